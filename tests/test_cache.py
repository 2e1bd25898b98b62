"""Where compiled kernels are kept."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.kernels import cache
from thinwire.kernels.cpu.jit import jit

SRC = Path(__file__).resolve().parents[1] / "src"
NOWHERE = "/proc/nowhere"  # nothing can be made there, not even by root
VARIABLES = ("HOME", "NUMBA_CACHE_DIR", "THINWIRE_CACHE_DIR", "XDG_CACHE_HOME")

# `pack` takes the smallest of all kernels.
ENCODE = """
import logging, torch, thinwire as tw
logging.basicConfig(format="%(message)s")
x = torch.arange(100.0)
frame = tw.pack(tw.NoCompression().encode(x))
assert torch.equal(tw.decode(frame), x)
from thinwire.kernels import cache
print(cache.directory())
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """A copy of the package where nothing can be kept beside the sources, not even by root."""
    left_out = shutil.ignore_patterns("__pycache__", "workloads", "templates")
    shutil.copytree(SRC / "thinwire", tmp_path / "thinwire", ignore=left_out)
    for folder in {source.parent for source in (tmp_path / "thinwire").rglob("*.py")}:
        (folder / "__pycache__").touch()
    return tmp_path


@pytest.mark.slow
def test_a_read_only_installation_without_a_home_encodes(read_only):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    temporary = read_only / "temporary"
    temporary.mkdir()
    environment |= {"HOME": NOWHERE, "TMPDIR": str(temporary), "PYTHONPATH": str(read_only)}
    done = subprocess.run(
        [sys.executable, "-c", ENCODE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.strip())
    assert place.is_relative_to(temporary)
    assert list(place.rglob("*.nbi"))
    assert place.parent.stat().st_mode & 0o777 == 0o700  # compiled code is this user's alone
    assert done.stderr.count("compiled kernels are kept in") == 1
    assert "THINWIRE_CACHE_DIR" in done.stderr


@pytest.fixture
def found(monkeypatch, tmp_path):
    """The directory that a process with these variables would find; tmp_path is its temporary."""
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))

    def find(**variables: str) -> Path:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return cache.directory.__wrapped__().parent

    return find


def test_the_most_special_variable_decides(found, tmp_path):
    names = {
        "THINWIRE_CACHE_DIR": tmp_path / "a",
        "NUMBA_CACHE_DIR": tmp_path / "b",
        "XDG_CACHE_HOME": tmp_path / "c",
        "HOME": tmp_path / "d",
    }
    variables = {name: str(path) for name, path in names.items()}
    assert found(**variables) == tmp_path / "a"
    del variables["THINWIRE_CACHE_DIR"]
    assert found(**variables) == tmp_path / "b"
    del variables["NUMBA_CACHE_DIR"]
    assert found(**variables) == tmp_path / "c" / "thinwire"
    del variables["XDG_CACHE_HOME"]
    assert found(**variables) == tmp_path / "d" / ".cache" / "thinwire"
    # What cannot be written to is passed over.
    assert found(**variables, THINWIRE_CACHE_DIR=NOWHERE) == tmp_path / "d" / ".cache" / "thinwire"


def test_what_an_image_holds_is_read_where_it_cannot_be_written_to(found, tmp_path, monkeypatch):
    image = {"THINWIRE_CACHE_DIR": str(tmp_path / "image"), "HOME": NOWHERE}
    place = found(**image)
    name = cache.directory.__wrapped__().name
    (place / name / "compiled.nbi").write_text("code")
    monkeypatch.setattr(cache, "_is_writable", lambda place: False)
    copy = found(**image) / name
    assert copy.is_relative_to(tmp_path)
    assert not copy.is_relative_to(place)
    assert (copy / "compiled.nbi").read_text() == "code"
    assert found(**image) / name == copy  # once is enough


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    place = cache._temporary()
    assert place.parent == tmp_path
    assert cache._temporary() == place
    place.chmod(0o777)
    assert cache._temporary() != place


def test_a_change_of_any_source_is_a_build_of_its_own(tmp_path, monkeypatch):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(cache, "SOURCES", tmp_path)
    before = cache._build()
    (tmp_path / "b.py").write_text("x = 2\n")
    assert cache._build() != before


def test_functions_of_others_are_kept_where_numba_keeps_them(tmp_path):
    source = tmp_path / "own.py"
    source.write_text("import numba\n@numba.njit(cache=True)\ndef f(x):\n    return x\n")
    ours = jit(lambda x: x)
    spec = importlib.util.spec_from_file_location("own", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not Path(module.f.stats.cache_path).is_relative_to(cache.directory())
    assert Path(ours.stats.cache_path).is_relative_to(cache.directory())


def test_nothing_is_kept_beside_the_sources():
    assert not list(SRC.rglob("*.nb[ic]"))
