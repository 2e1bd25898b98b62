"""The switches of a lab: a bridge for each rack, and the cables that join them."""

from pyroute2 import IPRoute

from thinwire.lab.parts import Cable, End, making
from thinwire.lab.topology import Link

_NTF_MASTER = 4  # the entry is the bridge's, not the port's own
_STATIC, _PERMANENT = 0x40, 0x80  # NUD_NOARP, NUD_PERMANENT


class Switches:
    """One switch a rack. Two are joined by one cable, more hang on a core by one each.

    Every switch is told where every host is, and answers for those of other racks when somebody
    asks for their hardware address. So no packet is ever flooded in search of its receiver, and a
    cable between racks carries only what one rack has for another.
    """

    def __init__(self, talk: IPRoute, racks: int, inter: Link | None) -> None:
        self._talk = talk
        self._racks = [self._bridge(f"rack{rack}") for rack in range(racks)]
        self._core: int | None = None
        self.uplinks: list[Cable] = []  # one a rack, seen from it
        if inter is None:
            return
        if racks == 2:
            # One token bucket on the way, as the rate says, and not two in a row.
            cable = self._join("up0", self._racks[0], "up1", self._racks[1], inter)
            self.uplinks = [cable, Cable(cable.far, cable.near)]
        else:
            self._core = self._bridge("core")
            self.uplinks = [
                self._join(f"up{rack}", bridge, f"core{rack}", self._core, inter)
                for rack, bridge in enumerate(self._racks)
            ]
        with making("a switch that answers for others (neigh_suppress)"):
            for uplink in self.uplinks:
                talk.brport("set", index=uplink.near.index, neigh_suppress=1)

    def attach(self, end: End, rack: int) -> None:
        """Plug a cable into a rack's switch."""
        self._talk.link("set", index=end.index, master=self._racks[rack])
        end.bring_up()

    def make_known(self, end: End, rack: int, hardware: str, address: str) -> None:
        """Tell all switches that this host is behind this end in this rack."""
        with making("an entry of a switch"):
            for other, bridge in enumerate(self._racks):
                self._enter(end if other == rack else self.uplinks[other].near, hardware)
                if self.uplinks:
                    self._talk.neigh(
                        "add", ifindex=bridge, dst=address, lladdr=hardware, state=_PERMANENT
                    )
            if self._core is not None:
                self._enter(self.uplinks[rack].far, hardware)

    def set_inter(self, link: Link) -> None:
        for uplink in self.uplinks:
            uplink.shape(link, "change")

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

    def _join(self, name: str, bridge: int, far_name: str, far_bridge: int, link: Link) -> Cable:
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
