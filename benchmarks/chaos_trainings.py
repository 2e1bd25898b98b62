"""Small trainings with thinwire that chaos.py disturbs.

Each can be built anew in another process group, restored from a snapshot and compared between ranks
by the hash of what is replicated. `changed` names what a failed call has changed but should not.
Weights and gradients follow from seeds, ranks and steps alone.
"""

import contextlib
import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

NUMEL = 1200  # divisible by all numbers of ranks
LEAST = 10  # elements: all matrices of `net` are compressed, its vectors are not
RATE = 0.1

Tensors = dict[str, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 10)
    )


def some(*numbers: int, numel: int = NUMEL) -> Tensor:
    """Random numbers that follow from these."""
    seed = 0
    for number in numbers:
        seed = 1009 * seed + number
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, step: int) -> Tensor:
    batch = some(dist.get_rank(), step, numel=160).view(8, 20)
    loss: Tensor = model(batch).square().mean()
    return loss


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names under which the bits differ; state that is not there yet is zero."""
    alone = [n for n in a.keys() ^ b.keys() if bool((a[n] if n in a else b[n]).any())]
    return sorted(alone + [n for n in a.keys() & b.keys() if not same(a[n], b[n])])


def tensors_in(value: Any, name: str = "") -> Tensors:
    """Copies of all tensors and numbers in nested dictionaries and lists, by where they stand."""
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    if isinstance(value, int | float):
        return {name: torch.tensor(value)}
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {k: v for key, each in items for k, v in tensors_in(each, f"{name}/{key}").items()}


class Training(ABC):
    """Args:
    timeout: seconds that its exchanges wait for other ranks.
    """

    # Points that it never comes to, or where it matters nothing.
    lacks: frozenset[str] = frozenset()
    torch_speaks = False  # torch, too, exchanges in it, and raises errors of its own

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.changed: list[str] = []
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @abstractmethod
    def step(self, number: int) -> None:
        """Step of this number, the same on all ranks."""

    @abstractmethod
    def replicated(self) -> Tensors:
        """What must have the same bits on all ranks after every step."""

    @abstractmethod
    def snapshot(self) -> Any:
        """A copy of all that a later step depends on."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Go on from a snapshot of this rank."""

    @contextlib.contextmanager
    def unchanged(self, what: Callable[[], Any]) -> Iterator[None]:
        """A call that, if it fails, leaves these tensors as they were."""
        before = tensors_in(what())
        try:
            yield
        except BaseException:
            self.changed += differing(before, tensors_in(what()))
            raise


def own(state: Any) -> Any:
    """A survivor goes on with what it remembers itself, as another rank of a smaller group."""
    return {**state, "rank": dist.get_rank(), "world_size": dist.get_world_size()}


class Calls(Training):
    """A vector that is moved by what a call brings."""

    lacks = frozenset({"hook", "end of backward", "optimizer"})

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.vector = some(0)
        self.residual = torch.zeros(NUMEL)

    def replicated(self) -> Tensors:
        return {"vector": self.vector}

    def snapshot(self) -> Any:
        return self.vector.clone(), self.residual.clone()

    def restore(self, snapshot: Any) -> None:
        self.vector, self.residual = snapshot[0].clone(), snapshot[1].clone()


class AllReduceCalls(Calls):
    def step(self, number: int) -> None:
        x, r = some(self.rank, number), self.residual
        with self.unchanged(lambda: [x, r]):
            tw.all_reduce(x, "topk:0.1", residual=r, op="avg", timeout=self.timeout)
        self.vector -= RATE * x


class ScatterCalls(Calls):
    """reduce_scatter, each rank moves its shard, all_gather."""

    def step(self, number: int) -> None:
        x, r = some(self.rank, number), self.residual
        shard, all_shards = torch.zeros(NUMEL // self.size), torch.zeros(NUMEL)
        with self.unchanged(lambda: [x, r, shard]):
            tw.reduce_scatter(shard, x, "quantize:4", residual=r, op="avg", timeout=self.timeout)
        with self.unchanged(lambda: [shard, r, all_shards]):
            tw.all_gather(all_shards, shard, "cast:bf16", timeout=self.timeout)
        self.vector -= RATE * all_shards


class GatherCalls(Calls):
    def step(self, number: int) -> None:
        x, r = some(self.rank, number), self.residual
        out = torch.zeros(self.size * NUMEL)
        with self.unchanged(lambda: [x, r, out]):
            tw.all_gather(out, x, "topk:0.1", residual=r, timeout=self.timeout)
        self.vector -= RATE * out.view(self.size, NUMEL).mean(0)


class BroadcastCalls(Calls):
    def step(self, number: int) -> None:
        x, r, source = some(self.rank, number), self.residual, number % self.size
        with self.unchanged(lambda: [x, r]):
            tw.broadcast(x, "quantize:4", src=source, residual=r, timeout=self.timeout)
        self.vector -= RATE * x


class SendCalls(Calls):
    """The vector goes from rank to rank; the last sends something back to the first."""

    def step(self, number: int) -> None:
        last, new = self.size - 1, self.vector.clone()
        if self.rank == 0:
            new -= RATE * some(number)
        else:
            with self.unchanged(lambda: [new]):
                tw.recv(new, src=self.rank - 1, timeout=self.timeout)
        if self.rank < last:
            with self.unchanged(lambda: [new]):
                tw.send(new, "none", dst=self.rank + 1, timeout=self.timeout)
        x, r = some(self.rank, number), self.residual
        with self.unchanged(lambda: [x, r]):
            if self.rank == last > 0:
                tw.send(x, "topk:0.1", dst=0, residual=r, timeout=self.timeout)
            elif self.rank == 0 < last:
                tw.recv(x, src=last, timeout=self.timeout)
        self.vector = new


class ReducerLoop(Training):
    """A loop of one's own with tw.Reducer."""

    lacks = frozenset({"hook", "end of backward", "optimizer"})
    spec, feedback = "topk:0.1", "ef14"

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.reducer = tw.Reducer(self.spec, feedback=self.feedback, timeout=timeout)
        self.weights = {"a": some(1), "b": some(2).view(30, 40)}

    def step(self, number: int) -> None:
        gradients = {
            "a": some(self.rank, number, 1),
            "b": some(self.rank, number, 2).view(30, 40),
        }

        # The step is counted: all ranks have begun it.
        def concerned() -> Any:
            return [gradients, self.reducer.state_dict()["reducer"]["tensors"]]

        with self.unchanged(concerned):
            self.reducer.average(gradients)
        for name, weight in self.weights.items():
            weight -= RATE * gradients[name]

    def replicated(self) -> Tensors:
        return self.weights

    def snapshot(self) -> Any:
        return copy.deepcopy((self.weights, self.reducer.state_dict()))

    def restore(self, snapshot: Any) -> None:
        self.weights = copy.deepcopy(snapshot[0])
        self.reducer.load_state_dict(own(snapshot[1]))


class EF21Loop(ReducerLoop):
    feedback = "ef21"


class Optimizing(Training):
    """A plain model with an optimizer that exchanges by itself."""

    lacks = frozenset({"hook", "end of backward"})
    name = "OneBitAdam"
    options: Mapping[str, Any] = {"freeze_step": 2}

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.model = net()
        self.optimizer: Any = getattr(tw.optim, self.name)(
            self.model.parameters(), lr=1e-2, timeout=timeout, **self.options
        )

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, number).backward()
        with self.unchanged(self._concerned):
            self.optimizer.step()

    def _concerned(self) -> Any:
        gradients = [p.grad for p in self.model.parameters()]
        return [self.model.state_dict(), gradients, self.optimizer.state_dict()["state"]]

    def replicated(self) -> Tensors:
        return dict(self.model.state_dict())

    def snapshot(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def restore(self, snapshot: Any) -> None:
        self.model.load_state_dict(snapshot[0])
        self.optimizer.load_state_dict(own(copy.deepcopy(snapshot[1])))


class LambOptimizing(Optimizing):
    name = "OneBitLamb"


class ZeroOneOptimizing(Optimizing):
    """Exchanges in every step: local steps, in which replicas differ, are not what is tested."""

    name = "ZeroOneAdam"
    options: Mapping[str, Any] = {"var_freeze_step": 2, "local_step_clipper": 1}


class Attached(Training):
    """DistributedDataParallel with tw.attach."""

    lacks = frozenset({"optimizer"})
    torch_speaks = True
    spec = "topk:0.1"
    options: Mapping[str, Any] = {"collective": "gather"}

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.model = DistributedDataParallel(net())
        self.wire = tw.attach(
            self.model, self.spec, min_numel=LEAST, timeout=timeout, **self.given()
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.5)
        self.loss = 0.0

    def given(self) -> Mapping[str, Any]:
        return self.options

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        own = self._own_gradients(number)
        before, weights = self._remembered(), self._weights()
        loss = loss_of(self.model, number)
        try:
            loss.backward()
        except BaseException:
            self.changed += differing(weights, self._weights())
            self._compare(own, before)
            raise
        self.optimizer.step()
        self.loss = loss.item()

    def _own_gradients(self, number: int) -> Tensors:
        """Without DDP, which is not told by autograd.grad."""
        named = dict(self.model.module.named_parameters())
        found = torch.autograd.grad(loss_of(self.model.module, number), list(named.values()))
        return dict(zip(named, found, strict=True))

    def _weights(self) -> Tensors:
        return tensors_in(self.model.module.state_dict())

    def _remembered(self) -> Tensors:
        return tensors_in(self.wire.state_dict()["reducer"]["tensors"])

    def _compare(self, own: Tensors, before: Tensors) -> None:
        """The exchange that failed has changed neither gradient nor state; others may have both."""
        after = self._remembered()
        new = set(differing(before, after))
        for name, parameter in self.model.module.named_parameters():
            mine = [key for key in after if key.startswith(f"/{name}/")]
            if not mine:
                continue  # uncompressed, and nothing is remembered of it
            averaged = parameter.grad is not None and not same(parameter.grad, own[name])
            renewed = any(key in new for key in mine)
            if averaged != renewed:
                self.changed.append(f"{'gradient' if averaged else 'state'} of {name} alone")

    def replicated(self) -> Tensors:
        return self._weights()

    def snapshot(self) -> Any:
        return copy.deepcopy(
            {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "wire": self.wire.state_dict(),
            }
        )

    def restore(self, snapshot: Any) -> None:
        state = copy.deepcopy(snapshot)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.wire.load_state_dict(own(state["wire"]))


class TwoShotAttached(Attached):
    spec = "quantize:4"
    options: Mapping[str, Any] = {"collective": "twoshot"}


class SparseAttached(Attached):
    options: Mapping[str, Any] = {"collective": "sparse"}


class SummableAttached(Attached):
    spec = "cast:bf16"
    options: Mapping[str, Any] = {"collective": "summable"}


class UncompressedAttached(Attached):
    """From the third step on ranks do not meet: sums are direct."""

    lacks = frozenset(
        {
            "optimizer",
            "encoding",
            "decoding",
            "prepare",
            "exchange",
            "finish",
            "meeting",
            "transfer",
        }
    )
    spec = "none"
    options: Mapping[str, Any] = {}


class HierarchicalAttached(Attached):
    def given(self) -> Mapping[str, Any]:
        return {"nodes": 2 if self.size % 2 == 0 else 1}


class PowerSGDAttached(Attached):
    lacks = frozenset({"optimizer", "encoding", "decoding"})
    spec = "powersgd:2"
    options: Mapping[str, Any] = {}


class ArcAttached(Attached):
    lacks = frozenset({"optimizer", "encoding", "decoding"})
    spec = "arc:0.3,least=0"
    options: Mapping[str, Any] = {}


TRAININGS: dict[str, type[Training]] = {
    "ddp-gather": Attached,
    "ddp-twoshot": TwoShotAttached,
    "ddp-sparse": SparseAttached,
    "ddp-summable": SummableAttached,
    "ddp-none": UncompressedAttached,
    "ddp-hierarchical": HierarchicalAttached,
    "ddp-powersgd": PowerSGDAttached,
    "ddp-arc": ArcAttached,
    "all-reduce": AllReduceCalls,
    "reduce-scatter": ScatterCalls,
    "all-gather": GatherCalls,
    "broadcast": BroadcastCalls,
    "send-recv": SendCalls,
    "reducer": ReducerLoop,
    "reducer-ef21": EF21Loop,
    "onebit-adam": Optimizing,
    "onebit-lamb": LambOptimizing,
    "zeroone-adam": ZeroOneOptimizing,
}
