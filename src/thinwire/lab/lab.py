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
from functools import partial
from typing import Any

from thinwire.errors import MissingExtraError
from thinwire.lab.cleaning import VARIABLE, this_process
from thinwire.lab.programs import Cluster, Host, LabError, Starter
from thinwire.lab.topology import INTERFACE, Shape, lay_out

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
    dropped_packets: int  # in both directions: the queue was full, or the link is to lose some

    def __sub__(self, earlier: "Counters") -> "Counters":
        mine, theirs = vars(self), vars(earlier)
        return Counters(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True)
class Lateness:
    """How much later than its links say a lab has delivered, because its machine was busy."""

    mean_seconds: float
    late_share: float  # of what was delivered, more than 5 ms late

    def __str__(self) -> str:
        mean = f"packets came {1e3 * self.mean_seconds:.2f} ms later than asked on average"
        return f"{mean}, {self.late_share:.2%} of them more than 5 ms"


class Lab(Cluster):
    """Hosts on this machine, each a network namespace with an own link to the switch of its rack.

    Args:
        hosts: how many.
        link: the rate of each link in either direction, like "100mbit", or one for each host. It
            may say more, "100mbit delay=15ms jitter=2ms loss=0.1%", and then holds before the
            following three.
        delay: how long what a host sends is on its way, like "15ms", on top of what the rate makes
            it take. One way: a round trip between two hosts takes the delay of both links, so 30 ms
            if all have 15.
        jitter: how much longer it may take, like "2ms": each packet as much of it as chance has it,
            but none overtakes another.
        loss: the share of packets sent that never arrive, like 0.001 or "0.1%".
        racks: over how many switches the hosts are divided, in order and evenly.
        inter: the rate of the link by which each rack's switch hangs on the rest, in either
            direction; required for two racks or more. Two racks share one link of that rate, more
            have one each to a core. Traffic inside a rack never touches it. It may say more as a
            link may, and has no delay, jitter or loss but those: they are added to what one rack
            sends to another, once.
        burst_bytes: how much may pass a link at once after a pause; 1 ms worth, but at least five
            full packets, if None.
        queue_seconds: how long data may wait at a link before more is dropped; 0.05 s, but at
            least 128 KiB and what the longest round trip of the lab has under way, if None.
        seed: of jitter and losses: the n-th packet of a link fares the same in each lab.

    Example:
        with Lab(hosts=4, link="100mbit", delay="15ms") as lab:
            for result in lab.run([sys.executable, "train.py"], timeout=600):
                print(result.host, result.stdout)

    Everything a lab has made is gone after the block, also when this process is killed inside it.
    """

    def __init__(
        self,
        hosts: int,
        link: str | Sequence[str] = "100mbit",
        *,
        delay: str | None = None,
        jitter: str | None = None,
        loss: float | str | None = None,
        racks: int = 1,
        inter: str | None = None,
        burst_bytes: int | None = None,
        queue_seconds: float | None = None,
        seed: int = 0,
    ) -> None:
        self._shape = Shape(burst_bytes, queue_seconds, delay, jitter, loss)
        self._topology = lay_out(hosts, link, racks, inter, self._shape)
        texts = [link] * hosts if isinstance(link, str) else link
        # As they were asked for, of each host with all that holds for it; between racks.
        self.links = [self._shape.text(text) for text in texts]
        self.inter = inter
        self._seed = seed
        self._ports = itertools.count(_FIRST_PORT)

    @property
    def is_distant(self) -> bool:
        """Whether any link has delay, jitter or loss."""
        return self._topology.is_distant

    @property
    def round_trip_seconds(self) -> float:
        """The longest between two hosts, without what rates and queues add to it."""
        return self._topology.round_trip_seconds

    def _open(self, closing: ExitStack) -> list[Host]:
        self._holder = Holder()
        closing.callback(self._holder.close)
        self._starter = Starter()
        closing.callback(self._starter.close)
        inter, distance = self._topology.inter, self._topology.distance(self._seed)
        self._holder.ask(
            {
                "do": "set_up",
                "racks": self._topology.racks,
                "inter": inter and asdict(inter),
                "distance": distance and asdict(distance),
            }
        )
        hosts = [self._plug_in(number) for number in range(len(self._topology.stations))]
        self._needed = {self._holder.pid: partial(self._holder.ended, "process that holds the lab")}
        forwarder = self._holder.ask({"do": "connect"})
        if forwarder is not None:
            ended = partial(self._holder.ended, "forwarder of the lab's packets")
            self._needed[forwarder] = ended
        return hosts

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

    def lateness(self) -> Lateness | None:
        """How well the distances were kept since the lab began; None in a lab without distance."""
        assert self.hosts
        found = self._holder.ask({"do": "lateness"})
        return None if found is None else Lateness(**found)

    def set_link(self, host: int, link: str) -> None:
        """Change a host's link, in both directions and at once.

        What the text does not say is as the arguments of the lab have it. A lab that was made
        without delay, jitter and loss cannot get them, nor can one that was made without loss.
        TCP's buffers stay as large as the lab that was asked for needs them.
        """
        if host not in range(len(self.hosts)):
            raise ValueError(f"host must be from 0 to {len(self.hosts) - 1}, got {host!r}")
        settings = self._topology.changed(self._shape.link(link), self._shape)
        self._holder.ask({"do": "set_link", "host": host, "link": asdict(settings)})

    def set_inter(self, link: str) -> None:
        """Change all links between racks, in both directions and at once; see `set_link`."""
        assert self.hosts
        if self._topology.inter is None:
            raise ValueError(f"inter is the rate between racks, and this lab has one: {link!r}")
        settings = self._topology.changed(self._shape.inter(link), self._shape)
        self._holder.ask({"do": "set_inter", "link": asdict(settings)})

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


def why_not(*, distance: bool = False) -> str | None:
    """Why no lab can be made here, in a sentence, or None: found out by making one.

    Args:
        distance: whether it is to have delay, jitter or loss, which takes more of the system.
    """
    try:
        with Lab(hosts=2, link="100mbit", delay="1ms" if distance else None):
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

    def ended(self, process: str, how: str = "") -> LabError:
        """What to raise when this process or one that it has started has ended."""
        size = os.fstat(self._complaints.fileno()).st_size
        said = os.pread(self._complaints.fileno(), size, 0).decode(errors="replace").split("\n")
        why = next((line for line in reversed(said) if line.strip()), "it said nothing")
        return LabError(f"the {process} has ended{how}, so hosts have no network: {why}")

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(_PATIENCE_SECONDS)
            raise self.ended("process that holds the lab", f" with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer
