"""All codes by their id. Ids are part of the wire format: never reuse one."""

from thinwire.wire.code import Code
from thinwire.wire.codes.affine import Affine
from thinwire.wire.codes.elias import Elias
from thinwire.wire.codes.non_finite import NonFinite
from thinwire.wire.codes.overlay import Overlay
from thinwire.wire.codes.pairs import Pairs
from thinwire.wire.codes.powers import Powers
from thinwire.wire.codes.raw import Narrow, Raw
from thinwire.wire.codes.scaled8 import Scaled8
from thinwire.wire.codes.seeded import Seeded
from thinwire.wire.codes.sparse import Sparse
from thinwire.wire.codes.uniform import Uniform
from thinwire.wire.codes.zipped import Zipped

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
