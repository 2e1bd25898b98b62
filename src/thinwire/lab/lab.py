"""A lab: hosts with slow links on one machine."""

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType

from thinwire.lab.host import Counters, Host
from thinwire.lab.owner import Holder
from thinwire.lab.results import LabError, Result
from thinwire.lab.run import OnLine, Run
from thinwire.lab.starter import Popen, Starter, end
from thinwire.lab.topology import INTERFACE, lay_out, link_of

_FIRST_PORT = 29500  # torchrun's


class Lab:
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
        self._closing: ExitStack | None = None
        self._hosts: list[Host] = []

    def __enter__(self) -> "Lab":
        if self._closing is not None:
            raise LabError("this lab is open already")
        with ExitStack() as closing:
            self._holder = Holder()
            closing.callback(self._holder.close)
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
            self._hosts = [self._plug_in(number) for number in range(len(self._topology.stations))]
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._closing is not None
        closing, self._closing, self._hosts = self._closing, None, []
        closing.close()

    @property
    def hosts(self) -> Sequence[Host]:
        if self._closing is None:
            raise LabError("this lab is not open: with Lab(...) as lab: ...")
        return self._hosts

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        on_line: OnLine | None = None,
    ) -> list[Result]:
        """Run one program on every host, as torchrun would with one process a node.

        Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
        GLOO_SOCKET_IFNAME and THINWIRE_RACK. None is left when this returns or raises, also not
        after Ctrl-C.

        Args:
            argv: the program and its arguments.
            env: variables on top of this process's own and of those above.
            cwd: the directory to start in.
            timeout: seconds after which all are ended.
            on_line: called with the host's number, "stdout" or "stderr", and each line as it comes.

        Raises:
            HostFailedError: a program ended with an exit code other than 0; the rest were ended.
            RunTimeoutError: the timeout has passed.
        """
        port = next(self._ports)  # a new one each time: the last may still have late packets
        processes: list[Popen] = []
        try:
            for host in self.hosts:
                processes.append(
                    host.start(
                        argv,
                        env={**self._ranked(host, port), **(env or {})},
                        cwd=cwd,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            run = Run(processes, self._holder.pid, on_line)
        except BaseException:
            end(processes)
            raise
        return run.finish(timeout)

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
        way_in = (self._holder.pid, file)
        return Host(number, station.rack, station.address, INTERFACE, way_in, self._starter)

    def _ranked(self, host: Host, port: int) -> dict[str, str]:
        return {
            "RANK": str(host.number),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
        }


def why_not() -> str | None:
    """Why no lab can be made here, in a sentence, or None: found out by making one."""
    try:
        with Lab(hosts=2, link="100mbit"):
            return None
    except (LabError, ImportError) as error:
        return str(error)
