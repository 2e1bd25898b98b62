"""all_gather and broadcast: what one rank has, for all."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.collectives.channel import place_of
from thinwire.collectives.handle import Handle
from thinwire.collectives.memory import guard, limit_of
from thinwire.collectives.message import bundle, unbundle
from thinwire.collectives.start import Group, Session, Timeout, describe, describe_all, span_of
from thinwire.collectives.talk import Call, Talk
from thinwire.collectives.work import Work
from thinwire.compressors import Compressor, local_of
from thinwire.frames.code import Extent
from thinwire.kernels import Key


def all_gather(
    output: Tensor | Sequence[Tensor],
    input: Tensor,
    compressor: Compressor | str,
    *,
    residual: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """The tensors of all ranks on all ranks, compressed on the way.

    Every rank ends with the same bits: in the place of its own tensor, too, stands what the others
    could decode of it.

    Args:
        output: one tensor of P times as many elements as each input, or a list of P tensors; the
            inputs may then differ in length.
        input: this rank's tensor. It is not changed.
        residual: what earlier calls left out of `input`.
        group, async_op, max_bytes, timeout, key: as for `all_reduce`.

    Returns:
        A handle, already ended unless `async_op`; its future holds `output`.
    """
    compressor = local_of(compressor)
    compressor.check_input(input, residual)
    limit, span = limit_of(max_bytes), span_of(timeout)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    session = Session(group, [input, *outputs])
    size, me = session.size, session.rank
    if isinstance(output, Tensor):
        if output.numel() != size * input.numel() or not output.is_contiguous():
            raise ValueError(
                f"output must be contiguous with {size} x {input.numel()} elements, got "
                f"{describe(output)}"
            )
        flat, n = output.detach().view(-1), input.numel()
        places = [flat[i * n : (i + 1) * n] for i in range(size)]
    else:
        places = [place.detach() for place in outputs]
    if len(places) != size:
        raise ValueError(f"output must be {size} tensors, one for each rank, got {len(places)}")
    if places[me].numel() != input.numel():
        raise ValueError(
            f"output[{me}] must be like the input, {describe(input)}, got {describe(places[me])}"
        )
    for i, place in enumerate(places):
        if place.dtype != input.dtype:
            raise ValueError(f"output[{i}] must be {input.dtype} too, got {describe(place)}")
    handle = Handle(output, f"all_gather of {describe(input)} with {compressor}")
    if size == 1:
        handle.account.collective = "none"
        places[0].copy_(input.detach().reshape(places[0].shape))
        handle.end()
        return handle
    drawn = session.key(compressor, key)
    details = (("output", describe_all(places)), ("compressor", str(compressor)))

    def job(talk: Talk) -> None:
        handle.account.collective = "all_gather"
        with talk.preparing():
            work = Work.of([input], [residual], compressor, drawn, changes=False, limit=limit)
            guard("all_gather", work, size)
            (part,) = work.parts
            payload = part.draft(compressor)
            message = bundle([payload])
        said = talk.meet([message.numel()])
        messages = talk.gather(message, [one.numbers[0] for one in said])
        with talk.clock("decode"):
            extents = [Extent(place.dtype, place.numel()) for place in places]
            received = [
                unbundle(m, [extent], compressor.fingerprint)[0]
                for m, extent in zip(messages, extents, strict=True)
            ]
            part.settle(compressor, payload)
            work.done()
            for place, theirs in zip(places, received, strict=True):
                theirs.restore(place)

    return session.begin(handle, Call("all_gather", details), job, span, async_op)


def broadcast(
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    src: int = 0,
    residual: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """One rank's tensor on all ranks, compressed on the way, in place.

    The source, too, ends with what the others could decode, so that all have the same bits.

    Args:
        tensor: what is sent on the source, and where it goes on all ranks.
        src: global rank of the source, as in torch.distributed.
        residual: on the source, what earlier calls left out; not used elsewhere.
        group, async_op, max_bytes, timeout, key: as for `all_reduce`.

    Returns:
        A handle, already ended unless `async_op`; its future holds `tensor`.
    """
    compressor = local_of(compressor)
    compressor.check_input(tensor, residual)
    limit, span = limit_of(max_bytes), span_of(timeout)
    session = Session(group, [tensor])
    root = place_of(session.group, src)
    handle = Handle(tensor, f"broadcast of {describe(tensor)} with {compressor}")
    if session.size == 1:
        handle.account.collective = "none"
        handle.end()
        return handle
    drawn = session.key(compressor, key)
    details = (
        ("tensor", describe(tensor)),
        ("compressor", str(compressor)),
        ("src", str(src)),
    )

    def job(talk: Talk) -> None:
        handle.account.collective = "broadcast"
        source = session.rank == root
        message = None
        with talk.preparing():
            mine = [residual if source else None]
            work = Work.of([tensor], mine, compressor, drawn, limit=limit)
            (part,) = work.parts
            guard("broadcast", work, session.size)
            if source:
                payload = part.draft(compressor)
                message = bundle([payload])
        said = talk.meet([0 if message is None else message.numel()])
        data = talk.broadcast(message, said[root].numbers[0], root)
        with talk.clock("decode"):
            (received,) = unbundle(data, [part.extent], compressor.fingerprint)
            if source:
                part.settle(compressor, payload)
            received.restore(part.x)
            work.done()

    return session.begin(handle, Call("broadcast", details), job, span, async_op)
