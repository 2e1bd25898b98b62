"""Flower's own messages, contexts, apps and strategies with `tw.flower`; most without processes."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import thinwire as tw

pytest.importorskip("flwr", reason="make test-integrations brings the frameworks")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from mutations import Mutator, frame_of, valid_frames

from thinwire.frames.values import NonFinite
from thinwire.integrations.flower import KIND, NAME


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """Whose messages these are; a runtime sets it for its process."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


EXAMPLES = (1, 2, 5)  # of the clients, whose sum is a power of two: sums of what follows are exact
ROUNDS = 3


def model() -> dict[str, np.ndarray]:
    """Multiples of 1/64: their sums and differences are exact."""
    rng = np.random.default_rng(0)
    return {
        "body.weight": rng.integers(-64, 64, (40, 50)).astype(np.float32) / 64,
        "body.bias": rng.integers(-64, 64, 50).astype(np.float32) / 64,
        "head.weight": rng.integers(-64, 64, (8, 8)).astype(np.float32) / 64,
        "mask": np.array([[0, -np.inf], [0, 0]], np.float32),
        "seen": np.array(3, np.int64),
    }


def record(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def numbers(found: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in found.items()}


def update(shape: tuple[int, ...], node: int, round_: int) -> np.ndarray:
    rng = np.random.default_rng([node, round_])
    return (rng.integers(-8, 8, shape) * rng.integers(0, 2, shape)).astype(np.float32) / 64


def trained(arrays: dict[str, np.ndarray], node: int, round_: int) -> dict[str, np.ndarray]:
    """What a client makes of a model, in the types that it trains in."""
    found = {}
    for name, array in arrays.items():
        if name == "seen":
            found[name] = (array + 1).astype(np.int64)
        elif name == "mask":
            found[name] = array
        else:
            found[name] = array.astype(np.float32) + update(array.shape, node, round_)
    return found


Change = Callable[[RecordDict, int, int], None]


def client_app(*mods, change: Change = lambda content, node, round_: None) -> ClientApp:
    """An app whose reply can be changed before mods see it."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        given = numbers(message.content["arrays"])
        round_ = int(message.content["config"]["server-round"])
        node = context.node_id
        content = RecordDict(
            {
                "arrays": record(trained(given, node, round_)),
                "metrics": MetricRecord({"num-examples": EXAMPLES[node - 1], "loss": node / 4}),
            }
        )
        change(content, node, round_)
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        total = sum(a.sum() for a in numbers(message.content["arrays"]).values() if a.ndim == 1)
        metrics = MetricRecord({"num-examples": 1, "total": float(total)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class LocalGrid(Grid):
    """Nodes 1, 2, ... in this process, each with an app and a context of its own."""

    def __init__(self, *apps: ClientApp) -> None:
        self.apps = dict(enumerate(apps, 1))
        self.contexts = {
            node: Context(1, node, {"partition-id": node - 1}, RecordDict(), {})
            for node in range(1, len(apps) + 1)
        }
        self.replies: list[Message] = []
        self.change: Callable[[Message], None] = lambda reply: None  # on the way to the server

    def set_run(self, run):
        raise AssertionError("nobody asks for this")

    @property
    def run(self):
        raise AssertionError("nobody asks for this")

    def create_message(self, *args, **kwargs):
        raise AssertionError("nobody asks for this")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages):
        raise AssertionError("nobody asks for this")

    def pull_messages(self, message_ids):
        raise AssertionError("nobody asks for this")

    def send_and_receive(self, messages, *, timeout=None):
        self.replies = []
        for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
            node = message.metadata.dst_node_id
            reply = self.apps[node](message, self.contexts[node])
            self.change(reply)
            self.replies.append(reply)
        return self.replies


def grid_of(compressor="none", count: int = 3, **options) -> LocalGrid:
    mod = tw.flower.Compression(compressor, **options)
    return LocalGrid(*(client_app(mod) for _ in range(count)))


def plain_grid(count: int = 3) -> LocalGrid:
    return LocalGrid(*(client_app() for _ in range(count)))


def run(used, grid: LocalGrid, rounds: int = ROUNDS):
    return used.start(grid=grid, initial_arrays=record(model()), num_rounds=rounds)


def fed_avg(**options) -> FedAvg:
    return FedAvg(min_train_nodes=3, min_available_nodes=3, **options)


def assert_equal(found: ArrayRecord, expected: ArrayRecord) -> None:
    assert list(found) == list(expected)
    for name, array in numbers(found).items():
        other = expected[name].numpy()
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other, err_msg=name)


def residuals(grid: LocalGrid, node: int) -> dict[str, np.ndarray]:
    return numbers(grid.contexts[node].state.array_records[f"{NAME}.residuals"])


def asked(server, grid: LocalGrid, round_: int = 1) -> list[Message]:
    """The messages of a round."""
    return list(server.configure_train(round_, record(model()), ConfigRecord(), grid))


def aggregated(server, grid: LocalGrid, round_: int = 1):
    replies = grid.send_and_receive(asked(server, grid, round_))
    return server.aggregate_train(round_, replies)


# What is aggregated


def test_without_loss_all_is_as_in_flower_bit_for_bit():
    server = tw.flower.Compressed(fed_avg())
    found, expected = run(server, grid_of("none")), run(fed_avg(), plain_grid())
    assert_equal(found.arrays, expected.arrays)
    assert found.train_metrics_clientapp == expected.train_metrics_clientapp
    assert found.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp


INSIDE = {
    "FedAdam": {},
    "FedAvgM": {"server_momentum": 0.5},
    "FedMedian": {},
    "FedProx": {"proximal_mu": 0.1},
    "FedYogi": {},
    "Krum": {"num_malicious_nodes": 0},
    "FedTrimmedAvg": {"beta": 0.34},
}


@pytest.mark.parametrize("name", INSIDE)
def test_any_strategy_aggregates_inside(name):
    def inside():
        return getattr(strategy, name)(
            min_train_nodes=3, min_available_nodes=3, fraction_evaluate=0.0, **INSIDE[name]
        )

    # Without the mask: means of squares make NaN of its infinity.
    arrays = record({name: array for name, array in model().items() if name != "mask"})
    found = tw.flower.Compressed(inside()).start(grid_of("none"), arrays, num_rounds=ROUNDS)
    expected = inside().start(plain_grid(), arrays, num_rounds=ROUNDS)
    assert_equal(found.arrays, expected.arrays)


def test_the_keys_of_the_strategy_inside_are_used():
    inside = fed_avg(arrayrecord_key="model", configrecord_key="told", weighted_by_key="loss")
    server = tw.flower.Compressed(inside)
    (message, *_) = asked(server, plain_grid())
    assert set(message.content) == {"model", "told"}
    assert message.content["told"]["server-round"] == 1


def test_a_clipping_server_clips_what_was_decoded():
    def private():
        return strategy.DifferentialPrivacyServerSideFixedClipping(
            fed_avg(fraction_evaluate=0.0), 0.0, 0.125, 3
        )

    arrays = {name: array for name, array in model().items() if name != "mask"}
    found = tw.flower.Compressed(private()).start(grid_of("none"), record(arrays), num_rounds=2)
    expected = private().start(plain_grid(), record(arrays), num_rounds=2)
    assert_equal(found.arrays, expected.arrays)
    moved = numbers(found.arrays)["body.weight"] - arrays["body.weight"]
    assert 0 < np.linalg.norm(moved) < 0.25 + 1e-6


def test_a_loop_of_its_own_is_the_one_that_runs():
    class Own(FedAvg):
        rounds = ()

        def start(self, *arguments, **options):
            self.rounds += ("before",)
            return super().start(*arguments, **options)

        def aggregate_train(self, server_round, replies):
            self.rounds += (server_round,)
            return super().aggregate_train(server_round, replies)

    inside = Own(min_train_nodes=3, min_available_nodes=3)
    server = tw.flower.Compressed(inside)
    found = run(server, grid_of("none"))
    assert inside.rounds == ("before", 1, 2, 3)
    assert_equal(found.arrays, run(fed_avg(), plain_grid()).arrays)
    assert not {"configure_train", "aggregate_train", "summary"} & set(vars(inside))


def test_evaluation_is_left_alone():
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.01")
    messages = server.configure_evaluate(1, record(model()), ConfigRecord(), grid)
    assert all(NAME not in message.content["config"] for message in messages)
    replies = grid.send_and_receive(messages)
    assert not any(reply.has_error() for reply in replies)
    total = float(model()["body.bias"].sum())
    assert server.aggregate_evaluate(1, replies)["total"] == pytest.approx(total, rel=1e-6)


# What is remembered


@pytest.mark.parametrize("spec", ["topk:0.05", "topk:0.05|quantize:4", "onebit", "quantize:4"])
def test_what_arrived_and_what_is_remembered_make_up_all_updates(spec):
    server, grid = tw.flower.Compressed(fed_avg()), grid_of(spec)
    arrived = {node: np.zeros((40, 50), np.float64) for node in grid.apps}
    for round_ in range(1, 6):
        aggregated(server, grid, round_)
        for reply in grid.replies:  # decoded in place
            got = reply.content["arrays"]["body.weight"].numpy() - model()["body.weight"]
            arrived[reply.metadata.src_node_id] += got
    for node, got in arrived.items():
        wanted = sum(update((40, 50), node, round_) for round_ in range(1, 6))
        # Five rounds, in each of which adding to weights of up to 1 rounds by 2^-24 at most.
        np.testing.assert_allclose(got + residuals(grid, node)["body.weight"], wanted, atol=1e-5)
        assert np.abs(residuals(grid, node)["body.weight"]).max() > 0
        assert set(residuals(grid, node)) == {"body.weight"}


def test_a_client_that_is_not_sampled_keeps_what_it_has():
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.05")
    aggregated(server, grid)
    before = residuals(grid, 1)["body.weight"].copy()
    messages = [m for m in asked(server, grid, 2) if m.metadata.dst_node_id != 1]
    server.aggregate_train(2, grid.send_and_receive(messages))
    np.testing.assert_array_equal(residuals(grid, 1)["body.weight"], before)
    assert not np.array_equal(residuals(grid, 2)["body.weight"], before)


def test_decay_weakens_what_is_remembered():
    grid = grid_of("topk:0.05", decay=0.5)
    server = tw.flower.Compressed(fed_avg())
    aggregated(server, grid)
    kept = residuals(grid, 1)["body.weight"].copy()
    aggregated(server, grid, 2)
    got = grid.replies[0].content["arrays"]["body.weight"].numpy() - model()["body.weight"]
    expected = kept / 2 + update((40, 50), 1, 2)
    np.testing.assert_allclose(got + residuals(grid, 1)["body.weight"], expected, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"compressor": "topk:0.05", "decay": 0}, {"compressor": "qsgd:7"}]
)
def test_nothing_is_remembered_where_that_is_not_wanted(options):
    grid = grid_of(**options)
    aggregated(tw.flower.Compressed(fed_avg()), grid)
    assert residuals(grid, 1) == {}


def test_a_function_chooses_by_name():
    chosen = {"body.weight": "onebit", "head.weight": None}
    server, grid = tw.flower.Compressed(fed_avg()), grid_of(chosen.get, min_numel=0)
    grid.change = lambda reply: sizes.update(
        {name: payload.num_bytes for name, payload in tw.unpack(frames_in(reply)).items()}
    )
    sizes = {}
    aggregated(server, grid)
    assert sizes["body.weight"] == tw.OneBit().encode(torch.zeros(40, 50)).num_bytes
    assert sizes["head.weight"] == payload(np.zeros((8, 8), "f4")).num_bytes
    assert set(residuals(grid, 1)) == {"body.weight"}


def test_a_residual_of_another_model_is_not_used():
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.05")
    state = grid.contexts[1].state
    state[f"{NAME}.residuals"] = record({"body.weight": np.ones((3, 3), np.float32)})
    aggregated(server, grid)
    assert residuals(grid, 1)["body.weight"].shape == (40, 50)


def test_random_compressors_draw_anew_for_each_client_and_round():
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("randomk:0.1")
    chosen = set()
    for round_ in (1, 2):
        aggregated(server, grid, round_)
        for reply in grid.replies:
            got = reply.content["arrays"]["body.weight"].numpy() - model()["body.weight"]
            chosen.add(np.flatnonzero(got).tobytes())
    assert len(chosen) == 6


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_keep_their_type(dtype):
    def change(content, node, round_):
        weights = content["arrays"]["body.weight"].numpy().astype(dtype)
        content["arrays"]["body.weight"] = Array(weights)

    mod = tw.flower.Compression("topk:1.0")
    grid = LocalGrid(*(client_app(mod, change=change) for _ in range(3)))
    aggregated(tw.flower.Compressed(fed_avg()), grid)
    for node, reply in enumerate(grid.replies, 1):
        got = reply.content["arrays"]["body.weight"].numpy()
        assert got.dtype == dtype
        expected = model()["body.weight"] + update((40, 50), node, 1)
        np.testing.assert_array_equal(got, expected)  # multiples of 1/64: exact in all types


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["body.weight", "body.bias"])
def test_an_update_that_is_not_finite_fails_and_is_not_remembered(name, value):
    def change(content, node, round_):
        if (node, round_) == (2, 2):
            broken = content["arrays"][name].numpy()
            broken.flat[3] = value
            content["arrays"][name] = Array(broken)

    mod = tw.flower.Compression("topk:0.05")
    grid = LocalGrid(*(client_app(mod, change=change) for _ in range(3)))
    server = tw.flower.Compressed(fed_avg())
    aggregated(server, grid)
    before = residuals(grid, 2)["body.weight"].copy()
    arrays, _ = aggregated(server, grid, 2)
    assert f"the update of '{name}' holds NaN or infinity" in grid.replies[1].error.reason
    np.testing.assert_array_equal(residuals(grid, 2)["body.weight"], before)
    assert np.isfinite(numbers(arrays)["body.weight"]).all()


# Who can read what


def test_bytes_are_those_that_flower_counts(caplog):
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.01|quantize:4")
    sizes = []
    grid.change = lambda reply: sizes.append(reply.content["arrays"].count_bytes())
    with caplog.at_level("INFO", "flwr"):
        aggregated(server, grid)
    upload = server.uploads[1]
    whole = record(model()).count_bytes()
    assert (upload.num_bytes, upload.uncompressed_bytes) == (sum(sizes), 3 * whole)
    assert (upload.compressed, upload.uncompressed, upload.failed) == (3, 0, 0)
    assert upload.compression_ratio == 3 * whole / sum(sizes) > 5
    assert f"aggregate_train: {upload}" in caplog.messages
    aggregated(server, grid, 2)
    assert server.total.compressed == 6
    assert server.total.num_bytes == sum(sizes)


def test_a_client_does_not_compress_for_a_server_that_does_not_decode():
    grid = grid_of("topk:0.05")
    arrays, _ = aggregated(fed_avg(), grid)
    assert arrays is None
    for reply in grid.replies:
        assert "wrap its strategy, tw.flower.Compressed(FedAvg(...))" in reply.error.reason
    assert not grid.contexts[1].state


def test_the_mark_does_not_reach_a_config_that_is_used_again():
    config = ConfigRecord()
    server, grid = tw.flower.Compressed(fed_avg()), plain_grid()
    (message, *_) = server.configure_train(1, record(model()), config, grid)
    assert message.content["config"][NAME] == 1
    assert NAME not in config


@pytest.mark.parametrize(
    "around",
    [
        lambda inside: FedAvg(min_train_nodes=3),
        lambda inside: strategy.DifferentialPrivacyServerSideFixedClipping(inside, 1.0, 1.0, 3),
    ],
    ids=["no wrapper", "a strategy around it"],
)
def test_frames_are_never_averaged(around):
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.05")
    replies = grid.send_and_receive(asked(server, grid))
    with pytest.raises(TypeError, match=r"tw.flower.Compressed\(strategy\), the outermost"):
        around(server).aggregate_train(1, replies)


def test_clients_without_the_mod_are_accepted_and_shown():
    grid = grid_of("none")
    grid.apps[2] = client_app()
    server = tw.flower.Compressed(fed_avg())
    arrays, _ = aggregated(server, grid)
    assert_equal(arrays, aggregated(fed_avg(), plain_grid())[0])
    assert (server.uploads[1].compressed, server.uploads[1].uncompressed) == (2, 1)
    assert "1 uncompressed" in str(server.uploads[1])


def test_clients_without_the_mod_can_be_refused():
    grid = grid_of("none")
    grid.apps[2] = client_app()
    server = tw.flower.Compressed(fed_avg(), accept_uncompressed=False)
    assert_equal(aggregated(server, grid)[0], without(2))
    assert server.uploads[1].failed == 1


def test_local_noise_comes_before_compression():
    def noisy(*mods):
        grid = LocalGrid(*(client_app(*mods) for _ in range(3)))
        given = record({name: a for name, a in model().items() if name not in ("mask", "seen")})
        server = tw.flower.Compressed(fed_avg())
        messages = server.configure_train(1, given, ConfigRecord(), grid)
        server.aggregate_train(1, grid.send_and_receive(messages))
        return grid.replies

    noise, ours = LocalDpMod(1.0, 0.01, 1.0, 0.5), tw.flower.Compression("topk:0.05")
    assert not any(reply.has_error() for reply in noisy(ours, noise))
    assert all("LocalDpMod" in reply.error.reason for reply in noisy(noise, ours))


# Broken and hostile clients


def without(node: int) -> ArrayRecord:
    """The average of the other clients."""
    grid = plain_grid()
    server = fed_avg()
    replies = [
        reply
        for reply in grid.send_and_receive(asked(server, grid))
        if reply.metadata.src_node_id != node
    ]
    return server.aggregate_train(1, replies)[0]


def frames_in(reply: Message) -> bytes:
    return reply.content["arrays"][NAME].data


def with_frames(reply: Message, data: bytes) -> None:
    frames = Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)
    reply.content["arrays"] = ArrayRecord({NAME: frames})


def repacked(reply: Message, **changed) -> None:
    """Frames of a reply with other payloads; None leaves one out."""
    payloads = {**tw.unpack(frames_in(reply)), **changed}
    with_frames(reply, tw.pack({n: p for n, p in payloads.items() if p is not None}))


def payload(array: np.ndarray):
    return tw.NoCompression().encode(array)


def untold_nan():
    """NaN in a frame that does not say so."""
    values = torch.full((2, 2), torch.nan)
    code = payload(values.numpy()).code
    return tw.unpack(frame_of(code, values.dtype, [2, 2], values.view(-1)))


WRONG = {
    "empty": lambda reply: with_frames(reply, b""),
    "no container": lambda reply: with_frames(reply, b"not a container at all" * 9),
    "a frame": lambda reply: with_frames(
        reply, tw.pack(payload(np.zeros(9, "f4"))).numpy().tobytes()
    ),
    "cut": lambda reply: with_frames(reply, frames_in(reply)[:-8]),
    "one missing": lambda reply: repacked(reply, seen=None),
    "one too many": lambda reply: repacked(reply, more=payload(np.zeros(0, "f4"))),
    "other shape": lambda reply: repacked(reply, mask=payload(np.zeros((4, 1), "f4"))),
    "more elements": lambda reply: repacked(reply, mask=payload(np.zeros((999, 9), "f4"))),
    "bfloat16": lambda reply: repacked(
        reply, mask=tw.NoCompression().encode(torch.zeros(2, 2, dtype=torch.bfloat16))
    ),
    "not finite": lambda reply: repacked(reply, mask=payload(np.full((2, 2), np.nan, "f4"))),
    "not finite and not said": lambda reply: repacked(reply, mask=untold_nan()),
    "overflow": lambda reply: repacked(reply, mask=payload(np.full((2, 2), 3e308, "f8") * 10)),
    "two records": lambda reply: reply.content.update({"more": reply.content["arrays"]}),
    "mixed": lambda reply: reply.content["arrays"].update({"seen": Array(np.zeros(1))}),
    "of another version": lambda reply: reply.content.update(
        {"arrays": ArrayRecord({NAME: Array("uint8", (1,), f"{NAME} 9", b"9")})}
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reply_that_cannot_be_used_is_its_clients_failure(name, caplog):
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("none")
    grid.change = lambda reply: reply.metadata.src_node_id == 2 and WRONG[name](reply)
    arrays, _ = aggregated(server, grid)
    assert_equal(arrays, without(2))
    assert (server.uploads[1].compressed, server.uploads[1].failed) == (2, 1)
    assert any("reply of node 2 dropped" in line for line in caplog.messages)


def test_a_reply_that_nobody_asked_for_is_a_failure():
    grid = grid_of("none")
    replies = grid.send_and_receive(asked(tw.flower.Compressed(fed_avg()), grid))
    del grid.apps[2]
    server = tw.flower.Compressed(FedAvg())
    asked(server, grid)
    assert_equal(server.aggregate_train(1, replies)[0], without(2))
    assert server.uploads[1].failed == 1


def test_a_bomb_is_refused_before_it_takes_memory():
    """A frame that says "not finite" is 24 bytes long whatever its tensor."""
    bomb = frame_of(NonFinite(), torch.float32, [1 << 31], non_finite=True)
    assert tw.unpack(bomb, max_bytes=1 << 60).numel == 1 << 31
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("none")

    def change(reply):
        if reply.metadata.src_node_id == 2:
            repacked(reply, mask=tw.unpack(bomb, max_bytes=1 << 60))

    grid.change = change
    messages = asked(server, grid)
    assert_equal(server.aggregate_train(1, grid.send_and_receive(messages))[0], without(2))


def test_mutated_frames_never_stop_the_server():
    """Whatever the second client sends, the round ends and the model stays finite."""
    rng = random.Random(0)
    mutator = Mutator(rng, valid_frames())
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.05|quantize:4")
    messages = asked(server, grid)
    replies = grid.send_and_receive(messages)
    honest = frames_in(replies[1])
    decoded = failed = 0
    for _ in range(2000):
        if rng.random() < 0.5:
            data = mutator.next().data
        else:
            data = bytearray(honest)
            for _ in range(rng.choice((1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        content = RecordDict({**replies[1].content})
        reply = Message(content, reply_to=messages[1])
        with_frames(reply, bytes(data))
        found, upload = server._decoded(reply, {})
        decoded, failed = decoded + upload.compressed, failed + upload.failed
        if not found.has_error():
            weights = numbers(found.content["arrays"])
            assert list(weights) == list(model())
            assert np.isfinite(weights["body.weight"]).all()
    assert failed > 1900
    assert decoded + failed == 2000


# What cannot be


@pytest.mark.parametrize("side", ["FixedClipping", "AdaptiveClipping"])
def test_clipping_by_clients_is_refused(side):
    kind = getattr(strategy, f"DifferentialPrivacyClientSide{side}")
    options = {"clipping_norm": 1.0} if side == "FixedClipping" else {}
    private = kind(fed_avg(), 0.1, num_sampled_clients=3, **options)
    for refused in (private, strategy.DifferentialPrivacyServerSideFixedClipping(private, 1, 1, 3)):
        with pytest.raises(ValueError, match=f"DifferentialPrivacyClientSide{side} adds noise"):
            tw.flower.Compressed(refused)


def test_compressing_twice_is_refused():
    with pytest.raises(ValueError, match="compressed already"):
        tw.flower.Compressed(tw.flower.Compressed(fed_avg()))


def test_what_is_no_strategy_is_refused():
    with pytest.raises(TypeError, match=r"takes a strategy of flwr.serverapp.strategy, got str"):
        tw.flower.Compressed("FedAvg")


def test_settings_are_checked():
    with pytest.raises(TypeError, match="PowerSGD is found by all ranks together"):
        tw.flower.Compression("powersgd:4")
    with pytest.raises(TypeError, match="TopK is a class"):
        tw.flower.Compression(tw.TopK)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got 1.5"):
        tw.flower.Compression("topk:0.01", decay=1.5)
    with pytest.raises(ValueError, match="min_numel must be a whole number from 0, got -1"):
        tw.flower.Compression("topk:0.01", min_numel=-1)
    with pytest.raises(ValueError, match="accept_uncompressed must be True or False"):
        tw.flower.Compressed(fed_avg(), accept_uncompressed=1)


CHANGES = {
    "other names": (
        lambda content: content["arrays"].update({"new": Array(np.zeros(1))}),
        "not in both: new",
    ),
    "another shape": (
        lambda content: content["arrays"].update({"mask": Array(np.zeros((4, 1)))}),
        r"'mask' is float64 of shape (4, 1)",
    ),
    "another type": (
        lambda content: content["arrays"].update({"mask": Array(np.zeros((2, 2), complex))}),
        "'mask' is complex128",
    ),
    "two records": (
        lambda content: content.update({"more": content["arrays"]}),
        "expected one ArrayRecord in a message, found 2",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_app_that_returns_something_else_is_told(name):
    change, reason = CHANGES[name]
    mod = tw.flower.Compression("topk:0.05")
    app = client_app(mod, change=lambda content, node, round_: change(content))
    grid = LocalGrid(app, app, app)
    aggregated(tw.flower.Compressed(fed_avg()), grid)
    assert reason in grid.replies[0].error.reason


def test_an_error_of_the_app_passes_untouched():
    from flwr.app import Error

    app = ClientApp(mods=[tw.flower.Compression("topk:0.05")])

    @app.train()
    def train(message, context):
        return Message(Error(0, "no data"), reply_to=message)

    grid = LocalGrid(app, app, app)
    assert aggregated(tw.flower.Compressed(fed_avg()), grid) == (None, None)
    assert grid.replies[0].error.reason == "no data"


def test_only_training_is_compressed():
    server, grid = tw.flower.Compressed(fed_avg()), grid_of("topk:0.05")
    query = Message(RecordDict(), 1, MessageType.QUERY)
    seen = tw.flower.Compression("topk:0.05")(query, grid.contexts[1], lambda m, c: (m, c))
    assert seen == (query, grid.contexts[1])
    assert server.uploads == {}


# Flower's runtimes

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "flower_training.py"
LIMIT = 480  # seconds; a node starts a process, which imports torch, for every message


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Of Flower's programs: what they write goes to a folder of this test."""
    (tmp_path / "home").mkdir()
    return {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "THINWIRE_OUT": str(tmp_path / "out.json"),
    }


@contextlib.contextmanager
def program(
    folder: Path, environment: dict[str, str], *words: object
) -> Iterator[subprocess.Popen]:
    """A program that is ended, with all that it has started, when the block is left."""
    arguments = [str(word) for word in words]
    with (folder / f"{Path(arguments[0]).name}.log").open("ab") as log:
        started = subprocess.Popen(
            arguments, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield started
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(timeout=10)


def outcome(folder: Path, *running: subprocess.Popen) -> dict:
    """What the server wrote; fails when one of the programs has ended without that."""
    path, end = folder / "out.json", time.monotonic() + LIMIT
    while not path.exists():
        ended = [p.args for p in running if p.poll() is not None]
        if (ended and not path.exists()) or time.monotonic() > end:
            logs = {log.name: log.read_text()[-2000:] for log in folder.glob("*.log")}
            pytest.fail(f"no result; ended: {ended}\n" + "\n".join(map(str, logs.items())))
        time.sleep(0.5)
    return json.loads(path.read_text())


def expected_outcome() -> dict:
    """The same apps in this process; their sums are exact, so that order does not matter."""
    import flower_training

    grid = LocalGrid(*[flower_training.client_app] * flower_training.CLIENTS)
    found = flower_training.start(grid)
    # All three would have sent the same quarter twice, had they forgotten what they left out.
    assert 1 - 0.75**3 < np.count_nonzero(found["weights"]) / 2048 < 1
    return json.loads(json.dumps(found))


@pytest.mark.timeout(LIMIT + 60)
def test_a_simulation_gives_what_the_apps_give_here(tmp_path, environment):
    with program(tmp_path, environment, sys.executable, PROGRAM) as simulation:
        assert outcome(tmp_path, simulation) == expected_outcome()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def wait_for(port: int, running: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and running.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    pytest.fail(f"{running.args} does not listen")


APP = """
[project]
name = "flower-training"
version = "0.1.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "thinwire"

[tool.flwr.app.components]
serverapp = "flower_training:server_app"
clientapp = "flower_training:client_app"
"""


@pytest.mark.timeout(LIMIT + 120)
def test_a_deployment_on_loopback_gives_what_the_apps_give_here(tmp_path, environment):
    """A SuperLink and three SuperNodes, each of which keeps the state of its client."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(PROGRAM, app)
    port = free_port()
    link = f"127.0.0.1:{port}"
    settings = (
        f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "{link}"\ninsecure = true\n'
    )
    (tmp_path / "home" / "config.toml").write_text(settings)
    with contextlib.ExitStack() as ended:

        def started(*words: object) -> subprocess.Popen:
            return ended.enter_context(program(tmp_path, environment, *words))

        # Nothing is installed at run time: it would come from the internet.
        options = (
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--disable-runtime-dependency-installation",
        )
        superlink = started("flower-superlink", "--insecure", *options)
        wait_for(port, superlink)
        nodes = [
            started(
                *("flower-supernode", "--insecure", "--superlink", link),
                *("--host", "127.0.0.1", "--port", free_port()),
                *("--node-config", f"partition-id={part}"),
            )
            for part in range(3)
        ]
        run = subprocess.run(
            ["flwr", "run", str(app), "test"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Successfully started run" in run.stdout, run.stdout + run.stderr
        assert outcome(tmp_path, superlink, *nodes) == expected_outcome()
