"""Figures of a wire: as typed dictionaries, as a table, and in words."""

import math
from typing import TYPE_CHECKING, TypedDict

import torch

from thinwire.compressors import LocalCompressor
from thinwire.feedback.base import Update
from thinwire.formatting import (
    TableColumn,
    plural,
    show_bytes,
    show_number,
    show_ratio,
    table,
    text_of,
)
from thinwire.kernels import Key
from thinwire.policies.base import OptimizerKind
from thinwire.reducer.unit import Unit
from thinwire.telemetry import Ledger, Line

if TYPE_CHECKING:
    from thinwire.parallel.wire import Wire

WIDTH = 110  # columns of a summary


class TensorStats(TypedDict):
    """What one tensor came to; see `thinwire.telemetry.Line`."""

    numel: int
    steps: int
    bytes_in: int
    bytes_sent: int
    ratio: float
    compressor: str
    collective: str
    relative_error: float | None
    residual_norm: float | None


class TotalStats(TypedDict):
    """What all tensors came to on this rank; see `thinwire.collectives.Account`."""

    bytes_in: int
    bytes_sent: int
    bytes_received: int
    network_bytes: int
    between_bytes: int
    ratio: float
    exchanges: int
    relative_error: float | None
    residual_norm: float | None


class DecisionStats(TypedDict):
    """What a policy has changed, and why."""

    step: int
    tensors: str
    compressor: str
    why: str


class Stats(TypedDict):
    """What `Wire.stats` returns."""

    step: int
    tensors: dict[str, TensorStats]
    total: TotalStats
    seconds: dict[str, float]
    seconds_per_step: dict[str, float]
    policy: str
    decisions: list[DecisionStats]


def stats_of(wire: "Wire", norms: bool = True) -> Stats:
    """What `Wire.stats` returns; norms of residuals take a pass over them."""
    ledger = wire._reducer.ledger
    ledger.fold()
    left = wire._reducer.states.norms("residual") if norms else {}
    # What was loaded may not have been sent yet.
    lines = ledger.lines | {
        n: Line(numel) for n, (_, numel) in left.items() if n not in ledger.lines
    }
    tensors: dict[str, TensorStats] = {
        name: {
            "numel": line.numel,
            "steps": line.steps,
            "bytes_in": line.bytes_in,
            "bytes_sent": round(line.bytes_sent),
            "ratio": line.ratio,
            "compressor": line.compressor,
            "collective": line.collective,
            "relative_error": line.relative_error,
            "residual_norm": left[name][0] if name in left else None,
        }
        for name, line in lines.items()
    }
    known = [row["residual_norm"] for row in tensors.values() if row["residual_norm"] is not None]
    bytes_in = sum(line.bytes_in for line in ledger.lines.values())
    measured = [
        (line.relative_error, line.numel)
        for line in ledger.lines.values()
        if line.relative_error is not None
    ]
    weight = sum(numel for _, numel in measured)
    return {
        "step": wire.step,
        "tensors": tensors,
        "total": {
            "bytes_in": bytes_in,
            "bytes_sent": ledger.bytes_sent,
            "bytes_received": ledger.bytes_received,
            "network_bytes": ledger.network_bytes,
            "between_bytes": ledger.between_bytes,
            "ratio": bytes_in / ledger.bytes_sent if ledger.bytes_sent else math.inf,
            "exchanges": ledger.exchanges,
            "relative_error": sum(e * n for e, n in measured) / weight if weight else None,
            "residual_norm": math.hypot(*known) if known else None,
        },
        "seconds": dict(ledger.seconds),
        "seconds_per_step": ledger.seconds_per_step,
        "policy": str(wire.policy),
        "decisions": [
            {"step": d.step, "tensors": d.tensors, "compressor": d.compressor, "why": d.why}
            for d in wire.decisions
        ],
    }


def table_of(stats: Stats, rows: int) -> str:
    """What `Wire.summary` returns."""
    steps = max(1, stats["step"])
    found = sorted(stats["tensors"].items(), key=lambda item: -item[1]["bytes_sent"])
    lines = [
        [
            name,
            row["compressor"],
            row["collective"],
            f"{row['numel']:,}",
            show_bytes(row["bytes_sent"] / max(1, row["steps"])),
            show_ratio(row["ratio"]),
            show_number(row["relative_error"]),
            show_number(row["residual_norm"]),
        ]
        for name, row in found[:rows]
    ]
    if len(found) > rows:
        lines.append([f"... and {len(found) - rows} more"])
    total = stats["total"]
    lines += [
        [],
        [
            f"total of {stats['step']} steps",
            "",
            "",
            f"{sum(row['numel'] for row in stats['tensors'].values()):,}",
            show_bytes(total["bytes_sent"] / steps),
            show_ratio(total["ratio"]),
            show_number(total["relative_error"]),
            show_number(total["residual_norm"]),
        ],
    ]
    figures = ("elements", "sent per step", "ratio", "error", "residual")
    columns: list[TableColumn | str] = ["tensor", "compressor", "collective"]
    columns += [TableColumn(figure, right=True, wrap=False) for figure in figures]
    shown = table(columns, lines)
    per_step = stats["seconds_per_step"].items()
    times = ", ".join(f"{kind} {1e3 * s:.1f} ms" for kind, s in per_step) or "nothing yet"
    without = " (without the first)" if stats["step"] > 1 else ""
    return f"{text_of(shown, WIDTH)}\nper step{without}: {times}"


def explanation_of(wire: "Wire") -> str:
    """What `Wire.explain` returns."""
    stats = stats_of(wire, norms=False)
    chosen_for = wire._choices.tensors
    rest = len(wire._parameters) - len(chosen_for)
    elements = sum(tensor.numel for tensor in chosen_for.values())
    feedback = wire._reducer.feedback
    kept = "What is left out is remembered and sent later" if feedback.parts else "Nothing is kept"
    if wire._configuration.average == "senders":
        kept = f"Each element is averaged over the ranks that sent it. {kept}"
    lines = [
        f"{wire.policy} decides on {plural(len(chosen_for), 'tensor')} with {elements:,} elements; "
        f"{rest} small or excluded ones are always sent uncompressed. {kept} ({feedback}).",
    ]
    if wire._optimizer.kind:
        like_adam = wire._optimizer.kind == OptimizerKind.ADAM_LIKE
        what = ", which divides by a running second moment of the gradient" if like_adam else ""
        lines.append(f"The optimizer is {wire._optimizer.name}{what}.")
    lines += wire._choices.explain()
    total = stats["total"]
    if wire.step and total["bytes_sent"]:
        waited = 1e3 * stats["seconds_per_step"].get("waiting", 0.0)
        lines.append(
            f"In {wire.step} steps each rank sent {show_bytes(total['bytes_sent'])} for tensors "
            f"of {show_bytes(total['bytes_in'])}, and waited {waited:.3g} ms per step for the "
            "network."
        )
    by_ddp = wire._reducer.ledger.steps_of_ddp
    if by_ddp:
        lines.append(f"{plural(by_ddp, 'step')} of these had nothing to compress: DDP's own.")
    last = wire.decisions[-3:]
    if last:
        lines.append("The last decisions:")
        lines += [f"  step {d.step}: {d.tensors}: {d.compressor} ({d.why})" for d in last]
    return "\n".join(lines)


class ErrorMeter:
    """Notes ||p - C(p)|| / ||p|| of every tensor, p being the gradient and what was left out
    before; costs about one more encoding."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def measure(self, unit: Unit, update: Update, compressor: LocalCompressor, key: Key) -> None:
        left = None if update.residual is None else update.residual.clone()
        wanted = update.tensor.to(torch.float32 if left is None else left.dtype)
        wanted = wanted.clone() if left is None else wanted + left
        payload = compressor.encode(update.tensor, residual=left, key=key)
        if payload.non_finite:
            return
        payload.add_to(error := wanted.clone(), -1.0)
        sizes = unit.sizes
        for name, e, p in zip(
            unit.names, torch.split(error, sizes), torch.split(wanted, sizes), strict=True
        ):
            line = self._ledger.lines.setdefault(name, Line(p.numel()))
            size = float(torch.linalg.vector_norm(p))
            line.relative_error = float(torch.linalg.vector_norm(e)) / size if size else 0.0
