"""Checks of the settings of a parameter group; each raises with what was expected."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def at_least(who: str, field: str, value: Any, least: float) -> None:
    """A finite number that is not below `least`."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not _number(value) or not least <= value < float("inf"):
        raise ValueError(f"{who}: {field} must be a number of at least {least:g}, got {value!r}")


def above_zero(who: str, field: str, value: Any) -> None:
    if not _number(value) or not 0 < value < float("inf"):
        raise ValueError(f"{who}: {field} must be a number above 0, got {value!r}")


def count(who: str, field: str, value: Any, least: int = 1) -> None:
    """A whole number of steps."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{who}: {field} must be a whole number of steps, got {value!r}")
    if value < least:
        raise ValueError(f"{who}: {field} must be at least {least}, got {value}")


def beta(who: str, field: str, value: Any) -> None:
    if not _number(value) or not 0 <= value < 1:
        raise ValueError(f"{who}: {field} must be in [0, 1), got {value!r}")


def betas(who: str, value: Any) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{who}: betas must be two numbers such as (0.9, 0.999), got {value!r}")
    for i, one in enumerate(value):
        beta(who, f"betas[{i}]", one)


def flag(who: str, field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{who}: {field} must be True or False, got {value!r}")


def parameter(who: str, p: Tensor) -> None:
    """What can be trained here: real floating-point numbers, dense."""
    if not p.dtype.is_floating_point or p.dtype.itemsize < 2:
        raise TypeError(f"{who}: parameters must be float32, float64 or half, got {p.dtype}")
    if p.layout != torch.strided:
        raise TypeError(f"{who}: parameters must be dense, got {p.layout}")


def masks(who: str, given: Any) -> dict[Tensor, Tensor]:
    """Bool tensors by parameter, each of its parameter's shape."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{who}: masks must be bool tensors by parameter, {{model.place.weight: mask}}, got "
            f"{type(given).__name__}"
        )
    for p, mask in given.items():
        if not isinstance(p, Tensor) or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"{who}: masks must map parameters to bool tensors")
        if mask.shape != p.shape:
            raise ValueError(
                f"{who}: a mask has the shape {list(mask.shape)}, its parameter {list(p.shape)}"
            )
    return dict(given)
