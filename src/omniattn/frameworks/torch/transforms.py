"""Gradients, vmap and autocast of the library's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from .library import LIBRARY, Score, fail
from .operators import alive_score_mod, operator

#: What has a gradient, by the name of its gradient.
_OF = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "mask": "dmask"}
_TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "mask", "sinks", "block_mask")


@functools.cache
def _names(function: str) -> tuple[str, ...]:
    return tuple(x.name for x in operator(function)._schema.arguments)


# --- Gradients -------------------------------------------------------------------------------------------------------


def _remember(function: str, ctx: Any, inputs: Sequence[Any], output: tuple[Any, Any]) -> None:
    """Keep what the backward of an operator needs."""
    given = dict(zip(_names(function), inputs, strict=True))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *(given.get(name) for name in _TENSORS), *given["arrays"])
    ctx.options = Score(*(given[name] for name in Score._fields))
    # The backward may run when the caller has let it go.
    ctx.score_mod = alive_score_mod(ctx.options.score_mod)
    ctx.predicts_blocks = ", sparse=(" in (given.get("precision") or "")
    ctx.block_size = given.get("block_size")
    ctx.has_pages = given.get("block_table") is not None
    ctx.longest = tuple(given[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in given)


def _gradients(function: str, ctx: Any, do: Any, dlse: Any, needed: dict[str, Any]) -> tuple[Any, ...]:
    """Gradients of an operator's arguments, in their order."""
    o, lse, *saved = ctx.saved_tensors
    given, arrays = dict(zip(_TENSORS, saved, strict=False)), saved[len(_TENSORS) :]
    wanted = [gradient for name, gradient in _OF.items() if needed[name] is True]
    made: dict[str, Any] = {}
    if wanted and not (do is None and dlse is None):
        if ctx.predicts_blocks:
            refuse_sparse(function)
        if ctx.has_pages:
            refuse_pages(function)
        options = ctx.options
        always = torch.are_deterministic_algorithms_enabled()
        if always and not torch.is_deterministic_algorithms_warn_only_enabled():
            options = options._replace(deterministic=True)
        packed = bool(ctx.longest)
        before = (*(given[name] for name in _TENSORS[3:7]), *ctx.longest) if packed else (given["block_mask"],)
        results = call(
            f"{function}_backward",
            (
                torch.zeros_like(o) if do is None else do, given["q"], given["k"], given["v"], o, lse, dlse, *before,
                given["mask"], given["sinks"], arrays, *options, wanted, *(() if packed else (ctx.block_size,)),
            ),
        )  # fmt: skip
        for gradient, name in zip(wanted, (name for name in _OF if needed[name] is True), strict=True):
            made[name] = results[wanted.index(gradient)].to(given[name].dtype)  # sums are float32, whatever these are
    nothing = [None] * len(arrays)
    return tuple(nothing if name == "arrays" else made.get(name) for name in _names(function))


def refuse_sparse(function: str) -> None:
    """Raise, because a block mask that a precision predicts is not there any more."""
    fail(
        "unsupported", f"{function}(): an argument requires a gradient, which sparse= of a precision does not have",
        instead="block_mask=sparse_blocks(...)",
    )  # fmt: skip


def refuse_pages(function: str) -> None:
    """Raise, because nothing is differentiated by pools of pages."""
    fail(
        "unsupported", f"{function}(): an argument requires a gradient, which block_table does not have",
        instead="k and v as packed sequences, or tensor.detach()",
    )  # fmt: skip


def _with_gradients(function: str) -> None:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        _remember(function, ctx, inputs, output)

    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        return _gradients(function, ctx, do, dlse, dict(zip(_names(function), ctx.needs_input_grad, strict=True)))

    torch.library.register_autograd(f"omniattn::{function}", backward, setup_context=setup, lib=LIBRARY)


#: Operators whose results have no gradient: why not, and what to do.
_NO_GRADIENT = {
    "merge_states": ("no gradient", "o = o_a * exp(lse_a - lse) + o_b * exp(lse_b - lse), in torch"),
    **dict.fromkeys(
        ("attention_backward", "attention_varlen_backward"),
        ("no second derivatives", "gradients without create_graph=True, or attention written out in torch"),
    ),
}


def _refuse(function: str) -> Any:
    what, instead = _NO_GRADIENT[function]
    raise UnsupportedError(f"{function}(): {what}", instead=instead)


def _without_gradients(function: str) -> None:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def backward(ctx: Any, *gradients: Any) -> Any:
        return _refuse(function)

    torch.library.register_autograd(f"omniattn::{function}", backward, setup_context=setup, lib=LIBRARY)


for _function in ("attention", "attention_varlen"):
    _with_gradients(_function)
for _function in _NO_GRADIENT:
    _without_gradients(_function)


class _Transformed(torch.autograd.Function):
    """An operator under `torch.func`'s transforms, which those of a library cannot be differentiated by.

    Its inputs are the operator's name and arguments, with the arrays of a score modification behind them.
    """

    @staticmethod
    def forward(function: str, count: int, *flat: Any) -> Any:
        results = operator(function)(*_nested(function, count, flat))
        return tuple(results) if isinstance(results, list) else results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function, count, *flat = inputs
        ctx.function, ctx.count = function, count
        if function not in _NO_GRADIENT:
            _remember(function, ctx, _nested(function, count, flat), output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.function in _NO_GRADIENT:
            _refuse(ctx.function)
        needed = dict(zip(_names(ctx.function), ctx.needs_input_grad[2:], strict=False))
        do, dlse = gradients
        made = _gradients(ctx.function, ctx, do, dlse, needed)
        return (None, None, *(None if isinstance(x, list) else x for x in made), *(None for _ in range(ctx.count)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: str, count: int, *flat: Any) -> Any:
        rule = _map(function, call)
        results, dims = rule(info, _nested(function, count, in_dims[2:]), *_nested(function, count, flat))
        return (tuple(results), tuple(dims)) if isinstance(results, list) else (results, dims)


def _nested(function: str, count: int, flat: Sequence[Any]) -> tuple[Any, ...]:
    """The operator's arguments, from those of `_Transformed`."""
    index = _names(function).index("arrays") if count else None
    arguments = list(flat[: len(flat) - count])
    if index is not None:
        arguments[index] = list(flat[len(flat) - count :])
    elif "arrays" in _names(function):
        arguments[_names(function).index("arrays")] = []
    return tuple(arguments)


def call(function: str, arguments: Sequence[Any]) -> Any:
    """An operator's results, whatever transforms its tensors are wrapped by."""
    if torch.compiler.is_dynamo_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return operator(function)(*arguments)
    names = _names(function)
    arrays = arguments[names.index("arrays")] if "arrays" in names else ()
    flat = [None if name == "arrays" else x for name, x in zip(names, arguments, strict=True)]
    return _Transformed.apply(function, len(arrays), *flat, *arrays)


# --- vmap ------------------------------------------------------------------------------------------------------------

#: Dense operators: arguments whose first dimension is the batch, which a mapped dimension is made part of.
_BATCHED = {
    "attention": ("q", "k", "v", "mask", "block_mask"),
    "attention_backward": ("do", "q", "k", "v", "o", "lse", "dlse", "mask", "block_mask"),
    "merge_states": ("o_a", "lse_a", "o_b", "lse_b"),
}  # fmt: skip


def _map(function: str, run: Callable[[str, Sequence[Any]], Any]) -> Callable[..., Any]:
    """The rule of an operator; ``run`` gives the results of one without the mapped dimension."""
    names = _names(function)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, given = info.batch_size, dict(zip(names, args, strict=True))
        # Only here it can be seen that autograd differentiates by what vmap has wrapped, for which it needs the LSE.
        if given.get("return_lse") is False and torch.is_grad_enabled() and _requires_grad(given):
            given["return_lse"] = True
            args = tuple(given.values())
        dims = dict(zip(names, in_dims, strict=True))
        if _is_reshape(function, given, dims):
            return _as_batch(function, names, given, dims, size, run)
        made = [run(function, _item(args, in_dims, i)) for i in range(size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*made, strict=True))
        return (list(stacked), [0] * len(stacked)) if "_backward" in function else (stacked, (0,) * len(stacked))

    return rule


def _requires_grad(given: dict[str, Any]) -> bool:
    return any(given[name] is not None and given[name].requires_grad for name in _OF)


def _is_mapped(dim: Any) -> bool:
    return any(d is not None for d in dim) if isinstance(dim, (list, tuple)) else dim is not None


def _is_reshape(function: str, given: dict[str, Any], dims: dict[str, Any]) -> bool:
    """Whether a mapped dimension can be made part of the batch."""
    batched = _BATCHED.get(function)
    if batched is None or any(_is_mapped(dim) and name not in batched for name, dim in dims.items()):
        return False
    # A score modification sees the number of the sequence; gradients that are sums over the batch would mix.
    if given.get("score_mod") is not None:
        return False
    # The first of them is never broadcast: mapped or not, it says how long the batch is.
    if given[batched[0]].ndim - (dims[batched[0]] is not None) != 4:
        return False
    if function == "attention_backward":
        return not {"dsinks", "dmask"} & set(given["wanted"])
    return True


def _as_batch(
    function: str, names: Sequence[str], given: dict[str, Any], dims: dict[str, Any], size: int,
    run: Callable[[str, Sequence[Any]], Any],
) -> tuple[Any, Any]:  # fmt: skip
    first, dim = given[_BATCHED[function][0]], dims[_BATCHED[function][0]]
    batch = first.shape[0] if dim is None else first.movedim(dim, 0).shape[1]
    merged = dict(given)
    for name in _BATCHED[function]:
        y, dim = given[name], dims[name]
        if y is None:
            continue
        broadcast = name in ("mask", "block_mask")
        if broadcast and dim is None and (y.ndim < 4 or y.shape[0] == 1):
            continue  # the same for all
        y = y.unsqueeze(0) if dim is None else y.movedim(dim, 0)
        if broadcast:
            y = y.reshape(y.shape[0], *(1,) * (5 - y.ndim), *y.shape[1:])
        y = y.expand(size, batch if broadcast and y.shape[1] == 1 else y.shape[1], *y.shape[2:])
        merged[name] = y.reshape(-1, *y.shape[2:])
    results = run(function, [merged[name] for name in names])
    parts = [_split(r, size) for r in results]
    return (parts, [0] * len(parts)) if "_backward" in function else (tuple(parts), (0,) * len(parts))


def _split(x: torch.Tensor, size: int) -> torch.Tensor:
    """The mapped dimension apart again; an LSE that was not asked for has nothing to be split."""
    return x.new_empty((size, 0)) if x.ndim == 1 else x.unflatten(0, (size, -1))


def _item(args: Sequence[Any], dims: Sequence[Any], i: int) -> list[Any]:
    made: list[Any] = []
    for x, dim in zip(args, dims, strict=True):
        if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
            made.append(_item(x, dim, i))
        else:
            made.append(x if dim is None else x.select(dim, i))
    return made


def _run_operator(function: str, arguments: Sequence[Any]) -> Any:
    return operator(function)(*arguments)


# Of a graph of torch.compile. The dispatcher, which calls these rules, passes on to the next transform by itself.
for _function in ("attention", "attention_varlen", "attention_backward", "attention_varlen_backward", "merge_states"):
    torch.library.register_vmap(f"omniattn::{_function}", _map(_function, _run_operator), lib=LIBRARY)


# --- Autocast --------------------------------------------------------------------------------------------------------


def autocast(device: str, tensors: Sequence[Any]) -> list[Any]:
    """q, k and v as torch's own attention gets them under autocast: float32 in the type of autocast."""
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors]


def _autocast_rule(function: str, device: str) -> Callable[..., Any]:
    op = operator(function)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCPU
    )

    def rule(q: Any, k: Any, v: Any, *others: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*autocast(device, (q, k, v)), *others)

    return rule


for _function in ("attention", "attention_varlen"):
    for _key, _device in (("AutocastCUDA", "cuda"), ("AutocastCPU", "cpu")):
        LIBRARY.impl(_function, _autocast_rule(_function, _device), _key)
