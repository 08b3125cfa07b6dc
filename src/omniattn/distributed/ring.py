"""``ring_attention`` and ``ring_attention_varlen``: attention over a sequence whose tokens are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import arrays
from ..arguments import check_bool, check_number
from ..checks import values
from ..errors import OmniattnError, ShapeError, UnsupportedError
from ..frameworks import FUNCTIONS
from ..frameworks.torch.head_dims import one_head_dim
from ..problems import Fp8, Int8, Precision
from .exchange import Group, group_of, meet
from .parts import asks_to_agree, check_seqlen, check_tensor, settle
from .quantized import Quantized, bias_of, format_of
from .schedule import Ring, check_schedule, ring_of, unites
from .steps import Common, Plain, Saved, Wire, backward, forward
from .wires import check_causal_lengths, check_precision, check_starts, of_keys

#: Arguments that are the same on all ranks.
_SAME = (
    "q", "k", "seqlen_q", "seqlen_k", "cu_seqlens", "window", "softmax_scale", "softcap", "precision", "schedule",
    "requires_grad",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A call whose arguments are right, for all ranks alike.

    Attributes
    ----------
    ring : Ring
    common : Common
    layout : str
    packed : bool
    precision : Precision
    return_lse : bool
    """

    ring: Ring
    common: Common
    layout: str
    packed: bool
    precision: Precision
    return_lse: bool

    def inside(self, x: Any) -> Any:
        """A view (batch, seq, heads, head_dim) of a tensor in the caller's layout."""
        if self.layout == "HND":
            x = x.transpose(-2, -3)
        return x[None] if self.packed else x

    def outside(self, x: Any) -> Any:
        """The caller's layout of what is (batch, seq, heads, head_dim)."""
        if self.packed:
            x = x[0]
        return x.transpose(-2, -3) if self.layout == "HND" else x


@torch.compiler.disable
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    precision: str | Int8 | Fp8 = "exact",
    schedule: str = "zigzag",
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    agree_first: bool | None = None,
) -> Any:
    """Attention over sequences whose tokens are divided among the ranks of a group, as `shard` divides them.

    ::

        unshard(ring_attention(shard(q), shard(k), shard(v))) = attention(q, k, v)         (up to rounding)

    Parameters
    ----------
    q : torch.Tensor, (batch, seqlen_q of this rank, num_q_heads, head_dim) for "NHD", heads before seqlen for "HND"
        As `omniattn.attention` takes it. All ranks call, those without a token too.
    k, v : torch.Tensor
        The same with seqlen_k of this rank and num_kv_heads, which divides num_q_heads; v may have a head_dim of its
        own.
    group : ProcessGroup or DeviceMesh of one dimension, optional
        The default group unless given.
    layout, causal, window, softmax_scale, softcap
        As in `omniattn.attention`, of the whole sequence: causal and window align at its end.
    sinks : torch.Tensor, (num_q_heads,), float32 or q's dtype, optional
        The same on all ranks. Their gradient is that of this rank's queries: its sum over ranks is the whole one.
    precision : str, Int8 or Fp8
        "exact"; or "int8" or "fp8": each rank quantizes its K and V once, and they travel so, with their scales, in
        half the bytes. A mean of K over all ranks is taken away first, by an all-reduce of a row a head. Without
        window, and without smooth_q. Gradients are straight-through, as `omniattn.attention` has them: K and V then
        travel in their own dtype.
    schedule : "zigzag" or "contiguous"
        That of `shard`. "zigzag" gives causal attention the same work on all ranks.
    seqlen_q, seqlen_k : int, optional
        Tokens of the whole sequence. Unless given all ranks have as many as this one. What `shard` gives a rank is
        checked.
    return_lse : bool
    deterministic : bool
        Same bits at every run, of gradients too. The forward has them in any case.
    agree_first : bool, optional
        Compare the arguments of all ranks before anything else: a wrong argument raises on all of them, in place of a
        wait for the group's time-out. One small all-gather, which the host waits for. Unless given: on the CPU yes, on
        a GPU no.

    Returns
    -------
    o : torch.Tensor
        Of this rank's queries: q's dtype and layout. A row that attends to nothing is 0. With "HND" a view whose
        memory is that of "NHD".
    lse : torch.Tensor, (batch, num_q_heads, seqlen_q of this rank), float32, natural logarithm
        Only with ``return_lse``. A row that attends to nothing has -inf (with sinks: the sink).

    Raises
    ------
    ArgumentError
        Or its subclasses: names the argument, what was expected and what came.
    CommunicationError
        A rank is gone, refused its arguments (``agree_first``), or does not answer within the group's time-out.
    UnsupportedError
        A precision that does not travel; a window with a low precision.

    Notes
    -----
    Ring Attention (Liu et al. 2023), with direct messages: a rank sends its K and V to those that read them, only the
    rows that they read, and in as many steps; `plan` says how much that is. Results are merged by `merge_states`. On
    GPUs the host does not wait. Autograd: backward has to run on all ranks, because they exchange K, V and their
    gradients in it; dK and dV travel in K's dtype. Under torch.compile the call is a break of the graph.
    """
    said = {
        "layout": layout, "causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap,
        "precision": precision, "schedule": schedule, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "deterministic": deterministic,
    }  # fmt: skip
    return _call("ring_attention", q, k, v, sinks, group, said, None, return_lse, agree_first)


@torch.compiler.disable
def ring_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    group: Any = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    schedule: str = "zigzag",
    return_lse: bool = False,
    deterministic: bool = False,
    agree_first: bool | None = None,
) -> Any:
    """The same for documents packed one behind the other, which are cut wherever a rank's tokens end.

    Parameters
    ----------
    q : torch.Tensor, (rows of this rank, num_q_heads, head_dim) for "NHD", heads first for "HND"
        This rank's part of the packed tokens, as `shard` gives it.
    k, v : torch.Tensor
        The same with num_kv_heads; v may have a head_dim of its own.
    cu_seqlens : sequence of int, NumPy array or CPU tensor, (documents + 1,)
        Token of the whole pack at which each document begins, and the end of the last one: 0 first, never decreasing,
        the number of all tokens last. On the host, because it says who sends what to whom; a tensor on a GPU raises.
    group, layout, causal, window, softmax_scale, softcap, sinks, schedule, deterministic, agree_first
        As in `ring_attention`.
    return_lse : bool

    Returns
    -------
    o : torch.Tensor
        Of this rank's rows.
    lse : torch.Tensor, (num_q_heads, rows of this rank), float32
        Only with ``return_lse``.

    Raises
    ------
    ArgumentError, CommunicationError
        As in `ring_attention`.
    """
    said = {
        "layout": layout, "causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap,
        "precision": "exact", "schedule": schedule, "seqlen_q": None, "seqlen_k": None,
        "deterministic": deterministic,
    }  # fmt: skip
    return _call("ring_attention_varlen", q, k, v, sinks, group, said, (cu_seqlens,), return_lse, agree_first)


def _call(
    function: str, q: Any, k: Any, v: Any, sinks: Any, group: Any, said: dict[str, Any], starts: tuple[Any] | None,
    return_lse: Any, agree_first: Any,
) -> Any:  # fmt: skip
    """One call of either function. starts: cu_seqlens of packed documents, in a tuple."""
    repeats = starts is None and (agree_first is None or agree_first is False)
    key = _key_of(function, (q, k, v, sinks), group, said, return_lse) if repeats else None
    known = None if key is None else _KNOWN.get(key)
    if known is not None and dist.is_initialized():
        return _run(q, k, v, sinks, *known, return_lse)
    at = group_of(group, function)
    asked: Asked | None = None
    facts = no_facts()
    failure: OmniattnError | None = None
    try:
        agree_first = asks_to_agree(agree_first, q, at, function)
        said["return_lse"] = check_bool(return_lse, "return_lse", function)
        q, k, v = as_tensors(q, k, v, sinks, function)
        asked = check(function, q, k, v, sinks, at, said, starts)
        facts = facts_of(q, k, v, sinks, asked)
    except OmniattnError as error:
        failure = error
    settle(at, q, function, facts, failure, agree_first)
    assert asked is not None
    meet(at, q.device, function)
    if key is not None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[key] = at, asked
    return _run(q, k, v, sinks, at, asked, return_lse)


#: Calls that have been checked, by `_key_of`: a layer's is the same in every step of a training.
_KNOWN: dict[Any, tuple[Group, Asked]] = {}
_MOST_KNOWN = 256


def _key_of(function: str, tensors: tuple[Any, ...], group: Any, said: dict[str, Any], return_lse: Any) -> Any:
    """All that the check of a call depends on; None where it has to be checked anew."""
    q = tensors[0]
    # Ranks on CPUs compare their arguments at every call.
    if type(q) is not torch.Tensor or not q.is_cuda or arrays.needs_operator(tensors) or arrays.is_autocast(tensors):
        return None
    facts: list[Any] = []
    for x in tensors:
        if x is None:
            facts.append(None)
        elif type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided or x.is_neg():
            return None
        else:
            facts.append((x.dtype, x.device, x.shape, x.stride()))
    options = tuple(said.values())
    # True == 1 == 1.0, but not every one of them is right everywhere.
    types = tuple(map(type, options)), tuple(map(type, said["window"])) if type(said["window"]) is tuple else None
    key = (function, *facts, dist.group.WORLD if group is None else group, options, types, return_lse, type(return_lse))
    try:
        hash(key)
    except TypeError:  # a list for window, say
        return None
    return key


def _run(q: Any, k: Any, v: Any, sinks: Any, at: Group, asked: Asked, return_lse: bool) -> Any:
    """A call that has been checked."""
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        o, lse = _outside(q, k, v, sinks, at, asked, False)
        return (o, lse) if return_lse else o
    padded = one_head_dim(q, k, v, asked.common.softmax_scale)
    head_dim_v = v.shape[-1]
    if padded is not None:
        q, k, v = padded[:3]
    o, lse = _Ring.apply(q, k, v, sinks, at, asked)
    o = o[..., :head_dim_v] if padded is not None else o
    return (o, lse) if return_lse else o


def as_tensors(q: Any, k: Any, v: Any, sinks: Any, function: str) -> tuple[Any, Any, Any]:
    """q, k and v, where they are tensors: of float32 under autocast in its type, as `attention` takes them."""
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if x is not None or name != "sinks":
            check_tensor(x, name, function)
    if not arrays.is_autocast((q, k, v)):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.dtype is torch.float32 else x for x in (q, k, v))
    return q, k, v


def no_facts() -> dict[str, Any]:
    """In the place of `facts_of` on a rank that refuses the call."""
    return dict.fromkeys(_SAME)


def facts_of(q: Any, k: Any, v: Any, sinks: Any, asked: Asked, travels: bool = True) -> dict[str, Any]:
    """What has to be the same on all ranks, by argument. travels: K and V, in the precision."""
    ring, common = asked.ring, asked.common
    outer = [tuple(n for i, n in enumerate(asked.inside(x).shape) if i != 1) for x in (q, k, v)]
    grads = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, sinks))
    # GPUs of different kinds read different operands.
    target = format_of(asked.precision, q.device) if travels and asked.precision.quantized else None
    found = (
        (outer[0], str(q.dtype), sinks is not None), (outer[1:], str(k.dtype)), ring.seqlen_q, ring.seqlen_k,
        ring.starts, ring.window, common.softmax_scale, common.softcap, (asked.precision, target), ring.schedule, grads,
    )  # fmt: skip
    return dict(zip(_SAME, found, strict=True))


def check(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    group: Group,
    said: dict[str, Any],
    starts: tuple[Any] | None,
    travels: bool = True,
) -> Asked:
    """The call, or an error that names the argument, before anything is sent. travels: K and V, in the precision."""
    layout, packed = said["layout"], starts is not None
    values.check_layout(layout, function)
    tensors = [arrays.describe_of(function, x.detach(), name) for name, x in zip("qkv", (q, k, v), strict=True)]
    arrays.require_same_device(tensors)
    values.check_qkv(tensors[0], tensors[1], tensors[2], 3 if packed else 4, layout, function)
    for t in tensors:
        values.check_strides(t, function)
    seq = -3 if layout == "NHD" else -2
    head_dim, heads = q.shape[-1], q.shape[-2 if layout == "NHD" else -3]
    if sinks is not None:
        described = arrays.describe_of(function, sinks.detach(), "sinks")
        arrays.require_same_device([tensors[0], described])
        values.check_sinks(described, heads, tensors[0].dtype, function)
    check_bool(said["causal"], "causal", function)
    window = values.check_window(said["window"], said["causal"], function)
    scale = said["softmax_scale"]
    scale = head_dim**-0.5 if scale is None else check_number(scale, "softmax_scale", function)
    softcap = values.check_softcap(said["softcap"], function)
    check_bool(said["deterministic"], "deterministic", function)
    schedule = check_schedule(said["schedule"], function)
    documents = () if starts is None else check_starts(starts[0], function)
    if packed:
        whole_q = whole_k = check_seqlen(documents[-1], q.shape[seq], group, schedule, function, "cu_seqlens", "q")
        check_seqlen(documents[-1], k.shape[seq], group, schedule, function, "cu_seqlens", "k")
    else:
        whole_q = check_seqlen(said["seqlen_q"], q.shape[seq], group, schedule, function, "seqlen_q", "q")
        whole_k = check_seqlen(said["seqlen_k"], k.shape[seq], group, schedule, function, "seqlen_k", "k")
    if travels:
        precision = check_precision(said["precision"], window, whole_k, function)
    else:
        precision = of_keys(values.check_precision(said["precision"], function), whole_k, function)
    if precision.quantized and travels:
        _check_operands(q, v, precision, window, softcap, (whole_q, whole_k), function)
    if precision.quantized:
        values.check_quantized_head_dim(max(head_dim, v.shape[-1]), f"precision={said['precision']!r}", function)
    unite = not precision.quantized or unites(whole_k, group.size, schedule, window)
    ring = ring_of(whole_q, whole_k, group.size, schedule, window, documents, unite)
    return Asked(
        ring, Common(function, scale, softcap, said["deterministic"]), layout, packed, precision, said["return_lse"]
    )


def _check_operands(
    q: Any, v: Any, precision: Precision, window: tuple[int, int], softcap: float, rows: tuple[int, int], function: str
) -> None:
    """What operands of chunks cannot serve."""
    if v.shape[-1] != q.shape[-1]:
        raise ShapeError(
            "v", f"head_dim {q.shape[-1]} with a low precision, like q", f"{v.shape[-1]}", function=function
        )
    check_causal_lengths(window, rows, function)
    if softcap and precision.smooth_k:
        raise UnsupportedError(
            f"{function}(): softcap with smooth_k: the mean that is taken from K changes what softcap makes of a score",
            instead="Int8(smooth_k=False), precision='fp8' or precision='exact'",
        )


def _forward(q: Any, k: Any, v: Any, sinks: Any, group: Group, asked: Asked, has_gradient: bool) -> tuple[Any, Any]:
    """o and LSE of tensors (batch, seq, heads, head_dim)."""
    low = asked.precision.quantized
    wire: Wire = Plain(q, k, v, asked.common)
    if low:
        wire = Quantized(group, asked.ring, q, k, v, asked.precision, asked.common)
    bias = None
    if isinstance(wire, Quantized) and wire.mean is not None:
        needed = asked.return_lse or sinks is not None or has_gradient
        bias = bias_of(q, wire.mean, asked.common.softmax_scale) if needed else None
    return forward(group, asked.ring, wire, q, v.shape[-1], asked.common, sinks, bias, not low)


def _outside(
    q: Any, k: Any, v: Any, sinks: Any, group: Group, asked: Asked, has_gradient: bool
) -> tuple[Any, Any]:  # fmt: skip
    """o and LSE in the caller's layout."""
    inside = (asked.inside(q), asked.inside(k), asked.inside(v))
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            o, lse = _forward(*inside, sinks, group, asked, has_gradient)
    else:
        o, lse = _forward(*inside, sinks, group, asked, has_gradient)
    return asked.outside(o), lse[0] if asked.packed else lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, group: Group, asked: Asked) -> tuple[Any, Any]:
        o, lse = _outside(q, k, v, sinks, group, asked, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.asked = asked, group
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        asked, group = ctx.asked
        do = torch.zeros_like(o) if do is None else do
        lse, dlse = (x[None] if asked.packed and x is not None else x for x in (lse, dlse))
        inside = [asked.inside(x) for x in (q, k, v, o, do)]
        saved = Saved(inside[0], inside[1], inside[2], inside[3], lse, inside[4], dlse)
        needs = dict(zip(("dq", "dk", "dv", "dsinks"), ctx.needs_input_grad, strict=False))
        wanted = tuple(name for name in ("dq", "dk", "dv") if needs[name])
        found = backward(group, asked.ring, saved, asked.common, wanted) if wanted else {}
        found = {name: asked.outside(x) for name, x in found.items()}
        if needs["dsinks"]:
            found["dsinks"] = _of_sinks(saved, sinks)
        return (*(found.get(name) for name in ("dq", "dk", "dv", "dsinks")), None, None)


def _of_sinks(saved: Saved, sinks: Any) -> Any:
    """Gradient of sinks by this rank's queries: it depends on no key but through the LSE."""
    wide = torch.promote_types(saved.o.dtype, torch.float32)
    of_row = (saved.do.to(wide) * saved.o.to(wide)).sum(-1).transpose(1, 2)
    if saved.dlse is not None:
        of_row = of_row - saved.dlse
    share = torch.exp(sinks.to(wide)[:, None] - saved.lse)
    share = torch.where(saved.lse == -torch.inf, 0.0, share)
    return -(share * of_row).sum((0, 2)).to(sinks.dtype)


FUNCTIONS["ring_attention"] = ring_attention
