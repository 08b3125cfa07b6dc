"""What ``packed_parts_sm80`` makes of packed sequences, in NumPy: the same numbers."""

from __future__ import annotations

import numpy as np

from omniattn.reference.core import Array


def packed_parts(cu_q: Array, cu_k: Array, used_q: Array | None, used_k: Array | None) -> tuple[Array, Array]:
    """Starts of sequences that count whole, from those of which the first rows count.

    ::

        both:    (used queries, used keys)  (other queries, no key)  (no query, other keys)
        used_q:  (used queries, all keys)   (other queries, no key)
        used_k:  (all queries, used keys)                            (no query, other keys)

    Parameters
    ----------
    cu_q, cu_k : ndarray, (batch + 1,), int32
    used_q, used_k : ndarray, (batch,), int32, or None
        One beyond its sequence counts as the whole of it, a negative one as none.

    Returns
    -------
    ndarray, ndarray
        (parts * batch + 1,), int32.
    """
    ends = [_used_ends(cu, used) for cu, used in ((cu_q, used_q), (cu_k, used_k))]
    columns_q, columns_k = [cu_q[:-1]], [cu_k[:-1]]
    if used_q is not None:
        columns_q.append(ends[0])
        columns_k.append(ends[1])
    if used_k is not None:
        columns_q.append(cu_q[1:])
        columns_k.append(ends[1])
    made = [
        np.concatenate((np.stack(columns, axis=1).reshape(-1), cu[-1:])).astype(np.int32)
        for columns, cu in ((columns_q, cu_q), (columns_k, cu_k))
    ]
    return made[0], made[1]


def _used_ends(cu: Array, used: Array | None) -> Array:
    if used is None:
        return cu[1:]
    return np.minimum(np.maximum(cu[:-1] + used, cu[:-1]), cu[1:])
