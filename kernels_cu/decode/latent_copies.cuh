// Storage, work items and copies of mla_decode_sm90, whose comment has the design.
//
// Config: Io, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kHalfPanels, kThreads, kProducers.
#pragma once
#include "decode/latent.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

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
    ScanStorage<Config::kThreads> scan;
};

// The two halves of a buffer: first panel, and panels. The second has the last panel besides.
template <typename Config>
OA_DEVICE constexpr int first_panel(int buffer, int half) {
    return buffer == half ? 0 : Config::kHalfPanels;
}

// A part of a sequence's keys.
struct LatentSplit {
    int32 sequence;
    int32 begin, end, blocks;  // keys
    int32 seq_len;
    int32 slot;  // of the partial result; -1: these are all keys
    Queries queries;
};

// The splits of a CTA, one after the other: every role walks over them by itself.
template <typename Config>
struct SplitCursor {
    int32 at, end, sequence, before;

    OA_DEVICE bool next(const DecodeParams& p, const Partition& partition, LatentSplit& split) {
        while (at < end) {
            const KeySpan span = key_span<kAllRows>(p, sequence);
            if (at >= before + span.chunks) {
                before += span.chunks;
                ++sequence;
                continue;
            }
            const int32 stop = p.fixed_splits ? at + 1 : min_of(end, before + span.chunks);
            split.sequence = sequence;
            split.begin = span.begin + ((at - before) << p.chunk_log2);
            split.end = min_of<int64>(span.end, span.begin + (int64(stop - before) << p.chunk_log2));
            split.blocks = (split.end - split.begin + Config::kKeys - 1) / Config::kKeys;
            split.seq_len = span.seq_len;
            split.queries = span.queries;
            split.slot = stop - at == span.chunks ? -1 : partial_slot(p, partition, blockIdx.y, before, at);
            at = stop;
            // Blocks of rows that this sequence has not.
            if (int32(blockIdx.x) * Config::kRows >= split.queries.count * p.group) continue;
            return true;
        }
        return false;
    }
};

// Whether threads copy, 16 bytes each: pages have too few rows in a row for TMA.
OA_DEVICE bool by_threads(const MlaDecodeParams& p) { return p.box_rows_log2 < 3; }

// Rounds of a buffer: parity that its consumers wait for.
struct Rounds {
    uint32 of[2] = {0, 0};
    OA_DEVICE uint32 parity(int buffer) const { return of[buffer] & 1; }
};

// The producer warpgroup.
template <typename Config>
class LatentProducer {
  public:
    OA_DEVICE LatentProducer(const MlaDecodeParams& p, LatentStorage<Config>& smem)
        : params_(p), p_(p.decode), smem_(smem), chunk_(int32(threadIdx.x) & 7), row_(int32(threadIdx.x) >> 3) {}

    OA_DEVICE void run(SplitCursor<Config> cursor, const Partition& partition) {
        LatentSplit split;
        for (uint32 number = 0; cursor.next(p_, partition, split); ++number) {
            if (by_threads(params_)) load_places(split, 0);
            mbarrier_wait(smem_addr_of(&smem_.q_empty), (number & 1) ^ 1);
            copy_queries(split);
            mbarrier_arrive_after_copies(smem_addr_of(&smem_.q_full));
            if (by_threads(params_)) {
                for (int32 block = 0; block < split.blocks; ++block) copy_block(split, block);
                arrive_late<0>(-1, 0);
            } else if (threadIdx.x < 32) {
                Chunk next = chunk_of(split, 0);
                for (int32 block = 0; block < split.blocks; ++block) {
                    const Chunk own = next;
                    if (block + 1 < split.blocks) next = chunk_of(split, block + 1);
                    copy_chunks(split, block, own);
                }
            }
        }
    }

  private:
    static constexpr int kSteps = Config::kKeys * 8 / Config::kProducers;  // rows of a thread

    OA_DEVICE int32 row(int i) const { return row_ + i * (Config::kProducers / 8); }
    // In a panel, swizzled.
    OA_DEVICE uint32 place(int i) const { return row(i) * 128 + ((chunk_ ^ (row(i) & 7)) << 4); }

    // Where the rows of a block are, a block ahead of their copies: the table is in global memory.
    OA_DEVICE void load_places(const LatentSplit& split, int32 block) {
        // Left of all windows is the first key that a query sees: what is there may be another sequence's by now.
        const int32 seen = p_.window_left < 0 ? 0 : split.seq_len - split.queries.count - p_.window_left;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int32 key = min_of(max_of(split.begin + block * Config::kKeys + row(i), seen), split.end - 1);
            const int32 index = quotient(key, p_.block_multiplier, p_.block_shift);
            uint32 number = split.sequence;
            if (p_.block_table != nullptr) number = p_.block_table[int64(split.sequence) * p_.table_columns + index];
            number = min_of(number, uint32(p_.num_blocks - 1));
            places_[i] = number * p_.block_places + uint32(key - index * p_.block_size) * p_.token_places;
        }
    }

    OA_DEVICE void copy_queries(const LatentSplit& split) const {
        const uint32 to = smem_addr_of(smem_.q);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row(i), token = token_of(p_, flat);
            const bool exists = token < split.queries.count;
            const uint16* from = p_.q;
            if (exists)
                from += split.sequence * p_.q_stride_b + (split.queries.first + token) * p_.q_stride_s +
                        (flat - token * p_.group) * p_.q_stride_h;
#pragma unroll
            for (int panel = 0; panel < Config::kPanels; ++panel)
                cp_async_16(to + panel * kPanelBytes + place(i), from + panel * 64 + chunk_ * 8, exists ? 16 : 0);
        }
    }

    OA_DEVICE void copy_block(const LatentSplit& split, int32 block) {
        const int buffer = block & 1;
        const int32 rows = split.end - split.begin - block * Config::kKeys;
        const uint8* from[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) from[i] = p_.k + uint64(places_[i]) * p_.place_bytes + chunk_ * 16;
        if (block + 1 < split.blocks) load_places(split, block + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mbarrier_wait(smem_addr_of(&smem_.empty[buffer][half]), rounds_.parity(buffer) ^ 1);
            const int first = first_panel<Config>(buffer, half);
            const uint32 to = smem_addr_of(smem_.k[buffer]);
#pragma unroll
            for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                const int panel = n == Config::kHalfPanels ? Config::kPanels - 1 : first + n;
#pragma unroll
                for (int i = 0; i < kSteps; ++i)
                    cp_async_16(to + panel * kPanelBytes + place(i), from[i] + panel * 128, row(i) < rows ? 16 : 0);
            }
            cp_async_commit();
            arrive_late(buffer, half);
        }
        ++rounds_.of[buffer];
    }

    // A lane's chunk of a block: rows that are in one page.
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
    // By TMA.
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
        ++rounds_.of[buffer];
    }

    // wgmma reads what threads have copied behind a fence of theirs: a half is announced behind the next one's copies.
    template <int kPending = 1>
    OA_DEVICE void arrive_late(int buffer, int half) {
        cp_async_wait<kPending>();
        fence_proxy_async();
        if (late_buffer_ >= 0) {
            const int first = first_panel<Config>(late_buffer_, late_half_);
            for (int n = 0; n < Config::kHalfPanels; ++n)
                mbarrier_arrive(smem_addr_of(&smem_.full[late_buffer_][first + n]));
            if (late_half_ == 1) mbarrier_arrive(smem_addr_of(&smem_.full[late_buffer_][Config::kPanels - 1]));
        }
        late_buffer_ = buffer, late_half_ = half;
    }
    int late_buffer_ = -1, late_half_ = 0;

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentStorage<Config>& smem_;
    const int32 chunk_, row_;  // 16 bytes of a panel's row, and the first row
    uint32 places_[kSteps];
    Rounds rounds_;
};
