"""What users may give in place of tensors: NumPy arrays, and bytes in place of frames."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = bytes | bytearray | memoryview


def tensor_of(who: str, given: Tensor | Array, *, written: bool = False) -> Tensor:
    """A tensor, or one over the memory of an array.

    Args:
        who: for errors.
        written: results will be written into it. Otherwise an array whose memory a tensor cannot
            have (read-only, or with negative strides) is copied.
    """
    if isinstance(given, Tensor):
        return given
    if not isinstance(given, np.ndarray):
        raise TypeError(f"{who} must be a tensor or a NumPy array, got {type(given).__name__}")
    usable = given.flags.writeable and all(stride >= 0 for stride in given.strides)
    if not usable:
        if written:
            raise ValueError(
                f"{who} is read-only or has negative strides, so nothing can be written into it: "
                "give a copy"
            )
        given = given.copy()
    return torch.from_numpy(given)


def bytes_of(given: Bytes | Array) -> Tensor:
    """Bytes as a uint8 tensor with memory of its own: the buffer may be used for the next."""
    if isinstance(given, np.ndarray) and (given.dtype != np.uint8 or given.ndim != 1):
        raise TypeError(
            f"bytes in an array are one-dimensional and uint8, got {given.dtype} of shape "
            f"{given.shape}"
        )
    data = bytearray(given.tobytes() if isinstance(given, np.ndarray | memoryview) else given)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
