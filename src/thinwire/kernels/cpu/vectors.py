"""Comparing 64 elements at once, as vectors that LLVM cuts to what a processor has.

LLVM does not vectorise a loop that makes single bits of comparisons. Written as vectors it becomes
one instruction for 16 elements on AVX-512, two on AVX2, four on Neon: collecting what lies above a
bound takes half of the time that it takes with a byte per element.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WORD = 64  # elements that a word has bits for
_BYTES = 64  # of a vector


@intrinsic
def reaching(_, x, at, bound):
    """Bit i of a 64-bit word: whether the bits of |x[at + i]| are at least `bound`.

    There must be 64 elements from `at` on.
    """

    def generate(context, builder, signature, args):
        own, at, bound = args
        return _compare(context, builder, [(own, signature.args[0])], at, bound)

    return types.uint64(x, types.intp, bound), generate


@intrinsic
def sum_reaching(_, x, r, at, bound):
    """The same of |x[at + i] + r[at + i]|."""

    def generate(context, builder, signature, args):
        own, other, at, bound = args
        arrays = [(own, signature.args[0]), (other, signature.args[1])]
        return _compare(context, builder, arrays, at, bound)

    return types.uint64(x, r, types.intp, bound), generate


def _compare(context, builder, arrays, at, bound):
    width = arrays[0][1].dtype.bitwidth
    lanes = 8 * _BYTES // width
    real = ir.FloatType() if width == 32 else ir.DoubleType()
    floats, whole = ir.VectorType(real, lanes), ir.VectorType(bound.type, lanes)
    int32, word = ir.IntType(32), ir.Constant(ir.IntType(64), 0)
    pointers = [context.make_array(kind)(context, builder, array).data for array, kind in arrays]

    def load(pointer, first):
        place = builder.gep(pointer, [builder.add(at, ir.Constant(at.type, first))])
        # Aligned like an element, not like a vector.
        return builder.load(builder.bitcast(place, floats.as_pointer()), align=width // 8)

    bounds = builder.insert_element(ir.Constant(whole, ir.Undefined), bound, int32(0))
    every = ir.Constant(ir.VectorType(int32, lanes), [0] * lanes)
    bounds = builder.shuffle_vector(bounds, ir.Constant(whole, ir.Undefined), every)
    unsigned = ir.Constant(whole, [(1 << (width - 1)) - 1] * lanes)
    for first in range(0, WORD, lanes):
        p = load(pointers[0], first)
        for pointer in pointers[1:]:
            p = builder.fadd(p, load(pointer, first))
        sizes = builder.and_(builder.bitcast(p, whole), unsigned)
        bits = builder.bitcast(builder.icmp_signed(">=", sizes, bounds), ir.IntType(lanes))
        bits = builder.zext(bits, word.type)
        word = builder.or_(word, builder.shl(bits, ir.Constant(word.type, first)))
    return word
