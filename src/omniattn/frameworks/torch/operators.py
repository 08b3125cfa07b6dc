"""Operators of the library ``omniattn``: what torch.compile, torch.export and functional transforms see of a call.

An eager call of plain tensors never comes here. What comes is a call that is read by torch.compile (`trace`), or one
whose tensors have no memory, are wrapped by a transform, or are watched by a dispatch mode (`run_call`). Kernels of the
operators call the public functions, so that every check and every plan is that of eager calls.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...arrays.identity import of_key
from ...checks.values import check_layout
from ...errors import ArgumentError, UnsupportedError
from ...launch.score_mod import PREFIX
from ...plan.engine import Call
from ...problems import GRADIENTS, Int4, Int8
from .. import FUNCTIONS

LIBRARY = torch.library.Library("omniattn", "DEF")

_ARRAYS = "Tensor? mask, Tensor? sinks, Tensor[] arrays"
_OPTIONS = (
    "str layout, bool causal, SymInt[]? window, float? softmax_scale, float softcap, str? score_mod, bool deterministic"
)
_QKV = "Tensor q, Tensor k, Tensor v"
_PACKED = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_FORWARD = "str precision, bool return_lse"
_GRADIENTS = "Tensor do, {}, Tensor o, Tensor lse, Tensor? dlse"

_SCHEMAS = {
    "attention": f"({_QKV}, Tensor? block_mask, {_ARRAYS}, {_OPTIONS}, {_FORWARD}, SymInt[]? block_size) "
    "-> (Tensor, Tensor)",
    "attention_varlen": f"({_QKV}, {_PACKED}, {_ARRAYS}, {_OPTIONS}, {_FORWARD}) -> (Tensor, Tensor)",
    "attention_backward": f"({_GRADIENTS.format(_QKV)}, {_ARRAYS}, {_OPTIONS}, str[] wanted) -> Tensor[]",
    "attention_varlen_backward": f"({_GRADIENTS.format(_QKV)}, {_PACKED}, {_ARRAYS}, {_OPTIONS}, str[] wanted) "
    "-> Tensor[]",
    "merge_states": "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)",
}  # fmt: skip

#: Inductor must not choose other strides than the caller's: kernels take what has contiguous channels.
TAGS = tuple(
    tag for tag in (getattr(torch.Tag, "needs_exact_strides", None), torch.Tag.pt2_compliant_tag) if tag is not None
)
for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=TAGS)


_OVERLOADS = {name: getattr(torch.ops.omniattn, name).default for name in _SCHEMAS}


def operator(name: str) -> Any:
    """The overload that calls go to."""
    return _OVERLOADS[name]


@torch.compiler.assume_constant_result
def fail(error: str, *texts: str, **named: str) -> None:
    """Raise one of the package's errors. torch.compile runs this while it reads the caller, and shows the error."""
    raise {"argument": ArgumentError, "unsupported": UnsupportedError}[error](*texts, **named)


class Score(NamedTuple):
    """What operators get of the options, in the order of their schemas."""

    layout: Any
    causal: Any
    window: Any
    softmax_scale: Any
    softcap: Any
    score_mod: Any
    deterministic: Any


# --- Options that an operator takes as text --------------------------------------------------------------------------


def precision_text(precision: Any, function: str) -> str:
    """``precision`` as text; `precision_of` reads it."""
    if isinstance(precision, str):
        return precision
    if isinstance(precision, (Int8, Int4)):
        return (
            f"{'Int8' if isinstance(precision, Int8) else 'Int4'}("
            f"granularity={precision.granularity!r}, smooth_k={precision.smooth_k}, smooth_q={precision.smooth_q}, "
            f"smooth_v={precision.smooth_v}, pv={precision.pv!r}, pv_accumulator={precision.pv_accumulator!r})"
        )
    fail("argument", "precision", "a string, an Int8 or an Int4", type(precision).__name__, function=function)
    return ""


@functools.lru_cache(maxsize=256)
def precision_of(text: str) -> Any:
    """What `precision_text` made a text of."""
    kind, _, rest = text.partition("(")
    if not rest:
        return text
    knobs = ast.parse(f"f({rest}", mode="eval").body
    assert isinstance(knobs, ast.Call)
    return {"Int8": Int8, "Int4": Int4}[kind](**{x.arg: ast.literal_eval(x.value) for x in knobs.keywords if x.arg})


@functools.lru_cache(maxsize=256)
def _score_mod_parts(text: str) -> tuple[Any, ...]:
    return ast.literal_eval(text)


def _score_mod_of(text: str | None, arrays: Sequence[Any]) -> Any:
    """The ScoreMod of a text and arrays; its NumPy functions are those of the object it was made of, while it lives."""
    if text is None:
        return None
    expression, mask, grad, names, key = _score_mod_parts(text)
    alive = of_key(key)
    return FUNCTIONS["ScoreMod"](
        expression, mask, getattr(alive, "reference", None), grad, getattr(alive, "reference_grad", None),
        **dict(zip(names, arrays, strict=True)),
    )  # fmt: skip


# --- Kernels ---------------------------------------------------------------------------------------------------------


def _options(score: Sequence[Any], arrays: Sequence[Any]) -> dict[str, Any]:
    layout, causal, window, softmax_scale, softcap, score_mod, deterministic = score
    return {
        "layout": layout, "causal": causal, "window": None if window is None else tuple(window),
        "softmax_scale": softmax_scale, "softcap": softcap, "score_mod": _score_mod_of(score_mod, arrays),
        "deterministic": deterministic,
    }  # fmt: skip


def _both(results: Any, return_lse: bool, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return results if return_lse else (results, q.new_empty((0,), dtype=torch.float32))


def _attention(
    q: Any, k: Any, v: Any, block_mask: Any, mask: Any, sinks: Any, arrays: Any, *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *score, precision, return_lse, block_size = more
    results = FUNCTIONS["attention"](
        q, k, v, block_mask=block_mask, mask=mask, sinks=sinks, precision=precision_of(precision),
        return_lse=return_lse, block_size=None if block_size is None else tuple(block_size),
        **_options(score, arrays),
    )  # fmt: skip
    return _both(results, return_lse, q)


def _attention_varlen(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, max_q: int, max_k: int, mask: Any, sinks: Any, arrays: Any,
    *more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    *score, precision, return_lse = more
    results = FUNCTIONS["attention_varlen"](
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=max_q, max_seqlen_k=max_k, mask=mask,
        sinks=sinks, precision=precision_of(precision), return_lse=return_lse, **_options(score, arrays),
    )  # fmt: skip
    return _both(results, return_lse, q)


def _attention_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, mask: Any, sinks: Any, arrays: Any, *more: Any
) -> list[torch.Tensor]:
    *score, wanted = more
    return list(
        FUNCTIONS["attention_backward"](
            do, q, k, v, o, lse, dlse=dlse, mask=mask, sinks=sinks, wanted=tuple(wanted), **_options(score, arrays)
        )
    )


def _attention_varlen_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, starts_q: Any, starts_k: Any, max_q: int, max_k: int,
    mask: Any, sinks: Any, arrays: Any, *more: Any,
) -> list[torch.Tensor]:  # fmt: skip
    *score, wanted = more
    return list(
        FUNCTIONS["attention_varlen_backward"](
            do, q, k, v, o, lse, dlse=dlse, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=max_q,
            max_seqlen_k=max_k, mask=mask, sinks=sinks, wanted=tuple(wanted), **_options(score, arrays),
        )
    )  # fmt: skip


def _merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return FUNCTIONS["merge_states"](o_a, lse_a, o_b, lse_b)


# --- Shapes, for tensors without memory ------------------------------------------------------------------------------


def _empty(like: torch.Tensor, shape: Sequence[Any] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(tuple(like.shape if shape is None else shape), dtype=dtype or like.dtype)


def _lse_of(q: torch.Tensor, layout: str, packed: bool, return_lse: bool) -> torch.Tensor:
    if not return_lse:
        shape: tuple[Any, ...] = (0,)
    elif packed:
        rows, heads = (q.shape[0], q.shape[1]) if layout == "NHD" else (q.shape[1], q.shape[0])
        shape = (heads, rows)
    else:
        rows, heads = (q.shape[1], q.shape[2]) if layout == "NHD" else (q.shape[2], q.shape[1])
        shape = (q.shape[0], heads, rows)
    return _empty(q, shape, torch.float32)


def _check_ranks(function: str, layout: str, rank: int, **tensors: torch.Tensor) -> None:
    check_layout(layout, function)
    for name, x in tensors.items():
        if x.ndim != rank:
            raise ArgumentError(name, f"{rank} dimensions", f"shape {tuple(x.shape)}", function=function)


def _attention_shapes(q: Any, k: Any, v: Any, block_mask: Any, mask: Any, sinks: Any, arrays: Any, *more: Any) -> Any:
    _check_ranks("attention", more[0], 4, q=q, k=k, v=v)
    layout, return_lse = more[0], more[-2]
    return _empty(q), _lse_of(q, layout, False, return_lse)


def _varlen_shapes(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, max_q: Any, max_k: Any, mask: Any, sinks: Any, arrays: Any,
    *more: Any,
) -> Any:  # fmt: skip
    _check_ranks("attention_varlen", more[0], 3, q=q, k=k, v=v)
    layout, return_lse = more[0], more[-1]
    return _empty(q), _lse_of(q, layout, True, return_lse)


def _gradients_shapes(q: Any, k: Any, v: Any, mask: Any, sinks: Any, wanted: Sequence[str]) -> list[torch.Tensor]:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    made = {
        "dq": lambda: _empty(q), "dk": lambda: _empty(k), "dv": lambda: _empty(v),
        "dsinks": lambda: _empty(q, sinks.shape, sums), "dmask": lambda: _empty(q, mask.shape, sums),
    }  # fmt: skip
    return [made[name]() for name in wanted]


def _backward_shapes(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, mask: Any, sinks: Any, arrays: Any, *more: Any
) -> Any:
    return _gradients_shapes(q, k, v, mask, sinks, more[-1])


def _varlen_backward_shapes(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, starts_q: Any, starts_k: Any, max_q: Any, max_k: Any,
    mask: Any, sinks: Any, arrays: Any, *more: Any,
) -> Any:  # fmt: skip
    return _gradients_shapes(q, k, v, mask, sinks, more[-1])


def _merge_shapes(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
    return _empty(o_a), _empty(lse_a)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_attention, _attention_shapes),
    "attention_varlen": (_attention_varlen, _varlen_shapes),
    "attention_backward": (_attention_backward, _backward_shapes),
    "attention_varlen_backward": (_attention_varlen_backward, _varlen_backward_shapes),
    "merge_states": (_merge_states, _merge_shapes),
}
for _name, (_kernel, _shapes) in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"omniattn::{_name}", _shapes, lib=LIBRARY)


# --- Calls -----------------------------------------------------------------------------------------------------------


def _needs_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def trace(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
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
) -> Any:
    """`attention` or `attention_varlen` by their operators.

    Parameters
    ----------
    score_mod : (key, expression, mask, grad, names), optional
        A score modification without its arrays, which are ``arrays``.
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
    if quantizers.is_quantized(q, k, v):
        if block_mask is not None or score_mod is not None:
            fail("argument", "q", "an array that is not quantized, with score_mod or block_mask", type(q).__name__,
                 function=function)  # fmt: skip
        return quantizers.trace_attention(
            function, q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), mask, sinks, options
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            fail(
                "unsupported", f"{function}(): argument {name!r} is a {type(x).__name__} in a traced or compiled call",
                instead="torch tensors",
            )  # fmt: skip
    if function == "attention_varlen":
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if not isinstance(x, torch.Tensor):
                fail("argument", name, "an int32 tensor of shape (batch + 1,)", type(x).__name__, function=function)
        for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if x is None:
                fail("argument", name, "an integer", "None", function=function)
    with_lse = options.return_lse
    if _needs_gradient(q, k, v, mask, sinks):
        with_lse = True
        check_differentiable(function, score_mod, arrays, block_mask)
    score = _score(options, score_mod)
    forward = (precision_text(options.precision, function), with_lse)
    if function == "attention":
        size = None if block_size is None else [block_size] * 2 if isinstance(block_size, int) else list(block_size)
        o, lse = transforms.call(function, (q, k, v, block_mask, mask, sinks, list(arrays), *score, *forward, size))
    else:
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        o, lse = transforms.call(function, (q, k, v, *packed, mask, sinks, list(arrays), *score, *forward))
    return (o, lse) if options.return_lse else o


def check_differentiable(function: str, score_mod: Any, arrays: Sequence[Any], block_mask: Any) -> None:
    """Raise for what has no gradient."""
    if block_mask is not None:
        fail(
            "unsupported",
            f"{function}(): an argument requires a gradient, which block_mask does not have",
            instead="the blocks in mask, or a ScoreMod with mask= and grad=",
        )
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
    if function in ("decode", "append"):
        return caches.run(call)
    if function in ("quantize_qk", "quantize_v") or "q_int" in call.operation.arrays:
        return quantizers.run(call)
    if function not in _SCHEMAS:
        raise UnsupportedError(
            f"{function}() of tensors that are traced, wrapped by a transform or watched by a dispatch mode",
            instead="calling it on plain tensors",
        )
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    if function == "merge_states":
        if given["out"] is not None or call.stream is not None:
            raise ArgumentError("out" if call.stream is None else "stream", "None in a traced call", "one")
        return list(transforms.call(function, [given[name] for name in ("o_a", "lse_a", "o_b", "lse_b")]))
    mod = call.subject
    names = [name for name in given if name.startswith(PREFIX)]
    arrays = [given[name] for name in names]
    parts = None if mod is None else (mod.key, mod.expression, mod.mask, mod.grad, tuple(mod.arrays))
    if function.endswith("_backward"):
        return trace_backward(function, given, call.options, parts, arrays, call.stream)
    o = trace(
        function, given["q"], given["k"], given["v"], cu_seqlens_q=given["cu_seqlens_q"],
        cu_seqlens_k=given["cu_seqlens_k"], max_seqlen_q=call.options.max_seqlen_q,
        max_seqlen_k=call.options.max_seqlen_k, mask=given["mask"], sinks=given["sinks"],
        block_mask=given.get("block_mask"), block_size=call.facts[1] if "block_mask" in given else None,
        score_mod=parts, arrays=arrays, options=call.options, out=given["out"], stream=call.stream,
    )  # fmt: skip
    return list(o) if call.options.return_lse else [o]


def trace_backward(
    function: str,
    arrays_by_name: dict[str, Any],
    options: Any,
    score_mod: Any = None,
    arrays: Sequence[Any] = (),
    stream: Any = None,
) -> list[Any]:
    """`attention_backward` or `attention_varlen_backward` by their operators: what is wanted, in order of `GRADIENTS`.

    Parameters
    ----------
    arrays_by_name : dict
        As in `checks.backward.ARRAYS`.
    score_mod, arrays
        As in `trace`.
    options : BackwardOptions
    """
    given = arrays_by_name
    for name in ("given.dq", "given.dk", "given.dv"):
        if given[name] is not None:
            fail("argument", name[6:], "None in a traced or compiled call", "one", function=function)
    if stream is not None:
        fail("argument", "stream", "None in a traced or compiled call", "one", function=function)
    packed: tuple[Any, ...] = ()
    if "varlen" in function:
        packed = (given["cu_seqlens_q"], given["cu_seqlens_k"], options.max_seqlen_q, options.max_seqlen_k)
    results = transforms.call(
        function,
        (
            given["do"], given["q"], given["k"], given["v"], given["o"], given["lse"], given["dlse"], *packed,
            given["mask"], given["sinks"], list(arrays), *_score(options, score_mod),
            [name for name in GRADIENTS if name in options.wanted],
        ),
    )  # fmt: skip
    return list(results)


def _score(options: Any, score_mod: Any) -> tuple[Any, ...]:
    """Options that all operators have, from those of a call."""
    text = None
    if score_mod is not None:
        key, expression, visible, grad, names = score_mod
        text = f"({expression!r}, {visible!r}, {grad!r}, {names!r}, {key})"
    return (
        options.layout, options.causal, None if options.window is None else list(options.window),
        options.softmax_scale, float(options.softcap), text, options.deterministic,
    )  # fmt: skip


# What is built on the definitions above: operators of caches; gradients, vmap and autocast.
from . import caches, quantizers, transforms  # noqa: E402
