"""gather: every rank gets every frame and adds them up in rank order.

1. Draft the payload of C(x + r).
2. Meet: compare the calls, exchange the lengths of the messages.
3. All-gather of the messages.
4. Open and check all frames.
5. Residual <- (x + r) - own payload; tensor <- weight * sum of the decoded, in rank order.

(P - 1) messages leave each rank. When P of them would not fit the memory limit, steps 1 to 4 go in
rounds over slices of the tensors, each slice compressed on its own; the sums grow in a buffer and
step 5 comes after the last round, so that a failure in between changes nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.memory import rounds_for
from thinwire.collectives.message import bundle, unbundle
from thinwire.collectives.talk import Said, Talk
from thinwire.collectives.work import Part, Work, share
from thinwire.frames import Payload
from thinwire.frames.payload import add_all


class _Ready(NamedTuple):
    """A slice that was drafted and announced."""

    parts: list[Part]
    payloads: list[Payload]
    message: Tensor
    said: list[Said]  # length, non-finite, rounds, limit


def gather(talk: Talk, work: Work) -> None:
    with talk.preparing():
        rounds = rounds_for(work, talk.members.size)
    ready = _announce(talk, work, 0, rounds, work.limit)
    said = ready.said
    agreed = _agree(talk, work, said)
    if any(one.numbers[2] != agreed for one in said):
        del ready  # what did not fit
        rounds = agreed
        ready = _announce(talk, work, 0, rounds, None)
    if rounds == 1 and all(part.real == part.x.dtype for part in work.parts):
        _at_once(talk, work, ready)
    else:
        _in_rounds(talk, work, ready, rounds)


def _announce(talk: Talk, work: Work, turn: int, rounds: int, limit: int | None) -> _Ready:
    with talk.preparing():
        parts = [_slice(part, turn, rounds) for part in work.parts]
        payloads = [part.draft(work.compressor) for part in parts]
        message = bundle(payloads)
    bad = any(payload.non_finite for payload in payloads)
    said = talk.meet([message.numel(), bad, rounds, limit or 0])
    return _Ready(parts, payloads, message, said)


def _agree(talk: Talk, work: Work, said: list[Said]) -> int:
    """The number of rounds that satisfies everybody, now that real lengths are known."""
    wanted = [one.numbers[2] for one in said]
    if any(one.numbers[3] for one in said):
        with talk.preparing():
            frame = max(one.numbers[0] * one.numbers[2] for one in said)
            mine = rounds_for(work, talk.members.size, frame)
        wanted += [one.numbers[0] for one in talk.meet([mine])]
    return max(wanted)


def _receive(talk: Talk, work: Work, ready: _Ready) -> list[list[Payload]]:
    """The payloads of all members, opened and checked."""
    messages = talk.gather(ready.message, [one.numbers[0] for one in ready.said])
    with talk.clock("decode"):
        extents = [part.extent for part in ready.parts]
        return [unbundle(m, extents, work.compressor.fingerprint) for m in messages]


def _at_once(talk: Talk, work: Work, ready: _Ready) -> None:
    received = _receive(talk, work, ready)
    talk.account.finite = not any(one.numbers[1] for one in ready.said)
    with talk.clock("decode"):
        if talk.account.finite:
            for part, payload in zip(ready.parts, ready.payloads, strict=True):
                part.settle(work.compressor, payload)
        for i, part in enumerate(ready.parts):
            add_all([theirs[i] for theirs in received], part.x, work.weight, fresh=True)


def _in_rounds(talk: Talk, work: Work, ready: _Ready, rounds: int) -> None:
    own: list[tuple[Part, Payload, Tensor]] = []
    sound = True
    for turn in range(rounds):
        if turn:
            ready = _announce(talk, work, turn, rounds, None)
        sound = sound and not any(one.numbers[1] for one in ready.said)
        received = _receive(talk, work, ready)
        ready = ready._replace(message=ready.message[:0])
        with talk.clock("decode"):
            for i, (part, payload) in enumerate(zip(ready.parts, ready.payloads, strict=True)):
                total = part.x.new_empty(part.x.numel(), dtype=part.real)
                add_all([theirs[i] for theirs in received], total, work.weight, fresh=True)
                own.append((part, payload, total))
        del received
    with talk.clock("decode"):
        # Sums beyond float16 are the same news as infinities in the tensors, and on all ranks.
        sound = sound and all(_fits(total, part.x.dtype) for part, _, total in own)
        talk.account.finite = sound
        for part, payload, total in own:
            if sound:
                part.settle(work.compressor, payload)
            part.x.copy_(total)


def _slice(part: Part, turn: int, rounds: int) -> Part:
    if rounds == 1:
        return part
    lo, hi = share(part.x.numel(), turn, rounds)
    return part.cut(lo, hi, part.key.derive(turn))


def _fits(total: Tensor, dtype: torch.dtype) -> bool:
    if dtype != torch.float16 or not total.numel():
        return True
    low, high = total.aminmax()
    return max(-float(low), float(high)) < 65520  # what rounds to infinity
