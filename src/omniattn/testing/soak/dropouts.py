"""Dropout of probabilities from its definition (docs/backward.md), by Philox 4x32-10 on Python's integers and NumPy's.

Nothing here comes from `omniattn.reference`: the two are beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Dropped:
    """Dropout of a call.

    Attributes
    ----------
    p : float
        As the call was given it.
    seed, offset : int
        64 bits each.
    """

    p: float
    seed: int
    offset: int

    def factors(self, sequence: int, heads: int, begin: int, end: int, keys: int) -> Any:
        """What probabilities of rows [begin, end) are multiplied by: (heads, rows, keys), 0 or 1 / (1 - p)."""
        threshold = min(max(round(256 * self.p), 1), 255)
        words = (self.offset & 0xFFFFFFFF, self.offset >> 32, 0, 0)
        key = _philox([np.uint64(word) for word in words], (self.seed & 0xFFFFFFFF, self.seed >> 32))[:2]
        q = np.arange(begin, end, dtype=np.uint64)[None, :, None]
        k = np.arange(keys, dtype=np.uint64)[None, None, :]
        h = np.arange(heads, dtype=np.uint64)[:, None, None]
        counter = np.broadcast_arrays(_group(k), _group(q), h, np.uint64(sequence))
        made = np.stack(_philox(list(counter), (int(key[0]), int(key[1]))))
        word = np.choose((q % 2 + 2 * (k % 2)).astype(np.int64) + 0 * h.astype(np.int64), made)
        byte = word >> (8 * (q // 8 % 2 + 2 * (k // 8 % 2))) & np.uint64(255)
        return np.where(byte >= threshold, 256 / (256 - threshold), 0.0)


def _group(i: Any) -> Any:
    return 4 * (i // 16) + i // 2 % 4


def _philox(c: list[Any], key: tuple[int, int]) -> list[Any]:
    """Four words of 32 bits, in uint64, of a counter of four."""
    for i in range(10):
        keys = [np.uint64((word + i * step) & 0xFFFFFFFF) for word, step in zip(key, _STEPS, strict=True)]
        a, b = np.uint64(_FACTORS[0]) * c[0], np.uint64(_FACTORS[1]) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ keys[0], b & _LOW, (a >> np.uint64(32)) ^ c[3] ^ keys[1], a & _LOW]
    return c
