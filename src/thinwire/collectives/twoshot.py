"""twoshot: every rank sums one shard of the tensor, then sends the sum to all, compressed again.

This is what a parameter server with compression both ways does, with every rank as the server of
one shard.

1. Draft a payload for every other rank's shard; meet (lengths); all-to-all.
2. Sum the own shard: x + r of this rank as it is, plus the decoded shards of the others.
3. Draft the payload of the weighted sum; meet (lengths); all-gather.
4. Residual <- (x + r) - payload for the shards of others; for the own shard, the sum less what was
   sent of it. Tensor <- the decoded sums, the same frames on all ranks.

The residual of the own shard is the server-side residual: this rank's contribution to its own shard
never travels, so nothing else has to be remembered there (docs/decisions/0007). 2 (P - 1) / P
payloads leave each rank.
"""

import torch
from torch import Tensor

from thinwire.collectives.memory import check_real
from thinwire.collectives.message import bundle, unbundle
from thinwire.collectives.talk import Talk
from thinwire.collectives.work import Part, Work, share
from thinwire.compressors import LocalCompressor
from thinwire.frames import Payload
from thinwire.frames.payload import add_all


def twoshot(talk: Talk, work: Work) -> None:
    compressor = work.compressor
    assert isinstance(compressor, LocalCompressor)
    me, size = talk.members.index, talk.members.size
    shards = [[_shard(part, j, size) for part in work.parts] for j in range(size)]
    first, received, sound = swap_shards(talk, work, shards, "twoshot")
    weight = work.weight
    with talk.preparing():
        sums = sum_shards(work, shards[me], received)
        del received
        means = [_narrowed(total, weight, p) for total, p in zip(sums, shards[me], strict=True)]
        second = [
            compressor.draft(mean, residual=_nothing(mean, part), key=part.key.derive(size))
            for mean, part in zip(means, shards[me], strict=True)
        ]
        message = bundle(second)
        del means
    bad = not sound or any(p.non_finite for p in second)
    said = talk.meet([message.numel(), bad])
    talk.account.finite = not any(one.numbers[1] for one in said)
    messages = talk.gather(message, [one.numbers[0] for one in said])
    with talk.clock("decode"):
        results = [
            unbundle(m, [part.extent for part in parts], compressor.fingerprint)
            for m, parts in zip(messages, shards, strict=True)
        ]
        if talk.account.finite:
            settle_shards(work, shards, first)
            for part, total, payload in zip(shards[me], sums, second, strict=True):
                if part.r is not None:
                    part.r.copy_(total)
                    payload.add_to(part.r, -1.0 / weight)
        for parts, payloads in zip(shards, results, strict=True):
            for part, payload in zip(parts, payloads, strict=True):
                payload.restore(part.x)


def swap_shards(
    talk: Talk, work: Work, shards: list[list[Part]], collective: str, finite: bool = True
) -> tuple[list[list[Payload]], list[Tensor], bool]:
    """Step 1: the payloads sent, the messages received from the others, whether all is finite.

    `collective` is whose memory is checked; `finite` is what this rank says of its own shard.
    """
    compressor, me = work.compressor, talk.members.index
    with talk.preparing():
        payloads = [
            [] if j == me else [part.draft(compressor) for part in parts]
            for j, parts in enumerate(shards)
        ]
        nothing = torch.empty(0, dtype=torch.uint8, device=talk.device)
        messages = [bundle(each) if each else nothing for each in payloads]
        check_real(collective, work, messages, len(shards))
        bad = not finite or any(p.non_finite for each in payloads for p in each)
    said = talk.meet([bad], [m.numel() for m in messages])
    received = talk.swap(messages, [one.words[me] for one in said])
    others = [message for j, message in enumerate(received) if j != me]
    return payloads, others, not any(one.numbers[0] for one in said)


def sum_shards(work: Work, own: list[Part], received: list[Tensor]) -> list[Tensor]:
    """Step 2: x + r of the own shard plus what came from the others, in rank order."""
    extents = [part.extent for part in own]
    opened = [unbundle(message, extents, work.compressor.fingerprint) for message in received]
    sums = []
    for i, part in enumerate(own):
        total = part.x.to(part.real, copy=True)
        if part.r is not None:
            total.add_(part.r)
        add_all([theirs[i] for theirs in opened], total)
        sums.append(total)
    return sums


def settle_shards(work: Work, shards: list[list[Part]], sent: list[list[Payload]]) -> None:
    """Bring the residuals of other ranks' shards up to date."""
    for parts, payloads in zip(shards, sent, strict=True):
        if payloads:
            for part, payload in zip(parts, payloads, strict=True):
                part.settle(work.compressor, payload)


def _shard(part: Part, index: int, count: int) -> Part:
    lo, hi = share(part.x.numel(), index, count)
    return part.cut(lo, hi, part.key.derive(index))


def _narrowed(total: Tensor, weight: float, part: Part) -> Tensor:
    """weight * total in the tensor's own type: that decides how wide values travel."""
    scaled = total if weight == 1 else total * weight
    return scaled.to(part.x.dtype)


def _nothing(mean: Tensor, part: Part) -> Tensor | None:
    """A zero residual where there is one: RandomK scales what it sends unless it is remembered."""
    if part.r is None:
        return None
    return torch.zeros(mean.numel(), dtype=part.r.dtype, device=mean.device)
