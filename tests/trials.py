"""Decoding damaged frames (`mutations`) with everything else forbidden: the memory around frame and
tensor cannot be touched, the process may not grow beyond limits, and every outcome is counted.

Shared by test_frames.py, test_hostile_frames.py and benchmarks/fuzz.py.
"""

import contextlib
import ctypes
import mmap
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator, MutableSequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mutations import LONGEST, MAX_NUMEL, MUTATIONS, Mutation, Mutator, ValidFrame, valid_frames
from torch import Tensor

import thinwire as tw
from thinwire.frames.frame import ALWAYS, default_bytes
from thinwire.frames.header import ALIGNMENT, CODES

PROT_NONE = 0
BY_BIT = {1 << number: kind.__name__ for number, kind in CODES.items()}
LIMITS = ["limits of what is expected", "limits by default"]
BLOCK = 1000  # mutations that share one generator of random numbers
# Room for a tensor of MAX_NUMEL float64 many times over, and for the stacks and arenas of threads.
MOST_MEMORY = 512 << 20
SLACK = 32 << 20  # for the allocator, and what libraries load when they are first needed
PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def memory_limit(extra: int = MOST_MEMORY) -> Iterator[None]:
    """So many bytes more than the process has now, and not one beyond."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class PeakMemory:
    """Most memory that this process has held since `begin`, beyond what it held then."""

    def __init__(self) -> None:
        # Opened once: opening takes longer than reading.
        self._clear = open("/proc/self/clear_refs", "wb", buffering=0)  # noqa: SIM115
        self._status = open("/proc/self/status", "rb", buffering=0)  # noqa: SIM115

    def begin(self) -> None:
        self._clear.write(b"5")  # "reset the peak", see proc(5)
        self._before = self._held(b"VmRSS:")

    @property
    def growth(self) -> int:
        return self._held(b"VmHWM:") - self._before

    def _held(self, name: bytes) -> int:
        self._status.seek(0)
        _, _, rest = self._status.read(4096).partition(name)
        return int(rest[:20].split()[0]) << 10


class GuardedMemory:
    """Memory between two pages that nobody can read or write: a step beyond ends the process."""

    def __init__(self, num_bytes: int) -> None:
        self._size = -(-num_bytes // PAGE) * PAGE
        everything = torch.frombuffer(mmap.mmap(-1, self._size + 2 * PAGE), dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for guard in (0, PAGE + self._size):
            address = ctypes.c_void_p(everything.data_ptr() + guard)
            if libc.mprotect(address, ctypes.c_size_t(PAGE), PROT_NONE):
                raise OSError(ctypes.get_errno(), "a page cannot be protected")
        self._room = everything[PAGE : PAGE + self._size]

    def take(self, num_bytes: int, alignment: int, at_end: bool) -> Tensor:
        """So many bytes right after the first guard, or as near to the last as alignment allows."""
        start = (self._size - num_bytes) // alignment * alignment if at_end else 0
        return self._room[start : start + num_bytes]


class Outcome(NamedTuple):
    """What became of a frame: a tensor, or the reason why not."""

    tensor: Tensor | None
    reason: str


def attempt(frame: Tensor) -> Outcome:
    """Decode a frame; anything but FrameError or a tensor of the claimed shape comes out."""
    try:
        payload = tw.unpack(frame, max_numel=MAX_NUMEL)
        tensor = payload.restore()
    except tw.FrameError as error:
        return Outcome(None, str(error))
    _check_claim(payload, tensor)
    return Outcome(tensor, "decoded")


def _check_claim(payload: tw.Payload, tensor: Tensor) -> None:
    assert tensor.shape == payload.shape, f"{tensor.shape} instead of {payload.shape}"
    assert tensor.dtype == payload.dtype, f"{tensor.dtype} instead of {payload.dtype}"


class MisreadError(Exception):
    """Bytes that were neither refused with FrameError nor read as what they claim to be."""

    def __init__(self, number: int, mutation: Mutation) -> None:
        self.number, self.data = number, bytes(mutation.data)
        super().__init__(f"{number} ({mutation.kind}): {self.data[:4096].hex()}")


class Tally:
    """What became of many mutations."""

    def __init__(self) -> None:
        # By kind, codes as bits, whether limits were those by default, and whether it was read.
        self._counts = Counter[tuple[str, int, bool, bool]]()
        self.seconds = 0.0  # of CPU time
        self.slowest = 0.0  # of them for one mutation, making it included
        self.growth = 0  # most bytes that one took where limits were those by default

    def add(self, mutation: Mutation, read: bool) -> None:
        self._counts[mutation.kind, mutation.codes, mutation.by_default, read] += 1

    def merge(self, other: "Tally") -> None:
        self._counts.update(other._counts)
        self.seconds += other.seconds
        self.slowest = max(self.slowest, other.slowest)
        self.growth = max(self.growth, other.growth)

    @property
    def done(self) -> int:
        return self._counts.total()

    @property
    def read(self) -> int:
        return sum(count for (*_, read), count in self._counts.items() if read)

    def rows(self) -> dict[str, tuple[int, int]]:
        """For each kind of mutation, code and limit: how many were refused, and read."""
        rows = {name: [0, 0] for name in (*sorted(MUTATIONS), *BY_BIT.values(), *LIMITS)}
        for (kind, codes, by_default, read), count in self._counts.items():
            rows[kind][read] += count
            rows[LIMITS[by_default]][read] += count
            for bit, name in BY_BIT.items():
                if codes & bit:
                    rows[name][read] += count
        return {name: (refused, read) for name, (refused, read) in rows.items()}

    @property
    def missing(self) -> list[str]:
        """Kinds, codes and limits of which none was refused or none was read."""
        return [name for name, both in self.rows().items() if 0 in both]

    def to_json(self) -> dict[str, Any]:
        counts = [[*key, count] for key, count in self._counts.items()]
        figures = {"seconds": self.seconds, "slowest": self.slowest, "growth": self.growth}
        return {"counts": counts, **figures}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Tally":
        tally = cls()
        for kind, codes, by_default, read, count in given["counts"]:
            tally._counts[kind, codes, by_default, read] = count
        tally.seconds, tally.slowest = given["seconds"], given["slowest"]
        tally.growth = given["growth"]
        return tally


def mutations(
    frames: list[ValidFrame], seed: int, start: int, stop: int
) -> Iterator[tuple[int, Mutation]]:
    """The mutations of a seed with numbers in [start, stop), whoever else makes the others."""
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        mutator = Mutator(random.Random(f"{seed}/{block}"), frames)
        for number in range(block * BLOCK, min(stop, (block + 1) * BLOCK)):
            mutation = mutator.next()
            if number >= start:
                yield number, mutation


class Trials:
    """Decodes the mutations of a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._frames = valid_frames()
        for frame in self._frames:  # loads all kernels
            attempt(torch.from_numpy(np.frombuffer(frame.data, np.uint8).copy()))
        self._frame_memory = GuardedMemory(LONGEST)
        self._tensor_memory = GuardedMemory(8 * MAX_NUMEL)
        self._peak = PeakMemory()

    def mutation(self, number: int) -> Mutation:
        """One of the mutations, without decoding it."""
        ((_, found),) = mutations(self._frames, self._seed, number, number + 1)
        return found

    def run(self, start: int, stop: int, at: MutableSequence[int] | None = None) -> Tally:
        """Decode the mutations with numbers in [start, stop).

        Args:
            at: its first element is the number of the mutation in work, for whoever wants to know
                where this process ended.

        Raises:
            MisreadError: one was neither refused with FrameError nor read as what it claims.
        """
        tally = Tally()
        before = begun = time.process_time()
        for number, mutation in mutations(self._frames, self._seed, start, stop):
            if at is not None:
                at[0] = number
            try:
                read = self._try(number, mutation, tally)
            except Exception as error:
                raise MisreadError(number, mutation) from error
            tally.add(mutation, read)
            now = time.process_time()
            tally.slowest = max(tally.slowest, now - before)
            before = now
        tally.seconds = before - begun
        return tally

    def _try(self, number: int, mutation: Mutation, tally: Tally) -> bool:
        """Whether it can be read."""
        at_end = number % 4 > 0
        given: bytes | Tensor
        if mutation.is_container:
            given = bytes(mutation.data)
        else:
            given = self._frame_memory.take(len(mutation.data), ALIGNMENT, at_end)
            given.numpy()[:] = np.frombuffer(mutation.data, np.uint8)
        if not mutation.by_default:
            try:
                found = tw.unpack(given, max_numel=MAX_NUMEL)
                self._restore(found, at_end, again=number % 8 == 0)
            except tw.FrameError:
                return False
            return True
        self._peak.begin()
        try:
            found = tw.unpack(given)
            payloads = found.values() if isinstance(found, dict) else [found]
            tensors = [payload.restore() for payload in payloads]
        except tw.FrameError:
            most, read = default_bytes(len(mutation.data)), False
        else:
            for payload, tensor in zip(payloads, tensors, strict=True):
                _check_claim(payload, tensor)
            most, read = sum(payload.decoded_bytes for payload in payloads), True
        grown = self._peak.growth
        assert grown <= most + SLACK, f"{grown} bytes of memory instead of {most}"
        tally.growth = max(tally.growth, grown)
        return read

    def _restore(
        self, found: tw.Payload | dict[str, tw.Payload], at_end: bool, again: bool
    ) -> None:
        """Decode into guarded memory; `again`, into other content, for what must be the same."""
        for payload in found.values() if isinstance(found, dict) else [found]:
            width = payload.dtype.itemsize
            memory = self._tensor_memory.take(payload.numel * width, width, at_end)
            out = memory.view(payload.dtype).view(payload.shape)
            payload.restore(out)
            if again:
                first = memory.clone()
                memory.fill_(0xA5)
                payload.restore(out)
                assert torch.equal(memory, first), "elements that are not written"


def fuzz(seed: int, count: int) -> Tally:
    """Decode the first so many mutations of a seed, within the memory that any frame may take."""
    torch.set_num_threads(1)  # each further one would reserve memory of its own
    trials = Trials(seed)
    with memory_limit(ALWAYS + SLACK):
        return trials.run(0, count)
