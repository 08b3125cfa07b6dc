"""Heads of more than 256 channels: what takes them, and what says that it does not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from omniattn import arguments
from omniattn.errors import ShapeError, UnsupportedError
from omniattn.kv import formats
from omniattn.problems import Target
from omniattn.registry import GPUS, REGISTRY, decode
from omniattn.select import select_backward, select_dq
from omniattn.select.choose import ranked
from tests.unit.select import every_call

#: SMs of a GPU of each compute capability, and the shared memory of a CTA.
TARGETS = {cc: Target(cc, smem, 132) for gpus in GPUS.values() for cc, smem in gpus.items()}


def qkv(*dims: int, dtype: Any = np.float16) -> list[Any]:
    rng = np.random.default_rng(sum(dims))
    return [rng.standard_normal((1, 5, 2, dim), np.float32).astype(dtype) for dim in dims]


def test_limits_are_the_same_everywhere() -> None:
    assert formats.ROW_DIMS == decode.ROW_DIMS
    assert max(formats.ROW_DIMS) == arguments.MAX_HEAD_DIM
    assert arguments.MAX_QUANTIZED_HEAD_DIM == formats.MAX_QUANTIZED_DIM == decode.MAX_QUANTIZED_DIM
    assert max(row.head_dim for row in REGISTRY if row.op == "attention") == arguments.MAX_HEAD_DIM
    assert max(row.head_dim for row in REGISTRY if row.quantized) == arguments.MAX_QUANTIZED_HEAD_DIM


@pytest.mark.parametrize("dims", [(264, 264, 264), (512, 512, 64), (64, 64, 504)], ids=str)
def test_the_reference_takes_them(dims: tuple[int, int, int]) -> None:
    q, k, v = qkv(*dims, dtype=np.float64)
    o = oa.attention(q, k, v, causal=True)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * dims[0] ** -0.5
    scores[..., np.triu_indices(5, 1)[0], np.triu_indices(5, 1)[1]] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(o, wanted, atol=1e-12)


@pytest.mark.parametrize("dims", [(264, 264, 264), (320, 320, 512)], ids=str)
def test_the_reference_has_their_gradients(dims: tuple[int, int, int]) -> None:
    """Along one direction, by a difference."""
    operands = qkv(*dims, dtype=np.float64)
    o, lse = oa.attention(*operands, causal=True, return_lse=True)
    rng = np.random.default_rng(1)
    do = rng.standard_normal(o.shape)
    gradients = oa.attention_backward(do, *operands, o, lse, causal=True)
    steps = [1e-6 * rng.standard_normal(x.shape) for x in operands]
    up, down = (
        (oa.attention(*(x + sign * step for x, step in zip(operands, steps, strict=True)), causal=True) * do).sum()
        for sign in (1.0, -1.0)
    )
    slope = sum((gradient * step).sum() for gradient, step in zip(gradients, steps, strict=True))
    assert abs(up - down - 2 * slope) <= 1e-6 * abs(slope)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", oa.Int8(smooth_q=True)], ids=str)
@pytest.mark.parametrize("dims", [(264, 264, 264), (64, 64, 264), (512, 512, 64)], ids=str)
def test_low_precision_says_what_it_takes(dims: tuple[int, int, int], precision: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim of (264|512)\. What works: head_dim up to 256"):
        oa.attention(*qkv(*dims), precision=precision)


def test_arrays_in_8_bits_say_so() -> None:
    with pytest.raises(UnsupportedError, match="e4m3 arrays with a head_dim of 320"):
        oa.attention(*qkv(320, 320, 320, dtype=ml_dtypes.float8_e4m3fn))


def test_quantizers_say_so() -> None:
    q, k, v = qkv(264, 264, 264)
    with pytest.raises(UnsupportedError, match="dtype='int8' with a head_dim of 264"):
        oa.quantize_qk(q, k)
    with pytest.raises(UnsupportedError, match="head_dim of 264"):
        oa.quantize_v(v)


def test_a_short_sequence_is_exact() -> None:
    """`min_seqlen` decides before the width does."""
    q, k, v = qkv(512, 512, 512)
    np.testing.assert_array_equal(oa.attention(q, k, v, precision=oa.Int8(min_seqlen=6)), oa.attention(q, k, v))


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_quantized_caches_say_so(dtype: str) -> None:
    like = np.zeros(1, np.float16)
    for options in ({"k_dtype": dtype}, {"k_dtype": "fp16", "v_dtype": dtype}):
        with pytest.raises(UnsupportedError, match=f"_dtype='{dtype}' with head_dim=264.*up to 256"):
            oa.KVCache(1, 16, 1, 264, like=like, **options)
    with pytest.raises(ShapeError, match="from 16 to 256"):
        oa.KVCache.from_arrays(*(np.zeros((1, 16, 1, 272), np.int8) for _ in "kv"))


@pytest.mark.parametrize("dims", [(520, 520), (576, 512)], ids=str)
def test_wider_ones_raise_by_name(dims: tuple[int, int]) -> None:
    q, k, v = qkv(dims[0], dims[0], dims[1])
    with pytest.raises(ShapeError, match=f"'q': expected head_dim a multiple of 8 from 8 to 512, received {dims[0]}"):
        oa.attention(q, k, v)
    o, lse = np.zeros((1, 5, 2, dims[1]), np.float16), np.zeros((1, 2, 5), np.float32)
    with pytest.raises(ShapeError, match=f"'q': .*received {dims[0]}"):
        oa.attention_backward(o, q, k, v, o, lse)


@pytest.mark.parametrize("cc", TARGETS, ids=str)
def test_every_gpu_has_kernels(cc: tuple[int, int]) -> None:
    """Forward with every option, gradients with every option, in tiles that fit."""
    target = TARGETS[cc]
    for width in ((264, 0), (320, 448), (512, 0), (64, 512)):
        for varlen in (False, True):
            for option in ({}, {"softcap": 30.0}, {"mask": "bool"}, {"mask": "io"}):
                call = every_call.call(every_call.MIDDLE, width, varlen=varlen, **option)
                assert ranked(call, target)[0][1].row.smem_bytes <= target.max_smem
    for option in ({}, {"softcap": 30.0}, {"mask": "io"}):
        call = every_call.gradients(every_call.call(every_call.MIDDLE, (512, 0), **option), ("dq", "dk", "dv"), False)
        assert select_backward(call, target).spec.family == "attn_bwd_wide_sm80"
        assert select_dq(call, target).spec.family == "attn_bwd_dq_sm80"
    masked = every_call.call(every_call.MIDDLE, (512, 0), mask="float32")
    assert select_backward(every_call.gradients(masked, ("dq", "dk", "dv", "dmask"), False), target).spec.dmask
