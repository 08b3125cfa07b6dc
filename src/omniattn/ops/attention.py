"""``attention`` and ``attention_varlen``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import arguments, arrays
from ..arrays.identity import Same
from ..checks import attention as checks
from ..checks import extras, operands, values
from ..checks.attention import AttentionOptions
from ..checks.memory import check_memory
from ..errors import ArgumentError, UnsupportedError
from ..frameworks import FUNCTIONS, compiling
from ..plan.attention import plan_attention
from ..plan.engine import Call, Operation, repeated, run
from ..plan.tuning import SharedGpu
from ..plan.with_cache import plan_varlen
from ..problems import OPERANDS, Auto, Fp8, Int4, Int8
from . import dropout, factors, on_cpu
from .attention_backward import backward_call
from .extras import Extras
from .score_mod import ScoreMod
from .traced import run_traced

_ON_OPERANDS = {
    name: Operation(
        name, operands.ALL, operands.check_operands, check_memory, plan_attention,
        on_cpu.attention_on_operands, (), operands.ALIGNED,
        {array: f"{of}.{array}" for array, of in operands.ARGUMENT.items()},
        placed=(operands.ALL.index("mask"), checks.MASK_ALIGNMENT), traced=run_traced,
    )
    for name in ("attention", "attention_varlen")
}  # fmt: skip


def _on_operands(call: Call) -> Call | None:
    """The call on quantized operands that takes the place of ``call``; None if there are none."""
    q, k, v, out, starts_q, starts_k, mask, sinks, *counts = call.objects
    if not (q.__class__ in OPERANDS or k.__class__ in OPERANDS or v.__class__ in OPERANDS):
        return None
    function = call.operation.name
    operands.check_kinds(function, q, k, v, starts_q, starts_k, *counts)
    of_q, of_k = q.pair, k.pair
    facts = (
        Same(of_q.problem), Same(of_k.problem), Same(v.problem), of_q is of_k, of_q.layout, of_k.layout, v.layout,
        call.facts,
    )  # fmt: skip
    objects = operands.arrays_of(of_q, of_k, v, out, mask, sinks)
    return Call(_ON_OPERANDS[function], objects, call.options, call.stream, None, facts, (q, k, v))


def _with_gradients(call: Call) -> list[Any]:
    """A call one of whose tensors needs a gradient."""
    quantized = _on_operands(call) if call.operation in (_ATTENTION, _ATTENTION_VARLEN) else None
    if quantized is not None:
        return run(quantized)
    if checks.DESCALES[0] in call.operation.arrays or arrays.is_e4m3(call.objects[0]):
        raise UnsupportedError(
            f"{call.operation.name}(): an argument requires a gradient, and e4m3 arrays and their factors have none",
            instead="16-bit arrays with precision='fp8', whose gradients are those of exact attention",
        )
    from ..frameworks.torch.autograd import run_with_gradients

    return run_with_gradients(call, backward_call)


def _arrays_of(name: str) -> tuple[str, ...]:
    return checks.PACKED_ARRAYS if name == "attention_varlen" else checks.ARRAYS


_ATTENTION, _ATTENTION_VARLEN = (
    Operation(
        name, _arrays_of(name), checks.check_attention, check_memory, plan, on_cpu.attention,
        ("q", "k", "v"), checks.ALIGNED, same=("q",), otherwise=_on_operands,
        placed=(checks.ARRAYS.index("mask"), checks.MASK_ALIGNMENT), gradients=_with_gradients,
        traced=run_traced,
    )
    for name, plan in (("attention", plan_attention), ("attention_varlen", plan_varlen))
)  # fmt: skip


@functools.lru_cache(maxsize=256)
def _with_arrays(name: str, more: tuple[str, ...]) -> Operation:
    """The operation ``name`` on more arrays: a block mask, those of a score modification, seed and offset."""
    return Operation(
        name, (*_arrays_of(name), *more), extras.check_call, check_memory, plan_attention, on_cpu.attention,
        ("q", "k", "v", *more), checks.ALIGNED, same=("q",),
        placed=(checks.ARRAYS.index("mask"), checks.MASK_ALIGNMENT), gradients=_with_gradients,
        traced=run_traced,
    )  # fmt: skip


def _with_extras(call: Call, more: Extras) -> Call:
    """``call`` with a score modification, a block mask or dropout, or some of them."""
    function = call.operation.name
    more.check_kinds(function, *call.objects[:3])
    names, arrays, facts = more.operands(function, gradients=False)
    operation = _with_arrays(function, names)
    return Call(operation, (*call.objects, *arrays), call.options, call.stream, None, facts, more.score_mod)


#: The operations on arrays in e4m3 with factors.
_WITH_DESCALES = {
    name: Operation(
        name, (*_arrays_of(name), *checks.DESCALES), checks.check_attention, check_memory, plan_attention,
        on_cpu.attention, ("q", "k", "v"), checks.ALIGNED, placed=(checks.ARRAYS.index("mask"), checks.MASK_ALIGNMENT),
        gradients=_with_gradients, traced=run_traced,
    )
    for name in ("attention", "attention_varlen")
}  # fmt: skip


def _with_descales(call: Call, given: tuple[Any, ...], more: bool) -> Call:
    """``call`` with factors of q, k and v; more: with score_mod, block_mask or dropout, which do not go with it."""
    function, q = call.operation.name, call.objects[0]
    name, factor = next((n, x) for n, x in zip(checks.DESCALES, given, strict=True) if x is not None)
    dtype, what = str(getattr(q, "dtype", "")).removeprefix("torch."), ""
    if any(x.__class__ in OPERANDS for x in call.objects[:3]):
        what = "quantized operands bring their scales"
    elif more:
        what = "score_mod, block_mask and dropout take no e4m3 arrays"
    elif dtype in values.CPU_DTYPES:  # `checks.attention` says it too, but of the array that a number has become
        what = checks.not_e4m3(dtype)
    if what:
        raise ArgumentError(name, f"None, because {what}", arguments.kind_of(factor), function=function)
    found = factors.as_arrays(q, given, function)
    return Call(_WITH_DESCALES[function], (*call.objects, *found), call.options, call.stream)


def _run_with_more(
    call: Call, descales: tuple[Any, ...], more: Extras, return_rng: bool, undo: Callable[[], object] | None
) -> Any:
    """The results of ``call`` with what plain ones have not. undo: of a draw from a generator, where it fails."""
    with dropout.undone_on_error(undo):
        if any(x is not None for x in descales):
            call = _with_descales(call, descales, more.has_any())
        results = run(_with_extras(call, more) if more.has_any() else call)
    return _one_or_more(results, (more.rng,) if return_rng else ())


# A third of what the class of a NamedTuple takes.
_new = tuple.__new__
#: The default of ``dropout_p``, which costs a plain call a comparison of objects.
_NO_DROPOUT = 0.0


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact",
    descale_q: Any = None,
    descale_k: Any = None,
    descale_v: Any = None,
    out_dtype: Any = None,
    dropout_p: float = _NO_DROPOUT,
    dropout_rng: Any = None,
    return_lse: bool = False,
    return_rng: bool = False,
    out: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> Any:
    """Attention of a batch of equally long sequences.

    ::

        S = softmax_scale * q @ k.T;  if softcap: S = softcap * tanh(S / softcap);  S = score_mod(S);  S += mask
        o = softmax(S) @ v            lse = log(sum(exp(S)))

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_q_heads, head_dim) for "NHD", (batch, num_q_heads, seqlen_q, head_dim) for "HND"
        torch, CuPy, JAX or NumPy array, or any DLPack exporter; float16 or bfloat16, on the CPU float32 and float64
        too. head_dim is a multiple of 8 from 8 to 512 and contiguous; the other strides are free (on a GPU multiples
        of 8 elements, addresses multiples of 16 bytes).
    k, v : array
        The same with seqlen_k and num_kv_heads, which divides num_q_heads: query head h reads kv head
        h // (num_q_heads // num_kv_heads). v may have a head_dim of its own, head_dim_v, by the same rules.
        Or all three quantized, ``quantize_qk(...).q``, ``quantize_qk(...).k``, ``quantize_v(...)``, with the bits that
        ``precision`` of the same knobs gives. Or all three e4m3, with ``descale_*`` (on a GPU with strides that are
        multiples of 16 elements); e5m2 raises.
    layout : "NHD" or "HND"
    causal : bool
        Query i sees the keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
    window : (left, right), optional
        Query i sees the keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right; -1 is unlimited.
    softmax_scale : float, optional
        1 / sqrt(head_dim) unless given. It, softcap and flags may be scalars of any library, but have no gradient.
    softcap : float
        0 for none.
    mask : array, optional
        Broadcastable to (batch, num_q_heads, seqlen_q, seqlen_k) in either layout. bool (True: visible), or float32 or
        o's dtype (added to the scores; -inf hides).
    score_mod : ScoreMod, optional
        A function of yours of each score, compiled into the kernel. With ``precision="exact"``.
    block_mask : array, bool, optional
        Broadcastable to (batch, num_q_heads, blocks of queries, blocks of keys): False hides a block, which is never
        loaded. With score_mod, and with a mask only if that is added and differs between queries. With a low precision
        on compute capability 9.0 and on the CPU, without either.
    block_size : int or (int, int), optional
        Queries and keys of a block, multiples of 64, 128 unless given; the last blocks may be smaller.
    sinks : array, (num_q_heads,), float32 or o's dtype, optional
        One more logit a head that takes part in the softmax and has no value; LSE counts it.
    precision : str, Int8, Int4, Fp8 or Auto
        "exact": the inputs' dtype with fp32 accumulation. "int8": 8-bit Q and K, P V in fp8 or fp16, whichever suits
        the GPU, with smoothing of K and V (SageAttention2); "int4": 4-bit Q and K, Q smoothed too; "fp8": all of them
        e4m3, Q and K rotated (FlashAttention-3). `Int8`, `Int4` and `Fp8` have the knobs. "auto": the fastest of these
        by the model of costs, among those whose mean error on the inputs of docs/precision.md is at most 0.05, or
        exact, on the CPU too; `Auto` has the bound. Quantized operands and e4m3 arrays have their precision, and it may
        be left out.
    descale_q, descale_k, descale_v : array, float32, optional
        Of e4m3 arrays: factors of q, k and v, 1 unless given. Shape () for one, (batch, num_kv_heads) for one a kv
        head, of q too (its group of query heads), or (batch, heads, ceil(seqlen / 128)), with the heads of that array,
        for one each 128 rows. Or a number, which is put where q lies; values on a GPU are not read. Those of q and k
        must not be negative. Of v per 128 rows: a factor below 2^-90 counts as that much, and one that is not finite
        makes o and LSE of the rows that see its keys NaN.
    out_dtype : str or dtype, optional
        Of o from e4m3 arrays: "bfloat16" (unless given) or "float16". Otherwise q's dtype, which may be said.
    dropout_p : float
        Share of the probabilities that are dropped, below 1, rounded to a multiple of 1/256 (at least one): o is that
        of softmax(S) times 0 or 1 / (1 - p), lse that of softmax(S). Exact, without score_mod, on a GPU up to a
        head_dim of 256; compiled at run time (docs/backward.md).
    dropout_rng : (seed, offset), array or key of JAX, optional
        Integers below 2**64, or an array, (2,) of 64 bits or (4,) of 32; torch's generator draws it unless it is given.
    return_lse : bool
        Also return the log-sum-exp.
    return_rng : bool
        Also return ``dropout_rng`` as an array (without dropout as given), the last result, for `attention_backward`.
    out : array, optional
        Where o goes; o's shape and dtype. It may be q itself, with the same strides and one head_dim; on a GPU no
        other array that is read. A torch tensor counts as changed in place.
    stream : optional
        An integer handle, a torch or CuPy stream, or an object with ``__cuda_stream__``; else the current stream.
    deterministic : bool
        Same bits at every run. The kernels give them in any case; gradients by autograd need it.

    Returns
    -------
    o : array
        Of q's framework, shape (with head_dim_v), layout and dtype (or out_dtype). A row that attends to nothing is 0.
    lse : array, (batch, num_q_heads, seqlen_q), float32, natural logarithm
        Only with ``return_lse``. A row that attends to nothing has -inf (with sinks: the sink).

    Raises
    ------
    ArgumentError
        Or its subclasses DtypeError, ShapeError, StrideError, AlignmentError, DeviceError: names the argument, what was
        expected and what came. Nothing has been launched or written then.
    UnsupportedError
        A precision or GPU that this version lacks; with a tensor that requires a gradient, what has none: ``sparse=``
        of a precision, score modifications without ``grad``.
    KernelNotFoundError, CompileError, DriverError
        The kernel could not be had or launched: says what was tried and what to do.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. FlashAttention-2 (Dao 2023),
    algorithm 1; sinks as in GPT-OSS; softcap as in Gemma 2. Torch's autograd differentiates o and lse by q, k, v, sinks
    and an additive mask (`attention_backward`); with a low precision as exact attention on the unquantized inputs, with
    the o and lse of the low precision (straight-through). Under torch.compile, torch.export, `torch.func` and dispatch
    modes, and under JAX's transformations, the call is an operator with these gradients (docs/torch.md, docs/jax.md).
    """
    said = (
        layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic, None, None, out_dtype,
    )  # fmt: skip
    p, rng, undo = 0.0, None, None
    if dropout_p is not _NO_DROPOUT or dropout_rng is not None or return_rng is not False:
        p, rng, return_rng, undo = dropout.of_forward(q, dropout_p, dropout_rng, return_rng, "attention")
    plain = descale_q is descale_k is descale_v is score_mod is block_mask is block_size is None and not p
    descales = (descale_q, descale_k, descale_v)
    if compiling():
        return _compiled(
            "attention", q, k, v, Extras(score_mod, block_mask, block_size, p, rng), return_rng,
            options=AttentionOptions(*said), mask=mask, sinks=sinks, out=out, stream=stream, descales=descales,
        )  # fmt: skip
    objects = (q, k, v, out, None, None, mask, sinks)
    if plain and not return_rng:
        results = repeated(_ATTENTION, objects, said, stream)
        if results is not None:
            return results[0] if len(results) == 1 else tuple(results)
    call = Call(_ATTENTION, objects, _new(AttentionOptions, said), stream)
    if not plain:
        return _run_with_more(call, descales, Extras(score_mod, block_mask, block_size, p, rng), return_rng, undo)
    return _one_or_more(run(call, is_asked=not return_rng), (rng,) if return_rng else ())


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    score_mod: ScoreMod | None = None,
    sinks: Any = None,
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact",
    descale_q: Any = None,
    descale_k: Any = None,
    descale_v: Any = None,
    out_dtype: Any = None,
    dropout_p: float = _NO_DROPOUT,
    dropout_rng: Any = None,
    return_lse: bool = False,
    return_rng: bool = False,
    out: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> Any:
    """Attention of sequences of different lengths, packed one behind the other.

    Sequence b owns the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the key rows cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]; causal and window align at the end of each sequence.

    Parameters
    ----------
    q : array, (total_q, num_q_heads, head_dim) for "NHD", (num_q_heads, total_q, head_dim) for "HND"
        Dtypes, strides and frameworks as in `attention`.
    k, v : array
        The same with total_k and num_kv_heads; v with head_dim_v. Or all three quantized, as in `attention`.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32, on q's device
        Row at which each sequence begins, and the end of the last one: 0 first, never decreasing. Checked on the CPU;
        on a GPU that would need a synchronization: values outside the tensors are clamped to them, and where values
        decrease the results of "exact" are unspecified (a low precision takes a value for at least as large as those
        before it). To be left out for quantized operands, which bring theirs.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence; less raises on the CPU. They give the mask its extent, and with smooth_q ("int4")
        a GPU's workspace, where too small a max_seqlen_k makes NaN. The result does not depend on them otherwise. For
        quantized operands needed only with a mask.
    seqused_q, seqused_k : array, (batch,), int32, on q's device, optional
        How many of a sequence's first rows are used; all of them unless given. Causal and window align at the end of
        the used rows, low precision quantizes these alone, and whatever the others hold, NaN too, changes no result.
        Values outside a sequence raise on the CPU and are clamped to it on a GPU. Not with quantized operands.
    block_table : array, (batch, max_blocks), int32, on q's device, optional
        K and V lie in pages of a pool: k is (blocks, tokens, num_kv_heads, head_dim) for "NHD" or (blocks,
        num_kv_heads, tokens, head_dim) for "HND", v the same with head_dim_v, any strides, any number of tokens; key i
        of sequence b is token i % tokens of page block_table[b, i // tokens]. seqused_k says how many keys each
        sequence has, cu_seqlens_k is None. Entries behind a sequence's last key may be anything, and so may what its
        pages hold behind that key. 16-bit arrays (on the CPU any), precision "exact", no gradients.
    mask : array, optional
        Broadcastable to (batch, num_q_heads, max_seqlen_q, max_seqlen_k), indexed from the start of each sequence.
        There is no block_mask of packed sequences: a `ScoreMod` with ``mask=`` hides keys there.
    layout, causal, window, softmax_scale, softcap, score_mod, sinks, precision, return_lse, out, stream, deterministic
        As in `attention`.
    dropout_p, dropout_rng, return_rng
        As in `attention`; sequence b drops what sequence b of a batch does. Not with ``block_table``.
    descale_q, descale_k, descale_v, out_dtype
        As in `attention`; factors each 128 rows, counted from the start of each sequence, have the shape (batch, heads,
        ceil(max_seqlen_q / 128)) or that of max_seqlen_k.

    Returns
    -------
    o : array
        Of q's framework, shape (with head_dim_v), layout and dtype. Rows that attend to nothing, are not used or belong
        to no sequence are 0.
    lse : array, (num_q_heads, total_q), float32, natural logarithm
        Only with ``return_lse``. -inf for rows that attend to nothing (with sinks: the sink), are not used or belong to
        no sequence.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.
    """
    p, rng, undo = 0.0, None, None
    if dropout_p is not _NO_DROPOUT or dropout_rng is not None or return_rng is not False:
        p, rng, return_rng, undo = dropout.of_forward(q, dropout_p, dropout_rng, return_rng, "attention_varlen")
    plain = descale_q is descale_k is descale_v is score_mod is None and not p
    descales = (descale_q, descale_k, descale_v)
    said = (
        layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic, max_seqlen_q,
        max_seqlen_k, out_dtype,
    )  # fmt: skip
    if compiling():
        return _compiled(
            "attention_varlen", q, k, v, Extras(score_mod, dropout=p, rng=rng), return_rng,
            options=AttentionOptions(*said), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
            block_table=block_table, mask=mask, sinks=sinks, out=out, stream=stream, descales=descales,
        )  # fmt: skip
    objects = (q, k, v, out, cu_seqlens_q, cu_seqlens_k, mask, sinks, seqused_q, seqused_k, block_table)
    if plain and not return_rng:
        results = repeated(_ATTENTION_VARLEN, objects, said, stream)
        if results is not None:
            return results[0] if len(results) == 1 else tuple(results)
    call = Call(_ATTENTION_VARLEN, objects, _new(AttentionOptions, said), stream)
    if not plain:
        return _run_with_more(call, descales, Extras(score_mod, dropout=p, rng=rng), return_rng, undo)
    return _one_or_more(run(call, is_asked=not return_rng), (rng,) if return_rng else ())


def _compiled(function: str, q: Any, k: Any, v: Any, more: Extras, return_rng: bool, **others: Any) -> Any:
    """A call that torch.compile reads: its operator."""
    from ..frameworks.torch.tracing import trace

    descales = factors.as_arrays(q, others.pop("descales"), function)
    results = trace(function, q, k, v, descales=descales, **others, **more.traced())
    if not return_rng:
        return results
    return (*results, more.rng) if isinstance(results, tuple) else (results, more.rng)


def call_of(q: Any, k: Any, v: Any, *, causal: bool = False, precision: Any = "exact") -> Call:
    """A call of `attention` as data, not run: for measurements that need its plan."""
    options = AttentionOptions("NHD", causal, None, None, 0.0, precision, False, False)
    return Call(_ATTENTION, (q, k, v, None, None, None, None, None), options)


def attention_beside(
    q: Any, k: Any, v: Any, *, is_shared: bool, sinks: Any, window: Any, softmax_scale: Any, softcap: Any,
    deterministic: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """o and LSE of `attention`. is_shared: a kernel of another stream has some SMs for a part of the call's time."""
    options = AttentionOptions("NHD", False, window, softmax_scale, softcap, "exact", True, deterministic)
    facts = SharedGpu() if is_shared else None
    o, lse = run(Call(_ATTENTION, (q, k, v, None, None, None, None, sinks), options, None, None, facts))
    return o, lse


def _one_or_more(results: list[Any], more: tuple[Any, ...] = ()) -> Any:
    return results[0] if len(results) == 1 and not more else (*results, *more)


FUNCTIONS.update(attention=attention, attention_varlen=attention_varlen)
