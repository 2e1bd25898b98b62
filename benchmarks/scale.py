"""The tables of docs/scale.md and of "Against the literature" in docs/plan.md, from the model.

    python benchmarks/scale.py [--out benchmarks/records/NAME.json]

Nothing is measured: the simulator and the formulas are asked. Takes about a minute.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

from harness import conclude, read_options
from rich.console import Console

import thinwire as tw
from thinwire.collectives.costs import (
    Coding,
    Due,
    Interconnect,
    local_step,
    overlapped_step,
    record_bytes,
)
from thinwire.formatting import show_bytes, show_seconds
from thinwire.plan.simulate import World, make_world, simulate_step
from thinwire.plan.sizes import LayeredModel, UniformModel, layers_of
from thinwire.policies.codecs import shipped

LOCAL_STEPS = 100
WAYS = (
    ("ddp", "plain"),
    ("quantize:4", "auto"),
    ("topk:0.01", "auto"),
    ("topk:0.001", "gather"),
    ("quantize:4", "tree"),
    ("quantize:4", "grouped"),
)


def scenes() -> dict[str, tuple[World, int, float]]:
    """Worlds, with the parameters of a model and the seconds of its step."""
    racks = {"ranks_per_rack": 40, "oversubscribed": 3.0, "delay": 2e-5, "rack_delay": 3e-5}
    uneven = {"stragglers": 0.01, "slowness": 1.5, "uneven": 0.05}
    return {
        "100 ranks": (make_world(100, 1.25e9, **racks, **uneven), 10**9, 1.0),
        "1,000 ranks": (make_world(1000, 1.25e9, **racks, **uneven), 10**9, 1.0),
        "10,000 ranks": (make_world(10_000, 1.25e9, **racks, **uneven), 10**9, 1.0),
        "20 regions of 8 ranks": (
            make_world(
                160, 1.25e9, ranks_per_rack=8, regions=20, region_rate=1.25e8, region_delay=0.08
            ),
            10**9,
            1.0,
        ),
        "1,000 phones": (
            make_world(
                1000, 1.25e6, delay=0.03, uneven=0.7, stragglers=0.1, slowness=4.0, download=3.0
            ),
            10**7,
            10.0,
        ),
    }


def scale_rows() -> list[dict[str, Any]]:
    table, rows = shipped()["cores-16"], []
    for name, (world, parameters, compute) in scenes().items():
        model = UniformModel(parameters)
        for method, collective in WAYS:
            compressor = None if method == "ddp" else tw.parse(method)
            due = (
                model.plain()
                if method == "ddp"
                else model.compressed(compressor, table, world.ranks)
            )
            step = simulate_step(world, due, compute, collective)
            row = {"scene": name, "method": method, "collective": collective}
            row |= {"step": step.seconds, "efficiency": step.efficiency, "sent": step.sent}
            if method != "ddp":
                once = simulate_step(world, model.fragment(compressor, table, 1), 0.0, collective)
                slowest = compute * float(world.speed.max())
                mean = slowest + once.seconds / LOCAL_STEPS
                row["local_step"] = mean
                row["local_efficiency"] = compute * float(world.speed.mean()) / mean
            rows.append(row)
    return rows


def meetings() -> list[dict[str, Any]]:
    """What a meeting, connections and a gather of 1 MB take of a rank."""
    return [
        {
            "ranks": p,
            "meeting_bytes": record_bytes(p) * (p - 1),
            "connections": p + 2,
            "gathered_bytes": p * 1e6,
        }
        for p in (8, 100, 1000, 10_000)
    ]


# The literature


def least_rate(efficiency_at: Callable[[float], float], wanted: float) -> float:
    """Bits per second at which an efficiency is reached."""
    low, high = 6.0, 14.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if efficiency_at(10**middle) >= wanted else (middle, high)
    return float(10**high)


SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
PAPER_DILOCO = {  # Douillard and others, Streaming DiLoCo, 2025: Gbit/s, simulated by them
    "DDP": (184, 324, 391, 391, 472),
    "DiLoCo": (3.0, 11, 23, 49, 184),
    "streaming": (2.4, 6.2, 9.1, 11, 19),
    "streaming, overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
    "streaming, overlapped, 4 bits": (0.5, 0.9, 1.1, 1.1, 1.4),
}


def streaming_diloco() -> list[dict[str, Any]]:
    """100 billion parameters in 16 bits between two places, 4.9 s per step, rounds of 100."""
    parameters, compute, fragments = 1e11, 4.9, 36

    def network(bits: float) -> Interconnect:
        return Interconnect(2, bits / 8, start=0.0, peer=0.0)

    def ddp(bits: float) -> float:
        coding, part = Coding("plain", 2.0), parameters / 1000
        due = [Due(coding, part, 1 / 3 + k / 1500) for k in range(1, 1001)]
        return overlapped_step(due, network(bits), compute).efficiency

    def local(width: float, parts: int, overlap: int) -> Callable[[float], float]:
        due = [Due(Coding("plain", width), parameters / parts, 1.0)]
        return lambda bits: local_step(due, network(bits), compute, 100, parts, overlap).efficiency

    ways = {
        "DDP": ddp,
        "DiLoCo": local(2.0, 1, 0),
        "streaming": local(2.0, fragments, 0),
        "streaming, overlapped": local(2.0, fragments, 1),
        "streaming, overlapped, 4 bits": local(0.5, fragments, 1),
    }
    return [
        {
            "method": name,
            "ours": [least_rate(efficiency, share) / 1e9 for share in SHARES],
            "paper": PAPER_DILOCO[name],
        }
        for name, efficiency in ways.items()
    ]


def resnet18() -> list[tuple[str, tuple[int, ...]]]:
    """Convolutions of the CIFAR version: 11.2 M parameters."""
    layers, width = [("first", (64, 3, 3, 3))], 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            layers.append((f"{stage}.{block}.a", (out, width, 3, 3)))
            layers.append((f"{stage}.{block}.b", (out, out, 3, 3)))
            if width != out:
                layers.append((f"{stage}.{block}.c", (out, width, 1, 1)))
            width = out
    return [*layers, ("last", (10, 512))]


def lstm() -> list[tuple[str, tuple[int, ...]]]:
    """Three layers of 650 on the words of WikiText-2: 28.9 M parameters."""
    layers = [("words", (28869, 650))]
    for number in range(3):
        layers += [(f"{number}.inputs", (2600, 650)), (f"{number}.states", (2600, 650))]
        layers += [(f"{number}.bias", (5200,))]
    return [*layers, ("bias", (28869,))]


# Seconds per batch (Vogels and others, 2019) as we remember them. That rank 2 takes 23 % less than
# SGD on the one and rank 4 55 % less on the other, others who have read the paper note too.
PAPER_POWERSGD = {
    "ResNet-18": {"SGD": 0.312, "powersgd:1": 0.229, "powersgd:2": 0.239, "powersgd:4": 0.260},
    "LSTM": {"SGD": 0.300, "powersgd:4": 0.134},
}


def powersgd() -> list[dict[str, Any]]:
    """On 8 hosts of 2 GPUs with 10 Gbit/s; computing is set by the fastest of theirs."""
    table, rows = shipped()["gpu"], []
    network = Interconnect(8, 1.25e9, 2, start=5e-5, peer=0.0, inside=5e9, trees=True)
    models = {"ResNet-18": layers_of(resnet18()), "LSTM": layers_of(lstm())}
    for title, paper in PAPER_POWERSGD.items():
        model = models[title]

        def step(name: str, compute: float, model: LayeredModel = model) -> float:
            due = model.plain()
            if name != "SGD":
                due = model.compressed(tw.parse(name), table, network.ranks)
            # They exchange when backward has ended.
            due = [each._replace(ready=1.0) for each in due]
            return overlapped_step(due, network, compute).seconds

        fastest = min(paper, key=paper.__getitem__)
        compute = paper[fastest] - step(fastest, 0.0)
        for name, theirs in paper.items():
            row = {"model": title, "method": name, "ours": step(name, compute), "paper": theirs}
            rows.append(row)
    return rows


# Times as fast as one GPU on 16, 32 and 64: 8 RTX 2080 Ti per machine, 25 Gbit/s between machines;
# dense by NCCL, and 0.1 % of the gradients by OpenMPI. Measured by the authors of DGC: read off the
# bars of data/docs/speedup.png in github.com/synxlin/deep-gradient-compression, to about 0.3.
PAPER_DGC = {
    "VGG-16": (138_000_000, (4.7, 8.3, 14.0), (11.7, 21.6, 41.6)),
    "ResNet-50": (25_600_000, (9.4, 17.4, 30.7), (11.4, 20.0, 33.8)),
}


def dgc() -> list[dict[str, Any]]:
    """The step is chosen so that dense on 64 GPUs comes to theirs; the rest is predicted."""
    table, rows = shipped()["gpu"], []

    def speedup(parameters: int, gpus: int, compute: float, spec: str | None) -> float:
        network = Interconnect(gpus // 8, 25e9 / 8, 8, start=5e-5, peer=1e-6, trees=True)
        model = UniformModel(parameters)
        due = model.plain() if spec is None else model.compressed(tw.parse(spec), table, gpus)
        return gpus * overlapped_step(due, network, compute).efficiency

    for name, (parameters, dense, sparse) in PAPER_DGC.items():
        low, high = 1e-3, 10.0
        for _ in range(60):
            middle = math.sqrt(low * high)
            enough = speedup(parameters, 64, middle, None) >= dense[-1]
            low, high = (low, middle) if enough else (middle, high)
        for number, gpus in enumerate((16, 32, 64)):
            row = {"model": name, "gpus": gpus, "step": high}
            row |= {"dense": speedup(parameters, gpus, high, None), "their_dense": dense[number]}
            row |= {"sparse": speedup(parameters, gpus, high, "topk:0.001")}
            rows.append(row | {"their_sparse": sparse[number]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options = read_options(parser)
    console = Console(width=140)
    rows = scale_rows()
    for row in rows:
        words = [f"{row['scene']:24}", f"{row['method']:12}", f"{row['collective']:8}"]
        words += [show_seconds(row["step"]), f"{row['efficiency']:.1%}", show_bytes(row["sent"])]
        if "local_step" in row:
            words += ["local", show_seconds(row["local_step"]), f"{row['local_efficiency']:.0%}"]
        console.print("  ".join(words))
    measured = {
        "scale": rows,
        "meetings": meetings(),
        "streaming_diloco": streaming_diloco(),
        "powersgd": powersgd(),
        "dgc": dgc(),
    }
    for name in ("meetings", "streaming_diloco", "powersgd", "dgc"):
        console.print(name, measured[name])
    note = "nothing was measured: these are figures of the model"
    return conclude(console, options, "thinwire.scale/1", measured, note=note)


if __name__ == "__main__":
    sys.exit(main())
