"""omniattn.compat.flash_attn and flash_attn_interface in the manner of FlashAttention's own tests, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import common  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from tests.unit.compat.compat_cases import close, naive, packed_naive, randoms, starts  # noqa: E402

pytestmark = pytest.mark.frameworks

#: float64 arithmetic; LSE is float32.
EXACT, OF_LSE = 1e-10, 2e-6
SLOPES = torch.tensor([[0.1, 0.5, 0.0, 1.0], [0.3, 0.2, 0.9, 0.4]])
SCORES: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window": (2, 1)}, {"window": (0, -1)}, {"causal": True, "window": (1, -1)},
    {"softcap": 0.7}, {"scale": -0.3}, {"slopes": SLOPES[0]}, {"slopes": SLOPES, "causal": True, "softcap": 2.0},
]  # fmt: skip


def flash_options(score: dict[str, Any]) -> dict[str, Any]:
    """The same in FlashAttention's names."""
    names = {"window": "window_size", "scale": "softmax_scale", "slopes": "alibi_slopes"}
    return {names.get(name, name): value for name, value in score.items()}


def in_fa2(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -math.inf, math.inf, lse)


def agree(made: Any, expected: Any, leaves: list[Any], lse_of: Any = None) -> None:
    """o, LSE and the gradients of a loss of both."""
    (o, lse, *_), (ref, ref_lse) = made, expected
    assert close(o, ref, EXACT)
    assert lse.dtype == torch.float32
    assert close(lse.double(), (lse_of or (lambda x: x))(ref_lse), OF_LSE)
    weights = torch.linspace(-1, 2, o.numel(), dtype=o.dtype).reshape(o.shape)
    for loss_of in (
        lambda o, lse: (o * weights).sum(),
        lambda o, lse: o.sum() + lse[lse.isfinite()].double().cos().sum(),
    ):
        got, want = (torch.autograd.grad(loss_of(*pair), leaves, retain_graph=True) for pair in ((o, lse), expected))
        for a, b in zip(got, want, strict=True):
            assert close(a, b, 1e-5)  # they are made of LSE, which is float32


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize(("sq", "sk", "heads_kv", "dim"), [(5, 5, 4, 8), (3, 7, 2, 16), (6, 4, 1, 12)])
def test_flash_attn_func(score: dict[str, Any], sq: int, sk: int, heads_kv: int, dim: int) -> None:
    q, k, v = leaves = randoms((2, sq, 4, dim), (2, sk, heads_kv, dim), (2, sk, heads_kv, dim), grad=True)
    options = flash_options(score)
    expected = naive(q, k, v, **score)
    made = fa2.flash_attn_func(q, k, v, return_attn_probs=True, deterministic=True, **options)
    agree(made, expected, leaves, in_fa2)
    assert len(made) == 3
    assert made[2].shape == (0,)
    assert made[2].dtype == q.dtype
    assert torch.equal(fa2.flash_attn_func(q, k, v, **options), made[0])
    if "alibi_slopes" not in options:
        agree(fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options), expected, leaves)
        assert torch.equal(fa3.flash_attn_func(q, k, v, num_splits=0, **options), made[0])


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_varlen(score: dict[str, Any]) -> None:
    lengths_q, lengths_k = [3, 0, 4], [5, 2, 0]
    slopes = score.get("slopes")
    score = (
        score if slopes is None else score | {"slopes": torch.cat([SLOPES, SLOPES[:1]]) if slopes.ndim == 2 else slopes}
    )
    q, k, v = leaves = randoms((7, 4, 8), (7, 2, 8), (7, 2, 8), grad=True)
    call = (q, k, v, starts(lengths_q), starts(lengths_k), 4, 5)
    options = flash_options(score)
    expected = packed_naive(q, k, v, lengths_q, lengths_k, **score)
    made = fa2.flash_attn_varlen_func(*call, return_attn_probs=True, **options)
    agree(made, expected, leaves, in_fa2)
    assert bool((made[1][:, 3:] == math.inf).all())  # no keys
    assert torch.equal(fa2.flash_attn_varlen_func(*call, **options), made[0])
    if slopes is None:
        made = fa3.flash_attn_varlen_func(*call, return_attn_probs=True, **options)
        agree(made, expected, leaves)
        assert bool((made[1][:, 3:] == -math.inf).all())


def test_packed_arguments() -> None:
    """q, k, v in one tensor: the same bits, and one gradient."""
    score = {"causal": True, "softcap": 3.0, "return_attn_probs": True}
    (qkv,) = randoms((2, 5, 3, 4, 8), grad=True)
    q, k, v = qkv.detach().requires_grad_().unbind(2)
    expected = fa2.flash_attn_func(q, k, v, **score)

    def same(made: Any, leaf: Any, parts: list[Any], plain: Any) -> None:
        assert all(torch.equal(a, b) for a, b in zip(made, plain, strict=True))
        (gradient,) = torch.autograd.grad(made[0].square().sum(), [leaf])
        of_parts = torch.autograd.grad(plain[0].square().sum(), parts, retain_graph=True)
        assert torch.equal(gradient, torch.stack(of_parts, dim=-3))

    same(fa2.flash_attn_qkvpacked_func(qkv, **score), qkv, [q, k, v], expected)
    same(fa3.flash_attn_qkvpacked_func(qkv, **score), qkv, [q, k, v], fa3.flash_attn_func(q, k, v, **score))
    kv = torch.stack([k, v], dim=2).detach().requires_grad_()
    same(fa2.flash_attn_kvpacked_func(q, kv, **score), kv, [k, v], expected)
    grouped = torch.cat([q, k[:, :, :2], v[:, :, :2]], dim=2).detach().requires_grad_()
    made = fa3.flash_attn_qkvpacked_func(grouped, num_heads_q=4, **score)
    assert torch.equal(made[0], fa3.flash_attn_func(q, k[:, :, :2], v[:, :, :2], **score)[0])
    made[0].sum().backward()
    assert grouped.grad.shape == grouped.shape

    cu = starts([4, 6])
    flat = qkv.detach().flatten(0, 1).requires_grad_()
    q, k, v = flat.detach().requires_grad_().unbind(1)
    expected = fa2.flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, **score)
    same(fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 6, **score), flat, [q, k, v], expected)
    kv = torch.stack([k, v], dim=1).detach().requires_grad_()
    same(fa2.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 6, 6, **score), kv, [k, v], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: Any) -> None:
    q, k, v = leaves = randoms((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), dtype=dtype, grad=True)
    o = fa2.flash_attn_func(q, k, v, causal=True)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    ref, _ = naive(*wide, causal=True)
    plain, _ = naive(q, k, v, causal=True)
    assert o.dtype == dtype
    assert (o.double() - ref).abs().max() <= 2 * (plain.double() - ref).abs().max() + 1e-5
    grads = [torch.autograd.grad(x.double().sum(), y) for x, y in ((o, leaves), (ref, wide), (plain, leaves))]
    for got, want, base in zip(*grads, strict=True):
        assert (got.double() - want).abs().max() <= 2 * (base.double() - want).abs().max() + 1e-5


def test_one_graph() -> None:
    """torch.compile reads the functions without a break, ALiBi included."""
    torch._dynamo.reset()
    leaves = randoms((2, 5, 4, 12), (2, 7, 2, 12), (2, 7, 2, 12), dtype=torch.float32, grad=True)

    def f(q: Any, k: Any, v: Any) -> Any:
        o, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=SLOPES, return_attn_probs=True)
        return o.square().sum() + lse.sum() + fa3.flash_attn_func(q, k, v, window_size=(2, 2)).sum()

    made, expected = torch.compile(f, fullgraph=True, backend="eager")(*leaves), f(*leaves)
    assert torch.equal(made, expected)
    for a, b in zip(torch.autograd.grad(made, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert close(a, b, 1e-6)


# Forward and backward of ring projects


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_two_halves_of_the_keys(packed: bool, infinity: float) -> None:
    """A ring of two steps: LSE and out are those of all keys when the gradients of a half are computed."""
    (do,) = randoms((2, 6, 4, 8), seed=1)
    q, k, v = leaves = randoms((2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 8), grad=True)
    mask = torch.ones(6, 10, dtype=torch.bool)
    mask[:, 5:] = mask[:, 5:].tril(-1)  # the second half causally, shifted: the first query sees none of it
    ref, ref_lse = naive(q, k, v, mask=mask)
    want = torch.autograd.grad((ref * do).sum(), leaves)
    cu_q, cu_k = starts([6, 6]), starts([5, 5])

    def shaped(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1) if packed else x

    def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, :5].contiguous(), x[:, 5:].contiguous()]

    outs, lses = [], []
    for i, (k_i, v_i) in enumerate(zip(parts_of(k), parts_of(v), strict=True)):
        window = (-1, -1) if i == 0 else (-1, 0)
        score = (0.0, 8**-0.5, False, *window, 0.0, None)
        if packed:
            made = fa2._flash_attn_varlen_forward(shaped(q), shaped(k_i), shaped(v_i), cu_q, cu_k, 6, 5, *score, False)
            out, lse = made[0].unflatten(0, (2, 6)), made[1].unflatten(1, (2, 6)).transpose(0, 1)
        else:
            made = fa2._flash_attn_forward(q, k_i, v_i, *score, False)
            out, lse = made[:2]
        assert len(made) == 4
        assert made[2].shape == (0,)
        assert made[3].dtype == torch.int64
        assert not out.requires_grad
        outs.append(out)
        lses.append(torch.where(lse == math.inf, -math.inf, lse).double())
        assert bool((lse[..., 0] == math.inf).all()) == (i == 1)
    lse = torch.logaddexp(*lses)
    out = sum(o * torch.exp(part - lse).transpose(1, 2)[..., None] for o, part in zip(outs, lses, strict=True))
    assert close(out, ref, 1e-6)
    assert close(lse, ref_lse, OF_LSE)
    lse = lse.float().masked_fill(lse == -math.inf, infinity)
    got = [torch.zeros_like(x) for x in leaves]
    for i, (k_i, v_i) in enumerate(zip(parts_of(k), parts_of(v), strict=True)):
        window = (-1, -1) if i == 0 else (-1, 0)
        score = (0.0, 8**-0.5, False, *window, 0.0, None, True, None)
        into = [torch.full_like(x.detach(), math.nan) for x in (shaped(q), shaped(k_i), shaped(v_i))]
        if packed:
            flat = lse.transpose(0, 1).flatten(1)
            call = [shaped(x) for x in (do, q, k_i, v_i, out)]
            fa2._flash_attn_varlen_backward(*call, flat, *into, cu_q, cu_k, 6, 5, *score)
        else:  # not contiguous along the sequence, as some rings keep it
            strange = lse.transpose(1, 2).contiguous().transpose(1, 2)
            fa2._flash_attn_backward(do, q, k_i, v_i, out, strange, *into, *score)
        dq, dk, dv = (x.unflatten(0, (2, -1)) if packed else x for x in into)
        got[0] += dq
        got[1][:, 5 * i : 5 * i + 5] = dk
        got[2][:, 5 * i : 5 * i + 5] = dv
    for a, b in zip(got, want, strict=True):
        assert close(a, b, 1e-5)


def test_lse_of_both_conventions() -> None:
    lse = torch.tensor([[1.0, math.inf], [-math.inf, 2.0]]).T
    assert torch.equal(common.ours(lse), torch.tensor([[1.0, -math.inf], [-math.inf, 2.0]]))
    assert common.ours(lse).is_contiguous()
    assert torch.equal(common.infinite(lse), torch.tensor([[1.0, math.inf], [math.inf, 2.0]]))


def test_backward_of_some_and_with_alibi() -> None:
    q, k, v, do = randoms((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), (2, 5, 4, 8), grad=True)
    ref, _ = naive(q, k, v, causal=True, slopes=SLOPES)
    want = torch.autograd.grad((ref * do).sum(), [q, k, v])
    out, lse, *_ = fa2._wrapped_flash_attn_forward(q, k, v, 0.0, 8**-0.5, True, -1, -1, 0.0, SLOPES, False)
    packed = torch.full((2, 6, 2, 2, 8), math.nan, dtype=q.dtype)
    more = (0.0, 8**-0.5, True, -1, -1, 0.0, SLOPES, True)
    assert fa2._wrapped_flash_attn_backward(do, q, k, v, out, lse, None, *packed.unbind(2), *more) is None
    assert close(packed[:, :, 0], want[1], 1e-6)
    assert close(packed[:, :, 1], want[2], 1e-6)
    with pytest.raises(ArgumentError, match="a tensor to write"):
        fa2._flash_attn_backward(do, q, k, v, out, lse, None, None, None, *more)


def test_combine() -> None:
    out, lse = randoms((3, 2, 5, 4, 8), (3, 2, 5, 4), dtype=torch.float32)
    lse[1, 0] = -math.inf
    lse[:, 1, 2] = -math.inf
    out[1, 0] = math.nan
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0)
    expected = (weights[..., None] * out.nan_to_num(0)).sum(0)
    made, made_lse = fa3.flash_attn_combine(out, lse)
    assert close(made, expected, 1e-6)
    assert close(made_lse, lse.logsumexp(0), 1e-6)
    into = torch.full((2, 5, 4, 8), math.nan, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(out, lse, into, torch.bfloat16)[0] is into
    assert torch.equal(into, made.bfloat16())
    assert torch.equal(fa3.flash_attn_combine(out, lse, None, torch.float16)[0], made.half())
    one, _ = fa3.flash_attn_combine(out[1:2], lse[1:2])
    assert bool((one[0] == 0).all())
    with pytest.raises(ShapeError, match="lse_partial"):
        fa3.flash_attn_combine(out, lse[:, :, :, :1])
    with pytest.raises(ArgumentError, match="out_dtype"):
        fa3.flash_attn_combine(out, lse, into, torch.float16)


@pytest.mark.parametrize("dim", [1, 59, 111, 264, 512, 513, 1030])
@pytest.mark.parametrize("splits", [1, 3])
def test_combine_of_any_head_dim(dim: int, splits: int) -> None:
    """Tensors as FlashAttention-3's own tests have them: not contiguous, some splits without a key."""
    out, lse = randoms((2 * splits, 2, 4, 5, dim), (splits, 2, 8, 5), dtype=torch.float32)
    out, lse = out.transpose(2, 3)[:splits], lse.transpose(-1, -2)[..., :4]
    lse[splits // 2 :, :1] = -math.inf
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0)
    made, made_lse = fa3.flash_attn_combine(out, lse)
    assert made.shape == (2, 5, 4, dim)
    assert close(made, (weights[..., None] * out).sum(0), 1e-6)
    assert close(made_lse, lse.logsumexp(0), 1e-6)
    into = torch.full((2, 5, 4, dim), math.nan, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(out, lse, into)[0] is into
    assert torch.equal(into, made.bfloat16())


def test_what_changes_no_more_than_last_bits() -> None:
    """Knobs of the originals' schedulers, at every value that they may have."""
    q, k, v = randoms((5, 4, 8), (5, 2, 8), (5, 2, 8))
    cu = starts([2, 3])
    dense, packed = fa3.flash_attn_func(q[None], k[None], v[None]), fa3.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3)
    for knobs in ({"num_splits": 3}, {"num_splits": 0}, {"pack_gqa": False}, {"pack_gqa": True}, {"sm_margin": 16}):
        assert torch.equal(fa3.flash_attn_func(q[None], k[None], v[None], **knobs), dense)
        assert torch.equal(fa3.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, **knobs), packed)
    qkv = randoms((1, 5, 3, 4, 8))[0]
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, sm_margin=4), fa3.flash_attn_qkvpacked_func(qkv))
    for splits in (0, 1, 4):
        made = fa2._flash_attn_varlen_forward(q, k, v, cu, cu, 3, 3, 0.0, 8**-0.5, False, num_splits=splits)
        assert torch.equal(made[0], packed)
    with pytest.raises(ArgumentError, match="num_splits"):
        fa2._flash_attn_varlen_forward(q, k, v, cu, cu, 3, 3, 0.0, 8**-0.5, False, num_splits=-2)


@pytest.mark.parametrize(
    ("given", "same"), [((None, 0), (-1, 0)), ((2, None), (2, -1)), ([None, None], (-1, -1)), ((None, 1), (-1, 1))]
)
def test_windows_without_a_limit(given: Any, same: tuple[int, int]) -> None:
    """None, as FlashAttention-4 has it; (None, 0) is causal. With more queries than keys rows are empty."""
    q, k, v = randoms((2, 6, 4, 8), (2, 4, 2, 8), (2, 4, 2, 8))
    for module in (fa2, fa3):
        made = module.flash_attn_func(q, k, v, window_size=given, return_attn_probs=True)
        expected = module.flash_attn_func(q, k, v, window_size=same, return_attn_probs=True)
        assert torch.equal(made[0], expected[0])
        assert torch.equal(made[1], expected[1])
    ref, _ = naive(q, k, v, window=same)
    assert close(made[0], ref, EXACT)
    cached = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, window_size=given)
    assert close(cached, ref, EXACT)


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dropout_p": 1.0}, ArgumentError, "'dropout_p': expected a number of at least 0 and less than 1"),
        ({"dropout_p": -1}, ArgumentError, "dropout_p"),
        ({"window_size": (3,)}, ArgumentError, "window_size"),
        ({"window_size": (-2, 0)}, ArgumentError, "window_size"),
        ({"alibi_slopes": torch.zeros(3)}, ShapeError, "alibi_slopes"),
        ({"alibi_slopes": [0.1] * 4}, ArgumentError, "alibi_slopes"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, UnsupportedError, "slopes"),
        ({"softcap": math.nan}, ArgumentError, "softcap"),
        ({"causal": 2}, ArgumentError, "causal"),
        ({"window_size": (None, -2)}, ArgumentError, "-1 or None: unlimited"),
        ({"return_attn_probs": "yes"}, ArgumentError, "return_attn_probs"),
    ],
    ids=str,
)
def test_errors_of_fa2(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = randoms((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), grad=True)
    with pytest.raises(error, match=text):
        fa2.flash_attn_func(q, k, v, **arguments)


def test_errors_name_the_function_and_its_own_arguments() -> None:
    """Those of `attention` too, which calls some otherwise."""
    q, k, v = randoms((2, 5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8))
    qkv, kv, packed = torch.stack([q, k, v], 2), torch.stack([k, v], 2), [x.flatten(0, 1) for x in (q, k, v)]
    cu = starts([10])
    rows, last = (packed[0], torch.stack(packed[1:], 1)), (cu, cu, 10, 10)
    o, lse, _ = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    score = (0.0, 1.0, False, -1, -1, 0.0, None, False)
    slopes, states, lses = {"alibi_slopes": torch.zeros(4)}, torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
    for function, arguments, options, named in (
        (fa2.flash_attn_func, (q, k, v), {"softmax_scale": "1"}, "softmax_scale"),
        (fa2.flash_attn_qkvpacked_func, (qkv.int(),), {}, "qkv"),
        (fa2.flash_attn_kvpacked_func, (q, kv.float()), {}, "kv"),
        # Padded, both have 8 channels.
        (fa2.flash_attn_func, (q[..., :7], k, v), {}, "k"),
        (fa2.flash_attn_kvpacked_func, (q, kv[..., :7]), {}, "kv"),
        (fa2.flash_attn_varlen_func, (packed[0][..., :5], *packed[1:], cu, cu, 10, 10), {}, "k"),
        (fa2.flash_attn_varlen_func, (*packed, cu, cu, 9, 10), {}, "max_seqlen_q"),
        (fa2.flash_attn_varlen_qkvpacked_func, (torch.stack(packed, 1), cu, 9), {}, "max_seqlen"),
        (fa2.flash_attn_varlen_qkvpacked_func, (torch.stack(packed, 1), cu.long(), 10), {}, "cu_seqlens"),
        (fa2.flash_attn_varlen_qkvpacked_func, (torch.stack(packed, 1), cu[0], 10), slopes, "cu_seqlens"),
        (fa2.flash_attn_varlen_func, (*packed, cu, cu.to("meta"), 10, 10), slopes, "cu_seqlens_k"),
        (fa2._flash_attn_backward, (q, q, k, v, o.sum(), lse, *grads, *score), {}, "out"),
        (fa2._flash_attn_backward, (q, q, k, v, o, lse.int(), *grads, *score), {}, "softmax_lse"),
        (fa3.flash_attn_combine, (states, lses.to("meta")), {}, "lse_partial"),
        (fa3.flash_attn_combine, (states, lses, states[0].to("meta")), {}, "out"),
        (fa3.flash_attn_combine, (states, lses, states[0].int()), {}, "out"),
        (fa3.flash_attn_combine, (states, lses), {"out_dtype": torch.int32}, "out_dtype"),
        (fa2.flash_attn_varlen_kvpacked_func, (*rows, *last), {"softmax_scale": "1"}, "softmax_scale"),
        (fa2._flash_attn_backward, (q.float(), q, k, v, o, lse, *grads, *score), {}, "dout"),
        (fa2._flash_attn_backward, (q, q, k, v, o, lse[:, :2], *grads, *score), {}, "softmax_lse"),
        (fa2.flash_attn_with_kvcache, (q, k, v), {"softmax_scale": "1"}, "softmax_scale"),
        (fa3.flash_attn_func, (q, k, v), {"v_descale": 1.0}, "v_descale"),
        (fa3.flash_attn_qkvpacked_func, (qkv.int(),), {}, "qkv"),
        (fa3.flash_attn_varlen_func, (*packed, *last), {"q_descale": 1.0}, "q_descale"),
    ):
        with pytest.raises(ArgumentError) as caught:
            function(*arguments, **options)
        assert (caught.value.function, caught.value.argument) == (function.__name__, named), str(caught.value)


def test_more_errors_of_fa2() -> None:
    q, k, v = randoms((5, 4, 8), (5, 2, 8), (5, 2, 8))
    call = (q, k, v, starts([5]), starts([5]), 5, 5)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="leftpad_k"):
        fa2._flash_attn_varlen_forward(*call, 0.0, 1.0, False, leftpad_k=table)
    with pytest.raises(ShapeError, match=r"'k': expected 4 dimensions \(blocks, tokens, heads, head_dim\)"):
        fa2.flash_attn_varlen_func(*call, block_table=table)
    with pytest.raises(UnsupportedError, match=r"flash_attn_func\(\): argument 'k' is a nested tensor"):
        fa2.flash_attn_func(q[None], torch.nested.nested_tensor([k]), v[None])
    with pytest.raises(UnsupportedError, match="return_softmax=True"):
        fa2._flash_attn_varlen_forward(*call, 0.0, 1.0, False, return_softmax=True)
    with pytest.raises(ShapeError, match="cu_seqlens_k"):
        fa2.flash_attn_varlen_func(q, k, v, starts([5]), starts([2, 3]), 5, 5, alibi_slopes=torch.zeros(4))
    with pytest.raises(ShapeError, match="q"):
        fa2.flash_attn_func(q, k, v)
    with pytest.raises(ArgumentError, match=r"a torch\.Tensor"):
        fa2.flash_attn_func(q[None].numpy(), k[None], v[None])
    with pytest.raises(ShapeError, match="qkv"):
        fa2.flash_attn_qkvpacked_func(torch.zeros(2, 5, 2, 4, 8))
    assert not fa2.flash_attn_func(q[None], k[None], v[None], softcap=-1.0).isnan().any()


def test_fp8_of_fa3() -> None:
    q, k, v = (torch.randn(2, n, h, 32).to(torch.float8_e4m3fn) for n, h in ((20, 4), (30, 2), (30, 2)))
    factors = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    given = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    named = dict(zip(("descale_q", "descale_k", "descale_v"), factors, strict=True))
    want, want_lse = oa.attention(q, k, v, causal=True, return_lse=True, **named)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **given)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    made = fa3.flash_attn_varlen_func(*packed, starts([20, 20]), starts([30, 30]), 20, 30, causal=True, **given)
    assert torch.equal(made, want.flatten(0, 1))
    qkv = torch.stack([k, k, v], dim=2)
    made = fa3.flash_attn_qkvpacked_func(qkv, v_descale=factors[2])
    assert torch.equal(made, oa.attention(k, k, v, descale_v=factors[2]))
    with pytest.raises(ArgumentError, match="'k_descale': expected None, because q is float32"):
        fa3.flash_attn_func(*(x.float() for x in (q, k, v)), k_descale=factors[1])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"qv": torch.zeros(1)}, UnsupportedError, "qv=a tensor"),
        ({"attention_chunk": 4}, UnsupportedError, "attention_chunk=4"),
        ({"num_splits": -1}, ArgumentError, "num_splits"),
        ({"num_splits": 1.5}, ArgumentError, "num_splits"),
        ({"pack_gqa": "yes"}, ArgumentError, "pack_gqa"),
        ({"sm_margin": -1}, ArgumentError, "sm_margin"),
    ],
    ids=str,
)
def test_errors_of_fa3(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = randoms((5, 4, 8), (5, 2, 8), (5, 2, 8))
    with pytest.raises(error, match=text):
        fa3.flash_attn_func(q[None], k[None], v[None], **arguments)
    with pytest.raises(error, match=text):
        fa3.flash_attn_varlen_func(q, k, v, starts([5]), starts([5]), 5, 5, **arguments)


def test_more_errors_of_fa3() -> None:
    q, k, v = randoms((5, 4, 8), (5, 2, 8), (5, 2, 8))
    used = torch.tensor([3], dtype=torch.int32)
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(ShapeError, match=name):
            fa3.flash_attn_varlen_func(q, k, v, starts([5]), starts([5]), 5, 5, **{name: used.repeat(2)})
    with pytest.raises(ShapeError, match="as many of k as of v"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 5, 7, 8), num_heads_q=4)
    with pytest.raises(ArgumentError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 5, 8, 8))
    with pytest.raises(ArgumentError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 5, 3, 4, 8), num_heads_q=4)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("by_used", [False, True])
def test_keys_in_blocks(slopes: bool, by_used: bool) -> None:
    q, k, v = randoms((6, 4, 8), (9, 2, 8), (9, 2, 8))
    lengths = [4, 5]
    table = torch.tensor([[2, 0, 99], [3, 1, 4]], dtype=torch.int32)
    pools = [torch.full((5, 2, 2, 8), math.nan, dtype=k.dtype) for _ in "kv"]
    for pool, x in zip(pools, (k, v), strict=True):
        for b, (begin, count) in enumerate(zip((0, 4), lengths, strict=True)):
            for i in range(count):
                pool[table[b, i // 2], i % 2] = x[begin + i]
    options = {"alibi_slopes": torch.linspace(0.1, 0.5, 4)} if slopes else {}
    sizes = (starts([2, 4]), starts(lengths), 4, 5)
    expected = fa2.flash_attn_varlen_func(q, k, v, *sizes, causal=True, **options)
    if by_used:
        used = torch.tensor(lengths, dtype=torch.int32)
        made, *_ = fa2._flash_attn_varlen_forward(
            q, *pools, *sizes, 0.0, 8**-0.5, True, block_table=table, seqused_k=used, **options
        )
    else:
        made = fa2.flash_attn_varlen_func(q, *pools, *sizes, causal=True, block_table=table, **options)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("keys", "error", "text"), [
    (torch.tensor(9, dtype=torch.int32), ShapeError, r"shape \(3,\), like cu_seqlens_q, received \(\)"),
    (starts([9]), ShapeError, r"shape \(3,\), like cu_seqlens_q, received \(2,\)"),
    (starts([9, 4]).long(), DtypeError, "int32, received int64"),
    (starts([9, -4]), ArgumentError, "0, and never less than before"),
    (starts([9, 4]) + 1, ArgumentError, "0, and never less than before"),
    (None, ArgumentError, r"a torch\.Tensor, received NoneType"),
])  # fmt: skip
@pytest.mark.parametrize("slopes", [None, torch.zeros(2)])
def test_counts_of_keys_in_blocks(keys: Any, error: type[Exception], text: str, slopes: Any) -> None:
    q, pool, table = torch.randn(5, 2, 8), torch.randn(4, 4, 2, 8), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(error, match=r"flash_attn_varlen_func\(\): argument 'cu_seqlens_k': expected " + text):
        fa2.flash_attn_varlen_func(q, pool, pool, starts([2, 3]), keys, 3, 9, block_table=table, alibi_slopes=slopes)
