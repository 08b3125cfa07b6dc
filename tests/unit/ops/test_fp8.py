"""e4m3 for Q, K, P and V on the CPU: arrays with factors, ``precision="fp8"``, rotation, and what raises."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import testing
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from omniattn.plan.attention import plan_attention
from omniattn.problems import Descale, Descales, Target
from omniattn.reference import e4m3_arrays
from omniattn.reference.dequantize import dequantize_qk
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.reference.rotation import negative_channels, rotate, rotate_back

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.frameworks
E4M3 = ml_dtypes.float8_e4m3fn


def drawn(rows_q: int = 150, rows_k: int = 300, head_dim: int = 64, seed: int = 0) -> list[Any]:
    return testing.make_qkv(
        batch=2, seqlen_q=rows_q, seqlen_k=rows_k, heads_q=4, heads_kv=2, head_dim=head_dim, seed=seed
    )


def e4m3(*arrays: Any) -> list[Any]:
    return [encode_e4m3(np.asarray(x, dtype=np.float32)).view(E4M3) for x in arrays]


def factors(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.uniform(0.5, 2.0, shape).astype(np.float32)


def expanded(factor: Any, rows: int, heads: int) -> Any:
    """A factor for every row: (batch, rows, heads, 1)."""
    if factor is None or factor.size == 1:
        return np.float32(1 if factor is None else factor.reshape(()))
    if factor.ndim == 2:
        return factor.repeat(heads // factor.shape[1], axis=1)[:, None, :, None]
    return factor.repeat(128, axis=2)[:, :, :rows].swapaxes(1, 2)[..., None]


# --- Arrays in e4m3 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 10)}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("kind", ["none", "scalar", "one", "per_head", "per_block"])
def test_factors_are_those_of_the_values(kind: str, options: dict[str, Any]) -> None:
    q, k, v = drawn()
    rng = np.random.default_rng(1)
    shapes: dict[str, list[Any]] = {
        "none": [None] * 3, "scalar": [()] * 3, "one": [(1,)] * 3, "per_head": [(2, 2)] * 3,
        "per_block": [(2, 4, 2), (2, 2, 3), (2, 2)],
    }  # fmt: skip
    given = [None if shape is None else np.asarray(factors(rng, shape)) for shape in shapes[kind]]
    low = e4m3(q, k, v)
    named = dict(zip(("descale_q", "descale_k", "descale_v"), given, strict=True))
    o, lse = oa.attention(*low, **named, out_dtype="float16", return_lse=True, **options)
    whole = [
        decode_e4m3(x.view(np.uint8)) * expanded(factor, x.shape[1], x.shape[2])
        for x, factor in zip(low, given, strict=True)
    ]
    want, want_lse = oa.attention(*whole, return_lse=True, **options)
    assert (o.dtype, o.shape, lse.dtype) == (np.float16, q.shape, np.float32)
    # P is rounded to four significant bits, and its errors average out over the keys.
    assert np.abs(o.astype(np.float32) - want).max() <= 0.05 * np.abs(want).max()
    assert np.abs(lse - want_lse).max() <= 1e-5


def test_default_and_named_types() -> None:
    low = e4m3(*drawn())
    first = oa.attention(*low)
    assert first.dtype == ml_dtypes.bfloat16
    for named in ("bfloat16", ml_dtypes.bfloat16):
        again = oa.attention(*low, precision="fp8", out_dtype=named)
        assert np.array_equal(again.view(np.uint16), first.view(np.uint16))
    assert oa.attention(*low, out_dtype=np.float16).dtype == np.float16
    q, k, v = drawn()
    assert oa.attention(q, k, v, out_dtype=np.float32).dtype == np.float32
    out = np.empty(q.shape, dtype=np.float16)
    assert oa.attention(*low, out_dtype="float16", out=out) is out


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_sequences_are_the_single_ones(layout: str) -> None:
    of_q, of_k = [140, 1, 0, 57], [130, 300, 5, 0]
    starts = [np.array([0, *np.cumsum(x)], dtype=np.int32) for x in (of_q, of_k)]
    rng = np.random.default_rng(2)
    q, k, v = e4m3(*(rng.standard_normal((sum(n), h, 64)) for n, h in ((of_q, 4), (of_k, 2), (of_k, 2))))
    dq, dk, dv = factors(rng, (4, 4, 2)), factors(rng, (4, 2, 3)), factors(rng, (4, 2))
    given = [x.swapaxes(0, 1).copy() if layout == "HND" else x for x in (q, k, v)]
    o, lse = oa.attention_varlen(
        *given, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=140, max_seqlen_k=300, layout=layout,
        descale_q=dq, descale_k=dk, descale_v=dv, causal=True, return_lse=True,
    )  # fmt: skip
    o = (o.swapaxes(0, 1) if layout == "HND" else o).astype(np.float32)
    for b in range(4):
        rows, keys = (slice(s[b], s[b + 1]) for s in starts)
        blocks = [-(-n // 128) for n in (of_q[b], of_k[b])]
        one, one_lse = oa.attention(
            q[None, rows], k[None, keys], v[None, keys], causal=True, return_lse=True,
            descale_q=dq[b : b + 1, :, : blocks[0]], descale_k=dk[b : b + 1, :, : blocks[1]],
            descale_v=dv[b : b + 1],
        )  # fmt: skip
        assert np.array_equal(o[rows], one[0].astype(np.float32))
        assert np.array_equal(lse[:, rows], one_lse[0])


def test_arrays_of_quantize_qk_give_its_scores() -> None:
    q, k, v = drawn()
    qk = oa.quantize_qk(q, k, dtype="float8_e4m3", hadamard=False)
    values = encode_e4m3(v.astype(np.float32))
    heads_last = [x.view(E4M3).swapaxes(1, 2) for x in (qk.q_int, qk.k_int)]
    o, lse = oa.attention(
        *heads_last, values.view(E4M3), descale_q=qk.q_scale, descale_k=qk.k_scale, causal=True, return_lse=True
    )
    got, got_lse = oa.attention(qk.q, qk.k, oa.quantize_v(v), causal=True, return_lse=True)
    assert np.array_equal(lse, got_lse)
    # V with one scale a channel loses less than V without any.
    assert np.abs(o.astype(np.float32) - got).max() <= 0.2


def test_a_head_dim_of_v_sinks_and_masks() -> None:
    q, k, v = drawn()
    low = e4m3(q, k, v[..., :40])
    sinks, mask = np.array([0.5, 2.0, -1.0, 30.0], np.float32), np.random.default_rng(3).random((2, 1, 150, 300)) < 0.6
    o, lse = oa.attention(*low, sinks=sinks, mask=mask, return_lse=True, out_dtype="float16")
    whole = [decode_e4m3(x.view(np.uint8)) for x in low]
    want, want_lse = oa.attention(*whole, sinks=sinks, mask=mask, return_lse=True)
    assert o.shape == (2, 150, 4, 40)
    assert np.abs(o - want).max() <= 0.05
    assert np.abs(lse - want_lse).max() <= 1e-5


def test_not_a_number_stays_with_who_sees_it() -> None:
    q, k, v = drawn(150, 150)
    q[0, 3, 0, 5] = k[1, 100, 0, 7] = np.nan
    low = e4m3(q, k, v)
    o, lse = oa.attention(*low, causal=True, return_lse=True)
    bad = np.isnan(o.astype(np.float32))
    expected = np.zeros(bad.shape, dtype=bool)
    expected[0, 3, 0] = True
    expected[1, 100:, :2] = True  # the query heads of kv head 0
    assert np.array_equal(bad, expected)
    assert np.array_equal(np.isnan(lse), expected[..., 0].swapaxes(1, 2))


@pytest.mark.parametrize(
    ("change", "error", "argument", "words"),
    [
        ({"precision": "int8"}, ArgumentError, "precision", ["'fp8' or nothing", "'int8'"]),
        ({"precision": oa.Fp8()}, ArgumentError, "precision", ["'fp8' or nothing", "Fp8("]),
        ({"out_dtype": "float32"}, ArgumentError, "out_dtype", ["'float16' or 'bfloat16'", "'float32'"]),
        ({"out_dtype": object()}, ArgumentError, "out_dtype", ["'float16' or 'bfloat16'", "object"]),
        ({"descale_q": np.ones((2, 4), np.float32)}, ShapeError, "descale_q", ["(2, 2)", "(2, 4, 2)", "(2, 4)"]),
        ({"descale_k": np.ones((2, 4, 3), np.float32)}, ShapeError, "descale_k", ["(2, 2, 3)", "(2, 4, 3)"]),
        ({"descale_v": np.ones(3, np.float32)}, ShapeError, "descale_v", ["shape ()", "(3,)"]),
        ({"descale_v": np.ones((2, 4, 3), np.float32)}, ShapeError, "descale_v", ["(2, 2, 3)", "(2, 4, 3)"]),
        ({"descale_k": np.ones(1)}, DtypeError, "descale_k", ["float32", "float64"]),
        ({"descale_k": "0.5"}, ArgumentError, "descale_k", ["an array", "str"]),
        ({"sinks": np.ones(4, np.float16)}, DtypeError, "sinks", ["bfloat16", "float16"]),
    ],
)
def test_what_does_not_go_with_e4m3(
    change: dict[str, Any], error: type[ArgumentError], argument: str, words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        oa.attention(*e4m3(*drawn()), **change)
    assert caught.value.argument == argument
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("value", "received"),
    [(1.0, "the float 1.0"), (2, "the int 2"), (np.float32(0.5), "the float32 0.5"), (np.ones(1, "f4"), "ndarray")],
)
def test_a_factor_where_none_goes_is_named_as_it_came(value: Any, received: str) -> None:
    """A number is told as one, although an array is made of it for those that take it."""
    q, k, v = drawn()
    qk, low = oa.quantize_qk(q, k), e4m3(q, k, v)
    for call in (
        lambda: oa.attention(qk.q, qk.k, oa.quantize_v(v), descale_q=value),
        lambda: oa.attention(q, qk.k, v, descale_q=value),
        lambda: oa.attention(q, k, v, descale_q=value),
        lambda: oa.attention(*low, descale_q=value, block_mask=np.ones((1, 1, 2, 3), dtype=bool)),
    ):
        with pytest.raises(ArgumentError, match="'descale_q': expected None, because") as caught:
            call()
        assert caught.value.received == received


def test_other_arrays_take_no_factors() -> None:
    q, k, v = drawn()
    one = np.ones((), np.float32)
    with pytest.raises(ArgumentError, match=r"descale_k.*None, because q is float32"):
        oa.attention(q, k, v, descale_k=one)
    with pytest.raises(ArgumentError, match=r"out_dtype.*'float32', like q.*'bfloat16'"):
        oa.attention(q, k, v, out_dtype="bfloat16")
    qk = oa.quantize_qk(q, k)
    with pytest.raises(ArgumentError, match=r"descale_q.*quantized operands bring their scales"):
        oa.attention(qk.q, qk.k, oa.quantize_v(v), descale_q=one)
    with pytest.raises(ArgumentError, match=r"out_dtype.*'float32'"):
        oa.attention(qk.q, qk.k, oa.quantize_v(v), out_dtype="float16")
    with pytest.raises(ArgumentError, match=r"descale_v.*score_mod, block_mask and dropout"):
        oa.attention(*e4m3(q, k, v), descale_v=one, block_mask=np.ones((1, 1, 2, 3), dtype=bool))
    with pytest.raises(UnsupportedError, match="block_mask with precision='fp8'"):
        oa.attention(*e4m3(q, k, v), block_mask=np.ones((1, 1, 2, 3), dtype=bool))
    with pytest.raises(DtypeError, match=r"k.*float8_e4m3fn, like q.*float32"):
        oa.attention(*e4m3(q), k, v)
    with pytest.raises(DtypeError, match=r"v.*float8_e5m2.*mantissa"):
        oa.attention(*e4m3(q, k), v.astype(ml_dtypes.float8_e5m2))
    for function in (oa.quantize_qk, lambda q, k: oa.attention_backward(q, q, k, k, q, np.zeros((2, 4, 150), "f4"))):
        with pytest.raises(DtypeError, match="float8_e4m3fn"):
            function(*e4m3(q, k))


def test_the_reference_checks_its_factors() -> None:
    codes = [encode_e4m3(x.astype(np.float32)) for x in drawn()]
    with pytest.raises(ShapeError, match=r"descale_q.*\(2, 4, blocks\).*\(3,\)"):
        e4m3_arrays.attention(*codes, descale_q=np.ones(3))


# --- What a GPU is told ----------------------------------------------------------------------------------------------


def problem_of(*arrays: Any, **options: Any) -> Any:
    return oa.explain(*arrays, **options).problem


def test_factors_of_a_problem() -> None:
    low = e4m3(*drawn())
    dq = np.ones((2, 4, 2), np.float32)
    dk = np.ones((2, 2), np.float32)
    problem = problem_of(*low, descale_q=dq, descale_k=dk, descale_v=np.ones(1, np.float32))
    assert problem.descales == Descales(
        Descale("per_block", (8, 2, 1)), Descale("per_head", (2, 1, 0)), Descale("scalar")
    )
    assert (problem.dtype, problem.input_dtype, problem.precision.name) == ("bfloat16", "float8_e4m3fn", "fp8")
    rows, keys = 2 * 150 * 4 * 64, 2 * 300 * 2 * 64
    assert problem.min_bytes == rows + 2 * keys + 2 * rows + 4 * 2 * 150 * 4
    assert problem_of(*low).descales == Descales()


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (7, 5)])
def test_gpus_without_products_of_e4m3_say_what_works(cc: tuple[int, int]) -> None:
    target = Target(cc, 160 << 10, 100)
    for problem, word in (
        (problem_of(*e4m3(*drawn())), "precision='exact'"),
        (dataclasses.replace(problem_of(*drawn(), precision="fp8"), dtype="float16"), "precision='int8'"),
    ):
        with pytest.raises(UnsupportedError, match="fp8") as caught:
            plan_attention(problem, target, None)
        assert word in str(caught.value)


@pytest.mark.parametrize("knobs", [oa.Int8, oa.Int4, oa.Fp8])
def test_exact_below_min_seqlen(knobs: Any) -> None:
    q, k, v = drawn()
    assert np.array_equal(oa.attention(q, k, v, precision=knobs(min_seqlen=301)), oa.attention(q, k, v))
    low = oa.attention(q, k, v, precision=knobs())
    assert np.array_equal(oa.attention(q, k, v, precision=knobs(min_seqlen=300)), low)
    assert not np.array_equal(low, oa.attention(q, k, v))
    said = oa.explain(q, k, v, precision=knobs(min_seqlen=301))
    assert said.why[0] == f"exact in place of {knobs.qk}: 300 keys are fewer than min_seqlen=301"
    assert (
        oa.explain(q, k, v, precision=knobs(min_seqlen=300)).problem == oa.explain(q, k, v, precision=knobs()).problem
    )
    starts = np.array([0, 150], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 150, "max_seqlen_k": 150}
    said = oa.explain(q[0], k[0, :150], v[0, :150], precision=knobs(min_seqlen=151), **packed)
    assert "150 keys are fewer" in said.why[0]


# --- Rotation --------------------------------------------------------------------------------------------------------


def hash_of(channel: int, seed: int) -> int:
    h = (channel + seed * 0x9E3779B9) % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_signs(seed: int) -> None:
    got = negative_channels(256, seed)
    assert got.tolist() == [hash_of(c, seed) % 2 == 1 for c in range(256)]
    assert 90 < got.sum() < 166


@pytest.mark.parametrize(("channels", "block"), [(64, 64), (96, 32), (128, 128), (160, 32), (192, 64), (256, 256)])
def test_rotation_keeps_products(channels: int, block: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 50, channels)).astype(np.float32)
    a, b = rotate(x, block, 3), rotate(y, block, 3)
    assert np.abs(a @ b.T - x @ y.T).max() <= 1e-4
    assert np.abs(rotate_back(a, block, 3) - x).max() <= 2e-6
    matrix = rotate(np.eye(channels, dtype=np.float32), block, 3)
    assert np.allclose(np.abs(matrix[matrix != 0]), block**-0.5)
    assert ((matrix != 0).sum(axis=1) == block).all()
    assert oa.quantize_qk(x[None, :, None], y[None, :, None], hadamard=True).problem.rotated_channels == block


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3"])
def test_rotated_operands_are_those_of_the_inputs(dtype: str, head_dim: int) -> None:
    q, k, _ = drawn(head_dim=head_dim)
    qk = oa.quantize_qk(q, k, dtype=dtype, hadamard=True, seed=9)
    got = dequantize_qk(qk)
    worst = {"int8": 0.012, "int4": 0.22, "float8_e4m3": 0.03}[dtype]
    for x, y in zip(got, (q, k), strict=True):
        error = np.sqrt(((x - y.swapaxes(1, 2)) ** 2).mean())
        assert error <= worst
    other = oa.quantize_qk(q, k, dtype=dtype, hadamard=True, seed=10)
    assert not np.array_equal(other.q_int, qk.q_int)
    with pytest.raises(ArgumentError, match=r"seed 9.*10"):
        oa.attention(qk.q, other.k, oa.quantize_v(q[:, :, :2]))


def test_bytes_and_scales_of_e4m3() -> None:
    q, k, _ = drawn(rows_q=130, rows_k=257)
    q[0, 5, 1, 2], k[1, 200, 1, 0] = np.inf, np.nan
    q[1, 0:128, 3] = 0
    qk = oa.quantize_qk(q, k, dtype="float8_e4m3", hadamard=False)
    assert (qk.q_int.dtype, qk.q_int.shape, qk.q_scale.shape) == (np.uint8, (2, 4, 130, 64), (2, 4, 2))
    assert (qk.k_scale.shape, qk.row_bias, qk.k_mean) == ((2, 2, 3), None, None)
    rows = q.swapaxes(1, 2)
    bad = ~np.isfinite(rows).all(axis=-1)
    amax = np.where(bad, 0, np.abs(rows).max(axis=-1))
    for b, h, block in np.ndindex(2, 4, 2):
        most = np.float32(amax[b, h, 128 * block : 128 * (block + 1)].max())
        assert qk.q_scale[b, h, block] == (most / np.float32(448) if most else 1)
    scale = qk.q_scale.repeat(128, axis=2)[:, :, :130, None]
    codes = encode_e4m3(rows * (np.float32(1) / scale))
    assert np.array_equal(qk.q_int, np.where(bad[..., None], 0x7F, codes))
    assert (qk.k_int[1, 1, 200] == 0x7F).all()
    assert bad.sum() == 1
    assert np.isfinite(qk.k_scale).all()
    full = oa.quantize_qk(q, k, dtype="float8_e4m3", smooth_k=True, with_bias=True)
    assert full.row_bias.shape == (2, 4, 130)
    assert np.isnan(full.row_bias[0, 1, 5])
