"""Attention on quantized operands in NumPy: its definition, its accuracy, and the ablation of the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import reference, testing
from omniattn.data import load_activations
from omniattn.errors import ArgumentError
from omniattn.reference import low_precision
from omniattn.reference.dequantize import dequantize_qk, dequantize_v
from omniattn.reference.e4m3 import decode_e4m3, encode_by_logarithm, encode_e4m3
from omniattn.testing import Report, compare
from tests.numerics import naive64
from tests.numerics.ablations import Inputs
from tests.numerics.committed import check
from tests.numerics.low_precision_accuracy import PRECISIONS, PUBLISHED


def exact(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return reference.attention(q, k, v, compute_dtype=np.float64, **options)[0]


def accuracy(precision: oa.Int8, q: Any, k: Any, v: Any, ref: Any, grouping: str = "sm90", **options: Any) -> Report:
    o, _ = low_precision.attention(q, k, v, precision=precision, grouping=grouping, **options)
    return compare(o, ref)


@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_accuracy_of_int8_is_the_published_one(kind: str) -> None:
    reports = []
    for seed in range(4):
        q, k, v = testing.make_qkv(kind, seqlen_q=512, seqlen_k=4096, heads_q=2, head_dim=128, seed=seed)
        reports.append(accuracy(oa.Int8(), q, k, v, exact(q, k, v)))
    cosine, l1 = PUBLISHED[kind]
    # The cosine of the mean of four draws moves by 1e-5; the L1 is given with three digits.
    assert np.mean([r.cosine for r in reports]) >= cosine - 1e-5
    assert np.mean([r.rel_l1 for r in reports]) <= l1 + 5e-4


@pytest.mark.parametrize("layer", range(4))
def test_accuracy_on_a_real_model(layer: int) -> None:
    x = load_activations()[layer]
    ref = exact(x.q, x.k, x.v, causal=True)
    eight = accuracy(oa.Int8(), x.q, x.k, x.v, ref, causal=True)
    assert eight.cosine >= 0.999
    assert eight.rel_l1 <= 0.04
    four = {
        name: accuracy(PRECISIONS[name], x.q, x.k, x.v, ref, causal=True)
        for name in ("int4, none", "int4, smooth K", "int4")
    }
    assert four["int4"].rel_l1 < four["int4, smooth K"].rel_l1 < four["int4, none"].rel_l1
    assert four["int4"].rel_l1 <= 0.21
    for name, found in {"int8": eight, **four}.items():
        check("low_precision_accuracy", "precisions", x.name, name, found.cosine, found.rel_l1)


@pytest.mark.parametrize("grouping", ["sm90", "sm80"])
def test_order_of_the_ablation_of_smoothing(grouping: str) -> None:
    """4-bit on channel-biased inputs: none < smooth K < smooth Q and K, as in SageAttention2's table."""
    q, k, v = testing.make_qkv("channel_bias", seqlen_q=1024, heads_q=4, head_dim=128)
    ref = exact(q, k, v)
    none, only_k, both = (
        accuracy(oa.Int4(smooth_k=smooth_k, smooth_q=smooth_q), q, k, v, ref, grouping)
        for smooth_k, smooth_q in ((False, False), (True, False), (True, True))
    )
    assert none.cosine < only_k.cosine < both.cosine
    assert both.rel_l1 < 0.5 * only_k.rel_l1 < 0.5 * none.rel_l1


@pytest.mark.parametrize("grouping", ["sm90", "sm80"])
def test_order_of_the_ablation_of_granularity(grouping: str) -> None:
    """4-bit on channel-biased inputs: per_block < per_thread, and per_token hardly better than per_thread."""
    q, k, v = testing.make_qkv("channel_bias", seqlen_q=1024, heads_q=4, head_dim=128)
    ref = exact(q, k, v)
    found = {
        name: accuracy(oa.Int4(granularity=name, smooth_v=False), q, k, v, ref, grouping)
        for name in ("per_tensor", "per_block", "per_thread", "per_token")
    }
    for name, report in found.items():
        label = f"as it is, {grouping}"
        check("low_precision_accuracy", "granularity", label, name, report.cosine, report.rel_l1)
    l1 = {name: report.rel_l1 for name, report in found.items()}
    assert l1["per_token"] < l1["per_thread"] < l1["per_block"] < l1["per_tensor"]
    assert l1["per_thread"] <= 1.15 * l1["per_token"]


def test_order_of_the_products_of_p_and_v() -> None:
    q, k, v = testing.make_qkv("channel_bias", seqlen_q=1024, heads_q=2, head_dim=64)
    ref = exact(q, k, v)
    l1 = {
        pv: accuracy(oa.Int8(pv=pv, smooth_v=False), q, k, v, ref).rel_l1  # as the papers have it
        for pv in ("fp8", "fp16", "exact")
    }
    assert l1["exact"] <= l1["fp16"] * 1.02
    assert l1["fp16"] < 0.5 * l1["fp8"]
    assert accuracy(oa.Int8(), q, k, v, ref).rel_l1 < 0.6 * l1["fp8"]


def test_one_level_of_accumulation_grows_with_length() -> None:
    """13-bit accumulators: an error that grows with the number of keys, and does not with a second level in fp32."""
    errors: dict[str, list[float]] = {"two_level": [], "single_level": []}
    for seqlen in (512, 8192):
        q, k, v = testing.make_qkv("mean_shift", seqlen_q=16, seqlen_k=seqlen, heads_q=2, head_dim=64)
        plain, _ = low_precision.attention(q, k, v, precision=oa.Int8())
        for name, found in errors.items():
            o, _ = low_precision.attention(q, k, v, precision=oa.Int8(), accumulator=name)
            found.append(compare(o, plain).rel_l1)
    assert errors["single_level"][1] > 4 * errors["single_level"][0]
    assert errors["two_level"][1] < 1.5 * errors["two_level"][0]
    assert errors["single_level"][1] > 20 * errors["two_level"][1]


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 11)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.array([0.5, 3.0, -1.0, 20.0], dtype=np.float32), "causal": True},
    "mask": {"mask": "bool"},
    "bias": {"mask": "float"},
    "scale": {"softmax_scale": 0.3, "causal": True},
}


def options_of(name: str, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    rng = np.random.default_rng(3)
    if options.get("mask") == "bool":
        options["mask"] = rng.random((2, 1, seqlen_q, seqlen_k)) < 0.7
        options["mask"][:, :, 5] = False
    elif options.get("mask") == "float":
        options["mask"] = rng.standard_normal((4, seqlen_q, seqlen_k)).astype(np.float32)
    return options


@pytest.mark.parametrize("precision", [oa.Int8(), oa.Int8(smooth_q=True, smooth_v=True, pv="fp16"), oa.Int4()])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_it_is_attention_of_the_dequantized_operands(name: str, precision: oa.Int8) -> None:
    """Against a plain fp64 attention of the dequantized operands: only the rounding of P is left."""
    q, k, v = testing.make_qkv("mean_shift", batch=2, seqlen_q=150, seqlen_k=200, heads_q=4, heads_kv=2, head_dim=64)
    options = options_of(name, 150, 200)
    o, lse = low_precision.attention(q, k, v, precision=precision, **options)

    qk = oa.quantize_qk(
        q, k, dtype=precision.qk, smooth_q=precision.smooth_q, smooth_k=precision.smooth_k, with_bias=True
    )
    values = oa.quantize_v(v, dtype="float16" if precision.pv == "fp16" else "float8_e4m3", smooth_v=precision.smooth_v)
    deq_q, deq_k = (x.astype(np.float64) for x in dequantize_qk(qk))
    block, group = np.arange(150) // 128, np.arange(4) // 2
    # What smoothing took away from a score is a sum of products too: more channels of q and k.
    smooth_k = (deq_k - qk.k_mean[:, :, None])[:, group]
    more_q, more_k = [deq_q, qk.row_bias[..., None]], [smooth_k, np.ones((2, 4, 200, 1))]
    if precision.smooth_q:
        more_q[0] = deq_q - qk.q_mean[:, :, block]
        more_q.append(np.broadcast_to(np.eye(2)[block], (2, 4, 150, 2)))
        more_k.append(qk.delta_s[..., :200].swapaxes(2, 3))
    deq_v = dequantize_v(values)[:, group]
    options.setdefault("softmax_scale", 64**-0.5)
    expected, expected_lse = naive64.dense(
        np.concatenate(more_q, axis=3), np.concatenate(more_k, axis=3), deq_v, layout="HND", **options
    )
    expected = expected.swapaxes(1, 2)
    bound = 2.0**-4 if precision.precision.on_cpu.pv == "fp8" else 2.0**-10
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    finite = np.isfinite(expected_lse)
    assert np.abs(lse[finite] - expected_lse[finite]).max() <= 2e-4
    assert np.abs(o - expected).max() <= bound * np.abs(v).max()
    assert compare(o, expected).rel_l1 <= bound / 2


def test_powers_of_integers_are_off_by_what_their_header_says() -> None:
    """e4m3 of logarithms: rms and mean of what they are off by, at most one step beside the nearest."""
    rng = np.random.default_rng(0)
    x = (2.0 ** rng.uniform(-5, 8.5, 100_000)).astype(np.float32)
    for linear, rms in ((False, 0.0282), (True, 0.0316)):
        codes = encode_by_logarithm(x, linear)
        off = decode_e4m3(codes) / x - 1
        assert abs(off.mean()) <= 2e-4
        assert 0.98 * rms <= np.sqrt((off.astype(np.float64) ** 2).mean()) <= rms
        assert np.abs(codes.astype(int) - encode_e4m3(x)).max() == 1
        ends = np.array([0, 2.0**-7.1, 28, 448, 1e30, np.nan], dtype=np.float32)
        assert encode_by_logarithm(ends, linear).tolist() == [0, 0, 94, 126, 127, 127]


@pytest.mark.parametrize("linear", [False, True])
def test_words_of_integer_powers_are_right_or_flagged(linear: bool) -> None:
    """kernels_cu/attention/integer_powers.cuh, its wrapping integers, over the range that it lets scores have.

    Whatever the distance from the base, P is what `encode_by_logarithm` says, or a byte that the kernel's test finds.
    """
    octave, shift = 2.0**23, 0.0054 if linear else 0.252
    for m2 in (-240.0, -3.25, 0.0, 4.8046875, 200.0, 249.0):
        most = min(244.0 + m2, 495.0 - m2)  # of c |S|
        scores = np.arange(-1_500_000, 1_500_001, 37, dtype=np.int64)
        scores = scores[np.abs(scores) * (most / 1.5e6) <= most]
        c = np.float32(most / 1.5e6)
        base = np.int64(np.rint(np.float32((7.0 + shift) - m2) * octave))
        word = (scores * np.int64(np.rint(c * octave)) + base).astype(np.int32)  # wraps
        h = (word >> 16).astype(np.int16)
        if linear:
            byte = np.clip(h, 0, 0x7FF) >> 4
        else:
            lower = np.clip((h - np.int16(35)).astype(np.int16), 0, 0x7F8).astype(np.int32)
            byte = lower * 16 + ((h.astype(np.int32) & 0x70) ^ 0x70) >> 8
        exponent = scores * np.float64(np.rint(c * octave) / octave) - m2
        want = encode_by_logarithm(np.exp2(np.clip(exponent, -200.0, 200.0)), linear)
        flagged = byte >= 0x7E
        assert (np.abs(byte - want.astype(np.int64))[~flagged] <= 1).all()
        assert flagged[want >= 0x7E].all()
        # What wraps is far below the base, and computed again.
        assert (exponent[flagged & (want < 0x7D)] < -255.0).all()


@pytest.mark.parametrize(("head_dim", "most"), [(64, 1.12), (128, 1.06)])
def test_powers_of_integers_cost_little_accuracy(head_dim: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal inputs, where nothing else hides it; fast_exp besides. 4 bits, and what has no such kernel, stay as is."""
    x = Inputs(*testing.make_qkv("normal", seqlen_q=256, seqlen_k=2048, heads_q=2, head_dim=head_dim))

    def error(precision: oa.Int8 | oa.Int4) -> float:
        return float(compare(low_precision.attention(x.q, x.k, x.v, precision=precision)[0], x.exact).rel_l1)

    found, fast, int4 = error(oa.Int8()), error(oa.Int8(fast_exp=True)), error(oa.Int4())
    monkeypatch.setattr(low_precision, "_powers", lambda *_: "none")
    nearest = error(oa.Int8())
    if head_dim == 128:
        assert nearest < found == fast <= most * nearest
    else:
        assert nearest == found < fast <= most * nearest
    assert error(oa.Int4()) == int4


def test_starting_from_quantized_operands_is_the_same() -> None:
    q, k, v = testing.make_qkv("channel_bias", batch=2, seqlen_q=150, seqlen_k=200, heads_q=4, heads_kv=2, head_dim=64)
    qk, values = oa.quantize_qk(q, k, smooth_q=True, with_bias=True), oa.quantize_v(v, smooth_v=True)
    o, lse = low_precision.attention_quantized(qk, values, causal=True)
    expected, expected_lse = low_precision.attention(
        q, k, v, precision=oa.Int8(smooth_q=True, smooth_v=True), causal=True
    )
    assert np.array_equal(o.swapaxes(1, 2), expected)
    assert np.array_equal(lse, expected_lse)


@pytest.mark.parametrize("precision", [oa.Int8(), oa.Int4(smooth_v=True), oa.Int8(pv="exact")])
def test_packed_sequences_are_the_sequences(precision: oa.Int8) -> None:
    of_q, of_k = [100, 1, 0, 257], [130, 300, 5, 0]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (of_q, of_k))
    q = testing.channel_bias((360, 4, 64))
    k, v = testing.channel_bias((440, 2, 64), 1), testing.channel_bias((440, 2, 64), 2)
    o, lse = low_precision.attention(q, k, v, precision=precision, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one, one_lse = low_precision.attention(
            q[None, rows], k[None, keys], v[None, keys], precision=precision, causal=True
        )
        if precision == oa.Int8():  # the kernel of packed sequences rounds P to nearest
            assert np.allclose(o[rows], one[0], rtol=0, atol=0.02 * np.abs(v).max())
        else:
            assert np.array_equal(o[rows], one[0])
        assert np.array_equal(lse[:, rows], one_lse[0])
    assert (o[358:] == 0).all()
    assert np.isneginf(lse[:, 358:]).all()


def test_not_a_number_reaches_the_rows_that_meet_it() -> None:
    q, k, v = testing.make_qkv("normal", seqlen_q=300, heads_q=2, head_dim=64)
    q[0, 9, 0, 3] = np.nan
    k[0, 200, 1, 5] = np.inf
    v[0, 250, 0, 7] = np.nan
    o, lse = low_precision.attention(q, k, v, precision=oa.Int8(), causal=True)
    bad = np.isnan(o[0])
    assert bad[9, 0].all()
    assert np.isnan(lse[0, 0]).nonzero()[0].tolist() == [9]
    # A key poisons those rows that see any key of its group: 192 is the first of 128-key tile 1 with (j % 8) // 2 = 0.
    first = next(j for j in range(128, 256) if j % 8 // 2 == 200 % 8 // 2)
    assert bad[:, 1].all(axis=1).nonzero()[0].tolist() == list(range(first, 300))
    assert bad[:, 0].any(axis=1).nonzero()[0].tolist() == [9, *range(250, 300)]
    assert bad[250:, 0].sum() == 50


def test_what_is_no_precision() -> None:
    q, k, v = testing.make_qkv(seqlen_q=4, head_dim=8)
    with pytest.raises(ArgumentError, match="precision"):
        low_precision.attention(q, k, v, precision="int8")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="accumulator"):
        low_precision.attention(q, k, v, precision=oa.Int8(), accumulator="bf16")
    # Sums in fp16 need other levels of P and V: precision asks for them, and then nothing else can.
    with pytest.raises(ArgumentError, match="accumulator"):
        low_precision.attention(q, k, v, precision=oa.Int8(), accumulator="fp16")
    with pytest.raises(ArgumentError, match="pv_accumulator='fp16'"):
        low_precision.attention(q, k, v, precision=oa.Int8(pv_accumulator="fp16"), accumulator="two_level")


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_a_batch_of_no_sequences_may_have_a_mask(precision: str) -> None:
    q, k = np.zeros((0, 5, 2, 16), np.float32), np.zeros((0, 31, 2, 16), np.float32)
    mask = np.zeros((0, 1, 5, 31), bool)
    o, lse = oa.attention(q, k, k, precision=precision, mask=mask, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 5, 2, 16), (0, 2, 5))
