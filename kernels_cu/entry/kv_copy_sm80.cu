// Copies of whole blocks inside the planes of a paged KV cache (copy-on-write); the pairs of blocks come with the
// arguments, so that nothing has to be on the device before.
//
//   plane[destination] = plane[source], each block block_bytes[plane] bytes, contiguous or in rows apart
//
// One CTA a pair and a part of a plane: blockIdx.x the pair, blockIdx.y the plane (K, V, parameters of K, of V),
// blockIdx.z the part. No shared memory. Bound by memory.
#include "params/kv_copy.cuh"
#include "ptx/types.cuh"

extern "C" __global__ void __launch_bounds__(256) kv_copy_sm80(const __grid_constant__ KvCopyParams p) {
    uint8* plane = p.planes[blockIdx.y];
    int64 bytes = p.block_bytes[blockIdx.y];
    if (plane == nullptr) return;
    const int64 block_step = p.row_chunks ? p.block_step : bytes;
    const uint8* from = plane + p.pairs[2 * blockIdx.x] * block_step;
    uint8* to = plane + p.pairs[2 * blockIdx.x + 1] * block_step;
    int64 first = int64(blockIdx.z) * 256 + threadIdx.x, step = int64(gridDim.z) * 256;
    if (p.row_chunks) {
        for (int64 i = first; i < bytes / 16; i += step) {
            uint64 row = uint64(i) / uint32(p.row_chunks), head = row / uint32(p.block_size);
            int64 at = head * p.head_step + (row - head * p.block_size) * p.token_step + (i - row * p.row_chunks) * 16;
            *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
        }
    } else if (bytes % 16 == 0 && (reinterpret_cast<uint64>(plane) & 15) == 0) {  // scales of a caller: at 4 bytes
        for (int64 i = first; i < bytes / 16; i += step)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
        for (int64 i = first; i < bytes / 4; i += step)
            reinterpret_cast<uint32*>(to)[i] = reinterpret_cast<const uint32*>(from)[i];
    }
}
