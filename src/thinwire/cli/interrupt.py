"""Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended, by the custom of shells


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done, so that a result that took minutes is not lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed.is_set():
        raise KeyboardInterrupt
