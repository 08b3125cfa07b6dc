// A warpgroup of mla_decode_rows8_sm90 that has a half of O: O += P V. It converts keys too.
#pragma once
#include "decode/latent8_storage.cuh"
#include "decode/latent_output.cuh"
#include "decode/latent_rows8.cuh"
#include "ptx/l2.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

// The two have the same instructions: those of a split's end come from far away, for both once. Each converts the
// channels of its own half of V, and a part of the others.
template <typename Config>
class Latent8Values {
    using Io = typename Config::Io;
    using Storage = Latent8Storage<Config>;
    // Two products: ptxas compiles 512 threads for 128 registers, too few for one of 256 columns.
    using Pv = Wgmma<Io, Config::kHeadDimV / 4>;
    static constexpr uint32 kBlockBytes = Storage::kBlockBytes;
    static constexpr int kOutput = Config::kHeadDimV / 4;
    static constexpr uint32 kRowBytes = Config::kRowBytes;

  public:
    OA_DEVICE Latent8Values(const MlaDecodeParams& p, Storage& smem) : params_(p), p_(p.decode), smem_(smem) {}

    OA_DEVICE void run() {
#pragma unroll 1
        for (uint32 block = 0; block < 2; ++block) {
            wait_codes(block, 0);
            if (!is_block(block)) break;
#pragma unroll 1
            for (uint32 half = 0; half < 2; ++half) convert(lanes_of(block), block, half);
            announce(smem_.full[buffer_of(block)]);
            convert_rest(block);
            announce(smem_.rest[buffer_of(block)]);
        }
        for (uint32 number = 0;; ++number) {
            wait_for_split(smem_, number);
            const int32 blocks = split_of(smem_, number).blocks;
            if (!__any_sync(0xffffffffu, blocks > 0)) return;
            const uint32 stop = stream_ + blocks;
#pragma unroll
            for (int i = 0; i < kOutput; ++i) o_[i] = 0.0f;
            if (own_half() == 1) prefetch_queries(number + 1);
            do {
                add_block();
            } while (__any_sync(0xffffffffu, ++stream_ != stop));
            end(split_of(smem_, number));
        }
    }

  private:
    // The lane's places in what a block's keys are converted from and to: a panel of this warpgroup's half of V a warp.
    struct Lanes {
        uint32 codes, scale, to;
    };
    // Computed anew where they are needed: there are no registers for them.
    OA_DEVICE static int32 own_half() { return (in_register(int32(threadIdx.x)) >> 7) - 1; }  // of O, 0: the left one
    OA_DEVICE static int32 thread() { return in_register(int32(threadIdx.x)) & 127; }
    OA_DEVICE uint32 fresh_stream() const { return in_register(int32(stream_)); }
    OA_DEVICE static int32 row() { return (thread() >> 5) * 16 + (thread() >> 2 & 7); }  // of O, the lane's first one

    // Q of the split behind this one, to L2: half a row a thread. The scores' warpgroup has to wait for it there.
    OA_DEVICE void prefetch_queries(uint32 number) const {
        wait_for_split(smem_, number);
        const LatentSplit& split = split_of(smem_, number);
        const uint16* from;
        if (split.blocks == 0 || !query_row<Config>(p_, from, split, thread() >> 1)) return;
        from += (thread() & 1) * (Config::kHeadDim / 2);
#pragma unroll
        for (int channel = 0; channel < Config::kHeadDim / 2; channel += 64) prefetch_l2(from + channel);
    }

    // O += P V of a block, and the block behind the next one in its place: keys of which products have read the values
    // are converted while the others' products run, 32 at a time.
    OA_DEVICE void add_block() {
        const uint32 buffer = buffer_of(stream_), at = smem_addr_of(smem_.k[0]) + buffer * kBlockBytes;
        WgmmaDescriptor p = wgmma_descriptor(at + (Config::kPanels - 1) * kPanelBytes, 16, 1024);
        WgmmaDescriptor v = wgmma_descriptor(at + own_half() * Config::kHalfPanels * kPanelBytes, kPanelBytes, 1024);
        asm volatile("" : "+r"(p.lo), "+r"(v.lo));  // before the wait
        mbarrier_wait(smem_addr_of(&smem_.ready[buffer]), parity_of(stream_));
        const int32 warp = thread() >> 5;
        if (__any_sync(0xffffffffu, smem_.grown[buffer][warp] == int32(stream_))) {
            const float alpha[2] = {smem_.alpha[row()], smem_.alpha[row() + 8]};
            arrive_for_warp(smem_.alpha_read[warp], thread() & 31);
#pragma unroll
            for (int i = 0; i < kOutput; ++i) o_[i] *= alpha[i >> 1 & 1];
        }
        wgmma_pin(o_);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
#pragma unroll
            for (int part = 0; part < 2; ++part)
                Pv::template ss<kKMajor, kMnMajor>(
                    *reinterpret_cast<float (*)[kOutput / 2]>(&o_[part * (kOutput / 2)]), p.at(step * 32),
                    v.at(part * (Config::kHalfPanels / 2 * kPanelBytes) + step * 16 * 128), 1);
            if (step % 2 == 1) wgmma_commit();
        }
        wgmma_pin(o_);
        const Lanes own = lanes_of(buffer);
        wait_codes(fresh_stream() + 2, 0);
        const bool more = is_block(fresh_stream() + 2);
        convert_behind<1>(own, more);
        convert_behind<0>(own, more);
        wgmma_pin(o_);
        if (more) announce(smem_.full[buffer]);
        named_barrier_sync(kAllValues, 256);  // P, too, has been read
        if (!more) return;
        convert_rest(fresh_stream() + 2);
        announce(smem_.rest[buffer]);
    }
    // 32 keys, once all but so many groups of products of the warpgroup's warps are done.
    template <int kGroups>
    OA_DEVICE void convert_behind(const Lanes& own, bool more) const {
        wgmma_wait<kGroups>();
        named_barrier_sync(kValuesOnly + own_half(), 128);
        if (more) convert(own, fresh_stream() + 2, 1 - kGroups);
    }
    OA_DEVICE void wait_codes(uint32 stream, uint32 half) const {
        const uint32 number = 2 * stream + half;
        mbarrier_wait(smem_addr_of(&smem_.codes_full[number % kStages]), number / kStages & 1);
    }
    // Once the codes of its first half are there.
    OA_DEVICE bool is_block(uint32 stream) const {
        return __any_sync(0xffffffffu, smem_.is_block[2 * stream % kStages] != 0);
    }
    OA_DEVICE void announce(uint64& bar) const {
        fence_proxy_async();
        arrive_for_warp(bar, thread() & 31);
    }
    // What a lane converts of 8 rows and 64 codes of each, a warp's: 16 codes. Rows are a chunk of 16 bytes apart in
    // the banks, so that 8 lanes have as many rows.
    OA_DEVICE static int32 row_of(int32 lane) { return lane & 7; }
    OA_DEVICE static int32 chunk_of(int32 lane) { return lane >> 3; }
    OA_DEVICE Lanes lanes_of(uint32 buffer) const {
        const int32 tid = in_register(int32(threadIdx.x)), lane = tid & 31, panel = (tid >> 5) - 4;
        const uint32 row = smem_addr_of(smem_.codes[0]) + row_of(lane) * kRowBytes;
        const uint32 place = row_of(lane) * 128 + ((2 * chunk_of(lane) ^ row_of(lane)) << 4);
        return {row + panel * 64 + chunk_of(lane) * 16, row + Config::kHeadDimV + (panel >> 1) * 4,
                smem_addr_of(smem_.k[0]) + buffer * kBlockBytes + panel * kPanelBytes + place};
    }
    // 32 keys of a block, of whose second half codes have to be waited for.
    OA_DEVICE void convert(const Lanes& own, uint32 stream, uint32 half) const {
        if (half == 1) wait_codes(stream, 1);
        const uint32 at = (2 * stream + half) % kStages * Storage::kStageBytes;
#pragma unroll
        for (int first = 0; first < kStageRows; first += 16) {
            uint4 codes[2];
            float scales[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                codes[i] = load_shared4(own.codes + at + (first + 8 * i) * kRowBytes);
                scales[i] = load_shared_float(own.scale + at + (first + 8 * i) * kRowBytes);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32 to = own.to + (half * kStageRows + first + 8 * i) * 128;
                store_shared4(to, dequantize8<Io>(codes[i].x, codes[i].y, scales[i]));
                store_shared4(to ^ 16, dequantize8<Io>(codes[i].z, codes[i].w, scales[i]));
            }
        }
    }
    // And the channels in 16 bits of all 64 keys: in each half 16 bytes of a row a lane, 8 rows and 4 chunks a warp.
    OA_DEVICE void convert_rest(uint32 stream) const {
        const int32 tid = in_register(int32(threadIdx.x)), lane = tid & 31, warp = (tid >> 5) - 4;
        const int32 row = (warp >> 1) * 8 + (lane & 7), chunk = (warp & 1) * 4 + (lane >> 3);
        const uint32 to =
            smem_addr_of(smem_.k[0]) + buffer_of(stream) * kBlockBytes + (Config::kPanels - 1) * kPanelBytes;
#pragma unroll
        for (uint32 half = 0; half < 2; ++half) {
            const uint32 from = smem_addr_of(smem_.codes[0]) + (2 * stream + half) % kStages * Storage::kStageBytes;
            store_shared4(to + (half * kStageRows + row) * 128 + ((chunk ^ (row & 7)) << 4),
                          load_shared4(from + row * kRowBytes + Config::kHeadDimV + 16 + chunk * 16));
        }
        const int32 key = tid - 128;
        if (params_.lists_rows != 0 && key < Config::kKeys)
            smem_.listed[buffer_of(stream)][key] =
                smem_.is_listed[(2 * stream + key / kStageRows) % kStages][key % kStageRows];
    }

    // Of all keys O, else a partial result.
    OA_DEVICE void end(const LatentSplit& split) {
        const float scale[2] = {smem_.scale[row()], smem_.scale[row() + 8]};
        arrive_for_warp(smem_.scale_read, thread() & 31);
        const int32 column = own_half() * (Config::kHeadDimV / 2);
        if (split.slot < 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int32 flat = first_row() + 8 * r, token = token_of(p_, flat);
                uint16* to = p_.o + split.sequence * p_.o_stride_b + (split.queries.first + token) * p_.o_stride_s +
                             (flat - token * p_.group) * p_.o_stride_h + column;
                // 32 channels at a time: for more there are no registers.
#pragma unroll
                for (int n = 0; n < kOutput; n += 16) {
                    asm volatile("" ::: "memory");
                    const auto& some = *reinterpret_cast<const float (*)[16]>(&o_[n]);
                    store_accumulators<Io>(to + 2 * n, some, r, scale[r], thread() & 31, token < split.queries.count);
                }
            }
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = first_row() + 8 * r;
            if (token_of(p_, flat) >= split.queries.count) continue;
            const int64 place = int64(split.slot) * params_.slot_rows + flat;
            float* to = p_.partial_o + place * Config::kHeadDimV + column + 4 * (thread() & 3);
#pragma unroll
            for (int n = 0; n < kOutput / 4; n += 2)
                *reinterpret_cast<float4*>(to + 8 * n) = pair_of_blocks(&o_[4 * n], r);
        }
    }
    OA_DEVICE int32 first_row() const { return in_register(int32(blockIdx.x)) * Config::kRows + row(); }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Storage& smem_;
    uint32 stream_ = 0;  // blocks of all splits
    float o_[kOutput];
};
