"""`thinwire compare`: methods by name, what is computed from measurements, and real small runs."""

import dataclasses
import inspect
import io
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import comparisons
import pytest
import ranks
import torch
import torch.distributed as dist
from rich.console import Console

import thinwire as tw
from thinwire.cli import main
from thinwire.compare import analysis, counters
from thinwire.compare.analysis import verdict_of
from thinwire.compare.document import (
    MethodResult,
    MetricPoint,
    Spread,
    SweepEntry,
    parse_document,
)
from thinwire.compare.method import (
    from_json,
    local_recipe,
    read,
    split,
    to_json,
    uses_of_method,
)
from thinwire.compare.models import CollectiveClock
from thinwire.compare.place import cluster_of
from thinwire.compare.rank import (
    Job,
    RankPlan,
    RankRecord,
    Timer,
    _ScriptObserver,
    heard,
    run_jobs,
    tell,
)
from thinwire.compare.run import Comparison, output_of, reason
from thinwire.compare.settings import (
    METHODS,
    PARALLELISMS,
    WORKLOAD,
    ComparisonSettingError,
    ComparisonSettings,
)
from thinwire.compare.table import print_document
from thinwire.compare.training import Training, shared_out
from thinwire.lab import HostFailedError, Lab, Loopback, Result, why_not
from thinwire.report import read_document
from thinwire.report.page import draw
from thinwire.workloads import Workload, workload

SMALL = "images:batch_size=4,per_class=20,test_per_class=5,width=4"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


STREAMING = "streaming-diloco:2,2,0,compressor=(onebit)"
LOCAL_TOPK = "local-sgd:2,compressor=(topk:0.01)"
LOCAL = {
    "adam-update": "updates of each step, topk:0.01|quantize:4",
    "diloco:50": "exchange every 50 steps, uncompressed",
    "local-sgd:5,compressor=(quantize:4)": "exchange every 5 steps, quantize:4",
    "post-local-sgd:5,9": "exchange every 5 steps after the first 9, uncompressed",
    "streaming-diloco:40": "exchange every 40 steps in 4 fragments, quantize:4",
}


# Methods


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("none, cast:bf16,topk:0.01+ef14", ["none", "cast:bf16", "topk:0.01+ef14"]),
        ("quantize:4,stochastic=true, none", ["quantize:4,stochastic=true", "none"]),
        ("topk:0.1+ef14:storage=int8,reset=9", ["topk:0.1+ef14:storage=int8,reset=9"]),
        ("tiered:0.01,small=(quantize:4), onebit", ["tiered:0.01,small=(quantize:4)", "onebit"]),
        ("quantize:4,64,onebit", ["quantize:4,64", "onebit"]),
        ("diloco:every=50,lr=0.5, sparseloco", ["diloco:every=50,lr=0.5", "sparseloco"]),
        (
            "local-sgd:10,compressor=(topk:0.1|quantize:4),adam-update:0.01,none",
            ["local-sgd:10,compressor=(topk:0.1|quantize:4)", "adam-update:0.01", "none"],
        ),
        ("ddp; quantize:4,64;", ["ddp", "quantize:4,64"]),
        (" , ", []),
    ],
)
def test_a_list_of_methods_is_split(text, methods):
    assert split(text) == methods


def test_methods_have_names_that_are_read_back():
    for name in (*METHODS, "ddp", "torch:fp16", "torch:powersgd", "torch:powersgd:4", "script"):
        assert read(name).name == name
        assert read(f" {name.upper()} ").name == name
    assert read("topk:0.01").name == "topk:0.01+ef14"  # "auto", by its name
    assert read("qsgd:7").name == "qsgd:7"  # right on average: needs none
    assert str(read("topk:0.01+none").feedback) == "none"
    assert (read("torch:powersgd").rank, read("torch:powersgd:4").rank) == (2, 4)
    assert read("topk:1e+0").policy == read("topk:1.0").policy


def test_methods_of_local_steps_say_when_they_exchange_what():
    found = {name: read(name) for name in LOCAL}
    assert {method.kind for method in found.values()} == {"local"}
    assert [method.title for method in found.values()] == list(LOCAL.values())
    for method in found.values():
        assert read(method.name) == method
        recipe = local_recipe(method)
        assert (recipe.policy, recipe.feedback) == (method.policy, method.feedback)
    assert read("diloco:every=50").name == "diloco:50"
    assert local_recipe(read("dgc:0.1")) is None
    with pytest.raises(ComparisonSettingError, match="has a feedback of its own: leave it out"):
        read("diloco:50+ef14")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "'nonsense' is no method .*unknown compressor"),
        ("topk:0.01+ef99", "unknown feedback 'ef99'"),
        ("topk:0.01+ef14+ef21", "COMPRESSOR or COMPRESSOR[+]FEEDBACK"),
        ("torch:int8", "unknown hook 'torch:int8', known: torch:fp16"),
        ("torch:powersgd:0", "unknown hook"),
        ("topk:2", "is no method"),
    ],
)
def test_unknown_methods_are_refused(name, words):
    with pytest.raises(ComparisonSettingError, match=words):
        read(name)


@pytest.mark.parametrize(
    "name", ["ddp", "torch:powersgd:4", "topk:0.01|quantize:4+ef21", "dgc:0.1,warmup=2", "auto:3",
             "layerwise:(A*=topk:0.1; *=dense)", "onebit-adam", "script", *LOCAL],
)  # fmt: skip
def test_a_plan_reaches_other_processes_as_it_is(name):
    method = read(name)
    plan = RankPlan((Job(method, 3), Job(method, 0, "1gbit")), 9.0, True, seconds=2.5)
    assert RankPlan.from_json(plan.to_json()) == plan
    assert from_json(json.loads(json.dumps(to_json(method)))) == method


def test_a_method_that_other_processes_cannot_read_is_refused(monkeypatch, capsys, tmp_path):
    def fail(_):
        raise ValueError("no such rules")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.compare.method.from_json", fail)
    assert main(["compare", "--with", "topk:0.1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'ddp' cannot be compared" in line
    assert "cannot be read back by the processes that train with it (no such rules)" in line


def test_a_method_that_reads_back_as_another_is_refused(monkeypatch):
    plain = read("ddp")
    monkeypatch.setattr("thinwire.compare.method.from_json", lambda _: plain)
    assert read("ddp") == plain
    with pytest.raises(ComparisonSettingError, match="it reads as 'ddp'"):
        read("topk:0.1")


def test_events_are_told_from_what_a_script_prints(capsys):
    print("unfinished", end="")
    tell("end", record={"losses": [math.inf]})
    print("@thinwire {broken")
    found = [heard(line) for line in capsys.readouterr().out.splitlines()]
    assert [each for each in found if each] == [{"event": "end", "record": {"losses": [math.inf]}}]


def test_a_method_knows_what_must_be_compiled_for_it():
    def names(text):
        return [str(use) for use in uses_of_method(read(text))]

    assert names("ddp") == names("torch:powersgd:4") == names("powersgd:2") == []
    assert names("topk:0.1") == ["topk:0.1 (float32)"]
    assert names("topk:0.1+ef14:storage=int8") == ["topk:0.1 (float32)", "storage=int8 (float32)"]
    assert names("onebit-adam") == ["scaledsign:l2 (float32)"]
    assert names("local-sgd:5,compressor=(topk:0.1)") == ["topk:0.1 (float32)"]


# Arithmetic


def record(losses, step=1.0, sent=1_000_000, metric=80.0, **more):
    count = len(losses)
    return RankRecord(
        losses=losses,
        seconds=[step * (i + 1) for i in range(count)],
        num_bytes=[sent * (i + 1) for i in range(count)],
        evaluations=[(count, metric)],
        exposed=0.4 * step,
        **more,
    )


def test_a_run_is_put_together_from_its_ranks():
    ranks = [
        record([3.0, 1.0], 1.0, 2_000_000, inside={"encode": 1.0, "network": 3.0}, reported=9),
        record([1.0, 1.0], 1.5, 4_000_000, inside={"encode": 1.0, "network": 3.0}, reported=5),
    ]
    run = analysis.run_of(7, ranks, None)
    assert run.losses == [2.0, 1.0]
    assert run.seconds == [1.5, 3.0]  # the slower
    assert run.megabytes == [3.0, 6.0]
    assert (run.seed, run.steps, run.bytes_reported) == (7, 2, 7)
    assert run.final_loss == 1.5  # a mean over the last steps
    assert run.evaluations == [MetricPoint(step=2, seconds=3.0, megabytes=6.0, value=80.0)]
    assert run.split.whole == pytest.approx(1.5)
    assert run.split.encode == pytest.approx(0.5 / 4)  # half a second, one part in four


def test_projected_times_are_those_of_the_bytes_on_the_link():
    run = analysis.run_of(0, [record([1.0, 1.0], 1.0, 1_448_000)], 10_000_000)
    network = 8 * 1_514_000 / 10_000_000
    assert run.seconds == pytest.approx([1 + network, 2 + 2 * network], abs=1e-4)
    assert run.split.network == pytest.approx(0.4 + network)
    assert run.step_seconds == pytest.approx(1 + network, abs=1e-4)
    assert run.split.whole == pytest.approx(run.step_seconds)


def test_steps_of_which_only_some_exchange_count_as_their_mean():
    # Two steps without an exchange, then one that sends 3 MB in 4 s.
    found = RankRecord(
        losses=[1.0] * 6,
        seconds=[1.0, 2.0, 7.0, 8.0, 9.0, 14.0],
        num_bytes=[0, 0, 3_000_000, 3_000_000, 3_000_000, 6_000_000],
        evaluations=[],
        in_rounds=True,
    )
    assert found.step_seconds == pytest.approx(14 / 6)
    assert found.bytes_per_step == 1_000_000
    run = analysis.run_of(0, [found], None)
    assert run.step_seconds == pytest.approx(14 / 6)
    network = 8 * counters.FULL * 3_000_000 / 10_000_000
    run = analysis.run_of(0, [found], 10_000_000)
    assert run.seconds[:3] == pytest.approx([1, 2, 7 + network], abs=1e-4)
    assert run.step_seconds == pytest.approx((14 + 2 * network) / 6)
    assert run.split.network * 6 >= 2 * network - 1e-9
    assert run.split.whole == pytest.approx(run.step_seconds)


def test_a_short_measurement_gives_each_step_its_share_of_an_exchange():
    measured = RankRecord(
        losses=[1.0] * 4,
        seconds=[5.0, 6.0, 7.0, 13.0],  # the first connects the ranks, the last exchanges
        num_bytes=[700, 700, 700, 10_700],
        evaluations=[],
        in_rounds=True,
    )
    found = shared_out(measured, 50)
    assert found.step_seconds == pytest.approx(1 + 5 / 50)
    assert found.bytes_per_step == 10_000 / 50


def test_what_diverges_is_told():
    def diverged(losses):
        return analysis.has_diverged(analysis.run_of(0, [record(losses)], None))

    assert not diverged([2.0] * 5 + [1.0] * 5)
    assert diverged([2.0, math.nan, 1.0])
    assert diverged([2.0, math.inf, 1.0])
    assert diverged([2.0] + [7.0] * 9)
    assert not diverged([-1.0] * 30 + [0.001] * 30)
    assert diverged([-1.0] + [1.5] * 30)


def test_the_time_to_a_loss_is_that_of_the_trailing_mean():
    falling = [5.0 - 0.1 * i for i in range(40)]
    run = analysis.run_of(0, [record(falling)], None)
    window = analysis.window_of(40)
    assert window == 5
    assert analysis.trailing(falling)[-1] == pytest.approx(sum(falling[-5:]) / 5)
    # The mean of the last five lags two steps behind.
    assert analysis.time_to(run, 3.0) == run.seconds[20 + 2]
    assert analysis.time_to(run, 0.0) is None
    assert analysis.time_to(run, 9.0) == run.seconds[4]  # not before the window is full


@pytest.mark.parametrize("shift", [2.0, -2.0])
def test_the_baseline_reaches_its_own_end_whatever_the_sign_of_losses(shift):
    losses = [shift + math.exp(-i / 10) for i in range(60)]
    document = document_with([method_row("ddp", runs_of(1.0, 80.0, losses))])
    assert document.methods[0].summary.to_target.speedup == 1.0


def method_row(name, runs, error=None):
    return MethodResult(name=name, title=name, error=error, diverged=False, runs=runs)


def document_with(methods, **settings):
    document = comparisons.document(methods, **settings)
    document.sweep = []
    analysis.summarise(document)
    return document


def runs_of(step, metric, losses=None, sent=1_000_000):
    losses = losses or [2.0 - 0.04 * i for i in range(40)]
    found = record(losses, step, sent, metric)
    return [analysis.run_of(seed, [found], None) for seed in range(2)]


def test_the_summary_compares_with_the_baseline():
    document = document_with(
        [
            method_row("ddp", runs_of(1.0, 80.0)),
            method_row("onebit+ef14", runs_of(0.1, 79.9, sent=50_000)),
            method_row("topk:0.01+ef14", runs_of(0.05, 70.0, [2.0] * 40)),
            method_row("torch:bf16", [], error="TypeError: no"),
        ]
    )
    base, best, poor, failed = (method.summary for method in document.methods)
    assert base.to_target.speedup == base.step_speedup == base.fewer_bytes == 1
    assert best.to_target.speedup == pytest.approx(10)
    assert best.step_speedup == pytest.approx(10)
    assert best.fewer_bytes == pytest.approx(20)
    assert best.final_metric == Spread(mean=79.9, lowest=79.9, highest=79.9)
    assert poor.to_target is None
    assert failed is None
    assert verdict_of(document) == (
        "onebit+ef14 reached plain DDP's final loss 10.0x sooner on 4 hosts with links of 100mbit "
        "(4 s instead of 40 s) with 20x fewer bytes, and ended at a test accuracy of 79.9 % "
        "(plain DDP 80)."
    )


def test_the_verdict_says_so_when_nothing_pays():
    slower = document_with([method_row("ddp", runs_of(1.0, 80.0)),
                            method_row("onebit", runs_of(1.2, 80.0))])  # fmt: skip
    assert verdict_of(slower).startswith("Compression does not pay here")
    assert "takes 1.20 times as long per step" in verdict_of(slower)
    worse = document_with([method_row("ddp", runs_of(1.0, 80.0)),
                           method_row("onebit", runs_of(0.1, 50.0, [2.0] * 40))])  # fmt: skip
    assert "no method ended as well" in verdict_of(worse)
    late = document_with([method_row("ddp", runs_of(1.0, 80.0)),
                          method_row("onebit", runs_of(1.2, 80.0)),
                          method_row("topk", runs_of(0.4, 80.0, [2.0] * 40))])  # fmt: skip
    assert "no method reached plain DDP's final loss sooner" in verdict_of(late)
    assert "topk, takes 0.40 times as long per step" in verdict_of(late)
    alone = document_with([method_row("ddp", runs_of(1.0, 80.0))])
    assert "nothing to compare" in verdict_of(alone)
    lost = document_with([method_row("ddp", [], error="E: x"), method_row("onebit", runs_of(1, 1))])
    assert "plain DDP did not finish" in verdict_of(lost)


def test_without_a_target_nothing_is_called_not_reached():
    out = io.StringIO()
    methods = [comparisons.diverged("ddp"), comparisons.method("topk:0.01")]
    for method in methods:
        method.summary = comparisons.method("x").summary
        method.summary.to_target = None
    document = comparisons.document(methods)
    print_document(document, Console(file=out, width=200))
    assert out.getvalue().count("not reached") == 2
    document.target_loss = None
    print_document(document, Console(file=out, width=200))
    assert out.getvalue().count("not reached") == 2


def test_the_verdict_says_where_it_stops_paying():
    document = document_with([method_row("ddp", runs_of(1.0, 80.0)),
                              method_row("onebit", runs_of(0.1, 80.0))],
                             network="projected")  # fmt: skip
    document.sweep = [
        SweepEntry(link="100mbit", step_seconds={"ddp": 1.0, "onebit": 0.1}),
        SweepEntry(link="1gbit", step_seconds={"ddp": 0.1, "onebit": 0.1}),
    ]
    assert "(projected)" in verdict_of(document)
    assert verdict_of(document).endswith(
        "A step was faster by 10.0x at 100mbit and 1.0x at 1gbit. It no longer pays from 1gbit on."
    )


def test_lower_can_be_better():
    document = document_with([method_row("ddp", runs_of(1.0, 2.0)),
                              method_row("onebit", runs_of(0.1, 2.5))],
                             metric="test nll, nats", higher_is_better=False)  # fmt: skip
    assert "no method ended as well" in verdict_of(document)


# Counters and errors


def test_what_was_sent_is_read_from_the_kernel():
    proc = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n"
        " wire0: 999 9 0 0 0 0 0 0 15140 10 0 0 0 0 0 0\n"
    )
    assert counters.from_proc(proc) == {"lo": 34, "wire0": 14480}
    netstat = (
        "Name  Mtu   Network       Address            Ipkts Ierrs Ibytes Opkts Oerrs Obytes Coll\n"
        "lo0   16384 <Link#1>                            50     0   5000    10     0  15140    0\n"
        "lo0   16384 127           127.0.0.1             50     -   5000    10     -  15140    -\n"
        "en0*  1500  <Link#4>    aa:bb:cc:dd:ee:ff       50     0   5000     1     0    166    0\n"
    )
    assert counters.from_netstat(netstat) == {"lo0": 14480, "en0": 100}


def failed(*texts):
    return HostFailedError(0, [Result(i, 1, "", text) for i, text in enumerate(texts)])


def test_the_reason_of_a_failure_is_its_cause():
    reset = "Traceback:\n[rank0]: RuntimeError: Connection reset by peer\n"
    cause = "Traceback:\n  ...\n[rank1]: torch.OutOfMemoryError: no memory\nlast words"
    assert reason(failed(reset, cause), 9) == "torch.OutOfMemoryError: no memory"
    assert reason(failed(reset, reset), 9) == "RuntimeError: Connection reset by peer"
    assert reason(failed(reset, "Timeout (0:00:09)!\nThread ..."), 9) == (
        "no step within 9 s: it hangs"
    )
    assert "failed with exit code 1" in reason(failed("what?", ""), 9)
    killed = [Result(0, 1, "", reset), Result(1, -signal.SIGKILL, "", "")]
    assert reason(HostFailedError(1, killed), 9) == "host 1 was ended by SIGKILL"


def test_the_output_of_a_failure_has_the_traceback_of_all_that_failed():
    results = [
        Result(0, 1, "epoch 1\n", "Traceback of 0\n  line\nValueError: no"),
        Result(1, -signal.SIGTERM, "", "ended for it"),
        Result(2, 3, "", "x\n" * 500 + "Traceback of 2"),
    ]
    found = output_of(HostFailedError(0, results))
    for part in ("host 0 failed with exit code 1", "Traceback of 0", "epoch 1", "Traceback of 2"):
        assert part in found
    assert "ended for it" not in found
    assert len(found.splitlines()) < 90


# The command


class Quiet:
    """A watcher that keeps to itself."""

    def said(self, *_):
        pass

    began = stepped = ended = failed = said


class ForkedCluster:
    """Hosts on loopback whose programs are ranks, in processes that have torch loaded already.

    A process that imports torch and what DDP needs takes six seconds of a processor. That ranks are
    started as programs, and heard while they run, is tested in a lab and with Ctrl-C.
    """

    def __init__(self, hosts):
        self.hosts = hosts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, argv, env, on_line):
        assert argv[1:3] == ["-m", "thinwire.compare.rank"]
        with tempfile.TemporaryDirectory() as folder, ranks.Ranks(self.hosts) as group:
            group.start(on_host, argv[3:], env, ranks.free_port(), folder)
            outcomes = group.outcomes()
            results = []
            for host, (outcome, process) in enumerate(zip(outcomes, group.processes, strict=True)):
                said = [Path(folder, f"{name}{host}").read_text() for name in ("stdout", "stderr")]
                for line in said[0].splitlines():
                    on_line(host, "stdout", line)
                process.join(ranks.GRACE if outcome.dead else 0)
                code = process.exitcode if outcome.dead else int(outcome.error != "")
                results.append(Result(host, code, said[0], said[1] + outcome.error))
        for result in results:
            if result.exit_code != 0:
                raise HostFailedError(result.host, results)


def on_host(words, env, port, folder):
    """Be what `python -m thinwire.compare.rank` is on a host."""
    os.environ.update(ranks.leave_for_torchrun(port), **env)
    for number, name in ((1, "stdout"), (2, "stderr")):
        path = f"{folder}/{name}{os.environ['RANK']}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["thinwire.compare.rank", *words]
    runpy.run_module("thinwire.compare.rank", run_name="__main__")
    sys.stdout.flush()


@pytest.fixture
def forked(monkeypatch):
    """Comparisons on loopback have processes that are forked; the links that they ask for."""
    asked = []

    def made(settings, links, projected):
        assert projected
        asked.append(list(links))
        return ForkedCluster(settings.hosts)

    monkeypatch.setattr("thinwire.compare.run.cluster_of", made)
    return asked


def compared(**settings):
    """The document of a comparison on loopback, its methods by name, and their first runs."""
    comparison = Comparison(ComparisonSettings(baselines=("ddp",), project=True, **settings))
    document = comparison.run(Quiet(), "command")
    methods = {method.name: method for method in document.methods}
    runs = {name: method.runs[0] for name, method in methods.items() if method.runs}
    return document, methods, runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "sound"], "--workload: unknown workload 'sound'"),
        (["--workload", "images:wide=1"], "no argument 'wide'"),
        (["--workload", "missing.py"], "--workload: no file missing.py"),
        (["--with", "nonsense"], "'nonsense' is no method"),
        (["--with", ","], "--with names no method"),
        (["--with", "script"], "'script' is a method for --workload SCRIPT.py"),
        (["--steps", "0"], "--steps must be more than 0"),
        (["--steps", "5", "--seconds", "5"], "not allowed with argument"),
        (["--seconds", "inf"], "--seconds must be finite"),
        (["--seconds", "nan"], "--seconds must be more than 0"),
        (["--target", "nan"], "--target must be finite, got nan"),
        (["--target", "inf"], "--target must be finite, got inf"),
        (["--link", "fast"], "a rate is a number"),
        (["--link", ""], "a rate is a number"),
        (["--links", "missing.txt"], "--links: "),
        (["--hosts", "1"], "--hosts must be at least 2"),
        (["--racks", "2"], "--racks and --inter go together"),
        (["--racks", "9", "--inter", "1mbit"], "--racks 9 is more than there are hosts"),
        (["--sweep", "fast"], "--sweep: a rate is a number"),
        (["--racks", "2", "--inter", "9mbit", "--sweep", "1mbit"], "--sweep is for"),
        (["--project", "--racks", "2", "--inter", "9mbit"], "--racks needs a lab"),
        (["--delay", "15"], "delay is a number and one of us, ms, s, like '30ms', got '15'"),
        (["--jitter", "much"], "jitter is a number"),
        (["--loss", "2"], "--loss: loss must be a share in [0, 1), like 0.001 or '0.1%'"),
        (["--delay", "1ms", "--link", "5gbit"], "at most 1000mbit"),
        (["--delay", "1ms", "--sweep", "5gbit"], "at most 1000mbit"),
        (["--project", "--delay", "1ms"], "--project: delay, jitter and loss need a lab"),
        (["--project", "--racks", "2", "--inter", "9mbit delay=1ms"], "--project: delay, jitter"),
        (["--", "stray"], "unexpected 'stray'"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_refused_comparison_leaves_no_folder(tmp_path):
    assert main(["compare", "--with", "nope", "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_an_output_that_cannot_be_written_is_told_at_once(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["compare", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "--out: cannot write to" in capsys.readouterr().err


def test_a_report_is_drawn_again_from_its_data(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr("thinwire.report.write", lambda *what: drawn.append(what) or ["page"])
    document = comparisons.document([comparisons.method("ddp")])
    data = tmp_path / "data.json"
    data.write_text(document.to_json())
    assert main(["report", str(data)]) == 0
    assert main(["report", str(data), "--out", str(tmp_path / "x")]) == 0
    assert drawn == [(document, tmp_path), (document, tmp_path / "x")]
    data.write_text("{}")
    assert main(["report", str(data)]) == 2
    assert main(["report", str(tmp_path / "missing.json")]) == 2
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert "expected a document of schema" in first
    assert "missing.json" in second


def test_the_demo_says_once_what_each_model_came_to(tmp_path, capsys, monkeypatch):
    found = comparisons.document([comparisons.method("ddp", seeds=1, steps=6)])
    found.verdict = " ".join(["The verdict is long."] * 12)
    monkeypatch.setattr("thinwire.cli.demo.compare", lambda *_: (found, 0))
    monkeypatch.setattr("thinwire.report.write", lambda document, folder: [folder / "report.html"])
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert " ".join(out.split()).count(found.verdict) == 2, "one for each model"
    assert max(map(len, out.splitlines())) <= 80


def test_only_what_was_asked_for_decides_the_exit_code(tmp_path, monkeypatch):
    methods = [comparisons.method("ddp"), comparisons.failed("torch:bf16", "TypeError: no")]
    document = comparisons.document(methods)
    monkeypatch.setattr(Comparison, "run", lambda *_: document)
    monkeypatch.setattr("thinwire.cli.compare.show", lambda *_: None)
    assert main(["compare", "--out", str(tmp_path)]) == 0
    assert main(["compare", "--out", str(tmp_path), "--with", "torch:bf16"]) == 1
    methods[0].diverged = True
    assert main(["compare", "--out", str(tmp_path)]) == 1


def test_help_shows_methods_and_examples(capsys):
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("torch:powersgd", "sparseloco", "thinwire compare --workload train.py", *METHODS):
        assert word in text


def test_the_default_workload_is_one():
    assert workload(WORKLOAD).name == "images"


class FailingCluster:
    """Tells what ranks would, and fails at the jobs of one method."""

    def __init__(self, hosts, failing):
        self.hosts, self.failing, self.started = hosts, failing, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, argv, env, on_line):
        jobs = RankPlan.from_json(Path(argv[3]).read_text(encoding="utf-8")).jobs
        self.started.append([(job.method.name, job.seed) for job in jobs])
        for i, job in enumerate(jobs):
            self._tell(on_line, 0, event="begin", job=i)
            if job.method.name == self.failing:
                raise failed("ValueError: too much", "")
            for rank in range(self.hosts):
                values = asdict(record([2.0, 1.0 + job.seed]))
                self._tell(on_line, rank, event="end", job=i, rank=rank, record=values)

    @staticmethod
    def _tell(on_line, host, **event):
        on_line(host, "stdout", f"@thinwire {json.dumps(event)}")


def test_a_script_that_fails_is_shown_with_its_error(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr("thinwire.compare.run.cluster_of", lambda *_: FailingCluster(2, "ddp"))
    document, methods, _ = compared(
        workload=str(script), hosts=2, links=("1mbit",) * 2, methods=("ddp",)
    )
    assert methods["ddp"].error == "ValueError: too much"
    assert "plain DDP did not finish" in document.verdict


def test_after_a_failure_the_others_go_on(monkeypatch):
    cluster = FailingCluster(2, "cast:bf16+ef14")
    monkeypatch.setattr("thinwire.compare.run.cluster_of", lambda *_: cluster)
    _, methods, _ = compared(
        workload=SMALL, hosts=2, links=("1mbit",) * 2, steps=2, seeds=(0, 1),
        methods=("cast:bf16", "none"),
    )  # fmt: skip
    assert cluster.started == [
        [(name, seed) for seed in (0, 1) for name in ("ddp", "cast:bf16+ef14", "none")],
        [("none", 0), ("ddp", 1), ("none", 1)],
    ]
    assert methods["cast:bf16+ef14"].error == "ValueError: too much"
    assert methods["cast:bf16+ef14"].runs == []
    for name in ("ddp", "none"):
        assert [(run.seed, run.losses[-1]) for run in methods[name].runs] == [(0, 1.0), (1, 2.0)]


@pytest.mark.slow
def test_a_comparison_in_the_lab(possible, tmp_path, capsys):
    code = main(
        ["compare", "--workload", SMALL, "--hosts", "2", "--link", "20mbit", "--steps", "4",
         "--evaluations", "2", "--with", "none, topk:0.1, local-sgd:2",
         "--with", "torch:bf16", "--no-torch-hooks", "--out", str(tmp_path)]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 1, err  # torch's bf16 hook was asked for, and refuses gloo
    assert "torch:bf16 failed: TypeError: BF16" in out.replace("\n", " ")
    for line in ("none, seed 0 ...", "none, seed 0: 4 steps, loss"):
        assert line in err
    document = read_document(tmp_path / "data.json")
    methods = {method.name: method for method in document.methods}
    assert list(methods) == ["ddp", "none", "topk:0.1+ef14", "local-sgd:2", "torch:bf16"]
    assert methods["torch:bf16"].runs == []
    ddp, none, topk = (methods[name].runs[0] for name in ("ddp", "none", "topk:0.1+ef14"))
    # The same training, whatever carries it; a sum of two is the same in any order.
    assert none.losses == ddp.losses
    assert topk.losses[0] == ddp.losses[0]
    assert topk.losses != ddp.losses
    # Two ranks send each other one copy per step; the rest is gloo's own.
    copies = 4 * 4 * document.settings.parameters
    assert copies < ddp.bytes_counted < copies + 4 * 5000
    # TCP may send some packets twice, one or two in a step.
    twice = 4 * 2 * counters.SEGMENT
    assert 0 <= none.bytes_counted - none.bytes_reported + 4 * 200 < twice
    local = methods["local-sgd:2"].runs[0]
    # Rounds of two steps, and one exchange at the end.
    sent = [1e6 * megabytes for megabytes in local.megabytes]
    copy = copies / 4
    assert sent[0] < 1000 + 2 * counters.SEGMENT < copy  # no exchange; packets sent twice
    assert all(
        count * copy < total < count * copy + 4 * 5000
        for count, total in ((1, sent[1]), (1, sent[2]), (3, sent[3]))
    )
    assert 0 <= local.bytes_counted - local.bytes_reported + 4 * 200 < 5000 + twice
    assert local.step_seconds == pytest.approx(local.seconds[-1] / 4, abs=1e-4)
    assert [point.step for point in local.evaluations] == [2, 4]
    assert [t.name for t in local.tensors] == [t.name for t in none.tensors]
    assert [point.step for point in topk.evaluations] == [2, 4]
    assert {row.compressor for row in topk.tensors} == {"topk:0.1", "none"}
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_a_sweep_measures_what_has_not_failed_at_another_rate(
    forked, tmp_path, capsys, monkeypatch
):
    drawn = []
    monkeypatch.setattr(
        "thinwire.report.write", lambda document, _: drawn.append(document) or ["page"]
    )
    code = main(
        ["compare", "--workload", SMALL, "--hosts", "2", "--link", "20mbit", "--project",
         "--steps", "2", "--evaluations", "1", "--with", "topk:0.1", "--with", "torch:bf16",
         "--no-torch-hooks", "--sweep", "1gbit", "--out", str(tmp_path)]
    )  # fmt: skip
    assert code == 1  # torch's bf16 hook refuses gloo
    assert "the time per step at 1gbit" in capsys.readouterr().err
    assert forked == [["20mbit"] * 2, ["1gbit"] * 2]
    (document,) = drawn
    assert [entry.link for entry in document.sweep] == ["20mbit", "1gbit"]
    for entry in document.sweep:
        assert entry.step_seconds.keys() == {"ddp", "topk:0.1+ef14"}


def test_a_lab_has_the_links_that_are_asked_for():
    settings = ComparisonSettings(hosts=4, racks=2, inter="5mbit")
    lab = cluster_of(settings, ["10mbit", "20mbit", "10mbit", "20mbit"], projected=False)
    assert isinstance(lab, Lab)
    rates = [station.link.rate_bits for station in lab._topology.stations]
    assert rates == [10_000_000, 20_000_000] * 2
    assert (lab._topology.racks, lab._topology.inter.rate_bits) == (2, 5_000_000)
    assert isinstance(cluster_of(settings, ["10mbit"] * 4, projected=True), Loopback)


def test_a_lab_has_the_distance_that_is_asked_for():
    links = ("10mbit", "20mbit delay=9ms")
    settings = ComparisonSettings(
        hosts=2, links=links, delay="15ms", jitter="1ms", loss=0.01, racks=2,
        inter="5mbit delay=2ms",
    )  # fmt: skip
    lab = cluster_of(settings, links, projected=False)
    found = [station.link for station in lab._topology.stations]
    assert [(link.delay_seconds, link.jitter_seconds, link.loss) for link in found] == [
        (0.015, 0.001, 0.01),
        (0.009, 0.001, 0.01),
    ]
    assert lab._topology.inter.delay_seconds == 0.002
    far, near = Comparison(settings), Comparison(dataclasses.replace(settings, delay=None))
    far.parameters = near.parameters = 1000
    assert far._patience() > near._patience()


def test_without_a_lab_distance_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("thinwire.compare.run.why_not", lambda distance: "no kernel")
    assert main(["compare", "--delay", "1ms", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "cannot be projected from the bytes sent, and none can be made: no kernel" in told


def test_distance_is_shown_wherever_links_are():
    document = comparisons.rich(delay="15ms", jitter="2ms", loss=0.001)
    words = "15ms of delay each way, up to 2ms of jitter, 0.1% loss"
    out = io.StringIO()
    print_document(document, Console(file=out, width=200))
    assert words in out.getvalue()
    assert words in verdict_of(document)
    assert words in draw(document).html
    settings = parse_document(json.loads(document.to_json())).settings
    assert (settings.delay, settings.jitter, settings.loss) == ("15ms", "2ms", 0.001)


@pytest.mark.slow
def test_a_step_takes_at_least_one_way_over_a_distance(tmp_path):
    if reason := why_not(distance=True):
        pytest.skip(f"no lab with distance can be made here: {reason}")
    command = ["compare", "--workload", SMALL, "--hosts", "2", "--delay", "50ms", "--steps", "3"]
    command += ["--evaluations", "1", "--with", "onebit", "--no-torch-hooks"]
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", *command, "--out", str(tmp_path)],
        env=ENV, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = read_document(tmp_path / "data.json")
    assert "later than asked on average" in " ".join(document.notes)
    for method in document.methods:
        (run,) = method.runs
        assert run.step_seconds >= 0.05
        # Payload by the kernel's counters, retransmissions included, against what was sent.
        if run.bytes_reported is not None:
            assert run.bytes_counted >= 0.95 * run.bytes_reported


def test_times_are_projected_where_there_is_no_lab(forked):
    document, _, runs = compared(
        workload=SMALL, hosts=2, links=("1mbit",) * 2, steps=None, seconds=2.0, target=101.0,
        evaluations=1, methods=("onebit", STREAMING),
    )  # fmt: skip
    assert [method.error for method in document.methods] == [None] * 3
    assert document.projected
    assert "(projected)" in document.verdict
    for run in runs.values():
        network = 8 * counters.FULL * run.bytes_counted / 1e6
        assert run.seconds[-1] > network
        # A typical step is shorter or longer than one is on average; parts are as on average.
        share = run.split.network / run.split.whole
        assert share * run.seconds[-1] >= network - 1e-4 * run.steps
    # There is no time for more steps than the network has, if it carries nothing but gradients.
    dense = 8 * 4 * document.settings.parameters / 1e6
    assert 1 <= runs["ddp"].steps <= 2.0 / dense
    onebit, copy = runs["onebit+ef14"], 4 * document.settings.parameters
    assert onebit.bytes_reported / onebit.steps < copy < 1e6 * runs["ddp"].megabytes[0]
    assert runs[STREAMING].tensors


class Apart(Workload):
    """Ranks that want parameters of their own, and have them after a step."""

    name, metric, higher_is_better, default_steps = "apart", "loss", False, 8
    rising = falling = 0.0
    batch_size = 1

    def build(self):
        return torch.nn.Linear(1, 1, bias=False)

    def epoch(self, generator):
        wanted = torch.tensor([[-1.0], [1.0]] * 100)
        return wanted.abs(), wanted

    def batches(self, rank=0, world=1, seed=0):
        while True:
            yield torch.ones(1, 1), torch.tensor([[-1.0, 1.0][rank]])

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum() / 2

    def optimizer(self, model):
        with torch.no_grad():
            model.module.weight.fill_(3.0)
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def evaluate(self, model):
        return model.weight.item()


def losses_apart(method):
    plan = RankPlan((Job(read(method), 0),), 60.0, loopback=True, steps=8, evaluations=1)
    timer = Timer(60.0)
    try:
        found = Training(Apart(), plan.jobs[0], plan, timer).run()
    finally:
        timer.stop()
    return found.losses


def test_the_loss_of_local_steps_is_that_of_what_all_ranks_hold():
    first, second = ranks.run(losses_apart, "local-sgd:4", ranks=2)
    assert (first, second) == ([8.0] * 4 + [0.5] * 4, [2.0] * 4 + [0.5] * 4)


SCRIPT = """
import os, sys, time
from contextlib import nullcontext
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw

how = sys.argv[1] if len(sys.argv) > 1 else ""
torch.set_num_threads(1)
dist.init_process_group("gloo")
model, small = DDP(torch.nn.Linear(200, 100)), DDP(torch.nn.Linear(100, 1))
if how == "attach":
    wire = tw.attach(model, "topk:0.5", min_numel=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
small_optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + int(os.environ["THINWIRE_SEED"]))

def loss_of(x):
    y = model(x)
    return (y - 1).square().mean() + small(y.detach()).square().mean()

with tw.LocalSteps(small, small_optimizer, every=4) if how == "attach" else nullcontext():
    for step in range(6):
        x = torch.randn(8, 200)
        with model.no_sync(), small.no_sync():  # accumulation: the two passes are one step
            loss_of(x).backward()
        loss = loss_of(x)
        optimizer.zero_grad()
        small_optimizer.zero_grad()
        loss.backward()
        small_optimizer.step()
        optimizer.step()
        if how == "hang" and step == 2:
            time.sleep(60)
        print("unfinished line", end="")
tw.track(90.0, "score, $")
if how == "attach":
    print(wire.stats()["step"], type(wire).__name__)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_compared(forked, script):
    document, _, runs = compared(
        workload=str(script), arguments=("attach",), hosts=2, links=("100mbit",) * 2,
        methods=("topk:0.01", "script", LOCAL_TOPK),
    )  # fmt: skip
    assert document.settings.metric == "score, $"
    assert document.settings.parameters == 20_100 + 101
    assert runs.keys() == {"ddp", "topk:0.01+ef14", "script", LOCAL_TOPK}
    assert {run.steps for run in runs.values()} == {6}
    assert {run.final_metric for run in runs.values()} == {90.0}
    assert len({run.losses[0] for run in runs.values()}) == 1  # one model, one data
    for name in ("topk:0.01+ef14", LOCAL_TOPK):
        assert {t.compressor for t in runs[name].tensors} == {"topk:0.01", "none"}
    assert {t.compressor for t in runs["script"].tensors} == {"topk:0.5", "none"}
    assert runs["ddp"].tensors == []
    # Exchanges after two, four and six steps, and one at the end.
    assert runs[LOCAL_TOPK].bytes_reported < runs["topk:0.01+ef14"].bytes_reported
    # By the kernel's count, which others on loopback add to, no less than by thinwire's own (some
    # of what it adds for gloo's messages apart).
    topk, own = runs["topk:0.01+ef14"], runs["script"]
    assert all(run.bytes_counted > run.bytes_reported - 6 * 200 for run in (topk, own))
    dense = 6 * 4 * document.settings.parameters
    assert topk.bytes_reported < own.bytes_reported < dense < runs["ddp"].bytes_counted


def test_a_method_of_local_steps_has_settings_of_its_own(monkeypatch):
    made = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(
        "thinwire.compare.training.ScriptLocalSteps",
        lambda meter, model, optimizer, compressor, **options: made.append((compressor, options)),
    )
    method = read("adam-update:gain=true", "ddp")
    observer = _ScriptObserver(Job(method, 0), RankPlan((), 1.0, loopback=True), None)
    observer._detach = lambda model: None
    given = dict.fromkeys(inspect.signature(tw.LocalSteps).parameters)
    for name in ("model", "optimizer", "compressor"):
        del given[name]
    observer._made_local(torch.nn.Linear(2, 2), None, "topk:0.5", **given)
    ((compressor, left),) = made
    assert compressor == "adam-update:gain=true"
    assert left.keys() == {
        *("group", "collective", "nodes", "granularity", "exclude", "scaler", "seed", "max_bytes"),
        *("timeout", "check_every", "measure_every"),
    }


def test_a_script_that_hangs_is_shown_with_its_error(forked, script):
    document, methods, _ = compared(
        workload=str(script), arguments=("hang",), hosts=2, links=("100mbit",) * 2,
        methods=("ddp",), patience=4.0,
    )  # fmt: skip
    assert methods["ddp"].error == "no step within 4 s: it hangs"
    assert "plain DDP did not finish" in document.verdict


def children_of(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in entry.read_bytes().decode(errors="replace"):
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_leaves_no_process_and_a_report_of_what_was_done(script, tmp_path, number):
    mine = tmp_path / f"mark{os.getpid()}.py"
    script.rename(mine)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", "compare", "--workload", str(mine), "--hosts", "2",
         "--no-torch-hooks", "--with", "ddp", "--project", "--out", str(tmp_path / "out"), "--",
         "hang"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**ENV, "TMPDIR": str(temporary)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "seed 0 ..." in line:
                break
        time.sleep(0.5)
        process.send_signal(number)
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert "interrupted" in rest
    assert not children_of(mine.name)
    assert not list(temporary.iterdir())
    assert read_document(tmp_path / "out" / "data.json").interrupted


# Sharded models


def test_methods_for_sharded_models_have_the_feedback_that_attach_would_choose():
    assert [read(name, "fsdp").name for name in ("quantize:4", "quantize:2", "topk:0.1")] == [
        *("quantize:4", "quantize:2+ef14", "topk:0.1+ef14")
    ]
    assert read("quantize:4+ef14", "fsdp").name == "quantize:4+ef14"
    assert [read(name, "hsdp").name for name in ("quantize:4", "dgc:0.1", "powersgd:4")] == [
        *("quantize:4+ef14", "dgc:0.1", "powersgd:4+ef14")
    ]
    for name, each in PARALLELISMS.items():
        assert each.baselines[0] == name
        assert [read(text, name).name for text in (*each.baselines, *each.methods)] == [
            *(*each.baselines, *each.methods)
        ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fsdp", "--with", "ddp"], "it is the baseline of --parallel ddp"),
        (["ddp", "--with", "fsdp"], "it is the baseline of --parallel fsdp"),
        (["fsdp", "--with", "torch:fp16"], "it is a hook of DistributedDataParallel"),
        (["hsdp", "--with", "diloco:5"], "local steps train a whole model on each host"),
        (["hsdp", "--with", "onebit-adam"], "it exchanges gradients of a whole model by itself"),
        (["fsdp", "--with", "powersgd:4"], "powersgd:4 does not go with --parallel fsdp: "),
        (["fsdp", "--with", "dgc:0.1"], "needs averages on all ranks, and FSDP scatters them"),
        (["ddp", "--weights", "quantize:8"], "--weights is for --parallel fsdp"),
        (["hsdp", "--weights", "quantize:8"], "--weights is for --parallel fsdp"),
        (
            ["fsdp", "--weights", "powersgd:4"],
            "applies by itself, such as quantize:8, got powersgd:4",
        ),
        (["fsdp", "--weights", "quantise:8"], "--weights: unknown compressor 'quantise'"),
        (["hsdp", "--hosts", "3"], "3 hosts cannot be divided so for 2 replicas, 4 could"),
        (["hsdp", "--racks", "4", "--inter", "1mbit"], "for --racks 4, 8 could"),
    ],
)
def test_what_does_not_go_with_sharded_models_is_told_in_a_line(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--parallel", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_racks_hold_the_replicas_of_shards():
    def replicas(**more):
        return ComparisonSettings(**more).replicas

    assert replicas(parallel="hsdp", hosts=6) == 2
    assert replicas(parallel="hsdp", hosts=6, racks=3, inter="1mbit") == 3
    assert (replicas(parallel="fsdp"), replicas(parallel="ddp", hosts=6)) == (1, 6)


@pytest.mark.parametrize(("parallel", "title"), [("fsdp", "FSDP2"), ("hsdp", "HSDP")])
def test_sharded_models_are_compared_with_plain_ones(parallel, title, monkeypatch):
    methods = [method_row(parallel, runs_of(1.0, 80.0)), method_row("onebit", runs_of(0.1, 80.0))]
    document = document_with(methods, parallel=parallel, weights="quantize:8")
    document.baseline = parallel
    analysis.summarise(document)
    verdict = document.verdict = verdict_of(document)
    assert verdict.startswith(f"onebit reached plain {title}'s final loss 10.0x sooner")
    assert verdict.endswith(f"(plain {title} 80).")
    console = Console(file=io.StringIO(), width=200)
    print_document(document, console)
    shown = console.file.getvalue()
    assert f"{title}'s" in shown.partition("onebit")[0]
    assert "parameters by quantize:8" in shown
    monkeypatch.setattr("thinwire.report.page.SECTIONS", {})
    page = draw(document).html
    assert f"sharded by {title}, parameters gathered by quantize:8" in page
    assert f"plain {title}" in page
    assert "DDP" not in page + shown


def sharded(parallel, hosts, *methods, **settings):
    """The document of a comparison on loopback, and the first runs of its methods."""
    comparison = Comparison(
        ComparisonSettings(
            parallel=parallel,
            baselines=(parallel,),
            methods=methods,
            hosts=hosts,
            project=True,
            links=("1mbit",) * hosts,
            **settings,
        )
    )
    document = comparison.run(Quiet(), "command")
    assert {m.name: m.error for m in document.methods if m.error} == {}
    return document, {method.name: method.runs[0] for method in document.methods}


def test_models_sharded_by_fsdp_are_compared(forked):
    task = {"workload": SMALL, "steps": 2, "evaluations": 1}
    document, runs = sharded("fsdp", 2, "none", "quantize:4", weights="quantize:8", **task)
    assert runs.keys() == {"fsdp", "none", "quantize:4"}
    plain, none, four = runs.values()
    # One model, one data; parameters that are sent whole at first.
    assert none.losses[0] == four.losses[0] == plain.losses[0]
    assert none.losses == pytest.approx(plain.losses, rel=1e-3)
    assert four.losses[1] not in (none.losses[1], plain.losses[1])
    assert [run.evaluations[0].step for run in runs.values()] == [2] * 3
    assert {t.compressor for t in four.tensors} == {"quantize:4", "none", "quantize:8"}
    assert plain.bytes_reported is None
    assert four.bytes_reported < none.bytes_reported < plain.bytes_counted
    for run in runs.values():
        assert 0 < run.split.network < run.split.whole
    assert document.baseline == "fsdp"
    assert "plain FSDP2" in document.verdict
    assert any("over gloo plain FSDP2 sends" in note for note in document.notes)


def test_replicas_of_shards_are_compared(forked):
    task = {"workload": SMALL, "steps": 2, "evaluations": 1}
    document, runs = sharded("hsdp", 4, "none", "powersgd:1", **task)
    plain, none, low_rank = runs.values()
    # A mean of four, whose sums are formed in another order.
    assert none.losses == pytest.approx(plain.losses, rel=1e-5)
    assert none.final_metric == plain.final_metric
    assert {t.compressor for t in low_rank.tensors} == {"powersgd:1", "none"}
    assert low_rank.bytes_reported < none.bytes_reported
    assert "plain HSDP" in document.verdict


@pytest.mark.parametrize(("mesh", "begins"), [(None, []), ("a mesh", ["warm up"])])
def test_the_first_step_of_sharded_models_counts_for_no_method(mesh, begins, monkeypatch):
    taken = []

    class Trained:
        def __init__(self, _task, job, *_):
            self.name = job.method.name

        def run(self):
            taken.append(self.name)
            return record([1.0])

    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("thinwire.compare.models.mesh_of", lambda _: mesh)
    monkeypatch.setattr("thinwire.compare.training.Training", Trained)
    monkeypatch.setattr("thinwire.compare.training.warm_up", lambda *_: taken.append("warm up"))
    jobs = Job(read("fsdp", "fsdp"), 0), Job(read("none", "fsdp"), 0)
    run_jobs(RankPlan(jobs, 9.0, True, workload=SMALL, parallel="fsdp"), None)
    assert taken == [*begins, "fsdp", "none"]


def test_the_clock_of_collectives_counts_what_training_waits_for(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args: calls.append(args) or "done")
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *args: dist.all_reduce(*args))
    before = dist.all_reduce
    with CollectiveClock() as clock:
        other = threading.Thread(target=dist.all_reduce, args=(1,))
        other.start()
        other.join()
        assert clock.seconds == 0
        assert dist.all_gather_into_tensor(2) == "done"
        first = clock.seconds
        assert first > 0
        dist.all_reduce(3)
        assert clock.seconds > first
    assert dist.all_reduce is before
    assert calls == [(1,), (2,), (3,)]


SHARDED_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import thinwire as tw

how = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2),
                        mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.Linear(100, 10))
for part in (model[0], model):
    fully_shard(part, mesh=mesh["shard"])
if how == "attach":
    wire = tw.attach(model, "topk:0.5", min_numel=10)
elif how == "replicas":
    wire = tw.attach(model, "topk:0.5", replicate=mesh["replicate"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + int(os.environ["THINWIRE_SEED"]))
for step in range(3):
    x = torch.randn(8, 200)
    for last in (False, True):  # accumulation: the two passes are one step
        model.set_requires_gradient_sync(last)
        (model(x) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
tw.track(90.0, "score, $")
if how in ("attach", "replicas"):
    assert wire.summary()
dist.destroy_process_group()
"""


@pytest.fixture
def sharded_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SHARDED_SCRIPT)
    return str(path)


def test_a_script_that_shards_its_model_is_compared(forked, sharded_script):
    document, runs = sharded(
        "fsdp", 2, "topk:0.01", "script", workload=sharded_script, arguments=("plain",),
        weights="quantize:8",
    )  # fmt: skip
    assert {run.steps for run in runs.values()} == {3}
    assert {run.final_metric for run in runs.values()} == {90.0}
    assert document.settings.parameters == 20_100 + 1_010
    plain, topk, own = runs.values()
    assert own.losses == plain.losses
    assert topk.losses[0] == plain.losses[0]
    assert {t.compressor for t in topk.tensors} == {"topk:0.01", "none", "quantize:8"}
    assert plain.tensors == own.tensors == []
    assert topk.bytes_reported < plain.bytes_counted


@pytest.mark.slow
def test_a_script_that_attaches_to_its_sharded_model_is_compared(forked, sharded_script):
    _, runs = sharded(
        "fsdp", 2, "topk:0.01", "script", workload=sharded_script, arguments=("attach",)
    )
    plain, topk, own = runs.values()
    assert plain.tensors == []
    assert {t.compressor for t in topk.tensors} == {"topk:0.01", "none"}
    assert {t.compressor for t in own.tensors} == {"topk:0.5", "none"}
    assert topk.bytes_reported < own.bytes_reported


@pytest.mark.slow
def test_a_script_with_replicas_of_shards_is_compared(forked, sharded_script):
    _, runs = sharded("hsdp", 4, "none", workload=sharded_script, arguments=("replicas",))
    plain, none = runs.values()
    assert none.losses == pytest.approx(plain.losses, rel=1e-5)
    assert plain.tensors == []
    assert {t.compressor for t in none.tensors} == {"none"}


def test_a_script_with_replicas_must_say_which(forked, sharded_script):
    settings = ComparisonSettings(
        parallel="hsdp", baselines=("hsdp",), methods=("hsdp",), project=True,
        workload=sharded_script, arguments=("plain",), hosts=4,
    )  # fmt: skip
    document = Comparison(settings).run(Quiet(), "command")
    assert "the script must say over which group replicas" in document.methods[0].error
