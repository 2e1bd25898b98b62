"""From what ranks measured to the document of a comparison: plain JSON types, see docs/compare.md.

All of it is arithmetic on lists; nothing here measures or runs.
"""

import math
import statistics
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from thinwire.compare.counters import FULL
from thinwire.compare.method import Method, read
from thinwire.compare.settings import BASELINE, SCHEMA
from thinwire.compare.verdict import verdict_of
from thinwire.lab import parse_rate
from thinwire.machine import machine, versions

if TYPE_CHECKING:
    from thinwire.compare.run import Comparison, Outcome

_KINDS = ("compute", "encode", "network", "decode")
NEAR = 0.02  # of the baseline's final loss: as near counts as there, for the baseline too
_BLOWN_UP = 3.0  # a loss so many times that of the start has diverged


def document_of(comparison: "Comparison", command: str) -> dict[str, Any]:
    """The document. `thinwire.report` draws it."""
    settings = comparison.settings
    rates = [parse_rate(link) for link in settings.links]
    slow = min(rates) if comparison.projected else None
    outcomes = [comparison.outcomes[name] for name in _order(comparison)]
    methods = [_method(outcome, slow) for outcome in outcomes]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine()._asdict(),
        "versions": versions(),
        "notes": comparison.notes,
        "settings": {
            "workload": settings.workload,
            **comparison.metric,
            "parameters": comparison.parameters,
            "hosts": settings.hosts,
            "links": list(settings.links),
            "racks": settings.racks,
            "inter": settings.inter,
            "network": "projected" if comparison.projected else "lab",
            "steps": settings.steps,
            "seconds": settings.seconds,
            "target": settings.target,
            "seeds": list(settings.seeds),
            "command": command,
        },
        "baseline": BASELINE,
        "methods": methods,
    }
    _summarise(document)
    document["sweep"] = _sweep(outcomes, document, comparison.projected)
    document["verdict"] = verdict_of(document)
    return document


def _order(comparison: "Comparison") -> list[str]:
    """As they were asked for, baselines first."""
    return list(dict.fromkeys(read(name).name for name in comparison.settings.names))


def _method(outcome: "Outcome", slow: int | None) -> dict[str, Any]:
    method: Method = outcome.method
    runs = [run_of(seed, ranks, slow) for seed, ranks in outcome.runs.items()]
    return {
        "name": method.name,
        "title": method.title,
        "kind": method.kind,
        "error": outcome.error,
        "diverged": any(map(has_diverged, runs)),
        "runs": runs,
    }


def run_of(seed: int, ranks: list[dict[str, Any]], slow: int | None) -> dict[str, Any]:
    """One training, from what each rank measured.

    Args:
        slow: if times are projected, the rate of the slowest link in bits a second.
    """
    steps = min(len(rank["losses"]) for rank in ranks)
    sent = [statistics.fmean(rank["bytes"][i] for rank in ranks) for i in range(steps)]
    network = [8 * FULL * count / slow if slow else 0.0 for count in sent]
    seconds = [max(rank["seconds"][i] for rank in ranks) + network[i] for i in range(steps)]
    losses = [statistics.fmean(rank["losses"][i] for rank in ranks) for i in range(steps)]
    first = ranks[0]
    evaluations = [
        {"step": step, "seconds": seconds[step - 1], "megabytes": sent[step - 1] / 1e6,
         "value": value if math.isfinite(value) else None}
        for step, value in first["evaluations"] if 0 < step <= steps
    ]  # fmt: skip
    split = _split(ranks, seconds[-1] / steps, network[-1] / steps)
    durations = [b - a for a, b in zip([0.0, *seconds], seconds, strict=False)]
    reported = [rank["reported"] for rank in ranks]
    return {
        "seed": seed,
        "steps": steps,
        "losses": [round(loss, 6) if math.isfinite(loss) else None for loss in losses],
        "seconds": [round(value, 4) for value in seconds],
        "megabytes": [round(count / 1e6, 4) for count in sent],
        "evaluations": evaluations,
        "final_loss": trailing(losses)[-1] if all(map(math.isfinite, losses)) else None,
        "final_metric": evaluations[-1]["value"] if evaluations else None,
        "step_seconds": statistics.median(durations),
        "split": split,
        "bytes_counted": round(sent[-1]),
        "bytes_reported": None if None in reported else round(statistics.fmean(reported)),
        "tensors": [_tensor(row) for row in first["tensors"]],
    }


def _tensor(row: dict[str, Any]) -> dict[str, Any]:
    figures = {key: row[key] for key in ("ratio", "relative_error")}
    finite = {k: v for k, v in figures.items() if v is not None and math.isfinite(v)}
    return {**row, **dict.fromkeys(figures), **finite}


def _split(ranks: list[dict[str, Any]], step: float, network: float) -> dict[str, float]:
    """The seconds of a step. What backward did not hide is divided as the exchanges' own time."""
    exposed = min(step - network, statistics.fmean(rank["exposed"] for rank in ranks))
    inside = {
        kind: statistics.fmean(rank["inside"].get(kind, 0.0) for rank in ranks)
        for kind in _KINDS[1:]
    }
    whole = sum(inside.values())
    if not whole:
        inside, whole = {"encode": 0.0, "network": 1.0, "decode": 0.0}, 1.0
    found = {"compute": step - network - exposed}
    found |= {kind: exposed * part / whole for kind, part in inside.items()}
    found["network"] += network
    return found


def window_of(steps: int) -> int:
    """How many steps a loss is averaged over: a batch's own loss says little."""
    return max(1, min(steps, max(5, steps // 10)))


def trailing(losses: list[float]) -> list[float]:
    """Of each step, the mean of the last losses."""
    window = window_of(len(losses))
    return [statistics.fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]


def has_diverged(run: dict[str, Any]) -> bool:
    """Whether the loss became infinite, or ended far above where it began."""
    losses = run["losses"]
    return None in losses or run["final_loss"] > _BLOWN_UP * max(losses[0], 1e-6)


def time_to(run: dict[str, Any], loss: float) -> float | None:
    """Seconds until the trailing mean of the loss is as low; None if it never is.

    The first window is left out: a mean of fewer losses is noise.
    """
    if None in run["losses"]:
        return None
    window = window_of(run["steps"])
    for i, value in enumerate(trailing(run["losses"])):
        if i + 1 >= window and value <= loss:
            seconds: float = run["seconds"][i]
            return seconds
    return None


def _summarise(document: dict[str, Any]) -> None:
    """Add target_loss and every method's summary."""
    methods = document["methods"]
    base = next((m for m in methods if m["name"] == document["baseline"] and m["runs"]), None)
    usable = base is not None and not base["diverged"]
    document["target_loss"] = (
        statistics.fmean(run["final_loss"] for run in base["runs"]) if base and usable else None
    )
    for method in methods:
        method["summary"] = summary_of(method, base, document["target_loss"])


def summary_of(
    method: dict[str, Any], base: dict[str, Any] | None, target_loss: float | None
) -> dict[str, Any] | None:
    """What all runs of a method come to, compared with the baseline."""
    runs = method["runs"]
    if not runs:
        return None
    step = statistics.median(run["step_seconds"] for run in runs)
    sent = statistics.fmean(run["megabytes"][-1] / run["steps"] for run in runs)
    metrics = [run["final_metric"] for run in runs if run["final_metric"] is not None]
    losses = [run["final_loss"] for run in runs if run["final_loss"] is not None]
    found: dict[str, Any] = {
        "final_metric": _spread(metrics),
        "final_loss": _spread(losses),
        "step_seconds": step,
        "seconds": statistics.fmean(run["seconds"][-1] for run in runs),
        "megabytes_a_step": sent,
        "fewer_bytes": None,
        "step_speedup": None,
        "to_target": None,
    }
    if base is not None:
        theirs = statistics.median(run["step_seconds"] for run in base["runs"])
        bytes_of_theirs = statistics.fmean(
            run["megabytes"][-1] / run["steps"] for run in base["runs"]
        )
        found["step_speedup"] = theirs / step
        found["fewer_bytes"] = bytes_of_theirs / sent if sent else None
    if base is not None and target_loss is not None:
        found["to_target"] = _to_target(runs, base["runs"], target_loss)
    return found


def _to_target(
    runs: list[dict[str, Any]], base: list[dict[str, Any]], loss: float
) -> dict[str, float] | None:
    """Time to within 2 % of the baseline's final loss, of the same seed where there is one.

    The baseline's own time is taken in the same way. None unless all runs get there.
    """
    goals = {run["seed"]: (1 + NEAR) * run["final_loss"] for run in base}
    theirs = [time_to(run, goals[run["seed"]]) for run in base]
    ours = [time_to(run, goals.get(run["seed"], (1 + NEAR) * loss)) for run in runs]
    reached = [seconds for seconds in ours if seconds is not None]
    whole = [seconds for seconds in theirs if seconds is not None]
    if len(reached) < len(runs) or not whole:
        return None
    seconds = statistics.fmean(reached)
    return {"seconds": seconds, "speedup": statistics.fmean(whole) / seconds}


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": statistics.fmean(values), "lowest": min(values), "highest": max(values)}


def _sweep(
    outcomes: list["Outcome"], document: dict[str, Any], projected: bool
) -> list[dict[str, Any]]:
    """Step times by rate, slowest first, with those of the trainings among them."""
    links = {link for outcome in outcomes for link in outcome.sweep}
    if not links:
        return []
    found: dict[str, dict[str, float]] = {link: {} for link in links}
    for outcome in outcomes:
        for link, ranks in outcome.sweep.items():
            seconds = max(rank["step_seconds"] for rank in ranks)
            if projected:
                sent = statistics.fmean(r["bytes"][-1] / len(r["bytes"]) for r in ranks)
                seconds += 8 * FULL * sent / parse_rate(link)
            found[link][outcome.method.name] = seconds
    same = set(document["settings"]["links"])
    if len(same) == 1 and document["settings"]["racks"] == 1:
        found[same.pop()] = {
            method["name"]: method["summary"]["step_seconds"]
            for method in document["methods"]
            if method["summary"]
        }
    return [{"link": link, "step_seconds": found[link]} for link in sorted(found, key=parse_rate)]
