"""`decode` and `append` as operators: a cache is its planes, which `append` changes, and its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...arrays.identity import of_key
from ...errors import UnsupportedError
from ...plan.engine import Call
from .. import FUNCTIONS
from .library import LIBRARY, TAGS, fail, plain

_TABLES = "Tensor seq_lens, Tensor? block_table, Tensor? recent_slots"
LIBRARY.define(
    f"decode(Tensor[] planes, Tensor[] key_arrays, int cache, Tensor q, {_TABLES}, Tensor? sinks, SymInt[]? window, "
    "float? softmax_scale, float softcap, bool return_lse, bool deterministic, SymInt shared_prefix) "
    "-> (Tensor, Tensor)",
    tags=TAGS,
)
LIBRARY.define(
    "attention_sparse(Tensor[] planes, Tensor[] key_arrays, int cache, Tensor q, Tensor indices, Tensor? topk_length, "
    "Tensor? sinks, float? softmax_scale, float softcap, bool return_lse, bool return_max, bool deterministic) "
    "-> Tensor[]",
    tags=TAGS,
)
LIBRARY.define(
    "attention_sparse_rows(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? sinks, SymInt head_dim_v, "
    "float? softmax_scale, float softcap, bool return_lse, bool return_max, bool deterministic) -> Tensor[]",
    tags=TAGS,
)
LIBRARY.define(
    "append(Tensor(a!)[] planes, Tensor[] key_arrays, int cache, Tensor k, Tensor? v, Tensor? seq_lens, "
    "Tensor? block_table, Tensor? recent_slots, Tensor? cu_seqlens, Tensor? cos, Tensor? sin, str rope, "
    "Tensor? slot_mapping=None, Tensor? positions=None, Tensor? k_pe=None) -> ()",
    tags=TAGS,
)


def cache_of(number: int, planes: Sequence[torch.Tensor], key_arrays: Sequence[torch.Tensor], function: str) -> Any:
    """The cache of a number, or one like it where the planes are copies, as functionalization makes them."""
    cache = of_key(number)
    if cache is None:
        raise UnsupportedError(
            f"{function}(): the cache that this was compiled or exported with is gone",
            instead="compiling it again with the cache that it shall use, which has to live as long",
        )
    own = [t.ptr for t in cache.tensors]
    return cache if [x.data_ptr() for x in (*planes, *key_arrays)] == own else cache.on(planes, key_arrays)


def _decode(
    planes: Any, key_arrays: Any, number: int, q: Any, seq_lens: Any, block_table: Any, recent_slots: Any, sinks: Any,
    window: Any, softmax_scale: Any, softcap: float, return_lse: bool, deterministic: bool, shared_prefix: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    results = FUNCTIONS["decode"](
        q, cache_of(number, planes, key_arrays, "decode"), seq_lens=seq_lens, block_table=block_table,
        recent_slots=recent_slots, sinks=sinks, window=None if window is None else tuple(window),
        softmax_scale=softmax_scale, softcap=softcap, return_lse=return_lse, deterministic=deterministic,
        shared_prefix=shared_prefix,
    )  # fmt: skip
    return results if return_lse else (results, q.new_empty((0,), dtype=torch.float32))


def _decode_shapes(
    planes: Any, key_arrays: Any, number: int, q: Any, seq_lens: Any, block_table: Any, recent_slots: Any, sinks: Any,
    window: Any, softmax_scale: Any, softcap: float, return_lse: bool, deterministic: bool, shared_prefix: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, q_len, heads, dim = q.shape
    shape = (batch, heads, q_len) if return_lse else (0,)
    return q.new_empty((batch, q_len, heads, value_dim(number, dim))), q.new_empty(shape, dtype=torch.float32)


def value_dim(number: int, dim: int) -> int:
    """Channels of o: of a latent cache fewer than q's."""
    cache = of_key(number)
    return dim if cache is None else int(cache.v_format.head_dim)


def _sparse(
    planes: Any, key_arrays: Any, number: int, q: Any, indices: Any, topk_length: Any, sinks: Any, softmax_scale: Any,
    softcap: float, return_lse: bool, return_max: bool, deterministic: bool,
) -> list[torch.Tensor]:  # fmt: skip
    function = "attention_sparse" if q.dim() == 3 else "decode"
    options = {"return_max": return_max} if function == "attention_sparse" else {}
    results = FUNCTIONS[function](
        q, cache_of(number, planes, key_arrays, function), indices=indices, topk_length=topk_length, sinks=sinks,
        softmax_scale=softmax_scale, softcap=softcap, return_lse=return_lse, deterministic=deterministic, **options,
    )  # fmt: skip
    return list(results) if isinstance(results, tuple) else [results]


def _sparse_shapes(
    planes: Any, key_arrays: Any, number: int, q: Any, indices: Any, topk_length: Any, sinks: Any, softmax_scale: Any,
    softcap: float, return_lse: bool, return_max: bool, deterministic: bool,
) -> list[torch.Tensor]:  # fmt: skip
    *lead, heads, dim = q.shape
    of_rows = (lead[0], heads) if len(lead) == 1 else (lead[0], heads, lead[1])
    found = [q.new_empty((*lead, heads, value_dim(number, dim)))]
    return found + [q.new_empty(of_rows, dtype=torch.float32) for wanted in (return_lse, return_max) if wanted]


def _sparse_rows(
    q: Any, kv: Any, indices: Any, topk_length: Any, sinks: Any, head_dim_v: int, softmax_scale: Any, softcap: float,
    return_lse: bool, return_max: bool, deterministic: bool,
) -> list[torch.Tensor]:  # fmt: skip
    results = FUNCTIONS["attention_sparse"](
        q, kv, indices=indices, topk_length=topk_length, sinks=sinks, head_dim_v=head_dim_v,
        softmax_scale=softmax_scale, softcap=softcap, return_lse=return_lse, return_max=return_max,
        deterministic=deterministic,
    )  # fmt: skip
    return list(results) if isinstance(results, tuple) else [results]


def _sparse_rows_shapes(
    q: Any, kv: Any, indices: Any, topk_length: Any, sinks: Any, head_dim_v: Any, softmax_scale: Any, softcap: float,
    return_lse: bool, return_max: bool, deterministic: bool,
) -> list[torch.Tensor]:  # fmt: skip
    tokens, heads = q.shape[:2]
    found = [q.new_empty((tokens, heads, head_dim_v))]
    return found + [q.new_empty((tokens, heads), dtype=torch.float32) for wanted in (return_lse, return_max) if wanted]


def _append(
    planes: Any, key_arrays: Any, number: int, k: Any, v: Any, seq_lens: Any, block_table: Any, recent_slots: Any,
    cu_seqlens: Any, cos: Any, sin: Any, rope: str, slot_mapping: Any = None, positions: Any = None, k_pe: Any = None,
) -> None:  # fmt: skip
    FUNCTIONS["append"](
        cache_of(number, planes, key_arrays, "append"), k, v, seq_lens=seq_lens, cu_seqlens=cu_seqlens,
        block_table=block_table, slot_mapping=slot_mapping, positions=positions, cos=cos, sin=sin, rope=rope,
        recent_slots=recent_slots, k_pe=k_pe,
    )  # fmt: skip


def _append_shapes(*arguments: Any) -> None:
    return None


for _name, _kernel, _shapes in (
    ("decode", _decode, _decode_shapes), ("attention_sparse", _sparse, _sparse_shapes),
    ("attention_sparse_rows", _sparse_rows, _sparse_rows_shapes), ("append", _append, _append_shapes),
):  # fmt: skip
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"omniattn::{_name}", _shapes, lib=LIBRARY)


def arrays_of(call: Call) -> dict[str, Any]:
    """The arrays of a call by name; raises for what no operator on a cache has."""
    function, cache = call.operation.name, call.cache
    assert cache is not None
    if not cache.plain_torch:
        fail("unsupported", f"{function}(): a traced or compiled call with a cache of another library's arrays",
             instead="a cache made with like= a torch tensor")  # fmt: skip
    return _checked(call)


def _checked(call: Call) -> dict[str, Any]:
    """Arrays that an operator can have."""
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    for name, x in (("out", given.get("out")), ("stream", call.stream)):
        if x is not None:
            fail("argument", name, "None in a traced or compiled call", "one", function=call.operation.name)
    check_no_gradient(given)
    return given


def check_no_gradient(given: Mapping[str, Any]) -> None:
    """Raise for an array that requires a gradient."""
    for name, x in given.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            fail("unsupported", f"argument {name!r} requires a gradient, which this call does not compute",
                 instead="calling under torch.no_grad() or torch.inference_mode(), or passing tensor.detach()"
                 )  # fmt: skip


def run(call: Call) -> list[Any]:
    """A call of `decode` or `append` by its operator; results as `plan.engine.run`."""
    function, cache, given = call.operation.name, call.cache, arrays_of(call)
    assert cache is not None
    planes, key_arrays = cache.operands
    if "indices" in given:
        if (given["q"].dim() == 3) != (function == "attention_sparse"):
            expected = "3 dimensions" if function == "attention_sparse" else "4 dimensions"
            fail("argument", "q", expected, f"{given['q'].dim()}", function=function)
        x = plain(call.options)
        return list(torch.ops.omniattn.attention_sparse.default(
            list(planes), list(key_arrays), cache.key, given["q"], given["indices"], given["topk_length"],
            given["sinks"], x.softmax_scale, float(x.softcap), x.return_lse, x.return_max, x.deterministic,
        ))  # fmt: skip
    tables = (given["seq_lens"], given["block_table"], given["recent_slots"])
    x = call.options
    if function == "append":
        torch.ops.omniattn.append.default(
            list(planes), list(key_arrays), cache.key, given["k"], given["v"], *tables, given["cu_seqlens"],
            given["cos"], given["sin"], x.rope, given["slot_mapping"], given["positions"], given["k_pe"],
        )  # fmt: skip
        return []
    x = plain(x)
    o, lse = torch.ops.omniattn.decode.default(
        list(planes), list(key_arrays), cache.key, given["q"], *tables, given["sinks"],
        None if x.window is None else list(x.window), x.softmax_scale, float(x.softcap), x.return_lse, x.deterministic,
        x.shared_prefix,
    )  # fmt: skip
    return [o, lse] if x.return_lse else [o]


def run_rows(call: Call, kv: Any, head_dim_v: int) -> list[Any]:
    """A call of `attention_sparse` over an array by its operator; results as `plan.engine.run`."""
    function, given = call.operation.name, _checked(call)
    check_no_gradient({"kv": kv})
    for name, x in (("kv", kv), ("q", given["q"]), ("indices", given["indices"])):
        if not isinstance(x, torch.Tensor):
            fail("argument", name, "a tensor in a traced or compiled call", type(x).__name__, function=function)
    if given["q"].dim() != 3:
        fail("argument", "q", "3 dimensions", f"{given['q'].dim()}", function=function)
    x = plain(call.options)
    return list(torch.ops.omniattn.attention_sparse_rows.default(
        given["q"], kv, given["indices"], given["topk_length"], given["sinks"], head_dim_v, x.softmax_scale,
        float(x.softcap), x.return_lse, x.return_max, x.deterministic,
    ))  # fmt: skip
