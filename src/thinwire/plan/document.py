"""A plan as a table for the terminal and as a JSON document."""

import math
from collections.abc import Sequence
from typing import Any

from thinwire.formatting import (
    NOTHING,
    TableColumn,
    show_bytes,
    show_number,
    show_rate,
    show_ratio,
    show_seconds,
    table,
    text_of,
)
from thinwire.plan.predict import Prediction, Setting, advice

SCHEMA = "thinwire.plan/1"
MILLION = 1e6
NAME = 25  # letters of a method before it is broken


def document_of(
    predictions: Sequence[Prediction], setting: Setting, words: dict[str, Any]
) -> dict[str, Any]:
    """All of it in plain types, ready for `json.dumps`.

    Args:
        words: what was asked for, as it was written.
    """
    network = setting.network
    return {
        "schema": SCHEMA,
        "settings": words,
        "network": {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in network._asdict().items()
        },
        "codecs": {
            "name": setting.table.name,
            "machine": setting.table.machine,
            "origin": setting.table.origin,
        },
        "parameters": setting.model.parameters,
        "compute_seconds": setting.compute,
        "price_per_gigabyte": setting.price,
        "advice": advice(predictions, words.get("optimizer"), setting),
        "methods": [each.as_json() for each in predictions],
    }


def tables_of(predictions: Sequence[Prediction]) -> str:
    """Two tables that fit 80 columns: where the time goes, and what it comes to."""
    name = TableColumn("per step and rank", wrap=True)

    def right(*titles: str) -> list[TableColumn]:
        return [TableColumn(title, right=True) for title in titles]

    time = table(
        [name, *right("sent", "encode", "network", "decode", "hidden", "step")],
        [
            [
                _broken(each.method.name),
                show_bytes(each.cost.sent),
                *(
                    show_seconds(seconds) if seconds else NOTHING
                    for seconds in (each.cost.encode, each.cost.network, each.cost.decode)
                ),
                show_seconds(each.cost.hidden) if each.cost.hidden else NOTHING,
                show_seconds(each.cost.seconds),
            ]
            for each in predictions
        ],
    )
    gain = table(
        [
            TableColumn("1,000 steps of all hosts"),
            *right("faster", "efficiency", "egress", "price", "stops paying at"),
        ],
        [
            [
                _broken(each.method.name),
                show_ratio(each.speedup),
                f"{100 * each.cost.efficiency:.0f} %",
                show_bytes(each.egress_bytes),
                f"${show_number(each.dollars)}",
                _stops(each),
            ]
            for each in predictions
        ],
    )
    return f"{text_of(time)}\n\n{text_of(gain)}"


def _broken(name: str) -> str:
    """On several lines: a spec has no spaces at which a table could break it."""
    lines = [""]
    for part in name.replace(",", ",\n").replace("|", "|\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > NAME:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _stops(each: Prediction) -> str:
    if each.method.plain:
        return NOTHING
    if math.isinf(each.break_even):
        return "never"
    return show_rate(each.break_even) if each.break_even else "never pays"
