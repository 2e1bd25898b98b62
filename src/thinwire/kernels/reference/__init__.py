"""The same kernels in plain PyTorch, for any device: short, and the meaning of the others."""

from thinwire.kernels.reference.affine import add_affine, encode_affine
from thinwire.kernels.reference.bits import (
    bitmap_decode,
    bitmap_encode,
    checksum,
    elias_decode,
    elias_encode,
    rice_decode,
    rice_encode,
    rice_parameter,
)
from thinwire.kernels.reference.narrow import round_to_bfloat16
from thinwire.kernels.reference.pairs import add_pairs, encode_pairs
from thinwire.kernels.reference.powers import add_powers, encode_powers
from thinwire.kernels.reference.random import bernoulli_positions, random_positions, random_words
from thinwire.kernels.reference.signed_pairs import add_signed_pairs, encode_signed_pairs
from thinwire.kernels.reference.sparse import (
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
from thinwire.kernels.reference.sum import extent, moments
from thinwire.kernels.reference.uniform import add_uniform, encode_uniform

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
