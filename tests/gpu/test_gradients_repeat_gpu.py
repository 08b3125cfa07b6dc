"""Calls with gradients that repeat: the shorter way gives the bits of the long one, and steps aside where it must."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from omniattn.frameworks.torch import repeated  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_plans")]

SHAPE = (2, 130, 4, 64)
STARTS = {"max_seqlen_q": 100, "max_seqlen_k": 100}


def _tensors(packed: bool = False) -> list[Any]:
    made = torch.Generator("cuda").manual_seed(3)
    shape = (150, *SHAPE[2:]) if packed else SHAPE
    return [torch.randn(shape, device="cuda", generator=made).bfloat16().requires_grad_() for _ in range(3)]


def _starts() -> dict[str, Any]:
    starts = torch.tensor([0, 50, 150], dtype=torch.int32, device="cuda")
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, **STARTS}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the shorter ways a call took."""
    ways: list[str] = []
    autograd = pytest.importorskip("omniattn.frameworks.torch.autograd")
    backward = repeated.Repeated.run_backward
    forward = autograd._apply_known

    def apply(*inputs: Any) -> Any:
        ways.append("forward")
        return forward(*inputs)

    def run_backward(*inputs: Any) -> Any:
        made = backward(*inputs)
        if made is not None:
            ways.append("backward")
        return made

    monkeypatch.setattr(autograd, "_apply_known", apply)
    monkeypatch.setattr(repeated.Repeated, "run_backward", run_backward)
    return ways


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"window": (20, 0)}], ids=str)
def test_the_same_bits(options: dict[str, Any], packed: bool, taken: list[str]) -> None:
    q, k, v = _tensors(packed)
    more = _starts() if packed else {}
    function: Any = oa.attention_varlen if packed else oa.attention
    sinks = torch.randn(4, device="cuda")
    do = torch.randn_like(q)

    def run() -> list[Any]:
        o = function(q, k, v, sinks=sinks, deterministic=True, **options, **more)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    first = run()
    assert taken == []
    run()  # learns the backward of the shorter forward
    assert taken == ["forward"]
    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert taken[1:] == ["forward", "backward"] * 2


def test_some_gradients_and_the_lse(taken: list[str]) -> None:
    q, k, v = _tensors()
    k.requires_grad_(False)
    do = torch.randn_like(q)
    expected = oa.attention_backward(
        do, q.detach(), k, v.detach(), *oa.attention(q.detach(), k, v.detach(), return_lse=True), deterministic=True
    )
    for _ in range(3):
        o, lse = oa.attention(q, k, v, return_lse=True, deterministic=True)
        dq, dv = torch.autograd.grad(o, (q, v), do)
        assert torch.equal(dq, expected[0])
        assert torch.equal(dv, expected[2])
        assert lse.requires_grad
    assert taken[-2:] == ["forward", "backward"]
    # A gradient of the LSE is not what was learned.
    o, lse = oa.attention(q, k, v, return_lse=True, deterministic=True)
    dq, dv = torch.autograd.grad((o, lse), (q, v), (do, torch.ones_like(lse)))
    assert taken[-1] == "forward"
    assert not torch.equal(dq, expected[0])
    dlse = oa.attention_backward(
        do, q.detach(), k, v.detach(), o.detach(), lse.detach(), dlse=torch.ones_like(lse), deterministic=True
    )
    assert torch.equal(dq, dlse[0])


def test_it_steps_aside(taken: list[str]) -> None:
    q, k, v = _tensors()
    do = torch.randn_like(q)

    def run(of: Any = None, **more: Any) -> Any:
        return torch.autograd.grad(
            oa.attention(q, k, v, deterministic=True), (q, k, v), do if of is None else of, **more
        )

    expected = run()
    for _ in range(3):
        run()
    taken.clear()
    # An incoming gradient of other strides, of a sum for one.
    spread = torch.ones(1, 1, 1, 1, device="cuda").bfloat16().expand(SHAPE)
    assert all(torch.equal(a, b) for a, b in zip(run(spread), run(torch.ones_like(q)), strict=True))
    # Where it is a graph that is asked for: no second derivatives, said by who follows it.
    made = run(create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    with pytest.raises(UnsupportedError, match="second derivatives"):
        made[0].float().sum().backward()
    # Tensors that were kept elsewhere come back as others.
    with torch.autograd.graph.save_on_cpu():
        o = oa.attention(q, k, v, deterministic=True)
    made = torch.autograd.grad(o, (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    # Changed in place behind the call: autograd's own error.
    o = oa.attention(q, k, v, deterministic=True)
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o, (q, k, v), do)
    with torch.no_grad():
        q.sub_(1)
    # Sinks that need a gradient get it.
    sinks = torch.zeros(4, device="cuda", requires_grad=True)
    for _ in range(3):
        (dsinks,) = torch.autograd.grad(oa.attention(q, k, v, sinks=sinks), (sinks,), do)
        assert dsinks.abs().max() > 0
    # A deterministic mode that comes later than the call was learned.
    before = torch.get_deterministic_debug_mode()
    o = oa.attention(q, k, v)
    torch.set_deterministic_debug_mode("error")
    try:
        taken.clear()
        torch.autograd.grad(o, (q, k, v), do)
        assert "backward" not in taken
    finally:
        torch.set_deterministic_debug_mode(before)


def test_forgotten_with_the_plans(taken: list[str]) -> None:
    q, k, v = _tensors()
    for _ in range(2):
        oa.attention(q, k, v)
    assert taken == ["forward"]
    PLANS.clear()
    oa.attention(q, k, v)
    assert taken == ["forward"]


def test_without_gradients_nothing_changes(taken: list[str]) -> None:
    q, k, v = _tensors()
    for _ in range(2):
        oa.attention(q, k, v)
    taken.clear()
    with torch.no_grad():
        assert not oa.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert oa.attention(q, k, v).is_inference()
    assert taken == []
    with pytest.raises(ArgumentError, match="'out'"):
        oa.attention(q, k, v, out=torch.empty_like(q))
