"""The network itself: a bridge in one namespace, each host in its own, a shaped veth pair between.

Runs in the holder, which must have one thread: entering a namespace changes the thread that asks.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from pyroute2 import IPRoute, NetlinkError
from pyroute2.ethtool.ioctl import EthtoolError, IoctlEthtool

from thinwire.lab.enter import CLONE_NEWNET, CLONE_NEWUSER, setns, unshare
from thinwire.lab.topology import INTERFACE, NETWORK, Link, Station

_ROOT_HANDLE = 0x10000
_SCOPE_LINK, _PROTO_KERNEL = 253, 2  # as the kernel makes it, so that it is replaced
_NO_IPV6_ADDRESS = {
    "attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})],
}


class BuildError(Exception):
    """The system refuses a part of the network; the message says which and why."""


@dataclass(frozen=True)
class Port:
    """Where a host is plugged in."""

    namespace: int  # an open file: what keeps the namespace alive
    inside: IPRoute  # talks to the kernel about the host's namespace
    host_end: int  # interface numbers
    switch_end: int


class Network:
    """One switch and what hangs on it. Ends, as all namespaces do, with its last process."""

    def __init__(self) -> None:
        with _making("a network namespace"):
            _leave_the_machines_network()
            self._switch_namespace = _namespace()
        self._switch = IPRoute()
        self.ports: list[Port] = []
        with _making("a bridge"):
            # Snooping would put the bridge's own questions on the links and into the counters.
            self._switch.link("add", ifname="switch0", kind="bridge", br_mcast_snooping=0)
            (self._bridge,) = self._switch.link_lookup(ifname="switch0")
            _bring_up(self._switch, self._bridge)

    def plug_in(self, station: Station) -> None:
        with _making("a network namespace"):
            unshare(CLONE_NEWNET)
            namespace = _namespace()
            inside, offload = IPRoute(), IoctlEthtool()  # belong to where they are made
            setns(self._switch_namespace, CLONE_NEWNET)
        name = f"port{len(self.ports)}"
        with _making("a veth pair"):
            peer = {"ifname": INTERFACE, "net_ns_fd": namespace}
            self._switch.link("add", ifname=name, kind="veth", peer=peer)
            (switch_end,) = self._switch.link_lookup(ifname=name)
            (host_end,) = inside.link_lookup(ifname=INTERFACE)
        port = Port(namespace, inside, host_end, switch_end)
        with _making("a token bucket (tbf)"):
            self._shape(port, station.link, "add")
        with _making("an interface"):
            _send_packet_by_packet(offload)
            inside.addr("add", index=host_end, address=station.address, prefixlen=NETWORK.prefixlen)
            self._switch.link("set", index=switch_end, master=self._bridge)
            _bring_up(self._switch, switch_end)
            _bring_up(inside, host_end)
            _choose_cubic(inside, host_end, station.address)
            inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")
        self.ports.append(port)

    def set_link(self, host: int, link: Link) -> None:
        with _making("a token bucket (tbf)"):
            self._shape(self.ports[host], link, "change")

    def counters(self, host: int) -> dict[str, int]:
        port = self.ports[host]
        (interface,) = port.inside.get_links(port.host_end)
        stats = interface.get_attr("IFLA_STATS64")
        ends = ((port.inside, port.host_end), (self._switch, port.switch_end))
        return {
            "sent_bytes": stats["tx_bytes"],
            "sent_packets": stats["tx_packets"],
            "received_bytes": stats["rx_bytes"],
            "received_packets": stats["rx_packets"],
            "dropped_packets": sum(_dropped(talk, index) for talk, index in ends),
        }

    def namespaces(self) -> set[int]:
        """The numbers by which /proc knows our namespaces."""
        files = [self._switch_namespace, *(port.namespace for port in self.ports)]
        return {os.fstat(file).st_ino for file in files}

    def _shape(self, port: Port, link: Link, verb: str) -> None:
        """Limit what leaves either end, so both directions, each on its own."""
        for talk, index in ((port.inside, port.host_end), (self._switch, port.switch_end)):
            talk.tc(
                verb,
                kind="tbf",
                index=index,
                handle=_ROOT_HANDLE,
                rate=link.rate_bits // 8,
                burst=link.burst_bytes,
                limit=link.queue_bytes,
            )


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


def _bring_up(talk: IPRoute, index: int) -> None:
    with contextlib.suppress(NetlinkError):  # a kernel without IPv6 has nothing to turn off
        # Address discovery would put packets of its own on the links.
        talk.link("set", index=index, IFLA_AF_SPEC=_NO_IPV6_ADDRESS)
    talk.link("set", index=index, state="up")


def _send_packet_by_packet(offload: IoctlEthtool) -> None:
    """Let packets leave as on a cable and be counted so, not 40 at once under one header."""
    offload.change_ifname(INTERFACE)
    features = offload.get_features()
    for name in features.keys():  # noqa: SIM118, it is no dict
        if name.startswith("tx-tcp") and name.endswith("segmentation"):
            features[name] = False
    offload.set_features(features)
    offload.close()


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


def _dropped(talk: IPRoute, index: int) -> int:
    (bucket,) = talk.get_qdiscs(index=index)
    return int(bucket.get_attr("TCA_STATS")["drop"])


@contextlib.contextmanager
def _making(what: str) -> Iterator[None]:
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
