// Scores of the indexer of DeepSeek sparse attention (DeepSeek-V3.2, "Lightning Indexer") on Hopper.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])        s that query t sees; -inf elsewhere
//
// q: e4m3 [sequences, queries, heads, 128]; k: e4m3 [blocks, block_size, 128] with one fp32 scale a key, rows at
// multiples of 16 bytes; weights, logits: fp32. Keys are the rows of the products, heads their columns, so that the sum
// over heads stays in a thread and its quad.
//
// A CTA has up to kSlots / (heads / 64) queries of a sequence and a span of its keys; its two warpgroups take tiles of
// 64 keys in alternation. Keys go from memory to registers, the A operand, three tiles at a time; the order of the 128
// channels is the one that 16-byte loads give (decode/index_keys.cuh), and q is laid out in shared memory to fit it.
//
//   warpgroup   tile i:  load tile i+2 | 4 products m64n64k32 for each query | relu, weights, sum over the quad, store
//   (no barrier but one behind the queries' way into shared memory: warpgroups overlap each other's products)
//
// Shared memory: queries kSlots x 8192 bytes (64 heads x 128 channels, swizzled by 128 bytes), weights kSlots x 320,
// seen keys 64 bytes. Bound by memory for few queries: 132 bytes a key, 4 a score.
#include "decode/index_keys.cuh"
#include "params/index_logits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma_e4m3.cuh"

constexpr int32 kSlots = SLOTS;  // queries times products of 64 heads
constexpr int32 kThreads = 256;  // two warpgroups
constexpr int32 kTile = 64;  // keys of a warpgroup's step
constexpr int32 kBuffers = 3;  // tiles in registers
constexpr int32 kQuadStride = 20;  // floats of a quad lane's 16 weights, with padding against bank conflicts
constexpr int32 kSlotBytes = kIndexHeads * kIndexDim;

struct SharedStorage {
    alignas(1024) uint8 q[kSlots][kSlotBytes];
    alignas(16) float weights[kSlots][4 * kQuadStride];
    SeenKeys seen[kSlots];
};

// 16 keys of a warp: this lane's quarter of rows lane / 4 and lane / 4 + 8, and their scales.
struct KeyRows {
    uint4 low[2], high[2];
    float scale[2];
};

// Queries and weights to shared memory; heads beyond the last one are zeros.
OA_DEVICE void stage_queries(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, int32 products) {
    const uint8* q = p.q + item.sequence * p.q_stride_b + (item.row - item.sequence * p.queries) * p.q_stride_n;
    const int32 slots = item.queries * products;
    for (int32 unit = threadIdx.x; unit < slots * kIndexHeads * 2; unit += kThreads) {
        const int32 half = unit & 1, row = (unit >> 1) & (kIndexHeads - 1), slot = unit / (2 * kIndexHeads);
        const int32 query = slot / products, head = (slot - query * products) * kIndexHeads + row;
        uint4 in[4] = {};
        if (head < p.num_heads) {
            const uint8* from = q + query * p.q_stride_n + head * p.q_stride_h + 64 * half;
#pragma unroll
            for (int c = 0; c < 4; ++c) in[c] = *reinterpret_cast<const uint4*>(from + 16 * c);
        }
        const uint32 to = smem_addr_of(s.q[slot]) + row * kIndexDim;
        const uint4 out[4] = {{in[0].x, in[1].x, in[2].x, in[3].x},
                              {in[0].y, in[1].y, in[2].y, in[3].y},
                              {in[0].z, in[1].z, in[2].z, in[3].z},
                              {in[0].w, in[1].w, in[2].w, in[3].w}};
#pragma unroll
        for (int w = 0; w < 4; ++w) store_shared4(to + (((4 * half + w) ^ (row & 7)) << 4), out[w]);
    }
    for (int32 at = threadIdx.x; at < slots * kIndexHeads; at += kThreads) {
        const int32 slot = at / kIndexHeads, column = at & (kIndexHeads - 1);
        const int32 query = slot / products, head = (slot - query * products) * kIndexHeads + column;
        const float w = head < p.num_heads ? p.weights[(item.row + query) * p.weights_stride + head] : 0.0f;
        // Column 8i + 2c + e belongs to lane c of a quad: its register 2i + e.
        s.weights[slot][((column >> 1) & 3) * kQuadStride + (column >> 3) * 2 + (column & 1)] = w;
    }
    if (threadIdx.x < item.queries) s.seen[threadIdx.x] = seen_keys(p, item, threadIdx.x);
}

// The A operands of the four products of 32 channels. Copies that the compiler cannot move: it would make them where
// the keys are asked for, and wait for them there.
struct KeyOperands {
    uint32 a[4][4];

    OA_DEVICE KeyOperands(const KeyRows& k, uint32 zero) {
        const uint32 word[2][8] = {
            {k.low[0].x, k.low[0].y, k.low[0].z, k.low[0].w, k.high[0].x, k.high[0].y, k.high[0].z, k.high[0].w},
            {k.low[1].x, k.low[1].y, k.low[1].z, k.low[1].w, k.high[1].x, k.high[1].y, k.high[1].z, k.high[1].w}};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[j][i] = copy_of(word[i & 1][2 * j + (i >> 1)], zero);
        }
    }
};

// 64 keys times the 64 heads of a slot, each head's product through relu and its weight: this thread's part of the sums
// of its two keys.
OA_DEVICE void add_heads(const KeyOperands& k, WgmmaDescriptor q, uint32 weights, float (&sum)[2]) {
    float acc[32];
    wgmma_discard(acc);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        Wgmma<E4m3, 64>::rs(acc, k.a[j], q.at(32 * j), j > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 w = load_shared4(weights + 16 * i);
        const float of[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = 4 * (2 * i + (e >> 1)) + (e & 1);
            sum[0] = fmaf(max_nan(acc[at], 0.0f), of[e], sum[0]);
            sum[1] = fmaf(max_nan(acc[at + 2], 0.0f), of[e], sum[1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) index_logits_sm90(const
                                                                            __grid_constant__ IndexLogitsParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(smem_raw);
    const IndexItem item(p);
    const int32 lane = threadIdx.x & 31, quad = lane >> 2, part = lane & 3;
    const int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) / 128, 0);
    const int32 warp_row = 16 * ((int32(threadIdx.x) / 32) & 3);
    const int32 products = (p.num_heads + kIndexHeads - 1) / kIndexHeads;

    int32 begin = p.max_keys, end = 0;  // keys that some query sees
    for (int32 i = 0; i < item.queries; ++i) {
        const SeenKeys seen = seen_keys(p, item, i);
        if (seen.begin < seen.end) begin = min_of(begin, seen.begin), end = max_of(end, seen.end);
    }
    begin = max_of(begin & -kTile, item.key), end = min_of(end, item.end);
    const int32 tiles = max_of(end - begin + kTile - 1, 0) / kTile;

    const IndexKeys keys(p, item.sequence);
    auto load = [&](KeyRows& to, int32 tile) {
        const int32 first = begin + tile * kTile + warp_row + quad;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Keys beyond the end are not there: the last one stands for them, and its scores are not used.
            const IndexKeys::Place at = keys.at(min_of(first + 8 * i, end - 1));
            const uint8* row = keys.values(at) + 16 * part;
            to.low[i] = load_ahead4(row);
            to.high[i] = load_ahead4(row + 64);
            to.scale[i] = load_ahead(keys.scale(at));
        }
    };
    KeyRows k[kBuffers];
#pragma unroll
    for (int i = 0; i < kBuffers - 1; ++i) {
        if (warpgroup + 2 * i < tiles) load(k[i], warpgroup + 2 * i);
    }
    if (tiles > 0) stage_queries(p, item, s, products);
    fence_proxy_async();
    __syncthreads();

    const WgmmaDescriptor q = wgmma_descriptor(smem_addr_of(s.q), 16, 1024);
    const uint32 weights = smem_addr_of(s.weights) + part * kQuadStride * 4;
    const uint32 zero = opaque_zero();
    auto score = [&](const KeyRows& rows, int32 tile) {
        const KeyOperands operands(rows, zero);
        const int32 key = begin + tile * kTile + warp_row + quad + 8 * (part & 1);
        for (int32 i = 0; i < item.queries; ++i) {
            float sum[2] = {};
            for (int32 product = 0; product < products; ++product) {
                const int32 slot = i * products + product;
                add_heads(operands, q.next(slot * kSlotBytes), weights + slot * (4 * kQuadStride * 4), sum);
            }
            // Over the quad: even lanes end with the first key, odd ones with the second.
            const bool odd = part & 1;
            float mine = odd ? sum[1] : sum[0], other = odd ? sum[0] : sum[1];
            mine += __shfl_xor_sync(0xffffffffu, other, 1);
            mine += __shfl_xor_sync(0xffffffffu, mine, 2);
            mine *= odd ? rows.scale[1] : rows.scale[0];
            const SeenKeys seen = s.seen[i];
            if (key < seen.begin || key >= seen.end) mine = neg_inf();
            if (part < 2 && key < item.end) p.logits[(item.row + i) * p.logits_stride + key] = mine;
        }
    };
    for (int32 base = warpgroup; base < tiles; base += 2 * kBuffers) {
#pragma unroll
        for (int i = 0; i < kBuffers; ++i) {
            const int32 tile = base + 2 * i, ahead = tile + 2 * (kBuffers - 1);
            if (ahead < tiles) load(k[(i + kBuffers - 1) % kBuffers], ahead);
            if (tile < tiles) score(k[i], tile);
        }
    }
    fill_unseen<kThreads>(p, item, tiles > 0 ? begin : item.end, tiles > 0 ? begin + tiles * kTile : item.end);
}
