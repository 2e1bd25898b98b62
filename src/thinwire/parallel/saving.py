"""Checkpoints that are whole or not there at all, whenever a process dies.

    directory/
        000003-step-8/      the third one saved here, at step 8
            rank0.pt        written by rank 0; so does every rank
            rank1.pt
            complete.json   written last: step, number of ranks, and the files with their sizes

1. Rank 0 makes a new directory, and every rank looks whether it sees it.
2. Each rank writes its own file: under another name, to the disk (fsync), then renamed.
3. When all have told that they are done, rank 0 writes complete.json in the same way. Without it
   the rest counts for nothing.
4. When all know that it is there, rank 0 removes what is old.

What fails on one rank is told to the others, and the death of a rank is noticed: nobody is left
waiting.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint

from thinwire import check
from thinwire.collectives.channel import process_group
from thinwire.collectives.numbers import GatherNumbers
from thinwire.collectives.options import Group, Options, Timeout
from thinwire.reducer.saved_state import gathered, is_of_one_rank
from thinwire.torch_internals import common_device

log = logging.getLogger("thinwire")
MARKER = "complete.json"
FORMAT = 1  # of the marker
NAME = re.compile(r"(\d{6,})-step-(\d+)")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint.

    Args:
        path: its own directory.
        step: that was given when it was saved.
        world_size: the number of ranks that saved it.
    """

    path: Path
    step: int
    world_size: int


@dataclass(frozen=True)
class LoadedCheckpoint(SavedCheckpoint):
    """A checkpoint with its content.

    Args:
        state: what this rank has saved. Of another number of ranks: what rank 0 has saved, in
            which states of wires, reducers and optimizers of thinwire hold those of all ranks, as
            if gathered, so that they can be loaded.
    """

    state: Any


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    group: Group = None,
    keep: int = 2,
    timeout: Timeout = None,
) -> Path:
    """Save a checkpoint of which every rank has its own part; all ranks call this together.

    When it returns, the checkpoint is complete and on the disk. When a rank fails or dies before
    that, all others get an error, and `load_checkpoint` gives the checkpoint before.

    Args:
        directory: for all checkpoints of a run; one that all ranks share.
        state: of this rank, as for torch.save: ``{"model": model.state_dict(), "wire":
            wire.state_dict(), ...}``. It must be something that torch.load reads with
            weights_only=True.
        step: of the training; the same on all ranks.
        group: a process group; None is the default one.
        keep: how many checkpoints stay, this one included; older ones are removed when this one is
            complete.
        timeout: seconds to wait for the others; by default the group's own limit. The slowest rank
            must have written its part within it.

    Returns:
        The directory of this checkpoint.

    Raises:
        PeerError: another rank died, did not answer in time or could not write.
        MismatchError: ranks are at different steps.
    """
    with new_checkpoint(directory, step=step, group=group, keep=keep, timeout=timeout) as path:
        target = path / _file_of(dist.get_rank(group))
        with _written_whole(target) as file:
            torch.save(state, file)
            file.flush()
            unsafe = get_unsafe_globals_in_checkpoint(file.name)
            if unsafe:
                raise TypeError(
                    f"the state holds {', '.join(sorted(unsafe))}, which torch.load does not read "
                    "with weights_only=True: save tensors and plain values, or allow it with "
                    "torch.serialization.add_safe_globals"
                )
    return path


def load_checkpoint(
    directory: str | os.PathLike[str], *, group: Group = None, timeout: Timeout = None
) -> LoadedCheckpoint | None:
    """What `save_checkpoint` saved last; all ranks call this together, and get the same step.

    Nothing is unpickled but what torch.load takes with weights_only=True. Tensors are in the host's
    memory.

    Args:
        directory: as given to `save_checkpoint`.
        group: a process group; None is the default one.
        timeout: seconds to wait for the others.

    Returns:
        The checkpoint, or None if no complete one is there. With another number of ranks than
        saved it, see `LoadedCheckpoint`.
    """
    found = newest_checkpoint(directory, group=group, timeout=timeout)
    if found is None:
        return None
    meeting = _Meeting(group, timeout, f"reading of {found.path.name}")
    with meeting.telling():
        state = _read(found, dist.get_rank(group), meeting.size)
    return LoadedCheckpoint(found.path, found.step, found.world_size, state)


@contextmanager
def new_checkpoint(
    directory: str | os.PathLike[str],
    *,
    step: int,
    group: Group = None,
    keep: int = 2,
    timeout: Timeout = None,
) -> Iterator[Path]:
    """A new directory for a checkpoint that others write; complete when the block ends well.

    What `save_checkpoint` does, around torch.distributed.checkpoint for example::

        with tw.new_checkpoint("checkpoints", step=8) as path:
            dcp.save({"wire": wire.stateful(), ...}, checkpoint_id=path)

    Whoever writes there must have brought it to the disk, as ``dcp.save`` does. All ranks enter and
    leave the block together. The arguments are those of `save_checkpoint`.
    """
    root = Path(directory)
    meeting = _Meeting(group, timeout, f"checkpoint of step {step} in {root.name!r}")
    with meeting.telling() as told:
        check.whole("checkpoint", "step", step, 0)
        check.whole("checkpoint", "keep", keep, 1)
        told.append(_make_directory(root, step) if meeting.first else 0)
    number = int(meeting.rows[0][0])
    path = root / f"{number:06d}-step-{step}"
    with meeting.telling():
        if not path.is_dir():
            raise FileNotFoundError(
                f"rank 0 has made {path}, which is not there: the directory of checkpoints must be "
                "one that all ranks share"
            )
    with meeting.telling():
        yield path
        _bring_to_disk(path)
    with meeting.telling():
        if meeting.first:
            _complete(path, step, meeting.size)
    if meeting.first:
        _remove_old(root, number, keep)


def newest_checkpoint(
    directory: str | os.PathLike[str], *, group: Group = None, timeout: Timeout = None
) -> SavedCheckpoint | None:
    """The newest complete checkpoint that all ranks see; all ranks call this together.

    For checkpoints that something else reads::

        found = tw.newest_checkpoint("checkpoints")
        if found is not None:
            dcp.load({"wire": wire.stateful(found.path), ...}, checkpoint_id=found.path)
    """
    root = Path(directory)
    meeting = _Meeting(group, timeout, f"newest checkpoint in {root.name!r}")
    complete: dict[int, SavedCheckpoint] = {}
    with meeting.telling() as told:
        complete = _complete_ones(root)
        told.append(max(complete, default=-1))
    while True:
        newest = [int(row[0]) for row in meeting.rows]
        if min(newest) < 0 <= max(newest):
            raise ValueError(
                f"{root}: rank {newest.index(min(newest))} of the group sees no complete "
                f"checkpoint there, and rank {newest.index(max(newest))} does: it must be a "
                "directory that all ranks share"
            )
        if min(newest) == max(newest):
            return complete.get(newest[0])
        with meeting.telling() as told:  # some see more than others: the newest that all see
            told.append(max((n for n in complete if n <= min(newest)), default=-1))


class _Meeting:
    """Where ranks tell each other how they fare; each step of a checkpoint ends with one.

    Attributes:
        size: of the group.
        first: whether this is its first rank.
        rows: what ranks told each other last, in their order.
    """

    def __init__(self, group: Group, timeout: Timeout, what: str) -> None:
        self._options = Options.of(group, timeout=timeout)
        self._device = common_device(process_group(group))
        self._what, self._count = what, 0
        self.size, self.first = dist.get_world_size(group), dist.get_rank(group) == 0
        self.rows: list[list[float]] = []

    @contextmanager
    def telling(self) -> Iterator[list[float]]:
        """Return when all ranks have come through the block; if one has not, all of them raise.

        Gives a list, for a number that the others are to know.
        """
        told: list[float] = []
        failed: Exception | None = None
        try:
            yield told
        except Exception as error:
            failed = error
        self._count += 1
        what = f"{self._what}, part {self._count}"
        numbers = (told or [0.0]) if failed is None else failed
        exchange = GatherNumbers(numbers, what, self._device, self._options)
        exchange.start()
        self.rows = exchange.rows


def _file_of(rank: int) -> str:
    return f"rank{rank}.pt"


@contextmanager
def _written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that has its name only when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _bring_to_disk(path.parent)


def _bring_to_disk(directory: Path) -> None:
    """The names in a directory, which are not part of the files."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(root: Path, step: int) -> int:
    """A directory that was not there before; returns its number."""
    new = [each for each in (root, *root.parents) if not each.exists()]
    root.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(root), default=0) + 1
    (root / f"{number:06d}-step-{step}").mkdir()
    _bring_to_disk(root)
    for each in new:
        _bring_to_disk(each.parent)
    return number


def _numbers(root: Path) -> dict[int, Path]:
    """All checkpoints, complete or not."""
    if not root.is_dir():
        return {}
    named = [(NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return {int(match[1]): path for match, path in named if match}


def _complete(path: Path, step: int, size: int) -> None:
    """Declare a checkpoint complete."""
    marker = {"format": FORMAT, "step": step, "world_size": size, "files": _sizes(path)}
    with _written_whole(path / MARKER) as file:
        file.write(json.dumps(marker, indent=1).encode())


def _sizes(path: Path) -> dict[str, int]:
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.name != MARKER)
    return {each.relative_to(path).as_posix(): each.stat().st_size for each in files}


def _complete_ones(root: Path) -> dict[int, SavedCheckpoint]:
    """The complete checkpoints, by their numbers."""
    found = {number: _opened(path) for number, path in _numbers(root).items()}
    return {number: saved for number, saved in found.items() if saved is not None}


def _opened(path: Path) -> SavedCheckpoint | None:
    """A checkpoint, if all of it is there."""
    try:
        marker = json.loads((path / MARKER).read_bytes())
        if marker["format"] != FORMAT:
            raise ValueError(f"format {marker['format']!r}, not {FORMAT}")
        check.whole(MARKER, "step", marker["step"], 0)
        check.whole(MARKER, "world_size", marker["world_size"], 1)
        there = _sizes(path)
        for name, size in marker["files"].items():
            if there.get(name) != size:
                raise ValueError(f"{name} has {there.get(name, 'no')} bytes, not {size}")
    except FileNotFoundError:
        return None  # never completed, or about to be removed
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is left out, it is damaged: %s", path, error)
        return None
    return SavedCheckpoint(path, marker["step"], marker["world_size"])


def _read(found: SavedCheckpoint, rank: int, size: int) -> Any:
    if not (found.path / _file_of(0)).is_file():
        raise ValueError(
            f"{found.path} was not written by save_checkpoint: newest_checkpoint() gives its path "
            "to whatever can read it"
        )
    if found.world_size == size:
        path = found.path / _file_of(rank)
        return torch.load(path, map_location="cpu", weights_only=True)
    if rank == 0:
        log.warning(
            "%s was saved by %d ranks and is loaded by %d: wires, reducers and optimizers of "
            "thinwire go on with the mean of what ranks remembered, all else is that of rank 0",
            found.path,
            found.world_size,
            size,
        )
    paths = [found.path / _file_of(other) for other in range(found.world_size)]
    # Mapped: of most of it only what rank 0 has saved will be looked at.
    return _merged([torch.load(p, map_location="cpu", weights_only=True, mmap=True) for p in paths])


def _merged(states: Sequence[Any]) -> Any:
    """What rank 0 has saved, with all ranks' states in place of those that are one rank's own."""
    first = states[0]
    if all(map(_is_ours, states)):
        return gathered(states)
    if isinstance(first, dict) and all(isinstance(state, Mapping) for state in states):
        return {
            key: _merged([state[key] for state in states])
            if all(key in state for state in states)
            else value
            for key, value in first.items()
        }
    kind = type(first)
    if kind in (list, tuple) and all(
        type(state) is kind and len(state) == len(first) for state in states
    ):
        return kind(_merged(entries) for entries in zip(*states, strict=True))
    return first


def _is_ours(state: Any) -> bool:
    """Whether this is the state of a wire, a reducer or an optimizer."""
    return is_of_one_rank(state) and any(
        key in state for key in ("reducer", "tensors", "param_groups")
    )


def _remove_old(root: Path, newest: int, keep: int) -> None:
    """All before the newest ones; of what was never completed, all before the newest one."""
    complete = sorted(_complete_ones(root))
    kept = set(complete[-keep:])
    for number, path in sorted(_numbers(root).items()):
        if number < newest and number not in kept:
            try:
                # First what makes it count: it is never seen with half of its files.
                (path / MARKER).unlink(missing_ok=True)
                _bring_to_disk(path)
                shutil.rmtree(path)
            except OSError as error:
                log.warning("%s, which is old, could not be removed: %s", path, error)
    _bring_to_disk(root)
