// Merge of two partial attention results over disjoint sets of keys (cascade and ring attention).
//
//   lse = log(exp(lse_a) + exp(lse_b));  o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)
//
// o_a, o_b, o: [batch, seqlen, heads, head_dim], any strides, last dimension contiguous, 16-byte rows; lse_*: fp32,
// [batch, heads, seqlen], any strides. Both LSE -inf: O = 0, LSE = -inf. decode merges a prefix that all sequences share
// (a), with what each has of its own (b): paused sequences (seq_lens 0) see nothing of it.
// One thread merges 16 bytes of one row; the grid covers rows * chunks, rows beyond 2^31 included. No shared memory.
// Bound by memory: reads two outputs, writes one.
#include "params/merge_states.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// A side without any key (LSE = -inf) does not count, whatever it holds.
struct Side {
    float weight;
    bool present;
    OA_DEVICE float scaled(float x) const { return present ? x * weight : 0.0f; }
};

template <typename Io>
OA_DEVICE uint32 merge_word(Io io, uint32 a, uint32 b, Side side_a, Side side_b) {
    float lo = side_a.scaled(to_float(io, uint16(a))) + side_b.scaled(to_float(io, uint16(b)));
    float hi = side_a.scaled(to_float(io, uint16(a >> 16))) + side_b.scaled(to_float(io, uint16(b >> 16)));
    return pack2(io, lo, hi);
}
OA_DEVICE uint32 merge_word(Float, uint32 a, uint32 b, Side side_a, Side side_b) {
    return __float_as_uint(side_a.scaled(__uint_as_float(a)) + side_b.scaled(__uint_as_float(b)));
}

extern "C" __global__ void __launch_bounds__(256) merge_states_sm80(const __grid_constant__ MergeStatesParams p) {
    for (int64 at = blockIdx.x * int64(256) + threadIdx.x; at < p.total; at += int64(gridDim.x) * 256) {
        int64 row = at / p.chunks;
        int32 chunk = int32(at - row * p.chunks);
        int64 rest = row / p.num_heads;
        int32 head = int32(row - rest * p.num_heads);
        int64 batch = rest / p.seqlen;
        int64 seq = rest - batch * p.seqlen;

        float lse_a = p.lse_a[batch * p.lse_a_stride_b + head * p.lse_a_stride_h + seq * p.lse_a_stride_s];
        if (p.seq_lens != nullptr && p.seq_lens[batch] == 0) lse_a = neg_inf();
        float lse_b = p.lse_b[batch * p.lse_b_stride_b + head * p.lse_b_stride_h + seq * p.lse_b_stride_s];
        float top = fmaxf(lse_a, lse_b);
        Side side_a{0.0f, lse_a != neg_inf()}, side_b{0.0f, lse_b != neg_inf()};
        float lse = neg_inf();
        if (side_a.present || side_b.present) {  // fmaxf drops a NaN, so `top` cannot tell
            float ea = exp2_approx((lse_a - top) * kLog2e), eb = exp2_approx((lse_b - top) * kLog2e);
            float sum = ea + eb;
            side_a.weight = ea / sum;
            side_b.weight = eb / sum;
            lse = top + log2_approx(sum) * kLn2;
        }
        auto address = [&](int64 sb, int64 ss, int64 sh) {
            return (batch * sb + seq * ss + head * sh) * IO_TYPE::kBytes + int64(chunk) * 16;
        };
        uint4 a = *reinterpret_cast<const uint4*>(p.o_a + address(p.o_a_stride_b, p.o_a_stride_s, p.o_a_stride_h));
        uint4 b = *reinterpret_cast<const uint4*>(p.o_b + address(p.o_b_stride_b, p.o_b_stride_s, p.o_b_stride_h));
        uint4 out;
        out.x = merge_word(IO_TYPE{}, a.x, b.x, side_a, side_b);
        out.y = merge_word(IO_TYPE{}, a.y, b.y, side_a, side_b);
        out.z = merge_word(IO_TYPE{}, a.z, b.z, side_a, side_b);
        out.w = merge_word(IO_TYPE{}, a.w, b.w, side_a, side_b);
        *reinterpret_cast<uint4*>(p.o + address(p.o_stride_b, p.o_stride_s, p.o_stride_h)) = out;
        if (chunk == 0) p.lse[batch * p.lse_stride_b + head * p.lse_stride_h + seq * p.lse_stride_s] = lse;
    }
}
