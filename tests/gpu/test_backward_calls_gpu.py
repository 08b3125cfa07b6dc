"""The backward on a GPU: the same bits, graphs, streams, large arrays, and torch's autograd."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from . import backward_cases  # noqa: E402
from .backward_cases import Problem, compare, make, mask_of, naive, run, slack_of  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backward_family")]

DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_thousand_runs_have_the_same_bits(head_dim: int) -> None:
    problem = make(batch=2, seqlen_q=300, seqlen_k=400, heads_q=4, heads_kv=2, head_dim=head_dim, causal=True)
    x = problem.arrays
    o, lse = oa.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True)
    call = (x["do"], x["q"], x["k"], x["v"], o, lse)
    first = oa.attention_backward(*call, causal=True, deterministic=True)
    differing = torch.zeros((), dtype=torch.int64, device=o.device)
    for _ in range(1000):
        for a, b in zip(oa.attention_backward(*call, causal=True, deterministic=True), first, strict=True):
            differing += (a.view(torch.int16) != b.view(torch.int16)).sum()
    assert int(differing) == 0
    # dk and dv have the same bits whether asked for or not.
    for _ in range(100):
        _, dk, dv = oa.attention_backward(*call, causal=True)
        _, dk_again, dv_again = oa.attention_backward(*call, causal=True)
        differing += (dk != dk_again).sum() + (dv != dv_again).sum()
    assert int(differing) == 0


def test_bits_do_not_depend_on_the_rest_of_the_batch() -> None:
    problem = make(batch=3, seqlen_q=200, seqlen_k=300, heads_q=4, heads_kv=2, head_dim=64, causal=True)
    whole = run(problem, deterministic=True)
    one = Problem({n: x[1:2].contiguous() for n, x in problem.arrays.items()}, problem.options)
    for name, gradient in run(one, deterministic=True).items():
        assert torch.equal(gradient[0], whole[name][1]), name


def test_graph_replays() -> None:
    problem = make(lengths=([130, 0, 70], [100, 50, 90]), heads_q=4, heads_kv=2, head_dim=128, causal=True)
    x = problem.arrays
    o, lse = oa.attention_varlen(x["q"], x["k"], x["v"], return_lse=True, **problem.forward_options)
    into = [torch.empty_like(x[name]) for name in ("q", "k", "v")]
    call = (x["do"], x["q"], x["k"], x["v"], o, lse)
    options = {**problem.forward_options, "deterministic": True}

    def backward() -> None:
        oa.attention_varlen_backward(*call, dq=into[0], dk=into[1], dv=into[2], **options)

    backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for seed in (1, 2):
        other = make(lengths=([130, 0, 70], [100, 50, 90]), heads_q=4, heads_kv=2, head_dim=128, causal=True, seed=seed)
        for name in ("q", "k", "v", "do"):
            x[name].copy_(other.arrays[name])
        new_o, new_lse = oa.attention_varlen(x["q"], x["k"], x["v"], return_lse=True, **problem.forward_options)
        o.copy_(new_o)
        lse.copy_(new_lse)
        for t in into:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for t, gradient in zip(into, oa.attention_varlen_backward(*call, **options), strict=True):
            assert torch.equal(t, gradient)


def test_stream() -> None:
    problem = make(seqlen_q=300, head_dim=64)
    x = problem.arrays
    o, lse = oa.attention(x["q"], x["k"], x["v"], return_lse=True)
    call = (x["do"], x["q"], x["k"], x["v"], o, lse)
    expected = oa.attention_backward(*call, deterministic=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    made = oa.attention_backward(*call, deterministic=True, stream=stream)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.alone  # 35 GB
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_than_2_31_elements(head_dim: int) -> None:
    """Offsets beyond 32 bits in every array: the last of many packed sequences."""
    length, heads = 4096, 2048 // head_dim
    count = 2**31 // (length * 2048) + 3
    rows = length * count
    assert (rows - length) * heads * head_dim > 2**31
    q, k = (torch.zeros(rows, heads, head_dim, device="cuda", dtype=torch.float16) for _ in range(2))
    last = slice(rows - length, rows)
    for t in (q, k):
        t[last].normal_()
    v, do = k, q  # of their own they would take 9 GB more, at the same offsets
    cu = torch.arange(0, rows + 1, length, device="cuda", dtype=torch.int32)
    packed: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": length, "max_seqlen_k": length}
    o, lse = oa.attention_varlen(q, k, v, causal=True, return_lse=True, **packed)
    whole = oa.attention_varlen_backward(do, q, k, v, o, lse, causal=True, deterministic=True, **packed)
    call = (t[None, last].contiguous() for t in (do, q, k, v, o))
    want = oa.attention_backward(*call, lse[None, :, last].contiguous(), causal=True, deterministic=True)
    for made, one in zip(whole, want, strict=True):
        assert (made[last].double() - one[0].double()).abs().max() <= 2e-3 * one.abs().max()
        assert not made[:length].any()
    del whole
    dq, _, _ = oa.attention_varlen_backward(do, q, k, v, o, lse, causal=True, **packed)
    assert (dq[last].double() - want[0][0].double()).abs().max() <= 2e-3 * want[0].abs().max()
    assert not dq[:length].any()


# torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_autograd(dtype: str, packed: bool) -> None:
    """o and LSE, by q, k, v, sinks and mask; the incoming gradients are what autograd makes of the problem's."""
    sizes: dict[str, Any] = {"lengths": ([100, 0, 50], [90, 20, 93])} if packed else {"seqlen_q": 150, "seqlen_k": 203}
    mask = mask_of("float", (3 if packed else 1, 4, 100 if packed else 150, 1))
    problem = make(
        heads_q=4, heads_kv=2, head_dim=64, dtype=dtype, causal=True, dlse=True, sinks=[0.0, 1.0, -1.0, 0.5], mask=mask,
        **sizes,
    )  # fmt: skip
    x = problem.arrays
    leaves = {name: x[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks", "mask")}
    options = {**problem.forward_options, "sinks": leaves["sinks"], "mask": leaves["mask"]}
    function = oa.attention_varlen if packed else oa.attention
    o, lse = function(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **options)
    torch.autograd.backward([o, lse], [x["do"], x["dlse"]])
    exact, plain = naive(problem, torch.float64), naive(problem, x["q"].dtype)
    for name, leaf in leaves.items():
        compare(
            f"d{name}",
            leaf.grad,
            exact[f"d{name}"],
            plain[f"d{name}"],
            dtype,
            f"d{name}",
            2.0,
            slack_of(problem, f"d{name}"),
        )


def test_autograd_of_a_sum_and_of_a_transposed_result() -> None:
    """Incoming gradients with strides of 0, and transposed ones."""
    problem = make(batch=2, heads_q=4, head_dim=128)
    q, k, v = (problem.arrays[name].clone().requires_grad_() for name in ("q", "k", "v"))
    weights = torch.randn(2, 4, 128, 130, device=q.device, dtype=q.dtype)
    for form, do in (
        (lambda o: o.sum(), torch.ones_like(q)),
        (lambda o: (o.permute(0, 2, 3, 1) * weights).sum(), weights.permute(0, 3, 1, 2)),
    ):
        made = torch.autograd.grad(form(oa.attention(q, k, v, deterministic=True)), (q, k, v))
        o, lse = oa.attention(*(x.detach() for x in (q, k, v)), return_lse=True)
        with torch.no_grad():
            expected = oa.attention_backward(do.contiguous(), q, k, v, o, lse, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_device_of_these_tests() -> None:
    assert backward_cases.DEVICE == "cuda"
