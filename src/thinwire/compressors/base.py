"""The contract of every compressor.

A compressor is an immutable description; it keeps no state and talks to nobody. There are two
branches:

- `LocalCompressor`: one rank makes a payload of a tensor by itself. Those that send some elements
  and the rest not at all are a `SparseCompressor` too (see `sparsifiers`).
- `JointCompressor` (see `joint`): all ranks together find out what to send, there is no payload.

Local encoding happens in two halves so that a failure in between can lose nothing:

1. `draft` reads the tensor and the residual and makes the payload of C(x + r); it writes neither.
2. `settle` brings the residual up to date: r <- (x + r) - decode(payload).

`encode` does both. Conservation holds for every compressor because `settle` is written once.
"""

import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ThinwireWarning
from thinwire.frames.arrays import Array, Bytes, tensor_of
from thinwire.frames.code import Code, Extent, Start, wide_type
from thinwire.frames.frame import longest_frame
from thinwire.frames.header import DTYPES, LONGEST_HEADER
from thinwire.frames.payload import Payload, add_all, flat_view, flattened
from thinwire.frames.values import PIECE, NonFinite, Raw, begin
from thinwire.kernels import Key
from thinwire.spec import spec_of

DEFAULT_KEY = Key()
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Encoded(NamedTuple):
    """What an algorithm makes of a tensor: a code, its sections, and what is known of them."""

    code: Code
    sections: tuple[Tensor, ...]
    known: Any = None  # what code.open(sections) would give, where that is at hand already


class Request(NamedTuple):
    """What an algorithm is asked to encode: x + r, flat.

    x comes in its own type, which kernels read as it is; r is float32, or float64 for a float64 x.
    """

    x: Tensor
    r: Tensor | None
    dtype: torch.dtype  # of the tensor that the user gave
    key: Key

    @property
    def numel(self) -> int:
        return self.x.numel()

    @property
    def real(self) -> torch.dtype:
        """The type of scales and of arithmetic."""
        return wide_type(self.x.dtype)

    def total(self, lo: int, hi: int) -> Tensor:
        """x + r from one element to another, in `real`; not to be written to."""
        x = self.x[lo:hi].to(self.real)
        return x if self.r is None else x + self.r[lo:hi]


@dataclass(frozen=True)
class Compressor(ABC):
    """Whatever can be given as a compressor; see the module for the two branches.

    Subclasses are frozen dataclasses that check their fields in `__post_init__` and carry their
    name in spec strings as `name`.
    """

    name: ClassVar[str]

    @property
    def lossless(self) -> bool:
        """Whether it keeps every bit of every element type."""
        return False

    def sends_all(self, numel: int) -> bool:
        """Whether it leaves out none of so many elements, whatever they are."""
        return self.lossless

    @property
    def leaves_out(self) -> bool:
        """Whether it sends some elements and the rest not at all."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether it is right on average, possibly with an error larger than the tensor."""
        return False

    @property
    def wants_residual(self) -> bool:
        """Whether what it leaves out is to be remembered: what feedback="auto" goes by.

        Not if nothing is left out, or if it is right on average; nor if its error can be as large
        as the tensor, since a residual could then grow without bound.
        """
        return not (self.lossless or self.unbiased)

    @property
    def random(self) -> bool:
        """Whether the result depends on the key."""
        return False

    @property
    def common_key(self) -> bool:
        """Whether all ranks must draw with the same key."""
        return False

    @property
    def grain(self) -> int | None:
        """How many elements are looked at together: what is cut at multiples of these and
        compressed piece by piece comes to the same values, random numbers apart. None if all of the
        tensor is looked at."""
        return None

    @property
    def summable(self) -> bool:
        """Whether payloads of different ranks may be added section by section by the backend."""
        return False

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that differ for different settings; ranks compare them."""
        return zlib.crc32(str(self).encode())

    @cached_property
    def _text(self) -> str:
        """Written once: every exchange compares it."""
        return spec_of(self)

    def __str__(self) -> str:
        return self._text

    def __or__(self, other: "Compressor") -> "LocalCompressor":
        from thinwire.compressors.chain import Chain

        return Chain.of(self, other)

    def check_input(self, x: Tensor, residual: Tensor | None) -> None:
        """Raise TypeError or ValueError for a tensor and residual that `encode` cannot take."""
        who = type(self).__name__
        check_dense(who, x)
        if residual is not None:
            check_dense(f"{who}, residual", residual)
        takes = DTYPES if self.lossless and residual is None else FLOATS
        if x.dtype not in takes:
            hint = "; a residual needs one too" if self.lossless and x.dtype in DTYPES else ""
            raise TypeError(
                f"{who} takes float32, float64, float16 and bfloat16 tensors, got {x.dtype}"
                f"{hint} (NoCompression and Lossless take integers)"
            )
        if residual is None:
            return
        wanted = wide_type(x.dtype)
        if residual.dtype != wanted:
            raise TypeError(
                f"{who}: the residual of a {x.dtype} tensor must be {wanted}, got {residual.dtype}"
            )
        if residual.shape != x.shape or residual.device != x.device:
            raise ValueError(
                f"{who}: the residual must match the tensor: {tuple(residual.shape)} on "
                f"{residual.device} against {tuple(x.shape)} on {x.device}"
            )


@dataclass(frozen=True)
class LocalCompressor(Compressor):
    """Makes a payload of a tensor without other ranks; subclasses implement `encode_flat`."""

    @abstractmethod
    def encode_flat(self, request: Request) -> Encoded | None:
        """Encode x + r; None if it is not finite throughout. Never called with no elements."""

    def max_section_bytes(self, extent: Extent) -> int:
        """Most bytes of sections that it makes of so many elements, whatever their values.

        Receivers allocate no more than this for what another rank announces.
        """
        return longest_frame(extent)

    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The longest frame that it can make of a tensor of so many elements."""
        return LONGEST_HEADER + self.max_section_bytes(Extent(dtype, numel))

    def encode(
        self, x: Tensor | Array, *, residual: Tensor | Array | None = None, key: Key | None = None
    ) -> Payload:
        """Compress a tensor, or a NumPy array.

        Args:
            x: float32, float64, float16 or bfloat16 (lossless compressors take integers too), of
                any shape and strides. It is not changed.
            residual: what earlier calls left out, of x's shape, float32 (float64 for a float64 x).
                It is added to x first, and in the end holds what was not sent. When x holds NaN or
                infinity the payload is flagged and the residual stays as it is.
            key: (seed, step, tensor) for compressors that draw random numbers. The same key always
                draws the same numbers, so pass the step.

        Returns:
            The payload, with ``payload.num_bytes`` the size of its frame.
        """
        who = f"{type(self).__name__}.encode"
        tensor = tensor_of(f"{who}: x", x)
        kept = None if residual is None else tensor_of(f"{who}: residual", residual, written=True)
        payload = self.draft(tensor, residual=kept, key=key)
        if kept is not None:
            self.settle(payload, tensor, kept)
        return payload

    def draft(
        self, x: Tensor, *, residual: Tensor | None = None, key: Key | None = None
    ) -> Payload:
        """The payload of C(x + residual); x and the residual are only read."""
        self.check_input(x, residual)
        if key is None and self.random and residual is not None:
            warnings.warn(
                f"{type(self).__name__}.encode with a residual but without key=: every call draws "
                "the same random numbers. Pass key=tw.Key(seed, step, tensor).",
                ThinwireWarning,
                stacklevel=3,
            )
        flat = flattened(x)
        r = None if residual is None else flattened(residual)
        encoded, finite = self._encoded(flat, r, checked_key(key))
        return self._payload(encoded, x.dtype, x.shape, x.device, not finite)

    def _encoded(self, flat: Tensor, r: Tensor | None, key: Key) -> tuple[Encoded | None, bool]:
        """What a flat tensor becomes, and whether it is finite throughout."""
        if not flat.numel():
            return nothing(flat), True
        encoded = self.encode_flat(Request(flat, r, flat.dtype, key))
        return encoded, encoded is not None

    def settle(self, payload: Payload, x: Tensor, residual: Tensor) -> None:
        """residual <- (x + residual) - decoded payload, unless the payload is non-finite."""
        if payload.non_finite or not x.numel():
            return
        flat, done = flat_view(residual)
        payload.add_to(flat, -1.0, Start(plus=flattened(x)))
        done()

    def decode(self, payload: Payload, out: Tensor | Array | None = None) -> Tensor:
        """The decompressed tensor: a new one of the original shape and type, or `out` filled."""
        self._check_payload(payload)
        if out is not None:
            out = tensor_of(f"{type(self).__name__}.decode: out", out, written=True)
            _check_out(payload, out)
        return payload.restore(out)

    def accumulate(
        self, payload: Payload | Sequence[Payload], out: Tensor | Array, weight: float = 1.0
    ) -> None:
        """out += weight * decoded; for sparse payloads the cost is that of the payload.

        A sequence of payloads is added in its order, to the same bits as one after the other.
        """
        given: Any = payload  # bytes are a sequence too
        several = isinstance(given, Sequence) and not isinstance(given, Bytes)
        payloads: list[Payload] = list(given) if several else [given]
        out = tensor_of(f"{type(self).__name__}.accumulate: out", out, written=True)
        for each in payloads:
            self._check_payload(each)
            _check_out(each, out)
        if not out.is_floating_point() and weight != int(weight):
            raise ValueError(f"weight {weight} cannot be applied to {out.dtype}")
        flat, done = flat_view(out)
        add_all(payloads, flat, weight)
        done()

    def _payload(
        self,
        encoded: Encoded | None,
        dtype: torch.dtype,
        shape: torch.Size,
        device: torch.device,
        non_finite: bool,
    ) -> Payload:
        code, sections, known = encoded or Encoded(NonFinite(), ())
        return Payload(code, dtype, shape, sections, device, non_finite, self.fingerprint, known)

    def _check_payload(self, payload: Payload) -> None:
        if not isinstance(payload, Payload):
            raise TypeError(
                f"{type(self).__name__} reads payloads, got {type(payload).__name__}: tw.unpack "
                "makes a payload of a frame, tw.decode its tensor"
            )
        if payload.fingerprint != self.fingerprint:
            raise ValueError(
                f"{self!r} cannot read this payload: other settings wrote it (fingerprint "
                f"{payload.fingerprint:#010x}, expected {self.fingerprint:#010x}). "
                "tw.decode(frame) reads any frame."
            )


def not_local(given: object) -> str:
    """Why something cannot be used as a `LocalCompressor`."""
    if isinstance(given, Compressor):
        return f"{type(given).__name__} is found by all ranks together"
    if isinstance(given, type):
        return f"{given.__name__} is a class, give an object such as {given.__name__}(...)"
    return f"{given!r} is no compressor"


def _check_out(payload: Payload, out: Tensor) -> None:
    if out.shape.numel() != payload.numel or out.device != payload.device:
        raise ValueError(
            f"out has {out.shape.numel()} elements on {out.device}, the payload {payload.numel} "
            f"on {payload.device}"
        )
    if out.dtype.is_floating_point != payload.dtype.is_floating_point:
        raise TypeError(f"a payload of {payload.dtype} cannot go into {out.dtype}")


def check_dense(who: str, given: object) -> None:
    """Refuse what is no tensor, or none whose elements all lie in memory."""
    if not isinstance(given, Tensor):
        array = isinstance(given, np.ndarray)
        hint = ": torch.from_numpy(array) shares its memory" if array else ""
        raise TypeError(f"{who}: expected a tensor, got {type(given).__name__}{hint}")
    if given.layout != torch.strided or given.is_meta:
        kind = "meta" if given.is_meta else str(given.layout).removeprefix("torch.")
        hint = "" if given.is_meta else ": call to_dense() first"
        raise TypeError(f"{who}: expected a dense tensor, got a {kind} one{hint}")


def checked_key(key: Key | None) -> Key:
    """A key that can be drawn with."""
    if key is not None and not isinstance(key, Key):
        raise TypeError(f"key must be a tw.Key(seed, step, tensor), got {key!r}")
    return DEFAULT_KEY if key is None else key.checked()


def nothing(flat: Tensor) -> Encoded:
    """The code of a tensor without elements."""
    return Encoded(Raw(), (flat.clone(),))


def add_narrower(out: Tensor, values: Tensor) -> None:
    """out += values, of the same type or a half one."""
    begin(out, Start(plus=values))


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values in a narrower type; what is too large becomes the largest finite number."""
    if values.dtype == dtype:
        return values
    out = torch.empty_like(values, dtype=dtype)
    for lo in range(0, values.numel(), PIECE):
        out[lo : lo + PIECE].copy_(values[lo : lo + PIECE])
    cut(out)
    return out


def cut(values: Tensor) -> None:
    """Make the largest finite number of what rounding took beyond it, in place.

    Piece by piece, without torch's thread pool: its threads wait for more work for milliseconds, on
    cores that whatever comes next needs.
    """
    flat, top = values.view(-1), torch.finfo(values.dtype).max
    for lo in range(0, flat.numel(), PIECE):
        flat[lo : lo + PIECE].clamp_(-top, top)
