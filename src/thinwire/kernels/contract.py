"""What every implementation of a kernel must give: the same as the reference, bit for bit.

`small_calls` makes calls like a given one on small made-up tensors, with which an implementation
can be compared with the reference at any time: when a kernel is used for the first time, or for all
kernels by `thinwire selftest`, which takes its calls from `every_call`.

Where a kernel adds up many numbers, the numbers are multiples of 2^-10 below one: their sums and
those of their squares are exact in float64, in any order.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.key import Key
from thinwire.kernels.reference.sparse import index_dtype

KEY = Key(seed=0x0123456789ABCDEF, step=3, tensor=5)
ODD = (float("inf"), float("nan"))


class KernelCall(NamedTuple):
    """A kernel and what it is called with."""

    name: str
    arguments: tuple[Any, ...]
    settings: dict[str, Any]


def difference(call: KernelCall, kernel: Callable[..., Any]) -> str | None:
    """In what a kernel differs from the reference, in words; None if it does not."""
    wanted = _outcome(getattr(reference, call.name), call)
    found = _outcome(kernel, call)
    if len(wanted) != len(found):
        return f"{len(found)} results instead of {len(wanted)}"
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        wrong = _compare(one, other)
        if wrong:
            return f"{wrong} (result {number + 1} of {len(wanted)})"
    return None


def _outcome(kernel: Callable[..., Any], call: KernelCall) -> list[Any]:
    """What a call returns and what it leaves in its arguments."""
    arguments, settings = _copy(call.arguments), _copy(call.settings)
    result = kernel(*arguments, **settings)
    return _flat([result, arguments, settings])


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(each) for each in value)
    return value


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [one for each in value for one in _flat(each)]
    return [value]


def _compare(wanted: Any, found: Any) -> str | None:
    if isinstance(wanted, float) and isinstance(found, float):
        same = struct.pack("<d", wanted) == struct.pack("<d", found)
        return None if same else f"{found!r} instead of {wanted!r}"
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        same = type(wanted) is type(found) and wanted == found
        return None if same else f"{_short(found)} instead of {_short(wanted)}"
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        return f"{_short(found)} instead of {_short(wanted)}"
    other = _bits(wanted) != _bits(found)
    if not bool(other.any()):
        return None
    width = wanted.element_size()
    first = int(torch.nonzero(other)[0]) // width
    count = int(other.view(-1, width).any(1).sum())
    values = [each.flatten()[first].item() for each in (found, wanted)]
    return (
        f"{count} of {wanted.numel()} elements differ, the first at {first}: "
        f"{values[0]!r} instead of {values[1]!r}"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)[:80]


# Made-up tensors. All come from random words, so that they are the same on every device.


def numbers(n: int, like: Tensor | torch.dtype, device: torch.device, salt: int = 0) -> Tensor:
    """Numbers in (-1, 1) of many magnitudes, every bit of them in use."""
    dtype = like.dtype if isinstance(like, Tensor) else like
    words = reference.random_words(2 * n, KEY._replace(tensor=salt), device).double()
    v = (words[:n] + words[n:] * 2.0**-32) * 2.0**-31 - 1
    return (v * v * v).to(dtype)


def multiples(n: int, like: Tensor, salt: int = 0) -> Tensor:
    """Multiples of 2^-10 in (-1/2, 1/2); every eighth is 1 for salt 0 and otherwise 0."""
    words = reference.random_words(n, KEY._replace(tensor=salt), like.device)
    v = ((words % 1001) - 500).double() / 1024
    v[::8] = 0.0 if salt else 1.0
    return v.to(like.dtype)


def _bytes(n: int, device: torch.device) -> Tensor:
    return (reference.random_words(n, KEY, device) & 255).to(torch.uint8)


def _positions(count: int, device: torch.device, most: int = 40) -> tuple[Tensor, int]:
    """(ascending positions, the number of elements they lie in)."""
    steps = reference.random_words(count, KEY, device) % most + 1
    steps[count // 2 :: 97] += 500
    at = steps.cumsum(0)
    n = int(at[-1]) + 3 if count else 3
    return at.to(index_dtype(n)), n


# Calls like a given one. Each function gets the arguments of that.

Small = Callable[..., Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]
_SMALL: dict[str, Small] = {}


def _small(*names: str) -> Callable[[Small], Small]:
    def remember(function: Small) -> Small:
        _SMALL.update(dict.fromkeys(names, function))
        return function

    return remember


def small_calls(call: KernelCall) -> Iterator[KernelCall]:
    """Calls of the same kernel for the same types and settings, on small tensors."""
    for arguments, settings in _SMALL[call.name](*call.arguments, **call.settings):
        yield KernelCall(call.name, arguments, settings)


KERNELS_WITHOUT_A_CONTRACT = frozenset({"scatter_mean_bytes"})  # says what memory it takes


def _length(block: int | None) -> int:
    """Two blocks and a part, and more than a program takes."""
    return 5003 if not block else max(2 * block + block // 2 + 3, 2500)


def _with_odd(x: Tensor, r: Tensor | None, arguments: tuple[Any, ...] = (), **settings: Any) -> Any:
    """The call itself, and the same with an infinity and with NaN."""
    yield (x, r, *arguments), settings
    for place, value in enumerate(ODD):
        odd = x.clone()
        odd[-1 - place] = value
        yield (odd, r, *arguments), settings


@_small("encode_uniform", "encode_affine", "encode_pairs", "encode_signed_pairs", "encode_powers")
def _encode(x: Tensor, r: Tensor | None, **settings: Any) -> Any:
    n = _length(settings.get("block"))
    sums = settings.get("rule") == "l2" or not {"rule", "width"} & settings.keys()
    if settings.get("rule") == "l2" and x.dtype == torch.float64:
        # MKL, by which torch takes roots of float64 on CPUs, does not always round them well. This
        # one is exact: 1 + 0.75^2 = 1.25^2.
        own, other = torch.zeros_like(multiples(n, x)), multiples(n, x, 1) * 0
        own[:: settings["block"]], own[1 :: settings["block"]] = 1.0, -0.75
    elif sums and "top" not in settings:
        own, other = multiples(n, x), multiples(n, x, 1)
    else:
        own, other = numbers(n, x, x.device), numbers(n, x, x.device, 1)
    given = settings.get("rule") == "given" or settings.get("extent") or "top" in settings
    if "scale" in settings:
        settings["scale"] = 0.3
    if settings.get("extent"):
        settings["extent"] = (-2.0, 2.0)
    if "top" in settings:
        settings["top"] = 1
    if settings.get("key"):
        settings["key"] = KEY
    other_or_none = None if r is None else other
    calls = _with_odd(own, other_or_none, **settings)
    yield next(calls)
    if not given:
        yield from calls


def _started(n: int, out: Tensor, plus: Tensor | None, settings: dict[str, Any]) -> Any:
    settings["weight"] = 0.3
    if plus is not None:
        settings["plus"] = numbers(n, plus, out.device, 2)
    return numbers(n, out, out.device)


@_small("add_uniform")
def _add_uniform(
    out: Tensor, packed: Tensor, scales: Tensor, plus: Tensor | None = None, **settings: Any
) -> Any:
    block, width = settings["block"], settings["width"]
    n = _length(block)
    out = _started(n, out, plus, settings)
    rows = -(-n // block) if block else 1
    raw = _bytes(-(-n // 5) if width == 0 else -(-n * width // 8), out.device)
    yield (out, raw, numbers(rows, scales, out.device, 3)), settings


@_small("add_affine")
def _add_affine(
    out: Tensor,
    packed: Tensor,
    lows: Tensor,
    scales: Tensor,
    plus: Tensor | None = None,
    **settings: Any,
) -> Any:
    block, width = settings["block"], settings["width"]
    n = _length(block)
    out = _started(n, out, plus, settings)
    rows = -(-n // block) if block else 1
    numbers_of_blocks = (numbers(rows, scales, out.device, salt) for salt in (3, 4))
    yield (out, _bytes(-(-n * width // 8), out.device), *numbers_of_blocks), settings


@_small("add_pairs", "add_signed_pairs")
def _add_pairs(
    out: Tensor, packed: Tensor, pairs: Tensor, plus: Tensor | None = None, **settings: Any
) -> Any:
    block = settings["block"]
    n = _length(block)
    out = _started(n, out, plus, settings)
    rows = -(-n // block) if block else 1
    yield (
        (out, _bytes(n, out.device), numbers(2 * rows, pairs, out.device, 3).view(-1, 2)),
        settings,
    )


@_small("add_powers")
def _add_powers(
    out: Tensor, codes: Tensor, table: Tensor, plus: Tensor | None = None, **settings: Any
) -> Any:
    n = _length(None)
    out = _started(n, out, plus, settings)
    yield (out, _bytes(n, out.device), numbers(256, table, out.device, 3)), settings


@_small("all_finite", "extent")
def _over_all(x: Tensor, r: Tensor | None) -> Any:
    n = _length(None)
    other = None if r is None else numbers(n, r, x.device, 1)
    yield from _with_odd(numbers(n, x, x.device), other)


@_small("moments")
def _moments(x: Tensor, r: Tensor | None, unit: float) -> Any:
    n = 1 << 12  # so that the mean is exact
    yield (multiples(n, x), None if r is None else multiples(n, r, 1), 0.5), {}


@_small("top_k")
def _top_k(x: Tensor, r: Tensor | None, k: int) -> Any:
    n = 20_003
    share = 1 / 3 if 3 * k > x.numel() else 0.01
    other = None if r is None else numbers(n, r, x.device, 1)
    yield from _with_odd(numbers(n, x, x.device), other, (int(n * share),))
    # Many alike: ties go to the lower position.
    yield (multiples(n, x), None if r is None else multiples(n, r, 1), int(n * share)), {}


@_small("chunk_top_k")
def _chunk_top_k(x: Tensor, r: Tensor | None, chunk: int, k: int, last: int) -> Any:
    n = _length(chunk)
    counts = chunk, min(k, chunk), min(max(last, 1), n % chunk)
    other = None if r is None else numbers(n, r, x.device, 1)
    yield from _with_odd(numbers(n, x, x.device), other, counts)
    yield (multiples(n, x), None if r is None else multiples(n, r, 1), *counts), {}


@_small("above")
def _above(x: Tensor, r: Tensor | None, value: float) -> Any:
    n = _length(None)
    other = None if r is None else numbers(n, r, x.device, 1)
    yield from _with_odd(numbers(n, x, x.device), other, (0.5,))


@_small("take")
def _take(x: Tensor, r: Tensor | None, positions: Tensor) -> Any:
    at, n = _positions(300, x.device)
    other = None if r is None else numbers(n, r, x.device, 1)
    yield from _with_odd(numbers(n, x, x.device), other, (at.to(positions.dtype),))


@_small("scatter_add")
def _scatter_add(
    out: Tensor, positions: Tensor, values: Tensor, plus: Tensor | None = None, **settings: Any
) -> Any:
    at, n = _positions(300, out.device)
    out = _started(n, out, plus, settings)
    yield (out, at.to(positions.dtype), numbers(300, values, out.device, 3)), settings


def _items(items: Any, out: Tensor) -> Any:
    """Three that overlap, of the types of the first."""
    at, n = _positions(300, out.device)
    some = [at[::2], at, at[1::3]]
    dtypes = (items[0][0].dtype, items[0][1].dtype) if items else (at.dtype, out.dtype)
    found = [
        (each.to(dtypes[0]), numbers(each.numel(), dtypes[1], out.device, 3 + i))
        for i, each in enumerate(some)
    ]
    return numbers(n, out, out.device), found


@_small("scatter_add_many")
def _scatter_add_many(out: Tensor, items: Any, weight: float) -> Any:
    yield (*_items(items, out), 0.3), {}


@_small("scatter_mean")
def _scatter_mean(out: Tensor, items: Any) -> Any:
    yield _items(items, out), {}


@_small("random_words")
def _random_words(count: int, key: Key, device: torch.device | None = None) -> Any:
    yield (2500, KEY, device), {}


@_small("random_positions")
def _random_positions(n: int, k: int, key: Key, device: torch.device | None = None) -> Any:
    yield (3000, 1000, KEY, device), {}


@_small("bernoulli_positions")
def _bernoulli(n: int, p: float, key: Key, device: torch.device | None = None) -> Any:
    yield (5003, 0.1, KEY, device), {}


@_small("round_to_bfloat16")
def _round(x: Tensor, out: Tensor, key: Key) -> Any:
    own = numbers(_length(None), x, x.device)
    own[:4] = own.new_tensor([torch.inf, -torch.inf, torch.nan, 3.4028235e38])
    yield (own, torch.zeros_like(own, dtype=torch.bfloat16), KEY), {}


@_small("checksum")
def _checksum(data: Tensor) -> Any:
    for n in (0, 8, 1003, 8 * 2500):
        yield (_bytes(n, data.device),), {}


@_small("rice_parameter")
def _rice_parameter(positions: Tensor, guess: int) -> Any:
    at, _ = _positions(3000, positions.device)
    for first in (0, 4, 30):
        yield (at.to(positions.dtype), first), {}


@_small("rice_encode")
def _rice_encode(positions: Tensor, parameter: int, unary_words: int) -> Any:
    at, _ = _positions(3000, positions.device)
    for wanted in {0, 3, 7}:
        _, words = _rice_words(at, wanted)
        yield (at.to(positions.dtype), wanted, words), {}


def _rice_words(at: Tensor, parameter: int) -> tuple[int, int]:
    gaps = torch.diff(at.long(), prepend=at.new_full((1,), -1).long()) - 1
    quotients = int((gaps >> parameter).sum())
    return quotients, -(-(quotients + at.numel()) // 64)


@_small("rice_decode")
def _rice_decode(words: Tensor, count: int, parameter: int, unary_words: int, n: int) -> Any:
    at, size = _positions(3000, words.device)
    for wanted in {0, 3, 7}:
        _, unary = _rice_words(at, wanted)
        coded = reference.rice_encode(at, wanted, unary)
        for number, length in ((3000, size), (2999, size), (3001, size), (3000, size - 3)):
            yield (coded, number, wanted, unary, length), {}


@_small("bitmap_encode")
def _bitmap_encode(positions: Tensor, n: int) -> Any:
    at, size = _positions(3000, positions.device, most=4)
    yield (at.to(positions.dtype), size), {}


@_small("bitmap_decode")
def _bitmap_decode(words: Tensor, count: int, n: int) -> Any:
    at, size = _positions(3000, words.device, most=4)
    coded = reference.bitmap_encode(at, size)
    for number, length in ((3000, size), (2999, size), (3001, size), (3000, size - 3)):
        yield (coded, number, length), {}


def _levels(limit: int, device: torch.device) -> Tensor:
    words = reference.random_words(5003, KEY, device)
    return (words % (2 * limit + 1)).to(torch.uint8)


@_small("elias_encode")
def _elias_encode(levels: Tensor, limit: int) -> Any:
    yield (_levels(limit, levels.device), limit), {}


@_small("elias_decode")
def _elias_decode(words: Tensor, unary_words: int, count: int, limit: int) -> Any:
    unary, coded = reference.elias_encode(_levels(limit, words.device), limit)
    for number, most in ((5003, limit), (5002, limit), (5004, limit), (5003, max(1, limit // 2))):
        yield (coded, unary, number, most), {}


# The whole contract.


def every_call(
    dtype: torch.dtype, device: torch.device, name: str | None = None
) -> Iterator[tuple[str, KernelCall]]:
    """All kernels, or one of them, with all settings worth trying: a label, and a call on small
    tensors."""
    for label, call in _prototypes(dtype, device):
        if name in (None, call.name):
            for each in small_calls(call):
                yield label, each


def _prototypes(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, KernelCall]]:
    """Calls that say what is tried; their tensors are of no length."""
    x = torch.empty(0, dtype=dtype, device=device)
    at, raw = x.to(torch.int32), x.to(torch.uint8)
    words = x.to(torch.int64)
    residuals = (("", None), (" + r", x))
    settings: dict[str, Any]
    starts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}), (" fresh", {"fresh": True}), (" plus", {"plus": x}),
    )  # fmt: skip
    for width, limit in ((8, 127), (4, 7), (2, 1), (3, 3)):
        for block, rule in ((256, "max"), (24, "l2"), (256, "power"), (1 << 13, "max")):
            settings = {"limit": limit, "width": width, "block": block, "rule": rule}
            for more, r in residuals:
                label = f"{width} bits, block {block}, {rule}"
                yield label + more, KernelCall("encode_uniform", (x, r), settings)
            yield (
                f"{label}, random",
                KernelCall("encode_uniform", (x, None), {**settings, "key": KEY}),
            )
        for length in (256, None):
            for more, start in starts:
                settings = {"limit": limit, "width": width, "block": length, "weight": 1.0, **start}
                label = f"{width} bits, block {length}{more}"
                yield label, KernelCall("add_uniform", (x, raw, x), settings)
    for width in (0, 2, 8):
        for key in (None, KEY):
            settings = {"limit": 1, "width": width, "block": None, "rule": "given", "scale": 1.0}
            label = f"{width or 'log 3'} bits, scale given{', random' if key else ''}"
            yield label, KernelCall("encode_uniform", (x, x), {**settings, "key": key})
    settings = {"limit": 1, "width": 0, "block": None, "weight": 1.0, "fresh": True}
    yield "log 3 bits", KernelCall("add_uniform", (x, raw, x), settings)
    for width, block in ((8, 256), (4, 64), (2, 24), (5, 256), (4, 1 << 13)):
        for more, r in residuals:
            settings = {"width": width, "block": block}
            yield (
                f"{width} bits, block {block}{more}",
                KernelCall("encode_affine", (x, r), settings),
            )
        settings = {"width": width, "block": block, "key": KEY}
        label = f"{width} bits, block {block}, random"
        yield label, KernelCall("encode_affine", (x, None), settings)
        for more, start in starts:
            settings = {"width": width, "block": block, "weight": 1.0, **start}
            yield f"{width} bits{more}", KernelCall("add_affine", (x, raw, x, x), settings)
    settings = {"width": 4, "block": None, "extent": (0.0, 1.0)}
    yield "4 bits, whole tensor", KernelCall("encode_affine", (x, x), settings)
    for length in (1024, 24, None):
        for more, r in residuals:
            for scaled in (False, True):
                label = f"block {length}{', scaled' if scaled else ''}{more}"
                yield label, KernelCall("encode_pairs", (x, r), {"block": length, "scaled": scaled})
            yield (
                f"block {length}{more}",
                KernelCall("encode_signed_pairs", (x, r), {"block": length}),
            )
        for more, start in starts:
            settings = {"block": length, "weight": 1.0, **start}
            yield f"block {length}{more}", KernelCall("add_pairs", (x, raw, x), settings)
            yield f"block {length}{more}", KernelCall("add_signed_pairs", (x, raw, x), settings)
    for more, start in starts:
        yield more.strip(), KernelCall("add_powers", (x, raw, x), {"weight": 1.0, **start})
        yield more.strip(), KernelCall("scatter_add", (x, at, x), {"weight": 1.0, **start})
    for more, r in residuals:
        own = f"x{more}"
        yield own, KernelCall("encode_powers", (x, r), {"top": 1, "key": KEY})
        yield own, KernelCall("extent", (x, r), {})
        yield own, KernelCall("all_finite", (x, r), {})
        yield own, KernelCall("moments", (x, r, 1.0), {})
        yield f"{own}, 1 %", KernelCall("top_k", (x, r, 0), {})
        yield f"{own}, a third", KernelCall("top_k", (x, r, 1), {})
        for chunk in (64, 1000, 4096, 1 << 13):
            call = KernelCall("chunk_top_k", (x, r, chunk, chunk // 10, 5), {})
            yield f"{own}, chunk {chunk}", call
        yield own, KernelCall("above", (x, r, 0.5), {})
        yield own, KernelCall("take", (x, r, at), {})
    yield "three items", KernelCall("scatter_add_many", (x, [], 1.0), {})
    yield "three items", KernelCall("scatter_mean", (x, []), {})
    if dtype != torch.float32:
        return
    yield "", KernelCall("round_to_bfloat16", (x, x, KEY), {})
    yield "", KernelCall("random_words", (0, KEY, device), {})
    yield "", KernelCall("random_positions", (0, 0, KEY, device), {})
    yield "", KernelCall("bernoulli_positions", (0, 0.0, KEY, device), {})
    yield "", KernelCall("checksum", (raw,), {})
    yield "", KernelCall("rice_parameter", (at, 0), {})
    yield "", KernelCall("rice_encode", (at, 0, 0), {})
    yield "", KernelCall("rice_decode", (words, 0, 0, 0, 0), {})
    yield "", KernelCall("bitmap_encode", (at, 0), {})
    yield "", KernelCall("bitmap_decode", (words, 0, 0), {})
    for limit in (1, 7, 127):
        yield f"limit {limit}", KernelCall("elias_encode", (raw, limit), {})
        yield f"limit {limit}", KernelCall("elias_decode", (words, 0, 0, limit), {})
