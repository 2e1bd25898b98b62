"""The table that the common tests run over: a row for each compressor and setting worth testing.

A new compressor needs one row here; the laws in test_contract.py and test_kernels.py then hold it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import thinwire as tw
from thinwire.compressors.sparsifiers import kept


@dataclass(frozen=True, kw_only=True, repr=False)
class Row:
    """A compressor by its spec string, and what it promises."""

    spec: str
    lossless: bool = False  # every bit of every element type, integers too
    random: bool = False  # the result depends on the key
    unbiased: bool = False  # the mean over keys is x (without a residual)
    summable: bool = False  # sections of different ranks may be added
    sparse: bool = False  # the payload gives positions and values
    residual: bool = True  # may be used with a residual
    sums: bool = False  # adds up many elements, so that float64 depends on the order
    # ||C(x) - x||^2 <= (1 - alpha(d)) ||x||^2 for d elements; in expectation for random ones.
    alpha: Callable[[int], float] | None = None
    reach: float = 1.0  # values up to this share of the largest finite number are surely sent
    most: float = 1.0  # bytes of a bfloat16 frame for each byte of the tensor, header apart
    header: int = 64  # bytes at most

    def __repr__(self) -> str:
        return f"Row({self.spec!r})"

    @property
    def compressor(self) -> tw.Compressor:
        return tw.parse(self.spec)

    @property
    def kind(self) -> str:
        """Rows of one kind run the same code, with other settings."""
        return type(self.compressor).__name__


def top(ratio: float) -> Callable[[int], float]:
    return lambda d: kept(d, ratio) / d


def block(size: float) -> Callable[[int], float]:
    """Rounding moves no element further than to zero, and the largest of each block hardly."""
    return lambda d: 1 / min(size, d)


def sparse_twobit(d: int) -> float:
    """1 / 32 of the elements carry their share at least, of which TwoBit keeps its own."""
    return 1 / 32 / min(4096, d)


def turns(least: int) -> Iterator[tuple[int, int, Row]]:
    """Every row, and every kind of compressor so many times at least: the number of the kind, that
    of the turn of its kind, the row.

    test_contract.py has every row with every type. What carries payloads from rank to rank sees
    every row, and every type, size and form with every kind.
    """
    kinds: dict[str, list[Row]] = {}
    for row in ROWS:
        kinds.setdefault(row.kind, []).append(row)
    for i, rows in enumerate(kinds.values()):
        for turn in range(max(least, len(rows))):
            yield i, turn, rows[turn % len(rows)]


def meetings(cases: Iterable[tuple]) -> set[tuple]:
    """All pairs of choices that meet in some case, each with the number of its field.

    Where a product of rows, sizes and types would be too long, a test takes some cases of it, and
    makes sure that they have the meetings of all. A row counts as its kind.
    """
    chosen = ([each.kind if isinstance(each, Row) else each for each in case] for case in cases)
    return {pair for case in chosen for pair in itertools.combinations(enumerate(case), 2)}


INFINITE = float("inf")
BITMAP = 1 + 1 / 16  # all values of two bytes, and a bit for each

ROWS = [
    Row(spec="none", lossless=True, summable=True, alpha=lambda d: 1),
    Row(spec="lossless", lossless=True, alpha=lambda d: 1),
    Row(spec="lossless:zlib,1", lossless=True, alpha=lambda d: 1),
    Row(spec="cast:fp16", summable=True),
    Row(spec="cast:bf16", summable=True, alpha=lambda d: 1 - 2**-16),
    Row(spec="cast:fp8", alpha=lambda d: (1 - 2**-8) / min(256, d)),
    Row(spec="cast:fp8,8", alpha=lambda d: (1 - 2**-8) / min(8, d)),
    Row(spec="topk:0.01", sparse=True, alpha=top(0.01)),
    Row(spec="topk:0.3", sparse=True, alpha=top(0.3)),
    Row(spec="topk:1.0", sparse=True, alpha=top(1.0), most=BITMAP),
    Row(spec="topk:0.1,chunk=64", sparse=True, alpha=lambda d: 0.1),
    Row(spec="topk:0.02,chunk=100000", sparse=True, alpha=lambda d: 0.02),
    Row(spec="randomk:0.1", random=True, unbiased=True, sparse=True),
    Row(spec="randomk:0.1,scaled=false", random=True, sparse=True, alpha=top(0.1)),
    Row(spec="randomk:0.1,scaled=true", random=True, unbiased=True, sparse=True, residual=False),
    Row(spec="randomk:0.25,shared=true", random=True, unbiased=True, sparse=True, summable=True),
    Row(spec="bernoulli:0.2", random=True, unbiased=True, sparse=True),
    Row(spec="bernoulli:0.2,scaled=false", random=True, sparse=True, alpha=lambda d: 0.2),
    Row(spec="bernoulli:0.2,shared=true", random=True, unbiased=True, sparse=True, summable=True),
    Row(spec="threshold:0.5", sparse=True, most=BITMAP),
    Row(spec="quantize:8", alpha=block(256)),
    Row(spec="quantize:4", alpha=block(256)),
    Row(spec="quantize:2", alpha=block(256)),
    Row(spec="quantize:8,8", alpha=block(8)),
    Row(spec="quantize:8,none", alpha=block(INFINITE)),
    Row(spec="quantize:4,stochastic=true", random=True, unbiased=True),
    Row(spec="quantize:2,none,stochastic=true", random=True, unbiased=True),
    Row(spec="quantize:4,entropy=true", alpha=block(256)),
    Row(spec="quantize:8,symmetric=false"),
    Row(spec="quantize:4,none,symmetric=false"),
    Row(spec="quantize:2,64,symmetric=false,stochastic=true", random=True, unbiased=True),
    Row(spec="qsgd:4", sums=True, random=True, unbiased=True),
    Row(spec="qsgd:1,64", sums=True, random=True, unbiased=True),
    Row(spec="qsgd:7,none", sums=True, random=True, unbiased=True),
    Row(spec="qsgd:127,norm=max", random=True, unbiased=True),
    Row(spec="qsgd:13,none,norm=max", random=True, unbiased=True),
    Row(spec="qsgd:7,entropy=true", sums=True, random=True, unbiased=True),
    Row(spec="onebit", sums=True, alpha=block(1024)),
    Row(spec="onebit:24", sums=True, alpha=block(24)),
    Row(spec="onebit:none", sums=True, alpha=block(INFINITE)),
    Row(spec="twobit", sums=True, alpha=block(4096)),
    Row(spec="twobit:24", sums=True, alpha=block(24)),
    Row(spec="twobit:none", sums=True, alpha=block(INFINITE)),
    Row(spec="scaledsign", sums=True, alpha=block(INFINITE)),
    Row(spec="scaledsign:l2", sums=True),
    Row(spec="terngrad", sums=True, random=True),
    Row(spec="terngrad:none", random=True, unbiased=True),
    Row(spec="natural", random=True, unbiased=True, alpha=lambda d: 7 / 8),
    Row(spec="tiered:0.05"),
    Row(spec="tiered:0.05,large=(none),small=(onebit)", sums=True, alpha=top(0.05), reach=1 / 2),
    Row(spec="tiered:0.1,large=(quantize:8),small=(quantize:2,symmetric=false)", reach=1 / 2),
    Row(spec="tiered:0.1,large=(topk:0.5),small=(qsgd:3)", sums=True, random=True),
    Row(spec="topk:0.1|quantize:4", sparse=True, alpha=lambda d: top(0.1)(d) / min(256, d)),
    Row(spec="topk:0.5|none", sparse=True, alpha=top(0.5)),
    Row(spec="topk:0.03125,chunk=4096|twobit", sums=True, sparse=True, alpha=sparse_twobit),
    Row(spec="topk:0.05|qsgd:7,entropy=true|lossless", sums=True, random=True),
    Row(spec="topk:0.5|topk:0.5|quantize:8,symmetric=false|lossless"),
    Row(spec="topk:0.5|tiered:0.1,small=(quantize:4)|lossless", header=80),
    Row(spec="randomk:0.1,shared=true|cast:fp16", random=True, sparse=True, summable=True),
    Row(spec="randomk:0.5|natural", random=True, unbiased=True, sparse=True),
    Row(spec="bernoulli:0.2|quantize:8", random=True, sparse=True),
    Row(spec="threshold:0.5|onebit", sums=True, sparse=True),
    Row(spec="quantize:4|lossless", alpha=block(256)),
    Row(spec="cast:bf16|lossless:zlib", alpha=lambda d: 1 - 2**-16),
    Row(spec="none|lossless", alpha=lambda d: 1),
]
