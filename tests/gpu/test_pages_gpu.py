"""K and V in pages of a pool (``block_table``) on a GPU against packed sequences of the same keys on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402
from omniattn.testing.pages import NOWHERE, pools  # noqa: E402

from .attention_cases import check_lse, poisoned, to_gpu, to_numpy  # noqa: E402
from .plans import only_rows  # noqa: E402

pytestmark = pytest.mark.gpu

#: Queries and keys: a prompt on a cache, single tokens, none of either, more queries than keys, a tile and one more.
LENGTHS = [(100, 130), (1, 300), (0, 5), (257, 257), (64, 0), (5, 3), (129, 1025), (1, 1)]
HEADS, HEADS_KV = 4, 2


@pytest.fixture(params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the kernels that this GPU gets, and with those that every GPU gets."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if request.param == "selected" or not spec.arch_specific))
    yield str(request.param)
    PLANS.clear()


class Call:
    """A call over pages on the GPU, and its packed twin on the CPU."""

    def __init__(
        self, page_size: int, head_dim: int = 64, layout: str = "NHD", dtype: str = "bfloat16", lengths: Any = None,
        heads: tuple[int, int] = (HEADS, HEADS_KV),
    ) -> None:  # fmt: skip
        pairs = LENGTHS if lengths is None else lengths
        queries, keys = [p[0] for p in pairs], [p[1] for p in pairs]
        self.dtype, self.layout = dtype, layout

        def made(rows: int, count: int, seed: int) -> np.ndarray[Any, Any]:
            x, _, _ = testing.make_qkv(
                batch=None, seqlen_q=rows, heads_q=count, head_dim=head_dim, dtype=dtype, layout="NHD", seed=seed
            )
            return np.asarray(x)

        self.q = made(sum(queries) + 3, heads[0], 1)
        self.k, self.v = (made(sum(keys), heads[1], seed) for seed in (2, 3))
        starts = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (queries, keys)]
        self.longest = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
        self.packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], **self.longest}
        found, table = pools((self.k, self.v), keys, page_size, page_size)
        self.pools = [self._laid_out(to_gpu(x, dtype), 4) for x in found]
        self.paged = {
            "cu_seqlens_q": torch.from_numpy(starts[0]).cuda(), "block_table": torch.from_numpy(table).cuda(),
            "seqused_k": torch.tensor(keys, dtype=torch.int32).cuda(), **self.longest, "layout": layout,
        }  # fmt: skip

    def _laid_out(self, x: Any, rank: int) -> Any:
        return x if self.layout == "NHD" else x.transpose(rank - 3, rank - 2).contiguous()

    def run(self, **options: Any) -> tuple[Any, Any]:
        q = self._laid_out(to_gpu(self.q, self.dtype), 3)
        out = poisoned(tuple(q.shape), self.dtype)
        _, lse = oa.attention_varlen(q, *self.pools, **self.paged, out=out, return_lse=True, **options)
        return out if self.layout == "NHD" else out.transpose(0, 1), lse

    def check(self, on_cpu: dict[str, Any] | None = None, **options: Any) -> None:
        made, lse = self.run(**options)
        given = options if on_cpu is None else on_cpu
        ref, ref_lse = oa.attention_varlen(self.q, self.k, self.v, **self.packed, return_lse=True, **given)
        testing.assert_close(to_numpy(made), np.asarray(ref, np.float32), atol=3e-2)
        check_lse(lse.cpu().numpy(), ref_lse, str(options))


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 48, 64, 256, 784])
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 5.0}], ids=str)
def test_page_sizes(family: str, page_size: int, options: dict[str, Any]) -> None:
    Call(page_size).check(**options)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (100, 3)}, {"softcap": 5.0, "causal": True}], ids=str
)
@pytest.mark.parametrize(("head_dim", "layout"), [
    (40, "NHD"), (64, "HND"), (96, "NHD"), (128, "HND"), (128, "NHD"), (192, "NHD"), (256, "HND"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_head_dims_and_layouts(family: str, options: dict[str, Any], head_dim: int, layout: str, dtype: str) -> None:
    Call(16, head_dim, layout, dtype).check(**options)


def _rows() -> list[KernelSpec]:
    return [spec for spec in REGISTRY if spec.paged and spec.dtype == "bfloat16"]


@pytest.mark.parametrize("spec", _rows(), ids=lambda spec: spec.name)
@pytest.mark.parametrize("page_size", [16, 3])
def test_every_row(spec: KernelSpec, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is chosen or not; those that merge partial results among them."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", spec.name)
    heads = (8, 2) if spec.op == "attention_split" else (HEADS, HEADS_KV)
    lengths = [(1, 3000), (4, 700), (0, 9), (60, 1300), (1, 64)] if spec.op == "attention_split" else None
    call = Call(page_size, spec.head_dim, lengths=lengths, heads=heads)
    PLANS.clear()
    call.check(causal=True, **({"softcap": 9.0} if spec.softcap != "never" else {}))
    PLANS.clear()


def test_k_and_v_in_one_row(family: str) -> None:
    """As vLLM has them since 0.26: views with strides of their own for page, token and head."""
    call = Call(16, 128)
    both = torch.cat(call.pools, dim=-1).transpose(1, 2).contiguous()  # (blocks, heads, tokens, 2 * dim)
    views = both.transpose(1, 2)
    expected = call.run(causal=True)[0]
    call.pools = [views[..., :128], views[..., 128:]]
    assert torch.equal(call.run(causal=True)[0][:-3], expected[:-3])


def test_masks_sinks_and_score_mods(family: str) -> None:
    call = Call(16)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    mask = np.random.default_rng(0).random((len(LENGTHS), HEADS, *call.longest.values())) < 0.6
    call.check({"sinks": sinks}, sinks=torch.from_numpy(sinks).cuda())
    call.check({"mask": mask}, mask=torch.from_numpy(mask).cuda())
    slopes = np.linspace(0.1, 0.4, HEADS, dtype=np.float32)

    def mod(slopes: Any) -> oa.ScoreMod:
        return oa.ScoreMod(
            "score - slopes[h] * (q - k)", slopes=slopes,
            reference=lambda score, b, h, q, k, slopes: score - slopes[h] * (q - k),
        )  # fmt: skip

    call.check({"score_mod": mod(slopes)}, score_mod=mod(torch.from_numpy(slopes).cuda()))


def test_one_graph_for_other_lengths_and_tables() -> None:
    call = Call(16, 128)
    for pool in call.pools:  # with other tables a sequence reads what nobody owned
        pool.nan_to_num_(0.5)
    q = to_gpu(call.q, "bfloat16")

    def run() -> Any:
        return oa.attention_varlen(q, *call.pools, **call.paged, causal=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o = run()
    used, table = call.paged["seqused_k"], call.paged["block_table"]
    keys = used.clone()
    for count in (keys // 2, torch.zeros_like(keys), keys):
        used.copy_(count)
        table.copy_(torch.where(table == NOWHERE, table, table.roll(1, 0)) if count is keys else table)
        graph.replay()
        assert torch.equal(o, run())


def test_the_longest_sequence_is_an_estimate(family: str) -> None:
    """Lengths that a graph was captured with say nothing of those that it is replayed with."""
    call = Call(16, 128)
    call.longest["max_seqlen_k"] = call.paged["max_seqlen_k"] = 0
    call.check(causal=True)


def test_a_pool_without_pages(family: str) -> None:
    call = Call(16, 128)
    call.pools = [x[:0] for x in call.pools]
    made, lse = call.run(causal=True)
    rows = sum(queries for queries, _ in LENGTHS)
    assert not made[:rows].any()
    assert torch.isneginf(lse[:, :rows]).all()


@pytest.mark.parametrize("page_size", [3, 1001])
def test_a_page_a_sequence(family: str, page_size: int) -> None:
    """Caches that are not in pages: copies of whole tiles, whatever the page's size."""
    call = Call(page_size, 128, lengths=[(5, n) for n in (page_size, 1, page_size // 2)])
    call.paged["block_table"] = call.paged["block_table"][:, :1].contiguous()
    call.check(causal=True)


def test_lengths_beyond_the_table_are_its_end() -> None:
    call = Call(16, lengths=[(3, 64), (5, 32)])
    call.paged["block_table"] = call.paged["block_table"][:, :4].contiguous()
    call.paged["block_table"][1] = call.paged["block_table"][0]
    call.paged["seqused_k"].copy_(torch.tensor([64, 64]))
    expected = call.run(causal=True)[0]
    call.paged["seqused_k"].copy_(torch.tensor([10**9, 2**31 - 1]))
    assert torch.equal(call.run(causal=True)[0][:8], expected[:8])


def test_a_pool_of_more_elements_than_31_bits() -> None:
    page, heads, dim = 256, 8, 128
    blocks = 2**31 // (page * heads * dim) + 64
    if torch.cuda.mem_get_info()[0] < 6 * blocks * page * heads * dim:
        pytest.skip("too little memory is free")
    pool = torch.zeros(2, blocks, page, heads, dim, dtype=torch.bfloat16, device="cuda")
    pool[:, -1] = torch.randn(2, page, heads, dim, device="cuda").bfloat16()
    q = torch.randn(40, heads, dim, device="cuda").bfloat16()
    starts = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    used = torch.tensor([200], dtype=torch.int32, device="cuda")
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    made = oa.attention_varlen(
        q, pool[0], pool[1], cu_seqlens_q=starts, seqused_k=used, block_table=table, max_seqlen_q=40, max_seqlen_k=200
    )
    k, v = pool[0, -1, :200], pool[1, -1, :200]
    expected = oa.attention(q[None], k[None], v[None])[0]
    torch.testing.assert_close(made, expected, atol=2e-2, rtol=0)
