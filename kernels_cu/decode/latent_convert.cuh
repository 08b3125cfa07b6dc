// Rows of e4m3 of mla_decode_sm90: from global memory by way of registers, in 16 bits to shared memory. Consumers
// multiply by the scale, one for all rows.
#pragma once
#include "decode/latent_rows.cuh"
#include "decode/latent_rows8.cuh"
#include "decode/latent_storage.cuh"
#include "params/mla_decode.cuh"
#include "ptx/l2.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// The part of the producer warps in it. A warp has 8 rows of each block. 4 lanes side by side have one, and store 16
// bytes of it each at a time: two rows fill all banks, as rows are swizzled. Of a half of a block a lane has 16 codes
// of each panel. They come from L2, for which they are asked two blocks before.
//
// ptxas gives all loads of the loop one scoreboard: what waits for one of them waits for all. So those of a block stand
// together, behind the stores of the block before. While they are under way the places of later rows are worked out.
// Nothing may be spilled there either: its loads have the same scoreboard.
template <typename Config>
class LatentConverter {
    static constexpr int kAhead = 2;  // blocks whose rows are known, and on their way to L2, beside the present one
    static constexpr uint32 kHalfBytes = Config::kHalfPanels * kPanelBytes;
    static_assert(Config::kKeys == Config::kProducers / 32 * 8 && Config::kHalfPanels == 4, "8 rows of a warp");

  public:
    OA_DEVICE LatentConverter(const MlaDecodeParams& p, LatentStorage<Config>& smem)
        : params_(p), p_(p.decode), smem_(smem) {}

    // Where the first rows of a split are.
    OA_DEVICE void begin(const LatentSplit& split) {
        int32 entries[kAhead + 1];
#pragma unroll
        for (int i = 0; i <= kAhead; ++i) entries[i] = entry_of(split, i);
        exist_ = 0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) read_place(split, i, entries[i], i);
#pragma unroll
        for (int i = 1; i < kAhead; ++i) prefetch_row(i);
        entry_ = entries[kAhead];
    }

    OA_DEVICE void bring(const LatentSplit& split) {
        LatentCodes first, second;  // halves
        uint4 last = make_uint4(0, 0, 0, 0);  // of the last panel
        load_half<0>(first, last, 0, 0);
        load_half<1>(second, last, 0, 0);
#pragma unroll 1
        for (int32 block = 0; block < split.blocks; ++block) {
            const int32 buffer = block & 1;
            store_half<0>(first, last, buffer);
            store_half<1>(second, last, buffer);
            const int32 entry = in_register(entry_);
            entry_ = entry_of(split, block + kAhead + 1);
            load_half<0>(first, last, buffer ^ 1, 1);
            load_half<1>(second, last, buffer ^ 1, 1);
            read_place(split, block + kAhead, entry, kAhead);
            prefetch_row(kAhead);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) places_[i] = places_[i + 1];
            exist_ >>= 1;
        }
    }

  private:
    // Computed anew where they are needed: there are no registers for them.
    OA_DEVICE static int32 thread() { return in_register(int32(threadIdx.x)); }
    // Of a panel's row the 32 bytes of the lane, and which row of a block.
    OA_DEVICE static int32 column() { return thread() & 3; }
    OA_DEVICE static int32 row() { return thread() >> 2; }

    OA_DEVICE int32 key_of(const LatentSplit& split, int32 block) const {
        return split.begin + block * Config::kKeys + row();
    }
    // What tables say, in global memory, is asked for a block before the row.
    OA_DEVICE int32 entry_of(const LatentSplit& split, int32 block) const {
        return table_entry(params_, split, key_of(split, block));
    }
    OA_DEVICE void read_place(const LatentSplit& split, int32 block, int32 entry, int at) {
        const KeyPlace own = key_place(params_, split, key_of(split, block), entry);
        places_[at] = own.place;
        exist_ |= uint32(own.exists) << at;
    }
    OA_DEVICE bool row_exists(int at) const { return (exist_ >> at & 1) != 0; }
    OA_DEVICE const uint8* row_address(int at) const { return p_.k + uint64(places_[at]) * p_.place_bytes; }
    // To L2: rows wait in registers for less time than memory takes. Of the CTAs with the same keys one does it.
    OA_DEVICE void prefetch_row(int at) const {
        if (blockIdx.x != 0 || !row_exists(at)) return;
        constexpr int kBytes = Config::kHeadDim;
        const uint8* row = row_address(at);
        // Each of the row's four lanes has every fourth line. Places are multiples of 16: there may be one line more.
        const int32 lines = int32(((uint32(reinterpret_cast<uint64>(row)) & 127) + kBytes + 127) / 128);
        const int32 own = column();
        prefetch_l2(row + own * 128);
        if (own + 5 < lines) {
            prefetch_l2(row + (own + 4) * 128);
        } else if (own + 5 == lines) {
            prefetch_l2(row + kBytes - 1);
        }
    }

    // Halves of block `buffer`, whose row is at `at`. Of a row that is not there zeros, as it may be NaN.
    template <int kHalf>
    OA_DEVICE void load_half(LatentCodes& own, uint4& last, int32 buffer, int at) const {
        const bool exists = row_exists(at);
        const int32 side = buffer ^ kHalf;  // 0: the left half
        const uint8* from = row_address(at) + column() * 16;
        const uint8* half = from + side * (Config::kHalfPanels * 64);
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; ++n) own.panels[n] = load_if(half + n * 64, exists);
        if constexpr (kHalf == 1) last = load_if(from + Config::kHeadDimV, exists);
    }

    template <int kHalf>
    OA_DEVICE void store_half(const LatentCodes& own, const uint4& last, int32 buffer) {
        mbarrier_wait(smem_addr_of(&smem_.empty[0][kHalf]) + buffer * 16, rounds_.parity(buffer) ^ 1);
        if (kHalf == 0 && params_.lists_rows != 0 && column() == 0) smem_.listed[buffer][row()] = exist_ & 1;
        const int32 side = buffer ^ kHalf, tid = thread(), line = tid >> 2 & 7, own_column = tid & 3;
        const uint32 row = smem_addr_of(smem_.k[0]) + buffer * LatentStorage<Config>::kBlockBytes + (tid >> 2) * 128;
        const uint32 column = (2 * own_column ^ line) << 4;
        const uint32 to = row + side * kHalfBytes + column, other = to ^ 16;
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; ++n) {
            uint4 x[2];
            convert(own.panels[n], x);
            store_shared4(to + n * kPanelBytes, x[0]);
            store_shared4(other + n * kPanelBytes, x[1]);
        }
        if constexpr (kHalf == 1) {
            const uint32 panel = row + (Config::kPanels - 1) * kPanelBytes;
            uint4 x[2];
            convert(last, x);
            store_shared4(panel + column, x[0]);
            store_shared4(panel + (column ^ 16), x[1]);
        }
        announce(buffer, side * Config::kHalfPanels);
        if (kHalf == 1) rounds_.advance(buffer);
    }
    // A half, by its first panel.
    OA_DEVICE void announce(int32 buffer, int32 panel) const {
        fence_proxy_async();
        __syncwarp();
        const uint32 bar = smem_addr_of(&smem_.full[0][0]) + (buffer * Config::kPanels + panel) * 8;
        if (int32(threadIdx.x & 31) < int32(kArrivalsOfWarp)) mbarrier_arrive(bar);
    }
    // 16 channels of a row.
    OA_DEVICE static void convert(uint4 codes, uint4 (&to)[2]) {
        using Io = typename Config::Io;
        to[0] = widen8<Io>(codes.x, codes.y), to[1] = widen8<Io>(codes.z, codes.w);
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentStorage<Config>& smem_;
    uint32 places_[kAhead + 1];  // of the present block's row and those ahead
    uint32 exist_;  // which of them there are, a bit each
    int32 entry_;  // of the block behind them
    Rounds rounds_;
};
