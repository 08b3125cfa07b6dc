"""Repeated calls on a GPU take the fast path, give the same bits, and refuse what first calls refuse."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import arrays, testing  # noqa: E402
from tests.repeated_calls import plain_calls  # noqa: E402

from .attention_cases import to_gpu  # noqa: E402
from .kernel_cases import poisoned_outputs  # noqa: E402

pytestmark = pytest.mark.gpu


def _qkv(dtype: str = "bfloat16", **options: Any) -> list[Any]:
    return [to_gpu(x, dtype) for x in testing.make_qkv(seqlen_q=70, heads_q=4, dtype=dtype, **options)]


@pytest.mark.parametrize(
    "name",
    [
        "plain", "lse", "HND", "mask and sinks", "out and stream", "varlen", "int8", "int4 into out", "int8 varlen",
        "operands", "quantize_qk", "quantize_v", "append and decode", "append and decode, paged", "decode into out",
        "decode, prefix", "attention_sparse into out", "decode, lists", "with cache, tokens",
        "with cache, packed", "with cache, batch", "merge", "merge into out", "index_logits", "top_k",
    ],
)  # fmt: skip
def test_the_fast_path_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = plain_calls("cuda", torch.cuda.current_stream().cuda_stream)[name]

    def copies() -> list[Any]:
        with poisoned_outputs():
            got = call()
        return [x.clone() for x in (got if isinstance(got, tuple) else (got,))]

    # The first torch tensor of a process puts torch's `torch_facts` in; the second call of a kind is seen by it first.
    for _ in range(2):
        copies()
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "torch_facts", lambda objects: None)
        expected = copies()

    def fail(*args: Any) -> None:
        raise AssertionError("a repeated call did not take the fast path")

    monkeypatch.setattr(arrays, "describe", fail)
    for _ in range(2):
        got = copies()
        assert len(got) == len(expected)
        for x, y in zip(got, expected, strict=True):
            assert not (y.is_floating_point() and y.isnan().any())
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
            assert torch.equal(x, y)


def test_repeated_calls_still_refuse() -> None:
    q, k, v = _qkv()
    out = torch.empty_like(q)
    wide = torch.empty(q.numel() + 8, device="cuda", dtype=q.dtype)
    shifted = wide[1 : q.numel() + 1].view(q.shape)
    with torch.inference_mode():
        frozen = torch.empty_like(q)
    for _ in range(2):
        oa.attention(q, k, v)
        oa.attention(q, k, v, out=out)
    for bad in ((shifted, k, v), (q, shifted, v), (q, k, shifted)):
        with pytest.raises(oa.errors.AlignmentError):
            oa.attention(*bad)
    for bad_out in (shifted, k, v, frozen):
        with pytest.raises(oa.errors.ArgumentError, match="'out'"):
            oa.attention(q, k, v, out=bad_out)
    assert oa.attention(q.detach().requires_grad_(), k, v).requires_grad
    oa.quantize_v(v)
    with pytest.raises(oa.errors.UnsupportedError, match="gradient"):
        oa.quantize_v(v.detach().requires_grad_())
    with pytest.raises(oa.errors.ArgumentError, match="causal"):
        oa.attention(q, k, v, causal=0)
    lse = torch.zeros(q.shape[0], 4, 70, device="cuda")
    for _ in range(2):
        oa.merge_states(q, lse, q, lse)
    with pytest.raises(oa.errors.AlignmentError):
        oa.merge_states(shifted, lse, q, lse)
    with pytest.raises(oa.errors.ArgumentError, match="'out'"):
        oa.merge_states(q, lse, q, lse, out=frozen)


def test_another_stream_waits_for_the_current_one() -> None:
    q, k, v = _qkv()
    expected = oa.attention(q, k, v)
    oa.attention(q, k, v)
    side = torch.cuda.Stream()
    source = q.clone()
    q.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    q.copy_(source)
    o = oa.attention(q, k, v, stream=side)
    side.synchronize()
    assert torch.equal(o, expected)
    with torch.cuda.stream(side):
        again = oa.attention(q, k, v)
    side.synchronize()
    assert torch.equal(again, expected)
