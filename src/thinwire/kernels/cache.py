"""Where compiled kernels are kept from one process to the next.

``$THINWIRE_CACHE_DIR``; without it Numba's ``$NUMBA_CACHE_DIR``; without both the user's cache
directory (``~/.cache/thinwire`` on Linux). Never beside the sources: an installation may be
read-only, and should leave nothing behind when it goes. Where none of these can be written to, a
temporary directory serves, and what was compiled there before is copied.

Each build of the kernels has a directory of its own, named by a hash of their sources: Numba itself
looks at the file of a function, not at those of the functions that it inlines.
"""

import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

log = logging.getLogger("thinwire")

SOURCES = Path(__file__).parent / "cpu"
DIRECTORY = "THINWIRE_CACHE_DIR"


@functools.cache
def directory() -> Path:
    """Of the compiled kernels of this build; it exists and can be written to."""
    name = f"kernels-{_build()}"
    places = [base / name for base in _bases()]
    for place in places:
        if _is_writable(place):
            return place
    own = _temporary() / name
    for place in places:
        if place.is_dir() and not own.is_dir():
            _copy(place, own)
    own.mkdir(parents=True, exist_ok=True)
    tried = " and ".join(str(place.parent) for place in places) or "no home directory"
    log.warning(
        "compiled kernels are kept in %s, which may not last: cannot write to %s. Set %s to a "
        "directory that can be written to",
        own, tried, DIRECTORY,
    )  # fmt: skip
    return own


def clear() -> None:
    """Remove the compiled kernels of all builds."""
    for base in (*_bases(), _temporary()):
        for place in base.glob("kernels-*"):
            shutil.rmtree(place, ignore_errors=True)


def _build() -> str:
    """What compiled code depends on. The processor and the version of Numba are Numba's matter."""
    found = hashlib.sha256(sys.version.encode())
    for path in sorted(SOURCES.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _bases() -> list[Path]:
    """The directories to be tried, best first."""
    given = os.environ.get(DIRECTORY) or os.environ.get("NUMBA_CACHE_DIR")
    user = _user_directory()
    bases = [Path(given).expanduser().absolute()] if given else []
    return bases if user is None else [*bases, user]


def _user_directory() -> Path | None:
    """What the platform has for caches; None where it has no home directory."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
    else:
        library = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(library)
    return Path(base) / "thinwire" if os.path.isabs(base) else None


def _is_writable(place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError:
        return False
    return True


def _temporary() -> Path:
    """One for all processes of this user."""
    place = Path(tempfile.gettempdir()) / f"thinwire-{_user()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
    except OSError:
        return _private()
    # Compiled code is run, so it must be nobody else's: anybody may have made this directory.
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return place if ours and not found.st_mode & 0o022 and not place.is_symlink() else _private()


@functools.cache
def _private() -> Path:
    return Path(tempfile.mkdtemp(prefix="thinwire-"))


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all: several processes may do it at once."""
    own = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        shutil.copytree(source, own / target.name)
        (own / target.name).rename(target)
    except OSError as error:
        if not target.is_dir():
            log.info("could not copy compiled kernels from %s: %s", source, error)
    finally:
        shutil.rmtree(own, ignore_errors=True)
