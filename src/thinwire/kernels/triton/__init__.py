"""Triton kernels for CUDA tensors: one pass over memory where the maths allows, no atomics.

Every one is compared with the reference before it is first used on a device (`checking.py`).
"""

from thinwire.kernels.triton import (
    affine,
    bits,
    narrow,
    pairs,
    powers,
    random,
    signed_pairs,
    sparse,
    statistics,
    uniform,
)
from thinwire.kernels.triton.checking import Checked
from thinwire.kernels.triton.sparse import scatter_mean_bytes

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

above = Checked(sparse.above)
add_affine = Checked(affine.add_affine)
add_pairs = Checked(pairs.add_pairs)
add_powers = Checked(powers.add_powers)
add_signed_pairs = Checked(signed_pairs.add_signed_pairs)
add_uniform = Checked(uniform.add_uniform)
all_finite = Checked(statistics.all_finite)
bernoulli_positions = Checked(random.bernoulli_positions)
bitmap_decode = Checked(bits.bitmap_decode)
bitmap_encode = Checked(bits.bitmap_encode)
checksum = Checked(statistics.checksum)
chunk_top_k = Checked(sparse.chunk_top_k)
elias_decode = Checked(bits.elias_decode)
elias_encode = Checked(bits.elias_encode)
encode_affine = Checked(affine.encode_affine)
encode_pairs = Checked(pairs.encode_pairs)
encode_powers = Checked(powers.encode_powers)
encode_signed_pairs = Checked(signed_pairs.encode_signed_pairs)
encode_uniform = Checked(uniform.encode_uniform)
extent = Checked(statistics.extent)
moments = Checked(statistics.moments)
random_positions = Checked(random.random_positions)
random_words = Checked(random.random_words)
rice_decode = Checked(bits.rice_decode)
rice_encode = Checked(bits.rice_encode)
rice_parameter = Checked(bits.rice_parameter)
round_to_bfloat16 = Checked(narrow.round_to_bfloat16)
scatter_add = Checked(sparse.scatter_add)
scatter_add_many = Checked(sparse.scatter_add_many)
scatter_mean = Checked(sparse.scatter_mean)
take = Checked(sparse.take)
top_k = Checked(sparse.top_k)
