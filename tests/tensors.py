"""Tensors for the laws: the types, shapes, layouts and contents that have gone wrong before."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)

SHAPES = [
    *((0,), (3, 0, 2), (), (1,), (2,), (7,), (8, 8), (5, 13), (2, 1, 3, 1, 2, 1, 2), (257,)),
    *((1000,), (41, 127)),  # the last is longer than the runs that kernels work on
]
KINDS = ["normal", "zeros", "denormal", "huge", "constant", "mixed", "ties", "outlier"]
LAYOUTS = ["plain", "transposed", "strided", "expanded"]


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The type of residuals and of arithmetic."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def content(kind: str, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """n finite numbers of a kind."""
    rng = np.random.default_rng(seed)
    info = torch.finfo(dtype)
    v = rng.standard_normal(n)
    match kind:
        case "zeros":
            v = v * 0.0  # of both signs
        case "denormal":
            v = rng.integers(-50, 50, n) * (info.smallest_normal * info.eps)
        case "huge":
            v = rng.choice([1, -1, 0.5, -0.25, 0.999], n) * info.max
        case "constant":
            v = np.full(n, rng.choice([1.0, -3.0, 0.1, info.max]))
        case "mixed":
            v = np.sign(v) * 10.0 ** rng.uniform(-40, np.log10(info.max), n)
        case "ties":
            v = rng.integers(-2, 3, n).astype(float)
        case "outlier":
            v[rng.integers(0, max(n, 1)) :][:1] *= 1e4
    return torch.from_numpy(v.clip(-info.max, info.max)).to(dtype)


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return content("normal", n, dtype, seed)


def lay(t: Tensor, layout: str) -> Tensor:
    """The same tensor with other strides; 'expanded' repeats its first row."""
    match layout:
        case "transposed":
            order = tuple(reversed(range(t.dim())))
            return t.permute(order).contiguous().permute(order)
        case "strided":
            room = torch.empty(*t.shape, 2, dtype=t.dtype)
            room[..., 0] = t
            return room[..., 0]
        case "expanded" if t.numel() and t.dim():
            return t[:1].expand(t.shape)
    return t


class Case(NamedTuple):
    """A tensor, a residual of its shape, and something to add to."""

    x: Tensor
    r: Tensor
    out: Tensor

    @property
    def total(self) -> Tensor:
        """x + r as compressors form it."""
        return self.x.to(self.r.dtype) + self.r


def make_case(shape, dtype, kind, residual, layouts, seed) -> Case:
    n = int(np.prod(shape))
    x = content(kind, n, dtype, seed).view(shape)
    r = content(residual, n, real_of(dtype), seed + 1).view(shape)
    out = normal(n, seed + 2, real_of(dtype)).view(shape)
    a, b, c = layouts
    return Case(lay(x, a), lay(r, b), lay(out, c))


_layouts = st.tuples(*(st.sampled_from(choice) for choice in (LAYOUTS, LAYOUTS[:3], LAYOUTS[:3])))
cases = st.builds(
    make_case,
    st.sampled_from(SHAPES),
    st.sampled_from(FLOATS),
    st.sampled_from(KINDS),
    st.sampled_from(["zeros", "normal", "mixed", "huge"]),
    _layouts,
    st.integers(0, 999),
)


def bits(t: Tensor) -> Tensor:
    """The memory of a tensor, so that NaN equals itself and 0 differs from -0."""
    return t.detach().contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
