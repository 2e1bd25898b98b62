"""Codecs of other libraries beside ours, on one tensor: encode to bytes that could be sent, decode.

    python benchmarks/others.py [--size 25.6M] [--rounds 7] [--out benchmarks/records/NAME.json]

Whatever can be imported is measured, and the rest is listed with the reason. To measure all:

hivemind   `pip install hivemind`; its blockwise codec also needs `pip install bitsandbytes`
GRACE      is not on PyPI: clone github.com/sands-lab/grace and name the clone in PYTHONPATH

Rounds interleave all codecs, so that whatever else the machine does falls on all alike; figures are
medians. Nothing is remembered between calls: GRACE and hivemind keep residuals elsewhere, so ours
gets none either. Each is called as its own library calls it, with its default number of threads.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import conclude, read_options
from rich.console import Console
from rich.table import Table
from torch import Tensor

import thinwire as tw
from thinwire.bench.results import Timing
from thinwire.bench.settings import read_size

NOTE = "encode ends with bytes or tensors that could be sent; no residual; default threads of each"


class Work(NamedTuple):
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    num_bytes: Callable[[Any], int]  # of what is sent


class Codec(NamedTuple):
    """
    Args:
        family: codecs of one family send about the same.
        make: may raise ImportError.
    """

    name: str
    family: str
    make: Callable[[], Work]


def ours(spec: str) -> Callable[[], Work]:
    def make() -> Work:
        compressor = tw.compressors.local_of(spec)
        return Work(
            lambda x: tw.pack(compressor.encode(x, key=tw.Key(1))),
            tw.decode,
            lambda frame: frame.numel(),
        )

    return make


def grace(module: str, kind: str, *arguments: Any) -> Callable[[], Work]:
    def make() -> Work:
        import importlib

        found = importlib.import_module(f"grace_dl.dist.compressor.{module}")
        codec = getattr(found, kind)(*arguments)
        return Work(
            lambda x: codec.compress(x, "x"),
            lambda sent: codec.decompress(*sent),
            lambda sent: sum(t.numel() * t.element_size() for t in sent[0]),
        )

    return make


def hivemind(kind: str) -> Callable[[], Work]:
    def make() -> Work:
        from hivemind import compression

        codec = getattr(compression, kind)()
        if kind == "BlockwiseQuantization":
            import bitsandbytes  # noqa: F401 - otherwise it fails when it is first called
        info = compression.CompressionInfo(key="x", descriptor=None)
        return Work(
            lambda x: codec.compress(x, info),
            codec.extract,
            lambda sent: len(sent.buffer),
        )

    return make


CODECS = (
    Codec("thinwire `topk:0.01`", "1 % largest", ours("topk:0.01")),
    Codec("GRACE TopK(0.01)", "1 % largest", grace("topk", "TopKCompressor", 0.01)),
    Codec("thinwire `onebit`", "1 bit", ours("onebit")),
    Codec("GRACE OneBit", "1 bit", grace("onebit", "OneBitCompressor")),
    Codec("thinwire `qsgd:127`", "8 bits, stochastic", ours("qsgd:127")),
    Codec("GRACE QSGD(127)", "8 bits, stochastic", grace("qsgd", "QSGDCompressor", 127)),
    Codec("thinwire `quantize:8`", "8 bits", ours("quantize:8")),
    Codec("hivemind Uniform8Bit", "8 bits", hivemind("Uniform8BitQuantization")),
    Codec("hivemind Quantile8Bit", "8 bits", hivemind("Quantile8BitQuantization")),
    Codec("hivemind Blockwise", "8 bits", hivemind("BlockwiseQuantization")),
    Codec("thinwire `cast:fp16`", "16 bits", ours("cast:fp16")),
    Codec("hivemind Float16", "16 bits", hivemind("Float16Compression")),
)


class Measured:
    """A codec at work."""

    def __init__(self, codec: Codec, x: Tensor) -> None:
        self.codec = codec
        self.error: str | None = None
        self.encodes: list[float] = []
        self.decodes: list[float] = []
        try:
            self.encode, self.decode, num_bytes = codec.make()
            sent = self.encode(x)  # compiles kernels, where there are any
            back = self.decode(sent).reshape(-1)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return
        self.ratio = x.numel() * x.element_size() / num_bytes(sent)
        self.relative_error = float((back - x).norm() / x.norm())

    def round(self, x: Tensor) -> None:
        begin = time.perf_counter()
        sent = self.encode(x)
        middle = time.perf_counter()
        self.decode(sent)
        self.encodes.append(middle - begin)
        self.decodes.append(time.perf_counter() - middle)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.codec.name, "family": self.codec.family}
        if self.error is not None:
            return {**row, "error": self.error}
        for part, seconds in (("encode", self.encodes), ("decode", self.decodes)):
            timing = Timing.of(seconds)
            row[part] = timing._asdict() if timing else None
        return {**row, "ratio": self.ratio, "relative_error": self.relative_error}


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="median ms")
    for column in ("codec", "encode", "decode", "ratio", "relative error"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], "", "", "", row["error"])
            continue
        times = (f"{1e3 * row[part]['median']:.1f}" for part in ("encode", "decode"))
        table.add_row(row["name"], *times, f"{row['ratio']:.1f}", f"{row['relative_error']:.4f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="25.6M", help="elements of the tensor (25.6M)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of (7)")
    options = read_options(parser)
    x = torch.randn(read_size(options.size), generator=torch.Generator().manual_seed(0))
    console = Console(width=120)
    found = []
    for codec in CODECS:
        print(f"{codec.name}: first call", file=sys.stderr, flush=True)
        found.append(Measured(codec, x))
    running = [each for each in found if each.error is None]
    for i in range(options.rounds):
        print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for each in running:
            each.round(x)
    rows = [each.row() for each in found]
    console.print(table_of(rows))
    return conclude(console, options, "thinwire.others/1", rows, note=NOTE)


if __name__ == "__main__":
    sys.exit(main())
