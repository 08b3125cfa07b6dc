// A row of O, of the kernels over latent caches that compute by mma.sync.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent.cuh"
#include "decode/latent_cluster.cuh"
#include "decode/latent_rows.cuh"
#include "decode/rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"

// Pairs of channels side by side, of a lane's 16 accumulators of 64 columns: which they are, and the first one's
// column. Over codes (decode/latent_codes.cuh) a lane has four channels side by side, even ones first.
template <bool kInCodes>
OA_DEVICE constexpr int first_of_pair(int n) {
    return kInCodes ? 4 * (n >> 1) + (n & 1) : 2 * n;
}
template <bool kInCodes>
OA_DEVICE constexpr int second_of_pair(int n) {
    return first_of_pair<kInCodes>(n) + (kInCodes ? 2 : 1);
}
template <bool kInCodes>
OA_DEVICE int32 column_of_pair(int n, int32 quad) {
    return kInCodes ? 16 * (n >> 1) + 4 * quad + 2 * (n & 1) : 8 * n + 2 * quad;
}

// Places of a partial result.
struct ToGlobal {
    float* to;
    template <typename Vector>
    OA_DEVICE void operator()(int32 column, Vector x) const {
        *reinterpret_cast<Vector*>(to + column) = x;
    }
};
struct ToShared {
    uint32 to;
    OA_DEVICE void operator()(int32 column, float2 x) const { store_shared2(to + 4 * column, x.x, x.y); }
    OA_DEVICE void operator()(int32 column, float4 x) const {
        store_shared4(to + 4 * column, make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                                                  __float_as_uint(x.w)));
    }
};

// The lane's part of a partial result of 64 columns, in the order of `pair_of_blocks`, times `unit`: by vectors of
// floats, which store(column, vector) takes.
template <bool kInCodes, typename Store>
OA_DEVICE void store_partial(const float (&x)[16], float unit, int32 quad, const Store& store) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        if constexpr (kInCodes) {
            const int32 column = 8 * n + 8 * (quad & 1) + 2 * (quad >> 1);
            store(column, make_float2(x[2 * n] * unit, x[2 * n + 2] * unit));
            store(column + 4, make_float2(x[2 * n + 1] * unit, x[2 * n + 3] * unit));
        } else {
            store(8 * n + 4 * quad,
                  make_float4(x[2 * n] * unit, x[2 * n + 1] * unit, x[2 * n + 2] * unit, x[2 * n + 3] * unit));
        }
    }
}

// O of row `own` of the CTA's and of 64 columns, `warp`'s; x: the lane's part, in units of `unit`. Of all keys O and
// LSE, else a partial result. With kClusters always a partial result, to the shared address `part`.
template <typename Config>
OA_DEVICE void store_row(const MlaDecodeParams& params, const LatentSplit& split, int32 own, const float (&x)[16],
                         float top, float l, float unit, int32 warp, int32 lane, uint32 part) {
    using Io = typename Config::Io;
    constexpr bool kInCodes = Config::kInCodes;
    const DecodeParams& p = params.decode;
    const int32 quad = lane & 3;
    const bool first = warp == 0 && quad == 0;
    if constexpr (Config::kClusters) {
        using Part = ClusterPart<Config>;
        if (first) store_shared2(part + Part::ml_at(own), top, l);
        store_partial<kInCodes>(x, unit, quad, ToShared{part + Part::o_at(own, 64 * warp)});
        return;
    }
    const int32 flat = int32(blockIdx.x) * Config::kRows + own, token = token_of(p, flat);
    if (token >= split.queries.count) return;
    const int32 head = flat - token * p.group;
    if (split.slot < 0) {
        const RowResult result = finish_row(top, l, sink_log2<Io>(p.sinks, p.sinks_kind, head));
        const float scale = result.o_scale * unit;
        if (first) note_row(params, split.sequence, head, split.queries.first, token, top, result.lse);
        uint16* to = p.o + split.sequence * p.o_stride_b + (split.queries.first + token) * p.o_stride_s +
                     head * p.o_stride_h + 64 * warp;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = first_of_pair<kInCodes>(n), j = second_of_pair<kInCodes>(n);
            *reinterpret_cast<uint32*>(to + column_of_pair<kInCodes>(n, quad)) =
                pack2(Io{}, x[i] * scale, x[j] * scale);
        }
        return;
    }
    const int64 row = int64(split.slot) * params.slot_rows + flat;
    if (first) *reinterpret_cast<float2*>(p.partial_ml + 2 * row) = make_float2(top, l);
    store_partial<kInCodes>(x, unit, quad, ToGlobal{p.partial_o + row * Config::kHeadDimV + 64 * warp});
}
