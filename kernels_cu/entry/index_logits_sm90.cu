// Scores of the indexer of DeepSeek sparse attention (DeepSeek-V3.2, "Lightning Indexer") on Hopper.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])        s that query t sees; -inf elsewhere
//
// q: e4m3 [sequences, queries, heads, 128]; k: e4m3 [blocks, block_size, 128] with one fp32 scale a key, rows at
// multiples of 16 bytes; weights, logits: fp32. Keys are the rows of the products, heads their columns, so that the sum
// over heads stays in a thread and its quad.
//
// A CTA has up to kSlots / (heads / 64) queries of a sequence and a span of its keys, in tiles of 64. The first
// CONSUMERS warpgroups take tiles in turn, the last one copies: 16 bytes a thread, from blocks of any size.
//
//   copies      tile i: wait for empty | 4 cp.async a thread, scales | kLag tiles later: landed, fence, arrive at full
//   consumers   tile i: wait for full | 4 products m64nWIDTHk32 for each 64 or 128 columns | arrive at empty
//                       relu, weights, sum over the quad, scale, store
//
// Shared memory: queries kSlots x 8192 bytes and keys kStages x 8192 (64 rows of 128 channels, swizzled by 128 bytes),
// scales kStages x 256, weights kSlots x 320, seen keys, barriers. Bound by memory for one query: 132 bytes a key, 4 a
// score; by products for many.
#include "decode/index_keys.cuh"
#include "params/index_logits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma_e4m3.cuh"

constexpr int32 kSlots = SLOTS;  // queries times products of 64 heads
constexpr int32 kPair = WIDTH / kIndexHeads;  // of them in a product
constexpr int32 kConsumers = CONSUMERS, kConsumerThreads = 128 * kConsumers;
constexpr int32 kThreads = kConsumerThreads + 128;
constexpr int32 kStages = STAGES, kLag = kStages - 2;
constexpr int32 kTile = 64;  // keys of a warpgroup's step
constexpr int32 kQuadStride = 20;  // floats of a quad lane's 16 weights, with padding against bank conflicts
constexpr int32 kSlotBytes = kIndexHeads * kIndexDim, kTileBytes = kTile * kIndexDim;
static_assert(kPair == 1 || kPair == 2, "64 or 128 columns");

struct SharedStorage {
    alignas(1024) uint8 q[kSlots][kSlotBytes];
    alignas(1024) uint8 k[kStages][kTileBytes];
    alignas(16) float scale[kStages][kTile];
    alignas(16) float weights[kSlots][4 * kQuadStride];
    alignas(8) uint64 full[kStages];
    alignas(8) uint64 empty[kStages];
    SeenKeys seen[kSlots];
};

// Where 16 bytes of a row of 128 go under a swizzle of 128 bytes.
OA_DEVICE uint32 swizzled(int32 row, int32 chunk) { return row * kIndexDim + ((chunk ^ (row & 7)) << 4); }

// Queries and weights to shared memory, by the consumers; what there is no head for are zeros.
OA_DEVICE void stage_queries(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, int32 products) {
    const uint8* q = p.q + item.sequence * p.q_stride_b + (item.row - item.sequence * p.queries) * p.q_stride_n;
    const int32 used = item.queries * products, slots = (used + kPair - 1) / kPair * kPair;
    for (int32 unit = threadIdx.x; unit < slots * kIndexHeads * 8; unit += kConsumerThreads) {
        const int32 chunk = unit & 7, row = (unit >> 3) & (kIndexHeads - 1), slot = unit / (8 * kIndexHeads);
        const int32 query = slot / products, head = (slot - query * products) * kIndexHeads + row;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (head < p.num_heads && slot < used) {
            x = *reinterpret_cast<const uint4*>(q + query * p.q_stride_n + head * p.q_stride_h + 16 * chunk);
        }
        store_shared4(smem_addr_of(s.q[slot]) + swizzled(row, chunk), x);
    }
    for (int32 at = threadIdx.x; at < slots * kIndexHeads; at += kConsumerThreads) {
        const int32 slot = at / kIndexHeads, column = at & (kIndexHeads - 1);
        const int32 query = slot / products, head = (slot - query * products) * kIndexHeads + column;
        const bool is_there = head < p.num_heads && slot < used;
        const float w = is_there ? half_weight(p, item.row + query, head) : 0.0f;
        // Column 8i + 2c + e belongs to lane c of a quad: its register 2i + e.
        s.weights[slot][((column >> 1) & 3) * kQuadStride + (column >> 3) * 2 + (column & 1)] = w;
    }
    if (threadIdx.x < item.queries) s.seen[threadIdx.x] = seen_keys(p, item, threadIdx.x);
}

// The last warpgroup: tiles of keys [begin, end) into the ring.
OA_DEVICE void copy_keys(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, int32 begin, int32 end,
                         int32 tiles) {
    const IndexKeys keys(p, item.sequence);
    const int32 thread = threadIdx.x - kConsumerThreads, chunk = thread & 7, row = thread >> 3;
    auto land = [&](int32 tile) {
        fence_proxy_async();  // products read what cp.async wrote
        mbarrier_arrive(smem_addr_of(&s.full[tile % kStages]));
    };
    for (int32 tile = 0; tile < tiles; ++tile) {
        const int32 stage = tile % kStages, first = begin + tile * kTile;
        IndexKeys::Place at[kTile / 16];
        // Keys beyond the end are not there: the last one stands for them, and its scores are not used.
#pragma unroll
        for (int32 i = 0; i < kTile / 16; ++i) at[i] = keys.at(min_of(first + row + 16 * i, end - 1));
        if (tile >= kStages) mbarrier_wait(smem_addr_of(&s.empty[stage]), (tile / kStages - 1) & 1);
        const uint32 to = smem_addr_of(s.k[stage]);
#pragma unroll
        for (int32 i = 0; i < kTile / 16; ++i) {
            cp_async_16(to + swizzled(row + 16 * i, chunk), keys.values(at[i]) + 16 * chunk, 16u);
            // Thread (row, chunk) copies the scale of one of its four rows.
            if (chunk == i) cp_async_4(smem_addr_of(&s.scale[stage][row + 16 * i]), keys.scale(at[i]));
        }
        cp_async_commit();
        if (tile >= kLag) {
            cp_async_wait<kLag>();
            land(tile - kLag);
        }
    }
    cp_async_wait<0>();
    for (int32 tile = max_of(tiles - kLag, 0); tile < tiles; ++tile) land(tile);
}

// The four products of 64 keys and WIDTH columns.
OA_DEVICE void multiply(float (&acc)[WIDTH / 2], WgmmaDescriptor k, WgmmaDescriptor q) {
    wgmma_discard(acc);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) Wgmma<E4m3, WIDTH>::ss(acc, k.at(32 * j), q.at(32 * j), j > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
}

// Each head's product through relu and its weight: this thread's part of the sums of its two keys, by 64 columns.
OA_DEVICE void add_heads(const float* acc, uint32 weights, float (&sum)[2]) {
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 w = load_shared4(weights + 16 * i);
        const float of[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = 4 * (2 * i + (e >> 1)) + (e & 1);
            part[0][e & 1] = fmaf(twice_relu(acc[at]), of[e], part[0][e & 1]);
            part[1][e & 1] = fmaf(twice_relu(acc[at + 2]), of[e], part[1][e & 1]);
        }
    }
    sum[0] += part[0][0] + part[0][1], sum[1] += part[1][0] + part[1][1];
}

// A consumer warpgroup: its tiles, every kConsumers-th one.
OA_DEVICE void score_keys(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, int32 begin, int32 tiles,
                          int32 products) {
    const int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) / 128, 0);
    const int32 lane = threadIdx.x & 31, part = lane & 3;
    const bool odd = part & 1;
    // Over a quad even lanes end with the first of its keys, odd ones with the second.
    const int32 own = 16 * ((int32(threadIdx.x) / 32) & 3) + (lane >> 2) + 8 * (part & 1);
    const WgmmaDescriptor q = wgmma_descriptor(smem_addr_of(s.q), 16, 1024);
    const WgmmaDescriptor k = wgmma_descriptor(smem_addr_of(s.k), 16, 1024);
    const uint32 weights = smem_addr_of(s.weights) + part * kQuadStride * 4;
    constexpr uint32 kWeightBytes = 4 * kQuadStride * 4;
    const int32 units = (item.queries * products + kPair - 1) / kPair;  // products of a tile
    for (int32 tile = warpgroup; tile < tiles; tile += kConsumers) {
        const int32 stage = tile % kStages, key = begin + tile * kTile + own;
        mbarrier_wait(smem_addr_of(&s.full[stage]), (tile / kStages) & 1);
        // The exchange makes all lanes wait for their loads: lane 0 gives the stage back for the warp.
        const float scale = __shfl_sync(0xffffffffu, load_shared_float(smem_addr_of(&s.scale[stage][own])), lane);
        float sum[kPair][2] = {};
        for (int32 unit = 0; unit < units; ++unit) {
            float acc[WIDTH / 2];
            multiply(acc, k.next(stage * kTileBytes), q.next(unit * (kPair * kSlotBytes)));
            if (unit == units - 1 && lane == 0) mbarrier_arrive(smem_addr_of(&s.empty[stage]));
#pragma unroll
            for (int32 i = 0; i < kPair; ++i)
                add_heads(acc + 32 * i, weights + (unit * kPair + i) * kWeightBytes, sum[i]);
            // With 64 columns the two halves of many heads are two products, with 128 columns one.
            if (kPair == 1 && products == 2 && (unit & 1) == 0) continue;
            if (kPair == 2 && products == 2) sum[0][0] += sum[kPair - 1][0], sum[0][1] += sum[kPair - 1][1];
#pragma unroll
            for (int32 i = 0; i < kPair; ++i) {
                const int32 query = products == 2 ? (kPair == 2 ? unit : unit >> 1) : unit * kPair + i;
                float mine = odd ? sum[i][1] : sum[i][0];
                mine += __shfl_xor_sync(0xffffffffu, odd ? sum[i][0] : sum[i][1], 1);
                mine += __shfl_xor_sync(0xffffffffu, mine, 2);
                sum[i][0] = sum[i][1] = 0.0f;
                if (i > 0 && products == 2) continue;
                if (query < item.queries && part < 2 && key < item.end) {
                    const SeenKeys seen = s.seen[query];
                    const bool sees = key >= seen.begin && key < seen.end;
                    p.logits[(item.row + query) * p.logits_stride + key] = sees ? mine * scale : neg_inf();
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) index_logits_sm90(const
                                                                               __grid_constant__ IndexLogitsParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(smem_raw);
    const IndexItem item(p);
    const int32 products = (p.num_heads + kIndexHeads - 1) / kIndexHeads;
    if (threadIdx.x == 0) {
        for (int32 i = 0; i < kStages; ++i) {
            mbarrier_init(smem_addr_of(&s.full[i]), 128);
            mbarrier_init(smem_addr_of(&s.empty[i]), 4);
        }
        fence_barrier_init();
    }
    int32 begin = p.max_keys, end = 0;  // keys that some query sees
    for (int32 i = 0; i < item.queries; ++i) {
        const SeenKeys seen = seen_keys(p, item, i);
        if (seen.begin < seen.end) begin = min_of(begin, seen.begin), end = max_of(end, seen.end);
    }
    begin = max_of(begin & -kTile, item.key), end = min_of(end, item.end);
    const int32 tiles = max_of(end - begin + kTile - 1, 0) / kTile;
    __syncthreads();

    if (tiles > 0 && threadIdx.x >= kConsumerThreads) {
        copy_keys(p, item, s, begin, end, tiles);
    } else if (tiles > 0) {
        stage_queries(p, item, s, products);
        fence_proxy_async();
        named_barrier_sync(1, kConsumerThreads);
        score_keys(p, item, s, begin, tiles, products);
    }
    fill_unseen<kThreads>(p, item, tiles > 0 ? begin : item.end, tiles > 0 ? begin + tiles * kTile : item.end);
}
