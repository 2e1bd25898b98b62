"""The network itself: switches in one namespace, each host in its own, a shaped veth pair between.

Runs in the holder, which must have one thread: entering a namespace changes the thread that asks.
"""

import contextlib
import os
from dataclasses import dataclass

from pyroute2 import IPRoute, NetlinkError
from pyroute2.ethtool.ioctl import IoctlEthtool

from thinwire.lab.enter import CLONE_NEWNET, CLONE_NEWUSER, setns, unshare
from thinwire.lab.parts import Cable, End, making
from thinwire.lab.switches import Switches
from thinwire.lab.topology import INTERFACE, NETWORK, Link, Station

_SCOPE_LINK, _PROTO_KERNEL = 253, 2  # as the kernel makes it, so that it is replaced


@dataclass(frozen=True)
class Port:
    """Where a host is plugged in."""

    namespace: int  # an open file: what keeps the namespace alive
    cable: Cable  # to its switch


class Network:
    """Switches and what hangs on them. Ends, as all namespaces do, with its last process."""

    def __init__(self) -> None:
        with making("a network namespace"):
            _leave_the_machines_network()
            self._switch_namespace = _namespace()
        self._switch = IPRoute()
        self.ports: list[Port] = []

    def set_up(self, racks: int, inter: Link | None) -> None:
        """Make the switches, once and first."""
        self.switches = Switches(self._switch, racks, inter)

    def plug_in(self, station: Station) -> None:
        with making("a network namespace"):
            unshare(CLONE_NEWNET)
            namespace = _namespace()
            inside, offload = IPRoute(), IoctlEthtool()  # belong to where they are made
            setns(self._switch_namespace, CLONE_NEWNET)
        name = f"port{len(self.ports)}"
        with making("a veth pair"):
            peer = {"ifname": INTERFACE, "net_ns_fd": namespace}
            self._switch.link("add", ifname=name, kind="veth", peer=peer)
            (switch_end,) = self._switch.link_lookup(ifname=name)
            (host_end,) = inside.link_lookup(ifname=INTERFACE)
        cable = Cable(End(inside, host_end), End(self._switch, switch_end))
        cable.shape(station.link, "add")
        with making("an interface"):
            _send_packet_by_packet(offload)
            inside.addr("add", index=host_end, address=station.address, prefixlen=NETWORK.prefixlen)
            self.switches.attach(cable.far, station.rack)
            cable.near.bring_up()
            _choose_cubic(inside, host_end, station.address)
            inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")
            hardware = inside.get_links(host_end)[0].get_attr("IFLA_ADDRESS")
        self.switches.make_known(cable.far, station.rack, hardware, station.address)
        self.ports.append(Port(namespace, cable))

    def namespaces(self) -> set[int]:
        """The numbers by which /proc knows our namespaces."""
        files = [self._switch_namespace, *(port.namespace for port in self.ports)]
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
