"""A payload: one tensor in compressed form, complete and ready to be sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.frames.code import KEEP, Code, Extent, Start
from thinwire.frames.header import header_bytes
from thinwire.frames.positions import Scattered, plain_dtype
from thinwire.frames.values import begin


@dataclass(frozen=True, eq=False)
class Payload:
    """What a compressor made of one tensor.

    Args:
        code: how the sections are to be read.
        dtype, shape: of the tensor.
        sections: the data, on the tensor's device.
        non_finite: the tensor held NaN or infinity. Lossy compressors then send nothing else, and
            every element decodes as NaN; lossless ones send the tensor all the same.
        fingerprint: a hash of the compressor's settings, to find ranks that disagree.
    """

    code: Code
    dtype: torch.dtype
    shape: torch.Size
    sections: tuple[Tensor, ...]
    device: torch.device
    non_finite: bool = False
    fingerprint: int = 0
    known: Any = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def extent(self) -> Extent:
        return Extent(self.dtype, self.numel)

    @property
    def header(self) -> bytes:
        """The frame's first bytes, with an empty checksum."""
        return header_bytes(self.code, self.dtype, self.shape, self.non_finite, self.fingerprint)

    @property
    def num_bytes(self) -> int:
        """The size of the frame: what crosses the network."""
        return len(self.header) + sum(s.numel() * s.dtype.itemsize for s in self.sections)

    @property
    def compression_ratio(self) -> float:
        """Bytes of the tensor divided by bytes of the frame; higher is better."""
        return self.numel * self.dtype.itemsize / self.num_bytes

    @cached_property
    def opened(self) -> Any:
        """The sections checked and in the form that adding takes (positions decoded, unzipped)."""
        return self.code.open(self.sections, self.extent) if self.known is None else self.known

    @property
    def decoded_bytes(self) -> int:
        """Most memory that decoding takes, the tensor included; computed before anything is read.

        It follows from what the header claims: how long the frame is says little about it.
        """
        extent = self.extent
        exact = self.code.verbatim or self.dtype == extent.real
        widened = 0 if exact else self.numel * extent.real.itemsize
        return self.numel * self.dtype.itemsize + widened + self.code.scratch_bytes(extent)

    def add_to(self, out: Tensor, weight: float = 1.0, start: Start = KEEP) -> None:
        """out += weight * decoded, after `start`; out is flat and contiguous.

        Types other than the payload's own arithmetic take one conversion on the way.
        """
        extent = self.extent
        real = extent.real if self.dtype.is_floating_point else self.dtype
        copied = start.fresh and weight == 1
        if out.dtype == real or (copied and out.dtype == self.dtype and self.code.verbatim):
            self.code.add(self.opened, extent, out, weight, start)
            return
        values = torch.empty(self.numel, dtype=real, device=out.device)
        self.code.add(self.opened, extent, values, 1.0, Start(fresh=True))
        if copied:
            out.copy_(values if self.non_finite else _within(values, out.dtype))
            return
        begin(out, start)
        if weight != 1:
            values.mul_(weight if real.is_floating_point else int(weight))
        out.add_(values)

    def restore(self, out: Tensor | None = None) -> Tensor:
        """A tensor of the payload's shape and type, or `out` overwritten."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        flat, done = flat_view(out)
        self.add_to(flat, 1.0, Start(fresh=True))
        done()
        return out

    def picked(self) -> tuple[Tensor, Tensor] | None:
        """(positions, values) of a sparse payload, None for others."""
        if isinstance(self.code, Scattered):
            return self.code.picked(self.opened, self.extent)
        return None

    def held(self) -> tuple[Tensor, Tensor]:
        """Ascending positions and values of the elements that were sent, all of them for most
        codes."""
        found = self.code.held(self.opened, self.extent)
        if found is not None:
            return found
        positions = torch.arange(self.numel, dtype=plain_dtype(self.numel), device=self.device)
        return positions, self.code.values(self.opened, self.extent, self.device)


def add_all(
    payloads: Sequence[Payload], out: Tensor, weight: float = 1.0, *, fresh: bool = False
) -> None:
    """out += weight * decoded for all payloads in their order, to the same bits as one by one.

    With `fresh`, whatever out held before does not count.
    """
    picked = [p.picked() for p in payloads]
    real = all(p.extent.real == out.dtype for p in payloads)
    if real and len(payloads) > 1 and all(item is not None for item in picked):
        if fresh:
            out.zero_()
        kernels.on(out.device).scatter_add_many(out, picked, weight)
        return
    for i, payload in enumerate(payloads):
        payload.add_to(out, weight, Start(fresh=fresh and i == 0))


def average_held(payloads: Sequence[Payload], out: Tensor) -> None:
    """out <- for each element the mean over the payloads that hold it; zero where none does.

    An element that was sent is held whatever its value. NaN throughout if a payload is non-finite.
    """
    if any(payload.non_finite for payload in payloads):
        out.fill_(torch.nan)
        return
    kernels.on(out.device).scatter_mean(out, [payload.held() for payload in payloads])


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values cut to the largest finite number of a narrower type, in place."""
    if not dtype.is_floating_point or dtype.itemsize >= values.dtype.itemsize:
        return values
    top = torch.finfo(dtype).max
    return values.clamp_(-top, top)


def flattened(t: Tensor) -> Tensor:
    """The elements as a flat contiguous tensor without history: the same memory if that goes."""
    if t.requires_grad:
        t = t.detach()
    if t.is_contiguous():
        return t if t.dim() == 1 else t.view(-1)
    return t.reshape(-1).contiguous()


def flat_view(t: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """A flat contiguous tensor to work on, and what to call so that its content is in `t`."""
    flat = flattened(t)
    if t.is_contiguous():
        return flat, _nothing
    return flat, lambda: t.detach().copy_(flat.view(t.shape))


def _nothing() -> None:
    pass
