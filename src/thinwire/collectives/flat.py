"""The flat algorithms by the names of their collectives, and which of them suits a reduction."""

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.choose import choose, settled_by
from thinwire.collectives.gather import Gather
from thinwire.collectives.joint import JointSearch
from thinwire.collectives.memory import Load
from thinwire.collectives.reduction import Reduction
from thinwire.collectives.scatter import SCATTER, Scatter
from thinwire.collectives.sparse import SparseRegions
from thinwire.collectives.summable import BackendSum, UncompressedSum
from thinwire.collectives.twoshot import TwoShot

_ALGORITHMS: dict[str, type[Algorithm]] = {
    "gather": Gather,
    "summable": BackendSum,
    "twoshot": TwoShot,
    "sparse": SparseRegions,
    "joint": JointSearch,
    SCATTER: Scatter,
}


def collective_for(reduction: Reduction, size: int, share: float = 1.0) -> str:
    """The collective for a share of each tensor among `size` ranks."""
    parts = reduction.parts
    compressors = [part.compressor for part in parts]
    settled = settled_by(compressors, size)
    if settled is not None:
        return settled
    mixed = len({part.x.dtype for part in parts}) > 1
    return choose(compressors, share * Load.of(parts).frame, size, mixed)


def algorithm_for(collective: str, reduction: Reduction, rank: int, size: int) -> Algorithm:
    """The algorithm of a flat collective, ready to be prepared."""
    if collective == "summable" and reduction.uncompressed:
        return UncompressedSum(reduction, rank, size)
    return _ALGORITHMS[collective](reduction, rank, size)
