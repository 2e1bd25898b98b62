"""Writing down what was found, without atomics and in order.

Each program first counts what it finds. The running sums of these counts say where each of them
writes, in a second launch. So the result has the order of the elements, on every device.
"""

import triton
import triton.language as tl


@triton.jit
def write_found(ends_ptr, program, out_ptr, what, found):
    """Write those of a program's numbers that are marked, behind those of the programs before it.

    `ends` holds the running sums of all programs' counts.
    """
    begin = tl.load(ends_ptr + program - 1, mask=program > 0, other=0)
    place = begin + tl.cumsum(found.to(tl.int64), 0) - 1
    tl.store(out_ptr + place, what.to(out_ptr.dtype.element_ty), mask=found)
