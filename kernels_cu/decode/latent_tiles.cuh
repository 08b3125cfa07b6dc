// Tiles of keys of mla_decode_sm80, whose comment has the design: copies to shared memory, and 8-bit rows in 16 bits.
#pragma once
#include "decode/latent_rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

template <int kFormat, int kHeadDim>
constexpr int kLatentRowBytes = kFormat == kRows16     ? 2 * kHeadDim
                                : kFormat == kRowsE4m3 ? kHeadDim
                                                       : 656;

// Of one thread, which has a key of every tile and every eighth 16 bytes of its row.
//
// Config: Io, kFormat, kHeadDim, kRows, kKeys, kStages, kThreads. Storage: k, raw, exists.
template <typename Config, typename Storage>
class LatentTiles {
    static constexpr int kRowBytes = kLatentRowBytes<Config::kFormat, Config::kHeadDim>;
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kCodes = Config::kFormat == kRowsE4m3 ? Config::kHeadDim / 16 : 32;  // chunks of e4m3
    static_assert(Config::kThreads == 8 * Config::kKeys, "a thread has one key");

  public:
    static constexpr uint32 kTileRow = 2 * Config::kHeadDim;  // bytes

    OA_DEVICE LatentTiles(const MlaDecodeParams& params, Storage& smem)
        : params_(params),
          p_(params.decode),
          smem_(smem),
          chunk_(int32(threadIdx.x) & 7),
          key_(int32(threadIdx.x) >> 3) {}

    // The first tile of a split, when no thread reads the last one any more.
    OA_DEVICE void begin(const LatentSplit& split) {
        entry_ = table_entry(params_, split, key_of(split, 0, key_));
        copy(split, 0);
    }
    // Tile `tile` is on its way from now on: behind the split's end zeros.
    OA_DEVICE void copy(const LatentSplit& split, int32 tile) {
        // As in `LatentWarps`.
        const int32 thread = Config::kRows == 64 ? in_register(int32(threadIdx.x)) : int32(threadIdx.x);
        const int32 own = thread >> 3, chunk = thread & 7;
        const KeyPlace at = key_place(params_, split, key_of(split, tile, own), entry_);
        const uint8* from = p_.k + uint64(at.place) * p_.place_bytes + chunk * 16;
        const uint32 bytes = at.exists ? 16 : 0;
        const uint32 to = Config::kFormat == kRows16
                              ? smem_addr_of(smem_.k[tile % Config::kStages]) + own * kTileRow + swizzled(chunk, own)
                              : smem_addr_of(smem_.raw) + own * kRowBytes + chunk * 16;
#pragma unroll
        for (int i = 0; i < (kChunks + 7) / 8; ++i)
            if (8 * i + 8 <= kChunks || chunk < kChunks - 8 * i) cp_async_16(to + i * 128, from + i * 128, bytes);
        if (params_.lists_rows != 0 && chunk == 0) smem_.exists[tile & 1][own] = at.exists;
        cp_async_commit();
        // A tile ahead of its copies: the table is another trip to memory.
        entry_ = table_entry(params_, split, key_of(split, tile + 1, own));
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
        if constexpr (Config::kFormat != kRows16) {
            const uint32 from = smem_addr_of(smem_.raw) + key_ * kRowBytes;
            const uint32 to = smem_addr_of(smem_.k[tile % Config::kStages]) + key_ * kTileRow;
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
    // bf16 numbers in q's type.
    OA_DEVICE static uint32 half(uint32 x) {
        const float2 f = unpack2(BFloat16{}, x);
        return pack2(Half{}, f.x, f.y);
    }
    OA_DEVICE static uint4 rope(BFloat16, uint4 x) { return x; }
    OA_DEVICE static uint4 rope(Half, uint4 x) { return make_uint4(half(x.x), half(x.y), half(x.z), half(x.w)); }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Storage& smem_;
    const int32 chunk_, key_;
    int32 entry_;  // of the table, for the next tile's key
};
