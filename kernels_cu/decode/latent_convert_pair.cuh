// Rows in 8 bits of mla_decode_sm90 in clusters of two CTAs that have the same keys: each converts half of the rows, and
// stores them in its own shared memory and in the other's.
#pragma once
#include "decode/latent_rows.cuh"
#include "decode/latent_rows8.cuh"
#include "decode/latent_storage.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cluster_stores.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/l2.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// The part of the producer warps in it. Of a block a CTA has rows 32 * rank to 32 * rank + 31. The first four warps have
// the half of their channels that is free first, the others the second half and the last panel. 8 lanes have one of a
// warp's 8 rows each, as in `LatentConverter`.
template <typename Config>
class LatentPairConverter {
    static constexpr int kFormat = Config::kFormat;
    static constexpr int kAhead = 3;  // blocks whose rows are known, and on their way to L2, beside the present one
    static constexpr uint32 kHalfBytes = Config::kHalfPanels * kPanelBytes;
    static constexpr int kEarly = 4;  // panels that are converted ahead of the wait for their place
    static constexpr int kOwnRows = Config::kKeys / 2;
    static_assert(Config::kCluster == 2 && Config::kProducers == 2 * 4 * kOwnRows && Config::kHalfPanels == 4, "roles");

  public:
    OA_DEVICE LatentPairConverter(const MlaDecodeParams& p, LatentStorage<Config>& smem)
        : params_(p),
          p_(p.decode),
          smem_(smem),
          peer_(peer_distance(smem_addr_of(&smem), cluster_rank() ^ 1)),
          half_(__shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0)),
          column_(int32(threadIdx.x) >> 3 & 3),
          row_(int32(cluster_rank()) * kOwnRows + (int32(threadIdx.x) >> 5 & 3) * 8 + (int32(threadIdx.x) & 7)) {}

    // Where the first rows of a split are.
    OA_DEVICE void begin(const LatentSplit& split) {
        int32 entries[kAhead + 1];
#pragma unroll
        for (int i = 0; i <= kAhead; ++i) entries[i] = table_entry(params_, split, key_of(split, i));
        exist_ = 0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) read_place(split, i, entries[i], i);
#pragma unroll
        for (int i = 1; i < kAhead; ++i) prefetch_row(i);
        entry_ = entries[kAhead];
        if (params_.lists_rows != 0) listed_ = table_entry(params_, split, listed_key(split, 0));
    }

    OA_DEVICE void bring(const LatentSplit& split) {
        LatentCodes codes;
        LatentLast<kFormat> last;
        float2 scales = {1.0f, 1.0f};
        load(codes, last, scales, 0, 0);
#pragma unroll 1
        for (int32 block = 0; block < split.blocks; ++block) {
            read_place(split, block + kAhead, entry_, kAhead);
            entry_ = table_entry(params_, split, key_of(split, block + kAhead + 1));
            prefetch_row(kAhead);
            const int32 buffer = block & 1;
            uint4 ready[kEarly + 1][2];
#pragma unroll
            for (int n = 0; n < kEarly; ++n) convert(codes.panels[n], n < 2 ? scales.x : scales.y, ready[n]);
#pragma unroll
            for (int n = 0; n < kEarly; ++n) hold(ready[n][0]), hold(ready[n][1]);
            wait(buffer);
            note_listed(split, block, buffer);
            store(codes, ready, last, scales, buffer);
            load(codes, last, scales, buffer ^ 1, 1);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) places_[i] = places_[i + 1];
            exist_ >>= 1;
        }
    }

  private:
    OA_DEVICE int32 key_of(const LatentSplit& split, int32 block) const {
        return split.begin + block * Config::kKeys + row_;
    }
    // A key of the block whose flag for both CTAs' rows this lane notes in its own CTA.
    OA_DEVICE int32 listed_row() const { return (int32(threadIdx.x) >> 5) * 8 + (int32(threadIdx.x) & 7); }
    OA_DEVICE int32 listed_key(const LatentSplit& split, int32 block) const {
        return split.begin + block * Config::kKeys + listed_row();
    }
    OA_DEVICE void note_listed(const LatentSplit& split, int32 block, int32 buffer) {
        if (params_.lists_rows == 0) return;
        const bool exists = key_place(params_, split, listed_key(split, block), listed_).exists;
        if (column_ == 0) smem_.listed[buffer][listed_row()] = exists;
        listed_ = table_entry(params_, split, listed_key(split, block + 1));
    }
    OA_DEVICE void read_place(const LatentSplit& split, int32 block, int32 entry, int at) {
        const KeyPlace own = key_place(params_, split, key_of(split, block), entry);
        places_[at] = own.place;
        exist_ |= uint32(own.exists) << at;
    }
    OA_DEVICE bool row_exists(int at) const { return (exist_ >> at & 1) != 0; }
    OA_DEVICE const uint8* row_address(int at) const { return p_.k + uint64(places_[at]) * p_.place_bytes; }
    // To L2. Of the clusters with the same keys one does it, each of a row's eight lanes a line.
    OA_DEVICE void prefetch_row(int at) const {
        if (blockIdx.x >= Config::kCluster || !row_exists(at)) return;
        constexpr int32 kBytes = kFormat == kRows656 ? Config::kHeadDimV + 16 + 2 * 64 : Config::kHeadDim;
        const uint8* row = row_address(at);
        const int32 line = column_ + 4 * half_, last = (uint32(reinterpret_cast<uint64>(row)) & 127) + kBytes - 1;
        if (line <= last >> 7) prefetch_l2(row + min_of(line * 128, kBytes - 1));
    }

    // The warp's half of the row at `at`, of a block for this buffer. Of a row that is not there zeros, as it may be NaN.
    OA_DEVICE void load(LatentCodes& own, LatentLast<kFormat>& last, float2& scales, int32 buffer, int at) const {
        const bool exists = row_exists(at);
        const int32 side = buffer ^ half_;  // 0: the left half
        const uint8* row = row_address(at);
        const uint8* from = row + column_ * 16;
        const uint8* half = from + side * (Config::kHalfPanels * 64);
        if constexpr (kFormat == kRows656) {
            scales.x = load_float_if(row + Config::kHeadDimV + side * 8, exists);
            scales.y = load_float_if(row + Config::kHeadDimV + side * 8 + 4, exists);
        }
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; ++n) own.panels[n] = load_if(half + n * 64, exists);
        if (half_ == 0) return;
        if constexpr (kFormat == kRows656) {
            last.chunks[0] = load_if(from + Config::kHeadDimV + 16, exists);
            last.chunks[1] = load_if(from + Config::kHeadDimV + 16 + 64, exists);
        } else {
            last.chunks[0] = load_if(from + Config::kHeadDimV, exists);
        }
    }

    // Until both CTAs' consumers have released the warp's half.
    OA_DEVICE void wait(int32 buffer) {
        mbarrier_wait(smem_addr_of(&smem_.empty[0][0]) + buffer * 16 + half_ * 8, rounds_.parity(buffer) ^ 1);
        rounds_.advance(buffer);
    }
    OA_DEVICE void store(const LatentCodes& own, const uint4 (&ready)[kEarly + 1][2], const LatentLast<kFormat>& last,
                         float2 scales, int32 buffer) const {
        const int32 side = buffer ^ half_, line = row_ & 7;
        const uint32 bars =
            smem_addr_of(&smem_.full[0][0]) + (buffer * Config::kPanels + side * Config::kHalfPanels) * 8;
        const auto bar_of = [&](int n) { return bars + n / Config::kTogether * Config::kTogether * 8; };
        const uint32 full = bar_of(Config::kHalfPanels - 1);
        const uint32 row = smem_addr_of(smem_.k[0]) + buffer * LatentStorage<Config>::kBlockBytes + row_ * 128;
        const uint32 column = (2 * column_ ^ line) << 4;
        const uint32 to = row + side * kHalfBytes + column, other = to ^ 16;
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; ++n) {
            uint4 x[2];
            if (n < kEarly) {
                x[0] = ready[min_of(n, kEarly)][0], x[1] = ready[min_of(n, kEarly)][1];
            } else {
                convert(own.panels[n], n < 2 ? scales.x : scales.y, x);
            }
            store_both(to + n * kPanelBytes, x[0], bar_of(n));
            store_both(other + n * kPanelBytes, x[1], bar_of(n));
            if (n + 1 < Config::kHalfPanels && (n + 1) % Config::kTogether == 0) announce(bar_of(n), Config::kTogether);
        }
        if (half_ != 0) {
            const uint32 panel = row + (Config::kPanels - 1) * kPanelBytes;
            if constexpr (kFormat == kRows656) {
                const uint32 chunk = panel + ((column_ ^ line) << 4);
                store_both(chunk, last.chunks[0], full);
                store_both(chunk ^ 64, last.chunks[1], full);
            } else {
                uint4 x[2];
                convert(last.chunks[0], 1.0f, x);
                store_both(panel + column, x[0], full);
                store_both(panel + (column ^ 16), x[1], full);
            }
        }
        announce(full, Config::kTogether + half_);
    }
    // The first of the half's warps expects what the other CTA stores here.
    OA_DEVICE static void announce(uint32 bar, int32 panels) {
        fence_proxy_async();
        __syncwarp();
        const int32 lane = int32(threadIdx.x) & 31;
        if (lane == 0 && (threadIdx.x & 96) == 0) {
            mbarrier_arrive_expect_tx(bar, kOwnRows * 128 * panels);
        } else if (lane < int32(kArrivalsOfWarp)) {
            mbarrier_arrive(bar);
        }
    }
    // 16 channels of a row. With one scale for all rows, consumers multiply.
    OA_DEVICE static void convert(uint4 codes, float scale, uint4 (&to)[2]) {
        using Io = typename Config::Io;
        if constexpr (kFormat == kRows656) {
            to[0] = dequantize8<Io>(codes.x, codes.y, scale), to[1] = dequantize8<Io>(codes.z, codes.w, scale);
        } else {
            to[0] = widen8<Io>(codes.x, codes.y), to[1] = widen8<Io>(codes.z, codes.w);
        }
    }
    // Is there before what stands below.
    OA_DEVICE static void hold(uint4& x) { asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)::"memory"); }
    OA_DEVICE void store_both(uint32 to, uint4 x, uint32 full) const {
        store_shared4(to, x);
        const uint32 words[4] = {x.x, x.y, x.z, x.w};
        store_async4(to + peer_, words, full + peer_);
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentStorage<Config>& smem_;
    const uint32 peer_;  // from an address here to the same one in the other CTA
    const int32 half_;  // that the warp has
    const int32 column_, row_;  // of a panel's row the 32 bytes of the lane, and which row of a block
    uint32 places_[kAhead + 1];  // of the present block's row and those ahead
    uint32 exist_;  // which of them there are, a bit each
    int32 entry_;  // of the block behind them
    int32 listed_;  // of the present block, for `note_listed`
    Rounds rounds_;
};
