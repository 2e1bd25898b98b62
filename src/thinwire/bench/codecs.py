"""The table of codecs that `thinwire plan` reckons with: seconds per element, and per call.

Each compressor does what exchanges do with it, on tensors of two sizes, in interleaved rounds: it
drafts a message; reads one, writes a tensor and brings the residual up to date; adds one more. A
line through the medians gives what a call costs and what an element does. Joint compressors search
on a square matrix, as one rank of one: what all ranks do, without what they wait for.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor

from thinwire.bench.measure import residual_of
from thinwire.bench.tensors import generate
from thinwire.compressors import Compressor, JointCompressor, LocalCompressor, compressor_of
from thinwire.compressors.joint import Seen
from thinwire.frames import pack, unpack
from thinwire.kernels import Key
from thinwire.machine import machine
from thinwire.policies.codecs import CodecRow, CodecTable, frame_of

SPECS = (
    *("none", "cast:bf16", "quantize:8", "quantize:4", "quantize:2", "qsgd:7", "natural"),
    *("onebit", "scaledsign", "terngrad", "topk:0.1", "topk:0.01", "topk:0.001"),
    *("topk:0.3|quantize:4", "topk:0.1|quantize:4", "topk:0.03|quantize:4"),
    *("topk:0.01|quantize:4", "topk:0.001|quantize:4", "randomk:0.01", "lossless"),
    *("powersgd:1", "powersgd:4", "powersgd:16"),
)
SMALL, LARGE = 1 << 14, 1 << 22  # elements, whole squares
# Of matrices, which joint compressors see one by one, as the layers of a small model: those that a
# cache does not hold take two to three times as long per element.
MATRIX = 1 << 18
ROUNDS = 7

Tick = Callable[[str, str], None]


@dataclass
class _Timed:
    """Seconds of the parts of a compressor on a tensor of one size."""

    encode: list[float]
    decode: list[float]
    add: list[float]


def measure_codecs(
    specs: Sequence[str] = SPECS,
    rounds: int = ROUNDS,
    tick: Tick = lambda stage, detail: None,
) -> CodecTable:
    """Measure all of them with the threads that torch has."""
    compressors = {str(compressor): compressor for compressor in map(compressor_of, specs)}
    times: dict[tuple[str, int], _Timed] = {}
    for numel in (SMALL, LARGE):
        x, out = generate("normal", numel), torch.zeros(numel)
        works = {spec: _work_of(each, x) for spec, each in compressors.items()}
        for spec, work in works.items():
            tick("warming up", spec)
            for _ in range(2):
                work(0, out)
        for number in range(1, rounds + 1):
            for spec, work in works.items():
                tick(f"{numel:,} elements, round {number} of {rounds}", spec)
                found = times.setdefault((spec, numel), _Timed([], [], []))
                encode, decode, add = work(number, out)
                found.encode.append(encode)
                found.decode.append(decode)
                found.add.append(add)
    rows = {
        spec: _row(compressor, times[spec, SMALL], times[spec, LARGE])
        for spec, compressor in compressors.items()
    }
    here, date = machine(), datetime.now(UTC).date().isoformat()
    threads = torch.get_num_threads()
    return CodecTable(
        "here",
        f"{here.cpu}, {threads} of {here.cores} cores",
        f"measured by thinwire bench --for-plan, {date}; medians of {rounds} rounds",
        threads,
        rows,
    )


def num_ticks(specs: Sequence[str], rounds: int) -> int:
    """How often `measure_codecs` tells how far it is."""
    return 2 * len(specs) * (1 + rounds)


Work = Callable[[int, Tensor], tuple[float, float, float]]


def _work_of(compressor: Compressor, x: Tensor) -> Work:
    """A round of it: seconds to encode, to decode, to add one more payload."""
    if isinstance(compressor, JointCompressor):
        return _joint_work(compressor, x)
    assert isinstance(compressor, LocalCompressor)
    residual = residual_of(x) if compressor.wants_residual else None

    def work(step: int, out: Tensor) -> tuple[float, float, float]:
        times = [time.perf_counter()]
        payload = compressor.draft(x, residual=residual, key=Key(step=step))
        # What adds up is summed as it is, without a frame.
        message = None if compressor.summable else pack(payload)
        times.append(time.perf_counter())
        arrived = payload if message is None else unpack(message)
        if residual is not None:
            compressor.settle(payload, x, residual)
        arrived.restore(out)
        times.append(time.perf_counter())
        arrived.add_to(out, 1.0)
        times.append(time.perf_counter())
        encode, decode, add = (b - a for a, b in itertools.pairwise(times))
        return encode, decode, add

    return work


def _joint_work(compressor: JointCompressor, x: Tensor) -> Work:
    side = int(min(x.numel(), MATRIX) ** 0.5)
    matrix, recall = x[: side * side].view(side, side), dict[str, Tensor]()

    def work(step: int, out: Tensor) -> tuple[float, float, float]:
        begin = time.perf_counter()
        seen = Seen(matrix.clone(), Key(step=step), recall)
        search = compressor.find([seen])
        wanted = next(search)
        try:
            while True:
                wanted = search.send(wanted)
        except StopIteration as end:
            out[: side * side].copy_(end.value[0].reshape(-1))
        return time.perf_counter() - begin, 0.0, 0.0

    return work


def _row(compressor: Compressor, small: _Timed, large: _Timed) -> CodecRow:
    """The line through the medians of two sizes, none of it below zero."""

    joint = isinstance(compressor, JointCompressor)
    most = MATRIX if joint else LARGE

    def line(few: list[float], many: list[float]) -> tuple[float, float]:
        low, high = statistics.median(few), statistics.median(many)
        slope = max(0.0, (high - low) / (most - SMALL))
        return max(0.0, low - slope * SMALL), slope

    call, encode = line(small.encode, large.encode)
    shorter, decode = line(small.decode, large.decode)
    frame = 0.0 if joint else frame_of(compressor)
    add = line(small.add, large.add)[1]
    # One call for both: encodings and decodings come in pairs.
    return CodecRow(frame, call if joint else 0.5 * (call + shorter), encode, decode, add)
