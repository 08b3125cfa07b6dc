"""``flex_attention`` and ``trace_score_mod``: FlexAttention's functions and block masks on this package's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .. import arguments
from ..errors import ArgumentError, DeviceError, ShapeError, UnsupportedError
from ..ops import ScoreMod, attention
from . import score_graph as graph
from . import shapes
from .score_graph import Node
from .score_text import array_name, evaluate, text
from .score_trace import Trace

FUNCTION = "flex_attention"
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]
MaskFunction = Callable[[Any, Any, Any, Any], Any]
#: A block that is hidden, that its function decides about, that is shown.
_PARTIAL, _FULL = 1, 2


def trace_score_mod(
    score_mod: ScoreFunction | None = None,
    mask_mod: MaskFunction | None = None,
    *,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """The `ScoreMod` of Python functions as FlexAttention takes them.

    ::

        mod = omniattn.torch.trace_score_mod(lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k)
        o = oa.attention(q, k, v, score_mod=mod)

    The functions are called once, with objects that write down what is done to them. The result has their text in CUDA
    C++, the same by NumPy for arrays on the CPU, and the derivative by the score for backward passes.

    Parameters
    ----------
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx)``: the new score.
    mask_mod : callable, optional
        ``mask_mod(b, h, q_idx, kv_idx)``: whether the key is visible.
    device : torch.device or str, optional
        What functions see as ``.device`` of their arguments; default: the CPU.

    Returns
    -------
    ScoreMod
        Tensors without a score or position in them are computed now. Those that a function reads by such an index are
        its arrays, which each call reads anew. Python numbers are part of the text: another number, another kernel.

    Raises
    ------
    UnsupportedError
        What cannot be translated, by its name: a decision of Python on a score or position, a function of torch without
        counterpart, a slice beside a traced index, more than 8 tensors, an element of another dtype than float32,
        float16, bfloat16, int32, int64, int8, uint8 or bool.
    ArgumentError
        No function; one that returns no number.

    Notes
    -----
    Arithmetic on scores is fp32 on a GPU. Positions are int32. A negative index counts from the end, as in torch; one
    outside the tensor is the function's own affair, as in a `ScoreMod`. Where two elements are equal, the gradient of
    ``torch.maximum`` and ``torch.minimum`` goes to the first, not to both by halves.
    """
    if score_mod is None and mask_mod is None:
        raise ArgumentError("score_mod", "a function, without mask_mod", "None", function="trace_score_mod")
    try:
        at = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError("device", "a torch.device, or its name", repr(device), function="trace_score_mod") from None
    made: ScoreMod = shapes.call("trace_score_mod", _traced, Trace(at), score_mod, mask_mod)
    return made


def _traced(trace: Trace, score_mod: Any, mask_mod: Any) -> ScoreMod:
    score = _score_of(trace, score_mod)
    return _made(trace, score, None if mask_mod is None else _mask_of(trace, mask_mod))


def _score_of(trace: Trace, function: ScoreFunction | None) -> Node:
    if function is None:
        return graph.place("score")
    return graph.cast(trace.run(function, "score_mod", ("score", "b", "h", "q", "k")), "f")


def _mask_of(trace: Trace, function: MaskFunction) -> Node:
    return graph.cast(trace.run(function, "mask_mod", ("b", "h", "q", "k")), "b")


def _made(trace: Trace, score: Node, mask: Node | None) -> ScoreMod:
    slope = graph.derivative(score) or graph.const(0.0)
    shown = mask if mask is None or mask.op != "const" or not mask.value else None
    return ScoreMod(
        text(score),
        mask=None if shown is None else text(shown),
        reference=functools.partial(_by_numpy, score, shown),
        grad=text(slope),
        reference_grad=functools.partial(_by_numpy, slope, None),
        **{array_name(number): x for number, x in enumerate(trace.arrays)},
    )


def _by_numpy(node: Node, mask: Node | None, score: Any, b: Any, h: Any, q: Any, k: Any, **arrays: Any) -> Any:
    """The node for a block of scores, -inf where the mask hides a key."""
    places = {"score": score, "b": b, "h": h, "q": q, "k": k}
    made = np.broadcast_to(evaluate(node, places, arrays), score.shape)
    if mask is None:
        return np.array(made, score.dtype)
    return np.where(evaluate(mask, places, arrays), made, -np.inf).astype(score.dtype)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` with its signature, by `attention`.

    ::

        softmax(score_mod(scale * query @ key.T), over the keys that block_mask shows) @ value

    Parameters
    ----------
    query : tensor, (batch, heads, L, E)
        float16 or bfloat16 on a GPU; on the CPU float32 and float64 too, by the NumPy reference. E need not be a
        multiple of 8: it is padded.
    key : tensor, (batch, heads of keys, S, E)
        One batch entry serves all of the query's.
    value : tensor, (batch, heads of keys, S, Ev)
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx)``, translated by `trace_score_mod`, which says what can be.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        As it is: blocks that it does not list are hidden, those that it lists as full are shown, and in the others its
        ``mask_mod`` decides. Its tables are read on the device, at each call.
    scale : float, optional
        1 / sqrt(E) unless given.
    enable_gqa : bool
        Allows fewer heads of keys, a number that divides the query's.
    return_lse : bool
        Also return the LSE: fp32, natural logarithm, (batch, heads, L).
    kernel_options : None
        Anything else raises: these kernels have none of Triton's options.
    return_aux : torch.nn.attention.flex_attention.AuxRequest, optional
        ``lse`` is served, ``max_scores`` raises.

    Returns
    -------
    tensor, (batch, heads, L, Ev), or (tensor, lse), or (tensor, AuxOutput)
        A row that attends to nothing is 0, and its LSE -inf.

    Raises
    ------
    UnsupportedError
        What cannot be translated, by its name; ``kernel_options``; ``max_scores``.
    ArgumentError
        Or its subclasses: shapes that do not belong together, a block mask of other lengths or another device.

    Notes
    -----
    The functions are translated at each call, which takes half a millisecond and more on the host; what is compiled
    for their text is kept. `trace_score_mod` translates once. Under torch.compile a call is a break of the graph, and a
    call of `attention` with the result of `trace_score_mod` is none. Gradients go to query, key and value; tensors that
    a function reads have none, and one that requires a gradient raises.
    """
    enable_gqa, return_lse = (
        arguments.check_bool(x, name, FUNCTION) for name, x in (("enable_gqa", enable_gqa), ("return_lse", return_lse))
    )
    if not (kernel_options is None or (isinstance(kernel_options, dict) and not kernel_options)):
        raise UnsupportedError(
            f"{FUNCTION}(): kernel_options are of Triton's kernels", instead="none: these kernels choose for themselves"
        )
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ArgumentError("return_aux", "an AuxRequest, or None", type(return_aux).__name__, function=FUNCTION)
    if getattr(return_aux, "max_scores", False):
        raise UnsupportedError(f"{FUNCTION}(): max_scores is not computed", instead="AuxRequest(lse=True)")
    key, value = _checked(query, key, value, enable_gqa)
    options = _modified(query, key, value, score_mod, block_mask)
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    tensors = [
        shapes.readable(F.pad(x, (0, shapes.padded_head_dim(x.shape[-1]) - x.shape[-1])) if x.shape[-1] % 8 else x)
        for x in (query, key, value)
    ]
    o, lse = shapes.call(
        FUNCTION, attention, *tensors, layout="HND", softmax_scale=head_dim**-0.5 if scale is None else scale,
        return_lse=True, **options,
    )  # fmt: skip
    o = o[..., :head_dim_v]
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return o, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _checked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """key and value with the query's batch."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(name, "a tensor", type(x).__name__, function=FUNCTION)
        if x.layout is not torch.strided or x.is_nested:
            raise UnsupportedError(
                f"{FUNCTION}(): argument {name!r} is a sparse or nested tensor", instead="strided tensors"
            )
        if x.dim() != 4 or x.shape[-1] == 0:
            raise ShapeError(name, "(batch, heads, seq, head_dim)", tuple(x.shape), function=FUNCTION)
    if key.shape[3] != query.shape[3]:  # which padding could make as many
        raise ShapeError("key", f"head_dim {query.shape[3]}, like query", key.shape[3], function=FUNCTION)
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise ShapeError("key", f"{query.shape[1]} heads as the query, without enable_gqa", key.shape[1],
                         function=FUNCTION)  # fmt: skip
    if key.shape[0] != query.shape[0] and key.shape[0] == value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    return key, value


@torch.compiler.disable
def _modified(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any
) -> dict[str, Any]:
    """``score_mod`` and ``block_mask`` of `attention`."""
    if score_mod is None and block_mask is None:
        return {}
    trace = Trace(query.device)
    score = _score_of(trace, score_mod)
    if block_mask is None:
        return {"score_mod": _made(trace, score, None)}
    kinds, size = _blocks(block_mask, query, key)
    mask = _mask_of(trace, block_mask.mask_mod)
    # Blocks of whole tiles are a mask that kernels have for themselves, gradients too. Others become part of the
    # expression.
    always = mask.op == "const" and bool(mask.value)
    if any(x % 64 for x in size):
        kind = _kind_of_block(trace, kinds, size)
        listed = graph.compare("eq", kind, graph.const(_PARTIAL))
        shown = graph.compare("eq", kind, graph.const(_FULL))
        mask = graph.logical("or", shown, graph.logical("and", listed, mask))
        if always:
            mask = graph.compare("ne", kind, graph.const(0))
        return {"score_mod": _made(trace, score, mask)}
    options: dict[str, Any] = {"block_mask": kinds != 0, "block_size": size}
    if not always and block_mask.full_kv_num_blocks is not None:
        kind = _kind_of_block(trace, kinds, size)
        mask = graph.logical("or", graph.compare("eq", kind, graph.const(_FULL)), mask)
    if score_mod is not None or not always:
        options["score_mod"] = _made(trace, score, None if always else mask)
    return options


def _kind_of_block(trace: Trace, kinds: torch.Tensor, size: tuple[int, int]) -> Node:
    """The element of ``kinds`` that a pair of a query and a key is in."""
    batch, head = (
        graph.place(name) if extent > 1 else graph.const(0) for name, extent in zip("bh", kinds.shape, strict=False)
    )
    row, column = (graph.floor_divide(graph.place(name), graph.const(n)) for name, n in zip("qk", size, strict=True))
    return trace.load(kinds, (batch, head, row, column))


def _blocks(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """What each block of a BlockMask is, uint8 (batch or 1, heads or 1, blocks of queries, of keys); their size."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise ArgumentError("block_mask", "a torch.nn.attention.flex_attention.BlockMask, or None",
                            type(block_mask).__name__, function=FUNCTION)  # fmt: skip
    lengths, size = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    if lengths != (query.shape[2], key.shape[2]):
        raise ShapeError("block_mask", f"one of {query.shape[2]} queries and {key.shape[2]} keys", lengths,
                         function=FUNCTION)  # fmt: skip
    lead = tuple(block_mask.kv_num_blocks.shape[:2])
    for axis, (own, of_query) in enumerate(zip(lead, query.shape[:2], strict=True)):
        if own not in (1, of_query):
            expected = f"{('batch', 'heads')[axis]} 1 or {of_query}"
            raise ShapeError("block_mask", expected, own, function=FUNCTION)
    if block_mask.kv_indices.device != query.device:
        raise DeviceError("block_mask", f"one on {query.device}", str(block_mask.kv_indices.device), function=FUNCTION)
    columns = -(-lengths[1] // size[1])
    kinds = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns, _PARTIAL)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns, _FULL)
        kinds = torch.maximum(kinds, full)
    return kinds, (int(size[0]), int(size[1]))


def _listed(counts: torch.Tensor, indices: torch.Tensor, columns: int, kind: int) -> torch.Tensor:
    """``kind`` where a row lists a block, else 0: of each row the first ``counts`` of its indices count."""
    here = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    # What does not count goes into a column of its own, which is cut off.
    at = torch.where(here, indices, columns).clamp(0, columns).long()
    made = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.uint8, device=indices.device)
    made.scatter_(-1, at, kind)
    return made[..., :columns].contiguous()
