"""``attention_with_kvcache`` on a GPU beside `attention` of each sequence in float64 on the CPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from omniattn.testing.pages import NOWHERE  # noqa: E402
from tests.foreign_pools import ORDERS, memory_shape, planes  # noqa: E402

from .attention_cases import TORCH_DTYPES, check_lse, poisoned, to_numpy  # noqa: E402
from .plans import only_rows  # noqa: E402

pytestmark = pytest.mark.gpu

HEADS, HEADS_KV = 4, 2
NAMES = {"bfloat16": "bf16", "float16": "fp16"}
#: New tokens and tokens of each sequence: a prompt, a chunk of one, single tokens, requests that pad a graph.
MIXED = [(130, 130), (70, 300), (1, 257), (1, 1), (0, 40), (0, 0), (5, 64)]
#: As many packed queries as `decode` takes: of drafts, of one token, of none, of more than there are keys.
FEW = [(1, 300), (4, 64), (0, 17), (9, 200), (3, 2), (0, 0), (16, 40), (1, 1)]
ALIKE = {1: [(1, 300), (1, 1), (1, 17), (1, 0)], 4: [(4, 300), (4, 2), (4, 17)], 40: [(40, 300), (40, 40), (40, 7)]}
ATOL = {"bfloat16": 3e-2, "float16": 4e-3}


@pytest.fixture(params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the kernels that this GPU gets, and with those that every GPU gets."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if request.param == "selected" or not spec.arch_specific))
    yield str(request.param)
    PLANS.clear()


def int32(values: Any) -> Any:
    return torch.as_tensor(np.asarray(values, np.int32)).cuda()


def on_memory(cls: Any, order: str, memory: Any, extents: tuple[int, int, int, int]) -> Any:
    """A cache on a pool: one array with K and V in a row, dimensions in both orders, or two views."""
    if order in ("BNHC", "BHNC"):
        return cls.from_arrays(memory, layout="NHD" if order == "BNHC" else "HND")
    k, v = planes(order, memory, *extents)
    if order == "BHLNC":
        return cls.from_arrays(k.transpose(1, 2), v.transpose(1, 2), layout="HND")
    return cls.from_arrays(k, v)


class Served:
    """Sequences in a cache, what no token owns being NaN.

    ``page``: tokens of a block, 0 for a contiguous cache. ``order``: of a pool that the cache is made on.
    """

    def __init__(
        self, lengths: list[tuple[int, int]], page: int, head_dim: int = 64, dtype: str = "bfloat16",
        k_dtype: str | None = None, order: str | None = None,
    ) -> None:  # fmt: skip
        self.new, self.tokens = [n for n, _ in lengths], [t for _, t in lengths]
        self.dtype, self.dim = dtype, head_dim
        starts = np.cumsum([0, *self.tokens])
        k, v = (self._rows(int(starts[-1]), HEADS_KV, seed) for seed in (1, 2))
        options = {"like": k, "k_dtype": k_dtype or NAMES[dtype]}
        self.places: dict[str, Any] = {"seq_lens": int32(self.tokens)}
        if page:
            counts = [-(-t // page) for t in self.tokens]
            free = np.random.default_rng(page).permutation(sum(counts) + 3)
            table = np.full((len(lengths), max(counts) + 1), NOWHERE, np.int32)
            for b, count in enumerate(counts):
                table[b, :count], free = free[:count], free[count:]
            self.places["block_table"] = int32(table)
            extents = sum(counts) + 3, page, HEADS_KV, head_dim
        else:
            extents = len(lengths), max(self.tokens) + 5, HEADS_KV, head_dim
        cls: Any = oa.PagedKVCache if page else oa.KVCache
        if order is not None:
            self.memory = torch.full(
                memory_shape(order, *extents), float("nan"), dtype=TORCH_DTYPES[dtype], device="cuda"
            )
            self.cache = on_memory(cls, order, self.memory, extents)
        else:
            self.cache = cls(*extents, **options)
        if k_dtype is None and order is None:
            self.cache.k.fill_(float("nan"))
            self.cache.v.fill_(float("nan"))
        oa.append(self.cache, k, v, cu_seqlens=int32(starts), **self.places)
        self.k, self.v = ([to_numpy(x[a:b]) for a, b in itertools.pairwise(starts)] for x in (k, v))

    def _rows(self, rows: int, heads: int, seed: int) -> Any:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        return torch.randn(rows, heads, self.dim, device="cuda", generator=generator).to(TORCH_DTYPES[self.dtype])

    def queries(self, packed: bool, spare: int = 0) -> tuple[Any, dict[str, Any]]:
        """The new tokens of all sequences, packed with rows of nobody behind them or as a batch; where things are."""
        q = self._rows(sum(self.new) + spare, HEADS, 3)
        if not packed:
            return q.view(len(self.new), -1, HEADS, self.dim), dict(self.places)
        starts = int32(np.cumsum([0, *self.new]))
        return q, {**self.places, "cu_seqlens_q": starts, "max_seqlen_q": max(self.new)}

    def check(self, packed: bool, *, spare: int = 0, read: list[int] | None = None, **options: Any) -> None:
        q, places = self.queries(packed, spare)
        out = poisoned(tuple(q.shape), self.dtype)
        if read is not None:
            places["batch_index"] = int32(read)
        sinks = options.get("sinks")
        given = options if sinks is None else {**options, "sinks": torch.from_numpy(sinks).cuda()}
        o, lse = oa.attention_with_kvcache(q, self.cache, **places, **given, return_lse=True, out=out)
        assert o is out
        made, made_lse = to_numpy(o), lse.cpu().numpy()
        assert made_lse.shape == ((HEADS, len(q)) if packed else (len(self.new), HEADS, q.shape[1]))
        row = 0
        for b, count in enumerate(self.new):
            source = b if read is None else read[b]
            queries = to_numpy(q[row : row + count] if packed else q[b])
            x = [y[None].astype(np.float64) for y in (queries, self.k[source], self.v[source])]
            expected, of_lse = oa.attention(*x, return_lse=True, **{"causal": True, **options})
            own, own_lse = (
                (made[row : row + count], made_lse[:, row : row + count]) if packed else (made[b], made_lse[b])
            )
            testing.assert_close(own, expected[0].astype(np.float32), atol=ATOL[self.dtype], label=f"sequence {b}")
            check_lse(own_lse, of_lse[0], f"sequence {b}")
            row += count
        if packed:
            assert not made[row:].any()
            assert np.isneginf(made_lse[:, row:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [0, 16])
def test_head_dims(family: str, dtype: str, head_dim: int, page: int) -> None:
    Served(MIXED, page, head_dim, dtype).check(True, spare=3)
    for lengths in ALIKE.values():
        Served(lengths, page, head_dim, dtype).check(False)
    Served(ALIKE[1], page, head_dim, dtype).check(True)
    Served(FEW, page, head_dim, dtype).check(True, spare=3)


@pytest.mark.parametrize("page", [0, 1, 3, 64, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False}, {"window": (50, -1)}, {"window": (20, 7), "causal": False}, {"softcap": 5.0},
        {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)}, {"softmax_scale": -0.1},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_options(family: str, page: int, options: dict[str, Any]) -> None:
    Served(MIXED, page).check(True, spare=1, **options)
    Served(FEW, page).check(True, spare=1, **options)
    for lengths in ALIKE.values():
        Served(lengths, page).check(False, **options)


@pytest.mark.parametrize("page", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_blocks_left_of_a_window(family: str, page: int, softcap: float) -> None:
    """They may be anybody's: blocks of NaN, or no block at all."""
    for lengths, packed in ((MIXED, True), (FEW, True), *((each, False) for each in ALIKE.values())):
        for left in (0, 20, 150):
            call = Served(lengths, page)
            table = call.places["block_table"].cpu().numpy()
            spare = np.setdiff1d(np.arange(call.cache.num_blocks), table)
            for b, (new, tokens) in enumerate(lengths):
                nobody = (spare[0], NOWHERE, -1)[b % 3]
                table[b, : max(tokens - new - left, 0) // page] = nobody
            call.places["block_table"] = int32(table)
            call.check(packed, window=(left, -1), softcap=softcap)


def test_batch_index(family: str) -> None:
    for count, read in ((1, [2, 0, 0, 1]), (4, [1, 1, 0]), (40, [2, 2, 0])):
        call = Served(ALIKE[count], 0)
        call.places["seq_lens"] = int32([call.tokens[b] for b in read])
        call.check(False, read=read)
    call = Served(MIXED, 0)
    read = [1, 0, 2, 2, 5, 4, 6]
    call.places["seq_lens"] = int32([call.tokens[b] for b in read])
    call.check(True, read=read)


@pytest.mark.parametrize("page", [0, 1, 3, 16, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_caches_on_arrays_of_the_caller(family: str, order: str, page: int) -> None:
    """Of any strides, NaN wherever no token is: the bits of own caches."""
    calls = [
        (MIXED, True, {"spare": 3}),
        (FEW, True, {"spare": 2}),
        *((lengths, False, {}) for lengths in ALIKE.values()),
    ]
    for dim, dtype in ((64, "bfloat16"), (96, "float16"), (128, "bfloat16")):
        for lengths, packed, more in calls:
            call, own = Served(lengths, page, dim, dtype, order=order), Served(lengths, page, dim, dtype)
            assert int(call.memory.isfinite().sum()) == 2 * sum(call.tokens) * HEADS_KV * dim
            call.check(packed, **more)
            q, places = call.queries(packed, **more)
            results = [
                oa.attention_with_kvcache(q, cache, **places, return_lse=True) for cache in (call.cache, own.cache)
            ]
            assert all(map(torch.equal, *results))
            if not page:
                read = [(b + 1) % len(lengths) for b in range(len(lengths))]
                call.places["seq_lens"] = int32([call.tokens[b] for b in read])
                call.check(packed, read=read, **more)
    Served(MIXED, page, order=order).check(True, window=(50, -1), softcap=5.0)


@pytest.mark.parametrize("page", [0, 16])
def test_score_mod(family: str, page: int) -> None:
    """Also of few queries, which go over pages then."""
    slopes = np.linspace(0.1, 0.4, HEADS, dtype=np.float32)

    def mod(slopes: Any) -> oa.ScoreMod:
        return oa.ScoreMod(
            "score - slopes[h] * (q - k) + 0.5f * b", mask="k != 2", slopes=slopes,
            reference=lambda score, b, h, q, k, slopes: np.where(
                k != 2, score - slopes[h] * (q - k) + 0.5 * b, -np.inf
            ),
        )  # fmt: skip

    for lengths, packed in ((MIXED, True), (ALIKE[4], False)):
        call = Served(lengths, page)
        q, places = call.queries(packed)
        made = oa.attention_with_kvcache(q, call.cache, **places, score_mod=mod(torch.from_numpy(slopes).cuda()))
        starts_k = np.cumsum([0, *call.tokens]).astype(np.int32)
        starts_q = np.cumsum([0, *call.new]).astype(np.int32)
        expected = oa.attention_varlen(
            to_numpy(q).reshape(-1, HEADS, call.dim), np.concatenate(call.k), np.concatenate(call.v),
            cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=max(call.new), max_seqlen_k=max(call.tokens),
            causal=True, score_mod=mod(slopes),
        )  # fmt: skip
        testing.assert_close(to_numpy(made).reshape(expected.shape), expected, atol=3e-2)


@pytest.mark.parametrize("k_dtype", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("page", [0, 16])
def test_quantized_caches_take_what_decode_takes(k_dtype: str, page: int) -> None:
    for count in (1, 4):
        call = Served(ALIKE[count], page, k_dtype=k_dtype)
        q, places = call.queries(False)
        expected = oa.decode(q, call.cache, **places, return_lse=True, softcap=9.0)
        made = oa.attention_with_kvcache(q, call.cache, **places, return_lse=True, softcap=9.0)
        assert all(map(torch.equal, made, expected))
    # Packed queries are those of a batch, sequence by sequence.
    call = Served(FEW, page, k_dtype=k_dtype)
    q, places = call.queries(True, spare=2)
    o, lse = oa.attention_with_kvcache(q, call.cache, **places, return_lse=True)
    row = 0
    for b, count in enumerate(call.new):
        of_one = {name: x[b : b + 1] for name, x in call.places.items()}
        if count and page:
            own = q[None, row : row + count]
            alone = oa.decode(own, call.cache, **of_one, return_lse=True)
            assert (o[row : row + count] - alone[0][0]).abs().max() < 2e-2
            torch.testing.assert_close(lse[:, row : row + count], alone[1][0], rtol=0, atol=1e-3)
        row += count
    assert not o[row:].any()
    assert torch.isneginf(lse[:, row:]).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_heads_of_a_kv_head(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """16 of them fill tiles of 16 rows beside attention; 24 need several."""
    for heads in (32, 48):
        monkeypatch.setattr(sys.modules[__name__], "HEADS", heads)
        Served(MIXED * 3, 16, head_dim).check(True, spare=3)
        Served(MIXED, 16, head_dim).check(True, deterministic=True)


@pytest.mark.parametrize("page", [0, 16])
def test_as_many_packed_rows_as_sequences(family: str, page: int) -> None:
    """One sequence has no row: the rows behind it are not its own."""
    Served([(1, 300), (0, 17), (1, 40), (1, 9)], page).check(True, spare=1)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_that_do_not_depend_on_the_batch(family: str, head_dim: int, page: int) -> None:
    """Of each sequence alone, and beside others, with any bound of their queries."""
    for lengths in (MIXED, FEW, MIXED * 9):
        call = Served(lengths, page, head_dim)
        call.check(True, spare=2, deterministic=True)
        q, places = call.queries(True, spare=2)
        o, lse = oa.attention_with_kvcache(q, call.cache, **places, return_lse=True, deterministic=True)
        row = 0
        for b, count in enumerate(call.new[:9]):
            if count:
                of_one = {name: x[b : b + 1] for name, x in call.places.items()}
                alone, alone_lse = oa.attention_with_kvcache(
                    q[row : row + count], call.cache, **of_one, cu_seqlens_q=int32([0, count]), max_seqlen_q=count,
                    return_lse=True, deterministic=True,
                )  # fmt: skip
                assert torch.equal(o[row : row + count], alone)
                assert torch.equal(lse[:, row : row + count], alone_lse)
            row += count


def test_a_recent_window_of_packed_queries() -> None:
    """Two passes and their merge, with rows of nobody."""
    k, v, q = (torch.randn(300, n, 64, device="cuda", dtype=torch.bfloat16) for n in (2, 2, 4))
    cache = oa.KVCache(3, 200, 2, 64, like=k, k_dtype="int4", recent_window=20)
    lens, starts = int32([150, 40, 110]), int32([0, 150, 190, 300])
    oa.append(cache, k, v, seq_lens=lens, cu_seqlens=starts)
    q, first = q[:9], int32([0, 4, 5, 7])
    o, lse = oa.attention_with_kvcache(
        q,
        cache,
        seq_lens=lens,
        cu_seqlens_q=first,
        max_seqlen_q=4,
        return_lse=True,
        out=torch.full_like(q, float("nan")),
    )
    for b, (begin, end) in enumerate(((0, 4), (4, 5), (5, 7))):
        queries = q[None, begin:end].expand(3, -1, -1, -1).contiguous()
        alone, alone_lse = oa.decode(queries, cache, seq_lens=lens, return_lse=True)
        assert (o[begin:end] - alone[b]).abs().max() < 2e-2
        assert (lse[:, begin:end] - alone_lse[b]).abs().max() < 1e-3
    assert not o[7:].any()
    assert torch.isneginf(lse[:, 7:]).all()


@pytest.mark.parametrize("page", [0, 16])
def test_more_packed_queries_than_the_caller_has_said(page: int) -> None:
    """NaN in the rows of that sequence, and nothing else."""
    call = Served(FEW, page)
    q, places = call.queries(True, spare=2)
    right = oa.attention_with_kvcache(q, call.cache, **places, return_lse=True)
    places["max_seqlen_q"] = 9
    o, lse = oa.attention_with_kvcache(q, call.cache, **places, return_lse=True)
    begin = sum(call.new[:6])
    assert o[begin : begin + 16].isnan().all()
    assert lse[:, begin : begin + 16].isnan().all()
    for made, expected in ((o, right[0]), (lse.mT, right[1].mT)):
        for rows in (slice(0, begin), slice(begin + 16, None)):
            torch.testing.assert_close(made[rows], expected[rows], atol=2e-2, rtol=0)


@pytest.mark.parametrize("lengths", [MIXED, FEW], ids=["mixed", "few"])
@pytest.mark.parametrize("page", [0, 16])
def test_one_graph_for_other_starts_lengths_and_tables(page: int, lengths: list[tuple[int, int]]) -> None:
    call = Served(lengths, page, 128)
    for plane in (call.cache.k, call.cache.v):  # with other tables a sequence reads what nobody owned
        plane.nan_to_num_(0.5)
    q, places = call.queries(True, spare=3)

    def run() -> Any:
        return oa.attention_with_kvcache(q, call.cache, **places, return_lse=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    starts, lens, table = (places.get(name) for name in ("cu_seqlens_q", "seq_lens", "block_table"))
    first, whole = starts.clone(), lens.clone()
    others = [([1] * 7, whole // 2), ([0, 0, 100, 0, 20, 1, 0], whole), ([0] * 7, whole * 0)]
    others.append(([130, 0, 0, 1, 0, 9, 60], whole))
    if lengths is FEW:
        others = [([1] * 8, whole // 2), ([0, 16, 0, 2, 1, 0, 5, 0], whole), ([0] * 8, whole * 0)]
    for new, tokens in others:
        starts.copy_(int32(np.cumsum([0, *new])))
        lens.copy_(tokens)
        if table is not None:
            table.copy_(torch.where(table == NOWHERE, table, table.flip(0).clamp(max=5)))
        graph.replay()
        assert all(map(torch.equal, captured, run()))
    starts.copy_(first)
    lens.copy_(whole)
    graph.replay()
    assert all(map(torch.equal, captured, run()))


def test_compiled_calls() -> None:
    for lengths, packed in ((MIXED, True), (FEW, True), (ALIKE[40], False), (ALIKE[1], True), (ALIKE[4], False)):
        call = Served(lengths, 16)
        q, places = call.queries(packed)

        def run(q: Any, call: Any = call, places: Any = places) -> Any:
            return oa.attention_with_kvcache(q, call.cache, **places, return_lse=True)

        torch.compiler.reset()
        made = torch.compile(run, fullgraph=True)(q)
        assert all(map(torch.equal, made, run(q)))


def test_lengths_beyond_the_cache_are_its_end() -> None:
    call = Served([(40, 64), (3, 32)], 16)
    q, places = call.queries(True)
    places["block_table"] = places["block_table"][:, :4].contiguous()
    places["block_table"][1] = places["block_table"][0]
    places["seq_lens"].copy_(int32([64, 64]))
    expected = oa.attention_with_kvcache(q, call.cache, **places)
    places["seq_lens"].copy_(int32([10**9, 2**31 - 1]))
    assert torch.equal(oa.attention_with_kvcache(q, call.cache, **places), expected)
