"""Which probabilities dropout keeps: the definition that every kernel is held to, bit for bit.

Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Philox 4x32-10.

    Parameters
    ----------
    counter : four of int or array, from 0 to 2**32 - 1
        Words of the counter, which broadcast.
    key : (int, int)
        Words of the key.

    Returns
    -------
    four of ndarray, uint64
        Numbers from 0 to 2**32 - 1, in the common shape.
    """
    x, y, z, w = (np.asarray(c, dtype=np.uint64) & _LOW for c in counter)
    for i in range(_ROUNDS):
        a, b = _FACTORS[0] * x, _FACTORS[1] * z
        k0, k1 = (np.uint64((k + i * step) & 0xFFFFFFFF) for k, step in zip(key, _STEPS, strict=True))
        x, y, z, w = (b >> _SHIFT) ^ y ^ k0, b & _LOW, (a >> _SHIFT) ^ w ^ k1, a & _LOW
    x, y, z, w = np.broadcast_arrays(x, y, z, w)
    return x, y, z, w


@dataclass(frozen=True)
class Dropout:
    """Dropout of a call.

    Attributes
    ----------
    threshold : int
        Of 256: a probability whose byte is below it is dropped; from 1 to 255.
    seed, offset : int
        From 0 to 2**64 - 1.
    """

    threshold: int
    seed: int
    offset: int

    @property
    def scale(self) -> float:
        """What is kept is multiplied by it."""
        return 256 / (256 - self.threshold)

    def kept(self, batch: int, head: int, rows: Array, keys: Array) -> Array:
        """Which probabilities of one head of one sequence are kept, bool (rows, keys).

        Parameters
        ----------
        batch, head : int
            Number of the sequence, and of the query head.
        rows, keys : ndarray, integer, one dimension
            Positions of queries and keys in their sequence.
        """
        words = (self.offset & 0xFFFFFFFF, self.offset >> 32, 0, 0)
        made = philox(words, (self.seed & 0xFFFFFFFF, self.seed >> 32))
        key = int(made[0]), int(made[1])
        # Each call of philox is about 4 queries and 4 keys, that of a query and key stands in each of their groups.
        q, k = rows.astype(np.int64), keys.astype(np.int64)
        groups_q, of_q = np.unique(_group(q), return_inverse=True)
        groups_k, of_k = np.unique(_group(k), return_inverse=True)
        four = np.stack(philox((groups_k[None, :], groups_q[:, None], head, batch), key))
        word = (q % 2)[:, None] + 2 * (k % 2)[None, :]
        byte = (q // 8 % 2)[:, None] + 2 * (k // 8 % 2)[None, :]
        found = four[word, of_q[:, None], of_k[None, :]] >> (8 * byte).astype(np.uint64) & np.uint64(0xFF)
        return np.asarray(found >= np.uint64(self.threshold))


def _group(position: Array) -> Array:
    """Number of the group of positions that share a call of philox: 2i, 2i + 1, 2i + 8 and 2i + 9 of 16."""
    return 4 * (position // 16) + position // 2 % 4
