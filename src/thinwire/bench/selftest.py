"""Is thinwire right on a device of this machine, and how fast is it?

Three parts, each of which can be run alone:

    kernels       every kernel against the reference, bit for bit, on small tensors
    collectives   two processes, over each backend that is there: exact sums, the same bits on both
                  ranks, and nothing lost
    speed         kernels on a large tensor, against the speed of its memory

The JSON document of it, made to be pasted into an issue:

    schema        "thinwire.selftest/1"
    date          ISO 8601, UTC
    passed        whether every kernel and every collective is right
    device        type, name, kernels ("cpu", "triton", "reference"), memory_bytes, triton, cuda
    machine       cpu, cores, memory_bytes, system
    versions      thinwire, torch, numba, numpy, python, commit
    kernels       one for each: kernel, calls, wrong ("" if none, else the first difference)
    collectives   one for each backend and compressor: backend, compressor, collective, wrong; a
                  backend that was left out has the reason in `skipped`
    speed         null if not measured, else
      numel, gigabytes_per_second     of `r += g`, which moves 12 bytes for each element
      rows        one for each: what, bytes (moved for each element, at least), seconds,
                  gigabytes_per_second, share (of what `r += g` reaches)
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bench.selftest_rank import COMPRESSORS
from thinwire.formatting import one_line
from thinwire.kernels import contract, reference
from thinwire.lab import LabError, Loopback
from thinwire.machine import machine, versions

SCHEMA = "thinwire.selftest/1"
PARTS = ("kernels", "collectives", "speed")
DTYPES = (torch.float32, torch.float64)
LIMIT = 300.0  # seconds for two processes: kernels may have to be compiled
ROUNDS = 7
SIZES = {"cpu": 1 << 24, "cuda": 1 << 26}  # elements that no cache holds
BASELINE_BYTES = 12  # of r += g for each element: r and g are read, r is written

Tick = Callable[[str, str], None]


class KernelVerdict(NamedTuple):
    kernel: str
    calls: int
    wrong: str = ""


class CollectiveVerdict(NamedTuple):
    backend: str
    compressor: str = ""
    collective: str = ""
    wrong: str = ""
    skipped: str = ""


class SpeedRow(NamedTuple):
    what: str
    bytes: float  # moved for each element, at least
    seconds: float
    gigabytes_per_second: float
    share: float


@dataclass
class SelftestReport:
    """What came out; parts that were not run are empty."""

    device: dict[str, Any]
    numel: int = 0
    gigabytes_per_second: float = 0.0
    kernels: list[KernelVerdict] = field(default_factory=list)
    collectives: list[CollectiveVerdict] = field(default_factory=list)
    speed: list[SpeedRow] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def passed(self) -> bool:
        found = [each.wrong for each in self.kernels] + [each.wrong for each in self.collectives]
        return not any(found)

    def document(self) -> dict[str, Any]:
        speed = None
        if self.speed:
            speed = {
                "numel": self.numel,
                "gigabytes_per_second": self.gigabytes_per_second,
                "rows": [row._asdict() for row in self.speed],
            }
        return {
            "schema": SCHEMA,
            "date": self.date,
            "passed": self.passed,
            "device": self.device,
            "machine": machine()._asdict(),
            "versions": versions(),
            "kernels": [row._asdict() for row in self.kernels],
            "collectives": [row._asdict() for row in self.collectives],
            "speed": speed,
        }


@dataclass(frozen=True)
class SelftestSettings:
    """What is tested.

    Args:
        device: of the tensors.
        parts: some of `PARTS`.
        names: of kernels; empty for all.
        numel: elements for the speed; None for a size that no cache holds.
    """

    device: torch.device
    parts: tuple[str, ...] = PARTS
    names: tuple[str, ...] = ()
    numel: int | None = None

    @property
    def kernels(self) -> list[str]:
        known = sorted(set(reference.__all__) - contract.KERNELS_WITHOUT_A_CONTRACT)
        return [name for name in known if not self.names or name in self.names]

    @property
    def backends(self) -> list[str]:
        return ["gloo", "nccl"] if self.device.type == "cuda" else ["gloo"]

    @property
    def num_steps(self) -> int:
        """How often `run` ticks."""
        steps = {
            "kernels": len(self.kernels),
            "collectives": len(self.backends),
            "speed": len(WORK),
        }
        return sum(steps[part] for part in self.parts)


def run(settings: SelftestSettings, tick: Tick) -> SelftestReport:
    """All parts, one after the other."""
    report = SelftestReport(describe(settings.device))
    if "kernels" in settings.parts:
        for name in settings.kernels:
            tick("kernels against the reference", name)
            report.kernels.append(judge(name, settings.device))
    if "collectives" in settings.parts:
        for backend in settings.backends:
            tick(f"two processes over {backend}", ", ".join(COMPRESSORS[:3]) + ", ...")
            report.collectives += exchange(backend, settings.device)
    if "speed" in settings.parts:
        measure(settings, report, tick)
    return report


def describe(device: torch.device) -> dict[str, Any]:
    """The device, and what runs on it."""
    import importlib.metadata

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    found: dict[str, Any] = {"type": device.type, "name": str(device), "kernels": name_of(device)}
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        found["name"] = of.name
        found["memory_bytes"] = of.total_memory
        found["capability"] = f"{of.major}.{of.minor}"
    return {**found, "triton": triton, "cuda": torch.version.cuda or torch.version.hip}


def name_of(device: torch.device) -> str:
    """Of the kernels in use."""
    return kernels.on(device).__name__.rpartition(".")[2]


# Kernels


def judge(name: str, device: torch.device) -> KernelVerdict:
    """Compare a kernel with the reference."""
    kernel = getattr(kernels.on(device), name)
    kernel = getattr(kernel, "kernel", kernel)  # itself, not what takes its place when it is wrong
    count = 0
    for dtype in DTYPES:
        for label, call in contract.every_call(dtype, device, name):
            count += 1
            try:
                wrong = contract.difference(call, kernel)
            except Exception as error:
                wrong = f"{type(error).__name__}: {one_line(error)[:300]}"
            if wrong:
                kind = str(dtype).removeprefix("torch.")
                return KernelVerdict(name, count, f"{kind}, {label or 'plain'}: {wrong}")
    return KernelVerdict(name, count)


# Collectives


def exchange(backend: str, device: torch.device) -> list[CollectiveVerdict]:
    """What two processes find out about a backend."""
    if backend == "nccl" and (reason := _why_no_nccl()):
        return [CollectiveVerdict(backend, skipped=reason)]
    argv = [sys.executable, "-m", "thinwire.bench.selftest_rank", backend, device.type]
    try:
        with Loopback(hosts=2) as loopback:
            results = loopback.run(argv, timeout=LIMIT)
    except LabError as error:
        return [CollectiveVerdict(backend, wrong=one_line(error)[-600:])]
    found = [json.loads(result.stdout.strip().splitlines()[-1]) for result in results]
    verdicts = []
    for one, other in zip(*found, strict=True):
        wrong = one["wrong"] or other["wrong"]
        verdicts.append(CollectiveVerdict(backend, one["compressor"], one["collective"], wrong))
    return verdicts


def _why_no_nccl() -> str | None:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    count = torch.cuda.device_count()
    return None if count >= 2 else f"NCCL needs a GPU for each of two processes, there is {count}"


# Speed


class _Material(NamedTuple):
    """What kernels are measured on."""

    x: Tensor
    r: Tensor
    device: torch.device

    @property
    def kernel(self) -> Any:
        return kernels.on(self.device)

    @property
    def n(self) -> int:
        return self.x.numel()


Work = tuple[str, float, Callable[[_Material], Callable[[], object]]]


def _uniform(width: int) -> dict[str, Any]:
    return {"limit": (1 << (width - 1)) - 1, "width": width, "block": 256}


def _encode_uniform(width: int, **more: Any) -> Callable[[_Material], Callable[[], object]]:
    settings = {**_uniform(width), "rule": "max", **more}
    return lambda m: lambda: m.kernel.encode_uniform(m.x, m.r, **settings)


def _add_uniform(width: int) -> Callable[[_Material], Callable[[], object]]:
    def prepared(m: _Material) -> Callable[[], object]:
        scales, packed = m.kernel.encode_uniform(m.x, m.r, rule="max", **_uniform(width))
        out = m.r.clone()
        settings = {**_uniform(width), "weight": -1.0, "plus": m.x}
        return lambda: m.kernel.add_uniform(out, packed, scales, **settings)

    return prepared


def _top_k(m: _Material) -> Callable[[], object]:
    k = m.n // 100
    return lambda: m.kernel.top_k(m.x, m.r, k)


def _scatter_add(m: _Material) -> Callable[[], object]:
    positions, values = m.kernel.top_k(m.x, m.r, m.n // 100)
    out = m.r.clone()
    return lambda: m.kernel.scatter_add(out, positions, values, weight=-1.0, plus=m.x)


def _rice(m: _Material) -> Callable[[], object]:
    positions, _ = m.kernel.top_k(m.x, m.r, m.n // 100)

    def both() -> None:
        parameter, quotients = m.kernel.rice_parameter(positions, 6)
        unary = -(-(quotients + positions.numel()) // 64)
        words = m.kernel.rice_encode(positions, parameter, unary)
        m.kernel.rice_decode(words, positions.numel(), parameter, unary, m.n)

    return both


def _pairs(m: _Material) -> Callable[[], object]:
    pairs, packed = m.kernel.encode_pairs(m.x, m.r, block=1024, scaled=False)
    out = m.r.clone()
    return lambda: m.kernel.add_pairs(out, packed, pairs, block=1024, weight=-1.0, plus=m.x)


def _checksum(m: _Material) -> Callable[[], object]:
    data = m.x.view(torch.uint8)
    return lambda: m.kernel.checksum(data)


def _round(m: _Material) -> Callable[[], object]:
    out = torch.empty_like(m.x, dtype=torch.bfloat16)
    return lambda: m.kernel.round_to_bfloat16(m.x, out, contract.KEY)


# What is measured, and how many bytes it moves for each element at least; see docs/gpu.md.
WORK: tuple[Work, ...] = (
    ("quantize 8 bits, x + r", 8 + 1 + 4 / 256, _encode_uniform(8)),
    ("quantize 4 bits, x + r", 8 + 0.5 + 4 / 256, _encode_uniform(4)),
    ("quantize 4 bits, random", 8 + 0.5 + 16 / 256, _encode_uniform(4, key=contract.KEY)),
    ("residual after 4 bits", 12 + 0.5 + 4 / 256, _add_uniform(4)),
    (
        "one bit, x + r",
        8 + 0.125,
        lambda m: lambda: m.kernel.encode_pairs(m.x, m.r, block=1024, scaled=False),
    ),
    ("residual after one bit", 12 + 0.125, _pairs),
    ("top 1 %, x + r", 8 + 0.2, _top_k),
    (
        "top 1 % of chunks, x + r",
        8 + 0.08,
        lambda m: lambda: m.kernel.chunk_top_k(m.x, m.r, 4096, 41, 0),
    ),
    ("residual after top 1 %", 12 + 0.16, _scatter_add),
    ("1 % of positions coded and back", 0.5, _rice),
    ("largest and least, x + r", 8, lambda m: lambda: m.kernel.extent(m.x, m.r)),
    ("checksum", 4, _checksum),
    ("random rounding to bfloat16", 6, _round),
)


def measure(settings: SelftestSettings, report: SelftestReport, tick: Tick) -> None:
    """Fill in the speed."""
    device = settings.device
    n = settings.numel or SIZES.get(device.type, SIZES["cpu"])
    n = n // 4096 * 4096 or 4096
    material = _Material(_normal(n, device, 0), _normal(n, device, 1), device)
    out = material.r.clone()
    base = _seconds(lambda: out.add_(material.x), device)
    report.numel = n
    report.gigabytes_per_second = BASELINE_BYTES * n / base / 1e9
    for what, num_bytes, prepared in WORK:
        tick("speed", what)
        seconds = _seconds(prepared(material), device)
        rate = num_bytes * n / seconds / 1e9
        share = rate / report.gigabytes_per_second
        report.speed.append(SpeedRow(what, num_bytes, seconds, rate, share))


def _normal(n: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(n, generator=generator, device=device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median; the first call, which compiles, is not counted."""

    def settled() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    found = []
    for _ in range(ROUNDS):
        settled()
        begin = time.perf_counter()
        work()
        settled()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


# In words


def lines(report: SelftestReport) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Tables: a title, headings, rows."""
    from thinwire.formatting import show_decimals, show_seconds

    if report.kernels:
        yield (
            f"kernels '{report.device['kernels']}' against the reference",
            ("kernel", "calls", "result"),
            [[row.kernel, str(row.calls), row.wrong or "same bits"] for row in report.kernels],
        )
    if report.collectives:
        rows = [
            [row.backend, row.compressor, row.collective, row.wrong or row.skipped or "right"]
            for row in report.collectives
        ]
        yield "two processes", ("backend", "compressor", "collective", "result"), rows
    if report.speed:
        rows = [
            [row.what, show_decimals(row.bytes), show_seconds(row.seconds),
             show_decimals(row.gigabytes_per_second), f"{row.share:.0%}"]
            for row in report.speed
        ]  # fmt: skip
        title = (
            f"speed over {report.numel:,} elements of float32; r += g moves "
            f"{report.gigabytes_per_second:.0f} GB/s"
        )
        yield title, ("what", "bytes each", "time", "GB/s", "share"), rows


def as_json(report: SelftestReport) -> str:
    return json.dumps(report.document(), indent=2, allow_nan=False)
