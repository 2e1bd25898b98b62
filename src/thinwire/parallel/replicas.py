"""Are the replicas still the same? Hashes of the parameters, compared over the ranks."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.exchange import Exchange
from thinwire.collectives.options import Group, Options, Timeout
from thinwire.collectives.transport import Transport
from thinwire.errors import ReplicaError
from thinwire.parallel.model import parameter_names
from thinwire.reducer.exchange import LOOP, Driver
from thinwire.torch_internals import ignored_by_ddp, is_dtensor, is_fsdp1, uncompiled

SHOWN = 5  # names in an error
DIGEST = 8  # bytes


def check_replicas(
    model: nn.Module, *, group: Group = None, buffers: bool = False, timeout: Timeout = None
) -> None:
    """Raise `ReplicaError` on all ranks if parameters differ in any bit between them.

    Args:
        model: a module, wrapped in DDP or not. All ranks of the group call this. One whose
            parameters are sharded (FSDP) is refused: ranks hold different shards. Parameters and
            buffers that DDP was told to ignore are not compared.
        group: a process group; None is the one of a DDP module, or the default one.
        buffers: compare buffers as well. DDP sends those of rank 0 to the others at the start of
            each forward pass, so between steps they may differ where all is well.
        timeout: seconds to wait for the others.
    """
    named = parameter_names(model)
    _check_whole(model, named)
    inner = uncompiled(model)
    ignored = ignored_by_ddp(inner) if isinstance(inner, DistributedDataParallel) else set()
    tensors: dict[str, Tensor] = {name: p for p, name in named}
    if buffers:
        tensors.update(model.named_buffers())
    tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) not in ignored}
    own = getattr(inner, "process_group", None) if group is None else group
    ReplicaCheck(tensors, Options.of(own, timeout=timeout)).start()


def _check_whole(model: nn.Module, named: Sequence[tuple[nn.Parameter, str]]) -> None:
    sharded = next((name for parameter, name in named if is_dtensor(parameter)), None)
    if sharded is None and not any(map(is_fsdp1, model.modules())):
        return
    what = "a FullyShardedDataParallel model" if sharded is None else f"{sharded} is a DTensor"
    raise TypeError(
        f"check_replicas compares whole parameters, but {what}: ranks of FSDP hold different "
        "shards by design, so there are no replicas to compare"
    )


class ReplicaCheck(Exchange):
    """Compares tensors over the ranks; its handle fails with `ReplicaError`.

    Args:
        tensors: by name.
        counts: whether this rank's replica is to be compared. One that has joined early takes no
            more steps and is behind the others.
        what: the tensors are, "parameters" or "averages".
        driver: asked whether to take part at all.

    Attributes:
        different: names of those that are not the same on all ranks, when it has ended.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        options: Options,
        counts: bool = True,
        *,
        what: str = "parameters",
        driver: Driver = LOOP,
    ) -> None:
        self._what, self._driver, self.batch = what, driver, driver.batch
        what = f"comparison of {len(tensors)} {what}"
        given = list(tensors.values()) or [torch.empty(0)]
        super().__init__("check_replicas", given, options, what=what)
        self._tensors, self._counts = tensors, counts
        self.different: list[str] = []
        words = ",".join(f"{name}:{list(t.shape)}:{t.dtype}" for name, t in tensors.items())
        named = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        self.details = ((self._what, f"{len(tensors)} (names {named})"),)

    def admit(self) -> None:
        self._driver.admit()

    def prepare(self) -> None:
        digests = b"".join(_digest(tensor) for tensor in self._tensors.values())
        message = torch.frombuffer(bytearray(digests or b"\0"), dtype=torch.uint8)
        self._message = message.to(self.device)

    def exchange(self, transport: Transport) -> None:
        length = self._message.numel()
        records = transport.meet([length, self._counts], along=self._message)
        rows = transport.gather(self._message, [length] * self.size, records)
        there = [i for i, record in enumerate(records) if record.numbers[1]]
        table = [bytes(rows[i].cpu().numpy()) for i in there]
        ranks = [transport.members.ranks[i] for i in there]
        self._found = _difference(table, list(self._tensors), ranks, self._what)
        self._differing = [
            name
            for i, name in enumerate(self._tensors)
            if len({row[DIGEST * i : DIGEST * (i + 1)] for row in table}) > 1
        ]

    def finish(self) -> None:
        self.different = self._differing
        if self._found:
            raise ReplicaError(self._found)


def _digest(tensor: Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=DIGEST).digest()


def _difference(table: list[bytes], names: list[str], ranks: Sequence[int], what: str) -> str:
    """Who differs from most, and in which tensors; nothing if all agree."""
    if len(set(table)) <= 1:
        return ""
    most = max(set(table), key=lambda row: (table.count(row), -table.index(row)))
    found = []
    for rank, row in zip(ranks, table, strict=True):
        if row == most:
            continue
        wrong = [
            name
            for i, name in enumerate(names)
            if row[DIGEST * i : DIGEST * (i + 1)] != most[DIGEST * i : DIGEST * (i + 1)]
        ]
        found.append(f"rank {rank} in {listed(wrong)}")
    same = [rank for rank, row in zip(ranks, table, strict=True) if row == most]
    others = ", ".join(map(str, same))
    who = f"{'; '.join(found)}, from {'rank' if len(same) == 1 else 'ranks'} {others}"
    if what != "parameters":
        return f"{what} differ between ranks: {who}. All ranks must go on with the same {what}"
    return (
        f"parameters differ between replicas: {who}. Replicas that start alike and apply "
        "the same averages stay alike: look for different initial weights, seeds or optimizer "
        "states, or parameters changed on one rank only"
    )


def listed(names: Sequence[str]) -> str:
    """The first of them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
