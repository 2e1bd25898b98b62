"""The Triton kernels: chosen for CUDA, tested in the interpreter, compiled for GPUs not there."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from thinwire import kernels
from thinwire.errors import MissingExtraError, ThinwireWarning

TESTS = Path(__file__).parent
CUDA, META = torch.device("cuda"), torch.device("meta")
LIMIT = 600  # seconds, on a busy machine; CI takes about 60 for each

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def release() -> tuple[int, ...]:
    try:
        return tuple(map(int, metadata.version("triton").split(".")[:2]))
    except metadata.PackageNotFoundError:
        return ()


needs_interpreter = pytest.mark.skipif(
    release() < (3, 9), reason="no Triton, or one before 3.9, whose interpreter knows too little"
)


@pytest.fixture(autouse=True)
def forgetful():
    """What was found out about Triton is found out anew."""
    yield
    kernels._has_triton.cache_clear()
    kernels._load.cache_clear()


def python(*words: str, **environment: str) -> str:
    """What a process prints; fails with it unless the process ends well."""
    folders = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "interpreted")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **environment}
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
    return done.stdout


def interpreted(marks: str, **environment: str) -> None:
    """Run the tests in tests/interpreted with these marks."""
    words = "-m", "pytest", str(TESTS / "interpreted"), "-m", marks, "-p", "no:cacheprovider"
    said = python(*words, "-x", "--timeout", str(LIMIT), TRITON_INTERPRET="1", **environment)
    assert " passed" in said or "[100%]" in said


@needs_interpreter
@pytest.mark.timeout(LIMIT)
def test_kernels_are_right_in_the_interpreter():
    interpreted("not slow")


@needs_interpreter
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
def test_the_whole_contract_holds_in_the_interpreter_and_all_kernels_compile(tmp_path):
    """For an A100, without a GPU: what the interpreter has run is what the compiler takes."""
    launches = tmp_path / "launches"
    interpreted("slow", THINWIRE_TEST_LAUNCHES=str(launches))
    # Every fourth: one takes a third of a second. TRITON_INTERPRET must not be set.
    lines = launches.read_text().splitlines()
    launches.write_text("\n".join(lines[::4]))
    env = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    said = json.loads(
        python(str(TESTS / "interpreted" / "compile_launches.py"), str(launches), "sm_80", **env)
    )
    assert said == {"compiled": len(lines[::4]), "wrong": {}}


@needs_triton
def test_triton_is_chosen_for_cuda():
    assert kernels.name_on(CUDA) == "triton"
    assert kernels.on(CUDA).__name__ == "thinwire.kernels.triton"
    assert kernels.name_on(torch.device("cpu")) == "cpu"
    assert kernels.name_on(META) == "reference"
    assert not kernels.are_compiled(CUDA)


def test_without_triton_the_reference_is_chosen(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernels.name_on(CUDA) == "reference"
    with pytest.raises(MissingExtraError, match=r"pip install 'thinwire\[triton\]'"):
        kernels.use("triton").__enter__()


@needs_triton
def test_a_triton_that_we_do_not_know_gives_a_warning(monkeypatch):
    def fail(name):
        raise AttributeError("module 'triton' has no attribute 'jit'")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.warns(ThinwireWarning, match="cannot be loaded .AttributeError: module 'triton'"):
        assert kernels.name_on(CUDA) == "reference"
