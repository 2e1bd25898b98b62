"""Feedback state: vectors that are kept from step to step, in full or in less memory.

    fp32   float32 on the tensor's device (float64 for float64 tensors)
    bf16   half of that, rounded
    int8   a quarter, in blocks of 256 with a scale each
    host   fp32 in the memory of the host

bf16 and int8 round what they keep, so conservation holds to that rounding only. They round up or
down at random, right on average. Rounded to nearest, an element to which each step adds less than
half a unit of its last digit would never grow, and never be sent. The scales of int8 are powers of
two: what was read from a vector and comes back by a checkpoint is kept exactly.

An exchange works in fp32, in scratch buffers that the exchanges of a group share: as large as the
largest of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.compiling import CPU, SMALL, WORKING, working_dtype
from thinwire.frames.code import wide_type
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse

STORAGES = ("fp32", "bf16", "int8", "host")
LIMIT, WIDTH, BLOCK = 127, 8, 256  # of int8


def stored_bytes(storage: str, numel: int, dtype: torch.dtype) -> int:
    """That a vector of state takes, for a tensor of this type."""
    wide = wide_type(dtype).itemsize
    if storage == "int8":
        return numel + wide * -(-numel // BLOCK)  # levels, and a scale for each block
    return numel * (2 if storage == "bf16" else wide)


class StateVector:
    """One flat vector of state, zero at first.

    Args:
        numel, device: as those of the tensor it belongs to.
        dtype: what it is worked with, float32 or float64.
        storage: how it is kept.
        stream: a number that sets its random numbers apart from those of other vectors of the same
            tensor.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: str = "fp32",
        stream: int = 0,
    ) -> None:
        self.numel, self.dtype, self.device, self.storage = numel, dtype, device, storage
        self.stream = stream
        self._kept: Tensor | None = None
        self._levels: tuple[Tensor, Tensor] | None = None  # scales and levels; None for zeros
        if storage == "fp32":
            self._kept = torch.zeros(numel, dtype=dtype, device=device)
        elif storage == "bf16":
            self._kept = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        elif storage == "host":
            pinned = device.type == "cuda"
            self._kept = torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    @property
    def direct(self) -> Tensor | None:
        """The vector itself, where it is kept in the form it is worked with."""
        kept = self._kept
        same = kept is not None and kept.dtype == self.dtype and kept.device == self.device
        return kept if same else None

    def read(self, out: Tensor | None = None) -> Tensor:
        """The vector in its working form: `out` filled, or a tensor not to be written to."""
        if out is None:
            if self.direct is not None:
                return self.direct
            out = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        if self._kept is not None:
            return out.copy_(self._kept)
        if self._levels is None:
            return out.zero_()
        scales, levels = self._levels
        kernels.on(self.device).add_uniform(
            out, levels, scales, limit=LIMIT, width=WIDTH, block=BLOCK, weight=1.0, fresh=True
        )
        return out

    def write(self, values: Tensor, key: Key | None = None) -> None:
        """Keep these values, which must be finite.

        Args:
            key: of this step, to round with. None rounds to nearest: for what is written once, and
                not step after step.
        """
        own = None if key is None else key._replace(stream=self.stream)
        if self._kept is None:
            self._write_levels(values, own)
        elif self._kept.dtype == torch.bfloat16 and own is not None:
            # float64 through float32: what a float32 vector would lose is lost here too.
            narrow = values if values.dtype == torch.float32 else _to_float32(values)
            kernels.on(self.device).round_to_bfloat16(narrow, self._kept, own)
        elif self._kept.dtype == torch.bfloat16:
            top = torch.finfo(torch.bfloat16).max  # what is larger would round to infinity
            self._kept.copy_(values.clamp(-top, top))
        elif self._kept.data_ptr() != values.data_ptr():
            self._kept.copy_(values)

    def _write_levels(self, values: Tensor, key: Key | None) -> None:
        if not self.numel:
            return
        found = kernels.on(self.device).encode_uniform(
            values, None, limit=LIMIT, width=WIDTH, block=BLOCK, rule="power", key=key
        )
        if found is None:  # shows in whatever is done with it next
            scales = values.new_full((-(-self.numel // BLOCK),), torch.nan)
            found = scales, torch.zeros(self.numel, dtype=torch.uint8, device=self.device)
        self._levels = found

    def zero(self) -> None:
        self._levels = None
        if self._kept is not None:
            self._kept.zero_()

    def scale(self, factor: float) -> None:
        """Multiply by a factor."""
        if self._kept is not None:
            self._kept.mul_(factor)
        elif self._levels is not None:
            self.write(self.read().mul_(factor))

    def __repr__(self) -> str:
        return f"<vector of {self.numel}, {self.storage}>"


@dataclass(frozen=True)
class StorageUse(KernelUse):
    """Vectors that are kept in one way."""

    storage: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"storage={self.storage} ({str(self.dtype).removeprefix('torch.')})"

    def rehearse(self) -> None:
        vector = StateVector(SMALL, self.dtype, CPU, self.storage)
        for key in (None, Key()):
            vector.write(torch.ones(SMALL, dtype=self.dtype, device=CPU), key)
            vector.read()


def storage_uses(
    storages: Iterable[str], dtypes: Iterable[torch.dtype], device: torch.device = CPU
) -> list[KernelUse]:
    """What has to be compiled to keep the state of tensors of these types."""
    if not kernels.are_compiled(device):
        return []
    working = {working_dtype(dtype) for dtype in dtypes}
    return [
        StorageUse(storage, dtype)
        for storage in storages
        for dtype in WORKING
        if dtype in working and storage in ("bf16", "int8")
    ]


def _to_float32(values: Tensor) -> Tensor:
    top = torch.finfo(torch.bfloat16).max
    return values.clamp(-top, top).float()


class ScratchBuffers:
    """Memory that one exchange after the other works in, by name; it grows as needed.

    Fresh memory of some megabytes costs as much as several passes over it. Few exchanges of a group
    are under way at a time: these have different buffers, those further apart the same.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`numel` elements with any content, the same memory for the same name each time."""
        key = (name, dtype, device)
        found = self._tensors.get(key)
        if found is None or found.numel() < numel:
            found = self._tensors[key] = torch.empty(numel, dtype=dtype, device=device)
        return found[:numel]
