"""The page to play with: the formulas of Python, fit for phones, dark rooms and keyboards."""

import json
import math
import random
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, evaluate, measure

from thinwire.cli import main
from thinwire.collectives.costs import Interconnect
from thinwire.plan.predict import (
    METHODS,
    PLAIN,
    PlannedMethod,
    Setting,
    break_even,
    read_method,
    step_of,
)
from thinwire.plan.sizes import UniformModel
from thinwire.policies.codecs import shipped
from thinwire.report.plan_page import (
    constants,
    described_method,
    network_as_json,
    plan_page,
)

NO_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
FIGURES = ("encode", "network", "decode", "hidden", "seconds", "sent", "egress")
FORMULAS = resources.files("thinwire.report").joinpath("templates", "plan.js").read_text()


def setting(**network: Any) -> Setting:
    table = shipped()["cores-1"]
    own = {"start": table.start, "peer": table.peer, "inside": table.inside} | network
    return Setting(UniformModel(125_000_000), Interconnect(**own), table, 0.8)


def page(tmp_path: Path) -> Path:
    path = tmp_path / "plan.html"
    methods = [read_method(name) for name in METHODS]
    path.write_text(plan_page(setting(hosts=16, rate=1.25e9, delay=1e-3), methods))
    return path


def drawn(count: int) -> list[tuple[PlannedMethod, Setting]]:
    """Settings by chance, over all that the formulas tell apart."""
    chance = random.Random(1)
    names = (*METHODS, "none", "streaming-diloco:24", "topk:0.001", "randomk:0.01")
    methods = [PlannedMethod(PLAIN, plain=True), *map(read_method, names)]
    tables = list(shipped().values())
    found = []
    for _ in range(count):
        table = chance.choice(tables)
        racks = chance.choice((1, 1, 2, 4))
        network = Interconnect(
            hosts=racks * chance.choice((1, 2, 3, 8, 50)),
            rate=10 ** chance.uniform(5, 11),
            ranks_per_host=chance.choice((1, 1, 2, 8)),
            delay=chance.choice((0.0, 10 ** chance.uniform(-5, -0.7))),
            racks=racks,
            uplink=10 ** chance.uniform(5, 11) if racks > 1 else math.inf,
            uplink_delay=10 ** chance.uniform(-4, -1) if racks > 1 else 0.0,
            inside=table.inside,
            start=table.start,
            peer=table.peer,
            together=chance.choice((math.inf, 1e9)),
            trees=chance.random() < 0.3,
        )
        model = UniformModel(round(10 ** chance.uniform(3, 9.5)))
        compute = 10 ** chance.uniform(-3, 1.5)
        busy, nodes = chance.choice((0.0, 1.0)), chance.random() < 0.4
        own = Setting(model, network, table, compute, nodes=nodes, busy=busy)
        found.append((chance.choice(methods), own))
    return found


def in_the_browser(cases: list[tuple[PlannedMethod, Setting]], folder: Path) -> list[Any]:
    given = [
        {
            "method": described_method(method, own.table),
            "plain": described_method(PlannedMethod(PLAIN, plain=True), own.table),
            "uncompressed": own.table.coding(None)._asdict(),
            "setting": {
                "network": network_as_json(own.network),
                "parameters": own.model.parameters,
                "compute": own.compute,
                "busy": own.busy,
                "nodes": own.nodes,
            },
        }
        for method, own in cases
    ]
    script = f"""{FORMULAS}
    const {{ stepOf, breakEven }} = planner({json.dumps(constants())});
    return {json.dumps(given)}.map(each => {{
      const network = each.setting.network;
      for (const name of ["uplink", "together"]) network[name] ??= Infinity;
      const even = breakEven(each.method, each.plain, each.setting, each.uncompressed);
      return {{ ...stepOf(each.method, each.setting, each.uncompressed),
        even: even === Infinity ? null : even }};
    }});"""
    found: list[Any] = evaluate(script, folder)
    return found


def check_equal(count: int, folder: Path) -> None:
    cases = drawn(count)
    for (method, own), found in zip(cases, in_the_browser(cases, folder), strict=True):
        cost = step_of(method, own)
        for name in FIGURES:
            # Hidden seconds are a difference of sums: they keep the sums' rounding.
            slack = 1e-9 * cost.seconds if name == "hidden" else 0.0
            expected = pytest.approx(getattr(cost, name), rel=1e-9, abs=slack + 1e-15)
            assert found[name] == expected, (name, method, own)
        even = math.inf if found["even"] is None else found["even"]
        # Where both curves run together, rounding decides which side of the other is.
        if even != pytest.approx(break_even(method, own), rel=1e-6):
            there = own.at((even if 0 < even < math.inf else 1e13) / 8)
            plain = step_of(PlannedMethod(PLAIN, plain=True), there).seconds
            assert step_of(method, there).seconds == pytest.approx(plain, rel=1e-6)


@NO_BROWSER
def test_formulas_are_the_same_in_javascript(tmp_path: Path) -> None:
    check_equal(60, tmp_path)


@NO_BROWSER
@pytest.mark.slow
def test_formulas_are_the_same_in_a_thousand_settings(tmp_path: Path) -> None:
    check_equal(1000, tmp_path)


@NO_BROWSER
@pytest.mark.parametrize(
    ("scheme", "paper"),
    [("1", "rgb(255, 255, 255)"), ("0", "rgb(22, 24, 28)")],
    ids=["light", "dark"],
)
def test_the_page_fits_desktops_and_phones(scheme: str, paper: str, tmp_path: Path) -> None:
    (tmp_path / "browser").mkdir()
    option = f"--blink-settings=preferredColorScheme={scheme}"
    frames, said = measure(page(tmp_path), tmp_path / "browser", option)
    assert "CONSOLE" not in said, said
    assert [frame["width"] for frame in frames] == [1280, 390]
    for frame in frames:
        assert frame["paper"] == paper
        assert frame["needs"] <= frame["width"], "the page scrolls sideways"
        assert frame["loaded"] == [], "the page loads something"
        assert len(frame["pictures"]) == 2
        assert all(0 <= left < right <= frame["width"] for left, right, _ in frame["pictures"])


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    text = page(tmp_path).read_text()
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org)", text)
    # Every control has a label of its own, and what changes is announced.
    controls = re.findall(r'<(?:input|select)[^>]* id="([^"]+)"', text)
    assert {"rate", "delay", "hosts", "parameters", "step", "method"} <= set(controls)
    for control in controls:
        assert f'for="{control}"' in text or re.search(
            rf'<label[^>]*><input[^>]*id="{control}"', text
        )
    assert 'aria-live="polite"' in text


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": 1, "delay": 5e-6, "rate": 1e4},
        {"hosts": 5000, "ranks_per_host": 100, "delay": 3.0, "rate": 1e13},
        {"hosts": 2, "delay": 1e-5, "rate": 1e6},
        {"hosts": 16, "rate": 1e8},
    ],
)
@pytest.mark.parametrize(("parameters", "step"), [(10, 1e-5), (10**8, 0.5), (70 * 10**9, 500.0)])
def test_the_page_opens_with_what_was_asked_for(
    change: dict[str, Any], parameters: int, step: float
) -> None:
    own = replace(setting(**change), model=UniformModel(parameters), compute=step)
    text = plan_page(own, [read_method("powersgd:4")])
    (data,) = re.findall(r'id="data">(.*)</script>', text)
    sliders = re.findall(r'type="range" id="(\w+)" min="([^"]+)" max="([^"]+)"', text)
    begin = json.loads(data)["begin"]
    assert {name for name, *_ in sliders} == begin.keys()
    for name, low, high in sliders:
        if name == "delay":  # the lowest stands for none
            assert not begin[name] or float(low) < math.log10(begin[name]) <= float(high)
        else:
            assert float(low) <= math.log10(begin[name]) <= float(high), name


def test_more_than_a_browser_can_draw_is_refused() -> None:
    own = replace(setting(hosts=2, rate=1e9), model=UniformModel(10**11 + 1))
    with pytest.raises(ValueError, match="--html draws at most 100G parameters"):
        plan_page(own, [read_method("quantize:4")])


def test_text_cannot_leave_its_place() -> None:
    own = setting(hosts=2, rate=1e9)
    method = PlannedMethod("</script><b>", read_method("quantize:4").compressor)
    assert "</script><b>" not in plan_page(own, [method])


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "plan.html"
    words = ["plan", "--parameters", "1M", "--step", "50ms", "--machine", "cores-1"]
    assert main([*words, "--html", str(path)]) == 0
    assert "Will compression pay?" in path.read_text()
    assert str(path) in capsys.readouterr().err
    assert main([*words, "--html", str(path), "--parallel", "fsdp"]) == 2
    assert "DDP" in capsys.readouterr().err
    assert main([*words, "--html", str(path), "--with", "arc:0.2"]) == 2
    assert "arc" in capsys.readouterr().err
