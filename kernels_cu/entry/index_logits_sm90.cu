// Scores of the indexer of DeepSeek sparse attention (DeepSeek-V3.2, "Lightning Indexer") on Hopper.
//
//   logits[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])        s that query t sees; -inf elsewhere
//
// q: e4m3 [sequences, queries, heads, 128]; k: e4m3 [blocks, block_size, 128] with one fp32 scale a key, rows at
// multiples of 16 bytes; weights, logits: fp32. Keys are the rows of the products, heads their columns, so that the sum
// over heads stays in a thread and its quad.
//
// A CTA has up to kSlots / (heads / 64) queries of a sequence and a span of its keys, in tiles of 64. A consumer
// warpgroup keeps the weights of its queries in registers: one query of 64 heads for products of 64 columns, two for
// 128 columns, or one of up to 128 heads. Warpgroups of other queries multiply the same tiles, warpgroups of the same
// queries take tiles in turn. The last warpgroup copies: 16 bytes a thread, from blocks of any size.
//
//   copies      tile i: wait for empty | 4 cp.async a thread, scales | arrive at full when they have landed
//   consumers   tile i: wait for full | fence, own turn | 4 products m64nWIDTHk32 | next one's turn
//                       wait for products | arrive at empty | relu, weights, sum over the quad, scale, store
//
// Shared memory: queries kSlots x 8192 bytes and keys kStages x 8192 (64 rows of 128 channels, swizzled by 128 bytes),
// scales kStages x 256, weights kSlots x 320, seen keys, barriers. Bound by memory for one query: 132 bytes a key, 4 a
// score. For many by products, 128 cycles of an SM's tensor cores for 64 keys of a query of 64 heads; relu and weights
// are 64 cycles of its fp32 units.
#include "decode/index_keys.cuh"
#include "params/index_logits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
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
constexpr int32 kStages = STAGES;
constexpr int32 kRegisters = REGISTERS;  // of a thread that multiplies; 0: as many as of one that copies
constexpr int32 kTile = 64;  // keys of a warpgroup's step
constexpr int32 kQuadStride = 20;  // floats of a quad lane's 16 weights, with padding against bank conflicts
constexpr int32 kSlotBytes = kIndexHeads * kIndexDim, kTileBytes = kTile * kIndexDim;
static_assert(kPair == 1 || kPair == 2, "64 or 128 columns");
static_assert(kSlots <= kPair * kConsumers && kSlots % kPair == 0, "at most a set of queries for each warpgroup");
static_assert(kConsumers <= kStages, "a stage for the next tile of each of them");

struct SharedStorage {
    alignas(1024) uint8 q[kSlots][kSlotBytes];
    alignas(1024) uint8 k[kStages][kTileBytes];
    alignas(16) float scale[kStages][kTile];
    alignas(16) float weights[kSlots][4 * kQuadStride];
    alignas(8) uint64 full[kStages];
    alignas(8) uint64 empty[kStages];
    SeenKeys seen[kSlots];
};

// How a CTA's queries are divided: a set is what one warpgroup has, as many queries as a product has room for.
struct Sets {
    int32 products;  // of 64 heads, of a query
    int32 queries;  // of a set
    int32 groups;  // sets: of the warpgroups some have the same one
    int32 rotation;  // those of a set take tiles in turn

    OA_DEVICE Sets(const IndexLogitsParams& p, const IndexItem& item) {
        products = p.num_heads > kIndexHeads ? 2 : 1;
        queries = max_of(kPair / products, 1);
        groups = (item.queries + queries - 1) / queries;
        rotation = kConsumers / groups;
    }
};

// Where 16 bytes of a row of 128 go under a swizzle of 128 bytes.
OA_DEVICE uint32 swizzled(int32 row, int32 chunk) { return row * kIndexDim + ((chunk ^ (row & 7)) << 4); }

// Of a product's columns: those whose relu is a maximum; for others an addition makes twice that, for half of the
// weight. Where several warpgroups multiply, additions and maxima in turn are faster than either: they are of two
// pipes.
OA_DEVICE constexpr bool has_maximum(int32 column) { return kConsumers > 1 && (column & 1); }

// Queries and weights to shared memory, by the consumers; what there is no head for are zeros.
OA_DEVICE void stage_queries(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, const Sets& sets) {
    const uint8* q = p.q + item.sequence * p.q_stride_b + (item.row - item.sequence * p.queries) * p.q_stride_n;
    const int32 slots = sets.groups * kPair;
    for (int32 unit = threadIdx.x; unit < slots * kIndexHeads * 8; unit += kConsumerThreads) {
        const int32 chunk = unit & 7, row = (unit >> 3) & (kIndexHeads - 1), slot = unit / (8 * kIndexHeads);
        const int32 query = slot / sets.products, head = (slot - query * sets.products) * kIndexHeads + row;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (head < p.num_heads && query < item.queries) {
            x = *reinterpret_cast<const uint4*>(q + query * p.q_stride_n + head * p.q_stride_h + 16 * chunk);
        }
        store_shared4(smem_addr_of(s.q[slot]) + swizzled(row, chunk), x);
    }
    for (int32 at = threadIdx.x; at < slots * kIndexHeads; at += kConsumerThreads) {
        const int32 slot = at / kIndexHeads, column = at & (kIndexHeads - 1);
        const int32 query = slot / sets.products, head = (slot - query * sets.products) * kIndexHeads + column;
        const bool is_there = head < p.num_heads && query < item.queries;
        float w = 0.0f;
        if (is_there)
            w = has_maximum(column) ? weight(p, item.row + query, head) : half_weight(p, item.row + query, head);
        // Column 8i + 2c + e belongs to lane c of a quad: its register 2i + e.
        s.weights[slot][((column >> 1) & 3) * kQuadStride + (column >> 3) * 2 + (column & 1)] = w;
    }
    if (threadIdx.x < item.queries) s.seen[threadIdx.x] = seen_keys(p, item, threadIdx.x);
}

// The last warpgroup: tiles of keys [begin, end) into the ring.
OA_DEVICE void copy_keys(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, int32 begin, int32 end,
                         int32 tiles) {
    const IndexKeys keys(p, item.sequence);
    const int32 lane = threadIdx.x & 31, warp = (threadIdx.x - kConsumerThreads) / 32, chunk = lane & 7;
    // A warp copies rows 4 warp + 0 ... 3 of each 16, eight lanes a row. Each lane finds one of its 16 rows, the upper
    // 16 lanes the same ones: row_of + 16 i is what lane lane / 8 + 4 i finds.
    const int32 row_of = 4 * warp + lane / 8, found = 4 * warp + (lane & 3) + 16 * ((lane >> 2) & 3);
    // Keys beyond the end are not there: the last one stands for them, and its scores are not used.
    auto find = [&](int32 tile) { return keys.at(min_of(begin + tile * kTile + found, end - 1)); };
    IndexKeys::Place next = find(0);
    int32 stage = 0, phase = 1;  // waits for the parity of the round before: of the first one they all pass
    for (int32 tile = 0; tile < tiles; ++tile) {
        const IndexKeys::Place at = next;
        if (tile + 1 < tiles) next = find(tile + 1);
        const uint64 values = reinterpret_cast<uint64>(keys.values(at));
        mbarrier_wait(smem_addr_of(&s.empty[stage]), phase);
        const uint32 to = smem_addr_of(s.k[stage]) + swizzled(row_of, chunk);
#pragma unroll
        for (int32 i = 0; i < kTile / 16; ++i) {
            const uint64 from = __shfl_sync(0xffffffffu, values, lane / 8 + 4 * i);
            cp_async_16(to + 16 * i * kIndexDim, reinterpret_cast<const uint8*>(from) + 16 * chunk, 16u);
        }
        if (lane < 16) cp_async_4(smem_addr_of(&s.scale[stage][found]), keys.scale(at));
        mbarrier_arrive_after_copies(smem_addr_of(&s.full[stage]));
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// The four products of 64 keys and WIDTH columns.
OA_DEVICE void multiply(float (&acc)[WIDTH / 2], WgmmaDescriptor k, WgmmaDescriptor q) {
    wgmma_discard(acc);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) Wgmma<E4m3, WIDTH>::ss(acc, k.at(32 * j), q.at(32 * j), j > 0);
    wgmma_commit();
}

// This thread's weights of 64 heads, halved but for columns with a maximum.
struct Weights {
    float of[16];
    OA_DEVICE void load(uint32 from) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 w = load_shared4(from + 16 * i);
            of[4 * i] = __uint_as_float(w.x), of[4 * i + 1] = __uint_as_float(w.y);
            of[4 * i + 2] = __uint_as_float(w.z), of[4 * i + 3] = __uint_as_float(w.w);
        }
    }
    // Each head's product through relu and its weight: this thread's part of the sums of its two keys.
    OA_DEVICE void add(const float* acc, float (&sum)[2]) const {
        float part[2][2];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int at = 4 * (i >> 1) + (i & 1);
#pragma unroll
            for (int key = 0; key < 2; ++key) {
                const float x = has_maximum(i) ? max_nan(acc[at + 2 * key], 0.0f) : twice_relu(acc[at + 2 * key]);
                part[key][i & 1] = i < 2 ? x * of[i] : fmaf(x, of[i], part[key][i & 1]);
            }
        }
        sum[0] = part[0][0] + part[0][1], sum[1] = part[1][0] + part[1][1];
    }
};

// Sums over a quad of two keys' parts for each of kPair queries: lane 2 query + key of the quad gets the one of its
// query and key. Of one query lanes 0 and 1 get them.
OA_DEVICE float sum_of_quad(const float (&sum)[kPair][2], int32 part) {
    const bool odd = part & 1, upper = part & 2;
    float mine[kPair];
#pragma unroll
    for (int32 i = 0; i < kPair; ++i) {
        mine[i] = odd ? sum[i][1] : sum[i][0];
        mine[i] += __shfl_xor_sync(0xffffffffu, odd ? sum[i][0] : sum[i][1], 1);
    }
    const float own = upper ? mine[kPair - 1] : mine[0];
    return own + __shfl_xor_sync(0xffffffffu, upper ? mine[0] : mine[kPair - 1], 2);
}

// What a thread stores of a set of queries: scores of one of them, for one of its two keys.
struct Target {
    float* to;
    int32 limit;  // it stores keys below this one
    SeenKeys seen;

    OA_DEVICE Target(const IndexLogitsParams& p, const IndexItem& item, const SharedStorage& s, const Sets& sets,
                     int32 set, int32 part) {
        const int32 query = set * sets.queries + (sets.queries == 2 ? part >> 1 : 0);
        const bool stores = query < item.queries && (part < 2 || sets.queries == 2);
        to = p.logits + (item.row + query) * p.logits_stride;
        limit = stores ? item.end : 0;
        seen = s.seen[stores ? query : 0];
    }
    OA_DEVICE void store(int32 key, float logit) const {
        if (key < limit) to[key] = key >= seen.begin && key < seen.end ? logit : neg_inf();
    }
};

// Where a warpgroup is: its tile, and the stage and the parity of the ring.
struct Position {
    int32 tile, stage, phase;
    OA_DEVICE void advance(int32 rotation) {
        tile += rotation, stage += rotation;
        if (stage >= kStages) stage -= kStages, phase ^= 1;
    }
};

// A consumer warpgroup.
struct Consumer {
    const IndexLogitsParams& p;
    const IndexItem& item;
    SharedStorage& s;
    const Sets& sets;
    int32 begin, tiles;
    int32 lane, part, own, group, rank;
    WgmmaDescriptor q, k;

    OA_DEVICE Consumer(const IndexLogitsParams& p, const IndexItem& item, SharedStorage& s, const Sets& sets,
                       int32 begin, int32 tiles)
        : p(p), item(item), s(s), sets(sets), begin(begin), tiles(tiles) {
        const int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) / 128, 0);
        group = warpgroup % sets.groups, rank = warpgroup / sets.groups;
        lane = threadIdx.x & 31, part = lane & 3;
        own = 16 * ((int32(threadIdx.x) / 32) & 3) + (lane >> 2) + 8 * (part & 1);  // of a tile's keys
        q = wgmma_descriptor(smem_addr_of(s.q), 16, 1024), k = wgmma_descriptor(smem_addr_of(s.k), 16, 1024);
    }

    OA_DEVICE float arrived(const Position& at) const {
        mbarrier_wait(smem_addr_of(&s.full[at.stage]), at.phase);
        fence_proxy_async();  // products read what cp.async wrote
        return load_shared_float(smem_addr_of(&s.scale[at.stage][own]));
    }
    OA_DEVICE void start(float (&acc)[WIDTH / 2], const Position& at) const {
        multiply(acc, k.next(at.stage * kTileBytes), q.next(group * (kPair * kSlotBytes)));
    }
    // The exchange makes all lanes wait for their loads of scales: lane 0 gives the stage back for the warp.
    OA_DEVICE void give_back(const Position& at, float& scale) const {
        scale = __shfl_sync(0xffffffffu, scale, lane);
        if (lane == 0) mbarrier_arrive(smem_addr_of(&s.empty[at.stage]));
    }
    OA_DEVICE void load(Weights (&weights)[kPair]) const {
        constexpr uint32 kBytes = 4 * kQuadStride * 4;
        const uint32 from = smem_addr_of(s.weights) + part * kQuadStride * 4 + group * (kPair * kBytes);
#pragma unroll
        for (int32 i = 0; i < kPair; ++i) weights[i].load(from + i * kBytes);
    }
    static OA_DEVICE void add(const float (&acc)[WIDTH / 2], const Weights (&weights)[kPair], float (&sum)[kPair][2]) {
#pragma unroll
        for (int32 j = 0; j < kPair; ++j) weights[j].add(acc + 32 * j, sum[j]);
    }
    OA_DEVICE void finish(const Position& at, float (&sum)[kPair][2], float scale, const Target& target) const {
        if (kPair == 2 && sets.queries == 1) {  // both halves are heads of one query
            sum[0][0] += sum[kPair - 1][0], sum[0][1] += sum[kPair - 1][1];
            sum[kPair - 1][0] = sum[0][0], sum[kPair - 1][1] = sum[0][1];
        }
        target.store(begin + at.tile * kTile + own, sum_of_quad(sum, part) * scale);
    }

    // Warpgroups of a CTA ask for their products in a fixed order: 2 + n is the barrier for the n-th one's turn.
    OA_DEVICE int32 number() const { return rank * sets.groups + group; }
    OA_DEVICE int32 all() const { return sets.groups * sets.rotation; }
    OA_DEVICE void wait_for_order() const {
        if (kConsumers > 1 && all() > 1) named_barrier_sync(2 + number(), 256);
    }
    OA_DEVICE void pass_order(bool is_last_round) const {
        const int32 next = number() + 1 == all() ? 0 : number() + 1;
        if (kConsumers > 1 && all() > 1 && !(is_last_round && next == 0)) named_barrier_arrive(2 + next, 256);
    }

    OA_DEVICE void run() const {
        Weights weights[kPair];
        load(weights);
        const Target target(p, item, s, sets, group, part);
        Position at{rank, rank, 0};
        if (number() + 1 == all()) pass_order(false);
        for (; at.tile < tiles; at.advance(sets.rotation)) {
            float acc[WIDTH / 2], sum[kPair][2];
            float scale = arrived(at);
            wait_for_order();
            start(acc, at);
            pass_order(at.tile - rank + sets.rotation >= tiles);
            wgmma_wait<0>();
            wgmma_pin(acc);
            give_back(at, scale);
            add(acc, weights, sum);
            finish(at, sum, scale, target);
        }
        // Those that had a tile less than others take and pass as many turns.
        if (at.tile - rank < tiles) {
            wait_for_order();
            pass_order(true);
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) index_logits_sm90(const
                                                                               __grid_constant__ IndexLogitsParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(smem_raw);
    const IndexItem item(p);
    const Sets sets(p, item);
    if (threadIdx.x == 0) {
        for (int32 i = 0; i < kStages; ++i) {
            mbarrier_init(smem_addr_of(&s.full[i]), 128);
            mbarrier_init(smem_addr_of(&s.empty[i]), 4 * sets.groups);
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
    fill_unseen<kThreads>(p, item, tiles > 0 ? begin : item.end, tiles > 0 ? begin + tiles * kTile : item.end);
    if (tiles == 0) return;
    __syncthreads();

    // Threads that copy hand registers to those that multiply; the two do not meet again.
    if (threadIdx.x >= kConsumerThreads) {
        if constexpr (kRegisters > 0) registers_release<32>();
        copy_keys(p, item, s, begin, end, tiles);
    } else {
        if constexpr (kRegisters > 0) registers_claim<kRegisters>();
        stage_queries(p, item, s, sets);
        fence_proxy_async();
        named_barrier_sync(1, kConsumerThreads);
        const Consumer consumer(p, item, s, sets, begin, tiles);
        if (consumer.rank < sets.rotation) consumer.run();
    }
}
