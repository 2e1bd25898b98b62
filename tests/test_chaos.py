"""A small seeded part of benchmarks/chaos.py and benchmarks/soak.py.

The runs themselves say what must hold; see chaos.py. Their ranks fork from the server of ranks.py.
"""

import os
import sys
from pathlib import Path

import pytest
import ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import chaos
import chaos_faults
import soak

# The first test of a new checkout compiles all kernels.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 120.0  # seconds for a run, on a busy machine

RUNS = [  # one of each kind of fault, in trainings that exchange in different ways
    chaos.Plan.of(seed, only.split(","))
    for seed, only in [
        (1, "kill,ddp-gather,finish,3"),
        (2, "kill,all-reduce,connecting,2"),
        (3, "raise,reducer,exchange,3"),
        (4, "half-close,ddp-sparse,transfer,2"),
        (5, "pause,onebit-adam,meeting,2"),
        (6, "stop,reduce-scatter,prepare,2"),
    ]
]


@pytest.fixture(scope="module")
def suite():
    with chaos.Suite(ranks.server(), LIMIT) as made:
        yield made


@pytest.mark.parametrize("plan", RUNS, ids=lambda plan: plan.fault.kind)
def test_what_is_done_to_a_rank_breaks_no_promise(suite, plan):
    result = suite.run(plan)
    assert not result.flaws, f"{plan}: {result.flaws}\n{result.last_words}"
    assert result.committed, f"{plan}: the point was not reached"


def test_all_points_at_which_a_fault_can_be_injected_exist():
    for where in chaos_faults.POINTS:
        assert list(chaos_faults.methods(where))


def test_a_seed_says_all_of_a_run():
    plans = [chaos.Plan.of(seed) for seed in range(200)]
    assert plans == [chaos.Plan.of(seed) for seed in range(200)]
    assert {plan.fault.kind for plan in plans} == set(chaos_faults.KINDS)
    assert {plan.training for plan in plans} >= set(chaos.TRAININGS)


def test_only_what_is_named_is_chosen():
    for seed in range(20):
        plan = chaos.Plan.of(seed, ["raise", "hook", "random moment", "3"])
        assert (plan.fault.kind, plan.fault.where, plan.size) == ("raise", "hook", 3)
        assert plan.training.startswith("ddp-")
    with pytest.raises(ValueError, match="nothing can be chosen of saving, all-reduce"):
        chaos.Plan.of(0, ["saving", "all-reduce"])


def test_exchanges_leave_threads_and_descriptors_as_they_are():
    samples = soak.soak(ranks.server(), "all-reduce", 300)
    assert {sample.rank for sample in samples} == {0, 1}
    for rank in range(2):
        verdict = soak.judge("all-reduce", rank, samples)
        assert verdict.count > 250
        assert len(verdict.threads) == len(verdict.descriptors) == 1, verdict


@pytest.mark.parametrize(
    ("grown", "flaw"),
    [
        (lambda step: 0, ""),
        (lambda step: 300 * step, "memory grows by 300 bytes each time, more than 100"),
        (lambda step: (step > 14_000) * 2_700_000, "memory grows by 2.7 MB at once"),
        (lambda step: 10 * step + (step == 9_000) * 500_000, ""),
    ],
)
def test_growth_each_time_is_told_from_growth_at_once(grown, flaw):
    samples = [
        soak.Sample(0, step, 325_000_000 + grown(step), 0, 8, 21)
        for step in range(500, 20_500, 500)
    ]
    verdict = soak.judge("steps", 0, samples)
    assert len(verdict.flaws) == bool(flaw), verdict
    assert all(each.startswith(flaw) for each in verdict.flaws), verdict


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_what_a_process_holds_more_than_before_is_seen():
    from resources import held

    before = held()
    with open(os.devnull) as file:
        assert held().beyond(before) == {"/dev/null open": 1}
        assert file
    assert held().beyond(before) == {}
