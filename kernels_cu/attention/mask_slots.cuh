// A mask's elements on their way to the lanes of mma.sync that need them: every lane copies its own to shared memory
// (cp.async), a tile ahead, and is the only one that reads them there, so that no barrier is needed.
//
// Of 16 keys of a row a lane has four neighbours (tile/four_keys.cuh), a chunk. Chunk (row, group) of a warp lies at
// (row * groups + group) * 512, 4 to 16 bytes a lane; rows l/4 + 8 * row, keys 16 * group + 4(l%4) + {0..3}.
//   kBits   packed booleans (params/mask_tiles.cuh): for each 16 rows two words a lane
//   kKeys   packed numbers of keys: chunks of row 0 alone
//   kFours  the mask itself, keys next to each other, chunks at multiples of their size
//   kWords  any other strides or alignment: for each element the 4 bytes that hold it; settle() makes chunks of them
#pragma once
#include "attention/score_forms.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "tile/four_keys.cuh"

// Config: kScoreMods, kMTiles (16-row tiles of a warp), kWarps, kBlockM, kBlockN.
template <typename Config>
class MaskSlots {
  public:
    static constexpr int kRows = 2 * Config::kMTiles, kGroups = Config::kBlockN / 16;
    static constexpr uint32 kWarpBytes = kRows * kGroups * 512;
    struct Storage {
        alignas(1024) uint8 mask[Config::kWarps][kWarpBytes];
    };
    static_assert(!Config::kScoreMods || 64 % Config::kBlockN == 0 && 64 % (16 * Config::kMTiles) == 0, "parts of a tile of packed masks");

    enum Source : int32 { kNone, kBits, kKeys, kFours, kWords };

    // smem: of the warp. warp_row: its first row.
    OA_DEVICE MaskSlots(const AttnFwdParams& p, const ScoreForms& f, const FwdTile& t, uint32 smem, int32 warp_row,
                        int lane)
        : p_(p), f_(f), t_(t), lane_(lane) {
        const int32 size = element_bytes(), row = warp_row + (lane >> 2);
        rows_ = min_of(p.mask_rows, t.seqlen_q) - row;
        if (f.tiles != nullptr) {
            source_ = f.forms & kFormBits ? kBits : kKeys;
            int64 head = t.sequence * f.tiles_stride_b + t.head_idx * f.tiles_stride_h;
            // Keys 4c + 2m + x of a group are keys 2c' + x of 8 in the order of packed words, with c' = 2(c%2) + m.
            int64 own = f.forms & kFormBits ? (warp_row >> 6) * f.tiles_stride_m + (warp_row >> 4 & 3) * 32 +
                                                  (lane & ~3) + 2 * (lane & 1)
                                            : FourKeys::of_lane(lane);
            at_ = static_cast<const uint8*>(f.tiles) + 4 * (head + own);
            slot_ = smem + lane * (f.forms & kFormBits ? 8 : 16);
        } else if (p.mask_kind != kMaskNone) {
            int64 all = int64(reinterpret_cast<uint64>(p.mask)) |
                        size * (p.mask_stride_b | p.mask_stride_h | p.mask_stride_q);
            source_ = p.mask_stride_k == 1 && (all & (4 * size - 1)) == 0 ? kFours : kWords;
            at_ = static_cast<const uint8*>(p.mask) +
                  size * (t.batch_idx * p.mask_stride_b + t.head_idx * p.mask_stride_h + row * p.mask_stride_q +
                          FourKeys::of_lane(lane) * p.mask_stride_k);
            slot_ = smem + lane * (source_ == kFours ? 4 * size : 16);
        } else {
            source_ = kNone;
            at_ = nullptr;
            slot_ = smem;
        }
    }

    OA_DEVICE Source source() const { return source_; }

    // Tile n of kBlockN keys; kind: MaskTileKind of the warp's rows there.
    OA_DEVICE void copy(int32 n, int32 kind) const {
        const int32 n0 = n * Config::kBlockN;
        switch (source_) {
            case kNone:
                break;
            case kBits:
                if (kind == kTileMixed)
#pragma unroll
                    for (int i = 0; i < Config::kMTiles; ++i)
                        cp_async_small<8>(slot_ + i * 256, at_ + int64(n0 / 64) * 512 + i * 128, 8);
                break;
            case kKeys:
                if (kind == kTileMixed)
#pragma unroll
                    for (int g = 0; g < kGroups; ++g) cp_async_16(slot_ + g * 512, at_ + int64(n0) * 4 + g * 64, 16);
                break;
            case kFours:
                if (p_.mask_kind == kMaskFloat) {
                    copy_fours<4>(n0);
                } else if (p_.mask_kind == kMaskIo) {
                    copy_fours<2>(n0);
                } else {
                    copy_fours<1>(n0);
                }
                break;
            case kWords:
                copy_words(n0);
        }
    }

    // Behind the wait for the copies of a tile, before anything is read.
    OA_DEVICE void settle(int32 n) const {
        if (source_ == kWords && p_.mask_kind != kMaskFloat) make_chunks(n * Config::kBlockN);
    }

    // Words of 16-row tile i, for keys in the lane's own order: bit 8g + 2r + x of m's word is group g, row r, key
    // 2m + x of the four.
    OA_DEVICE uint2 bits(int i, int32 n, int lane) const {
        uint2 w = load_shared2(slot_ + i * 256);
        uint32 shift = (n * Config::kBlockN & 63) / 2 + (lane & 2) * 2;
        return make_uint2(w.x >> shift, w.y >> shift);
    }
    // Chunks of 1, 2 and 4 bytes an element.
    OA_DEVICE uint32 bytes(int row, int group) const { return load_shared(slot_ + at(row, group)); }
    OA_DEVICE uint2 halves(int row, int group) const { return load_shared2(slot_ + at(row, group)); }
    OA_DEVICE uint4 words(int row, int group) const { return load_shared4(slot_ + at(row, group)); }

  private:
    OA_DEVICE static constexpr uint32 at(int row, int group) { return (row * kGroups + group) * 512; }
    OA_DEVICE int32 element_bytes() const {
        return p_.mask_kind == kMaskFloat ? 4 : p_.mask_kind == kMaskIo ? 2 : 1;
    }

    // Keys that the mask has, from the lane's first of a tile on.
    OA_DEVICE int32 keys_from(int32 n0) const {
        return min_of(p_.mask_cols, t_.seqlen_k) - FourKeys::of_lane(lane_) - n0;
    }

    // What lies outside the mask is not read, and becomes 0.
    template <int kSize>
    OA_DEVICE void copy_fours(int32 n0) const {
        const uint8* row = at_ + int64(n0) * kSize;
        const int32 keys = keys_from(n0);
        uint32 inside[kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) inside[g] = kSize * min_of(max_of(keys - 16 * g, 0), 4);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                cp_async_small<4 * kSize>(slot_ + at(r, g), row + 16 * g * kSize, 8 * r < rows_ ? inside[g] : 0);
            row += 8 * kSize * p_.mask_stride_q;
        }
    }

    // A word is read up to the element's end: behind it memory may end. Before it, it does not: allocations begin at
    // multiples of 4 bytes.
    OA_DEVICE void copy_words(int32 n0) const {
        const int32 size = element_bytes(), keys = keys_from(n0);
        const int64 next_key = p_.mask_stride_k * size, next_row = 8 * size * p_.mask_stride_q;
        const uint8* row = at_ + n0 * next_key;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            const uint8* key = row;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    uint32 low = uint32(reinterpret_cast<uint64>(key)) & 3;
                    bool inside = 8 * r < rows_ && 16 * g + e < keys;
                    cp_async_small<4>(slot_ + at(r, g) + 4 * e, key - low, inside ? low + size : 0);
                    key += next_key;
                }
                key += 12 * next_key;
            }
            row += next_row;
        }
    }

    OA_DEVICE void make_chunks(int32 n0) const {
        const int32 size = element_bytes();
        // Low bits of addresses are all that is needed of them.
        const uint32 next_key = uint32(p_.mask_stride_k) * size, next_row = 8 * size * uint32(p_.mask_stride_q);
        uint32 row = uint32(reinterpret_cast<uint64>(at_)) + n0 * next_key;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                uint4 w = load_shared4(slot_ + at(r, g));
                uint32 key = row + 16 * g * next_key, a = w.x >> 8 * (key & 3);
                uint32 b = w.y >> 8 * (key + next_key & 3), c = w.z >> 8 * (key + 2 * next_key & 3);
                uint32 d = w.w >> 8 * (key + 3 * next_key & 3);
                uint2 chunk = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
                if (size == 1) chunk.x = __byte_perm(chunk.x, chunk.y, 0x6420);
                store_shared2(slot_ + at(r, g), chunk);
            }
            row += next_row;
        }
    }

    const AttnFwdParams& p_;
    const ScoreForms& f_;
    const FwdTile& t_;
    const int lane_;
    const uint8* at_;  // the lane's first element or word
    uint32 slot_;
    int32 rows_;  // that the mask has, from the lane's first on
    Source source_;
};
