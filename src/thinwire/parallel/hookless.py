"""Backward passes that DDP carries out by itself, as if nothing were attached.

DDP takes one hook for ever, and a model with one divides its gradients in a pass of its own over
memory, which costs 2 to 5 % of a short step. So the model gets a second reducer of DDP's own,
without a hook. Which of the two the next pass goes through is decided when one has ended
(docs/decisions/0034).
"""

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire import torch_internals
from thinwire.parallel.step import raise_first

ATTRIBUTE = "_thinwire_reducers"  # of a DDP module that has two


class HooklessPasses:
    """Switches a model between its reducer with the hook and one without.

    Args:
        ddp: the model.
        parameter: one that every pass has a gradient for.
        computed: called in each pass without the hook, when its gradients are there and DDP is
            about to wait for their averages. Not after that: Ctrl-C comes out of the first line of
            Python behind it, and other ranks count the pass.
        ended: called after each of them, with the seconds that DDP has waited.
        begins: called before the next forward pass, where Ctrl-C may have come in between.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        parameter: Tensor,
        computed: Callable[[], None],
        ended: Callable[[float], None],
        begins: Callable[[], None],
    ) -> None:
        self._ddp, self._parameter = weakref.ref(ddp), parameter
        self._computed, self._ended, self._begins = computed, ended, begins
        self._removable: list[Any] = []  # hooks that are there while passes go without ours
        self._undecided: Any = None  # the one that is there until the next forward pass begins

    @staticmethod
    def possible(ddp: DistributedDataParallel) -> bool:
        """Whether a second reducer would leave everything else as it is."""
        return torch_internals.may_have_two_reducers(ddp)

    @property
    def next(self) -> bool:
        """Whether the next pass goes without the hook."""
        return bool(self._removable)

    def begin(self) -> None:
        """Have the next passes go without the hook; unless they do already, all parameters that DDP
        averages must be trained now."""
        ddp = self._ddp()
        if self.next or ddp is None or torch_internals.is_joining(ddp):
            self._decided()
            return
        reducers: _Reducers | None = getattr(ddp, ATTRIBUTE, None)
        if reducers is None:
            with torch.inference_mode(False):  # perhaps a forward pass of an evaluation
                reducers = _Reducers(ddp)
            setattr(ddp, ATTRIBUTE, reducers)
        reducers.plain.reducer.awaits = False  # of passes since `end`, which do not count here
        # The reducer holds the parameter where no garbage collector sees it: the hook must not hold
        # the reducer.
        passing = weakref.WeakMethod(self._passing)

        def note(gradient: Tensor) -> None:
            noted = passing()
            if noted is not None:
                noted(gradient)

        self._removable = [
            self._parameter.register_post_accumulate_grad_hook(note),
            ddp.register_forward_pre_hook(_Look(self._look)),
        ]
        torch_internals.use_reducer(ddp, reducers.plain)
        self._decided()  # last: after Ctrl-C the next forward pass decides

    @property
    def undecided(self) -> bool:
        """Whether that is decided when the next forward pass begins."""
        return self._undecided is not None

    def decide_later(self, decide: Callable[[], None]) -> None:
        """Have the next pass go through the hook, unless what is called when its forward pass
        begins says otherwise."""
        self.end()
        ddp = self._ddp()
        if ddp is not None:
            self._undecided = ddp.register_forward_pre_hook(_Look(lambda _: decide()))

    def _decided(self) -> None:
        undecided, self._undecided = self._undecided, None
        if undecided is not None:
            undecided.remove()

    def end(self) -> None:
        """Have the next passes go through the hook."""
        self._decided()
        ddp, removable = self._ddp(), self._removable
        self._removable = []
        for each in removable:
            each.remove()
        if removable and ddp is not None:
            torch_internals.use_reducer(ddp, getattr(ddp, ATTRIBUTE).hooked)

    def _look(self, ddp: Any) -> None:
        """Ranks that have joined the others early take part through the hook alone: a rank that
        runs out of batches before this model's first pass inside `join` is not found out."""
        self._begins()
        if torch_internals.is_joining(ddp):
            self.end()

    def _passing(self, _: Tensor) -> None:
        """A gradient is there; in a pass that its reducer was not told of, DDP does nothing: one
        that accumulates, a second one of the same forward pass, one of the module inside."""
        ddp = self._ddp()
        if ddp is None:
            return
        reducer = getattr(ddp, ATTRIBUTE).plain.reducer
        if reducer.awaits:
            reducer.awaits = False
            torch_internals.queue_callback(self._note_computed)

    def _note_computed(self) -> None:
        """DDP's own callback comes before the one that is queued here."""
        begin = time.perf_counter()
        torch_internals.queue_callback(lambda: self._ended(time.perf_counter() - begin))
        try:
            self._computed()
        except Exception as error:
            errors: list[BaseException] = [error]  # DDP must be able to end its pass first
            torch_internals.queue_callback(lambda: raise_first(errors))


class _Reducers:
    """Both reducers of a model, which alone holds them: the one with the hook holds all that the
    hook leads to, where no garbage collector sees it. A copy of the model has its own."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.hooked = torch_internals.reducer_of(ddp)
        self.plain = torch_internals.reducer_without_hook(ddp)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _Look:
    """A hook before the forward pass of one model: copies of the model, and what torch.save makes
    of it, have one that gives the inputs back and needs nothing of ours."""

    def __init__(self, look: Callable[[Any], None]) -> None:
        self._look = look

    def __call__(self, ddp: Any, inputs: Any) -> None:
        self._look(ddp)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")
