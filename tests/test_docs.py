"""What the documents show must run, lead somewhere, and say what the records say."""

import ast
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.lab import why_not

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import figures

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted(DOCS.rglob("*.md"))
SUBPACKAGES = (
    *("compressors", "collectives", "pipeline", "feedback", "reducer", "policies", "methods"),
    *("optim", "parallel", "workloads"),
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def modules_of(subpackage: str) -> list[str]:
    """Of a package of modules, or a module by itself."""
    found = importlib.import_module(f"thinwire.{subpackage}")
    inside = pkgutil.iter_modules(getattr(found, "__path__", ()))
    return [f"{found.__name__}.{module.name}" for module in inside] or [found.__name__]


MODULES = [name for each in SUBPACKAGES for name in modules_of(each)]


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


# Code blocks. All blocks of a page run one after the other, in one process and one process group of
# one rank: `python` blocks are whole programs, `py` blocks parts of one, which find what they speak
# of (`model`, `optimizer`, `batches`, ...) already there.

ELSEWHERE = {  # block: why it does not run here
    "docs/guides/fsdp.md": "test_fsdp.py, test_hsdp.py: needs several ranks, a mesh of 16 GPUs",
    "docs/guides/integrations.md": "tests/integrations, with the frameworks installed",
    "docs/tutorials/from-deepspeed.md": "tests/integrations/deepspeed_training.py",
    "docs/tutorials/from-horovod.md": "test_horovod.py, on two ranks",
}
NEEDS_LAB = "docs/guides/lab.md"
FLOWER = re.compile(r"ClientApp|from flwr")  # in tests/integrations


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of Python; indented ones belong to a list."""
    found = re.findall(r"^( *)```(python|py)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.M)
    return [
        (language, re.sub(rf"^{indent}", "", text, flags=re.M)) for indent, language, text in found
    ]


WITH_CODE = [page for page in PAGES if blocks_of(page)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.out(torch.relu(self.embed(x)))


def fresh(model):
    """What is attached to the model is detached: lines below each other are ways to choose from."""
    wire = tw.wire_of(model) if isinstance(model, nn.Module) else None
    if wire is not None:
        wire.detach()


def scope():
    """What parts of programs speak of."""
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    thin = types.ModuleType("thinwire")
    thin.__dict__.update({name: getattr(tw, name) for name in tw.__all__})

    def attach(model, *args, **options):
        fresh(model)
        if "optimizer" in options:  # of the model as it is now
            options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return tw.attach(model, *args, **options)

    def local_steps(model, *args, **options):
        fresh(model)
        return tw.LocalSteps(model, *args, **options)

    thin.attach, thin.LocalSteps = attach, local_steps
    batch = (torch.randn(8, 32), torch.randint(4, (8,)))
    wire = tw.attach(model, "topk:0.01", feedback="ef14")
    loss_of(model, batch).backward()
    other = Net()
    local = tw.LocalSteps(other, torch.optim.SGD(other.parameters(), lr=0.1), "local-sgd:2")
    return {
        "DistributedDataParallel": DistributedDataParallel,
        "Net": Net,
        "batches": iter([batch] * 200),
        "dist": _already_there(dist),
        "evaluate": lambda model: 1.0,
        "gradient": torch.randn(100, 100),
        "group": None,
        "loader": [batch] * 2,
        "local": local,
        "loss": nn.functional.cross_entropy,
        "loss_of": loss_of,
        "model": model,
        "net": net,
        "nn": nn,
        "optimizer": optimizer,
        "residual": torch.zeros(100, 100),
        "scaler": torch.amp.GradScaler("cpu"),
        "schedule": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "step": 0,
        "torch": torch,
        "tw": thin,
        "validate": lambda model: 90.0,
        "wire": wire,
        "x": torch.randn(64, 64),
    }


def _already_there(module):
    """torch.distributed whose group is made already."""
    found = types.SimpleNamespace(**{n: getattr(module, n) for n in dir(module) if n[0] != "_"})
    found.init_process_group = lambda *args, **options: None
    return found


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder of its own, and an environment as torchrun gives it to a single rank."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_the_documents_runs(page, alone, tmp_path, capsys):
    name = name_of(page)
    parts = None
    for i, (language, text) in enumerate(blocks_of(page)):
        where = f"{name}, block {i + 1}"
        if ">>> " in text:
            test = doctest.DocTestParser().get_doctest(text, {"tw": tw}, where, name, 0)
            assert doctest.DocTestRunner().run(test).failed == 0
        elif (name in ELSEWHERE and language == "py") or FLOWER.search(text):
            compile(text, where, "exec")
        elif language == "python" and name not in ("docs/tutorials/from-horovod.md", NEEDS_LAB):
            if "init_process_group(" in text:
                _leave()
            exec(compile(text, where, "exec"), {"__name__": "__main__"})
        elif language == "py":
            parts = parts or _parts(tmp_path)
            _run(text, where, parts)
        else:
            compile(text, where, "exec")


def _leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def _parts(folder):
    _leave()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tw.policies.Layerwise({"*": "quantize:4"}).save(folder / "settings.toml")
    return scope()


def _run(text, where, parts):
    program = compile(text, where, "exec")
    if "dcp." in text or "nodes=8" in text:  # test_ddp_checkpoints.py, test_hierarchical.py
        return
    if "init_process_group(" in text and "import torch.distributed" in text:
        _leave()  # it means torch's own, and not `_already_there`
    if "import thinwire" in text:  # in place of the one that does this with every attach
        fresh(parts["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw.errors.ThinwireWarning)
        exec(program, parts)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no lab can be made here: {why_not()}")
def test_code_of_the_lab_page_runs(alone, tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    program = "\n".join(text for _, text in blocks_of(ROOT / NEEDS_LAB))
    path = tmp_path / "page.py"
    path.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_first_tutorial_runs_as_it_says(tmp_path):
    ((_, program),) = blocks_of(DOCS / "tutorials" / "first-training.md")
    path = tmp_path / "train.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "step 30: loss" in done.stdout
    assert "topk:0.01" in done.stdout


def test_readme_example_runs(capsys):
    program = next(text for language, text in blocks_of(ROOT / "README.md") if language == "python")
    exec(compile(program, "README.md", "exec"), {})
    assert "times smaller" in capsys.readouterr().out


# Links


def anchors_of(page: Path) -> set[str]:
    """As GitHub and MyST make them from headings."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.M)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each) is not None for each in found)
        found.add(f"{slug}-{count}" if count else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.M)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        there = page.parent / target if target else page
        assert there.exists(), f"{name_of(page)} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors_of(there), f"{name_of(page)} links to {target}#{anchor}"


def test_code_messages_and_pages_name_pages_that_exist():
    code = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    for path in [*code, *(ROOT / "examples").glob("*.py"), *PAGES]:
        for target in re.findall(r"(?<![\w/])docs/[\w/-]+(?:\.md|/)", path.read_text()):
            assert (ROOT / target).exists(), f"{name_of(path)} names {target}"


# Figures


def test_figures_are_those_of_the_records():
    records = figures.newest()
    for page in figures.PAGES:
        text = page.read_text()
        same = figures.rewritten(page, text, records) == text
        assert same, f"{name_of(page)} has other figures than the records: run `make figures`"


def test_every_study_is_on_the_page_of_benchmarks():
    text = (DOCS / "benchmarks.md").read_text()
    for family in figures.newest():
        shown = f"<!-- figures {family} -->" in text or f"[{family}](" in text
        assert shown, f"docs/benchmarks.md shows nothing of {family}"


def test_the_readme_has_measured_figures_in_blocks_only():
    text = figures.BLOCK.sub("", (ROOT / "README.md").read_text())
    text = re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.DOTALL | re.M)
    found = re.findall(r"\d[\d.,]* (?:times|%|ms|MB|points|seconds|s\b)[^\n]*", text)
    assert not found, f"README.md: figures that no record vouches for: {found}"
    assert 90 <= len((ROOT / "README.md").read_text().splitlines()) <= 130


# The site


def documented() -> set[str]:
    """Whole names, of all pages of the API reference."""
    pages = "\n".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    return set(re.findall(r"auto(?:class|function|exception|data|module):: ([\w.]+)", pages))


def test_every_public_name_is_in_the_reference():
    last = {name.rpartition(".")[2] for name in documented()}
    modules = [tw, *(getattr(tw, name) for name in tw.__all__ if _is_module(name))]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            public = not (name == "__version__" or _is_module(name) or name.isupper())
            assert not public or name in last, f"docs/reference/api: {module.__name__}.{name}"


def _is_module(name: str) -> bool:
    return isinstance(getattr(tw, name, None), types.ModuleType)


def public_names(path: Path) -> list[str]:
    """A module's `__all__`, read and not imported: frameworks need not be installed."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_every_public_name_of_an_integration_is_in_the_reference():
    folder = ROOT / "src" / "thinwire" / "integrations"
    wanted = {
        f"thinwire.integrations.{path.stem}.{name}"
        for path in folder.glob("*.py")
        for name in public_names(path)
    }
    assert wanted
    assert wanted <= documented(), f"docs/reference/api: {sorted(wanted - documented())}"


def test_all_pages_are_in_an_index():
    """The site's menu has them by patterns; whoever reads the folder needs a link."""
    for folder in ("tutorials", "guides", "reference", "explanation"):
        index = (DOCS / folder / "README.md").read_text()
        for page in (DOCS / folder).glob("*.md"):
            assert page.name == "README.md" or f"({page.name})" in index, f"{folder}/{page.name}"
    decisions = (DOCS / "decisions" / "README.md").read_text()
    for page in (DOCS / "decisions").glob("0*.md"):
        assert f"({page.name})" in decisions, page.name
