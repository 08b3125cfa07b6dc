"""What ``attention`` and ``attention_varlen`` may be given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from .. import arguments, arrays, runtime
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from ..plan.engine import Call
from ..problems import (
    EXACT,
    FP8_ARRAYS,
    UNLIMITED,
    Alternatives,
    AttentionProblem,
    AttentionStrides,
    Descale,
    Descales,
    Pages,
    Precision,
    Sparse,
)
from ..problems.memory import ITEMSIZE
from ..problems.precision import CHOSEN_BY_AUTO, Auto, auto_of
from ..problems.quantize import BLOCK_ROWS, Strides3
from ..problems.sparse import check_heads
from ..problems.sparse_blocks import SparseBlocksProblem
from ..registry.sparse_blocks import CHOSEN_SCORES, MAX_SHARES, MEAN_DIM
from . import values

#: The caller's arrays, in the order of a call.
ARRAYS = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "mask", "sinks")
#: How many rows of packed sequences are used.
USED = ("seqused_q", "seqused_k")
#: Those of calls of packed sequences.
PACKED_ARRAYS = (*ARRAYS, *USED, "block_table")
#: Of calls on e4m3, behind `ARRAYS`.
DESCALES = ("descale_q", "descale_k", "descale_v")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "k", "v", "out"})
#: Bytes: masks that begin at a multiple of them take another kernel than others.
MASK_ALIGNMENT = 16


class AttentionOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    layout: Any
    causal: Any
    window: Any
    softmax_scale: Any
    softcap: Any
    precision: Any
    return_lse: Any
    deterministic: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    out_dtype: Any = None


class CommonOptions(NamedTuple):
    """Options that do not depend on the arrays, validated."""

    window: tuple[int, int]
    softcap: float
    return_lse: bool
    deterministic: bool


def check_common(options: AttentionOptions, function: str) -> CommonOptions:
    """What can be said without looking at an array."""
    values.check_layout(options.layout, function)
    causal = arguments.check_bool(options.causal, "causal", function)
    return_lse = arguments.check_bool(options.return_lse, "return_lse", function)
    deterministic = arguments.check_bool(options.deterministic, "deterministic", function)
    window = values.check_window(options.window, causal, function)
    return CommonOptions(window, values.check_softcap(options.softcap, function), return_lse, deterministic)


def check_values(options: AttentionOptions, function: str) -> None:
    """`check_common` and ``softmax_scale``, of a call that goes to an operator, whose schema says less."""
    check_common(options, function)
    if options.softmax_scale is not None:
        arguments.check_number(options.softmax_scale, "softmax_scale", function)


def check_scale(options: AttentionOptions, head_dim: int, function: str) -> float:
    """``softmax_scale``, 1 / sqrt(head_dim) unless given."""
    if options.softmax_scale is None:
        return float(head_dim**-0.5)
    return arguments.check_number(options.softmax_scale, "softmax_scale", function)


def check_attention(call: Call, tensors: dict[str, Tensor]) -> AttentionProblem:
    """The problem of a call on arrays."""
    function, options = call.operation.name, call.options
    varlen = function.startswith("attention_varlen")
    common = check_common(options, function)
    precision = values.check_precision(options.precision, function)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    layout = options.layout
    paged = "block_table" in tensors
    values.check_qkv(
        q, k, v, 3 if varlen else 4, layout, function, with_e4m3=not function.endswith("_backward"), paged=paged
    )
    dtype = values.check_out_dtype(options.out_dtype, q.dtype, function)
    arrays.require_same_device(tensors.values())
    scale = check_scale(options, q.shape[-1], function)
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    heads_q, heads_kv = q.shape[head], k.shape[head]
    rows_q, rows_k = q.shape[seq], k.shape[seq]
    batch, longest_q, longest_k, pages = q.shape[0], 0, 0, None
    if varlen:
        batch = _check_starts(tensors, function)
        values.check_seqused(tensors, batch, function)
        pages = _check_pages(tensors, batch, k, seq, function) if paged else None
        rows_k = rows_k if pages is None else pages.capacity
        longest_q, longest_k = _check_longest(options, rows_q, rows_k, "mask" in tensors, function)
    most = values.MAX_PACKED_SEQUENCES if varlen else arguments.MAX_EXTENT
    if batch > most:
        name = "cu_seqlens_q" if varlen else "q"
        raise ShapeError(name, f"at most {most} sequences", str(batch), function=function)
    if heads_q > arguments.MAX_EXTENT:
        raise ShapeError("q", f"at most {arguments.MAX_EXTENT} heads", str(heads_q), function=function)
    extent = (longest_q, longest_k) if varlen else (rows_q, rows_k)
    mask, mask_strides = check_mask(tensors, (batch, heads_q, *extent), dtype, function)
    sinks = values.check_sinks(tensors["sinks"], heads_q, dtype, function) if "sinks" in tensors else "none"
    for t in (q, k, v):
        values.check_strides(t, function)
    o_shape = (*q.shape[:-1], v.shape[-1])
    o_strides = check_out(tensors, o_shape, dtype, function)
    if pages is not None:
        _check_paged_call(q, options, function)
    precision, note = _precision_of(precision, longest_k if varlen else rows_k, q.dtype, options, function)
    if precision.quantized:
        what = "e4m3 arrays" if q.dtype == values.E4M3 else f"precision={precision.name!r}"
        values.check_quantized_head_dim(max(q.shape[-1], v.shape[-1]), what, function)
    descales = check_descales(tensors, (batch, heads_q, heads_kv), extent, function) if q.dtype == values.E4M3 else None
    if descales is None and (given := [name for name in DESCALES if name in tensors]):
        received = "an array" if tensors[given[0]].shape else "a number"  # which is an array by now
        raise ArgumentError(given[0], f"None, because {not_e4m3(q.dtype)}", received, function=function)

    def three(shape: tuple[int, ...], strides: tuple[int, ...]) -> Strides3:
        return canonical_strides(shape, strides, layout, len(shape) == 3)

    window = values.hiding_window(common.window, rows_q, rows_k)
    if pages is not None:  # of all sequences, as other packed keys are counted; 0 only where no page can be read
        rows_k = batch * min(longest_k or rows_k, rows_k)
    on_gpu = q.device == "cuda"
    can_map = on_gpu and runtime.has_tensor_maps()
    # Quantized operands are the library's own.
    own = precision.quantized and descales is None
    maps = can_map and (own or all(map(describable, (q, k, v))))
    rows_map = mask in ("float32", "io") and mask_has_map(tensors["mask"], mask_strides)
    keys_map = mask in ("float32", "io") and _keys_have_map(tensors["mask"], mask_strides)
    problem = AttentionProblem(
        dtype, batch, rows_q, rows_k, heads_q, heads_kv, q.shape[-1], *window, scale, common.softcap, mask,
        sinks, varlen, precision, common.deterministic, maps, None, common.return_lse, layout, longest_q, longest_k,
        maps and rows_map,
        AttentionStrides(
            three(q.shape, q.strides), three(k.shape, k.strides), three(v.shape, v.strides),
            three(o_shape, o_strides), (0 if varlen else heads_q * rows_q, rows_q), mask_strides,
        ), own_head_dim_v=v.shape[-1] if v.shape[-1] != q.shape[-1] else 0, descales=descales, note=note,
        used=("seqused_q" in tensors, "seqused_k" in tensors), pages=pages,
        keys_map=maps and keys_map,
    )  # fmt: skip
    if precision.sparse is not None:
        return _with_sparse(problem, precision.sparse, on_gpu, function)
    auto = auto_of(options.precision)
    if auto is None:
        return problem
    # Of operands of its own every map can be made that the driver makes.
    as_low = replace(problem, tensor_maps=can_map, mask_map=can_map and rows_map, keys_map=can_map and keys_map)
    return _with_alternatives(problem, as_low, auto, on_gpu)


def _with_alternatives(
    problem: AttentionProblem, as_low: AttentionProblem, auto: Auto, on_gpu: bool
) -> AttentionProblem:
    """An exact call with what it may be in its place; as_low: the call without a precision, on quantized operands."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if not on_gpu:
        return exact_for(problem, "no precision is faster on the CPU")
    if problem.pages is not None:
        return exact_for(problem, "low precisions have no block_table")
    if widest > arguments.MAX_QUANTIZED_HEAD_DIM:
        most = arguments.MAX_QUANTIZED_HEAD_DIM
        return exact_for(problem, f"low precisions take a head_dim of up to {most}, not {widest}")
    others = tuple(replace(as_low, precision=precision) for precision in CHOSEN_BY_AUTO)
    return replace(problem, alternatives=Alternatives(auto.max_error, others))


def exact_for(problem: AttentionProblem, reason: str) -> AttentionProblem:
    """A call that leaves its precision open, and that exact attention alone serves."""
    return replace(problem, alternatives=None, note=f"exact in place of auto: {reason}")


def _with_sparse(problem: AttentionProblem, sparse: Sparse, on_gpu: bool, function: str) -> AttentionProblem:
    """The call with the block mask that it predicts itself."""
    if problem.varlen:
        what = f"{function}(): packed sequences with {problem.precision.name}'s sparse="
        raise UnsupportedError(what, instead="attention of sequences that are equally long")
    if problem.mask == "bool":
        what = f"{function}(): a boolean mask with {problem.precision.name}'s sparse="
        raise UnsupportedError(what, instead="sparse_blocks, whose blocks go into the mask")
    if problem.window_left != UNLIMITED or problem.window_right not in (0, UNLIMITED):
        # Blocks would be chosen among those outside of the window, too.
        what = f"{function}(): a window with {problem.precision.name}'s sparse="
        raise UnsupportedError(what, instead="causal=True, or no window")
    for name, shares in (("topk", sparse.topk), ("cdf", sparse.cdf)):
        check_heads(shares, problem.num_q_heads, f"precision.sparse.{name}", function, sparse.source)
    made = problem.with_sparse(sparse)
    assert made.sparse is not None
    if on_gpu:
        check_kernels(made.sparse, function)
    return made


def _precision_of(
    precision: Precision, keys: int, q_dtype: str, options: AttentionOptions, function: str
) -> tuple[Precision, str]:
    """What the call runs in, and why that is not what it asked for."""
    if q_dtype == values.E4M3:
        # "exact" is the default: the arrays decide.
        if options.precision not in ("exact", "fp8"):
            expected = "'fp8' or nothing, because q, k and v are e4m3"
            raise ArgumentError("precision", expected, repr(options.precision), function=function)
        return FP8_ARRAYS, ""
    least = precision.min_seqlen
    if keys < least:
        return EXACT, f"exact in place of {precision.name}: {keys} keys are fewer than min_seqlen={least}"
    return replace(precision, min_seqlen=0) if least else precision, ""


def not_e4m3(dtype: str) -> str:
    """Why q of this type has no factors."""
    return f"q is {dtype} and not in e4m3"


def check_descales(
    tensors: dict[str, Tensor], counts: tuple[int, int, int], extent: tuple[int, int], function: str
) -> Descales:
    """The factors of q, k and v in e4m3.

    Parameters
    ----------
    counts : (batch, num_q_heads, num_kv_heads)
    extent : (int, int)
        Rows of the longest sequence of q, and of k.
    """
    found = []
    for name, rows in zip(DESCALES, (extent[0], extent[1], extent[1]), strict=True):
        batch, heads, heads_kv = counts[0], counts[1] if name == "descale_q" else counts[2], counts[2]
        t = tensors.get(name)
        if t is None:
            found.append(Descale())
            continue
        if t.dtype != "float32":
            raise DtypeError(name, "float32", t.dtype, function=function)
        shape, blocks = tuple(t.shape), -(-rows // BLOCK_ROWS)
        steps = tuple(0 if n == 1 else s for n, s in zip(shape, t.strides, strict=True))
        if shape in ((), (1,)):
            found.append(Descale("scalar"))
        elif shape == (batch, heads_kv):
            found.append(Descale("per_head", (steps[0], steps[1], 0)))
        elif shape == (batch, heads, blocks):
            if t.device == "cuda" and not 0 <= steps[2] < 2**32:
                expected = "blocks at a stride from 0 to 2^32 - 1"
                raise StrideError(name, expected, f"strides {tuple(t.strides)}", function=function)
            found.append(Descale("per_block", (steps[0], steps[1], steps[2])))
        else:
            expected = (
                f"shape () or (batch, num_kv_heads) = {(batch, heads_kv)} or (batch, heads, blocks of {BLOCK_ROWS} "
                f"rows) = {(batch, heads, blocks)}"
            )
            raise ShapeError(name, expected, str(shape), function=function)
    return Descales(*found)


def canonical_strides(shape: tuple[int, ...], strides: tuple[int, ...], layout: str, varlen: bool) -> Strides3:
    """(batch, seq, head) strides; 0 where the extent is 1, whatever the framework wrote there."""
    own = [0 if n == 1 else s for n, s in zip(shape, strides, strict=True)]
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    return (0 if varlen else own[0], own[seq], own[head])


def check_mask(
    tensors: dict[str, Tensor], shape: tuple[int, int, int, int], dtype: str, function: str
) -> tuple[str, tuple[int, int, int, int]]:
    """Kind of the mask, and its strides in the full shape."""
    if "mask" not in tensors:
        return "none", (0, 0, 0, 0)
    kind = values.check_mask(tensors["mask"], shape, dtype, function)
    return kind, values.broadcast_strides(tensors["mask"], shape)


def _is_mapped(mask: Tensor, strides: tuple[int, int, int, int]) -> bool:
    """Whether a tensor map can describe an additive mask: keys next to each other, else multiples of 16 bytes."""
    item = ITEMSIZE[mask.dtype]
    fitting = all(0 <= s * item < 2**40 and s * item % 16 == 0 for s in strides[:3])
    return mask.ptr % MASK_ALIGNMENT == 0 and strides[3] == 1 and fitting


def mask_has_map(mask: Tensor, strides: tuple[int, int, int, int]) -> bool:
    """The same of one that differs between queries: others have no map of rows."""
    return strides[2] > 0 and _is_mapped(mask, strides)


def _keys_have_map(mask: Tensor, strides: tuple[int, int, int, int]) -> bool:
    """The same of one that differs between heads and not between queries."""
    return strides[1] > 0 == strides[2] and _is_mapped(mask, strides)


def check_out(tensors: dict[str, Tensor], shape: tuple[int, ...], dtype: str, function: str) -> tuple[int, ...]:
    """Strides of o."""
    out = tensors.get("out")
    if out is None:
        return arrays.contiguous_strides(shape)
    values.check_like(out, shape, dtype, function)
    values.check_strides(out, function, written=True)
    return tuple(out.strides)


def _check_starts(tensors: dict[str, Tensor], function: str) -> int:
    """Number of packed sequences."""
    paged = "block_table" in tensors
    if paged and "cu_seqlens_k" in tensors:
        raise ArgumentError("cu_seqlens_k", "None, because block_table says where keys lie", "one", function=function)
    for name in ("cu_seqlens_q",) if paged else ("cu_seqlens_q", "cu_seqlens_k"):
        if name not in tensors:
            raise ArgumentError(name, "an int32 array of shape (batch + 1,)", "None", function=function)
        values.check_cu_seqlens(tensors[name], name, function)
    batch = tensors["cu_seqlens_q"].shape[0] - 1
    if paged:
        return int(batch)
    of_k = tensors["cu_seqlens_k"]
    if of_k.shape[0] != batch + 1:
        expected = f"shape ({batch + 1},), like cu_seqlens_q"
        raise ShapeError("cu_seqlens_k", expected, f"{tuple(of_k.shape)}", function=function)
    return int(batch)


def _check_pages(tensors: dict[str, Tensor], batch: int, k: Tensor, seq: int, function: str) -> Pages:
    """Where K and V lie in pages."""
    if "seqused_k" not in tensors:
        expected = "an int32 array of shape (batch,): how many keys each sequence has in its pages"
        raise ArgumentError("seqused_k", expected, "None", function=function)
    table = tensors["block_table"]
    if table.dtype != "int32":
        raise DtypeError("block_table", "int32", table.dtype, function=function)
    if len(table.shape) != 2 or table.shape[0] != batch:
        raise ShapeError("block_table", f"shape ({batch}, max_blocks)", f"{tuple(table.shape)}", function=function)
    if table.shape[0] > 0 and table.shape[1] > 1 and table.strides[1] != 1:
        raise StrideError("block_table", "rows of stride 1", f"stride {table.strides[1]}", function=function)
    size, count = k.shape[seq], table.shape[1]
    if size == 0:
        raise ShapeError("k", "pages of at least one key", "0", function=function)
    if k.shape[0] > arguments.MAX_ROWS:
        raise ShapeError("k", f"at most {arguments.MAX_ROWS} pages", f"{k.shape[0]}", function=function)
    if size * count > arguments.MAX_ROWS:
        expected = f"at most {arguments.MAX_ROWS // size} pages of {size} keys"
        raise ShapeError("block_table", expected, f"{count}", function=function)
    # A pool without pages has no keys, whatever the table says.
    return Pages(size, k.shape[0], count if k.shape[0] else 0, table.strides[0] if batch > 1 else 0)


def _check_paged_call(q: Tensor, options: AttentionOptions, function: str) -> None:
    """Raise for what kernels over pages do not have."""
    name = options.precision if isinstance(options.precision, str) else type(options.precision).__name__
    if auto_of(options.precision) is not None:
        name = "exact"
    if q.dtype == values.E4M3 or name != "exact":
        raise UnsupportedError(
            f"{function}(): block_table with {'e4m3 arrays' if q.dtype == values.E4M3 else f'precision={name!r}'}",
            instead="16-bit arrays with precision='exact', or a PagedKVCache of that format",
        )


def _check_longest(
    options: AttentionOptions, rows_q: int, rows_k: int, has_mask: bool, function: str
) -> tuple[int, int]:
    """max_seqlen_q and max_seqlen_k."""
    found = []
    for value, rows, name, of in (
        (options.max_seqlen_q, rows_q, "max_seqlen_q", "q"),
        (options.max_seqlen_k, rows_k, "max_seqlen_k", "k"),
    ):
        extent = arguments.check_int(value, name, function)
        if extent > arguments.MAX_ROWS:
            raise ArgumentError(name, f"at most {arguments.MAX_ROWS}", str(extent), function=function)
        if extent == 0 and rows > 0 and has_mask:
            raise ArgumentError(name, f"the longest sequence of {of}", "0", function=function)
        found.append(extent)
    return found[0], found[1]


def describable(t: Tensor) -> bool:
    """Whether a tensor map can describe the array: no negative or huge strides. 0 is that of an expanded array."""
    return all(n <= 1 or 0 <= s * t.itemsize < 2**40 for n, s in zip(t.shape[:-1], t.strides[:-1], strict=True))


def check_kernels(problem: SparseBlocksProblem, function: str) -> None:
    """What the kernels that predict blocks have no room for."""
    p = problem
    if p.head_dim > MEAN_DIM:
        what = f"{function}(): a head_dim of {p.head_dim} on a GPU"
        raise UnsupportedError(what, instead=f"head_dim up to {MEAN_DIM}")
    blocks_q, blocks_k = p.blocks
    if blocks_k > CHOSEN_SCORES:
        what = f"{function}(): {blocks_k} blocks of keys to choose from on a GPU"
        raise UnsupportedError(what, instead=f"up to {CHOSEN_SCORES}: larger blocks")
    if p.batch * (p.num_q_heads * blocks_q + p.num_kv_heads * blocks_k) > arguments.MAX_ROWS:
        raise UnsupportedError(f"{function}(): blocks that 31 bits cannot count", instead="larger blocks")
    of_heads = p.topk if p.cdf is None else p.cdf
    if isinstance(of_heads, tuple) and len(of_heads) > MAX_SHARES:
        what = f"{function}(): topk or cdf of each of {len(of_heads)} heads on a GPU"
        raise UnsupportedError(what, instead=f"up to {MAX_SHARES} heads, or a number for all of them")
