"""``top_k``: positions of the largest numbers of each row."""

from __future__ import annotations

from typing import Any

from ..checks import indexer as checks
from ..checks.indexer import TopKOptions
from ..checks.memory import check_memory
from ..frameworks import FUNCTIONS, compiling
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_top_k
from . import on_cpu_indexer
from .traced import run_traced

_TOP_K = Operation(
    "top_k", checks.TOP_K_ARRAYS, checks.check_top_k, check_memory, plan_top_k, on_cpu_indexer.top_k, ("logits",),
    checks.TOP_K_ALIGNED, given={"indices": "out"}, traced=run_traced,
    placed=(checks.TOP_K_ARRAYS.index("logits"), checks.ROWS_ALIGNMENT),
)  # fmt: skip


def top_k(
    logits: Any,
    k: int,
    *,
    lengths: Any = None,
    starts: Any = None,
    next_n: int = 1,
    block_table: Any = None,
    block_size: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Positions of the k largest numbers of each row: the keys that sparse attention takes by `index_logits`.

    Parameters
    ----------
    logits : array, (rows, elements), float32
        The last dimension contiguous, any stride between rows.
    k : int
        1 or more.
    lengths : array, (rows / next_n,), int32, optional
        Elements of each row, from its first one on; all unless given. Checked on the CPU; on a GPU lengths beyond the
        row are taken as its end, and those below 0 as 0.
    starts : array, (rows,), int32, optional
        First element of each row; 0 unless given. From 0 to elements: checked on the CPU, on a GPU taken as the nearest
        of these.
    next_n : int
        Rows of a sequence, as in `index_logits`: row i of so many has lengths[b] - next_n + i + 1 elements, none where
        that is below 0. More than 1 needs ``lengths`` or ``block_table``.
    block_table : array, (rows / next_n, blocks), int32, optional
        With it the result are rows of a pool: block_table[b, position // block_size] * block_size + position %
        block_size, below 2**31. Contiguous rows, of any stride, with blocks for all elements. Only the entries of
        chosen positions are read: checked on the CPU, and on a GPU taken as they are.
    block_size : int
        With ``block_table``.
    out : array, (rows, k), int32, optional
        Where the positions go; the last dimension contiguous. It shares no element with another array. A torch tensor
        counts as changed in place.
    stream : optional
        As in `attention`.

    Returns
    -------
    indices : array, (rows, k), int32
        Of logits' framework: positions counted from the row's start, ascending, and behind them -1 where fewer than k
        are chosen. NaN of either sign counts as the largest, as in torch.topk; of equal numbers (0 and -0 are) those
        with the lowest positions are chosen. -inf is never chosen: a key that is masked is not attended to.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. Nothing is synchronized, and
    lengths are read on the device: a call captured in a CUDA graph may be replayed with other ones in the same arrays.
    Calls repeat exactly. No gradients.
    """
    objects = (logits, lengths, starts, block_table, out)
    options = TopKOptions(k, next_n, block_size)
    if compiling():
        return run_traced(Call(_TOP_K, objects, options, stream))[0]
    known = repeated(_TOP_K, objects, options, stream)
    return (run(Call(_TOP_K, objects, options, stream), is_asked=True) if known is None else known)[0]


FUNCTIONS["top_k"] = top_k
