"""A plan as a page to play with: sliders, curves and a table, computed in the browser.

The formulas are those of `thinwire.collectives.costs` in JavaScript (templates/plan.js); constants
and the costs of codecs come from here, so that there is one place for each.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from thinwire.collectives import choose, costs, message, order, stream, transport
from thinwire.compressors import JointCompressor, PowerSGD
from thinwire.formatting import show_count
from thinwire.parallel import plan as buckets
from thinwire.plan import predict, sizes
from thinwire.plan.predict import PlannedMethod, Setting
from thinwire.policies.codecs import CodecTable
from thinwire.report.figure import COLORS
from thinwire.report.template import environment

# What a slider reaches from and to, as powers of ten; curves span the rates. Farther for a setting
# beyond it: the page opens with what was asked for.
_SLIDERS = {
    "rate": (6.0, 12.0),
    "delay": (-5.0, -0.6),  # the lowest stands for none: others begin a decade above it
    "hosts": (math.log10(2), 3.02),
    "ranks_per_host": (0.0, math.log10(16)),
    "parameters": (5.0, 10.5),
    "step": (-3.0, 2.0),
}
# Buckets of more are too many for a browser that draws 49 steps of each method as a slider moves.
MOST_PARAMETERS = 10**11
_CONSTANTS = {
    costs: (
        *("FRAMING", "FIRST_WINDOW", "IDLE", "CROWDED", "PAIR", "HELD", "RINGS"),
        *("CROWDED_UPLINK", "SLICES_AT_ONCE", "FORWARD", "ROUNDING"),
    ),
    order: ("AT_ONCE",),
    choose: ("SMALL", "TWICE"),
    message: ("ALIGNMENT",),
    stream: ("LEAST_BYTES", "LEAST_MESSAGE", "LEAST_SHARE", "MOST"),
    transport: ("HEADER", "FIELDS", "LEAST_ROOM", "MOST_ROOM", "MOST_SUMMED", "ROOM"),
    sizes: (
        *("WIDTH", "FIRST_BUCKET", "BUCKET", "WIDTH_PER_LAYER", "MATRICES", "VECTORS"),
        *("ROWS", "COLUMNS"),
    ),
    predict: ("SLOWEST", "FASTEST", "HALVINGS"),
    buckets: ("DENSE_ENOUGH",),
}


def constants() -> dict[str, float]:
    """Of the formulas, by their names in Python."""
    return {name: getattr(module, name) for module, names in _CONSTANTS.items() for name in names}


def described_method(method: PlannedMethod, table: CodecTable) -> dict[str, Any]:
    """A method as the page knows it. Raises ValueError for one whose bytes depend on shapes."""
    compressor, rank = method.compressor, 0
    if method.plain:
        coding = costs.Coding("plain")
    elif isinstance(compressor, PowerSGD):
        rank = compressor.rank * compressor.iterations
        coding = table.coding(compressor, 0.0)
    elif isinstance(compressor, JointCompressor):
        raise ValueError(f"{method.name}: the page knows of joint compressors only PowerSGD")
    else:
        coding = table.coding(compressor)
    return {
        "name": method.name,
        "plain": method.plain,
        "coding": coding._asdict(),
        "rank": rank,
        "every": method.every,
        "fragments": method.fragments,
        "overlap": method.overlap,
    }


def network_as_json(network: costs.Interconnect) -> dict[str, Any]:
    """Without infinities, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in network._asdict().items()
    }


def sliders_for(begin: dict[str, float]) -> dict[str, tuple[float, float]]:
    """What each slider reaches from and to: also what it begins with."""
    found = dict(_SLIDERS)
    for name, (low, high) in _SLIDERS.items():
        if not begin[name]:
            continue  # no delay
        at, spare = math.log10(begin[name]), int(name == "delay")
        if at < low + spare:
            low = math.floor(at) - spare
        if at > high:
            high = math.ceil(at)
        found[name] = (low, high)
    return found


def plan_page(setting: Setting, methods: Sequence[PlannedMethod]) -> str:
    """The page as HTML."""
    if setting.parallel != "ddp":
        raise ValueError(f"--html shows steps of DDP, got --parallel {setting.parallel}")
    own = [PlannedMethod(predict.PLAIN, plain=True), *(m for m in methods if not m.plain)]
    if len(own) < 2:
        raise ValueError("--html needs a method besides plain DDP")
    if setting.model.parameters > MOST_PARAMETERS:
        raise ValueError(
            f"--html draws at most {MOST_PARAMETERS // 10**9}G parameters, got "
            f"{show_count(setting.model.parameters)}: leave it out, the tables go farther"
        )
    steps = [predict.step_of(each, setting).seconds for each in own]
    able = [i for i, each in enumerate(own) if i and not each.every] or [1]
    network = setting.network
    begin = {
        "rate": 8 * network.rate,
        "delay": network.delay,
        "hosts": network.hosts,
        "ranks_per_host": network.ranks_per_host,
        "parameters": setting.model.parameters,
        "step": setting.compute,
    }
    sliders = sliders_for(begin)
    data = {
        "constants": constants(),
        "methods": [described_method(each, setting.table) for each in own],
        "uncompressed": setting.table.coding(None)._asdict(),
        "network": network_as_json(network),
        "busy": setting.busy,
        "price": setting.price,
        "worth": predict.WORTH,
        "colors": COLORS,
        "range": [10**power for power in sliders["rate"]],
        "chosen": min(able, key=steps.__getitem__),
        "nodes": setting.nodes,
        "begin": begin,
    }
    # Nothing in the text may end the element that it stands in.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return (
        environment()
        .get_template("plan.html.j2")
        .render(
            title="Will compression pay? thinwire plan",
            data=Markup(text),
            sliders=sliders,
            table=setting.table,
            price=f"{setting.price:g}",
        )
    )


def write_plan_page(path: Path, setting: Setting, methods: Sequence[PlannedMethod]) -> None:
    """Write the page."""
    text = plan_page(setting, methods)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
