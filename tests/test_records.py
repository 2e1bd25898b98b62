"""Records know the commit at which their run started, and that its code was committed."""

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire import machine

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import recording

BENCHMARKS = Path(recording.__file__).parent

CLEAN = machine.Checkout("abc1234", ())
DIRTY = machine.Checkout("abc1234", ("src/thinwire/spec.py",))
LATER = machine.Checkout("def5678", ())
Ticks = machine.Ticks


def run(monkeypatch, tmp_path, *checkouts, flags=()):
    """The record of a run that finds these checkouts, one after the other."""
    found = iter(checkouts)
    monkeypatch.setattr(recording, "checkout", lambda: next(found))
    path = tmp_path / "new" / "record.json"
    options = recording.read_options(argparse.ArgumentParser(), ["--out", str(path), *flags])
    recording.write_record(options, "test/1", {"figure": 1.0}, notes=["a note"])
    return json.loads(path.read_text())


def test_a_record_says_how_much_time_the_hypervisor_took(monkeypatch, tmp_path):
    found = iter([Ticks(900, 100, 1000), Ticks(900, 350, 2000)])
    monkeypatch.setattr(Ticks, "now", lambda: next(found))
    monkeypatch.setattr(recording, "busy", lambda: None)
    notes = run(monkeypatch, tmp_path, CLEAN, CLEAN)["notes"]
    assert "the hypervisor gave 25 % of this machine's time to others meanwhile" in notes


def test_little_stolen_time_is_not_worth_a_note(monkeypatch, tmp_path):
    found = iter([Ticks(900, 100, 1000), Ticks(1800, 101, 2000)])
    monkeypatch.setattr(Ticks, "now", lambda: next(found))
    monkeypatch.setattr(recording, "busy", lambda: None)
    assert run(monkeypatch, tmp_path, CLEAN, CLEAN)["notes"] == ["a note"]


@pytest.mark.parametrize(("idle", "busy"), [(1190, False), (1100, True)])
def test_other_work_is_seen_by_the_time_that_nobody_leaves_unused(monkeypatch, idle, busy):
    found = iter([Ticks(1000, 0, 2000), Ticks(idle, 0, 2200)])
    monkeypatch.setattr(Ticks, "now", lambda: next(found))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    note = machine.busy()
    assert (note is not None) == busy
    assert note is None or "other work took 50 % of this machine" in note


def test_without_the_kernels_counters_no_work_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_COUNTERS", tmp_path / "none")
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    assert machine.busy() is None


def test_a_record_names_the_commit_at_which_its_run_started(monkeypatch, tmp_path):
    record = run(monkeypatch, tmp_path, CLEAN, CLEAN)
    assert (record["started"]["commit"], record["started"]["dirty"]) == ("abc1234", False)
    assert record["notes"][0] == "a note"
    assert not any("changed while" in note for note in record["notes"])


def test_a_commit_during_the_run_is_noted_and_not_taken(monkeypatch, tmp_path):
    record = run(monkeypatch, tmp_path, CLEAN, LATER)
    assert record["started"]["commit"] == "abc1234"
    assert any("ended at def5678" in note for note in record["notes"])


@pytest.mark.parametrize(("start", "why"), [(DIRTY, "src/thinwire/spec.py"), (None, "checkout")])
def test_what_could_not_be_repeated_is_refused_before_anything_runs(
    monkeypatch, tmp_path, capsys, start, why
):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, start)
    said = capsys.readouterr().err
    assert why in said
    assert "--allow-dirty" in said


def test_a_dirty_record_says_so(monkeypatch, tmp_path):
    record = run(monkeypatch, tmp_path, DIRTY, DIRTY, flags=["--allow-dirty"])
    assert record["started"]["dirty"]
    assert record["started"]["changed"] == ["src/thinwire/spec.py"]


def test_without_a_record_a_dirty_tree_is_fine(monkeypatch):
    monkeypatch.setattr(recording, "checkout", lambda: DIRTY)
    assert recording.read_options(argparse.ArgumentParser(), []).out is None


def test_all_benchmarks_write_records_in_this_way():
    for path in BENCHMARKS.glob("*.py"):
        if path.name in ("recording.py", "make_data.py"):  # make_data writes data, no record
            continue
        text = path.read_text()
        assert not re.search(r"add_argument\(\s*\"--out\"", text), f"{path.name}: use read_options"
        if "write_record(" in text or "conclude(" in text:
            assert "read_options" in text or path.name == "harness.py", path.name


def test_what_makes_a_checkout_dirty(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    here = tmp_path / "src" / "thinwire" / "machine.py"
    here.parent.mkdir(parents=True)
    shutil.copy(machine.__file__, here)
    spec = importlib.util.spec_from_file_location("copied_machine", here)
    copied = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copied
    spec.loader.exec_module(copied)
    assert copied.checkout() is None  # no repository
    git("init")
    assert copied.checkout() is None  # somebody else's
    git("add", "src/thinwire/machine.py")
    git("commit", "-m", "first")
    shutil.rmtree(here.parent / "__pycache__", ignore_errors=True)
    assert copied.checkout().changed == ()
    assert "dirty" not in copied.versions()["commit"]
    for name in ("benchmarks/records/new.json", "docs/picture.png", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("written by a run")
    assert copied.checkout().changed == ()
    (tmp_path / "benchmarks" / "new.py").write_text("code that no commit has")
    assert copied.checkout().changed == ("benchmarks/new.py",)
    assert copied.versions()["commit"].endswith("-dirty")
    here.write_text(here.read_text() + "\n# changed\n")
    assert "src/thinwire/machine.py" in copied.checkout().changed
