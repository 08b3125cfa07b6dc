// A warp's tile of a KV cache on its way to shared memory: rows that a block table scatters, copied by cp.async.
#pragma once
#include "decode/kv_row.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/l2.cuh"

// The tiles of warps that share keys, one of each behind the other; else one tile of one warp. Config: kHeadDim,
// kKKind, kVKind, kQuantK, kQuantV, kKGroups, kVGroups, kTile (keys of a warp's copies), kRowWarps (warps that share
// keys, or 1), kByMatrix (16 bits, read by ldmatrix), kPlaces (rows of K and V have any strides).
template <typename Config>
struct KvStage {
    static constexpr int kKeys = Config::kTile * Config::kRowWarps;
    alignas(128) uint8 k[kKeys * KvRow<Config::kKKind, Config::kHeadDim, 4>::kBytes];
    alignas(128) uint8 v[kKeys * KvRow<Config::kVKind, Config::kHeadDim, 8>::kBytes];
    alignas(16) uint32 k_params[Config::kQuantK ? kKeys * Config::kKGroups : 4];
    alignas(16) uint32 v_params[Config::kQuantV ? kKeys * Config::kVGroups : 4];
    // Where they begin, bytes.
    static constexpr int kVAt = (sizeof(k) + 127) / 128 * 128, kKParamsAt = kVAt + sizeof(v);
    static constexpr int kVParamsAt = kKParamsAt + sizeof(k_params);
};

// Where rows are, as `DecodeParams` has it.
struct KvPlaces {
    uint32 place_bytes, token_bytes;
    int32 row_chunks;
};

// Copies by all 32 lanes of a warp. `row`: lane t's is the number of key t's row in the cache's planes (kPlaces: its
// place); `count` keys exist, the others become zeros. The caller commits the group of copies.
template <typename Config>
struct KvCopy {
    using Matrix = MatrixTile<Config::kHeadDim>;
    using KRows = typename Select<Config::kByMatrix, Matrix, KTile<Config::kKKind, Config::kHeadDim>>::Type;
    using VRows = typename Select<Config::kByMatrix, Matrix, VTile<Config::kVKind, Config::kHeadDim>>::Type;

    // Registers are at their limit: what only the caller's rows need is in loops, or all copies would take more.
    static constexpr bool kTight = Config::kHeadDim > 128 || Config::kNTiles > 1;

    const uint8* k;
    const uint8* v;
    const uint32* k_params;
    const uint32* v_params;
    uint64 policy;  // of L2
    int lane;
    int part;  // of a stage: which tile is this warp's; 0 if it has the stage alone
    KvPlaces places;
    bool row_scales;  // of the caller's 8-bit rows: each has a scale

    // Where its tile begins in a plane of the stage with rows of kRowBytes.
    template <int kRowBytes>
    OA_DEVICE uint32 place(uint32 plane) const {
        return Config::kRowWarps == 1 ? plane : plane + part * (Config::kTile * kRowBytes);
    }

    // Bytes before the row of a number, or at a place.
    template <typename Row>
    OA_DEVICE uint64 bytes_before(uint32 row) const {
        return uint64(row) * (Config::kPlaces ? places.place_bytes : uint32(Row::kBytes));
    }

    template <typename Tile>
    OA_DEVICE void plane(uint32 dst, const uint8* src, uint32 row, int32 count) const {
        constexpr int kChunks = Tile::Row::kChunks;
#pragma unroll
        for (int i = 0; i < Config::kTile * kChunks / 32; ++i) {
            int at = i * 32 + lane, t = at / kChunks;
            uint32 from = __shfl_sync(0xffffffffu, row, t);
            const uint8* address = src + bytes_before<typename Tile::Row>(from) + (at % kChunks) * 16;
            cp_async_16(dst + ((at ^ Tile::swizzle(t)) << 4), address, t < count ? 16 : 0, policy);
        }
    }
    // The same of rows that end before the kernel's: zeros behind them.
    template <typename Tile>
    OA_DEVICE void plane_of_short_rows(uint32 dst, const uint8* src, uint32 row, int32 count) const {
        constexpr int kChunks = Tile::Row::kChunks;
        bool there = int32(lane % kChunks) < places.row_chunks;
#pragma unroll 4
        for (int i = 0; i < Config::kTile * kChunks / 32; ++i) {
            int at = i * 32 + lane, t = at / kChunks, chunk = kChunks > 32 ? at % kChunks : lane % kChunks;
            if (kChunks > 32) there = chunk < places.row_chunks;
            uint32 from = __shfl_sync(0xffffffffu, row, t);
            const uint8* address = src + bytes_before<typename Tile::Row>(from) + chunk * 16;
            cp_async_16(dst + ((at ^ Tile::swizzle(t)) << 4), address, there && t < count ? 16 : 0, policy);
        }
    }
    // The same of a whole tile whose keys' rows are contiguous in the plane, 16 at a time.
    template <typename Tile>
    OA_DEVICE void plane_of_runs(uint32 dst, const uint8* src, const uint32 (&runs)[Config::kTile / 16]) const {
        constexpr int kChunks = Tile::Row::kChunks, kCopies = kChunks / 2;
#pragma unroll
        for (int run = 0; run < Config::kTile / 16; ++run) {
            const uint8* from = src + bytes_before<typename Tile::Row>(runs[run]) + lane * 16;
            // One address and constants: beside the copies of other distances the compiler computes each address.
            if (Config::kPlaces) asm volatile("" : "+l"(from));
            constexpr int kUnroll = kChunks > 32 ? 4 : kCopies;
#pragma unroll kUnroll
            for (int i = 0; i < kCopies; ++i) {
                int at = (run * kCopies + i) * 32 + lane;
                cp_async_16(dst + ((at ^ Tile::swizzle(at / kChunks)) << 4), from + i * 512, policy);
            }
        }
    }
    // The same where the rows have token_bytes from one to the next.
    template <typename Tile>
    OA_DEVICE void plane_of_steps(uint32 dst, const uint8* src, const uint32 (&runs)[Config::kTile / 16]) const {
        constexpr int kChunks = Tile::Row::kChunks, kCopies = kChunks / 2;
        constexpr int kParts = kChunks > 32 ? kChunks / 32 : 1;  // of a row
        constexpr int kRows = kChunks > 32 ? 1 : 32 / kChunks;  // that a warp copies at once
        constexpr int kUnroll = kTight ? 4 : kCopies;
#pragma unroll
        for (int run = 0; run < Config::kTile / 16; ++run) {
            const uint8* from = src + bytes_before<typename Tile::Row>(runs[run]) +
                                uint64(uint32(lane / kChunks)) * places.token_bytes + lane % kChunks * 16;
#pragma unroll kUnroll
            for (int i = 0; i < kCopies; ++i) {
                int at = (run * kCopies + i) * 32 + lane;
                if constexpr (kParts > 1) {
                    cp_async_16(dst + ((at ^ Tile::swizzle(at / kChunks)) << 4), from + i % kParts * 512, policy);
                    if (i % kParts < kParts - 1) continue;
                } else {
                    cp_async_16(dst + ((at ^ Tile::swizzle(at / kChunks)) << 4), from, policy);
                }
                from += kRows * places.token_bytes;
                if (kTight) asm volatile("" : "+l"(from));  // or the compiler has all addresses at once
            }
        }
    }
    template <int kGroups, int kStride = kGroups>  // words of a row, and from one row to the next
    OA_DEVICE void params(uint32 dst, const uint32* src, uint32 row, int32 count) const {
        constexpr int kBytes = kGroups >= 4 ? 16 : 4 * kGroups, kPerRow = 4 * kGroups / kBytes;
#pragma unroll
        for (int i = 0; i < (Config::kTile * kPerRow + 31) / 32; ++i) {
            int at = i * 32 + lane, t = at / kPerRow;
            uint32 from = kPerRow == 1 ? row : __shfl_sync(0xffffffffu, row, t & 31);
            if (t < Config::kTile) {
                const uint32* address = src + uint64(from) * kStride + at % kPerRow * (kBytes / 4);
                cp_async_small<kBytes>(dst + at * kBytes, address, t < count ? kBytes : 0, policy);
            }
        }
    }
    OA_DEVICE uint32 k_at(uint32 stage) const { return place<KRows::Row::kBytes>(stage); }
    OA_DEVICE uint32 v_at(uint32 stage) const { return place<VRows::Row::kBytes>(stage + KvStage<Config>::kVAt); }
    OA_DEVICE uint32 k_params_at(uint32 stage) const {
        return place<4 * Config::kKGroups>(stage + KvStage<Config>::kKParamsAt);
    }
    OA_DEVICE uint32 v_params_at(uint32 stage) const {
        return place<4 * Config::kVGroups>(stage + KvStage<Config>::kVParamsAt);
    }
    // FBGEMM's rows of K and V, 4 bytes a lane, 128 an instruction: adjacent rows have sectors in common. Rows beyond
    // `count` get parameters of 0, whatever their nibbles are; those are copied from the row that `row` names.
    OA_DEVICE void fbgemm_rows(uint32 stage, uint32 row, int32 count, bool in_runs) const {
        using Stage = KvStage<Config>;
        using Row = FbgemmRow<Config::kHeadDim, Config::kKGroups>;
        constexpr int kRows = 32 / Row::kWords;
        int first = lane / Row::kWords, w = lane % Row::kWords;
        uint32 to = first * 4 * Row::kWords + Row::place(w);
        uint32 to_k = place<4 * Row::kWords>(stage), to_v = place<4 * Row::kWords>(stage + Stage::kVAt);
        const uint8* from_k = k + 4 * (Config::kKGroups + w);
        const uint8* from_v = v + 4 * (Config::kKGroups + w);
        auto copy = [&](int i, uint64 from, int further) {
            // Which chunks are exchanged is the same for rows side by side.
            uint32 at_k = to ^ (KTile<kKvFbgemm, Config::kHeadDim>::swizzle(i * kRows) << 4);
            uint32 at_v = to ^ (VTile<kKvFbgemm, Config::kHeadDim>::swizzle(i * kRows) << 4);
            cp_async_4(to_k + i * 128 + at_k, from_k + from + further, policy);
            cp_async_4(to_v + i * 128 + at_v, from_v + from + further, policy);
        };
        if (in_runs && count >= Config::kTile) {
#pragma unroll
            for (int run = 0; run < Config::kTile / 16; ++run) {
                uint64 from = uint64(__shfl_sync(0xffffffffu, row, run * 16) + first) * Row::kBytes;
#pragma unroll
                for (int i = 0; i < 16 / kRows; ++i) copy(run * (16 / kRows) + i, from, i * kRows * Row::kBytes);
            }
        } else {
#pragma unroll
            for (int i = 0; i < Config::kTile / kRows; ++i)
                copy(i, uint64(__shfl_sync(0xffffffffu, row, i * kRows + first)) * Row::kBytes, 0);
        }
        auto words = [](const uint8* plane) { return reinterpret_cast<const uint32*>(plane); };
        params<Config::kKGroups, Row::kBytes / 4>(k_params_at(stage), words(k), row, count);
        params<Config::kVGroups, Row::kBytes / 4>(v_params_at(stage), words(v), row, count);
    }
    // `stage`: address of a KvStage, see KvRing. `in_runs`: rows are contiguous, or of one distance, 16 at a time.
    // `scale`: lane t's is the place of key t's scale, of the caller's 8-bit rows.
    OA_DEVICE void tile(uint32 stage, uint32 row, int32 count, bool in_runs, uint32 scale) const {
        if constexpr (Config::kKKind == kKvFbgemm) {
            static_assert(Config::kVKind == kKvFbgemm && Config::kKGroups == Config::kVGroups, "one layout for both");
            fbgemm_rows(stage, row, count, in_runs);
            return;
        }
        // Addresses only behind the branches: before them the compiler takes more registers for codes and d256.
        const bool is_short = Config::kPlaces && places.row_chunks < int32(KRows::Row::kChunks);
        if (kTight && is_short) {
            plane_of_short_rows<KRows>(k_at(stage), k, row, count);
            plane_of_short_rows<VRows>(v_at(stage), v, row, count);
        } else if (in_runs && count >= Config::kTile && !is_short) {
            uint32 runs[Config::kTile / 16];
#pragma unroll
            for (int run = 0; run < Config::kTile / 16; ++run) runs[run] = __shfl_sync(0xffffffffu, row, run * 16);
            if (Config::kPlaces && places.token_bytes != uint32(KRows::Row::kBytes)) {
                plane_of_steps<KRows>(k_at(stage), k, runs);
                plane_of_steps<VRows>(v_at(stage), v, runs);
            } else {
                plane_of_runs<KRows>(k_at(stage), k, runs);
                plane_of_runs<VRows>(v_at(stage), v, runs);
            }
        } else {
            // Behind the caller's rows nothing is copied, either. (Scales of keys are, by every lane.)
            int32 rows = count;
            if (!kTight && Config::kPlaces && int32(lane % KRows::Row::kChunks) >= places.row_chunks) rows = 0;
            plane<KRows>(k_at(stage), k, row, rows);
            plane<VRows>(v_at(stage), v, row, rows);
        }
        if constexpr (kv_in_order(Config::kKKind)) {
            if (!row_scales) return;
            params<1>(k_params_at(stage), k_params, scale, count);
            params<1>(v_params_at(stage), v_params, scale, count);
            return;
        }
        if (Config::kQuantK) params<Config::kKGroups>(k_params_at(stage), k_params, row, count);
        if (Config::kQuantV) params<Config::kVGroups>(v_params_at(stage), v_params, row, count);
    }
};

// A uniform number that the compiler does not know to be uniform: through a shuffle, of which each lane takes its own
// value, and these differ. ptxas 12.9 and 13.0 encode a cp.async that has both an L2 policy and an address with a part
// in a uniform register as an illegal instruction (sm_90a).
OA_DEVICE uint32 of_lane(uint32 x, int lane) { return __shfl_sync(0xffffffffu, x + lane, lane) - lane; }

// Which stage a warp's next copy goes to.
template <typename Stage, int kStages>
struct KvRing {
    uint32 address;
    int32 stage = 0;
    OA_DEVICE KvRing(Stage (&stages)[kStages], int lane) : address(of_lane(smem_addr_of(&stages[0]), lane)) {}
    OA_DEVICE void advance() {
        bool last = ++stage == kStages;
        address += last ? uint32(sizeof(Stage)) * uint32(1 - kStages) : uint32(sizeof(Stage));
        if (last) stage = 0;
    }
};
