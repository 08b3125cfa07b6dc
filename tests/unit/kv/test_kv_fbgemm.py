"""FBGEMM's int4 rows: what an independent reader finds in them, what is read of rows that another writer made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from omniattn import reference, testing
from omniattn.errors import ArgumentError
from omniattn.kv.cache import KVCache, PagedKVCache
from omniattn.kv.formats import KVFormat, check_format
from omniattn.ops import append, copy_blocks, decode
from omniattn.reference import kv_cache

Array = npt.NDArray[Any]
LIKE = np.zeros(1, dtype=np.float32)
DOCS = Path(__file__).parents[3] / "docs"
#: head_dim, groups.
ROWS = ((64, 1), (128, 1), (128, 4), (256, 1), (256, 4))


def lengths(*values: int) -> Array:
    return np.array(values, dtype=np.int32)


def read_row(row: Array, groups: int) -> Array:
    """One row by the layout's description, byte by byte."""
    dim = 2 * (len(row) - 4 * groups)
    out = np.empty(dim, dtype=np.float32)
    for channel in range(dim):
        at = 4 * (channel * groups // dim)
        scale, shift = np.frombuffer(row[at : at + 4].tobytes(), dtype="<f2").astype(np.float32)
        nibble = int(row[4 * groups + channel // 2]) >> (4 * (channel % 2)) & 15
        out[channel] = np.float32(nibble) * scale + shift
    return out


def published_row(x: Array, groups: int) -> Array:
    """A row as FBGEMM's own quantizer makes it: nearest fp16 of both parameters, codes by the unrounded ones."""
    parts, nibbles = [], []
    for part in x.reshape(groups, -1):
        scale = (part.max() - part.min()) / np.float32(15)
        inverse = 15.0 / (float(scale) * 15.0 + 1e-8)
        parts.append(np.array([scale, part.min()], dtype="<f2"))
        nibbles.append(np.rint((part - part.min()) * inverse).astype(np.uint8) & 15)
    codes = np.concatenate(nibbles)
    return np.concatenate([np.concatenate(parts).view(np.uint8), codes[0::2] | codes[1::2] << 4])


def options(dim: int, groups: int) -> dict[str, Any]:
    return {"like": LIKE, "k_dtype": "int4", "layout": "fbgemm", "group_size": None if groups == 1 else dim // groups}


@pytest.mark.parametrize(("dim", "groups"), ROWS)
def test_every_bit_belongs_to_one_element_or_parameter(dim: int, groups: int) -> None:
    fmt = check_format("int4", dim, dim // groups, True, "test", is_key=True, layout="fbgemm")
    assert fmt.row_bytes == fmt.token_bytes == dim // 2 + 4 * groups
    bits = [fmt.position(channel) + i for channel in range(dim) for i in range(4)]
    assert bits == list(range(32 * groups, 8 * fmt.row_bytes))


@pytest.mark.parametrize(("dim", "groups"), ROWS)
@pytest.mark.parametrize("kind", ["normal", "biased", "large", "tiny", "constant", "zero"])
def test_error_is_at_most_half_a_step(dim: int, groups: int, kind: str) -> None:
    fmt = KVFormat("int4", dim, dim // groups, True, False, "fbgemm")
    x = np.random.default_rng(1).standard_normal((40, dim)).astype(np.float32)
    x = {
        "normal": x, "biased": x + 300, "large": x * 1e4, "tiny": x * np.float32(1e-30),
        "constant": np.full_like(x, 2.7), "zero": -0.0 * np.abs(x),
    }[kind]  # fmt: skip
    data, params = kv_cache.encode(x, fmt)
    assert params.shape == (40, 0)
    assert data.shape == (40, fmt.row_bytes)
    back = kv_cache.decode_rows(data, params, fmt)
    scale = np.repeat(data[:, : 4 * groups].copy().view("<f2")[:, 0::2].astype(np.float32), dim // groups, axis=-1)
    assert (np.abs(back.astype(np.float64) - x) <= 0.5001 * scale + 2.0**-22 * np.abs(x)).all()
    # No larger than it has to be: a step of fp16 beyond a fifteenth of the range.
    ranges = np.ptp(x.reshape(40, groups, -1), axis=-1).repeat(dim // groups, axis=-1)
    assert (scale <= (ranges + 2.0**-10 * np.abs(x).max()) / 15 * (1 + 2.0**-10) + 2.0**-23).all()
    np.testing.assert_array_equal(back, np.stack([read_row(row, groups) for row in data]))
    assert not np.signbit(back[back == 0]).any()


@pytest.mark.parametrize(("dim", "groups"), ROWS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e6, -7e4])
def test_what_fp16_cannot_hold_marks_its_group_and_no_other(dim: int, groups: int, bad: float) -> None:
    fmt = KVFormat("int4", dim, dim // groups, True, True, "fbgemm")
    x = np.random.default_rng(2).standard_normal((1, dim)).astype(np.float32)
    x[0, 5] = bad
    back = kv_cache.decode_rows(*kv_cache.encode(x, fmt), fmt)[0]
    assert np.isnan(back[: fmt.group_size]).all()
    assert np.isfinite(back[fmt.group_size :]).all()


def test_no_rows_are_rows_too() -> None:
    fmt = KVFormat("int4", 128, 32, True, True, "fbgemm")
    data, params = kv_cache.encode(np.zeros((0, 2, 128), dtype=np.float32), fmt)
    assert data.shape == (0, 2, 80)
    assert kv_cache.decode_rows(data, params, fmt).shape == (0, 2, 128)


def test_rounding_down_to_fp16() -> None:
    x = np.array([1.0, 1.0001, -1.0001, 65504.0, 65519.0, 7e4, -65504.0, -65505.0, -7e4, 1e-9, -1e-9], np.float32)
    got = kv_cache.fp16_down(x)
    assert (got <= x).all()
    np.testing.assert_array_equal(got.astype(np.float16).astype(np.float32), got)
    expected = [1.0, 1.0, -1.0009765625, 65504.0, 65504.0, 65504.0, -65504.0, -np.inf, -np.inf, 0.0, -(2.0**-24)]
    np.testing.assert_array_equal(got, np.array(expected, dtype=np.float32))


@pytest.mark.parametrize(("dim", "groups"), ROWS)
def test_append_writes_rows_that_another_reader_understands(dim: int, groups: int) -> None:
    _, k, v = testing.make_qkv("normal", batch=2, seqlen_q=1, seqlen_k=9, heads_q=2, heads_kv=2, head_dim=dim)
    cache = KVCache(2, 12, 2, dim, **options(dim, groups))
    assert cache.k.shape == cache.v.shape == (2, 12, 2, dim // 2 + 4 * groups)
    assert cache.k_params is None
    assert cache.nbytes == 48 * (dim + 8 * groups)
    append(cache, k, v, seq_lens=lengths(9, 12))
    for plane, x in ((cache.k, k), (cache.v, v)):
        for b, first in ((0, 0), (1, 3)):
            for t in range(9):
                for head in range(2):
                    error = np.abs(read_row(plane[b, first + t, head], groups) - x[b, t, head]).max()
                    assert error <= 0.51 * np.ptp(x[b, t, head]) / 15 + 1e-3


@pytest.mark.parametrize(("dim", "groups"), ROWS)
@pytest.mark.parametrize("paged", [False, True])
def test_decode_reads_rows_of_another_writer(dim: int, groups: int, paged: bool) -> None:
    q, k, v = testing.make_qkv("normal", batch=2, seqlen_q=2, seqlen_k=12, heads_q=4, heads_kv=2, head_dim=dim)
    rows = [np.array([[[published_row(r, groups) for r in t] for t in s] for s in x]) for x in (k, v)]
    seen = [np.array([[[read_row(r, groups) for r in t] for t in s] for s in x]) for x in rows]
    pages: dict[str, Any] = {}
    if paged:
        cache: KVCache = PagedKVCache(8, 4, 2, dim, **options(dim, groups))
        table = np.random.default_rng(3).permutation(8)[:6].reshape(2, 3).astype(np.int32)
        for plane, x in ((cache.k, rows[0]), (cache.v, rows[1])):
            plane[table] = x.reshape(2, 3, 4, 2, -1)
        pages["block_table"] = table
    else:
        cache = KVCache(2, 12, 2, dim, **options(dim, groups))
        cache.k[...], cache.v[...] = rows
    o, lse = decode(q, cache, seq_lens=lengths(12, 12), return_lse=True, **pages)
    exact_o, exact_lse = reference.attention(q, *seen, causal=True)
    np.testing.assert_allclose(o, exact_o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


def test_accuracy_is_that_of_the_own_layout() -> None:
    q, k, v = testing.make_qkv("normal", batch=2, seqlen_q=1, seqlen_k=200, heads_q=4, heads_kv=2, head_dim=128)
    exact, _ = reference.attention(q, k, v, causal=True)
    errors = []
    for layout in ("fragment", "fbgemm"):
        cache = KVCache(2, 200, 2, 128, **(options(128, 4) | {"layout": layout}))
        append(cache, k, v, seq_lens=lengths(200, 200))
        o = decode(q, cache, seq_lens=lengths(200, 200))
        errors.append(float(np.abs(o - exact).sum() / np.abs(exact).sum()))
    assert errors[1] <= 1.1 * errors[0]


def test_changes_of_keys_and_copies_of_blocks() -> None:
    q, k, v = testing.make_qkv("normal", batch=1, seqlen_q=1, seqlen_k=8, heads_q=2, heads_kv=2, head_dim=64)
    mean = k.mean(axis=(0, 1))
    cache = PagedKVCache(4, 4, 2, 64, **options(64, 1), k_mean=mean, hadamard=True)
    table = np.array([[0, 1]], dtype=np.int32)
    append(cache, k, v, seq_lens=lengths(8), block_table=table)
    o = decode(q, cache, seq_lens=lengths(8), block_table=table)
    copy_blocks(cache, [(0, 3), (1, 2)])
    cache.k[:2] = 0
    again = decode(q, cache, seq_lens=lengths(8), block_table=np.array([[3, 2]], dtype=np.int32))
    np.testing.assert_array_equal(o, again)
    exact, _ = reference.attention(q, k, v, causal=True)
    assert float(np.abs(o - exact).sum() / np.abs(exact).sum()) <= 0.2


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"layout": "fbgem"}, "layout"),
        ({"layout": None}, "layout"),
        ({"k_dtype": "int8"}, "k_dtype"),
        ({"k_dtype": "bf16"}, "k_dtype"),
        ({"v_dtype": "fp8"}, "v_dtype"),
        ({"head_dim": 96}, "head_dim"),
        ({"group_size": 64}, "group_size"),
        ({"head_dim": 64, "group_size": 32}, "group_size"),
        ({"zero_point": False}, "zero_point"),
    ],
)
def test_what_the_layout_does_not_have(changes: dict[str, Any], argument: str) -> None:
    call = {"batch": 1, "max_seqlen": 4, "num_kv_heads": 1, "head_dim": 128} | options(128, 1)
    with pytest.raises(ArgumentError) as caught:
        KVCache(**(call | changes))
    assert caught.value.argument == argument


@pytest.mark.parametrize("groups", [1, 4])
def test_examples_of_the_documentation(groups: int) -> None:
    """Each line ``| FBGEMM, 4 groups | channel | word of parameters | byte | low bit |``, head_dim 128."""
    text = (DOCS / "kv_formats.md").read_text(encoding="utf-8")
    name = "FBGEMM, row-wise" if groups == 1 else "FBGEMM, 4 groups"
    rows = re.findall(rf"^\| {name} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) >= 4
    fmt = KVFormat("int4", 128, 128 // groups, True, True, "fbgemm")
    for channel, word, byte, bit in (map(int, row) for row in rows):
        assert fmt.position(channel) == 8 * byte + bit
        assert word == 4 * (channel // fmt.group_size)


def place(w: int, dim: int) -> int:
    """FbgemmRow::place of decode/kv_row.cuh."""
    pieces = min(dim // 32, 4)
    j, q = w >> 2, w & 3
    return ((j // pieces * 4 + q) * pieces + j % pieces) * 4


def swizzle(t: int, dim: int, is_key: bool) -> int:
    """KTile::swizzle and VTile::swizzle."""
    if is_key:
        return ((t >> 2) & 1) << 2
    return {8: (t & 3) << 1, 4: ((t >> 1) & 1) << 1, 2: 0}[dim // 32]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("tile", [16, 32])
def test_lanes_find_their_channels(dim: int, is_key: bool, tile: int) -> None:
    """Copies, swizzle, loads and the order of the nibbles, worked out again: lanes multiply what they believe to."""
    words, rows = dim // 8, 256 // dim
    memory: dict[int, tuple[int, int]] = {}
    for i in range(tile // rows):
        for lane in range(32):
            first, w = lane // words, lane % words
            at = i * 128 + ((first * 4 * words + place(w, dim)) ^ (swizzle(i * rows, dim, is_key) << 4))
            assert at not in memory
            memory[at] = (i * rows + first, w)
    assert sorted(memory) == list(range(0, tile * dim // 2, 4))
    units = dim // 16 if is_key else dim // 32
    loaded = 2 if is_key else 4  # bytes that a lane loads for a unit
    piece = min(units * loaded, 16)
    for t in range(tile):
        seen = set()
        for lane in range(4 if is_key else 8):
            for unit in range(units):
                slot = unit * loaded // 4 * 4
                spot = slot // piece * 4 + (lane if is_key else lane // 2)
                at = ((t * dim // 2 + spot * piece) ^ (swizzle(t, dim, is_key) << 4)) + slot % piece
                token, w = memory[at]
                assert token == t
                for element in range(4):
                    if is_key:
                        # unpack_int4: register j has nibbles j and j + 4; two registers a unit.
                        nibble = 2 * (unit & 1) + (element >> 1) + 4 * (element & 1)
                        # order_fbgemm_query: from two units of four channels side by side.
                        pair = [8 * (4 * (unit >> 1) + lane) + c for c in range(8)]
                        ordered = (0, 4, 1, 5, 2, 6, 3, 7)
                        channel = pair[ordered[4 * (unit & 1) + element]]
                    else:
                        nibble = 4 * (lane & 1) + element
                        channel = 4 * (8 * unit + lane) + element
                    assert channel == 8 * w + nibble
                    seen.add(channel)
        assert seen == set(range(dim))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("is_key", [True, False])
def test_loads_of_a_warp_meet_all_banks(dim: int, is_key: bool) -> None:
    """Eight lanes of a 16-byte load (sixteen of an 8-byte one), each bank by one address."""
    piece = min(dim // 8, 16)
    for part in range(dim // 8 // piece):
        for first in range(0, 32, 128 // piece):
            found: dict[int, int] = {}
            for lane in range(first, first + 128 // piece):
                q, g = lane & 3, lane >> 2
                # token_of_row(g) and lane q for K; token q and lane g for V.
                t, spot = (((g >> 1) & 3) + 4 * (g & 1), q) if is_key else (q, g // 2)
                at = (t * dim // 2 + (part * 4 + spot) * piece) ^ (swizzle(t, dim, is_key) << 4)
                assert found.setdefault(at % 128, at) == at
