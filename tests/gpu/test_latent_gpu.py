"""Decoding over latent caches, against float64: Hopper's kernel, and those for every GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.compat import flash_mla  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.select import cache as select_cache  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("latent_family"),
]

DIM, DIM_V = 576, 512
#: Largest relative L2 error of o: half a unit of the last place of its elements, and of the probabilities.
BOUND = {"bfloat16": 4e-3, "float16": 6e-4}


class Filled:
    """A pool whose blocks belong to nobody where no sequence has them, and queries."""

    def __init__(
        self, lengths: tuple[int, ...], block_size: int, heads: int = 16, q_len: int = 1, dtype: str = "bfloat16",
        growth: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.lengths, self.q_len, self.size = lengths, q_len, block_size
        io = getattr(torch, dtype)
        batch, longest = len(lengths), max(lengths)
        self.rows = [rng.standard_normal((n, DIM)) * (1 + growth * np.arange(n))[:, None] for n in lengths]
        self.rows = [torch.tensor(x, device="cuda").to(io) for x in self.rows]
        self.q = torch.tensor(rng.standard_normal((batch, q_len, heads, DIM)), device="cuda").to(io)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.where: dict[str, Any] = {}
        if block_size:
            columns = -(-longest // block_size)
            counts = [-(-n // block_size) for n in lengths]
            pool = torch.full((sum(counts) + 2, block_size, 1, DIM), math.nan, dtype=io, device="cuda")
            table = np.full((batch, columns), 2**31 - 1, np.int32)  # what is not needed is not looked at
            order = iter(rng.permutation(len(pool)))
            for b, (n, rows) in enumerate(zip(lengths, self.rows, strict=True)):
                for i in range(counts[b]):
                    block = int(next(order))
                    table[b, i] = block
                    some = rows[i * block_size : min((i + 1) * block_size, n), None]
                    pool[block, : len(some)] = some
            self.cache: Any = oa.PagedKVCache.from_arrays(pool, head_dim_v=DIM_V)
            self.where["block_table"] = torch.tensor(table, device="cuda")
        else:
            pool = torch.full((batch, longest, 1, DIM), math.nan, dtype=io, device="cuda")
            for b, rows in enumerate(self.rows):
                pool[b, : len(rows), 0] = rows
            self.cache = oa.KVCache.from_arrays(pool, head_dim_v=DIM_V)

    def expected(
        self, b: int, window: int = -1, softcap: float = 0.0, sinks: Any = None, scale: float = DIM**-0.5
    ) -> tuple[Any, Any]:
        """O and LSE of a sequence."""
        q, rows, n = self.q[b].double(), self.rows[b].double(), self.lengths[b]
        s = torch.einsum("qhd,kd->hqk", q, rows) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        own = torch.arange(self.q_len, device="cuda")[:, None] + n - self.q_len
        key = torch.arange(n, device="cuda")
        seen = (key <= own) & ((key >= own - window) if window >= 0 else torch.ones_like(key <= own))
        s = s.masked_fill(~seen, -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:2], 1)], -1)
        p = torch.softmax(s, -1)[..., :n].nan_to_num(0.0)
        return torch.einsum("hqk,kd->qhd", p, rows[:, :DIM_V]), torch.logsumexp(s, -1)

    def check(self, o: Any, lse: Any = None, **options: Any) -> None:
        assert o.shape == (*self.q.shape[:-1], DIM_V)
        for b in range(len(self.lengths)):
            want, want_lse = self.expected(b, **options)
            assert not o[b].isnan().any(), b
            error = (o[b].double() - want).norm() / want.norm().clamp_min(1e-9)
            assert error < BOUND[str(o.dtype).removeprefix("torch.")], (b, float(error))
            if lse is not None:
                finite = want_lse.isfinite()
                assert torch.equal(finite, lse[b].isfinite()), b
                assert ((lse[b].double() - want_lse)[finite].abs() < 2e-3).all(), b


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [64, 16, 48, 256, 8, 7, 1, 0])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (128, 1), (128, 2), (64, 1), (5, 8), (1, 1), (32, 3)])
def test_rows_and_blocks(heads: int, q_len: int, block_size: int, dtype: str) -> None:
    case = Filled((500, 64, 65, 127, 129, 1000, q_len), block_size, heads, q_len, dtype)
    o, lse = oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where)
    case.check(o, lse)


#: Of many sequences the plan counts what beginning one costs.
_UNEVEN = (1, 0, 2100, 2, 777, 0, 3000, 63, 129, 128, 513, 5000)


@pytest.mark.parametrize(
    "lengths",
    [(20000,), (300,) * 140, (1, 4096, 2, 777, 3000, 63), _UNEVEN * 2, _UNEVEN * 7],
    ids=["one", "many", "mixed", "uneven", "many uneven"],
)
@pytest.mark.parametrize(("heads", "block_size"), [(16, 64), (128, 64), (128, 1)])
def test_keys_are_divided(lengths: tuple[int, ...], heads: int, block_size: int) -> None:
    case = Filled(lengths, block_size, heads)
    case.check(*oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where))


@pytest.mark.parametrize("growth", [0.004, 0.05], ids=["slowly", "fast"])
def test_maxima_that_grow(growth: float) -> None:
    """Blocks of both warpgroups raise the maximum, and O follows."""
    case = Filled((1500, 640), 64, 128, 2, growth=growth)
    case.check(*oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where))


@pytest.mark.parametrize("block_size", [64, 16, 5, 0])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"window": (1000, 0)},
        {"softcap": 3.0},
        {"softcap": 500.0},
        {"softmax_scale": -0.02},
        {"softmax_scale": 0.1352},
    ],
    ids=["window 100", "window 1000", "softcap", "large softcap", "negative scale", "scale"],
)
@pytest.mark.parametrize("heads", [40, 32])
def test_options(heads: int, options: dict[str, Any], block_size: int) -> None:
    case = Filled((2500, 333, 90), block_size, heads, 3)
    o, lse = oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where, **options)
    known = {"window": options.get("window", (-1, 0))[0], "softcap": options.get("softcap", 0.0)}
    case.check(o, lse, scale=options.get("softmax_scale", DIM**-0.5), **known)


def test_sinks_and_out() -> None:
    case = Filled((2500, 90), 64, 128)
    sinks = torch.randn(128, device="cuda") * 3
    out = torch.full((2, 1, 128, 1024), 7.0, device="cuda", dtype=torch.bfloat16)[..., :DIM_V]
    o, lse = oa.decode(
        case.q, case.cache, seq_lens=case.lens, return_lse=True, sinks=sinks, out=out, **case.where
    )  # fmt: skip
    assert o.data_ptr() == out.data_ptr()
    case.check(o, lse, sinks=sinks)


def test_blocks_left_of_a_window_may_be_anybodys() -> None:
    case = Filled((3000,), 64)
    case.where["block_table"][0, :30] = torch.arange(30) * 1000003
    o = oa.decode(case.q, case.cache, seq_lens=case.lens, window=(1000, 0), **case.where)
    case.check(o, window=1000)


def test_packed_queries_and_requests_without_any() -> None:
    case = Filled((700, 64, 300, 2000), 64, 128, 3)
    counts = (2, 0, 3, 1)
    starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device="cuda")
    rows = torch.cat([case.q[b, 3 - n :] for b, n in enumerate(counts)])
    q = torch.cat([rows, rows[:2]])  # rows of nobody
    o, lse = oa.attention_with_kvcache(
        q, case.cache, seq_lens=case.lens, cu_seqlens_q=starts, max_seqlen_q=3, return_lse=True, **case.where
    )  # fmt: skip
    whole, whole_lse = oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where)
    for b, n in enumerate(counts):
        own = slice(int(starts[b]), int(starts[b + 1]))
        if n:
            assert (o[own].float() - whole[b, 3 - n :].float()).abs().max() < 2e-2
            assert (lse[:, own] - whole_lse[b, :, 3 - n :]).abs().max() < 1e-3
    assert (o[6:] == 0).all()
    assert lse[:, 6:].isneginf().all()


def test_queries_of_other_sequences_do_not_matter() -> None:
    """A block of rows has those of the next sequence behind a sequence's own, if a copy brings them."""
    case = Filled((700, 64, 300, 2000), 64, 32, 3)
    counts = (2, 0, 3, 1)
    starts = np.cumsum([0, *counts])
    q = torch.cat([case.q[b, 3 - n :] for b, n in enumerate(counts)])
    given: dict[str, Any] = {
        "seq_lens": case.lens, "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 3, "return_lse": True, **case.where,
    }  # fmt: skip
    o, lse = oa.attention_with_kvcache(q, case.cache, **given)
    for b, n in enumerate(counts):
        if n:
            want, _ = case.expected(b)
            own = slice(int(starts[b]), int(starts[b + 1]))
            error = (o[own].double() - want[3 - n :]).norm() / want[3 - n :].norm()
            assert error < BOUND["bfloat16"], (b, float(error))
            alone = torch.full_like(q, math.nan)
            alone[own] = q[own]
            again, again_lse = oa.attention_with_kvcache(alone, case.cache, **given)
            assert torch.equal(again[own], o[own]), b
            assert torch.equal(again_lse[:, own], lse[:, own]), b


@pytest.mark.parametrize(("heads", "q_len"), [(128, 1), (128, 2), (32, 3)])
def test_queries_with_strides(heads: int, q_len: int) -> None:
    case = Filled((500, 65, 1000), 64, heads, q_len)
    o = oa.decode(case.q, case.cache, seq_lens=case.lens, **case.where)
    case.check(o)
    rows = torch.full((3, q_len + 1, heads + 2, DIM + 64), math.nan, device="cuda", dtype=torch.bfloat16)
    rows[:, 1:, 1:-1, 64:] = case.q
    by_heads = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    for q in (rows[:, 1:, 1:-1, 64:], by_heads):
        assert torch.equal(oa.decode(q, case.cache, seq_lens=case.lens, **case.where), o)
    one = case.q[:1, :1, :1].expand(3, q_len, heads, DIM)
    wanted = oa.decode(one.contiguous(), case.cache, seq_lens=case.lens, **case.where)
    assert torch.equal(oa.decode(one, case.cache, seq_lens=case.lens, **case.where), wanted)


@pytest.mark.parametrize("lengths", [(64,) * 400, (128,) * 300, (1, 64, 65, 128, 0, 190) * 60, (2000, 64) * 50])
def test_splits_of_few_blocks(lengths: tuple[int, ...]) -> None:
    """Several a CTA: what a split needs is asked for while the two before it are computed."""
    case = Filled(lengths, 64, 128)
    for options in ({}, {"deterministic": True}):
        case.check(*oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where, **options))


def test_a_graph_is_replayed_with_other_lengths() -> None:
    case, other = Filled((3000, 1, 2000), 64, 128), Filled((700, 2900, 64), 64, 128, seed=3)
    pool = torch.full((200, 64, 1, DIM), math.nan, device="cuda", dtype=torch.bfloat16)
    cache, table = oa.PagedKVCache.from_arrays(pool, head_dim_v=DIM_V), torch.zeros(3, 47, device="cuda").int()
    lens, q = case.lens.clone(), case.q.clone()

    def put(one: Filled) -> None:
        own = one.where["block_table"]
        table.zero_()
        table[:, : own.shape[1]] = torch.where(own < 200, own, 0)
        pool[: len(one.cache.k)] = one.cache.k
        lens.copy_(one.lens)
        q.copy_(one.q)

    def call() -> Any:
        return oa.decode(q, cache, seq_lens=lens, block_table=table, return_lse=True)

    put(case)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call()
    for one in (case, other, case):
        put(one)
        graph.replay()
        one.check(o, lse)


def test_deterministic_does_not_depend_on_the_batch() -> None:
    case = Filled((3000, 64, 1111), 64, 128)
    alone = oa.decode(
        case.q[2:], case.cache, seq_lens=case.lens[2:], block_table=case.where["block_table"][2:], deterministic=True
    )
    o = oa.decode(case.q, case.cache, seq_lens=case.lens, deterministic=True, **case.where)
    case.check(o)
    assert torch.equal(o[2:], alone)


def test_batch_index() -> None:
    case = Filled((500, 700, 64), 0, 64)
    order = torch.tensor([2, 0], dtype=torch.int32, device="cuda")
    o = oa.attention_with_kvcache(case.q[order.long()], case.cache, seq_lens=case.lens[order.long()], batch_index=order)
    for i, b in enumerate((2, 0)):
        want, _ = case.expected(b)
        assert (o[i].double() - want).norm() / want.norm() < BOUND["bfloat16"]


def test_explain_names_the_kernels(latent_family: str) -> None:
    case = Filled((500,), 64)
    said = str(oa.explain(oa.decode, case.q, case.cache, seq_lens=case.lens, **case.where))
    names = {
        "few": "mla_decode_few_sm90_bf16_d576v512",
        "hopper": "mla_decode_sm90_bf16_d576v512",
        "blocks": "mla_decode_rows16_sm90_bf16_d576v512",
        "generic": "mla_decode_sm80_bf16_d576v512_r16",
    }
    assert names[latent_family] in said
    assert "the first 512 of them V" in said


@pytest.mark.parametrize(("block_size", "heads"), [(64, 128), (4, 128), (64, 8)])
def test_warps_that_come_at_random_times(block_size: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def delayed(make: Any) -> Any:
        def row(*of: Any, **more: Any) -> Any:
            return dataclasses.replace(made := make(*of, **more), defines=(*made.defines, ("RANDOM_DELAYS", "1")))

        return row

    case = Filled((1500, 64, 333), block_size, heads, 2, growth=0.01)
    monkeypatch.setattr(select_cache, "registered", lambda row: row)
    for name in ("latent_row", "latent_blocks_row", "latent_sm80_row", "latent_few_row"):
        monkeypatch.setattr(select_cache, name, delayed(getattr(select_cache, name)))
    PLANS.clear()
    try:
        for _ in range(5):
            case.check(*oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where))
    finally:
        PLANS.clear()


def test_calls_without_queries() -> None:
    """Nothing is launched; rows that no sequence has are cleared."""
    case = Filled((5, 3), 4)
    nobody: dict[str, Any] = {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="cuda"), "max_seqlen_q": 0}
    places: dict[str, Any] = {"seq_lens": case.lens, **case.where}
    q = case.q[:, 0].contiguous()
    assert oa.attention_with_kvcache(case.q[:, :0], case.cache, **places).shape == (2, 0, 16, DIM_V)
    assert oa.attention_with_kvcache(q[:0], case.cache, **places, **nobody).shape == (0, 16, DIM_V)
    none = {name: x[:1] if name == "cu_seqlens_q" else x for name, x in nobody.items()}
    without = {name: x[:0] for name, x in places.items()}
    for given in (places | nobody, without | none, without | none | {"max_seqlen_q": 100}):
        out = torch.full((2, 16, DIM_V), math.nan, dtype=q.dtype, device="cuda")
        o, lse = oa.attention_with_kvcache(q, case.cache, **given, out=out, return_lse=True)
        assert o is out
        assert not o.any()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_flash_mla(rows: int) -> None:
    """The functions of FlashMLA: causal ones are those of `decode`; else all rows see all keys."""
    case = Filled((500, 64, 1000), 64, 16, rows)
    given = case.q, case.cache.k, case.where["block_table"], case.lens, DIM_V, flash_mla.get_mla_metadata()[0]
    case.check(*flash_mla.flash_mla_with_kvcache(*given, causal=True))
    o, lse = flash_mla.flash_mla_with_kvcache(*given)
    for b, own in enumerate(case.rows):
        s = torch.einsum("qhd,kd->hqk", case.q[b].double(), own.double()) * DIM**-0.5
        want = torch.einsum("hqk,kd->qhd", s.softmax(-1), own[:, :DIM_V].double())
        assert (o[b].double() - want).norm() / want.norm() < BOUND["bfloat16"]
        assert (lse[b].double() - s.logsumexp(-1)).abs().max() < 2e-3
