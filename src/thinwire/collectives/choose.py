"""Which collective carries a reduction: `auto` decides by the bytes that each would move."""

from collections.abc import Sequence

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


def suits_all(collective: str, compressors: Sequence[Compressor]) -> str | None:
    """None, or why several compressors cannot share an exchange."""
    joint = [each for each in compressors if isinstance(each, JointCompressor)]
    if joint:
        for each in compressors:
            uncompressed = each.lossless and each.summable
            if not uncompressed and not isinstance(each, JointCompressor):
                return (
                    f"{joint[0]} and {each} cannot share an exchange: the one is found by all "
                    "ranks together, the other by each by itself. Only uncompressed tensors "
                    "('none') go with the one; make two calls"
                )
    elif collective == "sparse" and not alike(compressors):
        words = ", ".join(dict.fromkeys(map(str, compressors)))
        return (
            f"{words} cannot share an exchange through 'sparse': they write values in different "
            "ways. Use collective='auto', or make a call for each"
        )
    return None


def alike(compressors: Sequence[Compressor]) -> bool:
    """Whether all send single elements, written in the same way."""
    first = compressors[0]
    return isinstance(first, SparseCompressor) and all(
        each is first or (isinstance(each, SparseCompressor) and first.encloses_like(each))
        for each in compressors
    )


def settled_by(compressors: Sequence[Compressor], size: int) -> str | None:
    """The collective that follows from compressors and ranks alone, whatever the bytes, if one
    does."""
    if any(isinstance(each, JointCompressor) for each in compressors):
        return "joint"
    if all(each.summable for each in compressors):
        return "summable"
    return "gather" if moved("twoshot", 1.0, size) > TWICE * moved("gather", 1.0, size) else None


def choose(
    compressors: Sequence[Compressor], message: float, size: int, mixed: bool = False
) -> str:
    """The collective for a message of about so many bytes, of tensors with these compressors.

    What ranks find together goes through sums, and uncompressed tensors with it. If all payloads
    add up they go through the backend's all-reduce, which nothing beats. Otherwise gather, which
    compresses once, unless what compresses twice at most halves the bytes: that is from four ranks
    on, and not for messages so small that another meeting would cost more than it saves.
    Tensors of mixed types cannot go through sparse, nor those whose values are written in
    different ways.
    """
    settled = settled_by(compressors, size)
    if settled is not None:
        return settled
    rival = "sparse" if not mixed and alike(compressors) else "twoshot"
    gathered, other = moved("gather", message, size), moved(rival, message, size)
    return "gather" if gathered - other < SMALL else rival


def rides_along(num_bytes: float, size: int) -> bool:
    """Whether tensors that the backend could sum are better sent with the payloads of others.

    Through a gather more bytes leave each rank than through an all-reduce, but the exchange of
    their own is saved, with its meeting.
    """
    return moved("gather", num_bytes, size) <= SMALL
