// Backward of exact attention on Hopper's wgmma, sm_90a only: dK, dV and dQ in one pass. Source: FlashAttention-2 (Dao
// 2023), algorithm 2; FlashAttention-3 (Shah et al. 2024), section 3.
//
//   P = exp2(c Q K^T - lse2);  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dQ = scale dS K
//   lse2 = lse * log2(e), delta = rowsum(dO * O) - dlse: of attn_bwd_prepare; attn_bwd_finish scales and rounds dQ
//
// q, do: [batch, seqlen_q, num_q_heads, head_dim]   k, v: [batch, seqlen_k, num_kv_heads, head_dim]. Where head_dim is
// below HEAD_DIM, TMA fills with zeros. Persistent: a CTA an SM walks over tiles of 128 keys of one kv head; each of
// two consumer warpgroups owns 64 of them, their dK and dV in registers. Tiles of 64 queries of all its query heads
// come by. Scores are transposed, keys times queries, so that P^T and dS^T are operands from registers; dS goes through
// shared memory too, for dQ, of whose columns either warpgroup computes half, or all of every other tile (kAlternate).
//   warpgroup 0: producer, one lane copies; a lane for each consumer adds its dQ     warpgroups 1, 2: consumers
//
// dQ lags by two tiles and warpgroups need not meet: either may be more than a tile ahead. VARLEN: packed [rows, heads,
// head_dim]; warp 3 walks cu_seqlens (scheduler/bwd_feed.cuh), copies end with their sequence (params/attn_bwd.cuh).
// SOFTCAP, KEY_MASK: score modifications (attention/bwd_mods.cuh); dropout: attention/dropout.cuh. ORDERED: dQ is added
// to in a fixed order (attention/bwd_ordered.cuh). LISTS: a block mask (attention/bwd_listed.cuh). Shared memory, and
// who waits for whom in a step: attention/bwd_roles.cuh.
#include "attention/bwd_finish.cuh"
#include "attention/bwd_listed.cuh"
#include "attention/bwd_mods.cuh"
#include "attention/bwd_ordered.cuh"
#include "attention/bwd_products.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kConsumers = 2;
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 64 * kConsumers;
    static constexpr int kQStages = 3, kDoStages = NUM_DO_STAGES, kDsStages = 3;
    // Packed sequences; dQ is added to in a fixed order; a block mask.
    static constexpr bool kVarlen = VARLEN, kOrdered = ORDERED, kLists = LISTS;
    static constexpr bool kWalker = VARLEN || ORDERED || LISTS;  // a warp hands the tiles of keys to the other roles
    static constexpr bool kFinishes = ORDERED && !VARLEN && !kHasDropout;  // dQ is rounded here (bwd_finish.cuh)
    static constexpr bool kExponents = SOFTCAP || KEY_MASK;  // of P, made of scores before P is
    static constexpr bool kSoftcap = SOFTCAP, kKeyMask = KEY_MASK;  // the latter: the same for all queries, any dtype
    using Params = BwdSm90Params<kSoftcap>::Type;
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kPanels = kHeadDim / 64;
    // Warpgroup g makes dQ of tiles g, g + 2 .. of queries of a tile of keys, not half of the columns of each; and dK
    // before dQ, whose operands are in shared memory.
    static constexpr bool kAlternate = kHeadDim == 64, kDkFirst = kAlternate || !kVarlen;
    // Each warpgroup reads every second tile of dS: fences of the readers are half as many as of those who store.
    static constexpr bool kReadersFence = kAlternate;
    static constexpr int kDqWidth = kAlternate ? kHeadDim : kHeadDim / kConsumers;  // columns of dQ that it computes
    static constexpr int kProducerRegisters = kHeadDim == 64 ? 40 : 24;
    static constexpr int kConsumerRegisters = kHeadDim == 64 ? 232 : 240;
    // K and V as operands from registers: fewer reads of shared memory.
    static constexpr bool kKvInRegisters = kHeadDim == 64, kReadAhead = kHeadDim == 64;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "dK and dV in registers");
    static_assert(!kLists || !(kVarlen || kOrdered || kKeyMask || kHasDropout), "lists of batches, in any order");
};

using Layout = BwdLayout<Config>;
using SharedStorage = BwdStorage<Config>;
using Barriers = BwdBarriers<Config>;
using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;
using UnorderedWriter = Select<Config::kLists, BwdListedWriter<Config>, BwdWriter<Config>>::Type;
using Writer = Select<Config::kOrdered, BwdOrderedWriter<Config>, UnorderedWriter>::Type;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");
using Dropping = BackwardDropout<Config::kBlockM, Config::kHeadDim == 128>;
class Consumer : BwdProducts<Config>, Dropping {
    using Products = BwdProducts<Config>;
    using Products::issue_gradient, Products::issue_scores, Products::kSteps, Products::pack;
    using typename Products::Gradient, typename Products::KeyOperand, typename Products::Operand;
    using typename Products::QueryGradient, typename Products::Scores;

  public:
    OA_DEVICE Consumer(const Config::Params& params, const Barriers& bars, int32 group)
        : Dropping(params),
          params_(params),
          p_(params.bwd.fwd),
          bars_(bars),
          group_(group),
          lane_(in_register(threadIdx.x & 31)),
          warp_((threadIdx.x >> 5) & 3),
          k_(wgmma_descriptor(smem_addr_at(&SharedStorage::k) + group * 64 * 128, 16, 1024)),
          v_(wgmma_descriptor(smem_addr_at(&SharedStorage::v) + group * 64 * 128, 16, 1024)),
          q_(wgmma_descriptor(smem_addr_at(&SharedStorage::q), 16, 1024)),
          q_trans_(wgmma_descriptor(smem_addr_at(&SharedStorage::q), Layout::kQPanelBytes, 1024)),
          do_(wgmma_descriptor(smem_addr_at(&SharedStorage::d_o), 16, 1024)),
          do_trans_(wgmma_descriptor(smem_addr_at(&SharedStorage::d_o), Layout::kQPanelBytes, 1024)),
          ds_(wgmma_descriptor(smem_addr_at(&SharedStorage::ds), 16, 1024)),
          k_trans_(wgmma_descriptor(
              smem_addr_at(&SharedStorage::k) + column_bytes(Config::kAlternate ? 0 : group * Config::kDqWidth),
              Layout::kKvPanelBytes, 1024)) {
        // stmatrix: this lane's row of queries (modulo 16) and its chunk of 8 keys in panel `group`.
        int32 row = (lane_ & 7) + (lane_ >> 4) * 8, chunk = 2 * warp_ + ((lane_ >> 3) & 1);
        ds_store_ =
            smem_addr_at(&SharedStorage::ds) + group * Layout::kQPanelBytes + row * 128 + ((chunk ^ (lane_ & 7)) << 4);
    }

    OA_DEVICE void run() {
        BwdTiles<Config, true> tiles(p_, params_.tiles);
        const BwdFinish<Config> finish(params_.bwd, group_);
        for (BwdTile t; tiles.next(t);) {
            Rows rows(p_, t);
            Work w;
#pragma unroll
            for (int i = 0; i < Config::kHeadDim / 2; ++i) w.dk[i] = w.dv[i] = 0.0f;
            if (Config::kLists ? t.steps > 0 : !rows.is_empty()) {
                attend(t, rows, w);
                kv_phase_ ^= 1;
            }
            if (params_.bwd.dv != nullptr)
                store(w.dv, kHasDropout ? this->scaled(1.0f) : 1.0f, params_.bwd.dv, params_.bwd.dv_stride_b,
                      params_.bwd.dv_stride_s, params_.bwd.dv_stride_h, t);
            if (params_.bwd.dk != nullptr)
                store(w.dk, p_.softmax_scale, params_.bwd.dk, params_.bwd.dk_stride_b, params_.bwd.dk_stride_s,
                      params_.bwd.dk_stride_h, t);
            if (!rows.is_empty()) finish.next(t);
        }
        finish.end();
    }

  private:
    struct Work {  // of a tile of keys on its way through the queries
        Scores s, dp;
        QueryGradient dq;
        Operand p16, ds16;
        Gradient dk, dv;
        KeyOperand k, v;  // kKvInRegisters
        // Steps that come behind those at tile 0 of queries: the tile times heads(), and how many of its heads are left
        // behind this one (BwdStepSums). kLists: the tile.
        int32 at;
        bool hidden;  // kLists: from this warpgroup's keys
        float key_bias[2];  // kKeyMask: of this thread's keys, in base 2
    };

    // Byte of a column in its panel's rows, of all panels.
    OA_DEVICE static constexpr uint32 column_bytes(int32 column) {
        return (column >> 6) * Layout::kKvPanelBytes + (column & 63) * 2;
    }

    OA_DEVICE void load_operand(KeyOperand& a, uint32 smem) const {  // this warp's 16 rows of K or V
        const int32 row = group_ * 64 + warp_ * 16 + (lane_ & 15);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            ldmatrix_x4(a[step], smem + row * 128 + (((2 * step + (lane_ >> 4)) ^ (row & 7)) << 4));
    }
    OA_DEVICE void issue_s(Work& w, int32 stage) const {
        if constexpr (Config::kKvInRegisters)
            issue_scores(w.s, w.k, q_.next(stage * Layout::kQBytes));
        else
            issue_scores(w.s, k_, q_.next(stage * Layout::kQBytes));
    }
    OA_DEVICE void issue_dp(Work& w, int32 stage) const {
        if constexpr (Config::kKvInRegisters)
            issue_scores(w.dp, w.v, do_.next(stage * Layout::kQBytes));
        else
            issue_scores(w.dp, v_, do_.next(stage * Layout::kQBytes));
    }
    OA_DEVICE void issue_dq(QueryGradient& dq, int32 stage) const {
        WgmmaDescriptor ds = ds_.next(stage * Layout::kDsBytes);
#pragma unroll
        for (int step = 0; step < Config::kBlockN / 16; ++step) {
            uint32 panel = step >> 2, column = (step & 3) * 32;
            Wgmma<Config::Io, Config::kDqWidth>::template ss<kKMajor, kMnMajor>(
                dq, ds.at(panel * Layout::kQPanelBytes + column), k_trans_.at(step * 16 * 128), step != 0);
        }
        wgmma_commit();
    }

    // Steps of a tile of queries, without lists.
    OA_DEVICE int32 heads() const { return heads_of(p_); }
    // Of queries.
    OA_DEVICE int32 tile(const Work& w) const { return Config::kLists ? w.at : w.at / heads(); }
    OA_DEVICE void begin_heads(const BwdTile& t) { begin_keys(t, heads(), lane_, group_ * 4 + warp_); }
    OA_DEVICE void attend(const BwdTile& t, const Rows& tiles, Work& w) {
        const int32 total = Config::kLists ? t.steps : (tiles.end - tiles.first) * heads();
        Rows rows = tiles;
        if constexpr (!Config::kLists) {
            w.at = rows.end * heads() - 1;
            rows.full_first *= heads(), rows.full_end *= heads();  // as `at`
        }
        if constexpr (kHasDropout) begin_heads(t);
        if constexpr (Config::kKeyMask) load_key_bias(w, t);
        mbarrier_wait(bars_.k_full, kv_phase_);
        // V is waited for here too: its first product comes half a step later, at the same place in all steps.
        mbarrier_wait(bars_.v_full, kv_phase_);
        if constexpr (Config::kKvInRegisters) {
            load_operand(w.k, smem_addr_at(&SharedStorage::k));
            load_operand(w.v, smem_addr_at(&SharedStorage::v));
        }
        step<0>(t, rows, w);
        if constexpr (Config::kKvInRegisters) release_listed_v<Config>(lane_);
        if (total > 1) step<1>(t, rows, w);
        if constexpr (Config::kAlternate) {
            alternate(t, rows, w, total);
        } else {
#pragma unroll 1
            for (int32 i = 2; i < total; ++i) step<2>(t, rows, w);
        }
        if constexpr (!Config::kKvInRegisters) release_listed_v<Config>(lane_);
        // What is left: dQ of the last two steps, dK of the last one.
        if (total > 1) finish_dq_of(w, total - 2);
        wgmma_pin(w.dk);
        wgmma_fence();
        issue_gradient(w.dk, w.ds16, q_trans_.next(q_at_.stage * Layout::kQBytes));
        wgmma_wait<0>();
        wgmma_pin(w.dk);
        release_q();
        finish_dq_of(w, total - 1);
        if (lane_ == 0) mbarrier_arrive(bars_.kv_empty);
    }
    // Steps from the third on. Warpgroup 1 has dQ of the odd ones, of which the first is due at step 3.
    OA_DEVICE void alternate(const BwdTile& t, const Rows& rows, Work& w, int32 total) {
        int32 i = 2;
        if (group_ == 1 && i < total) step<2, false>(t, rows, w), ++i;
#pragma unroll 1
        while (i < total) {
            step<2, true>(t, rows, w);
            if (++i == total) break;
            step<2, false>(t, rows, w);
            ++i;
        }
    }
    // Of step i, the oldest one of which there is no dQ yet.
    OA_DEVICE void finish_dq_of(Work& w, int32 i) {
        if (!Config::kAlternate || (i & 1) == group_)
            finish_dq(w);
        else
            ds_read_.advance();
    }

    OA_DEVICE void wait_ds() const {
        bars_.ds.wait(ds_read_);
        if constexpr (Config::kReadersFence) fence_proxy_async();
    }
    // Of the oldest tile of dS in shared memory.
    OA_DEVICE void finish_dq(Work& w) {
        wait_ds();
        wgmma_discard(w.dq);
        wgmma_fence();
        issue_dq(w.dq, ds_read_.stage);
        wgmma_wait<0>();
        wgmma_pin(w.dq);
        end_dq(w);
        announce_dq();
    }

    // dQ to shared memory, as float4 j of thread i at 512 j + 4 i.
    OA_DEVICE void end_dq(const Work& w) {
        bars_.ds.release(ds_read_, lane_);
        ds_read_.advance();
        mbarrier_wait(bars_.dq_empty + 8 * group_, dq_phase_ ^ 1);
        const uint32 to = smem_addr_at(&SharedStorage::dq) + group_ * Layout::kDqBytes + (threadIdx.x & 127) * 16;
#pragma unroll
        for (int j = 0; j < Config::kDqWidth / 8; ++j)
            store_shared4(to + 2048 * j,
                          make_uint4(__float_as_uint(w.dq[4 * j]), __float_as_uint(w.dq[4 * j + 1]),
                                     __float_as_uint(w.dq[4 * j + 2]), __float_as_uint(w.dq[4 * j + 3])));
    }
    OA_DEVICE void announce_dq() {
        if constexpr (!Config::kReadersFence) fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(bars_.dq_full + 8 * group_);
        dq_phase_ ^= 1;
    }

    using QueryRows = BwdQueryRows<Config::kBlockM>;
    using ReadRows = BwdReadRows<Config::kBlockM>;
    OA_DEVICE QueryRows lse2_of(int32 stage) const { return {smem_addr_at(&SharedStorage::lse2), stage, lane_}; }
    OA_DEVICE QueryRows delta_of(int32 stage) const { return {smem_addr_at(&SharedStorage::delta), stage, lane_}; }

    // S to P, in place; kSoftcap: to what cap_products makes. Returns whether some are hidden. P: a template, because
    // the plain kernel's Params have no mods.
    template <typename P, typename Row>
    OA_DEVICE bool exponentiate(const P& params, const BwdTile& t, const Rows& rows, Work& w, const Row& lse2,
                                [[maybe_unused]] bool& near) const {
        const bool hides = w.at < rows.full_first || w.at >= rows.full_end || (Config::kLists && w.hidden);
        [[maybe_unused]] const float c = p_.softmax_scale * kLog2e;
        if constexpr (Config::kSoftcap) {
            near = cap_products(w.s, params.mods);
            if (hides) hide(w, t, neg_inf());
        } else {
            if (hides) hide(w, t, c > 0.0f ? neg_inf() : -neg_inf());
            if constexpr (Config::kKeyMask) biased_exponents(w.s, c, w.key_bias, lse2);
#pragma unroll
            for (int j = 0; j < Config::kBlockM / 8; ++j) {
                [[maybe_unused]] float2 row;
                if constexpr (!Config::kKeyMask) row = lse2(j);
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    float exponent = w.s[4 * j + x];
                    if constexpr (!Config::kKeyMask) exponent = fmaf(exponent, c, -(x & 1 ? row.y : row.x));
                    w.s[4 * j + x] = exp2_approx(exponent);
                }
            }
        }
        return hides;
    }
    // P as an operand, from what exponentiate left. In its place stays what dP - delta is multiplied by.
    template <typename P, typename Row>
    OA_DEVICE void pack_p(const P& params, const BwdTile& t, Work& w, const Row& lse2, bool hides, bool near) const {
        if constexpr (Config::kSoftcap) {
            if (near)
                capped_probabilities<true, typename Config::Io>(w.s, w.p16, params.mods, params.inv_factor2, lse2);
            else
                capped_probabilities<false, typename Config::Io>(w.s, w.p16, params.mods, params.inv_factor2, lse2);
            if (hides) hide(w, t, 0.0f);
        } else {
            pack(w.p16, w.s);
        }
    }
    // dS from dP, in its registers.
    OA_DEVICE void differentiate(Work& w, const QueryRows& delta) const {
#pragma unroll
        for (int j = 0; j < Config::kBlockM / 8; ++j) {
            const float2 row = delta(j);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* ds = w.dp + 4 * j + 2 * r;
                const float* p = w.s + 4 * j + 2 * r;
                if constexpr (!kHasDropout) ds[0] = p[0] * (ds[0] - row.x), ds[1] = p[1] * (ds[1] - row.y);
                if constexpr (kHasDropout) score_gradients(ds, p, row, j, r);
            }
        }
        wgmma_pin(w.dp);
    }
    template <bool kHasDq>  // dS and dQ have one arrival, and one fence
    OA_DEVICE void store_ds(const Work& w) {
        bars_.ds.wait_empty(ds_write_);
#pragma unroll
        for (int x = 0; x < Config::kBlockM / 16; ++x)
            stmatrix_x4<true>(ds_store_ + ds_write_.stage * Layout::kDsBytes + x * 16 * 128, w.ds16[x]);
        if constexpr (!Config::kReadersFence) fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) {
            mbarrier_arrive(bars_.ds.full + 8 * ds_write_.stage);
            if (kHasDq) mbarrier_arrive(bars_.dq_full + 8 * group_);
        }
        if (kHasDq) dq_phase_ ^= 1;
        ds_write_.advance();
    }
    OA_DEVICE void release_q() {
        bars_.q.release(q_at_, lane_);
        q_at_.advance();
    }
    template <bool kPacked>
    OA_DEVICE void release_do(const Work& w) {
        if (kPacked == uses_delta_early<Config>()) return;
        release_used<kPacked>(bars_.d_o, do_at_, lane_, w.ds16, uint32(p_.tile_offset));
        do_at_.advance();
    }

    // Step i; q_at_ is at step i - 1 unless i = 0. kBefore: how many steps came before, 2 for more. No
    // product is in flight from one step to the next: the compiler would wait for each.
    template <int kBefore, bool kDq = (kBefore > 1)>
    OA_DEVICE void step(const BwdTile& t, const Rows& rows, Work& w) {
        RingState<Config::kQStages> q_now = q_at_;
        if (kBefore > 0) q_now.advance();
        bars_.q.wait(q_now);
        if constexpr (kDq) wait_ds();
        [[maybe_unused]] const uint32 entry = entry_of_step<Config>(q_now.stage);
        wgmma_discard(w.s);
        if constexpr (kDq) wgmma_discard(w.dq);
        wgmma_fence();
        issue_s(w, q_now.stage);
        if constexpr (kDq && !Config::kDkFirst) issue_dq(w.dq, ds_read_.stage);
        if constexpr (kBefore > 0) issue_gradient(w.dk, w.ds16, q_trans_.next(q_at_.stage * Layout::kQBytes));
        if constexpr (kDq && Config::kDkFirst) issue_dq(w.dq, ds_read_.stage);
        wgmma_pin(w.s);
        if constexpr (Config::kLists) {
            const int32 now = uniform(int32(entry));  // behind the products, under which it arrives
            w.at = listed_tile(now), w.hidden = is_hidden(now, group_);
        }
        const typename Select<Config::kReadAhead, ReadRows, QueryRows>::Type lse2(lse2_of(q_now.stage));
        wgmma_wait<(kBefore > 0) + kDq>();
        wgmma_pin(w.s);
        bool near = false;
        const bool hides = exponentiate(params_, t, rows, w, lse2, near);
        wgmma_pin(w.s);  // ptxas puts exp2 behind the wait; kept before it by force the kernel was slower
        wgmma_wait<0>();
        if constexpr (kBefore > 0) {
            wgmma_pin(w.dk);
            release_q();
        }
        if constexpr (kDq) {
            wgmma_pin(w.dq);
            end_dq(w);
        } else if constexpr (kBefore > 1) {
            ds_read_.advance();  // the other warpgroup's
        }
        pack_p(params_, t, w, lse2, hides, near);
        if constexpr (kHasDropout) drop(w.p16, w.s, tile(w));
        bars_.d_o.wait(do_at_);
        wgmma_discard(w.dp);
        if constexpr (Config::kKeyMask && kBefore == 0) wgmma_pin(w.dv);  // else zeroed behind the fence
        wgmma_fence();
        issue_dp(w, do_at_.stage);
        issue_gradient(w.dv, w.p16, do_trans_.next(do_at_.stage * Layout::kQBytes));
        wgmma_pin(w.dp);
        if constexpr (!Config::kLists) --w.at;
        wgmma_wait<1>();
        wgmma_pin(w.dp);
        differentiate(w, delta_of(do_at_.stage));
        wgmma_wait<0>();
        wgmma_pin(w.dv);
        release_do<false>(w);
        pack(w.ds16, w.dp);
        release_do<true>(w);
        store_ds<kDq>(w);
        if constexpr (Config::kKeyMask)
            if (w.at >= 0 && p_.mask_stride_h != 0 && p_.num_q_heads > p_.num_kv_heads) load_key_bias(w, t);
        if constexpr (kHasDropout) {
            if ((w.at + 1) % heads() == 0)
                begin_heads(t);
            else
                next_head(true);
        }
    }

    OA_DEVICE void load_key_bias(Work& w, const BwdTile& t) const {
        const int32 key = t.n0 + group_ * 64 + warp_ * 16 + (lane_ >> 2);
        const int32 head = (t.kv_head_idx + 1) * heads() - 1 - w.at % heads();
#pragma unroll
        for (int r = 0; r < 2; ++r) w.key_bias[r] = key_bias_log2<Config::Io>(p_, t.sequence, head, key + r * 8);
    }

    // Scores of hidden pairs, and of keys behind the end, become `hidden`.
    OA_DEVICE void hide(Work& w, const BwdTile& t, float hidden) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int32 key = t.n0 + group_ * 64 + warp_ * 16 + (lane_ >> 2) + r * 8;
            QueryRange seen = visible_queries(key, t.seqlen_q, t.seqlen_k, p_.window_left, p_.window_right);
            uint32 len = key < t.seqlen_k ? uint32(max_of(seen.hi - seen.lo, 0)) : 0;
            if (Config::kLists && w.hidden) len = 0;
            int32 first = tile(w) * Config::kBlockM + 2 * (lane_ & 3) - seen.lo;
#pragma unroll
            for (int j = 0; j < Config::kBlockM / 8; ++j)
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    if (uint32(first + 8 * j + x) >= len) w.s[4 * j + 2 * r + x] = hidden;
        }
    }

    // dK or dV times `scale`.
    OA_DEVICE void store(const Gradient& d, float scale, uint16* to, int64 stride_b, int64 stride_s, int64 stride_h,
                         const BwdTile& t) const {
        to += t.batch_idx * stride_b + t.kv_head_idx * stride_h;
        if constexpr (Config::kVarlen) to += t.k_begin * stride_s;
        store_gradient<Config::Io>(d, scale, to, stride_s, t.n0 + group_ * 64 + warp_ * 16 + (lane_ >> 2), t.seqlen_k,
                                   p_.head_dim, lane_);
    }

    const Config::Params& params_;
    const AttnFwdParams& p_;
    const Barriers& bars_;
    const int32 group_;
    const int lane_, warp_;
    uint32 ds_store_;
    WgmmaDescriptor k_, v_, q_, q_trans_, do_, do_trans_, ds_, k_trans_;
    RingState<Config::kQStages> q_at_;
    RingState<Config::kDoStages> do_at_;
    RingState<Config::kDsStages> ds_write_, ds_read_;
    uint32 kv_phase_ = 0, dq_phase_ = 0;
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) attn_bwd_sm90(
    const __grid_constant__ Config::Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    Barriers bars;
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw);
        bars.init();
    }
    __syncthreads();
    launch_dependents(), wait_for_kernel_ahead();  // attn_bwd_finish, which waits too; attn_bwd_prepare
    int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_release<Config::kProducerRegisters>();
        if (threadIdx.x == 0) BwdProducer<Config>(params, bars).run();
        const int32 warp = threadIdx.x >> 5;
        if ((threadIdx.x & 31) == 0 && 0 < warp && warp <= Config::kConsumers) Writer(params, bars, warp - 1).run();
        if (Config::kOrdered && warp > Config::kConsumers)
            keep_order<Config>(params.bwd, params.tiles);
        else if (Config::kLists && warp > Config::kConsumers)
            walk_listed_bwd_tiles<Config::kBlockN>(params.bwd);
        else if (Config::kVarlen && warp > Config::kConsumers)
            walk_bwd_tiles<Config::kBlockN>(params.bwd.fwd, item_counter(params.bwd));
    } else {
        registers_claim<Config::kConsumerRegisters>();
        Consumer(params, bars, warpgroup - 1).run();
    }
}
