// Merge of the partial results over a latent cache: what mla_combine_sm80, whose comment has the design, does.
#pragma once
#include "attention/partial_sum.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent.cuh"
#include "decode/plan.cuh"
#include "decode/rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// Partial results of a sequence, and where the plan has put them.
struct Merge {
    int32 sequence, count;
    int32 first_slot;  // of the first result; that of number i behind it is base + i * step
    int32 base, step;
};

template <typename Config>
struct LatentCombineStorage {
    float4 o[Config::kWarps][32];
    float m[Config::kWarps], l[Config::kWarps];
    Merge merges[Config::kThreads];  // sequences that have to be merged, of so many
    int32 num_merges[Config::kWarps];
    ScanStorage<Config::kThreads> scan;
};

template <typename Config>
class LatentCombine {
    using Io = typename Config::Io;
    static constexpr int kParts = Config::kHeadDim / 128;

  public:
    OA_DEVICE LatentCombine(const MlaDecodeParams& params, LatentCombineStorage<Config>& smem)
        : params_(params),
          p_(params.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          warp_(int32(threadIdx.x) >> 5) {}

    OA_DEVICE void run() {
        const Scan<Config::kThreads, kAllRows> scan(p_, smem_.scan);
        const Partition partition(scan.total, p_);
        const int32 each = (p_.batch + Config::kThreads - 1) / Config::kThreads, ahead = begin_chunks<kAllRows>(p_);
        int32 at = scan.before;
        // Every CTA finds out which sequences are to be merged, and has some of their rows.
        for (int32 i = 0; i < each; ++i) {
            Merge own{scan.first + i, 1, 0, 0, 0};
            if (own.sequence < scan.last) {
                const int32 chunks = key_span<kAllRows>(p_, own.sequence).chunks;
                own = merge_of(partition, own.sequence, at + ahead, chunks);
                at += chunks == 0 ? 0 : ahead + chunks;
            }
            const int32 count = collect(own);
            if (i == 0) {
                fill_strays();
                wait_for_kernel_ahead();  // it was launched early, and has worked out the plan meanwhile
            }
            const int32 groups = groups_of_rows();
            for (int32 item = blockIdx.x; item < count * groups; item += int32(gridDim.x)) {
                const int32 merge = item / groups;
                if (has_parts()) {
                    merge_rows<4, 4>(smem_.merges[merge], item - merge * groups);
                } else {
                    merge_rows<16, 2>(smem_.merges[merge], item - merge * groups);
                }
            }
            __syncthreads();  // the list is free
        }
        if (each == 0) fill_strays(), wait_for_kernel_ahead();  // as every CTA
    }

  private:
    OA_DEVICE Merge merge_of(const Partition& partition, int32 sequence, int32 begin, int32 chunks) const {
        if (chunks == 0 || p_.fixed_splits) return {sequence, chunks, begin, begin, 1};
        const int32 worker = partition.worker_of(begin), count = partition.worker_of(begin + chunks - 1) - worker + 1;
        // One result of each cluster of workers.
        return {sequence, (count + params_.cluster - 1) / params_.cluster,
                partial_slot(p_, partition, worker, begin, begin), 2 * worker, 2 * params_.cluster};
    }
    // Lists what is to be merged; returns how many. One partial result is none: the kernel ahead wrote O.
    OA_DEVICE int32 collect(const Merge& own) {
        const uint32 wanted = __ballot_sync(0xffffffffu, own.count != 1);
        if (lane_ == 0) smem_.num_merges[warp_] = __popc(wanted);
        __syncthreads();
        int32 before = __popc(wanted & ((1u << lane_) - 1)), all = 0;
#pragma unroll
        for (int w = 0; w < Config::kWarps; ++w) {
            const int32 other = smem_.num_merges[w];
            if (w < warp_) before += other;
            all += other;
        }
        if (own.count != 1) smem_.merges[before] = own;
        __syncthreads();
        return all;
    }
    // Of a sequence's rows. Few results: a warp has a row, a lane 16 channels of two results at once. Else
    // `combine_split` warps have 128 channels of a row, a lane 4 of four results at once.
    OA_DEVICE bool has_parts() const { return p_.combine_split > 1; }
    OA_DEVICE int32 groups_of_rows() const {
        const int32 warps =
            min_of(params_.slot_rows, p_.q_len * p_.group) * p_.combine_split * (has_parts() ? kParts : 1);
        return (warps + Config::kWarps - 1) / Config::kWarps;
    }

    template <int kWidth, int kUnroll>
    OA_DEVICE void merge_rows(const Merge& merge, int32 group) {
        constexpr int kOwnParts = Config::kHeadDim / 32 / kWidth;
        const int32 split = p_.combine_split, part = warp_ & (split - 1);
        const int32 place = (group * Config::kWarps + warp_) / split;
        const int32 flat = place / kOwnParts, channels = place - flat * kOwnParts;
        const int32 token = token_of(p_, flat), head = flat - token * p_.group;
        const Queries queries = queries_of(p_, merge.sequence);
        const bool active = flat < params_.slot_rows && token < queries.count;
        const int32 first = channels * 32 * kWidth + lane_ * 4;  // the vectors of a lane are 128 places apart
        PartialSum<kWidth> sum;
        for (int32 i = part; active && i < merge.count; i += split * kUnroll) {
            float2 ml[kUnroll];
            float o[kUnroll][kWidth];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int32 at = i + u * split;
                const bool exists = at < merge.count;
                const int64 row = int64(slot_of(merge, at)) * params_.slot_rows + flat;
                const float4* from = reinterpret_cast<const float4*>(p_.partial_o + row * Config::kHeadDim + first);
                ml[u] = exists ? *reinterpret_cast<const float2*>(p_.partial_ml + 2 * row) : make_float2(kLowest, 0.0f);
#pragma unroll
                for (int e = 0; e < kWidth; e += 4) {
                    const float4 x = exists ? from[8 * e] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    o[u][e] = x.x, o[u][e + 1] = x.y, o[u][e + 2] = x.z, o[u][e + 3] = x.w;
                }
            }
            sum.add(ml, o);
        }
        if constexpr (kWidth == 4) add_warps(sum, split);
        if (!active || part != 0) return;
        const RowResult result = finish_row(sum.m, sum.l, sink_log2<Io>(p_.sinks, p_.sinks_kind, head));
        uint16* to = p_.o + merge.sequence * p_.o_stride_b + (queries.first + token) * p_.o_stride_s +
                     head * p_.o_stride_h + channel_of_place(first);
#pragma unroll
        for (int e = 0; e < kWidth; e += 4)
            store(to + 32 * e, make_float4(sum.o[e], sum.o[e + 1], sum.o[e + 2], sum.o[e + 3]), result.o_scale);
        if (lane_ == 0 && channels == 0)
            note_row(params_, merge.sequence, head, queries.first, token, sum.m, result.lse);
    }
    // Place of a sequence's partial result: workers behind the first one begin with it.
    OA_DEVICE int32 slot_of(const Merge& merge, int32 at) const {
        return at == 0 ? merge.first_slot : merge.base + at * merge.step;
    }
    // The sums of `split` warps, to the first of them.
    OA_DEVICE void add_warps(PartialSum<4>& sum, int32 split) {
        smem_.o[warp_][lane_] = make_float4(sum.o[0], sum.o[1], sum.o[2], sum.o[3]);
        if (lane_ == 0) smem_.m[warp_] = sum.m, smem_.l[warp_] = sum.l;
        __syncthreads();
        if ((warp_ & (split - 1)) == 0) {
            for (int32 w = warp_ + 1; w < warp_ + split; ++w) {
                const float2 ml[1] = {make_float2(smem_.m[w], smem_.l[w])};
                const float4 x = smem_.o[w][lane_];
                const float o[1][4] = {{x.x, x.y, x.z, x.w}};
                sum.add(ml, o);
            }
        }
        __syncthreads();
    }
    OA_DEVICE static void store(uint16* to, float4 x, float scale) {
        *reinterpret_cast<uint32*>(to) = pack2(Io{}, x.x * scale, x.y * scale);
        *reinterpret_cast<uint32*>(to + 8) = pack2(Io{}, x.z * scale, x.w * scale);
    }

    // Rows of packed queries that the kernel ahead does not compute: 0 and -inf in those that no sequence owns, NaN in
    // those of a sequence with more queries than the caller has said.
    OA_DEVICE void fill_strays() const {
        if (p_.cu_seqlens_q == nullptr || p_.has_company != 0) return;
        auto edge = [&](int32 b) { return min_of(max_of(p_.cu_seqlens_q[b], 0), p_.total_queries); };
        for (int32 b = blockIdx.x; b < p_.batch; b += int32(gridDim.x)) {
            const int32 first = edge(b), count = edge(b + 1) - first;
            if (count > p_.q_len) fill_rows(first, count, quiet_nan(), quiet_nan(), 0, 1);
        }
        const int32 first = edge(0), last = edge(p_.batch);
        fill_rows(0, first, 0.0f, neg_inf(), blockIdx.x, gridDim.x);
        fill_rows(last, p_.total_queries - last, 0.0f, neg_inf(), blockIdx.x, gridDim.x);
    }
    // Rows of all heads, by `ctas` CTAs of which this is number `cta`.
    OA_DEVICE void fill_rows(int32 first, int32 count, float o, float lse, int32 cta, int32 ctas) const {
        const int64 all = int64(count) * p_.num_q_heads * kParts;
        for (int64 i = int64(cta) * Config::kWarps + warp_; i < all; i += int64(ctas) * Config::kWarps) {
            const int32 place = int32(i / kParts), channels = int32(i - int64(place) * kParts);
            const int32 row = place / p_.num_q_heads, head = place - row * p_.num_q_heads;
            store(p_.o + (first + row) * p_.o_stride_s + head * p_.o_stride_h +
                      channel_of_place(channels * 128 + lane_ * 4),
                  make_float4(o, o, o, o), 1.0f);
            if (p_.lse != nullptr && lane_ == 0 && channels == 0)
                p_.lse[int64(head) * p_.total_queries + first + row] = lse;
        }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentCombineStorage<Config>& smem_;
    const int32 lane_, warp_;
};
