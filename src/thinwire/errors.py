"""Everything thinwire raises on its own account.

    ThinwireError
    ├── FrameError         a frame of bytes is damaged, hostile or not a frame (also a ValueError)
    ├── MemoryLimitError   an exchange would take more memory than allowed (also a MemoryError)
    ├── MismatchError      ranks asked for different things (also a ValueError)
    ├── MissingExtraError  an optional package is needed (also an ImportError)
    ├── PeerError          another rank died, stalled or failed (also a ConnectionError)
    └── ReplicaError       parameters differ between replicas

Mistakes in arguments are plain ``ValueError`` and ``TypeError``: they say what was expected, what
came and how to mend it. ``ThinwireWarning`` marks what works but is probably not what was meant.
"""

__all__ = [
    "FrameError",
    "MemoryLimitError",
    "MismatchError",
    "MissingExtraError",
    "PeerError",
    "ReplicaError",
    "ThinwireError",
    "ThinwireWarning",
]


class ThinwireError(Exception):
    """Base of all errors of this package."""


class FrameError(ThinwireError, ValueError):
    """Bytes that do not form a valid frame; the message says what is wrong with them."""


class MemoryLimitError(ThinwireError, MemoryError):
    """An exchange would take more memory than the limit; nothing was sent."""


class MismatchError(ThinwireError, ValueError):
    """Ranks entered one exchange with different calls; the message says who differs in what.

    All ranks of the group get it, no tensor was changed, and the group stays usable.
    """


class MissingExtraError(ThinwireError, ImportError):
    """A feature needs an optional package; the message names the pip line that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}': pip install 'thinwire[{extra}]'"
        )


class PeerError(ThinwireError, ConnectionError):
    """Another rank died, did not answer in time, could not go on, or announced what cannot be; the
    message says which.

    Tensors and residuals are as before the call. After a death or a timeout the group's connections
    are closed and later calls raise this at once: make a new process group to go on.
    """


class ReplicaError(ThinwireError):
    """Parameters differ between ranks; the message names the ranks and the parameters."""


class ThinwireWarning(UserWarning):
    """Something works but is probably not what was meant."""
