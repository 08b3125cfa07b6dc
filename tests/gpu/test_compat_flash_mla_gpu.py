"""FlashMLA's sparse functions, and its dense one over rows in 8 bits, on a GPU against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.compat import flash_mla  # noqa: E402

from .latent_rows8 import dressed, stored  # noqa: E402
from .test_sparse_gpu import BOUND, DIM, DIM_V, expected, lists_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="kernels of Hopper"
    ),
]

HEADS, SCALE = 64, 0.1352
#: Element types of k_cache by what its rows are.
ROWS = ("bfloat16", "float8_e4m3fn", "uint8", "int8")


def sinks_of(heads: int) -> Any:
    """Sinks of every size, both infinities among them."""
    found = torch.linspace(-8, 8, heads, device="cuda")
    found[0], found[1] = math.inf, -math.inf
    return found


def check(out: Any, lse: Any, most: Any, q: Any, rows: Any, lists: list[Any], sinks: Any) -> None:
    """Results (tokens, heads, ...) as FlashMLA defines them: the LSE has no sinks, and is +inf without keys."""
    for t, listed in enumerate(lists):
        want, want_lse, want_most = expected(q[t], rows[listed], SCALE)
        if sinks is not None:
            want = want * torch.sigmoid(want_lse - sinks.double()).nan_to_num(0.0)[:, None]
        assert not out[t].isnan().any(), t
        assert (out[t].double() - want).norm() <= 1.5 * BOUND["bfloat16"] * want.norm() + 1e-9, t
        if not len(listed):
            assert torch.isposinf(lse[t]).all(), t
            assert most is None or torch.isneginf(most[t]).all(), t
            continue
        assert ((lse[t].double() - want_lse).abs() < 4e-3).all(), t
        assert most is None or ((most[t].double() - want_most).abs() < 4e-3).all(), t


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_sparse_decoding(tokens: int, has_sinks: bool, kind: str) -> None:
    batch, topk, size = 4, 200, 64
    values = torch.randn(30 * size, DIM, device="cuda")
    if kind == "bfloat16":
        cache, meant = values.bfloat16(), values.bfloat16().double()
    else:
        cache, either = stored(values, "656")
        meant, cache = either.exact, cache.view(getattr(torch, kind))
    q = torch.randn(batch, tokens, HEADS, DIM, device="cuda").bfloat16()
    indices, _, _ = lists_of(batch * tokens, topk, len(meant))
    indices[0] = -1
    length = torch.tensor([200, 1, 0, 77], dtype=torch.int32, device="cuda")
    if kind != "bfloat16":
        pool = oa.PagedKVCache.from_arrays(cache.view(torch.uint8).view(30, size, 1, -1), head_dim_v=DIM_V)
        lengths = length[:, None].repeat(1, tokens)
        given_lists = {"indices": indices.view(batch, tokens, topk), "topk_length": lengths}
        meant = either.of(str(oa.explain(oa.decode, q, pool, **given_lists).kernel))
    sinks = sinks_of(HEADS) if has_sinks else None
    given: dict[str, Any] = {
        "softmax_scale": SCALE, "is_fp8_kvcache": kind != "bfloat16", "indices": indices.view(batch, tokens, topk),
        "attn_sink": sinks, "topk_length": length,
    }  # fmt: skip
    call = lambda: flash_mla.flash_mla_with_kvcache(  # noqa: E731
        q, cache.view(30, size, 1, -1), None, None, DIM_V, flash_mla.get_mla_metadata()[0], **given
    )
    out, lse = call()
    assert lse.shape == (batch, HEADS, tokens)
    counted = [indices[b * tokens + i, : int(length[b])] for b in range(batch) for i in range(tokens)]
    lists = [x[(x >= 0) & (x < len(meant))].long() for x in counted]
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), None, q.flatten(0, 1), meant, lists, sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = call()
    graph.replay()
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("topk", [64, 500])
def test_sparse_prefill(topk: int, has_sinks: bool) -> None:
    kv = torch.randn(3000, 1, DIM, device="cuda").bfloat16()
    q = torch.randn(200, 128, DIM, device="cuda").bfloat16()
    indices, lengths, lists = lists_of(200, topk, 3000)
    sinks = sinks_of(128) if has_sinks else None
    out, most, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices[:, None], SCALE, DIM_V, sinks, lengths)
    check(out, lse, most, q, kv[:, 0].double(), lists, sinks)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "656"])
def test_dense_decoding_over_8_bits(fmt: str, causal: bool) -> None:
    lengths, size, tokens = (500, 64, 1000), 64, 2
    bytes_, either = stored(torch.randn(32 * size, DIM, device="cuda") * 0.3, fmt)
    # Of kernels for more than 16 query rows. FlashMLA has no scale of all rows of e4m3.
    meant = either.rounded if fmt == "656" else bytes_.view(torch.float8_e4m3fn).double()
    pool, _ = dressed(bytes_.view(32, size, 1, -1), fmt)
    table = torch.randperm(32, device="cuda")[:48].repeat(2)[:48].view(3, 16).int()
    q = torch.randn(3, tokens, HEADS, DIM, device="cuda").bfloat16()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, pool, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), DIM_V, None, softmax_scale=SCALE,
        causal=causal, is_fp8_kvcache=True,
    )  # fmt: skip
    blocks = meant.view(32, size, DIM)
    for b, n in enumerate(lengths):
        own = blocks[table[b].long()].flatten(0, 1)
        for i in range(tokens):
            seen = own[: n - tokens + i + 1 if causal else n]
            want, want_lse, _ = expected(q[b, i], seen, SCALE)
            assert (out[b, i].double() - want).norm() < BOUND["bfloat16"] * want.norm(), (b, i)
            assert ((lse[b, :, i].double() - want_lse).abs() < 4e-3).all(), (b, i)
