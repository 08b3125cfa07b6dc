// Exact attention forward on Hopper's wgmma, sm_90a only. Source: FlashAttention-3 (Shah et al. 2024), section 3.
//
//   S = softmax_scale * Q K^T;  P = softmax([S, sink]);  O = P V;  LSE = log(sum(exp(S)) + exp(sink))
//
// q: [batch, seqlen_q, num_q_heads, head_dim]   k: [batch, seqlen_k, num_kv_heads, head_dim]   v, o: as k and q, with
// head_dim_v; strides that tensor maps take; VARLEN: packed [rows, heads, head_dim]. lse: [batch, num_q_heads,
// seqlen_q] or [heads, rows], natural logarithm, fp32. Below HEAD_DIM and HEAD_DIM_V, TMA fills with zeros.
//
// A persistent kernel, one CTA an SM, walks over tiles of BLOCK_M = 64 * NUM_CONSUMERS query rows of one head
// (scheduler/persistent.cuh), keys from the last visible tile to the first.
//   warpgroup 0: producer, one lane copies     warpgroups 1 ..: consumers, 64 query rows each: S, softmax, O
//
//   producer                                        consumer g
//   wait outer.empty <----------------------------- arrive outer.empty: the tile's last S is there
//   TMA Q -> outer.full --------------------------> wait outer.full
//   for i = 0 .. N:                                 for i = 0 .. N:
//     wait inner.empty <----------------------------- arrive inner.empty: S(i) and O of P(i-1) are there
//     TMA K(i), V(i-1) -> inner.full ---------------> wait inner.full
//                                                     wait named barrier 1 + g (ping-pong)
//                                                       S(i) = Q K(i)^T;  O += P(i-1) V(i-1)
//                                                     arrive at the next warpgroup's
//                                                     P(i) = softmax(S(i)), under the others' products
//
// A consumer passes over key tiles that none of its rows sees, and may be a tile of queries ahead. PAGED: K and V in
// pages (attention/paged_keys.cuh). SPLIT_KEYS: a CTA takes a part of a tile's keys (scheduler/split_tiles.cuh);
// attn_combine_sm80 merges. Of packed sequences it takes an even share of all (scheduler/stream_k.cuh),
// attn_combine_packed_sm90 merges. CTAS_PER_SM: of more than one, each with one warp that copies, behind its consumers,
// and no ping-pong. SCORE_MODS: softcap, masks and any softmax_scale between product and softmax
// (attention/tile_score_mods.cuh). Steps are those of a list where a mask hides whole tiles; what it needs is copied
// beside K (attention/mask_copies.cuh). Shared memory, bytes: masks, if any | Q [NUM_Q_STAGES][BLOCK_M * PANELS * 128]
// | K [NUM_STAGES][BLOCK_N * PANELS * 128] | V [same, with V's panels] | barriers. Panels: 64 columns, 128-byte
// swizzle; those beyond the head's are not read. Dropout: attention/dropout.cuh.
#include "attention/fwd_modes.cuh"
#include "attention/fwd_products.cuh"
#include "attention/fwd_roles.cuh"
#include "attention/mask_copies.cuh"
#include "attention/paged_keys.cuh"
#include "attention/partial_epilogue.cuh"
#include "attention/score_mods.cuh"
#include "attention/tile_score_mods.cuh"
#include "attention/warp_epilogue.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_fwd.cuh"
#include "pipeline/warp_roles.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/persistent.cuh"
#include "attention/dropout.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;  // of q and k, of v and o
    static constexpr int kConsumers = NUM_CONSUMERS;
    static constexpr int kCtas = CTAS_PER_SM;  // more than one: another CTA's products run under a softmax
    static constexpr bool kPingPong = kCtas == 1;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kInnerStages = NUM_STAGES;
    static constexpr int kOuterStages = NUM_Q_STAGES;
    static constexpr bool kVarlen = VARLEN;  // packed sequences
    static constexpr bool kPaged = PAGED;  // of which K and V lie in pages
    static constexpr bool kScoreMods = SCORE_MODS, kSoftcap = SOFTCAP;  // softcap, masks, biases, scale <= 0
    static constexpr bool kLists = MASK_LISTS;  // with kScoreMods: steps may be those of a list
    // A tile's base is found before its first exponentials, of few steps a large part; not where that spills.
    static constexpr bool kRaisesFirst = kScoreMods && !VARLEN && CTAS_PER_SM > 1 && BIAS_BYTES != 4;
    static constexpr bool kWaitsForMasks = kScoreMods && !kLists && !VARLEN;  // a kernel ahead makes what is beside K
    static constexpr bool kSplitKeys = SPLIT_KEYS;
    static constexpr bool kRotateHeads = kScoreMods, kMeetAtTiles = kScoreMods;
    static constexpr int kBiasBytes = BIAS_BYTES;  // of an element of a bias tile; 0: none
    static constexpr int kThreads = 128 * kConsumers + (kCtas == 1 ? 128 : 32);
    static constexpr int kPanels = (kHeadDim + 63) / 64, kPanelsV = (kHeadDimV + 63) / 64;
    static constexpr int kNTiles = kBlockN / 8, kDTiles = kHeadDimV / 8;
    // After how many of a product's k steps the next warpgroup may issue. With four there is always one that is ready.
    static constexpr int kPassStep = kConsumers == 4 ? kBlockN / 32 : kBlockN / 16;
    static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kBlockN % 16 == 0, "whole groups of output blocks");
    static_assert(!kScoreMods || kBlockN == 64, "tiles of masks");
    static_assert(!kPaged || (kVarlen && !kLists && BIAS_BYTES == 0), "pages of packed sequences, without masks");
    static_assert(!kSplitKeys || !kScoreMods || kLists != kVarlen, "lists of dense batches, none of packed sequences");
    static_assert((kCtas == 1 ? 2 : 1) <= kConsumers && kConsumers <= 4, "64 query rows each");
};

using Params = FwdSm90Params<Config, kHasScoreMod>::Type;
using Tile = TileOf<Config>;
using Masks = MaskTiles<Config>;
struct SharedStorage : Select<Config::kScoreMods, MaskTiles<Config>::Storage, Nothing>::Type {
    alignas(1024) uint8 q[Config::kOuterStages][Config::kBlockM * Config::kPanels * 128];
    alignas(1024) uint8 k[Config::kInnerStages][Config::kBlockN * Config::kPanels * 128];
    alignas(1024) uint8 v[Config::kInnerStages][Config::kBlockN * Config::kPanelsV * 128];
    RoleStorage<Config> roles;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");
constexpr uint32 kQBytes = Config::kBlockM * Config::kPanels * 128;
constexpr uint32 kKBytes = Config::kBlockN * Config::kPanels * 128;
constexpr uint32 kVBytes = Config::kBlockN * Config::kPanelsV * 128;
constexpr uint32 kKvPanelBytes = Config::kBlockN * 128;

class Producer : public ForwardProducer<Config, Producer> {
    using Base = ForwardProducer<Config, Producer>;

  public:
    static constexpr uint32 kQBytes = ::kQBytes;
    OA_DEVICE uint32 k_bytes(const FwdTile& t, int32 n) const { return bytes_of<Config::kPanels>(t, n); }
    OA_DEVICE uint32 v_bytes(const FwdTile& t, int32 n) const { return bytes_of<Config::kPanelsV>(t, n); }

    OA_DEVICE Producer(const Params& params, SharedStorage& smem, const RoleBarriers<Config>& bars)
        : ForwardProducer(params.fwd, params.tiles, smem.roles, bars), params_(params) {}

    OA_DEVICE void prefetch_maps() const {
        tma_prefetch(&params_.map_q);
        tma_prefetch(&params_.map_k);
        tma_prefetch(&params_.map_v);
    }
    OA_DEVICE void copy_tile(const Tile& t, const Span& keys) { copy_steps(params_, t, keys); }
    // Templates, as store below: of plain tiles the other branch would not compile.
    template <typename T>
    OA_DEVICE void copy_q(const T& t, int32 stage, uint32 bar) const {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) {
            uint32 smem = smem_addr_at(&SharedStorage::q) + stage * kQBytes + c * Config::kBlockM * 128;
            if constexpr (Config::kSplitKeys && Config::kVarlen) {
                tma_load_5d(smem, &params_.map_q, bar, c * 64, 0, t.q_begin + query_of(t, t.m0), t.head_idx, 0);
            } else if constexpr (Config::kSplitKeys) {
                tma_load_5d(smem, &params_.map_q, bar, c * 64, 0, t.m0 / t.pack, t.head_idx, t.batch_idx);
            } else {
                tma_load_4d(smem, &params_.map_q, bar, c * 64, t.q_begin + t.m0, t.head_idx, t.batch_idx);
            }
        }
    }
    OA_DEVICE void copy_k(const FwdTile& t, int32 kv_head, int32 n, int32 stage, uint32 bar) const {
        const uint32 smem = smem_addr_at(&SharedStorage::k) + stage * kKBytes;
        if constexpr (Config::kPaged) {
            pages_.template copy<Config::kPanels, false>(p_, t, &params_.map_k, n, kv_head,
                                                         p_.k + kv_head * p_.k_stride_h, p_.k_stride_b, p_.k_stride_s,
                                                         p_.head_dim_qk, smem, bar);
        } else {
            copy_keys<Config::kPanels>(t, kv_head, n, smem, &params_.map_k, bar);
        }
    }
    OA_DEVICE void copy_v(const FwdTile& t, int32 kv_head, int32 n, int32 stage, uint32 bar) const {
        const uint32 smem = smem_addr_at(&SharedStorage::v) + stage * kVBytes;
        if constexpr (Config::kPaged) {
            pages_.template copy<Config::kPanelsV, true>(p_, t, &params_.map_v, n, kv_head,
                                                         p_.v + kv_head * p_.v_stride_h, p_.v_stride_b, p_.v_stride_s,
                                                         p_.head_dim, smem, bar);
        } else {
            copy_keys<Config::kPanelsV>(t, kv_head, n, smem, &params_.map_v, bar);
        }
    }
    using Pages = PagedKeys<Config::kBlockN, producer_warps<Config>()>;  // with kPaged
    OA_DEVICE bool by_threads() const { return Pages::by_threads(p_); }
    OA_DEVICE void read_table(const Tile& t, int32 n, bool exists) { pages_.read_table(p_, t, n, exists); }

  private:
    template <typename P>
    OA_DEVICE void copy_steps(const P& params, const Tile& t, const Span& keys) {
        if constexpr (Config::kScoreMods) {
            const ListSteps steps = TileScoreMods<Config>::steps_of(params.mods, list_, t, keys);
            this->template copy_listed<Masks, Config::kWaitsForMasks>(params, t, steps);
        } else {
            Base::copy_tile(t, keys);
        }
    }
    template <int kPanels>
    OA_DEVICE uint32 bytes_of(const FwdTile& t, int32 n) const {
        if constexpr (Config::kPaged) return Pages::template bytes<kPanels>(p_, t, n);
        return kPanels * kKvPanelBytes;
    }
    template <int kPanels>
    OA_DEVICE void copy_keys(const FwdTile& t, int32 kv_head, int32 n, uint32 smem, const TensorMap* map,
                             uint32 bar) const {
#pragma unroll
        for (int c = 0; c < kPanels; ++c)
            tma_load_4d(smem + c * kKvPanelBytes, map, bar, c * 64, t.k_begin + n * Config::kBlockN, kv_head,
                        t.batch_idx);
    }

    const Params& params_;
    Pages pages_;
};

class Consumer : public ForwardConsumer<Config, Consumer>, FwdProducts<Config>, ForwardDropout<Config::kBlockN> {
    using Base = ForwardConsumer<Config, Consumer>;
    using Products = FwdProducts<Config>;
    using Steps = StepCursor<Config::kLists>;
    using Products::issue_pv, Products::issue_qk, Products::probabilities;
    using typename Products::Output, typename Products::Probabilities, typename Products::Scores;

  public:
    struct Rows {
        Output o;
        RowState<> softmax;

        OA_DEVICE Rows() {
#pragma unroll
            for (int i = 0; i < Config::kDTiles * 4; ++i) o[i] = 0.0f;
        }
    };

    OA_DEVICE Consumer(const Params& params, SharedStorage& smem, const RoleBarriers<Config>& bars, int32 group)
        : ForwardConsumer(params.fwd, params.tiles, smem.roles, bars, group),
          ForwardDropout<Config::kBlockN>(params),
          params_(params),
          q_(wgmma_descriptor(smem_addr_at(&SharedStorage::q) + group * 64 * 128, 16, 1024)),
          k_(wgmma_descriptor(smem_addr_at(&SharedStorage::k), 16, 1024)),
          v_(wgmma_descriptor(smem_addr_at(&SharedStorage::v), kKvPanelBytes, 1024)) {}

    template <typename Rows>
    OA_DEVICE void attend_tile(const Tile& t, const Span& keys, int32 warp_row, Rows& rows) {
        if constexpr (Config::kScoreMods) {
            attend_listed(params_, t, keys, warp_row, rows);
        } else {
            Base::attend_tile(t, keys, warp_row, rows);
        }
    }

    OA_DEVICE void attend(const Tile& t, const Span& keys, int32 i, int32 warp_row, Rows& state) {  // steps from i on
        Output& o = state.o;
        RowState<>& rows = state.softmax;
        const int32 num_tiles = keys.end - keys.first;
        // Rows of dense batches beyond the end are zeros, whose scores never grow.
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        const float c[2] = {p_.softmax_scale * kLog2e, p_.softmax_scale * kLog2e};
        const WgmmaDescriptor q = q_.next(outer_at_.stage * kQBytes);
        auto pass_on = [&] { ping_pong_.pass_on(); };
        auto nothing = [] {};
        Scores s;
        Probabilities probs;
        float alpha[2], sum[2];
        begin_tile(t.sequence, t.head_idx, lane_, warp_row / 16, keys.end - 1 - i);
        wait_outer();
        wait_inner();
        ping_pong_.wait();
        issue_qk(s, q, k_.next(inner_at_.stage * kKBytes));
        ping_pong_.pass_on();
        find_next();
        wgmma_wait<0>();
        wgmma_pin(s);
        release_inner();
        if (i == num_tiles - 1) release_outer();
        if (is_masked(keys, i)) mask_edges(s, p_, t, warp_row, (keys.end - 1 - i) * Config::kBlockN, lane_);
        rows.raise(s, c, alpha);
        probabilities(rows, s, c, probs, sum), drop(probs);
        rows.add(sum);
        clear_foreign_rows(t, keys.end - 1 - i);

        // S(i) and O += P(i - 1) V(i - 1).
        auto products = [&] {
            ping_pong_.wait();
            issue_qk(s, q, k_.next(inner_at_.stage * kKBytes));
            issue_pv(o, probs, v_.next(inner_at_.stage * kVBytes), pass_on);
            find_next();  // under the products
            wgmma_wait<0>();
            wgmma_pin(s);
            wgmma_pin(o);
            release_inner();
        };
        auto redo = [&] {
            rows.raise(s, c, alpha);
            rescale(o, alpha);
            probabilities(rows, s, c, probs, sum), drop(probs);
        };
        int32 special = next_special(keys, i);
        bool is_full = false;
        for (++i; i < num_tiles;) {
            if (!is_full) wait_inner();
            if (i >= special) {
                products();
                // The last scores are there: the producer may fetch the next tile's Q.
                if (i == num_tiles - 1) release_outer();
                if (is_masked(keys, i)) mask_edges(s, p_, t, warp_row, (keys.end - 1 - i) * Config::kBlockN, lane_);
                special = next_special(keys, i);
                probabilities(rows, s, c, probs, sum), drop(probs);
                if (__any_sync(0xffffffffu, RowState<>::too_large(sum, own))) redo();
                is_full = is_inner_full();
            } else {
                // Rare cases leave the loop: a jump over them costs ten cycles a step and more. They come back to the
                // same products, which all four warps issue by one instruction. Lanes see barriers apart: a vote.
                bool again;
                for (;;) {
                    products();
                    probabilities(rows, s, c, probs, sum), drop(probs);
                    is_full = is_inner_full();
                    again = RowState<>::too_large(sum, own);
                    if (__any_sync(0xffffffffu, again || !is_full || i + 1 >= special)) break;
                    rows.add(sum);
                    ++i;
                }
                if (__any_sync(0xffffffffu, again)) redo();
            }
            rows.add(sum);
            ++i;
        }
        if (!is_full) wait_inner();
        issue_pv(o, probs, v_.next(inner_at_.stage * kVBytes), nothing);
        wgmma_wait<0>();
        wgmma_pin(o);
        release_inner();
    }

    template <typename T>
    OA_DEVICE void store(const T& t, int32 warp_row, Rows& state) const {
        RowState<>& rows = state.softmax;
        rows.reduce();
        if constexpr (Config::kSplitKeys) {
            note_cut<Config::kVarlen>(params_, t, warp_row, lane_);
            store_split_rows<Config::Io>(state.o, rows.m2, rows.l, params_, p_, t, t.num_splits,
                                         first_partial_row<Config::kBlockM>(p_, list_, t), warp_row, lane_);
        } else {
            if constexpr (kHasDropout) scale(state.o);
            store_rows<Config::Io>(state.o, rows.m2, rows.l, {0.0f, 0.0f}, p_, t, warp_row, lane_);
        }
    }

  private:
    // As attend, of a list's tiles. This warpgroup's rows see nothing of some of them: it takes the others in runs. A
    // run begins with S alone and ends with O += P V alone, on the stage of the tile that it does not see.
    template <typename P>
    OA_DEVICE void attend_listed(const P& params, const Tile& t, const Span& keys, int32 warp_row, Rows& state) {
        const ScoreModParams& f = params.mods;
        const ListSteps steps = TileScoreMods<Config>::steps_of(f, list_, t, keys);
        Steps at(steps);
        const int32 own_end = own_end_of(t, Config::kSplitKeys ? 0 : keys.first);  // lists are divided by themselves
        for (; at.left > 0 && ListSteps::tile(at.entry()) >= own_end; at.advance()) pass_over_step();
        const uint32 full_tiles = max_of(keys.full_end - keys.full_first, 0);
        Output& o = state.o;
        RowState<>& rows = state.softmax;
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        const WgmmaDescriptor q = q_.next(outer_at_.stage * kQBytes);
        const int32 common_kinds = TileScoreMods<Config>::common_kinds(f);
        // Kinds of tiles, a bit each, whose scores take no rare case now. Where the base decides, none has one yet.
        int32 common = TileScoreMods<Config>::kMindsBase ? 0 : common_kinds;
        Scores s;
        Probabilities probs;
        TileScoreMods<Config> mods(f, steps);
        const NearCap near_cap(f);
        float alpha[2], sum[2], c[2];
        bool rare = false, ends = false;  // this step takes the rare case; the next tile is not of this run

        const int32 group = Config::kConsumers == 1 ? 0 : group_;
        const bool no_edges = TileScoreMods<Config>::hides_edges(p_, f);
        auto is_edge = [&] { return !no_edges && uint32(ListSteps::tile(at.entry()) - keys.full_first) >= full_tiles; };
        auto first_key = [&] { return ListSteps::tile(at.entry()) * Config::kBlockN; };
        auto place = [&] { return ModPlace{t, warp_row + (lane_ >> 2), first_key() + 2 * (lane_ & 3)}; };
        auto release = [&](uint32 used) {
            __syncwarp();  // all lanes have read what is beside K
            release_inner(used);
        };
        // Under the products of a step: whatever its softmax needs beside them.
        auto load_mods = [&] {
            mods.load(f, at.entry(), inner_at_.stage, group);
            ends = (at.left == 1) | (!mods.kOneKind && ListSteps::kind(at.next(), group) == kTileEmpty);
            bool special = is_edge() | (at.left == 1) | !(common >> mods.kind & 1);
            rare = __any_sync(0xffffffffu, special);
        };
        for (bool is_first = true;; is_first = false) {
            for (; !mods.kOneKind && at.left > 0 && ListSteps::kind(at.entry(), group) == kTileEmpty; at.advance())
                pass_over_step();
            if (at.left == 0) break;
            wait_outer();
            wait_inner();
            ping_pong_.wait();
            issue_qk(s, q, k_.next(inner_at_.stage * kKBytes));
            ping_pong_.pass_on();
            load_mods();
            wgmma_wait<0>();
            wgmma_pin(s);
            rare = true;
            bool again = false;
            for (;;) {
                // S(i) is there and takes the rare case, or its softmax is to be done again, or nothing of both.
                if (Config::kVarlen ? __any_sync(0xffffffffu, rare) : rare) {  // a vote: as for key_bias in apply_mods
                    if (at.left == 1) release_outer();
                    bool near = true;
                    // Which of softcap's polynomials a tile takes must not hang on the next sequence.
                    if (Config::kVarlen && Config::kSoftcap && is_edge())
                        forget_keys(s, t.seqlen_k, first_key(), lane_);
                    c[0] = c[1] =
                        mods.apply_mods(params, s, place(), inner_at_.stage, group, lane_, own, near, release);
                    if (is_edge()) mods.mask_ends(s, p_, t, warp_row, first_key(), lane_);
                    if (!near) common = 0;
                    // The base of a tile's first softmax is too low, which the sum tells.
                    again = Config::kRaisesFirst && is_first;
                    if (!again) {
                        probabilities(rows, s, c, probs, sum);
                        again = RowState<>::too_large(sum, own);
                    }
                }
                if (__any_sync(0xffffffffu, again)) {
                    if (!rare) {
                        if constexpr (mods.kNearCap) {
                            bool near = true;
                            c[0] = c[1] = softcap_scores(s, f, own, near).base2;
                            if (!near) common = 0;
                        } else if constexpr (mods.kMindsBase) {
                            mods.refine(s, p_, t, place(), sum);
                            c[0] = c[1] = 1.0f;
                        }
                    }
                    rows.raise(s, c, alpha);
                    if (!(mods.kOneKind && is_first)) rescale(o, alpha);
                    probabilities(rows, s, c, probs, sum);
                    if (mods.kMindsBase)
                        common = __all_sync(0xffffffffu, mods.is_common(rows.m2, own)) ? common_kinds : 0;
                }
                if (Config::kVarlen && is_first) clear_foreign_rows(t, ListSteps::tile(at.entry()));
                is_first = false;
                wait_inner();
                if (__any_sync(0xffffffffu, ends)) break;
                // The common steps: what is rare leaves the loop, and comes back to the same products (see attend).
                for (;;) {
                    rows.add(sum);
                    at.advance();
                    ping_pong_.wait();
                    issue_qk(s, q, k_.next(inner_at_.stage * kKBytes));
                    issue_pv(o, probs, v_.next(inner_at_.stage * kVBytes), [&] { ping_pong_.pass_on(); });
                    load_mods();
                    wgmma_wait<0>();
                    wgmma_pin(s);
                    wgmma_pin(o);
                    if (rare) break;
                    if (!mods.kReadsLate) release(mods.loaded());
                    if constexpr (mods.kNearCap) {
                        constexpr int kTops = Config::kVarlen ? 2 : 1;
                        int32 top[kTops], limit = __float_as_int(near_cap.limit);
                        exponentiate_near(s, near_cap, rows.m2, sum, top, typename Products::Put{probs});
                        again = (own[0] & (top[0] > limit)) | (own[1] & (top[kTops - 1] > limit));
                    } else {
                        uint32 used = 0;
                        c[0] = c[1] = mods.apply(params, s, place(), inner_at_.stage, group, lane_, used);
                        if (mods.kReadsLate) release(used);
                        probabilities(rows, s, c, probs, sum);
                        again = false;
                    }
                    again |= RowState<>::too_large(sum, own);
                    // Without a branch among them: the compiler would no longer know that warps stay together.
                    bool leaves = again | ends | !is_inner_full();
                    if (__any_sync(0xffffffffu, leaves)) break;
                }
            }
            rows.add(sum);
            at.advance();
            const bool in_list = __any_sync(0xffffffffu, at.left > 0);
            if (in_list) ping_pong_.wait();
            issue_pv(o, probs, v_.next(inner_at_.stage * kVBytes), [&] {
                if (in_list) ping_pong_.pass_on();
            });
            wgmma_wait<0>();
            wgmma_pin(o);
            release_inner();
            if (mods.kOneKind || !in_list) return;
            at.advance();
        }
        // The last tile of keys is not this warpgroup's, or there is none.
        if (steps.count > 0) {
            wait_inner();
            release_inner();
        }
        wait_outer();
        release_outer();
    }

    // Of tile n, the first, before its product with V, in the next stage: no other can be the sequence's last tile.
    OA_DEVICE void clear_foreign_rows(const FwdTile& t, int32 n) const {
        if constexpr (Config::kVarlen) {
            int32 valid_rows = t.seqlen_k - n * Config::kBlockN;
            if (valid_rows < Config::kBlockN) {
                wait_inner();
                Products::clear_tail(smem_addr_at(&SharedStorage::v) + inner_at_.stage * kVBytes, valid_rows, group_);
            }
        }
    }

    const Params& params_;
    WgmmaDescriptor q_, k_, v_;  // of the first stages
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) attn_fwd_sm90(
    const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    RoleBarriers<Config> bars(smem_addr_at(&SharedStorage::roles));
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw);
        bars.init(Config::kPaged ? Producer::Pages::arrivals(params.fwd) : 1);
        note_no_cut<Config::kSplitKeys && Config::kVarlen>(params);
    }
    __syncthreads();
    auto produce = [&](int lane) {
        Producer(params, smem, bars).run(lane);
        // At the latest: every CTA has to. Over pages the last one, as decode_sm80 may run beside this kernel.
        if (Config::kWaitsForMasks || (Config::kPaged && blockIdx.x == gridDim.x - 1)) wait_for_kernel_ahead();
    };
    auto consume = [&](int32 group) { Consumer(params, smem, bars, group).run(); };
    if constexpr (Config::kCtas == 1) run_roles<Config::kConsumers, producer_warps<Config>()>(produce, consume);
    if constexpr (Config::kCtas > 1) run_small_roles<Config::kConsumers>(produce, consume);
}
