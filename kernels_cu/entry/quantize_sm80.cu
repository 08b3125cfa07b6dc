// Quantization of Q, K and V for low-precision attention: integers for Q K^T, e4m3 or fp16 for P V.
// Source: SageAttention2 (Zhang et al. 2024), sections 3.1 to 3.3.
//
//   q_int = round((q - q_mean) / q_scale), k_int = round((k - k_mean) / k_scale), v_fp8 = e4m3((v - v_mean) / v_scale)
//   with ROTATED: q_int = round(R (q - q_mean) / q_scale), k_int alike, R orthogonal or 1; to integers or to e4m3
//
// q: [batch, seqlen_q, num_q_heads, head_dim], k, v: [batch, seqlen_k, num_kv_heads, head_dim], fp16 or bf16, any
// strides with 16-byte rows; or packed sequences. Outputs, granularities and the order of every sum:
// docs/quantization.md.
//
// One persistent grid of CTAs of 2 * HEAD_DIM threads; work items are taken by ticket (quantize/items.cuh):
//
//   CTA:  ticket -> item ---+-> sums of 256 keys of K or V -> last one of a head: mean, scale -> ready flag (release)
//                           +-> 128 rows of Q             -> integers, scales, row_bias          |
//                           +-> 128 keys of K or V        -> wait for the flag (acquire) <-------+
//
// The sums are of samples and come first, then Q, which needs none of them; so no CTA waits long.
//
// Shared memory (static), bytes: work of an item, at most 128 * HEAD_DIM and means | [2] largest magnitudes of groups |
// [2] items: one for this item and one for the next | flag.
#include "ptx/cp_async.cuh"
#include "quantize/items.cuh"
#include "quantize/reduce.cuh"
#include "quantize/rows.cuh"
#include "quantize/values.cuh"

constexpr int kHeadDim = HEAD_DIM;
static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "8, 16 or 32 threads a row");
constexpr int kThreads = 2 * kHeadDim;

union WorkStorage {
    float sums[2 * kRowLanes * kHeadDim];
    RowsStorage<kHeadDim> rows;
    ValuesStorage<kHeadDim> values;
};

struct SharedStorage {
    alignas(16) WorkStorage work;
    GroupStorage groups[2];
    QuantizeItem items[2];
    uint32 flag;
};

using Params = Select<ROTATED, QuantizeRotatedParams, QuantizeParams>::Type;
OA_DEVICE const QuantizeParams& common_part(const QuantizeParams& params) { return params; }
OA_DEVICE const QuantizeParams& common_part(const QuantizeRotatedParams& params) { return params.quantize; }
OA_DEVICE NoRotation rotation_of(const QuantizeParams&) { return {}; }
OA_DEVICE const Rotation& rotation_of(const QuantizeRotatedParams& params) { return params.rotation; }

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) quantize_sm80(const __grid_constant__ Params params) {
    __shared__ SharedStorage s;
    const QuantizeParams& p = common_part(params);
    if (p.clear_vectors > 0) {
        launch_dependents();
        for (int64 i = int64(blockIdx.x) * kThreads + threadIdx.x; i < p.clear_vectors;
             i += int64(gridDim.x) * kThreads)
            reinterpret_cast<uint4*>(p.ticket)[i] = uint4{0, 0, 0, 0};
        if constexpr (kCommon) {
            for (int64 i = int64(blockIdx.x) * kThreads + threadIdx.x; i < p.num_items;
                 i += int64(gridDim.x) * kThreads)
                p.item_table[i] = decode_item(p, uint32(i));
            return;
        }
        if (blockIdx.x == 0 && threadIdx.x < 32 && p.starts_q != nullptr)
            copy_starts(p.cu_seqlens_q, p.starts_q, p.batch, p.seqlen_q);
        if (blockIdx.x == 0 && threadIdx.x / 32 == 1 && p.starts_k != nullptr)
            copy_starts(p.cu_seqlens_k, p.starts_k, p.batch, p.seqlen_k);
        return;
    }
    wait_for_kernel_ahead();
    // The next ticket and item are loaded while this item is worked on.
    bool first_warp = threadIdx.x < 32;
    uint32 next = 0;  // thread 0: the ticket behind the item that has been taken last
    if (threadIdx.x == 0) next = atomic_add_relaxed(p.ticket, 1);
    auto take_next = [&](QuantizeItem& item) {
        if constexpr (kCommon) {
            if (threadIdx.x != 0) return;
            if (next < uint32(p.num_items)) {
                const uint8* from = reinterpret_cast<const uint8*>(p.item_table + next);
#pragma unroll
                for (uint32 i = 0; i < sizeof(QuantizeItem); i += 16)
                    cp_async_16(smem_addr_of(&item) + i, from + i, 16u);
                next = atomic_add_relaxed(p.ticket, 1);
            } else {
                item.kind = kNoItem;
            }
            return;
        }
        uint32 ticket = __shfl_sync(0xffffffffu, next, 0);
        QuantizeItem decoded;
        decoded.kind = kNoItem;
        if (ticket < uint32(p.num_items)) {
            if (threadIdx.x == 0) next = atomic_add_relaxed(p.ticket, 1);
            decoded = decode_item(p, ticket);
        }
        if (threadIdx.x == 0) item = decoded;
    };
    auto arrived = [&] {
        if (!kCommon || threadIdx.x != 0) return;
        cp_async_commit();
        cp_async_wait<0>();
    };
    if (first_warp) take_next(s.items[0]);
    s.groups[0].clear<kThreads>();
    for (uint32 buffer = 0;; buffer ^= 1) {
        arrived();
        __syncthreads();  // the item is there, and the one before is done
        const QuantizeItem& t = s.items[buffer];
        if (t.kind == kNoItem) return;
        if (first_warp) take_next(s.items[buffer ^ 1]);
        s.groups[buffer ^ 1].clear<kThreads>();
        if (t.batch_idx < 0) continue;  // a slot that no sequence fills
        if (t.kind == kReduceK) {
            reduce_k<IO_TYPE, kHeadDim>(p, t, s.work.sums, &s.flag);
        } else if (t.kind == kReduceV) {
            reduce_v<IO_TYPE, kHeadDim>(p, t, s.work.sums, &s.flag);
        } else if (t.kind == kQuantizeV) {
            quantize_v<IO_TYPE, kHeadDim>(p, t, s.work.values);
        } else if (t.kind == kFinishV) {
            finish_v<IO_TYPE, kHeadDim>(p, t, s.work.values);
        } else {
            quantize_rows<IO_TYPE, kHeadDim>(p, rotation_of(params), t, s.work.rows, s.groups[buffer]);
        }
    }
}
