// What the warps of mla_decode_sm80 compute, whose comment has the design: S, P and O of a CTA's rows.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent_cluster.cuh"
#include "decode/latent_codes.cuh"
#include "decode/latent_producer.cuh"
#include "decode/latent_row_store.cuh"
#include "decode/latent_rows.cuh"
#include "decode/latent_scores.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/delay.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mbarrier_meet.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/shared_pairs.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Config: Io, kFormat, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kStages, kHeld, kRowWarps, kParts, kKeyWarps,
// kTeams, kByCopies, kInCodes. Storage, of the CTA: teams, stages, scores, exists, row_scale; of two teams queries,
// full, empty too. Of a team: q, p, scales, alpha, m, l.
template <typename Config, typename Storage>
class LatentWarps {
    static constexpr uint32 kTileRow = Config::kTileRow, kScoreRow = 4 * Config::kKeys;  // bytes
    static constexpr uint32 kQRow = 2 * Config::kHeadDim;
    using Codes = typename IfCodes<Config, Config::kInCodes>::Type;
    using P = typename IfCodes<Config, Config::kInCodes>::P;
    // O and denominators count 2^-kRaised: P over codes, fp16, stays clear of what that rounds to less than 11 bits.
    static constexpr float kRaised = !Config::kInCodes ? 0.0f : Config::kFormat == kRows656 ? 4.0f : 7.0f;
    static constexpr float kLowered = 1.0f / float(1 << int(kRaised));
    static constexpr int kSteps = 4 / Config::kParts;  // of 16 channels, of a panel
    static constexpr int kOwnKeys = Config::kKeys / Config::kKeyWarps;
    static constexpr int kMTiles = Config::kRows / 16;
    // Softmax: lanes of a row, and keys of a lane.
    static constexpr int kLanes = 256 / Config::kRows, kWidth = Config::kKeys / kLanes;
    static_assert((Config::kKeys == 32 || Config::kInCodes) && Config::kWarps == 8 &&
                      Config::kHeadDimV == 64 * Config::kWarps,
                  "the layouts");

  public:
    OA_DEVICE LatentWarps(const MlaDecodeParams& params, Storage& smem, int32 team)
        : params_(params),
          p_(params.decode),
          all_(smem),
          smem_(smem.teams[team]),
          lane_(int32(threadIdx.x) & 31),
          warp_(__shfl_sync(0xffffffffu, int32(threadIdx.x) >> 5, 0) % Config::kWarps),
          team_(team),
          number_(team) {}

    // Q of a split is on its way to shared memory, with one team to the place of a tile, 16 bytes of 128 swizzled by
    // row; rows that the sequence has not are zeros.
    OA_DEVICE void ask(const LatentSplit& split) const {
        if constexpr (Config::kByCopies) {
            constexpr int kChunks = Config::kHeadDim / 8, kThreads = Config::kTeams * Config::kTeamThreads;
#pragma unroll 1
            for (int i = 0; i < (Config::kRows * kChunks + kThreads - 1) / kThreads; ++i) {
                const int32 place = int32(threadIdx.x) + i * kThreads;
                const int32 row = place / kChunks, chunk = place - row * kChunks;
                const int32 flat = first_row() + row, token = token_of(p_, flat);
                const bool exists = token < split.queries.count;
                const uint16* from = p_.q + chunk * 8;
                if (exists)
                    from += split.sequence * p_.q_stride_b + (split.queries.first + token) * p_.q_stride_s +
                            (flat - token * p_.group) * p_.q_stride_h;
                if (Config::kRows * kChunks % kThreads == 0 || row < Config::kRows)
                    cp_async_16(q_place() + row * kQRow + (chunk & ~7) * 16 + (((chunk & 7) ^ (row & 7)) << 4), from,
                                exists ? 16 : 0);
            }
            cp_async_commit();
        }
    }
    // Q to registers, and what a split begins with. With kByCopies the tile asked for behind Q may be under way.
    OA_DEVICE void begin(const LatentSplit& split) {
        if constexpr (Config::kByCopies) {
            cp_async_wait<Config::kTeams == 1 ? 1 : 0>();
            all_teams();
            if constexpr (Config::kInCodes) {
                codes_.begin(q_place(), spare_steps(), part_of(warp_), lane_, [this] { all_teams(); });
            } else {
                load_q();
            }
            if constexpr (Config::kTeams == 1) all_teams();
        } else {
            load_q(split);
        }
        const int32 lane = fresh(lane_), warp = fresh(warp_);
        m_ = kLowest, l_ = 0.0f;
        const int32 token = min_of(token_of(p_, first_row() + own_row(warp, lane)), split.queries.count - 1);
        const int32 end = split.seq_len - split.queries.count + token + 1;
        first_seen_ = p_.window_left < 0 ? 0 : max_of(end - 1 - p_.window_left, 0);
        end_ = min_of(end, split.end);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int i = 0; i < 32; ++i) o_[m][i] = 0.0f;
    }

  private:
    // From shared memory; where there are two teams, panels that registers do not hold stay there.
    OA_DEVICE void load_q() {
#pragma unroll
        for (int panel = 0; panel < Config::kHeld; ++panel)
#pragma unroll
            for (int step = 0; step < kSteps; ++step) ldmatrix_x4(q_[panel][step], fragment_of_q(panel, step));
    }
    OA_DEVICE uint32 fragment_of_q(int panel, int step) const {
        const int32 lane = fresh(lane_), warp = fresh(warp_), matrix = lane >> 3;
        const int32 row = row_warp(warp) * 16 + (lane & 7) + (matrix & 1) * 8;
        const int32 chunk = 2 * (kSteps * part_of(warp) + step) + (matrix >> 1);
        return q_place() + row * kQRow + panel * 128 + ((chunk ^ (row & 7)) << 4);
    }
    // From global memory.
    OA_DEVICE void load_q(const LatentSplit& split) {
        const int32 lane = fresh(lane_), warp = fresh(warp_);
        const uint16* from[2];
        bool exists[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = first_row() + row_warp(warp) * 16 + (lane >> 2) + 8 * r, token = token_of(p_, flat);
            exists[r] = token < split.queries.count;
            from[r] = p_.q + 2 * (lane & 3) + 16 * kSteps * part_of(warp);
            if (exists[r])
                from[r] += split.sequence * p_.q_stride_b + (split.queries.first + token) * p_.q_stride_s +
                           (flat - token * p_.group) * p_.q_stride_h;
        }
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel)
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32 x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i] = exists[i & 1]
                               ? *reinterpret_cast<const uint32*>(from[i & 1] + 64 * panel + 16 * step + 8 * (i >> 1))
                               : 0;
                if (panel < Config::kHeld) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) q_[panel][step][i] = x[i];
                } else {
                    store_shared4(spare_q(panel, step), make_uint4(x[0], x[1], x[2], x[3]));
                }
            }
    }

  public:
    // With two teams: waits for a tile, and gives its place back, when the warp has no more to read there.
    OA_DEVICE void wait(int32 tile) const {
        const uint32 number = number_ + uint32(tile) * Config::kTeams;
        mbarrier_wait(smem_addr_of(&all_.full[0]) + stage_of<Config>(number) * 8, parity_of<Config>(number));
    }
    OA_DEVICE void release(int32 tile) const {
        // Behind the last load's result: an arrival waits for no load, and copies might overtake one.
        const uint32 at = smem_addr_of(&all_.empty[0]) + stage_of_tile(tile) * 8 + (last_ & opaque_zero());
        __syncwarp();
        if (lane_ < int32(kArrivalsOfWarp)) mbarrier_arrive(at);
    }

    // Products of this warp's rows and keys of a tile over its part of the channels: of every panel kSteps steps.
    OA_DEVICE void part_of_scores(int32 tile) {
        float s[kOwnKeys / 8][4];
#pragma unroll
        for (int n = 0; n < kOwnKeys / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        if constexpr (Config::kInCodes) {
            if constexpr (Codes::kGroups) {
                const float factor = codes_.share_scales(tile_at(tile), scales_of(tile), fresh(warp_), fresh(lane_));
                if (factor != 1.0f)
#pragma unroll
                    for (int i = 0; i < 32; ++i) o_[0][i] *= factor;
            }
            const int32 warp = fresh(warp_);
            codes_.scores(s, tile_at(tile) + key_warp(warp) * kOwnKeys * kTileRow, part_of(warp), fresh(lane_));
        } else {
            products_of_keys(s, tile);
        }
        store_scores(s);
    }

  private:
    OA_DEVICE void products_of_keys(float (&s)[kOwnKeys / 8][4], int32 tile) const {
        const int32 lane = fresh(lane_), warp = fresh(warp_);
        // The lane's row for ldmatrix.
        const int key = key_warp(warp) * kOwnKeys + (lane & 7) + (lane >> 4) * 8;
        const int chunk = 2 * kSteps * part_of(warp) + (lane >> 3 & 1);
        const uint32 own = key * kTileRow + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32 from = tile_at(tile) + (own ^ (step * 32));
#pragma unroll
            for (int panel = 0; panel < Config::kPanels; ++panel) {
                uint32 q[4];
                if (panel < Config::kHeld) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) q[i] = q_[panel][step][i];
                } else if constexpr (Config::kTeams > 1) {
                    ldmatrix_x4(q, fragment_of_q(panel, step));
                } else {
                    const uint4 x = load_shared4(spare_q(panel, step));
                    q[0] = x.x, q[1] = x.y, q[2] = x.z, q[3] = x.w;
                }
#pragma unroll
                for (int n = 0; n < kOwnKeys / 8; n += 2) {
                    uint32 b[4];
                    ldmatrix_x4(b, from + n * 8 * kTileRow + panel * 128);
                    mma_m16n8k16(typename Config::Io{}, s[n], q, b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, s[n + 1], q, b[2], b[3]);
                }
            }
        }
    }
    OA_DEVICE void store_scores(const float (&s)[kOwnKeys / 8][4]) const {
        const int32 later = fresh(lane_), own_warp = fresh(warp_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row_warp(own_warp) * 16 + (later >> 2) + 8 * r;
            const uint32 to = scores_place() + (part_of(own_warp) * Config::kRows + row) * kScoreRow + (later & 1) * 8;
#pragma unroll
            for (int n = 0; n < kOwnKeys / 8; ++n) {
                const int unit = 2 * (key_warp(own_warp) * (kOwnKeys / 8) + n) + (later >> 1 & 1);
                store_shared2(to + place_of_scores(row, unit), s[n][2 * r], s[n][2 * r + 1]);
            }
        }
    }

  public:
    // P of this lane's row and keys; returns whether its maximum rose.
    OA_DEVICE bool probabilities(const LatentSplit& split, int32 tile) {
        const int32 lane = fresh(lane_), own = own_row(fresh(warp_), lane), column = lane % kLanes * kWidth;
        const uint32 row = scores_place() + own * kScoreRow;
        float s[kWidth] = {};
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part)
            add_scores<kWidth>(s, row + part * Config::kRows * kScoreRow, own, column);
        __syncwarp();
        finish_scores(s, split, tile, column);
        float top = s[0];
#pragma unroll
        for (int i = 1; i < kWidth; ++i) top = fmaxf(top, s[i]);
#pragma unroll
        for (int distance = 1; distance < kLanes; distance <<= 1)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
        // As `OnlineSoftmax`; the caller may want the maximum itself.
        const bool grew = top - m_ > (params_.row_max == nullptr ? 8.0f : 0.0f) + kRaised;
        float alpha = 1.0f;
        if (grew) {
            alpha = exp2_approx(m_ - (top - kRaised));
            m_ = top - kRaised;
            l_ *= alpha;
        }
        if (lane % kLanes == 0) smem_.alpha[own] = alpha;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            s[i] = exp2_approx(s[i] - m_);
            l_ += s[i];
        }
        uint32 packed[kWidth / 2];
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) packed[i] = pack2(P{}, s[2 * i], s[2 * i + 1]);
        // 16-byte chunks as ldmatrix reads eight rows of them.
        const uint32 to = p_place() + own * kPRow + ((column / 8 ^ (own & 7)) << 4) + column % 8 * 2;
        if constexpr (kWidth == 8) {
            store_shared4(to, make_uint4(packed[0], packed[1], packed[2], packed[3]));
        } else if constexpr (kWidth == 4) {
            store_shared2(to, packed[0], packed[1]);
        } else {
            store_shared(to, packed[0]);
        }
        return grew;
    }
    // O += P V of all rows and this warp's channels, panel `warp_`. grew: whether any warp's maximum has risen.
    OA_DEVICE void add_values(int32 tile, bool grew) {
        if (grew) rescale();
        if constexpr (Config::kInCodes) {
            add_codes(tile);
        } else {
            add_keys(tile);
        }
    }

  private:
    OA_DEVICE void add_codes(int32 tile) {
        const int32 lane = fresh(lane_), warp = fresh(warp_);
        const uint32 probs = p_place() + (lane & 15) * kPRow;
        const uint32 chunk = ((lane >> 4) ^ (lane & 7)) << 4;
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            uint32 a[4];
            ldmatrix_x4(a, probs + (chunk ^ (step * 32)));
            if constexpr (Codes::kGroups) {
                const uint32 scales = scales_of(tile) + (warp >> 1) * 2 * Config::kKeys + step * 32 + (lane & 3) * 4;
                const uint32 low = load_shared(scales), high = load_shared(scales + 16);
                a[0] = mul_half2(a[0], low), a[1] = mul_half2(a[1], low);
                a[2] = mul_half2(a[2], high), a[3] = mul_half2(a[3], high);
            }
            last_ = Codes::values(o_[0], a, tile_at(tile) + step * 16 * kTileRow + warp * 64, lane);
        }
    }
    OA_DEVICE void add_keys(int32 tile) {
        const int32 lane = fresh(lane_);
        // The lane's rows for ldmatrix.
        const uint32 chunk = ((lane >> 4) ^ (lane & 7)) << 4;
        const uint32 k = tile_at(tile) + (lane & 15) * kTileRow + warp_ * 128;
        const uint32 probs = p_place() + (lane & 15) * kPRow;
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            uint32 a[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) ldmatrix_x4(a[m], probs + m * 16 * kScoreRow + (chunk ^ (step * 32)));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32 b[4];
                ldmatrix_x4_trans(b, k + step * 16 * kTileRow + (chunk ^ (n * 32)));
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16(typename Config::Io{}, &o_[m][8 * n], a[m], b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, &o_[m][8 * n + 4], a[m], b[2], b[3]);
                }
            }
        }
    }

  public:
    // Of all keys O and LSE, else a partial result. Behind it the tiles' buffers are free when all warps have come.
    OA_DEVICE void end(const LatentSplit& split) {
#pragma unroll
        for (int distance = 1; distance < kLanes; distance <<= 1) l_ += __shfl_xor_sync(0xffffffffu, l_, distance);
        const int32 own = own_row(fresh(warp_), fresh(lane_));
        // By how much P was raised is nobody else's business: powers of two.
        if (lane_ % kLanes == 0) smem_.m[own] = m_ + kRaised, smem_.l[own] = l_ * kLowered;
        all_teams();
        const int32 lane = fresh(lane_);
        number_ += split.blocks;
        if constexpr (Config::kTeams == 1) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float x[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) x[i] = o_[m][4 * (i >> 1) + 2 * r + (i & 1)];
                    const int32 row = 16 * m + (lane >> 2) + 8 * r;
                    store_row<Config>(params_, split, row, x, smem_.m[row], smem_.l[row], row_scale() * own_unit(),
                                      warp_, lane, part_of_cluster());
                }
        } else {
            end_of_teams(split);
        }
    }

  private:
    // Each team has half of the rows of both: a lane one of its two.
    OA_DEVICE void end_of_teams(const LatentSplit& split) {
        static_assert(Config::kTeams == 1 || (Config::kRows == 16 && Config::kTeams == 2), "a row for each team");
        float own[16], other[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float low = o_[0][4 * (i >> 1) + (i & 1)], high = o_[0][4 * (i >> 1) + 2 + (i & 1)];
            own[i] = team_ == 0 ? low : high, other[i] = team_ == 0 ? high : low;
        }
        const int32 thread = int32(threadIdx.x) % Config::kTeamThreads;
        // Nobody reads Q or scores any more.
        const uint32 first = smem_addr_of(all_.queries), second_place = smem_addr_of(all_.scores);
        const uint32 to = (team_ == 0 ? first : second_place) + thread * 16;
        const uint32 from = (team_ == 0 ? second_place : first) + thread * 16;
        const float factor = own_unit();
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            store_shared4(to + i * 4 * Config::kTeamThreads,
                          make_uint4(__float_as_uint(other[i] * factor), __float_as_uint(other[i + 1] * factor),
                                     __float_as_uint(other[i + 2] * factor), __float_as_uint(other[i + 3] * factor)));
        all_teams();
        const int32 row = (lane_ >> 2) + 8 * team_;
        const auto& second = all_.teams[(team_ ^ 1) % Config::kTeams];
        const float m = smem_.m[row], m_other = second.m[row], top = fmaxf(m, m_other);
        const float weight = exp2_approx(m - top), weight_other = exp2_approx(m_other - top);
        const float l = smem_.l[row] * weight + second.l[row] * weight_other;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const uint4 x = load_shared4(from + i * 4 * Config::kTeamThreads);
            const uint32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                own[i + j] = fmaf(own[i + j] * factor, weight, __uint_as_float(words[j]) * weight_other);
        }
        store_row<Config>(params_, split, row, own, top, l, row_scale(), warp_, lane_, part_of_cluster());
    }
    // What O is in, beside the one scale of e4m3 rows.
    OA_DEVICE float own_unit() const {
        if constexpr (Config::kInCodes) return Codes::kGroups ? codes_.unit * kLowered : kLowered;
        return 1.0f;
    }
    // Of codes' Q the steps that registers do not hold: with two teams in the place of Q as it came.
    OA_DEVICE uint32 spare_steps() const { return Config::kTeams > 1 ? q_place() : smem_addr_of(smem_.q); }
    OA_DEVICE uint32 q_place() const {
        if constexpr (Config::kTeams > 1) return smem_addr_of(all_.queries);
        return smem_addr_of(all_.stages[Config::kStages - 1]);
    }

  public:
    // Of a cluster's CTA, which has one split: what it leaves, in the place of tiles that nobody reads any more.
    OA_DEVICE uint32 part_of_cluster() const { return smem_addr_of(all_.stages[0]); }
    // A barrier of all warps that compute.
    OA_DEVICE void all_teams() const {
        if constexpr (Config::kTeams == 1) {
            random_delay();
            __syncthreads();
        } else if constexpr (kArrivalsOfWarp == 1) {
            named_barrier_sync(3, Config::kTeams * Config::kTeamThreads);
        } else {  // racecheck takes warps that have met at other named barriers before for ones that do not meet here
            mbarrier_arrive_and_wait(smem_addr_of(&all_.both_teams));
        }
    }

  private:
    // Of 64 rows there are no registers for what can be computed anew from this.
    OA_DEVICE static int32 fresh(int32 x) { return Config::kRows == 64 || Config::kInCodes ? in_register(x) : x; }
    // Of the products of S; and the softmax's row.
    OA_DEVICE static int32 row_warp(int32 warp) { return warp % Config::kRowWarps; }
    OA_DEVICE static int32 part_of(int32 warp) { return warp / Config::kRowWarps % Config::kParts; }
    OA_DEVICE static int32 key_warp(int32 warp) { return warp / (Config::kRowWarps * Config::kParts); }
    OA_DEVICE static int32 own_row(int32 warp, int32 lane) {
        return warp * (Config::kRows / Config::kWarps) + lane / kLanes;
    }
    OA_DEVICE int32 first_row() const { return int32(blockIdx.x) * Config::kRows; }
    // The team's tile `tile`.
    OA_DEVICE uint32 stage_of_tile(int32 tile) const {
        if constexpr (Config::kTeams > 1) return stage_of<Config>(number_ + uint32(tile) * Config::kTeams);
        return uint32(tile) % Config::kStages;
    }
    OA_DEVICE uint32 tile_at(int32 tile) const {
        return smem_addr_of(all_.stages[0]) + stage_of_tile(tile) * uint32(sizeof(all_.stages[0]));
    }
    // P, 16-byte chunks swizzled by row; with one team in the place of scores.
    OA_DEVICE uint32 p_place() const {
        if constexpr (Config::kTeams > 1) return smem_addr_of(smem_.p);
        return scores_place();
    }
    OA_DEVICE uint32 scores_place() const { return smem_addr_of(all_.scores[team_]); }
    static constexpr uint32 kPRow = Config::kTeams > 1 ? 128 : kScoreRow;
    OA_DEVICE uint32 scales_of(int32 tile) const {
        return smem_addr_of(smem_.scales[0]) + uint32(tile) % Config::kTeams * uint32(sizeof(smem_.scales[0]));
    }
    // Of Q what has no place in registers: every lane's own.
    OA_DEVICE uint32 spare_q(int panel, int step) const {
        return smem_addr_of(smem_.q) + ((panel - Config::kHeld) * kSteps + step) * 16 * Config::kThreads +
               16 * threadIdx.x;
    }
    OA_DEVICE float row_scale() const { return Config::kFormat == kRowsE4m3 ? all_.row_scale : 1.0f; }
    // S in base-2 units; keys that the row does not see are -inf.
    OA_DEVICE void finish_scores(float (&s)[kWidth], const LatentSplit& split, int32 tile, int32 column) const {
        const float c = p_.softmax_scale * kLog2e * row_scale();
#pragma unroll
        for (int i = 0; i < kWidth; ++i) s[i] *= c;
        if (p_.softcap > 0.0f) {
            const float inverse = kLn2 / p_.softcap, back = p_.softcap * kLog2e;
#pragma unroll
            for (int i = 0; i < kWidth; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
        }
        const int32 first = split.begin + (tile * Config::kTeams + team_) * Config::kKeys;
        if (first + Config::kKeys > end_ || first < first_seen_) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
                if (first + column + i >= end_ || first + column + i < first_seen_) s[i] = neg_inf();
        }
        if (params_.lists_rows != 0) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
                if (!all_.exists[Config::kTeams > 1 ? stage_of_tile(tile) : tile & 1][column + i]) s[i] = neg_inf();
        }
    }

    OA_DEVICE void rescale() {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float alpha = smem_.alpha[16 * m + (lane_ >> 2) + 8 * r];
#pragma unroll
                for (int n = 0; n < 8; ++n) o_[m][4 * n + 2 * r] *= alpha, o_[m][4 * n + 2 * r + 1] *= alpha;
            }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Storage& all_;
    typename Storage::Team& smem_;
    const int32 lane_, warp_, team_;
    uint32 last_ = 0;  // of what was read of a tile
    uint32 number_;  // of the ring's tiles, the team's first one of the split
    float m_, l_;  // of the softmax's row: the maximum, and this lane's part of the denominator
    int32 first_seen_, end_;  // keys that it sees
    uint32 q_[Config::kInCodes ? 1 : Config::kHeld][kSteps][4];
    Codes codes_;
    float o_[kMTiles][32];
};
