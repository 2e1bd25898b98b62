"""What a wire tells about its exchanges: figures, a table, TensorBoard.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of nets.py.
"""

import math
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from nets import all_same, alone, backward, gradients, net, residuals, wired

import thinwire as tw
from thinwire.telemetry import Ledger

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


class Writer:
    """What log_to wants of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def error_by_hand(model: Any, wire: tw.Wire, step: int, spec: str) -> dict[str, float]:
    """||p - C(p)|| / ||p|| of each matrix, compressed by itself."""
    kept, found = residuals(wire), {}
    for name, g in alone(model, step).items():
        if g.dim() > 1:
            p = g.flatten() + kept[name]
            left = p - tw.decode(tw.pack(tw.parse(spec).encode(p)))
            found[name] = float(left.norm() / p.norm())
    return found


def on_stats(granularity: str) -> dict[str, Any]:
    model, wire = wired(granularity=granularity, measure_every=1)
    accounts, start = [], wire._reducer.start

    def noted(*args: Any, **options: Any) -> Any:
        exchange = start(*args, **options)
        accounts.append(exchange.handle.account)
        return exchange

    wire._reducer.start = noted
    writer, first = Writer(), wire.summary()
    wire.log_to(writer, every=2)
    for step in range(5):
        if step == 4:
            errors = error_by_hand(model, wire, step, "topk:0.1")
        backward(model, step)
    return {
        "first": first,
        "stats": wire.stats(),
        "summary": wire.summary(),
        "short": wire.summary(rows=2),
        "scalars": writer.scalars,
        "errors": errors,
        "norms": {name: float(r.norm()) for name, r in residuals(wire).items()},
        "accounts": [
            (a.bytes_sent, a.bytes_received, a.network_bytes, a.seconds) for a in accounts
        ],
    }


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What rank 0 has to tell."""
    return {each: ranks.run(on_stats, each, ranks=2)[0] for each in ("bucket", "tensor")}


TENSOR = {
    *("numel", "steps", "bytes_in", "bytes_sent", "ratio", "compressor", "collective"),
    *("relative_error", "residual_norm"),
}
TOTAL = {
    *("bytes_in", "bytes_sent", "bytes_received", "network_bytes", "ratio", "exchanges"),
    *("between_bytes", "relative_error", "residual_norm"),
}


def test_stats_are_those_of_the_exchanges(told):
    parameters = dict(net().named_parameters())
    for found in told.values():
        stats, accounts = found["stats"], found["accounts"]
        rows, total = stats["tensors"], stats["total"]
        keys = {"step", "tensors", "total", "seconds", "seconds_per_step", "policy", "decisions"}
        assert stats.keys() == keys
        assert rows.keys() == parameters.keys()
        assert total.keys() == TOTAL
        assert stats["step"] == 5
        for name, row in rows.items():
            assert row.keys() == TENSOR
            assert row["numel"] == parameters[name].numel()
            assert row["steps"] == 5
            assert row["bytes_in"] == 5 * 4 * row["numel"]
            # The row's bytes are rounded to a whole number, its ratio is not.
            assert row["bytes_in"] / row["ratio"] == pytest.approx(row["bytes_sent"], abs=0.51)
        sent, received, network_bytes = (sum(a[i] for a in accounts) for i in range(3))
        counted = total["bytes_sent"], total["bytes_received"], total["network_bytes"]
        assert counted == (sent, received, network_bytes)
        assert 0 < sent < network_bytes
        assert total["exchanges"] == len(accounts)
        assert total["bytes_in"] == sum(row["bytes_in"] for row in rows.values())
        assert total["ratio"] == total["bytes_in"] / total["bytes_sent"]
        # Each row's bytes are rounded to a whole number.
        assert abs(sent - sum(row["bytes_sent"] for row in rows.values())) <= len(rows) / 2
        for kind in ("encode", "network", "decode"):
            seconds = sum(a[3].get(kind, 0.0) for a in accounts)
            assert stats["seconds"][kind] == pytest.approx(seconds)
        assert stats["seconds"].keys() == {"encode", "network", "decode", "waiting"}
        assert stats["seconds_per_step"].keys() == stats["seconds"].keys()


def test_errors_and_norms_are_those_of_the_tensors(told):
    for found in told.values():
        rows, total = found["stats"]["tensors"], found["stats"]["total"]
        for name, row in rows.items():
            matrix = name in found["norms"]
            assert (row["relative_error"] is not None) == matrix
            assert (row["residual_norm"] is not None) == matrix
            if matrix:
                # Norms are summed in float32, of up to 1200 numbers.
                assert row["residual_norm"] == pytest.approx(found["norms"][name], rel=1e-5)
        assert total["residual_norm"] == pytest.approx(math.hypot(*found["norms"].values()))
        measured = [row for row in rows.values() if row["relative_error"] is not None]
        weights = sum(row["numel"] for row in measured)
        mean = sum(row["relative_error"] * row["numel"] for row in measured) / weights
        assert total["relative_error"] == pytest.approx(mean)
    for name, error in told["tensor"]["errors"].items():
        row = told["tensor"]["stats"]["tensors"][name]
        assert row["relative_error"] == pytest.approx(error, rel=1e-5)


def test_the_summary_is_a_table_of_all_tensors(told):
    for found in told.values():
        lines = found["summary"].splitlines()
        for name in found["stats"]["tensors"]:
            assert any(line.startswith(f"{name} ") for line in lines)
        assert any(line.startswith("total of 5 steps") for line in lines)
        assert "topk:0.1" in found["summary"]
        assert lines[-1].startswith("per step (without the first): ")
        assert "... and 4 more" in found["short"]
        assert len(found["short"].splitlines()) == len(lines) - 3
        assert "nothing yet" in found["first"]


def test_averages_leave_out_the_first_step():
    ledger = Ledger()
    assert ledger.seconds_per_step == {}
    for seconds in (60.0, 1.0, 2.0):
        ledger.add_seconds("network", seconds)
        ledger.end_step()
        if ledger.steps == 1:
            assert ledger.seconds_per_step == {"network": 60.0}  # there is no other
    ledger.add_seconds("decode", 3.0)
    assert ledger.seconds_per_step == {"network": 1.5, "decode": 1.5}
    assert ledger.seconds == {"network": 63.0, "decode": 3.0}


def test_totals_are_written_for_tensorboard(told):
    for found in told.values():
        tags = {tag for tag, _, _ in found["scalars"]}
        totals = {f"thinwire/{name}" for name in ("ratio", "bytes_sent", "bytes_in")}
        kinds = {f"thinwire/seconds/{kind}" for kind in ("encode", "network", "decode", "waiting")}
        assert tags == totals | kinds | {"thinwire/relative_error"}
        assert {step for _, _, step in found["scalars"]} == {2, 4}
        assert all(isinstance(value, float | int) for _, value, _ in found["scalars"])


def on_tensorboard(place: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model, wire = wired()
    with SummaryWriter(f"{place}/{dist.get_rank()}") as writer:
        wire.log_to(writer, every=1)
        backward(model, 0)


def test_tensorboard_itself_takes_them(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    ranks.run(on_tensorboard, str(tmp_path), ranks=2)
    assert all(any((tmp_path / str(rank)).iterdir()) for rank in range(2))


def on_unmeasured() -> list[Any]:
    model, wire = wired(measure_every=0)
    for step in range(3):
        backward(model, step)
    return [row["relative_error"] for row in wire.stats()["tensors"].values()]


def test_errors_are_measured_only_if_asked_for():
    for found in ranks.run(on_unmeasured, ranks=2):
        assert found == [None] * 6


def on_broken_writer() -> tuple[list[str], bool]:
    """A full disk in step 1; what comes out of it, and whether training can go on."""
    model, wire = wired()
    other, _ = wired()
    writer = Writer()
    wire.log_to(writer, every=1)
    writer.add_scalar = lambda *_: 1 / 0
    errors = []
    try:
        backward(model, 0)
    except ZeroDivisionError as error:
        errors.append(str(error))
    del writer.add_scalar
    backward(model, 1)
    for step in range(2):
        backward(other, step)
    return errors, all_same(gradients(model), gradients(other))


def test_a_writer_that_fails_does_not_break_the_model():
    for errors, equal in ranks.run(on_broken_writer, ranks=2):
        assert errors == ["division by zero"]
        assert equal


def on_loaded_stats() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]:
    model, wire = wired()
    for step in range(2):
        backward(model, step)
    fresh = wired()[1]
    fresh.load_state_dict(wire.state_dict())
    wire_stats = wire.stats()
    wire.load_state_dict(wire.state_dict())
    return wire_stats, fresh.stats(), wire.stats(), fresh.summary()


def test_what_was_loaded_is_shown_at_once():
    for before, fresh, again, summary in ranks.run(on_loaded_stats, ranks=2):
        norms = {name: row["residual_norm"] for name, row in before["tensors"].items()}
        kept = {name: norm for name, norm in norms.items() if norm is not None}
        assert len(kept) == 3
        assert {n: row["residual_norm"] for n, row in fresh["tensors"].items()} == kept
        assert {row["steps"] for row in fresh["tensors"].values()} == {0}
        for name, row in fresh["tensors"].items():
            assert row["numel"] == before["tensors"][name]["numel"]
        assert fresh["total"]["residual_norm"] == before["total"]["residual_norm"] > 0
        assert {n: row["residual_norm"] for n, row in again["tensors"].items()} == norms
        assert "0.weight" in summary


def on_decoded(storage: str) -> tuple[int, int, int]:
    """How often vectors are read for the figures and for a checkpoint of a unit of 3 tensors."""
    from thinwire.feedback.state import StateVector

    model, wire = wired(feedback=f"ef14:storage={storage}", ddp={"bucket_cap_mb": 25})
    for step in range(3):
        backward(model, step)
    reads, read = [], StateVector.read
    StateVector.read = lambda *given: reads.append(given) or read(*given)
    try:
        wire.stats()
        first = len(reads)
        wire.state_dict()
    finally:
        StateVector.read = read
    return first, len(reads) - first, len(wire._reducer.states.names())


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_a_vector_is_decoded_once_for_all_its_tensors(storage):
    assert ranks.run(on_decoded, storage, ranks=2) == [(1, 1, 3)] * 2
