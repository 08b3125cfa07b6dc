"""The drop-in modules on a GPU: forward and backward against float64; the same computation in 16 bits is the bound.

Gradients have the bounds of the other tests of the backward (`backward_cases.compare`): twice the error of attention
written out in 16 bits, and what a kernel's rowsum(do * o) of a rounded o adds. Errors of o and LSE as there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.compat import bert_padding, cached  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from omniattn.compat import sageattention as sage  # noqa: E402
from tests.unit.compat import compat_cases  # noqa: E402
from tests.unit.compat.compat_cases import close, packed_naive  # noqa: E402

from . import backward_cases  # noqa: E402
from .attention_cases import check_lse  # noqa: E402
from .backward_cases import Problem, slack_of  # noqa: E402

pytestmark = pytest.mark.gpu

NAMES = ("q", "k", "v")
SCORES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (30, 7)},
    "left": {"window": (50, -1), "causal": True},
    "softcap": {"softcap": 5.0}, "scale": {"softmax_scale": 0.2}, "alibi": {"alibi": 1}, "batch_alibi": {"alibi": 2},
    "all": {"causal": True, "window": (90, 0), "softcap": 20.0, "alibi": 1},
}  # fmt: skip
SHAPES = [(130, 130, 2, 64), (100, 203, 4, 128), (203, 100, 1, 96)]


def device() -> str:
    return backward_cases.DEVICE


def random(*shape: int, seed: int = 0, dtype: Any = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device(), dtype)


def slopes_of(score: dict[str, Any], batch: int) -> torch.Tensor | None:
    """(heads,) or (batch, heads), heads that ALiBi leaves alone among them."""
    dims = score.get("alibi", 0)
    if not dims:
        return None
    slopes = torch.tensor([0.5, 0.0, 0.05, 0.01], device=device())
    return slopes if dims == 1 else torch.stack([slopes * (b + 1) / batch for b in range(batch)])


def call_options(score: dict[str, Any], slopes: torch.Tensor | None) -> dict[str, Any]:
    """In FlashAttention's names."""
    names = {"window": "window_size"}
    options = {names.get(name, name): value for name, value in score.items() if name != "alibi"}
    return options if slopes is None else {**options, "alibi_slopes": slopes}


def of_naive(score: dict[str, Any], slopes: torch.Tensor | None) -> dict[str, Any]:
    """In the names of `compat_cases.naive`."""
    names = {"softmax_scale": "scale"}
    options = {names.get(name, name): value for name, value in score.items() if name != "alibi"}
    return {**options, "slopes": slopes}


def problem_of(
    arrays: dict[str, torch.Tensor], score: dict[str, Any], slopes: torch.Tensor | None, packed: dict[str, Any]
) -> Problem:
    """The same call for the tests of the backward."""
    options = {name: value for name, value in score.items() if name != "alibi"}
    mod = None
    if slopes is not None:
        if packed:
            shift = packed["cu_seqlens_k"].diff() - packed["cu_seqlens_q"].diff()
        else:
            shift = torch.full((len(arrays["q"]),), arrays["k"].shape[1] - arrays["q"].shape[1], device=device())
        batch = len(shift)

        def biased(s: torch.Tensor, b: int, h: Any, q: Any, k: Any) -> tuple[torch.Tensor, torch.Tensor]:
            own = slopes.expand(batch, slopes.shape[-1])[b][h].to(s.dtype)
            return s - own * (q + shift[b] - k).abs(), torch.ones_like(s, dtype=torch.bool)

        mod = (None, biased)
    return Problem(arrays, options, packed, mod)


def check_gradients(problem: Problem, made: Any, label: str) -> None:
    exact, plain = (backward_cases.naive(problem, dtype) for dtype in (torch.float64, problem.arrays["q"].dtype))
    factor = 3.0 if problem.options.get("softcap") else 2.0
    for name, gradient in zip(("dq", "dk", "dv"), made, strict=True):
        backward_cases.compare(
            name, gradient, exact[name], plain[name], problem.dtype, f"{name} {label}", factor, slack_of(problem, name)
        )


def check_output(o: torch.Tensor, lse: torch.Tensor | None, naive: Any, qkv: list[torch.Tensor]) -> None:
    """naive(q, k, v) -> o, LSE; LSE in our convention."""
    exact, exact_lse = naive(*(x.detach().double() for x in qkv))
    plain, _ = naive(*(x.detach() for x in qkv), wide=torch.float32)
    assert o.shape == exact.shape
    assert o.dtype == qkv[0].dtype
    error, bound = (o.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max() + 1e-4
    assert error <= bound, f"{error:.3e} > {bound:.3e}"
    if lse is not None:
        assert lse.dtype == torch.float32
        check_lse(lse.detach().cpu().numpy(), exact_lse.cpu().numpy(), "lse")


def in_ours(lse: torch.Tensor) -> torch.Tensor:
    """FlashAttention-2's LSE; -inf has no place in it."""
    assert not (lse == -math.inf).any()
    return lse.masked_fill(lse == math.inf, -math.inf)


# Forward and backward


def check_batch(shape: tuple[int, int, int, int], score: dict[str, Any], dtype: Any = torch.bfloat16) -> None:
    queries, keys, heads_kv, dim = shape
    sizes = ((2, queries, 4, dim), (2, keys, heads_kv, dim), (2, keys, heads_kv, dim))
    leaves = [random(*size, seed=i, dtype=dtype).requires_grad_() for i, size in enumerate(sizes)]
    do = random(2, queries, 4, dim, seed=5, dtype=dtype)
    slopes = slopes_of(score, 2)
    options = call_options(score, slopes)
    o, lse, none = fa2.flash_attn_func(*leaves, return_attn_probs=True, deterministic=True, **options)
    assert none.shape == (0,)
    check_output(o, in_ours(lse), lambda *x, **more: compat_cases.naive(*x, **of_naive(score, slopes), **more), leaves)
    made = torch.autograd.grad(o, leaves, do)
    arrays = {**{name: x.detach() for name, x in zip(NAMES, leaves, strict=True)}, "do": do}
    check_gradients(problem_of(arrays, score, slopes, {}), made, "FlashAttention-2")
    if slopes is None:
        again, lse = fa3.flash_attn_func(*leaves, return_attn_probs=True, deterministic=True, **options)
        assert torch.equal(again, o)
        assert not (lse == math.inf).any()
        for a, b in zip(torch.autograd.grad(again, leaves, do), made, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batches(shape: tuple[int, int, int, int], score: str) -> None:
    check_batch(shape, SCORES[score])


@pytest.mark.parametrize("dim", [32, 36, 40, 72, 160, 192, 256])
def test_head_dims(dim: int) -> None:
    check_batch((150, 130, 2, dim), SCORES["causal"])


@pytest.mark.parametrize("score", ["causal", "all"])
def test_fp16(score: str) -> None:
    check_batch((100, 150, 2, 64), SCORES[score], torch.float16)


@pytest.mark.parametrize("score", SCORES)
def test_packed_sequences(score: str) -> None:
    of_q, of_k = [100, 0, 70, 33], [90, 20, 130, 0]
    sizes = ((203, 4, 64), (240, 2, 64), (240, 2, 64))
    leaves = [random(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]
    do = random(203, 4, 64, seed=5)
    slopes = slopes_of(SCORES[score], 4)
    cu_q, cu_k = (compat_cases.starts(of, device()) for of in (of_q, of_k))
    options = call_options(SCORES[score], slopes)
    call = (*leaves, cu_q, cu_k, 100, 130)
    o, lse, _ = fa2.flash_attn_varlen_func(*call, return_attn_probs=True, deterministic=True, **options)

    def naive(*x: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_naive(*x, of_q, of_k, **of_naive(SCORES[score], slopes), **more)

    check_output(o, in_ours(lse), naive, leaves)
    made = torch.autograd.grad(o, leaves, do)
    arrays = {**{name: x.detach() for name, x in zip(NAMES, leaves, strict=True)}, "do": do}
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 100, "max_seqlen_k": 130}
    check_gradients(problem_of(arrays, SCORES[score], slopes, packed), made, "packed")
    if slopes is None:
        again = fa3.flash_attn_varlen_func(*call, deterministic=True, **options)
        assert torch.equal(again, o)


def test_one_tensor_for_all() -> None:
    """Views of a packed tensor are read where they lie; the bits are those of tensors of their own."""
    qkv = random(2, 150, 3, 4, 64).requires_grad_()
    apart = [x.detach().clone().requires_grad_() for x in qkv.unbind(2)]
    do = random(2, 150, 4, 64, seed=5)
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    o = fa2.flash_attn_func(*apart, **options)
    expected = torch.stack(torch.autograd.grad(o, apart, do), dim=2)
    for made in (fa2.flash_attn_qkvpacked_func(qkv, **options), fa3.flash_attn_qkvpacked_func(qkv, **options)):
        assert torch.equal(made, o)
        assert torch.equal(torch.autograd.grad(made, [qkv], do)[0], expected)
    cu = compat_cases.starts([150, 150], device())
    flat = qkv.detach().flatten(0, 1).requires_grad_()
    made = fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 150, **options)
    one = fa2.flash_attn_varlen_func(*flat.unbind(1), cu, cu, 150, 150, **options)
    assert torch.equal(made, one)
    assert torch.isfinite(torch.autograd.grad(made, [flat], do.flatten(0, 1))[0]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_of_two_steps(packed: bool) -> None:
    """Keys in two halves, the second one causally; the gradients are those of all keys, from the merged out and LSE."""
    halves, length = 2, 130
    q, k, v, do = (random(2, length if i in (0, 3) else 2 * length, 2, 64, seed=i) for i in range(4))
    score = {"softmax_scale": 0.125, "causal": True}  # aligned at the end: the last query sees all
    cu = compat_cases.starts([length, length], device())

    def shaped(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1) if packed else x

    outs, lses = [], []
    for i in range(halves):
        k_i, v_i = (x[:, i * length : (i + 1) * length].contiguous() for x in (k, v))
        more = (0.0, 0.125, i == 1, -1, -1, 0.0, None)
        if packed:
            made = fa2._flash_attn_varlen_forward(*map(shaped, (q, k_i, v_i)), cu, cu, length, length, *more, False)
            outs.append(made[0].unflatten(0, (2, length)))
            lses.append(made[1].unflatten(1, (2, length)).transpose(0, 1))
        else:
            made = fa2._flash_attn_forward(q, k_i, v_i, *more, False)
            outs.append(made[0])
            lses.append(made[1])
    out, lse = oa.merge_states(outs[0], lses[0].contiguous(), outs[1], lses[1].contiguous())
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for i in range(halves):
        k_i, v_i = (x[:, i * length : (i + 1) * length].contiguous() for x in (k, v))
        into = [torch.full_like(shaped(x), math.nan) for x in (q, k_i, v_i)]
        call = [shaped(x) for x in (do, q, k_i, v_i, out)]
        more = (0.0, 0.125, i == 1, -1, -1, 0.0, None, True)
        if packed:
            flat = lse.transpose(0, 1).flatten(1)
            fa2._flash_attn_varlen_backward(*call, flat, *into, cu, cu, length, length, *more)
        else:
            fa2._flash_attn_backward(*call, lse, *into, *more)
        parts = [x.unflatten(0, (2, length)) if packed else x for x in into]
        dq += parts[0]
        dk[:, i * length : (i + 1) * length], dv[:, i * length : (i + 1) * length] = parts[1:]
    problem = Problem({"q": q, "k": k, "v": v, "do": do}, score)
    check_gradients(problem, (dq.to(q.dtype), dk, dv), "ring")


def test_padded_batches() -> None:
    """unpad, attend, pad: the tokens of each sequence are what they are without padding."""
    lengths = [100, 40, 130]
    mask = torch.arange(130, device=device()) < torch.tensor(lengths, device=device())[:, None]
    x = random(3, 130, 3, 4, 64).requires_grad_()
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 100, 140, 270], 130, lengths)
    made = fa2.flash_attn_varlen_qkvpacked_func(rows, cu, longest, causal=True, deterministic=True)
    o = bert_padding.pad_input(made, indices, 3, 130)
    assert not o[~mask].any()
    (gradient,) = torch.autograd.grad(o.float().square().sum(), [x])
    assert not gradient[~mask].any()
    for b, n in enumerate(lengths):
        own = x[b : b + 1, :n].detach()
        ref, _ = compat_cases.naive(*own.double().unbind(2), causal=True)
        plain, _ = compat_cases.naive(*own.unbind(2), causal=True, wide=torch.float32)
        assert (o[b : b + 1, :n] - ref).abs().max() <= 2 * (plain - ref).abs().max() + 1e-4


# KV caches


def filled(
    kind: str, dim: int, before: list[int], capacity: int = 320, page: int = 64
) -> tuple[Any, Any, dict[str, Any]]:
    """Tokens of sequences, caches that hold them and NaN elsewhere, and the arguments that say where."""
    batch, heads = len(before), 2
    tokens = [random(batch, capacity, heads, dim, seed=10 + i) for i in range(2)]
    lengths = torch.tensor(before, dtype=torch.int32, device=device())
    options: dict[str, Any] = {"cache_seqlens": lengths}
    pages = capacity // page
    order = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(0))[: batch * pages]
    table = order.reshape(batch, pages).int().to(device())
    rows = [2, 0, 4][:batch]
    caches = []
    for x in tokens:
        if kind == "paged":
            cache = torch.full((batch * pages + 3, page, heads, dim), math.nan, device=device(), dtype=x.dtype)
            for b, n in enumerate(before):
                for t in range(0, n, page):
                    part = x[b, t : min(t + page, n)]
                    cache[int(table[b, t // page]), : len(part)] = part
            options["block_table"] = table
        else:
            size = (5 if kind == "batch_idx" else batch, capacity, heads, dim)
            cache = torch.full(size, math.nan, device=device(), dtype=x.dtype)
            for b, n in enumerate(before):
                cache[rows[b] if kind == "batch_idx" else b, :n] = x[b, :n]
            if kind == "batch_idx":
                options["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32, device=device())
        caches.append(cache)
    if kind == "leftpad":
        options["cache_leftpad"] = torch.tensor([5, 0, 70][:batch], dtype=torch.int32, device=device())
    return tokens, caches, options


@pytest.mark.parametrize("kind", ["plain", "batch_idx", "paged", "leftpad"])
@pytest.mark.parametrize(("queries", "dim"), [(1, 128), (1, 64), (3, 128), (40, 64), (2, 96)])
def test_caches(kind: str, queries: int, dim: int) -> None:
    before = [33, 200, 130]
    for score in ({"causal": True}, {}, {"causal": True, "window": (60, 0), "softcap": 20.0}, {"window": (60, 5)}):
        tokens, caches, options = filled(kind, dim, before)
        q, k_new, v_new = (random(3, queries, 4 if i == 0 else 2, dim, seed=20 + i) for i in range(3))
        first = options["cache_leftpad"].tolist() if kind == "leftpad" else [0, 0, 0]
        for module in (fa2, fa3):
            given = dict(options)
            if module is fa3 and "block_table" in given:
                given["page_table"] = given.pop("block_table")
            given |= call_options(score, None)
            made = module.flash_attn_with_kvcache(q, *caches, k_new, v_new, return_softmax_lse=True, **given)
            for b, n in enumerate(before):
                keys, values = (
                    torch.cat([x[b, first[b] : n], new[b]])[None] for x, new in zip(tokens, (k_new, v_new), strict=True)
                )
                lse = made[1][b : b + 1]
                check_output(
                    made[0][b : b + 1], in_ours(lse) if module is fa2 else lse,
                    functools.partial(compat_cases.naive, **score), [q[b : b + 1], keys, values],
                )  # fmt: skip
            written = sum(int((~x.isnan()).all(-1).all(-1).sum()) for x in caches)
            assert written == 2 * (sum(before) + 3 * queries)


def test_caches_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_gathered", lambda *x: pytest.fail("the keys were copied"))
    for kind in ("plain", "batch_idx", "paged"):
        for queries in (1, 16):
            _, caches, options = filled(kind, 128, [33, 200, 130])
            q = random(3, queries, 8, 128, seed=20)
            assert torch.isfinite(fa2.flash_attn_with_kvcache(q, *caches, causal=True, **options)).all()


def test_a_graph_of_steps() -> None:
    """Captured once; lengths, new tokens and the cache change between replays."""
    tokens, caches, options = filled("paged", 128, [33, 200, 130])
    q, k_new, v_new = (random(3, 1, 8 if i == 0 else 2, 128, seed=20 + i) for i in range(3))
    angles = torch.arange(320, device=device())[:, None] / torch.arange(1, 33, device=device())
    cos, sin = angles.cos(), angles.sin()

    def step(lengths: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return fa2.flash_attn_with_kvcache(
            q, k_cache, v_cache, k_new, v_new, cos, sin, causal=True, cache_seqlens=lengths,
            block_table=options["block_table"], rotary_interleaved=False,
        )  # fmt: skip

    lengths = options["cache_seqlens"]
    step(lengths, *(x.clone() for x in caches))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(lengths, *caches)
    for i in range(3):
        for x, seed in ((q, 1), (k_new, 2), (v_new, 3)):
            x.copy_(random(*x.shape, seed=10 * i + seed))
        expected_caches = [x.clone() for x in caches]
        expected = step(lengths, *expected_caches)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, expected)
        for a, b in zip(caches, expected_caches, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        lengths += 1
    del tokens


def test_combine() -> None:
    out = random(5, 2, 70, 4, 64, dtype=torch.float32)
    lse = random(5, 2, 70, 4, seed=1, dtype=torch.float32)
    lse[2, 0] = -math.inf
    lse[:, 1, 3] = -math.inf
    weights = (lse.double() - lse.double().logsumexp(0)).exp().nan_to_num(0)
    made, made_lse = fa3.flash_attn_combine(out, lse)
    assert close(made.double(), (weights[..., None] * out).sum(0), 1e-5)
    assert close(made_lse.double(), lse.double().logsumexp(0), 1e-5)


# SageAttention


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("sageattn", oa.Int8()),
        ("sageattn_qk_int8_pv_fp16_triton", oa.Int8("per_block", True, False, False, "fp16", "fp16")),
        ("sageattn_qk_int8_pv_fp16_cuda", oa.Int8("per_thread", True, False, False, "fp16", "fp32")),
        ("sageattn_qk_int8_pv_fp8_cuda", oa.Int8("per_thread", True, False, False, "fp8", "fp16")),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", oa.Int8("per_thread", True, False, False, "fp8", "fp32")),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sageattention(name: str, precision: oa.Int8, is_causal: bool) -> None:
    if "fp8" in name and device() == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(oa.errors.UnsupportedError):
            getattr(sage, name)(*(random(1, 2, 64, 64) for _ in range(3)))
        return
    for shape, layout in (((2, 4, 300, 64), "HND"), ((2, 300, 4, 128), "NHD")):
        q, k, v = (random(*shape, seed=i) for i in range(3))
        o, lse = getattr(sage, name)(q, k, v, tensor_layout=layout, is_causal=is_causal, return_lse=True)
        same, same_lse = oa.attention(q, k, v, layout=layout, causal=is_causal, precision=precision, return_lse=True)
        assert torch.equal(o, same)
        assert torch.equal(lse, same_lse)
        turned = [x.double() if layout == "NHD" else x.double().transpose(1, 2) for x in (q, k, v)]
        ref, ref_lse = compat_cases.naive(*turned, causal=is_causal)
        ref = ref if layout == "NHD" else ref.transpose(1, 2)
        assert (o.double() - ref).abs().sum() <= 0.08 * ref.abs().sum()
        assert (lse - ref_lse).abs().max() <= 0.1


@pytest.mark.parametrize(("queries", "keys"), [(100, 260), (260, 100)])
def test_sageattention_over_more_or_fewer_keys(queries: int, keys: int) -> None:
    """Causal from the top left, with a mask beside it."""
    q, k, v = (random(2, 4, n, 64, seed=i) for i, n in enumerate((queries, keys, keys)))
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(1)).to(device()) < 0.8
    mask[..., 0] = True
    o = sage.sageattn(q, k, v, is_causal=True, attn_mask=mask)
    visible = mask & torch.ones(queries, keys, dtype=torch.bool, device=device()).tril()
    ref, _ = compat_cases.naive(*(x.double().transpose(1, 2) for x in (q, k, v)), mask=visible)
    assert (o.double() - ref.transpose(1, 2)).abs().sum() <= 0.08 * ref.abs().sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_sageattention_of_packed_sequences(is_causal: bool) -> None:
    lengths = [130, 0, 70]
    q, k, v = (random(200, 4 if i == 0 else 2, 64, seed=i) for i in range(3))
    cu = compat_cases.starts(lengths, device())
    o = sage.sageattn_varlen(q, k, v, cu.long(), cu.long(), 130, 130, is_causal=is_causal)
    ref, _ = packed_naive(*(x.double() for x in (q, k, v)), lengths, lengths, causal=is_causal)
    assert (o.double() - ref).abs().sum() <= 0.08 * ref.abs().sum()


def test_training_through_sageattention() -> None:
    leaves = [random(2, 4, 200, 64, seed=i).requires_grad_() for i in range(3)]
    do = random(2, 4, 200, 64, seed=5)
    made = torch.autograd.grad(sage.sageattn(*leaves, is_causal=True), leaves, do)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    o, _ = compat_cases.naive(*(x.transpose(1, 2) for x in wide), causal=True)
    for a, b in zip(made, torch.autograd.grad(o.transpose(1, 2), wide, do.double()), strict=True):
        assert (a.double() - b).abs().sum() <= 0.08 * b.abs().sum()
