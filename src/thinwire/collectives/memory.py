"""The memory guard: what an exchange will take, and a limit above which it is refused.

Counted is what a call allocates beyond the tensors and residuals it was given, at the moment when
most of it exists. Sizes of payloads are taken from encoding a sample of normally distributed
numbers; what really was encoded is checked again before it is sent.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.work import Part
from thinwire.compressors import Compressor
from thinwire.errors import MemoryLimitError
from thinwire.kernels import Key
from thinwire.wire import Payload, pack, unpack

SAMPLE = 1 << 16
MOST_ROUNDS = 1 << 12
VARIABLE = "THINWIRE_MAX_BYTES"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Weight(NamedTuple):
    """Bytes for one element of a tensor."""

    frame: float  # of the payload as it travels
    opened: float  # of what a reader decodes before adding (positions, unzipped sections)
    draft: float  # of what an encoder holds besides the frame


@dataclass(frozen=True)
class Estimate:
    """Peak extra bytes of one exchange, and what they consist of."""

    items: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.items)

    def __str__(self) -> str:
        parts = " + ".join(f"{_readable(size)} {name}" for name, size in self.items if size)
        return f"{_readable(self.num_bytes)} ({parts or 'nothing'})"


def limit_of(max_bytes: int | str | None) -> int | None:
    """The limit in force: the argument, else the environment variable, else none."""
    source = "max_bytes"
    if max_bytes is None:
        max_bytes, source = os.environ.get(VARIABLE), VARIABLE
    if max_bytes is None or max_bytes == "":
        return None
    found = re.fullmatch(r"\s*(\d+)\s*(|[kmg]i?)b?\s*", str(max_bytes), re.IGNORECASE)
    if not found or isinstance(max_bytes, bool):
        raise ValueError(
            f"{source} must be a number of bytes such as 500000000 or 512MiB, got {max_bytes!r}"
        )
    return int(found[1]) * _UNITS[found[2].lower()]


class Load(NamedTuple):
    """Bytes that the tensors of a call come to in their different forms."""

    frame: float
    opened: float
    draft: float
    sums: float  # in the type that sums are formed in
    widened: float  # float32 copies that encoding half-precision tensors takes for a moment
    dense: float  # as they are
    converted: bool  # sums are not formed in the tensors themselves

    def grown(self, frame: float) -> "Load":
        """The same for payloads that turned out larger than expected."""
        factor = max(1.0, frame / self.frame)
        return self._replace(
            frame=self.frame * factor, opened=self.opened * factor, draft=self.draft * factor
        )

    @classmethod
    def of(cls, parts: Sequence[Part], compressor: Compressor) -> "Load":
        frame = opened = draft = sums = widened = dense = 0.0
        converted = False
        for part in parts:
            n = part.x.numel()
            weight = weigh(compressor, part.x.dtype, part.r is not None)
            frame += n * weight.frame + 64
            opened += n * weight.opened
            draft += n * weight.draft
            sums += n * part.real.itemsize
            dense += n * part.x.dtype.itemsize
            if part.real != part.x.dtype:
                widened = max(widened, n * part.real.itemsize)
                converted = True
        return cls(frame, opened, draft, sums, widened, dense, converted)


def estimate(collective: str, load: Load, size: int, rounds: int = 1) -> Estimate:
    """Peak extra bytes of an exchange among `size` ranks."""
    frame, opened, draft = load.frame, load.opened, load.draft
    others = (size - 1) / size
    items: dict[str, float]
    if collective == "gather":
        apart = load.converted or rounds > 1
        items = {
            "own payload": draft,
            f"{size} frames": size * frame / rounds,
            "frame to send or opened frames": max(frame, size * opened) / rounds,
            "sums": load.sums if apart else 0,
        }
    elif collective == "summable":
        items = {"own payload": draft, "sum": frame}
    elif collective == "dense":
        items = {"copy": load.dense}
    elif collective == "all_gather":
        items = {
            "own payload": draft,
            f"{size} frames": size * frame,
            "frame to send or opened frames": max(frame, size * opened),
        }
    elif collective == "broadcast":
        items = {"own payload": draft, "frame": frame, "opened frame": opened}
    else:
        shard = load.sums / size
        first = 3 * others * frame
        reduce = others * (frame + opened) + shard
        second = 2 * shard + (draft + frame) / size + frame + opened
        peak = max(first, reduce, 0 if collective == "reduce_scatter" else second)
        items = {"own payloads": draft, "frames and sums": peak}
    items["widened copy"] = max(0.0, load.widened - sum(items.values()) + draft)
    return Estimate(tuple((name, int(value)) for name, value in items.items()))


def guard(
    collective: str, parts: Sequence[Part], compressor: Compressor, size: int, limit: int | None
) -> None:
    """Refuse an exchange that would take more than the limit."""
    if limit is None:
        return
    need = estimate(collective, Load.of(parts, compressor), size)
    if need.num_bytes > limit:
        raise refuse(collective, need, limit, size)


def rounds_for(
    parts: Sequence[Part], compressor: Compressor, size: int, limit: int | None, frame: int = 0
) -> int:
    """In how many slices a gather must go to stay below the limit; an error if none is enough.

    `frame` is the size that frames really have, where that is known.
    """
    if limit is None:
        return 1
    load = Load.of(parts, compressor).grown(frame)
    rounds = 1
    while estimate("gather", load, size, rounds).num_bytes > limit:
        rounds *= 2
        if rounds > MOST_ROUNDS:
            raise refuse("gather", estimate("gather", load, size, MOST_ROUNDS), limit, size)
    return rounds


def refuse(collective: str, need: Estimate, limit: int, size: int) -> MemoryLimitError:
    """The error, with a way out."""
    return MemoryLimitError(
        f"{collective} over {size} ranks would take {need} of extra memory on each rank, the limit "
        f"is {_readable(limit)}. Raise max_bytes or {VARIABLE}, compress more strongly, or reduce "
        "smaller tensors one after the other"
    )


@lru_cache(maxsize=256)
def weigh(compressor: Compressor, dtype: torch.dtype, residual: bool) -> Weight:
    """Bytes an element, measured on a sample."""
    if not dtype.is_floating_point:
        return Weight(dtype.itemsize, 0, dtype.itemsize)
    sample = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)).to(dtype)
    room = torch.zeros(SAMPLE, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    payload = compressor.draft(sample, residual=room if residual else None, key=Key())
    frame = pack(payload)
    received = unpack(frame)
    return Weight(
        frame.numel() / SAMPLE,
        _extra(received.opened, received) / SAMPLE,
        (_held(payload) + _extra(payload.known, payload)) / SAMPLE,
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


def _readable(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
