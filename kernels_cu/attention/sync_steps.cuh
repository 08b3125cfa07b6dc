// The tiles of keys that a CTA of attn_fwd_sm80 visits, from the last to the first. Config: kBlockM, kBlockN, kMTiles,
// kChannelWarps, kScoreMods, kSplitKeys.
#pragma once
#include "attention/score_mods_mma.cuh"
#include "attention/split_keys.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/types.cuh"

// This CTA's part of `count` steps, those of all CTAs within one of each other.
template <typename Config>
struct PartOfSteps {
    int32 first, count;
    OA_DEVICE explicit PartOfSteps(int32 of) : first(0), count(max_of(of, 0)) {
        if (!Config::kSplitKeys) return;
        const SplitPart part(count, blockIdx.y, gridDim.y);
        first = part.first, count = part.count;
    }
};

// All of them.
template <typename Config, typename Tile, typename Keys>
struct AllSteps {
    using Part = PartOfSteps<Config>;
    int32 at, first;
    OA_DEVICE AllSteps(const AttnFwdParams&, const Tile&, const Keys& keys, int) : at(keys.end - 1), first(keys.first) {
        if (!Config::kSplitKeys) return;
        Part part(keys.end - keys.first);
        at -= part.first;
        first = at - part.count + 1;
    }
    OA_DEVICE bool done() const { return at < first; }
    OA_DEVICE bool has_next() const { return at > first; }
    OA_DEVICE int32 n() const { return at; }
    OA_DEVICE int32 next() const { return at - 1; }
    OA_DEVICE void find_next() const {}
    OA_DEVICE void advance() { --at; }
};
// Those of a list of tiles of 64 keys where a mask hides whole ones; and what it does to the warp's rows. Without
// branches: they would stand between the products of two tiles.
template <typename Config, typename Tile, typename Keys>
class ListedSteps {
    using Part = PartOfSteps<Config>;

  public:
    OA_DEVICE ListedSteps(const AttnFwdModsSm80Params& params, const Tile& t, const Keys& keys, int warp_idx)
        : list_(params.mods.lists),
          left_(Part(keys.end - keys.first).count),
          group_(warp_idx / Config::kChannelWarps * Config::kMTiles * 16 / 64) {
        const ScoreModParams& f = params.mods;
        // Without a list: the last tile but one to come.
        step_ = keys.end - Part(keys.end - keys.first).first +
                (params.fwd.mask_kind == kMaskNone ? kTileFull : kTileMixed) * kKindUnit;
        // A list that knows nothing of a mask: the mask is read in every tile.
        if ((f.flags & kModUserTiles) && params.fwd.mask_kind != kMaskNone) no_kind_ = kTileFull;
        if (list_ != nullptr) {
            list_ += t.sequence * f.lists_stride_b + t.head_idx * f.lists_stride_h +
                     int64(t.m0 / Config::kBlockM) * (1 + f.num_tiles);
            left_ = __ldg(list_++);
            if (Config::kSplitKeys) {
                Part part(left_);
                list_ += part.first;
                left_ = part.count;
            }
            step_ = 0;  // the last part of a tile
        }
        step_ = after(step_);
        // A part of 64 keys that nobody sees.
        if (!done() && n() >= keys.end) step_ -= n() - keys.end + 1;
    }
    OA_DEVICE bool done() const { return step_ < 0; }
    OA_DEVICE bool has_next() const { return next_ >= 0; }
    OA_DEVICE int32 n() const { return step_ & (kKindUnit - 1); }
    OA_DEVICE int32 next() const { return next_ & (kKindUnit - 1); }
    OA_DEVICE int32 kind() const { return step_ / kKindUnit; }  // MaskTileKind
    OA_DEVICE int32 next_kind() const { return next_ / kKindUnit; }  // kTileEmpty if there is none
    OA_DEVICE void find_next() { next_ = after(step_); }
    OA_DEVICE void advance() { step_ = next_; }

  private:
    static constexpr int32 kParts = 64 / Config::kBlockN, kKindUnit = 1 << 28;  // tiles of a list's: at most 2^22

    // ld.global.nc.b32; 0 where nothing is wanted.
    OA_DEVICE static int32 load_if(const int32* from, bool wanted) {
        int32 x;
        asm("{.reg .pred p;\n"
            "setp.ne.u32 p, %2, 0;\n"
            "mov.b32 %0, 0;\n"
            "@p ld.global.nc.b32 %0, [%1];}"
            : "=r"(x)
            : "l"(from), "r"(uint32(wanted)));
        return x;
    }

    OA_DEVICE int32 after(int32 step) {
        const bool listed = list_ != nullptr, part = listed && step % kParts != 0, some = left_ > 0;
        int32 entry = load_if(list_, listed && some && !part);
        int32 kind = ListSteps::kind(entry, group_);
        if (kind == no_kind_) kind = kTileMixed;
        int32 first = ListSteps::tile(entry) * kParts + kParts - 1 + kind * kKindUnit;
        left_ -= some && !part;
        list_ += listed && some && !part;
        return part || (some && !listed) ? step - 1 : some ? first : -1;
    }

    const int32* list_;  // of the next entry; or null
    int32 left_;  // entries, or tiles
    int32 step_, next_;  // tile, and its kind in kKindUnit; negative: none
    const int32 group_;
    int32 no_kind_ = -1;  // a kind that counts as mixed
};
