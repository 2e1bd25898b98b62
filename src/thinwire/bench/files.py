"""Tensors of the user's own: .npy and .safetensors.

All float tensors of a file are laid end to end as one, in the order of their names, as gradients
lie in a bucket. Where their types differ, the result has the widest of them. Other tensors
(integers, booleans, 8-bit floats) are left out.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.bench.settings import SettingError
from thinwire.compressors.base import FLOATS
from thinwire.errors import MissingExtraError


def load(path: Path) -> Tensor:
    """The float tensors of a file as one flat tensor. Raises SettingError and MissingExtraError."""
    readers = {".npy": _npy, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise SettingError(f"{path}: expected a file named .npy or .safetensors")
    if not path.is_file():
        raise SettingError(f"{path}: no such file")
    tensors = readers[path.suffix](path)
    floats = [t.reshape(-1) for t in tensors.values() if t.dtype in FLOATS and t.numel()]
    if not floats:
        held = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
        raise SettingError(
            f"{path}: no tensor of float16, bfloat16, float32 or float64 with elements in it "
            f"(types found: {', '.join(held) or 'none'})"
        )
    dtype = floats[0].dtype
    for each in floats[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    joined = torch.cat([each.to(dtype) for each in floats])
    if not bool(torch.isfinite(joined).all()):
        raise SettingError(f"{path}: holds NaN or infinity, of which there is nothing to measure")
    return joined


def _npy(path: Path) -> dict[str, Tensor]:
    try:
        array = np.load(path, allow_pickle=False)
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return {path.stem: torch.from_numpy(native)}
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise SettingError(f"{path}: not a plain NumPy array: {_line(error)}") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingExtraError("safetensors", "io", f"reading {path}") from None
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"{path}: not a safetensors file: {_line(error)}") from error
    return dict(sorted(tensors.items()))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
