"""Write the golden frames: python tests/golden/make.py

Each frame of FRAMES becomes NAME.bin, the bytes, and NAME.npy, what they decode to (bfloat16 as
float32, which holds it exactly). They fix the wire format: what one release wrote, all later ones
read. So this script adds what is missing and refuses to change what is there; a new version of the
format gets frames of new names beside the old ones.

Inputs come from integer arithmetic, so that no generator and no rounding can change them.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import thinwire as tw

HERE = Path(__file__).parent
KEY = tw.Key(seed=0xFEDCBA9876543210, step=1_000, tensor=77)


class Golden(NamedTuple):
    """A frame to keep: a compressor and what it is given."""

    spec: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (200,)
    kind: str = "ramp"
    repeatable: bool = True  # False: other releases of a library may write other bytes


def tensor(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of exact values: multiples of 1/64 below 8 in a scrambled order, and other kinds."""
    i = torch.arange(int(np.prod(shape)), dtype=torch.int64)
    value = (i * 7919 + 31) % 1021 - 510
    match kind:
        case "ramp":
            made = value / 64
        case "few":  # most are small: levels that entropy coding makes short
            made = torch.where(i % 11 == 0, value / 64, value % 3 / 64)
        case "whole":
            made = value
        case "spikes":  # one in 50 is large
            made = torch.where(i % 50 == 7, value * 64, value % 5 - 2)
        case "nan":
            made = torch.where(i % 100 == 3, torch.nan, value / 64)
    return made.to(dtype).view(shape)


F64, F16, BF16 = torch.float64, torch.float16, torch.bfloat16

FRAMES = {
    "non-finite": Golden("topk:0.1", kind="nan"),
    "raw": Golden("none", shape=(3, 1, 40)),
    "raw-empty": Golden("none", shape=(4, 0)),
    "raw-scalar": Golden("none", F64, ()),
    "raw-nan": Golden("none", kind="nan"),
    "raw-float16": Golden("none", F16),
    "raw-bfloat16": Golden("none", BF16),
    **{
        f"raw-{str(dtype).removeprefix('torch.')}": Golden("none", dtype, kind="whole")
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
    },
    "narrow-float16": Golden("cast:fp16"),
    "narrow-bfloat16": Golden("cast:bf16", F64),
    "scaled8": Golden("cast:fp8,64"),
    "sparse-plain": Golden("topk:0.01"),
    "sparse-bitmap": Golden("topk:0.5", F16),
    "sparse-rice": Golden("topk:0.1", shape=(10, 30)),
    "sparse-nothing": Golden("threshold:1000"),
    "seeded": Golden("randomk:0.1,shared=true"),
    "seeded-chance": Golden("bernoulli:0.1,shared=true", BF16),
    "uniform-8": Golden("quantize:8,64"),
    "uniform-4": Golden("quantize:4,stochastic=true", F64),
    "uniform-2": Golden("quantize:2,none"),
    "uniform-6": Golden("qsgd:31,norm=max"),
    "uniform-trits": Golden("terngrad"),
    "elias": Golden("quantize:8,64,entropy=true", kind="few"),
    "affine": Golden("quantize:8,64,symmetric=false"),
    "affine-whole": Golden("quantize:2,none,symmetric=false", F64),
    "pairs": Golden("onebit:64"),
    "pairs-whole": Golden("scaledsign", BF16),
    "powers": Golden("natural", F16),
    "overlay": Golden("tiered:0.02", kind="spikes"),
    "zipped-zstd": Golden("lossless", kind="few", repeatable=False),
    "zipped-zlib": Golden("topk:0.3|quantize:4|lossless:zlib", kind="few", repeatable=False),
    "signed-pairs": Golden("twobit:64"),
    "signed-pairs-whole": Golden("twobit:none", F64),
    "chunks": Golden("topk:0.1,chunk=48|twobit", BF16, (20, 35)),
    "nested": Golden("topk:0.5|topk:0.5|quantize:4"),
}


def encode(golden: Golden) -> torch.Tensor:
    """The frame as it is written today."""
    x = tensor(golden.kind, golden.dtype, golden.shape)
    return tw.pack(tw.parse(golden.spec).encode(x, key=KEY))


def decoded(frame: torch.Tensor) -> np.ndarray:
    """What a frame decodes to, in a type that NumPy has."""
    out = tw.decode(frame)
    return (out.float() if out.dtype == torch.bfloat16 else out).numpy()


def main() -> int:
    for name, golden in FRAMES.items():
        frame = encode(golden)
        path = HERE / f"{name}.bin"
        data = frame.numpy().tobytes()
        if not path.exists():
            path.write_bytes(data)
            np.save(HERE / f"{name}.npy", decoded(frame))
            print(f"wrote {name}: {len(data)} bytes")
        elif golden.repeatable and path.read_bytes() != data:
            print(f"{name} would change: that is another format, see the top of this script")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
