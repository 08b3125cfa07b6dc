// Storage and copies of mla_decode_sm90, whose comment has the design.
//
// Config: Io, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kHalfPanels, kThreads, kProducers, kFormat, kByMaps.
#pragma once
#include "decode/latent.cuh"
#include "decode/latent_rows8.cuh"
#include "decode/latent_rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Named barriers: P of even and of odd blocks is there; both warpgroups are done with a split; each by itself; those
// that copy.
enum LatentBarrier : int32 { kEvenP = 1, kOddP = 2, kSplitEnd = 3, kAlone = 4, kProducersOnly = 6 };

constexpr uint32 kPanelBytes = 64 * 128;  // 64 rows of 64 channels

template <typename Config>
struct LatentStorage {
    static constexpr uint32 kBlockBytes = Config::kPanels * kPanelBytes;
    alignas(1024) uint8 q[kBlockBytes];
    alignas(1024) uint8 k[2][kBlockBytes];
    float m[2][Config::kRows];  // running maximum behind the last even and the last odd block
    float l[2][2][Config::kRows];  // of every other split: each warpgroup's part of the denominator
    uint64 full[2][Config::kPanels];  // a buffer's panels
    uint64 empty[2][2];  // a buffer's first and second half, as they are copied
    uint64 q_full, q_empty;
    // By the first thread, which alone walks over the splits, up to two ahead of the consumers: split n is in place
    // n % 4. Behind the last one there is one of no blocks.
    LatentSplit splits[4];
    SplitCursor<Config> cursor;
    int32 chunks;  // of all sequences
    uint8 listed[2][Config::kKeys];  // whether a list has the key of a buffer's row
    ScanStorage<Config::kThreads> scan;
};

// The two halves of a buffer: first panel, and panels. The second has the last panel besides.
template <typename Config>
OA_DEVICE constexpr int first_panel(int buffer, int half) {
    return buffer == half ? 0 : Config::kHalfPanels;
}

// Rounds of a buffer: parity that its consumers wait for.
struct Rounds {
    uint32 parities = 0;  // a bit each: an array, indexed by a buffer that only the warp knows, would lie in memory
    OA_DEVICE uint32 parity(int buffer) const { return parities >> buffer & 1; }
    OA_DEVICE void advance(int buffer) { parities ^= 1u << buffer; }
};

// Threads that copy Q; of one of them q_full has another arrival, with what it says of the split.
template <typename Config>
constexpr uint32 kQueryArrivals = Config::kProducers - (Config::kByMaps ? 32 : 0);

// The producer warps: all of them bring each half of a block, in the order in which halves become free.
template <typename Config>
class LatentProducer {
    static constexpr int kRowsAtOnce = Config::kProducers / 8;  // 8 threads have a row
    static constexpr int kSteps = Config::kKeys / kRowsAtOnce;  // rows of a thread

  public:
    OA_DEVICE LatentProducer(const MlaDecodeParams& p, LatentStorage<Config>& smem)
        : params_(p), p_(p.decode), smem_(smem), chunk_(int32(threadIdx.x) & 7), row_(int32(threadIdx.x) >> 3) {}

    OA_DEVICE void run() {
        for (uint32 number = 0;; ++number) {
            LatentSplit& split = smem_.splits[number & 3];
            if (threadIdx.x == 0 && !smem_.cursor.next(p_, Partition(smem_.chunks, p_), split)) split.blocks = 0;
            named_barrier_sync(kProducersOnly, Config::kProducers);
            const bool exists = split.blocks > 0;
            if (Config::kByMaps && threadIdx.x < 32) {
                if (!exists) return;
                copy_by_maps(split);
                continue;
            }
            // Ahead of the wait for Q's place: this is read from global memory.
            if constexpr (!Config::kByMaps)
                if (exists) load_entries(split, 0), load_places(split, 0);
            copy_queries(split, number);
            if (!exists) return;
            if constexpr (Config::kFormat != kRows16) {
                convert_blocks(split);
            } else if constexpr (!Config::kByMaps) {
                for (int32 block = 0; block < split.blocks; ++block) copy_block(split, block);
            }
        }
    }

  private:
    OA_DEVICE int32 row(int i) const { return row_ + i * kRowsAtOnce; }
    // In a panel, swizzled.
    OA_DEVICE uint32 place(int i) const { return row(i) * 128 + ((chunk_ ^ (row(i) & 7)) << 4); }

    // Q, and what consumers are told of the split. By the warps that have nothing else to do if TMA copies keys, each a
    // part of the panels; else by all. Loops stay loops: at the kernel's begin every instruction comes from far away.
    OA_DEVICE void copy_queries(const LatentSplit& split, uint32 number) const {
        constexpr int kWarps = kQueryArrivals<Config> / 32,
                      kOwnPanels = Config::kByMaps ? Config::kPanels / kWarps : Config::kPanels;
        // With rows in 8 bits the loop would take the registers that codes wait in.
        constexpr int kUnroll = Config::kFormat == kRows16 ? 1 : kSteps;
        static_assert(!Config::kByMaps || Config::kPanels % kWarps == 0, "whole panels of a warp");
        mbarrier_wait(smem_addr_of(&smem_.q_empty), (number & 1) ^ 1);
        if (threadIdx.x == Config::kProducers - 32) mbarrier_arrive(smem_addr_of(&smem_.q_full));
        const int first = Config::kByMaps ? (int32(threadIdx.x) / 32 - 1) * kOwnPanels : 0;
        const uint32 to = smem_addr_of(smem_.q) + first * kPanelBytes;
        const int32 stop = split.blocks > 0 ? Config::kRows : 0;
#pragma unroll kUnroll
        for (int32 own = Config::kByMaps ? row_ & 3 : row_; own < stop; own += Config::kByMaps ? 4 : kRowsAtOnce) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + own, token = token_of(p_, flat);
            const bool exists = token < split.queries.count;
            const uint16* from = p_.q;
            if (exists)
                from += split.sequence * p_.q_stride_b + (split.queries.first + token) * p_.q_stride_s +
                        (flat - token * p_.group) * p_.q_stride_h + first * 64 + chunk_ * 8;
            const uint32 place = to + own * 128 + ((chunk_ ^ (own & 7)) << 4);
#pragma unroll
            for (int panel = 0; panel < kOwnPanels; ++panel)
                cp_async_16(place + panel * kPanelBytes, from + panel * 64, exists ? 16 : 0);
        }
        mbarrier_arrive_after_copies(smem_addr_of(&smem_.q_full));
    }

    // Where the rows of a block are. What tables say, in global memory, is asked for a block before.
    OA_DEVICE int32 key(const LatentSplit& split, int32 block, int i) const {
        return split.begin + block * Config::kKeys + row(i);
    }
    OA_DEVICE void load_entries(const LatentSplit& split, int32 block) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) entries_[i] = table_entry(params_, split, key(split, block, i));
    }
    OA_DEVICE void load_places(const LatentSplit& split, int32 block) {
        exists_ = 0;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const KeyPlace own = key_place(params_, split, key(split, block, i), entries_[i]);
            places_[i] = own.place;
            exists_ |= own.exists ? 1u << i : 0;
        }
        load_entries(split, block + 1);
    }
    OA_DEVICE const uint8* address(int i) const { return p_.k + uint64(places_[i]) * p_.place_bytes; }
    OA_DEVICE bool exists(int i) const { return (exists_ >> i & 1) != 0; }
    OA_DEVICE void wait_empty(int buffer, int half) const {
        mbarrier_wait(smem_addr_of(&smem_.empty[buffer][half]), rounds_.parity(buffer) ^ 1);
    }
    // Which keys of a block there are, where lists say it; behind the wait for its first half.
    OA_DEVICE void note_listed(int buffer, uint32 exists) const {
        if (params_.lists_rows == 0) return;
        if (chunk_ != 0) return;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) smem_.listed[buffer][row(i)] = exists >> i & 1;
    }
    OA_DEVICE static int panel_of(int buffer, int half, int n) {
        return n == Config::kHalfPanels ? Config::kPanels - 1 : first_panel<Config>(buffer, half) + n;
    }

    OA_DEVICE void copy_block(const LatentSplit& split, int32 block) {
        const int buffer = block & 1;
        const uint8* from[kSteps];
        uint32 bytes[kSteps];
        const uint32 there = exists_;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) from[i] = address(i) + chunk_ * 16, bytes[i] = exists(i) ? 16 : 0;
        load_places(split, block + 1);  // behind the last block nothing exists
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wait_empty(buffer, half);
            if (half == 0) note_listed(buffer, there);
            const uint32 to = smem_addr_of(smem_.k[buffer]);
#pragma unroll
            for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                const int panel = panel_of(buffer, half, n);
#pragma unroll
                for (int i = 0; i < kSteps; ++i)
                    cp_async_16(to + panel * kPanelBytes + place(i), from[i] + panel * 128, bytes[i]);
            }
            // Consumers fence what they wait for: nobody here waits for copies.
            mbarrier_arrive_after_copies(smem_addr_of(&smem_.full[buffer][first_panel<Config>(buffer, half)]));
        }
        rounds_.advance(buffer);
    }

    // By TMA. A lane's chunk of a block: rows that are in one page.
    struct Chunk {
        int32 page, row;  // no page of the tensor map: zeros
        bool exists;
    };
    OA_DEVICE int32 chunk_row() const { return int32(threadIdx.x) << params_.box_rows_log2; }
    OA_DEVICE Chunk chunk_of(const LatentSplit& split, int32 block) const {
        const int32 seen = p_.window_left < 0 ? 0 : split.seq_len - split.queries.count - p_.window_left;
        const int32 key = split.begin + block * Config::kKeys + chunk_row();
        if (chunk_row() >= Config::kKeys || key >= split.end) return {0, 0, false};
        if (key + (1 << params_.box_rows_log2) <= seen) return {p_.num_blocks, 0, true};
        const int32 index = quotient(key, p_.block_multiplier, p_.block_shift);
        int32 number = split.sequence;
        if (p_.block_table != nullptr) number = p_.block_table[int64(split.sequence) * p_.table_columns + index];
        return {number, key - index * p_.block_size, true};
    }
    OA_DEVICE void copy_by_maps(const LatentSplit& split) {
        Chunk next = chunk_of(split, 0);
        for (int32 block = 0; block < split.blocks; ++block) {
            const Chunk own = next;
            if (block + 1 < split.blocks) next = chunk_of(split, block + 1);
            copy_chunks(split, block, own);
        }
    }
    OA_DEVICE void copy_chunks(const LatentSplit& split, int32 block, const Chunk& own) {
        const int buffer = block & 1, log2 = params_.box_rows_log2;
        const int32 rows = min_of(split.end - split.begin - block * Config::kKeys, Config::kKeys);
        const uint32 row_bytes = uint32((rows + (1 << log2) - 1) >> log2 << log2) * 128;  // of a panel
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mbarrier_wait(smem_addr_of(&smem_.empty[buffer][half]), rounds_.parity(buffer) ^ 1);
            const int first = first_panel<Config>(buffer, half);
            const uint32 to = smem_addr_of(smem_.k[buffer]) + chunk_row() * 128;
            const int mine = int(threadIdx.x) == Config::kHalfPanels ? Config::kPanels - 1 : first + int(threadIdx.x);
            if (int(threadIdx.x) < Config::kHalfPanels + half)
                mbarrier_arrive_expect_tx(smem_addr_of(&smem_.full[buffer][mine]), row_bytes);
            __syncwarp();
            if (own.exists)
#pragma unroll
                for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                    const int panel = n == Config::kHalfPanels ? Config::kPanels - 1 : first + n;
                    const uint32 bar = smem_addr_of(&smem_.full[buffer][panel]);
                    tma_load_4d(to + panel * kPanelBytes, &params_.map, bar, panel * 64, own.row, 0, own.page);
                }
        }
        rounds_.advance(buffer);
    }

    // A half is asked for as soon as the one before is announced, and waits in registers until its place is free.
    OA_DEVICE void convert_blocks(const LatentSplit& split) {
        LatentCodes codes[kSteps];
        load_codes<0>(codes, 0);
        for (int32 block = 0; block < split.blocks; ++block) {
            const int buffer = block & 1;
            wait_empty(buffer, 0);
            note_listed(buffer, exists_);
            store_codes<0>(codes, buffer);
            load_codes<1>(codes, buffer);
            load_places(split, block + 1);
            wait_empty(buffer, 1);
            store_codes<1>(codes, buffer);
            load_codes<0>(codes, buffer ^ 1);
            rounds_.advance(buffer);
        }
    }

    template <int kHalf>
    OA_DEVICE void load_codes(LatentCodes (&codes)[kSteps], int buffer) const {
        const int first = first_panel<Config>(buffer, kHalf);
        const float common = p_.k_params == nullptr ? 1.0f : __uint_as_float(*p_.k_params);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            LatentCodes& own = codes[i];
            const uint8* from = address(i);
            auto chunk = [&](int at) {
                return exists(i) ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
            };
            own.left = chunk(first * 64 + chunk_ * 16);
            own.right = chunk(first * 64 + 128 + chunk_ * 16);
            if constexpr (Config::kFormat == kRows656) {
                // Of a row that is not there zeros too: it may be NaN.
                own.scales = exists(i) ? *reinterpret_cast<const float2*>(from + Config::kHeadDimV + first * 2)
                                       : make_float2(0.0f, 0.0f);
                if constexpr (kHalf == 1) own.last = chunk(Config::kHeadDimV + 16 + chunk_ * 16);
            } else {
                own.scales = make_float2(common, common);
                if constexpr (kHalf == 1) own.last = chunk(Config::kHeadDimV + (chunk_ & 3) * 16);
            }
        }
    }

    template <int kHalf>
    OA_DEVICE void store_codes(const LatentCodes (&codes)[kSteps], int buffer) const {
        const int first = first_panel<Config>(buffer, kHalf);
        const uint32 to = smem_addr_of(smem_.k[buffer]) + row_ * 128, swizzle = row_ & 7;
        const bool flip = (chunk_ & 4) != 0;  // 8 threads store to 8 different chunks of 16 bytes
        const uint32 column = (2 * (chunk_ & 3)) ^ swizzle;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const LatentCodes& own = codes[i];
            const uint32 row = to + i * kRowsAtOnce * 128, half = row + (first + (chunk_ >> 2)) * kPanelBytes;
            store16(own.left, own.scales.x, half, column, flip);
            store16(own.right, own.scales.y, half + 2 * kPanelBytes, column, flip);
            if constexpr (kHalf == 1) {
                const uint32 last = row + (Config::kPanels - 1) * kPanelBytes;
                if constexpr (Config::kFormat == kRows656) {
                    store_shared4(last + ((chunk_ ^ swizzle) << 4), own.last);
                } else if (chunk_ < 4) {
                    store16(own.last, own.scales.x, last, column, false);
                }
            }
        }
        fence_proxy_async();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(smem_addr_of(&smem_.full[buffer][first]));
    }

    // 16 channels to a panel's row: to the chunk of number `column` and its neighbour, the upper 8 first with `flip`.
    OA_DEVICE void store16(uint4 codes, float scale, uint32 row, uint32 column, bool flip) const {
        const uint4 low = dequantize8<typename Config::Io>(codes.x, codes.y, scale);
        const uint4 high = dequantize8<typename Config::Io>(codes.z, codes.w, scale);
        const uint32 first = row + ((column ^ (flip ? 1 : 0)) << 4);
        store_shared4(first, flip ? high : low);
        store_shared4(first ^ 16, flip ? low : high);
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentStorage<Config>& smem_;
    const int32 chunk_, row_;  // 16 bytes of a panel's row, and the first row
    int32 entries_[kSteps];
    uint32 places_[kSteps], exists_ = 0;
    Rounds rounds_;
};
