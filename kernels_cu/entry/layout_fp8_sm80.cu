// V in e4m3 from rows of tokens to rows of channels, as attention on 8-bit operands reads it (docs/quantization.md).
//
//   v_out[b, h, c, 128 i + 16 g + p] = v[b, 128 i + 16 g + order[p], h, c]
//   order: 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15
//   v_scale[b, h, c] = descale
//   drift[b, h, i] = any c: S(c)^2 > 36 Q(c)  or  sum S(c)^2 > 4 sum Q(c)    S, Q: sums of v and of v^2 over 128 keys
//
// Sums of tensor cores lose more the larger they grow (attention/flush_rule.cuh). Of independent values without a mean
// S^2 is Q on average: 36 is six standard deviations of one channel, 4 is more of all channels together.
//
// v: [batch, seqlen_k, num_kv_heads, head_dim], any strides with 16-byte rows, or packed sequences, whose keys begin at
// slots of 128 (scheduler/slots.cuh). v_out: [batch, num_kv_heads, head_dim_pad, 128 slots]; keys that a sequence does
// not have, and channels from head_dim on, are zeros. Bound by memory: each byte is read once and written once.
//
// One CTA of 2 * HEAD_DIM threads takes 128 keys of a head. A thread has four keys that are one word of v_out and 16
// channels: four loads of 16 bytes, 16 words to shared memory. Then 16 bytes of a channel each to global memory, 128 a
// row.
//
// Shared memory (static): words [HEAD_DIM][32] | totals of the warps. Units of 16 bytes of a channel are exchanged by
// its number / 16, so that neither side has more than two lanes at a bank.
#include "params/layout_fp8.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/half2.cuh"
#include "ptx/l2.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int kHeadDim = HEAD_DIM, kThreads = 2 * kHeadDim, kColumns = kHeadDim / 16, kWords = kBlockRows / 4;
// Units that neighbouring columns lie apart.
constexpr int kUnitStep = kHeadDim == 64 ? 2 : 1;

OA_DEVICE int32 swizzled(int32 column, int32 word) { return word ^ (column * kUnitStep % 8) * 4; }

// Bytes i of the four words: of channel i, of four keys.
OA_DEVICE void transpose_bytes(const uint32 (&rows)[4], uint32 (&channels)[4]) {
    uint32 low01 = permute_bytes(rows[0], rows[1], 0x5140), high01 = permute_bytes(rows[0], rows[1], 0x7362);
    uint32 low23 = permute_bytes(rows[2], rows[3], 0x5140), high23 = permute_bytes(rows[2], rows[3], 0x7362);
    channels[0] = permute_bytes(low01, low23, 0x5410);
    channels[1] = permute_bytes(low01, low23, 0x7632);
    channels[2] = permute_bytes(high01, high23, 0x5410);
    channels[3] = permute_bytes(high01, high23, 0x7632);
}

// Of 16 values v: the sums of v / 8 and of (v / 8)^2. In halves, of eight values each: so squares of the largest e4m3
// stay below the largest half, and that of the smallest is one, 2^-24.
OA_DEVICE float2 sums_of(const uint4& codes) {
    constexpr uint32 kEighth = 0x30003000u;
    const uint32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32 sum = 0, squares = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const uint32 pairs[2] = {half2_of_e4m3x2<false>(words[w]), half2_of_e4m3x2<true>(words[w])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32 scaled = mul_half2(pairs[i], kEighth);
            sum = add_half2(sum, scaled);
            squares = fma_half2(scaled, scaled, squares);
        }
    }
    return {low_float(Half{}, sum) + high_float(Half{}, sum), low_float(Half{}, squares) + high_float(Half{}, squares)};
}

extern "C" __global__ void __launch_bounds__(kThreads) layout_fp8_sm80(const __grid_constant__ LayoutFp8Params p) {
    __shared__ __align__(16) uint32 words[kHeadDim][kWords];
    __shared__ float2 totals[kThreads / 32];
    int32 tid = threadIdx.x;
    // Heads of a block of keys are neighbours in v.
    int32 head = int32(blockIdx.x % uint32(p.num_kv_heads)), slot = int32(blockIdx.x / uint32(p.num_kv_heads));
    int32 b = 0, index = slot;
    Sequence keys = {0, p.seqlen_k};
    if (p.cu_seqlens_k != nullptr) {
        b = sequence_of_slot(p.cu_seqlens_k, p.batch, p.seqlen_k, slot, kBlockRows);
        keys = used_sequence(p.cu_seqlens_k, p.seqused_k, b, p.seqlen_k);
        index = slot - first_slot(keys.begin, b, kBlockRows);
    } else {
        b = slot / p.slots;
        index = slot - b * p.slots;
    }
    int64 of_head = int64(b) * p.num_kv_heads + head;
    if (index == 0 && tid < p.head_dim_pad)
        p.v_scale[of_head * p.head_dim_pad + tid] =
            p.descale == nullptr ? 1.0f : p.descale[b * p.descale_stride_b + head * p.descale_stride_h];
    int32 count = min_of(keys.len - index * kBlockRows, kBlockRows);
    if (index < 0 || count <= 0) return;  // a slot that no sequence fills

    // Word w of a channel: keys 16 (w / 4) + 2 (w % 4) + {0, 1, 8, 9}.
    int32 column = tid % kColumns, word = tid / kColumns;
    int32 first = word / 4 * 16 + word % 4 * 2, channel = column * 16;
    const uint8* from = p.v + (p.cu_seqlens_k != nullptr ? 0 : b * p.v_stride_b) + head * p.v_stride_h +
                        (int64(keys.begin) + index * kBlockRows + first) * p.v_stride_s + channel;
    uint4 raw[4];
    uint64 policy = evict_first_policy();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int32 key = (i & 1) + (i >> 1) * 8;
        const uint8* row = from + key * p.v_stride_s;
        raw[i] = uint4{0, 0, 0, 0};
        if (first + key < count) {
            if (channel + 16 <= p.head_dim) {
                raw[i] = load_input(row, policy);
            } else if (channel < p.head_dim) {  // head_dim is a multiple of 8
                uint2 half = *reinterpret_cast<const uint2*>(row);
                raw[i].x = half.x, raw[i].y = half.y;
            }
        }
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        uint32 rows[4], channels[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            rows[i] = quarter == 0 ? raw[i].x : quarter == 1 ? raw[i].y : quarter == 2 ? raw[i].z : raw[i].w;
        transpose_bytes(rows, channels);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[channel + 4 * quarter + i][swizzled(column, word)] = channels[i];
    }
    __syncthreads();
    int64 row_bytes = int64(p.slots) * kBlockRows;
    // Packed sequences have one array for all of them, dense batches one each.
    int64 lead = p.cu_seqlens_k != nullptr ? head : of_head;
    uint8* to =
        p.v_out + lead * p.head_dim_pad * row_bytes + int64(p.cu_seqlens_k != nullptr ? slot : index) * kBlockRows;
    float squares = 0.0f, energy = 0.0f;
    bool drifts = false;
#pragma unroll
    for (int i = 0; i < kHeadDim * 8; i += kThreads) {
        int32 c = (i + tid) / 8, unit = (i + tid) % 8;
        uint4 codes = *reinterpret_cast<const uint4*>(&words[c][swizzled(c / 16, unit * 4)]);
        if (c < p.head_dim_pad) *reinterpret_cast<uint4*>(to + c * row_bytes + unit * 16) = codes;
        float2 sums = sums_of(codes);
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2) {  // eight lanes have a channel
            sums.x += __shfl_xor_sync(0xffffffffu, sums.x, bit);
            sums.y += __shfl_xor_sync(0xffffffffu, sums.y, bit);
        }
        drifts = drifts || sums.x * sums.x > 36.0f * sums.y;
        squares += sums.x * sums.x;
        energy += sums.y;
    }
#pragma unroll
    for (int bit = 8; bit < 32; bit *= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, bit);
        energy += __shfl_xor_sync(0xffffffffu, energy, bit);
    }
    if (tid % 32 == 0) totals[tid / 32] = {squares, energy};
    drifts = __syncthreads_or(drifts);
    if (tid != 0) return;
    for (int w = 1; w < kThreads / 32; ++w) squares += totals[w].x, energy += totals[w].y;
    p.drift[lead * p.slots + (p.cu_seqlens_k != nullptr ? slot : index)] = drifts || squares > 4.0f * energy;
}
