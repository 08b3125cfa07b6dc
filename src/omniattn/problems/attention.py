"""One call of attention: all that selection and builders may look at. No pointers, no framework objects."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .dropout import DropoutProblem
from .memory import ITEMSIZE
from .outputs import Output
from .precision import EXACT, Precision, value_levels
from .quantize import QK_DTYPES, QuantizeProblem, Strides3, row_bias_of
from .score_mod import BlockMaskProblem, ScoreModProblem, words
from .sparse import Sparse
from .sparse_blocks import SparseBlocksProblem

UNLIMITED = -1
#: Keys up to which kernels for Hopper and newer GPUs may read those that a mask hides from all queries. NaN there
#: reaches nobody otherwise (docs/api.md), so that how fast a kernel is does not decide about it.
READ_WHOLE = 256
#: Blocks of a block mask are multiples of it (registry.masks.MASK_TILE).
BLOCK_TILE = 64


@dataclass(frozen=True)
class AttentionStrides:
    """Element strides of a call's arrays, in the order (batch, seq, head); extents of 1 have stride 0."""

    q: Strides3
    k: Strides3
    v: Strides3
    o: Strides3
    lse: tuple[int, int]
    mask: tuple[int, int, int, int]


@dataclass(frozen=True)
class Descale:
    """Factors, fp32, of q, k or v that comes in e4m3: value = factor * e4m3.

    Attributes
    ----------
    granularity : str
        ``"none"`` (1), ``"scalar"``, ``"per_head"`` (a kv head of a sequence), ``"per_block"`` (128 rows of a head,
        counted from the sequence's first).
    strides : Strides3
        In elements, (batch, head, block): of q heads where it is that of q per block, else of kv heads. 0 for what
        shares a factor.
    """

    granularity: str = "none"
    strides: Strides3 = (0, 0, 0)


@dataclass(frozen=True)
class Descales:
    """That q, k and v come in e4m3, and the factors that they are to be multiplied by."""

    q: Descale = Descale()
    k: Descale = Descale()
    v: Descale = Descale()


@dataclass(frozen=True)
class Pages:
    """K and V of packed queries in pages of a pool, which a table names for each sequence.

    Attributes
    ----------
    page_size, num_pages : int
        Keys of a page, and pages of the pool.
    max_pages : int
        Entries of a sequence in the table.
    table_stride : int
        Elements from one sequence to the next.
    has_table : bool
        False: a sequence has one page, of its number.
    has_index : bool
        Each sequence names its row of the table, or its page.
    """

    page_size: int
    num_pages: int
    max_pages: int
    table_stride: int
    has_table: bool = True
    has_index: bool = False

    @property
    def capacity(self) -> int:
        """Keys that a sequence can have."""
        return self.max_pages * self.page_size


def is_plain_scale(scale: float) -> bool:
    """Whether kernels may multiply the -inf of hidden keys by ``scale`` and log2(e) in fp32."""
    return 2.0**-126 <= scale <= 2.0**127


@dataclass(frozen=True)
class AttentionProblem:
    """One call of ``attention`` or ``attention_varlen``, after validation.

    Attributes
    ----------
    dtype : str
        Element type of q, k, v and o; with ``descales`` of o.
    batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim : int
        Extents; for packed sequences seqlen_q and seqlen_k are the rows of the packed tensors.
    window_left, window_right : int
        Keys visible left and right of the diagonal, `UNLIMITED` for all; causal is ``window_right = 0``.
    softmax_scale, softcap : float
        Scale of the scores; 0 for no softcap.
    mask : str
        ``"none"``, ``"bool"``, ``"float32"`` or ``"io"`` (q's dtype).
    sinks : str
        ``"none"``, ``"float32"`` or ``"io"``.
    varlen : bool
        Packed sequences with cu_seqlens.
    precision : Precision
    deterministic : bool
        The caller wants the same bits at every run.
    tensor_maps : bool
        Tensor maps can describe q, k and v (positive strides below 2^40 bytes), and the driver can make them.
    operands : QuantizeProblem, optional
        What describes q, k and v that come quantized.
    lse : bool
        The caller wants the LSE.
    layout : str
        Of q, k, v and o: ``"NHD"`` or ``"HND"``.
    max_seqlen_q, max_seqlen_k : int
        Of packed sequences: extents of the mask, and of ``delta_s``.
    mask_map : bool
        A tensor map can describe the additive mask.
    score_mod : ScoreModProblem, optional
        The user's modification of scores.
    block_mask : BlockMaskProblem, optional
        Which blocks of queries and keys are visible at all.
    own_head_dim_v : int
        head_dim of v and o where that is another one; else 0.
    descales : Descales, optional
        Where q, k and v come in e4m3.
    sparse : SparseBlocksProblem, optional
        What predicts the block mask, which is the call's own and no array of the caller's then.
    note : str
        Why the call is another one than ``precision=`` asked for; empty where it is not.
    keys_map : bool
        A tensor map can describe an additive mask of numbers a key, others for each head.
    keys_as_tiles : bool
        Such a mask is read as one of queries and keys.
    used : (bool, bool)
        Whether the call says how many rows of each packed sequence are used, of queries and of keys.
    queries_per_sequence : int
        Of packed sequences over pages that all have so many, without cu_seqlens; else 0.
    passed_over : int
        Packed sequences over pages of up to so many queries are another launch's; 0: none.
    num_splits : int
        Parts of a sequence's keys at most; 0: as many as are fastest.
    is_part : bool
        Queries that are not used are those of other launches, which write their results.
    alternatives : Alternatives, optional
        What an exact call may be in its place, where the caller leaves the precision open.
    pages : Pages, optional
        Where K and V lie in pages. ``seqlen_k`` is a bound of all sequences' keys then, and strides of k and v are
        those of (page, key, head).
    strides : AttentionStrides, optional
        None where nobody launches.
    dropout : DropoutProblem, optional
        How many probabilities are dropped.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int
    window_right: int
    softmax_scale: float
    softcap: float
    mask: str
    sinks: str
    varlen: bool
    precision: Precision = EXACT
    deterministic: bool = False
    tensor_maps: bool = True
    operands: QuantizeProblem | None = None
    lse: bool = False
    layout: str = "NHD"
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    mask_map: bool = False
    strides: AttentionStrides | None = None
    score_mod: ScoreModProblem | None = None
    block_mask: BlockMaskProblem | None = None
    own_head_dim_v: int = 0
    descales: Descales | None = None
    sparse: SparseBlocksProblem | None = None
    note: str = ""
    keys_map: bool = False
    keys_as_tiles: bool = False
    used: tuple[bool, bool] = (False, False)
    pages: Pages | None = None
    queries_per_sequence: int = 0
    passed_over: int = 0
    num_splits: int = 0
    is_part: bool = False
    alternatives: Alternatives | None = None
    dropout: DropoutProblem | None = None

    @property
    def input_dtype(self) -> str:
        """Element type of q, k and v."""
        return self.dtype if self.descales is None else "float8_e4m3fn"

    @property
    def head_dim_v(self) -> int:
        """head_dim of v and o."""
        return self.own_head_dim_v or self.head_dim

    @property
    def head_dims(self) -> str:
        """head_dim, in words."""
        return f"head_dim {self.head_dim}" + (f" and {self.head_dim_v} of v" if self.own_head_dim_v else "")

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q."""
        return (*self.o_shape[:-1], self.head_dim)

    @property
    def o_shape(self) -> tuple[int, ...]:
        """Shape of o."""
        rows = (self.seqlen_q, self.num_q_heads) if self.layout == "NHD" else (self.num_q_heads, self.seqlen_q)
        return (*(() if self.varlen else (self.batch,)), *rows, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the LSE."""
        return (*(() if self.varlen else (self.batch,)), self.num_q_heads, self.seqlen_q)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        o = Output("o", self.o_shape, self.dtype)
        return (o, Output("lse", self.lse_shape, "float32")) if self.lse else (o,)

    @property
    def mask_extent(self) -> tuple[int, int]:
        """Extents of the mask along queries and keys."""
        return (self.max_seqlen_q, self.max_seqlen_k) if self.varlen else (self.seqlen_q, self.seqlen_k)

    @property
    def mask_encoding(self) -> str:
        """``"none"``, ``"bits"`` (booleans), ``"keys"`` (a number a key for all queries) or ``"tiles"`` (numbers)."""
        if self.mask in ("none", "bool"):
            return "none" if self.mask == "none" else "bits"
        # A packed mask would decide about tiles, which a block mask does.
        of_keys = self.strides is not None and self.strides.mask[2] == 0 and self.block_mask is None
        return "keys" if of_keys and not self.keys_as_tiles else "tiles"

    @property
    def mask_dtype(self) -> str:
        """Element type of the mask, where there is one."""
        return self.dtype if self.mask == "io" else self.mask

    @property
    def one_mask_for_all_keys(self) -> bool:
        """Whether the mask differs between queries and not between keys: packed it would be far larger."""
        return self.strides is not None and self.strides.mask[3] == 0 != self.strides.mask[2] and self.seqlen_k > 1

    @property
    def packs_mask(self) -> bool:
        """Whether kernels before attention can pack the mask: booleans, or values that are the same for all queries."""
        return self.mask_encoding in ("bits", "keys")

    @property
    def aligns_mask(self) -> bool:
        """Whether a kernel that wants tensor maps can get a copy of the additive mask, which no map describes."""
        if self.mask_encoding != "tiles" or self.mask_map or self.varlen or self.finds_tiles:
            return False
        return self.mask_elements < 2**31  # rows of 16 bytes are counted in 31 bits

    @property
    def mask_elements(self) -> int:
        """Of the mask, as it lies in memory: what is broadcast counts once."""
        b, h, q, _ = self.strides.mask if self.strides is not None else (1, 1, 1, 1)
        rows, keys = self.mask_extent
        return (self.batch if b else 1) * (self.num_q_heads if h else 1) * (rows if q else 1) * keys

    @property
    def finds_tiles(self) -> bool:
        """Whether a block mask or a mask expression hides tiles, and nothing else (a packed mask) finds them."""
        hides = self.block_mask is not None or (self.score_mod is not None and self.score_mod.mask is not None)
        # Without the longest sequence there is no telling how much memory that takes.
        sized = not self.varlen or (self.max_seqlen_q > 0 and self.max_seqlen_k > 0)
        return hides and sized and not self.packs_mask

    @property
    def tiles_by(self) -> tuple[bool, bool]:
        """Whether what a block mask and a mask expression leave differs between batches, and between query heads."""
        names = words(self.score_mod.mask or "") if self.score_mod is not None else frozenset()
        of_batch, of_head = (False, False) if self.block_mask is None else (x != 0 for x in self.block_mask.strides[:2])
        return of_batch or "b" in names, of_head or "h" in names

    @property
    def packed_lists(self) -> bool:
        """Whether it is one of packed sequences with a mask, or with tiles to be found."""
        return self.varlen and (self.mask != "none" or self.finds_tiles)

    @property
    def absolute_scores(self) -> bool:
        """Whether something looks at the size of scores, to which smoothing adds a constant of each row."""
        return self.lse or self.sinks != "none" or self.softcap > 0

    @property
    def score_mods(self) -> bool:
        """Whether scores have to be formed one by one before the softmax.

        The plain kernels take the row maximum of the unscaled products, which is the maximum of the scores only if the
        scale is positive, and apply scale * log2(e) to the -inf of hidden keys: neither 0 nor infinity will do in fp32.
        """
        modified = self.softcap > 0.0 or self.mask != "none"
        modified = modified or self.score_mod is not None or self.block_mask is not None
        return modified or not is_plain_scale(self.softmax_scale)

    def with_sparse(self, sparse: Sparse) -> AttentionProblem:
        """The same call with a block mask that it predicts itself; `precision` has no `Sparse` then."""
        assert self.strides is not None
        predicted = SparseBlocksProblem(
            self.dtype, self.batch, self.seqlen_q, self.seqlen_k, self.num_q_heads, self.num_kv_heads, self.head_dim,
            sparse.sizes, sparse.topk, sparse.cdf, sparse.similarity, self.window_right == 0, sparse.keep_first,
            self.layout, self.strides.q, self.strides.k, sparse.source,
        )  # fmt: skip
        rows, keys = predicted.blocks
        steps = tuple(0 if n == 1 else s for n, s in (
            (self.batch, self.num_q_heads * rows * keys), (self.num_q_heads, rows * keys), (rows, keys), (keys, 1),
        ))  # fmt: skip
        size = sparse.sizes[0] // BLOCK_TILE, sparse.sizes[1] // BLOCK_TILE
        own = BlockMaskProblem(size, (steps[0], steps[1], steps[2], steps[3]))
        return replace(self, sparse=predicted, block_mask=own, precision=replace(self.precision, sparse=None))

    def quantization(self, *, grouping: str, pv: str, pv_accumulator: str, unpacked: bool) -> QuantizeProblem:
        """The quantization of q, k and v that a kernel reading such operands needs first.

        Where v has a head_dim of its own: the arrays that come of it, which are as wide as the wider of both.
        """
        p, e4m3, head_dim = self.precision, self.precision.qk == "fp8", max(self.head_dim, self.head_dim_v)
        return QuantizeProblem(
            self.dtype, self.batch, self.seqlen_q, self.seqlen_k, self.num_q_heads, self.num_kv_heads, head_dim,
            self.varlen, QK_DTYPES[p.qk], p.granularity, "sm90" if e4m3 else grouping, p.smooth_q, p.smooth_k,
            p.smooth_v, row_bias_of(e4m3, p.smooth_k, self.absolute_scores),
            v_dtype="float16" if pv == "fp16" else "float8_e4m3", max_seqlen_k=max(self.max_seqlen_k, 1),
            unpacked=unpacked and not e4m3, v_levels=value_levels(pv, pv_accumulator), hadamard=p.hadamard, seed=p.seed,
            used=self.used,
        )  # fmt: skip

    def quantizations(self, whole: QuantizeProblem) -> tuple[QuantizeProblem, ...]:
        """What makes the arrays of ``whole``, one after the other: all of it, or q and k apart from v."""
        if not self.own_head_dim_v:
            return (whole,)
        alike = replace(whole, least_pad=whole.head_dim_pad)
        return (
            replace(alike, head_dim=self.head_dim, v=False, smooth_v=False),
            replace(
                alike, head_dim=self.head_dim_v, qk=False, rows_q=0, heads_q=0, smooth_q=False, smooth_k=False,
                row_bias="none",
            ),
        )  # fmt: skip

    @property
    def visible_pairs(self) -> int | None:
        """(query, key) pairs of one head and batch that are computed; None if the lengths are on the device."""
        if self.varlen:
            return None
        offset = self.seqlen_k - self.seqlen_q

        def below(start: int) -> int:
            """Sum over the rows i of clamp(i + start, 0, seqlen_k)."""
            first = min(max(-start, 0), self.seqlen_q)  # rows before it count 0
            last = min(max(self.seqlen_k - start, first), self.seqlen_q)  # rows from it on count seqlen_k
            rising = (last - first) * (first + start) + (last - first) * (last - first - 1) // 2
            return rising + (self.seqlen_q - last) * self.seqlen_k

        upper = self.seqlen_q * self.seqlen_k
        if self.window_right != UNLIMITED:
            upper = below(offset + self.window_right + 1)
        lower = 0 if self.window_left == UNLIMITED else below(offset - self.window_left)
        return upper - lower

    @property
    def flops(self) -> int | None:
        """Multiply-adds of both products, two operations each."""
        pairs = self.visible_pairs
        widths = self.head_dim + self.head_dim_v
        return None if pairs is None else 2 * pairs * widths * self.num_q_heads * self.batch

    @property
    def min_bytes(self) -> int:
        """Bytes that have to move: q, k, v read once, o and the LSE written once."""
        batch = 1 if self.varlen else self.batch
        rows_q, rows_kv = self.seqlen_q * self.num_q_heads, self.seqlen_k * self.num_kv_heads
        inputs = self.head_dim * rows_q + (self.head_dim + self.head_dim_v) * rows_kv
        outputs = self.head_dim_v * rows_q
        return batch * (ITEMSIZE[self.input_dtype] * inputs + ITEMSIZE[self.dtype] * outputs + 4 * rows_q)


@dataclass(frozen=True)
class Alternatives:
    """The same call in low precisions, of which a plan takes what is fastest and accurate enough (`Auto`).

    Attributes
    ----------
    max_error : float
        Of `precision.MEAN_ERRORS`.
    problems : tuple of AttentionProblem
        As if the caller had asked for that precision.
    """

    max_error: float
    problems: tuple[AttentionProblem, ...]
