"""What formats of KV caches cost, what per-token int4 breaks, and what repairs it: `decode` on the CPU.

The inputs and the formats are those of the table in docs/kv_formats.md (`kv_accuracy`). The margins leave about a tenth
to what was measured.
"""

from __future__ import annotations

import pytest

from tests.numerics import kv_accuracy
from tests.numerics.committed import check, committed
from tests.numerics.kv_accuracy import accuracy

LAYERS = ("layer 0", "layer 11", "layer 19", "layer 29")
INPUTS = (*LAYERS, "normal", "shifted K", "biased K", "outlier channels")
MEAN, SCALES, TURNED = "int4, K mean", "int4, K channel scales", "int4, K Hadamard"
MEAN_SCALES, MEAN_TURNED = "int4, K mean, channel scales", "int4, K mean, Hadamard"


def of_keys(fmt: str, name: str) -> float:
    """Relative L1 error of O that a format of K alone brings: V is exact."""
    return accuracy(fmt, name, v_dtype="bf16").rel_l1


def test_the_committed_results_are_what_is_measured() -> None:
    rows = list(kv_accuracy.measure())
    assert {(row["table"], row["input"], row["variant"]) for row in rows} == committed("kv_accuracy").keys()
    for row in rows:
        check("kv_accuracy", row["table"], row["input"], row["variant"], row["cosine"], row["rel_l1"])
        assert row["token_bytes"] == committed("kv_accuracy")[row["table"], row["input"], row["variant"]]["token_bytes"]


@pytest.mark.parametrize("name", INPUTS)
def test_order_of_the_formats(name: str) -> None:
    reports = {fmt: accuracy(fmt, name) for fmt in ("bf16", "fp8", "int8", "int4", "int4, groups of 32")}
    # The inputs are bfloat16 numbers: what is left is fp32 arithmetic.
    assert reports["bf16"].rel_l1 <= 1e-5
    assert reports["int8"].cosine >= 0.9995
    assert reports["int8"].rel_l1 <= 0.03
    assert reports["fp8"].cosine >= 0.995
    assert reports["int8"].rel_l1 <= 0.6 * reports["fp8"].rel_l1
    assert reports["int4, groups of 32"].rel_l1 <= 0.9 * reports["int4"].rel_l1
    # V alone in 4 bits beside K in 8.
    assert accuracy("K int8, V int4, groups of 32", name).rel_l1 <= 0.1


@pytest.mark.parametrize("name", ["biased K", "outlier channels"])
def test_strong_channels_break_int4_by_tokens(name: str) -> None:
    assert of_keys("int4", name) >= 3 * of_keys("int4", "normal")
    assert accuracy("int4", name).cosine <= 0.955
    # The strong channels take the range of a row, of which 256 steps are still enough.
    assert of_keys("int8", name) <= 0.03


@pytest.mark.parametrize(
    ("name", "repair", "share"),
    [
        # Share of int4's error that is left.
        ("biased K", MEAN, 0.24),
        ("biased K", MEAN_TURNED, 0.24),
        ("biased K", MEAN_SCALES, 0.25),
        ("biased K", SCALES, 0.55),
        ("biased K", TURNED, 0.86),
        ("outlier channels", SCALES, 0.45),
        ("outlier channels", MEAN_SCALES, 0.46),
        ("outlier channels", TURNED, 0.50),
        ("outlier channels", MEAN_TURNED, 0.50),
    ],
)
def test_repairs_of_strong_channels(name: str, repair: str, share: float) -> None:
    assert of_keys(repair, name) <= share * of_keys("int4", name)


def test_repairs_leave_what_int4_costs_on_normal_keys() -> None:
    plain = of_keys("int4", "normal")
    assert of_keys(MEAN, "biased K") <= 1.1 * plain
    assert of_keys(SCALES, "outlier channels") <= 1.55 * plain
    # And cost nothing where nothing is broken.
    for repair in (MEAN, SCALES, TURNED, MEAN_SCALES, MEAN_TURNED):
        assert of_keys(repair, "normal") <= 1.1 * plain


def test_a_mean_is_no_outlier() -> None:
    """Each repair has keys that it does not help: why there are three of them."""
    assert of_keys(MEAN, "outlier channels") >= 0.9 * of_keys("int4", "outlier channels")
    # A zero point takes a common mean away. A rotation collects it in one channel, unless it is subtracted before.
    plain = of_keys("int4", "shifted K")
    assert plain <= 1.1 * of_keys("int4", "normal")
    assert of_keys(TURNED, "shifted K") >= 4 * plain
    assert of_keys(MEAN_TURNED, "shifted K") <= 1.1 * plain


@pytest.mark.parametrize("name", LAYERS)
def test_repairs_on_a_real_model(name: str) -> None:
    plain = of_keys("int4", name)
    shares = {fmt: of_keys(fmt, name) / plain for fmt in (MEAN, SCALES, TURNED, MEAN_SCALES, MEAN_TURNED)}
    assert shares[MEAN] <= 0.96
    assert shares[SCALES] <= 0.74
    assert shares[TURNED] <= 0.93
    assert shares[MEAN_SCALES] <= 0.82
    assert shares[MEAN_TURNED] <= 0.64
    assert of_keys("int4, groups of 32, K mean, channel scales", name) <= 0.68 * plain


@pytest.mark.parametrize(("name", "share"), [("shifted K", 0.5), ("biased K", 0.45)])
def test_fp8_has_no_zero_point_and_wants_the_mean(name: str, share: float) -> None:
    assert accuracy("fp8, K mean", name).rel_l1 <= share * accuracy("fp8", name).rel_l1


@pytest.mark.parametrize(
    ("name", "share"),
    # Share of int4's error that is left: queries of the model look at what is near.
    [("layer 0", 0.55), ("layer 11", 0.1), ("layer 19", 0.28), ("layer 29", 0.6), ("normal", 0.95)],
)
def test_the_newest_tokens_in_16_bits(name: str, share: float) -> None:
    window = "int4, the newest 32 in 16 bits"
    assert accuracy(window, name).rel_l1 <= share * accuracy("int4", name).rel_l1
    if name in LAYERS:
        assert accuracy(f"{MEAN_SCALES}, the newest 32", name).rel_l1 <= accuracy(window, name).rel_l1
