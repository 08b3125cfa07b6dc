"""Masks prepared for attention, without a GPU: the reference, places, launches, arithmetic of the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omniattn.launch import masks
from omniattn.launch.host_struct import At
from omniattn.launch.structs import MASK_LIST, MASK_PACK
from omniattn.problems import AttentionProblem
from omniattn.reference import mask_tiles
from omniattn.reference.mask_tiles import EMPTY, FIRST_GROUP, FULL, MIXED, UNWRITTEN
from omniattn.registry import REGISTRY, by_name
from omniattn.testing.mask_cases import PACK_OPS, MaskCase, MaskShape, difference, mask_cases
from tests.unit.launch.launch_fakes import fields_of_record

PACK, LISTING = by_name("mask_pack_sm80_bf16"), by_name("mask_list_sm80")
MEMORY = At("workspace", 1024)


def problem(shape: MaskShape, **changes: Any) -> AttentionProblem:
    return replace(shape.problem("bfloat16"), **changes)


def build(shape: MaskShape) -> Any:
    facts = (shape.block_m, shape.lead_rows, shape.num_m_blocks)
    return masks.build(PACK, LISTING, problem(shape), *facts, MEMORY)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 200), (70, 130), (128, 64)])
def test_bits_by_their_definition(rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows)
    mask = rng.random((2, 1, rows, cols)) < 0.5
    bits, kinds = mask_tiles.pack_bits(mask)
    assert bits.shape == (2, 1, -(-rows // 64), -(-cols // 64), 128)
    assert kinds.shape == bits.shape[:-1]
    for b, _, m, n, t in np.ndindex(bits.shape):
        warp, lane = divmod(t, 32)
        word = 0
        for i, r, x in np.ndindex(8, 2, 2):
            row, key = 64 * m + 16 * warp + lane // 4 + 8 * r, 64 * n + 8 * i + 2 * (lane % 4) + x
            row = 0 if rows == 1 else row
            if row < rows and key < cols and mask[b, 0, row, key]:
                word |= 1 << (4 * i + 2 * r + x)
        assert bits[b, 0, m, n, t] == word


def test_kinds_of_bits() -> None:
    mask = np.zeros((1, 1, 100, 300), dtype=np.bool_)
    mask[:, :, :64, 64:128] = True
    mask[:, :, 63, 130] = True
    mask[:, :, 64:, 128:] = True
    _, kinds = mask_tiles.pack_bits(mask)
    # The last tile of keys ends early: keys that do not exist are hidden. Rows that do not exist hide nothing.
    assert kinds[0, 0].tolist() == [[EMPTY, FULL, MIXED, EMPTY, EMPTY], [EMPTY, EMPTY, FULL, FULL, MIXED]]
    assert mask_tiles.pack_bits(mask[:, :, 99:])[1][0, 0].tolist() == [[EMPTY, EMPTY, FULL, FULL, MIXED]]


def test_additive_masks() -> None:
    mask = np.zeros((1, 1, 330), dtype=np.float32)
    mask[..., 64:128] = -np.inf
    mask[..., 130], mask[..., 200], mask[..., 270] = np.nan, -0.0, 1e-30
    bias, kinds = mask_tiles.key_bias(mask)
    assert kinds.tolist() == [[[[FULL, EMPTY, MIXED, FULL, MIXED, MIXED]]]]
    assert np.array_equal(bias[..., :330], mask, equal_nan=True)
    assert np.isneginf(bias[..., 330:]).all()


@pytest.mark.parametrize("broadcast_rows", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 30), (0, 0)])
@pytest.mark.parametrize("lead_rows", [0, 64, 128])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(500, 500), (300, 1000), (700, 130)])
def test_lists_hold_every_visible_key(
    seqlen_q: int, seqlen_k: int, lead_rows: int, window: tuple[int, int], broadcast_rows: bool
) -> None:
    rng = np.random.default_rng(0)
    block_m, num_m_blocks = 192, 5
    m_tiles = 1 if broadcast_rows else -(-seqlen_q // 64)
    kinds = rng.choice(np.array([EMPTY, MIXED, FULL], dtype=np.uint8), (1, 2, m_tiles, -(-seqlen_k // 64)))
    found = mask_tiles.lists(
        kinds, num_m_blocks=num_m_blocks, block_m=block_m, lead_rows=lead_rows, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        window_left=window[0], window_right=window[1], broadcast_rows=broadcast_rows,
    )  # fmt: skip
    i, j = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)[None]
    inside = ((j >= i - window[0]) | (window[0] < 0)) & ((j <= i + window[1]) | (window[1] < 0))
    for h, m in np.ndindex(2, num_m_blocks):
        count, *entries = found[0, h, m].tolist()
        assert entries[count:] == [UNWRITTEN] * (len(entries) - count)
        tiles = [entry % FIRST_GROUP for entry in entries[:count]]
        assert tiles == sorted(set(tiles), reverse=True)
        rows = range(max(m * block_m - lead_rows, 0), min((m + 1) * block_m - lead_rows, seqlen_q))
        of_rows = [kinds[0, h, 0 if broadcast_rows else row // 64] for row in rows]
        for n in range(kinds.shape[-1]):
            some = any(kind[n] != EMPTY for kind in of_rows)
            if rows and some and inside[rows.start : rows.stop, 64 * n : 64 * n + 64].any():
                assert n in tiles
            if n in tiles:
                assert some
                groups = entries[tiles.index(n)] // FIRST_GROUP
                for row, kind in zip(rows, of_rows, strict=True):
                    assert groups >> 2 * ((row - m * block_m + lead_rows) // 64) & 3 == kind[n]
        if not rows:
            assert count == 0


def test_places_and_launches() -> None:
    shape = MaskShape("bool", 2, 3, 300, 1000, "b", pad=8, window=(7, 0), block_m=192, lead_rows=64)
    (pack, listing), found = build(shape)
    tiles, lists = 5 * 16, 2 * 17
    assert found.bits == At("workspace", 1024)
    assert found.key_bias is None
    assert found.kinds == At("workspace", 1024 + 3 * tiles * 512)
    assert found.lists == At("workspace", found.kinds.offset + 256)
    assert (found.tiles_stride_b, found.tiles_stride_h, found.tiles_stride_m) == (0, tiles * 128, 16 * 128)
    assert (found.lists_stride_b, found.lists_stride_h, found.num_tiles) == (0, lists, 16)
    assert found.num_bytes == 3 * tiles * 512 + 256 + 512
    assert found.num_bytes == masks.workspace_bytes(problem(shape), shape.num_m_blocks)
    assert fields_of_record(pack, MASK_PACK) == {
        "mask": At("mask"), "bits": found.bits, "key_bias": None, "kinds": found.kinds,
        "mask_stride_b": 0, "mask_stride_h": 300 * 1008, "mask_stride_q": 1008, "mask_stride_k": 1,
        "first_byte": 0, "end_byte": 2 * 300 * 1008 + 299 * 1008 + 1000, "cu_seqlens_q": None, "cu_seqlens_k": None,
        "seqused_q": None, "seqused_k": None,
        "mask_kind": 1, "mask_heads": 3, "rows": 300, "cols": 1000, "pack_log2": 0, "pack_heads": 1,
        "m_tiles": 5, "n_tiles": 16,
        "total_q": 300, "total_k": 1000,
    }  # fmt: skip
    assert (pack.grid, pack.threads, pack.overlap) == ((3 * 5 * 4, 1, 1), 128, False)
    assert fields_of_record(listing, MASK_LIST) == {
        "kinds": found.kinds, "lists": found.lists, "cu_seqlens_q": None, "cu_seqlens_k": None,
        "seqused_q": None, "seqused_k": None,
        "mask_batch": 1, "mask_heads": 3, "m_tiles": 5, "n_tiles": 16,
        "broadcast_rows": 0, "num_m_blocks": 2, "block_m": 192, "lead_rows": 64, "seqlen_q": 300, "seqlen_k": 1000,
        "window_left": 7, "window_right": 0, "pack": 1, "batch": 2, "kinds_of_slots": 0, "zero": 0,
    }  # fmt: skip
    assert (listing.grid, listing.threads, listing.overlap) == ((2, 1, 1), 128, True)


def test_places_of_values_for_each_key() -> None:
    (pack, listing), found = build(MaskShape("io", 2, 3, 300, 1000, "hq", "spread"))
    assert found.bits is None
    assert found.key_bias == At("workspace", 1024)
    assert (found.tiles_stride_b, found.tiles_stride_h, found.tiles_stride_m) == (1024, 0, 0)
    assert (found.lists_stride_b, found.lists_stride_h) == (3 * 17, 0)
    fields = fields_of_record(pack, MASK_PACK)
    assert (fields["mask_kind"], fields["rows"], fields["mask_stride_k"], fields["m_tiles"]) == (3, 1, 2, 1)
    assert (fields["first_byte"], fields["end_byte"]) == (0, 2 * (2000 + 2 * 999 + 1))
    assert fields_of_record(listing, MASK_LIST)["broadcast_rows"] == 1


def packed(shape: MaskShape, batch: int, total_q: int, total_k: int, **changes: Any) -> AttentionProblem:
    """``shape``: of the mask, as long as the longest sequences."""
    longest = {"max_seqlen_q": shape.seqlen_q, "max_seqlen_k": shape.seqlen_k}
    return problem(shape, varlen=True, batch=batch, seqlen_q=total_q, seqlen_k=total_k, **longest, **changes)


def test_places_and_launches_of_packed_sequences() -> None:
    one = packed(MaskShape("bool", 4, 3, 300, 1000, "h", window=(7, 0)), 4, 700, 1500)
    blocks = -(-700 // 192) + 4 + 2
    (pack, listing), found = masks.build(PACK, LISTING, one, 192, 0, blocks, MEMORY)
    assert found.num_bytes == masks.workspace_bytes(one, blocks)
    assert (found.lists_stride_b, found.lists_stride_h, found.num_tiles) == (0, 0, 17)
    assert (found.tiles_stride_b, found.tiles_stride_h, found.tiles_stride_m) == (5 * 16 * 128, 0, 16 * 128)
    starts = {"cu_seqlens_q": At("cu_seqlens_q"), "cu_seqlens_k": At("cu_seqlens_k")}
    fields = fields_of_record(pack, MASK_PACK)
    assert fields.items() >= {**starts, "rows": 300, "cols": 1000, "total_q": 700, "total_k": 1500}.items()
    assert pack.grid == (4 * 5 * 4, 1, 1)
    fields = fields_of_record(listing, MASK_LIST)
    assert fields.items() >= {
        **starts, "mask_batch": 4, "mask_heads": 1, "num_m_blocks": blocks, "lead_rows": 0, "seqlen_q": 700,
        "seqlen_k": 1500, "batch": 4, "kinds_of_slots": 0,
    }.items()  # fmt: skip
    assert listing.grid == (-(-blocks // 4), 1, 1)
    # A mask that is the same for all is packed whole.
    one = packed(MaskShape("bool", 4, 3, 300, 1000, "b"), 4, 700, 1500)
    (pack, listing), found = masks.build(PACK, LISTING, one, 192, 0, blocks, MEMORY)
    assert (found.lists_stride_b, found.lists_stride_h) == (0, blocks * 18)
    assert fields_of_record(pack, MASK_PACK)["cu_seqlens_q"] is None
    assert fields_of_record(listing, MASK_LIST)["cu_seqlens_q"] == At("cu_seqlens_q")
    assert listing.grid == (-(-3 * blocks // 4), 1, 1)
    none, _ = masks.build(PACK, LISTING, replace(one, batch=0), 192, 0, 6, MEMORY)
    assert none == ()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 30)])
@pytest.mark.parametrize("of_slots", [False, True])
def test_lists_of_packed_sequences(window: tuple[int, int], of_slots: bool) -> None:
    """Every sequence has the lists that it has alone; blocks of others are nobody's."""
    rng = np.random.default_rng(1)
    lengths = [(300, 700), (0, 60), (64, 0), (1, 130), (500, 200)]
    starts_q, starts_k = ([0, *np.cumsum(x).tolist()] for x in zip(*lengths, strict=True))
    block_m, blocks, n_tiles = 128, -(-starts_q[-1] // 128) + len(lengths) + 2, 8 if of_slots else 11
    m_tiles = -(-starts_q[-1] // 64) + len(lengths) if of_slots else 8
    kinds = rng.choice(np.array([EMPTY, MIXED, FULL], dtype=np.uint8), (1 if of_slots else 5, 2, m_tiles, n_tiles))
    found = mask_tiles.packed_lists(
        kinds, starts_q, starts_k, num_m_blocks=blocks, block_m=block_m, window_left=window[0],
        window_right=window[1], broadcast_rows=False, kinds_of_slots=of_slots,
    )  # fmt: skip
    taken = np.zeros(blocks, dtype=np.bool_)
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        first, own = mask_tiles.first_slot(starts_q[b], b, block_m), -(-seqlen_q // block_m)
        at = mask_tiles.first_slot(starts_q[b], b, 64)
        part = kinds[:, :, at : at + -(-seqlen_q // 64)] if of_slots else kinds[b : b + 1]
        assert not taken[first : first + own].any()
        taken[first : first + own] = True
        assert (found[:, first : first + own, 1] == b).all()
        if not seqlen_q:
            continue
        part = np.pad(part, ((0, 0), (0, 0), (0, 0), (0, 11 - n_tiles)))
        alone = mask_tiles.lists(
            part, num_m_blocks=own, block_m=block_m, lead_rows=0, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            window_left=window[0], window_right=window[1], broadcast_rows=False,
        )[0]  # fmt: skip
        for h, m in np.ndindex(2, own):
            count = found[h, first + m, 0]
            if count == mask_tiles.NO_LIST:
                assert of_slots
                assert seqlen_k > 64 * n_tiles
            else:
                assert found[h, first + m, 2 : 2 + count].tolist() == alone[h, m, 1 : 1 + alone[h, m, 0]].tolist()
    assert (found[:, ~taken, 0] == 0).all()


def test_memory_of_backward_strides() -> None:
    (pack, _), _ = build(MaskShape("bool", 1, 1, 10, 100, layout="backwards"))
    fields = fields_of_record(pack, MASK_PACK)
    assert (fields["mask_stride_q"], fields["first_byte"], fields["end_byte"]) == (-100, -900, 100)


def test_nothing_to_prepare() -> None:
    no_keys, _ = build(MaskShape("bool", 2, 1, 100, 0))
    assert [record.spec for record in no_keys] == [LISTING]
    assert not no_keys[0].overlap
    no_queries, found = build(MaskShape("bool", 2, 1, 0, 100))
    assert no_queries == ()
    assert found.num_tiles == 2


def test_masks_that_attention_reads_itself() -> None:
    booleans = MaskShape("bool", 1, 1, 100, 100)
    assert masks.takes(problem(booleans))
    packed = problem(booleans, varlen=True, max_seqlen_q=100, max_seqlen_k=100)
    assert masks.takes(packed)
    assert not masks.pay(packed)  # mma.sync reads no lists of packed sequences
    assert not masks.takes(problem(booleans, mask="none"))
    values = MaskShape("float32", 1, 1, 100, 100)
    assert not masks.takes(problem(values))
    assert masks.takes(problem(replace(values, broadcast="q")))
    assert masks.takes(problem(replace(values, seqlen_q=1)))
    with pytest.raises(AssertionError, match="reads this mask itself"):
        build(values)


@pytest.mark.parametrize("spec", [row for row in REGISTRY if row.op in PACK_OPS], ids=lambda row: row.name)
def test_faults_are_found(spec: Any) -> None:
    case = mask_cases(spec)[0]
    wanted = case.prepare().wanted
    name = "lists" if spec.op == "mask_list" else "bits"
    at, values = At("workspace", 256), wanted[name]
    before = np.full(values.nbytes + 512, 0xA5, dtype=np.uint8)
    right = before.copy()
    result = right[256:-256].view(values.dtype).reshape(values.shape)
    np.copyto(result, values, where=values != UNWRITTEN if name == "lists" else np.True_)
    assert difference(right, before, {name: (at, values)}) == ""
    for place, note in ((256, f"{name} differs in 1 of"), (255, "1 bytes outside"), (len(right) - 256, "1 bytes outs")):
        wrong = right.copy()
        wrong[place] ^= 4
        assert difference(wrong, before, {name: (at, values)}).startswith(note)


def test_cases_hold_tiles_of_all_kinds() -> None:
    for spec in (row for row in REGISTRY if row.op in PACK_OPS):
        cases: tuple[MaskCase, ...] = mask_cases(spec)
        assert {kind for case in cases for kind in np.unique(case.prepare().wanted["kinds"])} == {EMPTY, MIXED, FULL}


def test_sixteen_bytes_to_bits() -> None:
    """nonzero_bytes of mask_pack_sm80.cu."""

    def dp4a(a: int, b: int, c: int) -> int:
        return c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))

    def marks(word: int) -> int:
        return (((word & 0x7F7F7F7F) + 0x7F7F7F7F) | word) & 0x80808080

    rng = np.random.default_rng(0)
    for density in (0.1, 0.5, 0.9, 1.0):
        data = np.where(rng.random(16) < density, rng.choice([1, 2, 127, 128, 255], 16), 0).astype(np.uint8)
        a, b, c, d = data.view("<u4").tolist()
        low = dp4a(marks(b), 0x80402010, dp4a(marks(a), 0x08040201, 0))
        high = dp4a(marks(d), 0x80402010, dp4a(marks(c), 0x08040201, 0))
        assert (low >> 7 | high << 1) == sum(int(x != 0) << i for i, x in enumerate(data))
