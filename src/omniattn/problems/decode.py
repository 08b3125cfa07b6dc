"""One call of ``decode``, the passes over keys that it is made of, and how keys are divided among CTAs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..kv.formats import KVFormat
from ..kv.layout import CacheLayout
from .outputs import Output

#: `RecentSide` of device code.
OLDER, NEWEST = 1, 2
#: `kSharedPrefix` of device code.
SHARED_PREFIX = -1
#: Keys of the smallest chunk of a sequence that work is divided into; and of every split with ``deterministic``, of
#: latent caches more: a partial result of theirs has 512 channels of every head in fp32.
CHUNK, FIXED_SPLIT, LATENT_FIXED_SPLIT = 128, 512, 1024
#: New tokens of a sequence at most; longer ones are prompts.
MAX_Q_LEN = 16
#: Warps of a row that merge partial results with ``deterministic``: the order of the sum depends on it, so that it is
#: one number for all batches.
FIXED_COMBINE_WARPS = 4
#: CTAs of the main kernel at most: the kernels compute with their square in 31 bits.
MAX_WORKERS = 46340


@dataclass(frozen=True)
class DecodeProblem:
    """One call of ``decode`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Element type of q.
    cache : CacheLayout
    batch, q_len, num_q_heads, num_kv_heads, head_dim : int
    capacity : int
        Tokens that a sequence can have at most.
    block_size, num_blocks, table_columns : int
        Of the cache; a contiguous one has a block for each sequence and no table (0 columns).
    window_left : int
        -1: unlimited.
    softmax_scale, softcap : float
    sinks : str
        ``"none"``, ``"float32"`` or ``"io"``.
    deterministic : bool
    shared_prefix : int
        First tokens that all sequences have in the same blocks, read once; 0: none.
    lse : bool
        The caller wants the LSE.
    q_strides, o_strides : tuple of int
        Element strides (batch, seq, head, ...).
    total_queries : int
        Of packed queries, of which a sequence has up to q_len; -1: each has q_len.
    has_company : bool
        Sequences with more queries than q_len are another launch's, and so are rows that no sequence owns.
    num_splits : int
        Parts of a sequence's keys at most; 0: as many as are fastest.
    topk : int
        Of sparse attention the rows of the cache that a query token's list has; its tokens are the sequences, of one
        query each. 0: all rows of a sequence.
    tokens : int
        Of sparse attention the query tokens that o and lse have for each of their sequences; 0: they have no such
        dimension.
    has_lengths : bool
        seq_lens are given; of sparse attention they may not be.
    maximum : bool
        The caller wants the largest score of each row.
    tensor_maps : bool
        The driver in use can make them.
    """

    dtype: str
    cache: CacheLayout
    batch: int
    q_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    block_size: int
    num_blocks: int
    table_columns: int
    window_left: int
    softmax_scale: float
    softcap: float
    sinks: str
    deterministic: bool
    shared_prefix: int = 0
    lse: bool = False
    q_strides: tuple[int, ...] = ()
    o_strides: tuple[int, ...] = ()
    total_queries: int = -1
    has_company: bool = False
    num_splits: int = 0
    tensor_maps: bool = True
    topk: int = 0
    tokens: int = 0
    has_lengths: bool = True
    maximum: bool = False

    @property
    def has_fixed_splits(self) -> bool:
        """Whether places in the sequence divide its keys, whatever else is in the batch."""
        return self.deterministic or self.num_splits > 0

    @property
    def has_even_lists(self) -> bool:
        """Whether sequences are lists that are known to be of one length."""
        return bool(self.topk) and not self.has_lengths and not self.packed

    @property
    def head_dim_v(self) -> int:
        """Channels of o; of latent caches fewer than q's."""
        return self.cache.v_format.head_dim

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def packed(self) -> bool:
        """Whether queries are packed: sequences have as many as their starts say."""
        return self.total_queries >= 0

    @property
    def rows(self) -> tuple[int, int]:
        """Extents of q and o before the heads: sequences and queries of each; packed ones as those of one."""
        return (1, self.total_queries) if self.packed else (self.batch, self.q_len)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns; those of packed queries without the first dimension."""
        batch, queries = self.rows
        heads, dim = self.num_q_heads, self.head_dim_v
        lead: tuple[int, ...]
        of_rows: tuple[int, ...]
        if self.topk and not self.tokens:
            lead, of_rows = (batch, heads), (batch, heads)
        elif self.topk:
            lead, of_rows = (batch // self.tokens, self.tokens, heads), (batch // self.tokens, heads, self.tokens)
        else:
            first = () if self.packed else (batch,)
            lead, of_rows = (*first, queries, heads), (*first, heads, queries)
        wanted = [Output("o", (*lead, dim), self.dtype)]
        wanted += [Output("lse", of_rows, "float32")] if self.lse else []
        wanted += [Output("row_max", of_rows, "float32")] if self.maximum else []
        return tuple(wanted)


#: Keys of a block of Hopper's kernel over latent caches, and rows in one page from which on a tensor map brings them.
LATENT_KEYS, _FEWEST_ROWS = 64, 8
#: Keys and query rows of the one sequence over a latent cache up to which chunks have `LATENT_KEYS`
#: (docs/performance/records/mla_decode_sm90.toml, "Few sequences").
_SHORT, _SHORT_ROWS = 4096, 16
#: Query rows of a block of that kernel.
LATENT_QUERIES = 64


def box_rows(problem: DecodeProblem) -> int:
    """Rows of a latent cache that one copy by TMA brings: a power of two, of which whole ones are in a page; 0: none.

    Blocks of keys begin at multiples of 64 keys, so that the only page of a sequence has any number of rows.
    """
    if not problem.tensor_maps or problem.topk or problem.cache.k_format.quantized:
        return 0
    size = problem.block_size
    rows = LATENT_KEYS if problem.table_columns <= 1 else min(size & -size, LATENT_KEYS)
    return rows if rows >= _FEWEST_ROWS else 0


def query_box(problem: DecodeProblem) -> tuple[int, int]:
    """Heads and tokens of the `LATENT_QUERIES` query rows that one copy by TMA brings; (0, 0) if none can.

    Rows (token, head) one behind the other are a box if they are heads of one token or all heads of several.
    """
    heads, p = problem.num_q_heads, problem
    steps = [n for extent, n in zip((*p.rows, heads), p.q_strides, strict=False) if extent > 1]
    is_mapped = p.tensor_maps and p.rows[1] > 0 and all(0 <= 2 * n < 2**40 for n in steps)
    if not is_mapped or max(heads, LATENT_QUERIES) % min(heads, LATENT_QUERIES) != 0:
        return 0, 0
    return min(heads, LATENT_QUERIES), max(LATENT_QUERIES // heads, 1)


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """How the keys of a pass are divided.

    Attributes
    ----------
    workers : int
        CTAs of the main kernel: each has an even share of the chunks of all segments.
    combine_warps : int
        Warps of the second kernel that merge a row's partial results.
    cluster : int
        CTAs of a cluster, which merge their partial results; all of one sequence. More than 1 for a kernel that does.
    """

    workers: int
    combine_warps: int
    cluster: int = 1


@dataclass(frozen=True)
class KeyPass:
    """One pass over keys of a call: all of them, or one of two sides that are merged.

    Attributes
    ----------
    problem : DecodeProblem
        With strides, capacity and blocks of this pass.
    k, v : KVFormat
    hadamard : bool
    side : int
        `OLDER`: the quantized tokens before the recent window. `NEWEST`: those of the window; blocks are slots then.
    first_key : int
        Keys before it are another pass's. `SHARED_PREFIX`: this one's are those that all sequences share.
    sinks : bool
        Whether this pass counts the sinks.
    prefix_sequences : int
        Of the pass over a shared prefix, which takes all queries for those of one sequence: how many sequences.
    """

    problem: DecodeProblem
    k: KVFormat
    v: KVFormat
    hadamard: bool
    side: int = 0
    first_key: int = 0
    sinks: bool = True
    prefix_sequences: int = 0

    @property
    def rows(self) -> int:
        """Query rows of a kv head."""
        return self.problem.group * self.problem.q_len

    @property
    def keys(self) -> int:
        """Keys of a sequence, at most."""
        p = self.problem
        return min(p.capacity, p.cache.recent_window) if self.side == NEWEST else p.capacity

    @property
    def chunk(self) -> int:
        """Keys of a chunk."""
        p = self.problem
        if p.num_splits:  # kernels have 31 bits for a chunk: of more keys there are two
            return min(max(CHUNK, 1 << max(-(-self.keys // p.num_splits) - 1, 0).bit_length()), 1 << 30)
        if not p.deterministic:
            # Of one sequence of few rows: twice as many CTAs.
            is_short = p.cache.is_latent and p.batch == 1 and self.keys <= _SHORT and self.rows <= _SHORT_ROWS
            return LATENT_KEYS if is_short and not p.topk and not self.k.quantized else CHUNK
        return LATENT_FIXED_SPLIT if p.cache.is_latent else FIXED_SPLIT

    def row_blocks(self, tile_rows: int) -> int:
        """Blocks of so many query rows of a kv head."""
        return -(-self.rows // tile_rows)

    def segments(self, tile_rows: int) -> int:
        """Keys of a sequence and kv head, for each block of so many query rows; of a latent cache once for all."""
        blocks = self.row_blocks(tile_rows)
        if self.problem.cache.is_latent:
            blocks = min(blocks, 1)
        return self.problem.batch * self.problem.num_kv_heads * blocks

    def chunks(self, tile_rows: int) -> int:
        """Chunks of all segments, at most."""
        return self.segments(tile_rows) * -(-self.keys // self.chunk)


def passes(problem: DecodeProblem) -> tuple[KeyPass, ...]:
    """What is computed one after the other: one pass, or two whose results are merged."""
    p, cache = problem, problem.cache
    row = p.num_q_heads * p.head_dim
    own = (p.rows[1] * row, row, p.head_dim, 1)
    formats = (cache.k_format, cache.v_format)
    if cache.recent_window:
        assert cache.recent_format is not None
        contiguous = dataclasses.replace(p, o_strides=own)
        older = KeyPass(contiguous, *formats, cache.hadamard, side=OLDER, sinks=False)
        slots = dataclasses.replace(
            contiguous, block_size=cache.recent_ring, num_blocks=cache.recent_slots, table_columns=int(cache.paged)
        )
        return older, KeyPass(slots, cache.recent_format, cache.recent_format, False, side=NEWEST)
    if p.shared_prefix and p.batch:
        # One sequence, whose table is that of sequence 0, of so many tokens as its capacity lets it have.
        queries = p.batch * p.q_len
        step = p.q_strides[0] if p.q_len == 1 else p.q_strides[1]
        alone = dataclasses.replace(
            p, batch=1, q_len=queries, capacity=p.shared_prefix, q_strides=(0, step, p.q_strides[2], 1),
            o_strides=(0, row, p.head_dim, 1),
        )  # fmt: skip
        prefix = KeyPass(
            alone, *formats, cache.hadamard, first_key=SHARED_PREFIX, sinks=False, prefix_sequences=p.batch
        )
        rest = KeyPass(dataclasses.replace(p, o_strides=own), *formats, cache.hadamard, first_key=p.shared_prefix)
        return prefix, rest
    return (KeyPass(p, *formats, cache.hadamard),)
