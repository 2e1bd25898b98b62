"""Feedback state: vectors that are kept from step to step, in full or in less memory.

    fp32   float32 on the tensor's device (float64 for float64 tensors)
    bf16   half of that, rounded
    int8   a quarter, in blocks of 256 with a scale each
    host   fp32 in the memory of the host

bf16 and int8 round what they keep, so conservation holds to that rounding only. An exchange works
in fp32, in scratch buffers that the exchanges of a group share: as large as the largest of them.
"""

import torch
from torch import Tensor

from thinwire.compressors import Quantize
from thinwire.frames import Payload

STORAGES = ("fp32", "bf16", "int8", "host")
_EIGHT_BITS = Quantize(8)


class StateVector:
    """One flat vector of state, zero at first.

    Args:
        numel, device: as those of the tensor it belongs to.
        dtype: what it is worked with, float32 or float64.
        storage: how it is kept.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, storage: str = "fp32"
    ) -> None:
        self.numel, self.dtype, self.device, self.storage = numel, dtype, device, storage
        self._kept: Tensor | None = None
        self._payload: Payload | None = None  # None stands for zeros
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
        return out.zero_() if self._payload is None else self._payload.restore(out)

    def write(self, values: Tensor) -> None:
        """Keep these values, which must be finite."""
        if self._kept is None:
            self._payload = _EIGHT_BITS.encode(values)
        elif self._kept.dtype == torch.bfloat16:
            top = torch.finfo(torch.bfloat16).max  # what is larger would round to infinity
            self._kept.copy_(values.clamp(-top, top))
        elif self._kept.data_ptr() != values.data_ptr():
            self._kept.copy_(values)

    def zero(self) -> None:
        self._payload = None
        if self._kept is not None:
            self._kept.zero_()

    def scale(self, factor: float) -> None:
        """Multiply by a factor."""
        if self._kept is not None:
            self._kept.mul_(factor)
        elif self._payload is not None:
            self.write(self.read().mul_(factor))

    def __repr__(self) -> str:
        return f"<vector of {self.numel}, {self.storage}>"


class ScratchBuffers:
    """Memory that one exchange after the other works in, by name; it grows as needed.

    Fresh memory of some megabytes costs as much as several passes over it. Exchanges of a group run
    one after the other, so those of one group can share their buffers.
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
