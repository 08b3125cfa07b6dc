// Tiles of keys of mla_decode_sm80, whose comment has the design: copies to shared memory, and 8-bit rows in 16 bits.
#pragma once
#include "decode/latent_codes.cuh"
#include "decode/latent_rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

// Of one thread, which has every eighth 16 bytes of a key's row, of every 32nd key of a tile.
//
// Config: Io, kFormat, kHeadDim, kRows, kKeys, kStages, kTeamThreads, kConverts, kTileRow. Storage: stages, raw,
// exists.
template <typename Config, typename Storage>
class LatentTiles {
    static constexpr int kRowBytes = kLatentRowBytes<Config::kFormat, Config::kHeadDim>;
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kCodes = Config::kFormat == kRowsE4m3 ? Config::kHeadDim / 16 : 32;  // chunks of e4m3
    static constexpr int kAtOnce = Config::kTeamThreads / 8;  // keys
    static constexpr int kOwn = Config::kKeys / kAtOnce;  // of a thread
    static constexpr uint32 kTileRow = Config::kTileRow;  // bytes
    static_assert(Config::kKeys % kAtOnce == 0 && kOwn <= (Config::kConverts ? 1 : 2), "the keys of a thread");

  public:
    OA_DEVICE LatentTiles(const MlaDecodeParams& params, Storage& smem)
        : params_(params),
          p_(params.decode),
          smem_(smem),
          chunk_(int32(threadIdx.x) & 7),
          key_(int32(threadIdx.x) >> 3) {}

    // Where the first tile of a split is.
    OA_DEVICE void ask(const LatentSplit& split) {
        entry_ = table_entry(params_, split, key_of(split, 0, asked(int32(threadIdx.x))));
    }
    // Tile `tile` is on its way from now on, when no thread reads what was in its place any more: behind the
    // split's end zeros.
    OA_DEVICE void copy(const LatentSplit& split, int32 tile) {
        // As in `LatentWarps`.
        const int32 thread =
            Config::kRows == 64 || Config::kInCodes ? in_register(int32(threadIdx.x)) : int32(threadIdx.x);
        const int32 chunk = thread & 7, first = thread / 8;
        const uint32 stage = Config::kConverts ? smem_addr_of(smem_.raw)
                                               : smem_addr_of(smem_.stages[0]) +
                                                     tile % Config::kStages * uint32(sizeof(smem_.stages[0]));
        const KeyPlace found = key_place(params_, split, key_of(split, tile, asked(thread)), entry_);
        const uint32 all = kOwn == 1 ? 0 : __ballot_sync(0xffffffffu, found.exists);
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
            const int32 own = first + n * kAtOnce;
            const int32 source = (first & 3) + 4 * n;
            const uint32 place = kOwn == 1 ? found.place : __shfl_sync(0xffffffffu, found.place, source);
            const bool exists = kOwn == 1 ? found.exists : (all >> source & 1) != 0;
            const uint8* from = p_.k + uint64(place) * p_.place_bytes + chunk * 16;
            const uint32 bytes = exists ? 16 : 0;
            const uint32 to = Config::kFormat == kRows16 ? stage + own * kTileRow + swizzled(chunk, own)
                              : Config::kConverts        ? stage + own * kRowBytes + chunk * 16
                                                         : stage + own * kTileRow + chunk * 16;
#pragma unroll
            for (int i = 0; i < (kChunks + 7) / 8; ++i)
                if (8 * i + 8 <= kChunks || chunk < kChunks - 8 * i) cp_async_16(to + i * 128, from + i * 128, bytes);
            if (params_.lists_rows != 0 && chunk == 0) smem_.exists[tile & 1][own] = exists;
        }
        cp_async_commit();
        // A tile ahead of its copies: the table is another trip to memory.
        entry_ = table_entry(params_, split, key_of(split, tile + 1, asked(thread)));
    }
    // Tile `tile` in 8 bits, which the warp has copied, to 16; the next one is on its way then.
    OA_DEVICE void convert(const LatentSplit& split, int32 tile) {
        cp_async_wait<0>();
        __syncwarp();
        convert_tile(tile);
        __syncwarp();
        copy(split, tile + 1);
    }

  private:
    OA_DEVICE void convert_tile(int32 tile) const {
        if constexpr (Config::kConverts) {
            const uint32 from = smem_addr_of(smem_.raw) + key_ * kRowBytes;
            const uint32 to = smem_addr_of(smem_.stages[tile % Config::kStages]) + key_ * kTileRow;
            float scales[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // of e4m3 rows the one scale is in S and O
            if constexpr (Config::kFormat == kRows656) {
                const uint4 bits = load_shared4(from + kCodes * 16);
                scales[0] = __uint_as_float(bits.x), scales[1] = __uint_as_float(bits.y);
                scales[2] = __uint_as_float(bits.z), scales[3] = __uint_as_float(bits.w);
                store_shared4(to + kCodes * 32 + swizzled(chunk_, key_),
                              rope(typename Config::Io{}, load_shared4(from + (kCodes + 1 + chunk_) * 16)));
            }
#pragma unroll
            for (int i = 0; i < (kCodes + 7) / 8; ++i)
                if (8 * i + 8 <= kCodes || chunk_ < kCodes - 8 * i)
                    convert_chunk(load_shared4(from + (8 * i + chunk_) * 16), scales[i & 3], to + i * 256);
        }
    }
    // Of 16 bytes in a panel of 128.
    OA_DEVICE static uint32 swizzled(int chunk, int32 key) { return (chunk ^ (key & 7)) << 4; }

    // The key that a thread looks up: of the warp's 4 or 8 one of its lanes each, where they are more than one of a
    // thread.
    OA_DEVICE static int32 asked(int32 thread) {
        if constexpr (kOwn == 1) return thread >> 3;
        return (thread >> 5) * 4 + (thread & 3) + (thread >> 2 & 1) * kAtOnce;
    }
    OA_DEVICE static int32 key_of(const LatentSplit& split, int32 tile, int32 own) {
        return split.begin + tile * Config::kKeys + own;
    }

    // 16 codes to their place in two panels.
    OA_DEVICE void convert_chunk(uint4 codes, float scale, uint32 to) const {
        // Lanes of the second panel begin with their second half: the eight of a key fill 128 bytes of banks.
        const int own = chunk_ >> 2;
        const uint4 x = own ? make_uint4(codes.z, codes.w, codes.x, codes.y) : codes;
        const uint32 panel = to + own * 128;
        const int half = 2 * (chunk_ & 3) + own;
        store_shared4(panel + swizzled(half, key_), scaled(x.x, x.y, scale));
        store_shared4(panel + swizzled(half ^ 1, key_), scaled(x.z, x.w, scale));
    }
    OA_DEVICE static uint4 scaled(uint32 a, uint32 b, float scale) {
        return make_uint4(pair<false>(a, scale), pair<true>(a, scale), pair<false>(b, scale), pair<true>(b, scale));
    }
    template <bool kHigh>
    OA_DEVICE static uint32 pair(uint32 codes, float scale) {
        const float2 x = unpack2(Half{}, half2_of_e4m3x2<kHigh>(codes));
        return pack2(typename Config::Io{}, x.x * scale, x.y * scale);
    }
    OA_DEVICE static uint4 rope(BFloat16, uint4 x) { return x; }
    OA_DEVICE static uint4 rope(Half, uint4 x) {
        return make_uint4(half_of(x.x), half_of(x.y), half_of(x.z), half_of(x.w));
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Storage& smem_;
    const int32 chunk_, key_;
    int32 entry_;  // of the table, for the next tile's key that the thread looks up
};
