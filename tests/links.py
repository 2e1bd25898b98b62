"""Steps as ranks would measure them, over a link of which only its rate and start are made up.

Nothing is measured: all seconds are those of a made-up clock.
"""

import random
from collections.abc import Sequence

import torch

from thinwire.collectives.costs import plain_sum
from thinwire.collectives.probe import SHORTER, ProbeSize
from thinwire.parallel.ddp import COMPARED, SETTLED
from thinwire.policies import (
    Journal,
    Measured,
    OptimizerKind,
    PolicyContext,
    TensorInfo,
    policy_of,
)
from thinwire.policies.base import Choice
from thinwire.policies.forecast import network_of
from thinwire.policies.ladder import bytes_of


def context(*shapes: tuple[int, ...], size: int = 4, feedback: bool = True) -> PolicyContext:
    shapes = shapes or ((800, 500),)
    tensors = [TensorInfo(f"t{i}", torch.Size(shape)) for i, shape in enumerate(shapes)]
    return PolicyContext(tensors, size, feedback, Journal())


class SimulatedLink:
    """A policy on each rank, and what they measure.

    Args:
        kinds: of the optimizer, as far as each rank knows.
        compute: seconds of a step; the second half of it can hide communication.
        codec: seconds of a compressed step.
        noise: each time is up to so much longer.
        meets: seconds more on the network, in uncompressed steps in which ranks of DDP meet.
        slow_start: steps of which each computes twice as long.
    """

    def __init__(
        self,
        spec: str,
        where: PolicyContext | None = None,
        *,
        seed: int = 0,
        kinds: Sequence[OptimizerKind] = (OptimizerKind.OTHER,),
        compute: float = 0.1,
        codec: float = 0.004,
        noise: float = 0.2,
        meets: float = 0.0,
        slow_start: int = 0,
    ) -> None:
        self.where = where or context()
        own = [self.where, *(self.where._replace(journal=Journal()) for _ in range(3))]
        self.choosers = [policy_of(spec).begin(each) for each in own]
        self.kinds, self.compute, self.codec, self.noise = kinds, compute, codec, noise
        self.meets, self.slow_start = meets, slow_start
        self._uncompressed, self._waits = 0, False  # passes in a row; whether residuals wait
        self._met, self.met = 0, False  # passes before ranks met; whether they did in this one
        self.draw = random.Random(seed)
        self.step, self.seconds, self.overhead = 0, 0.0, 0.0
        self.reports = self.probes = 0
        self._probe: ProbeSize | None = None
        self._doubts = False

    @property
    def chooser(self):
        return self.choosers[0]

    def load(self, state: Sequence[float]) -> None:
        for chooser in self.choosers:
            chooser.load(state)

    def _noisy(self, value: float) -> float:
        return value * (1 + self.noise * self.draw.random())

    def num_bytes(self, choices: Sequence[Choice]) -> float:
        pairs = zip(self.where.tensors, choices, strict=True)
        return sum(bytes_of(choice, [tensor], self.where.size, True) for tensor, choice in pairs)

    def seconds_with(self, choices: Sequence[Choice], rate: float, start: float = 0.003) -> float:
        """What a step takes, without noise."""
        codec = self.codec if any(choice is not None for choice in choices) else 0.0
        talking = start + 8 * self.num_bytes(choices) / rate + codec
        return self.compute + max(0.0, talking - self.compute / 2)

    def _sum_seconds(self, num_bytes: float, rate: float, start: float) -> float:
        return plain_sum(network_of(self.where.size, start, rate / 8), num_bytes).seconds

    def go(self, rate: float, slow: float = 0.0, start: float = 0.003) -> str:
        """One step at so many bits per second; what the first tensor was sent with.

        Args:
            slow: seconds by which one rank is late.
            start: seconds that any exchange takes.
        """
        self.step += 1
        step = self.step
        all_choices = [
            [chooser.choose(tensor, step) for tensor in self.where.tensors]
            for chooser in self.choosers
        ]
        self.sent = choices = all_choices[0]
        assert all(each == choices for each in all_choices), "ranks differ in what they choose"
        passes = self._uncompressed
        listens = {chooser.listens_every for chooser in self.choosers}
        assert len(listens) == 1, "ranks differ in when they listen"
        heard = not any(choices) and passes % listens.pop() == 0  # as in direct passes of DDP
        if heard and self._doubts:
            self._doubts = False
            for chooser in self.choosers:
                chooser.ask(step)
        dues = {(chooser.due(step), chooser.probes(step)) for chooser in self.choosers}
        assert len(dues) == 1, "ranks differ in what they ask for"
        ((due, probe),) = dues
        assert due or not probe
        compressed = any(choice is not None for choice in choices)
        plain = not (compressed or self._waits)
        self.met = plain and (passes < SETTLED or (passes - self._met >= COMPARED and not due))
        self._met = passes if self.met else self._met
        meets = self.meets if self.met or (self._waits and not compressed) else 0.0
        self._uncompressed, self._waits = self._uncompressed + 1 if plain else 0, compressed
        told, longest = [], 0.0
        for rank in range(4):
            network = self._noisy(start + 8 * self.num_bytes(choices) / rate)
            network += meets + (slow if rank else 0.0)
            codec = self._noisy(self.codec if compressed else 0.0005)
            waiting = max(0.0, network + codec - self.compute / 2)
            computing = self.compute * (2 if step <= self.slow_start else 1)
            took = self._noisy(computing) + waiting
            measured = Measured(
                took, self.compute / 2, waiting, network, codec, self.num_bytes(choices), 2.0
            )
            if self._probe:
                num_bytes = float(self._probe.num_bytes)
                measured = measured._replace(
                    probed=num_bytes,
                    meeting=self._noisy(start),
                    moving=self._noisy(self._sum_seconds(num_bytes, rate, start)),
                    moving_part=self._noisy(self._sum_seconds(num_bytes / SHORTER, rate, start)),
                    tries=float(self._probe.tries),
                )
            told.append(measured)
            longest = max(longest, took)
        self.seconds += longest
        pairs = zip(self.choosers, told, strict=True)
        self._doubts |= any(chooser.doubts(measured) for chooser, measured in pairs)
        if due:
            rows = []
            for i, (chooser, measured) in enumerate(zip(self.choosers, told, strict=True)):
                chooser.note_optimizer(self.kinds[i % len(self.kinds)])
                rows.append(chooser.report(measured))
            for chooser in self.choosers:
                chooser.learn(step, rows)
            self._doubts = False
            self.reports += 1
            self.probes += bool(probe)
            self.overhead += start
            if probe:
                lengths = (probe.num_bytes, probe.num_bytes / SHORTER)
                sums = sum(self._sum_seconds(length, rate, start) for length in lengths)
                self.overhead += (probe.meetings + 1) * start + probe.tries * sums
            self._probe = probe
        return str(choices[0])
