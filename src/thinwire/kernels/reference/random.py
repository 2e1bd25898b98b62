"""Random words and what is drawn by them, in plain PyTorch; the CPU kernels tell the method."""

import torch
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.sparse import index_dtype

GROUP = 512
ROUNDS = 8
MASK = 0xFFFFFFFF


def _high(a: Tensor, constant: int) -> Tensor:
    """The upper 32 bits of a 32-by-32-bit product, without leaving signed 64-bit integers."""
    low = a * (constant & 0xFFFF)
    return ((a * (constant >> 16) + (low >> 16)) >> 16) & MASK


def philox(counter: list[Tensor], seed: int) -> list[Tensor]:
    """Philox4x32-10 of four tensors of 32-bit words (held as int64)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, seed >> 32
    for _ in range(10):
        a_high, a_low = _high(c0, 0xD2511F53), (c0 * 0xD2511F53) & MASK
        b_high, b_low = _high(c2, 0xCD9E8D57), (c2 * 0xCD9E8D57) & MASK
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def random_words(count: int, key: Key, device: torch.device | None = None) -> Tensor:
    """32-bit words of elements [0, count), as int64 in [0, 2^32)."""
    group = torch.arange(-(-count // GROUP), dtype=torch.int64, device=device).unsqueeze(1)
    step, tensor = torch.full_like(group, key.step), torch.full_like(group, key.tensor)
    counter = [group & MASK, (group >> 32) ^ (key.stream << 24), step, tensor]
    k0, k1, k2, _ = philox(counter, key.seed)
    v = (torch.arange(GROUP, dtype=torch.int64, device=device) * 0x9E3779B1 + k0) & MASK
    v = v ^ (v >> 17)
    v = ((v * 0xED5AD4BB) & MASK) ^ k1
    v = v ^ (v >> 11)
    v = (v * 0xAC4C1B51) & MASK
    v = v ^ (v >> 15)
    v = (v * 0x31848BAB) & MASK
    return (v ^ (v >> 14) ^ k2).flatten()[:count]


def random_positions(n: int, k: int, key: Key, device: torch.device | None = None) -> Tensor:
    """k distinct positions below n, ascending: the first such values of a keyed permutation."""
    width = max(8, (n - 1).bit_length())
    left = width // 2
    right = width - left
    keys = random_words(ROUNDS, key, device).tolist()
    found = torch.empty(0, dtype=torch.int64, device=device)
    tried = 0
    while found.numel() < k:
        short = k - found.numel()
        more = min((1 << width) - tried, int(short * (1 << width) / n * 1.01) + 256)
        v = torch.arange(tried, tried + more, dtype=torch.int64, device=device)
        high, low = v >> right, v & ((1 << right) - 1)
        for r in range(0, ROUNDS, 2):
            high = high ^ (_mix(low ^ keys[r]) & ((1 << left) - 1))
            low = low ^ (_mix(high ^ keys[r + 1]) & ((1 << right) - 1))
        v = (high << right) | low
        found, tried = torch.cat([found, v[v < n]]), tried + more
    return found[:k].sort().values.to(index_dtype(n))


def _mix(v: Tensor) -> Tensor:
    v = (v * 0x9E3779B1) & MASK
    v = v ^ (v >> 15)
    v = (v * 0x85EBCA77) & MASK
    return v ^ (v >> 13)


def bernoulli_positions(n: int, p: float, key: Key, device: torch.device | None = None) -> Tensor:
    """Positions below n that are kept with probability p each (to 2^-32), ascending."""
    kept = random_words(n, key, device) < round(p * 2**32)
    return torch.nonzero(kept).squeeze(1).to(index_dtype(n))
