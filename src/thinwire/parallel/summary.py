"""Figures of a wire, as a dictionary and as a table."""

import io
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from thinwire.parallel.wire import Wire


def stats_of(wire: "Wire", norms: bool = True) -> dict[str, Any]:
    """What `Wire.stats` returns."""
    ledger = wire.reducer.ledger
    ledger.fold()
    tensors: dict[str, dict[str, Any]] = {}
    for name, line in ledger.lines.items():
        tensors[name] = {
            "numel": line.numel,
            "steps": line.steps,
            "bytes_in": line.bytes_in,
            "bytes_sent": round(line.bytes_sent),
            "ratio": line.ratio,
            "compressor": line.compressor,
            "collective": line.collective,
            "relative_error": line.relative_error,
            "residual_norm": _norm(wire, name) if norms else None,
        }
    norms_known = [row["residual_norm"] for row in tensors.values()]
    known = [norm for norm in norms_known if norm is not None]
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
            "wire_bytes": ledger.wire_bytes,
            "between_bytes": ledger.between_bytes,
            "ratio": bytes_in / ledger.bytes_sent if ledger.bytes_sent else math.inf,
            "exchanges": ledger.exchanges,
            "relative_error": sum(e * n for e, n in measured) / weight if weight else None,
            "residual_norm": math.hypot(*known) if known else None,
        },
        "seconds": dict(ledger.seconds),
        "policy": str(wire.policy),
        "decisions": [decision._asdict() for decision in wire.decisions],
    }


def _norm(wire: "Wire", name: str) -> float | None:
    """Of what waits to be sent."""
    if "residual" not in wire.reducer.feedback.parts or name not in wire.reducer.slabs.names():
        return None
    state, _ = wire.reducer.slabs.state(name)
    return float(torch.linalg.vector_norm(state["residual"])) if state else 0.0


def table_of(stats: dict[str, Any], rows: int) -> str:
    """What `Wire.summary` returns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    steps = max(1, stats["step"])
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("compressor")
    table.add_column("collective")
    for title in ("elements", "sent a step", "ratio", "error", "residual"):
        table.add_column(title, justify="right")
    found = sorted(stats["tensors"].items(), key=lambda item: -item[1]["bytes_sent"])
    for name, row in found[:rows]:
        table.add_row(
            name,
            row["compressor"],
            row["collective"],
            f"{row['numel']:,}",
            _bytes(row["bytes_sent"] / max(1, row["steps"])),
            _ratio(row["ratio"]),
            _short(row["relative_error"]),
            _short(row["residual_norm"]),
        )
    if len(found) > rows:
        table.add_row(f"... and {len(found) - rows} more")
    total = stats["total"]
    table.add_section()
    table.add_row(
        f"total of {stats['step']} steps",
        "",
        "",
        f"{sum(row['numel'] for row in stats['tensors'].values()):,}",
        _bytes(total["bytes_sent"] / steps),
        _ratio(total["ratio"]),
        _short(total["relative_error"]),
        _short(total["residual_norm"]),
    )
    out = io.StringIO()
    Console(file=out, width=110).print(table)
    times = ", ".join(f"{kind} {1e3 * s / steps:.1f} ms" for kind, s in stats["seconds"].items())
    return f"{out.getvalue().rstrip()}\na step: {times or 'nothing yet'}"


def explanation_of(wire: "Wire") -> str:
    """What `Wire.explain` returns."""
    stats = stats_of(wire, norms=False)
    governed, rest = wire.steering.targets, len(wire._parameters) - len(wire.steering.targets)
    elements = sum(target.numel for target in governed.values())
    feedback = wire.reducer.feedback
    kept = "What is left out is remembered and sent later" if feedback.parts else "Nothing is kept"
    lines = [
        f"{wire.policy} decides on {len(governed)} tensors with {elements:,} elements; {rest} "
        f"small or excluded ones always travel as they are. {kept} ({feedback}).",
        *wire.steering.chooser.explain(),
    ]
    total, seconds = stats["total"], stats["seconds"]
    if wire.step and total["bytes_sent"]:
        waited = 1e3 * seconds.get("waiting", 0.0) / wire.step
        lines.append(
            f"In {wire.step} steps each rank sent {_bytes(total['bytes_sent'])} for gradients of "
            f"{_bytes(total['bytes_in'])}, and waited {waited:.3g} ms a step for the network."
        )
    last = wire.decisions[-3:]
    if last:
        lines.append("The last decisions:")
        lines += [f"  step {d.step}: {d.tensors}: {d.compressor} ({d.why})" for d in last]
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _ratio(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:.1f}x"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
