// What a map of visible blocks and a user's mask expression do to each tile of 64 query rows x 64 keys.
//
//   kinds[b, h, m, n] = empty, mixed or full (params/mask_tiles.cuh); full tiles have all their keys
//
// Without an expression a visible block's tiles are full, and a thread takes a tile. With one a warp does: lane l the
// keys l and l + 32 of all rows, and it stops at 8 rows that show it to be mixed. No shared memory. Bound by the
// expression's instructions.
// Packed sequences: kinds[h, slot, n], by warps, tiles of rows as scheduler/slots.cuh numbers them, each by the lengths
// of its own sequence; tiles that do not exist are empty.
#include "attention/score_mod_user.cuh"
#include "params/mask_tiles.cuh"
#include "params/tile_kinds.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int kThreads = 128, kTile = 64, kRowsAVote = 8;

extern "C" __global__ void __launch_bounds__(kThreads) tile_kinds_sm80(const __grid_constant__ TileKindsParams p) {
    int32 lane = threadIdx.x % 32;
    const bool by_warp = kHasScoreMask || p.cu_seqlens_q != nullptr;
    int64 tile =
        by_warp ? int64(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32 : int64(blockIdx.x) * kThreads + threadIdx.x;
    int64 rest = tile / p.n_tiles;
    int32 n = int32(tile - rest * p.n_tiles);
    int64 head = rest / p.m_tiles;
    int32 m = int32(rest - head * p.m_tiles);
    int32 b = int32(head / p.heads), h = int32(head - int64(b) * p.heads);
    int32 seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
    bool visible = true;
    if (p.cu_seqlens_q != nullptr) {
        if (b > 0) return;
        b = sequence_of_slot(p.cu_seqlens_q, p.batch, p.seqlen_q, m, kTile);
        Sequence q = used_sequence(p.cu_seqlens_q, p.seqused_q, b, p.seqlen_q);
        seqlen_q = q.len;
        seqlen_k = used_sequence(p.cu_seqlens_k, p.seqused_k, b, p.seqlen_k).len;
        m -= first_slot(q.begin, b, kTile);
        visible = m >= 0 && m * int64(kTile) < seqlen_q && n * int64(kTile) < seqlen_k;
    } else {
        if (b >= p.batch) return;
        visible = p.blocks == nullptr ||
                  p.blocks[b * p.block_stride_b + h * p.block_stride_h + m / p.block_rows * p.block_stride_q +
                           n / p.block_keys * p.block_stride_k] != 0;
    }
    bool any = visible, all = visible && (n + 1) * int64(kTile) <= seqlen_k;
    if (kHasScoreMask && visible) {
        any = false;
        int32 rows = min_of(seqlen_q - m * kTile, kTile);
        for (int32 first = 0; first < rows; first += kRowsAVote) {
            for (int32 row = first; row < min_of(first + kRowsAVote, rows); ++row) {
                ScorePosition q = score_position(m * kTile + row);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int32 key = n * kTile + lane + 32 * i;
                    if (key >= seqlen_k) continue;
                    bool sees = user_mask(b, h, q, score_position(key), p.arrays);
                    any = any || sees;
                    all = all && sees;
                }
            }
            if (__any_sync(0xffffffffu, any) && !__all_sync(0xffffffffu, all)) break;
        }
        any = __any_sync(0xffffffffu, any);
        all = __all_sync(0xffffffffu, all);
    }
    if (!by_warp || lane == 0) p.kinds[tile] = !any ? kTileEmpty : all ? kTileFull : kTileMixed;
}
