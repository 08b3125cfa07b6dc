// A block of 128 keys of K, behind a launch that has summed up samples (quantize/value_sums.cuh). The
// bits are those of quantize/rows.cuh.
#pragma once
#include "quantize/rows.cuh"
#include "quantize/value_sums.cuh"

template <int kHeadDim>
struct KeysStorage {
    alignas(16) float mean[kHeadDim];
    GroupStorage groups;
};

// By a CTA of 2 * kHeadDim threads, which may be launched while the kernel ahead ends: until then it reads k alone. The
// CTA of a head's first block stores its mean. A tile of scales is a block.
template <typename Io, int kHeadDim>
OA_DEVICE void quantize_keys_block(const QuantizeParams& p, const QuantizeItem& t, KeysStorage<kHeadDim>& s) {
    static_assert(kCommonKeyTile == kBlockRows, "the grouping sm90");
    constexpr int kColumns = kHeadDim / 8;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    int32 first = t.index * kBlockRows, count = min_of(t.len - first, kBlockRows);
    uint4 raw[kSteps];
    load_rows<kColumns>(p, cc, ty, t.rows, t.stride_bytes, count, raw);
    s.groups.template clear<2 * kHeadDim>();
    wait_for_kernel_ahead();
    if (tid < kHeadDim) {
        float of_channel = key_mean<kHeadDim>(p, t);
        s.mean[tid] = of_channel;
        if (t.index == 0 && tid < p.head_dim_pad)
            p.k_mean[sequence_head(t, p.num_kv_heads) * p.head_dim_pad + tid] = of_channel;
    }
    __syncthreads();
    float mean[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] = s.mean[cc * 8 + j];

    // All rows of a thread have one group. Where all rows exist and are finite, lane 0 of a row's has its magnitude;
    // else lane cc < 8 has that of one row (combine_rows).
    Grouping grouping(kPerThread, kCommonKeyTile, false, false);
    int32 own_row = ty + row_of_lane(cc & 7) * kRowLanes, slot = grouping.slot(own_row);
    bool regular = count == kBlockRows, bad = false;
    if (regular) {
        float most = largest_of_rows<Io, kColumns, 0, kSteps>(raw, mean);
        if (cc == 0) {
            reduce_max_shared(&s.groups.amax[slot], __float_as_uint(most));
            if (!is_finite(most)) s.groups.irregular = 1;
        }
        __syncthreads();
        regular = s.groups.irregular == 0;
        if (!regular) {
            __syncthreads();
            s.groups.template clear<2 * kHeadDim>();
            __syncthreads();
        }
    }
    if (!regular) {
        forget(raw);
        float most_of[kSteps], none[1][8];
        float most = largest_of_any_row<Io, kColumns, NoRotation>(raw, mean, none, most_of, ty, count);
        bad = !is_finite(most);
        if (cc < 8) {
            reduce_max_shared(&s.groups.amax[slot], bad ? 0 : __float_as_uint(most));
            if (bad) reduce_max_shared(&s.groups.bad[slot], 1);
        }
        __syncthreads();
    }
    float scale = scale_of(__uint_as_float(s.groups.amax[slot]), 127), inverse = div_rn(1.0f, scale);
    if (cc < 8) store_scale(p, t, NoRotation{}, false, first, count, grouping, own_row, slot, scale, s.groups);
    if (bad) inverse = quiet_nan();
    forget(raw);

    uint8* to = p.k_int + (output_row(t, p.seqlen_k) + first + ty) * p.head_dim_pad + cc * 8;
    bool has_channels = cc * 8 < p.head_dim_pad;
#pragma unroll
    for (int i = 0; i < kSteps; ++i, to += kRowLanes * p.head_dim_pad) {
        float of_row = regular ? inverse : __shfl_sync(0xffffffffu, inverse, row_of_lane(i), kColumns), x[8];
        uint32 n[8];
        unpack8(Io{}, raw[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) n[j] = __float_as_uint(fmaf(x[j] - mean[j], of_row, kRound));
        uint2 packed{pack_low_bytes(n[0], n[1], n[2], n[3]), pack_low_bytes(n[4], n[5], n[6], n[7])};
        if (!regular && !is_finite(of_row)) packed.x = packed.y = 0;
        if (has_channels && (regular || ty + i * kRowLanes < count)) *reinterpret_cast<uint2*>(to) = packed;
    }
}
