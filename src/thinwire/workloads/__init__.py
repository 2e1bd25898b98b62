"""Training tasks with real data that ship with thinwire, to see what compression costs.

`workload(spec)` gives one; `Workload` says what it can do. Nothing here talks to other ranks.
"""

from thinwire.spec import Kind
from thinwire.workloads.images import Images
from thinwire.workloads.text import Text
from thinwire.workloads.workload import Batch, Workload

__all__ = ["WORKLOADS", "Batch", "Images", "Text", "Workload", "workload"]

_KIND: Kind[Workload] = Kind("workload", "workloads", Workload, "images")
_KIND.add(Images, Text)
WORKLOADS = _KIND.classes


def workload(spec: str) -> Workload:
    """The workload that a spec names, such as ``images`` or ``images:batch_size=64,hidden=512``."""
    return _KIND.parse(spec)
