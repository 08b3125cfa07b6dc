// Which tiles of 64 keys each tile of block_m query rows of attention has to visit under a mask and a window.
//
//   lists[m] = count, then n + kFirstGroup * (kind of the block's 64-row groups, two bits each), n descending
//
// A tile of keys is left out where the mask hides it from all rows of the block (kinds of mask_pack_sm80), or where it
// lies outside the window of every row; only rows in [0, seqlen_q) count. A block without rows: count 0. Entries beyond
// the count are not written.
// kinds: [mask_batch, mask_heads, m_tiles, n_tiles] bytes; lists: [mask_batch, mask_heads, num_m_blocks, 1 + n_tiles].
// Packed sequences: lists[slot] = count, sequence, entries, [mask_heads, num_m_blocks, 2 + n_tiles], slots of block_m
// rows as scheduler/slots.cuh numbers them, each by the lengths of its own sequence. What lies beyond the mask is
// hidden. A slot that is no block of its sequence: count 0.
//
// A warp takes a block of rows, 4 * 32 tiles of keys a step: lane l has tiles l, l + 32, ... from the last on, and a
// ballot gives each that stays its place. No shared memory. Bound by latency.
#include "attention/mask.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int kThreads = 128, kTileRows = 64, kTileKeys = 64, kUnroll = 4;

// The block of query rows that a warp lists.
struct Block {
    int64 m0;  // its first row, which may lie before row 0
    int32 seqlen_q, seqlen_k;
    const uint8* kinds;  // of the first tile of rows
    int32 m_tiles;  // from there on
    int32* list;  // the count; entries begin at `entries`
    int32* entries;
};

OA_DEVICE Block dense_block(const MaskListParams& p, int64 block, int64 mask) {
    Block b;
    b.m0 = (block - mask * p.num_m_blocks) * p.block_m - p.lead_rows;
    b.seqlen_q = p.seqlen_q, b.seqlen_k = p.seqlen_k;
    b.kinds = p.kinds + mask * p.m_tiles * p.n_tiles;
    b.m_tiles = p.m_tiles;
    b.list = p.lists + block * (1 + int64(p.n_tiles));
    b.entries = b.list + 1;
    return b;
}

// All lanes of a warp. There is at least one sequence.
OA_DEVICE Block packed_block(const MaskListParams& p, int64 block, int32 head) {
    Block b;
    int32 slot = int32(block - int64(head) * p.num_m_blocks);
    int32 sequence = sequence_of_slot(p.cu_seqlens_q, p.batch, p.seqlen_q, slot, p.block_m);
    Sequence q = used_sequence(p.cu_seqlens_q, p.seqused_q, sequence, p.seqlen_q);
    b.m0 = int64(slot - first_slot(q.begin, sequence, p.block_m)) * p.block_m;
    b.seqlen_q = q.len;
    b.seqlen_k = used_sequence(p.cu_seqlens_k, p.seqused_k, sequence, p.seqlen_k).len;
    if (p.kinds_of_slots) {
        int32 first = first_slot(q.begin, sequence, kTileRows);
        b.kinds = p.kinds + (int64(head) * p.m_tiles + first) * p.n_tiles;
        b.m_tiles = p.m_tiles - first;
    } else {
        int64 mask = (p.mask_batch > 1 ? int64(sequence) * p.mask_heads : 0) + head;
        b.kinds = p.kinds + mask * p.m_tiles * p.n_tiles;
        b.m_tiles = p.m_tiles;
    }
    b.list = p.lists + block * (2 + int64(p.n_tiles));
    b.entries = b.list + 2;
    if (threadIdx.x % 32 == 0) b.list[1] = sequence;
    return b;
}

extern "C" __global__ void __launch_bounds__(kThreads) mask_list_sm80(const __grid_constant__ MaskListParams p) {
    wait_for_kernel_ahead();  // kinds
    int32 lane = threadIdx.x % 32;
    int64 block = int64(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, mask = block / p.num_m_blocks;
    const bool packed = p.cu_seqlens_q != nullptr;
    if (mask >= (packed ? 1 : int64(p.mask_batch)) * p.mask_heads) return;
    const Block b = packed ? packed_block(p, block, int32(mask)) : dense_block(p, block, mask);
    const int64 m0 = b.m0;
    int32 first_row = int32(max_of<int64>(m0, 0)), last_row = int32(min_of<int64>(m0 + p.block_m, b.seqlen_q)) - 1;
    int32 count = 0;
    if (m0 < b.seqlen_q && last_row >= 0) {
        // As KeyTiles of attention has it.
        const int32 queries = b.seqlen_q / p.pack;
        KeyRange top = visible_keys(first_row / p.pack, queries, b.seqlen_k, p.window_left, p.window_right);
        KeyRange bottom = visible_keys(last_row / p.pack, queries, b.seqlen_k, p.window_left, p.window_right);
        int32 first = top.lo / kTileKeys, end = int32((int64(bottom.hi) + kTileKeys - 1) / kTileKeys);
        int32 group = first_row / kTileRows, groups = last_row / kTileRows - group + 1;
        const uint8* kinds = b.kinds + (p.broadcast_rows ? 0 : int64(group) * p.n_tiles);
        int64 next_row = p.broadcast_rows ? 0 : p.n_tiles;
        // Sequences may be longer than the caller says.
        if (!p.broadcast_rows) groups = min_of(groups, b.m_tiles - group);
        if (end > p.n_tiles && p.kinds_of_slots) {
            if (lane == 0) b.list[0] = kNoList;
            return;
        }
        end = min_of(end, p.n_tiles);
        int32 place = group - int32(m0 / kTileRows);  // groups before row 0 are empty
        for (int32 behind = end; behind > first; behind -= 32 * kUnroll) {
            uint32 of_groups[kUnroll] = {};
            for (int32 g = 0; g < groups; ++g) {
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) {
                    int32 n = behind - 1 - u * 32 - lane;
                    uint32 kind = n >= first ? kinds[g * next_row + n] : kTileEmpty;
                    of_groups[u] |= kind << (2 * (place + g));
                }
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                uint32 stay = __ballot_sync(0xffffffffu, of_groups[u] != 0);
                int32 n = behind - 1 - u * 32 - lane;
                if (of_groups[u] != 0)
                    b.entries[count + __popc(stay & ((1u << lane) - 1))] = n + kFirstGroup * int32(of_groups[u]);
                count += __popc(stay);
            }
        }
    }
    if (lane == 0) b.list[0] = count;
}
