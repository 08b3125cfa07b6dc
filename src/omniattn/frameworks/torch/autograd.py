"""Gradients by torch's autograd: what `attention` and `attention_varlen` do with tensors that need one.

The public functions come here only then, so that a plain call does not pay for it. Forward and backward are calls like
any other, which `plan.engine.run` plans and repeats.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

from ...checks.attention import check_values
from ...errors import ArgumentError, UnsupportedError
from ...plan import native
from ...plan.engine import KNOWN_CALLS, Call, run
from ...problems import GRADIENTS
from .head_dims import one_head_dim
from .repeated import KNOWN, Backward, Repeated, key_of, learn, objects_of, saved_of

#: What has a gradient, by the name of its gradient.
_OF = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "mask": "dmask"}


def run_with_gradients(call: Call, backward: Backward) -> list[Any]:
    """Run a call of attention whose results autograd shall differentiate.

    Parameters
    ----------
    call : Call
        One of its tensors requires a gradient.
    backward : callable
        Gives the call of the backward.

    Returns
    -------
    list of tensor
        As `plan.engine.run`.

    Raises
    ------
    UnsupportedError
        What has no gradient: a predicted block mask, arrays of a score modification; ``out`` and ``stream``;
        forward-mode derivatives.
    """
    _check(call)
    padded = None
    q, k, v, *others = call.objects
    if all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        padded = one_head_dim(q, k, v, call.options.softmax_scale)
    if padded is not None:
        options = call.options._replace(softmax_scale=padded.softmax_scale)
        call = Call(call.operation, (*padded[:3], *others), options, call.stream, None, call.facts, call.subject)
    o, lse = _Attention.apply(call, backward, *call.objects)
    if padded is not None:
        o = o[..., : padded.head_dim_v]
    else:
        learn(call, backward)
    return [o, lse] if call.options.return_lse else [o]


def _run_known(call: Call) -> list[Any] | None:
    """`run_with_gradients` of a call like one that has run; None if there was none."""
    key, addresses = key_of(call)
    known = None if key is None else KNOWN.get(key)
    if known is None:
        return None
    q, k, v, *_ = call.objects
    results = _apply_known(known, call.objects, addresses, q, k, v)
    if results is None:
        return None
    known.runs += 1
    if known.runs % native.OFFERED == 1:
        native.learn_gradients(call, functools.partial(_run_by_module, known))
    return list(results)


def _run_by_module(known: Repeated, objects: tuple[Any, ...]) -> list[Any] | None:
    """`_run_known` of a call that the C module has found to be like one that has run."""
    results = _apply_known(known, objects, None, objects[0], objects[1], objects[2])
    return None if results is None else list(results)


class _Attention(torch.autograd.Function):
    """Attention, with the gradients of q, k, v, sinks and mask.

    Without ``setup_context``, which makes torch look at the signature at every call: transforms, which need one, come
    to the operators.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, backward: Backward, *objects: Any) -> tuple[Any, Any]:
        ctx.set_materialize_grads(False)
        ctx.backward_of = backward
        # Without grad mode, as autograd calls this, tensors that need gradients are tensors like others.
        options = call.options._replace(return_lse=True)
        o, lse = run(Call(call.operation, objects, options, None, None, call.facts, call.subject))
        # Autograd keeps tensors, and notices changes in place; arrays of other libraries only need to be kept.
        tensors = [x if isinstance(x, torch.Tensor) else None for x in objects]
        ctx.save_for_backward(o, lse, *tensors)
        ctx.others = [None if t is x else x for t, x in zip(tensors, objects, strict=True)]
        ctx.call = _with_options(call)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        o, lse, *objects = ctx.saved_tensors
        objects = [t if x is None else x for t, x in zip(objects, ctx.others, strict=True)]
        needed = ctx.needs_input_grad[2:]
        return (None, None, *_differentiate(ctx.backward_of, ctx.call, needed, do, o, lse, dlse, objects))


class _Known(torch.autograd.Function):
    """`_Attention` of a call like one that has run (`repeated.Repeated`), whose gradients are those of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, known: Repeated, objects: tuple[Any, ...], addresses: list[int] | None, q: Any, k: Any, v: Any
    ) -> tuple[Any, ...] | None:
        results = known.run_forward(objects, addresses)
        if results is None:
            return None
        o, lse = results
        ctx.set_materialize_grads(False)
        ctx.known = known
        ctx.save_for_backward(*saved_of(objects, o, lse))
        return (o, lse) if known.call.options.return_lse else (o,)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> tuple[Any, ...]:
        known = ctx.known
        needed = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        usual = dlse is None and not torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled()
        if usual:
            made = known.run_backward(needed, do, saved)
            if made is not None:
                return (None, None, None, *made)
        objects = objects_of(saved)
        every = (*needed, *(False,) * (len(objects) - 3))
        learn_with = (known, needed) if usual else None
        found = _differentiate(known.backward_of, known.call, every, do, saved[3], saved[4], dlse, objects, learn_with)
        return (None, None, None, *found[:3])


#: `Function.apply` without a search for transforms that have ended: no tensor here is one of theirs (`key_of`).
_apply_known: Any = getattr(super(torch.autograd.Function, _Known), "apply", _Known.apply)
KNOWN_CALLS.append(_run_known)


def _differentiate(
    backward_of: Backward,
    call: Call,
    needed: tuple[bool, ...],
    do: Any,
    o: Any,
    lse: Any,
    dlse: Any,
    objects: list[Any],
    known: tuple[Repeated, tuple[bool, ...]] | None = None,
) -> tuple[Any, ...]:
    """Gradients of the call's arrays ``objects``, None for those that need none."""
    names = call.operation.arrays
    wanted = tuple(_OF[name] for name, needs in zip(names, needed, strict=True) if needs)
    if not wanted or (do is None and dlse is None):
        return (None,) * len(names)
    arrays = dict(zip(names, objects, strict=True))
    if do is None:
        do = torch.zeros_like(o)
    strict = torch.are_deterministic_algorithms_enabled()
    if strict and not torch.is_deterministic_algorithms_warn_only_enabled():
        call = _with_options(call, deterministic=True)
    if torch.is_grad_enabled():
        with torch.no_grad():
            results = run(backward_of(call, arrays, do, o, lse, dlse, wanted))
        results = _Final.apply(call.operation.name, len(results), *results, do, dlse, *arrays.values())
    else:
        its = backward_of(call, arrays, do, o, lse, dlse, wanted)
        results = run(its)
        if known is not None:
            known[0].learn_backward(known[1], its, do)
    found = dict(zip((name for name in GRADIENTS if name in wanted), results, strict=True))
    gradients: list[Any] = []
    for name in names:
        gradient = found.get(_OF.get(name, ""))
        if gradient is not None and gradient.dtype is not arrays[name].dtype:
            gradient = gradient.to(arrays[name].dtype)  # sums are float32, whatever sinks and masks are
        gradients.append(gradient)
    return tuple(gradients)


class _Final(torch.autograd.Function):
    """Gradients as they are, where their own graph is asked for (``create_graph``): an error for who follows it.

    torch's ``once_differentiable`` looks at the incoming gradient only. These depend on q, k and v too.
    """

    @staticmethod
    def forward(ctx: Any, function: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.function = function
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(
            f"{ctx.function}(): no second derivatives",
            instead="gradients without create_graph=True, or attention written out in torch",
        )


def _with_options(call: Call, **changes: Any) -> Call:
    """The call with other options, and without its arrays, which autograd keeps in its own way."""
    return Call(call.operation, (), call.options._replace(**changes), None, None, call.facts, call.subject)


def _check(call: Call) -> None:
    function = call.operation.name
    needing = [
        name for name, x in zip(call.operation.arrays, call.objects, strict=True)
        if isinstance(x, torch.Tensor) and x.requires_grad
    ]  # fmt: skip
    first = needing[0]
    check_values(call.options, function)
    if not isinstance(call.objects[0], torch.Tensor):
        expected = f"a torch tensor, because argument {first!r} requires a gradient"
        raise ArgumentError("q", expected, type(call.objects[0]).__name__, function=function)
    instead = "calling under torch.no_grad() or torch.inference_mode(), or passing tensor.detach()"
    for name in needing:
        if name not in _OF:
            raise UnsupportedError(
                f"{function}(): argument {name!r} requires a gradient, which only q, k, v, sinks and mask can have",
                instead=instead,
            )
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    for name, there in (("out", given.get("out") is not None), ("stream", call.stream is not None)):
        if there:
            hint = "with torch.cuda.stream(...) chooses the stream" if name == "stream" else None
            raise ArgumentError(
                name, f"None, because argument {first!r} requires a gradient", "one", function=function, hint=hint
            )
    if getattr(call.options.precision, "sparse", None) is not None:
        raise UnsupportedError(
            f"{function}(): argument {first!r} requires a gradient, which sparse= of a precision does not have",
            instead="block_mask=sparse_blocks(...)",
        )
    if given.get("block_table") is not None:
        raise UnsupportedError(
            f"{function}(): argument {first!r} requires a gradient, which block_table does not have",
            instead="k and v as packed sequences, or tensor.detach()",
        )
    mod = call.subject
    if mod is not None and mod.grad is None and mod.reference_grad is None:
        raise UnsupportedError(
            f"{function}(): argument {first!r} requires a gradient, and the score_mod comes without its derivative",
            instead="ScoreMod(..., grad=the derivative of the new score by the old one)",
        )
    if getattr(forward_ad, "_current_level", -1) >= 0:
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise UnsupportedError(
                    f"{function}(): argument {name!r} has a tangent (forward-mode differentiation), and attention has "
                    "gradients only",
                    instead="torch.autograd.forward_ad.unpack_dual(tensor).primal",
                )
