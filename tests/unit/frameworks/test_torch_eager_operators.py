"""Eager calls that go to operators: torch.jit.trace, autocast, torch.func; what is checked ahead of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks


def _tensors(gradient: bool = False) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, 4, 8, generator=g).requires_grad_(gradient) for _ in range(3)]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torch_jit_calls_the_operator(gradient: bool) -> None:
    """It would otherwise record memory that nobody writes."""
    q, k, v = _tensors()
    own = q.clone().requires_grad_(gradient)
    traced = torch.jit.trace(lambda q: oa.attention(q, k, v, causal=True) + 0, (own,))
    other = 2 * own
    made = traced(other)
    assert torch.equal(made, oa.attention(other, k, v, causal=True))
    if gradient:
        expected = torch.autograd.grad(oa.attention(other, k, v, causal=True).sum(), other)
        assert torch.equal(torch.autograd.grad(made.sum(), other)[0], expected[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_torch_jit_has_no_backward_of_its_own() -> None:
    q, k, v = _tensors()
    o, lse = oa.attention(q, k, v, return_lse=True)
    with pytest.raises(UnsupportedError, match=r"attention_backward\(\) within torch.jit.trace"):
        torch.jit.trace(lambda do: oa.attention_backward(do, q, k, v, o, lse)[0], (q,))


def test_a_score_mod_lives_until_the_backward() -> None:
    """Its functions of NumPy are not in the text that an operator gets."""
    q, k, v = _tensors(gradient=True)

    def mod() -> Any:
        return oa.ScoreMod("score * 2.0f", grad="2.0f", reference=_doubled, reference_grad=_two)

    expected = torch.autograd.grad(oa.attention(q, k, v, softmax_scale=0.5).sum(), (q, k, v))
    with torch.autocast("cpu", torch.float16, enabled=False):
        found = torch.autograd.grad(oa.attention(q, k, v, softmax_scale=0.25, score_mod=mod()).sum(), (q, k, v))
    torch.testing.assert_close(found, expected)
    function = torch.func.grad(lambda q: oa.attention(q, k, v, softmax_scale=0.25, score_mod=mod()).sum())
    torch.testing.assert_close(function(q.detach()), expected[0])


def _doubled(score: Any, *_: Any) -> Any:
    return score * 2.0


def _two(score: Any, *_: Any) -> Any:
    return np.full_like(score, 2.0)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"window": 3}, "window"), ({"causal": "yes"}, "causal"), ({"causal": 2}, "causal"),
        ({"deterministic": None}, "deterministic"), ({"return_lse": "no"}, "return_lse"), ({"layout": 3}, "layout"),
        ({"softmax_scale": "x"}, "softmax_scale"), ({"softcap": None}, "softcap"), ({"window": (True, 1)}, "window"),
    ],
)  # fmt: skip
def test_options_are_checked_ahead_of_an_operator(options: dict[str, Any], argument: str) -> None:
    """The schema of an operator takes some of them, and its errors name no argument."""
    q, k, v = _tensors()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=f"argument '{argument}'"):
        oa.attention(q, k, v, **options)
    with pytest.raises(ArgumentError, match=f"argument '{argument}'"):
        torch.func.grad(lambda q: oa.attention(q, k, v, **options).sum())(q)
    with pytest.raises(ArgumentError, match=f"argument '{argument}'"):
        oa.attention(q.requires_grad_(), k, v, **options)


def test_arrays_of_other_libraries_are_named() -> None:
    q, k, v = _tensors()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="argument 'mask' is a ndarray"):
        oa.attention(q, k, v, mask=np.ones((1, 1), bool))
    with pytest.raises(ArgumentError, match="argument 'q': expected a torch tensor, because argument 'k'"):
        oa.attention(q.numpy(), k.requires_grad_(), v)
