"""Latent caches of the package's own, and `append` to them: bytes, places, errors; and the kernel, run on the CPU."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from omniattn.launch.structs import LATENT_APPEND
from omniattn.plan.others import plan_append
from omniattn.problems import Target
from omniattn.reference.attention import attention
from omniattn.reference.e4m3 import encode_e4m3
from omniattn.reference.kv_cache import decode_656, encode_656
from tests.host_kernels import HostKernels

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
DTYPES = ("fp16", "bf16", "fp8", "fp8_ds_mla")
LENGTHS = np.array([21, 0, 7, 34], np.int32)
STARTS = np.cumsum([0, *LENGTHS]).astype(np.int32)
SCALE = 0.0371


def tokens(*lead: int, dtype: Any = np.float16, seed: int = 1, width: int = 576) -> Any:
    return np.random.default_rng(seed).standard_normal((*lead, width)).astype(dtype)


def scale_of(k_dtype: str) -> dict[str, Any]:
    return {"k_scale": np.array([SCALE], np.float32)} if k_dtype == "fp8" else {}


def paged(k_dtype: str, size: int = 5, blocks: int = 30, **options: Any) -> Any:
    made = oa.PagedKVCache(
        blocks, size, 1, 576, like=np.zeros(1, np.float16), k_dtype=k_dtype, head_dim_v=512, **scale_of(k_dtype),
        **options,
    )  # fmt: skip
    made.k.view(np.uint8)[...] = 0xFF
    return made


def table(size: int, blocks: int = 30) -> Any:
    columns = -(-int(LENGTHS.max()) // size)
    return np.random.default_rng(size).permutation(blocks)[: 4 * columns].reshape(4, columns).astype(np.int32)


def stored(x: Any, k_dtype: str) -> Any:
    """Bytes of rows, by the formats' definitions."""
    x = np.asarray(x).astype(np.float32)
    if k_dtype in ("fp16", "bf16"):
        return x.astype({"fp16": np.float16, "bf16": BF16}[k_dtype]).view(np.uint8)
    if k_dtype == "fp8":
        return np.clip(x / np.float32(SCALE), -448, 448).astype(E4M3).view(np.uint8)
    groups = x[..., :512].reshape(*x.shape[:-1], 4, 128)
    scales = np.maximum(np.abs(groups).max(-1) / np.float32(448), np.float32(2.0**-126))
    codes = (groups / scales[..., None]).astype(E4M3).reshape(*x.shape[:-1], 512)
    return np.concatenate([part.view(np.uint8) for part in (codes, scales, x[..., 512:].astype(BF16))], -1)


def meant(data: Any, k_dtype: str) -> Any:
    if k_dtype in ("fp16", "bf16"):
        return data.view({"fp16": np.float16, "bf16": BF16}[k_dtype]).astype(np.float32)
    return data.view(E4M3).astype(np.float32) * np.float32(SCALE) if k_dtype == "fp8" else decode_656(data)


@pytest.mark.parametrize("k_dtype", DTYPES)
def test_append_and_decode(k_dtype: str) -> None:
    x = tokens(int(LENGTHS.sum()))
    cache, places = paged(k_dtype), table(5)
    oa.append(cache, x, seq_lens=LENGTHS, cu_seqlens=STARTS, block_table=places)
    data, want = cache.k.view(np.uint8), stored(x, k_dtype)
    q = tokens(4, 1, 3, seed=2)
    o = oa.decode(q, cache, seq_lens=LENGTHS, block_table=places, softmax_scale=0.04)
    for b, n in enumerate(LENGTHS):
        at = np.arange(n)
        own = data[places[b, at // 5], at % 5, 0]
        np.testing.assert_array_equal(own, want[STARTS[b] : STARTS[b + 1]])
        keys = meant(own, k_dtype)[None, :, None]
        expected, _ = attention(q[b : b + 1], keys, keys[..., :512], softmax_scale=0.04)
        np.testing.assert_allclose(o[b].astype(np.float32), expected[0], atol=2e-3)
    used = np.zeros(data.shape[:2], bool)
    for b, n in enumerate(LENGTHS):
        used[places[b, np.arange(n) // 5], np.arange(n) % 5] = True
    assert (data[~used] == 0xFF).all()


@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize("rope", [None, "half", "interleaved"])
def test_every_way_to_give_tokens_is_the_same(k_dtype: str, rope: str | None) -> None:
    """Side by side or apart, with the head's dimension or without, packed, in a batch, by slots."""
    batch = np.array([6, 6], np.int32)
    x, places = tokens(2, 6), np.array([[3, 0], [1, 4]], np.int32)
    angles = np.random.default_rng(3).uniform(0, 6, (6, 32))
    rotation: dict[str, Any] = {} if rope is None else {
        "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32), "rope": rope
    }  # fmt: skip
    flat, starts = x.reshape(12, 576), np.array([0, 6, 12], np.int32)
    slots = (5 * places[:, np.arange(6) // 5] + np.arange(6) % 5).reshape(-1).astype(np.int64)
    by_slot = {"slot_mapping": slots, **({"positions": np.tile(np.arange(6), 2)} if rope else {})}
    wide = np.zeros((12, 2112), np.float16)
    wide[:, 1536:] = flat
    found = []
    for k, rest, where in (
        (x, {}, {"seq_lens": batch, "block_table": places}),
        (x[:, :, None], {}, {"seq_lens": batch, "block_table": places}),
        (x[..., :512].copy(), {"k_pe": x[..., 512:].copy()}, {"seq_lens": batch, "block_table": places}),
        (x[..., None, :512], {"k_pe": x[..., 512:]}, {"seq_lens": batch, "block_table": places}),
        (flat, {}, {"seq_lens": batch, "cu_seqlens": starts, "block_table": places}),
        (flat[:, :512], {"k_pe": flat[:, None, 512:]}, by_slot),
        (wide[:, 1536:2048], {"k_pe": wide[:, 2048:]}, by_slot),
    ):
        cache = paged(k_dtype, blocks=5)
        oa.append(cache, k, **rest, **where, **rotation)
        found.append(cache.k.view(np.uint8))
    assert all(np.array_equal(one, found[0]) for one in found)
    if rope is not None:
        plain = paged(k_dtype, blocks=5)
        oa.append(plain, x, seq_lens=batch, block_table=places)
        behind = {"fp8": 512, "fp8_ds_mla": 528}.get(k_dtype, 1024)
        different = (plain.k.view(np.uint8) != found[0]).any(axis=(0, 1, 2))
        assert not different[:behind].any()
        assert different[behind:].any()


@pytest.mark.parametrize("k_dtype", DTYPES)
def test_arrays_of_the_caller_get_the_same_bytes(k_dtype: str) -> None:
    x, places = tokens(int(LENGTHS.sum())), table(5)
    own = paged(k_dtype)
    kind = {"fp16": np.float16, "bf16": BF16, "fp8": E4M3, "fp8_ds_mla": np.uint8}[k_dtype]
    width = own.k.shape[-1]
    memory = np.full((30, 2, 5, 1, width + 16), 0, kind)  # two layers, and gaps between rows
    theirs = oa.PagedKVCache.from_arrays(memory[:, 1, ..., :width], head_dim_v=512, **scale_of(k_dtype))
    for cache in (own, theirs):
        oa.append(cache, x, seq_lens=LENGTHS, cu_seqlens=STARTS, block_table=places)
    for b, n in enumerate(LENGTHS):
        at = places[b, np.arange(n) // 5], np.arange(n) % 5
        np.testing.assert_array_equal(theirs.k[at].view(np.uint8), own.k[at].view(np.uint8))
    assert not memory[:, 0].view(np.uint8).any()
    assert not memory[..., width:].view(np.uint8).any()


def test_scales_and_values_that_are_not_finite() -> None:
    x = tokens(6, dtype=np.float32)
    x[0, 3], x[1, 130], x[2, 256:384], x[3, :128] = math.inf, math.nan, 0.0, 1e-44
    x[4, 520], x[5, 0] = math.nan, 3e38
    data = encode_656(x)
    scales = data[:, 512:528].copy().view(np.float32)
    assert np.isnan(scales[0, 0])
    assert np.isnan(scales[1, 1])
    assert np.isnan(scales).sum() == 2
    assert scales[2, 2] == scales[3, 0] == np.float32(2.0**-126)
    assert not data[0, :128].any()
    assert not data[1, 128:256].any()
    rows = decode_656(data)
    assert np.isnan(rows[0, :128]).all()
    assert not rows[2, 256:384].any()
    assert np.isnan(rows[4, 520])
    assert np.isfinite(rows[5]).all()
    np.testing.assert_allclose(rows[5, 0], 3e38, rtol=1e-6)
    x = tokens(3, dtype=np.float32)
    x[0, 3], x[1, 4], x[2, 5] = math.inf, math.nan, -1e6
    cache = paged("fp8")
    oa.append(cache, x, slot_mapping=np.array([0, 1, 2]))
    codes = cache.k[0, :3, 0]
    assert (codes[0, 3], codes[1, 4], codes[2, 5]) == (0x7E, 0x7F, 0xFE)


@pytest.mark.parametrize("k_dtype", DTYPES)
def test_copies_swaps_and_pickles(k_dtype: str) -> None:
    x, size = tokens(40), 5
    cache = paged(k_dtype)
    space = oa.SwapSpace(cache, 4)
    manager = oa.BlockManager(30, size, swap_space=space)
    manager.add("a")
    manager.extend({"a": 20})
    lens, places = manager.seq_lens(["a"]), manager.block_table(["a"])
    oa.append(cache, x[None, :20], seq_lens=lens, block_table=places)
    before = cache.k.view(np.uint8)[places[0]].copy()
    assert space.nbytes == 4 * before[0].nbytes
    manager.swap_out("a")
    cache.k.view(np.uint8)[...] = 0
    manager.swap_in("a")
    np.testing.assert_array_equal(cache.k.view(np.uint8)[list(manager.blocks("a"))], before)
    free = next(i for i in range(30) if i not in manager.blocks("a"))
    oa.copy_blocks(cache, [(manager.blocks("a")[0], free)])
    np.testing.assert_array_equal(cache.k.view(np.uint8)[free], before[0])
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert repr(other) == repr(cache)
        assert other.facts == cache.facts
        np.testing.assert_array_equal(other.k.view(np.uint8), cache.k.view(np.uint8))
        oa.append(other, x[:1], slot_mapping=np.array([3]))


def test_what_a_cache_says() -> None:
    expected = {"fp16": (1152, "fp16"), "bf16": (1152, "bf16"), "fp8": (576, "fp8"), "fp8_ds_mla": (656, "fp8_ds_mla")}
    for k_dtype, (row, name) in expected.items():
        cache = paged(k_dtype, 4, 3)
        assert (cache.token_bytes, cache.nbytes) == (row, 12 * row)
        assert repr(cache) == f"<PagedKVCache 3 x 4 tokens, latent rows of 576, 512 of them V, {name}, cpu>"
        assert cache.v is None
        assert cache.facts.is_latent
        assert cache.k.shape == (3, 4, 1, row // cache.k.itemsize)


LIKE = np.zeros(1, np.float16)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_kv_heads": 2}, "'num_kv_heads': expected 1 with head_dim_v"),
        ({"head_dim_v": 576}, "'head_dim_v': expected a multiple of 8 below 576"),
        ({"head_dim_v": 500}, "'head_dim_v': expected a multiple of 8"),
        ({"head_dim_v": None}, "'head_dim': expected a multiple of 8 from 8 to 512"),
        ({"head_dim_v": None, "head_dim": 64, "k_scale": LIKE}, "'k_scale': expected None without head_dim_v"),
        ({"head_dim_v": None, "head_dim": 64, "k_dtype": "fp8_ds_mla"}, "'k_dtype'"),
        ({"head_dim": 584}, "'head_dim': expected a multiple of 8 from 8 to 576"),
        ({"head_dim": 568, "k_dtype": "fp8"}, "'head_dim': expected a multiple of 16"),
        ({"head_dim": 320, "head_dim_v": 256, "k_dtype": "fp8_ds_mla"}, "'head_dim': expected 576"),
        ({"head_dim_v": 256, "k_dtype": "fp8_ds_mla"}, "'head_dim_v': expected 512"),
        ({"k_dtype": "int8"}, "'k_dtype': expected 'bf16' or 'fp16' or 'fp8' or 'fp8_ds_mla'"),
        ({"k_dtype": 3}, "'k_dtype'"),
        ({"v_dtype": "bf16"}, "'v_dtype': expected None with head_dim_v"),
        ({"group_size": 128}, "'group_size': expected None"),
        ({"zero_point": False}, "'zero_point': expected True"),
        ({"layout": "fbgemm"}, "'layout': expected 'fragment'"),
        ({"hadamard": True}, "'hadamard': expected False"),
        ({"k_mean": np.zeros((1, 576), np.float32)}, "'k_mean': expected None with head_dim_v, received ndarray"),
        ({"recent_window": 16}, "'recent_window': expected 0"),
        ({"recent_slots": 2}, "'recent_slots': expected None"),
        ({"k_scale": np.ones(1, np.float32)}, "'k_scale': expected None but with k_dtype 'fp8'"),
        ({"k_dtype": "fp8", "k_scale": np.ones(2, np.float32)}, r"'k_scale': expected shape \(1,\), .*received \(2,\)"),
        ({"k_dtype": "fp8", "k_scale": np.ones(1)}, "'k_scale': expected float32"),
    ],
)  # fmt: skip
def test_what_constructors_refuse(given: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "k_dtype": "fp16", **given}
    with pytest.raises(ArgumentError, match=said):
        oa.PagedKVCache(4, 16, arguments.pop("num_kv_heads"), arguments.pop("head_dim"), like=LIKE, **arguments)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"v": tokens(3)}, ArgumentError, "'v': expected None with a latent cache"),
        ({"k": tokens(3, width=512)}, ShapeError, r"'k': expected .*576"),
        ({"k": tokens(3, 2)}, ShapeError, "'k'"),
        ({"k_pe": tokens(3, width=64)}, ShapeError, r"'k': expected .*512"),
        ({"k": tokens(3, width=512), "k_pe": tokens(2, width=64)}, ShapeError, "'k_pe'"),
        ({"k": tokens(3, width=512), "k_pe": tokens(3, width=32)}, ShapeError, "'k_pe'"),
        ({"k": tokens(3, width=512), "k_pe": tokens(3, width=64, dtype=np.float32)}, DtypeError, "'k_pe'"),
        ({"cos": np.ones((9, 33), np.float32)}, ArgumentError, "'sin'"),
        ({"cos": np.ones((9, 33), np.float32), "sin": np.ones((9, 33), np.float32)}, ShapeError, "1 to 32 pairs"),
        ({"slot_mapping": np.array([0, 1, 150])}, ArgumentError, "slots below 150"),
    ],
)  # fmt: skip
def test_what_append_refuses(given: dict[str, Any], error: type[Exception], said: str) -> None:
    cache = paged("fp16")
    call: dict[str, Any] = {"k": tokens(3), "slot_mapping": np.array([0, 1, -1]), **given}
    with pytest.raises(error, match=said):
        oa.append(cache, **call)
    assert (cache.k.view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize("slots", [[], [-1, -1, -7]])
def test_no_token_has_a_slot(k_dtype: str, slots: list[int]) -> None:
    cache = paged(k_dtype)
    for lead in ((3,), (3, 1)):
        oa.append(cache, tokens(*lead), slot_mapping=np.array(slots, np.int64))
    assert (cache.k.view(np.uint8) == 0xFF).all()


def test_k_pe_and_v_of_other_caches() -> None:
    cache, x = oa.KVCache(1, 8, 1, 64, like=LIKE, k_dtype="fp16"), tokens(1, 2, 1, width=64)
    lens = np.array([2], np.int32)
    with pytest.raises(ArgumentError, match="'k_pe': expected None but with a latent cache"):
        oa.append(cache, x, x, k_pe=x, seq_lens=lens)
    with pytest.raises(ArgumentError, match="'v': expected an array"):
        oa.append(cache, x, seq_lens=lens)


def problem(cache: Any, **options: Any) -> Any:
    """What `append` finds a call to be."""
    from omniattn.checks.append import AppendOptions, check_append
    from omniattn.ops.append import _APPEND
    from omniattn.plan.engine import Call, describe

    names = {"k": tokens(3), "slot_mapping": np.array([0, 1, -1]), **options}
    call = Call(_APPEND, tuple(names.get(name) for name in _APPEND.arrays), AppendOptions("half"), None, cache)
    return check_append(call, describe(call, None))


@pytest.mark.parametrize("k_dtype", ["fp16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_launches(k_dtype: str, cc: tuple[int, int]) -> None:
    target = Target(cc, 99 << 10, 100)
    (record,) = plan_append(problem(paged(k_dtype)), target, None).records
    suffix = {"fp16": "", "fp8": "_e4m3", "fp8_ds_mla": "_656"}[k_dtype]
    assert record.spec.name == f"latent_append_sm80_fp16_d576v512{suffix}"
    assert record.grid == (1, 1, 1)
    assert len(record.arguments) == LATENT_APPEND.size
    at = {p.offset: (p.operand, p.add) for p in record.pointers}
    assert at[LATENT_APPEND.offsets["k_pe"]] == ("k", 1024)
    apart = problem(paged(k_dtype), k=tokens(3, width=512), k_pe=tokens(3, width=64))
    at = {p.offset: (p.operand, p.add) for p in plan_append(apart, target, None).records[0].pointers}
    assert at[LATENT_APPEND.offsets["k_pe"]] == ("k_pe", 0)


def test_no_kernel_for_other_widths() -> None:
    narrow = oa.PagedKVCache(4, 16, 1, 320, like=LIKE, k_dtype="fp16", head_dim_v=256)
    with pytest.raises(UnsupportedError, match="rows of 320 channels, 256 of them V"):
        plan_append(problem(narrow, k=tokens(3, width=320)), Target((9, 0), 99 << 10, 100), None)
    x = tokens(3, width=320)
    oa.append(narrow, x, slot_mapping=np.array([0, 1, 17]))  # the CPU takes them
    np.testing.assert_array_equal(narrow.k[1, 1, 0], x[2])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch)


def same_rows(ours: Any, theirs: Any, k_dtype: str) -> None:
    """Equal bytes, NaN of 16 bits whatever its bits."""
    a, b = (x.view(np.uint8).reshape(-1, x.view(np.uint8).shape[-1]) for x in (ours, theirs))
    behind = {"fp8": 576, "fp8_ds_mla": 528}.get(k_dtype, 0)
    np.testing.assert_array_equal(a[:, :behind], b[:, :behind])
    kind = np.float16 if k_dtype == "fp16" else BF16
    if behind < 576:
        x, y = (np.ascontiguousarray(z[:, behind:]).view(kind).astype(np.float32) for z in (a, b))
        np.testing.assert_array_equal(x, y)


def difficult(dtype: Any) -> Any:
    """Rows of many magnitudes, of zeros with signs, with values that are not finite."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((int(LENGTHS.sum()), 576)).astype(np.float32)
    if dtype is BF16:
        x[:40] *= np.exp2(rng.integers(-130, 120, (40, 1))).astype(np.float32)
    x[3, :200] = -0.0
    x[5, 7], x[6, 300], x[7, 575], x[8, 130:140] = math.inf, math.nan, -math.inf, math.nan
    x[9] = 0.0
    x[10, 100] = 1e-40
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "k_dtype"),
    [(np.float16, "fp16"), (BF16, "bf16"), (BF16, "fp8"), (np.float16, "fp8"), (BF16, "fp8_ds_mla"),
     (np.float16, "fp8_ds_mla")],
)  # fmt: skip
def test_the_kernel_writes_what_the_reference_writes(kernels: HostKernels, dtype: Any, k_dtype: str) -> None:
    x, places = difficult(dtype), table(5)
    k, k_pe = np.ascontiguousarray(x[:, :512]), np.ascontiguousarray(x[:, None, 512:])
    angles = np.random.default_rng(3).uniform(0, 6, (int(LENGTHS.max()), 32))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    few = {"cos": np.ascontiguousarray(cos[:, :12]), "sin": np.ascontiguousarray(sin[:, :12])}
    half = {"cos": np.ascontiguousarray(cos[:, :16]), "sin": np.ascontiguousarray(sin[:, :16])}
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    slots = np.random.default_rng(4).permutation(150)[: len(x)].astype(np.int64)
    slots[[0, 9, 30]] = -1
    by_position = {"seq_lens": LENGTHS, "cu_seqlens": STARTS, "block_table": places}
    square = {"seq_lens": np.array([7, 3, 9, 2, 30], np.int32)}
    square["block_table"] = np.arange(30, dtype=np.int32).reshape(5, 6)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (x, by_position), (k, {"k_pe": k_pe, **by_position, "cos": cos, "sin": sin}),
        (k, {"k_pe": k_pe[:, 0], "slot_mapping": slots, "positions": positions, "rope": "interleaved", **few}),
        (x, {"slot_mapping": slots[:50].astype(np.int32)}),
        (k, {"k_pe": k_pe, "slot_mapping": slots, "positions": positions.astype(np.int32), **few}),
        (k, {"k_pe": k_pe, "slot_mapping": slots, "positions": positions, **half}),
        (k, {"k_pe": k_pe, **by_position, **half, "rope": "interleaved"}),
        (x[:10].reshape(5, 2, 576), {**square, "cos": cos, "sin": sin, "rope": "interleaved"}),
    ]  # fmt: skip
    for given, options in calls:
        ours, theirs = paged(k_dtype), paged(k_dtype)
        kernels(oa.append, ours, given, **options)
        oa.append(theirs, given, **options)
        same_rows(ours.k, theirs.k, k_dtype)


@pytest.mark.parametrize("scale", [0.0, -2.0, math.nan, math.inf, 1e-25, 1e25, 3e-39])
def test_scales_that_are_not_usual(kernels: HostKernels, scale: float) -> None:
    x = difficult(BF16)
    ours, theirs = paged("fp8"), paged("fp8")
    for cache in (ours, theirs):
        cache.k_scale[...] = scale
    with np.errstate(all="ignore"):
        kernels(oa.append, ours, x, slot_mapping=np.arange(len(x)))
        oa.append(theirs, x, slot_mapping=np.arange(len(x)))
    same_rows(ours.k, theirs.k, "fp8")


def test_places_outside_of_the_cache_are_not_written(kernels: HostKernels) -> None:
    """On a GPU nobody looks at them before."""
    x = tokens(6)
    cache = paged("fp16", 5, 4)
    kernels(oa.append, cache, x, slot_mapping=np.array([-1, 20, 3, 1 << 40, -(1 << 40), 4]))
    written = (cache.k.view(np.uint8) != 0xFF).any(-1)[..., 0]
    assert [tuple(at) for at in np.argwhere(written)] == [(0, 3), (0, 4)]
    cache = paged("fp16", 5, 4)
    lens, bad = np.array([3, 9, 1], np.int32), np.array([[9], [0], [-1]], np.int32)
    kernels(oa.append, cache, x[:, None].reshape(3, 2, 576), seq_lens=lens, block_table=bad)
    assert (cache.k.view(np.uint8) == 0xFF).all()
    angles = np.ones((2, 32), np.float32)
    kernels(
        oa.append,
        cache,
        x[:3],
        slot_mapping=np.array([0, 1, 2]),
        positions=np.array([1, 2, -7]),
        cos=angles,
        sin=angles,
    )
    assert np.isnan(cache.k[0, 1:3, 0, 512:].astype(np.float32)).all()
    assert np.isfinite(cache.k[0, :3, 0, :512].astype(np.float32)).all()
    assert np.isfinite(cache.k[0, 0].astype(np.float32)).all()


def test_codes_are_those_of_a_division() -> None:
    """The kernel's division by a reciprocal and two corrections, in float32 by float64's exact products."""
    rng = np.random.default_rng(11)
    x = (rng.standard_normal(200000) * np.exp2(rng.integers(-6, 3, 200000))).astype(BF16).astype(np.float32)
    s = (np.abs(rng.standard_normal(200000)) + 0.01).astype(np.float32) / np.float32(448)
    inverse = np.float32(1) / s

    def fma(a: Any, b: Any, c: Any) -> Any:
        # Products of 24 bits are exact in float64; sums of these are rounded twice, nearly always to the same.
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)

    q = x * inverse
    for _ in range(2):
        q = fma(fma(-q, s, x), inverse, q)
    np.testing.assert_array_equal(q, x / s)
    np.testing.assert_array_equal(encode_e4m3(q), encode_e4m3(x / s))
