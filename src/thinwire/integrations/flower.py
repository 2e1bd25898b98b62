"""Flower: ``ClientApp(mods=[tw.flower.Compression("topk:0.01|quantize:4")])`` on the clients and
``tw.flower.Compressed(FedAvg())`` on the server.

What a client uploads after training is one container of frames: for each array the difference to
what it has received in this round, or the array itself if it holds integers. The server adds what
it had sent, so neither side keeps anything of the other; what a client leaves out stays with it, in
its context's state.

The two agree by a mark in the server's message, without which a client compresses nothing. And a
container is an `Array` of a kind of its own: strategies that do not know it raise a TypeError that
shows KIND, where bytes in a NumPy array would have been averaged.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire import check
from thinwire.compressors import Compressor, NoCompression, local_of
from thinwire.compressors.base import LocalCompressor
from thinwire.errors import FrameError
from thinwire.formatting import show_bytes
from thinwire.frames import Payload, pack, unpack
from thinwire.integrations.wiring import framework
from thinwire.kernels import Key

__all__ = ["Compressed", "Compression", "Upload"]

_app: Any = framework("flwr.app", extra="flower", purpose="tw.flower")
_strategy: Any = framework("flwr.serverapp.strategy", extra="flower", purpose="tw.flower")
_constant: Any = framework("flwr.common.constant", extra="flower", purpose="tw.flower")

NAME = "thinwire"  # of the mark in a config, of the container in a reply, of records in a state
VERSION = 1  # of how a reply is laid out
KIND = "thinwire: only tw.flower.Compressed(strategy), the outermost one, decodes this"
TYPES = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
SEEDS = 1 << 64

_log = logging.getLogger("flwr")  # where Flower tells of its rounds

Numbers = NDArray[Any]


class Compression:
    """A mod that compresses what a client uploads after training; other messages pass untouched.

    It must come first in the list: mods work on a reply in reverse, and it has to be the last. The
    server's strategy must be a `Compressed` one; clients of another get an error that says so.

    An update with NaN or infinity is an error of this round, and nothing of it is remembered.

    Args:
        compressor: one, or its spec; or a function that gives one for the name of an array, None
            for uncompressed. Not one that all ranks find together ("powersgd").
        decay: of what earlier rounds of this client left out, each time it takes part: 1 keeps all,
            0 remembers nothing.
        min_numel: arrays with fewer than two dimensions or with fewer elements are sent
            uncompressed, as are integers.

    Example:
        app = ClientApp(mods=[tw.flower.Compression("topk:0.01|quantize:4")])
    """

    def __init__(
        self,
        compressor: Compressor | str | Callable[[str], Compressor | str | None],
        *,
        decay: float = 1.0,
        min_numel: int = 1024,
    ) -> None:
        who = "tw.flower.Compression"
        by_name = callable(compressor) and not isinstance(compressor, type)
        self.compressor = compressor if by_name else local_of(compressor)  # type: ignore[arg-type]
        if not check.is_number(decay) or not 0 <= decay <= 1:
            raise ValueError(f"{who}: decay must be in [0, 1], got {decay!r}")
        check.whole(who, "min_numel", min_numel, 0)
        self.decay, self.min_numel = decay, min_numel

    def __call__(self, msg: Any, ctxt: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        """Let the app train, then compress its reply."""
        if not _is_train(msg):
            return call_next(msg, ctxt)
        if not _is_marked(msg):
            return _failure(
                msg,
                "tw.flower.Compression: the server does not decode compressed updates: wrap its "
                "strategy, tw.flower.Compressed(FedAvg(...)), or leave this mod out",
            )
        received = _numbers(_only_record(msg)[1])
        reply = call_next(msg, ctxt)
        if reply.has_error():
            return reply
        try:
            key, trained = _only_record(reply)
            payloads, residuals = self._encoded(_numbers(trained), received, ctxt)
        except (TypeError, ValueError) as error:
            return _failure(msg, f"tw.flower.Compression: {error}")
        data = pack(payloads)
        frames = _app.Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)
        reply.content[key] = _app.ArrayRecord({NAME: frames})
        ctxt.state[f"{NAME}.residuals"] = _arrays(residuals)
        return reply

    def _encoded(
        self, trained: Mapping[str, Numbers], received: Mapping[str, Numbers], ctxt: Any
    ) -> tuple[dict[str, Payload], dict[str, Numbers]]:
        """Payloads of all arrays, and what they leave out of those that are compressed."""
        if trained.keys() != received.keys():
            names = ", ".join(sorted(trained.keys() ^ received.keys()))
            raise ValueError(
                f"the app must return the arrays that it received, by their names; not in both: "
                f"{names}"
            )
        kept = ctxt.state.array_records.get(f"{NAME}.residuals", {})
        count = ctxt.state.config_records.get(f"{NAME}.replies", {}).get("count", 0)
        ctxt.state[f"{NAME}.replies"] = _app.ConfigRecord({"count": count + 1})
        key = Key(seed=ctxt.node_id % SEEDS, step=count)  # for each client and reply another
        payloads, residuals = dict[str, Payload](), dict[str, Numbers]()
        for i, (name, old) in enumerate(received.items()):
            new = trained[name]
            if new.dtype.name not in TYPES or new.shape != old.shape:
                raise ValueError(
                    f"{name!r} is {new.dtype} of shape {new.shape}: expected the shape that was "
                    f"received, {old.shape}, and one of {', '.join(TYPES)}"
                )
            if new.dtype.kind != "f":
                payloads[name] = NoCompression().encode(new)
                continue
            difference = _difference(new, old)
            compressor = self._compressor(name, new)
            residual = self._residual(kept.get(name), difference, compressor)
            payloads[name] = compressor.encode(
                difference, residual=residual, key=key._replace(tensor=i)
            )
            if residual is not None:
                residuals[name] = residual
            if payloads[name].non_finite:
                raise ValueError(f"the update of {name!r} holds NaN or infinity")
        return payloads, residuals

    def _compressor(self, name: str, array: Numbers) -> LocalCompressor:
        if array.ndim < 2 or array.size < self.min_numel:
            return NoCompression()
        chosen = self.compressor(name) if callable(self.compressor) else self.compressor
        return NoCompression() if chosen is None else local_of(chosen)

    def _residual(self, kept: Any, like: Numbers, compressor: Compressor) -> Numbers | None:
        """What to add to a difference; zeros where nothing that fits is remembered."""
        if self.decay == 0 or not compressor.wants_residual:
            return None
        dtype = np.float64 if like.dtype == np.float64 else np.float32
        found = None if kept is None else kept.numpy()
        if found is None or found.shape != like.shape or found.dtype != dtype:
            return np.zeros(like.shape, dtype)
        decayed: Numbers = np.multiply(found, self.decay, dtype=dtype)
        return decayed


@dataclass(frozen=True)
class Upload:
    """What came back from the clients in a round, as Flower counts the bytes of arrays.

    Args:
        compressed, uncompressed, failed: numbers of replies. Those that failed could not be
            decoded, and are not in the bytes.
        num_bytes: received.
        uncompressed_bytes: what the same arrays would have been.
    """

    compressed: int = 0
    uncompressed: int = 0
    failed: int = 0
    num_bytes: int = 0
    uncompressed_bytes: int = 0

    @property
    def compression_ratio(self) -> float:
        """Uncompressed bytes divided by bytes received; higher is better."""
        return self.uncompressed_bytes / self.num_bytes if self.num_bytes else 1.0

    def __add__(self, other: "Upload") -> "Upload":
        return Upload(*map(operator.add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        words = (
            f"{show_bytes(self.num_bytes)} uploaded instead of "
            f"{show_bytes(self.uncompressed_bytes)} (ratio {self.compression_ratio:.1f})"
        )
        others = {"uncompressed": self.uncompressed, "failed": self.failed}
        for name, count in others.items():
            words += f", {count} {name}" if count else ""
        return words


class Compressed(_strategy.Strategy):  # type: ignore[misc]
    """A strategy whose clients may upload compressed: it decodes, the strategy inside aggregates.

    Replies are decoded to the arrays that the clients would have sent, so that any strategy works
    inside, with its own weights and keys. It must be the outermost: a strategy around it would see
    frames. What the server sends stays uncompressed.

    A reply that cannot be decoded (any bytes, other names or shapes, more elements than were sent,
    NaN or infinity) is a failure of that client, which the strategy inside sees as an error reply.

    Args:
        strategy: any but those that rely on clients that clip (their bound would not hold for an
            update with a residual).
        accept_uncompressed: whether clients without `Compression` may take part. Their replies are
            passed on as they are.

    Attributes:
        uploads: an `Upload` for each round.

    Example:
        strategy = tw.flower.Compressed(FedAvg(fraction_train=0.3))
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)
    """

    def __init__(self, strategy: Any, *, accept_uncompressed: bool = True) -> None:
        who = "tw.flower.Compressed"
        if not isinstance(strategy, _strategy.Strategy):
            raise TypeError(
                f"{who} takes a strategy of flwr.serverapp.strategy, got {type(strategy).__name__}"
            )
        _check_inside(who, strategy)
        check.flag(who, "accept_uncompressed", accept_uncompressed)
        self.strategy, self.accept_uncompressed = strategy, accept_uncompressed
        self.uploads: dict[int, Upload] = {}
        self._sent: dict[int, Any] = {}  # the round's messages by node
        # Bound now: while `start` runs, the strategy's own attributes are this object's methods.
        self._configure, self._aggregate = strategy.configure_train, strategy.aggregate_train
        self._summary = strategy.summary

    @property
    def total(self) -> Upload:
        """All rounds together."""
        return sum(self.uploads.values(), Upload())

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """The messages of the strategy inside, marked: their receivers may compress."""
        messages = list(self._configure(server_round, arrays, config, grid))
        self._sent = {}
        for message in messages:
            node = message.metadata.dst_node_id
            if len(message.content.array_records) != 1 or node in self._sent:
                raise ValueError(
                    f"tw.flower.Compressed: {type(self.strategy).__name__} must send each node one "
                    f"message with one ArrayRecord, and does not for node {node}"
                )
            _mark(message)
            self._sent[node] = message
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """What the strategy inside makes of the decoded replies."""
        sent: dict[int, dict[str, Numbers]] = {}  # by record: most strategies send one to all
        upload, decoded = Upload(), list[Any]()
        for reply in replies:
            found, seen = self._decoded(reply, sent)
            upload += seen
            decoded.append(found)
        self.uploads[server_round] = upload
        if decoded:
            _log.info("aggregate_train: %s", upload)
        return self._aggregate(server_round, decoded)  # type: ignore[no-any-return]

    def _decoded(self, reply: Any, sent: dict[int, dict[str, Numbers]]) -> tuple[Any, Upload]:
        """A reply with plain arrays, or with an error, and its figures."""
        if reply.has_error():
            return reply, Upload()
        node = reply.metadata.src_node_id
        message = self._sent.get(node)
        records = reply.content.array_records
        arrived = sum(record.count_bytes() for record in records.values())
        try:
            if message is None:
                raise ValueError("it was not asked for")
            if not any(_is_ours(array) for record in records.values() for array in record.values()):
                if not self.accept_uncompressed:
                    raise ValueError("it is not compressed, which accept_uncompressed=False asks")
                return reply, Upload(0, 1, 0, arrived, arrived)
            base = _only_record(message)[1]
            if id(base) not in sent:
                sent[id(base)] = _numbers(base)
            key, record = _only_record(reply)
            if list(map(_is_ours, record.values())) != [True]:
                raise ValueError("frames and other arrays are mixed")
            plain = _arrays(_restored(next(iter(record.values())).data, sent[id(base)]))
        except ValueError as error:
            _log.warning("tw.flower.Compressed: reply of node %d dropped: %s", node, error)
            failed = f"tw.flower.Compressed could not use this reply: {error}"
            return _failure(message, failed, reply), Upload(failed=1)
        reply.content[key] = plain
        return reply, Upload(1, 0, 0, arrived, plain.count_bytes())

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """Those of the strategy inside."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        """What the strategy inside makes of them."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log that replies may be compressed, and the settings of the strategy inside."""
        accepted = "accepted" if self.accept_uncompressed else "refused"
        _log.info("\t├──> Compressed replies decoded, uncompressed ones %s", accepted)
        self._summary()

    def start(self, *arguments: Any, **options: Any) -> Any:
        """The loop of the strategy inside, which may be its own, with this object's methods."""
        mine = ("configure_train", "aggregate_train", "summary")
        for name in mine:
            setattr(self.strategy, name, getattr(self, name))
        try:
            return self.strategy.start(*arguments, **options)
        finally:
            for name in mine:
                delattr(self.strategy, name)


def _check_inside(who: str, strategy: Any) -> None:
    """Refuse what cannot be inside of a compressed strategy, however deep it is."""
    clipped_by_clients = (
        _strategy.DifferentialPrivacyClientSideAdaptiveClipping,
        _strategy.DifferentialPrivacyClientSideFixedClipping,
    )
    inside = strategy
    while isinstance(inside, _strategy.Strategy):
        if isinstance(inside, clipped_by_clients):
            raise ValueError(
                f"{who}: {type(inside).__name__} adds noise for updates that clients have clipped, "
                "and with what earlier rounds left out an update can exceed that bound: take the "
                "strategy that clips on the server's side, after decoding"
            )
        if isinstance(inside, Compressed):
            raise ValueError(f"{who}: the strategy inside is compressed already")
        inside = getattr(inside, "strategy", None)


def _is_train(message: Any) -> bool:
    """Whether it asks for training, by a named function of the app too ("train.name")."""
    return bool(message.metadata.message_type.partition(".")[0] == _app.MessageType.TRAIN)


def _mark(message: Any) -> None:
    """Say in a message's config that its sender decodes; records are shared, so in a copy."""
    content = _app.RecordDict(dict(message.content))
    key = next(iter(content.config_records), NAME)
    old = content.config_records.get(key, {})
    content[key] = _app.ConfigRecord({**old, NAME: VERSION})
    message.content = content


def _is_marked(message: Any) -> bool:
    return any(record.get(NAME) == VERSION for record in message.content.config_records.values())


def _is_ours(array: Any) -> bool:
    return bool(array.stype.startswith(NAME))


def _only_record(message: Any) -> tuple[str, Any]:
    """Name and content of a message's arrays."""
    records = message.content.array_records
    if len(records) != 1:
        raise ValueError(f"expected one ArrayRecord in a message, found {len(records)}")
    found: tuple[str, Any] = next(iter(records.items()))
    return found


def _failure(message: Any, reason: str, reply: Any = None) -> Any:
    """An error in place of a reply to a message; in place of `reply` if nobody asked for it."""
    error = _app.Error(code=_constant.ErrorCode.MOD_FAILED_PRECONDITION, reason=reason)
    if message is None:
        return _app.Message(error=error, metadata=reply.metadata)
    return _app.Message(error, reply_to=message)


def _numbers(record: Any) -> dict[str, Numbers]:
    return {name: array.numpy() for name, array in record.items()}


def _arrays(numbers: Mapping[str, Numbers]) -> Any:
    return _app.ArrayRecord({name: _app.Array(array) for name, array in numbers.items()})


def _difference(new: Numbers, old: Numbers) -> Numbers:
    """new - old in the type of new; zero where they are equal, as infinities in a mask are."""
    with np.errstate(invalid="ignore", over="ignore"):
        base = old.astype(new.dtype, copy=False)
        found: Numbers = np.subtract(new, base, out=np.zeros_like(new), where=new != base)
    return found


def _restored(data: bytes, sent: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The arrays that a client has trained.

    Args:
        data: from anybody: more elements than were sent are refused before they take memory.
        sent: what the client got.
    """
    found = unpack(data, max_numel=sum(array.size for array in sent.values()))
    if not isinstance(found, dict) or found.keys() != sent.keys():
        raise FrameError("it does not hold the arrays that were sent, by their names")
    trained: dict[str, Numbers] = {}
    for name, old in sent.items():
        payload: Payload = found[name]
        type_name = str(payload.dtype).removeprefix("torch.")
        if tuple(payload.shape) != old.shape or type_name not in TYPES:
            raise FrameError(
                f"{name!r} is {type_name} of shape {tuple(payload.shape)}, sent was {old.shape}"
            )
        update: Numbers = payload.restore().numpy()
        if payload.dtype.is_floating_point:
            with np.errstate(invalid="ignore", over="ignore"):
                base = old.astype(update.dtype, copy=False)
                np.add(base, update, out=update)
            if not np.all(np.isfinite(update) | (update == base)):
                raise FrameError(f"{name!r} holds NaN or infinity")
        trained[name] = update
    return trained
