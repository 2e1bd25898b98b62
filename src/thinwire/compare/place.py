"""Where a comparison runs: in a lab, or on this machine's loopback if there can be none."""

from collections.abc import Sequence

from thinwire.compare.settings import ComparisonSettings
from thinwire.lab import Cluster, Lab, Loopback, parse_link


def cluster_of(settings: ComparisonSettings, links: Sequence[str], projected: bool) -> Cluster:
    """Hosts with these links, or without where times are projected; to be opened by `with`."""
    return Loopback(settings.hosts) if projected else lab_of(settings, links)


def lab_of(settings: ComparisonSettings, links: Sequence[str]) -> Lab:
    """The lab that is asked for, with these links. Raises ValueError for what can be none."""
    return Lab(
        settings.hosts,
        list(links),
        delay=settings.delay,
        jitter=settings.jitter,
        loss=settings.loss,
        racks=settings.racks,
        inter=settings.inter,
    )


def rate_of(link: str) -> int:
    """Bits per second."""
    return parse_link(link).rate_bits
