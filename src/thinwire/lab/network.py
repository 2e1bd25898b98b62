"""The network itself, asked of the kernel: cables, switches, and a namespace for each host.

The switches are in one namespace, each host is in its own, and a shaped veth pair leads from one to
the other; where links have distance, another process takes the place of switches and cables
(`distance`). Runs in the process that holds the namespaces (`holder`), which must have one thread:
entering a namespace changes the thread that asks.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pyroute2 import IPRoute, NetlinkError
from pyroute2.ethtool.ioctl import EthtoolError, IoctlEthtool

from thinwire.lab.enter import CLONE_NEWNET, CLONE_NEWUSER, setns, unshare
from thinwire.lab.topology import INTERFACE, NETWORK, LinkSettings, Station

_ROOT_HANDLE = 0x10000
_NO_IPV6_ADDRESS = {
    "attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})],
}
_NTF_MASTER = 4  # the entry is the bridge's, not the port's own
_STATIC, _PERMANENT = 0x40, 0x80  # NUD_NOARP, NUD_PERMANENT
_SCOPE_LINK, _PROTO_KERNEL = 253, 2  # as the kernel makes it, so that it is replaced


class BuildError(Exception):
    """The system refuses a part of the network; the message says which and why."""


@dataclass(frozen=True)
class End:
    """One end of a cable."""

    talk: IPRoute  # talks to the kernel about the namespace that this end is in
    index: int  # the number of the interface

    def bring_up(self) -> None:
        with contextlib.suppress(NetlinkError):  # a kernel without IPv6 has nothing to turn off
            # Address discovery would put packets of its own on the links.
            self.talk.link("set", index=self.index, IFLA_AF_SPEC=_NO_IPV6_ADDRESS)
        self.talk.link("set", index=self.index, state="up")

    def shape(self, link: LinkSettings, verb: str) -> None:
        """Limit what leaves this end."""
        with making("a token bucket (tbf)"):
            self.talk.tc(
                verb,
                kind="tbf",
                index=self.index,
                handle=_ROOT_HANDLE,
                rate=link.rate_bits // 8,
                burst=link.burst_bytes,
                limit=link.queue_bytes,
            )

    def dropped(self) -> int:
        (bucket,) = self.talk.get_qdiscs(index=self.index)
        return int(bucket.get_attr("TCA_STATS")["drop"])


@dataclass(frozen=True)
class Cable:
    """A veth pair, seen from its near end."""

    near: End
    far: End

    def shape(self, link: LinkSettings, verb: str) -> None:
        """Limit what leaves either end, so both directions, each on its own."""
        for end in (self.near, self.far):
            end.shape(link, verb)

    def counters(self) -> dict[str, int]:
        (interface,) = self.near.talk.get_links(self.near.index)
        stats = interface.get_attr("IFLA_STATS64")
        return {
            "sent_bytes": stats["tx_bytes"],
            "sent_packets": stats["tx_packets"],
            "received_bytes": stats["rx_bytes"],
            "received_packets": stats["rx_packets"],
            "dropped_packets": self.near.dropped() + self.far.dropped(),
        }


@contextlib.contextmanager
def making(what: str) -> Iterator[None]:
    """Say which part of the network an error of the kernel is about."""
    try:
        yield
    except (OSError, NetlinkError, EthtoolError) as error:
        # pyroute2's errors are no OSErrors and keep the number elsewhere, if at all.
        number = getattr(error, "code", getattr(error, "errno", None))
        if number not in (errno.EPERM, errno.EACCES):
            raise BuildError(f"this kernel cannot make {what}: {error}") from error
        raise BuildError(
            f"making {what} is not permitted ({error}): run as root, or allow this user to make "
            "user namespaces (a container needs the capability SYS_ADMIN for either)"
        ) from error


@dataclass(frozen=True)
class HostNamespace:
    """The network namespace of a host."""

    file: int  # open: what keeps the namespace alive
    talk: IPRoute
    offload: IoctlEthtool

    def settle(self, end: End, address: str) -> None:
        """Make an interface the one by which this host reaches the others."""
        self.talk.addr("add", index=end.index, address=address, prefixlen=NETWORK.prefixlen)
        end.bring_up()
        _choose_cubic(self.talk, end.index, address)
        self.talk.link("set", index=self.talk.link_lookup(ifname="lo")[0], state="up")

    def send_packet_by_packet(self) -> None:
        """Let packets leave as on a cable and be counted so, not 40 at once under one header."""
        self.offload.change_ifname(INTERFACE)
        features = self.offload.get_features()
        for name in features.keys():  # noqa: SIM118, it is no dict
            if name.startswith("tx-tcp") and name.endswith("segmentation"):
                features[name] = False
        self.offload.set_features(features)


class Wiring(Protocol):
    """What lies between the hosts of a lab."""

    def plug_in(self, station: Station, host: HostNamespace) -> None: ...

    def connect(self) -> int | None:
        """After all hosts were plugged in; the process that carries packets, if one does."""

    def set_link(self, host: int, link: LinkSettings) -> None: ...

    def set_inter(self, link: LinkSettings) -> None: ...

    def counters(self) -> list[dict[str, int]]: ...

    def inter_counters(self) -> list[dict[str, int]]: ...

    def lateness(self) -> dict[str, float] | None: ...


class Switches:
    """One switch per rack. Two are joined by one cable, more hang on a core by one each.

    Every switch is told where every host is, and answers for those of other racks when somebody
    asks for their hardware address. So no packet is ever flooded in search of its receiver, and a
    cable between racks carries only what one rack has for another.
    """

    def __init__(self, talk: IPRoute, racks: int, inter: LinkSettings | None) -> None:
        self._talk = talk
        self._cables: list[Cable] = []  # one per host, seen from it
        self._racks = [self._bridge(f"rack{rack}") for rack in range(racks)]
        self._core: int | None = None
        self._uplinks: list[Cable] = []  # one per rack, seen from it
        if inter is None:
            return
        if racks == 2:
            # One token bucket on the way, as the rate says, and not two in a row.
            cable = self._join("up0", self._racks[0], "up1", self._racks[1], inter)
            self._uplinks = [cable, Cable(cable.far, cable.near)]
        else:
            self._core = self._bridge("core")
            self._uplinks = [
                self._join(f"up{rack}", bridge, f"core{rack}", self._core, inter)
                for rack, bridge in enumerate(self._racks)
            ]
        with making("a switch that answers for others (neigh_suppress)"):
            for uplink in self._uplinks:
                talk.brport("set", index=uplink.near.index, neigh_suppress=1)

    def plug_in(self, station: Station, host: HostNamespace) -> None:
        """A cable from a host to the switch of its rack."""
        name = f"port{len(self._cables)}"
        with making("a veth pair"):
            peer = {"ifname": INTERFACE, "net_ns_fd": host.file}
            self._talk.link("add", ifname=name, kind="veth", peer=peer)
            (switch_end,) = self._talk.link_lookup(ifname=name)
            (host_end,) = host.talk.link_lookup(ifname=INTERFACE)
        cable = Cable(End(host.talk, host_end), End(self._talk, switch_end))
        cable.shape(station.link, "add")
        with making("an interface"):
            host.send_packet_by_packet()
            self._talk.link("set", index=switch_end, master=self._racks[station.rack])
            cable.far.bring_up()
            host.settle(cable.near, station.address)
            hardware = host.talk.get_links(host_end)[0].get_attr("IFLA_ADDRESS")
        self._make_known(cable.far, station.rack, hardware, station.address)
        self._cables.append(cable)

    def connect(self) -> None:
        """Nothing is left to do."""

    def _make_known(self, end: End, rack: int, hardware: str, address: str) -> None:
        """Tell all switches that this host is behind this end in this rack."""
        with making("an entry of a switch"):
            for other, bridge in enumerate(self._racks):
                self._enter(end if other == rack else self._uplinks[other].near, hardware)
                if self._uplinks:
                    self._talk.neigh(
                        "add", ifindex=bridge, dst=address, lladdr=hardware, state=_PERMANENT
                    )
            if self._core is not None:
                self._enter(self._uplinks[rack].far, hardware)

    def set_link(self, host: int, link: LinkSettings) -> None:
        self._cables[host].shape(link, "change")

    def set_inter(self, link: LinkSettings) -> None:
        for uplink in self._uplinks:
            uplink.shape(link, "change")

    def counters(self) -> list[dict[str, int]]:
        return [cable.counters() for cable in self._cables]

    def inter_counters(self) -> list[dict[str, int]]:
        return [uplink.counters() for uplink in self._uplinks]

    def lateness(self) -> None:
        """Nothing here has a time at which it is due."""

    def _enter(self, end: End, hardware: str) -> None:
        self._talk.fdb("add", ifindex=end.index, lladdr=hardware, flags=_NTF_MASTER, state=_STATIC)

    def _bridge(self, name: str) -> int:
        with making("a bridge"):
            # Snooping would put the bridge's own questions on the links and into the counters.
            self._talk.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
            (index,) = self._talk.link_lookup(ifname=name)
            # Given, it stays: else each port that is plugged in may change it to its own, and with
            # a change of address the kernel forgets all neighbours.
            hardware = f"02:00:0a:4d:{index >> 8:02x}:{index & 0xFF:02x}"
            self._talk.link("set", index=index, address=hardware)
            End(self._talk, index).bring_up()
        return int(index)

    def _join(
        self, name: str, bridge: int, far_name: str, far_bridge: int, link: LinkSettings
    ) -> Cable:
        with making("a veth pair"):
            self._talk.link("add", ifname=name, kind="veth", peer={"ifname": far_name})
            (near,) = self._talk.link_lookup(ifname=name)
            (far,) = self._talk.link_lookup(ifname=far_name)
        cable = Cable(End(self._talk, near), End(self._talk, far))
        cable.shape(link, "add")
        with making("an interface"):
            for end, master in ((cable.near, bridge), (cable.far, far_bridge)):
                self._talk.link("set", index=end.index, master=master)
                end.bring_up()
        return cable


class Network:
    """Hosts and what lies between them. Ends, as all namespaces do, with its last process."""

    def __init__(self) -> None:
        with making("a network namespace"):
            _leave_the_machines_network()
            self.namespace = _namespace()  # where switches are
        self.talk = IPRoute()
        self.wiring: Wiring  # is given, once and first
        self._hosts: list[HostNamespace] = []

    def plug_in(self, station: Station) -> int:
        """A host, by the open file of its namespace."""
        with making("a network namespace"):
            unshare(CLONE_NEWNET)
            # These belong to where they are made.
            host = HostNamespace(_namespace(), IPRoute(), IoctlEthtool())
            setns(self.namespace, CLONE_NEWNET)
        self._hosts.append(host)
        self.wiring.plug_in(station, host)
        host.offload.close()
        return host.file

    def namespaces(self) -> set[int]:
        """The numbers by which /proc knows our namespaces."""
        files = [self.namespace, *(host.file for host in self._hosts)]
        return {os.fstat(file).st_ino for file in files}


def _leave_the_machines_network() -> None:
    """A new network namespace, and where that needs it a user namespace to be allowed to."""
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        # Everybody stays who they are: a program in the lab sees its user's own name and files.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _choose_cubic(talk: IPRoute, index: int, address: str) -> None:
    """Let TCP use Linux's usual congestion control, whatever this machine has as its default.

    BBR, the default of some, sizes its window by the shortest round trip it has seen, here 0.03 ms,
    and left 2 to 20 % of links unused that were busy in both directions. It is a setting of the
    route because /proc/sys may be read-only and cubic may be reserved for the machine itself.
    """
    with contextlib.suppress(NetlinkError):  # a kernel without it keeps its default
        talk.route(
            "replace",
            dst=str(NETWORK),
            oif=index,
            prefsrc=address,
            scope=_SCOPE_LINK,
            proto=_PROTO_KERNEL,
            metrics={"cc_algo": "cubic"},
        )
