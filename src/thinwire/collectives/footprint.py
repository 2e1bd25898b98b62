"""What an exchange reads and writes: which two may be under way at the same time.

Addresses, not storages: gradients are often views of one flat tensor, and two pieces of it have
nothing in common.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Self

from torch import Tensor

Span = tuple[int, int]  # addresses of the first byte and of the one behind the last


class Footprint:
    """The memory of tensors, and objects that are told apart by what they are.

    Args:
        tensors: on one device; None for one that is not there.
        objects: others that an exchange works with.
    """

    def __init__(self, tensors: Iterable[Tensor | None], objects: Iterable[object] = ()) -> None:
        self._objects = {id(each) for each in objects}
        self._spans = _merged(span_of(each) for each in tensors if each is not None)

    def __or__(self, other: "Footprint") -> Self:
        both = type(self)(())
        both._objects = self._objects | other._objects
        both._spans = _merged([*self._spans, *other._spans])
        return both

    def meets(self, other: "Footprint") -> bool:
        """Whether the two have something in common."""
        if not self._objects.isdisjoint(other._objects):
            return True
        fewer, more = sorted((self._spans, other._spans), key=len)
        ends = [end for _, end in more]
        for begin, end in fewer:
            place = bisect_left(ends, begin + 1)  # the first that ends behind it
            if place < len(more) and more[place][0] < end:
                return True
        return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may have elements in common."""
    (begin, end), (other, last) = span_of(a), span_of(b)
    return a.device == b.device and max(begin, other) < min(end, last)


def span_of(tensor: Tensor) -> Span:
    """From the first to the last byte of its elements; strides are not looked at."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _merged(spans: Iterable[Span]) -> list[Span]:
    """In order, those that touch as one, without empty ones."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
