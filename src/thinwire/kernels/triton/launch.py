"""How Triton kernels are written here, and how they are launched.

The rules that keep them equal to the reference, bit for bit:

- No fused multiply-add: every launch says so. Rounding once where PyTorch rounds twice changes the
  last bit.
- Divisions of float32 are that of `numbers.py`: Triton's own ``/`` is an approximation. Roots are
  taken in float64.
- No atomics. Partial results lie in an array, one for each program, and are added up in its order.
- Constants of float64 come in as the bits of an integer: Triton takes a Python float for float32.
- Whatever a kernel needs has a name in Triton's interpreter too: no inline assembly, nothing of
  libdevice, no descriptors.

A residual that is not there is `x` once more and a constant that says so: then the loads vanish.
"""

import struct
from typing import Any

import torch
import triton

TILE = 2048  # elements of a program: 16 for each of 128 threads
MOST = 4096  # elements of a block that one program holds in registers; longer ones take two passes


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run so many programs of a kernel on the device of its first argument, on the current stream.

    Args:
        constants: what the kernel is compiled for.
    """
    if not programs:
        return
    options = {"num_warps": 4, "enable_fp_fusion": False, **constants}
    device = arguments[0].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **options)
    else:
        kernel[(programs,)](*arguments, **options)


def tiles(n: int, tile: int = TILE) -> int:
    """How many programs it takes for n elements."""
    return -(-n // tile)


def double(value: float) -> int:
    """The bits of a float64, for an argument annotated as an integer."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def rows_of(block: int) -> tuple[int, int]:
    """(rows, lanes) of a tile that holds blocks of this length side by side."""
    lanes: int = triton.next_power_of_2(max(8, block))
    return max(1, TILE // lanes), lanes


def warps(elements: int) -> int:
    """Threads for a tile, in warps: 16 elements each."""
    return max(1, min(8, elements // 512))


def flag(like: torch.Tensor) -> torch.Tensor:
    """A number that kernels set to 1 where they find something; they never set it to anything else,
    so it does not matter who comes first."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)
