// A mask's elements on their way to the lanes of mma.sync that need them: every lane copies its own to shared memory
// (cp.async), a tile ahead, and is the only one that reads them there, so that no barrier is needed.
//
// Of 16 keys of a row a lane has four neighbours (tile/four_keys.cuh), a chunk. Chunk (row, group) of a warp lies at
// (row * groups + group) * 512, 4 to 16 bytes a lane; rows l/4 + 8 * row, keys 16 * group + 4(l%4) + {0..3}.
//   kBits   packed booleans (params/mask_tiles.cuh): for each 16 rows two words a lane
//   kKeys   packed numbers of keys: chunks of row 0 alone
// Of the mask itself:
//   kFours  keys next to each other, chunks at multiples of their size
// and what settle() makes chunks of:
//   kShifted  1 or 2 bytes an element, keys next to each other: the two aligned chunks that hold one
//   kRowValues  one value for all keys: for each row the 4 bytes that hold it
//   kWords  anything else: for each element the 4 bytes that hold it
// Rows where that would reach beyond the mask's memory, and tiles that some keys do not exist of, come element by
// element. What does not exist becomes 0.
#pragma once
#include "attention/score_mods.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "scheduler/split_tiles.cuh"
#include "tile/four_keys.cuh"

// Config: kScoreMods, kMTiles (16-row tiles of a warp), kWarps, kBlockM, kBlockN, kSplitKeys.
template <typename Config>
class MaskSlots {
  public:
    using Tile = SyncTileOf<Config>;
    static constexpr int kRows = 2 * Config::kMTiles, kGroups = Config::kBlockN / 16;
    static constexpr uint32 kWarpBytes = kRows * kGroups * 512;
    struct Storage {
        alignas(1024) uint8 mask[Config::kWarps][kWarpBytes];
    };
    static_assert(!Config::kScoreMods || (64 % Config::kBlockN == 0 && 64 % (16 * Config::kMTiles) == 0),
                  "parts of a tile of packed masks");

    enum Source : int32 { kNone, kBits, kKeys, kFours, kShifted, kRowValues, kWords };

    // smem: of the warp. warp_row: its first row.
    OA_DEVICE MaskSlots(const AttnFwdModsSm80Params& params, const Tile& t, uint32 smem, int32 warp_row, int lane)
        : params_(params), p_(params.fwd), t_(t), warp_row_(warp_row), lane_(lane) {
        const AttnFwdParams& p = params.fwd;
        const ScoreModParams& f = params.mods;
        const int32 size = element_bytes(), row = warp_row + (lane >> 2);
        if (f.tiles != nullptr) {
            source_ = f.flags & kModBits ? kBits : kKeys;
            int64 head = t.sequence * f.tiles_stride_b + head_of(t, row) * f.tiles_stride_h;
            // Keys 4c + 2m + x of a group are keys 2c' + x of 8 in the order of packed words, with c' = 2(c%2) + m.
            int64 own = f.flags & kModBits ? (warp_row >> 6) * f.tiles_stride_m + (warp_row >> 4 & 3) * 32 +
                                                 (lane & ~3) + 2 * (lane & 1)
                                           : FourKeys::of_lane(lane);
            // All rows of a CTA are of one tile of 64 queries.
            if (Config::kSplitKeys && (f.flags & kModBits))
                own = (query_of(t, t.m0) >> 6) * f.tiles_stride_m + 2 * (lane & 1);
            at_ = static_cast<const uint8*>(f.tiles) + 4 * (head + own);
            slot_ = smem + lane * (f.flags & kModBits ? 8 : 16);
        } else if (p.mask_kind != kMaskNone) {
            int64 all =
                int64(reinterpret_cast<uint64>(p.mask)) | size * (p.mask_stride_b | p.mask_stride_h | p.mask_stride_q);
            source_ = kWords;
            if (p.mask_stride_k == 0) source_ = kRowValues;
            if (p.mask_stride_k == 1 && size < 4) source_ = kShifted;
            if (p.mask_stride_k == 1 && (all & (4 * size - 1)) == 0) source_ = kFours;
            at_ = static_cast<const uint8*>(p.mask) +
                  size * (t.batch_idx * p.mask_stride_b + head_of(t, row) * p.mask_stride_h +
                          query_of(t, row) * p.mask_stride_q + FourKeys::of_lane(lane) * p.mask_stride_k);
            slot_ = smem + lane * (source_ == kFours ? 4 * size : 16);
        } else {
            source_ = kNone;
            at_ = nullptr;
            slot_ = smem;
        }
    }

    OA_DEVICE Source source() const { return source_; }

    // Tile n of kBlockN keys.
    OA_DEVICE void copy(int32 n) const {
        const int32 n0 = n * Config::kBlockN;
        if (source_ == kBits) {
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i) {
                if constexpr (Config::kSplitKeys) {
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        cp_async_whole<8>(slot_ + i * 512 + r * 256, at_ + int64(n0 / 64) * 512 + words_of(i, r));
                } else {
                    cp_async_whole<8>(slot_ + i * 256, at_ + int64(n0 / 64) * 512 + i * 128);
                }
            }
        } else if (source_ == kKeys) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) cp_async_whole<16>(slot_ + g * 512, at_ + int64(n0) * 4 + g * 64);
        } else if (p_.mask_kind == kMaskFloat) {
            copy_mask<4>(n0);
        } else if (p_.mask_kind == kMaskIo) {
            copy_mask<2>(n0);
        } else {
            copy_mask<1>(n0);
        }
    }

    // Behind the wait for the copies of a tile, before anything is read.
    OA_DEVICE void settle(int32 n) const {
        const int32 size = element_bytes();
        if (source_ < kShifted || (source_ == kWords && size == 4)) return;
        // Low bits of addresses are all that is needed of them.
        const uint32 next_key = uint32(p_.mask_stride_k) * size,
                     next_row = query_of(t_, 8) * size * uint32(p_.mask_stride_q);
        uint32 row = uint32(reinterpret_cast<uint64>(at_)) + n * Config::kBlockN * next_key;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            uint4 w;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                if (g == 0 || source_ != kRowValues) {
                    w = load_shared4(slot_ + at(r, g));
                    w = source_ == kShifted ? shifted(w, row + 16 * g * next_key, size)
                                            : packed(w, row + 16 * g * next_key, next_key, size);
                }
                store_shared4(slot_ + at(r, g), w);
            }
            row += next_row;
        }
    }

    // Words of 16-row tile i, for keys in the lane's own order: bit 8g + 2r + x of m's word is group g, row r, key
    // 2m + x of the four.
    OA_DEVICE uint2 bits(int i, int32 n, int lane) const {
        uint32 shift = (n * Config::kBlockN & 63) / 2 + (lane & 2) * 2;
        if constexpr (Config::kSplitKeys) {
            uint2 found = make_uint2(0, 0);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint2 w = load_shared2(slot_ + i * 512 + r * 256);
                uint32 own = shift + (query(i, r) >> 2 & 2);
                found.x |= (w.x >> own & 0x03030303) << 2 * r;
                found.y |= (w.y >> own & 0x03030303) << 2 * r;
            }
            return found;
        }
        uint2 w = load_shared2(slot_ + i * 256);
        return make_uint2(w.x >> shift, w.y >> shift);
    }
    // Chunks of 1, 2 and 4 bytes an element.
    OA_DEVICE uint32 bytes(int row, int group) const { return load_shared(slot_ + at(row, group)); }
    OA_DEVICE uint2 halves(int row, int group) const { return load_shared2(slot_ + at(row, group)); }
    OA_DEVICE float4 numbers(int row, int group) const {
        uint4 w = load_shared4(slot_ + at(row, group));
        return make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w));
    }
    // Of block n of 8 columns.
    OA_DEVICE float2 two_numbers(int row, int n) const {
        return load_shared_float2(slot_ + at(row, n >> 1) + 8 * (n & 1));
    }

  private:
    // Of packed booleans, by the query of a lane's row: where its words are in a tile, in bytes.
    OA_DEVICE int32 query(int i, int r) const { return query_of(t_, warp_row_ + (lane_ >> 2) + 16 * i + 8 * r); }
    OA_DEVICE int32 words_of(int i, int r) const { return (query(i, r) & 48) * 8 + (query(i, r) & 7) * 16; }
    OA_DEVICE static constexpr uint32 at(int row, int group) { return (row * kGroups + group) * 512; }
    OA_DEVICE int32 element_bytes() const { return p_.mask_kind == kMaskFloat ? 4 : p_.mask_kind == kMaskIo ? 2 : 1; }

    // Rows and keys that the mask has, from the lane's first on, and from tile n0 .. on.
    OA_DEVICE int32 rows_from() const { return rows() - warp_row_ - (lane_ >> 2); }
    OA_DEVICE int32 keys_from(int32 n0) const { return keys() - n0 - FourKeys::of_lane(lane_); }
    OA_DEVICE int32 rows() const { return min_of(p_.mask_rows, t_.seqlen_q); }
    OA_DEVICE int32 keys() const { return min_of(p_.mask_cols, t_.seqlen_k); }

    // Chunks from aligned ones, and from a word of each element. first: address of the first element.
    OA_DEVICE static uint4 shifted(uint4 w, uint32 first, int32 size) {
        uint32 shift = 8 * (first & 3);
        if (size == 2 && (first & 4)) w = make_uint4(w.y, w.z, w.w, 0);
        return make_uint4(__funnelshift_r(w.x, w.y, shift), __funnelshift_r(w.y, w.z, shift), 0, 0);
    }
    OA_DEVICE uint4 packed(uint4 w, uint32 first, uint32 next_key, int32 size) const {
        if (source_ == kRowValues) w.y = w.z = w.w = w.x;
        if (size == 4) return w;
        uint32 a = w.x >> 8 * (first & 3), b = w.y >> 8 * (first + next_key & 3);
        uint32 c = w.z >> 8 * (first + 2 * next_key & 3), d = w.w >> 8 * (first + 3 * next_key & 3);
        uint2 chunk = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
        return make_uint4(size == 2 ? chunk.x : __byte_perm(chunk.x, chunk.y, 0x6420), chunk.y, 0, 0);
    }

    OA_DEVICE bool has_all_keys(int32 n0) const { return n0 <= keys() - Config::kBlockN; }
    OA_DEVICE bool has_all_rows() const { return warp_row_ <= rows() - 8 * kRows; }
    OA_DEVICE bool in_memory(const uint8* first, const uint8* end) const {
        const uint8* mask = static_cast<const uint8*>(p_.mask);
        return first >= mask + params_.mask_first_byte && end <= mask + params_.mask_end_byte;
    }

    // kSize: bytes of an element.
    template <int kSize>
    OA_DEVICE void copy_mask(int32 n0) const {
        if (source_ == kFours) {
            copy_fours<kSize>(n0);
        } else if (kSize < 4 && source_ == kShifted) {
            copy_shifted<kSize>(n0);
        } else if (source_ == kRowValues) {
            copy_row_values<kSize>();
        } else {
            copy_words<kSize>(n0);
        }
    }

    template <int kSize>
    OA_DEVICE void copy_fours(int32 n0) const {
        const uint8* row = at_ + int64(n0) * kSize;
        const int64 next_row = query_of(t_, 8) * kSize * p_.mask_stride_q;
        const int32 rows = rows_from();
        if (has_all_keys(n0) && has_all_rows()) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int g = 0; g < kGroups; ++g) cp_async_whole<4 * kSize>(slot_ + at(r, g), row + 16 * g * kSize);
                row += next_row;
            }
        } else {
#pragma unroll 1
            for (int r = 0; r < kRows; ++r) {
                if (has_all_keys(n0)) {
                    const uint32 bytes = 8 * r < rows ? 4 * kSize : 0;
#pragma unroll
                    for (int g = 0; g < kGroups; ++g)
                        cp_async_small<4 * kSize>(slot_ + at(r, g), row + 16 * g * kSize, bytes);
                } else {
                    copy_elements<kSize>(r, row, n0);
                }
                row += next_row;
            }
        }
    }

    template <int kSize>
    OA_DEVICE void copy_shifted(int32 n0) const {
        constexpr int kChunk = 4 * kSize;
        const int32 rows = rows_from();
        const uint8* row = at_ + int64(n0) * kSize;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            const uint8* from = row - (uint32(reinterpret_cast<uint64>(row)) & (kChunk - 1));
            if (has_all_keys(n0) && 8 * r < rows && in_memory(from, from + 16 * (kGroups - 1) * kSize + 2 * kChunk)) {
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    cp_async_whole<kChunk>(slot_ + at(r, g), from + 16 * g * kSize);
                    cp_async_whole<kChunk>(slot_ + at(r, g) + kChunk, from + 16 * g * kSize + kChunk);
                }
            } else {
                copy_elements<kSize>(r, row, n0);
            }
            row += query_of(t_, 8) * kSize * p_.mask_stride_q;
        }
    }

    template <int kSize>
    OA_DEVICE void copy_row_values() const {
        const int32 rows = rows_from();
        const uint8* row = at_;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            uint32 low = uint32(reinterpret_cast<uint64>(row)) & 3;
            if (8 * r < rows && in_memory(row - low, row - low + 4)) {
                cp_async_whole<4>(slot_ + at(r, 0), row - low);
            } else {
                store_element<kSize>(slot_ + at(r, 0) + low, load_element<kSize>(row, 8 * r < rows));
            }
            row += query_of(t_, 8) * kSize * p_.mask_stride_q;
        }
    }

    template <int kSize>
    OA_DEVICE void copy_words(int32 n0) const {
        const int32 rows = rows_from();
        const int64 next_key = p_.mask_stride_k * kSize;
        const uint8* row = at_ + n0 * next_key;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            const uint8* last = row + (16 * kGroups - 13) * next_key;
            bool fits = in_memory(word_of(min_of(row, last)), word_of(max_of(row, last)) + 4);
            if (has_all_keys(n0) && 8 * r < rows && fits) {
                const uint8* key = row;
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        cp_async_whole<4>(slot_ + at(r, g) + 4 * e, word_of(key));
                        key += next_key;
                    }
                    key += 12 * next_key;
                }
            } else {
                copy_elements<kSize>(r, row, n0);
            }
            row += query_of(t_, 8) * kSize * p_.mask_stride_q;
        }
    }
    OA_DEVICE static const uint8* word_of(const uint8* x) {
        return reinterpret_cast<const uint8*>(reinterpret_cast<uint64>(x) & ~uint64(3));
    }

    // A row of the tile, from its first element on, one by one to where they are expected; all loads before the stores.
    template <int kSize>
    OA_DEVICE void copy_elements(int32 r, const uint8* row, int32 n0) const {
        const int32 keys = 8 * r < rows_from() ? keys_from(n0) : 0;
        const int64 next_key = p_.mask_stride_k * kSize;
        uint32 x[kGroups][4];
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[g][e] = load_element<kSize>(row + (16 * g + e) * next_key, 16 * g + e < keys);
        const uint32 first = uint32(reinterpret_cast<uint64>(row));
        uint32 slot = slot_ + at(r, 0) + (source_ == kShifted ? first & (4 * kSize - 1) : 0);
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                uint32 place = kSize * e;
                if (source_ == kWords) place = 4 * e + (first + (16 * g + e) * uint32(next_key) & 3);
                store_element<kSize>(slot + 512 * g + place, x[g][e]);
            }
    }
    template <int kSize>
    OA_DEVICE static uint32 load_element(const uint8* from, bool exists) {
        if (!exists) return 0;
        if constexpr (kSize == 4) return __ldg(reinterpret_cast<const uint32*>(from));
        if constexpr (kSize == 2) return __ldg(reinterpret_cast<const uint16*>(from));
        return __ldg(from);
    }
    template <int kSize>
    OA_DEVICE static void store_element(uint32 slot, uint32 x) {
        if constexpr (kSize == 4) {
            store_shared(slot, x);
        } else if constexpr (kSize == 2) {
            store_shared(slot, uint16(x));
        } else {
            store_shared(slot, uint8(x));
        }
    }

    const AttnFwdModsSm80Params& params_;
    const AttnFwdParams& p_;
    const Tile& t_;
    const int32 warp_row_;
    const int lane_;
    const uint8* at_;  // the lane's first element or word
    uint32 slot_;
    Source source_;
};
