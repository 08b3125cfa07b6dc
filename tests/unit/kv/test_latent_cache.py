"""Latent caches (multi-head latent attention): rows that all query heads share, whose first channels are the value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from omniattn.kv.layout import CacheLayout
from omniattn.launch.structs import MLA_DECODE
from omniattn.plan.others import plan_decode
from omniattn.problems import DecodeProblem, Target
from omniattn.problems.decode import query_box
from omniattn.runtime.record import LaunchRecord
from omniattn.select.decode_ways import decode_ways

HOPPER = Target((9, 0), 227 << 10, 132)
RNG = np.random.default_rng(5)


def pool(blocks: int = 6, size: int = 4, dim: int = 24, dtype: Any = np.float16) -> Any:
    return RNG.standard_normal((blocks, size, 1, dim)).astype(dtype)


def expected(q: Any, rows: Any, dim_v: int, **options: Any) -> Any:
    """By `attention` on the keys and values that the rows stand for."""
    n, heads = q.shape[0], q.shape[1]
    k = np.repeat(rows[None], heads, axis=2)
    return oa.attention(q[None], k, k[..., :dim_v], causal=True, window=options.pop("window", None), **options)[0][:n]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"window": (5, 0)}, {"softcap": 2.0}, {"softmax_scale": 0.3}], ids=lambda o: next(iter(o), "plain")
)
def test_values_are_the_first_channels(paged: bool, options: dict[str, Any]) -> None:
    latent, dim_v, lengths = pool(), 16, (9, 3)
    table = np.array([[4, 0, 5], [2, 1, 3]], np.int32)
    cache: Any
    if paged:
        cache = oa.PagedKVCache.from_arrays(latent, head_dim_v=dim_v)
        rows = [latent[table[b]].reshape(-1, 1, 24)[:n] for b, n in enumerate(lengths)]
        where: dict[str, Any] = {"block_table": table}
    else:
        latent = latent.reshape(2, 12, 1, 24)
        cache, where = oa.KVCache.from_arrays(latent, head_dim_v=dim_v), {}
        rows = [latent[b, :n] for b, n in enumerate(lengths)]
    q = RNG.standard_normal((2, 2, 3, 24)).astype(np.float16)
    lens = np.array(lengths, np.int32)
    o, lse = oa.decode(q, cache, seq_lens=lens, return_lse=True, **where, **options)
    packed = oa.attention_with_kvcache(
        q.reshape(4, 3, 24), cache, seq_lens=lens, cu_seqlens_q=np.array([0, 2, 4], np.int32), max_seqlen_q=2, **where,
        **options,
    )  # fmt: skip
    assert o.shape == (2, 2, 3, dim_v)
    assert lse.shape == (2, 3, 2)
    np.testing.assert_array_equal(packed.reshape(o.shape), o)
    for b in range(2):
        want = expected(q[b], rows[b], dim_v, **options)
        np.testing.assert_allclose(o[b].astype(np.float32), want.astype(np.float32), atol=2e-3)


def test_out_and_sinks() -> None:
    latent = pool()
    cache = oa.KVCache.from_arrays(latent.reshape(2, 12, 1, 24), head_dim_v=16)
    q, lens = RNG.standard_normal((2, 1, 3, 24)).astype(np.float16), np.array([7, 0], np.int32)
    out, sinks = np.ones((2, 1, 3, 16), np.float16), np.full(3, 50.0, np.float32)
    assert oa.decode(q, cache, seq_lens=lens, out=out, sinks=sinks) is out
    assert np.abs(out).max() < 1e-3  # the sink has nearly everything, and a sequence without tokens nothing
    with pytest.raises(ShapeError, match="out"):
        oa.decode(q, cache, seq_lens=lens, out=np.ones((2, 1, 3, 24), np.float16))


def test_a_latent_cache_says_what_it_is() -> None:
    latent = pool()
    cache = oa.PagedKVCache.from_arrays(latent, head_dim_v=16)
    assert cache.v is None
    assert cache.k is latent
    assert (cache.token_bytes, cache.nbytes) == (2 * 24, latent.nbytes)
    assert cache.facts.is_latent
    assert not oa.PagedKVCache.from_arrays(latent, latent.copy()).facts.is_latent


def test_blocks_are_copied_and_swapped() -> None:
    latent = pool()
    before = latent.copy()
    cache = oa.PagedKVCache.from_arrays(latent, head_dim_v=16)
    oa.copy_blocks(cache, [(0, 1), (0, 2)])
    np.testing.assert_array_equal(latent[1], before[0])
    np.testing.assert_array_equal(latent[2], before[0])
    np.testing.assert_array_equal(latent[3:], before[3:])
    assert oa.SwapSpace(cache, 2).nbytes == 2 * latent[0].nbytes


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"head_dim_v": 24}, ArgumentError, "head_dim_v.*a multiple of 8 below 24"),
        ({"head_dim_v": 12}, ArgumentError, "head_dim_v.*a multiple of 8"),
        ({"head_dim_v": "16"}, ArgumentError, "head_dim_v"),
        ({"head_dim_v": 16, "v": pool()}, ArgumentError, "'v': expected None with head_dim_v"),
        ({"head_dim_v": 16, "k_scale": np.ones(1, np.float32)}, ArgumentError, "'k_scale': expected None"),
    ],
)  # fmt: skip
def test_what_it_may_be_given(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        oa.PagedKVCache.from_arrays(pool(), **given)


def test_rows_that_are_none() -> None:
    two_heads = RNG.standard_normal((6, 4, 2, 24)).astype(np.float16)
    with pytest.raises(ShapeError, match="one head with head_dim_v"):
        oa.PagedKVCache.from_arrays(two_heads, head_dim_v=16)
    with pytest.raises(DtypeError, match=r"'k': expected float16.*received int8"):
        oa.PagedKVCache.from_arrays(np.zeros((6, 4, 1, 32), np.int8), head_dim_v=16)
    with pytest.raises(ShapeError, match="from 8 to 576"):
        oa.PagedKVCache.from_arrays(np.zeros((6, 4, 1, 584), np.float16), head_dim_v=512)


def test_what_is_not_served_says_so() -> None:
    latent = pool()
    cache = oa.PagedKVCache.from_arrays(latent, head_dim_v=16)
    table, lens = np.zeros((1, 6), np.int32), np.array([20], np.int32)
    long = np.zeros((1, 17, 3, 24), np.float16)
    with pytest.raises(UnsupportedError, match="a latent cache with 17 queries"):
        oa.attention_with_kvcache(long, cache, seq_lens=lens, block_table=table)
    with pytest.raises(ArgumentError, match="0 with a latent cache"):
        oa.decode(long[:, :1], cache, seq_lens=lens, block_table=table, shared_prefix=4)
    with pytest.raises(ShapeError, match=r"1 to 16, received 17\. Prompts of latent attention are attention"):
        oa.decode(long, cache, seq_lens=lens, block_table=table)
    with pytest.raises(ShapeError, match=r"1 to 16, received 0\n"):
        oa.decode(long[:, :0], cache, seq_lens=lens, block_table=table)


@pytest.mark.parametrize("heads", [1, 7, 8])
def test_rows_in_8_bits_take_no_more_tokens_than_those_in_16(heads: int) -> None:
    """Quantized caches of others have up to 128 rows a kv head in one call."""
    cache = oa.PagedKVCache(2, 64, 1, 576, head_dim_v=512, k_dtype="fp8_ds_mla", like=np.zeros(0))
    q, table = np.zeros((1, 17, heads, 576), np.float16), np.zeros((1, 1), np.int32)
    with pytest.raises(UnsupportedError, match=r"a latent cache with 17 queries.*up to 16 causal"):
        oa.attention_with_kvcache(q, cache, seq_lens=np.array([20], np.int32), block_table=table)


def test_who_forgets_head_dim_v_is_told() -> None:
    rows = np.zeros((2, 8, 1, 576), np.float16)
    with pytest.raises(ArgumentError, match=r"'head_dim': .*received 576\. head_dim_v makes a latent cache"):
        oa.PagedKVCache(2, 8, 1, 576, like=rows)
    halves = oa.PagedKVCache.from_arrays(rows)
    with pytest.raises(ShapeError, match=r"head_dim 288, like the cache, received 576\. With head_dim_v"):
        oa.decode(rows[:, :1], halves, seq_lens=np.ones(2, np.int32), block_table=np.zeros((2, 1), np.int32))


# Plans for a GPU


def problem(heads: int = 128, q_len: int = 1, batch: int = 4, block_size: int = 64, **more: Any) -> DecodeProblem:
    latent = np.zeros((2, 8, 1, 576), np.float16)
    facts: CacheLayout = oa.PagedKVCache.from_arrays(latent, head_dim_v=512).facts
    row = heads * 576
    given = {
        "dtype": "float16", "cache": facts, "batch": batch, "q_len": q_len, "num_q_heads": heads, "num_kv_heads": 1,
        "head_dim": 576, "capacity": 65536, "block_size": block_size, "num_blocks": 2, "table_columns": 64,
        "window_left": -1, "softmax_scale": 0.1, "softcap": 0.0, "sinks": "none", "deterministic": False,
        "q_strides": (q_len * row, row, 576, 1), "o_strides": (q_len * heads * 512, heads * 512, 512, 1), **more,
    }  # fmt: skip
    return DecodeProblem(**given)


def launches(asked: DecodeProblem, target: Target = HOPPER) -> tuple[LaunchRecord, LaunchRecord]:
    main, combine = plan_decode(asked, target, None).records
    return main, combine


@pytest.mark.parametrize(
    ("heads", "q_len", "blocks", "workers"), [(128, 1, 2, 64), (128, 2, 4, 32), (5, 16, 2, 64), (17, 1, 1, 132)]
)
def test_blocks_of_rows_share_the_sms(heads: int, q_len: int, blocks: int, workers: int) -> None:
    main, combine = launches(problem(heads, q_len))
    many = heads * q_len >= 64 and heads != 5  # of 64 rows (token, head) some tokens' heads would be in two blocks
    assert main.spec.name == f"mla_decode_{'rows16_sm90_fp16_d576v512' if many else 'sm90_fp16_d576v512_tma'}"
    assert combine.spec.name == "mla_combine_sm80_fp16_d512"
    # 4 sequences: a whole number of CTAs each.
    assert main.grid == (blocks, workers - workers % 4, 1)
    assert main.threads == 384
    assert combine.overlap


AMPERE = Target((8, 0), 163 << 10, 108)
ADA = Target((8, 9), 99 << 10, 128)


@pytest.mark.parametrize(
    ("target", "heads", "q_len", "tile", "workers"),
    [(AMPERE, 16, 1, 16, 216), (ADA, 16, 1, 16, 128), (AMPERE, 17, 1, 32, 108),
     (ADA, 128, 1, 64, 64), (AMPERE, 128, 2, 64, 27), (ADA, 40, 1, 64, 128)],
)  # fmt: skip
def test_the_general_kernels_tile_is_for_so_many_rows(
    target: Target, heads: int, q_len: int, tile: int, workers: int
) -> None:
    main, combine = launches(problem(heads, q_len), target)
    assert main.spec.name == f"mla_decode_sm80_fp16_d576v512_r{tile}"
    assert combine.spec.name == "mla_combine_sm80_fp16_d512"
    blocks = -(-heads * q_len // tile)
    assert main.grid == (blocks, workers, 1)
    assert not main.tensor_maps
    at = MLA_DECODE.offsets["slot_rows"]
    assert int.from_bytes(combine.arguments[at : at + 4], "little") == blocks * tile


@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (8, 2), (16, 1)])
def test_few_rows_have_a_kernel_of_hoppers(heads: int, q_len: int) -> None:
    main, _ = launches(problem(heads, q_len))
    assert main.spec.name == "mla_decode_few_sm90_fp16_d576v512"
    assert main.grid == (1, 132, 1)
    assert main.threads == 2 * 256 + 128
    assert not main.tensor_maps


@pytest.mark.parametrize(
    ("heads", "keys", "name", "grid"),
    [(16, 4096, "few_sm90_fp16_d576v512", (1, 64, 1)), (32, 4096, "few_sm90_fp16_d576v512", (2, 32, 1)),
     (128, 1024, "few_sm90_fp16_d576v512", (8, 8, 1)), (128, 4096, "rows16_sm90_fp16_d576v512", (2, 32, 1)),
     (16, 32768, "few_sm90_fp16_d576v512", (1, 64, 1)), (64, 32768, "rows16_sm90_fp16_d576v512", (1, 64, 1)),
     (16, 65536, "few_sm90_fp16_d576v512", (1, 132, 1))],
)  # fmt: skip
def test_one_sequence(heads: int, keys: int, name: str, grid: tuple[int, int, int]) -> None:
    """Little to do for CTAs of 16 rows; and no more results than warps merge at once, where keys are few enough."""
    main, _ = launches(problem(heads, batch=1, capacity=keys))
    assert (main.spec.name, main.grid) == (f"mla_decode_{name}", grid)


def test_deterministic_calls_do_not_depend_on_how_little_there_is() -> None:
    main, _ = launches(problem(128, batch=1, capacity=1024, deterministic=True))
    assert main.spec.name == "mla_decode_rows16_sm90_fp16_d576v512"


def test_a_named_kernel_is_taken() -> None:
    for name in ("mla_decode_sm80_fp16_d576v512_r64", "mla_decode_sm90_fp16_d576v512"):
        assert plan_decode(problem(16), HOPPER, name).records[0].spec.name == name
    with pytest.raises(ArgumentError, match="mla_decode_sm90"):
        plan_decode(problem(16), AMPERE, "mla_decode_sm90_fp16_d576v512")


@pytest.mark.parametrize(
    ("block_size", "columns", "maps", "rows"),
    [(64, 64, True, 64), (256, 16, True, 64), (48, 9, True, 16), (8, 9, True, 8), (4, 9, True, 0), (1, 9, True, 0),
     (4097, 1, True, 64), (64, 64, False, 0)],
)  # fmt: skip
def test_rows_that_a_copy_brings(block_size: int, columns: int, maps: bool, rows: int) -> None:
    main, _ = launches(problem(32, block_size=block_size, table_columns=columns, tensor_maps=maps))
    at = MLA_DECODE.offsets["box_rows_log2"]
    log2 = int.from_bytes(main.arguments[at : at + 4], "little")
    assert len(main.tensor_maps) == (rows > 0)
    assert (1 << log2 if log2 else 0) == rows
    for map_ in main.tensor_maps:
        assert map_.box == (64, rows, 1, 1)
        assert map_.dims == (576, block_size, 1, 2)


@pytest.mark.parametrize(
    ("heads", "q_len", "block_size", "maps", "name"),
    [(128, 1, 64, True, "rows16_sm90_fp16_d576v512"), (128, 2, 256, True, "rows16_sm90_fp16_d576v512"),
     (32, 3, 64, True, "rows16_sm90_fp16_d576v512"), (65, 1, 64, True, "sm90_fp16_d576v512_tma"),
     (48, 2, 64, True, "sm90_fp16_d576v512_tma"), (100, 1, 64, True, "sm90_fp16_d576v512_tma"),
     (64, 1, 64, True, "rows16_sm90_fp16_d576v512"), (63, 1, 64, True, "sm90_fp16_d576v512_tma"),
     (32, 1, 64, True, "sm90_fp16_d576v512_tma"), (128, 1, 32, True, "sm90_fp16_d576v512_tma"),
     (128, 1, 64, False, "sm90_fp16_d576v512")],
)  # fmt: skip
def test_whole_blocks_of_keys_and_many_rows(heads: int, q_len: int, block_size: int, maps: bool, name: str) -> None:
    main, _ = launches(problem(heads, q_len, block_size=block_size, table_columns=64, tensor_maps=maps))
    assert main.spec.name == f"mla_decode_{name}"
    if name.startswith("rows16"):
        keys, queries = main.tensor_maps
        assert (keys.dims, keys.box) == ((64, block_size, 9, 2), (64, 64, 9, 1))
        assert (queries.dims, queries.box) == (
            (64, heads, q_len, 9, 4),
            (64, min(heads, 64), max(64 // heads, 1), 9, 1),
        )
        of_tokens = 1152 * heads if q_len > 1 else 16
        assert queries.strides_bytes == (1152, of_tokens, 128, 1152 * heads * q_len)
        assert queries.offset == MLA_DECODE.offsets["map_q"]


@pytest.mark.parametrize(
    ("more", "box"),
    [({}, (64, 1)), ({"total_queries": 7}, (64, 1)), ({"total_queries": 0}, (0, 0)), ({"tensor_maps": False}, (0, 0)),
     ({"q_strides": (1, -73728, 576, 1)}, (0, 0)), ({"q_strides": (1, 73728, 1 << 39, 1)}, (0, 0))],
)  # fmt: skip
def test_queries_that_a_copy_brings(more: dict[str, Any], box: tuple[int, int]) -> None:
    assert query_box(problem(128, 2, **more)) == box


def test_one_query_of_any_stride_has_a_copy() -> None:
    assert query_box(problem(128, 1, batch=1, q_strides=(-1, -1, 576, 1))) == (64, 1)


def test_the_reason_says_that_no_copy_brings_queries() -> None:
    for heads, said in ((100, True), (128, False)):
        (way,) = decode_ways(problem(heads), HOPPER)
        assert ("no copy brings 64 of its 100 query rows" in way.passes[0].main.why[0]) == said


@pytest.mark.parametrize(
    ("dtype", "heads", "name"),
    [("bfloat16", 16, "few_sm90_bf16_d576v512_656"), ("bfloat16", 17, "rows8_sm90_bf16_d576v512_656"),
     ("bfloat16", 128, "rows8_sm90_bf16_d576v512_656"), ("float16", 128, "sm80_fp16_d576v512_656_r64")],
)  # fmt: skip
def test_rows_of_656_bytes(dtype: str, heads: int, name: str) -> None:
    cache = oa.PagedKVCache(2, 64, 1, 576, head_dim_v=512, k_dtype="fp8_ds_mla", like=np.zeros(0)).facts
    main, _ = launches(problem(heads, dtype=dtype, cache=cache))
    assert main.spec.name == f"mla_decode_{name}"
    assert not main.tensor_maps
    assert main.smem_bytes == main.spec.smem_bytes


def test_partial_results_have_the_rows_of_all_blocks() -> None:
    main, combine = launches(problem(128, 2))
    size = plan_decode(problem(128, 2), HOPPER, None).workspace_bytes
    workers, rows = main.grid[1], 4 * 64
    assert size == 2 * workers * rows * (4 * 512 + 8)
    at = MLA_DECODE.offsets["decode.num_row_blocks"]
    assert int.from_bytes(combine.arguments[at : at + 4], "little") == 4
    assert combine.grid[1:] == (1, 1)


def test_other_gpus_and_widths_raise() -> None:
    with pytest.raises(UnsupportedError, match=r"8\.0"):
        launches(problem(), Target((7, 5), 64 << 10, 40))
    narrow: CacheLayout = oa.PagedKVCache.from_arrays(pool(), head_dim_v=16).facts
    with pytest.raises(UnsupportedError, match="rows of 24 channels, 16 of them V"):
        launches(problem(cache=narrow, head_dim=24))


def test_calls_without_queries() -> None:
    cache = oa.PagedKVCache.from_arrays(pool(dim=24), head_dim_v=16)
    table, lens = np.zeros((3, 2), np.int32), np.array([3, 2, 1], np.int32)

    def call(shape: tuple[int, ...], batch: int = 3, **options: Any) -> Any:
        q = np.zeros((*shape, 8, 24), np.float16)
        return oa.attention_with_kvcache(q, cache, seq_lens=lens[:batch], block_table=table[:batch], **options)

    nobody: dict[str, Any] = {"cu_seqlens_q": np.zeros(4, np.int32), "max_seqlen_q": 0, "return_lse": True}
    assert call((0, 1), 0).shape == (0, 1, 8, 16)
    assert call((3, 0)).shape == (3, 0, 8, 16)
    assert [x.shape for x in call((0,), **nobody)] == [(0, 8, 16), (8, 0)]
    assert call((0,), 0, cu_seqlens_q=np.zeros(1, np.int32), max_seqlen_q=1).shape == (0, 8, 16)
    for longest in (0, 1, 100):
        none = {"cu_seqlens_q": np.zeros(1, np.int32), "max_seqlen_q": longest, "return_lse": True}
        for o, lse in (call((5,), **nobody), call((5,), 0, **none)):
            assert o.shape == (5, 8, 16)
            assert not o.any()
            assert (lse == -np.inf).all()


@pytest.mark.parametrize("target", [HOPPER, AMPERE])
def test_rows_and_no_sequence_are_cleared_by_the_kernel_that_merges(target: Target) -> None:
    """Nothing is ahead of it that it could overlap with."""
    without = problem(batch=0, q_len=1, total_queries=40, table_columns=1)
    (record,) = plan_decode(without, target, None).records
    assert record.spec.op == "latent_combine"
    assert not record.overlap
    assert record.grid[0] >= 1
    assert plan_decode(replace(without, total_queries=0), target, None).records == ()


@pytest.mark.parametrize("given", [np.int64(16), np.array(16)])
def test_head_dim_v_of_any_integer_type(given: Any) -> None:
    found = oa.PagedKVCache.from_arrays(pool(dim=32), head_dim_v=given)
    assert type(found.v_format.head_dim) is int
