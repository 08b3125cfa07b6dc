"""Selection: which registry row serves which problem on which GPU. No GPU, no driver."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.problems import UNLIMITED, Descale, Descales, Fp8, Int4, Int8, Pages, Precision, Target
from omniattn.problems import AttentionProblem as Problem
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.select import candidates, choices, rows_of
from tests.unit.select.shape_plans import row_of

# Shared memory that one CTA may have, by compute capability.
GPUS = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
TARGETS = [Target(cc, smem) for cc, smem in GPUS.items()]
PLAIN = Problem(
    dtype="bfloat16",
    batch=1,
    seqlen_q=8,
    seqlen_k=8,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=64,
    window_left=UNLIMITED,
    window_right=UNLIMITED,
    softmax_scale=0.125,
    softcap=0.0,
    mask="none",
    sinks="none",
    varlen=False,
)
FEATURES: list[dict[str, Any]] = [
    {},
    {"window_right": 0},
    {"window_left": 3},
    {"sinks": "float32"},
    {"sinks": "io"},
    {"varlen": True},
    {"deterministic": True},
]
SCORE_MODS: list[dict[str, Any]] = [
    {"softcap": 30.0},
    {"mask": "bool"},
    {"mask": "float32"},
    {"mask": "io"},
    {"softmax_scale": 0.0},
    {"softmax_scale": -1.0},
    {"softmax_scale": 1e-60},  # 0 in fp32
    {"softmax_scale": 3e38},  # times log2(e): infinity in fp32
]


def changed(**fields: Any) -> Problem:
    return dataclasses.replace(PLAIN, **fields)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"sm_{t.cc[0]}{t.cc[1]}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_problem_gets_a_row_that_serves_it(target: Target, dtype: str, head_dim: int) -> None:
    for fields in (*FEATURES, *SCORE_MODS):
        problem = changed(dtype=dtype, head_dim=head_dim, **fields)
        assert problem.score_mods == (fields in SCORE_MODS)
        rows = {way.row for way in candidates(problem, target)}
        assert row_of(problem, target) in rows
        for spec in rows:
            assert (spec.op.partition("_")[0], spec.quantized, spec.dtype) == ("attention", False, dtype)
            assert spec.head_dim >= head_dim
            assert spec.smem_bytes <= target.max_smem
            assert spec.min_arch == target.cc if spec.arch_specific else spec.min_arch <= target.cc
            assert spec.score_mods == problem.score_mods


EXACT_ROWS = [s for s in REGISTRY if s.op == "attention" and not s.quantized]


@pytest.mark.parametrize("spec", EXACT_ROWS, ids=lambda s: s.name)
def test_every_row_may_be_taken_somewhere(spec: KernelSpec) -> None:
    mask, softcap = "none", 0.0
    if spec.score_mods and spec.softcap == "any" and spec.bias_bytes == 0:
        softcap = 1.0
        if spec.sequences == "packed" and spec.masks != "none" and not spec.paged:
            mask = "bool"
    elif spec.score_mods:
        mask = {0: "bool", 2: "io", 4: "float32"}[spec.bias_bytes]
    problem = changed(
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        own_head_dim_v=spec.own_head_dim_v or (spec.head_dim - 8 if spec.other_head_dim_v else 0),
        mask=mask,
        mask_map=True,
        softcap=softcap,
        varlen=spec.sequences == "packed",
        pages=Pages(16, 100, 50, 50) if spec.paged else None,
    )
    assert any(spec in rows_of(problem, target) for target in TARGETS)


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_reasons_name_what_decided(cc: tuple[int, int]) -> None:
    why = "\n".join(choices(changed(head_dim=72, softcap=5.0, seqlen_k=1024), Target(cc, GPUS[cc]))[0].why)
    for words in ("bfloat16", "72", "softcap", f"{cc[0]}.{cc[1]}", "ways by the model", " µs"):
        assert words in why


def test_force() -> None:
    target = Target((9, 0), GPUS[9, 0])
    larger = "attn_fwd_sm80_bf16_d256_mods"
    assert larger not in {row.name for row in rows_of(PLAIN, target)}
    found = choices(PLAIN, target, larger)
    assert {choice.candidate.row.name for choice in found} == {larger}
    assert found[0].why[0] == f"OMNIATTN_FORCE_KERNEL={larger}"
    assert row_of(PLAIN, target, "") == row_of(PLAIN, target)


INT8 = Int8().precision


@pytest.mark.parametrize(
    ("force", "fields", "shows"),
    [
        ("attn_fwd_sm80_bf16_d46", {}, "attn_fwd_sm80_bf16_d64"),  # suggests a near name
        ("attn_int8_sm90_bf16_d64", {}, "it multiplies int8 operands, not exact ones"),
        ("attn_fwd_sm90_bf16_d64_m256n64", {"precision": INT8}, "it multiplies bfloat16, not int8 ones"),
        ("attn_int8_sm90_bf16_d64", {"precision": Int8(smooth_q=True).precision}, "compiled without smooth_q"),
        ("attn_int8_sm90_bf16_d64_smoothq", {"precision": INT8}, "compiled with smooth_q"),
        ("attn_int8_sm90_bf16_d64", {"precision": INT8, "lse": True}, "it makes no LSE"),
        ("attn_int8_sm90_bf16_d64", {"precision": INT8, "varlen": True}, "no packed sequences"),
        ("attn_int8_sm90_bf16_d64_varlen", {"precision": INT8}, "packed sequences only"),
        ("attn_int4_sm80_bf16_d64", {"precision": Int8(pv="fp16").precision}, "it multiplies 4-bit integers"),
        ("attn_fwd_sm80_fp16_d64", {}, "float16"),
        ("attn_fwd_sm80_bf16_d32", {}, "up to 32"),
        ("attn_fwd_sm80_bf16_d64", {"softcap": 1.0}, "softcap"),
    ],
)
def test_force_that_cannot_serve(force: str, fields: dict[str, Any], shows: str) -> None:
    with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL") as caught:
        choices(changed(**fields), Target((9, 0), GPUS[9, 0]), force)
    assert force in str(caught.value)
    assert shows in str(caught.value)


def test_a_forced_row_of_another_operation_does_not_matter() -> None:
    target = Target((9, 0), GPUS[9, 0])
    free = row_of(PLAIN, target)
    assert row_of(PLAIN, target, "merge_states_sm80_bf16") == free
    assert row_of(PLAIN, target, "kv_copy_sm80, quantize_sm80_bf16_d64") == free
    both = "kv_copy_sm80, attn_fwd_sm80_bf16_d96"
    assert row_of(PLAIN, target, both).name == "attn_fwd_sm80_bf16_d96"
    # Of several of an operation the first that fits.
    several = "attn_int8_sm80_bf16_d128,attn_fwd_sm80_bf16_d96, attn_fwd_sm80_bf16_d128"
    assert row_of(PLAIN, target, several).name == "attn_fwd_sm80_bf16_d96"
    assert row_of(changed(precision=INT8), target, several).name == "attn_int8_sm80_bf16_d128"
    with pytest.raises(ArgumentError, match=r"attn_int8_sm80_bf16_d64': .*; 'attn_int4_sm80_bf16_d64': "):
        choices(PLAIN, target, "attn_int8_sm80_bf16_d64,attn_int4_sm80_bf16_d64")
    # Blanks and commas without a name between them are nothing.
    assert row_of(PLAIN, target, " , ") == free
    with pytest.raises(ArgumentError, match=r"names of kernels.*'nobody'"):
        choices(PLAIN, target, "kv_copy_sm80,nobody")


def test_force_on_an_older_gpu() -> None:
    newer = next(spec for spec in EXACT_ROWS if spec.min_arch > (8, 0))
    with pytest.raises(ArgumentError, match=r"this GPU has 8\.0"):
        choices(changed(dtype=newer.dtype, head_dim=newer.head_dim), Target((8, 0), 2**20), newer.name)


@pytest.mark.parametrize(
    ("fields", "target", "shows"),
    [
        ({}, Target((7, 5), 64 * 1024), r"this GPU has 7\.5"),
        ({"dtype": "float32"}, Target((9, 0), 2**20), "float32"),
        ({"head_dim": 520}, Target((9, 0), 2**20), "520"),
        ({"head_dim": 512}, Target((8, 0), 64 * 1024), "bytes of shared memory"),
        ({"head_dim": 256}, Target((8, 0), 48 * 1024), "bytes of shared memory"),
    ],
)
def test_nothing_serves(fields: dict[str, Any], target: Target, shows: str) -> None:
    with pytest.raises(UnsupportedError, match=shows):
        choices(changed(**fields), target)


HOPPER = Target((9, 0), GPUS[9, 0])
LOW = [Int8(), Int8(smooth_q=True, smooth_v=True), Int8(granularity="per_tensor", smooth_k=False), Int4()]


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_gets_a_row_on_hopper(dtype: str, low: Int8 | Int4) -> None:
    for head_dim, lse in itertools.product(range(8, 257, 8), (False, True)):
        for fields in FEATURES:
            problem = changed(dtype=dtype, head_dim=head_dim, precision=low.precision, lse=lse, **fields)
            spec = row_of(problem, HOPPER)
            assert (spec.op, spec.quantized, spec.dtype) == ("attention", True, dtype)
            assert spec.head_dim == (64 if head_dim <= 64 else 128 if head_dim <= 128 else 256)
            assert spec.family == "attn_int8_sm90"
            assert (spec.smooth_q != "never") == low.smooth_q
            assert spec.sequences == ("packed" if problem.varlen else "dense")
            assert spec.lse == (lse or low.smooth_q or (spec.quantizes_q and problem.absolute_scores))


def low_of(spec: KernelSpec, **knobs: Any) -> Precision:
    """The knobs that only this row's product serves."""
    if spec.qk == "fp8":
        # Kernels that quantize q themselves know no mean of k.
        low = Fp8(smooth_k=spec.arch_specific and not spec.quantizes_q and not spec.score_mods).precision
        return dataclasses.replace(low, pv_accumulator=spec.pv_accumulator)
    kind = Int4 if spec.qk == "int4" else Int8
    # Kernels that quantize q themselves have one scale a lane.
    if spec.arch_specific and not spec.quantizes_q:
        knobs = {"granularity": "per_warp"} | knobs
    if spec.integer_powers == "linear":
        knobs = {"fast_exp": True} | knobs
    knobs = {"smooth_q": spec.smooth_q != "never", "pv": spec.pv, "pv_accumulator": spec.pv_accumulator} | knobs
    return kind(**knobs).precision


def mods_of(spec: KernelSpec) -> dict[str, Any]:
    """Score modifiers, or factors of v, that only this row, of those of its architecture, serves."""
    if spec.block_masks:
        return {"block_mask": BlockMaskProblem((2, 1), (0, 0, 0, 1))}
    if spec.value_factors:
        descales = {"descales": Descales(v=Descale("per_block", (2, 1, 1)))}
        return descales | (forms_of(spec) if spec.score_mods else {})
    return forms_of(spec) if spec.score_mods else {}


def forms_of(spec: KernelSpec) -> dict[str, Any]:
    if spec.bias_bytes:
        return {"mask": "float32" if spec.bias_bytes == 4 else "io", "mask_map": True}
    return {"softmax_scale": -1.0} if spec.softcap == "never" else {"softcap": 5.0}


@pytest.mark.parametrize("spec", [s for s in REGISTRY if s.quantized and s.op == "attention"], ids=lambda s: s.name)
def test_every_low_precision_row_is_chosen_and_can_be_forced(spec: KernelSpec) -> None:
    # 4-bit rows are for GPUs with 4-bit products, e4m3 ones for those with such products; and one is for Hopper alone.
    target = HOPPER if spec.min_arch >= (9, 0) else Target((8, 9), GPUS[8, 9])
    mods = mods_of(spec)
    problem = changed(
        dtype=spec.dtype, head_dim=spec.head_dim, varlen=spec.sequences == "packed", precision=low_of(spec),
        lse=spec.lse, **mods,
    )  # fmt: skip
    assert row_of(problem, target) == spec
    assert row_of(problem, target, spec.name) == spec
    if not mods and spec.qk == "int8":
        problem = dataclasses.replace(problem, precision=low_of(spec, pv="auto", pv_accumulator="auto"))
        assert row_of(problem, target, spec.name) == spec


#: (compute capability, bits) -> family, element type and accumulator of P V that "auto" takes.
CHOSEN = {
    ((8, 0), 8): ("attn_int8_sm80", "fp16", "fp32"),
    ((8, 0), 4): ("attn_int4_sm80", "fp16", "fp32"),
    ((8, 6), 8): ("attn_int8_sm80", "fp16", "fp16"),
    ((8, 6), 4): ("attn_int4_sm80", "fp16", "fp16"),
    ((8, 9), 8): ("attn_int8_sm89", "fp8", "fp16"),
    ((8, 9), 4): ("attn_int4_sm89", "fp8", "fp16"),
    ((9, 0), 8): ("attn_int8_sm90", "fp8", "fp32"),
    ((9, 0), 4): ("attn_int8_sm90", "fp8", "fp32"),
    ((10, 0), 8): ("attn_int8_sm80", "fp16", "fp32"),
    ((12, 0), 8): ("attn_int8_sm89", "fp8", "fp16"),
    ((12, 0), 4): ("attn_int8_sm89", "fp8", "fp16"),
}


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_low_precision_by_architecture(case: tuple[tuple[int, int], int]) -> None:
    cc, bits = case
    target = Target(cc, GPUS.get(cc, 99 << 10))
    for smooth_q in (False, True):
        for head_dim in (8, 64, 128, 136, 256):
            low = (Int8 if bits == 8 else Int4)(smooth_q=smooth_q)
            found = choices(changed(head_dim=head_dim, precision=low.precision), target)[0]
            spec = found.candidate.row
            family = CHOSEN[case][0]
            if (cc, bits, head_dim, smooth_q) == ((10, 0), 8, 128, False):
                family = "attn_int8_mbarrier_sm90"
            assert (spec.family, spec.pv, spec.pv_accumulator) == (family, *CHOSEN[case][1:])
            (reason,) = [x for x in found.why if "accumulators" in x]
            assert f"{spec.pv} with {spec.pv_accumulator} accumulators" in reason
            assert any("no faster than int8" in x for x in found.why) == (bits == 4 and cc >= (9, 0))
            capped = row_of(changed(head_dim=head_dim, precision=low.precision, softcap=9.0), target)
            assert capped.score_mods
            assert (capped.family == "attn_int8_sm90") == (cc == (9, 0))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_choice_of_pv_can_be_forced(target: Target) -> None:
    for pv in ("fp16", "fp8"):
        for acc in ("fp32", "fp16"):
            for kind in (Int8, Int4):
                low = kind(pv=pv, pv_accumulator=acc)
                problem = changed(precision=low.precision)
                if pv == "fp8" and target.cc < (8, 9):
                    with pytest.raises(UnsupportedError, match=r"needs compute capability 8\.9"):
                        choices(problem, target)
                    continue
                found = choices(problem, target)[0]
                assert (found.candidate.row.pv, found.candidate.row.pv_accumulator) == (pv, acc)
                assert any("as asked for" in reason for reason in found.why)


def test_a_driver_without_tensor_maps_has_low_precision_too() -> None:
    found = choices(changed(precision=INT8, tensor_maps=False), HOPPER)[0]
    assert found.candidate.row.family == "attn_int8_sm80"
    assert any("tensor maps" in reason for reason in found.why)


@pytest.mark.parametrize(
    ("fields", "target", "shows"),
    [
        ({"precision": Int8(granularity="per_token").precision}, HOPPER, "one scale a lane, not one a token"),
        ({"precision": Int4(pv="exact").precision}, HOPPER, "P and V in fp16, not exact"),
        ({"precision": INT8, "dtype": "float32"}, HOPPER, "float32"),
        ({"precision": INT8, "head_dim": 264}, HOPPER, "264"),
        ({"precision": INT8}, Target((7, 5), 64 << 10), r"this GPU has 7\.5"),
        (
            {"precision": Int8(pv="fp8").precision},
            Target((8, 6), 99 << 10),
            r"needs compute capability 8\.9 or newer, this GPU has 8\.6",
        ),
    ],
    ids=str,
)
def test_no_low_precision_row_serves(fields: dict[str, Any], target: Target, shows: str) -> None:
    """An error that says what is missing, and what to use instead: nothing falls back to another precision silently."""
    with pytest.raises(UnsupportedError, match=shows) as caught:
        choices(changed(**fields), target)
    assert "precision='exact'" in str(caught.value)


def test_visible_pairs_against_brute_force() -> None:
    rng = random.Random(11)
    for _ in range(3000):
        sq, sk = rng.randint(0, 12), rng.randint(0, 12)
        left, right = (rng.choice((UNLIMITED, rng.randint(0, 15))) for _ in range(2))
        problem = changed(seqlen_q=sq, seqlen_k=sk, window_left=left, window_right=right, batch=2, num_q_heads=3)
        pairs = sum(
            (left == UNLIMITED or j >= i + sk - sq - left) and (right == UNLIMITED or j <= i + sk - sq + right)
            for i in range(sq)
            for j in range(sk)
        )
        assert problem.visible_pairs == pairs, (sq, sk, left, right)
        assert problem.flops == 4 * pairs * 64 * 2 * 3
    assert changed(varlen=True).visible_pairs is None
    assert changed(varlen=True).flops is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"batch": 8192, "seqlen_q": 524288, "num_q_heads": 32, "varlen": True}, "attn_fwd_sm90"),
        ({"batch": 1, "seqlen_q": 1, "num_q_heads": 2**30, "varlen": True}, "attn_fwd_sm80"),
        ({"batch": 2**20, "seqlen_q": 1, "num_q_heads": 2**11}, "attn_fwd_sm80"),
    ],
    ids=str,
)
def test_tiles_are_counted_in_31_bits(fields: dict[str, object], expected: str) -> None:
    target = Target((9, 0), GPUS[9, 0])
    assert row_of(changed(**fields), target).family == expected


@pytest.mark.parametrize("lse", [False, True])
def test_e4m3_by_architecture(lse: bool) -> None:
    """Hopper's own rows, mma.sync from sm_89 on, nothing below."""
    for cc, family in {(8, 9): "attn_fp8_sm89", (9, 0): "attn_fp8_sm90", (10, 0): "attn_fp8_sm89"}.items():
        target = Target(cc, GPUS.get(cc, 99 << 10))
        for head_dim, fields in itertools.product((8, 64, 96, 136, 256), FEATURES):
            problem = changed(head_dim=head_dim, precision=Fp8().precision, lse=lse, **fields)
            spec = row_of(problem, target)
            assert (spec.family, spec.qk, spec.pv) == (family, "fp8", "fp8")
            assert spec.head_dim >= head_dim
    for cc in ((8, 0), (8, 6)):
        with pytest.raises(UnsupportedError, match="precision='int8'"):
            choices(changed(precision=Fp8().precision), Target(cc, GPUS[cc]))


def test_integers_and_e4m3_take_rows_of_their_own() -> None:
    for precision, name, reason in (
        (Fp8().precision, "attn_int8_sm90_bf16_d64", "it multiplies int8 operands"),
        (INT8, "attn_fp8_sm90_bf16_d64", "it multiplies fp8 operands"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            choices(changed(dtype="bfloat16", precision=precision), HOPPER, name)
