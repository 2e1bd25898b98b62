"""Reductions, and which compressor may be used with which."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.compressors import Compressor
from thinwire.compressors.base import FLOATS

NAMES = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


def op_name(op: Any) -> str:
    """The name of a ReduceOp, or of what a user wrote for one."""
    if isinstance(op, str):
        name = op.upper()
        if name in NAMES:
            return name
        raise ValueError(f"op must be one of {', '.join(NAMES).lower()}, got {op!r}")
    for name in NAMES if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType) else ():
        if op == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"op must be a torch.distributed.ReduceOp or its name, got {op!r}")


def check(
    name: str,
    compressor: Compressor,
    tensors: Sequence[Tensor],
    residuals: Sequence[Tensor | None],
) -> None:
    """Refuse what would be wrong: no lossy compressor knows the smallest or the product."""
    without = all(r is None for r in residuals)
    plain = compressor.lossless and compressor.summable and without
    for tensor, r in zip(tensors, residuals, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, got {type(tensor).__name__}")
        if name not in ("SUM", "AVG") and not plain:
            raise ValueError(
                f"{compressor} takes SUM and AVG, not {name}: use 'none' without a residual"
            )
        if name == "AVG" and tensor.dtype not in FLOATS:
            raise TypeError(f"an average of {tensor.dtype} is not a {tensor.dtype}: use SUM")
        if not plain:
            compressor.check_input(tensor, r)


def check_writable(tensors: Sequence[Tensor | None]) -> None:
    """Refuse tensors that cannot take a result."""
    for each in tensors:
        if each is not None and any(
            n > 1 and step == 0 for n, step in zip(each.shape, each.stride(), strict=True)
        ):
            raise ValueError("several elements of the tensor share one place: clone() it first")


def weight_of(name: str, size: int) -> float:
    """What the sum is multiplied with."""
    return 1.0 / size if name == "AVG" else 1.0
