"""Philox4x32-10 and what is drawn by it, in plain PyTorch; see the CPU kernels for the order."""

import torch
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.sparse import index_dtype

GROUP = 512
LANE = GROUP // 4
ROUNDS = 8
MASK = 0xFFFFFFFF


def _high(a: Tensor, constant: int) -> Tensor:
    """The upper 32 bits of a 32-by-32-bit product, without leaving signed 64-bit integers."""
    low = a * (constant & 0xFFFF)
    return ((a * (constant >> 16) + (low >> 16)) >> 16) & MASK


def random_words(count: int, key: Key, device: torch.device | None = None) -> Tensor:
    """32-bit words of elements [0, count), as int64 in [0, 2^32)."""
    groups = -(-count // GROUP)
    counter = torch.arange(groups * LANE, dtype=torch.int64, device=device)
    c0, c1 = counter & MASK, (counter >> 32) ^ (key.stream << 24)
    c2, c3 = torch.full_like(c0, key.step), torch.full_like(c0, key.tensor)
    k0, k1 = key.seed & MASK, key.seed >> 32
    for _ in range(10):
        a_high, a_low = _high(c0, 0xD2511F53), (c0 * 0xD2511F53) & MASK
        b_high, b_low = _high(c2, 0xCD9E8D57), (c2 * 0xCD9E8D57) & MASK
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    lanes = torch.stack([c.view(groups, LANE) for c in (c0, c1, c2, c3)], 1)
    return lanes.flatten()[:count]


def random_positions(n: int, k: int, key: Key, device: torch.device | None = None) -> Tensor:
    """k distinct positions below n, ascending: the first k values of a keyed permutation."""
    width = max(8, (n - 1).bit_length())
    left = width // 2
    right = width - left
    keys = random_words(ROUNDS, key, device).tolist()
    v = torch.arange(k, dtype=torch.int64, device=device)
    pending = torch.ones_like(v, dtype=torch.bool)
    while bool(pending.any()):
        a, b = v >> right, v & ((1 << right) - 1)
        for r in range(ROUNDS):
            m = (a if r & 1 else b) ^ keys[r]
            m = (m * 0x9E3779B1) & MASK
            m ^= m >> 15
            m = (m * 0x85EBCA77) & MASK
            m ^= m >> 13
            if r & 1:
                b = b ^ (m & ((1 << right) - 1))
            else:
                a = a ^ (m & ((1 << left) - 1))
        v = torch.where(pending, (a << right) | b, v)
        pending &= v >= n
    return v.sort().values.to(index_dtype(n))


def bernoulli_positions(n: int, p: float, key: Key, device: torch.device | None = None) -> Tensor:
    """Positions below n that are kept with probability p each (to 2^-32), ascending."""
    kept = random_words(n, key, device) < round(p * 2**32)
    return torch.nonzero(kept).squeeze(1).to(index_dtype(n))
