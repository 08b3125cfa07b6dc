"""Whether a row of the registry can serve a call, and if not, why: one answer for every operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..problems import UNLIMITED, AttentionProblem, BackwardProblem, QuantizeProblem, Target
from ..problems.attention import is_plain_scale
from ..problems.memory import ITEMSIZE
from ..problems.tile_order import num_m_blocks, num_n_blocks
from ..registry import KernelSpec
from ..registry.limits import MAX_COLUMNS, MAX_ITEMS
from ..registry.masks import MASK_TILE, MAX_TILES
from .model import rules

#: Of the launches that quantize K and V, and not Q.
KV_OPS = ("quantize_kv_sums", "quantize_kv")
#: Calls whose rows differ in what they can serve. Others have one row a call: which, selection says by name.
Problem = AttentionProblem | BackwardProblem | QuantizeProblem

#: Classes of calls whose rows are kept.
MAX_CLASSES = 1024
#: A class of calls.
K = TypeVar("K", bound=Hashable)


def fit(row: KernelSpec, problem: Problem | None, target: Target) -> str | None:
    """Why a row cannot serve a call.

    Parameters
    ----------
    row : KernelSpec
        Of an operation that the call consists of.
    problem : AttentionProblem, BackwardProblem, QuantizeProblem or None
        None for what has one row a call: only the GPU is looked at.
    target : Target

    Returns
    -------
    str or None
        A sentence about the row; None if it can serve.
    """
    if isinstance(problem, AttentionProblem):
        if row.op == "attention_split" and (reason := unfit_for_splits(problem)) is not None:
            return reason
        return _unfit_class(row, _class_of(problem, target)) or _unfit_call(row, problem, target)
    if isinstance(problem, BackwardProblem):
        reason = _unfit_backward(row, problem)
    else:
        reason = _unfit_quantizer(row, problem) if problem is not None else None
    return reason or row.unfit(target.cc, target.max_smem) or None


def fitting_rows(
    registry: Sequence[KernelSpec], op: str, problem: AttentionProblem, target: Target
) -> list[KernelSpec]:
    """The rows of ``op``, ``"attention"`` or ``"attention_split"``, that can serve a call, in the registry's order.

    The answers of `fit`, sooner: rows that can serve no call of a class are sorted out once a class.
    """
    if op == "attention_split" and unfit_for_splits(problem) is not None:
        return []
    of_class = _class_of(problem, target)
    alike = _CLASSES(registry, (op, of_class))
    if not _is_countable(problem):
        return [row for row in alike if _unfit_call(row, problem, target) is None]
    key = op, of_class, _details_of(problem)
    found = _FITTING.get(key)
    if found is None or found[0] is not alike:
        if len(_FITTING) >= MAX_CLASSES:
            _FITTING.clear()
        found = _FITTING[key] = alike, [row for row in alike if _unfit_call(row, problem, target) is None]
    return list(found[1])


def unfit_for_splits(problem: AttentionProblem) -> str | None:
    """Why no kernel that splits keys can serve a call; None if one may."""
    p = problem
    if 0 in (p.batch, p.seqlen_q, p.seqlen_k, p.num_q_heads):
        return "there is nothing to attend to"
    # Four channels a column; 64 rows more for the last tile, and rows of no head.
    batch = 1 if p.varlen else p.batch
    if batch * p.num_q_heads * (p.seqlen_q + 64) * p.head_dim_v // 2 >= MAX_COLUMNS:
        return "it counts rows in 31 bits"
    return None


class RowsOf(Generic[K]):
    """The rows of the registry that can serve a class of calls, sorted out once a class.

    A new length is planned anew, at every step of a generation: most of its time would go by in looking at rows for
    other calls.

    Parameters
    ----------
    serves : callable
        (row, class) -> whether it can.
    among : callable, optional
        (registry, class) -> the rows to look at; None: all.
    """

    def __init__(
        self,
        serves: Callable[[KernelSpec, K], bool],
        among: Callable[[Sequence[KernelSpec], K], Sequence[KernelSpec]] | None = None,
    ) -> None:
        self._serves, self._among = serves, among
        self._registry: Sequence[KernelSpec] = ()
        self._found: dict[K, tuple[KernelSpec, ...]] = {}

    def __call__(self, registry: Sequence[KernelSpec], of: K) -> tuple[KernelSpec, ...]:
        """Those of ``registry``, in its order."""
        found = self._found
        if registry is not self._registry or len(found) >= MAX_CLASSES:
            found = {}
            self._registry, self._found = registry, found
        rows = found.get(of)
        if rows is None:
            some = registry if self._among is None else self._among(registry, of)
            rows = found[of] = tuple(row for row in some if self._serves(row, of))
        return rows


class _Class(NamedTuple):
    """What rules most rows of attention out, the same for calls of every length."""

    dtype: str
    quantized: bool
    precision: str
    head_dim: int
    head_dim_v: int
    own_head_dim_v: bool
    score_mods: bool
    lse: bool
    varlen: bool
    paged: bool
    tensor_maps: bool
    cc: tuple[int, int]
    max_smem: int


def _class_of(problem: AttentionProblem, target: Target) -> _Class:
    p = problem
    return _Class(
        p.dtype, p.precision.quantized, p.precision.name, p.head_dim, p.head_dim_v, bool(p.own_head_dim_v),
        p.score_mods, p.lse, p.varlen, p.pages is not None, p.tensor_maps, target.cc, target.max_smem,
    )  # fmt: skip


def _unfit_class(row: KernelSpec, of: _Class) -> str | None:
    """Why a row of attention can serve no call of a class; None if it can."""
    if (reason := _unfit_arrays(row, of.dtype, of.head_dim)) is not None:
        return reason
    if row.head_dim_v < of.head_dim_v:
        return f"it takes v of head_dim up to {row.head_dim_v}, not {of.head_dim_v}"
    if max(of.head_dim, of.head_dim_v) <= row.above_head_dim:
        return f"it is for head dims above {row.above_head_dim}"
    # Kernels with tensor maps fill the rows of each array with zeros, and so do quantizers. Others have one head_dim.
    takes_both = row.arch_specific or row.quantized or row.any_head_dim_v
    if not takes_both and of.own_head_dim_v != row.other_head_dim_v:
        return "it takes v of q's head_dim only" if of.own_head_dim_v else "it is for v of another head_dim than q"
    if of.score_mods and not row.score_mods:
        return "it has no softcap, mask or non-positive softmax_scale"
    if of.lse and not row.lse:
        return "it makes no LSE"
    if row.needs_lse and not of.lse:
        return "it is for calls that want the LSE"
    if (reason := _unfit_sequences(row, of.varlen)) is not None:
        return reason
    if row.paged != of.paged:
        return "it is for K and V in pages" if row.paged else "it takes no K and V in pages"
    if row.tensor_maps and not of.tensor_maps:
        return "tensor maps cannot describe these strides, or the driver in use cannot make them"
    if row.quantized != of.quantized:
        return f"it multiplies {f'{row.qk} operands' if row.quantized else row.dtype}, not {of.precision} ones"
    return row.unfit(of.cc, of.max_smem) or None


def _details_of(problem: AttentionProblem) -> tuple[Hashable, ...]:
    """What else decides about rows, the same for calls of every length whose tiles can be counted."""
    p = problem
    masks = None
    if p.mask != "none":
        masks = p.mask_encoding, p.mask_dtype, p.mask_map, p.aligns_mask, p.one_mask_for_all_keys
    operands = None
    if p.precision.quantized:
        of = p.operands
        operands = (
            p.precision, None if of is None else (of.e4m3, of.grouping, of.stored_bits),
            None if p.descales is None else p.descales.v.granularity, p.absolute_scores, _maps_queries(p),
        )  # fmt: skip
    scores = p.score_mod is not None, p.dropout is not None, p.block_mask is not None, p.softcap > 0.0
    return *scores, masks, operands


def _is_countable(problem: AttentionProblem) -> bool:
    """Whether every kernel can count the tiles of a call."""
    p = problem
    heads = p.num_q_heads * (1 if p.varlen else p.batch)
    return p.seqlen_k <= MASK_TILE * MAX_TILES and heads * (p.seqlen_q // 64 + p.batch + 4) < MAX_ITEMS


def _of_kind(row: KernelSpec, of: tuple[str, str, bool]) -> bool:
    return (row.op, row.dtype, row.quantized) == of


def _of_class(row: KernelSpec, of: tuple[str, _Class]) -> bool:
    return _unfit_class(row, of[1]) is None


#: By operation, element type and whether operands are quantized; of those by class; of those by what else decides.
_KINDS: RowsOf[tuple[str, str, bool]] = RowsOf(_of_kind)
_FITTING: dict[Hashable, tuple[tuple[KernelSpec, ...], list[KernelSpec]]] = {}
_CLASSES: RowsOf[tuple[str, _Class]] = RowsOf(
    _of_class, among=lambda rows, of: _KINDS(rows, (of[0], of[1].dtype, of[1].quantized))
)


def _unfit_call(row: KernelSpec, problem: AttentionProblem, target: Target) -> str | None:
    """Why a row of attention, which can serve calls of this class, cannot serve this one; None if it can."""
    p = problem
    if p.score_mod is not None and not row.score_mod:
        return "it takes no score_mod"
    if p.dropout is not None and not row.dropout:
        return "it has no dropout"
    if p.block_mask is None:
        if row.block_masks:
            return "it is for calls with a block_mask"
    else:
        if row.quantized and not row.block_masks:
            return "it takes no block_mask"
        if not row.lists:
            return "it visits every tile of keys"
        if p.seqlen_k > MASK_TILE * MAX_TILES:
            return f"lists count tiles of keys up to {MAX_TILES}"
    if p.softcap > 0.0 and row.softcap == "never":
        return "it has no softcap"
    if row.score_mods and row.masks != "any" and (reason := _unfit_mask(row, p)) is not None:
        return reason
    if p.precision.quantized and (reason := _unfit_precision(row, p, target)) is not None:
        return reason
    return _unfit_tiles(row, p, p.seqlen_q)


def _unfit_mask(row: KernelSpec, problem: AttentionProblem) -> str | None:
    """Why a row that forms scores, of masks as other kernels or tensor maps bring them, cannot take a call's mask."""
    p = problem
    if p.seqlen_k > MASK_TILE * MAX_TILES:
        return f"it counts tiles of keys up to {MAX_TILES}"
    if p.mask_encoding == "tiles":
        if row.masks != "tiles":
            return "it takes no additive mask that differs between queries"
        if row.bias_bytes != ITEMSIZE[p.mask_dtype]:
            return f"it takes additive masks of {8 * row.bias_bytes} bits"
        if not (p.mask_map or (row.mask_maps and p.aligns_mask)):
            return "tensor maps cannot describe this mask: its address and strides are no multiples of 16 bytes"
    elif row.masks == "tiles":
        return "it is for additive masks that differ between queries"
    elif p.mask_encoding == "bits" and p.one_mask_for_all_keys:
        return "it packs masks key by key, and this one is the same for all keys"
    elif p.mask != "none" and row.masks == "none":
        return "it takes no masks of packed sequences"
    return None


def _unfit_precision(row: KernelSpec, problem: AttentionProblem, target: Target) -> str | None:
    """Why a row of attention on quantized operands cannot multiply what a call wants multiplied; None if it can."""
    wanted, operands, descales = problem.precision, problem.operands, problem.descales
    by_block = descales is not None and descales.v.granularity == "per_block"
    if by_block != row.value_factors:
        return (
            "it takes no factor for each 128 rows of v" if by_block else "it is for v with a factor for each 128 rows"
        )
    if (wanted.qk == "fp8") != (row.qk == "fp8"):
        return f"it multiplies {row.qk} operands, not {wanted.qk} ones"
    if (
        operands is not None
        and not operands.e4m3
        and (operands.grouping, operands.stored_bits) != (row.grouping, row.stored_bits)
    ):
        return (
            f"it reads {row.stored_bits}-bit operands in the {row.grouping} grouping, these are "
            f"{operands.stored_bits}-bit ones in the {operands.grouping} grouping"
        )
    if descales is not None and not row.arch_specific and problem.head_dim % 16:
        return "it reads rows of e4m3 in units of 16, and head_dim is no multiple of that"
    if wanted.pv not in ("auto", row.pv):
        return f"it multiplies P and V in {row.pv}, not {wanted.pv}"
    if wanted.pv_accumulator not in ("auto", row.pv_accumulator):
        return f"it sums P V in {row.pv_accumulator}, not {wanted.pv_accumulator}"
    if row.qk == "int4" and wanted.qk == "int8":
        return "it multiplies 4-bit integers"
    if row.qk == "int8" and wanted.qk == "int4" and target.cc < (9, 0) and operands is None:
        return "it multiplies 8-bit integers, and this GPU has 4-bit products"
    if row.smooth_q == ("never" if wanted.smooth_q else "always"):
        return f"it is compiled with{'out' if wanted.smooth_q else ''} smooth_q"
    if row.integer_powers == "linear" and not wanted.fast_exp:
        return "it is for Int8(fast_exp=True)"
    if wanted.granularity == "per_token":
        return "it has one scale a lane, not one a token"
    return _unfit_raw_queries(row, problem) if row.quantizes_q else None


def _unfit_raw_queries(row: KernelSpec, problem: AttentionProblem) -> str | None:
    """Why a row that quantizes q itself cannot do so in a call; None if it can."""
    wanted = problem.precision
    if problem.operands is not None or problem.descales is not None:
        return "it quantizes q itself, and this q comes quantized"
    if wanted.qk == "fp8" and (wanted.granularity, wanted.smooth_k) != ("per_block", False):
        return "it quantizes q itself, to e4m3 with a scale a row, and knows no mean of k"
    if wanted.qk != "fp8" and (wanted.qk, wanted.granularity, wanted.hadamard) != ("int8", "per_thread", False):
        return "it quantizes q itself, to 8-bit integers with a scale a lane, without a rotation"
    if not _maps_queries(problem):
        return "it reads q by a tensor map, which cannot describe these strides"
    if problem.absolute_scores and not row.lse:
        return "it knows no q . k_mean, which an LSE, sinks and softcap need"
    return None


def _maps_queries(problem: AttentionProblem) -> bool:
    """Whether a tensor map can describe q in 16 bits as it comes, which `tensor_maps` says nothing of here."""
    return problem.strides is None or all(0 <= 2 * step < 2**40 for step in problem.strides.q)


def _unfit_backward(row: KernelSpec, problem: BackwardProblem) -> str | None:
    """Why a row of the backward can serve a call on no GPU; None if it can on some."""
    f = problem.forward
    masked = f.mask != "none" or f.score_mod is not None
    if (reason := _unfit_arrays(row, f.dtype, f.head_dim)) is not None:
        return reason
    if f.own_head_dim_v:
        return "it takes v of q's head_dim only"
    if needs_mods(problem) and not row.score_mods:
        return "it has no softcap, mask or score_mod"
    if masked and row.masks == "none":
        return "it takes no mask and no score_mod"
    if f.dropout is not None and not row.dropout:
        return "it has no dropout"
    if f.softcap == 0.0 and row.softcap == "always":
        return "it is for softcap"
    if f.softcap > 0.0 and row.softcap == "never":
        return "it has no softcap"
    if row.masks == "keys" and (f.score_mod is not None or not _hides_keys_alike(f)):
        return "it takes masks that are the same for all queries, and no score_mod"
    if "dmask" in problem.wanted and row.op == "attention_backward" and not row.dmask:
        return "it makes no gradient of a mask"
    if "dmask" not in problem.wanted and row.dmask:
        return "it adds to the gradient of a mask, which is not wanted"
    if (reason := _unfit_blocks(row, f)) is not None:
        return reason
    if row.ordered_dq and not ("dq" in problem.wanted and (problem.deterministic or _order_pays(row, f))):
        return "it adds to dq in a fixed order, which deterministic=True asks for"
    if (reason := _unfit_sequences(row, f.varlen)) is not None:
        return reason
    if row.tensor_maps and not f.tensor_maps:
        return "no tensor map describes q, k, v or do (negative or huge strides)"
    if not row.any_scale and not is_plain_scale(abs(f.softmax_scale)):
        return f"it takes no softmax_scale of {f.softmax_scale:g}"
    return _unfit_tiles(row, f, max(f.seqlen_q, f.seqlen_k))


def _order_pays(row: KernelSpec, f: AttentionProblem) -> bool:
    """Whether additions to dq in an order are faster than others: nothing is cleared before and rounded behind them.

    Of short sequences, of which there are many or queries are causal; of causal batches at head_dim 128 also of longer
    ones: the more heads a tile of keys goes through at each tile of queries, the longer it may wait for the tile
    before. Where there are too few tiles, twice as many of long ones, they all wait for each other.
    """
    r = rules()
    causal = f.window_right == 0
    if f.window_left != UNLIMITED or f.window_right not in (0, UNLIMITED):
        return False
    if row.head_dim not in r.order_causal or f.seqlen_q != f.seqlen_k or f.varlen:
        return False
    if f.dropout is not None or f.softcap > 0.0 or f.mask != "none":
        return False
    length, group = num_m_blocks(f, row.block_m), f.num_q_heads // max(f.num_kv_heads, 1)
    tiles = f.batch * f.num_kv_heads * num_n_blocks(f, row.block_n)
    shortest, for_each = r.order_short
    if 0 < length <= shortest and tiles * group >= for_each * length**2:
        return True
    if not causal or tiles == 0:
        return False
    shared, alone = r.order_causal[row.head_dim]
    if length <= (shared if group > 1 else alone):
        return True
    least, of_head, most, least_tiles = r.order_long
    pays = row.head_dim == 128 and least <= length <= min(of_head * group, most)
    return pays and tiles >= (2 if length > of_head else 1) * least_tiles


def _unfit_blocks(row: KernelSpec, f: AttentionProblem) -> str | None:
    """Why a row of the backward cannot take the block mask of a call, or needs one."""
    if f.block_mask is None:
        return "it is for calls with a block_mask" if row.block_masks else None
    if not row.lists:
        return "it visits every tile"
    if max(f.seqlen_q, f.seqlen_k) > MASK_TILE * MAX_TILES:
        return f"lists count tiles up to {MAX_TILES}"
    return None


def needs_mods(problem: BackwardProblem) -> bool:
    """Whether a backward has to form scores one by one; a scale of any sign and size and a block mask need nothing."""
    f = problem.forward
    return f.softcap > 0.0 or f.mask != "none" or f.score_mod is not None


def _hides_keys_alike(f: AttentionProblem) -> bool:
    """Whether there is a mask, and it is the same for all queries."""
    return f.mask != "none" and f.strides is not None and f.strides.mask[2] == 0


def _unfit_quantizer(row: KernelSpec, problem: QuantizeProblem) -> str | None:
    """Why a quantizer can serve a call on no GPU; None if it can on some."""
    if (reason := _unfit_arrays(row, problem.dtype, problem.head_dim_pad)) is not None:
        return reason
    if row.op in KV_OPS:
        if not problem.is_of_keys:
            return "it is for K and V by the defaults of int8 attention, without Q"
        return _unfit_sequences(row, problem.varlen)
    if row.op == "quantize":
        if problem.e4m3 and problem.qk and not row.rotated:
            return "it makes integers of q and k, not e4m3"
        if problem.hadamard and problem.qk and not row.rotated:
            return "it has no Hadamard transform"
        if row.rotated and not problem.rotated:
            return "it is for what is rotated, or becomes e4m3"
    if row.specialization is not None and row.specialization != problem.specialization:
        return "it is made for the defaults of int8 attention in the {} grouping with {} values only".format(
            *row.specialization
        )
    return None


def _unfit_arrays(row: KernelSpec, dtype: str, head_dim: int) -> str | None:
    if row.dtype != dtype:
        return f"it is compiled for {row.dtype}, the arrays are {dtype}"
    if row.head_dim < head_dim:
        return f"it takes head_dim up to {row.head_dim}, not {head_dim}"
    return None


def _unfit_sequences(row: KernelSpec, varlen: bool) -> str | None:
    if varlen and row.sequences == "dense":
        return "it takes no packed sequences"
    if not varlen and row.sequences == "packed":
        return "it takes packed sequences only"
    return None


def _unfit_tiles(row: KernelSpec, problem: AttentionProblem, rows: int) -> str | None:
    """Why a persistent kernel cannot count the tiles of so many rows, or all that packed sequences have."""
    if not row.arch_specific:
        return None
    # A bound: 64 rows are the smallest tile, and packed sequences add one each.
    blocks = rows // 64 + (problem.batch + 3 if problem.varlen else 1)
    heads = problem.num_q_heads * (1 if problem.varlen else problem.batch)
    return "it counts tiles in 31 bits" if heads * blocks >= MAX_ITEMS else None
