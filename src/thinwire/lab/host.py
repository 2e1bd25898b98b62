"""One host of a lab, and what crossed its link."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from thinwire.lab import enter
from thinwire.lab.mark import VARIABLE, own_mark
from thinwire.lab.starter import Popen, Starter

File = int | IO[Any] | None  # as subprocess takes them


@dataclass(frozen=True)
class Counters:
    """What a link has carried since the lab began, seen from its host or rack; subtract with `-`.

    Bytes are those of Ethernet frames with their headers: 1514 for a full one.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    dropped_packets: int  # in both directions, because a queue was full

    def __sub__(self, earlier: "Counters") -> "Counters":
        mine, theirs = vars(self), vars(earlier)
        return Counters(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True)
class Host:
    """A place in the lab with an own network: `address` on `interface`, `lo`, and nothing else."""

    number: int
    rack: int
    address: str
    interface: str
    _way_in: tuple[int, int] = field(repr=False)  # the holder's process and its open file
    _starter: Starter = field(repr=False)

    def start(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
    ) -> Popen:
        """Start a program on this host. It ends with the lab at the latest.

        Args:
            argv: the program and its arguments.
            env: variables on top of this process's own, GLOO_SOCKET_IFNAME and THINWIRE_RACK.
            cwd: the directory to start in; this process's own if None.
            stdin, stdout, stderr: as subprocess.Popen takes them.
        """
        program, *arguments = [os.fspath(word) for word in argv]
        place = {"GLOO_SOCKET_IFNAME": self.interface, "THINWIRE_RACK": str(self.rack)}
        whole = {**os.environ, **place, **(env or {}), VARIABLE: str(own_mark())}
        here = cwd is None or os.sep not in program
        if here and shutil.which(program, path=whole.get("PATH")) is None:
            raise FileNotFoundError(f"host {self.number}: no program {program!r} to start")
        script = str(Path(enter.__file__).resolve())
        keys = [str(number) for number in (os.getpid(), *self._way_in)]
        command = [sys.executable, "-I", "-S", script, *keys, program, *arguments]
        return self._starter.start(
            lambda: subprocess.Popen(
                command,
                env=whole,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                # Out of the terminal's reach: on Ctrl-C it is the lab that ends its programs.
                start_new_session=True,
            )
        )
