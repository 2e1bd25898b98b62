"""Numbers of elements as people write them: 10k, 4M, 25.6M."""

import re
from decimal import Decimal

from thinwire.bench.settings import SettingError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MOST = 1 << 32  # elements that a frame may hold


def read_size(text: str) -> int:
    """The number of elements that `text` means; units are powers of 1000."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)", text.strip().lower())
    if not found:
        raise SettingError(
            f"a size is a number with an optional k, M or G, such as 25.6M: {text!r}"
        )
    count = Decimal(found[1]) * _UNITS[found[2]]
    if count != int(count) or not 1 <= count <= MOST:
        raise SettingError(f"a size is a whole number of elements from 1 to 2^32, got {text!r}")
    return int(count)


def show_size(count: int) -> str:
    """The shortest way to write a number of elements without losing digits that matter."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count)
