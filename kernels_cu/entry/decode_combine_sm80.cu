// Merge of the partial results that decode_sm80 leaves (Flash-Decoding, Dao et al. 2023):
//
//   M = max m_i;  L = sum l_i 2^(m_i - M);  O = sum O_i 2^(m_i - M) / L;  LSE = ln 2 (M + log2 L), sinks added to L
//
// partial_o: [slots, ROWS, HEAD_DIM] fp32, partial_ml: [slots, ROWS, 2]: maximum in base-2 units and denominator.
//
// One CTA a segment (sequence, kv head, block of query rows) and query row. It works out the plan as decode_sm80 does
// (scheduler/decode_plan.cuh). Segments that one CTA of decode_sm80 had as a whole are done; those without keys become O = 0,
// LSE = -inf (or the sink) here. Each warp sums every fourth partial result, a lane HEAD_DIM / 32 channels. Bits depend on the
// plan alone, with whole granules on the sequence alone.
//
// Shared memory, bytes: partial sums 4 * HEAD_DIM * 4 | maxima, denominators 32 | scan.
#include "attention/softmax.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"
#include "scheduler/decode_params.cuh"
#include "scheduler/decode_plan.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kRows = ROWS;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kWidth = kHeadDim / 32;  // channels of a lane
    static constexpr int kUnroll = kWidth == 8 ? 2 : 4;  // loads in flight
};

struct SharedStorage {
    float o[Config::kWarps][Config::kHeadDim];
    float m[Config::kWarps], l[Config::kWarps];
    ScanStorage<Config::kThreads> scan;
};

template <int kWidth>
OA_DEVICE void add_scaled(float (&sum)[kWidth], const float* from, float weight) {
    if constexpr (kWidth == 2) {
        float2 x = *reinterpret_cast<const float2*>(from);
        sum[0] = fmaf(x.x, weight, sum[0]);
        sum[1] = fmaf(x.y, weight, sum[1]);
    } else {
#pragma unroll
        for (int i = 0; i < kWidth; i += 4) {
            float4 x = *reinterpret_cast<const float4*>(from + i);
            sum[i] = fmaf(x.x, weight, sum[i]);
            sum[i + 1] = fmaf(x.y, weight, sum[i + 1]);
            sum[i + 2] = fmaf(x.z, weight, sum[i + 2]);
            sum[i + 3] = fmaf(x.w, weight, sum[i + 3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) decode_combine_sm80(const
                                                                                   __grid_constant__ DecodeParams p) {
    __shared__ SharedStorage smem;
    int tid = threadIdx.x, lane = tid & 31, warp_idx = tid >> 5;
    int32 segments = p.num_kv_heads * p.num_row_blocks;
    int32 sequence = int32(blockIdx.x) / segments, segment = int32(blockIdx.x) - sequence * segments;
    int32 kv_head = segment / p.num_row_blocks;
    int32 row = blockIdx.y, flat = (segment - kv_head * p.num_row_blocks) * Config::kRows + row;
    int32 token = flat / p.group, head = kv_head * p.group + (flat - token * p.group);

    int32 granules = key_span(p, sequence).granules, first_worker = 0, first_slot = 0, count = 0;
    Scan<Config::kThreads> scan(p, smem.scan);
    Share share(scan.total, p.num_workers);
    if (granules > 0) {
        scan.before_sequence(p, sequence, smem.scan);
        first_slot = smem.scan.before + segment * granules;
        if (p.whole_granules) {
            count = granules;
        } else {
            first_worker = share.worker_of(first_slot);
            count = share.worker_of(first_slot + granules - 1) - first_worker + 1;
        }
    }
    wait_for_kernel_ahead();  // it was launched early, and has worked out the plan meanwhile
    if (count == 1 || token >= p.q_len) return;  // decode_sm80 wrote it
    auto slot_row = [&](int32 i) {
        return int64(partial_slot(p, share, first_worker + i, first_slot, first_slot + i)) * Config::kRows + row;
    };
    float m = kLowest, l = 0.0f;
    for (int32 i = tid; i < count; i += Config::kThreads) m = fmaxf(m, p.partial_ml[2 * slot_row(i)]);
#pragma unroll
    for (int mask = 16; mask >= 1; mask >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, mask));
    if (lane == 0) smem.m[warp_idx] = m;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) m = fmaxf(m, smem.m[w]);
    float sum[Config::kWidth] = {};
#pragma unroll Config::kUnroll
    for (int32 i = warp_idx; i < count; i += Config::kWarps) {
        int64 at = slot_row(i);
        float2 ml = *reinterpret_cast<const float2*>(p.partial_ml + 2 * at);
        float weight = exp2_approx(ml.x - m);
        l = fmaf(ml.y, weight, l);
        add_scaled(sum, p.partial_o + at * Config::kHeadDim + lane * Config::kWidth, weight);
    }
    if (lane == 0) smem.l[warp_idx] = l;
#pragma unroll
    for (int i = 0; i < Config::kWidth; ++i) smem.o[warp_idx][lane * Config::kWidth + i] = sum[i];
    __syncthreads();
    l = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) l += smem.l[w];
    RowResult result = finish_row(m, l, decode_sink_log2<Config::Io>(p, head));
    uint16* to = p.o + sequence * p.o_stride_b + token * p.o_stride_s + head * p.o_stride_h;
    for (int channel = 2 * tid; channel < p.head_dim; channel += 2 * Config::kThreads) {
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int w = 0; w < Config::kWarps; ++w) {
            a += smem.o[w][channel];
            b += smem.o[w][channel + 1];
        }
        *reinterpret_cast<uint32*>(to + channel) = pack2(Config::Io{}, a * result.o_scale, b * result.o_scale);
    }
    if (p.lse != nullptr && tid == 0) p.lse[(int64(sequence) * p.num_q_heads + head) * p.q_len + token] = result.lse;
}
