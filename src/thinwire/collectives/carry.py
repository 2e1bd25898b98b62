"""The flat collectives by name: which carries a work, and carrying it."""

import torch.distributed as dist

from thinwire.collectives.choose import choose
from thinwire.collectives.gather import gather
from thinwire.collectives.joint import joint
from thinwire.collectives.memory import Load
from thinwire.collectives.sparse import sparse
from thinwire.collectives.summable import is_dense, summable
from thinwire.collectives.talk import Talk
from thinwire.collectives.twoshot import twoshot
from thinwire.collectives.work import Work
from thinwire.compressors import JointCompressor

_PLAIN = {"gather": gather, "twoshot": twoshot, "sparse": sparse, "joint": joint}


def chosen(work: Work, size: int, share: float = 1.0) -> str:
    """The collective for a share of a work among `size` ranks."""
    mixed = len({part.x.dtype for part in work.parts}) > 1
    message = (
        0.0
        if isinstance(work.compressor, JointCompressor)
        else Load.of(work.parts, work.compressor).frame
    )
    return choose(work.compressor, share * message, size, mixed)


def kind(collective: str, work: Work) -> str:
    """What the memory guard calls it."""
    return "dense" if collective == "summable" and is_dense(work) else collective


def carry(collective: str, talk: Talk, work: Work, operation: str = "SUM") -> None:
    """Exchange a work; `operation` is for 'summable', an average is a weighted sum."""
    if collective == "summable":
        summable(talk, work, getattr(dist.ReduceOp, operation if operation != "AVG" else "SUM"))
    else:
        _PLAIN[collective](talk, work)
