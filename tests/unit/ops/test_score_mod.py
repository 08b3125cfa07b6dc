"""`ScoreMod` and block masks without a GPU: what is refused, the CPU's results, what kernels are compiled with."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.launch import masks, score_mods, tile_kinds
from omniattn.launch.host_struct import At
from omniattn.launch.score_mod import HEADER, array_values, user_text, with_score_mod
from omniattn.launch.structs import ATTN_FWD_MODS_SM90, ATTN_FWD_USER_MOD_SM90, MASK_LIST, SCORE_MOD_ARRAYS, TILE_KINDS
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, AttentionStrides, Target
from omniattn.problems.score_mod import BlockMaskProblem, ModArray, ScoreModProblem
from omniattn.registry import by_name
from omniattn.runtime.compile import compile_spec, user_errors
from omniattn.runtime.record import LaunchRecord
from omniattn.runtime.sources import source_digest
from omniattn.runtime.store import get_store
from omniattn.testing.tile_cases import tile_cases
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select.shape_plans import unsplit

_LAYOUTS = {"mask_list": MASK_LIST, "tile_kinds": TILE_KINDS}


def fields(record: LaunchRecord) -> dict[str, Any]:
    """The arguments of a launch by name."""
    of_attention = ATTN_FWD_USER_MOD_SM90 if record.spec.generated else ATTN_FWD_MODS_SM90
    return dict(fields_of_record(record, _LAYOUTS.get(record.spec.op, of_attention)))


H200 = Target((9, 0), 227 << 10, 132)
A100 = Target((8, 0), 163 << 10, 108)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], dtype=np.float32)


def qkv(seqlen_q: int = 9, seqlen_k: int = 12) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, n, 4, 16)).astype(np.float32) for n in (seqlen_q, seqlen_k, seqlen_k)]


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    return score + slopes[h] * (k - q)


ALIBI = oa.ScoreMod("score + slopes[h] * (k - q)", reference=alibi, slopes=SLOPES)


@pytest.mark.parametrize(
    "text",
    [
        "score; q", "{score}", "score\\\n+1", 'printf("x")', "'a'", "#define q k", "score // q", "score /* q",
        "score)(", "score)", "(score", "score[", "(score]", "a<%b%>", "%:include", "a<:0:>",
        "", "  ", "score + \u0430", "@", "$x",
        "__syncthreads()", "__shfl_sync(-1, score, 0)", "atomicAdd(&q, 1)", "__trap()", "__nanosleep(1)", "malloc(8)",
        "x" * 10_001, None, 3, "score ** 2",
    ],
)  # fmt: skip
def test_only_one_expression(text: Any) -> None:
    for argument in ("expression", "mask"):
        given = {"expression": "score", argument: text}
        if argument == "mask" and text is None:
            continue
        with pytest.raises(oa.errors.ArgumentError, match=rf"^ScoreMod\(\): argument '{argument}'"):
            oa.ScoreMod(**given)


@pytest.mark.parametrize(
    "name", ["q", "score", "float", "_x", "__x", "HEAD_DIM", "X", "oa_x", "\u00e4", "b", "int32", "Half"]
)
def test_names_that_no_expression_can_use(name: str) -> None:
    with pytest.raises(oa.errors.ArgumentError, match="argument 'arrays'"):
        oa.ScoreMod("score", **{name: SLOPES})


def test_arguments_of_score_mod() -> None:
    for bad in ({"x": None}, {f"a{i}": SLOPES for i in range(9)}, {"reference": 3}):
        with pytest.raises(oa.errors.ArgumentError):
            oa.ScoreMod("score", **bad)
    mod = oa.ScoreMod("score", mask="k <= q", x=SLOPES)
    assert repr(mod) == "ScoreMod('score', mask='k <= q', x)"
    with pytest.raises(TypeError):
        mod.arrays["y"] = SLOPES  # type: ignore[index]
    with pytest.raises(AttributeError):
        mod.mask = None  # type: ignore[misc]


def test_reference_on_the_cpu() -> None:
    q, k, v = qkv()
    bias = (SLOPES[:, None, None] * (np.arange(12)[None, None] - np.arange(9)[None, :, None])).astype(np.float32)
    for options in ({}, {"causal": True}, {"softcap": 2.0}, {"sinks": SLOPES}):
        got, lse = oa.attention(q, k, v, score_mod=ALIBI, return_lse=True, **options)
        want, want_lse = oa.attention(q, k, v, mask=bias[None], return_lse=True, **options)
        np.testing.assert_allclose(got, want, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, atol=1e-6)

    def hides(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.where((k + b + h) % 2 == 0, score, -np.inf)

    v[:, 1] = np.nan  # of an odd key: head 0 of sequence 0 never sees it
    o = oa.attention(q, k, v, score_mod=oa.ScoreMod("score", mask="(k + b + h) % 2 == 0", reference=hides))
    assert np.isfinite(o[0, :, 0]).all()
    assert np.isnan(o[0, :, 1]).all()


def test_packed_on_the_cpu() -> None:
    q, k, v = (np.concatenate(list(x)) for x in qkv())
    starts_q, starts_k = (np.array([0, n, 2 * n], dtype=np.int32) for n in (9, 12))

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
        return alibi(score, b, h, q, k, slopes) + b * k

    made = oa.ScoreMod("score + slopes[h] * (k - q) + b * k", reference=mod, slopes=SLOPES)
    got = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=9, max_seqlen_k=12, score_mod=made
    )
    np.testing.assert_allclose(got, np.concatenate(list(oa.attention(*qkv(), score_mod=made))), atol=1e-6)


def test_calls_that_are_refused() -> None:
    q, k, v = qkv()
    few = np.zeros(0, dtype=np.float32)

    def same(score: Any, b: Any, h: Any, q: Any, k: Any, x: Any) -> Any:
        return score

    for mod, error, said in (
        (oa.ScoreMod("score"), oa.errors.UnsupportedError, "reference="),
        (lambda s: s, oa.errors.ArgumentError, "an omniattn.ScoreMod"),
        (oa.ScoreMod("score", reference=same, x=SLOPES.astype(np.float64)), oa.errors.DtypeError, "score_mod.x"),
        (oa.ScoreMod("score", reference=same, x=few), oa.errors.ShapeError, "score_mod.x"),
        (oa.ScoreMod("score", reference=same, x=SLOPES.reshape(1, 1, 1, 1, 4)), oa.errors.ShapeError, "dimensions"),
        (oa.ScoreMod("score", reference=lambda *a: np.zeros(5)), oa.errors.ShapeError, "score_mod"),
    ):
        with pytest.raises(error, match=re.escape(said)):
            oa.attention(q, k, v, score_mod=mod)
    for precision in ("int8", "int4"):
        with pytest.raises(oa.errors.UnsupportedError, match=r"\(\): score_mod with precision=.*precision='exact'"):
            oa.attention(q, k, v, score_mod=ALIBI, precision=precision)
    pair = oa.quantize_qk(q, k)
    with pytest.raises(oa.errors.ArgumentError, match=r"argument 'q'.*not quantized"):
        oa.attention(pair.q, pair.k, oa.quantize_v(v), score_mod=ALIBI)


def test_a_function_is_no_expression() -> None:
    for given in ((alibi,), ("score", alibi)):
        with pytest.raises(oa.errors.ArgumentError, match="a function goes into reference="):
            oa.ScoreMod(*given)  # type: ignore[arg-type]


def test_a_mask_does_not_see_scores() -> None:
    with pytest.raises(oa.errors.ArgumentError, match=r"'mask': expected .* over b, h, q, k .*-INFINITY.*'score'"):
        oa.ScoreMod("score", mask="score > 0.0f")
    assert oa.ScoreMod("score", mask="my_score[k] > 0.0f", my_score=SLOPES).mask


@pytest.mark.parametrize(
    ("reference", "shows"),
    [
        (3, "received 3"),
        (lambda score: score, r"reference\(score, b, h, q, k, slopes=slopes\).*\(score\)"),
        (lambda score, b, h, q, k: score, "slopes"),
        (lambda score, b, h, q, k, slope: score, "slope"),
    ],
)
def test_references_that_cannot_be_called(reference: Any, shows: str) -> None:
    with pytest.raises(oa.errors.ArgumentError, match=rf"^ScoreMod\(\): argument 'reference'.*{shows}"):
        oa.ScoreMod("score + slopes[h]", reference=reference, slopes=SLOPES)


@pytest.mark.parametrize(
    ("result", "shows"),
    [(None, "received None"), (True, "received .*True"), ("x", "'x'"), (np.ones((9, 12), dtype=np.bool_), "of bool"),
     (np.ones((9, 12), dtype=np.complex64), "complex64")],
)  # fmt: skip
def test_references_that_return_no_scores(result: Any, shows: str) -> None:
    """A truth value would be a score of 0 or 1."""
    mod = oa.ScoreMod("score", reference=lambda *_: result)
    with pytest.raises(oa.errors.DtypeError, match=f"argument 'score_mod'.*-inf where a key is hidden.*{shows}"):
        oa.attention(*qkv(), score_mod=mod)
    assert oa.attention(*qkv(), score_mod=oa.ScoreMod("0.0f", reference=lambda *_: 0)).shape == (2, 9, 4, 16)


def test_block_masks_on_the_cpu() -> None:
    q, k, v = qkv(150, 200)
    rng = np.random.default_rng(1)
    for shape, size in (((2, 4, 3, 4), 64), ((3, 4), (64, 64)), ((2, 1, 2, 1), (128, 256))):
        blocks = rng.random(shape) < 0.6
        rows, keys = (size, size) if isinstance(size, int) else size
        full = blocks.repeat(rows, -2).repeat(keys, -1)[..., :150, :200]
        got = oa.attention(q, k, v, block_mask=blocks, block_size=size)
        assert np.array_equal(got, oa.attention(q, k, v, mask=full))
        bias = rng.standard_normal((150, 200)).astype(np.float32)
        got = oa.attention(q, k, v, block_mask=blocks, block_size=size, mask=bias)
        assert np.array_equal(got, oa.attention(q, k, v, mask=np.where(full, bias, -np.inf).astype(np.float32)))


def test_block_masks_that_are_refused() -> None:
    q, k, v = qkv(150, 200)
    blocks = np.ones((3, 4), dtype=np.bool_)
    for options, error in (
        ({}, oa.errors.ShapeError),
        ({"block_size": 100}, oa.errors.ArgumentError),
        ({"block_size": 0}, oa.errors.ArgumentError),
        ({"block_size": (64, 64, 64)}, oa.errors.ArgumentError),
        ({"block_size": "64"}, oa.errors.ArgumentError),
        ({"block_size": 64, "mask": np.ones((1, 200), dtype=np.bool_)}, oa.errors.UnsupportedError),
        ({"block_size": 64, "precision": "int8", "score_mod": oa.ScoreMod("score")}, oa.errors.UnsupportedError),
    ):
        with pytest.raises(error):
            oa.attention(q, k, v, block_mask=blocks, **options)
    with pytest.raises(oa.errors.DtypeError):
        oa.attention(q, k, v, block_mask=blocks.astype(np.int8), block_size=64)
    with pytest.raises(oa.errors.ShapeError, match=r"block_size of \(128, 128\); .* mask=, received \(150, 200\)"):
        oa.attention(q, k, v, block_mask=np.ones((150, 200), dtype=np.bool_))
    with pytest.raises(oa.errors.ArgumentError, match="without block_mask"):
        oa.attention(q, k, v, block_size=64)
    whole = np.ones((2, 2), dtype=np.bool_)
    assert np.array_equal(oa.attention(q, k, v, block_mask=whole), oa.attention(q, k, v))


def problem(**changes: Any) -> AttentionProblem:
    own = (1000 * 256, 256, 128)
    made = AttentionProblem(
        "bfloat16", 2, 1000, 1000, 2, 2, 128, -1, -1, 0.1, 0.0, "none", "none", False,
        strides=AttentionStrides(own, own, own, own, (2000, 1000), (0, 0, 0, 0)),
    )  # fmt: skip
    return replace(made, **changes)


MOD = ScoreModProblem("score + table(h, k)", "k <= q", (ModArray("table", "float16", (2, 1000), (2000, 2)),))


def test_texts_that_are_compiled() -> None:
    text = user_text(MOD)
    assert 'const ScoreArray<Half, 2, false> table(oa_arrays, 0, "table");' in text
    assert '#line 1 "score_mod expression"\nscore + table(h, k)\n' in text
    assert '#line 1 "score_mod mask"\nk <= q\n' in text
    row = by_name("attn_fwd_sm90_bf16_d128_m192n64_masks")
    made = with_score_mod(row, MOD)
    sources = get_store().sources
    assert HEADER in sources.closure(row.source), "the text takes the place of a file that kernels include"
    assert sources.of(made)[HEADER] == text
    assert source_digest(made, sources) != source_digest(row, sources)
    # Neither shape nor strides nor contents are in it.
    other = ScoreModProblem(MOD.expression, MOD.mask, (ModArray("table", "float16", (2, 500), (500, 1)),))
    assert with_score_mod(row, other) == made
    for changed in (
        replace(MOD, expression="score"), replace(MOD, mask=None), replace(MOD, checked=True),
        replace(MOD, arrays=(ModArray("table", "float32", (2, 1000), (2000, 2)),)),
    ):  # fmt: skip
        assert with_score_mod(row, changed).name != made.name
    assert with_score_mod(row, None) is row


def test_values_of_arrays() -> None:
    made: dict[str, Any] = array_values(MOD)
    assert made["data"] == [At("score_mod.table"), *[None] * 7]
    assert made["strides"][:5] == (2000, 2, 0, 0, 0)
    assert made["extents"][:5] == (2, 1000, 0, 0, 0)
    SCORE_MOD_ARRAYS.pack(made)


#: Rows of calls whose keys are not split.
UNSPLIT = "attn_fwd_sm90_bf16_d128_m192n64_masks,attn_fwd_sm90_bf16_d128_m192n64_softcap"


def test_plans_on_hopper() -> None:
    launches = plan_attention(problem(score_mod=MOD), H200, UNSPLIT)
    kinds, listing, main = launches.records
    assert main.spec.name.startswith("attn_fwd_sm90_bf16_d128_m192n64_masks_mod_")
    assert main.spec.prebuild == ()
    assert kinds.spec.name.startswith("tile_kinds_sm80_mod_")
    assert listing.spec.name == "mask_list_sm80"
    assert fields(main)["mods.flags"] == score_mods.MOD_TILES
    # A mask expression of q and k alone: one map for all sequences and heads.
    assert (fields(kinds)["batch"], fields(kinds)["heads"]) == (1, 1)
    assert fields(main)["mods.lists_stride_b"] == fields(main)["mods.lists_stride_h"] == 0

    (alone,) = plan_attention(problem(score_mod=replace(MOD, mask=None)), H200, UNSPLIT).records
    assert fields(alone)["mods.flags"] == 0
    capped = plan_attention(problem(score_mod=MOD, softcap=3.0), H200, UNSPLIT)
    assert "_softcap_mod_" in capped.selection.spec.name
    # Masks that are packed have lists of their own; the expression is evaluated everywhere then.
    packed = plan_attention(problem(score_mod=MOD, mask="bool"), H200, UNSPLIT)
    assert [record.spec.op for record in packed.records] == ["mask_pack", "mask_list", "attention"]
    assert not fields(packed.records[-1])["mods.flags"] & score_mods.MOD_TILES


def test_plans_on_other_gpus() -> None:
    kinds, listing, main = unsplit(problem(score_mod=MOD), A100).records
    assert kinds.spec.name.startswith("tile_kinds_sm80_mod_")
    assert listing.spec.name == "mask_list_sm80"
    assert main.spec.name.startswith("attn_fwd_sm80_bf16_d128_mods_mod_")
    blocks = BlockMaskProblem((2, 2), (0, 0, 8, 1))
    assert len(unsplit(problem(block_mask=blocks), A100).records) == 3
    with pytest.raises(oa.errors.UnsupportedError, match="takes no score_mod"):
        plan_attention(problem(score_mod=MOD, precision=oa.Int8().precision), H200, None)


@pytest.mark.parametrize(
    ("mask", "blocks", "extents"),
    [
        ("k <= q", (0, 0, 4, 1), (1, 1)),
        ("doc[b] == k", (0, 0, 4, 1), (2, 1)),
        ("k % (h + 1) == 0", (0, 0, 4, 1), (1, 2)),
        ("k <= q", (16, 0, 4, 1), (2, 1)),
        ("k <= q", (0, 8, 4, 1), (1, 2)),
        (None, (16, 8, 4, 1), (2, 2)),
    ],
)
def test_maps_are_as_small_as_can_be(mask: str | None, blocks: tuple[int, ...], extents: tuple[int, int]) -> None:
    size = BlockMaskProblem((4, 4), blocks)  # type: ignore[arg-type]
    one = problem(score_mod=ScoreModProblem("score", mask, ()), block_mask=size)
    found = tile_kinds.extents(one)
    assert (found.batch, found.heads) == extents
    kinds, listing, main = plan_attention(one, H200, UNSPLIT).records
    assert fields(kinds)["block_rows"] == 4
    count = -(-1000 // 192)
    places = fields(main)
    assert places["mods.lists_stride_b"] == (count * 17 * found.heads if found.batch > 1 else 0)
    assert places["mods.lists_stride_h"] == (count * 17 if found.heads > 1 else 0)
    assert fields(listing)["mask_heads"] == found.heads
    assert kinds.num_ctas == -(-found.batch * found.heads * 16 * 16 // (128 if mask is None else 4))


def test_block_masks_by_kernel() -> None:
    blocks = BlockMaskProblem((2, 2), (0, 0, 8, 1))
    launches = plan_attention(problem(block_mask=blocks), H200, UNSPLIT)
    assert [record.spec.name for record in launches.records] == [
        "tile_kinds_sm80", "mask_list_sm80", "attn_fwd_sm90_bf16_d128_m192n64_masks",
    ]  # fmt: skip
    assert masks.takes(problem(block_mask=blocks)) is False


#: Ways to use positions and arrays of every type.
EXPRESSIONS = (
    "score + q * 0.5", "score + 2u * q", "q / 2", "score * (q < 5.0)", "min(q, k) + score", "fabsf(q - k)",
    "float(q) / (k + 1)", "(q + k) % 3", "q ? score : 0", "q == k ? score : -INFINITY", "double(q) + score",
    "score + expf(-(q - k) * 0.1f)", "table(h, q - k + 10, k) + score", "1.0f / (1 + q)", "q * q", "2.5 - q",
    "(k - q) * slopes[h]", "slopes[h] * k / q", "doc[q] == doc[k] ? score : 0.0f", "flag[u[k]] ? tiny[0] : tau()",
    "bf(h, 1) * score", "table(b, h, doc[k])", "max(0, k - q)", "q % 2 == 0 ? q : k", "3 - q", "(1LL << 40) + q",
    "score + (k >> 6)", "fmaxf(score, q)",
)  # fmt: skip


def compiled(expression: str, mask: str | None = None) -> Any:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "slopes": ("float16", (16,)), "table": ("float32", (4, 9, 9)), "doc": ("int64", (99,)), "flag": ("bool", (9,)),
        "tiny": ("int8", (3,)), "tau": ("float32", ()), "u": ("uint8", (4,)), "bf": ("bfloat16", (4, 2)),
    }  # fmt: skip
    arrays = tuple(ModArray(name, dtype, shape, shape) for name, (dtype, shape) in shapes.items())
    row = with_score_mod(by_name("tile_kinds_sm80"), ScoreModProblem(expression, mask, arrays))
    return compile_spec(row, "90a", nvrtc_cache=False)


def test_expressions_compile() -> None:
    # The mask expression is what this kernel evaluates; both are compiled.
    assert compiled(" + ".join(f"({e})" for e in EXPRESSIONS), " && ".join(f"({e}) > 0" for e in ("q", "k - q"))).cubin


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("score + slops[h]", '"slops" is undefined'), ("score +", "expected an expression"),
        ("score = 1", "modifiable"), ("q += 1", "+="),
        ("slopes(h, q)", "one index for each of its dimensions"), ("slopes", "no suitable"),
        ("score score", "expected"),
    ],
)  # fmt: skip
def test_the_compiler_names_the_line(text: str, said: str) -> None:
    with pytest.raises(oa.errors.CompileError) as caught:
        compiled(text)
    found = user_errors(with_score_mod(by_name("tile_kinds_sm80"), MOD), caught.value.log)
    assert said in found
    assert "score_mod expression" in found


def test_what_is_shown_of_a_compiler_log() -> None:
    made = with_score_mod(by_name("attn_fwd_sm80_bf16_d128_mods"), MOD)
    log = (
        'score_mod expression(1): error: identifier "foo" is undefined\n  score + foo\n          ^\n\n'
        "entry/attn_fwd_sm80.cu(3): warning: something\n\n1 error detected in the compilation.\n"
    )
    assert user_errors(made, log) == log.split("\n\n")[0]
    assert user_errors(made, "entry/attn_fwd_sm80.cu(3): error: out of memory\n") == ""
    assert user_errors(by_name("attn_fwd_sm80_bf16_d128_mods"), log) == ""


def test_cases_of_tile_kinds() -> None:
    for case in tile_cases(by_name("tile_kinds_sm80")):
        _, kinds = case.prepare()
        assert {0, 2} <= set(kinds.reshape(-1).tolist()) or kinds.size < 8
