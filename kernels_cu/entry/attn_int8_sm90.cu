// Low-precision attention forward on Hopper's wgmma, sm_90a only: INT8 or e4m3 Q K^T, FP8 P V with two-level
// accumulation.
// Source: SageAttention2 (Zhang et al. 2024), sections 3.1 to 3.3; warp specialization: FlashAttention-3 (Shah et al.
// 2024).
//
//   S = softmax_scale * (q_scale k_scale (q_int . k_int) + delta_s + row_bias);  P = softmax([S, sink])
//   with factors of V (VALUE_FACTORS): one for each 128 rows of V, of the caller, in P (attention/value_factors.cuh)
//   with score modifications besides: S = softcap * tanh(S / softcap);  S += bias, or S = -inf where a key is hidden
//   O = (P V8) v_scale + P v_mean;  LSE = log(sum(exp(S)) + exp(sink))
//
// q_int [batch, num_q_heads, seqlen_q, head_dim_pad] s8   k_int [batch, num_kv_heads, seqlen_k, head_dim_pad] s8;
// with QK_TYPE E4m3 both are e4m3, with one scale for 128 rows (BlockScales), and their products fp32: no constant is
// added, no scale is cut (warp_softmax.cuh).
// v [batch, num_kv_heads, head_dim_pad, keys] e4m3, keys padded to 128 and permuted inside each 16
// (docs/quantization.md), so that the accumulator layout of S is the operand layout of P. Packed sequences have no
// batch; theirs begin at slots of 128 (q_scale, k_scale, delta_s, v). o: any strides of attention. Scales are per
// thread: of the 16 rows of a warp, rows r and r + 8 have one scale; of a tile of 128 keys, keys 8i + 2j and 8i + 2j +
// 1 have one: a lane needs one of each. row_bias is a constant of its row, which no softmax sees: it enters with LSE
// and sinks only.
//
// Roles and barriers are those of attn_fwd_sm90 (attention/fwd_roles.cuh); only two warpgroups take part in ping-pong.
//   consumer, step i   wait inner.full | S(i) = Q K(i)^T | A += P(i-1) V(i-1), sums of P(i-1)
//                      softmax(i), under the products with P(i-1) | arrive inner.empty
//                      every flush_keys keys: O += A, A = 0
// With REGISTER_Q consumers read Q before the first step and release its stage at once. With QUANTIZE_Q so they do, of
// Q in 16 bits as the call has it [batch, seqlen_q, num_q_heads, head_dim], any strides, and make q_int and q_scale of
// it (tile/raw_queries.cuh); row_bias is K's mean then, [batch, num_kv_heads, head_dim_pad] or null, whose products
// with Q are made here: rows with NaN or infinity are known. It may be launched while the kernel that makes K and V
// ends: until then it reads Q alone. Of head_dim 256 half of Q in 16 bits passes through a stage of K and V, which it
// takes before its tile's first one (RING_Q below); its integers replace the other half.
//
// SPLIT_KEYS: a CTA takes a part of a tile's keys (scheduler/split_tiles.cuh), and rows of a tile are those of several
// heads, each with scales and biases of its own; attn_combine_sm80 merges. WITH_LSE stores sums of P before rounding
// besides; with factors of V there is one sum for both. Of packed sequences it takes an even share of all
// (scheduler/stream_k.cuh), attn_combine_packed_sm90 merges.
//
// SCORE_MODS: softcap, masks and any softmax_scale between product and softmax, with the steps and copies of
// attn_fwd_sm90's score modifications (attention/int8_mods.cuh, attention/int8_mods_roles.cuh). With SPLIT_KEYS the
// rows of a tile are those of one head, so that a lane still has one scale and a CTA one delta_s; lists are divided
// among the splits. With BLOCK_MASK: lists alone (attention/int8_blocks_roles.cuh).
//
// Two-level accumulation: the tensor cores keep about 13 bits of mantissa when they add e4m3 products, and truncate. So
// A, in registers, covers flush_keys keys only, and O is summed in fp32; it lies in shared memory, because three
// warpgroups have no registers for both.
// P is 28 at the base of the softmax: an e4m3 number, so that a key that counts for more than all others is not
// rounded, with room below the largest e4m3 for scores that exceed the base. O is divided by sums of P as rounded:
// products with ones. The LSE is of sums before rounding, which kernels WITH_LSE compute besides; their O has the same
// bits. With factors of V both are of sums before rounding, because P rounded with a small factor is 0.
//
// Shared memory, bytes: masks, if any | Q [NUM_Q_STAGES][BLOCK_M * HEAD_DIM], twice that with QUANTIZE_Q up to head_dim
// 128 | K [NUM_STAGES][BLOCK_N * HEAD_DIM] | V [same] | ones [512], with SCORE_MODS [256] | delta_s
// [NUM_STAGES][DELTA_ROWS][BLOCK_N * 4], with QUANTIZE_Q a byte a thread | O [BLOCK_M * HEAD_DIM * 4] | k_scale
// [NUM_STAGES][16] | v_scale and v_mean [NUM_CONSUMERS][2][HEAD_DIM * 4], at head_dim 256 in O's place | with
// QUANTIZE_Q and WITH_LSE row_bias [BLOCK_M * 4] | barriers. Rows of Q and K are min(HEAD_DIM, 128) bytes, those of V
// BLOCK_N, each with a swizzle of its length.
#include "attention/int8_blocks_roles.cuh"
#include "attention/int8_mods_roles.cuh"
#include "attention/int8_roles.cuh"
#include "attention/int8_walk.cuh"
#include "attention/integer_powers.cuh"
#include "attention/value_factors.cuh"
#include "params/attn_fp8_raw.cuh"
#include "pipeline/warp_roles.cuh"
#include "ptx/barrier_vote.cuh"
#include "ptx/uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler/persistent.cuh"

struct Config {
    using Io = IO_TYPE;  // of o, sinks and biases of 16 bits
    using Qk = QK_TYPE;  // of Q and K
    using Score = Int8Score<Qk>::Type;  // of a product of theirs
    static constexpr bool kBlockScales = kScoreBias<Score> == 0.0f;  // e4m3: one for 128 rows
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kConsumers = NUM_CONSUMERS;
    static constexpr bool kSplitKeys = SPLIT_KEYS;
    static constexpr bool kPingPong = kConsumers == 2 && !kSplitKeys;  // often one of the two has no rows
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kBlockTiles = kBlockRows / kBlockN;  // of keys, to a scale
    static constexpr int kInnerStages = NUM_STAGES;
    static constexpr int kOuterStages = NUM_Q_STAGES;
    static constexpr bool kVarlen = VARLEN, kPaged = false;
    static constexpr bool kDelta = SMOOTH_Q;  // with score modifications: if there is delta_s
    static constexpr bool kLse = WITH_LSE;
    static constexpr bool kFactors = VALUE_FACTORS;  // one for each 128 rows of V; kLse, not kDelta
    static constexpr bool kRegisterQ = REGISTER_Q;
    static constexpr bool kRawQ = QUANTIZE_Q;  // Q in 16 bits, as it comes
    static constexpr bool kRingQ = kRawQ && kHeadDim == 256;  // half of it comes in a stage of K and V
    static constexpr int kQueryBytes = kRawQ && !kRingQ ? 2 : 1;  // of an element, where Q has its place
    static constexpr bool kScoreMods = SCORE_MODS, kSoftcap = SOFTCAP;  // softcap, masks, biases, scale <= 0
    static constexpr bool kBlocks = BLOCK_MASK;  // kScoreMods: instead of all of these but the scale
    static constexpr bool kRotateHeads = kScoreMods, kMeetAtTiles = false;
    static constexpr int kBiasBytes = BIAS_BYTES;  // of an element of a bias tile; 0: none
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;
    static constexpr int kPanels = kHeadDim / kRowBytes;
    static constexpr int kQueryRowBytes = kRawQ ? 128 : kRowBytes;
    static constexpr int kQueryPanels = kHeadDim * kQueryBytes / kQueryRowBytes;
    static constexpr int kNTiles = kBlockN / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    static constexpr int kOutputs = kHeadDim / 2;  // of one thread
    static constexpr int kOnesBytes = kScoreMods ? 256 : 512;
    // Blocks of 128 query rows, which delta_s has, in a tile.
    static constexpr int kDeltaRows = kBlockM % 128 == 0 ? kBlockM / 128 : kBlockM / 128 + 1;
    static constexpr bool kByRow = kHeadDim == 128;  // order of exponentials: the other one costs 1 to 2 %
    static constexpr bool kEarlyChannels = kHeadDim <= 128;
    // Of steps without hidden keys; Q is in registers (attention/integer_powers.cuh).
    static constexpr int kPowers = INTEGER_POWERS;
    // With half of P by special functions what the other half loses of small ones is little.
    static constexpr bool kWatchesSmall = kPowers == kCorrectedPowers || kPowers == kLinearPowers;
    static constexpr int kOwnChannels = kEarlyChannels ? kHeadDim : 1;
    static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "rows of 64 or 128 bytes");
    static_assert(!kFactors || (kBlockScales && kLse && !kDelta), "arrays in e4m3");
    static_assert(!kSplitKeys || !kDelta || kScoreMods, "mods know the head of delta_s");
    static_assert(!kRawQ || !(kSplitKeys || kScoreMods || kDelta || kFactors), "all keys in a CTA");
    static_assert(!kRawQ || !kBlockScales || !(kVarlen || kRingQ), "e4m3 of batches, up to 128 channels");
    static_assert(!kSplitKeys || !kVarlen || !(kScoreMods || kFactors), "packed sequences without mods and factors");
    static_assert(!kSplitKeys || !(kScoreMods || kVarlen) || kLse, "these make the sums for the LSE");
    static_assert(kPowers == kNoPowers || ((kRawQ || kRegisterQ) && kEarlyChannels),
                  "powers of integers need Q in registers, and vote where channels are loaded");
    static_assert(kPowers == kNoPowers || !(kBlockScales || kDelta || kLse || kSplitKeys || kScoreMods),
                  "powers of integers are for plain rows of int8: an LSE wants sums before rounding");
    static_assert(kBlockN == 64, "rows of V have the length of their swizzle; two tiles to a tile of scales");
};

using RawParams = Select<Config::kRawQ && Config::kBlockScales, AttnFp8RawSm90Params, AttnInt8Sm90Params>::Type;
using WholeParams = Select<Config::kFactors, AttnFp8FactorsSm90Params, RawParams>::Type;
using PackedSplitParams = Select<Config::kVarlen, AttnInt8StreamKSm90Params, AttnInt8SplitSm90Params>::Type;
using SplitParams = Select<Config::kFactors, AttnFp8SplitFactorsSm90Params, PackedSplitParams>::Type;
using PlainParams = Select<Config::kSplitKeys, SplitParams, WholeParams>::Type;
using Params = Select<Config::kScoreMods, ModsParams<Config>, PlainParams>::Type;
using SharedStorage = Int8Storage<Config>;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

using Tile = Int8Tile<Config>;
using PlainShift = Select<Config::kDelta, DeltaShift, NoShift>::Type;
using Factor = Select<Config::kFactors, ValueFactor, NoValueFactor>::Type;  // of V
using Shift = Select<Config::kFactors, ValueShift, PlainShift>::Type;

// Of a tile's rows; until the next flush.
constexpr int32 kNeverPowers = 0, kTakesPowers = 1, kNotNowPowers = 2;

struct NoPowers {
    OA_DEVICE NoPowers(const float (&)[2], float) {}
};

class PlainProducer : public Int8Producer<Config, PlainParams, PlainProducer> {
  public:
    using Int8Producer::Int8Producer;

    OA_DEVICE void run(int lane) {
        if (Config::kRawQ && Config::kVarlen) wait_for_kernel_ahead();  // those ahead write where sequences begin
        Int8Producer::run(lane);
    }
};

class PlainConsumer : public Int8Consumer<Config, PlainParams, PlainConsumer> {
  public:
    using Int8Consumer::Int8Consumer;

    template <typename T>
    OA_DEVICE void attend_tile(const T& t, const Span& keys, int32 warp_row, Rows& rows) {
        // Half of Q is the first thing in the ring, ahead of steps that this warpgroup may pass over.
        if constexpr (Config::kRingQ) {
            this->wait_outer();
            this->wait_inner();
            raw_scale_ = this->quantize_queries(t);
        }
        Int8Consumer::attend_tile(t, keys, warp_row, rows);
    }

    // All steps from i on. All four warps have to issue a product by the very same instruction, so only what is equal
    // for the whole warpgroup may decide between two places where products are issued.
    OA_DEVICE void attend(const TileOf<Config>& t, const Span& keys, int32 i, int32 warp_row, Rows& state) {
        const int32 num_tiles = keys.end - keys.first;
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        this->find_key_scales(t);
        // Loaded here, used behind the waits for Q and K: a trip to L2 or memory.
        float q_scale[2];
        if constexpr (!Config::kRawQ) scales_of_queries(t, warp_row, q_scale);
        Tile::Queries q;
        Tile::Scores s;
        Tile::Probabilities probs, fresh;
        const uint32 opaque = Factor::opaque();
        Tile::RowSums sums = {};
        float c[2], alpha[2], sum[2];
        Factor factor;
        bool is_full = false;
        float k_ahead = 1.0f, v_ahead = 1.0f, most = 0.0f;
        int32 takes_powers = kNeverPowers;
        Walk w{{t, keys, warp_row, state, own, q, s, probs, fresh, opaque, sums, alpha, sum, factor, i, is_full},
               q_scale,
               c,
               k_ahead,
               v_ahead,
               most,
               takes_powers};
        if (Config::kFactors) prefetch_step(w, keys.end - 1 - i);
        first_step(w, num_tiles);

        const int32 flush_tiles = this->tiles_to_flush(t, keys.first, keys.end);
        int32 flush_at = i + flush_tiles;
        auto next_special = [&](int32 j) { return min_of(ForwardConsumer::next_special(keys, j), flush_at); };
        int32 special = next_special(i);
        for (++i; i < num_tiles; ++i) {
            if (!is_full) wait_inner();
            if (i >= special) {
                issue_products(w);
                if (!Tile::Queries::kTaken && i == num_tiles - 1) release_outer();
                mask(w);
                exponentiate(w);
                w.finish_pv();
                const bool flushes = i == flush_at;
                if (flushes) {
                    flush(state);
                    flush_at += flush_tiles;
                }
                special = next_special(i);
                w.renew_probs();
                if (__any_sync(0xffffffffu, is_too_large(w))) redo(w);
                if constexpr (Config::kWatchesSmall) {
                    if (flushes && takes_powers != kNeverPowers) watch_small(w);
                }
                release_stage(is_full);
            } else if (Config::kPowers != kNoPowers && takes_powers == kTakesPowers) {
                take_common_steps<Config::kPowers>(w, special);
            } else {
                take_common_steps<kNoPowers>(w, special);
            }
            w.add_sums();
        }
        take_last_product(w);
    }

  private:
    // What the steps share besides.
    struct Walk : Int8Walk<Config, PlainConsumer> {
        float (&q_scale)[2];  // from the first step on with the softmax's scale in it
        float (&c)[2];  // of the step's scores, to base 2
        // kFactors: K's scale and V's factor of the block of 128 keys that comes next, a block ahead.
        float &k_ahead, &v_ahead;
        // kPowers: the largest |S| of these rows, and whether the warpgroup's steps take powers of integers
        // (kNeverPowers and so on).
        float& most;
        int32& takes_powers;
    };

    // The first step: S alone, and the base of the softmax.
    OA_DEVICE void first_step(Walk& w, int32 num_tiles) {
        wait_outer();
        this->take_queries(w.t, w.q);
        if constexpr (Config::kRingQ) {
            w.q_scale[0] = w.q_scale[1] = raw_scale_;
        } else {
            note_queries(w.q, w.t, w.warp_row, w.q_scale);
        }
        wait_inner();
        ping_pong_.wait();
        Tile::issue_qk(w.s, w.q, k_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        w.state.attended = true;
        w.q_scale[0] *= p_.softmax_scale * kLog2e;
        w.q_scale[1] *= p_.softmax_scale * kLog2e;
        if (Config::kFactors) {
            enter_block(w, w.keys.end - 1 - w.i);
        } else {
            scales_of_scores(w.q_scale, w.keys.end - 1 - w.i, w.c);
        }
        if (Config::kEarlyChannels) {
            // All four warps have read the last tile's.
            if constexpr (Config::kPowers != kNoPowers) {
                w.most = most_score(w.q);
                const bool too_far = !(w.c[0] * w.most <= kMostOctaves);
                const bool never = any_at_barrier(too_far, kFirstFreeBarrier + group_, 128);
                w.takes_powers = uniform(never ? kNeverPowers : kTakesPowers);
            } else {
                named_barrier_sync(kFirstFreeBarrier + group_, 128);
            }
            fetch_channels(w.t);
        }
        wgmma_wait<0>();
        wgmma_pin(w.s);
        // Q's registers have been operands, so that loads of them have returned (Ring::release).
        if (Tile::Queries::kTaken || w.i == num_tiles - 1) release_outer();
        mask(w);
        w.state.softmax.raise(w.s, w.c, w.alpha, shift_of(w.t, w.factor));
        exponentiate(w);
        w.renew_probs();
        if (__any_sync(0xffffffffu, is_too_large(w))) redo(w);
        w.add_sums();
        release_stage(w.is_full);
    }

    // In a step that computed P by special functions, at its end: whether the next ones may take integers. All four
    // warps.
    OA_DEVICE void watch_small(Walk& w) const {
        const bool small = any_at_barrier(mostly_small(w.probs), kFirstFreeBarrier + group_, 128);
        w.takes_powers = uniform(small ? kNotNowPowers : kTakesPowers);
    }

    // Steps before `special` as long as nothing rare happens; the last one's sums are left to the caller. Rare cases
    // leave the loop, by one branch for all: a jump over them would cost ten cycles a step and more. (`|`, here and in
    // is_too_large: of references `||` is not folded to the same code as of variables.)
    // kPowers: of integers. The loops of a row are apart: a branch in one would keep the products from its arithmetic.
    template <int kPowers>
    OA_DEVICE void take_common_steps(Walk& w, int32 special) {
        constexpr bool kInPlace = kPowers == kCorrectedPowers || kPowers == kLinearPowers;
        using Integers = IntegerPowers<kPowers != kCorrectedPowers>;
        const typename Select<kPowers != kNoPowers, Integers, NoPowers>::Type powers(w.state.softmax.m2, w.most);
        bool again, given = !Config::kDelta;
        for (;;) {
            issue_products(w);
            if constexpr (kInPlace) {
                Logarithms logarithms;
                logarithms.take(w.s, w.c[0], powers);
                w.finish_pv();
                release_stage(w.is_full);
                logarithms.put(powers, w.probs);
                again = w.signs_past_largest(w.probs) != 0;
            } else {
                if constexpr (kPowers == kHalfLinearPowers) {
                    exponentiate_half<Config::kByRow>(w.s, w.state.softmax.m2, w.c, powers, w.fresh);
                } else {
                    exponentiate(w);
                }
                w.finish_pv();
                if (!Config::kDelta) release_stage(w.is_full);
                w.renew_probs();
                again = kPowers == kNoPowers ? is_too_large(w) : w.signs_past_largest() != 0;
            }
            if constexpr (kPowers != kNoPowers) again = again | !(w.c[0] <= powers.most_scale);
            if (__any_sync(0xffffffffu, again | (w.i + 1 >= special) | (!Config::kDelta && !w.is_full))) break;
            if (Config::kDelta) {  // redo() needs the stage's delta_s
                release_stage(w.is_full);
                given = true;
                if (__any_sync(0xffffffffu, !w.is_full)) break;  // lanes may have asked at different times
                given = false;
            }
            w.add_sums();
            ++w.i;
        }
        if (__any_sync(0xffffffffu, again)) redo(w);
        if (!given) release_stage(w.is_full);
    }

    // S(i), and A += P(i - 1) V(i - 1), which is still running at the end.
    OA_DEVICE void issue_products(Walk& w) {
        if (!Config::kBlockScales) scales_of_scores(w.q_scale, w.keys.end - 1 - w.i, w.c);
        ping_pong_.wait();
        Tile::issue_qk(w.s, w.q, k_.next(inner_at_.stage * Tile::kKBytes));
        Tile::issue_pv(w.state.acc, w.sums, w.probs, v_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        // From global memory, under the products.
        int32 n = w.keys.end - 1 - w.i;
        if (Config::kBlockScales && !Config::kFactors) scales_of_scores(w.q_scale, n, w.c);
        if (Config::kFactors && uint32(n) % Config::kBlockTiles == Config::kBlockTiles - 1) enter_block(w, n);
        wgmma_wait<1>();
        wgmma_pin(w.s);
    }

    // kFactors, of a block of 128 keys: what was loaded a block ahead is in force, and the next is loaded. Keys are
    // walked from the last tile on.
    OA_DEVICE void enter_block(Walk& w, int32 n) const {
        w.c[0] = w.q_scale[0] * w.k_ahead;
        w.c[1] = Config::kSplitKeys ? w.q_scale[1] * w.k_ahead : w.c[0];
        w.factor.set(w.v_ahead);
        prefetch_step(w, n - Config::kBlockTiles);  // before the first block: of any
    }
    OA_DEVICE void prefetch_step(Walk& w, int32 n) const {
        w.k_ahead = this->scale_of_keys(n);
        w.v_ahead = this->factor_of_values(n);
    }

    OA_DEVICE void mask(Walk& w) const {
        if (is_masked(w.keys, w.i))
            mask_edges(w.s, p_, w.t, w.warp_row, (w.keys.end - 1 - w.i) * Config::kBlockN, lane_);
    }
    // P(i), except as operand.
    OA_DEVICE void exponentiate(Walk& w) const {
        w.sum[0] = w.sum[1] = 0.0f;
        w.state.softmax.exponentiate_in_order<false, Config::kByRow>(w.s, w.c, w.packer(), shift_of(w.t, w.factor));
    }
    // Whether P(i) needs a higher base, or its scale is too large for integers as scores.
    OA_DEVICE bool is_too_large(const Walk& w) const {
        const bool past = w.signs_past_largest() != 0;
        if (Config::kDelta) return past;
        const bool coarse[2] = {this->is_coarse(w.c[0]), Config::kSplitKeys && this->is_coarse(w.c[1])};
        return past | coarse[0] | coarse[1];
    }
    // P(i) anew, with the base raised to the largest score.
    OA_DEVICE void redo(Walk& w) const {
        Shift shift = shift_of(w.t, w.factor);
        w.state.softmax.raise(w.s, w.c, w.alpha, shift);
        w.rescale_sums();
        w.sum[0] = w.sum[1] = 0.0f;
        w.state.softmax.exponentiate_in_order<true, Config::kByRow>(w.s, w.c, w.packer(), shift);
        w.renew_probs();
    }

    // What is added to the exponents of the step's tile: delta_s, or log2 of V's factor.
    OA_DEVICE ValueShift shift_of(const FwdTile&, const ValueFactor& factor) const { return factor.shift(); }
    OA_DEVICE PlainShift shift_of(const FwdTile& t, const NoValueFactor&) const {
        return PlainShift(delta_of(t), p_.softmax_scale * kLog2e);
    }

    float raw_scale_ = 0.0f;  // kRingQ: of this lane's rows, from attend_tile to the first step
};

using Producer = Select<Config::kScoreMods, Int8ModsProducer<Config>, PlainProducer>::Type;
using ModsConsumer = Select<Config::kBlocks, Int8BlocksConsumer<Config>, Int8ModsConsumer<Config>>::Type;
using Consumer = Select<Config::kScoreMods, ModsConsumer, PlainConsumer>::Type;

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) attn_int8_sm90(const
                                                                                 __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    RoleBarriers<Config> bars(smem_addr_at(&SharedStorage::roles));
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw);
        bars.init();
        note_no_cut<Config::kSplitKeys && Config::kVarlen>(params);
    }
    if (threadIdx.x < sizeof(smem.ones) / 4) reinterpret_cast<uint32*>(smem.ones)[threadIdx.x] = kOnes;
    fence_proxy_async();
    __syncthreads();
    run_roles<Config::kConsumers>([&](int lane) { Producer(params, smem, bars).run(lane); },
                                  [&](int32 group) { Consumer(params, smem, bars, group).run(); });
}
