"""Packed sequences whose keys are split over CTAs on wgmma, an even share for each (stream_k.cuh)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from omniattn.testing.pages import pools  # noqa: E402

from .test_few_queries_gpu import exact  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]
ROWS = [s for s in REGISTRY if s.op == "attention_split" and not s.quantized and s.sequences == "packed"]


def starts(lengths: list[int], first: int = 0) -> Any:
    return torch.tensor([first, *(first + x for x in itertools.accumulate(lengths))], dtype=torch.int32, device="cuda")


def packed(
    lengths_q: list[int], lengths_k: list[int], heads: tuple[int, int], head_dim: int, dtype: Any,
    first: int = 0, behind: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """q, k, v with rows of no sequence before and behind, and both cu_seqlens."""
    rows = [sum(x) + first + behind for x in (lengths_q, lengths_k, lengths_k)]
    arrays = (
        torch.randn(n, h, head_dim, device="cuda", dtype=dtype)
        for n, h in zip(rows, (heads[0], *[heads[1]] * 2), strict=True)
    )
    return (*arrays, starts(lengths_q, first), starts(lengths_k, first))


def call(args: tuple[Any, ...], longest_q: int, longest_k: int, page_size: int = 0, **options: Any) -> tuple[Any, Any]:
    """page_size: the keys lie in pages of a pool."""
    q, k, v, of_q, of_k = args
    options |= {"cu_seqlens_k": of_k} if not page_size else {}
    if page_size:
        lengths, first = of_k.diff(), int(of_k[0])
        arrays = [x[first:].float().cpu().numpy() for x in (k, v)]
        made, table = pools(arrays, lengths.tolist(), page_size, page_size)
        k, v = (torch.from_numpy(x).to(q) for x in made)
        options |= {"seqused_k": lengths, "block_table": torch.from_numpy(table).cuda()}
    return oa.attention_varlen(
        q, k, v, cu_seqlens_q=of_q, max_seqlen_q=longest_q, max_seqlen_k=longest_k, return_lse=True, **options
    )


def close_to_float64(made: tuple[Any, Any], args: tuple[Any, ...], sinks: Any = None, **options: Any) -> None:
    (o, lse), (q, k, v, of_q, of_k) = made, args
    limit = 2e-2 if q.dtype == torch.bfloat16 else 3e-3
    at_q, at_k = of_q.tolist(), of_k.tolist()
    for b in range(len(at_q) - 1):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        if rows.start == rows.stop:
            continue
        want, want_lse = exact(q[None, rows], k[None, keys], v[None, keys], sinks=sinks, **options)
        own, own_lse = o[rows].double(), lse[:, rows].double()
        assert torch.isfinite(own).all()
        assert (own - want[0]).abs().max() <= limit, (b, (own - want[0]).abs().max())
        empty = want_lse[0] == -torch.inf
        assert torch.equal(own_lse == -torch.inf, empty)
        assert (own_lse - want_lse[0]).masked_fill(empty, 0.0).abs().max() <= 1e-3, b
    for rows in (slice(0, at_q[0]), slice(at_q[-1], None)):
        assert not o[rows].any()
        assert (lse[:, rows] == -torch.inf).all()


CASES = {
    "8 of 32": ([32] * 8, [8192] * 8, (32, 8), {}),
    "lengths": ([1, 17, 64, 3, 129, 40], [9000, 17, 640, 12000, 129, 0], (16, 4), {"causal": True}),
    "more queries": ([300, 5, 90], [100, 4000, 90], (8, 2), {"causal": True}),
    "heads of 7": ([4] * 20 + [0, 1], [2000 + 10 * i for i in range(22)], (28, 4), {}),
    "window": ([50, 1, 200], [5000, 300, 7000], (12, 2), {"window": (1000, 5)}),
    "one head": ([33, 100], [9000, 2000], (3, 3), {"causal": True}),
    "one of many": ([1] * 70, [x * 37 % 3000 for x in range(70)], (32, 4), {"causal": True}),
    "prefill among": ([1000, 1, 1, 1], [1000, 3000, 2000, 1], (8, 1), {"causal": True}),
}


@pytest.mark.parametrize("spec", ROWS, ids=lambda s: s.name)
@pytest.mark.parametrize("case", CASES)
def test_beside_float64(case: str, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    *extents, options = CASES[case]
    torch.manual_seed(len(case))
    args = packed(*extents, spec.head_dim - 8 * (case == "window"), getattr(torch, spec.dtype), 3, 70)
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", spec.name)
    longest = [max(x) for x in extents[:2]]
    sinks = torch.randn(extents[2][0], device="cuda") if case in ("lengths", "one of many") else None
    if spec.score_mods and case != "8 of 32":
        options = {**options, "softcap": 5.0}
    page_size = 16 if spec.paged else 0
    made, again = (call(args, *longest, page_size, sinks=sinks, **options) for _ in range(2))
    close_to_float64(made, args, sinks, **options)
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


def random_lengths(of: random.Random) -> tuple[list[int], list[int]]:
    """Of a few sequences or many; without a query or a key there would be no kernel to force."""
    batch = of.choice([1, 2, 9, 40, 100])
    while True:
        lengths_q = [of.choice([0, 1, 1, 2, 7, 30, 100]) for _ in range(batch)]
        lengths_k = [of.choice([0, 1, 63, 64, 500, 3000]) for _ in range(batch)]
        if sum(lengths_q) and sum(lengths_k):
            return lengths_q, lengths_k


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = random.Random(seed)
    spec = of.choice(ROWS)
    group, heads_k = of.choice([1, 2, 3, 4, 6, 7, 8, 16]), of.choice([1, 2, 5])
    lengths_q, lengths_k = random_lengths(of)
    options: dict[str, Any] = of.choice([{}, {"causal": True}, {"window": (of.randrange(700), of.randrange(50))}])
    if spec.score_mods:
        options["softcap"] = of.choice([2.0, 50.0])
    torch.manual_seed(seed)
    first, behind = of.choice([0, 1, 200]), of.choice([0, 5, 1000])
    args = packed(
        lengths_q, lengths_k, (group * heads_k, heads_k), spec.head_dim, getattr(torch, spec.dtype), first, behind
    )
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", spec.name)
    made = call(args, max(lengths_q), max(lengths_k), of.choice([1, 7, 16, 256]) if spec.paged else 0, **options)
    close_to_float64(made, args, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim_v", [128, 64])
def test_other_arrays(layout: str, head_dim_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than the walk takes at once; strided o; v of another head_dim; rows that do not count."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm90_bf16_d128_m64n64_varlen_split")
    torch.manual_seed(head_dim_v)
    lengths_q, lengths_k = [1 + i % 3 for i in range(130)], [37 * i % 2500 for i in range(130)]
    q, k, v, of_q, of_k = packed(lengths_q, lengths_k, (16, 4), 128, torch.bfloat16, 2, 9)
    v = v[..., :head_dim_v].contiguous()
    out = torch.full((q.shape[0], 16, head_dim_v + 8), torch.nan, device="cuda", dtype=q.dtype)[..., :head_dim_v]
    heads_first = [x.transpose(0, 1) if layout == "HND" else x for x in (q, k, v, out)]
    used = torch.tensor([max(x - 5, 0) for x in lengths_k], dtype=torch.int32, device="cuda")
    for seqused in (None, used):
        call: dict[str, Any] = {
            "cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": 3, "max_seqlen_k": 2500, "layout": layout,
            "causal": True, "seqused_k": seqused,
        }  # fmt: skip
        *given, to = heads_first
        _, lse = oa.attention_varlen(*given, out=to, return_lse=True, **call)
        counted = lengths_k if seqused is None else used.tolist()
        for b in range(130):
            rows = slice(int(of_q[b]), int(of_q[b + 1]))
            keys = slice(int(of_k[b]), int(of_k[b]) + counted[b])
            want, want_lse = exact(q[None, rows], k[None, keys], v[None, keys], causal=True)
            assert (out[rows].double() - want[0]).abs().max() <= 2e-2, b
            empty = want_lse[0] == -torch.inf
            assert (lse[:, rows].double() - want_lse[0]).masked_fill(empty, 0.0).abs().max() <= 1e-3, b


def test_lengths_that_overlap_touch_nothing_else() -> None:
    """The work of sequences that are each the whole tensor is more than 31 bits count: tiles of keys are counted
    several at a time.
    """
    rows, keys, batch = 130_000, 1_000_000, 150
    q, k = (torch.randn(n, 1, 128, device="cuda", dtype=torch.bfloat16) for n in (rows, keys))
    room = torch.zeros(rows + 2000, 1, 128, device="cuda", dtype=torch.bfloat16)
    of_q, of_k = (torch.tensor([n, 0] * (batch // 2) + [n], dtype=torch.int32, device="cuda") for n in (rows, keys))
    of_q[0] = of_k[0] = 0
    call = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": rows, "max_seqlen_k": keys}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm90_bf16_d128_m64n64_varlen_split")
        oa.attention_varlen(q, k, k, out=room[1000 : 1000 + rows], **call)
    torch.cuda.synchronize()
    assert not room[:1000].any()
    assert not room[1000 + rows :].any()


def test_thousands_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles of rows times tiles of keys than 31 bits count, were each tile to see all keys."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm90_bf16_d64_m64n64_varlen_split")
    torch.manual_seed(0)
    lengths = [1 + i * 7 % 900 for i in range(4000)]
    args = packed([1 + i % 2 for i in range(4000)], lengths, (8, 1), 64, torch.bfloat16)
    close_to_float64(call(args, 2, 900, causal=True), args, causal=True)


def test_forced_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths may change between replays of a graph: the kernel divides the work by what it finds."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm90_bf16_d128_m128n128_varlen_split")
    args = packed([32] * 8, [4000, 100, 8192, 2000, 1, 3000, 9000, 2000], (32, 8), 128, torch.bfloat16)
    call(args, 32, 9000, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call(args, 32, 9000, causal=True)
    for lengths in ([2000] * 8, [1, 9000, 10, 9000, 10, 1, 0, 5000]):
        args[4].copy_(starts(lengths))
        graph.replay()
        torch.cuda.synchronize()
        used = args[4][-1].item()
        close_to_float64((o, lse), (args[0], args[1][:used], args[2][:used], *args[3:]), causal=True)
