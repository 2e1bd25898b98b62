"""One step of a wire: its exchanges, what went wrong in them, what they came to."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from thinwire import kernels
from thinwire.collectives.exchange import Refusal
from thinwire.collectives.handle import Handle
from thinwire.compressors import Compressor
from thinwire.errors import MismatchError, PeerError
from thinwire.feedback.base import Update
from thinwire.kernels import Key
from thinwire.parallel.plan import PlannedExchange
from thinwire.reducer.exchange import Driver
from thinwire.reducer.unit import Unit
from thinwire.reducer.units import UNCOMPRESSED
from thinwire.telemetry import Named

if TYPE_CHECKING:
    from thinwire.parallel.wire import Wire


class SkippedError(PeerError):
    """Not sent, as an earlier exchange of the same step failed on all ranks."""


class Sent(Protocol):
    """An exchange of a step."""

    @property
    def handle(self) -> Handle: ...

    @property
    def units(self) -> Sequence[Named]: ...

    def commit(self) -> None: ...


class ExchangeStep(Driver):
    """The exchanges of one step, by whoever drives them.

    When an exchange fails in a way that all ranks know of (they met, and disagreed or heard that
    one cannot go on), none of them sends the rest of the step. So ranks that plan different numbers
    of exchanges come together again in the next one.

    Args:
        wire: whose step it is.
        skips_unused: see `Driver`.

    Attributes:
        step: its number.
        exchanges: of tensors.
        handles: of those, and of all else that the step has to wait for.
        errors: that ended it.
    """

    def __init__(self, wire: "Wire", skips_unused: bool = False) -> None:
        # Whether the step counts is known only when all gradients have been seen.
        self.defers_commit = wire._configuration.scaler is not None
        configuration = wire._configuration
        self.details = (
            ("scaler", "given" if self.defers_commit else "none"),
            ("check_every", str(configuration.check_every)),
        )
        self.skips_unused = skips_unused
        self.step = 0
        self.exchanges: list[Sent] = []
        self.handles: list[Handle] = []
        self.errors: list[BaseException] = []
        self._wire = wire
        self._failed = False

    def admit(self) -> None:
        if self._failed:
            raise SkippedError("not sent: an exchange before it failed")

    def inspect(self, unit: Unit, update: Update, compressor: Compressor, key: Key) -> None:
        self._wire._inspect(self.step, unit, update, compressor, key)

    def send(self, planned: PlannedExchange, arrived: Mapping[str, Tensor]) -> None:
        """Start an exchange of tensors that have arrived."""
        units = [
            Unit(
                unit.names,
                [arrived[name] for name in unit.names],
                UNCOMPRESSED if unit.compressor is None else unit.compressor,
            )
            for unit in planned.units
        ]
        exchange = self._wire._reducer.start(units, self, exact=planned.exact)
        self.exchanges.append(exchange)
        self.follow(exchange.handle, planned.names)

    def fail(self, error: BaseException, tensor: Tensor) -> None:
        """This rank cannot go on with the step: the others are told in their next exchange."""
        self.errors.append(error)
        told = error if isinstance(error, Exception) else InterruptedError(type(error).__name__)
        refusal = Refusal(told, tensor, self._wire._reducer.options, self.batch)
        self.follow(refusal.start(async_op=True), set())

    def follow(self, handle: Handle, names: set[str]) -> None:
        """Wait for an exchange of these tensors too."""
        self.handles.append(handle)

        def ended(handle: Handle) -> None:
            error = handle.exception()
            if isinstance(error, MismatchError | PeerError) or handle.account.announced:
                self._failed = True
            self.arrive(names)

        handle.when_ended(ended)

    def arrive(self, names: set[str]) -> None:
        """The exchange of these tensors has ended, well or not; called by the thread that carried
        it out."""
        return None

    def wait(self) -> None:
        """Return when everything has ended; notes what failed."""
        for handle in self.handles:
            handle.wait_until_ended()
            error = handle.exception()
            known = any(error is each for each in self.errors)
            if error is not None and not known and not isinstance(error, SkippedError):
                self.errors.append(error)

    def commit(self) -> None:
        """The step went well: remember what was left out, if that was deferred and the optimizer
        will not skip the step."""
        if self.defers_commit and self.all_finite():
            for exchange in self.exchanges:
                exchange.commit()

    def totals(self) -> tuple[float, float, float, float]:
        """Seconds on the network and with compression, and bytes, of all exchanges; how many."""
        accounts = [exchange.handle.account for exchange in self.exchanges]
        seconds = [account.seconds for account in accounts]
        network = sum(each.get("network", 0.0) for each in seconds)
        codec = sum(each.get("encode", 0.0) + each.get("decode", 0.0) for each in seconds)
        num_bytes = sum(account.network_bytes for account in accounts)
        return network, codec, float(num_bytes), float(len(accounts))

    def all_finite(self) -> bool:
        """Whether the optimizer will take this step, as far as exchanges have ended: the same
        answer on all ranks, who have the same averages."""
        ended = [exchange for exchange in self.exchanges if exchange.handle.is_completed()]
        if not all(exchange.handle.account.finite for exchange in ended):
            return False
        # Uncompressed sums were not looked at.
        summed = [e for e in ended if e.handle.collective in ("summable", "none")]
        for piece in (piece for e in summed for unit in e.units for piece in unit.pieces):
            flat = piece.reshape(-1)
            if not kernels.on(flat.device).all_finite(flat, None):
                return False
        return True


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first error as itself; the others are noted."""
    raise first_of(errors)


def first_of(errors: list[BaseException]) -> BaseException:
    """The first error, on which the others are noted."""
    first, *others = errors
    for other in others:
        if str(other) != str(first):
            first.add_note(f"also: {type(other).__name__}: {other}")
    return first
