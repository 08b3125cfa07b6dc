"""``attention_backward`` and ``attention_varlen_backward``."""

from __future__ import annotations

import functools
from typing import Any

from .. import arrays
from ..checks import attention as forward_checks
from ..checks import backward as checks
from ..checks.backward import BackwardOptions
from ..checks.dropout import EXPECTED, FROM_FORWARD
from ..checks.memory import check_memory
from ..errors import ArgumentError
from ..frameworks import FUNCTIONS, compiling
from ..plan.backward import plan_backward
from ..plan.engine import Call, Operation, run
from ..plan.tuning import SharedGpu
from ..problems import GRADIENTS, OPERANDS
from . import dropout, extras, on_cpu
from .extras import Extras
from .score_mod import ScoreMod
from .traced import run_traced


def arrays_of(name: str) -> tuple[str, ...]:
    """The caller's arrays of a function, in the order of a call."""
    return checks.PACKED_ARRAYS if name == "attention_varlen_backward" else checks.ARRAYS


@functools.lru_cache(maxsize=256)
def _operation(name: str, more: tuple[str, ...] = ()) -> Operation:
    """The operation ``name`` on more arrays: a block mask, those of a score modification, seed and offset."""
    return Operation(
        name, (*arrays_of(name), *more), checks.check_backward, check_memory, plan_backward,
        on_cpu.attention_backward, checks.REQUIRED, checks.ALIGNED, checks.LABELS,
        placed=(checks.ARRAYS.index("mask"), forward_checks.MASK_ALIGNMENT), given=checks.GIVEN,
        traced=run_traced,
    )  # fmt: skip


def call_of(
    function: str, objects: tuple[Any, ...], options: BackwardOptions, more: Extras, stream: Any = None
) -> Call:
    """A call as data. objects: in the order of `arrays_of`; do and dlse with any strides."""
    for name, x in zip("qkv", objects, strict=False):
        if x.__class__ in OPERANDS:
            raise ArgumentError(
                name, "an array that is not quantized: quantized attention has no gradient", type(x).__name__,
                function=function,
            )  # fmt: skip
    more.check_kinds(function, *objects[:3])
    q, k, v, do, o, lse, dlse, *others = objects
    objects = (q, k, v, arrays.with_plain_rows(do), o, lse, arrays.with_plain_rows(dlse, 4), *others)
    if not more.has_any():
        return Call(_operation(function), objects, options, stream)
    names, arrays_of_more, facts = more.operands(function, gradients=True)
    objects = (*objects, *arrays_of_more)
    return Call(_operation(function, names), objects, options, stream, None, facts, more.score_mod)


def backward_call(
    call: Call, given: dict[str, Any], do: Any, o: Any, lse: Any, dlse: Any, wanted: tuple[str, ...]
) -> Call:
    """The backward of a call of `attention` or `attention_varlen`, whose arrays are given by name.

    Its results are in the order of `GRADIENTS`.
    """
    x = call.options
    options = BackwardOptions(
        x.layout, x.causal, x.window, x.softmax_scale, x.softcap, x.deterministic, wanted, x.max_seqlen_q,
        x.max_seqlen_k,
    )  # fmt: skip
    objects: tuple[Any, ...] = (
        given["q"], given["k"], given["v"], do, o, lse, dlse, given["cu_seqlens_q"], given["cu_seqlens_k"],
        given["mask"], given["sinks"], None, None, None,
    )  # fmt: skip
    if call.operation.name == "attention_varlen":
        objects += (given["seqused_q"], given["seqused_k"])
    more = extras.of_forward(call, given)
    return call_of(f"{call.operation.name}_backward", objects, options, more)


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    wanted: tuple[str, ...] | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    block_size: int | tuple[int, int] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_rng: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """Gradients of `attention`, from the gradients of its results.

    ::

        P = exp(S - lse);   dV = P.T @ dO;   D = rowsum(dO * O) - dlse;   dS = P * (dO @ V.T - D)
        dQ = softmax_scale * dS' @ K;   dK = softmax_scale * dS'.T @ Q     dS': dS times the derivative of softcap
                                                                           and score_mod
        dsinks = -sum(exp(sinks - lse) * D);   dmask = dS
        with dropout: dV = (P * M).T @ dO;   dS = P * (M * (dO @ V.T) - D)     M: the mask times 1 / (1 - p)

    Parameters
    ----------
    do : array
        Gradient of o; o's shape and dtype. Any strides: torch and CuPy make a contiguous copy where rows are not
        contiguous, do not begin at multiples of 16 bytes, or repeat (as ``.sum()`` makes them). Arrays of other
        libraries on a GPU need such rows.
    q, k, v : array
        As `attention` took them: float16 or bfloat16, on the CPU float32 and float64 too; not quantized.
    o, lse : array
        What ``attention(..., return_lse=True)`` returned. Or those of a larger attention, to whose keys these k and v
        belong, as `merge_states` and ring attention have them. lse is contiguous along the sequence.
    dlse : array, optional
        Gradient of lse: its shape, float32.
    dq, dk, dv : array, optional
        Where gradients go; shape and dtype of q, k, v. No element of one is another's, or on a GPU an input's: they may
        be parts of one buffer. Torch tensors count as changed in place.
    wanted : tuple of str, optional
        Which gradients to compute, of "dq", "dk", "dv", "dsinks", "dmask"; only those are. Unless given: dq, dk, dv,
        and with sinks dsinks.
    layout, causal, window, softmax_scale, softcap, mask, score_mod, block_mask, block_size, sinks
        Those of the forward. A score_mod needs its ``grad``, the derivative of the new score by the old one. Tiles that
        a block_mask hides are neither loaded nor computed; keys that no block shows get dk = dv = 0.
    dropout_p, dropout_rng
        Those of the forward, which hands out what it drew with ``return_rng``.
    stream : optional
        As in `attention`.
    deterministic : bool
        Same bits at every run, for dq too. dk and dv have them in any case.

    Returns
    -------
    tuple of array
        What is wanted, in the order of ``wanted``. dq, dk, dv: shape, layout, dtype and framework of q, k, v. dsinks:
        (num_q_heads,), float32. dmask: shape of the mask, summed over what is broadcast, float32. (float64 for
        float64 inputs.) A row that attends to nothing (lse = -inf) gives and gets 0.

    Raises
    ------
    ArgumentError
        Or its subclasses, as in `attention`. Nothing has been launched or written then.
    UnsupportedError
        A score_mod without derivative, a GPU that this version lacks kernels for, a tensor that needs a gradient: there
        are no second derivatives.
    KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. FlashAttention-2 (Dao 2023),
    algorithm 2. There is no low precision. Gradients of a score_mod's arrays are not computed.
    docs/backward.md has the workspaces.
    """
    asked = checks.check_wanted(wanted, sinks is not None, "attention_backward")
    options = BackwardOptions(layout, causal, window, softmax_scale, softcap, deterministic, asked)
    objects = (q, k, v, do, o, lse, dlse, None, None, mask, sinks, dq, dk, dv)
    more = Extras(score_mod, block_mask, block_size, *_dropped(q, dropout_p, dropout_rng, "attention_backward"))
    if compiling():
        return _compiled("attention_backward", objects, options, more, stream)
    return in_order(run(call_of("attention_backward", objects, options, more, stream)), asked)


def attention_varlen_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    wanted: tuple[str, ...] | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    score_mod: ScoreMod | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_rng: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """Gradients of `attention_varlen`, from the gradients of its results.

    Parameters
    ----------
    do, q, k, v, o, lse, dlse, dq, dk, dv, wanted
        As in `attention_backward`, in the shapes of `attention_varlen`: lse and dlse are (num_q_heads, total_q).
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        Those of the forward.
    layout, causal, window, softmax_scale, softcap, mask, score_mod, sinks, dropout_p, dropout_rng, stream
        As in `attention_backward`.
    deterministic : bool
        As in `attention_backward`.

    Returns
    -------
    tuple of array
        As `attention_backward`. Rows that belong to no sequence, or are not used in theirs, have gradient 0.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention_backward`.
    """
    asked = checks.check_wanted(wanted, sinks is not None, "attention_varlen_backward")
    options = BackwardOptions(
        layout, causal, window, softmax_scale, softcap, deterministic, asked, max_seqlen_q, max_seqlen_k
    )
    objects = (
        q, k, v, do, o, lse, dlse, cu_seqlens_q, cu_seqlens_k, mask, sinks, dq, dk, dv, seqused_q, seqused_k,
    )  # fmt: skip
    more = Extras(score_mod, None, None, *_dropped(q, dropout_p, dropout_rng, "attention_varlen_backward"))
    if compiling():
        return _compiled("attention_varlen_backward", objects, options, more, stream)
    return in_order(run(call_of("attention_varlen_backward", objects, options, more, stream)), asked)


def gradients_beside(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, is_shared: bool, given: dict[str, Any],
    wanted: tuple[str, ...], window: Any, softmax_scale: Any, softcap: Any, deterministic: Any,
) -> list[Any]:  # fmt: skip
    """Those of `attention_backward`, in the order of `GRADIENTS`.

    given: dlse, dq, dk, dv, those that there are. is_shared: as in `attention.attention_beside`.
    """
    options = BackwardOptions("NHD", False, window, softmax_scale, softcap, deterministic, wanted)
    places = (given.get(name) for name in ("dq", "dk", "dv"))
    objects = (q, k, v, do, o, lse, given.get("dlse"), None, None, None, None, *places)
    call = call_of("attention_backward", objects, options, Extras())
    if is_shared:
        call.facts = SharedGpu()
    return run(call)


def _dropped(q: Any, p: Any, rng: Any, function: str) -> tuple[float, Any]:
    """``dropout_p`` and ``dropout_rng`` as `dropout.of_call` makes them; nothing is drawn."""
    p = dropout.check_p(p, function)
    if p and rng is None:
        raise ArgumentError("dropout_rng", EXPECTED, "None", function=function, hint=FROM_FORWARD)
    p, rng = dropout.of_call(q, p, rng, function)
    return p, rng if p else None


def _compiled(function: str, objects: tuple[Any, ...], options: BackwardOptions, more: Extras, stream: Any) -> Any:
    """A call that torch.compile reads: its operator."""
    from ..frameworks.torch.tracing import trace_backward

    given = dict(zip(arrays_of(function), objects, strict=True))
    results = trace_backward(function, given, options, stream=stream, **more.traced())
    return in_order(results, options.wanted)


def in_order(results: list[Any], wanted: tuple[str, ...]) -> tuple[Any, ...]:
    """Results of a call, which are in the order of `GRADIENTS`, in that of ``wanted``."""
    by_name = dict(zip((name for name in GRADIENTS if name in wanted), results, strict=True))
    return tuple(by_name[name] for name in wanted)


FUNCTIONS.update(attention_backward=attention_backward, attention_varlen_backward=attention_varlen_backward)
FUNCTIONS["backward of a call"] = backward_call
