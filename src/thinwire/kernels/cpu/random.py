"""Random 32-bit words as a function of an element's number, and what is drawn by them.

Elements come in groups of 512. Philox4x32-10 (Salmon et al. 2011) of the group's number under the
key gives the group three words k0, k1, k2; element i of the group is the 32-bit hash "triple32"
(Wellons 2018) of i * 0x9E3779B1 + k0, with k1 and k2 mixed in. A word an
element costs 0.9x the time of ``r += g`` that way, Philox alone five times as much.
"""

import numpy as np
import torch

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import jit
from thinwire.kernels.key import Key

u32, u64 = np.uint32, np.uint64
GROUP = 512
ROUNDS = 8
# Of the hash; the i-th element of a group begins with i times the stride.
STRIDE = 0x9E3779B1
SHIFTS, MULTIPLIERS = (17, 11, 15, 14), (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)


@jit
def philox(c0, c1, c2, c3, k0, k1):
    for _ in range(10):
        a = u64(u32(0xD2511F53)) * u64(c0)
        b = u64(u32(0xCD9E8D57)) * u64(c2)
        c0, c1, c2, c3 = (
            u32(u32(b >> u64(32)) ^ c1 ^ k0),
            u32(b),
            u32(u32(a >> u64(32)) ^ c3 ^ k1),
            u32(a),
        )
        k0 = u32(k0 + u32(0x9E3779B9))
        k1 = u32(k1 + u32(0xBB67AE85))
    return c0, c1, c2, c3


@jit
def group_keys(group, key):
    """The three keys of one group."""
    high = u32(group >> 32) ^ key[4]
    k0, k1, k2, _ = philox(u32(group), high, key[0], key[1], key[2], key[3])
    return k0, k1, k2


@jit
def word_of(index, keys):
    """The word of one element of a group."""
    v = u32(u32(u32(index) * u32(STRIDE)) + keys[0])
    v = u32(v ^ (v >> u32(SHIFTS[0])))
    v = u32(u32(v * u32(MULTIPLIERS[0])) ^ keys[1])
    v = u32(v ^ (v >> u32(SHIFTS[1])))
    v = u32(v * u32(MULTIPLIERS[1]))
    v = u32(v ^ (v >> u32(SHIFTS[2])))
    v = u32(v * u32(MULTIPLIERS[2]))
    return u32(v ^ (v >> u32(SHIFTS[3])) ^ keys[2])


@jit
def fill_group(group, key, out):
    """out = the first words of one group."""
    keys = group_keys(group, key)
    for i in range(out.size):
        out[i] = word_of(i, keys)


@jit
def fill(first, count, key, out):
    """Words of elements [first, first+count) into out; return where in out they begin."""
    group = first // GROUP
    at = 0
    while group * GROUP < first + count:
        fill_group(group, key, out[at : at + GROUP])
        group += 1
        at += GROUP
    return first % GROUP


def key_words(key: Key | None):
    """The key as the five words that the compiled loops take; none of them for no key."""
    if key is None:
        return np.empty(0, u32)
    return np.array(
        [key.step, key.tensor, key.seed & 0xFFFFFFFF, key.seed >> 32, key.stream << 24], u32
    )


def random_words(count: int, key: Key, device: torch.device | None = None):
    """32-bit words of elements [0, count), as int64 in [0, 2^32)."""
    out = np.empty(-(-count // GROUP) * GROUP, u32)
    if count:
        fill(0, count, key_words(key), out)
    return torch.from_numpy(out[:count].astype(np.int64))


@jit
def _feistel(first, keys, left, right, high, low):
    """Both halves of the permuted numbers first, first + 1, ..."""
    left_mask, right_mask = u32((1 << left) - 1), u32((1 << right) - 1)
    for i in range(high.size):
        v = first + i
        high[i] = u32(v >> right)
        low[i] = u32(v) & right_mask
    for r in range(0, ROUNDS, 2):
        even, odd = keys[r], keys[r + 1]
        for i in range(high.size):
            high[i] ^= _mix(low[i] ^ even) & left_mask
            low[i] ^= _mix(high[i] ^ odd) & right_mask


@jit
def _mix(v):
    v = u32(v * u32(0x9E3779B1))
    v = u32(v ^ (v >> u32(15)))
    v = u32(v * u32(0x85EBCA77))
    return u32(v ^ (v >> u32(13)))


@jit
def _permuted_below(first, count, n, keys, left, right, out):
    """Values below n among the permuted numbers first .. first + count - 1."""
    high, low = np.empty(GROUP, u32), np.empty(GROUP, u32)
    found = 0
    for lo in range(0, count, GROUP):
        m = min(GROUP, count - lo)
        _feistel(first + lo, keys, left, right, high[:m], low[:m])
        for i in range(m):
            v = (np.int64(high[i]) << right) | np.int64(low[i])
            out[found] = v
            found += v < n
    return found


def random_positions(n: int, k: int, key: Key, device: torch.device | None = None):
    """k distinct positions below n, ascending: the first k values below n of a keyed permutation.

    A Feistel network permutes the numbers below the next power of two (at least 256): O(k) work,
    the same on every device, no table of n entries.
    """
    width = max(8, (n - 1).bit_length())
    left = width // 2
    keys = random_words(ROUNDS, key).numpy().astype(u32)
    dtype = np.int32 if n < 1 << 31 else np.int64

    def work(lo, hi):
        out = np.empty(hi - lo + 1, dtype)
        return out[: _permuted_below(lo, hi - lo, n, keys, left, width - left, out)]

    pieces, found, tried = [], 0, 0
    while found < k:
        # The share below n is n / 2^width; a little more than needed, or the rest.
        more = min((1 << width) - tried, int((k - found) * (1 << width) / n * 1.01) + 256)
        parts = [(tried + lo, tried + hi) for lo, hi in threads.ranges(more, least=1 << 14)]
        pieces += threads.run(work, parts)
        found, tried = sum(map(len, pieces)), tried + more
    out = np.concatenate(pieces)[:k] if pieces else np.empty(0, dtype)
    out.sort()
    return torch.from_numpy(out)


@jit
def _bernoulli(first, count, limit, key, out, write):
    words = np.empty(GROUP, u32)
    found = 0
    for lo in range(first, first + count, GROUP):
        fill_group(lo // GROUP, key, words)
        for i in range(min(GROUP, first + count - lo)):
            if write:
                if u64(words[i]) < limit:
                    out[found] = lo + i
                    found += 1
            else:
                found += u64(words[i]) < limit
    return found


def bernoulli_positions(n: int, p: float, key: Key, device: torch.device | None = None):
    """Positions below n that are kept with probability p each (to 2^-32), ascending."""
    dtype = np.int32 if n < 1 << 31 else np.int64
    words, limit = key_words(key), u64(round(p * 2**32))
    parts = threads.ranges(n, GROUP)
    none = np.empty(0, dtype)
    counts = threads.run(lambda lo, hi: _bernoulli(lo, hi - lo, limit, words, none, False), parts)
    ends = np.cumsum(counts)
    out = np.empty(ends[-1], dtype)
    begin = {lo: end - count for (lo, _), end, count in zip(parts, ends, counts, strict=True)}
    threads.run(lambda lo, hi: _bernoulli(lo, hi - lo, limit, words, out[begin[lo] :], True), parts)
    return torch.from_numpy(out)
