"""Which tiles see each other, worked out by the device compiler from the kernels' own code, against every pair."""

from __future__ import annotations

import random

import pytest

from build_tools.layouts import device_constants

BLOCK_M, BLOCK_N = 16, 8


def cases() -> list[tuple[int, int, int, int]]:
    rng = random.Random(5)
    far = (2**31 - 513, 2**31 - 514)
    some = [(rng.randint(1, 70), rng.randint(1, 70), *(rng.choice((-1, 0, rng.randint(0, 30), rng.choice(far)))
            for _ in range(2))) for _ in range(60)]  # fmt: skip
    return [*some, (40, 40, -1, 0), (17, 64, -1, 0), (64, 17, -1, 0), (33, 33, -1, -1), (64, 64, 0, 0)]


def sees(row: int, key: int, case: tuple[int, int, int, int]) -> bool:
    seqlen_q, seqlen_k, left, right = case
    center = row + seqlen_k - seqlen_q
    return 0 <= key < seqlen_k and (left < 0 or key >= center - left) and (right < 0 or key <= center + right)


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


@pytest.mark.parametrize("struct", ["KeyTiles", "QueryTiles"])
def test_tiles_hold_every_visible_pair(struct: str) -> None:
    """KeyTiles: tiles of keys for a block of queries; QueryTiles: tiles of queries for a block of keys."""
    by_keys = struct == "QueryTiles"
    own, other = (BLOCK_N, BLOCK_M) if by_keys else (BLOCK_M, BLOCK_N)
    places = [(case, at) for case in cases() for at in range(0, case[1 if by_keys else 0], own)]
    numbers = [
        f"{struct}<{BLOCK_M}, {BLOCK_N}>({at}, {', '.join(map(str, case))}).{member}"
        for case, at in places
        for member in ("first", "end", "full_first", "full_end")
    ]
    found = list(map(signed, device_constants("attention/query_tiles.cuh", numbers)))
    for i, (case, at) in enumerate(places):
        first, end, full_first, full_end = found[4 * i : 4 * i + 4]
        extent = case[0 if by_keys else 1]
        mine = range(at, min(at + own, case[1 if by_keys else 0]))
        for tile in range(-(-extent // other)):
            theirs = range(tile * other, tile * other + other)
            pairs = [sees(*((y, x) if by_keys else (x, y)), case) for x in mine for y in theirs if y < extent]
            if any(pairs):
                assert first <= tile < end, (case, at, tile)
            if max(first, full_first) <= tile < min(end, full_end):
                assert all(pairs), (case, at, tile)
                assert theirs[-1] < extent, "elements behind the end need a mask"
                assert not by_keys or at + own <= case[1], "keys behind the end need a mask"
        # No more tiles than the range of what is seen.
        seen = [y for y in range(extent) if any(sees(*((y, x) if by_keys else (x, y)), case) for x in mine)]
        if seen:
            assert (first, end) == (seen[0] // other, seen[-1] // other + 1), (case, at)


def test_splits_of_tiles_of_keys() -> None:
    """SplitKeyTiles: splits follow each other, and together are the tiles of keys that a tile of packed rows sees."""
    rng = random.Random(6)
    places = [
        (case, pack, m0, splits)
        for case in cases()[:40]
        for pack, splits in ((rng.choice((1, 2, 4, 16)), rng.choice((1, 2, 3, 5, 12))),)
        for m0 in range(0, case[0] * pack, BLOCK_M)
    ]
    members = ("first", "end")
    numbers = [
        f"SplitKeyTiles<{BLOCK_M}, {BLOCK_N}>({m0}, {pack}, {case[0]}, {case[1]}, {case[2]}, {case[3]}, {split}, "
        f"{splits}).{member}"
        for case, pack, m0, splits in places
        for split in range(splits)
        for member in members
    ]
    found = iter(map(signed, device_constants("attention/split_keys.cuh", numbers)))
    for case, pack, m0, splits in places:
        rows = sorted({row // pack for row in range(m0, min(m0 + BLOCK_M, case[0] * pack))})
        seen = [y // BLOCK_N for y in range(case[1]) if any(sees(row, y, case) for row in rows)]
        spans = [(next(found), next(found)) for _ in range(splits)]
        tiles = [tile for first, end in spans for tile in range(first, end)]
        assert len(set(tiles)) == len(tiles)
        assert set(seen) <= set(tiles)
        if seen:
            assert tiles == list(range(seen[0], seen[-1] + 1)), (case, pack, m0, splits)
        lengths = [max(end - first, 0) for first, end in spans]
        assert max(lengths) - min(lengths) <= 1
