"""Dropout on a GPU: the mask bit for bit, gradients beside float64 with that mask, statistics, graphs, packed calls."""

from __future__ import annotations

from typing import Any

import pytest

import omniattn
from omniattn.errors import OmniattnError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

RNG = (0x123456789ABCDEF0, 0xFEDCBA9876543210)
#: Kernel of the forward (None: the chosen one), head_dim and options of the call.
FORWARDS: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "wgmma d64": (None, 64, {}),
    "wgmma d128": (None, 128, {}),
    "wgmma d128, 192 rows": ("attn_fwd_sm90_bf16_d128_m192n64", 128, {}),
    "wgmma d96": (None, 96, {}),
    "wgmma d256": (None, 256, {}),
    "mma d64": ("attn_fwd_sm80_bf16_d64", 64, {}),
    "mma d128": ("attn_fwd_sm80_bf16_d128", 128, {}),
    "mma d256": ("attn_fwd_sm80_bf16_d256", 256, {}),
    "mma d64, bias": ("attn_fwd_sm80_bf16_d64_n64_mods", 64, {"mask": True}),
    "mma d128, softcap": ("attn_fwd_sm80_bf16_d128_mods", 128, {"softcap": 20.0}),
}
#: Kernel of the backward, head_dim and options of the call.
BACKWARDS: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "wgmma d64": (None, 64, {}),
    "wgmma d128": (None, 128, {}),
    "wgmma d64, deterministic": (None, 64, {"deterministic": True}),
    "wgmma d128, deterministic": (None, 128, {"deterministic": True}),
    "mma d64": ("attn_bwd_joint_sm80_bf16_d64", 64, {}),
    "mma d64, 64 queries": ("attn_bwd_sm80_bf16_d64_m64", 64, {}),
    "mma d128": ("attn_bwd_sm80_bf16_d128", 128, {}),
    "mma d128, dq alone": ("attn_bwd_sm80_bf16_d128,attn_bwd_dq_sm80_bf16_d128", 128, {"deterministic": True}),
    "mma d256": (None, 256, {}),
    "mma d64, bias": (None, 64, {"mask": True}),
    "mma d128, bias": (None, 128, {"mask": True}),
    "mma d64, softcap": (None, 64, {"softcap": 20.0}),
}


def _arrays(batch: int, queries: int, keys: int, heads: tuple[int, int], head_dim: int, seed: int = 0) -> list[Any]:
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [torch.randn(batch, *s, head_dim, device="cuda", dtype=torch.bfloat16, generator=g) for s in shapes]


def kept_by_kernel(q: Any, k: Any, head_dim: int, **options: Any) -> Any:
    """Which probabilities a kernel keeps: those that reach o by values that are one column of the identity each."""
    batch, keys, heads_kv = k.shape[:3]
    found = torch.zeros(batch, q.shape[2], q.shape[1], keys, dtype=torch.bool, device="cuda")
    for begin in range(0, keys, head_dim):
        count = min(head_dim, keys - begin)
        v = torch.zeros(batch, keys, heads_kv, head_dim, device="cuda", dtype=q.dtype)
        rows = torch.arange(count, device="cuda")
        v[:, begin + rows, :, rows] = 1
        o = omniattn.attention(q, k, v, **options)
        found[..., begin : begin + count] = (o[..., :count] != 0).transpose(1, 2)
    return found


def expected_kept(shape: tuple[int, int, int, int], p: float, rng: Any = RNG) -> Any:
    return torch.from_numpy(omniattn.dropout_mask(shape, p, rng)).cuda()


def _options_of(options: dict[str, Any], heads: int, queries: int, keys: int) -> dict[str, Any]:
    made = dict(options)
    if made.pop("mask", False):
        g = torch.Generator("cuda").manual_seed(5)
        made["mask"] = torch.randn(1, heads, queries, keys, device="cuda", dtype=torch.float32, generator=g)
    return made


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_kernels_keep_what_the_mask_says(name: str, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel, with grouped heads, odd lengths, and rows of several tiles."""
    force, head_dim, options = FORWARDS[name]
    if force is not None:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", force)
    batch, queries, keys, heads = 2, 333, 411, 4
    q, k, _ = _arrays(batch, queries, keys, (heads, 2), head_dim)
    made = _options_of(options, heads, queries, keys)
    found = kept_by_kernel(q * 0.1, k, head_dim, dropout_p=p, dropout_rng=RNG, **made)
    wanted = expected_kept((batch, heads, queries, keys), p)
    assert int((found != wanted).sum()) == 0, f"{int((found != wanted).sum())} of {wanted.numel()} differ"


def _reference(
    arrays: list[Any], do: Any, kept: Any, p: float, causal: bool, mask: Any = None, softcap: float = 0.0
) -> list[Any]:
    """o and gradients in float64."""
    q, k, v = (x.double().detach().requires_grad_() for x in arrays)
    group = q.shape[2] // k.shape[2]
    kk, vv = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, kk) * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s + mask.double()
    if causal:
        rows, keys = s.shape[-2:]
        i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")[None]
        s = s.masked_fill(j > i + keys - rows, -torch.inf)
    share = max(round(p * 256), 1) / 256
    probabilities = torch.softmax(s, -1) * kept / (1 - share)
    o = torch.einsum("bhqk,bkhd->bqhd", probabilities, vv)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())]


def worst(found: Any, wanted: Any) -> float:
    """Largest error, relative to the largest number."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_mask(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float64 with what `dropout_mask` keeps."""
    force, head_dim, options = BACKWARDS[name]
    if force is not None:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", force)
    batch, queries, keys, heads, p = 2, 333, 411, 4, 0.25
    arrays = _arrays(batch, queries, keys, (heads, 2), head_dim, seed=1)
    do = torch.randn_like(arrays[0])
    made = _options_of(options, heads, queries, keys)
    known = made | {"causal": causal, "dropout_p": p, "dropout_rng": RNG}
    leaves = [x.requires_grad_() for x in arrays]
    o = omniattn.attention(*leaves, **known)
    gradients = torch.autograd.grad(o, leaves, do)
    kept = expected_kept((batch, heads, queries, keys), p)
    wanted = _reference(arrays, do, kept, p, causal, made.get("mask"), made.get("softcap", 0.0))
    errors = [worst(x, y) for x, y in zip((o, *gradients), wanted, strict=True)]
    assert all(error <= 2e-2 for error in errors), errors


@pytest.mark.parametrize("options", [{}, {"mask": True}, {"softcap": 20.0}], ids=str)
def test_one_query_of_heads_that_share_keys(options: dict[str, Any]) -> None:
    """Without dropout heads are the rows of a tile, where each would drop what another one does."""
    batch, keys, heads, head_dim, p = 3, 411, 8, 64, 0.3
    arrays = _arrays(batch, 1, keys, (heads, 2), head_dim, seed=4)
    made = _options_of(options, heads, 1, keys)
    known = made | {"dropout_p": p, "dropout_rng": RNG}
    wanted_mask = expected_kept((batch, heads, 1, keys), p)
    found_mask = kept_by_kernel(arrays[0] * 0.1, arrays[1], head_dim, **known)
    assert int((found_mask != wanted_mask).sum()) == 0
    leaves = [x.requires_grad_() for x in arrays]
    o = omniattn.attention(*leaves, **known)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, leaves, do)
    wanted = _reference(arrays, do, wanted_mask, p, False, made.get("mask"), made.get("softcap", 0.0))
    errors = [worst(x, y) for x, y in zip((o, *gradients), wanted, strict=True)]
    assert all(error <= 2e-2 for error in errors), errors


def test_the_gradient_of_a_mask() -> None:
    """dmask = P * (M * (dO @ V.T) - D)."""
    batch, queries, keys, heads, p = 1, 150, 203, 2, 0.25
    arrays = _arrays(batch, queries, keys, (heads, 2), 64, seed=2)
    bias = torch.zeros(batch, heads, queries, keys, device="cuda", requires_grad=True)
    do = torch.randn_like(arrays[0])
    o = omniattn.attention(*arrays, mask=bias, dropout_p=p, dropout_rng=RNG)
    (found,) = torch.autograd.grad(o, bias, do)
    q, k, v, d = (x.double() for x in (*arrays, do))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    probabilities = torch.softmax(s, -1)
    factor = expected_kept((batch, heads, queries, keys), p) / 0.75
    delta = (d * torch.einsum("bhqk,bkhd->bqhd", probabilities * factor, v)).sum(-1).transpose(1, 2)
    wanted = probabilities * (torch.einsum("bqhd,bkhd->bhqk", d, v) * factor - delta[..., None])
    assert worst(found, wanted) <= 2e-2


def test_packed_sequences_drop_what_a_batch_drops() -> None:
    """Sequence by sequence, forward and gradients."""
    lengths, head_dim, p = (70, 1, 300, 129), 64, 0.3
    q, k, v = _arrays(len(lengths), max(lengths), max(lengths), (4, 2), head_dim, seed=3)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]).requires_grad_() for x in (q, k, v)]
    own = {"dropout_p": p, "dropout_rng": RNG, "causal": True}
    most = max(lengths)
    o = omniattn.attention_varlen(
        *packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most, **own
    )
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, packed, do)
    kept = expected_kept((len(lengths), 4, most, most), p)
    for b, n in enumerate(lengths):
        rows = slice(int(starts[b]), int(starts[b]) + n)
        one = [x[rows][None].detach() for x in packed]
        wanted = _reference(one, do[rows][None], kept[b : b + 1, :, :n, :n], p, True)
        for found, want in zip((o, *gradients), wanted, strict=True):
            scale = max(float(want.abs().max()), 1.0)
            assert float((found[rows][None].double() - want).abs().max()) <= 3e-2 * scale, (b, n)


def test_a_share_is_dropped() -> None:
    """Of many, within six standard deviations of p; neighbours do not hang together."""
    for p in (0.004, 0.1, 0.5, 0.9):
        kept = expected_kept((2, 4, 1024, 1024), p).double()
        share, n = max(round(p * 256), 1) / 256, kept.numel()
        assert abs(float(1 - kept.mean()) - share) < 6 * (share * (1 - share) / n) ** 0.5
        centred = kept - kept.mean()
        for dim in (-1, -2, -3):
            pairs = centred.narrow(dim, 0, kept.shape[dim] - 1) * centred.narrow(dim, 1, kept.shape[dim] - 1)
            assert abs(float(pairs.mean())) < 6 * share * (1 - share) / pairs.numel() ** 0.5


def test_the_generator_is_drawn_from_and_graphs_go_on() -> None:
    """The same seed gives the same o; each replay of a graph another one; backward takes the forward's numbers."""
    q, k, v = _arrays(1, 256, 256, (2, 2), 64)
    torch.cuda.manual_seed(7)
    a, rng = omniattn.attention(q, k, v, dropout_p=0.3, return_rng=True)
    b = omniattn.attention(q, k, v, dropout_p=0.3)
    torch.cuda.manual_seed(7)
    c = omniattn.attention(q, k, v, dropout_p=0.3)
    assert torch.equal(a, c)
    assert not torch.equal(a, b)
    assert torch.equal(a, omniattn.attention(q, k, v, dropout_p=0.3, dropout_rng=rng))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        omniattn.attention(q, k, v, dropout_p=0.3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, drawn = omniattn.attention(q, k, v, dropout_p=0.3, return_rng=True)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((o.clone(), drawn.clone()))
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[1][0], seen[2][0])
    for one, numbers in seen:
        assert torch.equal(one, omniattn.attention(q, k, v, dropout_p=0.3, dropout_rng=numbers))


def test_a_call_that_is_refused_draws_nothing() -> None:
    q, k, v = _arrays(1, 64, 64, (2, 2), 64)
    before = torch.cuda.get_rng_state()
    for refused in ({"k": k[..., :32]}, {"softcap": -1.0}, {"precision": "int8"}):
        with pytest.raises(OmniattnError):
            omniattn.attention(q, **{"k": k, "v": v, **refused}, dropout_p=0.3)
        assert torch.equal(torch.cuda.get_rng_state(), before)
    omniattn.attention(q, k, v, dropout_p=0.3)
    assert not torch.equal(torch.cuda.get_rng_state(), before)
