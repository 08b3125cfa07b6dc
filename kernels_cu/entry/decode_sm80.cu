// Attention of one or a few new query tokens over a KV cache, any GPU from sm_80 on, with K and V in 16, 8 or 4 bits.
// Source: Flash-Decoding (Dao et al. 2023); PagedAttention (Kwon et al. 2023).
//
//   S = softmax_scale * q (s_k c_k + z_k)^T;  S = softcap * tanh(S / softcap);  P = softmax([S, sink])
//   O = P (s_v c_v + z_v);  LSE = log(sum(exp(S)) + exp(sink))
//
// q, o: [batch, q_len, num_q_heads, head_dim], or packed by cu_seqlens_q; the cache: docs/kv_formats.md. Rows of 16-bit
// K and V, and those of an engine's pool in 8 bits, are wherever the strides of the arguments say, and as wide as
// head_dim there. Query token i of sequence b sees the keys up to seq_lens[b] - q_len + i. lse: [batch, num_q_heads,
// q_len].
//
// Keys are on the M side of both products (mma.m16n8k16), the rows (query token, head of the kv head's group) on the N
// side, in tiles of 8: S^T = K Q^T and O^T = V^T P^T waste nothing for groups of up to 8 heads. Codes are multiplied as
// they are: K's scale and zero go into the scores (S = s (Q.c) + z sum(Q)), V's scale into the probabilities, and V's
// zero adds sum(P z) to each channel.
//
// A CTA computes one split of the keys after another (decode/plan.cuh). Warp w takes every NUM_WARPS-th tile of
// TILE_TOKENS keys of a split, with its own running maximum, O, and ring of NUM_STAGES in shared memory: no CTA barrier
// within a split. With more rows (ROW_WARPS > 1) the warps copy the same, but each computes the tiles of all for 8
// N_TILES rows of its own: the keys are read once for all rows. __syncthreads then is in the place of __syncwarp, and
// ldmatrix gives fragments of 16-bit K and V (of V transposed): what a warp reads is read by each, so instructions that
// pack registers would cost more than their place in the loads saves.
//
//   each warp, tile i: cp.async.wait(i) | __syncwarp | copy tile i + NUM_STAGES - 1 | S^T  softmax  O^T of tile i
//   end of a split:    __syncthreads | merge of the warps through shared memory | O and LSE, or a partial result
//
// Shared memory, bytes: for each warp (ROW_WARPS > 1: for all together) NUM_STAGES * (K | V | parameters of K |
// parameters of V), later the merge's m, l, O | scan. In front of them, with HEAD_DIM 512, for each warp its queries.
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/kv_copy.cuh"
#include "decode/kv_row.cuh"
#include "decode/plan.cuh"
#include "decode/query.cuh"
#include "decode/rows.cuh"
#include "decode/tile.cuh"
#include "params/decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/l2.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16: q, o, and 16-bit caches
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kKKind = K_KIND, kVKind = V_KIND;
    static constexpr bool kQuantK = kKKind != kKv16, kQuantV = kVKind != kKv16;
    static constexpr bool kInOrder = kv_in_order(kKKind);  // the caller's arrays in 8 bits
    static constexpr bool kPlaces = (!kQuantK && !kQuantV) || kInOrder;  // rows are where the strides say
    static_assert(!(kInOrder || kv_in_order(kVKind)) || kKKind == kVKind, "K and V of a caller are alike");
    static constexpr int kKGroups = K_GROUPS, kVGroups = V_GROUPS;  // parameters of a row; 1 for 16 bits too
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr int kTile = TILE_TOKENS;  // keys of a warp's tile
    static constexpr int kNTiles = N_TILES;  // tiles of 8 query rows
    static constexpr int kThreads = kWarps * 32;
    // Warps that compute the same keys, each for query rows of its own: 1 or all.
    static constexpr int kRowWarps = ROW_WARPS;
    static constexpr bool kSharedKeys = kRowWarps > 1;
    static constexpr int kKeyWarps = kWarps / kRowWarps;  // warps with keys of their own
    // K and V are read by ldmatrix; with 512 channels its addresses would take registers that O needs.
    static constexpr bool kByMatrix = kSharedKeys && !kQuantK && !kQuantV && kHeadDim <= 256;
    static constexpr int kWarpRows = 8 * kNTiles;
    static constexpr int kRows = kWarpRows * kRowWarps;
    static constexpr int kMTiles = M_TILES;  // tiles of 16 keys that are computed together
    static constexpr bool kSharedQuery = kHeadDim > 256;  // O of 8 rows takes 128 registers
    static_assert(kTile % 16 == 0 && kTile <= 32, "a lane looks up one key of a tile");
    static_assert(kStages >= 2, "a tile is copied while another one is computed");
    static_assert(kRowWarps == 1 || kRowWarps == kWarps, "a CTA barrier is between copies and those who read them");
    static_assert(kTile * kRowWarps % (16 * kMTiles) == 0, "whole steps");
};

using Tile = DecodeTile<Config>;
using Rows = Tile::Rows;
using Query = QueryRow<Config::kKKind, Config::kHeadDim, Config::kKGroups, Config::kByMatrix>;
using QuerySteps = SharedQuery<Config::kNTiles, Config::kHeadDim / 16>;
using QueryRegisters = RegisterQuery<Config::kNTiles, Config::kHeadDim / 16>;
using QueryFragments = Select<Config::kSharedQuery, QuerySteps, QueryRegisters>::Type;

// The warps' results, to be merged.
struct Merge {
    float o[Config::kKeyWarps][Config::kRows][Config::kHeadDim + 4];
    float m[Config::kKeyWarps][Config::kRows], l[Config::kKeyWarps][Config::kRows];
};
struct QueryStorage {
    alignas(128) uint8 queries[Config::kWarps][QuerySteps::kWarpBytes];
};
struct NoQueryStorage {};
OA_DEVICE void place_queries(QueryRegisters&, NoQueryStorage&, int, int) {}
OA_DEVICE void place_queries(QuerySteps& b, QueryStorage& smem, int warp_idx, int lane) {
    b.at = smem_addr_of(smem.queries[warp_idx]) + lane * 8;
}
struct SharedStorage : Select<Config::kSharedQuery, QueryStorage, NoQueryStorage>::Type {
    union {
        KvStage<Config> stages[Config::kKeyWarps][Config::kStages];
        Merge merge;
    };
    ScanStorage<Config::kThreads> scan;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

constexpr int32 kEarlyChunks = 2;  // of a CTA
constexpr int64 kShortStream = 300 << 20;  // bytes, six times an H200's L2: docs/performance/decode.md

// token / block_size.
OA_DEVICE uint32 block_index(const DecodeParams& p, int32 token) {
    return uint32(quotient(token, p.block_multiplier, p.block_shift));
}

// The block that holds a key.
OA_DEVICE uint32 block_of(const DecodeParams& p, int32 sequence, int32 token) {
    if (p.block_table == nullptr) return sequence;
    if (p.recent_side == kRecentNewest) return p.block_table[sequence];  // a slot is a block
    return p.block_table[int64(sequence) * p.table_columns + block_index(p, token)];
}

// Number of a key's row in the planes, (block * num_kv_heads + head) * block_size + row: below 2^32, which the host
// checks. FBGEMM's layout: (block * block_size + row) * num_kv_heads + head. With kPlaces: its place.
OA_DEVICE uint32 cache_row(const DecodeParams& p, uint32 block, int32 kv_head, int32 token) {
    if (p.recent_side == kRecentNewest) token = int32(uint32(token) % uint32(p.recent_ring));
    uint32 row = uint32(token) - block_index(p, token) * uint32(p.block_size);
    block = min_of(block, uint32(p.num_blocks - 1));  // a number out of range reads the last block, nothing outside
    if (Config::kPlaces) return block * p.block_places + uint32(kv_head) * p.head_places + row * p.token_places;
    return Config::kKKind == kKvFbgemm ? (block * uint32(p.block_size) + row) * p.num_kv_heads + kv_head
                                       : (block * p.num_kv_heads + kv_head) * uint32(p.block_size) + row;
}

// Place of a key's scale, where each row has one.
OA_DEVICE uint32 scale_place(const DecodeParams& p, uint32 block, int32 kv_head, int32 token) {
    uint32 row = uint32(token) - block_index(p, token) * uint32(p.block_size);
    block = min_of(block, uint32(p.num_blocks - 1));
    return block * p.scale_outer + uint32(kv_head) * p.scale_head + row * p.scale_token;
}

// The scale of all keys of a sequence and head; 1 where there is none, or each has its own.
OA_DEVICE float common_scale(const DecodeParams& p, const uint32* scales, int32 sequence, int32 kv_head) {
    if (!Config::kInOrder || p.row_scales || scales == nullptr) return 1.0f;
    return reinterpret_cast<const float*>(scales)[uint32(sequence) * p.scale_outer + uint32(kv_head) * p.scale_head];
}

// A split of a segment.
struct Split {
    int32 sequence, kv_head, row_block;
    int32 begin, end;  // keys to walk
    int32 seq_len;
    int32 limit;  // end of the keys that are this launch's
    Queries queries;
};

// First row of a warp.
OA_DEVICE int32 first_row(const Split& split, int warp_idx) {
    return split.row_block * Config::kRows + (Config::kSharedKeys ? warp_idx * Config::kWarpRows : 0);
}

// Address of query row `row` of a split, null if there is none.
OA_DEVICE const uint16* query_row(const DecodeParams& p, const Split& split, int32 row) {
    int32 token = token_of(p, row), head = split.kv_head * p.group + (row - token * p.group);
    if (token >= split.queries.count) return nullptr;
    return p.q + split.sequence * p.q_stride_b + (split.queries.first + token) * p.q_stride_s + head * p.q_stride_h;
}

OA_DEVICE void load_queries(Query (&queries)[Config::kNTiles], const DecodeParams& p, const Split& split, int warp_idx,
                            int lane) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
        int32 row = first_row(split, warp_idx) + n * 8 + (lane >> 2);
        queries[n].load(query_row(p, split, row), p, lane & 3);
    }
}

OA_DEVICE void make_rows(QueryFragments& b, Rows& rows, Query (&queries)[Config::kNTiles], const DecodeParams& p,
                         const Split& split, int warp_idx, int lane) {
    int q = lane & 3;
    if (Config::kInOrder) rows.row_scales = p.row_scales != 0;
    const float k_scale = common_scale(p, p.k_params, split.sequence, split.kv_head);
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
        int32 token = token_of(p, first_row(split, warp_idx) + n * 8 + (lane >> 2));
        Query& query = queries[n];
        if constexpr (Config::kQuantK) {
            query.transform(Config::Io{}, p, split.kv_head, q);
            if (Config::kInOrder) query.scale *= k_scale;
            if constexpr (Tile::kZeroProduct) query.pack_sums(rows.zero_b[n], q);
        } else {
            query.keep(p);
        }
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            set_query_step(b, n, step, query.b[step][0], query.b[step][1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int src = 8 * q + 4 * r;  // a lane of row 2 q + r
            rows.scale[n][r] = __shfl_sync(0xffffffffu, query.scale, src);
            rows.bias[n][r] = __shfl_sync(0xffffffffu, query.bias, src);
            if (Config::kQuantK)
#pragma unroll
                for (int group = 0; group < Config::kKGroups; ++group) {
                    if (!Tile::kZeroProduct) rows.sum[group][n][r] = __shfl_sync(0xffffffffu, query.sum[group], src);
                    rows.start[group][n][r] = __shfl_sync(0xffffffffu, query.start[group], src);
                }
            int32 its_token = min_of(__shfl_sync(0xffffffffu, token, src), split.queries.count - 1);
            rows.end[n][r] =
                p.first_key == kSharedPrefix ? split.seq_len : split.seq_len - split.queries.count + 1 + its_token;
            rows.m[n][r] = kLowest;
            rows.l[n][r] = 0.0f;
            rows.f[n][r] = kLargestFactor;
#pragma unroll
            for (int group = 0; group < (Config::kQuantV ? Config::kVGroups : 1); ++group) rows.z[group][n][r] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < Config::kHeadDim / 16; ++d)
            rows.o[n][d][0] = rows.o[n][d][1] = rows.o[n][d][2] = rows.o[n][d][3] = 0.0f;
    }
}

// Brings a split's part of the block table to L2: behind the copies of K and V, a trip to memory takes longer than a
// tile.
OA_DEVICE void prefetch_table(const DecodeParams& p, const Split& split, int tid) {
    if (p.block_table == nullptr || split.begin >= split.end) return;
    const int32* from = p.block_table + int64(split.sequence) * p.table_columns;
    int32 last = int32(block_index(p, split.end - 1));
    int32 i = int32(block_index(p, split.begin)) + 32 * tid;
    if (tid == Config::kThreads - 1) prefetch_l2(from + last);
    for (; i <= last; i += 32 * Config::kThreads) prefetch_l2(from + i);
}

// This warp's keys of a split: those that it copies, or with shared keys all, of which it copies every NUM_WARPS-th
// tile.
OA_DEVICE void walk(QueryFragments& b, Rows& rows, const DecodeParams& p, const Split& split,
                    KvStage<Config> (&stages)[Config::kStages], uint64 policy, int warp_idx, int lane) {
    constexpr int kStep = Config::kWarps * Config::kTile;
    int32 first = split.begin + warp_idx * Config::kTile;
    const int32 computed = Config::kSharedKeys ? split.begin : first;  // first key that this warp computes
    int32 tiles = computed < split.end ? (split.end - computed + kStep - 1) / kStep : 0;
    const bool has_rows = !Config::kSharedKeys || first_row(split, warp_idx) < split.queries.count * p.group;
    KvPlaces places{p.place_bytes, p.token_bytes, p.row_chunks};
    int part = Config::kSharedKeys ? int(of_lane(uint32(warp_idx), lane)) : 0;
    KvCopy<Config> copy{p.k, p.v, p.k_params, p.v_params, policy, lane, part, places, p.row_scales != 0};
    // Where rows follow each other at least 16 at a time, splits begin at multiples of 16. (Between FBGEMM's rows are
    // those of other heads.)
    bool in_runs = Config::kPlaces
                       ? p.token_bytes != 0
                       : p.recent_side != kRecentNewest && (p.block_table == nullptr || p.block_size % 16 == 0) &&
                             (Config::kKKind != kKvFbgemm || p.num_kv_heads == 1);
    // Left of all windows, in blocks that may be another sequence's by now, is the first key that a query sees: NaN
    // times 0 would be NaN. (16 keys that follow each other are in one block, which the sequence has.)
    const int32 seen = in_runs || p.window_left < 0 ? 0 : split.seq_len - split.queries.count - p.window_left;
    // A lane's key of a tile; behind the end of the split its last one, of which nothing is copied.
    auto key_of = [&](int32 tile) {
        return min_of(max_of(first + tile * kStep + lane % Config::kTile, seen), split.end - 1);
    };
    // Loaded a tile ahead of its copy: the block table is another trip to memory.
    uint32 block = tiles > 0 ? block_of(p, split.sequence, key_of(0)) : 0;
    int32 copied = 0;
    KvRing<KvStage<Config>, Config::kStages> ring(stages, lane);
    auto copy_next = [&]() {
        if (copied < tiles) {
            uint32 row = cache_row(p, block, split.kv_head, key_of(copied));
            uint32 scale = 0;
            if (Config::kInOrder && p.row_scales) scale = scale_place(p, block, split.kv_head, key_of(copied));
            copy.tile(ring.address, row, split.end - first - copied * kStep, in_runs, scale);
            ring.advance();
            block = block_of(p, split.sequence, key_of(copied + 1));
        }
        ++copied;
        cp_async_commit();
    };
    Query queries[Config::kNTiles];
    if (!Config::kSharedQuery) load_queries(queries, p, split, warp_idx, lane);
#pragma unroll 1
    for (int i = 0; i < Config::kStages - 1; ++i) copy_next();
    if (Config::kSharedQuery) load_queries(queries, p, split, warp_idx, lane);  // there are no registers to wait in
    make_rows(b, rows, queries, p, split, warp_idx, lane);
    HalfMagic magic{p.two_1024};
    // Every row sees the keys before this one, but for the window.
    int32 seen_by_all =
        p.first_key == kSharedPrefix ? split.limit : min_of(split.seq_len - split.queries.count + 1, split.limit);
    int32 window_begin = p.window_left < 0 ? 0 : split.seq_len - 1 - p.window_left;
    for (int32 i = 0; i < tiles; ++i) {
        cp_async_wait<Config::kStages - 2>();
        // Tile i has landed; every lane (with shared keys: of the CTA) has left tile i - 1.
        if constexpr (Config::kSharedKeys) {
            __syncthreads();
        } else {
            __syncwarp();
        }
        copy_next();
        if (!has_rows) continue;
        const KvStage<Config>& stage = stages[i % Config::kStages];
#pragma unroll 1
        for (int part = 0; part < KvStage<Config>::kKeys; part += 16 * Config::kMTiles) {
            int32 key = computed + i * kStep + part;
            if (Config::kSharedKeys && key >= split.end) break;
            Tile::Scores x;
            Tile::mma_qk(x, b, rows, stage, magic, part, lane);
            if (p.softcap > 0.0f) Tile::apply_softcap(x, p.softcap);
            if (key + 16 * Config::kMTiles > seen_by_all || key < window_begin)
                Tile::mask_keys(x, rows, key, split.limit, p.window_left, lane);
            Tile::softmax_pv(x, rows, stage, magic, part, lane);
        }
    }
    cp_async_wait<0>();
}

OA_DEVICE void store_warp(Merge& merge, Rows& rows, int warp_idx, int lane) {
    int q = lane & 3, g = lane >> 2;
    int key_warp = Config::kSharedKeys ? 0 : warp_idx, first = Config::kSharedKeys ? warp_idx * Config::kWarpRows : 0;
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = first + n * 8 + 2 * q + r;
            float l = sum_over_keys(rows.l[n][r]);
            if (g == 0) {
                merge.m[key_warp][row] = rows.m[n][r];
                merge.l[key_warp][row] = l;
            }
            if constexpr (Config::kByMatrix) {
#pragma unroll
                for (int d = 0; d < Config::kHeadDim / 16; ++d) {
                    merge.o[key_warp][row][16 * d + g] = rows.o[n][d][r];
                    merge.o[key_warp][row][16 * d + 8 + g] = rows.o[n][d][2 + r];
                }
                continue;
            }
            float back = Config::kQuantV ? inverse_power(rows.f[n][r]) : 1.0f;
#pragma unroll
            for (int unit = 0; unit < Tile::VRow::kUnits; ++unit) {
                constexpr int kGroupUnits = Tile::VRow::kUnits / Config::kVGroups;
                if (Config::kQuantV && unit % kGroupUnits == 0)
                    rows.z[unit / kGroupUnits][n][r] = sum_over_keys(rows.z[unit / kGroupUnits][n][r]);
                float z = Config::kQuantV ? rows.z[unit / kGroupUnits][n][r] : 0.0f;
                float4 o = make_float4(rows.o[n][2 * unit][r], rows.o[n][2 * unit][2 + r], rows.o[n][2 * unit + 1][r],
                                       rows.o[n][2 * unit + 1][2 + r]);
                o = make_float4(fmaf(o.x, back, z), fmaf(o.y, back, z), fmaf(o.z, back, z), fmaf(o.w, back, z));
                *reinterpret_cast<float4*>(&merge.o[key_warp][row][Tile::VRow::channel(unit, g, 0)]) = o;
            }
        }
}

// The merged result, to O and LSE or (slot >= 0) to a partial result.
OA_DEVICE void write_split(const Merge& merge, const DecodeParams& p, const Split& split, int32 slot, int tid) {
    constexpr int kRowThreads = min_of(Config::kSharedKeys ? 32 : Config::kThreads / 8, Config::kHeadDim / 4);
    constexpr int kAtOnce = min_of(Config::kThreads / kRowThreads, Config::kRows);  // rows
    static_assert(Config::kRows % kAtOnce == 0, "whole rounds");
    if (tid >= kAtOnce * kRowThreads) return;
    const float v_scale = common_scale(p, p.v_params, split.sequence, split.kv_head);
    constexpr int kUnroll = Config::kSharedKeys ? 2 : Config::kRows / kAtOnce;
    int at = tid % kRowThreads;
#pragma unroll kUnroll
    for (int n = 0; n < Config::kRows / kAtOnce; ++n) {
        int row = n * kAtOnce + tid / kRowThreads;
        float m = merge.m[0][row], l = 0.0f, weight[Config::kKeyWarps];
#pragma unroll
        for (int w = 1; w < Config::kKeyWarps; ++w) m = fmaxf(m, merge.m[w][row]);
#pragma unroll
        for (int w = 0; w < Config::kKeyWarps; ++w) {
            weight[w] = exp2_approx(merge.m[w][row] - m);
            l = fmaf(merge.l[w][row], weight[w], l);
        }
        int32 flat = split.row_block * Config::kRows + row, token = token_of(p, flat);
        if (token >= split.queries.count) continue;
        int32 head = split.kv_head * p.group + (flat - token * p.group);
        float scale = v_scale;
        int64 slot_row = int64(slot) * Config::kRows + row;
        if (slot < 0) {
            RowResult result = finish_row(m, l, sink_log2<Config::Io>(p.sinks, p.sinks_kind, head));
            scale *= result.o_scale;
            if (p.lse != nullptr && at == 0)
                p.lse[lse_place(p, p.prefix_sequences ? 0 : split.sequence, head, split.queries.first, token)] =
                    result.lse;
        } else if (at == 0) {
            *reinterpret_cast<float2*>(p.partial_ml + 2 * slot_row) = make_float2(m, l);
        }
        uint16* to =
            p.o + split.sequence * p.o_stride_b + (split.queries.first + token) * p.o_stride_s + head * p.o_stride_h;
        constexpr int kChannelUnroll = Config::kSharedQuery ? 4 : Config::kHeadDim / 4 / kRowThreads;
#pragma unroll kChannelUnroll
        for (int i = 0; i < Config::kHeadDim / 4 / kRowThreads; ++i) {
            int channel = 4 * (i * kRowThreads + at);
            float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < Config::kKeyWarps; ++w) {
                float4 part = *reinterpret_cast<const float4*>(&merge.o[w][row][channel]);
                o.x = fmaf(part.x, weight[w], o.x);
                o.y = fmaf(part.y, weight[w], o.y);
                o.z = fmaf(part.z, weight[w], o.z);
                o.w = fmaf(part.w, weight[w], o.w);
            }
            if (slot >= 0) {
                if (Config::kInOrder) o = make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
                *reinterpret_cast<float4*>(p.partial_o + slot_row * Config::kHeadDim + channel) = o;
            } else if (channel < p.head_dim) {
                uint2 packed = make_uint2(pack2(Config::Io{}, o.x * scale, o.y * scale),
                                          pack2(Config::Io{}, o.z * scale, o.w * scale));
                *reinterpret_cast<uint2*>(to + channel) = packed;
            }
        }
    }
}

// Prefetches the lengths to L2, and meanwhile this CTA's queries, guessing that all lengths are equal.
OA_DEVICE void prefetch_first(const DecodeParams& p, int tid) {
    constexpr int kLines = Config::kHeadDim / 64;
    if (tid < 32) prefetch_l2(p.seq_lens + min_of(tid * 32, p.batch - 1));
    if (tid < 32) return;
    // Approximate divisions: a prefetch is a hint.
    float heads = float(p.num_kv_heads * p.num_row_blocks),
          place = float(blockIdx.x) * rcp_approx(float(p.num_workers));
    int32 sequence = min_of(int32(place * float(p.batch)), p.batch - 1);
    // The block table's row, up to 32 lines of it.
    int32 entry = 32 * (Config::kThreads - 1 - tid);
    if (p.block_table != nullptr && tid >= Config::kThreads - 32 && entry < p.table_columns)
        prefetch_l2(p.block_table + int64(sequence) * p.table_columns + entry);
    if (Config::kRows * kLines <= tid - 32) return;
    int32 row_block = int32((place * float(p.batch) - float(sequence)) * heads), kv_head = row_block;
    if (p.num_row_blocks > 1) kv_head = row_block / p.num_row_blocks;
    row_block -= kv_head * p.num_row_blocks;
    int line = (tid - 32) % kLines, row = row_block * Config::kRows + (tid - 32) / kLines;
    if (row >= p.group || kv_head >= p.num_kv_heads || 64 * line >= p.head_dim) return;
    // Packed: as if every sequence had one query.
    int64 at =
        p.cu_seqlens_q == nullptr ? sequence * p.q_stride_b : min_of(sequence, p.total_queries - 1) * p.q_stride_s;
    prefetch_l2(p.q + at + (kv_head * p.group + row) * p.q_stride_h + 64 * line);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) decode_sm80(const
                                                                                     __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);

    prefetch_first(p, tid);
    Scan<Config::kThreads, Config::kRows> scan(p, smem.scan);
    Partition partition(scan.total, p);
    int32 at = partition.begin(blockIdx.x), end = partition.begin(blockIdx.x + 1);
    if (at >= end) return;  // which counts as launch_dependents
    // decode_combine waits for the end of this kernel. Where there is much work it is launched late, so that it takes
    // nothing from the first copies.
    bool early = partition.each <= kEarlyChunks || p.has_company;
    if (early) launch_dependents();
    scan.locate(p, at, smem.scan);
    int32 sequence = smem.scan.sequence, before = smem.scan.before;
    // A stream that is not many times L2 evicts itself first. (Blocks of rows read the same keys, which then stay.)
    constexpr int kKeyBytes = Tile::KRow::kBytes + Tile::VRow::kBytes + (Config::kQuantK ? 4 * Config::kKGroups : 0) +
                              (Config::kQuantV ? 4 * Config::kVGroups : 0);
    bool brief = (int64(scan.total) << p.chunk_log2) * kKeyBytes < kShortStream;
    uint64 policy = l2_policy(brief && (Config::kNTiles == 1 || p.num_row_blocks == 1));
    // Over a shared prefix there is one sequence, number 0. Added to its number and not chosen instead of it: 15
    // instructions less in the loop.
    const int32 owner = p.first_key == kSharedPrefix ? prefix_owner(p) : 0;
    while (at < end) {
        KeySpan span = key_span<Config::kRows>(p, sequence);
        int32 all = span.chunks * p.num_kv_heads * span.row_blocks;
        if (at >= before + all) {  // sequences without keys have none
            before += all;
            ++sequence;
            continue;
        }
        int32 segment = all == span.chunks ? 0 : (at - before) / span.chunks;
        int32 segment_begin = before + segment * span.chunks;
        int32 stop = p.fixed_splits ? at + 1 : min_of(end, segment_begin + span.chunks);
        Split split;
        split.sequence = sequence + owner;
        split.kv_head = span.row_blocks == 1 ? segment : segment / span.row_blocks;
        split.row_block = segment - split.kv_head * span.row_blocks;
        split.begin = span.begin + ((at - segment_begin) << p.chunk_log2);
        split.end = min_of<int64>(span.end, span.begin + (int64(stop - segment_begin) << p.chunk_log2));
        split.seq_len = span.seq_len;
        split.limit = span.end;
        split.queries = span.queries;
        bool whole = stop - at == span.chunks;

        if (p.recent_side != kRecentNewest) prefetch_table(p, split, tid);
        QueryFragments b;
        place_queries(b, smem, warp_idx, lane);
        Rows rows;
        walk(b, rows, p, split, smem.stages[Config::kSharedKeys ? 0 : warp_idx], policy, warp_idx, lane);
        if (!early) launch_dependents();
        __syncthreads();  // every warp has left its stages
        store_warp(smem.merge, rows, warp_idx, lane);
        __syncthreads();
        write_split(smem.merge, p, split, whole ? -1 : partial_slot(p, partition, blockIdx.x, segment_begin, at), tid);
        __syncthreads();
        at = stop;
    }
}
