"""The tile of short sequences: what the model chooses, and when it is not asked."""

from __future__ import annotations

import dataclasses

import pytest

from omniattn.problems import AttentionProblem, Target
from omniattn.registry import REGISTRY, by_name
from omniattn.select import select_attention
from omniattn.select.tile import SMALL, _tile_steps, best_tile, tile_us

HOPPER = Target((9, 0), 227 << 10, 132)


def problem_of(batch: int, heads: int, sq: int, sk: int, d: int, causal: bool = False) -> AttentionProblem:
    right = 0 if causal else -1
    return AttentionProblem("bfloat16", batch, sq, sk, heads, heads, d, -1, right, 0.1, 0.0, "none", "none", False)


#: (batch, heads, queries, keys, head_dim, causal), tile, and what it was measured to gain over the one of long
#: sequences (docs/performance/short.md).
MEASURED = [
    ((1024, 16, 32, 32, 64, False), "m64n32", 3.4),
    ((512, 16, 32, 32, 128, True), "m64n32", 2.7),
    ((1024, 16, 64, 64, 64, False), "m64n64", 2.0),
    ((256, 16, 128, 128, 64, True), "m64n64", 1.5),
    ((1, 12, 577, 577, 64, False), "m64n64", 1.5),
    ((2, 16, 1000, 1000, 128, False), "m128n128", 1.2),
    ((1, 8, 1024, 1024, 128, True), "m64n64", 1.34),
]


@pytest.mark.parametrize(("call", "tile", "gain"), MEASURED)
def test_measured_calls_get_their_tile(call: tuple[int, int, int, int, int, bool], tile: str, gain: float) -> None:
    problem = problem_of(*call)
    chosen = select_attention(problem, HOPPER)
    assert chosen.spec.name == f"attn_fwd_sm90_bf16_d{call[4]}_{tile}"
    assert any("short sequences" in reason for reason in chosen.why)
    long = by_name("attn_fwd_sm90_bf16_d64_m256n64" if call[4] == 64 else "attn_fwd_sm90_bf16_d128_m192n64")
    assert tile_us(problem, long, HOPPER) / tile_us(problem, chosen.spec, HOPPER) == pytest.approx(gain, rel=0.2)


@pytest.mark.parametrize("extents", [(16, 32, 1024, 1024), (4, 32, 4096, 4096), (1, 8, 1025, 60), (1, 8, 16, 5000)])
def test_long_sequences_keep_theirs(extents: tuple[int, int, int, int]) -> None:
    assert select_attention(problem_of(*extents, 64), HOPPER).spec.name == "attn_fwd_sm90_bf16_d64_m256n64"


def test_packed_sequences_count_by_their_mean() -> None:
    dense = problem_of(64, 16, 100, 100, 64)
    packed = dataclasses.replace(dense, varlen=True, seqlen_q=6400, seqlen_k=6400)
    chosen = select_attention(packed, HOPPER).spec
    assert chosen.name == select_attention(dense, HOPPER).spec.name + "_varlen"
    assert SMALL in chosen.tuned_for
    assert tile_us(packed, chosen, HOPPER) == tile_us(dense, by_name(chosen.name.removesuffix("_varlen")), HOPPER)


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"num_q_heads": 0}])
def test_nothing_to_do(changes: dict[str, int]) -> None:
    """No division by zero, and the usual tile."""
    rows = [s for s in REGISTRY if SMALL in s.tuned_for]
    usual = by_name("attn_fwd_sm90_bf16_d64_m256n64")
    assert best_tile(dataclasses.replace(problem_of(2, 4, 9, 9, 64), **changes), HOPPER, usual, rows) is usual


def test_small_tiles_share_an_sm() -> None:
    for spec in REGISTRY:
        if SMALL in spec.tuned_for:
            assert spec.ctas_per_sm > 1
            assert spec.ctas_per_sm * (spec.smem_bytes + 1024) <= 228 << 10, spec.name
            # Registers are handed out to four warps at a time.
            assert spec.ctas_per_sm * (-(-spec.num_warps // 4) * 4) * 32 <= 2048


def packed_problem(lengths: list[int], heads: int, d: int, causal: bool) -> AttentionProblem:
    rows, longest = sum(lengths), max(lengths)
    dense = problem_of(len(lengths), heads, rows, rows, d, causal)
    return dataclasses.replace(dense, varlen=True, max_seqlen_q=longest, max_seqlen_k=longest)


@pytest.mark.parametrize(("head_dim", "tile", "gain"), [(64, "m64n64", 1.11), (128, "m64n64", 1.16)])
@pytest.mark.parametrize("last", [32, 100, 160])
def test_packed_lengths_are_spread_around_their_mean(head_dim: int, tile: str, gain: float, last: int) -> None:
    """128 causal sequences of 128 to 256 tokens, measured: their mean of 192 fills a tile of 192 rows, and few of them
    do. A token more or less in all changes nothing."""
    lengths = [128 + i * 37 % 129 for i in range(127)] + [last]
    problem = packed_problem(lengths, 16, head_dim, causal=True)
    chosen = select_attention(problem, HOPPER).spec
    assert chosen.name == f"attn_fwd_sm90_bf16_d{head_dim}_{tile}_varlen"
    long = by_name(f"attn_fwd_sm90_bf16_d{head_dim}_{'m256n64' if head_dim == 64 else 'm192n64'}_varlen")
    assert tile_us(problem, long, HOPPER) / tile_us(problem, chosen, HOPPER) == pytest.approx(gain, rel=0.1)


def test_a_longest_sequence_beyond_belief_does_not_count() -> None:
    equal = packed_problem([512] * 64, 16, 128, causal=False)
    times = [
        tile_us(
            dataclasses.replace(equal, max_seqlen_q=longest, max_seqlen_k=longest),
            by_name("attn_fwd_sm90_bf16_d128_m128n128_varlen"),
            HOPPER,
        )
        for longest in (512, 2048, 1 << 20)
    ]
    assert times[0] < times[1] == times[2]
    assert times[0] == tile_us(problem_of(64, 16, 512, 512, 128), by_name("attn_fwd_sm90_bf16_d128_m128n128"), HOPPER)


@pytest.mark.parametrize("head_dim", [72, 96])
@pytest.mark.parametrize(("batch", "seqlen"), [(2048, 16), (1024, 64), (2, 197)])
def test_head_dims_without_small_tiles_take_wider_ones(head_dim: int, batch: int, seqlen: int) -> None:
    problem = problem_of(batch, 16, seqlen, seqlen, head_dim)
    chosen = select_attention(problem, HOPPER)
    # Rows of 144 bytes end within a sector: there the large tile of two warpgroups, which reads K and V less often.
    small = head_dim == 96 or seqlen <= 64
    assert (chosen.spec.head_dim, SMALL in chosen.spec.tuned_for) == (128, small)
    assert any(f"head_dim {head_dim} in a tile of 128" in reason for reason in chosen.why)
    usual = by_name("attn_fwd_sm90_bf16_d96_m192n96")
    assert tile_us(problem, chosen.spec, HOPPER) < 0.95 * tile_us(problem, usual, HOPPER)
    assert select_attention(problem_of(16, 16, 1024, 1024, head_dim), HOPPER).spec is usual


@pytest.mark.parametrize("tile", ["m192n64", "m64n64"])
@pytest.mark.parametrize(("left", "right"), [(127, 0), (64, 64), (1023, 0), (-1, 0), (-1, 40)])
def test_steps_are_the_tiles_that_someone_sees(tile: str, left: int, right: int) -> None:
    spec = by_name(f"attn_fwd_sm90_bf16_d128_{tile}")
    for sq, sk in ((384, 384), (100, 300), (300, 100), (64, 64)):
        expected = []
        lead = (-sq % spec.block_m) // 64 * 64
        for m0 in range(-lead, sq, spec.block_m):
            rows = range(max(m0, 0), min(m0 + spec.block_m, sq))
            seen = {
                j // spec.block_n
                for i in rows
                for j in range(sk)
                if (left < 0 or j >= i + sk - sq - left) and j <= i + sk - sq + right
            }
            expected.append(len(seen))
        assert _tile_steps(sq, sk, spec.block_m, spec.block_n, left, right) == expected


@pytest.mark.parametrize(
    ("head_dim", "heads", "window", "tile", "gain"),
    [(128, 16, (127, 0), "m64n64", 1.08), (128, 16, (64, 64), "m64n64", 1.09), (64, 32, (1023, 0), "m64n64", 1.09)],
)
def test_narrow_windows_of_long_sequences_have_the_choice(
    head_dim: int, heads: int, window: tuple[int, int], tile: str, gain: float
) -> None:
    """As measured with 16384 queries and keys; wider windows have large tiles."""
    long = problem_of(1, heads, 16384, 16384, head_dim)
    problem = dataclasses.replace(long, window_left=window[0], window_right=window[1])
    chosen = select_attention(problem, HOPPER).spec
    assert chosen.name == f"attn_fwd_sm90_bf16_d{head_dim}_{tile}"
    usual = by_name(f"attn_fwd_sm90_bf16_d{head_dim}_{'m256n64' if head_dim == 64 else 'm192n64'}")
    assert tile_us(problem, usual, HOPPER) / tile_us(problem, chosen, HOPPER) == pytest.approx(gain, rel=0.07)
    wide = dataclasses.replace(long, window_left=4095, window_right=0)
    assert select_attention(wide, HOPPER).spec is usual


@pytest.mark.parametrize(
    ("extents", "changes", "tile"),
    [
        ((16, 16, 1024, 1024), {}, "m192n64"),  # 142 us beside 152 of 128 rows
        ((25, 16, 640, 640), {}, "m192n64"),  # 112 beside 138
        ((32, 16, 512, 512), {}, "m128n128"),  # 111 beside 123
        ((8, 16, 2048, 2048), {"window_left": 1023}, "m128n128"),  # 210 beside 243
        ((8, 16, 4096, 4096), {"window_left": 2047}, "m128n128"),  # 767 beside 772
        ((2, 16, 8192, 8192), {"window_left": 4095}, "m192n64"),  # 577 beside 581
        ((1, 32, 16384, 16384), {"window_left": 4095}, "m192n64"),  # 1488 beside 1542
        ((1, 16, 16384, 16384), {"window_left": 2048, "window_right": 2048}, "m192n64"),  # 703 beside 729
    ],
)
def test_causal_calls_and_windows_at_128(
    extents: tuple[int, int, int, int], changes: dict[str, int], tile: str
) -> None:
    problem = dataclasses.replace(problem_of(*extents, 128, causal=True), **changes)
    assert select_attention(problem, HOPPER).spec.name == f"attn_fwd_sm90_bf16_d128_{tile}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "tile"),
    [(8, 1025, 64, "m64n64"), (12, 2048, 64, "m64n64"), (8, 1025, 128, "m128n128"), (8, 4096, 128, "m128n128")],
)
def test_a_token_more_does_not_end_the_choice(heads: int, seqlen: int, head_dim: int, tile: str, causal: bool) -> None:
    """Single sequences have so few tiles that it does not matter how long they are."""
    spec = select_attention(problem_of(1, heads, seqlen, seqlen, head_dim, causal), HOPPER).spec
    assert spec.name == f"attn_fwd_sm90_bf16_d{head_dim}_{tile}"
    wide = by_name(f"attn_fwd_sm90_bf16_d{head_dim}_{'m256n64' if head_dim == 64 else 'm192n64'}")
    problem = problem_of(1, heads, seqlen, seqlen, head_dim, causal)
    assert tile_us(problem, spec, HOPPER) < 0.9 * tile_us(problem, wide, HOPPER)
    # Of a batch nothing is known.
    assert select_attention(problem_of(16, 16, 2048, 2048, head_dim, causal), HOPPER).spec is wide


@pytest.mark.parametrize(("call", "tile"), [((1, 12, 1000, 64), "m64n64"), ((8, 12, 448, 128), "m128n128")])
def test_a_key_more_does_not_end_the_choice(call: tuple[int, int, int, int], tile: str) -> None:
    batch, heads, rows, head_dim = call
    for keys in (4096, 4097):
        chosen = select_attention(problem_of(batch, heads, rows, keys, head_dim), HOPPER).spec
        assert chosen.name == f"attn_fwd_sm90_bf16_d{head_dim}_{tile}"


def test_few_packed_queries_have_the_choice() -> None:
    """No kernel splits their keys on wgmma. Measured with tiles of 192 and of 128 rows: 164 and 150 us."""
    dense = problem_of(8, 32, 8 * 32, 8 * 8192, 128)
    problem = dataclasses.replace(dense, varlen=True, num_kv_heads=8, max_seqlen_q=32, max_seqlen_k=8192)
    times = [
        tile_us(problem, by_name(f"attn_fwd_sm90_bf16_d128_{tile}_varlen"), HOPPER) for tile in ("m192n64", "m128n128")
    ]
    assert times == pytest.approx([164, 150], rel=0.06)
    assert select_attention(problem, HOPPER).spec.name == "attn_fwd_sm90_bf16_d128_m64n64_varlen"


def test_groups_that_do_not_pack_have_the_choice() -> None:
    """Seven query heads on a kv head: 448 tiles of 32 rows, which no split makes fewer."""
    problem = dataclasses.replace(problem_of(8, 56, 32, 8192, 128), num_kv_heads=8)
    assert select_attention(problem, HOPPER).spec.name == "attn_fwd_sm90_bf16_d128_m64n64"
    idle = dataclasses.replace(problem_of(1, 32, 512, 32768, 128), num_kv_heads=8)
    assert select_attention(idle, HOPPER).spec.name == "attn_fwd_sm90_bf16_d128_m192n64"


#: (batch, heads, queries, keys, head_dim): the tile, us, those of the others that were measured, cuDNN's.
NARROW = [
    ((1, 3, 8192, 8192, 40), "d64_m256n64"),  # 111; small tiles 251; 159
    ((1144, 10, 128, 128, 40), "d64_m256n64"),  # 238; 296; 181
    ((78, 24, 577, 577, 40), "d64_m256n64"),  # 454; 743; 515
    ((64, 16, 256, 256, 72), "d128_m128n128"),  # 83; 94 in its own, small 130; 81
    ((16, 16, 577, 577, 72), "d96_m192n96"),  # 95; 98 in the wider, small 158; 107
    ((128, 16, 128, 128, 80), "d128_m128n128"),  # 56; 73, 59; 55
    ((2, 16, 1024, 1024, 80), "d128_m128n128"),  # 33; 36, 35; 35
    ((256, 16, 128, 128, 96), "d128_m128n128"),  # 110; 135, 113; 111
    ((16, 16, 577, 577, 96), "d96_m192n96"),  # 93; 96, 104; 107
    ((2, 12, 1000, 1000, 96), "d128_m64n32"),  # 30; 36, 34 in the large wider one; 37
    # Tiles of 192 rows in even shares.
    ((16, 16, 1024, 1024, 128), "d128_m192n64"),  # 203; 209 in tiles of 128; 226
    ((20, 16, 600, 600, 128), "d128_m192n64"),  # 118; 124
]


@pytest.mark.parametrize(("call", "tile"), NARROW)
def test_narrow_heads(call: tuple[int, int, int, int, int], tile: str) -> None:
    assert select_attention(problem_of(*call), HOPPER).spec.name == f"attn_fwd_sm90_bf16_{tile}"


def test_wider_tiles_have_to_gain_more_where_rows_are_not_aligned() -> None:
    """Measured: b64 s256 causal gains 8 % at d96 and loses 22 % at d72, whose rows have 144 bytes."""
    names = {
        head_dim: select_attention(problem_of(64, 16, 256, 256, head_dim, causal=True), HOPPER).spec.name
        for head_dim in (72, 96)
    }
    assert names == {72: "attn_fwd_sm90_bf16_d96_m192n96", 96: "attn_fwd_sm90_bf16_d128_m64n64"}
    # With 64 keys a step: 217 us beside 254.
    assert select_attention(problem_of(1024, 16, 64, 64, 96), HOPPER).spec.name.endswith("d128_m64n64")


#: (batch, heads, queries, keys, head_dim), mask, causal; what is chosen, us beside those of the large tile.
SMALL_FORMS = [
    ((2048, 16, 16, 16, 64), "none", False, "m16n16"),  # 77 beside 701
    ((512, 16, 24, 24, 128), "io", False, "m16n16"),  # 91 beside 248
    ((1024, 16, 40, 40, 64), "none", True, "m16n16"),  # 144 beside 436; on wgmma: 163
    ((1024, 16, 40, 40, 64), "bool", False, "m64n64_masks"),  # 129 beside 406; one warp: 174
    ((16, 16, 64, 64, 64), "none", False, "m64n64_softcap"),  # 9.2 beside 12.2; one warp: 10.7
    ((1024, 16, 64, 64, 64), "none", True, "m64n64_softcap"),  # 167 beside 440; one warp: 211
    ((512, 16, 64, 64, 128), "float32", False, "m64n64_bias32"),
    ((2048, 16, 16, 80, 64), "none", False, "m64n64_softcap"),
    ((512, 16, 100, 100, 64), "bool", False, "m64n64_masks"),  # 176 beside 290
    ((256, 16, 128, 128, 64), "io", False, "m64n64_bias16"),  # 99 beside 152
    ((256, 16, 128, 128, 128), "none", False, "m64n64_softcap"),  # 156 beside 180
    ((64, 16, 256, 256, 128), "bool", False, "m64n64_masks"),  # 111 beside 118
    ((64, 16, 256, 256, 64), "none", True, "m64n64_softcap"),  # 68 beside 80
    ((2, 12, 197, 197, 64), "bool", False, "m64n64_masks"),  # 13.4 beside 21.2
    ((1, 12, 577, 577, 64), "io", False, "m64n64_bias16"),  # 15.6 beside 23.4
    ((16, 12, 577, 577, 64), "none", False, "m64n64_softcap"),  # 81 beside 97
    ((8, 16, 1024, 1024, 64), "none", True, "m64n64_softcap"),  # 69 beside 75
]
LARGE_FORMS = [
    ((64, 16, 256, 256, 64), "none"),  # 76 beside 76
    ((16, 16, 577, 577, 128), "io"),  # 138 beside 143
    ((8, 16, 1024, 1024, 64), "bool"),  # 93 beside 112
    ((1, 12, 577, 577, 64), "bool"),  # keys that nobody sees are passed over
    ((8, 16, 32, 2048, 64), "none"),  # 32 beside 46 on mma.sync
]


def form_of(call: tuple[int, int, int, int, int], mask: str, causal: bool = False) -> AttentionProblem:
    problem = dataclasses.replace(problem_of(*call, causal=causal), mask=mask, mask_map=True)
    return problem if mask != "none" else dataclasses.replace(problem, softcap=50.0)


@pytest.mark.parametrize(("call", "mask", "causal", "tile"), SMALL_FORMS)
def test_short_sequences_with_scores(call: tuple[int, int, int, int, int], mask: str, causal: bool, tile: str) -> None:
    problem = form_of(call, mask, causal)
    chosen = select_attention(problem, HOPPER)
    one_warp = tile == "m16n16"
    assert chosen.spec.name == f"attn_fwd_sm{80 if one_warp else 90}_bf16_d{call[4]}_{tile}" + "_mods" * one_warp
    assert any("measured with so few queries" in reason for reason in chosen.why)
    # Not measured there.
    for other in (Target((8, 0), 163 << 10, 108), Target((10, 0), 227 << 10, 148)):
        assert SMALL not in select_attention(problem, other).spec.tuned_for
    assert SMALL not in select_attention(dataclasses.replace(problem, varlen=True), HOPPER).spec.tuned_for


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mask", "kind"), [("bool", "masks"), ("io", "bias16"), ("float32", "bias32"), ("none", "softcap")]
)
@pytest.mark.parametrize("head_dim", [72, 80, 96])
def test_scores_at_head_dims_without_small_tiles(head_dim: int, mask: str, kind: str, causal: bool) -> None:
    """Small tiles of 128 where they were measured to be faster: rows of 144 and 160 bytes with a mask up to 64 keys."""
    one_warp, small = "attn_fwd_sm80_bf16_d128_m16n16_mods", f"attn_fwd_sm90_bf16_d128_m64n64_{kind}"
    large = by_name(f"attn_fwd_sm90_bf16_d96_m192n64_{kind}")
    longest = 128 if mask == "none" or head_dim == 96 else 64
    for batch, seqlen, name in (
        (1024, 1, one_warp), (1024, 32, one_warp), (1024, 33, small), (64, 64, small), (1, 64, small),
        (512, longest, small),
    ):  # fmt: skip
        problem = form_of((batch, 16, seqlen, seqlen, head_dim), mask, causal)
        chosen = select_attention(problem, HOPPER)
        assert chosen.spec.name == name
        assert any(f"head_dim {head_dim} in a tile of 128" in reason for reason in chosen.why)
        assert any("measured with so few queries" in reason for reason in chosen.why)
        for other in (Target((8, 0), 163 << 10, 108), Target((10, 0), 227 << 10, 148)):
            assert SMALL not in select_attention(problem, other).spec.tuned_for
        assert SMALL not in select_attention(dataclasses.replace(problem, varlen=True), HOPPER).spec.tuned_for
    for batch, seqlen in ((1024, longest + 1), (1024, 200), (16, 1024), (2, 197)):
        problem = form_of((batch, 8, seqlen, seqlen, head_dim), mask, causal)
        assert select_attention(problem, HOPPER).spec is large
    # Up to 64 queries are one small tile, whatever the keys.
    few = select_attention(form_of((1024, 16, 16, 80, head_dim), mask, causal), HOPPER).spec
    assert few.name == (small if longest >= 80 else large.name)


def test_wider_tiles_with_scores_where_others_do_not_serve() -> None:
    """Without tensor maps one warp, but not four with zeros; v of its own head_dim has no small tiles."""
    for seqlen, tile in ((48, "d128_m16n16"), (64, "d96")):
        problem = dataclasses.replace(form_of((64, 16, seqlen, seqlen, 96), "io"), tensor_maps=False)
        assert select_attention(problem, HOPPER).spec.name == f"attn_fwd_sm80_bf16_{tile}_mods"
    own = dataclasses.replace(form_of((1024, 16, 64, 64, 96), "bool"), own_head_dim_v=64)
    assert select_attention(own, HOPPER).spec.name == "attn_fwd_sm90_bf16_d96_m192n64_masks"


@pytest.mark.parametrize(("call", "mask"), LARGE_FORMS)
def test_large_tiles_with_scores(call: tuple[int, int, int, int, int], mask: str) -> None:
    chosen = select_attention(form_of(call, mask), HOPPER).spec
    assert (chosen.family, SMALL in chosen.tuned_for) == ("attn_fwd_sm90", False)


def test_a_mask_that_no_map_describes_is_copied() -> None:
    """Measured: 24 us beside 30 on mma.sync, a large batch 204 beside 353; longer sequences at d128 146 beside 330."""
    for call, tile in (
        ((1, 12, 577, 577, 64), "m64n64"), ((512, 16, 100, 100, 64), "m64n64"), ((16, 16, 577, 577, 128), "m192n64"),
    ):  # fmt: skip
        problem = dataclasses.replace(form_of(call, "io"), mask_map=False)
        chosen = select_attention(problem, HOPPER)
        assert chosen.spec.name == f"attn_fwd_sm90_bf16_d{call[4]}_{tile}_bias16"
        assert any("rows at multiples of 16 bytes" in reason for reason in chosen.why)
    few = dataclasses.replace(problem_of(8, 16, 32, 577, 64), mask="io")  # which are split on mma.sync
    assert not select_attention(few, HOPPER).spec.arch_specific


def test_copies_of_masks_are_no_larger_than_the_keys() -> None:
    """Of many heads with few queries: a bias for each is copied, one that is larger than K and V is not."""
    copied = dataclasses.replace(problem_of(64, 32, 8, 4099, 64), mask="io", mask_map=False)
    assert select_attention(copied, HOPPER).spec.bias_bytes == 2
    few_keys = dataclasses.replace(copied, num_q_heads=64, num_kv_heads=1, seqlen_q=64)
    assert select_attention(few_keys, HOPPER).spec.bias_bytes == 0


def test_packed_calls_without_queries() -> None:
    empty = dataclasses.replace(problem_of(4, 16, 0, 4096, 128), varlen=True, max_seqlen_q=1, max_seqlen_k=4096)
    assert select_attention(empty, HOPPER).spec.arch_specific


def test_without_tensor_maps_64_rows_where_tiles_are_few() -> None:
    few = dataclasses.replace(form_of((1, 12, 577, 577, 64), "io"), tensor_maps=False)
    assert select_attention(few, HOPPER).spec.name == "attn_fwd_sm80_bf16_d64_m64n64_mods"
    many = dataclasses.replace(form_of((512, 16, 100, 100, 64), "io"), tensor_maps=False)
    assert select_attention(many, HOPPER).spec.name == "attn_fwd_sm80_bf16_d64_n64_mods"


@pytest.mark.parametrize(
    ("head_dim", "causal", "limit"),
    [(64, False, 24), (64, True, 48), (32, False, 24), (128, False, 16), (128, True, 24), (72, False, 16)],
)
def test_one_warp_without_scores(head_dim: int, causal: bool, limit: int) -> None:
    for seqlen, small in ((1, True), (limit, True), (limit + 1, False)):
        problem = problem_of(1024, 16, seqlen, seqlen, head_dim, causal)
        chosen = select_attention(problem, HOPPER)
        name = f"attn_fwd_sm80_bf16_d{64 if head_dim <= 64 else 128}_m16n16"
        assert (chosen.spec.name == name) == small
        assert any("measured with so few queries" in reason for reason in chosen.why) == small
        for other in (Target((8, 0), 163 << 10, 108), Target((10, 0), 227 << 10, 148)):
            assert SMALL not in select_attention(problem, other).spec.tuned_for
    long, few = problem_of(1024, 16, 16, 2048, head_dim, causal), problem_of(8, 16, 16, 16, head_dim, causal)
    assert all(select_attention(other, HOPPER).spec.block_m != 16 for other in (long, few))


@pytest.mark.parametrize(
    ("head_dim", "causal", "limit"), [(64, False, 40), (64, True, 48), (128, False, 28), (128, True, 40)]
)
def test_one_warp_of_packed_sequences(head_dim: int, causal: bool, limit: int) -> None:
    """Up to a mean, if none is longer than 64; where nothing is known beyond the mean, one may be long."""
    for mean, longest, small in ((1, 64, True), (limit, 64, True), (limit, 65, False), (limit + 1, 64, False)):
        rows = dict.fromkeys(("seqlen_q", "seqlen_k"), 1024 * mean)
        dense = problem_of(1024, 16, mean, mean, head_dim, causal)
        unknown = dataclasses.replace(dense, varlen=True, **rows)
        packed = dataclasses.replace(unknown, max_seqlen_q=longest, max_seqlen_k=longest)
        assert (select_attention(packed, HOPPER).spec.block_m == 16) == small
        assert select_attention(unknown, HOPPER).spec.block_m != 16


def test_one_warp_where_all_heads_run_at_once() -> None:
    """Measured: 16 sequences of 16 at d64 6.5 us beside 7.4, of 64 9.8 beside 9.2."""
    chosen = [select_attention(problem_of(16, 16, s, s, 64, causal=True), HOPPER).spec.block_m for s in (16, 17, 48)]
    assert chosen[0] == 16
    assert 16 not in chosen[1:]


@pytest.mark.parametrize(("head_dim", "queries", "tiny"), [(32, 16, True), (32, 64, True), (32, 65, False)])
def test_tiny_sequences_with_softcap_without_a_small_tile(head_dim: int, queries: int, tiny: bool) -> None:
    chosen = select_attention(form_of((2048, 16, queries, queries, head_dim), "none"), HOPPER)
    assert chosen.spec.family == ("attn_fwd_sm80" if tiny else "attn_fwd_sm90")
    assert any("tiny" in reason for reason in chosen.why) == tiny
