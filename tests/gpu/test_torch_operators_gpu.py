"""torch.compile by Inductor and CUDA graphs, checkpointing, autocast: the bits of eager calls, and no kernel more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

pytestmark = pytest.mark.gpu

FORMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window_softcap": {"window": (40, 0), "softcap": 20.0},
    "int8": {"precision": "int8"},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(1)
    yield
    torch._dynamo.reset()


def _tensors(*shape: int, gradient: bool = True) -> list[Any]:
    shape = shape or (2, 200, 4, 64)
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=gradient) for _ in range(3)]


# Graphs first: what the first call of all keeps must not be in their memory.
@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_forward_and_backward(form: str, mode: str) -> None:
    options = FORMS[form]

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, deterministic=True, **options)

    compiled = torch.compile(f, fullgraph=True, mode=mode)
    for _ in range(3):  # CUDA graphs are recorded at the second call, and replayed at the third
        q, k, v = _tensors()
        torch.compiler.cudagraph_mark_step_begin()
        made, expected = compiled(q, k, v), f(q, k, v)
        assert torch.equal(made, expected)
        do = torch.randn_like(expected)
        gradients = torch.autograd.grad(made, (q, k, v), do)
        for a, b in zip(gradients, torch.autograd.grad(expected, (q, k, v), do), strict=True):
            assert torch.equal(a, b)
            assert a.abs().max() > 0


def test_dynamic_lengths() -> None:
    compiled = torch.compile(lambda q, k, v: oa.attention(q, k, v, causal=True), fullgraph=True, dynamic=True)
    for length in (100, 333, 64):
        q, k, v = _tensors(2, length, 4, 128, gradient=False)
        assert torch.equal(compiled(q, k, v), oa.attention(q, k, v, causal=True))


def test_packed_sequences() -> None:
    starts = torch.tensor([0, 100, 101, 300], dtype=torch.int32, device="cuda")

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention_varlen(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=199, max_seqlen_k=199, causal=True,
            deterministic=True,
        )  # fmt: skip

    q, k, v = _tensors(300, 4, 64)
    made, expected = torch.compile(f, fullgraph=True)(q, k, v), f(q, k, v)
    assert torch.equal(made, expected)
    do = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (made, expected)), strict=True):
        assert torch.equal(a, b)


def test_score_mod_with_gradients() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    mod = oa.ScoreMod("score + slopes[h] * (k - q)", slopes=slopes, grad="1.0f")

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, score_mod=mod, causal=True, deterministic=True)

    q, k, v = _tensors()
    made, expected = torch.compile(f, fullgraph=True)(q, k, v), f(q, k, v)
    assert torch.equal(made, expected)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (made, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_generation_in_one_graph(mode: str) -> None:
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    first, second = (oa.KVCache(2, 64, 2, 64, like=like, k_dtype="int8") for _ in range(2))
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")

    def step(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        oa.append(first, k, v, seq_lens=lengths)
        return oa.decode(q, first, seq_lens=lengths)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for i in range(6):
        q, k, v = (torch.randn(2, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
        lengths += 1
        torch.compiler.cudagraph_mark_step_begin()
        o = compiled(q, k, v, lengths).clone()
        oa.append(second, k, v, seq_lens=lengths)
        assert torch.equal(o, oa.decode(q, second, seq_lens=lengths)), i


def _kernels(function: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    # Not copies and fills, nor the profiler's own buffers.
    other = ("mem", "activity buffer")
    events = (e for e in profile.key_averages() if not any(word in e.key.lower() for word in other))
    return sorted(e.key for e in events for _ in range(e.count))


def test_a_compiled_call_launches_no_kernel_more() -> None:
    q, k, v = _tensors()

    def both(f: Any) -> None:
        torch.autograd.grad(f(q, k, v), (q, k, v), torch.ones_like(q))

    def eager(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, causal=True)

    compiled = torch.compile(eager, fullgraph=True)
    for f in (eager, compiled):
        both(f)
        both(f)
    assert _kernels(lambda: both(compiled)) == _kernels(lambda: both(eager))


def test_autocast_and_checkpointing() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in _tensors())
    with torch.autocast("cuda", torch.bfloat16):
        made = torch.utils.checkpoint.checkpoint(
            lambda *x: oa.attention(*x, deterministic=True), q, k, v, use_reentrant=False
        )
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = oa.attention(*low, deterministic=True)
    assert torch.equal(made, expected)
    for a, b in zip(
        torch.autograd.grad(made.float().sum(), (q, k, v)), torch.autograd.grad(expected.float().sum(), low),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b.float())


def test_gradients_of_each_sample() -> None:
    q, k, v = _tensors(3, 2, 70, 4, 64, gradient=False)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, causal=True, deterministic=True).float().square().sum()

    made = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        inputs = [x[i].clone().requires_grad_() for x in (q, k, v)]
        for a, b in zip(made, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(a[i], b, rtol=0, atol=0)


def test_export_runs_on_other_tensors() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return oa.attention(q, k, v, causal=True)

    program = torch.export.export(Layer(), tuple(_tensors(gradient=False)))
    q, k, v = _tensors(gradient=False)
    assert torch.equal(program.module()(q, k, v), Layer()(q, k, v))
