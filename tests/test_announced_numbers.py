"""Ranks that announce what cannot be: all refuse it alike, nothing is allocated, all goes on.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from tensors import normal, same

import thinwire as tw
from thinwire.collectives.message import Expected, bundle, max_message_bytes
from thinwire.collectives.transport import Transport
from thinwire.frames import longest_frame
from thinwire.frames.code import Extent

TIMEOUT = 600.0  # of calls: ranks.py ends them long before
LIAR = 1
N = 1000
LARGE = 100_000  # elements, most of which do not fit a message that comes along with a record
TERABYTE = 1 << 40
INNER = [[0, 1], [2, 3]]


class Lie(NamedTuple):
    """What the liar says in place of the truth."""

    call: str
    meeting: int  # in which meeting of the call, from 1
    kind: str  # "numbers", or "words" for what it says to each member
    place: int
    value: int
    says: str  # what the error names


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def calls(x: torch.Tensor, r: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Every call, through every collective."""
    size, me = dist.get_world_size(), dist.get_rank()

    def reduce(spec: str, collective: str, **more: Any) -> Callable[[], object]:
        given = {"residual": r, "timeout": TIMEOUT, "collective": collective} | more
        return lambda: tw.all_reduce(x, spec, **given)

    half = x.half()
    return {
        "gather": reduce("topk:0.1", "gather"),
        "gather in rounds": reduce("topk:0.1", "gather", max_bytes="1GB"),
        "twoshot": reduce("quantize:4", "twoshot"),
        "sparse": reduce("topk:0.1", "sparse"),
        "sparse regions": lambda: tw.all_reduce(
            normal(LARGE, me), "topk:0.9", collective="sparse", timeout=TIMEOUT
        ),
        "summable": lambda: tw.all_reduce(
            half, "cast:fp16", collective="summable", timeout=TIMEOUT
        ),
        "hierarchical": reduce("topk:0.1", "auto", nodes=INNER),
        "reduce_scatter": lambda: tw.reduce_scatter(
            torch.empty(N), normal(N * size, me), "onebit", timeout=TIMEOUT
        ),
        "all_gather": lambda: tw.all_gather(
            torch.empty(N * size), x, "lossless", residual=r, timeout=TIMEOUT
        ),
        "broadcast": lambda: tw.broadcast(x, "natural", src=LIAR, timeout=TIMEOUT),
        "send": lambda: (
            tw.send(x, "topk:0.1", dst=0, residual=r, timeout=TIMEOUT)
            if me == LIAR
            else tw.recv(x, src=LIAR, timeout=TIMEOUT)
        ),
    }


LENGTH = "announces a message of so many bytes"
ROUNDS = "announces a number of rounds"
LIES = {
    "gather": Lie("gather", 1, "numbers", 0, TERABYTE, LENGTH),
    "less than nothing": Lie("gather", 1, "numbers", 0, -1, LENGTH),
    "most negative": Lie("gather", 1, "numbers", 0, -(1 << 63), LENGTH),
    "a little too long": Lie("gather", 1, "numbers", 0, 2000, LENGTH),
    "no rounds": Lie("gather", 1, "numbers", 2, 0, ROUNDS),
    "endless rounds": Lie("gather", 1, "numbers", 2, 1 << 50, ROUNDS),
    "endless rounds in the end": Lie("gather in rounds", 2, "numbers", 0, 1 << 50, ROUNDS),
    "to owners": Lie("twoshot", 1, "words", 0, TERABYTE, LENGTH),
    "to another owner": Lie("twoshot", 1, "words", 2, TERABYTE, LENGTH),
    "to all": Lie("twoshot", 2, "numbers", 0, TERABYTE, LENGTH),
    "chosen": Lie("sparse", 1, "numbers", 1, TERABYTE, "announces chosen elements"),
    "fewer chosen than none": Lie("sparse", 1, "numbers", 1, -9, "announces chosen elements"),
    "quantiles outside": Lie(
        "sparse regions", 1, "words", 0, LARGE + 1, "announces a step between quantiles"
    ),
    "quantiles below": Lie(
        "sparse regions", 1, "words", 0, -1, "announces a step between quantiles"
    ),
    "quantiles descend": Lie(
        "sparse regions", 1, "words", 1, 0, "announces a step between quantiles"
    ),
    "last quantile": Lie("sparse regions", 1, "words", 2, LARGE + 1, "announces a last quantile"),
    "sparse to owners": Lie("sparse", 1, "words", 0, TERABYTE, LENGTH),
    "sparse to all": Lie("sparse", 2, "numbers", 0, TERABYTE, LENGTH),
    "large sparse to owners": Lie("sparse regions", 2, "words", 0, TERABYTE, LENGTH),
    "infinite peak": Lie(
        "summable", 1, "numbers", 1, bits(torch.inf), "announces a largest magnitude"
    ),
    "no peak": Lie("summable", 1, "numbers", 1, bits(torch.nan), "announces a largest magnitude"),
    "negative peak": Lie("summable", 1, "numbers", 1, bits(-1.0), "announces a largest magnitude"),
    "reduce_scatter": Lie("reduce_scatter", 1, "words", 2, TERABYTE, LENGTH),
    "all_gather": Lie("all_gather", 1, "numbers", 0, TERABYTE, LENGTH),
    "broadcast": Lie("broadcast", 1, "numbers", 0, TERABYTE, LENGTH),
    "send": Lie("send", 1, "numbers", 0, TERABYTE, LENGTH),
    "inside nodes": Lie("hierarchical", 1, "words", 0, TERABYTE, LENGTH),
    "between nodes": Lie("hierarchical", 2, "numbers", 0, TERABYTE, LENGTH),
    "endless rounds between nodes": Lie("hierarchical", 2, "numbers", 2, 1 << 50, ROUNDS),
    "results inside nodes": Lie("hierarchical", 3, "numbers", 1, TERABYTE, LENGTH),
}
SIZES = {"hierarchical": 4, "send": 2}


def lying(lie: Lie) -> Callable[..., Any]:
    """A `Transport._meet` that says something else, once."""
    truthful, meetings = Transport._meet, 0

    def meet(self: Any, numbers: Any, words: Any, failure: Any, **more: Any) -> Any:
        nonlocal meetings
        meetings += 1
        said = {"numbers": list(numbers), "words": list(words)}
        if meetings == lie.meeting:
            said[lie.kind] += [0] * (lie.place + 1 - len(said[lie.kind]))
            said[lie.kind][lie.place] = lie.value
        return truthful(self, said["numbers"], said["words"], failure, **more)

    return meet


class Report(NamedTuple):
    error: str
    untouched: bool
    usable: bool


def on_lies(names: list[str]) -> dict[str, Report]:
    me, size, found = dist.get_rank(), dist.get_world_size(), {}
    for name in names:
        lie = LIES[name]
        x, r = normal(N, me), normal(N, 9 + me)
        before, error = (x.clone(), r.clone()), ""
        with pytest.MonkeyPatch.context() as patch:
            if me == LIAR:
                patch.setattr(Transport, "_meet", lying(lie))
            try:
                calls(x, r)[lie.call]()
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        untouched = same(x, before[0]) and same(r, before[1])
        ones = torch.ones(N)
        tw.all_reduce(ones, "topk:1.0", timeout=TIMEOUT)
        found[name] = Report(error, untouched, bool((ones == size).all()))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_cannot_be_is_refused_by_all(size):
    names = [name for name, lie in LIES.items() if SIZES.get(lie.call, 3) == size]
    for found in ranks.run(on_lies, names, ranks=size):
        assert list(found) == names
        for name, report in found.items():
            lie = LIES[name]
            assert report.error.startswith("PeerError"), (name, report.error)
            assert lie.says in report.error, (name, report.error)
            assert f"rank {LIAR} announces" in report.error, (name, report.error)
            assert report.untouched, name
            assert report.usable, name


def on_the_truth() -> list[str]:
    """The same calls without a lie, so that the lies above are all that is refused."""
    me = dist.get_rank()
    size = dist.get_world_size()
    done = []
    for name in calls(normal(N, me), normal(N, 9 + me)):
        if SIZES.get(name, 3) == size:
            calls(normal(N, me), normal(N, 9 + me))[name]()
            done.append(name)
    return done


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_truth_is_not_refused(size):
    names = {lie.call for lie in LIES.values() if SIZES.get(lie.call, 3) == size}
    for found in ranks.run(on_the_truth, ranks=size):
        assert set(found) == names


def on_long_explanations() -> list[str]:
    """Ranks that disagree explain themselves; one says that it has a terabyte to say."""
    truthful, errors, lengths = Transport._send_records, [], []

    def send(self: Any, record: list[int], messages: Any) -> Any:
        record[1] += 1  # the checksum of the call
        record[3] = lengths[-1]
        return truthful(self, record, messages)

    for length in (TERABYTE, -1):
        lengths.append(length)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == LIAR:
                patch.setattr(Transport, "_send_records", send)
            try:
                tw.all_reduce(torch.ones(N), "topk:0.1", timeout=TIMEOUT)
            except tw.PeerError as error:
                errors.append(str(error))
        tw.all_reduce(torch.ones(N), "topk:0.1", timeout=TIMEOUT)
    return errors


def test_long_explanations_are_not_listened_to():
    for errors in ranks.run(on_long_explanations, ranks=3):
        assert len(errors) == 2
        for error in errors:
            assert f"rank {LIAR} announces an explanation of" in error


# The bounds


@pytest.mark.parametrize("spec", ["topk:0.1", "quantize:4", "lossless", "tiered:0.1"])
def test_messages_of_several_tensors_keep_their_bound(spec):
    c = tw.parse(spec)
    for sizes in ([0], [1], [5, 0, 7], [1000, 3], [64] * 20):
        payloads = [c.encode(normal(n, n)) for n in sizes]
        expected = [Expected(payload.extent, c) for payload in payloads]
        assert bundle([tw.pack(p) for p in payloads]).numel() <= max_message_bytes(expected)


def test_bounds_are_worth_having():
    """What a rank may announce is near to what it sends, and never much more than the tensor."""
    n = 1_000_000
    for spec in ("none", "topk:0.01", "quantize:4", "onebit", "topk:0.01|onebit", "tiered:0.01"):
        c = tw.parse(spec)
        most = c.max_payload_bytes(n, torch.float32)
        assert most < 4 * c.encode(normal(n)).num_bytes, spec
        assert most < longest_frame(Extent(torch.float32, n)), spec
