"""Where a comparison runs: in a lab, or on this machine's loopback if there can be none."""

from collections.abc import Sequence

from thinwire.compare.settings import ComparisonSettings
from thinwire.lab import Cluster, Lab, Loopback


def cluster_of(settings: ComparisonSettings, links: Sequence[str], projected: bool) -> Cluster:
    """Hosts with these links, or without where times are projected; to be opened by `with`."""
    if projected:
        return Loopback(settings.hosts)
    return Lab(settings.hosts, list(links), racks=settings.racks, inter=settings.inter)
