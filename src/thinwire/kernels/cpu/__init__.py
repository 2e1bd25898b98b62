"""Numba kernels for CPU tensors: memory-bound loops, threads by ranges, no hidden copies."""

from thinwire.kernels.cpu.affine import add_affine, encode_affine
from thinwire.kernels.cpu.checksum import checksum
from thinwire.kernels.cpu.elias import elias_decode, elias_encode
from thinwire.kernels.cpu.indices import (
    bitmap_decode,
    bitmap_encode,
    rice_decode,
    rice_encode,
    rice_parameter,
)
from thinwire.kernels.cpu.narrow import round_to_bfloat16
from thinwire.kernels.cpu.pairs import add_pairs, encode_pairs
from thinwire.kernels.cpu.powers import add_powers, encode_powers
from thinwire.kernels.cpu.random import bernoulli_positions, random_positions, random_words
from thinwire.kernels.cpu.signed_pairs import add_signed_pairs, encode_signed_pairs
from thinwire.kernels.cpu.sparse import (
    above,
    all_finite,
    chunk_top_k,
    scatter_add,
    scatter_add_many,
    scatter_mean,
    scatter_mean_bytes,
    take,
    top_k,
)
from thinwire.kernels.cpu.statistics import extent, moments
from thinwire.kernels.cpu.uniform import add_uniform, encode_uniform

__all__ = [
    "above",
    "add_affine",
    "add_pairs",
    "add_powers",
    "add_signed_pairs",
    "add_uniform",
    "all_finite",
    "bernoulli_positions",
    "bitmap_decode",
    "bitmap_encode",
    "checksum",
    "chunk_top_k",
    "elias_decode",
    "elias_encode",
    "encode_affine",
    "encode_pairs",
    "encode_powers",
    "encode_signed_pairs",
    "encode_uniform",
    "extent",
    "moments",
    "random_positions",
    "random_words",
    "rice_decode",
    "rice_encode",
    "rice_parameter",
    "round_to_bfloat16",
    "scatter_add",
    "scatter_add_many",
    "scatter_mean",
    "scatter_mean_bytes",
    "take",
    "top_k",
]
