"""Scalars on a GPU: factors are never read, scales are; what the originals' own tests ask of caches and combining."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from omniattn.compat.rotary import rotation  # noqa: E402
from tests.unit.compat import compat_cases  # noqa: E402
from tests.unit.compat.compat_cases import close  # noqa: E402

from .test_compat_gpu import check_output, device, filled, in_ours, random  # noqa: E402

pytestmark = pytest.mark.gpu


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_factors_stay_on_the_device() -> None:
    """Numbers of the host, scalars of the GPU in any type: the bits of float32 scalars, and nothing is waited for."""
    q, k, v = (random(1, 200, heads, 64, seed=i).to(torch.float8_e4m3fn) for i, heads in enumerate((4, 2, 2)))
    scalars = [torch.tensor(x, device=device()) for x in (0.5, 2.0, -0.25)]
    names = ("descale_q", "descale_k", "descale_v")
    want = oa.attention(q, k, v, **dict(zip(names, scalars, strict=True)))
    torch.cuda.synchronize()
    made = []
    with no_synchronization():
        for given in (
            (0.5, 2, -0.25), [x.cpu() for x in (torch.tensor(0.5), torch.tensor(2.0), torch.tensor(-0.25))],
            [x.bfloat16() for x in scalars], [x.double() for x in scalars],
        ):  # fmt: skip
            made.append(oa.attention(q, k, v, **dict(zip(names, given, strict=True))))
            made.append(fa3.flash_attn_func(q, k, v, q_descale=given[0], k_descale=given[1], v_descale=given[2]))
    assert all(torch.equal(o, want) for o in made)


def test_scales_are_read_at_each_call() -> None:
    """A scalar on the GPU may change between calls that are otherwise the same, warm or not."""
    q, k, v = (random(1, 70, 4, 64, seed=i) for i in range(3))
    scale = torch.tensor(0.5, device=device())
    for value in (0.5, 0.125, 0.5, 2.0):
        scale.fill_(value)
        want = oa.attention(q, k, v, softmax_scale=value)
        for _ in range(2):
            assert torch.equal(oa.attention(q, k, v, softmax_scale=scale), want)
        want = fa2.flash_attn_func(q, k, v, softmax_scale=value, causal=True)
        assert torch.equal(fa2.flash_attn_func(q, k, v, softmax_scale=scale, causal=1), want)
    causal = torch.tensor(True, device=device())
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=causal), fa3.flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("kind", ["plain", "batch_idx", "paged", "leftpad"])
@pytest.mark.parametrize(("queries", "dim"), [(1, 59), (40, 111), (2, 5)])
def test_caches_of_any_head_dim(kind: str, queries: int, dim: int) -> None:
    """Written where they lie; with rotary embedding by the places in the cache, padding included."""
    before = [33, 200, 130]
    tokens, caches, options = filled(kind, dim, before)
    q, k_new, v_new = (random(3, queries, 4 if i == 0 else 2, dim, seed=20 + i) for i in range(3))
    first = options["cache_leftpad"].tolist() if kind == "leftpad" else [0, 0, 0]
    pairs = dim // 4
    angles = torch.arange(320, device=device())[:, None] / torch.arange(1, pairs + 1, device=device())
    cos, sin = angles.cos(), angles.sin()
    out, lse = fa2.flash_attn_with_kvcache(
        q, *caches, k_new, v_new, cos, sin, causal=True, rotary_interleaved=False, return_softmax_lse=True, **options
    )
    at = options["cache_seqlens"][:, None] + torch.arange(queries, device=device())
    turn = rotation("test", 320, cos, sin, False, q, k_new)
    assert turn is not None
    new_q, new_k = turn(q, at), turn(k_new, at)
    for b, n in enumerate(before):
        keys, values = (
            torch.cat([x[b, first[b] : n], new[b]])[None] for x, new in zip(tokens, (new_k, v_new), strict=True)
        )
        naive = functools.partial(compat_cases.naive, causal=True)
        check_output(out[b : b + 1], in_ours(lse[b : b + 1]), naive, [new_q[b : b + 1], keys, values])
    assert sum(int((~x.isnan()).all(-1).all(-1).sum()) for x in caches) == 2 * (sum(before) + 3 * queries)


def test_lengths_beyond_a_block_table() -> None:
    """An error before anything is written, one wait for all layers, and none while a graph is captured."""
    _, caches, options = filled("paged", 128, [33, 200, 130])
    q, k_new, v_new = (random(3, 1, 8 if i == 0 else 2, 128, seed=20 + i) for i in range(3))
    saved = [x.clone() for x in caches]
    lengths = options.pop("cache_seqlens")
    for value, new in ((321, ()), (320, (k_new, v_new))):
        lengths[1] = value
        with pytest.raises(RuntimeError, match="block_table has 5 blocks of 64 tokens"):
            fa2.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, **options)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(caches, saved, strict=True))
    lengths[1] = 319
    fa2.flash_attn_with_kvcache(q, *caches, k_new, v_new, cache_seqlens=lengths, **options)
    torch.cuda.synchronize()
    with no_synchronization():
        for _ in range(2):
            fa2.flash_attn_with_kvcache(q, *caches, k_new, v_new, cache_seqlens=lengths, **options)
    table = options.pop("block_table")
    lengths[1] = 318
    with no_synchronization():  # FlashAttention-3 does not look
        fa3.flash_attn_with_kvcache(q, *caches, k_new, v_new, cache_seqlens=lengths, page_table=table, num_splits=3)


@pytest.mark.parametrize("dim", [59, 512, 1024])
def test_combine_of_any_head_dim(dim: int) -> None:
    out = random(5, 2, 70, 4, dim, dtype=torch.float32)
    lse = random(5, 2, 70, 4, seed=1, dtype=torch.float32)
    lse[2, 0] = -math.inf
    weights = (lse.double() - lse.double().logsumexp(0)).exp().nan_to_num(0)
    made, made_lse = fa3.flash_attn_combine(out, lse)
    assert close(made.double(), (weights[..., None] * out).sum(0), 1e-5)
    assert close(made_lse.double(), lse.double().logsumexp(0), 1e-5)
