"""`thinwire selftest` on this CPU: what is right passes, what is wrong is named."""

import json
import types

import pytest
import torch

from thinwire import kernels
from thinwire.bench import selftest
from thinwire.bench.selftest import SelftestSettings
from thinwire.cli import main
from thinwire.kernels import cpu

CPU = torch.device("cpu")
FEW = ("above", "checksum", "extent", "rice_encode", "scatter_mean")


def run(**settings):
    ticks = []
    found = SelftestSettings(CPU, **settings)
    report = selftest.run(found, lambda stage, detail: ticks.append((stage, detail)))
    assert len(ticks) == found.num_steps
    return report


def test_kernels_and_speed_of_this_machine():
    report = run(parts=("kernels", "speed"), names=FEW, numel=20_000)
    assert [row.kernel for row in report.kernels] == list(FEW)
    assert all(row.calls and not row.wrong for row in report.kernels)
    assert report.passed
    assert report.numel == 16_384
    assert [row.what for row in report.speed] == [what for what, *_ in selftest.WORK]
    for row in report.speed:
        assert row.gigabytes_per_second == pytest.approx(row.bytes * 16_384 / row.seconds / 1e9)
    document = json.loads(selftest.as_json(report))
    assert document["schema"] == "thinwire.selftest/1"
    assert document["device"]["kernels"] == "cpu"
    assert document["speed"]["rows"][0]["what"] == report.speed[0].what


def test_every_kernel_of_this_machine():
    report = run(parts=("kernels",))
    assert [row for row in report.kernels if row.wrong] == []
    assert sum(row.calls for row in report.kernels) > 800


def test_a_wrong_kernel_is_named(monkeypatch, capsys):
    def extent(x, r):
        found = cpu.extent(x, r)
        return found and (found[0], 2 * found[1])

    def take(x, r, positions):
        raise RuntimeError("no such\ninstruction")

    broken = types.SimpleNamespace(
        **{**vars(cpu), "extent": extent, "take": take, "__name__": "thinwire.kernels.cpu"}
    )
    monkeypatch.setattr(kernels, "on", lambda device: broken)
    report = run(parts=("kernels",), names=("extent", "take"))
    assert not report.passed
    first, second = report.kernels
    assert first.wrong.startswith("float32, x: ")
    assert "instead of" in first.wrong
    assert second.wrong == "float32, x: RuntimeError: no such instruction"
    monkeypatch.setattr(selftest, "run", lambda settings, tick: report)
    assert main(["selftest", "--only", "kernels"]) == 1
    said = capsys.readouterr().out
    assert "SOMETHING IS WRONG" in said
    assert json.loads(said[said.index("{\n") :])["passed"] is False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_agree(capsys, tmp_path):
    out = tmp_path / "selftest.json"
    assert main(["selftest", "--only", "collectives", "--json", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == document
    rows = document["collectives"]
    assert {row["backend"] for row in rows} == {"gloo"}
    assert len(rows) == len(selftest.COMPRESSORS)
    assert {row["wrong"] for row in rows} == {""}
    assert {row["collective"] for row in rows} >= {"gather", "summable"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_backend_that_fails_is_named():
    (row,) = selftest.exchange("pigeons", CPU)
    assert row.backend == "pigeons"
    assert "pigeons" in row.wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "abacus"], "expected cpu, cuda or cuda:1, got 'abacus'"),
        (["--device", "meta"], "expected cpu, cuda or cuda:1, got 'meta'"),
        (["--out", "/nonexistent/file.json"], "No such file or directory"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["selftest", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_ctrl_c_leaves_no_empty_file(monkeypatch, capsys, tmp_path):
    def stopped(settings, tick):
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "run", stopped)
    assert main(["selftest", "--out", str(tmp_path / "new.json")]) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda_device(capsys):
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err
