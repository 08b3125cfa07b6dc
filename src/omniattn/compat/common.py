"""What the drop-in modules share: checks of arguments that our functions do not have, padding, ALiBi, packed parts."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from .. import arguments
from ..checks.dropout import check_p
from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from ..frameworks.torch.dropout import rng_of, undo_of_draw
from ..frameworks.torch.told import call
from ..ops import ScoreMod, attention, attention_backward, attention_varlen, attention_varlen_backward
from ..ops.dropout import undone_on_error

#: What the functions of FlashAttention call our arguments.
NAMES = {
    "window": "window_size", "descale_q": "q_descale", "descale_k": "k_descale", "descale_v": "v_descale",
    "do": "dout", "o": "out", "lse": "softmax_lse", "dropout_rng": "rng_state",
}  # fmt: skip
#: Those with k and v in one tensor, and with q, too.
KV_PACKED = {**NAMES, "k": "kv", "v": "kv"}
QKV_PACKED = {**NAMES, "q": "qkv", "k": "qkv", "v": "qkv"}
#: And of packed sequences, which are those of queries and keys.
QKV_PACKED_VARLEN = {
    **QKV_PACKED, "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}  # fmt: skip
#: Why there is no dropout.
NO_DROPOUT = "kernels for these operands have none"


def refuse_dropout(dropout_p: Any, function: str) -> None:
    """Only 0 is served."""
    if arguments.check_number(dropout_p, "dropout_p", function, least=0.0) > 0:
        raise UnsupportedError(
            f"{function}(): dropout_p={dropout_p!r}; {NO_DROPOUT}",
            instead="dropout_p=0.0, and torch.nn.functional.dropout on the output of the layer",
        )


def refuse(function: str, reason: str, instead: str | None, **given: Any) -> None:
    """Arguments that are served with their default only, None unless it is a number: ``name=(value, default)``."""
    for name, (value, default) in given.items():
        if value is default:
            continue
        if default is not None and isinstance(value, (bool, int, float)) and value == default:
            continue
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise UnsupportedError(f"{function}(): {name}={shown}; {reason}", instead=instead)


def check_tensors(function: str, **given: Any) -> None:
    """Tensors of torch, with an element at each place, and nothing else: these functions are for its users."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(name, "a torch.Tensor", type(x).__name__, function=function)
        # What these functions do to tensors before ours see them fails in torch's words otherwise.
        if x.layout is not torch.strided:
            layout = str(x.layout).removeprefix("torch.")
            raise UnsupportedError(
                f"{function}(): argument {name!r} has layout {layout}", instead="strided tensors: tensor.to_dense()"
            )
        if x.is_nested:
            raise UnsupportedError(
                f"{function}(): argument {name!r} is a nested tensor",
                instead="packed sequences, or a padded tensor: torch.nested.to_padded_tensor",
            )


def check_one_device(function: str, **given: Any) -> None:
    """Tensors on the device of the first one; None is no tensor."""
    (like, first), *others = given.items()
    for name, x in others:
        if x is not None and x.device != first.device:
            raise DeviceError(name, f"{first.device}, like {like}", x.device, function=function)


@contextlib.contextmanager
def told(function: str, **names: str) -> Iterator[None]:
    """Errors of our functions, told of ``function``, which calls some arguments otherwise: ``ours="theirs"``."""
    try:
        yield
    except ArgumentError as error:
        raise error.named(function, **names) from None


def check_rank(x: torch.Tensor, name: str, dims: str, function: str) -> None:
    """``dims``: "(batch, seqlen, heads, head_dim)" say."""
    rank = dims.count(",") + 1
    if x.ndim != rank:
        raise ShapeError(name, f"{rank} dimensions {dims}", f"shape {tuple(x.shape)}", function=function)


def flag(value: Any, name: str, function: str) -> bool:
    """A bool as the originals take it: also 0 or 1, and a scalar of any library."""
    if isinstance(value, bool):
        return value
    value = arguments.plain(value, name, function)
    return arguments.check_bool(bool(value) if isinstance(value, int) and value in (0, 1) else value, name, function)


def check_window(window_size: Any, function: str) -> tuple[int, int] | None:
    """``window_size`` of FlashAttention as our ``window``; None without limits."""
    expected = "(left, right), two integers >= -1 (-1 or None: unlimited)"
    try:
        left, right = (-1 if x is None else operator.index(x) for x in window_size)
    except (TypeError, ValueError):
        raise ArgumentError("window_size", expected, repr(window_size), function=function) from None
    if left < -1 or right < -1:
        raise ArgumentError("window_size", expected, repr(window_size), function=function)
    return None if (left, right) == (-1, -1) else (left, right)


def scale_of(scale: Any, name: str, q: torch.Tensor, function: str) -> Any:
    """The number that multiplies scores: 1 / sqrt(head_dim) unless given.

    torch.compile, which cannot read every scalar, leaves the check to the operator.
    """
    if scale is not None:
        return scale if torch.compiler.is_compiling() else arguments.check_number(scale, name, function)
    return float(max(q.shape[-1], 1) ** -0.5)  # without channels: an error of the shape comes later


def softcap_of(softcap: Any, function: str) -> float:
    """FlashAttention takes numbers up to 0 for no softcap."""
    return max(arguments.check_number(softcap, "softcap", function), 0.0)


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous; a copy where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_channels(q: torch.Tensor, k: torch.Tensor, function: str) -> None:
    """Channels of q and k, which padding could make as many of one as of the other."""
    if k.shape[-1] != q.shape[-1]:
        raise ShapeError("k", f"head_dim {q.shape[-1]}, like q", f"{k.shape[-1]}", function=function)


def padded(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v with contiguous rows, and zeros behind each up to a multiple of 8 channels, which change no score."""
    missing = [-x.shape[-1] % 8 for x in tensors]
    return tuple(functional.pad(x, (0, n)) if n else contiguous_rows(x) for x, n in zip(tensors, missing, strict=True))


_SLOPES = (torch.float32, torch.float16, torch.bfloat16)


def alibi(slopes: Any, shift: torch.Tensor, batch: int, heads: int, function: str) -> Any:
    """The bias -slope * |i + shift - j| of query i and key j; ``shift``, (batch,): keys minus queries of a sequence."""
    check_tensors(function, alibi_slopes=slopes)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        expected = f"shape ({heads},) or ({batch}, {heads}): (nheads,) or (batch, nheads)"
        raise ShapeError("alibi_slopes", expected, f"{tuple(slopes.shape)}", function=function)
    if slopes.dtype not in _SLOPES:
        expected = "torch.float32, torch.float16 or torch.bfloat16"
        raise DtypeError("alibi_slopes", expected, slopes.dtype, function=function)
    if slopes.device != shift.device:
        raise DeviceError("alibi_slopes", f"{shift.device}, like q", slopes.device, function=function)
    arrays = {"slopes": slopes.expand(batch, heads), "shift": shift}
    if torch.compiler.is_compiling():
        return _Traced(((_FOR_TRACES.key, _BIASED, None, "1.0f", (*arrays,)), (*arrays.values(),)))
    return ScoreMod(_BIASED, reference=_alibi, grad="1.0f", reference_grad=_one, **arrays)


def _alibi(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, shift: Any) -> Any:
    return score - slopes[b, h] * abs(q + shift[b] - k)


def _one(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, shift: Any) -> Any:
    return np.ones_like(score)


class _Traced(NamedTuple):
    """A `ScoreMod` as torch.compile can make one: its facts, with the number of one that has the functions."""

    facts: tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]


_BIASED = "score - slopes(b, h) * fabsf(float(q + shift[b] - k))"
_FOR_TRACES = ScoreMod(_BIASED, None, _alibi, "1.0f", _one, slopes=np.zeros((1, 1)), shift=np.zeros(1, np.int32))


def attend(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    names: Mapping[str, str] = NAMES,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention`, or with ``packed`` `attention_varlen`, with FlashAttention's arguments; LSE as ours.

    names: what ``function`` calls our arguments.
    """
    made: tuple[torch.Tensor, torch.Tensor | None] = call(function, _attend, function, q, k, v, names=names, **options)
    return made


def _attend(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    packed: dict[str, Any] | None = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_lse: bool = False,
    descales: tuple[Any, Any, Any] = (None, None, None),
    dropout: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_tensors(function, q=q, k=k, v=v)
    dims = "(batch, seqlen, heads, head_dim)" if packed is None else "(total, heads, head_dim)"
    of_keys = "(blocks, tokens, heads, head_dim)" if packed is not None and "block_table" in packed else dims
    for name, x, names in (("q", q, dims), ("k", k, of_keys), ("v", v, of_keys)):
        check_rank(x, name, names, function)
    check_channels(q, k, function)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, deterministic) | (dropout or {})
    if alibi_slopes is not None:
        options["score_mod"] = alibi_of(function, q, k, alibi_slopes, packed)
    if any(x is not None for x in descales):
        options |= dict(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))
    dim = v.shape[-1]
    q, k, v = padded(q, k, v)
    if packed is None:
        results = attention(q, k, v, return_lse=return_lse, **options)
    else:
        results = attention_varlen(q, k, v, return_lse=return_lse, **packed, **options)
    out, lse = results if return_lse else (results, None)
    return (out if out.shape[-1] == dim else out[..., :dim]), lse


def options_of(
    function: str, q: torch.Tensor, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, deterministic: Any
) -> dict[str, Any]:
    """Options that `attention` and `attention_backward` share."""
    return {
        "softmax_scale": scale_of(softmax_scale, "softmax_scale", q, function),
        "causal": flag(causal, "causal", function), "window": check_window(window_size, function),
        "softcap": softcap_of(softcap, function),
        "deterministic": flag(deterministic, "deterministic", function),
    }  # fmt: skip


def alibi_of(function: str, q: torch.Tensor, k: torch.Tensor, slopes: Any, packed: dict[str, Any] | None) -> Any:
    """ALiBi of q and k as they are given."""
    if packed is not None:
        cu_q, cu_k = packed["cu_seqlens_q"], packed["cu_seqlens_k"]
        paged = "block_table" in packed
        starts = {"cu_seqlens_q": cu_q} | ({} if paged else {"cu_seqlens_k": cu_k})
        check_tensors(function, **starts)
        for name, x in starts.items():
            if x.ndim != 1:
                raise ShapeError(name, "shape (batch + 1,)", f"{tuple(x.shape)}", function=function)
        if not paged and cu_q.shape != cu_k.shape:
            expected = f"shape {tuple(cu_q.shape)}, like cu_seqlens_q"
            raise ShapeError("cu_seqlens_k", expected, f"{tuple(cu_k.shape)}", function=function)
        used = {name: packed[name] for name in ("seqused_q", "seqused_k") if name in packed}
        check_tensors(function, **used)
        for name, x in (starts | used).items():
            if x.device != q.device:
                raise DeviceError(name, f"{q.device}, like q", x.device, function=function)
        lengths = (cu_q.diff(), packed["seqused_k"] if paged else cu_k.diff())
        for name, x in used.items():
            if x.shape != lengths[0].shape:
                raise ShapeError(name, f"shape {tuple(lengths[0].shape)}", f"{tuple(x.shape)}", function=function)
        of_q, of_k = (
            torch.minimum(used[name], own) if name in used else own
            for name, own in zip(("seqused_q", "seqused_k"), lengths, strict=True)
        )
        shift = of_k - of_q
        return alibi(slopes, shift, shift.shape[0], q.shape[-2], function)
    batch = q.shape[0]
    shift = torch.full((batch,), k.shape[1] - q.shape[1], dtype=torch.int32, device=q.device)
    return alibi(slopes, shift, batch, q.shape[-2], function)


def some_row_is_empty(q: torch.Tensor, k: torch.Tensor, causal: bool, window: tuple[int, int] | None) -> bool:
    """Whether a query of a batch can attend to nothing: only where there are more queries than keys."""
    queries, keys = q.shape[1], k.shape[1]
    return keys == 0 or (queries > keys and (causal or window is not None))


def infinite(lse: torch.Tensor) -> torch.Tensor:
    """LSE in FlashAttention-2's convention: +inf where a row attends to nothing."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def ours(lse: torch.Tensor) -> torch.Tensor:
    """LSE of FlashAttention-2's convention, or ours, in ours: -inf; contiguous along the sequence."""
    return lse.masked_fill(lse == math.inf, -math.inf).contiguous()


# FlashAttention-2


def parts(x: Any, name: str, count: int, dims: str, function: str) -> tuple[torch.Tensor, ...]:
    """The tensors in a packed one. The backward of unbind writes one gradient for all, without adding."""
    check_tensors(function, **{name: x})
    check_rank(x, name, dims, function)
    if x.shape[-3] != count:
        raise ShapeError(
            name, f"{count} in the third dimension from the end, {dims}", f"{tuple(x.shape)}", function=function
        )
    return x.unbind(-3)


def packed_of(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, seqused_q: Any = None,
    seqused_k: Any = None, block_table: Any = None, function: str = "",
) -> dict[str, Any]:  # fmt: skip
    """What `attention_varlen` calls them. Of keys in blocks cu_seqlens_k counts those of each sequence."""
    if block_table is not None:
        check_tensors(function, block_table=block_table)
        if seqused_k is None:
            seqused_k = _counted(cu_seqlens_q, cu_seqlens_k, function)
        check_tensors(function, seqused_k=seqused_k)
        cu_seqlens_k = None
    made = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k, "block_table": block_table}
    return made | {name: x for name, x in used.items() if x is not None}


def _counted(cu_seqlens_q: Any, cu_seqlens_k: Any, function: str) -> torch.Tensor:
    """Keys of each sequence in blocks, which cu_seqlens_k counts although they do not follow one another."""
    name = "cu_seqlens_k"
    check_tensors(function, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_k.dtype != torch.int32:
        dtype = str(cu_seqlens_k.dtype).removeprefix("torch.")
        raise DtypeError(name, "int32", dtype, function=function)
    if cu_seqlens_k.ndim != 1 or cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected = f"shape {tuple(cu_seqlens_q.shape)}, like cu_seqlens_q"
        raise ShapeError(name, expected, f"{tuple(cu_seqlens_k.shape)}", function=function)
    if cu_seqlens_k.device != cu_seqlens_q.device:
        expected = f"{cu_seqlens_q.device}, like cu_seqlens_q"
        raise DeviceError(name, expected, cu_seqlens_k.device, function=function)
    counts = cu_seqlens_k.diff()
    on_cpu = cu_seqlens_k.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and (bool((cu_seqlens_k[:1] != 0).any()) or bool((counts < 0).any())):
        raise ArgumentError(name, "0, and never less than before", f"{cu_seqlens_k.tolist()}", function=function)
    return counts


def check_dropout(dropout_p: Any, function: str) -> dict[str, Any]:
    """What `attention` calls it, if there is any."""
    return {"dropout_p": dropout_p} if check_p(dropout_p, function) else {}


def func(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    packed: dict[str, Any] | None,
    dropout_p: Any,
    return_attn_probs: Any,
    **options: Any,
) -> Any:
    """out, or (out, LSE, S_dmask)."""
    if dropout := check_dropout(dropout_p, function):
        options["dropout"] = dropout | options.pop("rng", {})
    if not flag(return_attn_probs, "return_attn_probs", function):
        return attend(function, q, k, v, packed=packed, **options)[0]
    causal = options["causal"] = flag(options["causal"], "causal", function)
    out, lse = attend(function, q, k, v, packed=packed, return_lse=True, **options)
    assert lse is not None
    if packed is not None or some_row_is_empty(q, k, causal, check_window(options["window_size"], function)):
        lse = infinite(lse)
    return out, lse, q.new_empty((0,))


@torch.no_grad()
def forward(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    packed: dict[str, Any] | None,
    dropout_p: Any,
    return_softmax: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, LSE, S_dmask, rng_state, without gradients."""
    refuse(
        function, "the probabilities are never in memory", "return_softmax=False, as without dropout",
        return_softmax=(return_softmax, False),
    )  # fmt: skip
    check_tensors(function, q=q)
    undo = None
    if check_dropout(dropout_p, function):
        undo = undo_of_draw(q)
        rng = rng_of(q, None, function)
        options["rng"] = {"dropout_rng": rng}
    else:
        rng = q.new_empty((2,), dtype=torch.int64)
    with undone_on_error(undo):
        out, lse, none = func(function, q, k, v, packed, dropout_p, True, **options)
    return out, lse, none, rng


@torch.no_grad()
def backward(
    function: str, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, into: tuple[Any, Any, Any],
    packed: dict[str, Any] | None, dropout_p: Any, alibi_slopes: Any, score: tuple[Any, ...], rng_state: Any = None,
) -> None:  # fmt: skip
    """Gradients into the tensors of ``into`` that are not None. rng_state: what `forward` returned."""
    dropout = check_dropout(dropout_p, function)
    if dropout and rng_state is None:
        raise ArgumentError("rng_state", "what the forward returned, with dropout_p", "None", function=function)
    check_tensors(function, dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
    given = {name: x for name, x in zip(("dq", "dk", "dv"), into, strict=True) if x is not None}
    if not given:
        raise ArgumentError("dq", "a tensor to write, in dq, dk or dv", "None in all of them", function=function)
    check_tensors(function, **given)
    dims = "(batch, seqlen, heads, head_dim)" if packed is None else "(total, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_rank(x, name, dims, function)
    if lse.dtype != torch.float32:
        raise DtypeError("softmax_lse", "torch.float32", lse.dtype, function=function)
    options = options_of(function, q, *score) | dropout
    if dropout:
        options["dropout_rng"] = rng_state
    if alibi_slopes is not None:
        options["score_mod"] = alibi_of(function, q, k, alibi_slopes, packed)
    q, k, v, out = (contiguous_rows(x) for x in (q, k, v, out))
    run = attention_backward if packed is None else attention_varlen_backward
    # A graph allocates what its operators give.
    compiling = torch.compiler.is_compiling()
    into_given = {} if compiling else given
    options |= packed or {}
    made = call(function, run, dout, q, k, v, out, ours(lse), names=NAMES, wanted=tuple(given), **into_given, **options)
    if compiling:
        for x, gradient in zip(given.values(), made, strict=True):
            x.copy_(gradient)
