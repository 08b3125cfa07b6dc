"""What a call writes: torch counts it as changed, and it shares no element with what kernels read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = (2, 64, 4, 64)


def _randoms(count: int, *shape: int) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(5)
    return [torch.randn(shape or SHAPE, device="cuda", generator=generator).bfloat16() for _ in range(count)]


def _counts(call: Callable[[], Any], *written: Any) -> None:
    """By the engine, by the fast path, and where it is installed by the C module."""
    for _ in range(4):
        before = [x._version for x in written]
        call()
        assert all(x._version > n for x, n in zip(written, before, strict=True))


def test_what_is_written_counts_as_changed() -> None:
    q, k, v, out, do, *gradients = _randoms(8)
    o, lse = oa.attention(q, k, v, return_lse=True)
    _counts(lambda: oa.attention(q, k, v, out=out), out)
    _counts(lambda: oa.attention(q, k, v, out=out, precision="int8"), out)
    _counts(lambda: oa.merge_states(q, lse, k, lse, out=out), out)
    dq, dk, dv = gradients
    _counts(lambda: oa.attention_backward(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv), *gradients)
    cache = oa.PagedKVCache(8, 16, 4, 64, like=q, k_dtype="int8")
    lens = torch.tensor([64, 64], dtype=torch.int32, device="cuda")
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    planes = [cache.k, cache.v, cache.k_params, cache.v_params]
    _counts(lambda: oa.append(cache, k, v, seq_lens=lens, block_table=table), *planes)
    _counts(lambda: oa.copy_blocks(cache, [(0, 1)]), *planes)
    _counts(lambda: oa.decode(q[:, :1], cache, seq_lens=lens, block_table=table, out=out[:, :1]), out)
    assert [x._version for x in (q, k, v, do, o, lse, lens, table)] == [0] * 8
    x = q.clone().requires_grad_()
    y = x.exp()
    oa.attention(q, k, v, out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    leaf = q.clone().requires_grad_()
    o = oa.attention(leaf, k, v)
    oa.attention(q, k, v, out=o.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_parts_of_one_buffer_are_written_side_by_side() -> None:
    q, k, v, do = _randoms(4)
    o, lse = oa.attention(q, k, v, return_lse=True)
    expected = oa.attention_backward(do, q, k, v, o, lse, deterministic=True)
    for dim in (2, 3):
        packed = torch.full((*SHAPE[:dim], 3, *SHAPE[dim:]), torch.nan, device="cuda", dtype=q.dtype)
        dq, dk, dv = packed.unbind(dim)
        for _ in range(4):
            packed.fill_(torch.nan)
            oa.attention_backward(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, deterministic=True)
            for x, y in zip((dq, dk, dv), expected, strict=True):
                torch.testing.assert_close(x, y)
    qkv = torch.stack([q, k, v], dim=2)
    out = torch.full_like(qkv, torch.nan)
    for _ in range(4):
        torch.testing.assert_close(oa.attention(*qkv.unbind(2), out=out[:, :, 1]), o)
        assert out[:, :, ::2].isnan().all()
    for _ in range(4):  # q itself, a part of the buffer that k and v are parts of
        whole = qkv.clone()
        torch.testing.assert_close(oa.attention(*whole.unbind(2), out=whole[:, :, 0]), o)
        assert torch.equal(whole[:, :, 1:], qkv[:, :, 1:])


def test_overlaps_are_refused_at_every_call() -> None:
    q, k, v, do, out = _randoms(5)
    (wide,) = _randoms(1, 2, 128, 4, 64)
    _, lse = oa.attention(q, k, v, return_lse=True)
    parts = [wide[:, :64], wide[:, 64:]]
    for _ in range(3):  # what has these strides is known
        oa.attention(parts[0], k, v, out=parts[1])
        oa.attention_backward(do, q, k, v, out, lse, dq=parts[0], dk=parts[1])
    cache = oa.KVCache(2, 64, 4, 64, like=q)
    lens = torch.tensor([64, 64], dtype=torch.int32, device="cuda")
    for _ in range(3):
        oa.append(cache, k, v, seq_lens=lens)
    torch.cuda.synchronize()
    kept = wide.clone()
    for _ in range(2):
        for call in (
            lambda: oa.attention(parts[0], k, v, out=wide[:, 32:96]),
            lambda: oa.attention(q, parts[0], v, out=wide[:, 63:127]),
            lambda: oa.attention(q, k, v, out=k),
            lambda: oa.attention_backward(do, q, k, v, out, lse, dq=parts[0], dk=wide[:, 2:66]),
            lambda: oa.attention_backward(do, q, k, parts[0], out, lse, dq=wide[:, 2:66]),
            lambda: oa.append(cache, cache.k.transpose(1, 2), v, seq_lens=lens),
            lambda: oa.decode(q[:, :1], cache, seq_lens=lens, out=cache.v.transpose(1, 2)[:, :1]),
        ):
            with pytest.raises(ArgumentError, match="shares memory"):
                call()
    assert torch.equal(wide, kept)


def test_inference_tensors_are_written_in_inference_mode() -> None:
    q, k, v = _randoms(3)
    with torch.inference_mode():
        frozen = torch.empty_like(q)
        for _ in range(4):
            oa.attention(q, k, v, out=frozen)
        assert torch.equal(frozen, oa.attention(q, k, v))
        frozen.fill_(7)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="an inference tensor outside inference mode"):
            oa.attention(q, k, v, out=frozen)
    assert (frozen == 7).all()
