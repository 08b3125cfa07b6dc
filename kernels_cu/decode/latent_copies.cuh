// Storage and copies of mla_decode_sm90, whose comment has the design.
//
// Config: Io, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kHalfPanels, kThreads, kProducers, kFormat, kByMaps.
#pragma once
#include "decode/latent.cuh"
#include "decode/latent_rows8.cuh"
#include "decode/latent_rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/l2.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Named barriers: P of even and of odd blocks is there; both warpgroups are done with a split; each by itself; those
// that copy.
enum LatentBarrier : int32 { kEvenP = 1, kOddP = 2, kSplitEnd = 3, kAlone = 4, kProducersOnly = 6 };

constexpr uint32 kPanelBytes = 64 * 128;  // 64 rows of 64 channels

// Of a warp one lane arrives for all of them.
#ifdef EVERY_LANE_ARRIVES  // for race checkers that do not follow that
constexpr uint32 kArrivalsOfWarp = 32;
#else
constexpr uint32 kArrivalsOfWarp = 1;
#endif
OA_DEVICE void arrive_for_warp(uint64& bar, int32 lane) {
    if (lane < int32(kArrivalsOfWarp)) mbarrier_arrive(smem_addr_of(&bar));
}

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

// Threads that copy Q; q_full has another arrival of the first thread, with what it says of the split.
template <typename Config>
constexpr uint32 kQueryArrivals = Config::kProducers - (Config::kByMaps ? 32 : 0);

// The producer warps: all of them bring each half of a block, in the order in which halves become free. A lane reads
// where one row of a pair of blocks is, of which a warp brings 16 rows each, a pair ahead of its copy.
template <typename Config>
class LatentProducer {
    static constexpr int kRowsAtOnce = Config::kProducers / 8;  // 8 threads have a row
    static constexpr int kSteps = Config::kKeys / kRowsAtOnce;  // rows of a thread
    static constexpr int kBlockRows = Config::kKeys / (Config::kProducers / 32);  // rows of a warp
    static_assert(kBlockRows == 16 && kSteps == 4, "a lane has one row of a pair of blocks");
    static constexpr int kAhead = 1;  // pairs of blocks whose rows are known before their copy

  public:
    OA_DEVICE LatentProducer(const MlaDecodeParams& p, LatentStorage<Config>& smem)
        : params_(p),
          p_(p.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          chunk_(int32(threadIdx.x) & 7),
          row_(int32(threadIdx.x) >> 3) {}

    OA_DEVICE void run() {
        for (uint32 number = 0;; ++number) {
            LatentSplit& split = smem_.splits[number & 3];
            if (threadIdx.x == 0 && !smem_.cursor.next(p_, Partition(smem_.chunks, p_), split)) split.blocks = 0;
            named_barrier_sync(kProducersOnly, Config::kProducers);
            const bool exists = split.blocks > 0;
            if (Config::kByMaps && threadIdx.x < 32) {
                wait_for_place(number);
                if (!exists) return;
                copy_by_maps(split);
                continue;
            }
            // Ahead of the wait for Q's place: this is read from global memory.
            if constexpr (!Config::kByMaps)
                if (exists) begin_rows(split);
            copy_queries(split, number);
            if (!exists) return;
            if constexpr (Config::kFormat != kRows16) {
                convert_blocks(split);
            } else if constexpr (!Config::kByMaps) {
                copy_blocks(split);
            }
        }
    }

  private:
    OA_DEVICE int32 row(int i) const { return row_ + i * kRowsAtOnce; }
    // In a panel, swizzled.
    OA_DEVICE uint32 place(int i) const { return row(i) * 128 + ((chunk_ ^ (row(i) & 7)) << 4); }

    // Of Q. The thread that has written what consumers are told of the split says so.
    OA_DEVICE void wait_for_place(uint32 number) const {
        mbarrier_wait(smem_addr_of(&smem_.q_empty), (number & 1) ^ 1);
        if (threadIdx.x == 0) mbarrier_arrive(smem_addr_of(&smem_.q_full));
    }

    // Q: by the warps that have nothing else to do if TMA copies keys, each a part of the panels; else by all. Loops
    // stay loops: at the kernel's begin every instruction comes from far away.
    OA_DEVICE void copy_queries(const LatentSplit& split, uint32 number) const {
        constexpr int kWarps = kQueryArrivals<Config> / 32,
                      kOwnPanels = Config::kByMaps ? Config::kPanels / kWarps : Config::kPanels;
        // With rows in 8 bits the loop would take the registers that codes wait in.
        constexpr int kUnroll = Config::kFormat == kRows16 ? 1 : kSteps;
        static_assert(!Config::kByMaps || Config::kPanels % kWarps == 0, "whole panels of a warp");
        wait_for_place(number);
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
                cp_async_16(place + panel * kPanelBytes, from + panel * 64, exists ? 16u : 0u);
        }
        mbarrier_arrive_after_copies(smem_addr_of(&smem_.q_full));
    }

    // Row r of the 16 that a warp brings of a block. Copies: 4 rows at a time, of which the next 4 are 16 further.
    // Rows in 8 bits: 8 rows at a time, one after the other.
    OA_DEVICE int32 warp_row(int32 r) const {
        const int32 warp = int32(threadIdx.x) >> 5;
        if constexpr (Config::kFormat == kRows16) return 4 * warp + (r & 3) + kRowsAtOnce * (r >> 2);
        return kBlockRows * warp + r;
    }
    OA_DEVICE int32 lane_row() const { return warp_row(lane_ & (kBlockRows - 1)); }
    OA_DEVICE int32 lane_block() const { return lane_ / kBlockRows; }
    OA_DEVICE int32 lane_key(const LatentSplit& split, int32 pair) const {
        return split.begin + (2 * pair + lane_block()) * Config::kKeys + lane_row();
    }
    // What tables say, in global memory, is asked for a pair before the row.
    OA_DEVICE int32 entry_of(const LatentSplit& split, int32 pair) const {
        return table_entry(params_, split, lane_key(split, pair));
    }
    OA_DEVICE void read_place(const LatentSplit& split, int32 pair, int32 entry, int at) {
        const KeyPlace own = key_place(params_, split, lane_key(split, pair), entry);
        places_[at] = own.place;
        exist_[at] = __ballot_sync(0xffffffffu, own.exists);
    }
    // Rows in 8 bits, to L2: they wait in registers for less time than memory takes. Of the CTAs with the same keys one
    // does it. Copies would lose more than they gain.
    static constexpr bool kPrefetches = Config::kFormat != kRows16;
    OA_DEVICE void prefetch_row(int at) const {
        if (blockIdx.x != 0 || (exist_[at] >> lane_ & 1) == 0) return;
        constexpr int kBytes = Config::kFormat == kRows656 ? Config::kHeadDimV + 16 + 2 * 64 : Config::kHeadDim;
        const uint8* from = p_.k + uint64(places_[at]) * p_.place_bytes;
#pragma unroll
        for (int byte = 0; byte < kBytes; byte += 128) prefetch_l2(from + byte);
        // Places are multiples of 16.
        if (kBytes % 128 != 16 && (uint32(reinterpret_cast<uint64>(from)) & 127) + (kBytes - 1) % 128 >= 128)
            prefetch_l2(from + kBytes - 1);
    }
    OA_DEVICE void begin_rows(const LatentSplit& split) {
        int32 entries[kAhead + 1];
#pragma unroll
        for (int i = 0; i <= kAhead; ++i) entries[i] = entry_of(split, i);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            read_place(split, i, entries[i], i);
            if (kPrefetches && i > 0) prefetch_row(i);
        }
        entry_ = entries[kAhead];
    }
    OA_DEVICE void read_ahead(const LatentSplit& split, int32 pair) {
        read_place(split, pair + kAhead, entry_, kAhead);
        entry_ = entry_of(split, pair + kAhead + 1);
        if constexpr (kPrefetches) prefetch_row(kAhead);
    }
    OA_DEVICE void next_pair() {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) places_[i] = places_[i + 1], exist_[i] = exist_[i + 1];
    }
    // A row whose place a lane of the warp has.
    OA_DEVICE const uint8* row_address(int at, int lane) const {
        return p_.k + uint64(__shfl_sync(0xffffffffu, places_[at], lane)) * p_.place_bytes;
    }
    OA_DEVICE bool row_exists(int at, int lane) const { return (exist_[at] >> lane & 1) != 0; }
    OA_DEVICE void wait_empty(int buffer, int half) const {
        mbarrier_wait(smem_addr_of(&smem_.empty[buffer][half]), rounds_.parity(buffer) ^ 1);
    }
    // Which keys of a block there are, where lists say it; behind the wait for its first half.
    OA_DEVICE void note_listed(int buffer) const {
        if (params_.lists_rows != 0 && lane_block() == buffer)
            smem_.listed[buffer][lane_row()] = exist_[0] >> lane_ & 1;
    }
    OA_DEVICE static constexpr int panel_of(int buffer, int half, int n) {
        return n == Config::kHalfPanels ? Config::kPanels - 1 : first_panel<Config>(buffer, half) + n;
    }

    OA_DEVICE void copy_blocks(const LatentSplit& split) {
        for (int32 pair = 0;; ++pair) {
            copy_block<0>();
            read_ahead(split, pair);
            if (2 * pair + 1 >= split.blocks) return;
            copy_block<1>();
            if (2 * pair + 2 >= split.blocks) return;
            next_pair();
        }
    }
    template <int kBuffer>
    OA_DEVICE void copy_block() {
        const uint8* from[kSteps];
        uint32 bytes[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int lane = kBuffer * kBlockRows + i * 4 + (lane_ >> 3);
            from[i] = row_address(0, lane) + chunk_ * 16, bytes[i] = row_exists(0, lane) ? 16 : 0;
        }
        const uint32 to = smem_addr_of(smem_.k[kBuffer]) + place(0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wait_empty(kBuffer, half);
            if (half == 0) note_listed(kBuffer);
            // Row by row: memory has the chunks of a row side by side.
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
#pragma unroll
                for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                    const int panel = panel_of(kBuffer, half, n);
                    cp_async_16(to + panel * kPanelBytes + i * kRowsAtOnce * 128, from[i] + panel * 128, bytes[i]);
                }
            // Consumers fence what they wait for: nobody here waits for copies.
            mbarrier_arrive_after_copies(smem_addr_of(&smem_.full[kBuffer][first_panel<Config>(kBuffer, half)]));
        }
        rounds_.advance(kBuffer);
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

    // Rows in 8 bits. 8 lanes of a warp have a row each of 8, and store 16 bytes of it at a time: to all banks, as rows
    // are swizzled. Of a half a lane has 16 codes of each panel. While a half is converted, the next one is loaded, row
    // by row, to the registers that become free.
    static constexpr int kGroups = kBlockRows / 8;  // 8 lanes have a row each
    OA_DEVICE void convert_blocks(const LatentSplit& split) {
        LatentCodes codes[kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) load_codes<0, 0>(codes[g], 0, 8 * g);
        for (int32 pair = 0;; ++pair) {
            convert_half<0, 0>(codes);
            read_ahead(split, pair);
            convert_half<0, 1>(codes);
            if (2 * pair + 1 >= split.blocks) return;
            convert_half<1, 0>(codes);
            convert_half<1, 1>(codes);
            if (2 * pair + 2 >= split.blocks) return;
            next_pair();
        }
    }
    template <int kBuffer, int kHalf>
    OA_DEVICE void convert_half(LatentCodes (&codes)[kGroups]) {
        constexpr int kNextBuffer = kHalf == 0 ? kBuffer : kBuffer ^ 1, kNextHalf = kHalf ^ 1;
        // Where the places of the half that is loaded are.
        constexpr int kPair = kBuffer & kHalf, kLanes = kBlockRows * kNextBuffer;
        wait_empty(kBuffer, kHalf);
        if constexpr (kHalf == 0) note_listed(kBuffer);
        if constexpr (kHalf == 1 && Config::kFormat == kRows656) copy_last<kBuffer>();
        // Not unrolled: ptxas would move all loads behind all stores.
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
            store_codes<kBuffer, kHalf>(codes[0], g);
            codes[0] = codes[1];
            load_codes<kNextBuffer, kNextHalf>(codes[1], kPair, kLanes + 8 * g);
        }
        if constexpr (kHalf == 1 && Config::kFormat == kRows656) cp_async_commit(), cp_async_wait<0>();
        fence_proxy_async();
        __syncwarp();
        arrive_for_warp(smem_.full[kBuffer][first_panel<Config>(kBuffer, kHalf)], lane_);
        if (kHalf == 1) rounds_.advance(kBuffer);
    }

    // lanes: the first of the 8 that have the places of these rows.
    template <int kBuffer, int kHalf>
    OA_DEVICE void load_codes(LatentCodes& own, int at, int lanes) const {
        constexpr int kFirst = first_panel<Config>(kBuffer, kHalf);
        const bool exists = row_exists(at, lanes + chunk_);
        const uint8* row = row_address(at, lanes + chunk_);
        const uint8* from = row + (lane_ >> 3) * 16;
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; ++n) own.panels[n] = load_if(from + (kFirst + n) * 64, exists);
        if constexpr (Config::kFormat == kRows656) {
            // Of a row that is not there zeros too: it may be NaN.
            own.scales = exists ? *reinterpret_cast<const float2*>(row + Config::kHeadDimV + kFirst * 2)
                                : make_float2(0.0f, 0.0f);
        } else {
            if constexpr (kHalf == 1) own.last = load_if(from + Config::kHeadDimV, exists);
        }
    }

    template <int kBuffer, int kHalf>
    OA_DEVICE void store_codes(const LatentCodes& own, int g) const {
        constexpr int kFirst = first_panel<Config>(kBuffer, kHalf);
        const uint32 row = smem_addr_of(smem_.k[kBuffer]) + warp_row(chunk_) * 128;
        const uint32 column = ((2 * (lane_ >> 3)) ^ chunk_) << 4;
        const uint32 to = row + column, other = row + (column ^ 16);
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; ++n) {
            const uint32 at = (kFirst + n) * kPanelBytes + g * 8 * 128;
            store16(own.panels[n], n < Config::kHalfPanels / 2 ? own.scales.x : own.scales.y, to + at, other + at);
        }
        if constexpr (kHalf == 1 && Config::kFormat == kRowsE4m3) {
            const uint32 at = (Config::kPanels - 1) * kPanelBytes + g * 8 * 128;
            store16(own.last, 1.0f, to + at, other + at);
        }
    }
    // Channels in 16 bits: a lane has two chunks of 16 bytes of each row.
    template <int kBuffer>
    OA_DEVICE void copy_last() const {
        const int32 column = lane_ >> 3;
        const uint32 to = smem_addr_of(smem_.k[kBuffer]) + (Config::kPanels - 1) * kPanelBytes +
                          warp_row(chunk_) * 128 + ((column ^ chunk_) << 4);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int32 lane = kBlockRows * kBuffer + 8 * g + chunk_;
            const uint32 bytes = row_exists(0, lane) ? 16 : 0;
            const uint8* from = row_address(0, lane) + Config::kHeadDimV + 16 + column * 16;
            cp_async_16(to + g * 8 * 128, from, bytes);
            cp_async_16((to ^ 64) + g * 8 * 128, from + 64, bytes);
        }
    }
    // 16 channels of a row. With one scale for all rows, consumers multiply.
    OA_DEVICE void store16(uint4 codes, float scale, uint32 to, uint32 other) const {
        using Io = typename Config::Io;
        if constexpr (Config::kFormat == kRows656) {
            store_shared4(to, dequantize8<Io>(codes.x, codes.y, scale));
            store_shared4(other, dequantize8<Io>(codes.z, codes.w, scale));
        } else {
            store_shared4(to, widen8<Io>(codes.x, codes.y));
            store_shared4(other, widen8<Io>(codes.z, codes.w));
        }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentStorage<Config>& smem_;
    const int32 lane_;
    const int32 chunk_, row_;  // 16 bytes of a panel's row, and the first row
    // The lane's rows of this pair of blocks and of those ahead, and which rows of the warp's there are, a bit a lane.
    uint32 places_[kAhead + 1], exist_[kAhead + 1];
    int32 entry_;  // of the pair behind those
    Rounds rounds_;
};
