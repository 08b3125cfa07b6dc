"""One call of ``attention_with_kvcache``: attention over pages, or one of ``decode``, as the kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.formats import KVFormat, row_dim
from ..kv.layout import CacheLayout
from .attention import AttentionProblem
from .decode import MAX_Q_LEN, DecodeProblem
from .dequantize import DequantizeProblem
from .outputs import Output

#: Names of caches' element types.
_FORMATS = {"float16": "fp16", "bfloat16": "bf16"}
#: Elements that the kernels of ``decode`` read at a time.
_STEP = 8


def few_queries(group: int, *, rows: int = 8) -> int:
    """Queries of a sequence that have up to so many ``rows``, or one.

    The smallest tile of ``decode``'s kernels has 8. ``group``: query heads of a kv head.
    """
    return max(1, rows // group)


def fixed_rows(quantized: bool) -> int:
    """Rows of a packed sequence's queries that the kernels of ``decode`` take with ``deterministic``.

    In 16 bits tiles of 8 and of 16 rows add in the same order. ``quantized``: the cache has K or V in 8 or 4 bits.
    """
    return 8 if quantized else 16


def decode_of_pages(problem: AttentionProblem) -> DecodeProblem | None:
    """The call of ``decode``'s kernels on the sequences of few queries of packed ones over pages.

    Of all, where none has more than these take; else of those that it may take off attention over pages. None where
    they do not serve the call.
    """
    p, s, pages = problem, problem.strides, problem.pages
    if s is None or pages is None or not p.batch or p.queries_per_sequence or p.used[0] or p.dtype not in _FORMATS:
        return None
    if p.score_mod is not None or p.mask != "none" or p.block_mask is not None or p.own_head_dim_v:
        return None
    if p.precision.quantized or not p.max_seqlen_q or not (p.window_right == 0 or p.max_seqlen_q == 1):
        return None
    if (
        not pages.has_table
        or not pages.num_pages
        or pages.has_index
        or (p.batch > 1 and pages.table_stride != pages.max_pages)
    ):
        return None
    if s.k != s.v or any(step % _STEP for step in s.k):
        return None
    extents = (pages.num_pages, p.num_kv_heads, pages.page_size)
    page, key, head = s.k
    strides = tuple(step if n > 1 else 0 for step, n in zip((page, head, key), extents, strict=True))
    formats = [KVFormat(_FORMATS[p.dtype], p.head_dim, row_dim(p.head_dim), False, is_key) for is_key in (True, False)]
    cache = CacheLayout(
        True,
        pages.num_pages,
        pages.page_size,
        p.num_kv_heads,
        p.head_dim,
        formats[0],
        formats[1],
        False,
        (),
        0,
        0,
        0,
        None,
        "cuda",
        0,
        "NHD",
        strides,  # type: ignore[arg-type]
    )
    all_few = p.max_seqlen_q <= MAX_Q_LEN
    few = p.max_seqlen_q if all_few else few_queries(p.num_q_heads // p.num_kv_heads)
    return DecodeProblem(
        p.dtype, cache, p.batch, few, p.num_q_heads, p.num_kv_heads, p.head_dim, pages.capacity, pages.page_size,
        pages.num_pages, pages.max_pages, p.window_left, p.softmax_scale, p.softcap, p.sinks, False, 0, p.lse,
        (*s.q, 1), (*s.o, 1), p.seqlen_q, not all_few,
    )  # fmt: skip


def keys_of_pages(problem: AttentionProblem, few: DecodeProblem) -> DequantizeProblem:
    """Keys and values of a call over pages made one behind the other; ``few``: `decode_of_pages`."""
    p, pages = problem, problem.pages
    assert pages is not None
    return DequantizeProblem(
        p.dtype, few.cache, p.batch, p.seqlen_q, 0, pages.capacity, pages.max_pages, pages.page_size, pages.num_pages,
        p.window_left,
    )  # fmt: skip


@dataclass(frozen=True)
class WithCacheProblem:
    """One call of ``attention_with_kvcache``, after validation.

    Attributes
    ----------
    kernels : AttentionProblem or DecodeProblem
        The call of the kernels that run it. That of attention has the rows of all sequences packed, those of a batch
        too; that of ``decode`` is a batch.
    q_shape : tuple of int
        Of q and o as the caller has them.
    capacity : int
        Tokens that a sequence can have at most.
    window : (int, int)
        Keys visible left and right of the diagonal, -1 for all; causal is a right side of 0.
    why : str
        Why these kernels.
    batch_index : bool
        Each sequence names the one of a contiguous cache that it reads.
    few : DecodeProblem, optional
        Of packed queries that attention over pages runs: the call of ``decode``'s kernels on the sequences that have a
        few, which may take these off it.
    keys : DequantizeProblem, optional
        Of attention: what its kernels read where keys and values are made one behind the other. Those of a quantized
        cache have to be: ``kernels`` has no pages then.
    """

    kernels: AttentionProblem | DecodeProblem
    q_shape: tuple[int, ...]
    capacity: int
    window: tuple[int, int]
    why: str
    batch_index: bool = False
    few: DecodeProblem | None = None
    keys: DequantizeProblem | None = None

    @property
    def by_decode(self) -> bool:
        """Whether the kernels of ``decode`` run it."""
        return isinstance(self.kernels, DecodeProblem)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call makes. The LSE is as its kernels write it: `lse_is_own` says whether as the caller's."""
        o, *lse = self.kernels.outputs
        return (Output("o", (*self.q_shape[:-1], o.shape[-1]), o.dtype), *lse)

    @property
    def lse_is_own(self) -> bool:
        """Whether the LSE is (heads, rows) of packed queries, (batch, heads, q_len) of a batch; else it needs a view.

        The kernels of ``decode`` write (batch, heads, q_len), those over pages (heads, rows).
        """
        return self.by_decode or len(self.q_shape) == 3
