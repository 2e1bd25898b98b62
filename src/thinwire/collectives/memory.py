"""The memory guard: what an exchange will take, and a limit above which it is refused.

Counted is what a call allocates beyond the tensors and residuals it was given, at the moment when
most of it exists. Sizes of payloads are taken from encoding a sample of normally distributed
numbers; what really was encoded is checked again before it is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.options import VARIABLE
from thinwire.collectives.reduction import Part, Reduction
from thinwire.compressors import Compressor, JointCompressor, LocalCompressor
from thinwire.errors import MemoryLimitError
from thinwire.formatting import show_bytes
from thinwire.frames import Payload, pack, unpack
from thinwire.frames.code import wide_type
from thinwire.kernels import Key

SAMPLE = 1 << 16
CANDIDATE = 8  # bytes of an element that may be chosen: position and value
MOST_ROUNDS = 1 << 12


class Weight(NamedTuple):
    """Bytes for one element of a tensor."""

    frame: float  # of the payload as it travels
    opened: float  # of what a reader decodes before adding (positions, unzipped sections)
    draft: float  # of what an encoder holds besides the frame
    choice: float  # position and value of the elements that a sparsifier chooses
    squeezed: float  # of sections before they go through a general-purpose coder


@dataclass(frozen=True)
class Estimate:
    """Peak extra bytes of one exchange, and what they consist of."""

    items: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.items)

    def __str__(self) -> str:
        parts = " + ".join(f"{show_bytes(size)} {name}" for name, size in self.items if size)
        return f"{show_bytes(self.num_bytes)} ({parts or 'nothing'})"


class Load(NamedTuple):
    """Bytes that the tensors of a call come to in their different forms."""

    frame: float
    opened: float
    draft: float
    choice: float  # position and value of the elements that a sparsifier chooses
    squeezed: float  # sections before they go through a general-purpose coder
    passing: float  # what encoding takes for a moment, float32 copies of half precision included
    sums: float  # in the type that sums are formed in
    dense: float  # as they are
    converted: bool  # sums are not formed in the tensors themselves
    counts: float = 0.0  # of those who sent each element of a stretch

    def grown(self, frame: float) -> "Load":
        """The same for payloads that turned out larger than expected."""
        factor = max(1.0, frame / self.frame)
        return self._replace(
            frame=self.frame * factor,
            opened=self.opened * factor,
            draft=self.draft * factor,
            choice=self.choice * factor,
        )

    def part(self, share: float) -> "Load":
        """That of a share of each tensor."""
        return self._replace(
            frame=share * self.frame,
            opened=share * self.opened,
            draft=share * self.draft,
            choice=share * self.choice,
            squeezed=share * self.squeezed,
            passing=share * self.passing,
            sums=share * self.sums,
            dense=share * self.dense,
        )

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Load":
        frame = opened = draft = choice = squeezed = passing = sums = dense = 0.0
        converted = False
        for part in parts:
            n = part.x.numel()
            weight = weigh(part.compressor, part.x.dtype, part.r is not None)
            frame += n * weight.frame + 64
            opened += n * weight.opened
            draft += n * weight.draft
            choice += n * weight.choice
            sums += n * part.real.itemsize
            dense += n * part.x.dtype.itemsize
            halved = part.real != part.x.dtype
            converted = converted or halved
            squeezed = max(squeezed, n * weight.squeezed)
            moment = weight.choice + weight.squeezed + halved * part.real.itemsize
            passing = max(passing, n * moment)
        return cls(frame, opened, draft, choice, squeezed, passing, sums, dense, converted)


def estimate(collective: str, load: Load, size: int, rounds: int = 1) -> Estimate:
    """Peak extra bytes of an exchange among `size` ranks: those of its largest phase."""
    return largest(_PHASES[collective](load, size, rounds))


Phase = dict[str, float]


def largest(phases: Sequence[Phase]) -> Estimate:
    """The phase that takes most."""
    found = max(phases, key=lambda phase: sum(phase.values()))
    return Estimate(tuple((name, int(value)) for name, value in found.items()))


def _gathering(frame: float, size: int) -> Phase:
    """Of an all-gather: gloo collects what arrives in memory of its own and copies it."""
    return {"message": frame, "padded": frame, f"{size} frames, twice": 2 * size * frame}


def gather_load(reduction: Reduction) -> Load:
    """The load of a gather: that of its tensors, and who sent what is counted in one of them at a
    time."""
    load = Load.of(reduction.parts)
    if not reduction.senders:
        return load
    return load._replace(
        counts=max(
            kernels.on(part.x.device).scatter_mean_bytes(part.x.numel()) for part in reduction.parts
        )
    )


def _gather(load: Load, size: int, rounds: int) -> list[Phase]:
    frame, opened = load.frame / rounds, load.opened / rounds
    own = {"own payload": load.draft}
    apart = load.converted or rounds > 1
    sums = {"sums": load.sums if apart else 0}
    before = sums if rounds > 1 else {}
    received = {f"{size} frames": size * frame, "opened": size * opened}
    received |= {"unzipping": 2 * load.squeezed / rounds}
    return [
        own | {"encoding": load.passing / rounds} | before,
        own | _gathering(frame, size) | before,
        own | {"message": frame} | received | sums | {"counts": load.counts},
    ]


def _summable(load: Load, size: int, rounds: int) -> list[Phase]:
    own = {"own payload": load.draft}
    # Positions that are drawn again take as much once more while they are sorted.
    result = {"sum": load.frame, "opened": 2 * load.opened}
    values = {"values": load.sums if load.converted else 0}
    return [own | {"encoding": load.passing}, own | result | values]


def _dense(load: Load, size: int, rounds: int) -> list[Phase]:
    return [{"copy": load.dense}]


def _all_gather(load: Load, size: int, rounds: int) -> list[Phase]:
    own = {"own payload": load.draft}
    received = {f"{size} frames": size * load.frame, "opened": size * load.opened}
    received |= {"unzipping": 2 * load.squeezed}
    return [own | {"encoding": load.passing}, own | _gathering(load.frame, size), own | received]


def _broadcast(load: Load, size: int, rounds: int) -> list[Phase]:
    frames = {"frame": load.frame, "opened": load.opened}
    return [{"own payload": load.draft} | frames | {"encoding": load.passing}]


def _scatter(load: Load, size: int, rounds: int) -> list[Phase]:
    share = (size - 1) / size
    own = {"own payloads": share * load.draft}
    messages = {"messages, joined": 2 * share * load.frame}
    received = {"received": share * load.frame}
    shard = {"opened": share * load.opened, "sum of the own shard": load.sums / size}
    shard |= {"unzipping": 2 * load.squeezed / size}
    return [
        own | {"encoding": load.passing / size},
        own | messages | received,
        own | received | shard,
    ]


def _twoshot(load: Load, size: int, rounds: int) -> list[Phase]:
    own = {"own payloads": (size - 1) / size * load.draft}
    own |= {"sum of the own shard": load.sums / size}
    second = {"its payload": load.draft / size}
    frames = {f"{size} frames": load.frame, "opened": load.opened}
    frames |= {"unzipping": 2 * load.squeezed / size}
    zeros = {"zeros": load.sums / size, "scaled": load.dense / size}
    return [
        *_scatter(load, size, rounds),
        own | second | zeros | {"encoding": load.passing / size},
        own | second | _gathering(load.frame / size, size),
        own | second | frames,
    ]


def _sparse(load: Load, size: int, rounds: int) -> list[Phase]:
    share, chosen = (size - 1) / size, {"chosen": 1.5 * load.choice}
    sent = {"own payloads": share * load.frame}
    messages = {"messages, joined": 2 * share * load.frame}
    received = {"received": share * load.frame}
    shard = {"sums of the own region": load.sums / size}
    opened = {"opened": share * load.opened, "choosing": 2 * load.choice / size}
    kept = {"its payload": load.draft / size}
    return [
        {"chosen": load.choice, "encoding": load.passing},
        chosen | sent | messages | received,
        chosen | sent | received | shard | opened,
        chosen | sent | shard | kept | _gathering(load.frame / size, size),
    ]


_PHASES: dict[str, Callable[[Load, int, int], list[Phase]]] = {
    "gather": _gather,
    "summable": _summable,
    "dense": _dense,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce_scatter": _scatter,
    "twoshot": _twoshot,
    "sparse": _sparse,
}


def kind_of(collective: str, reduction: Reduction) -> str:
    """The row of `_PHASES` that a collective's memory is found in."""
    return "dense" if collective == "summable" and reduction.uncompressed else collective


def guard(collective: str, reduction: Reduction, size: int) -> None:
    """Refuse an exchange that would take more than the limit."""
    collective = kind_of(collective, reduction)
    if reduction.max_bytes is not None and collective == "joint":
        need = _joint(reduction.parts)
        if need.num_bytes > reduction.max_bytes:
            raise refusal(collective, need, reduction.max_bytes, size)
    elif reduction.max_bytes is not None:
        _check(collective, Load.of(reduction.parts), size, reduction.max_bytes)


def _joint(parts: Sequence[Part]) -> Estimate:
    """Copies of all tensors, what travels of them twice, and the results."""

    def values(part: Part) -> int:
        if isinstance(part.compressor, JointCompressor):
            return part.compressor.sent(part.shape)
        return part.x.numel()

    copies = sum(part.x.numel() * part.real.itemsize for part in parts)
    sent = sum(values(part) * part.real.itemsize for part in parts)
    return Estimate((("copies", copies), ("factors", 2 * sent), ("results", copies)))


def check_real(
    collective: str, reduction: Reduction, messages: Sequence[Tensor], size: int
) -> None:
    """The same for messages to all others, now that they are there."""
    if reduction.max_bytes is not None:
        frame = sum(message.numel() for message in messages) * size / (size - 1)
        load = Load.of(reduction.parts).grown(frame)
        _check(collective, load, size, reduction.max_bytes)


def _check(collective: str, load: Load, size: int, limit: int) -> None:
    need = estimate(collective, load, size)
    if need.num_bytes > limit:
        raise refusal(collective, need, limit, size)


def rounds_for(reduction: Reduction, size: int, frame: int = 0) -> int:
    """In how many slices a gather must go to stay below the limit; an error if none is enough.

    `frame` is the size that frames really have, where that is known.
    """
    if reduction.max_bytes is None:
        return 1
    load = gather_load(reduction).grown(frame)
    rounds = 1
    while estimate("gather", load, size, rounds).num_bytes > reduction.max_bytes:
        rounds *= 2
        if rounds > MOST_ROUNDS:
            raise refusal(
                "gather", estimate("gather", load, size, MOST_ROUNDS), reduction.max_bytes, size
            )
    return rounds


def refusal(collective: str, need: Estimate, limit: int, size: int) -> MemoryLimitError:
    """The error, with a way out."""
    rounds = "; collective='gather' can go in rounds" if collective in ("twoshot", "sparse") else ""
    return MemoryLimitError(
        f"{collective} over {size} ranks would take {need} of extra memory on each rank, the limit "
        f"is {show_bytes(limit)}. Raise max_bytes or {VARIABLE}, compress more strongly, or reduce "
        f"smaller tensors one after the other{rounds}"
    )


@lru_cache(maxsize=256)
def weigh(compressor: Compressor, dtype: torch.dtype, residual: bool) -> Weight:
    """Bytes per element, measured on a sample."""
    if not dtype.is_floating_point:
        return Weight(dtype.itemsize, 0, dtype.itemsize, 0, 0)
    assert isinstance(compressor, LocalCompressor)
    sample = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)).to(dtype)
    zeros = torch.zeros(SAMPLE, dtype=wide_type(dtype))
    payload = compressor.draft(sample, residual=zeros if residual else None, key=Key())
    frame = pack(payload)
    received = unpack(frame)
    picked = payload.picked()
    count = 0 if picked is None else picked[0].numel()
    widened = count * 4 if dtype.itemsize == 2 else 0  # values, when they are added
    opened = _extra(received.opened, received)
    return Weight(
        frame.numel() / SAMPLE,
        (opened + widened) / SAMPLE,
        (_held(payload) + _extra(payload.known, payload)) / SAMPLE,
        CANDIDATE * count / SAMPLE,
        0.0 if count else opened / SAMPLE,
    )


def _held(payload: Payload) -> int:
    return sum(section.nbytes for section in payload.sections)


def _extra(opened: Any, payload: Payload) -> int:
    """Bytes of tensors in nested tuples that are not the sections themselves."""
    if isinstance(opened, Tensor):
        places = {section.untyped_storage().data_ptr() for section in payload.sections}
        return 0 if opened.untyped_storage().data_ptr() in places else opened.nbytes
    if isinstance(opened, tuple | list):
        return sum(_extra(each, payload) for each in opened)
    return 0
