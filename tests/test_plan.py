"""The cost model: formulas against answers by hand, bytes against real frames, the command."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run

import thinwire as tw
from thinwire.bench import codecs
from thinwire.cli import main
from thinwire.collectives import choose as choosing
from thinwire.collectives import costs
from thinwire.collectives.costs import (
    FRAMING,
    NO_EXCHANGE,
    ChannelSchedule,
    Coding,
    Due,
    ExchangeCost,
    Interconnect,
    direct,
    exchange_cost,
    gather,
    local_step,
    meeting,
    overlapped_step,
    plain_sum,
    ring,
    slow_start,
    summable,
    twoshot,
    waiting_step,
)
from thinwire.collectives.order import AT_ONCE
from thinwire.collectives.reduction import Part, Reduction
from thinwire.collectives.stream import slice_count
from thinwire.formatting import show_seconds
from thinwire.kernels import Key
from thinwire.plan.document import tables_of
from thinwire.plan.predict import (
    METHODS,
    Setting,
    advice,
    break_even,
    predict,
    read_method,
    step_of,
)
from thinwire.plan.sizes import LayeredModel, UniformModel, layers_of, read_layers
from thinwire.policies.codecs import MEMORY, CodecRow, CodecTable, shipped, table_from, table_of

MB = 1_000_000
RINGED = FRAMING * MB / costs.RINGS  # of a link around which rings move 1 MB/s of payload
FREE = {"start": 0.0, "peer": 0.0, "meeting": 0.0}  # software costs nothing


def table() -> CodecTable:
    return shipped()["cores-1"]


# Alpha and beta by hand


def test_a_ring_all_reduce_takes_2_p_minus_1_hops() -> None:
    # 4 ranks, 1 MB/s of payload, 6 hops of a quarter of 4 MB each. A round trip of 2 s is waited
    # for while half of the chunk moves, one of 0.5 s is hidden by it.
    far = Interconnect(4, RINGED, delay=1.0, **FREE)
    assert plain_sum(far, 4 * MB).seconds == pytest.approx(6 * (2.0 + 0.5))
    network = Interconnect(4, RINGED, delay=0.25, **FREE)
    found = plain_sum(network, 4 * MB)
    assert found.seconds == pytest.approx(6 * 1.0)
    pair = Interconnect(2, RINGED, delay=0.25, **FREE)
    assert plain_sum(pair, 2 * MB).seconds == pytest.approx(2 * (0.5 + 1.0))
    assert found.sent == pytest.approx(1.5 * 4 * MB)
    assert found.rounds == 6


def test_an_all_gather_takes_p_minus_1_hops() -> None:
    network = Interconnect(5, RINGED, **FREE)
    assert ring(network, 4, MB).seconds == pytest.approx(4.0)


def test_messages_straight_to_all_share_the_link() -> None:
    # Between two, what goes one way waits for what goes the other.
    pair = Interconnect(2, FRAMING * MB, delay=0.5, **FREE)
    lost = (1 / costs.PAIR - 1) * costs.HELD / MB
    assert direct(pair, MB).seconds == pytest.approx(1.0 + 1.0 + lost)
    crowd = Interconnect(5, FRAMING * MB, **FREE)
    short = costs.HELD / 2
    assert direct(crowd, short).seconds == pytest.approx(4 * short / MB / costs.CROWDED)
    # Of a long message, no more is lost than a queue holds.
    lost = 4 * (1 / costs.CROWDED - 1) * costs.HELD / MB
    assert direct(crowd, MB).seconds == pytest.approx(4.0 + lost)
    assert direct(crowd, MB).sent == 4 * MB


def test_ranks_of_a_host_share_its_link() -> None:
    # Each of 2 ranks sends 1 MB to each of the 2 ranks of the other host.
    network = Interconnect(2, FRAMING * MB, ranks_per_host=2, inside=math.inf, **FREE)
    lost = 4 * (1 / costs.PAIR - 1) * costs.HELD / MB
    assert direct(network, MB).seconds == pytest.approx(4.0 + lost)
    assert direct(network, MB).egress == 2 * MB
    # Of a ring only one rank of each host sends to the other.
    assert ring(network, 3, MB).seconds == pytest.approx(3.0 / costs.RINGS)


def test_racks_share_an_uplink() -> None:
    # 2 racks of 2 hosts: 2 * 2 messages leave a rack.
    network = Interconnect(4, 1e12, racks=2, uplink=FRAMING * MB, uplink_delay=0.25, **FREE)
    assert direct(network, MB).seconds == pytest.approx(4.0 / costs.CROWDED_UPLINK + 0.5)
    assert ring(network, 1, MB).seconds == pytest.approx(1.0 / costs.RINGS)


def test_hosts_that_share_a_machine_share_what_it_moves() -> None:
    network = Interconnect(4, 1e15, together=MB, **FREE)
    assert ring(network, 1, MB).seconds == pytest.approx(4.0)
    assert direct(network, MB).seconds == pytest.approx(12.0)


def test_software_counts_for_each_round_and_each_message() -> None:
    network = Interconnect(4, 1e15, start=1.0, peer=0.1)
    assert direct(network, 0).seconds == pytest.approx(1.3)
    assert ring(network, 6, 0).seconds == pytest.approx(6.6)


def test_a_tree_waits_once_per_level() -> None:
    network = Interconnect(8, FRAMING * MB, delay=0.1, trees=True, **FREE)
    assert plain_sum(network, 8 * MB).seconds == pytest.approx(2 * 3 * 0.1 + 14.0)


def test_slow_start_doubles_the_window() -> None:
    window = costs.FIRST_WINDOW
    assert slow_start(window, 1e9, 0.1) == 0.0
    assert slow_start(1e9, 1e9, 0.0) == 0.0
    # 1, 2, 4 windows in three round trips are not enough for 15: the last 8 go in a fourth.
    assert slow_start(15 * window, 1e12, 0.1) == pytest.approx(0.3, abs=1e-6)
    # A link that is full at once loses nothing.
    assert slow_start(1e9, window / 0.1, 0.1) == 0.0


def test_short_messages_come_along() -> None:
    network = Interconnect(4, FRAMING * MB, delay=1.0, **FREE)
    assert gather(network, 1000).rounds == 1
    assert gather(network, MB).rounds == 4  # a meeting, then three hops
    assert twoshot(network, 4000).rounds == 2
    assert summable(network, 100).rounds == 1
    assert summable(network, MB).rounds == 7


def test_one_rank_exchanges_nothing() -> None:
    network = Interconnect(1, MB)
    cost = exchange_cost(Coding("whole", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 100, network)
    assert cost.moving == cost.sent == 0
    assert plain_sum(network, MB).seconds == 0
    for coding in (Coding("plain", exchange=1.0), Coding("whole", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)):
        found = waiting_step([Due(coding, MB, 0.0)], [Due(coding, MB, 1.0)], network, 0.5)
        assert found == (0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0), "it waits for nobody"


def test_exchanges_queue_on_one_channel() -> None:
    # encode 1 s, move 8 s, decode 1 s; ready at 1 and 2 of 4 s. The second is encoded while the
    # first moves, which is decoded while the second does: 1 + 1 + 8 = 10, then 8 + 1 more. Nobody
    # waits for round trips, so that the second may begin before the first has moved gains nothing.
    network = Interconnect(2, FRAMING * MB, **FREE)
    coding = Coding("summable", frame=4.0, encode=1 / MB, decode=1 / MB)
    first = exchange_cost(coding, MB, network)
    sum_seconds = summable(network, 4 * MB).seconds
    assert (first.encode, first.decode) == (1.0, 1.0)
    assert first.moving == pytest.approx(sum_seconds)
    cost = overlapped_step([Due(coding, MB, 0.25), Due(coding, MB, 0.5)], network, 4.0)
    assert cost.seconds == pytest.approx(1 + 1 + 2 * sum_seconds + 1)
    assert cost.hidden == pytest.approx(4 + 2 * sum_seconds - (cost.seconds - 4.0))
    # One that comes when the first has arrived does not wait for its decoding: it comes at 2.5 + 8,
    # is encoded in 1 s, moves in 8 s and is decoded in 3 s.
    line, slow = ChannelSchedule(network.round_trip), first._replace(decode=3.0)
    assert line.add(1.0, slow) == pytest.approx(2 + sum_seconds + 3)
    assert line.add(2.5 + sum_seconds, slow) == pytest.approx(
        2.5 + sum_seconds + 1 + sum_seconds + 3
    )


def short(rounds: int, trip: float, encode: float = 0.0, decode: float = 0.0) -> ExchangeCost:
    """An exchange of no bytes to speak of: so many round trips, and codecs."""
    own, trips = NO_EXCHANGE, rounds * trip
    return own._replace(encode=encode, moving=trips, decode=decode, rounds=rounds, trips=trips)


def test_what_waits_shares_round_trips_once_it_is_released() -> None:
    # Round trips of 10 s. The first goes alone; what waited when it began knows that after 10 s.
    # The fourth begins when the first has ended, the fifth to seventh when the second to fourth
    # have.
    line = ChannelSchedule(10.0)
    assert [line.add(0.0, short(1, 10.0)) for _ in range(7)] == [10, 20, 20, 20, 30, 30, 30]
    # Of two round trips each: the second and third begin at 10, the fourth at 20, when the first
    # has ended, the fifth and sixth at 30, the seventh at 40.
    line = ChannelSchedule(10.0)
    assert [line.add(0.0, short(2, 10.0)) for _ in range(7)] == [20, 30, 30, 40, 50, 50, 60]
    # A step has the same: tensors of 4 bytes go with one record.
    network = Interconnect(2, 1e15, delay=5.0, **FREE)
    due = [Due(Coding("summable"), 1, 0.0)]
    for count, seconds in ((1, 10.0), (4, 20.0), (7, 30.0)):
        assert overlapped_step(count * due, network, 0.1).seconds == pytest.approx(seconds)
        found = local_step(count * due, network, 0.1, every=1).seconds
        assert found == pytest.approx(0.1 + seconds)


def test_what_does_not_wait_when_another_begins_goes_behind_it() -> None:
    # Each comes when the one before has ended: one after the other, 1 + 20 + 2 s each.
    line, ended = ChannelSchedule(10.0), 0.0
    for number in range(5):
        ended = line.add(ended, short(2, 10.0, encode=1.0, decode=2.0))
        assert ended == pytest.approx(23.0 * (number + 1))
    # The second and third come when the first has begun. So the second begins when that has moved,
    # at 20, and the third a round trip later, at 30, as it waited then.
    line = ChannelSchedule(10.0)
    arrivals = (0.0, 5.0, 5.0)
    assert [line.add(each, short(2, 10.0)) for each in arrivals] == [20, 40, 50]


def test_exchanges_at_a_time_are_not_faster_than_the_link() -> None:
    # Rings of 6 hops of 1 s each: round trips of 0.5 s hide behind what moves. Of five at once only
    # meetings wait, each while another moves.
    network = Interconnect(4, RINGED, delay=0.25, **FREE)
    meets = meeting(network).seconds
    due = [Due(Coding("summable"), MB, 0.0)]
    assert overlapped_step(due, network, 0.1).seconds == pytest.approx(meets + 6.0)
    whole = overlapped_step(5 * due, network, 0.1).seconds
    assert whole == pytest.approx(5 * (meets - 0.5 + 6.0))
    # What is left without round trips is what hosts without delay take, also inside of hosts.
    many = network._replace(ranks_per_host=2)
    for spec in ("none", "quantize:4", "topk:0.01"):
        coding = table().coding(tw.parse(spec))
        for numel, nodes in product((10, MB, 16 * MB), (False, True)):
            cost = exchange_cost(coding, numel, many, nodes)
            near = exchange_cost(coding, numel, many._replace(delay=0.0), nodes)
            assert near.trips == 0 < cost.trips
            assert cost.moving - cost.trips == pytest.approx(near.moving), (spec, numel, nodes)


@given(
    trip=st.sampled_from((0.0, 0.1, 1.0)),
    drawn=st.lists(
        st.tuples(*[st.floats(0.0, 3.0)] * 4, st.integers(1, 4)), min_size=1, max_size=12
    ),
)
def test_a_few_exchanges_are_under_way_at_a_time(
    trip: float, drawn: list[tuple[float, float, float, float, int]]
) -> None:
    line, arrived, alone, link = ChannelSchedule(trip), 0.0, 0.0, 0.0
    ended: list[float] = []
    for pause, encode, moving, decode, rounds in drawn:
        arrived += pause
        cost = short(rounds, trip, encode=encode, decode=decode)
        cost = cost._replace(moving=cost.moving + moving)
        ended.append(line.add(arrived, cost))
        alone = max(alone, arrived) + cost.seconds
        link += moving
        slack = 1e-9 * alone
        assert link - slack <= ended[-1] <= alone + slack, "not longer than one after the other"
        assert ended[-1] >= arrived + cost.seconds - slack
        if len(ended) > AT_ONCE:
            assert ended[-1] >= ended[-1 - AT_ONCE] + cost.seconds - slack


def test_large_tensors_go_in_slices() -> None:
    # 16 MB: three slices; what is encoded and summed of the others hides behind what moves.
    network = Interconnect(4, FRAMING * MB, **FREE)
    coding = Coding("whole", 1.0, encode=1 / MB, decode=1 / MB, add=0.1 / MB)
    whole, sliced = (
        exchange_cost(each, 4 * MB, network) for each in (coding, coding._replace(cut=True))
    )
    assert costs.slices_of(coding._replace(cut=True), "twoshot", 4 * MB, 4) == 3
    assert sliced.encode == pytest.approx(whole.encode / 3)
    assert sliced.between == pytest.approx(whole.between / 3)
    assert sliced.decode == whole.decode
    assert sliced.codec == pytest.approx(whole.codec)
    assert sliced.work == pytest.approx(whole.work)
    assert sliced.sent == pytest.approx(whole.sent, rel=1e-3)
    # On a fast link codecs take all of the time.
    fast = exchange_cost(coding._replace(cut=True), 4 * MB, Interconnect(4, 1e15, **FREE))
    assert fast.seconds == pytest.approx(fast.codec + fast.decode)
    # Short tensors and what goes through `sparse` do not.
    assert costs.slices_of(coding._replace(cut=True), "sparse", 4 * MB, 4) == 1
    assert costs.slices_of(coding._replace(cut=True), "gather", MB, 4) == 1


def test_slices_are_those_of_the_collectives() -> None:
    # costs.slices_of and stream.slice_count must not drift apart.
    for spec in ("quantize:4", "natural", "onebit"):
        compressor = tw.parse(spec)
        for numel in (10, 1 << 20, 1 << 21, (1 << 21) - 1, 5 << 20, 1 << 26):
            part = Part(torch.empty(1).expand(numel), None, Key(), compressor)
            for ranks in (2, 16, 17, 1000):
                count = slice_count(Reduction([part], 1.0), ranks) if compressor.grain else 1
                found = costs.slices_of(table().coding(compressor), "twoshot", numel, ranks)
                assert found == count


def test_plain_all_reduces_go_two_at_a_time() -> None:
    # Round trips of 10 s, no bytes to speak of: two at once wait together, the third after one.
    network = Interconnect(2, 1e15, delay=5.0, **FREE)
    dues = [Due(Coding("plain"), 1, 0.0)] * 3
    assert overlapped_step(dues[:2], network, 1.0).seconds == pytest.approx(20.0)
    assert overlapped_step(dues, network, 1.0).seconds == pytest.approx(40.0)
    # Bytes take turns.
    slow = Interconnect(2, RINGED, **FREE)
    dues = [Due(Coding("plain"), MB, 0.0)] * 3
    assert overlapped_step(dues, slow, 1.0).seconds == pytest.approx(12.0)


def test_what_hides_costs_nothing_but_the_cores_time() -> None:
    network = Interconnect(2, 1e15, **FREE)
    coding = Coding("summable", encode=0.1 / MB)
    due = [Due(coding, MB, 0.1)]
    assert overlapped_step(due, network, 1.0).seconds == pytest.approx(1.0)
    assert overlapped_step(due, network, 1.0, busy=1.0).seconds == pytest.approx(1.1)


def test_local_steps_share_out_an_exchange() -> None:
    network = Interconnect(2, FRAMING * MB, **FREE)
    coding = Coding("summable", encode=0.0)
    whole = summable(network, 4 * MB).seconds
    due = [Due(coding, MB, 1.0)]
    assert local_step(due, network, 1.0, every=10).seconds == pytest.approx(1 + whole / 10)
    hidden = local_step(due, network, 1.0, every=10, overlap=2).seconds
    assert hidden == pytest.approx(1 + (whole - 2) / 10)
    parts = [Due(coding, MB / 4, 1.0)]
    quarter = summable(network, MB).seconds
    found = local_step(parts, network, 1.0, every=10, fragments=4).seconds
    assert found == pytest.approx(1 + 4 * quarter / 10)


def test_a_sharded_step_waits_for_everything() -> None:
    network = Interconnect(4, RINGED, **FREE)
    plain = Coding("plain")
    gathers, scatters = [Due(plain, MB, 0.0)] * 2, [Due(plain, MB, 1.0)]
    found = waiting_step(gathers, scatters, network, 1.0)
    # (P - 1) / P of 4 MB twice, then gloo's all-reduce of them.
    assert found.seconds == pytest.approx(1 + 2 * 3.0 + 6.0)
    assert found.sent == 12 * MB
    # NCCL has a reduce-scatter, which sends half of that.
    over_nccl = waiting_step(gathers, scatters, network._replace(trees=True), 1.0)
    assert over_nccl.seconds == pytest.approx(1 + 3 * 3.0)
    assert over_nccl.sent == 9 * MB


def test_the_rule_is_that_of_the_collectives() -> None:
    # costs.collective_of and choose.choose must not drift apart.
    for spec in ("none", "cast:bf16", "quantize:4", "topk:0.01", "topk:0.01|quantize:4", "onebit"):
        compressor = tw.parse(spec)
        coding = table().coding(compressor)
        for message in (100, 10_000, MB):
            for ranks in (2, 3, 4, 8, 100):
                assert costs.collective_of(coding, message, ranks) == choosing.choose(
                    [compressor], message, ranks
                )


# Predicted bytes are those of real exchanges


def _sent(specs: tuple[str, ...], numel: int) -> dict[str, float]:
    found = {}
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for spec in specs:
        x = torch.randn(numel // 500, 500, generator=generator)
        handle = tw.all_reduce(x, spec, residual=torch.zeros_like(x))
        found[spec] = float(handle.bytes_sent)
    return found


LOCAL = tuple(spec for spec in shipped()["cores-1"].rows if not spec.startswith("powersgd"))


@pytest.mark.parametrize(("ranks", "numel"), [(2, 200_000), (4, 200_000), (3, 20_000)])
def test_predicted_bytes_are_those_sent(ranks: int, numel: int) -> None:
    measured = run(_sent, LOCAL, numel, ranks=ranks)
    network = Interconnect(ranks, MB)
    for spec in LOCAL:
        sent = sum(row[spec] for row in measured) / ranks
        expected = exchange_cost(table().coding(tw.parse(spec)), numel, network).sent
        # Frames of this size have headers of up to 64 bytes, messages are rounded up to 64; what
        # sparse sends back depends on how far the ranks' choices agree (fewer than 2 k / P).
        room = 0.35 if spec.startswith(("topk", "randomk")) and ranks > 3 else 0.03
        if spec == "lossless":
            room = 0.1  # a short tensor gives its coder less to learn from
        slack = 4 * 64 * (ranks - 1)
        assert abs(sent - expected) <= room * sent + slack, (spec, sent, expected)


def test_predicted_bytes_of_low_rank_are_those_sent() -> None:
    specs = ("powersgd:1", "powersgd:4", "powersgd:16")
    measured = run(_sent, specs, 200_000, ranks=2)
    model = layers_of([("w", (400, 500))])
    for spec in specs:
        (due,) = model.compressed(tw.parse(spec), table(), 2)
        expected = exchange_cost(due.coding, due.numel, Interconnect(2, MB)).sent
        assert expected == pytest.approx(measured[0][spec], rel=0.02)


# Models


def test_uniform_buckets_hold_all_parameters() -> None:
    for count in (1000, 10**6, 125 * 10**6):
        dues = UniformModel(count).plain()
        assert sum(due.numel for due in dues) == pytest.approx(count)
        assert dues[-1].ready == pytest.approx(1.0)
        assert all(a.ready < b.ready for a, b in pairwise(dues))


def test_layers_are_exchanged_as_ddp_and_the_planner_do() -> None:
    # The CNN of the images workload: its large layer fills the first bucket.
    layers = [("conv", (64, 32, 3, 3)), ("bias", (64,)), ("fc", (128, 3136)), ("fc.bias", (128,))]
    model = layers_of(layers)
    assert [due.numel for due in model.plain()] == [128 + 128 * 3136, 64 + 64 * 32 * 9]
    dues = model.compressed(tw.parse("quantize:4"), table(), 4)
    assert [due.numel for due in dues] == [128 * 3136, 64 * 32 * 9]
    frame = table().coding(tw.parse("quantize:4")).frame
    assert [due.numel * (due.coding.frame - frame) for due in dues] == pytest.approx(
        [4 * 128, 4 * 64], rel=1e-6
    )  # vectors ride along
    (joint,) = model.compressed(tw.parse("powersgd:2"), table(), 4)
    assert joint.numel == model.parameters


def test_layers_come_from_a_safetensors_header(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"a": "b"},
        "w": {"dtype": "BF16", "shape": [10, 20], "data_offsets": [0, 400]},
        "ids": {"dtype": "I64", "shape": [5], "data_offsets": [400, 440]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert read_layers(path).parameters == read_layers(tmp_path).parameters == 200
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": path.name, "ids": path.name}}))
    assert read_layers(index).parameters == 200


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("m.safetensors", b"\xff" * 8, "header"),
        ("m.safetensors", b"abc", "not a safetensors file"),
        ("m.safetensors", (2).to_bytes(8, "little") + b"{}", "at least one tensor"),
        ("m.safetensors", (2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ("m.pt", b"", "pickles"),
        ("m.safetensors.index.json", b"{}", "index"),
    ],
)
def test_a_damaged_file_of_layers_is_refused(
    name: str, content: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_layers(path)


# Tables of codecs


def test_shipped_tables_say_where_they_come_from() -> None:
    tables = shipped()
    assert set(tables) == {"cores-1", "cores-2", "cores-16", "gpu"}
    for each in tables.values():
        assert each.origin.startswith(("measured", "not measured"))
        assert table_from(json.loads(each.to_json())) == each
        for spec, row in each.rows.items():
            assert str(tw.parse(spec)) == spec, "rows are found by the spec's own text"
            assert row.encode > 0
    assert {t.name for t in tables.values() if t.origin.startswith("measured")} == {
        "cores-1",
        "cores-2",
    }


def test_a_strength_that_was_not_measured_is_like_its_nearest() -> None:
    spec, _ = table().row_of(tw.parse("topk:0.02"))
    assert spec == "topk:0.01"
    assert table().coding(tw.parse("topk:0.02")).frame > table().coding(tw.parse(spec)).frame
    with pytest.raises(ValueError, match="--for-plan"):
        table().row_of(tw.parse("tiered:0.01"))


def test_hosts_that_share_cores_are_slower() -> None:
    shared = table().shared(8, 2)
    alone, slower = table().rows["none"], shared.rows["none"]
    assert slower.encode == pytest.approx(4 * MEMORY * alone.encode)
    assert slower.call == pytest.approx(4 * alone.call)
    assert shared.start == pytest.approx(4 * table().start + costs.SCHEDULING)
    # Two on two cores wait for nothing but memory, and joint compressors not for that.
    pair = table().shared(2, 2)
    assert pair.start == table().start
    assert pair.rows["none"].encode == pytest.approx(MEMORY * alone.encode)
    assert pair.rows["powersgd:4"] == table().rows["powersgd:4"]
    assert table().shared(1, 2) == table()


@pytest.mark.parametrize(
    "document", [[], {"schema": "x"}, {"schema": "thinwire.codecs/1"}, {"schema": None}]
)
def test_a_wrong_table_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="table of codecs"):
        table_from(document)


def test_a_table_may_lie_in_a_file_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "codecs"
    path.write_text(table().to_json())
    assert table_of(str(path)).rows == table().rows


def test_an_unknown_machine_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: cores-1, cores-2, cores-16, gpu"):
        table_of("abacus")


# Predictions


def setting(hosts: int = 4, link: float = 1e8, parameters: int = 10 * MB) -> Setting:
    own = table()
    network = Interconnect(hosts, link / 8, start=own.start, peer=own.peer)
    return Setting(UniformModel(parameters), network, own, 0.5)


@given(
    method=st.sampled_from(METHODS),
    hosts=st.integers(2, 64),
    link=st.floats(1e6, 1e11),
    parameters=st.integers(1000, 10**9),
)
def test_a_step_is_never_shorter_than_its_computing(
    method: str, hosts: int, link: float, parameters: int
) -> None:
    cost = step_of(read_method(method), setting(hosts, link, parameters))
    assert cost.seconds >= cost.compute
    assert 0 <= cost.hidden <= cost.encode + cost.network + cost.decode + 1e-9
    assert 0 < cost.efficiency <= 1


@given(
    method=st.sampled_from(METHODS),
    parallel=st.sampled_from(("ddp", "fsdp")),
    hosts=st.integers(1, 64),
    parameters=st.integers(1000, 10**8),
)
def test_what_rounding_leaves_is_not_hidden(
    method: str, parallel: str, hosts: int, parameters: int
) -> None:
    found = read_method(method)
    if parallel == "fsdp" and (found.every or method.startswith("powersgd")):
        return
    cost = step_of(found, replace(setting(hosts, 1e8, parameters), parallel=parallel))
    # A hundredth of the least, of what local steps share out over their round.
    assert cost.hidden == 0 or cost.hidden > 0.01 * costs.ROUNDING
    if parallel == "fsdp" and hosts > 1 and parameters < MB:
        assert cost.hidden == 0, "in one piece nothing is beside anything"


@given(method=st.sampled_from(METHODS), link=st.floats(1e6, 1e10))
def test_a_faster_link_never_makes_a_step_longer(method: str, link: float) -> None:
    slow = step_of(read_method(method), setting(link=link))
    fast = step_of(read_method(method), setting(link=2 * link))
    assert fast.seconds <= slow.seconds * (1 + 1e-12)


def test_break_even_is_where_both_take_as_long() -> None:
    own = setting()
    method = read_method("quantize:4")
    rate = break_even(method, own)
    assert 0 < rate < math.inf
    there = own.at(rate / 8)
    plain = step_of(read_method("ddp"), there).seconds
    # 30 binary digits of rates are halved 30 times: 30 ln(2) / 2^30, rounded up.
    assert step_of(method, there).seconds == pytest.approx(plain, rel=2e-8)
    # The same rate, whether one looks from a slower or from a faster link.
    assert break_even(method, own.at(10 * rate / 8)) == pytest.approx(rate, rel=1e-6)


def test_a_cost_is_reckoned_once_for_equal_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = costs.exchange_cost
    monkeypatch.setattr(costs, "exchange_cost", lambda *a: asked.append(a[:2]) or real(*a))
    own = setting(parameters=10**9)
    for name in ("ddp", "quantize:4"):
        asked.clear()
        step_of(read_method(name), own)
        # The first and the last bucket differ, and what is sent uncompressed beside them.
        assert len(asked) <= 6, name


def test_advice_follows_the_figures() -> None:
    methods = [read_method(name) for name in METHODS]
    slow = predict(methods, setting(link=1e7))
    assert advice(slow, "sgd").startswith("Use topk:0.01|quantize:4")
    assert advice(slow, "adam").startswith("Use quantize:4")
    assert "With Adam" in advice(slow)
    fast = predict(methods, setting(link=1e12, parameters=1 * MB))
    assert advice(fast, "adam").startswith("Stay with plain ddp")
    assert re.search(r"waits \d+ % of a step", advice(fast))
    assert advice(fast[:1]).endswith("Nothing was compared with it.")


@pytest.mark.parametrize(
    ("names", "suits"),
    [
        ("none cast:bf16 quantize:4 twobit diloco:100,compressor=(onebit)", True),
        (
            "topk:0.01 topk:0.01|quantize:4 onebit scaledsign 1bit-sgd signsgd quantize:4+ef21",
            False,
        ),
    ],
)
def test_what_attach_warns_of_under_adam_is_not_recommended_for_it(names: str, suits: bool) -> None:
    own = setting(link=1e6)
    for method in map(read_method, names.split()):
        assert method.suits_adam is suits, method.name
        if not method.every and str(method.compressor) in own.table.rows:
            said = advice(predict([method], own), "adam")
            assert said.startswith("Use" if suits else "Stay"), said


def test_low_ranks_are_not_advised_under_adam_but_mentioned() -> None:
    """They suit it, and cost accuracy all the same."""
    found = predict([read_method("quantize:4"), read_method("powersgd:4")], setting(link=1e6))
    assert advice(found, "sgd").startswith("Use powersgd:4")
    said = advice(found, "adam")
    assert said.startswith("Use quantize:4")
    assert f"powersgd:4 would take {show_seconds(found[-1].cost.seconds)}, but low ranks" in said
    assert "cost them accuracy" in advice(found)
    alone = advice(predict([read_method("powersgd:4")], setting(link=1e6)), "adam")
    assert "no method for Adam gains 5 %. powersgd:4 would take" in alone
    quick = predict([read_method("powersgd:4")], setting(link=1e11))
    assert "low ranks" not in advice(quick, "adam")


def test_advice_says_what_sums_inside_of_hosts_bring() -> None:
    # Eight ranks that send their shards over one link, where one sum of them would do.
    methods, own = [read_method("quantize:4")], setting(hosts=4, link=1e8)
    many = replace(own, network=own.network._replace(ranks_per_host=8))
    found = step_of(methods[0], replace(many, nodes=True)).seconds
    assert 1.05 * found < step_of(methods[0], many).seconds
    assert f"nodes=8), quantize:4 would take {show_seconds(found)}" in advice(
        predict(methods, many), "sgd", many
    )
    assert "nodes=" not in advice(predict(methods, own), "sgd", own)


def test_tables_fit_80_columns() -> None:
    methods = [read_method(name) for name in METHODS]
    for link in (1e6, 1e9, 1e12):
        text = tables_of(predict(methods, setting(1024, link, 10**9)))
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "name",
    [
        *("auto", "auto:low_rank=true", "warmup:9,(auto:5)+ef14", "accuracy:(topk:0.01),0.5"),
        *("layerwise:(nothing*=topk:0.001; *=quantize:4)", "solve:(topk:0.01)"),
        *("bandwidth:(topk:0.001|quantize:4)", "magnitude:0.1"),
    ],
)
def test_what_no_one_compressor_stands_for_is_not_planned(name: str) -> None:
    with pytest.raises(ValueError, match=r"for each tensor, or as it trains.* such as quantize:4"):
        read_method(name)


@pytest.mark.parametrize("name", ["warmup:9,(topk:0.01)", "ramp:8,(topk:0.01)+ef14", "dgc:0.01"])
def test_a_schedule_is_planned_as_it_ends(name: str) -> None:
    assert str(read_method(name).compressor) == "topk:0.01"


# The command


def test_the_command_prints_tables_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --parameters 125M --hosts 16 --ranks-per-host 8 --link 10gbit --delay 1ms"
    assert main([*words.split(), "--step", "0.8s", "--machine", "cores-1"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "Use " in out
    assert "measured on" in out


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --parameters 1M --step 50ms --machine gpu --json --parallel fsdp"
    assert main([*words.split(), "--weights", "quantize:8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "thinwire.plan/1"
    assert document["codecs"]["origin"].startswith("not measured")
    assert {row["method"] for row in document["methods"]} >= {"fsdp", "quantize:4"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--step 1s", "give one of"),
        ("--parameters 1M", "--step must say"),
        ("--parameters 1M --step 1parsec", "a time is"),
        ("--parameters 1M --step 1s --link 3", "a rate is"),
        ("--parameters 1M --step 1s --hosts 4 --racks 3 --inter 1mbit", "evenly"),
        ("--parameters 1M --step 1s --racks 2", "belong together"),
        ("--parameters 1M --step 1s --with bogus:3", "bogus"),
        ("--parameters 1M --step 1s --machine abacus", "unknown machine"),
        ("--parameters 1M --step 1s --hosts 0", "at least 1"),
        ("--parameters 0 --step 1s", "at least 1"),
        ("--parameters 10001G --step 1s", "at most 10000G, got 10001G"),
        ("--layers nowhere.safetensors --step 1s", "nowhere"),
        ("--script nowhere.py", "no file"),
        ("--parameters 1M --step 1s --weights quantize:8", "fsdp"),
        ("--parameters 1M --step 1s --parallel fsdp --nodes", "--nodes is for --parallel ddp"),
        (
            "--parameters 1M --step 1s --parallel fsdp --weights powersgd:4",
            "powersgd:4 does not go with --weights",
        ),
        ("--parameters 1M --step 1s --price inf --json", "--price must be a finite number"),
        ("--parameters 1M --step 1s --price nan", "--price must be a finite number"),
        ("--parameters 1M --step 1s foo", "unexpected 'foo': only --script takes arguments"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--machine", "cores-1", *words.split()]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    ["--hosts 0", "--link fast", "--with bogus:3", "--step 0s", "--price nan", "--delay 1"],
)
def test_nothing_is_measured_before_all_is_checked(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr("thinwire.bench.profile.profile_script", lambda *_: pytest.fail("measured"))
    assert main(["plan", "--machine", "cores-1", "--script", str(script), *words.split()]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_script_is_watched_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "assert sys.argv[1:] == ['--width', '64']\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "while True:\n"
        "    opt.zero_grad()\n"
        "    net(torch.randn(8, 64)).sum().backward()\n"
        "    opt.step()\n"
    )
    words = ["plan", "--machine", "cores-1", "--json", "--script", str(script)]
    assert main([*words, "--", "--width", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == 64 * 64 + 64 + 640 + 10
    assert document["compute_seconds"] > 0
    script.write_text("raise SystemExit('no GPU')")
    assert main(words) == 2
    assert "no GPU" in capsys.readouterr().err


def test_codecs_are_measured_for_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"none", "quantize:4", "powersgd:4"} <= set(codecs.SPECS)
    monkeypatch.setattr(codecs, "SPECS", ("none", "quantize:4"))  # all of them take long
    path = tmp_path / "codecs.json"
    words = ["bench", "--for-plan", "--with", "quantize:4; powersgd:1", "--rounds", "1"]
    assert main([*words, "--out", str(path)]) == 0
    found = table_from(json.loads(path.read_text()))
    assert set(found.rows) == {"none", "quantize:4", "powersgd:1"}, "--with adds to the usual ones"
    assert all(isinstance(row, CodecRow) and row.encode >= 0 for row in found.rows.values())
    capsys.readouterr()
    plan = "plan --parameters 1M --step 1s --with quantize:4 --machine"
    assert main([*plan.split(), str(path)]) == 0
    assert "here" in capsys.readouterr().out
    assert main([*words, "--size", "3"]) == 2


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        LayeredModel(())
