"""What the documents show must run: the README's example and every docstring's."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import thinwire as tw

ROOT = Path(__file__).parent.parent
ROOMS = (
    *("compressors", "collectives", "pipeline", "feedback", "reducer", "policies", "methods"),
    *("optim", "parallel", "workloads"),
)


def modules_of(room: str) -> list[str]:
    """A room is a package of modules, or a module by itself."""
    found = importlib.import_module(f"thinwire.{room}")
    inside = pkgutil.iter_modules(getattr(found, "__path__", ()))
    return [f"{found.__name__}.{module.name}" for module in inside] or [found.__name__]


MODULES = [name for room in ROOMS for name in modules_of(room)]


def test_readme_example_runs(capsys):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code, "README.md has no Python example"
    for block in code:
        exec(compile(block, "README.md", "exec"), {})
    assert "times smaller" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_every_compressor_has_an_example_and_a_line_on_it():
    for name, line in tw.list_compressors().items():
        kind = type(tw.parse(_spec(name)))
        assert line.endswith("."), f"{name}: the first line of the docstring is a sentence"
        assert ">>> " in (kind.__doc__ or ""), f"{name}: no example in the docstring"


def _spec(name: str) -> str:
    needs = {"cast": "fp16", "quantize": "4", "qsgd": "7", "bernoulli": "0.5", "threshold": "1"}
    ratio = {"topk": "0.5", "randomk": "0.5", "tiered": "0.5"}
    argument = {**needs, **ratio}.get(name)
    return f"{name}:{argument}" if argument else name


def test_relative_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
