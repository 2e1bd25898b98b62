"""What a caller holds while an exchange is under way."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger("thinwire")


@dataclass
class Account:
    """What an exchange came to, filled in while it runs.

    Args:
        collective: the algorithm that was used.
        bytes_sent, bytes_received: by this rank, without any headers.
        network_bytes: bytes_sent with what gloo adds to each message: what TCP carries. The counter
            of an Ethernet interface shows 66 bytes more for each packet of at most 1448.
        exchanges: how many it stands for.
        between_bytes: those of bytes_sent that went to another node, meetings apart; counted by
            the hierarchical collective, the only one that knows of nodes.
        tensor_bytes: what this rank has made of each tensor, as frames or as values to be summed;
            empty where that is not told apart.
        finite: False if a rank's tensor held NaN or infinity, so that no residual was changed.
            Uncompressed tensors (NoCompression without a residual) are not looked at.
        announced: this rank could not go on, and all others were told.
        lost: the group has lost its connections; nothing more can be exchanged over it.
        seconds: where this rank's time went: "encode", "network" (waiting for others included)
            and "decode".
    """

    collective: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    network_bytes: int = 0
    exchanges: int = 1
    between_bytes: int = 0
    tensor_bytes: list[int] = field(default_factory=list)
    finite: bool = True
    announced: bool = False
    lost: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


class Handle:
    """An exchange that was started; the tensors belong to it until it has ended.

    It must not be dropped on one rank and waited for on another: every rank takes part anyway.
    """

    def __init__(self, result: Any, what: str) -> None:
        self.account = Account()
        self.what = what
        self._result = result
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._seen = False  # somebody has been told that it has ended
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._callbacks: list[Callable[[Handle], None]] = []

    def __repr__(self) -> str:
        state = "running" if not self._ended.is_set() else "failed" if self._error else "done"
        return f"<{self.what}, {state}>"

    @property
    def collective(self) -> str:
        """The algorithm that was used; empty until ranks have agreed on one."""
        return self.account.collective

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return self.account.bytes_sent

    def wait(self, timeout: float | None = None) -> None:
        """Return when the exchange has ended; raise its error if it failed.

        Args:
            timeout: seconds to wait here. When they pass TimeoutError is raised, and the exchange
                goes on. (The `timeout` of the call itself ends the exchange.)
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.what} has not ended within {timeout:g} s; it goes on")
        self._seen = True
        if self._error is not None:
            raise self._error

    def wait_until_ended(self) -> None:
        """Return when the exchange has ended, well or not; raises nothing."""
        self._ended.wait()
        self._seen = True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if self._ended.is_set():
            self._seen = True
            return True
        return False

    @property
    def open(self) -> bool:
        """Whether nobody has been told yet that it has ended: nothing in the program can have been
        ordered behind it."""
        return not self._seen

    def exception(self) -> BaseException | None:
        """The error of an exchange that failed; None while it runs and when it went well."""
        self._seen = self._seen or self._ended.is_set()
        return self._error

    def get_future(self) -> "torch.futures.Future[Any]":
        """A torch future that holds the tensor (the list of tensors), or the error."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            ended = self._ended.is_set()
        if ended:
            self._fulfil(future)
        return future

    def when_ended(self, callback: "Callable[[Handle], None]") -> None:
        """Have this called with the handle when the exchange has ended, by the thread that carried
        it out; at once if it has ended already. Nothing that waits for another exchange may be
        called there."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, error: BaseException | None = None) -> None:
        """Called once, by whoever carries out the exchange."""
        with self._lock:
            self._error = error
            self._ended.set()
            future, callbacks = self._future, self._callbacks
            self._callbacks = []
        if future is not None:
            self._fulfil(future)  # runs callbacks, which may ask this handle
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the thread that calls it has other exchanges to carry out
                log.exception("a callback of %s raised", self.what)

    def _fulfil(self, future: "torch.futures.Future[Any]") -> None:
        self._seen = True
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)


def wait_all(handles: Iterable[Handle]) -> None:
    """Return when all have ended; raise the first error among them, in the order given.

    Every one is waited for first, so that no tensor is in use any more when the error comes.
    """
    handles = list(handles)
    first: BaseException | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
