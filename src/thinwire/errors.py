"""Everything thinwire raises on its own account.

    ThinwireError
    ├── FrameError         a frame of bytes is damaged, hostile or not a frame (also a ValueError)
    └── MissingExtraError  an optional package is needed (also an ImportError)

Mistakes in arguments are plain ``ValueError`` and ``TypeError``: they say what was expected, what
came and how to mend it. ``ThinwireWarning`` marks what works but is probably not what was meant.
"""

__all__ = ["FrameError", "MissingExtraError", "ThinwireError", "ThinwireWarning"]


class ThinwireError(Exception):
    """Base of all errors of this package."""


class FrameError(ThinwireError, ValueError):
    """Bytes that do not form a valid frame; the message says what is wrong with them."""


class MissingExtraError(ThinwireError, ImportError):
    """A feature needs an optional package; the message names the pip line that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}': pip install 'thinwire[{extra}]'"
        )


class ThinwireWarning(UserWarning):
    """Something works but is probably not what was meant."""
