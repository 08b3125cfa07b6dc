"""What ``mask_pack_sm80`` and ``mask_list_sm80`` make of a mask, in NumPy: the same bits."""

from __future__ import annotations

import numpy as np

from omniattn.reference.core import Array, Options, key_range
from omniattn.registry.masks import PACK_TILES

#: What a mask does to a tile of 64 rows x 64 keys: hides all of it, anything else, nothing.
EMPTY, MIXED, FULL = 0, 1, 2
#: In an entry of a list: the unit of what the mask does in each group of 64 rows, two bits a group.
FIRST_GROUP = 1 << 22
#: What `lists` has where the kernel writes nothing.
UNWRITTEN = -1
#: A list's count where nothing is known of a sequence's tiles.
NO_LIST = -1

_TILE = 64


def _tiles(extent: int) -> int:
    return -(-extent // _TILE)


def pack_bits(mask: Array) -> tuple[Array, Array]:
    """Words and kinds of a boolean mask.

    Parameters
    ----------
    mask : (batch, heads, rows, cols), bool
        True: visible. With one row: the same for every query.

    Returns
    -------
    bits : (batch, heads, m_tiles, n_tiles, 128), uint32
        Thread ``t = 32w + l`` of a warpgroup, bit ``4i + 2r + x``: row ``16w + l/4 + 8r``, key ``8i + 2(l%4) + x`` of
        the tile; 0 for keys and rows that do not exist.
    kinds : (batch, heads, m_tiles, n_tiles), uint8
    """
    batch, heads, rows, cols = mask.shape
    m_tiles, n_tiles = _tiles(rows), _tiles(cols)
    shape = (batch, heads, m_tiles, _TILE, n_tiles, _TILE)
    padded = np.zeros((batch, heads, m_tiles * _TILE, n_tiles * _TILE), dtype=np.bool_)
    padded[:, :, : _TILE if rows == 1 else rows, :cols] = mask
    exists = np.zeros((m_tiles * _TILE, 1), dtype=np.bool_)
    exists[: _TILE if rows == 1 else rows] = True
    kinds = np.where((padded | ~exists).reshape(shape).all(axis=(3, 5)), FULL, MIXED)
    kinds[~padded.reshape(shape).any(axis=(3, 5))] = EMPTY
    # Axes: batch, heads, m; rows as w, r, l/4; n; keys as i, l%4, x.
    parts = padded.reshape(batch, heads, m_tiles, 4, 2, 8, n_tiles, 8, 4, 2).transpose(0, 1, 2, 6, 3, 5, 8, 7, 4, 9)
    packed = np.packbits(parts.reshape(batch, heads, m_tiles, n_tiles, 128, 32), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")[..., 0], kinds.astype(np.uint8)


def key_bias(mask: Array) -> tuple[Array, Array]:
    """Values and kinds of an additive mask that is the same for every query.

    Parameters
    ----------
    mask : (batch, heads, cols), float32

    Returns
    -------
    bias : (batch, heads, 64 n_tiles), float32
        -inf for keys that do not exist.
    kinds : (batch, heads, 1, n_tiles), uint8
        `EMPTY` where all values are -inf, `FULL` where all are 0.
    """
    batch, heads, cols = mask.shape
    n_tiles = _tiles(cols)
    bias = np.full((batch, heads, n_tiles * _TILE), -np.inf, dtype=np.float32)
    bias[..., :cols] = mask
    tiles = bias.reshape(batch, heads, 1, n_tiles, _TILE)
    kinds = np.where((tiles == 0).all(axis=-1), FULL, MIXED)
    kinds[np.isneginf(tiles).all(axis=-1)] = EMPTY
    return bias, kinds.astype(np.uint8)


def lists(
    kinds: Array,
    *,
    num_m_blocks: int,
    block_m: int,
    lead_rows: int,
    seqlen_q: int,
    seqlen_k: int,
    window_left: int,
    window_right: int,
    broadcast_rows: bool,
) -> Array:
    """Tiles of keys that each tile of query rows has to visit.

    Parameters
    ----------
    kinds : (batch, heads, m_tiles, n_tiles)
    num_m_blocks, block_m, lead_rows, seqlen_q, seqlen_k, window_left, window_right
        As in ``MaskListParams`` (kernels_cu/params/mask_tiles.cuh).
    broadcast_rows : bool
        The only tile of rows stands for all.

    Returns
    -------
    ndarray of int32
        (batch, heads, num_m_blocks, 1 + n_tiles): the count, then tiles from the last on, each with the kind in every
        group of the block's rows in units of `FIRST_GROUP`; `UNWRITTEN` behind them.
    """
    batch, heads, _, n_tiles = kinds.shape
    options = Options(1.0, 0.0, window_left, window_right, np.dtype(np.float32))
    found = np.full((batch, heads, num_m_blocks, 1 + n_tiles), UNWRITTEN, dtype=np.int32)
    found[..., 0] = 0
    for m in range(num_m_blocks):
        begin = max(m * block_m - lead_rows, 0)
        end = min((m + 1) * block_m - lead_rows, seqlen_q)
        if begin >= end:
            continue
        lo, hi = key_range(begin, end, seqlen_q, seqlen_k, options)
        groups = range(begin // _TILE, _tiles(end))
        place = begin // _TILE - (m * block_m - lead_rows) // _TILE
        for b in range(batch):
            for h in range(heads):
                of_block = kinds[b, h, [0] * len(groups) if broadcast_rows else list(groups)].astype(np.int64)
                units = (of_block << (2 * (place + np.arange(len(groups))))[:, None]).sum(axis=0)
                tiles = [n for n in reversed(range(lo // _TILE, _tiles(hi))) if units[n]]
                entries = [n + FIRST_GROUP * int(units[n]) for n in tiles]
                found[b, h, m, : 1 + len(entries)] = [len(entries), *entries]
    return found


def first_slot(begin: int, sequence: int, rows: int) -> int:
    """Number of the first of a packed sequence's blocks of ``rows`` rows among those of all (scheduler/slots.cuh)."""
    return -(-begin // rows) + sequence


def packed_lists(
    kinds: Array,
    starts_q: list[int],
    starts_k: list[int],
    *,
    num_m_blocks: int,
    block_m: int,
    window_left: int,
    window_right: int,
    broadcast_rows: bool,
    kinds_of_slots: bool = False,
) -> Array:
    """As `lists`, of packed sequences.

    Parameters
    ----------
    kinds : (batch or 1, heads, m_tiles, n_tiles)
        ``kinds_of_slots``: (1, heads, slots, n_tiles), of the sequences' own tiles.
    starts_q, starts_k : list of int
        The cumulative lengths.
    num_m_blocks, block_m, window_left, window_right, broadcast_rows
        As in `lists`; blocks of all sequences.

    Returns
    -------
    ndarray of int32
        (heads, num_m_blocks, 2 + n_tiles): the count or `NO_LIST`, the sequence, tiles; `UNWRITTEN` behind them.
        Blocks that belong to no sequence have the number of the one before them.
    """
    _, heads, _, n_tiles = kinds.shape
    found = np.full((heads, num_m_blocks, 2 + n_tiles), UNWRITTEN, dtype=np.int32)
    found[..., 0] = 0
    for b in range(len(starts_q) - 1):
        seqlen_q, seqlen_k = starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b]
        first = first_slot(starts_q[b], b, block_m)
        found[:, 0 if b == 0 else first :, 1] = b
        blocks = -(-seqlen_q // block_m)
        # As far as a mask reaches, and with hidden tiles behind it.
        tiles = max(_tiles(seqlen_k), n_tiles)
        own = np.zeros((1, heads, max(_tiles(seqlen_q), 1), tiles), dtype=np.uint8)
        if kinds_of_slots:
            at = first_slot(starts_q[b], b, _TILE)
            part = kinds[:, :, at : at + _tiles(seqlen_q)]
        else:
            part = kinds[b if len(kinds) > 1 else 0][None, :, : 1 if broadcast_rows else _tiles(seqlen_q)]
        own[:, :, : 1 if broadcast_rows else part.shape[2], :n_tiles] = part[:, :, : own.shape[2]]
        made = lists(
            own, num_m_blocks=blocks, block_m=block_m, lead_rows=0, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            window_left=window_left, window_right=window_right, broadcast_rows=broadcast_rows,
        )[0]  # fmt: skip
        found[:, first : first + blocks, 0] = made[..., 0]
        found[:, first : first + blocks, 2:] = made[..., 1 : 1 + n_tiles]
        if kinds_of_slots:
            options = Options(1.0, 0.0, window_left, window_right, np.dtype(np.float32))
            for m in range(blocks):
                rows = m * block_m, min((m + 1) * block_m, seqlen_q)
                if _tiles(key_range(*rows, seqlen_q, seqlen_k, options)[1]) > n_tiles:
                    found[:, first + m, 0], found[:, first + m, 2:] = NO_LIST, UNWRITTEN
    return found


def packed_pack_exists(starts_q: list[int], starts_k: list[int], m_tiles: int, n_tiles: int) -> Array:
    """Which tiles `mask_pack_sm80` reads of packed sequences that have a mask each: (batch, m_tiles, n_tiles), bool."""
    q, k = np.diff(starts_q)[:, None, None], np.diff(starts_k)[:, None, None]
    m, n = np.arange(m_tiles)[:, None], np.arange(n_tiles)[None] // PACK_TILES * PACK_TILES
    return np.asarray((m * _TILE < q) & (n * _TILE < k))
