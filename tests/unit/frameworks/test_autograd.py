"""Gradients by torch's autograd, on the CPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad, gradcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.frameworks

STARTS = {
    "cu_seqlens_q": torch.tensor([0, 3, 3, 5], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 2, 3, 6], dtype=torch.int32), "max_seqlen_q": 3, "max_seqlen_k": 3,
}  # fmt: skip
SINE = oa.ScoreMod(
    "sinf(score)", grad="cosf(score)", reference=lambda score, b, h, q, k: np.sin(score),
    reference_grad=lambda score, b, h, q, k: np.cos(score),
)  # fmt: skip


def qkv(
    sq: int = 3, sk: int = 4, dtype: Any = torch.float64, *, packed: bool = False, grad: bool = True
) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(sq * 10 + sk)
    shapes = [(sq, 4, 8), (sk, 2, 8), (sk, 2, 8)] if packed else [(2, sq, 4, 8), (2, sk, 2, 8), (2, sk, 2, 8)]
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"window": (1, 1), "softcap": 1.0}, {"softmax_scale": -0.5},
        {"score_mod": SINE, "causal": True},
    ],
    ids=str,
)  # fmt: skip
def test_gradcheck(options: dict[str, Any]) -> None:
    assert gradcheck(lambda *x: oa.attention(*x, **options), qkv(), fast_mode=True)
    assert gradcheck(lambda *x: oa.attention_varlen(*x, **STARTS, **options), qkv(5, 6, packed=True), fast_mode=True)


def test_gradcheck_of_masks_and_sinks() -> None:
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for shape in ((2, 4, 3, 4), (4,), (4, 1, 1)):
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert gradcheck(
            lambda q, k, v, m, s: oa.attention(q, k, v, mask=m, sinks=s), (*qkv(), mask, sinks), fast_mode=True
        )


def test_gradcheck_of_the_lse() -> None:
    """It is float32: steps are large."""
    assert gradcheck(
        lambda *x: oa.attention(*x, return_lse=True, causal=True)[1], qkv(), eps=1e-2, atol=1e-3, rtol=1e-2,
        check_grad_dtypes=True,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_against_torch(dtype: Any) -> None:
    """o and LSE together, in every dtype of the CPU."""
    q, k, v = qkv(6, 9, dtype)
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    (o.double().sin().sum() + lse.double().cos().sum()).backward()
    made = [x.grad for x in (q, k, v)]
    assert [x.dtype for x in made] == [dtype] * 3
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 9, dtype=torch.bool).triu(4), -torch.inf)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(2, dim=2))
    (o.sin().sum() + scores.logsumexp(-1).cos().sum()).backward()
    for gradient, x in zip(made, (q, k, v), strict=True):
        unit = torch.finfo(dtype).eps
        assert (gradient.double() - x.grad).abs().max() <= 8 * unit * max(1, float(x.grad.abs().max()))


def test_forms_of_the_incoming_gradient() -> None:
    """Stride 0 everywhere, as sum() makes it; transposed; a slice."""
    q, k, v = qkv()
    forms: list[Callable[[Any], Any]] = [
        torch.sum, lambda o: o.transpose(1, 2).contiguous().square().sum(), lambda o: o[:, 1:, ::2].sum(),
    ]  # fmt: skip
    for form in forms:
        made = torch.autograd.grad(form(oa.attention(q, k, v)), (q, k, v))
        o, lse = oa.attention(*(x.detach() for x in (q, k, v)), return_lse=True)
        o.requires_grad_()
        (do,) = torch.autograd.grad(form(o), o)
        with torch.no_grad():
            expected = oa.attention_backward(do, q, k, v, o, lse)
            contiguous = oa.attention_backward(do.contiguous(), q, k, v, o, lse)
        for gradient, x, y in zip(made, expected, contiguous, strict=True):
            assert torch.equal(gradient, x)
            assert torch.equal(gradient, y)


def test_only_what_needs_a_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_backward = sys.modules["omniattn.ops.attention_backward"]
    asked: list[tuple[str, ...]] = []
    plain = attention_backward.call_of

    def call_of(function: str, objects: Any, options: Any, *rest: Any) -> Any:
        asked.append(options.wanted)
        return plain(function, objects, options, *rest)

    monkeypatch.setattr(attention_backward, "call_of", call_of)
    sinks, mask = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for wanted in ((1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1), (1, 1, 1, 1, 1)):
        arrays = [x.detach().requires_grad_(bool(w)) for x, w in zip((*qkv(), mask, sinks), wanted, strict=True)]
        q, k, v, m, s = arrays
        oa.attention(q, k, v, mask=m, sinks=s).sum().backward()
        assert [x.grad is not None for x in arrays] == [bool(w) for w in wanted]
        assert asked.pop() == tuple(n for n, w in zip(("dq", "dk", "dv", "dmask", "dsinks"), wanted, strict=True) if w)
    # Nothing that was asked of the results: nothing is computed.
    o, lse = oa.attention(*qkv(), return_lse=True)
    assert o.requires_grad
    lse.sum().backward()
    assert len(asked) == 1


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the call or torch asks for it."""
    asked: list[bool] = []
    backward = sys.modules["omniattn.ops.attention_backward"]
    plain = backward.call_of

    def call_of(function: str, objects: Any, options: Any, *rest: Any) -> Any:
        asked.append(options.deterministic)
        return plain(function, objects, options, *rest)

    monkeypatch.setattr(backward, "call_of", call_of)
    for deterministic, mode in ((False, "default"), (True, "default"), (False, "error"), (False, "warn")):
        o = oa.attention(*qkv(), deterministic=deterministic)
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode(mode)
        try:
            o.sum().backward()
        finally:
            torch.set_deterministic_debug_mode(before)
    assert asked == [False, True, True, False]


def test_dtypes_of_sinks_and_masks() -> None:
    """Gradients come in the dtype of what they belong to."""
    q, k, v = qkv(dtype=torch.float16)
    for dtype in (torch.float16, torch.float32):
        sinks, mask = (torch.zeros(n, dtype=dtype, requires_grad=True) for n in (4, 4))
        oa.attention(q, k, v, sinks=sinks, mask=mask).sum().backward()
        assert (sinks.grad.dtype, mask.grad.dtype) == (dtype, dtype)


def test_plain_calls_are_plain() -> None:
    """Without grad mode, or without a tensor that requires a gradient, no graph is made."""
    q, k, v = qkv()
    with torch.no_grad():
        assert not oa.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert oa.attention(q, k, v).is_inference()
    assert oa.attention(*qkv(grad=False)).grad_fn is None
    assert oa.attention(q, k, v).grad_fn is not None


def test_changes_in_place_are_noticed() -> None:
    q, k, v = qkv()
    o = oa.attention(q * 1, k, v)
    o.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("form", [lambda o: o.sum(), lambda o: o.square().sum()])
def test_no_second_derivatives(form: Any) -> None:
    """Where the incoming gradient depends on nothing, too: torch's own check looks at that alone."""
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(form(oa.attention(q, k, v)), q, create_graph=True)
    (expected,) = torch.autograd.grad(form(oa.attention(q, k, v)), q)
    assert torch.equal(dq, expected)
    with pytest.raises(UnsupportedError, match=r"attention\(\): no second derivatives"):
        dq.sum().backward()
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.functional.hessian(lambda x: form(oa.attention(x, k, v)), q.detach())
    o, lse = oa.attention(q.detach(), k.detach(), v.detach(), return_lse=True)
    with pytest.raises(UnsupportedError, match="'q' requires a gradient, which this call does not compute"):
        oa.attention_backward(o, q, k, v, o, lse)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"precision": "int8"}, {"precision": "fp8"}, {"dropout_p": 0.25}, {"softcap": 1.0},
        {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": 128}, {"packed": True},
    ],
    ids=lambda options: " ".join(options) or "plain",
)  # fmt: skip
def test_no_second_and_no_forward_derivatives_of_any_call(options: dict[str, Any]) -> None:
    packed = bool(options.pop("packed", False))
    q, k, v = qkv(5, 6, dtype=torch.float32, packed=packed)
    name = "attention_varlen" if packed else "attention"

    def call(x: torch.Tensor) -> Any:
        return oa.attention_varlen(x, k, v, **STARTS) if packed else oa.attention(x, k, v, **options)

    (dq,) = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=rf"{name}\(\): no second derivatives"):
        dq.sum().backward()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=rf"{name}\(\): argument 'q' has a tangent"):
        call(forward_ad.make_dual(q.detach(), torch.ones_like(q)))
    with pytest.raises(NotImplementedError, match="jvp function"):  # torch's own word for it
        torch.func.jvp(call, (q.detach(),), (torch.ones_like(q),))


def test_checkpoints() -> None:
    q, k, v = qkv()
    made = []
    for o in (oa.attention(q, k, v), checkpoint(oa.attention, q, k, v, use_reentrant=False)):
        made.append(torch.autograd.grad(o.sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("precision", ["int8", "int4", oa.Int8(smooth_k=False)], ids=str)
def test_low_precisions_are_differentiated_straight_through(precision: Any) -> None:
    """The gradients are those of exact attention with the o and lse of the low precision."""
    q, k, v = qkv(dtype=torch.float32)
    o, lse = oa.attention(q, k, v, precision=precision, return_lse=True)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    made = torch.autograd.grad(o, (q, k, v), do)
    plain = [x.detach() for x in (do, q, k, v, o, lse)]
    assert all(torch.equal(a, b) for a, b in zip(made, oa.attention_backward(*plain), strict=True))
    assert torch.equal(torch.autograd.grad(oa.attention(q, k, v, precision=precision), v, do)[0], made[2])


def test_quantized_operands_have_no_gradient() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        oa.quantize_qk(q, k)
    with torch.no_grad():
        both, value = oa.quantize_qk(q, k, with_bias=True), oa.quantize_v(v)
    assert not oa.attention(both.q, both.k, value).requires_grad
    mask = torch.zeros(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="'mask' requires a gradient"):
        oa.attention(both.q, both.k, value, mask=mask)
    o, lse = oa.attention(both.q, both.k, value, return_lse=True)
    with pytest.raises(ArgumentError, match="quantized attention has no gradient"):
        oa.attention_backward(o, both.q, both.k, value, o, lse)


def test_what_has_no_gradient() -> None:
    q, k, v = qkv()
    slopes = torch.ones(4, dtype=torch.float32, requires_grad=True)
    alibi = {"reference": lambda score, b, h, q, k, slopes: score + slopes[h] * (k - q), "slopes": slopes}
    one = {"grad": "1.0f", "reference_grad": lambda score, b, h, q, k, slopes: 1.0}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"out": torch.empty(2, 3, 4, 8, dtype=torch.float64)}, ArgumentError, "'out'"),
        ({"stream": 7}, ArgumentError, "'stream'"),
        ({"precision": oa.Int8(sparse=oa.Sparse(topk=0.5))}, UnsupportedError, "sparse= of a precision"),
        ({"score_mod": oa.ScoreMod("score + slopes[h]", **alibi, **one)}, UnsupportedError, "'score_mod.slopes'"),
        ({"score_mod": oa.ScoreMod("score", reference=lambda score, *_: score)}, UnsupportedError, "grad="),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            oa.attention(q, k, v, **options)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="'q' has a tangent"):
        oa.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_explain_needs_no_gradient() -> None:
    q, k, v = qkv()
    assert oa.explain(oa.attention, q, k, v).kernel == "reference (NumPy, CPU)"
    assert q.requires_grad


def test_modules_and_other_threads() -> None:
    """Autograd runs backward passes in threads of its own where there are GPUs; here, two at once."""
    q, k, v = qkv()
    o = oa.attention(q, k, v)
    made: list[Any] = []
    threads = [
        threading.Thread(target=lambda: made.append(torch.autograd.grad(o.sum(), q, retain_graph=True)[0]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(*made)


def test_training_lowers_a_loss() -> None:
    torch.manual_seed(0)
    heads = torch.nn.Linear(16, 3 * 16)
    x, target = torch.randn(4, 6, 16), torch.randn(4, 6, 16)
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        q, k, v = heads(x).unflatten(-1, (3, 2, 8)).unbind(2)
        loss = (oa.attention(q, k, v, causal=True).flatten(2) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def _refused_draws() -> list[Callable[[Any], Any]]:
    """Calls with dropout that are refused, the first two behind the checks of dropout itself."""
    from omniattn.compat import flash_attn

    cu = torch.tensor([0, 5, 3], dtype=torch.int32)  # goes back
    return [
        lambda q: oa.attention(q, q[..., :8], q, dropout_p=0.5),
        lambda q: oa.attention(q, q, q, dropout_p=0.5, precision="int8"),
        lambda q: oa.attention(q, q, q, dropout_p=0.5, descale_q=torch.ones(2, 3)),
        lambda q: oa.attention(q, q, q, dropout_p=0.5, softcap=-1.0),
        lambda q: oa.attention_varlen(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=0.5),
        lambda q: flash_attn.flash_attn_func(q, q[..., :8], q, dropout_p=0.5),
    ]


@pytest.mark.parametrize("number", range(6))
def test_a_call_that_is_refused_draws_nothing(number: int) -> None:
    q = torch.randn(1, 16, 2, 16, dtype=torch.float16)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises((ArgumentError, UnsupportedError)):
        _refused_draws()[number](q)
    assert torch.equal(torch.get_rng_state(), before)
    oa.attention(q, q, q, dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), before)
