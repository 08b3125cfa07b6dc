"""append and decode on the caller's pools in 8 bits, against the NumPy reference on the same bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.problems.decode import MAX_Q_LEN  # noqa: E402
from tests.foreign_pools import ORDERS, memory_shape, planes  # noqa: E402
from tests.gpu.decode_cases import Case, compare  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = (torch.float8_e4m3fn, torch.int8)
KINDS = ("none", "one", "heads", "sequences", "rows", "rows apart")
LENGTHS, HEADS = (300, 17, 0, 129), 2


def normal(*shape: int, seed: int = 0, dtype: Any = torch.bfloat16) -> torch.Tensor:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(x).to("cuda", dtype)


def int32(x: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.int32, device="cuda")


def scales_of(kind: str, rows: tuple[int, ...], dtype: Any, times: float = 1.0) -> Any:
    """Scales of a kind for numbers up to 4; those of rows are NaN until they are written."""
    least = times * 4.0 / (448.0 if dtype == torch.float8_e4m3fn else 127.0)
    if kind == "none":
        return None
    if kind in ("rows", "rows apart"):
        wide = torch.full((*rows, 3), math.nan, device="cuda")
        return wide[..., 1] if kind == "rows apart" else wide[..., 0].contiguous()
    shape = {"one": (1,), "heads": (HEADS,), "sequences": (len(LENGTHS), 1)}[kind]
    x = torch.from_numpy(np.random.default_rng(5).uniform(1.0, 2.0, shape).astype(np.float32)).cuda() * least
    # As FlashAttention-3's callers have them: a stride of 0.
    return x.expand(len(LENGTHS), HEADS) if kind == "sequences" else x


def _on(x: torch.Tensor, device: str) -> torch.Tensor:
    """The same numbers with the same strides."""
    if 0 in x.stride():
        return x[:, :1].to(device).expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), device=device).copy_(x)


class Pool:
    """A pool whose bytes are all NaN (int8: -1), and the same on the CPU; filled by `append` on both."""

    def __init__(self, order: str, size: int, dim: int, dtype: Any, kind: str, *, fill: bool = True) -> None:
        columns = -(-max(LENGTHS) // size)
        blocks = len(LENGTHS) * columns + 2
        numbers = np.random.default_rng(size + dim).permutation(blocks)[: len(LENGTHS) * columns]
        self.numbers, self.size = numbers.reshape(len(LENGTHS), columns), size
        shape = memory_shape(order, blocks, size, HEADS, dim)
        self.caches, self.memories, self.scales = [], [], []
        scales = [scales_of(kind, (blocks, size, HEADS), dtype, times) for times in (1.0, 1.5)]
        for device in ("cuda", "cpu"):
            memory = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
            own = [None if x is None else _on(x, device) for x in scales]
            k, v = planes(order, memory.view(dtype), blocks, size, HEADS, dim)
            self.caches.append(oa.PagedKVCache.from_arrays(k, v, k_scale=own[0], v_scale=own[1]))
            self.memories.append(memory)
            self.scales.append(own)
        self.table, self.lens = int32(self.numbers), int32(LENGTHS)
        self.new = [normal(sum(LENGTHS), HEADS, dim, seed=n) for n in (1, 2)]
        if kind == "sequences":  # which `append` refuses: any codes
            codes = np.random.default_rng(7).integers(-100, 100, shape, np.int8)
            codes[codes == -1] = 0  # of e4m3 it is NaN
            for memory in self.memories:
                memory.copy_(torch.from_numpy(codes.view(np.uint8)))
        elif fill:
            starts = int32(np.cumsum([0, *LENGTHS]))
            for cache, device in zip(self.caches, ("cuda", "cpu"), strict=True):
                given = [x.to(device) for x in (*self.new, self.lens, starts, self.table)]
                oa.append(cache, *given[:2], seq_lens=given[2], cu_seqlens=given[3], block_table=given[4])

    def check_memory(self) -> None:
        """The reference's bytes and scales, and nothing else written."""
        assert torch.equal(self.memories[0].cpu(), self.memories[1])
        for ours, theirs in zip(*self.scales, strict=True):
            if ours is not None:
                assert torch.equal(ours.cpu().nan_to_num(-1.0), theirs.nan_to_num(-1.0))

    def check_decode(self, q: torch.Tensor, function: Any = oa.decode, **options: Any) -> None:
        results = []
        for cache, device in zip(self.caches, ("cuda", "cpu"), strict=True):
            lens, table, queries = (x.to(device) for x in (self.lens, self.table, q))
            results.append(
                function(queries.float() if device == "cpu" else queries, cache, seq_lens=lens, block_table=table,
                         return_lse=True, **options)
            )  # fmt: skip
        case = Case(head_dim=q.shape[-1], k_dtype="fp8", dtype="float16" if q.dtype == torch.float16 else "bfloat16")
        compare(results[0], tuple(x.numpy() for x in results[1]), case, f"{options}", rounded=q.shape[1] > MAX_Q_LEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_every_kind_of_scales(dim: int, dtype: Any, kind: str) -> None:
    """Pages of 1 to 256 tokens; one query and several, one and two tiles of rows."""
    for size in (1, 3, 16, 256):
        x = Pool("BNHC" if size < 16 else "two pools", size, dim, dtype, kind)
        x.check_memory()
        for q_len, heads in ((1, 8), (3, 8), (16, 2)):
            q = normal(len(LENGTHS), q_len, heads, dim, seed=3, dtype=torch.float16 if size == 3 else torch.bfloat16)
            x.check_decode(q)
            x.check_decode(q, oa.attention_with_kvcache, window=(70, 0), softcap=5.0)
            x.check_decode(q, deterministic=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_prompts(dim: int, dtype: Any, kind: str) -> None:
    """Many queries of each sequence, and in one call with sequences of few: NaN in all that nobody owns."""
    for size in (1, 3, 16, 256):
        x = Pool("BNHC" if size < 16 else "two pools", size, dim, dtype, kind)
        run = oa.attention_with_kvcache
        q = normal(len(LENGTHS), 70, 4, dim, seed=3, dtype=torch.float16 if size == 3 else torch.bfloat16)
        x.check_decode(q, run)
        x.check_decode(q, run, window=(70, 0), softcap=5.0)
        x.check_decode(q, run, causal=False)
        rows = [100, 1, 0, 2]
        packed = normal(sum(rows) + 3, 4, dim, seed=4)
        options = {"cu_seqlens_q": int32(np.cumsum([0, *rows])), "max_seqlen_q": 100}
        o, lse = run(packed, x.caches[0], seq_lens=x.lens, block_table=x.table, return_lse=True, **options)
        host = {"cu_seqlens_q": options["cu_seqlens_q"].cpu(), "max_seqlen_q": 100}
        want, of_lse = run(
            packed.cpu().float(), x.caches[1], seq_lens=x.lens.cpu(), block_table=x.table.cpu(), return_lse=True, **host
        )
        assert float((o.cpu().float() - want).abs().max()) <= 2e-2 * float(want.abs().max())
        torch.testing.assert_close(lse.cpu(), of_lse, atol=1e-2, rtol=1e-2)


def test_a_score_mod_over_codes() -> None:
    """Beside the same numbers in bfloat16, which holds codes of e4m3 without scales exactly."""
    x = Pool("two pools", 16, 128, torch.float8_e4m3fn, "none")
    q, slopes = normal(len(LENGTHS), 40, 4, 128, seed=3), torch.linspace(0.1, 0.4, 4, device="cuda")
    mod = oa.ScoreMod("score - slopes[h] * (q - k)", slopes=slopes)
    wide = [
        plane.bfloat16() for plane in planes("two pools", x.memories[0].view(torch.float8_e4m3fn), 78, 16, HEADS, 128)
    ]
    options = {"seq_lens": x.lens, "block_table": x.table, "return_lse": True, "score_mod": mod}
    made = oa.attention_with_kvcache(q, x.caches[0], **options)
    expected = oa.attention_with_kvcache(q, oa.PagedKVCache.from_arrays(*wide), **options)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


# Gaps between padded rows are 8 bytes here: kernels copy 16 at a time, and from_arrays refuses it.
@pytest.mark.parametrize("order", [order for order in ORDERS if order != "padded rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_order(order: str, dtype: Any) -> None:
    for size, kind in ((5, "rows"), (16, "heads")):
        x = Pool(order, size, 128, dtype, kind)
        x.check_memory()
        x.check_decode(normal(len(LENGTHS), 1, 8, 128, seed=3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_prefix_and_copies(dtype: Any) -> None:
    x, by_slot = (Pool("two pools", 16, 128, dtype, "rows", fill=fill) for fill in (True, False))
    slots = np.concatenate([
        x.numbers[b, np.arange(n) // 16] * 16 + np.arange(n) % 16 for b, n in enumerate(LENGTHS)
    ])  # fmt: skip
    for wide in (torch.int32, torch.int64):
        oa.append(by_slot.caches[0], *x.new, slot_mapping=torch.tensor(slots, dtype=wide, device="cuda"))
        assert torch.equal(x.memories[0], by_slot.memories[0])
        for one, other in zip(x.scales[0], by_slot.scales[0], strict=True):
            assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    pairs = [(int(x.numbers[0, 0]), int(x.numbers[1, 1])), (int(x.numbers[0, 1]), int(x.numbers[3, 9]))]
    for cache in x.caches:
        oa.copy_blocks(cache, pairs)
    x.check_memory()
    x.numbers[1:, :1] = x.numbers[0, :1]
    x.table.copy_(int32(x.numbers))
    x.check_decode(normal(len(LENGTHS), 1, 8, 128, seed=3), shared_prefix=16)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_copies_of_scales_that_begin_at_any_float(first: int) -> None:
    """A block of them is a multiple of 16 bytes long, and need not begin at one."""
    wide = torch.arange(257.0, device="cuda")
    k_scale, v_scale = wide[first : first + 128].view(4, 16, 2), wide[first + 1 : first + 129].view(4, 16, 2).clone()
    k, v = (torch.zeros(4, 16, 2, 128, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2))
    cache = oa.PagedKVCache.from_arrays(k, v, k_scale=k_scale, v_scale=v_scale)
    want = wide.clone()
    want[first + 96 : first + 128] = want[first + 32 : first + 64]
    oa.copy_blocks(cache, [(1, 3)])
    assert torch.equal(wide, want)
    assert torch.equal(v_scale[3], v_scale[1])


def test_a_graph_reads_new_scales() -> None:
    """Scales are read when the call runs, as lengths and tables are."""
    x = Pool("two pools", 16, 128, torch.float8_e4m3fn, "heads")
    q, out = (
        normal(len(LENGTHS), 1, 8, 128, seed=3),
        torch.empty(len(LENGTHS), 1, 8, 128, dtype=torch.bfloat16, device="cuda"),
    )
    call = lambda: oa.decode(q, x.caches[0], seq_lens=x.lens, block_table=x.table, out=out)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    before = out.clone()
    x.scales[0][1].mul_(2.0)
    graph.replay()
    assert torch.equal(out, 2 * before)


def test_flash_attention_3_over_e4m3() -> None:
    """q, k and v in e4m3 with descales, batches and packed rows; the bytes of new tokens; a graph that is replayed."""
    from omniattn.compat import flash_attn_interface as fa3

    batch, before, page, dim = 3, [200, 3, 77], 16, 128
    make = lambda *shape, seed: normal(*shape, seed=seed).to(torch.float8_e4m3fn)  # noqa: E731
    caches = [make(60, page, HEADS, dim, seed=n) for n in (1, 2)]
    table = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:48].reshape(batch, 16).int().cuda()
    descales = {name: torch.rand(batch, HEADS, device="cuda") + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    descales["v_descale"] = descales["v_descale"][:, :1].expand(batch, HEADS)
    for rows, packed in ((1, False), (4, False), (4, True)):
        q, k, v = (
            make(batch, rows, 8, dim, seed=3),
            make(batch, 2, HEADS, dim, seed=4),
            make(batch, 2, HEADS, dim, seed=5),
        )
        options: dict[str, Any] = {"cache_seqlens": int32(before), "page_table": table, **descales}
        if packed:
            q = q.flatten(0, 1)
            options |= {"cu_seqlens_q": int32(range(0, 4 * batch + 1, 4)), "max_seqlen_q": 4}
        results = []
        for device in ("cuda", "cpu"):
            own = [x.to(device).clone() for x in caches]
            given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            tensors = (x.to(device) for x in (q, *own, k, v))
            out, lse, *_ = fa3.flash_attn_with_kvcache(*tensors, causal=True, return_softmax_lse=True, **given)
            assert out.dtype == torch.bfloat16
            results.append([out.cpu().float(), lse.cpu(), *(x.view(torch.uint8).cpu() for x in own)])
        ours, theirs = results
        assert float((ours[0] - theirs[0]).abs().max()) <= 2e-2 * float(theirs[0].abs().max())
        assert float((ours[1] - theirs[1]).abs().max()) <= 1e-3
        assert all(map(torch.equal, ours[2:], theirs[2:]))
    own = [x.clone() for x in caches]
    call = lambda: fa3.flash_attn_with_kvcache(q, *own, k, v, causal=True, **options)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    options["cache_seqlens"].copy_(int32([100, 30, 5]))
    descales["k_descale"].mul_(0.5)
    graph.replay()
    assert torch.equal(made, call())


def test_flashinfer_over_e4m3() -> None:
    """Batches and packed rows, scales that are tensors; new tokens by slots come back as the bytes that they were."""
    from omniattn.compat import flashinfer as fi

    page, lengths, rows, dim = 16, [200, 33, 77], [4, 1, 7], 128
    pool = normal(40, 2, page, HEADS, dim, seed=1).to(torch.float8_e4m3fn)
    counts = [-(-n // page) for n in lengths]
    indptr, indices = int32(np.cumsum([0, *counts])), int32(np.random.default_rng(2).permutation(40)[: sum(counts)])
    last = int32([(n - 1) % page + 1 for n in lengths])
    scales = torch.rand(2, HEADS, device="cuda") + 0.5
    for given in ([1, 1, 1], rows):
        q = normal(sum(given), 8, dim, seed=3)
        results = []
        for device in ("cuda", "cpu"):
            wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8, device=device))
            wrapper.plan(
                int32(np.cumsum([0, *given])), indptr, indices, last, 8, HEADS, dim, page, causal=True,
                q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn,
            )  # fmt: skip
            k_scale, v_scale = scales.to(device)
            out, lse = wrapper.run(q.to(device), pool.to(device), k_scale=k_scale, v_scale=v_scale, return_lse=True)
            results.append((out.cpu().float(), lse.cpu()))
        assert float((results[0][0] - results[1][0]).abs().max()) <= 2e-2 * float(results[1][0].abs().max())
        assert float((results[0][1] - results[1][1]).abs().max()) <= 2e-3
    every = torch.arange(256, dtype=torch.uint8, device="cuda")[:200, None, None].expand(200, HEADS, dim).contiguous()
    request, at = int32([0] * 200), int32(range(200))
    tokens = every.view(torch.float8_e4m3fn)
    fi.append_paged_kv_cache(tokens, tokens, request, at, pool, indices, indptr, last)
    place = indices[at // page].long(), at.long() % page
    for plane in pool.view(torch.uint8).unbind(1):
        same = (plane[place] == every) | (
            tokens.float().isnan() & plane.view(torch.float8_e4m3fn)[place].float().isnan()
        )
        assert bool(same.all())
