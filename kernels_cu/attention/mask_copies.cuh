// What masks need beside a tile of K, in shared memory: the producer's copies and where consumers find them.
#pragma once
#include "attention/score_mods.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// In place of MaskTiles where nothing is copied beside K.
struct NoMaskTiles {
    OA_DEVICE static uint32 bytes(const ScoreModParams&, int32) { return 0; }
    template <typename Params, typename Tile>
    OA_DEVICE static void copy(const Params&, const Tile&, int32, int32, uint32) {}
};

// Config: kConsumers, kInnerStages, kBlockM, kBlockN, kSplitKeys, kBiasBytes (of an element of a bias tile; 0: none).
// Of each stage of K: a tile of the bias in panels of 128 bytes a row; or, for tiles that the mask cuts, bits of each
// warpgroup, or one number a key.
template <typename Config>
struct MaskTiles {
    static constexpr uint32 kPanelBytes = Config::kBlockM * 128;
    static constexpr uint32 kPanels = Config::kBlockN * Config::kBiasBytes / 128;
    static constexpr uint32 kWordBytes = 512;  // of a warpgroup
    static constexpr uint32 kBytes = kPanels != 0 ? kPanels * kPanelBytes : Config::kConsumers * kWordBytes;
    struct Storage {
        alignas(1024) uint8 mask[Config::kInnerStages][kBytes];
    };
    static_assert(Config::kConsumers <= kMaxGroups, "kinds in an entry");

    // Storage is the first member of a kernel's shared memory.
    OA_DEVICE static uint32 at(int32 stage) { return smem_addr_at(&Storage::mask) + stage * kBytes; }

    // Bytes that copy() copies.
    OA_DEVICE static uint32 bytes(const ScoreModParams& f, int32 entry) {
        if constexpr (kPanels != 0) return kBytes;
        uint32 mixed = ListSteps::mixed_groups(entry);
        if (f.flags & kModBits) return __popc(mixed) * kWordBytes;
        return mixed != 0 && (f.flags & kModKeyBias) ? Config::kBlockN * 4 : 0;
    }
    // One thread. params: with score modifications and map_bias.
    template <typename Params, typename Tile>
    OA_DEVICE static void copy(const Params& params, const Tile& t, int32 entry, int32 stage, uint32 bar) {
        const ScoreModParams& f = params.mods;
        const int32 n = ListSteps::tile(entry);
        if constexpr (kPanels != 0) {
#pragma unroll
            for (int c = 0; c < kPanels; ++c) {
                const int32 key = n * Config::kBlockN + c * (128 / Config::kBiasBytes), head = t.head_idx * f.bias_head;
                if constexpr (Config::kSplitKeys) {
                    tma_load_5d(at(stage) + c * kPanelBytes, &params.map_bias, bar, key, 0, t.m0 / t.pack, head,
                                t.sequence * f.bias_batch);
                } else {
                    tma_load_4d(at(stage) + c * kPanelBytes, &params.map_bias, bar, key, t.m0, head,
                                t.sequence * f.bias_batch);
                }
            }
            return;
        }
        int64 head = t.sequence * f.tiles_stride_b + t.head_idx * f.tiles_stride_h;
        if (f.flags & kModBits) {
            const uint32* words = static_cast<const uint32*>(f.tiles) + head + n * 128;
            for (int g = 0; g < Config::kConsumers; ++g)
                if (ListSteps::kind(entry, g) == kTileMixed)
                    bulk_load(at(stage) + g * kWordBytes, words + (t.m0 / 64 + g) * f.tiles_stride_m, kWordBytes, bar);
        } else {
            bulk_load(at(stage), static_cast<const float*>(f.tiles) + head + n * Config::kBlockN, Config::kBlockN * 4,
                      bar);
        }
    }

    // What bits() reads, whether it means anything or not: a load without a branch, ahead of its use.
    OA_DEVICE static uint32 word(int32 stage, int32 group) {
        return load_shared(at(stage) + group * kWordBytes + (threadIdx.x & 127) * 4);
    }
    // Of this thread's 32 scores: a bit for each that the mask lets through; all ones if the mask is none of bits.
    OA_DEVICE static uint32 bits(const ScoreModParams& f, int32 entry, int32 stage, int32 group) {
        int32 kind = ListSteps::kind(entry, group);
        if (kPanels != 0 || !(f.flags & kModBits) || kind == kTileFull) return 0xffffffffu;
        return kind == kTileEmpty ? 0 : word(stage, group);
    }
};
