"""The small functions that all kernels use: sums, exact arithmetic, bits of numbers."""

import triton
import triton.language as tl

KEEP = tl.constexpr(0)  # what an add kernel does to its output first: nothing,
ZERO = tl.constexpr(1)  # or makes it zero,
ADD = tl.constexpr(2)  # or adds another tensor to it


@triton.jit
def load_sum(x_ptr, r_ptr, at, mask, HAS_R: tl.constexpr):
    """x + r, zero outside the mask."""
    p = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_R:
        p = p + tl.load(r_ptr + at, mask=mask, other=0.0)
    return p


@triton.jit
def is_odd(p):
    """Whether a number is infinite or none."""
    return ~(tl.abs(p) < float("inf"))


@triton.jit
def note_odd(flag_ptr, p):
    """Set the flag if one of the numbers is odd."""
    # Every writer writes a one.
    tl.store(flag_ptr + tl.program_id(0) * 0, 1, mask=tl.sum(is_odd(p).to(tl.int32)) > 0)


@triton.jit
def divide(a, b):
    """a / b, rounded once, in the type of both.

    Triton's ``/`` of float32 is an approximation, and its `div_rn` takes tiny quotients for zero in
    some releases. A quotient of float64 has more than twice the digits, and one more: rounded to
    float32 it is the same as if rounded once.
    """
    return (a.to(tl.float64) / b.to(tl.float64)).to(a.dtype)


@triton.jit
def rint(v):
    """The nearest whole number, halves to even ones; for |v| < 2^22.

    Where the last place of a number is worth one, adding rounds. libdevice has a function for it,
    but the interpreter has none.
    """
    if v.dtype == tl.float32:
        found = (v + 12582912.0) - 12582912.0
    else:
        found = (v + 6755399441055744.0) - 6755399441055744.0
    return found


@triton.jit
def magnitude(p):
    """The bits of |p| as a signed integer: ordered like |p|, infinity and NaN at the top."""
    if p.dtype == tl.float32:
        found = p.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        found = p.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    return found


@triton.jit
def power_above(p):
    """The least power of two that is at least p, a normal number above zero."""
    if p.dtype == tl.float32:
        found = ((p.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF).to(tl.float32, bitcast=True)
    else:
        low = (1 << 52) - 1
        found = ((p.to(tl.int64, bitcast=True) + low) & ~low).to(tl.float64, bitcast=True)
    return found


@triton.jit
def from_bits(bits, like):
    """The float64 with these bits, in the type of `like`; broadcasts."""
    return tl.full((1,), bits, tl.int64).to(tl.float64, bitcast=True).to(like.dtype)


@triton.jit
def combine(out_ptr, plus_ptr, at, mask, values, weight, MODE: tl.constexpr):
    """out += weight * values, after keeping out, zeroing it or adding another tensor to it."""
    product = (values * from_bits(weight, values)).to(out_ptr.dtype.element_ty)
    if MODE == ZERO:
        found = product
    else:
        found = tl.load(out_ptr + at, mask=mask, other=0.0)
        if MODE == ADD:
            found = found + tl.load(plus_ptr + at, mask=mask, other=0.0)
        found = found + product
    tl.store(out_ptr + at, found, mask=mask)
