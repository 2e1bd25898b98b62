"""The instruments of the fuzz: they find what they are there to find."""

import ctypes
import mmap
import os
import signal

import pytest
import torch
import trials
from mutations import MUTATIONS, Mutation, valid_frames
from trials import BLOCK, GuardedMemory, MisreadError, PeakMemory, Tally, Trials, mutations

import thinwire as tw
from thinwire.frames.header import CODES


@pytest.mark.parametrize(("at_end", "offset"), [(True, 96), (False, -1)])
def test_a_step_out_of_guarded_memory_ends_the_process(at_end, offset):
    memory = GuardedMemory(1000).take(96, 8, at_end)
    memory.fill_(1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # without the trace that pytest would print
        ctypes.memset(memory.data_ptr() + offset, 0, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV


def test_peak_memory_is_that_of_what_has_been_freed():
    peak = PeakMemory()
    peak.begin()
    # Not torch's: what earlier tests have freed may still be held, and is then taken again.
    memory = mmap.mmap(-1, 32 << 20)
    for _ in range(32):
        memory.write(b"1" * (1 << 20))
    memory.close()
    assert 30 << 20 < peak.growth < 40 << 20
    peak.begin()
    assert peak.growth < 8 << 20


def test_a_mutation_depends_on_seed_and_number_alone():
    frames = valid_frames()
    made = dict(mutations(frames, 3, 0, BLOCK + 20))
    assert list(made) == list(range(BLOCK + 20))
    near = range(BLOCK - 20, BLOCK + 20)
    assert dict(mutations(frames, 3, near.start, near.stop)) == {i: made[i] for i in near}
    assert made[5] != dict(mutations(frames, 4, 5, 6))[5]


@pytest.fixture(scope="module")
def subject():
    return Trials(0)


def broken_unpack(kind):
    """A reader with a defect."""

    def unpack(frame, **limits):
        payload = unpack_rightly(frame, **limits)
        if kind == "error":
            raise KeyError("not a FrameError")
        if kind == "memory" and not limits:
            torch.ones(64 << 20)
        return payload

    unpack_rightly = tw.unpack
    return unpack


@pytest.mark.parametrize("kind", ["error", "memory"])
def test_a_broken_reader_is_found(kind, subject, monkeypatch):
    monkeypatch.setattr(tw, "unpack", broken_unpack(kind))
    with pytest.raises(MisreadError) as caught:
        subject.run(0, 500)
    assert caught.value.data == bytes(subject.mutation(caught.value.number).data)


def test_elements_that_are_not_written_are_found(subject, monkeypatch):
    def restore(self, out=None):
        return torch.empty(self.shape, dtype=self.dtype) if out is None else out

    monkeypatch.setattr(tw.Payload, "restore", restore)
    with pytest.raises(MisreadError) as caught:
        subject.run(0, 500)
    assert "elements that are not written" in str(caught.value.__cause__)


def test_the_tally_names_what_did_not_occur():
    tally = Tally()
    assert {*MUTATIONS, *trials.LIMITS, *(kind.__name__ for kind in CODES.values())} == {
        *tally.missing
    }
    codes = sum(1 << number for number in CODES)
    for kind in MUTATIONS - {"flip"}:
        for by_default in (False, True):
            for read in (False, True):
                tally.add(Mutation(b"", kind, codes, by_default), read)
    tally.add(Mutation(b"", "flip", codes, False), False)
    assert tally.missing == ["flip"]
    assert Tally.from_json(tally.to_json()).rows() == tally.rows()
