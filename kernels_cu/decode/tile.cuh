// What one warp of a decode kernel does with a tile of keys: scores, softmax, output (entry/decode_sm80.cu has the
// equations).
//
// Keys are on the M side of both products. Lane l has in S^T the keys l/4 and l/4 + 8 of each 16 for the rows 2 (l % 4)
// + {0, 1} of each 8; a transposition of 8x8 blocks makes P^T from it. In O^T it has channels of the same rows.
#pragma once
#include "decode/kv_copy.cuh"
#include "decode/kv_dequant.cuh"
#include "decode/kv_row.cuh"
#include "decode/query_steps.cuh"
#include "ptx/cvt.cuh"
#include "ptx/half2.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"

constexpr float kDecodeSlack = 8.0f;  // the maximum is updated once probabilities exceed 2^8
// 2^80: with the smallest scale of V, 2^-60, still far beyond 2^kDecodeSlack, so that the first key sets the factor.
constexpr float kLargestFactor = 1208925819614629174706176.0f;

// 1 / x of a power of two from 2^-126 to 2^126.
OA_DEVICE float inverse_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// Largest value of all lanes with the same rows.
OA_DEVICE float max_over_keys(float v) {
#pragma unroll
    for (int mask = 4; mask <= 16; mask <<= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, mask));
    return v;
}
OA_DEVICE float sum_over_keys(float v) {
#pragma unroll
    for (int mask = 4; mask <= 16; mask <<= 1) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

// A vector of 16, 8 or 4 bytes of a row from shared memory.
template <int kVecBytes>
OA_DEVICE void load_vec(uint32 (&w)[kVecBytes / 4], const uint8* at) {
    if constexpr (kVecBytes == 16) {
        uint4 x = *reinterpret_cast<const uint4*>(at);
        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    } else if constexpr (kVecBytes == 8) {
        uint2 x = *reinterpret_cast<const uint2*>(at);
        w[0] = x.x, w[1] = x.y;
    } else {
        w[0] = *reinterpret_cast<const uint32*>(at);
    }
}

// Words from shared memory, 16 bytes at a time.
template <int kGroups>
OA_DEVICE void load_params(uint32 (&w)[kGroups], const uint32* at) {
    constexpr int kBytes = kGroups >= 4 ? 16 : 4 * kGroups;
#pragma unroll
    for (int i = 0; i < 4 * kGroups / kBytes; ++i) {
        uint32 x[kBytes / 4];
        load_vec<kBytes>(x, reinterpret_cast<const uint8*>(at) + i * kBytes);
#pragma unroll
        for (int j = 0; j < kBytes / 4; ++j) w[i * (kBytes / 4) + j] = x[j];
    }
}

template <typename Config>
struct DecodeTile {
    static constexpr bool kInOrder = kv_in_order(Config::kKKind);  // K and V alike
    using KRow = KvRow<Config::kKKind, Config::kHeadDim, 4>;
    using VRow = KvRow<Config::kVKind, Config::kHeadDim, 8>;
    using KSmem = KTile<Config::kKKind, Config::kHeadDim>;
    using VSmem = VTile<Config::kVKind, Config::kHeadDim>;
    using Matrix = MatrixTile<Config::kHeadDim>;

    // Element type of the products: that of a 16-bit cache, fp16 for codes.
    template <bool kQuantized>
    using ProductType = typename Select<kQuantized, Half, typename Config::Io>::Type;

    static constexpr bool kZeroProduct = has_zero_product(Config::kKKind, Config::kKGroups);

    // A warp's state of its rows: lane l has rows 2 (l % 4) + {0, 1} of each 8.
    struct Rows {
        float scale[Config::kNTiles][2], bias[Config::kNTiles][2];
        float sum[Config::kQuantK ? Config::kKGroups : 1][Config::kNTiles][2];
        float start[Config::kQuantK ? Config::kKGroups : 1][Config::kNTiles][2];  // see QueryRow
        uint32 zero_b[Config::kNTiles][2];  // `sum` as a fragment, with kZeroProduct in its place
        int32 end[Config::kNTiles][2];  // keys before it are visible
        float m[Config::kNTiles][2], l[Config::kNTiles][2];
        float f[Config::kNTiles][2];  // power of two that brings p * scale of V into the range of fp16
        float z[Config::kQuantV ? Config::kVGroups : 1][Config::kNTiles][2];  // sum of p * zero of V
        float o[Config::kNTiles][Config::kHeadDim / 16][4];
        bool row_scales;  // kInOrder: each row of K and V has a scale, else a row's scale is 1
    };
    // A token's parameters; 1 where the cache has none.
    template <int kGroups>
    static OA_DEVICE void params_of(uint32 (&w)[kGroups], const uint32* at, const Rows& rows) {
        if (!kInOrder || rows.row_scales) {
            load_params(w, at);
        } else {
            w[0] = 0x3f800000u;
        }
    }
    using Scores = float[Config::kMTiles][Config::kNTiles][4];

    // Tokens of a 16-key slice by rows of the fragment: row r of S^T, and slot r of P V, is token r/2 % 4 + 4 (r % 2) +
    // 8 (r / 8), which keeps lanes that read together on different banks.
    static OA_DEVICE int token_of_row(int r) { return Config::kByMatrix ? r : ((r >> 1) & 3) + 4 * (r & 1) + (r & 8); }

    // mma_qk where ldmatrix gives K's fragments, without packing registers.
    template <typename Queries>
    static OA_DEVICE void mma_qk_by_matrix(Scores& x, const Queries& b, const Rows& rows, const KvStage<Config>& stage,
                                           int first, int lane) {
        // Matrices of a fragment: keys 0 .. 7 | 8 .. 15 of a chunk, then of the next one.
        uint32 at = smem_addr_of(stage.k) + first * KRow::kBytes;
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int n = 0; n < Config::kNTiles; ++n) x[i][n][0] = x[i][n][1] = x[i][n][2] = x[i][n][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step)
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i) {
                uint32 a[4];
                ldmatrix_x4(a, at + i * 16 * KRow::kBytes + Matrix::offset(lane & 15, 2 * step + (lane >> 4)));
#pragma unroll
                for (int n = 0; n < Config::kNTiles; ++n) {
                    const uint2 q = query_step(b, n, step);
                    mma_m16n8k16(typename Config::Io{}, x[i][n], a, q.x, q.y);
                }
            }
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                for (int y = 0; y < 4; ++y) x[i][n][y] *= rows.scale[n][y & 1];
    }

    // Scores of one tile in base-2 units. Queries: decode/query_steps.cuh.
    template <typename Queries>
    static OA_DEVICE void mma_qk(Scores& x, const Queries& b, const Rows& rows, const KvStage<Config>& stage,
                                 HalfMagic magic, int first, int lane) {
        if constexpr (Config::kByMatrix) {
            mma_qk_by_matrix(x, b, rows, stage, first, lane);
            return;
        }
        using Type = ProductType<Config::kQuantK>;
        constexpr int kSteps = Config::kHeadDim / 16, kGroupSteps = kSteps / Config::kKGroups;
        constexpr int kVecSteps = kSteps / KRow::kVecs;
        // A warp that is alone on its scheduler waits for each product of a sum: every second one has a sum of its own.
        constexpr bool kTwoSums = Config::kHeadDim > 256;
        constexpr bool kOffsetCodes = KeyCodes<Config::kKKind>::kOffset01 != 0.0f;
        int q = lane & 3, token = token_of_row(lane >> 2);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            const uint8* at = stage.k + (first + i * 16) * KRow::kBytes;
            float acc[Config::kNTiles][4], odd[kTwoSums ? Config::kNTiles : 1][4] = {};
            const uint32* params = stage.k_params + (first + i * 16 + token) * Config::kKGroups;
            uint32 words[2][Config::kKGroups];  // of the tokens of rows l / 4 and l / 4 + 8
            if (Config::kQuantK) {
                params_of(words[0], params, rows);
                params_of(words[1], params + 8 * Config::kKGroups, rows);
            }
            if constexpr (kZeroProduct) {  // x = sum of z sum(Q): columns are (part of the sums, group)
                uint32 z[4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    uint2 two = *reinterpret_cast<const uint2*>(params + r * 8 * Config::kKGroups + 2 * (q & 1));
                    z[r] = z[2 + r] = permute_bytes(two.x, two.y, 0x7632);
                }
#pragma unroll
                for (int n = 0; n < Config::kNTiles; ++n) {
                    x[i][n][0] = x[i][n][1] = x[i][n][2] = x[i][n][3] = 0.0f;
                    mma_m16n8k16(BFloat16{}, x[i][n], z, rows.zero_b[n][0], rows.zero_b[n][1]);
                }
            }
#pragma unroll
            for (int vec = 0; vec < KRow::kVecs; ++vec) {
                uint32 w[2][KRow::kVecBytes / 4];
                uint32 offset = KSmem::offset(token, q, vec);
                load_vec<KRow::kVecBytes>(w[0], at + offset);
                load_vec<KRow::kVecBytes>(w[1], at + offset + 8 * KRow::kBytes);
                uint32 a[2][2 * kVecSteps];  // elements 0, 1 and 2, 3 of each unit
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    if constexpr (!Config::kQuantK) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) a[r][j] = w[r][j];
                    } else {
                        constexpr int kWordRegs = 2 * kVecSteps / (KRow::kVecBytes / 4);
#pragma unroll
                        for (int j = 0; j < KRow::kVecBytes / 4; ++j)
                            unpack_k_word<Config::kKKind>(w[r][j], magic, a[r] + j * kWordRegs);
                    }
                }
#pragma unroll
                for (int j = 0; j < kVecSteps; ++j) {
                    int step = vec * kVecSteps + j;
                    uint32 fragment[4] = {a[0][2 * j], a[1][2 * j], a[0][2 * j + 1], a[1][2 * j + 1]};
                    int group = step / kGroupSteps;
                    if (step % kGroupSteps == 0)
#pragma unroll
                        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                            for (int y = 0; y < 4; ++y) acc[n][y] = kOffsetCodes ? rows.start[group][n][y & 1] : 0.0f;
#pragma unroll
                    for (int n = 0; n < Config::kNTiles; ++n) {
                        const uint2 q = query_step(b, n, step);
                        mma_m16n8k16(Type{}, kTwoSums && step % 2 ? odd[kTwoSums ? n : 0] : acc[n], fragment, q.x, q.y);
                    }
                    if (step % kGroupSteps != kGroupSteps - 1) continue;
                    if constexpr (kTwoSums) {
                        static_assert(!Config::kQuantK, "one group");
#pragma unroll
                        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                            for (int y = 0; y < 4; ++y) acc[n][y] += odd[n][y];
                    }
                    float s[2] = {1.0f, 1.0f}, z[2] = {0.0f, 0.0f};
                    if (Config::kQuantK)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            s[r] = param_scale<Config::kKKind>(words[r][group]);
                            z[r] = param_zero<Config::kKKind>(words[r][group]);
                        }
#pragma unroll
                    for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                        for (int y = 0; y < 4; ++y) {
                            if (!Config::kQuantK) {
                                x[i][n][y] = acc[n][y] * rows.scale[n][y & 1];
                                continue;
                            }
                            if (Config::kKGroups == 1) {
                                float base = rows.bias[n][y & 1];
                                if (kv_has_zeros(Config::kKKind)) base = fmaf(z[y >> 1], rows.sum[0][n][y & 1], base);
                                x[i][n][y] = fmaf(acc[n][y] * s[y >> 1], rows.scale[n][y & 1], base);
                                continue;
                            }
                            float base = kZeroProduct || group > 0 ? x[i][n][y] : 0.0f;
                            if (kv_has_zeros(Config::kKKind) && !kZeroProduct)
                                base = fmaf(z[y >> 1], rows.sum[group][n][y & 1], base);
                            x[i][n][y] = fmaf(acc[n][y], s[y >> 1], base);
                            if (group == Config::kKGroups - 1)
                                x[i][n][y] = fmaf(x[i][n][y], rows.scale[n][y & 1], rows.bias[n][y & 1]);
                        }
                }
            }
        }
    }

    static OA_DEVICE void apply_softcap(Scores& x, float softcap) {
        float inverse = kLn2 / softcap, back = softcap * kLog2e;
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                for (int y = 0; y < 4; ++y) x[i][n][y] = back * tanh_exp2(x[i][n][y] * inverse);
    }

    // Masks keys that a row must not see, and those of another launch; `first`: first key of the tile, `limit`: end of
    // the keys.
    static OA_DEVICE void mask_keys(Scores& x, const Rows& rows, int32 first, int32 limit, int32 window_left,
                                    int lane) {
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                for (int y = 0; y < 4; ++y) {
                    int32 key = first + i * 16 + token_of_row(lane >> 2) + 8 * (y >> 1), end = rows.end[n][y & 1];
                    bool hidden =
                        key >= min_of(end, limit) || (window_left >= 0 && int64(key) < int64(end) - 1 - window_left);
                    if (hidden) x[i][n][y] = neg_inf();
                }
    }

    static OA_DEVICE void scale_output(Rows& rows, int n, int r, float by) {
#pragma unroll
        for (int d = 0; d < Config::kHeadDim / 16; ++d) {
            rows.o[n][d][r] *= by;
            rows.o[n][d][2 + r] *= by;
        }
    }

    // Updates the running maximum when a score is more than kDecodeSlack above it.
    static OA_DEVICE void update_maximum(const Scores& x, Rows& rows) {
        float top[Config::kNTiles][2];
        bool grew = false;
#pragma unroll
        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[n][r] = fmaxf(x[0][n][r], x[0][n][2 + r]);
#pragma unroll
                for (int i = 1; i < Config::kMTiles; ++i)
                    top[n][r] = fmaxf(top[n][r], fmaxf(x[i][n][r], x[i][n][2 + r]));
                grew |= top[n][r] - rows.m[n][r] > kDecodeSlack;
            }
        if (!__any_sync(0xffffffffu, grew)) return;
#pragma unroll
        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float m_new = fmaxf(rows.m[n][r], max_over_keys(top[n][r]));
                float alpha = exp2_approx(rows.m[n][r] - m_new);
                float o_scale = alpha;
                if (Config::kQuantV) {
                    // Probabilities shrink by alpha: the factor grows, in whole powers of two.
                    float steps = fminf(floorf(m_new - rows.m[n][r]), 126.0f);
                    float f_new =
                        fminf(rows.f[n][r] * __uint_as_float(uint32(127 + int32(steps)) << 23), kLargestFactor);
                    o_scale *= f_new * inverse_power(rows.f[n][r]);
                    rows.f[n][r] = f_new;
#pragma unroll
                    for (int group = 0; group < Config::kVGroups; ++group) rows.z[group][n][r] *= alpha;
                }
                rows.m[n][r] = m_new;
                rows.l[n][r] *= alpha;
                scale_output(rows, n, r, o_scale);
            }
    }

    // Brings the largest p * scale of V near 1, where fp16 would overflow.
    static OA_DEVICE void update_factor(const float (&largest)[Config::kNTiles][2], Rows& rows) {
        bool over = false;
#pragma unroll
        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) over |= largest[n][r] * rows.f[n][r] > 256.0f;
        if (!__any_sync(0xffffffffu, over)) return;
#pragma unroll
        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float most = max_over_keys(largest[n][r]);
                if (most * rows.f[n][r] <= 256.0f) continue;
                int32 exponent = min_of(max_of(int32(__float_as_uint(most) >> 23) - 127, -79), 126);
                float f_new = __uint_as_float(uint32(127 - exponent) << 23);
                scale_output(rows, n, r, f_new * inverse_power(rows.f[n][r]));
                rows.f[n][r] = f_new;
            }
    }

    // O^T += V^T P^T of 16 keys; b: P^T as fragments, one for each group of V.
    static OA_DEVICE void mma_pv(Rows& rows, const uint32 (&b)[Config::kVGroups][Config::kNTiles][2], const uint8* at,
                                 HalfMagic magic, int lane) {
        using Type = ProductType<Config::kQuantV>;
        if constexpr (Config::kByMatrix) {
            // Matrices of a fragment: channels 0 .. 7 | 8 .. 15 of the first 8 keys, then of the others.
            uint32 from = smem_addr_of(at);
#pragma unroll
            for (int d = 0; d < Config::kHeadDim / 16; ++d) {
                uint32 a[4];
                ldmatrix_x4_trans(a, from + Matrix::offset((lane & 7) + (lane >> 4) * 8, 2 * d + ((lane >> 3) & 1)));
#pragma unroll
                for (int n = 0; n < Config::kNTiles; ++n) mma_m16n8k16(Type{}, rows.o[n][d], a, b[0][n][0], b[0][n][1]);
            }
            return;
        }
        constexpr int kUnits = VRow::kUnits, kVecUnits = kUnits / VRow::kVecs;
        int q = lane & 3, g = lane >> 2;
#pragma unroll
        for (int vec = 0; vec < VRow::kVecs; ++vec) {
            uint32 w[4][VRow::kVecBytes / 4];  // of tokens q, q + 4, q + 8, q + 12
#pragma unroll
            for (int t = 0; t < 4; ++t) load_vec<VRow::kVecBytes>(w[t], at + VSmem::offset(q + 4 * t, g, vec));
            uint32 a[2][4 * kVecUnits];  // tokens q, q + 4 | q + 8, q + 12: elements 0 .. 3 of each unit
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int j = 0; j < VRow::kVecBytes / 4; ++j) {
                    uint32 w0 = w[2 * r][j], w1 = w[2 * r + 1][j];
                    if constexpr (!Config::kQuantV) {
                        a[r][2 * j] = permute_bytes(w0, w1, 0x5410);
                        a[r][2 * j + 1] = permute_bytes(w0, w1, 0x7632);
                    } else {
                        constexpr int kWordRegs = 4 * kVecUnits / (VRow::kVecBytes / 4);
                        unpack_v_words<Config::kVKind>(w0, w1, magic, g, a[r] + j * kWordRegs);
                    }
                }
#pragma unroll
            for (int j = 0; j < kVecUnits; ++j) {
                int unit = vec * kVecUnits + j, group = unit * Config::kVGroups / kUnits;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int e = 4 * j + 2 * half;
                    uint32 fragment[4] = {a[0][e], a[0][e + 1], a[1][e], a[1][e + 1]};
#pragma unroll
                    for (int n = 0; n < Config::kNTiles; ++n)
                        mma_m16n8k16(Type{}, rows.o[n][2 * unit + half], fragment, b[group][n][0], b[group][n][1]);
                }
            }
        }
    }

    static OA_DEVICE void softmax_pv(Scores& x, Rows& rows, const KvStage<Config>& stage, HalfMagic magic, int first,
                                     int lane) {
        using Type = ProductType<Config::kQuantV>;
        update_maximum(x, rows);
        int token = token_of_row(lane >> 2);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                for (int y = 0; y < 4; ++y) {
                    x[i][n][y] = exp2_approx(x[i][n][y] - rows.m[n][y & 1]);
                    rows.l[n][y & 1] += x[i][n][y];
                }
        float s[Config::kMTiles][Config::kVGroups][2];
        if (Config::kQuantV) {
            float largest[Config::kNTiles][2] = {};
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    uint32 words[Config::kVGroups];
                    params_of(words, stage.v_params + (first + i * 16 + token + 8 * r) * Config::kVGroups, rows);
                    float most = param_scale<Config::kVKind>(words[0]);
#pragma unroll
                    for (int group = 0; group < Config::kVGroups; ++group) {
                        s[i][group][r] = param_scale<Config::kVKind>(words[group]);
                        most = fmaxf(most, s[i][group][r]);
                        if (!kv_has_zeros(Config::kVKind)) continue;
                        float zero = param_zero<Config::kVKind>(words[group]);
#pragma unroll
                        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                            for (int y = 0; y < 2; ++y)
                                rows.z[group][n][y] = fmaf(x[i][n][2 * r + y], zero, rows.z[group][n][y]);
                    }
#pragma unroll
                    for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                        for (int y = 0; y < 2; ++y) largest[n][y] = fmaxf(largest[n][y], x[i][n][2 * r + y] * most);
                }
            update_factor(largest, rows);
        }
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            uint32 b[Config::kVGroups][Config::kNTiles][2];
            if (Config::kVGroups > 1)  // once for all groups
#pragma unroll
                for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                    for (int y = 0; y < 4; ++y) x[i][n][y] *= rows.f[n][y & 1];
#pragma unroll
            for (int group = 0; group < Config::kVGroups; ++group)
#pragma unroll
                for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float p0 = x[i][n][2 * r], p1 = x[i][n][2 * r + 1];
                        if (Config::kQuantV) {  // a NaN scale makes NaN of 0 too: docs/kv_formats.md
                            p0 *= s[i][group][r];
                            p1 *= s[i][group][r];
                            if (Config::kVGroups == 1) p0 *= rows.f[n][0], p1 *= rows.f[n][1];
                        }
                        b[group][n][r] = transpose_8x8(pack2(Type{}, p0, p1));
                    }
            mma_pv(rows, b, stage.v + (first + i * 16) * VRow::kBytes, magic, lane);
        }
    }
};
