// What the backward kernels on mma.sync with stationary keys have in common: tiles, steps, copies, products, and the
// way in and out.
#pragma once
#include "attention/bwd_scores.cuh"
#include "attention/bwd_stray.cuh"
#include "attention/query_tiles.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/tile_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"
#include "scheduler/bwd_lists.cuh"
#include "scheduler/bwd_tile.cuh"
#include "scheduler/padded_rows.cuh"
#include "tile/panel.cuh"
#include "attention/dropout.cuh"

// A step: a tile of queries of a query head. entry: of a list; without one every group of keys sees the tile.
struct Place {
    int32 head, m;
    int32 entry = kAllGroups * kTileFull;
};
// The steps of a CTA: tiles of queries of one query head after the other.
template <bool kLists, int kBlockM, int kBlockN>
struct QuerySteps {
    int32 first, end;  // tiles of a head
    int32 left;  // steps from `at` on
    Place at;
    template <typename Queries>
    OA_DEVICE QuerySteps(const AttnBwdParams&, const BwdTile&, const Queries& tiles, int32 head, int32 group)
        : first(tiles.first), end(tiles.end), left(max_of(tiles.end - tiles.first, 0) * group), at{head, first} {}
    OA_DEVICE Place next() const { return at.m + 1 == end ? Place{at.head + 1, first} : Place{at.head, at.m + 1}; }
};
// The same of kernels that pass over tiles of queries by lists, where a call has some. An entry names kParts tiles, of
// which some may lie behind the last query or outside of the window.
template <int kBlockM, int kBlockN>
struct QuerySteps<true, kBlockM, kBlockN> : QuerySteps<false, kBlockM, kBlockN> {
    using Plain = QuerySteps<false, kBlockM, kBlockN>;
    using Plain::at, Plain::left;
    static constexpr int32 kParts = kListedRows / kBlockM;
    static_assert(kParts * kBlockM == kListedRows, "an entry names whole tiles");

    template <typename Queries>
    OA_DEVICE QuerySteps(const AttnBwdParams& p, const BwdTile& t, const Queries& tiles, int32 head, int32 group)
        : Plain(p, t, tiles, head, group), list(p.lists) {
        if (list == nullptr) return;
        list = bwd_list(p, t.batch_idx, head, t.n0 / kBlockN);
        stride = p.lists_stride_h;
        left = 0;
#pragma unroll 4
        for (int32 h = 0; h < group; ++h) left += list[h * stride];
        left *= kParts;
        of_head = 0, at = Place{head - 1, 0};
        list -= stride;
        if (left > 0) at = first_of_entry();
    }
    // Once a step, whose place the step after it takes; behind the last one anything.
    OA_DEVICE Place next() {
        if (list == nullptr) return Plain::next();
        if (left <= 1) return at;
        if ((at.m + 1) % kParts != 0) return Place{at.head, at.m + 1, at.entry};
        return first_of_entry();
    }
    // Of the next entry, which there is.
    OA_DEVICE Place first_of_entry() {
        Place to = at;
        while (of_head == 0) {
            list += stride;
            ++to.head;
            of_head = *list, number = 0;
        }
        --of_head;
        to.entry = list[++number];
        to.m = listed_tile(to.entry) * kParts;
        return to;
    }
    const int32* list;  // of the query head
    int64 stride;
    int32 of_head, number;  // entries of the head that are left; the last one
};

// Config: Io, kHeadDim, kBlockM, kBlockN, kWarps, kThreads, kStages, kLists (QuerySteps); kKeyGroups of kKeyRows keys,
// which kKTiles tiles of 16 and kDTiles tiles of 8 columns hold; kQTiles of 8 queries, of which a warp makes scores at
// a time; kDsTiles; kDqWarpsM warps side by side along the queries of dQ, kDqMTiles tiles of 16 queries and kDqSteps of
// 16 columns each.
template <typename Config>
struct BwdKeys {
    using QTile = PanelTile<Config::kBlockM, Config::kHeadDim>;
    using KvTile = PanelTile<Config::kBlockN, Config::kHeadDim>;
    using DsTile = PanelTile<Config::kBlockN, Config::kBlockM>;  // transposed: a row a key
    using QLane = PanelLane<Config::kBlockM, Config::kHeadDim>;
    using KvLane = PanelLane<Config::kBlockN, Config::kHeadDim>;
    using DsLane = PanelLane<Config::kBlockN, Config::kBlockM>;
    using QCopy = TileCopy<Config::kBlockM, Config::kHeadDim, Config::kThreads>;
    using KvCopy = TileCopy<Config::kBlockN, Config::kHeadDim, Config::kThreads>;
    using Scores = float[Config::kKTiles][Config::kQTiles * 4];
    using Output = float[Config::kOutKTiles][Config::kOutDTiles * 4];
    using DqTile = float[Config::kDqMTiles][Config::kDqSteps * 8];
    using Queries = QueryTiles<Config::kBlockM, Config::kBlockN>;
    using Steps = QuerySteps<Config::kLists, Config::kBlockM, Config::kBlockN>;

    struct SharedStorage {
        alignas(1024) uint8 k[KvTile::kBytes];  // dK on the way out
        alignas(1024) uint8 v[KvTile::kBytes];  // dV on the way out
        alignas(1024) uint8 q[Config::kStages][QTile::kBytes];
        alignas(1024) uint8 d_o[Config::kStages][QTile::kBytes];
        alignas(1024) uint8 ds[Config::kDsTiles][DsTile::kBytes];  // of this step and the one before
        alignas(1024) float lse2[Config::kStages][Config::kBlockM];
        float delta[Config::kStages][Config::kBlockM];
    };

    // What all warps know of the CTA's work.
    struct Work {
        const AttnBwdParams& p;
        const ScoreModArrays* arrays;
        const BwdTile& t;
        const Queries& tiles;
        uint32 smem;
        int64 padded;  // first padded row of the sequence
        int warp_idx, lane, group;  // group: in the half of the warps
        const TileDropout& dropout;
        // Of a step.
        OA_DEVICE TileDropout dropout_of(const Place& step, int own_lane) const {
            TileDropout made = dropout;
            made.begin(t.sequence, step.head, own_lane);
            return made;
        }
        // Shared address of a member.
        template <typename Member>
        OA_DEVICE uint32 at(Member SharedStorage::* member) const {
            return smem_addr_at(member, smem);
        }
    };

    // D^T = A B^T of a warp's keys: A keys (K or V), B queries (Q or dO).
    OA_DEVICE static void mma_scores(Scores& s, uint32 smem_a, const KvLane& a_lane, uint32 smem_b,
                                     const QLane& b_lane) {
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
            for (int x = 0; x < Config::kQTiles * 4; ++x) s[i][x] = 0.0f;
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            uint32 a[Config::kKTiles][4];
#pragma unroll
            for (int i = 0; i < Config::kKTiles; ++i) ldmatrix_x4(a[i], smem_a + a_lane.at(i * 16, step));
#pragma unroll
            for (int n = 0; n < Config::kQTiles; n += 2) {
                uint32 b[4];
                ldmatrix_x4(b, smem_b + b_lane.at(n * 8, step));
#pragma unroll
                for (int i = 0; i < Config::kKTiles; ++i) {
                    mma_m16n8k16(typename Config::Io{}, s[i] + 4 * n, a[i], b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, s[i] + 4 * (n + 1), a[i], b[2], b[3]);
                }
            }
        }
    }

    // D += A B of a warp's keys: A P^T or dS^T, packed pairs of queries; B dO or Q.
    using Packed = uint32[Config::kKTiles][Config::kQTiles * 2];
    OA_DEVICE static void mma_output(Output& o, const Packed& a, uint32 smem_b, const QLane& b_lane) {
#pragma unroll
        for (int n = 0; n < Config::kQTiles; n += 2)
#pragma unroll
            for (int d = 0; d < Config::kOutDTiles; d += 2) {
                uint32 b[4];
                ldmatrix_x4_trans(b, smem_b + b_lane.at(n * 8, d / 2));
#pragma unroll
                for (int i = 0; i < Config::kKTiles; ++i) {
                    const uint32 rows[4] = {a[i][2 * n], a[i][2 * n + 1], a[i][2 * n + 2], a[i][2 * n + 3]};
                    mma_m16n8k16(typename Config::Io{}, o[i] + 4 * d, rows, b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, o[i] + 4 * (d + 1), rows, b[2], b[3]);
                }
            }
    }

    // dQ of a step: this warp's part of queries and columns. Here and below addresses are made anew in every step
    // (in_register): kept, they would take registers that the accumulators need.
    OA_DEVICE static void add_dq(const Work& w, uint32 smem_ds, const Place& of) {
        int lane = in_register(w.lane);
        int32 first_row = w.warp_idx % Config::kDqWarpsM * Config::kDqMTiles;  // in 16 rows
        int32 first_step = w.warp_idx / Config::kDqWarpsM * Config::kDqSteps;
        DsLane ds_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
        KvLane k_lane(lane & 15, lane >> 4);
        uint32 smem_k = w.at(&SharedStorage::k);
        DqTile dq;
#pragma unroll
        for (int i = 0; i < Config::kDqMTiles; ++i)
#pragma unroll
            for (int x = 0; x < Config::kDqSteps * 8; ++x) dq[i][x] = 0.0f;
#pragma unroll
        for (int key = 0; key < Config::kBlockN; key += 16) {
            uint32 a[Config::kDqMTiles][4];
#pragma unroll
            for (int i = 0; i < Config::kDqMTiles; ++i)
                ldmatrix_x4_trans(a[i], smem_ds + ds_lane.at(key, first_row + i));
#pragma unroll
            for (int d = 0; d < Config::kDqSteps; ++d) {
                uint32 b[4];
                ldmatrix_x4_trans(b, smem_k + k_lane.at(key, first_step + d));
#pragma unroll
                for (int i = 0; i < Config::kDqMTiles; ++i) {
                    mma_m16n8k16(typename Config::Io{}, dq[i] + 8 * d, a[i], b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, dq[i] + 8 * d + 4, a[i], b[2], b[3]);
                }
            }
        }
        // Rows behind the sequence are padding: their sums are zeros, and nobody reads them.
        int64 row =
            of.head * w.p.rows_stride_h + w.padded + int64(of.m) * Config::kBlockM + first_row * 16 + (lane >> 2);
        float* to = w.p.dq_accum + row * w.p.dq_columns + first_step * 16 + (lane & 3) * 4;
#pragma unroll
        for (int i = 0; i < Config::kDqMTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* at = to + int64(i * 16 + r * 8) * w.p.dq_columns;
#pragma unroll
                for (int d = 0; d < Config::kDqSteps; ++d)
                    reduce_add_global4(at + 16 * d, dq[i][8 * d + 2 * r], dq[i][8 * d + 2 * r + 1],
                                       dq[i][8 * d + 4 + 2 * r], dq[i][8 * d + 5 + 2 * r]);
            }
    }

    // Whether a list hides a step from a warp, whose first key of the tile is `key`.
    OA_DEVICE static bool hides_all(const Place& at, int32 key) {
        return Config::kLists && Config::kBlockN > kListedRows && is_hidden(at.entry, key / kListedRows);
    }
    // Whether scores have to be modified one by one.
    OA_DEVICE static bool modifies_scores(const AttnFwdParams& p) {
        return Config::kScoreMods && (!Config::kLists || Config::kDMask || ::modifies_scores(p));
    }

    // Shared address of queries 8n + 2(lane % 4) + {0, 1} of a key of the tile.
    OA_DEVICE static uint32 ds_word(int key, int n, int lane) { return DsTile::offset(key, n) + (lane & 3) * 4; }

    // Copies of a step's Q, dO, lse2 and delta.
    OA_DEVICE static void copy_step(const Work& w, const Place& at, int stage) {
        const AttnFwdParams& f = w.p.fwd;
        int32 tid = in_register(int32(threadIdx.x));
        QCopy copy(f.head_dim, tid);
        int32 rows = w.t.seqlen_q - at.m * Config::kBlockM;
        int64 row = int64(w.t.q_begin) + int64(at.m) * Config::kBlockM;
        copy.issue(w.at(&SharedStorage::q) + stage * QTile::kBytes,
                   f.q + w.t.batch_idx * f.q_stride_b + at.head * f.q_stride_h + row * f.q_stride_s, f.q_stride_s, rows,
                   tid);
        copy.issue(w.at(&SharedStorage::d_o) + stage * QTile::kBytes,
                   w.p.d_o + w.t.batch_idx * w.p.do_stride_b + at.head * w.p.do_stride_h + row * w.p.do_stride_s,
                   w.p.do_stride_s, rows, tid);
        int64 padded = at.head * w.p.rows_stride_h + w.padded + int64(at.m) * Config::kBlockM;
        constexpr int kChunks = Config::kBlockM / 4;
        if (tid < 2 * kChunks) {
            bool second = tid >= kChunks;
            int32 chunk = second ? tid - kChunks : tid;
            cp_async_16(
                w.at(second ? &SharedStorage::delta : &SharedStorage::lse2) + stage * Config::kBlockM * 4 + chunk * 16,
                (second ? w.p.delta : w.p.lse2) + padded + chunk * 4, 16);
        }
    }

    // Not 0: a step's dO has stray rows.
    OA_DEVICE static uint32 is_stray(const Work& w, const Place& at) {
        return stray_do<Config::kBlockM>(w.p, at.head * w.p.rows_stride_h + w.padded + at.m * Config::kBlockM);
    }
    // Zeros in the rows of dO that attend to nothing, once the step has landed; all threads.
    OA_DEVICE static void clear_stray(const Work& w, int stage) {
        constexpr int kChunks = Config::kHeadDim / 8;
#pragma unroll 1
        for (int at = threadIdx.x; at < Config::kBlockM * kChunks; at += Config::kThreads)
            if (load_shared_float(w.at(&SharedStorage::lse2) + (stage * Config::kBlockM + at / kChunks) * 4) ==
                -neg_inf())
                store_shared4(
                    w.at(&SharedStorage::d_o) + stage * QTile::kBytes + QTile::offset(at / kChunks, at % kChunks),
                    uint4{});
        __syncthreads();
    }

    // A warp's tile of dK or dV through shared memory to 16-byte stores.
    OA_DEVICE static void store_tile(const Output& o, float scale, uint8* tile, uint16* to, int64 stride, int32 rows,
                                     int32 head_dim, int group, int lane) {
        constexpr int kChunks = Config::kOutDTiles, kRows = Config::kOutKTiles * 16;
        constexpr int kColumnGroups = Config::kHeadDim / 8 / kChunks;
        int first_row = group / kColumnGroups * kRows, first_chunk = group % kColumnGroups * kChunks;
#pragma unroll
        for (int i = 0; i < Config::kOutKTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = first_row + i * 16 + (lane >> 2) + r * 8;
#pragma unroll
                for (int d = 0; d < kChunks; ++d)
                    *reinterpret_cast<uint32*>(tile + KvTile::offset(row, first_chunk + d) + (lane & 3) * 4) =
                        pack2(typename Config::Io{}, o[i][4 * d + 2 * r] * scale, o[i][4 * d + 2 * r + 1] * scale);
            }
        __syncwarp();
#pragma unroll
        for (int at = 0; at < kRows * kChunks; at += 32) {
            int row = first_row + (at + lane) / kChunks, chunk = first_chunk + (at + lane) % kChunks;
            if (row < rows && chunk * 8 < head_dim)
                *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) =
                    *reinterpret_cast<const uint4*>(tile + KvTile::offset(row, chunk));
        }
    }

    // A CTA. make(w, o, steps): all steps; leaves dV (warps of the first half) or dK (second half) of the warp's keys
    // in `o`.
    template <typename Make>
    OA_DEVICE static void run(const BwdParams& params, Make make) {
        const AttnBwdParams& p = backward_of(params);
        const AttnFwdParams& f = p.fwd;
        extern __shared__ __align__(1024) uint8 smem_raw[];
        SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
        int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);
        BwdTile t;
        if (!bwd_tile<Config::kBlockN>(f, p.num_n_blocks, t)) return;
        bool owned = t.seqlen_q != kNoSequence;
        Queries tiles(f, t);
        int32 group_heads = f.num_q_heads / f.num_kv_heads;
        Steps steps(p, t, tiles, t.kv_head_idx * group_heads, group_heads);
        if (!owned) steps.left = 0;
        int half = warp_idx / (Config::kWarps / 2);
        const TileDropout dropout(params);
        Work w{p,
               arrays_of(params),
               t,
               tiles,
               smem_addr_of(smem_raw),
               owned ? padded_begin(f, t.sequence, t.q_begin) : 0,
               warp_idx,
               lane,
               warp_idx % (Config::kWarps / 2),
               dropout};
        Output o;
#pragma unroll
        for (int i = 0; i < Config::kOutKTiles; ++i)
#pragma unroll
            for (int x = 0; x < Config::kOutDTiles * 4; ++x) o[i][x] = 0.0f;
        int64 row = int64(t.k_begin) + t.n0;
        int32 rows = min_of(t.seqlen_k - t.n0, Config::kBlockN);
        if (steps.left > 0) {
            KvCopy kv_copy(f.head_dim, tid);
            const uint16* gk = f.k + t.batch_idx * f.k_stride_b + t.kv_head_idx * f.k_stride_h + row * f.k_stride_s;
            const uint16* gv = f.v + t.batch_idx * f.v_stride_b + t.kv_head_idx * f.v_stride_h + row * f.v_stride_s;
            kv_copy.issue(w.at(&SharedStorage::k), gk, f.k_stride_s, rows, tid);
            kv_copy.issue(w.at(&SharedStorage::v), gv, f.v_stride_s, rows, tid);
            copy_step(w, steps.at, 0);
            cp_async_commit();
            make(w, o, steps);
            __syncthreads();  // K and V are read
        }
        uint16* to = half == 0 ? p.dv : p.dk;
        if (to == nullptr) return;
        int64 stride = half == 0 ? p.dv_stride_s : p.dk_stride_s;
        to += half == 0 ? t.batch_idx * p.dv_stride_b + t.kv_head_idx * p.dv_stride_h + row * stride
                        : t.batch_idx * p.dk_stride_b + t.kv_head_idx * p.dk_stride_h + row * stride;
        store_tile(o, half == 0 ? dropout.scaled(1.0f) : f.softmax_scale, half == 0 ? smem.v : smem.k, to, stride, rows,
                   f.head_dim, w.group, lane);
    }
};
