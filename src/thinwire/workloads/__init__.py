"""Training tasks with real data that ship with thinwire, to see what compression costs.

`workload(name)` gives one; `Workload` says what it can do. Nothing here talks to other ranks.
"""

from thinwire.workloads.images import Images
from thinwire.workloads.text import Text
from thinwire.workloads.workload import Batch, Workload

__all__ = ["WORKLOADS", "Batch", "Images", "Text", "Workload", "workload"]

WORKLOADS: dict[str, type[Workload]] = {kind.name: kind for kind in (Images, Text)}


def workload(name: str) -> Workload:
    """The workload of that name, with its default settings."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}, known: {', '.join(sorted(WORKLOADS))}")
    return WORKLOADS[name]()
