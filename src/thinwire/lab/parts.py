"""The parts a network is built of: what is asked of the kernel about cables and interfaces."""

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass

from pyroute2 import IPRoute, NetlinkError
from pyroute2.ethtool.ioctl import EthtoolError

from thinwire.lab.topology import Link

_ROOT_HANDLE = 0x10000
_NO_IPV6_ADDRESS = {
    "attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})],
}


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

    def dropped(self) -> int:
        (bucket,) = self.talk.get_qdiscs(index=self.index)
        return int(bucket.get_attr("TCA_STATS")["drop"])


@dataclass(frozen=True)
class Cable:
    """A veth pair, seen from its near end."""

    near: End
    far: End

    def shape(self, link: Link, verb: str) -> None:
        """Limit what leaves either end, so both directions, each on its own."""
        with making("a token bucket (tbf)"):
            for end in (self.near, self.far):
                end.talk.tc(
                    verb,
                    kind="tbf",
                    index=end.index,
                    handle=_ROOT_HANDLE,
                    rate=link.rate_bits // 8,
                    burst=link.burst_bytes,
                    limit=link.queue_bytes,
                )

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
