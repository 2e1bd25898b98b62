"""The buffers of a model that takes local steps: which are averaged, and which are left alone.

A buffer is looked up by its name each time: a forward pass may have put another tensor in its
place. Ranks tell each other with each exchange which of their buffers have changed, and send those
from then on. So masks and tables, which may hold infinity, are never sent, and all ranks know what
the others send.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives.numbers import GatherNumbers
from thinwire.collectives.options import Options
from thinwire.reducer.saved_state import required

BUFFER = "(buffer) "  # before the name of a buffer
FLAGS = "(buffers)"  # two rows that say which buffers have changed, and which were replaced
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class ModelBuffers:
    """The buffers that a module has now, by name.

    Args:
        module: that holds them.
        ignored: ids of those that are nobody's concern.

    Attributes:
        names: of those that are averaged if they change, the floating-point ones.
        like: for each buffer a tensor without memory of its shape.
        common: those of `names` as they were after the last exchange, the same on all ranks; none
            before the first step.
        sent: names of those that have changed on a rank.
        apart: names of those that stay with each rank: some rank has replaced them by one of
            another shape or kind, or removed them, or they hold infinity and are changed.
    """

    def __init__(self, module: nn.Module, ignored: Collection[int] = ()) -> None:
        self._module = module
        found = {
            name: buffer
            for name, buffer in module.named_buffers()
            if buffer.layout == torch.strided and id(buffer) not in ignored
        }
        self._paths = {name.replace("_orig_mod.", ""): name for name in found}
        self.like = {
            name: torch.empty_like(found[path], device="meta") for name, path in self._paths.items()
        }
        self.names = [name for name, like in self.like.items() if like.is_floating_point()]
        self._places = {name: i for i, name in enumerate(self.names)}
        self.common: dict[str, Tensor] = {}
        self.sent: set[str] = set()
        self.apart: set[str] = set()

    def find(self, name: str) -> Tensor | None:
        """A buffer as it is now; None if it is one of another shape or kind, or gone."""
        try:
            buffer: Tensor | None = self._module.get_buffer(self._paths[name])
        except AttributeError:
            return None
        like = self.like[name]
        if buffer is None or buffer.shape != like.shape or buffer.layout != torch.strided:
            return None
        return buffer if buffer.is_floating_point() == like.is_floating_point() else None

    def held(self, names: Collection[str]) -> dict[str, Tensor]:
        """Those of them that all ranks have."""
        found = {name: self.find(name) for name in names if name not in self.apart}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def part(self, device: torch.device, options: Options) -> None:
        """Leave apart, on all ranks, what one of them has replaced before the first step."""
        if not self.like:
            return
        replaced = [float(self.find(name) is None) for name in self.like]
        what = f"which of {len(replaced)} buffers were replaced"
        exchange = GatherNumbers(replaced, what, device, options)
        exchange.start()
        ranks = zip(*exchange.rows, strict=True)
        self.apart = {name for name, each in zip(self.like, ranks, strict=True) if any(each)}

    def agree(self, sent: Collection[str]) -> None:
        """All ranks have the same now.

        Args:
            sent: those that they had not before, the same names on all ranks.
        """
        self.common = {n: b.detach().clone() for n, b in self.held(self.names).items()}
        self.sent = {name for name in sent if name in self.common}

    # An exchange.

    def due(self, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """What an exchange sends of these, and which of them are not what they were."""
        if not names:
            return {}
        tensors = {}
        changed = [torch.zeros((), dtype=torch.bool, device=device)] * len(self.names)
        replaced = [False] * len(self.names)
        for name in names:
            if name in self.apart:
                continue
            own = self.find(name)
            if own is None:
                replaced[self._places[name]] = True
            elif name not in self.sent:
                changed[self._places[name]] = _differ(own, self.common[name]).to(device)
            if name in self.sent:  # the other ranks expect it
                values = self.common[name] if own is None else own
                tensors[BUFFER + name] = values.detach().clone()
        rows = torch.stack(changed), torch.tensor(replaced, device=device)
        return {**tensors, FLAGS: torch.stack(rows).float()}

    def learn(self, averaged: Mapping[str, Tensor], size: int) -> tuple[set[str], set[str]]:
        """Which have changed, and which were replaced, on some rank; those not known before."""
        if FLAGS not in averaged:  # there are none, or an older version has begun the exchange
            return set(), set()
        counts = (averaged[FLAGS].cpu() * size).round().tolist()
        changed, replaced = (
            {name for name, count in zip(self.names, row, strict=True) if count} for row in counts
        )
        self.sent |= changed
        self._leave(replaced)
        return changed - replaced, replaced

    def land(self, averaged: Mapping[str, Tensor], mixing: float) -> None:
        """Go on with what they came to."""
        for name in self.common:
            if BUFFER + name in averaged:
                self.common[name] = averaged[BUFFER + name]
                own = self.find(name)
                if own is not None:  # else replaced since: the next exchange tells
                    move(own, self.common[name], mixing)

    def go_back(self, names: Collection[str], averaged: Mapping[str, Tensor]) -> set[str]:
        """To what they were before an exchange of these that does not count.

        Returns:
            Those that hold infinity by nature, so that they would never be averaged: apart now.
        """
        for name, own in self.held(names).items():
            _restore(own, self.common[name])
        endless = {n for n in self.common.keys() & set(names) if not _finite(self.common[n])}
        parted = {n for n in endless & self.sent if not _finite(averaged.get(BUFFER + n))}
        self.sent -= endless
        self._leave(parted)
        return parted

    def _leave(self, names: Collection[str]) -> None:
        """Leave them apart, on all ranks."""
        for name in names:
            self.apart.add(name)
            self.common.pop(name, None)
        self.sent.difference_update(names)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        own = {name: buffer.detach() for name, buffer in self.held(self.names).items()}
        buffers = {**self.common, **own}
        return {
            "buffers": buffers,
            "common_buffers": dict(self.common),
            "sent_buffers": sorted(self.sent),
            # Before the first step these, too, that this rank alone has replaced so far.
            "apart_buffers": sorted(set(self.names).difference(buffers)),
        }

    def check(self, who: str, state: Mapping[str, Any], begun: bool) -> None:
        """Refuse a state that does not fit.

        Args:
            begun: it has common buffers.
        """
        for key in ("sent_buffers", "apart_buffers"):
            listed = state.get(key, [])
            if not isinstance(listed, list | tuple) or not set(self.names).issuperset(listed):
                raise ValueError(f"{who}: {key} must be a list of names of the model's buffers")
        apart = state.get("apart_buffers", ())
        like = {name: self.like[name] for name in self.names if name not in apart}
        check_alike(f"{who}: buffers", state["buffers"], like)
        if begun:
            check_alike(f"{who}: common_buffers", state["common_buffers"], like)

    def load(self, states: Sequence[Mapping[str, Any]], begun: bool) -> None:
        """Go on from what was saved, from the mean of several."""
        first = states[0]
        self.apart = {name for state in states for name in state.get("apart_buffers", ())}
        self.common = {}
        for name, own in self.held(self.names).items():
            _restore(own, mean([state["buffers"][name] for state in states]))
        if begun:
            self.common = {name: b.detach().clone() for name, b in first["common_buffers"].items()}
            for name, own in self.held(self.common).items():
                self.common[name] = self.common[name].to(own)
        # Older versions sent all of them.
        finite = [name for name, b in self.common.items() if bool(torch.isfinite(b).all())]
        self.sent = set(first.get("sent_buffers", finite)).intersection(self.common)


def _differ(own: Tensor, other: Tensor) -> Tensor:
    """Whether they do, in any bit, as NaN is not equal to itself; nobody waits for a device."""
    bits = BITS[own.dtype.itemsize]
    return (own.detach().view(bits) != other.to(own).view(bits)).any()


def _finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())


def _restore(own: Tensor, to: Tensor) -> None:
    """Nothing is written where nothing has changed: a constant may be an expanded tensor."""
    if bool(_differ(own, to)):
        own.detach().copy_(to)


def move(tensor: Tensor, to: Tensor, mixing: float) -> None:
    """Set it to another, but for this share of itself."""
    tensor = tensor.detach()
    if mixing:
        tensor.mul_(mixing).add_(to.to(tensor.dtype), alpha=1 - mixing)
    else:
        tensor.copy_(to)


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """In float64; of equal tensors the first itself, which their mean may miss by a rounding."""
    first = tensors[0]
    if not any(bool(_differ(first, tensor)) for tensor in tensors[1:]):
        return first
    total = first.double()
    for tensor in tensors[1:]:
        total = total + tensor.double()
    return total / len(tensors)


def check_alike(who: str, found: Any, like: Mapping[str, Tensor]) -> None:
    """Refuse a saved dictionary of tensors that has other names or shapes."""
    required(who, found, list(like))
    for name in found:
        if name not in like:
            raise ValueError(f"{who}: the state has {name!r}, which the model has not")
        tensor = found[name]
        if not isinstance(tensor, Tensor) or tensor.shape != like[name].shape:
            raise ValueError(f"{who}: {name} must be a tensor of {list(like[name].shape)}")
