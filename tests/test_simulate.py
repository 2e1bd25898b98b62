"""The simulator: links by hand, equal ranks against the formulas, what unevenness must do."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.collectives.costs import (
    CROWDED,
    Coding,
    Due,
    Interconnect,
    direct,
    held_up,
    overlapped_step,
    plain_sum,
    ring,
)
from thinwire.plan import simulate
from thinwire.plan.events import pass_links, turn_ring
from thinwire.plan.simulate import (
    COLLECTIVES,
    WITHOUT_MEETING,
    World,
    direct_round,
    exchange_round,
    grouped_round,
    make_world,
    ring_round,
    simulate_step,
    tree_round,
)
from thinwire.plan.sizes import UniformModel
from thinwire.policies.codecs import shipped

RATE = 1e8


def passed(path: list[list[int]], sizes: list[list[float]], release: list[float]) -> list[float]:
    rates = np.ones(8)
    begin = np.array(release)
    found = pass_links(begin, np.zeros(len(release)), np.array(path), np.array(sizes), rates)
    return found[1].tolist()


def test_a_link_serves_one_after_the_other() -> None:
    assert passed([[0], [0], [1]], [[2.0], [3.0], [4.0]], [0.0, 1.0, 0.0]) == [2.0, 5.0, 4.0]


def test_a_message_cuts_through() -> None:
    # Through two free links at once; behind a slower one it ends when that has passed it.
    assert passed([[0, 1]], [[5.0, 5.0]], [0.0]) == [5.0]
    assert passed([[0, 1]], [[5.0, 2.0]], [1.0]) == [6.0]
    # The second link is taken until 4: the message waits there, not in the first.
    assert passed([[1, -1], [0, 1]], [[4.0, 0.0], [1.0, 3.0]], [0.0, 0.0]) == [4.0, 7.0]


def naive(
    release: list[float], path: list[list[int]], sizes: list[list[float]], links: int
) -> list[float]:
    """The same in the shortest way: always the message that comes first to its next link."""
    free, head, end = [0.0] * links, list(release), [0.0] * len(release)
    place = [0] * len(release)
    while True:
        waiting = [m for m in range(len(release)) if place[m] < len(path[m])]
        if not waiting:
            return end
        m = min(waiting, key=lambda each: (head[each], each))
        link, size = path[m][place[m]], sizes[m][place[m]]
        begin = max(head[m], free[link])
        free[link] = begin + size
        head[m], end[m] = begin, max(end[m], begin + size)
        place[m] += 1


@given(data=st.data(), count=st.integers(1, 12))
def test_the_heap_keeps_the_order_of_time(data: st.DataObject, count: int) -> None:
    whole = st.integers(0, 9)
    release = data.draw(st.lists(whole.map(float), min_size=count, max_size=count))
    links = st.lists(st.integers(0, 4), min_size=3, max_size=3)
    path = data.draw(st.lists(links, min_size=count, max_size=count))
    lengths = st.lists(whole.map(float), min_size=3, max_size=3)
    sizes = data.draw(st.lists(lengths, min_size=count, max_size=count))
    assert passed(path, sizes, release) == naive(release, path, sizes, 8)


@given(
    begin=st.lists(st.integers(0, 50), min_size=2, max_size=9),
    hops=st.integers(0, 400),
    data=st.data(),
)
def test_a_ring_that_moves_alike_may_jump(begin: list[int], hops: int, data: st.DataObject) -> None:
    size = len(begin)
    hop = data.draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    t = [float(each) for each in begin]
    for _ in range(hops):
        t = [max(t[j - 1], t[j]) + hop[j] for j in range(size)]
    found = turn_ring(np.array(begin, dtype=float), np.array(hop, dtype=float), hops)
    assert found.tolist() == pytest.approx(t, rel=1e-12)


# Equal ranks: the formulas


@pytest.mark.parametrize("ranks", [2, 4, 16, 100])
def test_equal_ranks_take_what_the_formulas_say(ranks: int) -> None:
    world, network = make_world(ranks, RATE, delay=1e-3), Interconnect(ranks, RATE, delay=1e-3)
    zero = np.zeros(ranks)
    found = ring_round(world, zero, 2 * (ranks - 1), 1e6 / ranks)
    assert found.ended.max() == pytest.approx(plain_sum(network, 1e6).seconds)
    assert found.ended.min() == found.ended.max()
    # Few ranks that begin together send each to another one at any time: nothing is crowded.
    message, together = 1e5, ranks <= simulate.EXACT
    crowd = message / (message + held_up(ranks, message)) if together else 1.0
    free = Interconnect(ranks, RATE / crowd, delay=1e-3)
    direct_seconds = direct_round(world, zero, message).ended.max()
    assert direct_seconds == pytest.approx(direct(free, message).seconds, rel=0.02)


def test_a_step_of_equal_ranks_is_that_of_the_formulas() -> None:
    table, ranks = shipped()["cores-1"], 8
    world, network = make_world(ranks, RATE), Interconnect(ranks, RATE)
    for spec in ("quantize:4", "topk:0.01", "cast:bf16"):
        due = UniformModel(10**7).compressed(tw.parse(spec), table, ranks)
        found = simulate_step(world, due, 0.1)
        # Eight that begin together are no crowd: the formula lies above by at most that.
        formula = overlapped_step(due, network, 0.1).seconds
        assert CROWDED * formula <= found.seconds <= 1.02 * formula


@pytest.mark.parametrize(
    ("delay", "parameters"),
    [pytest.param(0.05, 10**6, id="round trips"), pytest.param(1e-3, 10**8, id="bytes")],
)
def test_over_a_distance_a_step_is_that_of_the_formulas(delay: float, parameters: int) -> None:
    table, ranks = shipped()["cores-1"], 8
    world, network = make_world(ranks, RATE, delay=delay), Interconnect(ranks, RATE, delay=delay)
    # Eight that begin together are no crowd, as above; sums around a ring are none anyway.
    for spec, least in (("topk:0.01", CROWDED), ("cast:bf16", 0.999)):
        due = UniformModel(parameters).compressed(tw.parse(spec), table, ranks)
        due = [each._replace(ready=0.0) for each in 5 * due]
        found = simulate_step(world, due, 0.1).seconds
        formula = overlapped_step(due, network, 0.1).seconds
        assert least * formula <= found <= 1.001 * formula


def far(ranks: int = 2) -> tuple[World, Due]:
    """Round trips of a second, and an exchange of two of them that takes nothing else."""
    world = make_world(ranks, 1e15, delay=0.5, start=0.0, peer=0.0)
    return replace(world, meeting=0.0), Due(Coding("whole", 1.0), 1e6, 0.0)


def test_exchanges_that_wait_share_round_trips() -> None:
    # The second and third begin a second after the first, the fourth when that has ended.
    world, due = far()
    found = [simulate_step(world, count * [due], 0.1, "gather").seconds for count in range(1, 5)]
    assert found == pytest.approx([2.0, 3.0, 3.0, 4.0], rel=1e-3)


def test_an_exchange_is_released_when_it_waits_on_all_ranks() -> None:
    # One rank has the second and third half a second late, when the first has begun. So the second
    # begins when that has ended, at 2, and the third a round trip later.
    world, due = far()
    world = replace(world, speed=np.array([0.001, 1.0]))
    late = due._replace(ready=0.5)
    assert simulate_step(world, [due, late, late], 1.0, "gather").seconds == pytest.approx(
        5.0, rel=1e-3
    )
    # If it has all three a second late, all wait when the first begins there, at 1. That ends at 3;
    # both others begin at 2.
    all_late = [due._replace(ready=1.0)] * 3
    assert simulate_step(world, all_late, 1.0, "gather").seconds == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("collective", WITHOUT_MEETING)
def test_without_meetings_exchanges_go_one_after_the_other(collective: str) -> None:
    world, due = far(6)
    due = due._replace(coding=Coding("plain"))
    once = simulate_step(world, [due], 0.1, collective).seconds
    assert once >= 1.0
    found = simulate_step(world, 4 * [due], 0.1, collective).seconds
    assert found == pytest.approx(4 * once)


def test_aggregated_messages_take_as_long_as_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for settings in (
        {"ranks_per_rack": None},
        {"ranks_per_rack": 8, "oversubscribed": 4.0, "rack_delay": 1e-3},
        {"ranks_per_rack": 8, "regions": 3, "region_rate": RATE, "region_delay": 0.02},
    ):
        world = make_world(48, RATE, **settings)  # type: ignore[arg-type]
        begin = np.linspace(0.0, 0.01, 48)
        exact = direct_round(world, begin, 1e5).ended.max()
        with monkeypatch.context() as patch:
            patch.setattr(simulate, "EXACT", 1)
            rough = direct_round(world, begin, 1e5).ended.max()
        # Who meets whom at which receiver is chance: both lie between no crowd and a crowd.
        assert rough == pytest.approx(exact, rel=0.3), settings


# Unevenness


def due_of(parameters: int = 10**6) -> list[Any]:
    return UniformModel(parameters).compressed(tw.parse("quantize:4"), shipped()["cores-1"], 8)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nobody_ends_before_the_last_has_come(collective: str) -> None:
    world = make_world(30, RATE, ranks_per_rack=5, uneven=0.5, seed=1)
    begin = np.zeros(30)
    begin[17] = 100.0
    found = exchange_round(world, begin, Coding("whole", 0.5), 1e5, collective)
    # A ring's hops reach a rank's neighbours in turn, each of them within 2 (P - 1) hops.
    assert found.ended.min() > 100.0


def test_stragglers_hold_up_all() -> None:
    even = simulate_step(make_world(50, RATE), due_of(), 1.0)
    slow = simulate_step(make_world(50, RATE, stragglers=0.02, slowness=3.0), due_of(), 1.0)
    assert slow.seconds >= 3.0 > even.seconds
    assert slow.waiting > even.waiting


def test_an_oversubscribed_rack_is_slower() -> None:
    times = [
        simulate_step(
            make_world(200, RATE, ranks_per_rack=20, oversubscribed=factor), due_of(10**8), 0.1
        ).seconds
        for factor in (1.0, 8.0)
    ]
    assert times[1] > 2 * times[0]


def test_distance_between_regions_is_waited_for() -> None:
    near = make_world(20, RATE, ranks_per_rack=5, regions=2, region_rate=RATE)
    far = make_world(20, RATE, ranks_per_rack=5, regions=2, region_rate=RATE, region_delay=0.1)
    found = [simulate_step(world, due_of(), 0.1).seconds for world in (near, far)]
    assert found[1] > found[0] + 0.1


def test_a_slow_link_slows_the_ring_around_it() -> None:
    world = make_world(10, RATE)
    world.up[3] = RATE / 10
    slow = ring_round(world, np.zeros(10), 18, 1e6).ended.max()
    assert slow == pytest.approx(ring(Interconnect(10, RATE / 10), 18, 1e6).seconds, rel=0.01)


def test_trees_and_groups_meet_nobody() -> None:
    world = make_world(1000, RATE, ranks_per_rack=40, delay=1e-3)
    tree = tree_round(world, np.zeros(1000), 1e4).ended
    assert tree.min() > 0
    # Five levels of four children, up and down, a round trip each.
    assert tree.max() < 2 * 5 * (2e-3 + 5 * 1e4 / RATE + 1e-3)
    grouped = grouped_round(world, np.zeros(1000), 1e4, 1e4).ended
    flat = ring_round(world, np.zeros(1000), 1998, 10.0).ended
    assert grouped.max() < flat.max()


def test_ten_thousand_ranks() -> None:
    world = make_world(10_000, RATE, ranks_per_rack=40, oversubscribed=4.0, stragglers=0.01)
    for collective in ("plain", "auto", "tree"):
        found = simulate_step(world, due_of(10**7), 1.0, collective)
        assert math.isfinite(found.seconds)
        assert found.seconds >= 2.0


def test_wrong_worlds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_world(0, RATE)
    with pytest.raises(ValueError, match="collective must be"):
        simulate_step(make_world(2, RATE), due_of(), 1.0, "carrier pigeon")


def test_one_rank_computes_alone() -> None:
    world: World = make_world(1, RATE)
    assert simulate_step(world, due_of(), 1.0).seconds == pytest.approx(1.0, rel=0.05)
