"""Imports point one way, a class name stands for one class, and `import thinwire` stays light.

Source files are parsed, not imported: imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import thinwire as tw

SRC = Path(__file__).resolve().parents[1] / "src"
FACE = "thinwire"  # thinwire/__init__.py: may import anything; of subpackages only cli may
SUBPACKAGES = (
    *("kernels", "frames", "compressors", "collectives", "pipeline", "feedback", "reducer"),
    *("policies", "methods", "optim", "parallel", "integrations", "workloads", "plan", "lab"),
    *("compare", "report", "bench", FACE, "cli"),
    "__main__",
)
BASE = frozenset(
    {"check", "errors", "formatting", "machine", "spec", "telemetry", "torch_internals"}
)
MAY_TALK = frozenset({*SUBPACKAGES[SUBPACKAGES.index("collectives") :], "torch_internals"}) - {FACE}


class Module(NamedTuple):
    name: str
    source: str
    is_package: bool = False

    @property
    def subpackage(self) -> str:
        return subpackage_of(self.name)


def subpackage_of(name: str) -> str:
    """`thinwire.frames.frame` is in subpackage frames; `thinwire` is the face."""
    return name.split(".")[1] if "." in name else FACE


def read(path: Path) -> Module:
    parts = path.relative_to(SRC).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, path.read_text(encoding="utf-8"), is_package)


MODULES = [read(path) for path in sorted((SRC / "thinwire").rglob("*.py"))]


def imported(module: Module) -> set[str]:
    """Absolute names of all a module imports, plus `torch.distributed` reached by attribute."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.source)):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=source, names=aliases, level=level):
                base = package[: len(package) - level + 1] if level else []
                prefix = ".".join([*base, source] if source else base)
                names |= {f"{prefix}.{alias.name}" for alias in aliases}
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                names.add("torch.distributed")
    return names


def imports_any(module: Module, *targets: str) -> bool:
    return any(f"{name}.".startswith(f"{t}.") for name in imported(module) for t in targets)


def wrong_way(module: Module) -> list[str]:
    """The imports of a module that point to its right, as `importer -> imported`."""
    if module.subpackage == FACE:
        return []
    reach = SUBPACKAGES.index(module.subpackage) + 1 if module.subpackage in SUBPACKAGES else 0
    allowed = BASE | set(SUBPACKAGES[:reach])
    wrong = []
    for name in sorted(imported(module)):
        if name == FACE or name.startswith(f"{FACE}."):
            found = subpackage_of(name)
            # `from thinwire import TopK` names no subpackage: it is an import of the face.
            if (found if found in BASE.union(SUBPACKAGES) else FACE) not in allowed:
                wrong.append(f"{module.name} -> {name}")
    return wrong


def shared_class_names(modules: list[Module]) -> list[str]:
    """Names that more than one class has, private and nested ones included, with their places."""
    places: dict[str, list[str]] = {}
    # Adapters of different frameworks have the same words: tw.lightning.Compression.
    for module in (m for m in modules if m.subpackage != "integrations"):
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module.name}, line {node.lineno}")
    return [f"{name} ({'; '.join(found)})" for name, found in places.items() if len(found) > 1]


def test_every_module_stands_in_a_subpackage() -> None:
    assert MODULES, f"no source found under {SRC}: correct SRC in this test"
    lost = [m.name for m in MODULES if m.subpackage not in BASE.union(SUBPACKAGES)]
    assert not lost, (
        f"{lost} stand in no subpackage: move them into one, or give SUBPACKAGES a new one"
    )


def test_imports_point_one_way() -> None:
    wrong = [edge for module in MODULES for edge in wrong_way(module)]
    assert not wrong, (
        f"{wrong} point to the right in {' -> '.join(SUBPACKAGES)}: move the shared part to the "
        "left, or pass it in as an argument"
    )


def test_only_collectives_and_later_subpackages_talk() -> None:
    wrong = [
        m.name
        for m in MODULES
        if m.subpackage not in MAY_TALK and imports_any(m, "torch.distributed")
    ]
    assert not wrong, f"{wrong} use torch.distributed: move what talks to collectives"


def test_nothing_imports_pickle() -> None:
    wrong = [m.name for m in MODULES if imports_any(m, "pickle")]
    assert not wrong, f"{wrong} import pickle, which runs what it reads: send a frame instead"


def test_no_two_classes_share_a_name() -> None:
    wrong = shared_class_names(MODULES)
    assert not wrong, f"one name for two classes, rename one of each: {wrong}"


def test_a_shared_class_name_is_detected() -> None:
    one = Module("thinwire.kernels.topk", "class _Turn: ...")
    other = Module("thinwire.frames.frame", "def f():\n    class _Turn: ...")
    assert not shared_class_names([one])
    places = "_Turn (thinwire.kernels.topk, line 1; thinwire.frames.frame, line 2)"
    assert shared_class_names([one, other]) == [places]


@pytest.mark.parametrize(
    "module",
    [
        Module("thinwire.kernels.topk", "import thinwire.frames.frame"),
        Module("thinwire.frames.frame", "from thinwire import compressors"),
        Module("thinwire.compressors.topk", "def f():\n    from ..collectives import gather"),
        Module("thinwire.compressors", "from .. import feedback", is_package=True),
        Module("thinwire.bench", "from thinwire import TopK"),
        Module("thinwire.errors", "from .kernels import topk"),
        Module("thinwire.attic.topk", "from ..kernels import topk"),
    ],
    ids=lambda module: module.name,
)
def test_a_wrong_import_is_detected(module: Module) -> None:
    assert wrong_way(module), f"{module} passes although it points to the right: mend wrong_way"


@pytest.mark.parametrize(
    "source",
    ["import torch.distributed as d", "from torch import distributed", "torch.distributed.barrier"],
)
def test_talking_is_detected(source: str) -> None:
    module = Module("thinwire.frames.frame", source)
    assert imports_any(module, "torch.distributed"), f"{source!r} is not seen: mend imported"


@pytest.mark.parametrize(
    "module",
    [
        Module("thinwire.frames", "from . import frame\nfrom .frame import Frame", is_package=True),
        Module("thinwire.compressors.topk", "from ..frames import frame\nfrom ..errors import E"),
        Module("thinwire.telemetry", "import torch\nfrom .errors import E"),
        Module("thinwire.cli", "from thinwire import __version__"),
    ],
    ids=lambda module: module.name,
)
def test_a_right_import_passes(module: Module) -> None:
    assert not wrong_way(module), f"{module} is refused although it points left: mend wrong_way"


def test_the_typed_script_uses_every_public_name() -> None:
    tree = ast.parse((Path(__file__).parent / "typed_user_script.py").read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "tw"
    }
    lacking = sorted(set(tw.__all__) - used)
    assert not lacking, f"tests/typed_user_script.py does not use {lacking}: add a line for each"


def test_import_is_light() -> None:
    # `import torch` alone already loads much of torch.distributed, so only what is new counts.
    probe = (
        "import sys, torch; old = set(sys.modules); import thinwire; print(*set(sys.modules) - old)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"`import thinwire` fails, mend it first:\n{done.stderr}"
    heavy = (
        *("jinja2", "matplotlib", "numba", "pydantic", "rich", "torch.distributed", "triton"),
        "zstandard",
    )
    loaded = [
        n for n in sorted(done.stdout.split()) if f"{n}.".startswith(tuple(f"{h}." for h in heavy))
    ]
    assert not loaded, (
        f"`import thinwire` loads {loaded}: import them in the function that needs them"
    )
