"""All codes by their id. Ids are part of the wire format: never reuse one."""

from thinwire.frames.code import Code
from thinwire.frames.codes.affine import Affine
from thinwire.frames.codes.elias import Elias
from thinwire.frames.codes.non_finite import NonFinite
from thinwire.frames.codes.overlay import Overlay
from thinwire.frames.codes.pairs import Pairs
from thinwire.frames.codes.powers import Powers
from thinwire.frames.codes.raw import Narrow, Raw
from thinwire.frames.codes.scaled8 import Scaled8
from thinwire.frames.codes.seeded import Seeded
from thinwire.frames.codes.sparse import Sparse
from thinwire.frames.codes.uniform import Uniform
from thinwire.frames.codes.zipped import Zipped

__all__ = [
    "BY_ID",
    "Affine",
    "Elias",
    "Narrow",
    "NonFinite",
    "Overlay",
    "Pairs",
    "Powers",
    "Raw",
    "Scaled8",
    "Seeded",
    "Sparse",
    "Uniform",
    "Zipped",
]

BY_ID: dict[int, type[Code]] = {
    code.id: code
    for code in (
        NonFinite,
        Raw,
        Narrow,
        Scaled8,
        Sparse,
        Seeded,
        Uniform,
        Elias,
        Affine,
        Pairs,
        Powers,
        Overlay,
        Zipped,
    )
}
