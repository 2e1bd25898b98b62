"""Made-up documents of `thinwire compare`, for tests of what is drawn from them."""

import math
import random
from typing import Any

from thinwire.compare.document import Document, DocumentSettings, MethodResult, TrainingRun

PARTS = ("compute", "encode", "network", "decode")


def method(
    name: str,
    *,
    title: str | None = None,
    seconds: tuple[float, float, float, float] = (0.05, 0.01, 0.1, 0.005),  # compute to decode
    megabytes: float = 0.1,  # per step
    final: float = 87.0,
    seeds: int = 3,
    steps: int = 100,
    tensors: int = 8,
    ratio: float = 40.0,
) -> MethodResult:
    """A method that went well: losses fall to about 0.5, the metric rises to `final`."""
    runs = [_run(name, s, seconds, megabytes, final, steps, tensors, ratio) for s in range(seeds)]
    metrics = [run.final_metric for run in runs]
    losses = [run.final_loss for run in runs]
    step = sum(seconds)
    summary = {
        "final_metric": _spread(metrics),
        "final_loss": _spread(losses),
        "step_seconds": step,
        "seconds": step * steps,
        "megabytes_a_step": megabytes,
        "fewer_bytes": 2.5 / megabytes if megabytes else None,
        "step_speedup": 0.81 / step,
        "to_target": {"seconds": 0.9 * step * steps, "speedup": 0.9 / step},
    }
    return MethodResult(
        name=name, title=title or name, error=None, diverged=False, runs=runs, summary=summary
    )


def failed(name: str, error: str, title: str | None = None) -> MethodResult:
    """A method that never took a step."""
    return MethodResult(
        name=name, title=title or name, kind="torch", error=error, diverged=False, runs=[]
    )


def diverged(name: str, **options: Any) -> MethodResult:
    """A method whose loss grows from a third of the run on, and is not finite at the end."""
    result = method(name, final=10.0, **options)
    result.diverged = True
    for run in result.runs:
        steps = len(run.losses)
        for i in range(steps // 3, steps):
            run.losses[i] = None if i > 2 * steps // 3 else 2 * 1.5 ** min(i - steps // 3, 60)
    result.summary.to_target = None
    return result


def document(methods: list[MethodResult], **settings: Any) -> Document:
    """A whole document; `settings` go over those of a run in the lab."""
    names = [one.name for one in methods if one.runs]
    given = {
        "workload": "images",
        "metric": "test accuracy, %",
        "higher_is_better": True,
        "parameters": 421642,
        "hosts": 4,
        "links": ["100mbit"] * 4,
        "racks": 1,
        "inter": None,
        "network": "lab",
        "steps": 100,
        "seconds": None,
        "target": None,
        "seeds": [0, 1, 2],
        "command": "thinwire compare --link 100mbit",
    }
    return Document(
        date="2026-11-16T07:00:00+00:00",
        machine={
            "cpu": "AMD EPYC 7B13",
            "cores": 2,
            "memory_bytes": 8_342_000_000,
            "system": "Linux 6.1",
        },
        versions={"thinwire": "0.1.0", "torch": "2.9.1", "python": "3.11.7", "commit": None},
        notes=["another process used half of a core during the run"],
        settings=DocumentSettings(**{**given, **settings}),
        baseline="ddp",
        target_loss=0.52,
        methods=methods,
        sweep=[
            {"link": link, "step_seconds": {n: _step(n, rate, i) for i, n in enumerate(names)}}
            for link, rate in (("10mbit", 10), ("100mbit", 100), ("1gbit", 1000))
        ],
        verdict="topk:0.01+ef14 reached plain DDP's final loss 9.3x sooner, equally accurate.",
    )


LONG_ERROR = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.2]:34567\n"
    + "\n".join(f'  File "/opt/torch/<frozen>/hooks_{i}.py", line {i}, in run' for i in range(30))
)


def rich(*, steps: int = 100, tensors: int = 8, **settings: Any) -> Document:
    """Eight methods, one of them failed and one diverged; three seeds; three links."""
    own: dict[str, Any] = {"steps": steps, "tensors": tensors}
    torch = {"steps": steps, "tensors": 0}
    ddp = {"title": "plain DDP, fp32", "seconds": (0.05, 0.0, 0.76, 0.0), "megabytes": 2.5}
    fp16 = {"title": "fp16_compress_hook", "seconds": (0.05, 0.004, 0.4, 0.003), "final": 86.9}
    onebit = {"seconds": (0.05, 0.006, 0.04, 0.004), "final": 87.7, "ratio": 31}
    four = {"seconds": (0.05, 0.005, 0.1, 0.004), "final": 86.6, "ratio": 8}
    both = {"seconds": (0.05, 0.014, 0.009, 0.003), "final": 86.2, "ratio": 120}
    few = {"seconds": (0.05, 0.011, 0.006, 0.002), "ratio": 400}
    return document(
        [
            method("ddp", **ddp, **torch),
            method("torch:fp16", megabytes=1.25, **fp16, **torch),
            failed("torch:powersgd", LONG_ERROR, "PowerSGD, rank 1"),
            method("topk:0.01+ef14", seconds=(0.05, 0.012, 0.02, 0.004), megabytes=0.05, **own),
            method("onebit+ef14", megabytes=0.1, **onebit, **own),
            method("quantize:4", megabytes=0.33, **four, **own),
            method("topk:0.01|quantize:4+ef14", megabytes=0.02, **both, **own),
            diverged("topk:0.001", megabytes=0.01, **few, **own),
        ],
        **settings,
    )


def _run(
    name: str,
    seed: int,
    seconds: tuple[float, float, float, float],
    megabytes: float,
    final: float,
    steps: int,
    tensors: int,
    ratio: float,
) -> TrainingRun:
    draw = random.Random(f"{name}{seed}")
    step = sum(seconds)
    losses = [
        0.5 + 1.8 * math.exp(-5 * i / steps) + draw.gauss(0, 0.06) + 0.02 * seed
        for i in range(steps)
    ]
    marks = sorted({max(1, round(steps * part / 5)) for part in range(1, 6)})
    ends = final + draw.gauss(0, 0.35)
    values = {
        "seed": seed,
        "steps": steps,
        "losses": losses,
        "seconds": [step * (i + 1) for i in range(steps)],
        "megabytes": [megabytes * (i + 1) for i in range(steps)],
        "evaluations": [
            {
                "step": mark,
                "seconds": step * mark,
                "megabytes": megabytes * mark,
                "value": 10 + (ends - 10) * (1 - math.exp(-5 * mark / steps)),
            }
            for mark in marks
        ],
        "final_loss": losses[-1],
        "final_metric": ends,
        "step_seconds": step,
        "split": dict(zip(PARTS, seconds, strict=True)),
        "bytes_counted": round(1e6 * megabytes * steps),
        "bytes_reported": None,
        "tensors": [
            {
                "name": f"blocks.{i}.weight",
                "numel": 300_000 // (i + 1),
                "ratio": ratio * draw.uniform(0.8, 1.2),
                "relative_error": draw.uniform(0.1, 0.9),
                "bytes_sent": 1000,
                "compressor": name,
                "collective": "gather",
            }
            for i in range(tensors)
        ],
    }
    return TrainingRun.model_validate(values)


def _step(name: str, rate: float, i: int) -> float:
    """Seconds per step at this many Mbit/s."""
    return 0.05 + 76 / rate if name == "ddp" else 0.05 + 0.02 * i + 40 / rate / 2**i


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
