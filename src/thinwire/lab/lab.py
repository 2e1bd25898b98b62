"""Clusters on this machine: `Lab`, whose hosts have slow links, and `Loopback`, whose have none."""

import contextlib
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.errors import MissingExtraError
from thinwire.lab.cleaning import VARIABLE, this_process
from thinwire.lab.programs import Cluster, Host, LabError, Starter
from thinwire.lab.topology import INTERFACE, lay_out, link_of

_FIRST_PORT = 29500  # torchrun's
_PATIENCE_SECONDS = 10.0


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


class Lab(Cluster):
    """Hosts on this machine, each a network namespace with an own link to the switch of its rack.

    Args:
        hosts: how many.
        link: the rate of each link in either direction, like "100mbit", or one for each host.
        racks: over how many switches the hosts are divided, in order and evenly.
        inter: the rate of the link by which each rack's switch hangs on the rest, in either
            direction; required for two racks or more. Two racks share one link of that rate, more
            have one each to a core. Traffic inside a rack never touches it.
        burst_bytes: how much may pass a link at once after a pause; 1 ms worth, but at least five
            full packets, if None.
        queue_seconds: how long data may wait at a link before more is dropped; 0.05 s, but at
            least 128 KiB, if None.

    Example:
        with Lab(hosts=4, link="100mbit") as lab:
            for result in lab.run([sys.executable, "train.py"], timeout=600):
                print(result.host, result.stdout)

    Everything a lab has made is gone after the block, also when this process is killed inside it.
    """

    def __init__(
        self,
        hosts: int,
        link: str | Sequence[str] = "100mbit",
        *,
        racks: int = 1,
        inter: str | None = None,
        burst_bytes: int | None = None,
        queue_seconds: float | None = None,
    ) -> None:
        self._topology = lay_out(hosts, link, racks, inter, burst_bytes, queue_seconds)
        self._settings = (burst_bytes, queue_seconds)
        self._ports = itertools.count(_FIRST_PORT)

    def _open(self, closing: ExitStack) -> list[Host]:
        self._holder = Holder()
        closing.callback(self._holder.close)
        self._holder_pid = self._holder.pid
        self._starter = Starter()
        closing.callback(self._starter.close)
        inter = self._topology.inter
        self._holder.ask(
            {
                "do": "set_up",
                "racks": self._topology.racks,
                "inter": None if inter is None else asdict(inter),
            }
        )
        return [self._plug_in(number) for number in range(len(self._topology.stations))]

    def counters(self) -> list[Counters]:
        """What each host's link has carried since the lab began."""
        assert self.hosts
        return [Counters(**values) for values in self._holder.ask({"do": "counters"})]

    def inter_counters(self) -> list[Counters]:
        """What the link of each rack to the rest has carried, seen from the rack; [] for one rack.

        Two racks have one link: what the first has sent the second has received, and both tell the
        same dropped packets.
        """
        assert self.hosts
        return [Counters(**values) for values in self._holder.ask({"do": "inter_counters"})]

    def set_link(self, host: int, rate: str) -> None:
        """Change the rate of a host's link, in both directions and at once."""
        if host not in range(len(self.hosts)):
            raise ValueError(f"host must be from 0 to {len(self.hosts) - 1}, got {host!r}")
        link = link_of(rate, *self._settings)
        self._holder.ask({"do": "set_link", "host": host, "link": asdict(link)})

    def set_inter(self, rate: str) -> None:
        """Change the rate between racks, of all their links, in both directions and at once."""
        assert self.hosts
        if self._topology.inter is None:
            raise ValueError(f"inter is the rate between racks, and this lab has one: {rate!r}")
        link = link_of(rate, *self._settings)
        self._holder.ask({"do": "set_inter", "link": asdict(link)})

    def _plug_in(self, number: int) -> Host:
        station = self._topology.stations[number]
        file = self._holder.ask({"do": "plug_in", **asdict(station)})
        namespace = (self._holder.pid, file)
        return Host(number, station.rack, station.address, INTERFACE, namespace, self._starter)

    def _variables(self) -> list[dict[str, str]]:
        port = next(self._ports)  # a new one each time: the last may still have late packets
        return [
            {
                "RANK": str(host.number),
                "WORLD_SIZE": str(len(self.hosts)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.hosts[0].address,
                "MASTER_PORT": str(port),
            }
            for host in self.hosts
        ]


class Loopback(Cluster):
    """Hosts that are plain processes of this machine and talk over its loopback: no slow links.

    Runs where no lab can be made. Like those of a lab, programs end with the block at the latest,
    and on Linux also when this process is killed inside it.

    Args:
        hosts: how many.

    Example:
        with Loopback(hosts=4) as loopback:
            loopback.run([sys.executable, "train.py"], timeout=600)
    """

    def __init__(self, hosts: int) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int):
            raise TypeError(f"hosts must be a number of hosts, got {hosts!r}")
        if hosts < 1:
            raise ValueError(f"hosts must be at least 1, got {hosts}")
        self._number = hosts

    def _open(self, closing: ExitStack) -> list[Host]:
        starter = Starter()
        closing.callback(starter.close)
        return [Host(rank, 0, "127.0.0.1", "lo", None, starter) for rank in range(self._number)]

    def _variables(self) -> list[dict[str, str]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        size = str(self._number)
        common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = map(str, range(self._number))
        return [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in ranks]


def why_not() -> str | None:
    """Why no lab can be made here, in a sentence, or None: found out by making one."""
    try:
        with Lab(hosts=2, link="100mbit"):
            return None
    except (LabError, ImportError) as error:
        return str(error)


class Holder:
    """The process that holds a lab's namespaces (`thinwire.lab.holder`), and questions to it.

    It lives as long as this process does at most.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise LabError("a lab needs Linux: it is made of network namespaces")
        if importlib.util.find_spec("pyroute2") is None:
            raise MissingExtraError("pyroute2", "lab", "a lab")
        self._lock = threading.Lock()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "thinwire.lab.holder", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env={
                **os.environ,
                # It finds what we find, wherever we found it.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                VARIABLE: str(this_process()),
            },
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, object]) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # _receive says why it broke
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            return self._receive().get("value")

    def close(self) -> None:
        """Let it kill what still runs in the lab and go. Returns when all is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._complaints.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(_PATIENCE_SECONDS)
            self._complaints.seek(0)
            said = self._complaints.read().decode(errors="replace").split("\n")
            why = next((line for line in reversed(said) if line.strip()), "it said nothing")
            code = self._process.returncode
            raise LabError(f"the process that holds the lab has ended with exit code {code}: {why}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer
