// An additive mask that no tensor map describes, with rows at multiples of 16 bytes.
//
//   copy[b, h, q, k] = mask[b, h, q, k];  0 for k from cols up to the end of the row
//
// mask: elements of 2 or 4 bytes, any strides, [mask_batch, mask_heads, rows, cols]; copy: contiguous, row_chunks
// times 16 bytes a row. A thread makes 16 bytes: of keys next to each other from the words that hold them, which may
// reach beyond the row as long as they stay inside the mask's memory; else element by element. Bound by memory.
#include "params/mask_tiles.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"

constexpr int kThreads = 256;

// `count` elements; the others are 0.
template <typename Element>
OA_DEVICE uint4 gather(const uint8* at, int64 key_stride, int32 count) {
    constexpr int kElements = 16 / sizeof(Element), kInWord = 4 / sizeof(Element);
    uint32 w[4] = {};
#pragma unroll
    for (int i = 0; i < kElements; ++i)
        if (i < count)
            w[i / kInWord] |= uint32(__ldg(reinterpret_cast<const Element*>(at) + i * key_stride))
                              << 32 / kInWord * (i % kInWord);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// 16 bytes at a multiple of 2.
OA_DEVICE uint4 load_words(const uint8* at) {
    uint32 shift = uint32(reinterpret_cast<uint64>(at)) & 3;
    const uint32* words = reinterpret_cast<const uint32*>(at - shift);
    uint32 w[5];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __ldg(words + i);
    w[4] = shift != 0 ? __ldg(words + 4) : 0;
    shift *= 8;
    return make_uint4(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                      __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
}

extern "C" __global__ void __launch_bounds__(kThreads, 6) mask_align_sm80(const __grid_constant__ MaskAlignParams p) {
    launch_dependents();  // attention waits for the end of this kernel by itself
    const uint32 chunk = blockIdx.x * kThreads + threadIdx.x;
    if (chunk >= p.chunks) return;
    const uint32 row_chunks = uint32(p.row_chunks), per_chunk = 16 / uint32(p.element_bytes);
    const uint32 row = chunk / row_chunks, key = (chunk - row * row_chunks) * per_chunk;
    const uint32 mask = row / uint32(p.rows), batch = mask / uint32(p.mask_heads);
    const int64 offset = batch * p.mask_stride_b + (mask - batch * uint32(p.mask_heads)) * p.mask_stride_h +
                         (row - mask * uint32(p.rows)) * p.mask_stride_q + key * p.mask_stride_k;
    const uint8* at = p.mask + offset * p.element_bytes;
    const int32 count = min_of(p.cols - int32(key), int32(per_chunk));
    const uint64 base = reinterpret_cast<uint64>(p.mask), from = reinterpret_cast<uint64>(at) & ~uint64(3);
    const uint64 end = (reinterpret_cast<uint64>(at) + 19) & ~uint64(3);
    uint4 made;
    if (p.mask_stride_k == 1 && count == int32(per_chunk) && from >= base + p.first_byte && end <= base + p.end_byte) {
        made = load_words(at);
    } else if (p.element_bytes == 2) {
        made = gather<uint16>(at, p.mask_stride_k, count);
    } else {
        made = gather<uint32>(at, p.mask_stride_k, count);
    }
    reinterpret_cast<uint4*>(p.copy)[chunk] = made;
}
