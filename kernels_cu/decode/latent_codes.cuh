// Products of mla_decode_sm80 and mla_decode_few_sm90 over rows in 8 bits of which a CTA needs each code twice, once
// for S and once for O: codes become fp16 in registers, and stay 8 bits wide in shared memory.
#pragma once
#include "decode/latent_rows.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/half2.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/uniform.cuh"

template <typename T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

// Bytes of a row in a cache; and in a tile that has it as it is: eight rows of 592 or 656 bytes fill all banks, 16
// bytes each, and 16-bit rows are swizzled.
template <int kFormat, int kHeadDim>
constexpr int kLatentRowBytes = kFormat == kRows16     ? 2 * kHeadDim
                                : kFormat == kRowsE4m3 ? kHeadDim
                                                       : 656;
template <int kFormat, int kHeadDim>
constexpr int kCodeRow = kLatentRowBytes<kFormat, kHeadDim> + (kFormat == kRowsE4m3 ? 16 : 0);

// bf16 numbers in fp16.
OA_DEVICE uint32 half_of(uint32 x) {
    const float2 f = unpack2(BFloat16{}, x);
    return pack2(Half{}, f.x, f.y);
}

// One warp's part: rows of Q, 16; of S kOwnKeys keys and a quarter of the channels; of O 64 channels.
//
// A warp has nine steps of 16 channels for S. Rows of 656 bytes: eight of a group that has one scale, and one of the
// channels in 16 bits. A lane's four codes of a key are the channels 4 (lane % 4) and on of a step, in the places that
// mma has for 2 (lane % 4), + 1, + 8 and + 9; Q is in the same order.
//
// Q in bf16 becomes fp16 times a power of two for each row and warp, that its largest number be in [2^14, 2^15): what
// is lost is below 2^-39 of that. O of rows with scales is in units of `unit`, which no scale exceeds more than 8
// times.
template <typename Config>
struct LatentCodes {
    static constexpr bool kGroups = Config::kFormat == kRows656;
    static constexpr int kSteps = 9, kCodeSteps = kGroups ? 8 : 9;
    static constexpr int kTiles = Config::kKeys / 2 / 8;  // of 8 keys, of a warp's S
    static constexpr uint32 kRow = Config::kTileRow;
    static constexpr bool kNarrowed = Config::kNarrowed;  // Q in bf16
    static constexpr uint32 kScales = 512, kRope = 528;  // bytes of a row
    static_assert(Config::kKeys == 64 && Config::kRows == 16 && Config::kParts == 4, "the warps of S");

    // Steps of Q in registers; those behind are in shared memory, in the order of fragments, where all teams find them.
    static constexpr int kHeld = Config::kHeldSteps;
    uint32 q[kHeld][4];
    uint32 spare;  // their address there, of the lane
    float back[2];  // what S of a row is multiplied by for Q as it was
    float unit;

    // all_teams(): a barrier of all warps.
    template <typename Barrier>
    OA_DEVICE void begin(uint32 q_smem, uint32 spare_smem, int part, int lane, const Barrier& all_teams) {
        uint32 q[kSteps][4];
        unit = __uint_as_float(0x00800000);
        const int row = lane >> 2;
        uint32 top[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kCodeSteps; ++i) {
            const uint32 byte = (kCodeSteps * part + i) * 32 + (lane & 3) * 8;
            const uint32 at =
                q_smem + row * 2 * Config::kHeadDim + (byte & ~127u) + (((byte >> 4 & 7) ^ row) << 4) + (byte & 8);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint2 x = load_shared2(at + r * 16 * Config::kHeadDim);
                q[i][r] = x.x, q[i][2 + r] = x.y;
                if constexpr (kNarrowed)
                    top[r] = max_abs2(typename Config::Io{}, max_abs2(typename Config::Io{}, top[r], x.x), x.y);
            }
        }
        if constexpr (kGroups) {
            const int mi = lane >> 3, own = (lane & 7) + (mi & 1) * 8;
            ldmatrix_x4(q[8],
                        q_smem + own * 2 * Config::kHeadDim + 1024 + (((2 * part + (mi >> 1)) ^ (lane & 7)) << 4));
        }
        back[0] = back[1] = 1.0f;
        if constexpr (kNarrowed) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[r] = max_abs2(typename Config::Io{}, top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
                top[r] = max_abs2(typename Config::Io{}, top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
                const float2 x = unpack2(typename Config::Io{}, top[r]);
                const int exponent = int(__float_as_uint(max_nan(x.x, x.y)) >> 23 & 255);
                // 2^(14 - (exponent - 127)), a normal number as its reciprocal is.
                const int up = min_of(268 - exponent, 253);
                const float factor = __uint_as_float(uint32(up) << 23);
                back[r] = __uint_as_float(uint32(254 - up) << 23);
#pragma unroll
                for (int i = 0; i < kCodeSteps; ++i)
#pragma unroll
                    for (int j = r; j < 4; j += 2) {
                        const float2 y = unpack2(typename Config::Io{}, q[i][j]);
                        q[i][j] = pack2(Half{}, y.x * factor, y.y * factor);
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) this->q[i][j] = q[i][j];
        if constexpr (kHeld < kSteps) {
            all_teams();
            spare = spare_smem + (part * (kSteps - kHeld) * 32 + lane) * 16;
#pragma unroll
            for (int i = kHeld; i < kSteps; ++i)
                store_shared4(spare + (i - kHeld) * 512, make_uint4(q[i][0], q[i][1], q[i][2], q[i][3]));
            all_teams();
        }
    }
    OA_DEVICE void step_of_q(uint32 (&x)[4], int i) const {
        if (i < kHeld) {
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = q[i < kHeld ? i : 0][j];
        } else {
            const uint4 y = load_shared4(spare + (i - kHeld) * 512);
            x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
        }
    }

    // S of the keys from `rows` on over this warp's channels.
    OA_DEVICE void scores(float (&s)[kTiles][4], uint32 rows, int part, int lane) const {
        const int mi = lane >> 3;
        const uint32 from = rows + (mi * 8 + (lane & 7)) * kRow + kCodeSteps * part * 16;
#pragma unroll
        for (int i = 0; i < kCodeSteps; ++i) {
            uint32 codes[4], own[4];
            step_of_q(own, i);
            ldmatrix_x4(codes, from + i * 16);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const uint2 b = halves_of_e4m3x4(codes[n]);
                mma_m16n8k16(Half{}, s[n], own, b.x, b.y);
            }
        }
        if constexpr (kGroups) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float scale =
                        load_shared_float(rows + (8 * n + 2 * (lane & 3) + j) * kRow + kScales + part * 4);
                    s[n][j] *= back[0] * scale, s[n][2 + j] *= back[1] * scale;
                }
            uint32 own[4];
            step_of_q(own, 8);
            const uint32 rope = rows + ((lane & 7) + (mi >> 1) * 8) * kRow + kRope + part * 32 + (mi & 1) * 16;
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                uint32 b[4];
                ldmatrix_x4(b, rope + n * 8 * kRow);
                if constexpr (!kNarrowed)
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[i] = half_of(b[i]);
                mma_m16n8k16(typename Config::Io{}, s[n], own, b[0], b[1]);
                mma_m16n8k16(typename Config::Io{}, s[n + 1], own, b[2], b[3]);
            }
        } else if constexpr (kNarrowed) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) s[n][j] *= back[j >> 1];
        }
    }

    // Scales of a tile in units, fp16, to shared memory [4][kKeys]: those of a group and half of the keys by each warp.
    // Returns what O is to be multiplied by.
    OA_DEVICE float share_scales(uint32 tile, uint32 to, int warp, int lane) {
        float top = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 x = load_shared4(tile + (half * 32 + lane) * kRow + kScales);
            top = fmaxf(top, fmaxf(fmaxf(fabsf(__uint_as_float(x.x)), fabsf(__uint_as_float(x.y))),
                                   fmaxf(fabsf(__uint_as_float(x.z)), fabsf(__uint_as_float(x.w)))));
        }
        top = __uint_as_float(max_of_warp(__float_as_uint(top)));
        float factor = 1.0f;
        if (top > 8.0f * unit) {
            const float before = unit;
            unit = __uint_as_float(__float_as_uint(top) & 0x7f800000);
            factor = before * reciprocal();
        }
        const int key = (warp & 1) * 32 + lane, group = warp >> 1;
        const float own = load_shared_float(tile + key * kRow + kScales + group * 4) * reciprocal();
        store_shared(to + (group * 64 + key) * 2, uint16(pack2(Half{}, own, 0.0f)));
        return factor;
    }
    // 1 / unit, a power of two.
    OA_DEVICE float reciprocal() const {
        return __uint_as_float(max_of(0x7f000000 - int32(__float_as_uint(unit)), 0x00400000));
    }

    // O += P V of 16 keys and the warp's 64 channels, from `rows` on: o[8 c + 0..3] has of 16 channels the even ones,
    // o[8 c + 4..7] the odd ones. Returns something that is there when all loads have returned.
    OA_DEVICE static uint32 values(float* o, const uint32 (&p)[4], uint32 rows, int lane) {
        const int mi = lane >> 3;
        const uint32 from = rows + ((mi & 1) * 8 + (lane & 7)) * kRow + (mi >> 1) * 16;
        uint32 last = 0;
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
            uint32 codes[4];
            ldmatrix_x4_trans(codes, from + c * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Two keys of a channel side by side.
                const uint2 a = halves_of_e4m3x4(permute_bytes(codes[2 * i], 0, 0x3120));
                const uint2 b = halves_of_e4m3x4(permute_bytes(codes[2 * i + 1], 0, 0x3120));
                mma_m16n8k16(Half{}, o + 8 * (c + i), p, a.x, b.x);
                mma_m16n8k16(Half{}, o + 8 * (c + i) + 4, p, a.y, b.y);
            }
            last = codes[3];
        }
        return last;
    }
};

// What a kernel has of it, and the type of P.
template <typename Config, bool kInCodes>
struct IfCodes {
    using Type = LatentCodes<Config>;
    using P = Half;
};
template <typename Config>
struct IfCodes<Config, false> {
    struct Type {};
    using P = typename Config::Io;
};
