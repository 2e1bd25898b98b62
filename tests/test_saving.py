"""Checkpoints that are whole or not there: ranks are killed while they save.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of nets.py.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import digest, named, residuals, train, wired

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

LAST = 9  # steps of a whole run
KILLED = 6  # the step whose checkpoint a rank does not survive


class Run:
    """Training with a wire."""

    def __init__(self, feedback: str = "ef14") -> None:
        self.model, self.wire = wired(feedback=feedback)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def to(self, step: int) -> None:
        train(self.model, range(self.wire.step, step), self.optimizer)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "wire": self.wire.state_dict(),
        }

    def save(self, directory: str, **more: Any) -> Path:
        return tw.save_checkpoint(directory, self.state(), step=self.wire.step, **more)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.wire.load_state_dict(state["wire"])

    def result(self) -> str:
        """Of all bits that training has led to."""
        kept = residuals(self.wire)
        parameters = [p.detach() for p in named(self.model).values()]
        return digest([*parameters, *(kept[name] for name in sorted(kept))])


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_whole_run(directory: str) -> str:
    """Saved on the way, never stopped."""
    run = Run()
    for step in (2, 4):
        run.to(step)
        run.save(directory)
    run.to(LAST)
    return run.result()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[str]:
    """What each rank's training leads to."""
    return ranks.run(on_whole_run, str(tmp_path_factory.mktemp("whole")), ranks=2)


# A rank dies


class Death(NamedTuple):
    """Which rank dies, and before which call with which file."""

    rank: int
    module: Any
    function: str
    file: str  # how its name ends; empty for any
    left: int  # the step that is found afterwards

    @property
    def name(self) -> str:
        return f"rank {self.rank} before {self.function} {self.file}".strip()

    def arrange(self) -> None:
        """To be called in the process that dies."""
        original = getattr(self.module, self.function)

        def deadly(*args: Any, **options: Any) -> Any:
            if self.file in " ".join(map(file_of, args)):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(self.module, self.function, deadly)


def file_of(argument: Any) -> str:
    """The file that an argument is about; a number may be an open one."""
    if isinstance(argument, int):
        return os.readlink(f"/proc/self/fd/{argument}")
    return str(getattr(argument, "name", argument))


DEATHS = [
    *(Death(rank, torch, "save", "", 4) for rank in (0, 1)),
    *(Death(rank, os, "fsync", f"rank{rank}.pt.tmp", 4) for rank in (0, 1)),
    *(Death(rank, os, "replace", f"rank{rank}.pt", 4) for rank in (0, 1)),
    Death(0, os, "mkdir", "step-6", 4),
    Death(0, os, "fsync", "complete.json.tmp", 4),
    Death(0, os, "replace", "complete.json", 4),
    Death(0, os, "unlink", "complete.json", 6),
    Death(0, shutil, "rmtree", "", 6),
    Death(0, os, "rmdir", "", 6),
]


def on_death(directory: str, number: int) -> str:
    """Save three times; the third one a rank does not survive."""
    run, death = Run(), DEATHS[number]
    for step in (2, 4):
        run.to(step)
        run.save(directory)
    run.to(KILLED)
    if dist.get_rank() == death.rank:
        death.arrange()
    said = caught(lambda: run.save(directory))
    return said or caught(lambda: run.to(LAST))


def on_resumed(directory: str) -> tuple[int, str]:
    loaded = tw.load_checkpoint(directory)
    assert loaded is not None
    run = Run()
    run.load(loaded.state)
    assert run.wire.step == loaded.step
    run.to(LAST - 1)
    run.save(directory, keep=1)
    run.to(LAST)
    return loaded.step, run.result()


@pytest.mark.parametrize("number", range(len(DEATHS)), ids=[death.name for death in DEATHS])
def test_a_rank_that_dies_while_saving_leaves_the_last_complete_step(number, tmp_path, whole):
    death, directory = DEATHS[number], str(tmp_path / "checkpoints")
    with ranks.Ranks(2) as group:
        said = group.run(on_death, directory, number, dying=[death.rank])[1 - death.rank]
    assert said.startswith("PeerError: "), "the other rank was not told"
    found = ranks.run(on_resumed, directory, ranks=2)
    assert [step for step, _ in found] == [death.left] * 2
    assert [result for _, result in found] == whole, "not bit for bit"
    names = [path.name for path in Path(directory).iterdir()]
    assert len(names) == 1, "what was left behind is not removed"
    assert names[0].endswith("-step-8")


# What is there


def on_kept(directory: str) -> list[Any]:
    run, found = Run(), []
    for step in range(1, 5):
        run.to(step)
        path = run.save(directory, keep=2)
        found.append((path.name, sorted(p.name for p in Path(directory).iterdir())))
        dist.barrier()
    run.save(directory, keep=2)  # the same step once more
    dist.barrier()
    newest = tw.newest_checkpoint(directory)
    assert newest is not None
    return [found, (newest.path.name, newest.step, newest.world_size)]


def test_old_checkpoints_are_removed_and_a_step_can_be_saved_again(tmp_path):
    for found, newest in ranks.run(on_kept, str(tmp_path / "a" / "b"), ranks=2):
        assert [name for name, _ in found] == [f"00000{i}-step-{i}" for i in range(1, 5)]
        assert newest == ("000005-step-4", 4, 2)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "000004-step-4",
        "000005-step-4",
    ]
    marker = json.loads((tmp_path / "a" / "b" / "000005-step-4" / "complete.json").read_text())
    assert marker["step"] == 4
    assert marker["world_size"] == 2
    assert marker["files"].keys() == {"rank0.pt", "rank1.pt"}


def on_first(directory: str) -> None:
    run = Run()
    run.to(3)
    for _ in range(2):
        run.save(directory)


def on_loaded(directory: str) -> tuple[str, Any]:
    loaded = tw.load_checkpoint(directory)
    return ("", None) if loaded is None else (loaded.path.name, loaded.step)


@pytest.mark.parametrize("damage", ["cut", "gone", "marker", "unmarked", "other format"])
def test_a_damaged_checkpoint_is_left_out(damage, tmp_path):
    directory = str(tmp_path)
    ranks.run(on_first, directory, ranks=2)
    newest = tmp_path / "000002-step-3"
    if damage == "cut":
        with (newest / "rank1.pt").open("ab") as file:
            file.truncate(100)
    elif damage == "gone":
        (newest / "rank0.pt").unlink()
    elif damage == "unmarked":
        (newest / "complete.json").unlink()
    else:
        text = "{" if damage == "marker" else '{"format": 7}'
        (newest / "complete.json").write_text(text)
    (tmp_path / "notes").mkdir()  # not ours
    assert ranks.run(on_loaded, directory, ranks=2) == [("000001-step-3", 3)] * 2
    ranks.run(on_first, directory, ranks=2)
    assert (tmp_path / "notes").is_dir()


def test_where_nothing_is_there_is_nothing_to_load(tmp_path):
    assert ranks.run(on_loaded, str(tmp_path / "none"), ranks=2) == [("", None)] * 2


def on_not_shared(directory: str) -> list[str]:
    """Each rank has a directory of its own, as on machines that share none."""
    own = f"{directory}/{dist.get_rank()}/checkpoints"
    found = [caught(lambda: tw.save_checkpoint(own, {}, step=1))]
    complete = f"{own}/000007-step-3"
    if dist.get_rank() == 0:
        Path(complete).mkdir()
        Path(complete, "complete.json").write_text(
            json.dumps({"format": 1, "step": 3, "world_size": 2, "files": {}})
        )
    found.append(caught(lambda: tw.load_checkpoint(own)))
    return found


def test_a_directory_that_ranks_do_not_share_is_refused(tmp_path):
    first, second = ranks.run(on_not_shared, str(tmp_path), ranks=2)
    assert first[0].startswith("PeerError: ")
    assert second[0].startswith("FileNotFoundError: ")
    for said in (first, second):
        assert "one that all ranks share" in said[0]
        assert said[1].startswith("ValueError: ")
        assert "directory that all ranks share" in said[1]


def on_a_rank_that_cannot_write(directory: str) -> list[str]:
    class Strange:
        pass

    me = dist.get_rank()
    state = {"odd": Strange()} if me else {"x": torch.ones(3)}
    found = [caught(lambda: tw.save_checkpoint(directory, state, step=1))]
    text = torch.tensor([1]) if me else torch.ones(3)
    state = {"ours": text, "a": torch.nn.Linear if me else 3}
    found.append(caught(lambda: tw.save_checkpoint(directory, state, step=1)))
    found.append(caught(lambda: tw.save_checkpoint(directory, {}, step=1 + me)))
    found.append(caught(lambda: tw.save_checkpoint(directory, {}, step=-1)))
    found.append(caught(lambda: tw.save_checkpoint(directory, {}, step=1, keep=0)))
    found.append(on_loaded(directory)[0])
    tw.save_checkpoint(directory, {"x": torch.ones(3)}, step=5)  # and it still works
    return [*found, on_loaded(directory)[0]]


def test_what_cannot_be_written_on_one_rank_ends_all(tmp_path):
    first, second = ranks.run(on_a_rank_that_cannot_write, str(tmp_path), ranks=2)
    for i in (0, 1):
        assert first[i].startswith("PeerError: ")
        assert "could not go on at rank 1: " in first[i]
    assert "Strange" in second[0]
    assert second[1].startswith("TypeError: the state holds torch.nn.modules.linear.Linear")
    for said in (first, second):
        assert said[2].startswith("MismatchError: ")
        assert "step 1" in said[2]
        assert "step 2" in said[2]
        assert said[3].startswith("ValueError: checkpoint: step must be a whole number from 0")
        assert said[4].startswith("ValueError: checkpoint: keep must be a whole number from 1")
        assert said[5] == "", "what was not completed counts"
        assert said[6].endswith("-step-5")


# On another number of ranks


def on_four(directory: str) -> None:
    run = Run("ef14")
    run.to(3)
    reducer = tw.Reducer("topk:0.1")
    reducer.average({"w": torch.arange(30.0) * (1 + dist.get_rank())})
    tw.save_checkpoint(
        directory,
        ({**run.state(), "more": [reducer.state_dict()], "me": dist.get_rank()}, "two"),
        step=3,
    )


def on_two(directory: str) -> dict[str, Any]:
    loaded = tw.load_checkpoint(directory)
    assert loaded is not None
    run = Run("ef14")
    given, _ = loaded.state
    run.load(given)
    reducer = tw.Reducer("topk:0.1")
    reducer.load_state_dict(given["more"][0])
    saved = [each["reducer"]["tensors"] for each in given["wire"]["ranks"]]
    kept = run.wire.state_dict()["reducer"]["tensors"]
    errors = []
    for name, state in kept.items():
        if "residual" in state:
            mean = sum(each[name]["residual"].double() for each in saved) / len(saved)
            errors.append(float((state["residual"] - mean).abs().max()))
    run.to(5)
    tw.check_replicas(run.model)
    return {
        "from": (loaded.world_size, loaded.step, given["me"], len(saved)),
        "error": max(errors),
        "alike": digest([kept[name]["residual"] for name in kept if "residual" in kept[name]]),
    }


def test_another_number_of_ranks_loads_the_same_checkpoint(tmp_path):
    ranks.run(on_four, str(tmp_path), ranks=4)
    found = ranks.run(on_two, str(tmp_path), ranks=2)
    for each in found:
        assert each["from"] == (4, 3, 0, 4)
        assert each["error"] <= 4 * 2.0**-24  # three sums of residuals below 1, and a division
    assert found[0]["alike"] == found[1]["alike"]


# With torch.distributed.checkpoint


def on_dcp(directory: str, dies: bool) -> str:
    import torch.distributed.checkpoint as dcp

    run = Run()
    for step in (2, 4):
        run.to(step)
        state = {"wire": run.wire.stateful(), "model": run.model.module.state_dict()}
        if dies and step == 4 and dist.get_rank() == 1:
            Death(1, os, "fsync", ".distcp", 2).arrange()
        with tw.new_checkpoint(directory, step=step) as path:
            dcp.save(state, checkpoint_id=path)
    return ""


def on_dcp_loaded(directory: str) -> tuple[int, int, str]:
    import torch.distributed.checkpoint as dcp

    found = tw.newest_checkpoint(directory)
    assert found is not None
    run = Run()
    model = run.model.module.state_dict()
    state = {"wire": run.wire.stateful(found.path), "model": model}
    dcp.load(state, checkpoint_id=found.path)
    return found.step, run.wire.step, caught(lambda: tw.load_checkpoint(directory))


@pytest.mark.parametrize("dies", [False, True])
def test_around_torch_distributed_checkpoint(dies, tmp_path):
    directory = str(tmp_path)
    with ranks.Ranks(2) as group:
        group.start(on_dcp, directory, dies)
        outcomes = group.outcomes(dying=[1] if dies else [])
    assert bool(outcomes[0].error) == dies
    step = 2 if dies else 4
    for found in ranks.run(on_dcp_loaded, directory, ranks=2):
        assert found[:2] == (step, step)
        assert found[2].startswith("ValueError: ")
        assert "was not written by save_checkpoint" in found[2]
