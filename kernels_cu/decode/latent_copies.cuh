// Copies of mla_decode_sm90, whose comment has the design.
//
// Config: Io, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kHalfPanels, kThreads, kProducers, kFormat, kByMaps.
#pragma once
#include "decode/latent.cuh"
#include "decode/latent_convert.cuh"
#include "decode/latent_rows.cuh"
#include "decode/latent_storage.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

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
    static_assert(Config::kFormat != kRows16 || (kBlockRows == 16 && kSteps == 4), "a lane has one row of a pair");
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
        if constexpr (Config::kFormat == kRows16) {
            walk(*this);
        } else {
            LatentConverter<Config> converter(params_, smem_);
            walk(converter);
        }
    }

    // Where threads copy rows: where the first ones of a split are, and all blocks of it.
    OA_DEVICE void begin(const LatentSplit& split) {
        int32 entries[kAhead + 1];
#pragma unroll
        for (int i = 0; i <= kAhead; ++i) entries[i] = entry_of(split, i);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) read_place(split, i, entries[i], i);
        entry_ = entries[kAhead];
    }
    OA_DEVICE void bring(const LatentSplit& split) {
        for (int32 pair = 0;; ++pair) {
            copy_block<0>();
            read_ahead(split, pair);
            if (2 * pair + 1 >= split.blocks) return;
            copy_block<1>();
            if (2 * pair + 2 >= split.blocks) return;
            next_pair();
        }
    }

  private:
    // All splits; `rows` brings the rows of those whose rows threads bring.
    template <typename Rows>
    OA_DEVICE void walk(Rows& rows) {
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
                if (exists) rows.begin(split);
            copy_queries(split, number);
            if (!exists) return;
            if constexpr (!Config::kByMaps) rows.bring(split);
        }
    }

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

    // Row r of the 16 that a warp brings of a block: 4 rows at a time, of which the next 4 are 16 further.
    OA_DEVICE int32 warp_row(int32 r) const { return 4 * (int32(threadIdx.x) >> 5) + (r & 3) + kRowsAtOnce * (r >> 2); }
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
    OA_DEVICE void read_ahead(const LatentSplit& split, int32 pair) {
        read_place(split, pair + kAhead, entry_, kAhead);
        entry_ = entry_of(split, pair + kAhead + 1);
    }
    OA_DEVICE void next_pair() {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) places_[i] = places_[i + 1], exist_[i] = exist_[i + 1];
    }
    // A row whose place a lane of the warp has.
    OA_DEVICE const uint8* row_address(const uint8* first, int at, int lane) const {
        return first + uint64(__shfl_sync(0xffffffffu, places_[at], lane)) * p_.place_bytes;
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

    template <int kBuffer>
    OA_DEVICE void copy_block() {
        const uint8* from[kSteps];
        uint32 bytes[kSteps];
        const uint8* own = in_register(p_.k + chunk_ * 16);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int lane = kBuffer * kBlockRows + i * 4 + (lane_ >> 3);
            from[i] = row_address(own, 0, lane), bytes[i] = row_exists(0, lane) ? 16 : 0;
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
