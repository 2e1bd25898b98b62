"""The command line: what it prints, what it returns, and what it does not import."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire import (
    __version__,
    list_compressors,
    list_feedbacks,
    list_methods,
    list_policies,
)
from thinwire.bench.picture import write_picture
from thinwire.bench.run import prepare, run
from thinwire.bench.settings import BenchSettings
from thinwire.cli import main
from thinwire.cli.parsing import ended_gently, patient, reserve

SRC = Path(__file__).resolve().parents[1] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC)}
SMALL = ("bench", "--size", "2k", "--rounds", "2", "--data", "normal")
FEW = (*SMALL, "--with", "none; topk:0.01; quantize:4; topk:0.01|quantize:4")

# Commands whose help must not load what only running them needs; one process tries all of them.
HELP = (
    *("--help", "--version", "", "bench --help", "compare --help", "report --help"),
    "demo --help",
    *("lab", "lab run --help", "lab clean --help", "compile --help", "selftest --help"),
    *("compressors --help", "feedbacks --help", "methods --help", "policies --help"),
)
PROBE = """
import sys
from thinwire.cli import main
for line in sys.argv[1:]:
    if code := main(line.split()):
        sys.exit(f"{line!r} ended with {code}")
    heavy = [n for n in ("torch", "numpy", "numba", "rich", "matplotlib") if n in sys.modules]
    if heavy:
        sys.exit(f"{line!r} loads {heavy}: import inside the command that needs it")
"""


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    done = python("-c", PROBE, *HELP)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: thinwire") == len(HELP) - 1  # --version has none


@pytest.mark.parametrize("line", HELP)
def test_help_fits_a_terminal(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(line.split()) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_python_m_thinwire() -> None:
    done = python("-m", "thinwire", "--version")
    assert (done.returncode, done.stdout) == (0, f"thinwire {__version__}\n")


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("compressors", list_compressors),
        ("feedbacks", list_feedbacks),
        ("methods", list_methods),
        ("policies", list_policies),
    ],
)
def test_listings(
    command: str, known: Callable[[], dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in known())
    assert max(map(len, table.splitlines())) <= 80

    assert main([command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    told = {re.split("[:,]", row["usage"])[0]: row["description"] for row in rows}
    assert told.items() >= known().items()


# Arguments that cannot work ({} is the folder of `files`), and a word of what must be said of them.
WRONG = {
    "command": ("squeeze", "invalid choice"),
    "option": ("bench --sizes 3", "unrecognized"),
    "compressor": ("bench --with topk:0.01;zip", "randomk"),
    "argument": ("bench --with topk:3", "(0, 1]"),
    "no compressor": ("bench --with ;", "no compressor"),
    "scaled": ("bench --size 9 --with randomk:0.1,scaled=true", "residual"),
    "size": ("bench --size much", "25.6M"),
    "part of an element": ("bench --size 0.5", "whole number"),
    "data": ("bench --data odd", "normal, heavy"),
    "rounds": ("bench --rounds 0", "at least 1"),
    "not a number": ("bench --rounds x", "invalid int"),
    "threads": ("bench --threads -1", "at least 1"),
    "too many threads": ("bench --threads 100000", "--threads must be at most 1024"),
    "both": ("bench --input a.npy --size 3", "--input"),
    "missing": ("bench --input {}/missing.npy", "no such file"),
    "suffix": ("bench --input {}/a.pt", ".safetensors"),
    "integers": ("bench --input {}/integers.npy", "int64"),
    "empty": ("bench --input {}/empty.npy", "no tensor"),
    "nan": ("bench --input {}/nan.npy", "NaN"),
    "objects": ("bench --input {}/objects.npy", "plain NumPy array"),
    "no array": ("bench --input {}/text.npy", "plain NumPy array"),
    "no safetensors": ("bench --input {}/text.safetensors", "not a safetensors file"),
    "plot": ("bench --plot a.pdf", ".html"),
    "no folder": ("bench --plot {}/text.npy/a.png", "cannot write"),
    "a folder": ("bench --out {}", "cannot write"),
    "no file system": ("bench --out /proc/x.json", "cannot write /proc/x.json"),
    "for ever": ("demo --seconds inf", "--seconds must be finite"),
    "no time": ("demo --seconds nan", "--seconds must be finite"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "integers.npy", np.arange(3))
    np.save(folder / "empty.npy", np.zeros((0, 3)))
    np.save(folder / "nan.npy", np.array([1.0, np.nan]))
    np.save(folder / "objects.npy", np.array([{}, None]), allow_pickle=True)
    (folder / "text.npy").write_text("no array")
    (folder / "text.safetensors").write_text("no tensors")
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, word = WRONG[name]
    code = main(line.format(files).split())
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    *before, last = error.splitlines()
    assert last.startswith("thinwire")
    assert ": error: " in last
    assert word in last
    # All else on stderr is the progress of a run that had begun.
    assert all(text.endswith("first use only") for text in before)


def test_bench_prints_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # on a busy machine figures are wider
    state = torch.get_rng_state()
    assert main([*FEW, "--threads", "1"]) == 0
    assert torch.get_num_threads() == 2, "the number of threads must be as before"
    assert torch.equal(torch.get_rng_state(), state), "the global generator must be left alone"
    out, error = capsys.readouterr()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    assert "1 threads" in lines[0]
    assert any(line.startswith("normal, 2k float32; one r += g: ") for line in lines)
    for name in ("none", "topk:0.01", "quantize:4", "topk:0.01|quantize:4"):
        (row,) = [line.split() for line in lines if line.split()[:1] == [name]]
        assert len(row) == 14
    assert "compiling kernels, first use only" in error


def test_a_narrow_terminal_gets_fewer_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main([*FEW, "--no-eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[[line.startswith("normal") for line in lines].index(True) + 1 :]
    assert max(map(len, table)) <= 70
    assert any(line.startswith("Left out for want of space: bits, cosine") for line in table)


def test_bench_writes_a_document_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "new" / "bench.json", tmp_path / "deep" / "er" / "a.html"
    assert main([*FEW, "--json", "--out", str(path), "--plot", str(page)]) == 0
    out, error = capsys.readouterr()
    assert f"wrote {page}" in error
    found = json.loads(out)
    assert json.loads(path.read_text()) == found
    assert found["schema"] == "thinwire.bench/1"
    assert found["settings"]["sizes"] == [2000]
    assert found["interrupted"] is False
    (group,) = found["groups"]
    check_group(group)
    rows = {row["compressor"]: row for row in group["rows"]}
    assert rows["none"]["relative_error"] == 0
    assert rows["topk:0.01"]["encode"]["eager"]["rounds"] == 2
    assert rows["topk:0.01|quantize:4"]["encode"]["speedup"] is None

    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "<td>topk:0.01|quantize:4</td>" in text
    assert "||x - y|| / ||x|| and &lt;x, y&gt;" in text, "what is no HTML is escaped"
    assert "prefers-color-scheme: dark" in text
    for outside in ("http:", "https:", "src=", "@import", "<link", "<script"):
        assert outside not in text, f"the page loads something by {outside}"


def test_bench_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    few = BenchSettings(("none", "topk:0.1"), (1000,), ("normal",), rounds=1, eager=False)
    write_picture(run(prepare(few), lambda stage, detail: None), picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def check_group(group: dict[str, Any]) -> None:
    """The relations that hold between the numbers of a group."""
    base = group["baseline"]
    assert 0 < base["lowest_seconds"] <= base["median_seconds"] <= base["highest_seconds"]
    for row in group["rows"]:
        assert row["compression_ratio"] == group["num_bytes"] / row["num_bytes"]
        assert row["bits_per_element"] == 8 * row["num_bytes"] / group["numel"]
        for part in (row["encode"], row["decode"]):
            seconds = part["median_seconds"]
            assert part["lowest_seconds"] <= seconds <= part["highest_seconds"]
            assert part["rounds"] == base["rounds"]
            assert part["passes"] == seconds / base["median_seconds"]
            assert part["gigabytes_per_second"] == group["num_bytes"] / seconds / 1e9
            if part["eager"]:
                assert part["speedup"] == part["eager"]["median_seconds"] / seconds


def test_bench_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*FEW, "--plot", "a.png"]) == 2
    assert "pip install 'thinwire[plot]'" in capsys.readouterr().err


def test_bench_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gradients.npy"
    np.save(path, np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30))
    few = ("bench", "--with", "quantize:8", "--rounds", "1", "--json", "--input")
    assert main([*few, str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["data"] is None
    (group,) = found["groups"]
    assert (group["data"], group["numel"], group["dtype"]) == ("gradients.npy", 600, "float32")


def test_ctrl_c_waits_for_the_result() -> None:
    done = []

    def work() -> None:
        with patient():
            signal.raise_signal(signal.SIGINT)
            done.append("printed")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["printed"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals on Windows")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_other_signals_count_as_ctrl_c_while_asked(number: str) -> None:
    one = getattr(signal, number)
    before, done = signal.getsignal(one), []

    def work() -> None:
        with ended_gently():
            with patient():
                signal.raise_signal(one)
                done.append("printed")
            done.append("too late")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["printed"]
    assert signal.getsignal(one) == before


def test_files_are_reserved_and_given_back(tmp_path: Path) -> None:
    new, old, full = tmp_path / "new", tmp_path / "old", tmp_path / "full"
    old.touch()
    with reserve(new, None, old, full):
        assert new.exists()
        full.write_text("a result")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "old"]
    with pytest.raises(ValueError, match=r"cannot write .*: Is a directory"):
        reserve(new, tmp_path)
    assert not new.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process on Windows")
def test_ctrl_c_shows_what_was_done() -> None:
    command = ["bench", "--size", "2k", "--rounds", "1000000", "--with", "none", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire", *command, "--no-eager"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.endswith("speed\n"):
                    break
            process.send_signal(signal.SIGINT)
            out, error = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    found = json.loads(out)
    assert found["interrupted"] is True
    assert [row["compressor"] for row in found["groups"][0]["rows"]] == ["none"]
