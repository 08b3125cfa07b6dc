// Scores of the indexer of DeepSeek sparse attention (DeepSeek-V3.2, "Lightning Indexer"), any GPU from sm_80 on.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])        s that query t sees; -inf elsewhere
//
// q: e4m3 [sequences, queries, heads, 128]; k: e4m3 [blocks, block_size, 128] with one fp32 scale a key; rows at
// multiples of 16 bytes, or of 4 (blocks of values and scales in one array, of any size); weights, logits: fp32.
// Products are m16n8k16 of fp16, which e4m3 converts to exactly, with fp32 sums.
//
// A CTA has up to kSlots / (heads / 64) queries of a sequence and a span of its keys; each of its four warps takes
// tiles of 32 keys. Keys go from memory to registers, where the next tile waits for the current one; the order of the
// 128 channels is the one that 16-byte loads give (decode/index_keys.cuh). Queries lie in shared memory as the
// fragments of the products: group of 8 heads, word, lane.
//
// Shared memory: queries kSlots x 16384 bytes (fp16), weights kSlots x 256, seen keys. No barrier but one behind the
// queries' way into it.
#include "decode/index_keys.cuh"
#include "params/index_logits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

constexpr int32 kSlots = SLOTS;
constexpr int32 kThreads = 128, kWarps = 4;
constexpr int32 kTile = 32;    // keys of a warp's step, two products of 16
constexpr int32 kWords = 8;    // 4-byte words of a row that a lane has: products of 16 channels
constexpr int32 kGroups = kIndexHeads / 8;

struct SharedStorage {
    alignas(16) uint2 q[kSlots][kGroups][kWords][32];
    alignas(16) float weights[kSlots][kIndexHeads];
    SeenKeys seen[kSlots];
};

// 32 keys of a warp: this lane's quarter of rows lane / 4 + 8 i, and their scales.
struct KeyRows {
    uint32 word[4][kWords];
    float scale[4];
};
// The same in fp16: the A operands of two products of 16 keys.
struct KeyOperands {
    uint32 a[2][kWords][4];
};

// Two e4m3 numbers as fp16, exactly; NaN stays NaN.
template <bool kHigh>
OA_DEVICE uint32 fp16_of(uint32 codes) {
    uint32 d = half2_of_e4m3x2<kHigh>(codes);
#if __CUDA_ARCH__ < 890
    const uint32 pair = kHigh ? codes >> 16 : codes;
    if ((pair & 0x7fu) == 0x7fu) d |= 0x7fffu;
    if ((pair & 0x7f00u) == 0x7f00u) d |= 0x7fff0000u;
#endif
    return d;
}

OA_DEVICE void stage_queries(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, int32 products) {
    const uint8* q = p.q + item.sequence * p.q_stride_b + (item.row - item.sequence * p.queries) * p.q_stride_n;
    const int32 slots = item.queries * products;
    // A unit is 32 bytes of a head: what lane `part` of its quad has.
    for (int32 unit = threadIdx.x; unit < slots * kIndexHeads * 4; unit += kThreads) {
        const int32 part = unit & 3, row = (unit >> 2) & (kIndexHeads - 1), slot = unit / (4 * kIndexHeads);
        const int32 query = slot / products, head = (slot - query * products) * kIndexHeads + row;
        uint4 in[2] = {};
        if (head < p.num_heads) {
            const uint8* from = q + query * p.q_stride_n + head * p.q_stride_h + 16 * part;
            in[0] = *reinterpret_cast<const uint4*>(from);
            in[1] = *reinterpret_cast<const uint4*>(from + 64);
        }
        const uint32 words[kWords] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            s.q[slot][row >> 3][w][(row & 7) * 4 + part] =
                make_uint2(fp16_of<false>(words[w]), fp16_of<true>(words[w]));
        }
    }
    for (int32 at = threadIdx.x; at < slots * kIndexHeads; at += kThreads) {
        const int32 slot = at / kIndexHeads, query = slot / products;
        const int32 head = (slot - query * products) * kIndexHeads + (at & (kIndexHeads - 1));
        s.weights[slot][at & (kIndexHeads - 1)] = head < p.num_heads ? half_weight(p, item.row + query, head) : 0.0f;
    }
    if (threadIdx.x < item.queries) s.seen[threadIdx.x] = seen_keys(p, item, threadIdx.x);
}

OA_DEVICE void load_row(uint32 (&to)[kWords], const uint8* row, int32 part, bool aligned) {
    if (aligned) {
        const uint4 low = load_ahead4(row + 16 * part), high = load_ahead4(row + 64 + 16 * part);
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    } else {
#pragma unroll
        for (int w = 0; w < kWords; ++w) to[w] = load_ahead(row + word_byte(w) + 16 * part);
    }
}

OA_DEVICE void convert(KeyOperands& to, const KeyRows& from) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32 first = from.word[2 * m][w], second = from.word[2 * m + 1][w];
            to.a[m][w][0] = fp16_of<false>(first);
            to.a[m][w][1] = fp16_of<false>(second);
            to.a[m][w][2] = fp16_of<true>(first);
            to.a[m][w][3] = fp16_of<true>(second);
        }
    }
}

// 32 keys times the 64 heads of a slot: this thread's part of the sums of its four keys.
OA_DEVICE void add_heads(const KeyOperands& k, const SharedStorage& s, int32 slot, int32 lane, float (&sum)[4]) {
#pragma unroll 2
    for (int32 group = 0; group < kGroups; ++group) {
        float acc[2][4] = {};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint2 b = s.q[slot][group][w][lane];
            mma_m16n8k16(Half{}, acc[0], k.a[0][w], b.x, b.y);
            mma_m16n8k16(Half{}, acc[1], k.a[1][w], b.x, b.y);
        }
        const float2 weight = *reinterpret_cast<const float2*>(&s.weights[slot][8 * group + 2 * (lane & 3)]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* d = acc[i >> 1] + 2 * (i & 1);
            sum[i] = fmaf(twice_relu(d[0]), weight.x, sum[i]);
            sum[i] = fmaf(twice_relu(d[1]), weight.y, sum[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) index_logits_sm80(const
                                                                            __grid_constant__ IndexLogitsParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(smem_raw);
    const IndexItem item(p);
    const int32 lane = threadIdx.x & 31, quad = lane >> 2, part = lane & 3;
    const int32 warp = __shfl_sync(0xffffffffu, int32(threadIdx.x) / 32, 0);
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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Keys beyond the end are not there: the last one stands for them, and its scores are not used.
            const IndexKeys::Place at = keys.at(min_of(begin + tile * kTile + quad + 8 * i, end - 1));
            load_row(to.word[i], keys.values(at), part, p.k_aligned);
            to.scale[i] = load_ahead(keys.scale(at));
        }
    };
    KeyRows next;
    if (warp < tiles) load(next, warp);
    if (tiles > 0) stage_queries(p, item, s, products);
    __syncthreads();

    for (int32 tile = warp; tile < tiles; tile += kWarps) {
        KeyOperands k;
        convert(k, next);
        const float low = part & 1 ? next.scale[1] : next.scale[0], high = part & 1 ? next.scale[3] : next.scale[2];
        const float scale = part & 2 ? high : low;
        if (tile + kWarps < tiles) load(next, tile + kWarps);
        const int32 key = begin + tile * kTile + quad + 8 * part;
        for (int32 i = 0; i < item.queries; ++i) {
            float sum[4] = {};
            for (int32 product = 0; product < products; ++product) add_heads(k, s, i * products + product, lane, sum);
            // Over the quad: lane `part` ends with key `part` of the four.
            const bool odd = part & 1, upper = part & 2;
            float a = odd ? sum[1] : sum[0], b = odd ? sum[3] : sum[2];
            a += __shfl_xor_sync(0xffffffffu, odd ? sum[0] : sum[1], 1);
            b += __shfl_xor_sync(0xffffffffu, odd ? sum[2] : sum[3], 1);
            float mine = upper ? b : a;
            mine += __shfl_xor_sync(0xffffffffu, upper ? a : b, 2);
            mine *= scale;
            const SeenKeys seen = s.seen[i];
            if (key < seen.begin || key >= seen.end) mine = neg_inf();
            if (key < item.end) p.logits[(item.row + i) * p.logits_stride + key] = mine;
        }
    }
    fill_unseen<kThreads>(p, item, tiles > 0 ? begin : item.end, tiles > 0 ? begin + tiles * kTile : item.end);
}
