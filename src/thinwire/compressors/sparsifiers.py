"""Sparsifiers: some elements with their positions, the values in a code of their own."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import check, kernels
from thinwire.compressors.base import (
    Encoded,
    LocalCompressor,
    Request,
    checked_key,
    narrow,
    nothing,
)
from thinwire.frames.code import Code, Extent, wide_type
from thinwire.frames.payload import Payload, flattened
from thinwire.frames.positions import Seeded, Sparse, max_position_bytes, write_positions
from thinwire.frames.values import Raw
from thinwire.kernels import Key


class Selection(NamedTuple):
    """What is to be sent, and how a reader knows where it belongs."""

    positions: Tensor
    values: Tensor
    drawn: Key | None = None  # the reader draws the positions itself from this key
    chance: int = 0  # of each position in units of 2^-32, with `drawn`; 0: exactly so many


@lru_cache(maxsize=256)
def _exact(ratio: float) -> Fraction:
    return Fraction(repr(ratio))


def kept(numel: int, ratio: float) -> int:
    """k = max(1, ceil(numel * ratio)), never above numel; 0.07 means 7/100, not its float."""
    exact = _exact(ratio)
    return min(numel, max(1, -(-numel * exact.numerator // exact.denominator)))


def raw_values(request: Request) -> Encoded:
    """The end of a chain: values in the tensor's own type."""
    return Encoded(Raw(), (narrow(request.x, request.dtype),))


@dataclass(frozen=True)
class SparseCompressor(LocalCompressor):
    """Sends some elements and the rest not at all: a sparsifier, or a chain that begins with one.

    Its two halves can be used by themselves: what one rank has picked may be summed with what
    others have, before it is enclosed.
    """

    @property
    def leaves_out(self) -> bool:
        return True

    @abstractmethod
    def choose(self, request: Request) -> tuple[Tensor, Tensor] | None:
        """What `pick` gives, of a flat tensor with elements."""

    @abstractmethod
    def encode_chosen(
        self, positions: Tensor, values: Tensor, extent: Extent, key: Key
    ) -> Encoded | None:
        """What `enclose` puts into a payload."""

    def encloses_like(self, other: "SparseCompressor") -> bool:
        """Whether `enclose` writes the same as another's, apart from who wrote it."""
        return other == self

    @abstractmethod
    def max_chosen(self, numel: int) -> int:
        """Most elements that `choose` chooses of so many."""

    @abstractmethod
    def max_enclosed_bytes(self, count: int, extent: Extent) -> int:
        """Most bytes of sections that `encode_chosen` makes of at most so many values."""

    def max_section_bytes(self, extent: Extent) -> int:
        return self.max_enclosed_bytes(self.max_chosen(extent.numel), extent)

    def pick(
        self, x: Tensor, *, residual: Tensor | None = None, key: Key | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The first half: what of x + residual it would send.

        Returns:
            Ascending positions in the flat tensor and their values (float32, or float64 for a
            float64 x); None if x is not finite throughout.
        """
        self.check_input(x, residual)
        flat = flattened(x)
        r = None if residual is None else flattened(residual)
        if not x.numel():
            positions = torch.empty(0, dtype=torch.int64, device=x.device)
            return positions, flat.to(wide_type(x.dtype))
        return self.choose(Request(flat, r, x.dtype, checked_key(key)))

    def enclose(
        self, positions: Tensor, values: Tensor, extent: Extent, key: Key | None = None
    ) -> Payload:
        """The second half: a flat payload of these values at these positions, and no others."""
        key = checked_key(key)
        if extent.numel:
            encoded = self.encode_chosen(positions, values, extent, key)
        else:
            encoded = nothing(values.to(extent.dtype))
        shape = torch.Size([extent.numel])
        return self._payload(encoded, extent.dtype, shape, values.device, encoded is None)

    def flagged(self, extent: Extent, device: torch.device) -> Payload:
        """The flat payload that only says: not finite."""
        shape = torch.Size([extent.numel])
        return self._payload(None, extent.dtype, shape, device, True)


@dataclass(frozen=True)
class Sparsifier(SparseCompressor):
    """Sends some elements as they are and the rest not at all; implements `select`."""

    @abstractmethod
    def select(self, request: Request) -> Selection | None:
        """Positions (ascending) and values of x + r; None if it is not finite throughout."""

    def encloses_like(self, other: SparseCompressor) -> bool:
        return type(other).encode_chosen is type(self).encode_chosen

    def max_chosen(self, numel: int) -> int:
        return numel

    def max_enclosed_bytes(self, count: int, extent: Extent) -> int:
        values = Raw().section_bytes(Extent(extent.dtype, count))
        return max_position_bytes(count, extent.numel) + values

    def encode_flat(self, request: Request) -> Encoded | None:
        return self.encode_through(request, raw_values)

    def choose(self, request: Request) -> tuple[Tensor, Tensor] | None:
        selection = self.select(request)
        return None if selection is None else (selection.positions, selection.values)

    def encode_chosen(
        self, positions: Tensor, values: Tensor, extent: Extent, key: Key
    ) -> Encoded | None:
        return encode_selection(Selection(positions, values), extent, key, raw_values)

    def encode_through(
        self, request: Request, encode_values: Callable[[Request], Encoded | None]
    ) -> Encoded | None:
        """Encode with the values going through a further stage."""
        selection = self.select(request)
        if selection is None:
            return None
        extent = Extent(request.dtype, request.numel)
        return encode_selection(selection, extent, request.key, encode_values)


def encode_selection(
    selection: Selection,
    extent: Extent,
    key: Key,
    encode_values: Callable[[Request], Encoded | None],
) -> Encoded | None:
    """Positions and values as a code, the values going through a further stage."""
    positions, values, drawn, chance = selection
    count = positions.numel()
    inner = Request(values, None, extent.dtype, key.substream())
    encoded = encode_values(inner) if count else raw_values(inner)
    if encoded is None:
        return None
    code, sections, known = encoded
    if known is None:
        known = code.open(sections, Extent(extent.dtype, count))
    outer: Code
    if drawn is not None:
        outer = Seeded(count, chance, *drawn, code)
        return Encoded(outer, sections, (positions, known))
    settings, written = write_positions(positions, extent.numel)
    outer = Sparse(count, inner=code, **settings)
    return Encoded(outer, (written, *sections), (positions, known))


@dataclass(frozen=True)
class TopK(Sparsifier):
    """The k elements of largest magnitude.

    k = max(1, ceil(d * ratio)); exact, ties go to the lower index. Contractive:
    ||C(x) - x||^2 <= (1 - k/d) ||x||^2. Biased, so use it with a residual.

    With chunks the same is done to each by itself, so that every part of the tensor sends its
    share. They are counted from the beginning of what is encoded as one: where a collective sends a
    tensor in slices, that of a slice.

    Args:
        ratio: share of elements sent, in (0, 1]; smaller sends less.
        chunk: elements of the flat tensor among which the k = max(1, ceil(chunk * ratio)) largest
            are sent; the last chunk may be shorter, with a k of its own. None for all together.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.TopK(0.5)
        >>> c.decode(c.encode(torch.tensor([1.0, -3.0, 2.0, 0.5])))
        tensor([ 0., -3.,  2.,  0.])

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017;
    Stich et al., Sparsified SGD with Memory, 2018. With chunks: Peng et al., DeMo: Decoupled
    Momentum Optimization, 2024.
    """

    ratio: float
    chunk: int | None = None
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        check.fraction("TopK", "ratio", self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))
        if self.chunk is not None:
            check.whole("TopK", "chunk", self.chunk, 1)

    @property
    def grain(self) -> int | None:
        return self.chunk

    def max_chosen(self, numel: int) -> int:
        if self.chunk is None:
            return kept(numel, self.ratio)
        whole, rest = divmod(numel, self.chunk)
        return whole * kept(self.chunk, self.ratio) + kept(rest, self.ratio)

    def sends_all(self, numel: int) -> bool:
        return self.max_chosen(numel) == numel

    def select(self, request: Request) -> Selection | None:
        x, r, n, chunk = request.x, request.r, request.numel, self.chunk
        kernel = kernels.on(x.device)
        if chunk is None or chunk >= n:
            chosen = kernel.top_k(x, r, kept(n, self.ratio))
        else:
            each, last = kept(chunk, self.ratio), kept(n % chunk, self.ratio)
            chosen = kernel.chunk_top_k(x, r, chunk, each, last)
        return None if chosen is None else Selection(*chosen)


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """All elements of at least a given magnitude.

    Sends x_i where |x_i| >= value. How many that are depends on the tensor. What is left out is
    below the threshold: max |C(x) - x| < value.

    Args:
        value: the smallest magnitude sent, positive; larger sends less.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Threshold(1.0)
        >>> c.decode(c.encode(torch.tensor([1.0, -3.0, 0.5])))
        tensor([ 1., -3.,  0.])

    Reference: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015.
    """

    value: float
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        check.positive("Threshold", "value", self.value)
        object.__setattr__(self, "value", float(self.value))

    @property
    def grain(self) -> int | None:
        return 1

    def select(self, request: Request) -> Selection | None:
        chosen = kernels.on(request.x.device).above(request.x, request.r, self.value)
        return None if chosen is None else Selection(*chosen)


class RandomSparsifier(Sparsifier):
    """A sparsifier whose positions come from the key alone; subclasses hold the two fields."""

    scaled: bool | None
    shared: bool

    @property
    def random(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return self.scaled is True

    @property
    def summable(self) -> bool:
        return self.shared

    @property
    def common_key(self) -> bool:
        return self.shared

    def check_options(self) -> None:
        who = type(self).__name__
        check.one_of(who, "scaled", self.scaled, (None, True, False))
        check.flag(who, "shared", self.shared)

    @abstractmethod
    def draw(self, request: Request) -> tuple[Tensor, int, float]:
        """(positions, chance as in `Selection`, the factor that makes the result unbiased)."""

    def select(self, request: Request) -> Selection | None:
        if self.scaled and request.r is not None:
            raise ValueError(
                f"{self!r}: scaled values and a residual do not go together (what is sent would "
                "grow without bound); use scaled=False with a residual"
            )
        kernel = kernels.on(request.x.device)
        positions, chance, factor = self.draw(request)
        values = kernel.take(request.x, request.r, positions)
        if values is None:
            return None
        scaled = request.r is None if self.scaled is None else self.scaled
        if scaled and factor != 1:
            top = torch.finfo(values.dtype).max
            values.mul_(factor).clamp_(-top, top)
        return Selection(positions, values, request.key if self.shared else None, chance)


@dataclass(frozen=True)
class RandomK(RandomSparsifier):
    """k elements at random positions.

    k = max(1, ceil(d * ratio)) distinct positions, drawn from the key alone. Scaled by d/k it is
    unbiased with E||C(x) - x||^2 = (d/k - 1) ||x||^2; unscaled it is contractive with
    E||C(x) - x||^2 = (1 - k/d) ||x||^2, which is what a residual needs.

    Args:
        ratio: share of elements sent, in (0, 1]; smaller sends less.
        scaled: multiply by d/k. None: yes without a residual, no with one.
        shared: all ranks use the same key, so positions need not travel and payloads add up.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.RandomK(0.25)
        >>> int((c.decode(c.encode(torch.ones(100), key=tw.Key(1))) == 4).sum())
        25

    Reference: Stich et al., Sparsified SGD with Memory, 2018; Wangni et al., Gradient
    Sparsification for Communication-Efficient Distributed Optimization, 2018.
    """

    ratio: float
    scaled: bool | None = None
    shared: bool = False
    name: ClassVar[str] = "randomk"

    def __post_init__(self) -> None:
        check.fraction("RandomK", "ratio", self.ratio)
        self.check_options()
        object.__setattr__(self, "ratio", float(self.ratio))

    def max_chosen(self, numel: int) -> int:
        return kept(numel, self.ratio)

    def draw(self, request: Request) -> tuple[Tensor, int, float]:
        n = request.numel
        k = kept(n, self.ratio)
        device = request.x.device
        positions = kernels.on(device).random_positions(n, k, request.key, device)
        return positions, 0, n / k


@dataclass(frozen=True)
class Bernoulli(RandomSparsifier):
    """Each element with probability p.

    Scaled by 1/p it is unbiased with E||C(x) - x||^2 = (1/p - 1) ||x||^2; unscaled
    E||C(x) - x||^2 = (1 - p) ||x||^2, which is what a residual needs.

    Args:
        p: probability of each element, in (0, 1], kept to 2^-32; smaller sends less.
        scaled: multiply by 1/p. None: yes without a residual, no with one.
        shared: all ranks use the same key, so positions need not travel and payloads add up.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Bernoulli(1.0)
        >>> c.decode(c.encode(torch.tensor([1.0, -3.0])))
        tensor([ 1., -3.])

    Reference: Khirirat et al., Distributed Learning with Compressed Gradients, 2018.
    """

    p: float
    scaled: bool | None = None
    shared: bool = False
    name: ClassVar[str] = "bernoulli"

    def __post_init__(self) -> None:
        check.fraction("Bernoulli", "p", self.p)
        if self.p < 2**-32:
            raise ValueError(f"Bernoulli: p must be at least 2^-32, got {self.p!r}")
        self.check_options()
        object.__setattr__(self, "p", float(self.p))

    def draw(self, request: Request) -> tuple[Tensor, int, float]:
        device = request.x.device
        positions = kernels.on(device).bernoulli_positions(
            request.numel, self.p, request.key, device
        )
        return positions, round(self.p * 2**32), 1 / self.p
