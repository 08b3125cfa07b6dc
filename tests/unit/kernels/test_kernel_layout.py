"""Index arithmetic of the kernels, worked out again in Python. What is shared with the host: test_struct_layouts.py.

The formulas are those of tile/panel.cuh, pipeline/tile_copy.cuh, attention/mask.cuh and scheduler/fwd_tile.cuh.
"""

from __future__ import annotations

import heapq
import random
import re
from pathlib import Path

import numpy as np
import pytest

from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import REGISTRY, KernelSpec

KERNELS = Path(__file__).parents[3] / "kernels_cu"
FORWARD = [spec for spec in REGISTRY if spec.family == "attn_fwd_sm80"]
# (rows, head_dim) of every tile that a kernel keeps in shared memory.
TILES = sorted({(rows, spec.head_dim) for spec in FORWARD for rows in (spec.block_m, spec.block_n)})


def panel_offset(rows: int, head_dim: int, row: int, chunk: int) -> int:
    """Byte of 16-byte chunk `chunk` of row `row`."""
    panel, full_panels = chunk // 8, head_dim // 64
    if panel == full_panels:  # the 64-byte rows of an odd multiple of 32 columns
        return full_panels * rows * 128 + row * 64 + 16 * ((chunk % 4) ^ (row // 2 % 4))
    return panel * rows * 128 + row * 128 + 16 * ((chunk % 8) ^ (row % 8))


def banks(offsets: list[int]) -> set[int]:
    """16-byte bank groups that eight 16-byte accesses touch."""
    return {offset // 16 % 8 for offset in offsets}


@pytest.mark.parametrize(("rows", "head_dim"), TILES)
def test_every_chunk_has_a_place_of_its_own(rows: int, head_dim: int) -> None:
    places = {panel_offset(rows, head_dim, row, chunk) for row in range(rows) for chunk in range(head_dim // 8)}
    assert places == set(range(0, rows * head_dim * 2, 16))


@pytest.mark.parametrize(("rows", "head_dim"), TILES)
def test_ldmatrix_and_row_accesses_have_no_bank_conflict(rows: int, head_dim: int) -> None:
    """One 8x8 matrix of ldmatrix: the same chunk of 8 rows. A copy: 8 lanes that follow each other."""
    full_panels, has_tail = head_dim // 64, head_dim % 64 != 0
    for first in range(0, rows, 8):
        for chunk in range(head_dim // 8):
            assert len(banks([panel_offset(rows, head_dim, first + r, chunk) for r in range(8)])) == 8
    for row in range(rows):
        for panel in range(full_panels):
            assert len(banks([panel_offset(rows, head_dim, row, panel * 8 + c) for c in range(8)])) == 8
    if has_tail:
        for row in range(0, rows, 2):
            lanes = [panel_offset(rows, head_dim, row + lane // 4, full_panels * 8 + lane % 4) for lane in range(8)]
            assert len(banks(lanes)) == 8


@pytest.mark.parametrize(("rows", "head_dim"), TILES)
def test_address_of_a_step_is_one_xor(rows: int, head_dim: int) -> None:
    """PanelLane computes a lane's offset once and reaches the other columns by XOR."""
    full_panels = head_dim // 64
    for row in range(16):
        for half in range(2):
            full = row * 128 + ((half ^ (row & 7)) << 4)
            tail = row * 64 + ((half ^ ((row >> 1) & 3)) << 4)
            for base in range(0, rows - 15, 8):
                for step in range(head_dim // 16):
                    panel = step >> 2
                    if panel == full_panels:
                        at = (tail ^ ((step & 1) << 5)) + full_panels * rows * 128 + base * 64
                    else:
                        at = (full ^ ((step & 3) << 5)) + panel * rows * 128 + base * 128
                    assert at == panel_offset(rows, head_dim, base + row, 2 * step + half)


@pytest.mark.parametrize("spec", FORWARD, ids=lambda spec: spec.name)
def test_copies_fill_each_tile_once(spec: KernelSpec) -> None:
    """Every chunk is written by exactly one thread and step, at the place where ldmatrix looks for it."""
    threads, head_dim = spec.num_warps * 32, spec.head_dim
    full_panels = head_dim // 64
    for rows in (spec.block_m, spec.block_n):
        written: dict[int, tuple[int, int]] = {}

        def write(place: int, row: int, chunk: int, written: dict[int, tuple[int, int]] = written) -> None:
            assert place not in written
            written[place] = (row, chunk)

        for tid in range(threads):
            if full_panels:
                row0, chunk = tid >> 3, tid & 7
                dst = row0 * 128 + ((chunk ^ (row0 & 7)) << 4)
                for r in range(0, rows, threads // 8):
                    if row0 + r < rows:
                        to = dst ^ ((r & 4) << 4) if threads // 8 % 8 else dst
                        for panel in range(full_panels):
                            write(to + panel * rows * 128 + r * 128, row0 + r, panel * 8 + chunk)
            if head_dim % 64:
                row0, chunk = tid >> 2, tid & 3
                dst = full_panels * rows * 128 + row0 * 64 + ((chunk ^ ((row0 >> 1) & 3)) << 4)
                for r in range(0, rows, threads // 4):
                    if row0 + r < rows:
                        write(dst + r * 64, row0 + r, full_panels * 8 + chunk)
        expected = {
            panel_offset(rows, head_dim, row, chunk): (row, chunk)
            for row in range(rows)
            for chunk in range(head_dim // 8)
        }
        assert written == expected


@pytest.mark.parametrize("threads", [32, 64, 128])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_every_step_of_a_copy_orders_its_rows(rows: int, threads: int) -> None:
    """FourKeys reorders 16 rows: a step of fewer cannot take its source rows from those of the first step."""

    def row_at(slot: int) -> int:
        return (slot & ~15) | (slot >> 1 & 3) << 2 | (slot >> 3 & 1) << 1 | (slot & 1)

    step = threads // 8
    copied = {}
    for slot in range(step):
        for r in range(0, rows, step):
            copied[slot + r] = row_at(slot) + r if step % 16 == 0 else row_at(slot + r)
    assert copied == {slot: row_at(slot) for slot in range(rows)}
    assert sorted(copied.values()) == list(range(rows))


@pytest.mark.parametrize("spec", FORWARD, ids=lambda spec: spec.name)
def test_shared_memory_of_a_row(spec: KernelSpec) -> None:
    """SharedStorage aligns each member to 1024 bytes; smem_bytes has to leave room for that (here: none is needed)."""
    stages = int(dict(spec.defines)["NUM_STAGES"])
    sizes = [spec.block_m * spec.head_dim * 2, *[spec.block_n * spec.head_dim * 2] * (2 * stages)]
    wide = spec.head_dim > 256  # two warps have the same rows: scores that they exchange, a mask for each
    if spec.score_mods:
        sizes.append(spec.block_m * spec.block_n * 4 * (1 + wide))
    if wide:
        sizes.append(spec.block_m * spec.block_n * 4)
    assert all(size % 1024 == 0 for size in sizes)
    assert spec.smem_bytes == sum(sizes)
    if spec.smem_bytes > 99 * 1024:  # what a CTA may have on sm_86, sm_89 and sm_120: another row serves those
        kind = spec.dtype, spec.head_dim, spec.score_mods, spec.other_head_dim_v
        same = [s for s in FORWARD if (s.dtype, s.head_dim, s.score_mods, s.other_head_dim_v) == kind]
        assert any(s.smem_bytes <= 99 * 1024 and s.min_arch == (8, 0) for s in same)


def visible(row: int, sq: int, sk: int, left: int, right: int) -> tuple[int, int]:
    """visible_keys: keys lo <= j < hi."""
    center = row + sk - sq
    lo = 0 if left < 0 else max(min(center - left, sk), 0)
    hi = sk if right < 0 else max(min(center + right + 1, sk), 0)
    return lo, hi


def test_walk_over_key_tiles_meets_every_visible_pair() -> None:
    """The tiles that a CTA walks, and the ones that it does not mask, against the definition of the window."""
    rng = random.Random(7)
    far = (2**31 - 513, 2**31 - 514)
    for _ in range(4000):
        sq, sk = rng.randint(1, 90), rng.randint(0, 90)
        left, right = (rng.choice((-1, 0, rng.randint(0, 40), rng.choice(far))) for _ in range(2))
        block_m, block_n = rng.choice((16, 32)), rng.choice((8, 16, 24))
        for m0 in range(0, sq, block_m):
            last = min(m0 + block_m, sq) - 1
            first_lo, first_hi = visible(m0, sq, sk, left, right)
            last_lo, last_hi = visible(last, sq, sk, left, right)
            n_first, n_end = first_lo // block_n, -(-last_hi // block_n)
            n_full_first, n_full_end = -(-last_lo // block_n), first_hi // block_n
            for row in range(m0, last + 1):
                lo, hi = visible(row, sq, sk, left, right)
                center = row + sk - sq
                met = set()
                for n in range(n_end - 1, n_first - 1, -1):
                    unmasked = n_full_first <= n < n_full_end
                    met |= {j for j in range(n * block_n, (n + 1) * block_n) if unmasked or lo <= j < hi}
                assert met == {
                    j for j in range(sk) if (left < 0 or j >= center - left) and (right < 0 or j <= center + right)
                }, (sq, sk, left, right, m0, row)


def dense_tile(tile_idx: int, heads: int, blocks: int, causal: bool) -> tuple[int, int]:
    """(head, block of query rows) of a tile, as scheduler/fwd_tile.cuh has it below 2^31 tiles."""
    if not causal:
        return tile_idx // blocks, blocks - 1 - tile_idx % blocks
    turn_heads = min(max(TURN_TILES // blocks, 1), TURN_HEADS)
    turn, behind = divmod(heads * blocks - 1 - tile_idx, turn_heads * blocks)
    end = heads - turn * turn_heads
    block, place = divmod(behind, min(turn_heads, end))
    return end - 1 - place, block


TURN_HEADS, TURN_TILES = 16, 1024


def test_heads_that_take_turns_are_those_of_the_kernel() -> None:
    text = (KERNELS / "scheduler/fwd_tile.cuh").read_text(encoding="utf-8")
    assert f"kInterleavedHeads = {TURN_HEADS}, kInterleavedTiles = {TURN_TILES};" in text


@pytest.mark.parametrize("causal", [False, True])
def test_dense_tiles_are_all_there_once(causal: bool) -> None:
    for heads in (1, 2, 15, 16, 17, 40):
        for blocks in (1, 2, 7, 64, 65, 1025):
            tiles = [dense_tile(i, heads, blocks, causal) for i in range(heads * blocks)]
            assert sorted(tiles) == [(head, block) for head in range(heads) for block in range(blocks)]


@pytest.mark.parametrize(("heads", "blocks"), [(32, 64), (40, 64), (33, 47), (64, 32), (16, 256)])
def test_causal_launches_end_together(heads: int, blocks: int) -> None:
    """264 places of an H200 take the next tile as they get free: none is busy for long after the first is idle."""

    def ends(order: bool) -> list[int]:
        free = [0] * 264
        for i in range(heads * blocks):
            heapq.heapreplace(free, free[0] + dense_tile(i, heads, blocks, order)[1] + 1)
        return free

    work = heads * blocks * (blocks + 1) / 2 / 264
    assert max(ends(True)) <= 1.08 * work
    assert max(ends(True)) <= max(ends(False))


def varlen_tile(starts_q: list[int], total_q: int, block: int, block_m: int) -> tuple[int | None, int, int, int] | None:
    """(sequence or None, begin, length, first row) of a packed tile; None for nothing to do."""
    batch = len(starts_q) - 1
    for base in range(0, batch, 32):
        lanes: list[tuple[int, int, int]] = []
        inclusive: list[int] = []
        for lane in range(32):
            b = min(base + lane, batch - 1)
            lo = min(max(starts_q[b], 0), total_q)
            hi = min(max(starts_q[b + 1], lo), total_q)
            blocks = -(-(hi - lo) // block_m) if base + lane < batch else 0
            lanes.append((lo, hi, blocks))
            inclusive.append(blocks + (inclusive[-1] if inclusive else 0))
        for lane, (lo, hi, blocks) in enumerate(lanes):
            if inclusive[lane] > block:
                return base + lane, lo, hi - lo, (blocks - 1 - (block - (inclusive[lane] - blocks))) * block_m
        block -= inclusive[31]
    first = min(max(starts_q[0], 0), total_q) if batch else total_q
    end = min(max(starts_q[batch], first), total_q) if batch else total_q
    head_blocks = -(-first // block_m)
    begin, length = (0, first) if block < head_blocks else (end, total_q - end)
    m0 = (block if block < head_blocks else block - head_blocks) * block_m
    return (None, begin, length, m0) if m0 < length else None


@pytest.mark.parametrize("batch", [0, 1, 5, 31, 32, 33, 64, 65])
def test_packed_tiles_cover_each_row_once(batch: int) -> None:
    rng = random.Random(batch)
    for _ in range(60):
        block_m, total = 16, rng.randint(0, 400)
        starts = sorted(rng.choice((rng.randint(0, total), 0, total)) for _ in range(batch + 1))
        if rng.random() < 0.5:
            starts[0] = 0
        # As launch/attn_fwd.py sizes the grid.
        grid = -(-total // block_m) + batch + 2 if total else 0
        owner: dict[int, int | None] = {}
        for block in range(grid):
            tile = varlen_tile(starts, total, block, block_m)
            if tile is None:
                continue
            sequence, begin, length, m0 = tile
            assert 0 <= m0 < length
            for row in range(begin + m0, begin + min(m0 + block_m, length)):
                assert row not in owner
                owner[row] = sequence
        expected: dict[int, int | None] = dict.fromkeys(range(total))
        for b in range(batch):
            expected.update(dict.fromkeys(range(starts[b], starts[b + 1]), b))
        assert owner == expected


def test_garbage_lengths_stay_inside_the_tensor() -> None:
    rng = random.Random(3)
    for _ in range(300):
        total, batch = rng.randint(1, 200), rng.randint(1, 70)
        starts = [rng.choice((rng.randint(-(2**31), 2**31 - 1), rng.randint(-5, 250))) for _ in range(batch + 1)]
        for block in range(-(-total // 16) + batch + 2):
            tile = varlen_tile(starts, total, block, 16)
            if tile is not None:
                _, begin, length, m0 = tile
                assert begin >= 0
                assert begin + length <= total
                assert 0 <= m0 < length


def test_p_that_has_no_room_in_e4m3_shows_in_its_byte() -> None:
    text = (KERNELS / "attention/p_e4m3.cuh").read_text(encoding="utf-8")
    named = {name: int(value, 16) for name, value in re.findall(r"\b(k\w+) = (0x[0-9a-f]+)", text)}
    ones, to_sign, signs = (named[name] for name in ("kOnes", "kToSign", "kSigns"))
    codes = np.arange(128, dtype=np.uint8)  # P is never negative
    values = decode_e4m3(codes)
    too_large = np.isnan(values) | (values == 448)
    # Every code in every place, beside any others: the addition must not carry into the next byte.
    rng = np.random.default_rng(0)
    for place in range(4):
        words = rng.integers(0, 128, (128, 64, 4)).astype(np.uint8)
        words[:, :, place] = codes[:, None]
        marked = (words.view("<u4")[..., 0].astype(np.uint64) + to_sign).astype("<u4") & np.uint32(signs)
        shown = marked[..., None].view(np.uint8)
        np.testing.assert_array_equal(shown != 0, too_large[words])
        assert set(np.unique(shown)) <= {0, 0x80}
    assert set(ones.to_bytes(4, "little")) == set(encode_e4m3(np.ones(1, np.float32)).tolist())
    # At the base P becomes an e4m3 number, and one that does not count as too large.
    found = re.search(r"kBaseLog2 = ([\d.]+)f;", text)
    assert found is not None
    at_base = np.array([2.0 ** float(found[1])], np.float32)
    assert at_base[0] <= 28 == decode_e4m3(encode_e4m3(at_base))[0]
