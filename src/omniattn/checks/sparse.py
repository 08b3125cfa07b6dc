"""What ``attention_sparse``, and ``decode`` with ``indices``, may be given."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, ShapeError, UnsupportedError
from ..kv.cache import KVCache
from ..plan.engine import Call
from ..problems import DecodeProblem
from . import values
from .caches import check_int32
from .decode import check_queries, check_scale_sinks_out, has_maps

#: The caller's arrays, in the order of a call.
ARRAYS = ("q", "indices", "topk_length", "sinks", "out")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "out"})


class SparseOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    softmax_scale: Any
    softcap: Any
    return_lse: Any
    return_max: Any
    deterministic: Any


def check_sparse(call: Call, tensors: dict[str, Tensor]) -> DecodeProblem:
    """The problem of a call: its query tokens are the sequences, of one query each."""
    name, cache, options = call.operation.name, call.cache, call.options
    assert cache is not None
    flags = (
        arguments.check_bool(getattr(options, flag), flag, name)
        for flag in ("return_lse", "return_max", "deterministic")
    )
    return_lse, return_max, deterministic = flags
    softcap = values.check_softcap(options.softcap, name)
    q, indices = tensors["q"], tensors["indices"]
    arrays.require_same_device(
        [q, indices, *cache.tensors, *(t for n, t in tensors.items() if n not in ("q", "indices"))]
    )
    _check_cache(cache, name)
    _check_extents(q, name)
    check_queries(q, cache, name)
    lead = tuple(q.shape[:-2])
    check_int32(indices, (*lead, None), f"({', '.join(map(str, lead))}, topk), topk >= 1", name)
    topk = indices.shape[-1]
    if topk > arguments.MAX_ROWS:
        raise ShapeError("indices", f"topk up to {arguments.MAX_ROWS}", f"{topk}", function=name)
    length = tensors.get("topk_length")
    if length is not None:
        _check_length(length, lead, name)
    scale, sinks, o_strides = check_scale_sinks_out(options.softmax_scale, tensors, cache, name)
    tokens = q.shape[1] if len(lead) == 2 else 0
    batch = lead[0] * max(tokens, 1)
    q_strides = _joined(q, q.strides, tokens, "q", name)
    out_strides = _joined(tensors.get("out", q), o_strides, tokens, "out", name)
    return DecodeProblem(
        q.dtype, cache.facts, batch, 1, q.shape[-2], 1, q.shape[-1], topk, cache.block_size, cache.num_blocks, topk, -1,
        scale, softcap, sinks, deterministic, 0, return_lse, q_strides, out_strides, tensor_maps=has_maps(q, cache),
        topk=topk, tokens=tokens, has_lengths=length is not None, maximum=return_max,
    )  # fmt: skip


def _check_extents(q: Tensor, function: str) -> None:
    """Query tokens one behind the other, or those of sequences: `decode` has the latter."""
    names = "batch, q_len, num_q_heads, head_dim" if function == "decode" else "tokens, num_q_heads, head_dim"
    rank = names.count(",") + 1
    if len(q.shape) != rank:
        expected = f"{rank} dimensions ({names})"
        raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=function)
    if len(q.shape) == 4 and q.shape[1] < 1:
        raise ShapeError("q", "q_len of 1 or more", f"{q.shape[1]}", function=function)


def _check_cache(cache: KVCache, function: str) -> None:
    argument = "cache" if function == "decode" else "kv"
    if not cache.facts.is_latent:
        raise UnsupportedError(
            f"{function}(): lists of rows of a cache with K and V of their own",
            instead="a latent cache, whose rows are both: from_arrays(..., head_dim_v=)",
        )
    if cache.num_blocks * cache.block_size > arguments.MAX_ROWS:
        expected = f"at most {arguments.MAX_ROWS} rows, which int32 numbers can name"
        raise ArgumentError(argument, expected, f"{cache.num_blocks * cache.block_size}", function=function)


def _check_length(length: Tensor, lead: tuple[int, ...], function: str) -> None:
    """One for each query token, or for each sequence of one."""
    if len(lead) == 2 and lead[1] == 1 and len(length.shape) == 1:
        check_int32(length, (lead[0],), f"({lead[0]},)", function)
        return
    check_int32(length, lead, f"({', '.join(map(str, lead))}{',' if len(lead) == 1 else ''})", function)


def _joined(t: Tensor, strides: tuple[int, ...], tokens: int, name: str, function: str) -> tuple[int, int, int, int]:
    """Strides (token, 0, head, channel) of an array whose first two dimensions, of four, are one to the kernels."""
    if not tokens:
        return strides[0], 0, strides[1], strides[2]
    batch, step = t.shape[0], strides[1] if tokens > 1 else strides[0]
    if t.device == "cuda" and min(batch, tokens) > 1 and strides[0] != tokens * strides[1]:
        expected = f"first two dimensions that lie as one, strides ({tokens} * s, s, ...)"
        raise ArgumentError(name, expected, f"strides {tuple(strides)}", function=function)
    return step, 0, strides[2], strides[3]


def host_lengths(tensors: dict[str, Tensor], topk: int, function: str) -> Any:
    """``topk_length`` on the CPU, one a token, or None; on a GPU a look at it would need a synchronization."""
    if "topk_length" not in tensors:
        return None
    lengths = arrays.to_numpy(tensors["topk_length"]).reshape(-1)
    bad = [int(x) for x in lengths if not 0 <= x <= topk]
    if bad:
        raise ArgumentError("topk_length", f"0 to {topk}, the entries of a list", f"{bad[0]}", function=function)
    return lengths
