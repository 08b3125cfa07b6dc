// The user's mask in the order in which attention on Hopper reads it, and what each tile of it does.
//
//   bits[m, n, t] bit 4i + 2r + x = mask[64m + 16w + l/4 + 8r, 64n + 8i + 2(l%4) + x] != 0      (t = 32w + l)
//   key_bias[key]                 = mask[key] as fp32, -inf for keys that do not exist
//   kinds[m, n]                   = empty, mixed or full (params/mask_tiles.cuh)
//
// mask: booleans (bytes), fp32 or IO_TYPE, any strides, [mask_batch, mask_heads, rows, cols]. Booleans give bits, a
// word for each thread of a warpgroup that has a tile of 64 rows x 64 keys in a wgmma accumulator; rows and keys that
// do not exist have bit 0. rows = 1: one tile of rows, all equal. Additive masks give key_bias, with rows = 1 only. Of
// packed sequences that have a mask each, a CTA beyond its sequence's end reads nothing: empty tiles without bits.
//
// A CTA of 4 warps takes 64 rows x 256 keys. Booleans: thread t loads keys 16(t%16) .. + 15 of rows t/16 + 8i, all
// before it needs the first, and reduces them to 16 bits; the bits of a row meet in shared memory, and every thread
// picks its words from there. Then warp w judges tile w. Additive: warp w copies and judges tile w.
//
//   load bits of rows -> shared --__syncthreads--> words -> global; kinds -> global
//
// Shared memory, bytes: rows[64][32], a bit a key. Bound by reading the mask.
#include "params/mask_tiles.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int kThreads = 128, kRows = 64, kTiles = 4, kKeys = 64 * kTiles;
constexpr int kChunk = 16, kChunks = kKeys / kChunk, kRowStep = kThreads / kChunks, kRowsPerThread = kRows / kRowStep;

// Bit i: byte i is not 0.
OA_DEVICE uint32 nonzero_bytes(uint32 a, uint32 b, uint32 c, uint32 d) {
    // The top bit of each byte.
    auto marks = [](uint32 w) { return (((w & 0x7f7f7f7f) + 0x7f7f7f7f) | w) & 0x80808080; };
    uint32 low = __dp4a(marks(b), 0x80402010u, __dp4a(marks(a), 0x08040201u, 0u));
    uint32 high = __dp4a(marks(d), 0x80402010u, __dp4a(marks(c), 0x08040201u, 0u));
    return low >> 7 | high << 1;
}

// 16 bytes at a multiple of 16, and at any address: the words that hold them.
struct AlignedChunk {
    static constexpr int kBatch = 8;  // chunks in flight
    uint4 w;
    OA_DEVICE static bool inside(uint64 at, uint64 first, uint64 end) { return at >= first && at + kChunk <= end; }
    OA_DEVICE void load(const uint8* at) { w = __ldg(reinterpret_cast<const uint4*>(at)); }
    OA_DEVICE uint32 bits() const { return nonzero_bytes(w.x, w.y, w.z, w.w); }
};
struct AnyChunk {
    static constexpr int kBatch = 4;
    uint32 w[5], shift;
    OA_DEVICE static bool inside(uint64 at, uint64 first, uint64 end) {
        return (at & ~uint64(3)) >= first && ((at + kChunk + 3) & ~uint64(3)) <= end;
    }
    OA_DEVICE void load(const uint8* at) {
        shift = uint32(reinterpret_cast<uint64>(at)) & 3;
        const uint32* words = reinterpret_cast<const uint32*>(at - shift);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = __ldg(words + i);
        w[4] = shift != 0 ? __ldg(words + 4) : 0;
        shift *= 8;
    }
    OA_DEVICE uint32 bits() const {
        return nonzero_bytes(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                             __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
    }
};

// What this thread loads: the first `rows` of its rows, kRowStep apart, and `keys` keys of each.
struct Part {
    const uint8* at;
    int64 row_stride, key_stride;
    int32 rows, keys;

    // Byte by byte, any stride.
    OA_DEVICE void gather(uint32 (&seen)[kRowsPerThread]) const {
#pragma unroll 2
        for (int i = 0; i < kRowsPerThread; ++i) {
            uint32 bits = 0;
#pragma unroll
            for (int j = 0; j < kChunk; ++j)
                if (i < rows && j < keys) bits |= uint32(__ldg(at + i * row_stride + j * key_stride) != 0) << j;
            seen[i] = bits;
        }
    }

    // By words, keys next to each other. Words may reach beyond the row, as long as they stay inside the mask's memory,
    // which holds whatever lies between two of its elements; false if they do not.
    template <typename Chunk>
    OA_DEVICE bool load(uint32 (&seen)[kRowsPerThread], uint64 first, uint64 end) const {
        if (rows <= 0 || keys <= 0) return true;
        uint64 top = reinterpret_cast<uint64>(at), bottom = reinterpret_cast<uint64>(at + (rows - 1) * row_stride);
        if (!Chunk::inside(top, first, end) || !Chunk::inside(bottom, first, end)) return false;
#pragma unroll
        for (int base = 0; base < kRowsPerThread; base += Chunk::kBatch) {
            Chunk chunk[Chunk::kBatch];
#pragma unroll
            for (int i = 0; i < Chunk::kBatch; ++i)
                chunk[i].load(at + min_of(base + i, rows - 1) * row_stride);  // no branch between loads
#pragma unroll
            for (int i = 0; i < Chunk::kBatch; ++i) seen[base + i] = base + i < rows ? chunk[i].bits() : 0;
        }
        return true;
    }
};

// Of a row's 64 keys those that lane l has: keys 8i + 2(l%4) + x as bits 4i + x.
OA_DEVICE uint32 pairs_of_lane(uint2 row, int32 lane) {
    uint32 shift = 2 * (lane & 3);
    uint32 low = row.x >> shift & 0x03030303, high = row.y >> shift & 0x03030303;
    return __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
}

OA_DEVICE uint8 kind_of(bool any, bool all) { return any ? all ? kTileFull : kTileMixed : kTileEmpty; }

// The place of a CTA: tiles [n0, n0 + kTiles) of tile m of the rows of a mask (batch, head).
struct Place {
    int64 offset;  // of the mask, elements
    int64 mask;  // its number
    int32 m, n0;
    bool exists;  // not beyond the ends of a packed sequence
    OA_DEVICE explicit Place(const MaskPackParams& p) {
        uint32 groups = (uint32(p.n_tiles) + kTiles - 1) / kTiles, rest = blockIdx.x / groups;
        n0 = int32(blockIdx.x - rest * groups) * kTiles;
        mask = rest / uint32(p.m_tiles);
        m = int32(rest - uint32(mask) * p.m_tiles);
        uint32 batch = uint32(mask) / uint32(p.mask_heads), head = uint32(mask) - batch * p.mask_heads;
        offset = batch * p.mask_stride_b + int64(head) * p.pack_heads * p.mask_stride_h;
        exists = true;
        if (p.cu_seqlens_q != nullptr) {
            int32 rows = used_sequence(p.cu_seqlens_q, p.seqused_q, int32(batch), p.total_q).len;
            int32 keys = used_sequence(p.cu_seqlens_k, p.seqused_k, int32(batch), p.total_k).len;
            exists = int64(m) * kRows < rows && int64(n0) * 64 < keys;
        }
    }
};

OA_DEVICE void pack_bits(const MaskPackParams& p, const Place& place, int32 tid, int32 warp, int32 lane) {
    __shared__ __align__(16) uint16 keys_of_row[kRows][kChunks];
    int32 first_row = tid / kChunks, chunk = tid % kChunks, row0 = place.m * kRows + first_row;
    int64 key0 = int64(place.n0) * 64 + chunk * kChunk;  // may pass 2^31 in the last tile
    Part part;
    part.at = p.mask + place.offset + key0 * p.mask_stride_k + (row0 >> p.pack_log2) * p.mask_stride_q;
    if (p.pack_log2 > 0)  // of all rows of the thread
        part.at += min_of(row0 & ((1 << p.pack_log2) - 1), p.pack_heads - 1) * p.mask_stride_h;
    part.row_stride = (kRowStep >> p.pack_log2) * p.mask_stride_q;
    part.key_stride = p.mask_stride_k;
    part.rows = min_of((p.rows - row0 + kRowStep - 1) / kRowStep, kRowsPerThread);
    part.keys = int32(min_of<int64>(p.cols - key0, kChunk));
    uint32 seen[kRowsPerThread] = {};
    uint64 base = reinterpret_cast<uint64>(p.mask), first = base + p.first_byte, end = base + p.end_byte;
    bool loaded = false;
    if (p.mask_stride_k == 1) {
        bool aligned = ((base | p.mask_stride_b | p.mask_stride_h | p.mask_stride_q) & 15) == 0;
        loaded = aligned ? part.load<AlignedChunk>(seen, first, end) : part.load<AnyChunk>(seen, first, end);
    }
    if (!loaded) part.gather(seen);
    uint32 exist = part.keys <= 0 ? 0 : 0xffffu >> (kChunk - part.keys);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) keys_of_row[first_row + i * kRowStep][chunk] = uint16(seen[i] & exist);
    __syncthreads();

    int32 tiles = min_of(p.n_tiles - place.n0, kTiles);
    int64 tile = (place.mask * p.m_tiles + place.m) * p.n_tiles + place.n0;
    uint32* bits = p.bits + tile * kThreads + tid;
    int32 top = p.rows == 1 ? 0 : warp * 16 + lane / 4, bottom = p.rows == 1 ? 0 : top + 8;
    auto row_of_tile = [&](int32 row, int32 n) { return reinterpret_cast<const uint2*>(keys_of_row[row])[n]; };
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
        if (n < tiles)
            bits[n * kThreads] = pairs_of_lane(row_of_tile(top, n), lane) | pairs_of_lane(row_of_tile(bottom, n), lane)
                                                                                << 2;
    if (warp < tiles) {
        uint2 a = row_of_tile(lane, warp), b = row_of_tile(lane + 32, warp);
        int32 rows = p.rows - place.m * kRows;
        bool all = (lane >= rows || (a.x & a.y) == ~0u) && (lane + 32 >= rows || (b.x & b.y) == ~0u);
        bool any = (a.x | a.y | b.x | b.y) != 0;
        any = __any_sync(0xffffffffu, any), all = __all_sync(0xffffffffu, all);
        if (lane == 0) p.kinds[tile + warp] = kind_of(any, all);
    }
}

OA_DEVICE void copy_bias(const MaskPackParams& p, const Place& place, int32 warp, int32 lane) {
    int32 n = place.n0 + warp;
    if (n >= p.n_tiles) return;
    int64 tile = place.mask * p.n_tiles + n;
    bool any = false, all = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int64 key = int64(n) * 64 + i * 32 + lane, from = place.offset + key * p.mask_stride_k;
        float value = neg_inf();
        if (key < p.cols)
            value = p.mask_kind == kMaskFloat
                        ? __ldg(reinterpret_cast<const float*>(p.mask) + from)
                        : to_float(IO_TYPE{}, __ldg(reinterpret_cast<const uint16*>(p.mask) + from));
        p.key_bias[tile * 64 + i * 32 + lane] = value;
        any |= value != neg_inf();
        all &= value == 0.0f;
    }
    any = __any_sync(0xffffffffu, any), all = __all_sync(0xffffffffu, all);
    if (lane == 0) p.kinds[tile] = kind_of(any, all);
}

extern "C" __global__ void __launch_bounds__(kThreads, 8) mask_pack_sm80(const __grid_constant__ MaskPackParams p) {
    launch_dependents();  // the kernel of the lists waits for the end of this one by itself
    int32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    Place place(p);
    if (!place.exists) {
        int32 n = place.n0 + warp;
        if (lane == 0 && n < p.n_tiles) p.kinds[(place.mask * p.m_tiles + place.m) * p.n_tiles + n] = kTileEmpty;
    } else if (p.mask_kind == kMaskBool) {
        pack_bits(p, place, tid, warp, lane);
    } else {
        copy_bias(p, place, warp, lane);
    }
}
