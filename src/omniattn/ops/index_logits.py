"""``index_logits``: the scores by which sparse attention chooses its keys."""

from __future__ import annotations

from typing import Any

from ..checks import indexer as checks
from ..checks.indexer import LogitsOptions
from ..checks.memory import check_memory
from ..frameworks import FUNCTIONS, compiling
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_index_logits
from . import on_cpu_indexer
from .traced import run_traced

_INDEX_LOGITS = Operation(
    "index_logits", checks.LOGITS_ARRAYS, checks.check_index_logits, check_memory, plan_index_logits,
    on_cpu_indexer.index_logits, ("q", "k", "weights"), checks.LOGITS_ALIGNED, given={"logits": "out"},
    traced=run_traced,
)  # fmt: skip


def index_logits(
    q: Any,
    k: Any,
    weights: Any,
    *,
    k_scale: Any = None,
    seq_lens: Any = None,
    block_table: Any = None,
    max_keys: int | None = None,
    k_start: Any = None,
    k_end: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Scores of the indexer of DeepSeek sparse attention, by which `top_k` chooses the keys that a query attends to.

    ::

        logits[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])       s that query t sees; -inf elsewhere

    With ``seq_lens`` k is a paged cache and q the newest tokens of each sequence (decode). Without it the keys lie one
    behind the other, and each query has a range of them (prompts).

    Parameters
    ----------
    q : array, float8_e4m3fn
        (batch, next_n, heads, 128) with ``seq_lens``, else (rows, heads, 128); 1 to 128 heads. 128 is contiguous; the
        other strides are free (on a GPU multiples of 16, addresses too). Scales of q belong to the weights.
    k : array
        With ``seq_lens`` a cache. uint8, (blocks, block_size, 1, 132) or (blocks, block_size, 132), without
        ``k_scale``: each block has block_size * 128 bytes of values in float8_e4m3fn, and behind them block_size
        scales in float32, as vLLM and DeepGEMM lay it out. Or float8_e4m3fn, (blocks, block_size, 128) or (blocks,
        block_size, 1, 128), with ``k_scale``. Any block_size; blocks may have bytes between them.
        Without ``seq_lens`` float8_e4m3fn, (keys, 128), with ``k_scale``.
    weights : array, (rows, heads), float32
        rows is batch * next_n: the queries of a sequence one behind the other. Of either sign.
    k_scale : array, (blocks, block_size) or (keys,), float32, optional
        Of each key.
    seq_lens : array, (batch,), int32, optional
        Tokens of each sequence, the new ones included: query i sees the keys j <= seq_lens[b] - next_n + i. Checked on
        the CPU; on a GPU lengths beyond the columns are taken as their end, and those below 0 as 0.
    block_table : array, (batch, max_blocks), int32, with ``seq_lens``
        The block that holds keys block_size * j and on of sequence b is block_table[b, j]. Only the entries that
        seq_lens reaches are read. Checked on the CPU; on a GPU a number that is no block is taken as the nearest one.
    max_keys : int, optional
        With ``seq_lens``: columns of the logits; max_blocks * block_size unless given.
    k_start, k_end : array, (rows,), int32, optional
        Without ``seq_lens``: row t sees the keys k_start[t] <= s < k_end[t]; 0 and all keys unless given. From 0 to
        keys: checked on the CPU, on a GPU taken as the nearest of these. No key where k_start is not below k_end.
    out : array, (rows, max_keys), float32, optional
        Where the logits go; the last dimension contiguous. It shares no element with another array. A torch tensor
        counts as changed in place.
    stream : optional
        As in `attention`.

    Returns
    -------
    logits : array, (rows, max_keys) or (rows, keys), float32
        Of q's framework. All elements are written: -inf where a query does not see a key. NaN in a key that a query
        sees, in q or in a weight makes the logit NaN.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. Products of e4m3 are summed in
    fp32; the tensor cores of Hopper keep about 13 bits of each sum of 32 products. Nothing is synchronized, and lengths
    are read on the device: a call captured in a CUDA graph may be replayed with other ones in the same arrays. The bits
    of a row depend on that row's arrays only. No gradients. Source: DeepSeek-V3.2 (2025), "Lightning Indexer".
    """
    objects = (q, k, weights, k_scale, seq_lens, block_table, k_start, k_end, out)
    options = LogitsOptions(max_keys)
    if compiling():
        return run_traced(Call(_INDEX_LOGITS, objects, options, stream))[0]
    known = repeated(_INDEX_LOGITS, objects, options, stream)
    return (run(Call(_INDEX_LOGITS, objects, options, stream), is_asked=True) if known is None else known)[0]


FUNCTIONS["index_logits"] = index_logits
