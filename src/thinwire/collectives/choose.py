"""Which collective carries a reduction: `auto` decides by the bytes that each would move."""

from thinwire.compressors import Compressor, JointCompressor, SparseCompressor

COLLECTIVES = ("auto", "gather", "summable", "twoshot", "sparse", "joint", "hierarchical")
SMALL = 1 << 16  # bytes that gather may move more: less than what another meeting costs
TWICE = 0.5  # what compresses twice must move at most this share of gather's bytes


def moved(collective: str, message: float, size: int) -> float:
    """Bytes that leave each of `size` ranks when one rank's message has `message` bytes."""
    return message * (size - 1) * (1.0 if collective == "gather" else 2.0 / size)


def suits(collective: str, compressor: Compressor) -> str | None:
    """None, or why a compressor cannot be used with a collective."""
    if isinstance(compressor, JointCompressor) != (collective == "joint"):
        return "'joint' carries what all ranks find together (PowerSGD, ARCTopK), and only that"
    if collective == "summable" and not compressor.summable:
        return (
            "its payloads do not add up (those of NoCompression, Cast to 16 bits and shared "
            "RandomK do)"
        )
    if collective == "sparse" and not isinstance(compressor, SparseCompressor):
        return "it does not send single elements (TopK, Threshold, RandomK and chains of them do)"
    return None


def choose(compressor: Compressor, message: float, size: int, mixed: bool = False) -> str:
    """The collective for a message of about so many bytes.

    Payloads that add up go through the backend's all-reduce, which nothing beats. Otherwise gather,
    which compresses once, unless what compresses twice at most halves the bytes: that is from four
    ranks on, and not for messages so small that another meeting would cost more than it saves.
    Tensors of mixed types cannot go through sparse.
    """
    if isinstance(compressor, JointCompressor):
        return "joint"
    if compressor.summable:
        return "summable"
    rival = "sparse" if isinstance(compressor, SparseCompressor) and not mixed else "twoshot"
    gathered, other = moved("gather", message, size), moved(rival, message, size)
    if other > TWICE * gathered or gathered - other < SMALL:
        return "gather"
    return rival
