// Merge of the partial results of the CTAs of a cluster, each of which has a part of one sequence's keys, by the
// equation of decode_combine_sm80: results go through shared memory, and one is left of them all.
#pragma once
#include "attention/partial_sum.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent.cuh"
#include "decode/latent_rows.cuh"
#include "decode/rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cluster_memory.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/shared.cuh"
#include "ptx/shared_pairs.cuh"
#include "ptx/types.cuh"

// What a CTA leaves for the others: O of its rows, not divided, channels in the order of `pair_of_blocks`, and maxima
// and denominators. Rows are 16 banks apart, so that what lanes of two rows store meets in no bank.
template <typename Config>
struct ClusterPart {
    float o[Config::kRows][Config::kHeadDimV + 16];
    float2 ml[Config::kRows];
    // Bytes from its begin on.
    OA_DEVICE static uint32 o_at(int32 row, int32 place) {
        return uint32(row * (Config::kHeadDimV + 16) + place) * uint32(sizeof(float));
    }
    OA_DEVICE static uint32 ml_at(int32 row) { return uint32(sizeof(o)) + uint32(row) * uint32(sizeof(float2)); }
};

// The cluster's part of a sequence: the CTAs that have some of it, and whether that is all of it. The host makes
// clusters of calls alone in which each CTA has one split at most, and those of a cluster the same sequence's.
struct ClusterMembers {
    int32 first, count;  // workers
    bool whole;

    OA_DEVICE ClusterMembers(const MlaDecodeParams& params, int32 chunks) {
        const DecodeParams& p = params.decode;
        const Partition partition(chunks, p);
        first = in_register(int32(blockIdx.y)) - int32(cluster_rank());
        count = min_of(params.cluster, partition.num_workers - first);
        // Sequences have as many chunks each.
        whole = int64(partition.begin(first + count) - partition.begin(first)) * p.batch == chunks;
    }
};

// By `kThreads` threads, all of the CTA that have not exited. Each member's result is at the shared address `part` of
// its own; nobody reads it any more behind the call. Of all keys O and LSE, else a partial result, in the first
// member's slot.
template <typename Config, int kThreads>
OA_DEVICE void merge_in_cluster(const MlaDecodeParams& params, const LatentSplit& split, uint32 part,
                                const ClusterMembers& members) {
    using Io = typename Config::Io;
    constexpr int kVectors = Config::kHeadDimV / 4, kAtOnce = 4;
    const DecodeParams& p = params.decode;
    using Part = ClusterPart<Config>;
    const int32 rank = int32(cluster_rank());
    cluster_sync();
#pragma unroll 1
    for (int32 item = in_register(int32(threadIdx.x));; item += kThreads) {
        // Rows in turn to the members.
        const int32 row = item / kVectors * members.count + rank, place = item % kVectors * 4;
        const int32 flat = in_register(int32(blockIdx.x)) * Config::kRows + row, token = token_of(p, flat);
        if (row >= Config::kRows) break;
        if (token >= split.queries.count) continue;
        PartialSum<4> sum;
#pragma unroll 1
        for (int first = 0; first < members.count; first += kAtOnce) {
            float2 ml[kAtOnce];
            float o[kAtOnce][4];
#pragma unroll
            for (int u = 0; u < kAtOnce; ++u) {
                ml[u] = make_float2(kLowest, 0.0f);
                o[u][0] = o[u][1] = o[u][2] = o[u][3] = 0.0f;
                if (first + u >= members.count) continue;
                const uint2 bits = load_cluster2(part + Part::ml_at(row), first + u);
                const uint4 x = load_cluster4(part + Part::o_at(row, place), first + u);
                ml[u] = make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y));
                o[u][0] = __uint_as_float(x.x), o[u][1] = __uint_as_float(x.y);
                o[u][2] = __uint_as_float(x.z), o[u][3] = __uint_as_float(x.w);
            }
            sum.add(ml, o);
        }
        if (!members.whole) {
            const int64 slot_row = int64(2 * members.first) * params.slot_rows + flat;
            if (place == 0) *reinterpret_cast<float2*>(p.partial_ml + 2 * slot_row) = make_float2(sum.m, sum.l);
            *reinterpret_cast<float4*>(p.partial_o + slot_row * Config::kHeadDimV + place) =
                make_float4(sum.o[0], sum.o[1], sum.o[2], sum.o[3]);
            continue;
        }
        const int32 head = flat - token * p.group;
        const RowResult result = finish_row(sum.m, sum.l, sink_log2<Io>(p.sinks, p.sinks_kind, head));
        if (place == 0) note_row(params, split.sequence, head, split.queries.first, token, sum.m, result.lse);
        uint16* to = p.o + split.sequence * p.o_stride_b + (split.queries.first + token) * p.o_stride_s +
                     head * p.o_stride_h + channel_of_place(place);
        *reinterpret_cast<uint32*>(to) = pack2(Io{}, sum.o[0] * result.o_scale, sum.o[1] * result.o_scale);
        *reinterpret_cast<uint32*>(to + 8) = pack2(Io{}, sum.o[2] * result.o_scale, sum.o[3] * result.o_scale);
    }
    cluster_sync();
}
