"""Links with delay, jitter and loss: a TAP device in each host, and a process between them.

Takes the place of cables and switches (`network`) in a lab with distance. A host's end of its link
is a TAP device, whose rate on the way out a token bucket of the kernel keeps: what waits there is
known to TCP, which then writes less, as it would before a slow cable. All else that lies between
two hosts is `forwarder`, a process that this one starts.
"""

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyroute2.netlink.rtnl.ifinfmsg import IFF_NOARP

from thinwire.lab.enter import CLONE_NEWNET, setns
from thinwire.lab.network import BuildError, End, HostNamespace, making
from thinwire.lab.topology import INTERFACE, DistanceSettings, LinkSettings, Station

_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 1, 2
# All hosts have it: nobody asks for it (NOARP), the forwarder goes by the address of the receiver.
_HARDWARE = "02:00:0a:4d:ff:01"
_MOST_WAITING = 5000  # for the forwarder, while others have the processors
_BUFFERS = ("tcp_rmem", "tcp_wmem")
# What is under way, as much again in a queue, and the kernel's own for each byte of either.
_BUFFER_BYTES_PER_WINDOW_BYTE = 8


class Distance:
    """TAP devices of hosts, and the process that carries packets from one to the other."""

    def __init__(
        self, namespace: int, inter: LinkSettings | None, settings: DistanceSettings
    ) -> None:
        self._namespace, self._inter, self._settings = namespace, inter, settings
        self._stations: list[Station] = []
        self._ends: list[End] = []
        self._files: list[int] = []

    def plug_in(self, station: Station, host: HostNamespace) -> None:
        setns(host.file, CLONE_NEWNET)
        try:
            with making(f"a TAP device ({_TUN})"):
                self._files.append(_tap(by_packet=self._settings.by_packet))
            _allow_windows(self._settings.window_bytes)
        finally:
            setns(self._namespace, CLONE_NEWNET)
        with making("an interface"):
            (index,) = host.talk.link_lookup(ifname=INTERFACE)
            host.talk.link("set", index=index, address=_HARDWARE, txqlen=_MOST_WAITING)
            host.talk.link("set", index=index, flags=IFF_NOARP, change=IFF_NOARP)
            end = End(host.talk, index)
        self._shape(end, station.link, "add")
        with making("an interface"):
            host.settle(end, station.address)
        self._stations.append(station)
        self._ends.append(end)

    def connect(self) -> int:
        """Start the forwarder."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "thinwire.lab.forwarder", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._files,
        )
        self._ask(
            {
                "files": self._files,
                "links": [asdict(station.link) for station in self._stations],
                "racks": [station.rack for station in self._stations],
                "inter": self._inter and asdict(self._inter),
                "seed": self._settings.seed,
            }
        )
        return self._process.pid

    def set_link(self, host: int, link: LinkSettings) -> None:
        self._shape(self._ends[host], link, "change")
        self._ask({"do": "set_link", "host": host, "link": asdict(link)})

    def set_inter(self, link: LinkSettings) -> None:
        self._ask({"do": "set_inter", "link": asdict(link)})

    def counters(self) -> list[dict[str, int]]:
        found: list[dict[str, int]] = self._ask({"do": "counters"})
        for counters, end in zip(found, self._ends, strict=True):
            counters["dropped_packets"] += end.dropped()
        return found

    def inter_counters(self) -> list[dict[str, int]]:
        found: list[dict[str, int]] = self._ask({"do": "inter_counters"})
        return found

    def lateness(self) -> dict[str, float]:
        found: dict[str, float] = self._ask({"do": "lateness"})
        return found

    def _shape(self, end: End, link: LinkSettings, verb: str) -> None:
        """Keep a host's rate on its way out; TCP writes no more at once than the bucket passes."""
        with making("an interface with a limit to what TCP writes at once (gso_max_size)"):
            end.talk.link("set", index=end.index, gso_max_size=min(link.burst_bytes, 2**16))
        end.shape(link, verb)

    def _ask(self, request: dict[str, object]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what follows says why it broke
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise BuildError(f"the forwarder of the lab's packets has ended with exit code {code}")
        return json.loads(line)


def _tap(by_packet: bool) -> int:
    """A new TAP device in this namespace, by its open file; it goes when that is closed."""
    try:
        file = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise BuildError(
            f"delay, jitter and loss need {_TUN}, which this user may not open: run as root, or "
            f"let everybody open it, as most systems do (chmod 666 {_TUN})"
        ) from error
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(file, _TUNSETOFFLOAD, _TUN_F_CSUM | (0 if by_packet else _TUN_F_TSO4))
    except OSError:
        os.close(file)
        raise
    return file


def _allow_windows(num_bytes: int) -> None:
    """Let TCP's buffers in this namespace grow so far that they do not limit a connection."""
    wanted = _BUFFER_BYTES_PER_WINDOW_BYTE * num_bytes
    for name in _BUFFERS:
        path = Path("/proc/sys/net/ipv4", name)
        least, usual, most = map(int, path.read_text().split())
        if most < wanted:
            with making(f"TCP buffers of {wanted} bytes ({path})"):
                path.write_text(f"{least} {usual} {wanted}")
