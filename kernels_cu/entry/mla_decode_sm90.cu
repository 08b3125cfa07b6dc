// Attention of one or a few new query tokens over a latent cache (multi-head latent attention, DeepSeek-V2, 2024), on
// Hopper's wgmma, sm_90a only. Source: FlashMLA (DeepSeek 2025): two warpgroups that have half of O's channels each.
//
//   S = softmax_scale * q k^T;  S = softcap * tanh(S / softcap);  P = softmax([S, sink]);  O = P k[:, :HEAD_DIM_V]
//
// q: [batch, q_len, num_q_heads, HEAD_DIM], or packed by cu_seqlens_q; o with HEAD_DIM_V. k: rows of HEAD_DIM wherever
// the strides say, one for all query heads. Query token i of sequence b sees the keys up to seq_lens[b] - q_len + i.
//
// A CTA has 64 rows (query token, head), and one split of the keys after another (decode/latent.cuh). It takes 64 keys
// at a time, even blocks in buffer 0, odd ones in buffer 1. Warpgroup 0 makes P of even blocks, warpgroup 1 of odd
// ones; both add all blocks in order, each to its half of O:
//
//   warpgroup 0: copies             warpgroup 1 (even, O left)            warpgroup 2 (odd, O right)
//   Q, then of each block two       S = Q k(0)^T                          S = Q k(1)^T
//   halves, each when its last      m, P(0) -> shared, barrier ---------> wait
//   reader has released it          O += P(0) k(0) left                   O += P(0) k(0) right
//                                   wait <-------------- barrier -------- m, P(1) -> shared
//                                   O += P(1) k(1) left                   O += P(1) k(1) right
//
// Both follow one running maximum. P takes the place of the last 64 channels of its block, which no value has. Of
// buffer 0 the left half is warpgroup 1's alone once S is there, and the right half with P is released by warpgroup 2;
// of buffer 1 the other way round: S begins with the half that is free first.
//
// Shared memory, bytes: Q [9][64 * 128] | K [2][9][64 * 128] | maxima, denominators, barriers, scan. Panels of 64
// channels, 128-byte swizzle.
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent.cuh"
#include "params/mla_decode.cuh"
#include "pipeline/warp_roles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
    static constexpr int kRows = kLatentRows, kKeys = 64;  // of a CTA, of a block
    static constexpr int kPanels = kHeadDim / 64, kHalfPanels = kHeadDimV / 128;
    static constexpr int kThreads = 384, kProducers = 128;
    static constexpr int kCluster = CLUSTER;  // CTAs that have other rows of the same keys, and bring each a part
    static_assert(kHeadDim % 64 == 0 && kHeadDimV == kHeadDim - 64 && kHeadDimV % 128 == 0, "P has a panel of its own");
};
constexpr uint32 kPanelBytes = 64 * 128, kBlockBytes = Config::kPanels * kPanelBytes;

struct SharedStorage {
    alignas(1024) uint8 q[kBlockBytes];
    alignas(1024) uint8 k[2][kBlockBytes];
    float m[2][Config::kRows];  // running maximum behind the last even and the last odd block
    float l[2][2][Config::kRows];  // of every other split: each warpgroup's part of the denominator
    uint64 full[2][2], empty[2][2];  // of a buffer's first and second half, as they are copied
    uint64 q_full, q_empty;
    ScanStorage<Config::kThreads> scan;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

// Named barriers: P of even and of odd blocks is there; both warpgroups are done with a split; each by itself.
enum Barrier : int32 { kEvenP = 1, kOddP = 2, kSplitEnd = 3, kAlone = 4 };

// The two halves of a buffer: first panel, and panels. The second has the last panel besides.
OA_DEVICE constexpr int first_panel(int buffer, int half) { return buffer == half ? 0 : Config::kHalfPanels; }

struct Split {
    int32 sequence;
    int32 begin, end, blocks;  // keys
    int32 seq_len, limit;  // end of the keys that are this launch's
    int32 slot;  // of the partial result; -1: these are all keys
    Queries queries;
};

// The splits of a CTA, one after the other: every role walks over them by itself.
struct SplitCursor {
    int32 at, end, sequence, before;

    OA_DEVICE bool next(const DecodeParams& p, const Partition& partition, Split& split) {
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
            split.limit = span.end;
            split.queries = span.queries;
            split.slot = stop - at == span.chunks ? -1 : partial_slot(p, partition, blockIdx.y, before, at);
            at = stop;
            // Blocks of rows that this sequence has not.
            if (int32(blockIdx.x / Config::kCluster) * Config::kCluster * Config::kRows >= split.queries.count * p.group)
                continue;
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

class Producer {
  public:
    OA_DEVICE Producer(const MlaDecodeParams& p, SharedStorage& smem)
        : params_(p), p_(p.decode), smem_(smem), chunk_(int32(threadIdx.x) & 7), row_(int32(threadIdx.x) >> 3) {}

    OA_DEVICE void run(SplitCursor cursor, const Partition& partition) {
        Split split;
        for (uint32 number = 0; cursor.next(p_, partition, split); ++number) {
            if (by_threads(params_)) look_up(split, 0);
            mbarrier_wait(smem_addr_of(&smem_.q_empty), (number & 1) ^ 1);
            copy_queries(split);
            mbarrier_arrive_after_copies(smem_addr_of(&smem_.q_full));
            if (by_threads(params_)) {
                for (int32 block = 0; block < split.blocks; ++block) copy_block(split, block);
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
    OA_DEVICE void look_up(const Split& split, int32 block) {
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

    OA_DEVICE void copy_queries(const Split& split) const {
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

    OA_DEVICE void copy_block(const Split& split, int32 block) {
        const int buffer = block & 1;
        const int32 rows = split.end - split.begin - block * Config::kKeys;
        const uint8* from[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) from[i] = p_.k + uint64(places_[i]) * p_.place_bytes + chunk_ * 16;
        if (block + 1 < split.blocks) look_up(split, block + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mbarrier_wait(smem_addr_of(&smem_.empty[buffer][half]), rounds_.parity(buffer) ^ 1);
            const int first = buffer == half ? 0 : Config::kHalfPanels;
            const uint32 to = smem_addr_of(smem_.k[buffer]);
#pragma unroll
            for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                const int panel = n == Config::kHalfPanels ? Config::kPanels - 1 : first + n;
#pragma unroll
                for (int i = 0; i < kSteps; ++i)
                    cp_async_16(to + panel * kPanelBytes + place(i), from[i] + panel * 128, row(i) < rows ? 16 : 0);
            }
            mbarrier_arrive_after_copies(smem_addr_of(&smem_.full[buffer][half]));
        }
        ++rounds_.of[buffer];
    }

    // A lane's chunk of a block: rows that are in one page.
    struct Chunk {
        int32 page, row;  // no page of the tensor map: zeros
        bool exists;
    };
    static constexpr int kOwnRows = Config::kKeys / Config::kCluster;  // of a block, that this CTA brings

    OA_DEVICE int32 chunk_row() const {
        return kOwnRows * (Config::kCluster == 1 ? 0 : cluster_rank()) + (int32(threadIdx.x) << params_.box_rows_log2);
    }
    OA_DEVICE Chunk chunk_of(const Split& split, int32 block) const {
        const int32 seen = p_.window_left < 0 ? 0 : split.seq_len - split.queries.count - p_.window_left;
        const int32 key = split.begin + block * Config::kKeys + chunk_row();
        if (int32(threadIdx.x) << params_.box_rows_log2 >= kOwnRows || key >= split.end) return {0, 0, false};
        if (key + (1 << params_.box_rows_log2) <= seen) return {p_.num_blocks, 0, true};
        const int32 index = quotient(key, p_.block_multiplier, p_.block_shift);
        int32 number = split.sequence;
        if (p_.block_table != nullptr) number = p_.block_table[int64(split.sequence) * p_.table_columns + index];
        return {number, key - index * p_.block_size, true};
    }
    // By TMA, to all CTAs of the cluster.
    OA_DEVICE void copy_chunks(const Split& split, int32 block, const Chunk& own) {
        const int buffer = block & 1, log2 = params_.box_rows_log2;
        const int32 rows = min_of(split.end - split.begin - block * Config::kKeys, Config::kKeys);
        const uint32 row_bytes = uint32((rows + (1 << log2) - 1) >> log2 << log2) * 128;  // of a panel
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32 bar = smem_addr_of(&smem_.full[buffer][half]);
            mbarrier_wait(smem_addr_of(&smem_.empty[buffer][half]), rounds_.parity(buffer) ^ 1);
            if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bar, row_bytes * (Config::kHalfPanels + half));
            __syncwarp();
            const int first = buffer == half ? 0 : Config::kHalfPanels;
            const uint32 to = smem_addr_of(smem_.k[buffer]) + chunk_row() * 128;
            if (own.exists)
#pragma unroll
                for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                    const int panel = n == Config::kHalfPanels ? Config::kPanels - 1 : first + n;
                    if constexpr (Config::kCluster == 1) {
                        tma_load_4d(to + panel * kPanelBytes, &params_.map, bar, panel * 64, own.row, 0, own.page);
                    } else {
                        tma_load_4d_multicast(to + panel * kPanelBytes, &params_.map, bar, (1 << Config::kCluster) - 1,
                                              panel * 64, own.row, 0, own.page);
                    }
                }
        }
        ++rounds_.of[buffer];
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    SharedStorage& smem_;
    const int32 chunk_, row_;  // 16 bytes of a panel's row, and the first row
    uint32 places_[kSteps];
    Rounds rounds_;
};

// Warpgroup kOwn of the two that compute.
template <int kOwn>
class Consumer {
    using Products = Wgmma<Config::Io, Config::kKeys>;
    using Pv = Wgmma<Config::Io, Config::kHeadDimV / 2>;
    static constexpr int kOutput = Config::kHeadDimV / 4, kScores = Config::kKeys / 2;

  public:
    OA_DEVICE Consumer(const MlaDecodeParams& p, SharedStorage& smem)
        : p_(p.decode),
          smem_(smem),
          clears_(!by_threads(p)),
          lane_(int32(threadIdx.x) & 31),
          row_((int32(threadIdx.x) >> 5 & 3) * 16 + (lane_ >> 2)),
          q_(wgmma_descriptor(operand(smem.q), 16, 1024)),
          k_(wgmma_descriptor(operand(smem.k[0]), 16, 1024)),
          v_(wgmma_descriptor(operand(smem.k[0]) + kOwn * Config::kHalfPanels * kPanelBytes, kPanelBytes, 1024)) {}

    OA_DEVICE void run(SplitCursor cursor, const Partition& partition) {
        Split split;
        for (uint32 number = 0; cursor.next(p_, partition, split); ++number) {
            begin(split);
            mbarrier_wait(smem_addr_of(&smem_.q_full), number & 1);
            fence_proxy_async();
            if (kOwn >= split.blocks) release_queries();
            for (int32 block = 0; block < split.blocks; block += 2) {
                if constexpr (kOwn == 0) {
                    even(split, block);
                } else {
                    odd(split, block);
                }
            }
            end(split, number & 1);
        }
    }

  private:
    // Without the number of the CTA in its cluster.
    OA_DEVICE static uint32 operand(const uint8* p) { return smem_addr_of(p) & 0x3ffff; }

    OA_DEVICE void begin(const Split& split) {
        const int32 flat = int32(blockIdx.x) * Config::kRows + row_;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            m_[r] = kLowest, l_[r] = 0.0f;
            const int32 token = min_of(token_of(p_, flat + 8 * r), split.queries.count - 1);
            ends_[r] = split.seq_len - split.queries.count + token + 1;
        }
#pragma unroll
        for (int i = 0; i < kOutput; ++i) o_[i] = 0.0f;
    }

    // Warpgroup 0: S and P of block `block`, and of O's left half this block and the next.
    OA_DEVICE void even(const Split& split, int32 block) {
        float s[kScores];
        uint32 probs[Config::kKeys / 16][4];
        scores<0>(s, split, block);
        float alpha[2];
        const bool grew = raise(s, alpha);
        note_maximum(0);
        probabilities(s, probs);
        share(probs, 0);
        named_barrier_arrive(kEvenP, 256);
        if (grew) rescale(alpha);
        clear_tail(split, block, 0);
        issue_own(probs, 0);
        wgmma_wait<0>();
        wgmma_pin(o_);
        release(smem_.empty[0][0]);
        if (block + 1 < split.blocks) {
            named_barrier_sync(kOddP, 256);
            if (follow(1, alpha)) rescale(alpha);
            wait_full(1, 1);
            clear_tail(split, block + 1, 1);
            issue_shared(1);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[1][1]);
            ++rounds_.of[1];
        }
        ++rounds_.of[0];
    }

    // Warpgroup 1: S and P of the block behind `block`, and of O's right half both.
    OA_DEVICE void odd(const Split& split, int32 block) {
        float s[kScores], alpha[2];
        const bool exists = block + 1 < split.blocks;
        if (exists) scores<1>(s, split, block + 1);
        named_barrier_sync(kEvenP, 256);
        if (follow(0, alpha)) rescale(alpha);
        wait_full(0, 1);
        clear_tail(split, block, 0);
        issue_shared(0);
        if (exists) {
            uint32 probs[Config::kKeys / 16][4];
            const bool grew = raise(s, alpha);
            note_maximum(1);
            probabilities(s, probs);
            share(probs, 1);
            named_barrier_arrive(kOddP, 256);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[0][1]);
            if (grew) rescale(alpha);
            clear_tail(split, block + 1, 1);
            issue_own(probs, 1);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[1][0]);
            ++rounds_.of[1];
        } else {
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[0][1]);
        }
        ++rounds_.of[0];
    }

    // What threads have copied is read by wgmma.
    OA_DEVICE void wait_full(int buffer, int half) const {
        mbarrier_wait(smem_addr_of(&smem_.full[buffer][half]), rounds_.parity(buffer));
        fence_proxy_async();
    }
    OA_DEVICE void release(uint64& bar) const {
        if constexpr (Config::kCluster == 1) {
            if (lane_ == 0) mbarrier_arrive(smem_addr_of(&bar));
        } else {
            if (lane_ < Config::kCluster) mbarrier_arrive_cluster(smem_addr_of(&bar), lane_);
        }
    }
    OA_DEVICE void release_queries() const {
        if (lane_ == 0) mbarrier_arrive(smem_addr_of(&smem_.q_empty));
    }
    // TMA brings whole chunks, and leaves what is behind them: rows that are no keys of the split would be NaN times 0.
    OA_DEVICE void clear_tail(const Split& split, int32 block, int buffer) const {
        const int32 rows = split.end - split.begin - block * Config::kKeys;
        if (!clears_ || rows >= Config::kKeys) return;
        const uint32 to = smem_addr_of(smem_.k[buffer]) + kOwn * Config::kHalfPanels * kPanelBytes + rows * 128;
        for (int32 i = int32(threadIdx.x) & 127; i < (Config::kKeys - rows) * 8; i += 128)
#pragma unroll
            for (int panel = 0; panel < Config::kHalfPanels; ++panel)
                store_shared4(to + panel * kPanelBytes + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        named_barrier_sync(kAlone + kOwn, 128);
    }

    // S of a block in base-2 units; keys that a row does not see are -inf.
    template <int kBuffer>
    OA_DEVICE void scores(float (&s)[kScores], const Split& split, int32 block) const {
        wgmma_discard(s);
        wait_full(kBuffer, 0);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 1) wait_full(kBuffer, 1);
#pragma unroll
            for (int n = 0; n < Config::kHalfPanels + half; ++n) {
                const int panel = n == Config::kHalfPanels ? Config::kPanels - 1 : first_panel(kBuffer, half) + n;
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const uint32 at = panel * kPanelBytes + step * 32;
                    Products::ss(s, q_.at(at), k_.at(kBuffer * kBlockBytes + at), half + n + step != 0);
                }
            }
        }
        wgmma_commit();
        wgmma_pin(s);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (block + 2 >= split.blocks) release_queries();
        const int32 first = split.begin + block * Config::kKeys;
        const float c = p_.softmax_scale * kLog2e;
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= c;
        if (p_.softcap > 0.0f) {
            const float inverse = kLn2 / p_.softcap, back = p_.softcap * kLog2e;
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
        }
        // Every row sees the keys before this one, but for the window.
        const int32 seen_by_all = min_of(split.seq_len - split.queries.count + 1, split.end);
        const bool is_behind = first + Config::kKeys > seen_by_all;
        if (is_behind || (p_.window_left >= 0 && first < split.seq_len - 1 - p_.window_left)) mask(s, split, first);
    }
    OA_DEVICE void mask(float (&s)[kScores], const Split& split, int32 first) const {
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int32 key = first + 8 * n + 2 * (lane_ & 3) + x;
                    const bool hidden = key >= min_of(ends_[r], split.end) ||
                                        (p_.window_left >= 0 && int64(key) < int64(ends_[r]) - 1 - p_.window_left);
                    if (hidden) s[4 * n + 2 * r + x] = neg_inf();
                }
    }

    // Raises the maximum where a score is far above it; returns whether O has to follow, by `alpha`.
    OA_DEVICE bool raise(const float (&s)[kScores], float (&alpha)[2]) {
        constexpr float kSlack = 8.0f;  // as `OnlineSoftmax`
        float top[2];
        bool grew = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int n = 4; n < kScores; n += 4) top[r] = fmaxf(top[r], fmaxf(s[n + 2 * r], s[n + 2 * r + 1]));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            grew |= top[r] - m_[r] > kSlack;
        }
        if (!__any_sync(0xffffffffu, grew)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) move_to(r, fmaxf(m_[r], top[r]), alpha[r]);
        return true;
    }
    OA_DEVICE void move_to(int r, float m, float& alpha) {
        alpha = exp2_approx(m_[r] - m);
        m_[r] = m;
        l_[r] *= alpha;
    }
    // Tells the other warpgroup.
    OA_DEVICE void note_maximum(int which) const {
        if ((lane_ & 3) != 0) return;
        smem_.m[which][row_] = m_[0];
        smem_.m[which][row_ + 8] = m_[1];
    }
    // Takes over the other warpgroup's maximum; returns whether O has to follow.
    OA_DEVICE bool follow(int which, float (&alpha)[2]) {
        const float m[2] = {smem_.m[which][row_], smem_.m[which][row_ + 8]};
        if (!__any_sync(0xffffffffu, m[0] != m_[0] || m[1] != m_[1])) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) move_to(r, m[r], alpha[r]);
        return true;
    }
    OA_DEVICE void rescale(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < kOutput; ++i) o_[i] *= alpha[i >> 1 & 1];
    }

    // P, as left operand of a product: the layout of S is that of P.
    OA_DEVICE void probabilities(const float (&s)[kScores], uint32 (&probs)[Config::kKeys / 16][4]) {
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float p0 = exp2_approx(s[4 * n + 2 * r] - m_[r]);
                const float p1 = exp2_approx(s[4 * n + 2 * r + 1] - m_[r]);
                l_[r] += p0 + p1;
                probs[n >> 1][2 * (n & 1) + r] = pack2(Config::Io{}, p0, p1);
            }
    }
    // To shared memory, where the last panel of the buffer was. All four warps' products have read that.
    OA_DEVICE void share(const uint32 (&probs)[Config::kKeys / 16][4], int buffer) const {
        named_barrier_sync(kAlone + kOwn, 128);
        const int32 warp_row = row_ - (lane_ >> 2) + (lane_ & 15);
        const uint32 to = smem_addr_of(smem_.k[buffer]) + (Config::kPanels - 1) * kPanelBytes + warp_row * 128;
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
            stmatrix_x4(to + (((2 * step + (lane_ >> 4)) ^ (lane_ & 7)) << 4), probs[step]);
        fence_proxy_async();
    }

    // O += P V of this warpgroup's own P, and of the other's.
    OA_DEVICE void issue_own(const uint32 (&probs)[Config::kKeys / 16][4], int buffer) {
        wgmma_pin(o_);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
            Pv::template rs<kMnMajor>(o_, probs[step], v_.at(buffer * kBlockBytes + step * 16 * 128), 1);
        wgmma_commit();
        wgmma_pin(o_);
    }
    OA_DEVICE void issue_shared(int buffer) {
        wgmma_pin(o_);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
            Pv::template ss<kKMajor, kMnMajor>(
                o_, k_.at(buffer * kBlockBytes + (Config::kPanels - 1) * kPanelBytes + step * 32),
                v_.at(buffer * kBlockBytes + step * 16 * 128), 1);
        wgmma_commit();
        wgmma_pin(o_);
    }

    // Of all keys O and LSE, else a partial result. which: of the two places for denominators.
    OA_DEVICE void end(const Split& split, int which) {
        sum_of_quad(l_);
        if ((lane_ & 3) == 0) smem_.l[which][kOwn][row_] = l_[0], smem_.l[which][kOwn][row_ + 8] = l_[1];
        named_barrier_sync(kSplitEnd, 256);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row_ + 8 * r, token = token_of(p_, flat);
            if (token >= split.queries.count) continue;
            const int32 head = flat - token * p_.group;
            const float l = smem_.l[which][0][row_ + 8 * r] + smem_.l[which][1][row_ + 8 * r];
            const int32 column = kOwn * (Config::kHeadDimV / 2) + 2 * (lane_ & 3);
            if (split.slot < 0) {
                const RowResult result = finish_row(m_[r], l, sink_log2<Config::Io>(p_.sinks, p_.sinks_kind, head));
                if (kOwn == 0 && (lane_ & 3) == 0 && p_.lse != nullptr)
                    p_.lse[lse_place(p_, split.sequence, head, split.queries.first, token)] = result.lse;
                uint16* to = p_.o + split.sequence * p_.o_stride_b + (split.queries.first + token) * p_.o_stride_s +
                             head * p_.o_stride_h + column;
#pragma unroll
                for (int n = 0; n < kOutput / 4; ++n)
                    *reinterpret_cast<uint32*>(to + 8 * n) = pack2(
                        Config::Io{}, o_[4 * n + 2 * r] * result.o_scale, o_[4 * n + 2 * r + 1] * result.o_scale);
            } else {
                const int64 row = int64(split.slot) * p_.num_row_blocks * Config::kRows + flat;
                if (kOwn == 0 && (lane_ & 3) == 0)
                    *reinterpret_cast<float2*>(p_.partial_ml + 2 * row) = make_float2(m_[r], l);
                float* to = p_.partial_o + row * Config::kHeadDimV + column;
#pragma unroll
                for (int n = 0; n < kOutput / 4; ++n)
                    *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o_[4 * n + 2 * r], o_[4 * n + 2 * r + 1]);
            }
        }
    }

    const DecodeParams& p_;
    SharedStorage& smem_;
    const bool clears_;
    const int32 lane_, row_;  // the lane's first row
    const WgmmaDescriptor q_, k_, v_;
    Rounds rounds_;
    float m_[2], l_[2];
    int32 ends_[2];  // keys that a row sees end here
    float o_[kOutput];
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) mla_decode_sm90(
    const __grid_constant__ MlaDecodeParams params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const DecodeParams& p = params.decode;
    launch_dependents();  // decode_combine waits for the end of this kernel
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) {
            mbarrier_init(smem_addr_of(&smem.full[i >> 1][i & 1]), by_threads(params) ? Config::kProducers : 1);
            mbarrier_init(smem_addr_of(&smem.empty[i >> 1][i & 1]), 4 * Config::kCluster);
        }
        mbarrier_init(smem_addr_of(&smem.q_full), Config::kProducers);
        mbarrier_init(smem_addr_of(&smem.q_empty), 8);
        fence_barrier_init();
    }
    Scan<Config::kThreads, kAllRows> scan(p, smem.scan);
    const Partition partition(scan.total, p);
    SplitCursor cursor;
    cursor.at = partition.begin(blockIdx.y), cursor.end = partition.begin(blockIdx.y + 1);
    if (cursor.at >= cursor.end) return;  // so do the others of the cluster
    scan.locate(p, cursor.at, smem.scan);
    cursor.sequence = smem.scan.sequence, cursor.before = smem.scan.before;
    if constexpr (Config::kCluster > 1) cluster_sync();
    run_roles<2, 4>([&](int) { Producer(params, smem).run(cursor, partition); },
                    [&](int32 group) {
                        if (group == 0) {
                            Consumer<0>(params, smem).run(cursor, partition);
                        } else {
                            Consumer<1>(params, smem).run(cursor, partition);
                        }
                    });
    if constexpr (Config::kCluster > 1) cluster_sync();  // others may still arrive here, and copy to here
}
