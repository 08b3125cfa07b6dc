"""Calls that torch has to see, by their operators.

An eager call of plain tensors never comes here. What comes is a call that is read by torch.compile (`trace`), or one
whose tensors have no memory, are wrapped by a transform, or are watched by a dispatch mode (`run_call`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...checks.attention import check_values
from ...launch.dropout import RNG
from ...launch.score_mod import PREFIX
from ...plan.engine import Call
from ...problems import GRADIENTS
from . import blocks, caches, e4m3, indexer, quantizers, transforms, with_cache
from .head_dims import one_head_dim
from .library import fail, plain, precision_text
from .operators import dropout_text, score_mod_text


def _needs_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x is not None and _requires_grad(x) for x in tensors)


def _requires_grad(x: torch.Tensor) -> bool:
    # A tensor that vmap has wrapped does not say that the one within requires a gradient.
    if not torch.compiler.is_dynamo_compiling():
        while not x.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def trace(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    mask: Any = None,
    sinks: Any = None,
    block_mask: Any = None,
    block_size: Any = None,
    score_mod: Any = None,
    arrays: Sequence[Any] = (),
    options: Any,
    out: Any = None,
    stream: Any = None,
    descales: Sequence[Any] = (),
    dropout: tuple[float, Any] | None = None,
) -> Any:
    """`attention` or `attention_varlen` by their operators.

    Parameters
    ----------
    descales : sequence
        Factors of q, k and v in e4m3, all three or none.
    score_mod : (key, expression, mask, grad, names), optional
        A score modification without its arrays, which are ``arrays``.
    dropout : (p, tensor of seed and offset), optional
    options : AttentionOptions
        The others: as the caller of the function gave them.

    Returns
    -------
    o, or (o, lse)

    Raises
    ------
    ArgumentError, UnsupportedError
        What an operator cannot have: ``out``, ``stream``, arrays of other libraries.
    """
    for name, x in (("out", out), ("stream", stream)):
        if x is not None:
            fail("argument", name, "None in a traced or compiled call", "one", function=function)
    options, max_seqlen_q, max_seqlen_k, block_size = plain((options, max_seqlen_q, max_seqlen_k, block_size))
    if any(x is not None for x in descales) or (isinstance(q, torch.Tensor) and q.dtype is torch.float8_e4m3fn):
        if not (block_mask is score_mod is block_table is dropout is None):
            expected = "a 16-bit array, with score_mod, block_mask, block_table or dropout"
            fail("argument", "q", expected, "e4m3", function=function)
        sequences = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        return e4m3.trace(function, (q, k, v), sequences, mask, sinks, descales, options)
    if quantizers.is_quantized(q, k, v):
        if not (block_mask is score_mod is dropout is None):
            expected = "an array that is not quantized, with score_mod, block_mask or dropout"
            fail("argument", "q", expected, type(q).__name__, function=function)
        return quantizers.trace_attention(
            function,
            q,
            k,
            v,
            (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table),
            (max_seqlen_q, max_seqlen_k),
            mask,
            sinks,
            options,
        )
    others = {"mask": mask, "sinks": sinks, "seqused_q": seqused_q, "seqused_k": seqused_k}
    for name, x in {"q": q, "k": k, "v": v, **others}.items():
        if not isinstance(x, torch.Tensor) and not (x is None and name in others):
            fail(
                "unsupported", f"{function}(): argument {name!r} is a {type(x).__name__} in a traced or compiled call",
                instead="torch tensors",
            )  # fmt: skip
    e4m3.check_out_dtype(function, options.out_dtype, str(q.dtype).removeprefix("torch."))
    if function == "attention_varlen":
        needed = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
        for name, x in needed if block_table is None else needed[:1]:
            if not isinstance(x, torch.Tensor):
                fail("argument", name, "an int32 tensor of shape (batch + 1,)", type(x).__name__, function=function)
        if block_table is not None:
            for name, x in (("block_table", block_table), ("seqused_k", seqused_k)):
                if not isinstance(x, torch.Tensor):
                    fail("argument", name, "an int32 tensor", type(x).__name__, function=function)
            if cu_seqlens_k is not None:
                fail(
                    "argument", "cu_seqlens_k", "None with block_table", type(cu_seqlens_k).__name__, function=function
                )
        for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if x is None:
                fail("argument", name, "an integer", "None", function=function)
    # torch.jit.trace compares what it recorded with a call whose tensors need no gradients.
    with_lse, padded = options.return_lse or torch._C._get_tracing_state() is not None, None
    if _needs_gradient(q, k, v, mask, sinks):
        with_lse = True
        if block_table is not None:
            transforms.refuse_pages(function)
        padded = one_head_dim(q, k, v, options.softmax_scale)
        if padded is not None:
            q, k, v = padded[:3]
            options = options._replace(softmax_scale=padded.softmax_scale)
        check_differentiable(function, score_mod, arrays, options.precision)
    score_mod, arrays = _scores_of(function, score_mod, arrays, dropout)
    score = _score(options, score_mod)
    forward = (precision_text(options.precision, function), with_lse)
    if function == "attention":
        size = _size(block_size)
        o, lse = transforms.call(function, (q, k, v, block_mask, mask, sinks, list(arrays), *score, *forward, size))
    else:
        packed = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k)
        o, lse = transforms.call(function, (q, k, v, *packed, mask, sinks, list(arrays), *score, *forward))
    if padded is not None:
        o = o[..., : padded.head_dim_v]
    return (o, lse) if options.return_lse else o


def check_differentiable(function: str, score_mod: Any, arrays: Sequence[Any], precision: Any = None) -> None:
    """Raise for what has no gradient."""
    if getattr(precision, "sparse", None) is not None:
        transforms.refuse_sparse(function)
    if score_mod is not None and score_mod[3] is None:
        fail(
            "unsupported",
            f"{function}(): an argument requires a gradient, and the score_mod comes without its derivative",
            instead="ScoreMod(..., grad=the derivative of the new score by the old one)",
        )
    if _needs_gradient(*arrays):
        fail(
            "unsupported",
            f"{function}(): an array of the score_mod requires a gradient, which only q, k, v, sinks and mask can have",
            instead="passing tensor.detach()",
        )


def run_call(call: Call) -> list[Any]:
    """A call of any operation whose tensors are wrapped, watched or without memory; results as `plan.engine.run`."""
    function = call.operation.name
    call.options = plain(call.options)
    if function in ("decode", "append", "attention_sparse"):
        return caches.run(call)
    if function == "attention_with_kvcache":
        return with_cache.run(call)
    if function in ("index_logits", "top_k"):
        return indexer.run(call)
    if function == "sparse_blocks":
        return blocks.run(call)
    if function in ("quantize_qk", "quantize_v") or "q_int" in call.operation.arrays:
        return quantizers.run(call)
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    if function == "merge_states":
        for name, x in (("out", given["out"]), ("stream", call.stream)):
            if x is not None:
                fail("argument", name, "None in a traced or compiled call", "one", function=function)
        return list(transforms.call(function, [given[name] for name in ("o_a", "lse_a", "o_b", "lse_b")]))
    if not _has_symbols(call.options):
        check_values(call.options, function)
    changes = _changes_of(call, given)
    if function.endswith("_backward"):
        return trace_backward(function, given, call.options, stream=call.stream, **changes)
    o = trace(
        function, given["q"], given["k"], given["v"], cu_seqlens_q=given["cu_seqlens_q"],
        cu_seqlens_k=given["cu_seqlens_k"], seqused_q=given.get("seqused_q"), seqused_k=given.get("seqused_k"),
        block_table=given.get("block_table"), max_seqlen_q=call.options.max_seqlen_q,
        max_seqlen_k=call.options.max_seqlen_k, mask=given["mask"], sinks=given["sinks"],
        options=call.options, out=given["out"], stream=call.stream,
        descales=[given.get(name) for name in ("descale_q", "descale_k", "descale_v")], **changes,
    )  # fmt: skip
    return list(o) if call.options.return_lse else [o]


def _has_symbols(options: Any) -> bool:
    """Whether a number is one of a trace with symbolic shapes, which says nothing of its value."""
    window = options.window if isinstance(options.window, (tuple, list)) else ()
    numbers = (options.softmax_scale, options.softcap, *window)
    return any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in numbers)


def trace_backward(
    function: str,
    arrays_by_name: dict[str, Any],
    options: Any,
    score_mod: Any = None,
    arrays: Sequence[Any] = (),
    stream: Any = None,
    block_mask: Any = None,
    block_size: Any = None,
    dropout: tuple[float, Any] | None = None,
) -> list[Any]:
    """`attention_backward` or `attention_varlen_backward` by their operators: what is wanted, in order of `GRADIENTS`.

    Parameters
    ----------
    arrays_by_name : dict
        As in `checks.backward.PACKED_ARRAYS`.
    score_mod, arrays, block_mask, block_size, dropout
        As in `trace`.
    options : BackwardOptions
    """
    if torch._C._get_tracing_state() is not None:
        fail(
            "unsupported", f"{function}() within torch.jit.trace, which records no operator with names of gradients",
            instead="torch.compile or torch.export",
        )  # fmt: skip
    score_mod, arrays = _scores_of(function, score_mod, arrays, dropout)
    given, options, block_size = arrays_by_name, plain(options), plain(block_size)
    for name in ("given.dq", "given.dk", "given.dv"):
        if given[name] is not None:
            fail("argument", name[6:], "None in a traced or compiled call", "one", function=function)
    if stream is not None:
        fail("argument", "stream", "None in a traced or compiled call", "one", function=function)
    before: tuple[Any, ...] = (block_mask,)
    size: tuple[Any, ...] = (_size(block_size),)
    if "varlen" in function:
        size = ()
        before = (
            given["cu_seqlens_q"], given["cu_seqlens_k"], given["seqused_q"], given["seqused_k"],
            options.max_seqlen_q, options.max_seqlen_k,
        )  # fmt: skip
    results = transforms.call(
        function,
        (
            given["do"], given["q"], given["k"], given["v"], given["o"], given["lse"], given["dlse"], *before,
            given["mask"], given["sinks"], list(arrays), *_score(plain(options), score_mod),
            [name for name in GRADIENTS if name in options.wanted], *size,
        ),
    )  # fmt: skip
    return list(results)


def _changes_of(call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `trace` and `trace_backward`: what changes scores and probabilities of a call."""
    # Facts of another class say how a plan divides a GPU, which operators are not told.
    mod, (_, size, p) = call.subject, call.facts if call.facts.__class__ is tuple else (None, None, 0.0)
    return {
        "score_mod": None if mod is None else mod.facts[0],
        "arrays": [x for name, x in given.items() if name.startswith(PREFIX)],
        "block_mask": given.get("block_mask"), "block_size": size, "dropout": (p, given[RNG]) if p else None,
    }  # fmt: skip


def _size(block_size: Any) -> Any:
    """Queries and keys of a block, as operators take them."""
    return None if block_size is None else [block_size] * 2 if isinstance(block_size, int) else list(block_size)


def _scores_of(
    function: str, score_mod: Any, arrays: Sequence[Any], dropout: tuple[float, Any] | None
) -> tuple[Any, Sequence[Any]]:
    """A score modification, or the text of dropout, and its arrays."""
    if dropout is None:
        return score_mod, arrays
    p, rng = dropout
    if score_mod is not None:
        fail("unsupported", f"{function}(): dropout_p={p:g} with score_mod", instead="dropout_p=0.0")
    if not isinstance(rng, torch.Tensor):
        fail("argument", "dropout_rng", "a tensor, or two integers", type(rng).__name__, function=function)
    return dropout_text(p), [rng]


def _score(options: Any, score_mod: Any) -> tuple[Any, ...]:
    """Options that all operators have, from those of a call. score_mod: its parts, or the text of dropout."""
    text = score_mod if isinstance(score_mod, str) else None
    if score_mod is not None and text is None:
        text = score_mod_text(*score_mod)
    return (
        options.layout, options.causal, None if options.window is None else list(options.window),
        options.softmax_scale, float(options.softcap), text, options.deterministic,
    )  # fmt: skip
