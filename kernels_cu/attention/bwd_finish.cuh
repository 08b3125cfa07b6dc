// dQ from its sums, by the consumers of the ordered one-pass backward (entry/attn_bwd_sm90.cu): no kernel behind it.
//
//   dq = softmax_scale * dq_accum, rounded to 16 bits
//
// With additions in order (attention/bwd_ordered.cuh) the last tile of keys that sees a tile of queries adds to it
// last. So a tile of keys finishes the queries that the next one does not see: with causality those at its diagonal. It
// does so at the end of the CTA's next tile, while the tile behind that is on its way to shared memory: by then the
// writers have ended the tile, so that nobody waits but at the kernel's end, and for nobody but its own CTA.
//
//   writer g: all additions of a tile complete -> tiles_ended(g)      consumer g: tiles_ended -> reads its columns
//
// dq_accum holds what thread i of a warpgroup has of 64 queries where thread i wrote it (params/attn_bwd.cuh). With
// kAlternate consumers wait for both writers, as either adds all columns of its tiles.
// Without AttnBwdParams.dq attn_bwd_finish has to follow.
#pragma once
#include "attention/bwd_roles.cuh"
#include "attention/bwd_store.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/uniform.cuh"

template <typename Config, bool kFinishes = Config::kFinishes>
class BwdFinish {
  public:
    OA_DEVICE BwdFinish(const AttnBwdParams&, int32) {}
    OA_DEVICE void next(const BwdTile&) const {}
    OA_DEVICE void end() const {}
};

// Whole warps of consumers. The tile before lies in shared memory: the loop over queries has no register for it.
template <typename Config>
class BwdFinish<Config, true> {
    using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;
    static constexpr int kColumns = Config::kHeadDim / Config::kConsumers, kOutputs = kColumns / 2;  // of a consumer

  public:
    OA_DEVICE BwdFinish(const AttnBwdParams& params, int32 group) : params_(params), group_(group) {
        put(make_uint4(0, 0, 0, 0));
    }
    // Behind the products of tile t, which has queries.
    OA_DEVICE void next(const BwdTile& t) const {
        if (params_.dq == nullptr) return;
        const uint4 before = tile_before();
        finish(before);
        put(make_uint4(uint32(t.n0), uint32(t.batch_idx), uint32(t.kv_head_idx), before.w + 1));
    }
    OA_DEVICE void end() const {
        if (params_.dq != nullptr) finish(tile_before());
    }

  private:
    OA_DEVICE static uint32 place() {
        return smem_addr_at(&BwdFeedStorage<true>::tile_before) + ((threadIdx.x >> 5) - 4) * uint32(sizeof(uint4));
    }
    // Uniform: else the compiler takes rings and descriptors of the loop over queries out of uniform registers.
    OA_DEVICE static uint4 tile_before() {
        const uint4 tile = load_shared4(place());
        return make_uint4(uniform(tile.x), uniform(tile.y), uniform(tile.z), uniform(tile.w));
    }
    // Every lane writes the same, and reads what the warp wrote.
    OA_DEVICE static void put(uint4 tile) {
        __syncwarp();
        store_shared4(place(), tile);
        __syncwarp();
    }
    // 0, which the compiler finds out here: what it computes of it takes no registers in the loop over queries.
    OA_DEVICE static int32 late_zero() {
        int32 zero;
        asm volatile("mov.b32 %0, 0;" : "=r"(zero));
        return zero;
    }
    // tile: first key, batch entry, kv head, and which of this CTA's tiles it is: 1 for the first one, 0 for none.
    OA_DEVICE void finish(uint4 tile) const {
        if (tile.w == 0) return;
        const AttnFwdParams& fwd = params_.fwd;
        const Rows rows(int32(tile.x), fwd.seqlen_q, fwd.seqlen_k, fwd.window_left, fwd.window_right);
        int32 end = rows.end;
        if (const int32 n0 = int32(tile.x) + Config::kBlockN; n0 < fwd.seqlen_k) {
            const Rows after(n0, fwd.seqlen_q, fwd.seqlen_k, fwd.window_left, fwd.window_right);
            if (!after.is_empty()) end = min_of(end, after.first);
        }
        if (end <= rows.first) return;
#pragma unroll
        for (int32 i = 0; i < (Config::kAlternate ? Config::kConsumers : 1); ++i) {
            const uint32 writer = StepsStorage::ended(Config::kAlternate ? i : group_);
            while (uint32(uniform(load_acquire_shared2(writer).x)) < tile.w) {
            }
        }
        __syncwarp();
        const int32 heads = (fwd.num_q_heads + late_zero()) / fwd.num_kv_heads, first_head = int32(tile.z) * heads;
#pragma unroll 1
        for (int32 head = first_head; head < first_head + heads; ++head)
#pragma unroll 1
            for (int32 m = rows.first; m < end; ++m) round(int32(tile.y), head, m);
    }
    // Tile m of queries: this thread's 2 rows, the columns of its warpgroup.
    OA_DEVICE void round(int32 batch, int32 head, int32 m) const {
        const AttnFwdParams& fwd = params_.fwd;
        const int32 thread = int32(threadIdx.x & 127) + late_zero();
        const int64 row = int64(batch) * ((fwd.seqlen_q + 127) / 128 * 128) + m * Config::kBlockM;
        const float* from = params_.dq_accum + (head * params_.rows_stride_h + row) * Config::kHeadDim +
                            group_ * (64 * kColumns) + thread * 4;
        float sums[kOutputs];
#pragma unroll
        for (int j = 0; j < kOutputs / 4; ++j) {
            const float4 four = load_gpu(reinterpret_cast<const float4*>(from + 512 * j));
            sums[4 * j] = four.x, sums[4 * j + 1] = four.y, sums[4 * j + 2] = four.z, sums[4 * j + 3] = four.w;
        }
        const int32 warp = thread >> 5, lane = thread & 31, column = group_ * kColumns;
        store_gradient<typename Config::Io>(
            sums, fwd.softmax_scale, params_.dq + batch * params_.dq_stride_b + head * params_.dq_stride_h + column,
            params_.dq_stride_s, m * Config::kBlockM + warp * 16 + (lane >> 2), fwd.seqlen_q, fwd.head_dim - column,
            lane);
    }

    const AttnBwdParams& params_;
    const int32 group_;
};
