"""Enter a host's namespaces and become a program there, which is killed when its starter ends.

Run as a script, by path and without site-packages, so that it starts fast and needs nothing in the
program's environment: `python -I -S enter.py <parent> <holder> <fd> <program> <arguments>...`.
The namespace is the one that process <holder> holds open as <fd>; where <holder> is 0 the program
stays in the namespaces of <parent>.
"""

import ctypes
import os
import signal
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127  # by the custom of shells

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind))


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of `parent` that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which started this one, is gone")


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(parent: int, holder: int, fd: int, argv: list[str]) -> None:
    if holder:
        network = os.open(f"/proc/{holder}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        user = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        if not os.path.samestat(os.fstat(user), os.stat("/proc/self/ns/user")):
            setns(user, CLONE_NEWUSER)  # first: it brings the right to enter the other
        setns(network, CLONE_NEWNET)
    die_with(parent)  # last: a change of credentials makes the kernel forget it
    # Python ignores these two, and what is ignored stays so in the program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    except OSError as error:
        print(f"thinwire.lab: cannot start {sys.argv[4]}: {error}", file=sys.stderr)
        sys.exit(_NOT_STARTED)
