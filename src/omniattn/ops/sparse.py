"""``attention_sparse``: each query token attends to rows that a list names (DeepSeek sparse attention)."""

from __future__ import annotations

from typing import Any

from .. import arguments, arrays
from ..checks import sparse as checks
from ..checks.memory import check_memory
from ..checks.sparse import SparseOptions
from ..errors import ArgumentError, ShapeError, StrideError, UnsupportedError
from ..frameworks import FUNCTIONS, compiling
from ..kv.cache import KVCache, PagedKVCache
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_decode
from . import on_cpu
from .traced import run_traced, run_traced_rows


def _traced(call: Call) -> list[Any]:
    """A call that a framework has to see: torch's operator."""
    cache = call.cache
    if not compiling() and (arrays.traced_by_jax(call.objects) or (cache is not None and cache.traced)):
        raise UnsupportedError(
            f"{call.operation.name}(): lists of rows in a function that JAX traces", instead="the call outside of jit"
        )
    return run_traced(call)


def _operation(name: str) -> Operation:
    return Operation(
        name, checks.ARRAYS, checks.check_sparse, check_memory, plan_decode, on_cpu.sparse, ("q", "indices"),
        checks.ALIGNED, traced=_traced,
    )  # fmt: skip


#: Channels of the value of rows in an array, unless given: those of DeepSeek's and Kimi's models.
_HEAD_DIM_V = 512
_SPARSE = _operation("attention_sparse")
#: The same, with the name that errors say.
_DECODE = _operation("decode")


def attention_sparse(
    q: Any,
    kv: Any,
    *,
    indices: Any,
    topk_length: Any = None,
    head_dim_v: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    return_lse: bool = False,
    return_max: bool = False,
    out: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> Any:
    """Attention of query tokens over the rows of a latent array that each one's list names.

    ::

        k = kv[indices[t]];  S = softmax_scale * q[t] @ k.T;  o[t] = softmax(S) @ k[:, :head_dim_v]

    DeepSeek sparse attention (DeepSeek-V3.2, 2025) of a prompt, after an indexer has chosen the rows. All query heads
    of a token share its list. Causality is the list's matter.

    Parameters
    ----------
    q : array, (tokens, num_q_heads, head_dim), float16 or bfloat16, on the CPU float32 and float64 too
        Strides and addresses as `decode`'s.
    kv : array, (rows, 1, head_dim) or (rows, head_dim), or a latent KVCache or PagedKVCache
        Rows, of which the first head_dim_v channels are the value too, in the formats of a latent cache
        (`KVCache.from_arrays`): 16 bits, float8_e4m3fn, or 656 bytes. On a GPU head_dim is 576 and head_dim_v 512.
    indices : array, (tokens, topk) or (tokens, 1, topk), int32, on q's device
        Numbers of rows; of a cache block * block_size + token. Contiguous, topk 1 or more. Those below 0 or beyond the
        last row are no keys, and may stand anywhere. A row that is named twice counts twice.
    topk_length : array, (tokens,), int32, on q's device, optional
        Entries of each list that count, from the first on; all unless given. From 0 to topk: checked on the CPU; on a
        GPU more than topk count as topk, and less than 0 as 0.
    head_dim_v : int, optional
        Of ``kv`` as an array: channels of the value, 512 unless given. A cache has its own; another number raises.
    softmax_scale : float, optional
        1 / sqrt(head_dim) unless given.
    softcap : float
        0 for none.
    sinks : array, (num_q_heads,), float32 or q's dtype, optional
        As in `decode`.
    return_lse, return_max : bool
        Also return the log-sum-exp, and the largest score.
    out, stream
        As in `decode`.
    deterministic : bool
        The bits of a token's result depend on that token only, as in `decode`.

    Returns
    -------
    o : array, (tokens, num_q_heads, head_dim_v)
        Of q's framework and dtype. A row without keys is 0.
    lse : array, (tokens, num_q_heads), float32, natural logarithm
        Only with ``return_lse``. A row without keys has -inf (with sinks: the sink).
    row_max : array, (tokens, num_q_heads), float32
        Only with ``return_max``: the largest score, after scale and softcap, without sinks; -inf without keys.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: those of `decode` over latent caches; arrays on the CPU run the NumPy reference. Nothing is synchronized. No
    gradients. Under torch.compile it is an operator.
    """
    if not isinstance(kv, KVCache) and (compiling() or arrays.needs_torch_operator((q, kv))):
        said = SparseOptions(softmax_scale, softcap, return_lse, return_max, deterministic)
        call = Call(_SPARSE, (q, _flat(indices, q), topk_length, sinks, out), said, stream)
        found = run_traced_rows(call, kv, _HEAD_DIM_V if head_dim_v is None else head_dim_v)
        return found[0] if len(found) == 1 else tuple(found)
    cache = kv if isinstance(kv, KVCache) else _cache_of(kv, head_dim_v)
    if cache is kv and head_dim_v is not None and cache.facts.is_latent:
        _check_width(head_dim_v, cache)
    said = SparseOptions(softmax_scale, softcap, return_lse, return_max, deterministic)
    return _run(_SPARSE, (q, _flat(indices, q), topk_length, sinks, out), said, stream, cache)


def decode_listed(q: Any, cache: KVCache, arrays_: tuple[Any, ...], options: SparseOptions, stream: Any) -> Any:
    """``decode`` with ``indices``; ``arrays_``: indices, topk_length, sinks, out."""
    return _run(_DECODE, (q, *arrays_), options, stream, cache)


def _run(operation: Operation, objects: tuple[Any, ...], said: SparseOptions, stream: Any, cache: KVCache) -> Any:
    if compiling():
        results = _traced(Call(operation, objects, said, stream, cache))
    else:
        known = repeated(operation, objects, said, stream, cache)
        results = run(Call(operation, objects, said, stream, cache), is_asked=True) if known is None else known
    return results[0] if len(results) == 1 else tuple(results)


def _cache_of(kv: Any, head_dim_v: int | None) -> KVCache:
    """A cache of one block of rows."""
    t = arrays.describe_of("attention_sparse", kv, "kv")
    if len(t.shape) not in (2, 3) or (len(t.shape) == 3 and t.shape[1] != 1):
        expected = "(rows, 1, head_dim) or (rows, head_dim)"
        raise ShapeError("kv", expected, f"shape {tuple(t.shape)}", function="attention_sparse")
    if t.shape[0] < 1:
        raise ShapeError("kv", "1 or more rows", f"shape {tuple(t.shape)}", function="attention_sparse")
    rows = kv.reshape(1, t.shape[0], 1, t.shape[-1]) if len(t.shape) == 2 else kv[None]
    try:
        cache: KVCache = PagedKVCache.from_arrays(rows, head_dim_v=_HEAD_DIM_V if head_dim_v is None else head_dim_v)
    except (ShapeError, StrideError) as error:
        # As the caller's array has it, not as a block of one.
        own = f"shape {tuple(t.shape)}" if isinstance(error, ShapeError) else f"strides {tuple(t.strides)}"
        named = error.named("attention_sparse", k="kv")
        if named.argument == "kv":
            named = type(error)("kv", error.expected, own, function="attention_sparse", hint=error.hint)
        raise named from None
    except ArgumentError as error:
        raise error.named("attention_sparse", k="kv") from None
    cache.planes["k"].argument = "kv"  # as errors of the call shall name it
    return cache


def _check_width(head_dim_v: Any, cache: KVCache) -> None:
    """``head_dim_v`` beside a cache, which has one."""
    own = cache.v_format.head_dim
    if arguments.check_int(head_dim_v, "head_dim_v", "attention_sparse") != own:
        raise ArgumentError(
            "head_dim_v", f"None or {own} with a cache, which has its own", repr(head_dim_v),
            function="attention_sparse",
        )  # fmt: skip


def _flat(indices: Any, q: Any) -> Any:
    """Lists as (tokens, topk): those of FlashMLA have a dimension for the one kv head."""
    shape, of_q = arguments.shape_of(indices), arguments.shape_of(q)
    if shape is None:
        raise ArgumentError("indices", "an int32 array", type(indices).__name__, function="attention_sparse")
    return indices[:, 0] if len(shape) == 3 and shape[1] == 1 and len(of_q or ()) == 3 else indices


FUNCTIONS["attention_sparse"] = attention_sparse
