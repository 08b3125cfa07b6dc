// As TileCopy, of rows of 8-bit codes that lie anywhere: 16 channels an item. The 16 bytes of an item land in the first
// of the two chunks that its elements of 16 bits fill; the thread that copied them converts them there. So nothing is
// staged elsewhere, and no barrier is between the copy and the conversion.
#pragma once
#include "decode/kv_dequant.cuh"
#include "params/kv_codes.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/shared.cuh"
#include "scheduler/page_table.cuh"
#include "tile/panel.cuh"

template <typename Io, int kRows, int kHeadDim, int kThreads, typename Order>
struct CodeCopy {
    using Tile = PanelTile<kRows, kHeadDim>;
    static constexpr int kPairs = kHeadDim / 16, kItems = kRows * kPairs;
    static_assert(kHeadDim % 16 == 0 && kItems % kThreads == 0, "whole rounds of items");
    static constexpr int kRounds = kItems / kThreads;

    // found(row): where a row of the tile is; at(that), scale_at(that): its codes and its scale. scales: kItems floats,
    // a place for each item's.
    template <typename Found, typename At, typename ScaleAt>
    OA_DEVICE static void issue(uint32 smem, uint32 scales, const KvCodes& codes, Found found, At at, ScaleAt scale_at,
                                int valid_rows, int head_dim, int tid) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int slot = (i * kThreads + tid) / kPairs, pair = (i * kThreads + tid) % kPairs;
            const int row = Order::row_at(slot);
            const bool exists = row < valid_rows && pair * 16 < head_dim;
            const auto from = found(exists ? row : 0);
            cp_async_16(smem + Tile::offset(slot, 2 * pair), at(from) + (exists ? pair * 16 : 0), exists ? 16 : 0);
            if (codes.row_scales) cp_async_small<4>(scales + (i * kThreads + tid) * 4, scale_at(from), exists ? 4 : 0);
        }
    }

    // Own items, whose copies have ended. scale: of all rows, where rows have none.
    OA_DEVICE static void convert(uint32 smem, uint32 scales, const KvCodes& codes, float scale, int tid) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int slot = (i * kThreads + tid) / kPairs, pair = (i * kThreads + tid) % kPairs;
            const float factor = codes.row_scales ? load_shared_float(scales + (i * kThreads + tid) * 4) : scale;
            const uint4 in = load_shared4(smem + Tile::offset(slot, 2 * pair));
            const uint2 a = elements(in.x, codes, factor), b = elements(in.y, codes, factor);
            const uint2 c = elements(in.z, codes, factor), d = elements(in.w, codes, factor);
            store_shared4(smem + Tile::offset(slot, 2 * pair), make_uint4(a.x, a.y, b.x, b.y));
            store_shared4(smem + Tile::offset(slot, 2 * pair + 1), make_uint4(c.x, c.y, d.x, d.y));
        }
    }

  private:
    // Four codes.
    OA_DEVICE static uint2 elements(uint32 w, const KvCodes& codes, float factor) {
        uint32 low, high;
        if (codes.e4m3) {
            low = unpack_bytes<kKvE4m3InOrder, false>(w), high = unpack_bytes<kKvE4m3InOrder, true>(w);
        } else {
            w = with_bias<kKvInt8InOrder>(w);
            low = unpack_bytes<kKvInt8InOrder, false>(w), high = unpack_bytes<kKvInt8InOrder, true>(w);
        }
        return make_uint2(scaled(low, factor), scaled(high, factor));
    }
    OA_DEVICE static uint32 scaled(uint32 codes, float factor) {
        const float2 x = unpack2(Half{}, codes);
        return pack2(Io{}, in_range(x.x * factor), in_range(x.y * factor));
    }
    // What fp16 has no number for becomes its largest one; NaN stays.
    OA_DEVICE static float in_range(float x) {
        if (!is_half(Io{})) return x;
        return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    }
    OA_DEVICE static constexpr bool is_half(Half) { return true; }
    OA_DEVICE static constexpr bool is_half(BFloat16) { return false; }
};

// Scales of the items of K and V.
template <typename Config, bool = Config::kCodes>
struct CodeScales {};
template <typename Config>
struct CodeScales<Config, true> {
    alignas(1024) float scales[Config::kStages][2][Config::kBlockN * Config::kHeadDim / 16];
};

// Tiles of K and V in codes: nothing, where they come as elements. Storage: with `CodeScales`.
template <typename Config, typename Order, typename P, typename Tile, typename Storage, bool = Config::kCodes>
class CodeTiles {
  public:
    OA_DEVICE CodeTiles(const P&, const AttnFwdParams&, const Tile&, const Storage&, int32, int) {}
    OA_DEVICE void copy(bool, uint32, int32, int) const {}
    OA_DEVICE void convert(bool, uint32, int) const {}
};
template <typename Config, typename Order, typename P, typename Tile, typename Storage>
class CodeTiles<Config, Order, P, Tile, Storage, true> {
    using Copy = CodeCopy<typename Config::Io, Config::kBlockN, Config::kHeadDim, Config::kThreads, Order>;

  public:
    OA_DEVICE CodeTiles(const P& params, const AttnFwdParams& p, const Tile& t, const Storage& smem, int32 kv_head,
                        int tid)
        : codes_(params.codes), p_(p), t_(t), smem_(smem), kv_head_(kv_head), tid_(tid) {
        if (codes_.k_scale == nullptr || codes_.row_scales) return;
        const uint32 at = uint32(t.sequence) * codes_.scale_outer + uint32(kv_head) * codes_.scale_head;
        scale_[0] = codes_.k_scale[at], scale_[1] = codes_.v_scale[at];
    }
    OA_DEVICE void copy(bool is_v, uint32 to, int32 n, int stage) const {
        const int64 first = int64(n) * Config::kBlockN;
        const uint16* pool = is_v ? p_.v : p_.k;
        const uint8* own = reinterpret_cast<const uint8*>(pool) + kv_head_ * (is_v ? p_.v_stride_h : p_.k_stride_h);
        const float* scales = (is_v ? codes_.v_scale : codes_.k_scale) + kv_head_ * codes_.scale_head;
        const int64 stride_b = is_v ? p_.v_stride_b : p_.k_stride_b, stride_s = is_v ? p_.v_stride_s : p_.k_stride_s;
        auto found = [&](int row) { return PageTable(p_, t_).at(seen_key(p_, t_, first + row)); };
        auto at = [&](const PageRow& row) { return own + PageTable::offset(p_, row, stride_b, stride_s); };
        auto scale_at = [&](const PageRow& row) {
            return scales + PageTable::offset(p_, row, codes_.scale_outer, codes_.scale_token);
        };
        const int32 count = int32(min_of<int64>(t_.seqlen_k - first, Config::kBlockN));
        Copy::issue(to, scales_at(is_v, stage), codes_, found, at, scale_at, count, p_.head_dim, tid_);
    }
    OA_DEVICE void convert(bool is_v, uint32 tile, int stage) const {
        Copy::convert(tile, scales_at(is_v, stage), codes_, scale_[is_v], tid_);
    }

  private:
    OA_DEVICE uint32 scales_at(bool is_v, int stage) const { return smem_addr_of(&smem_.scales[stage][is_v]); }

    const KvCodes& codes_;
    const AttnFwdParams& p_;
    const Tile& t_;
    const Storage& smem_;
    const int32 kv_head_;
    const int tid_;
    float scale_[2] = {1.0f, 1.0f};  // of all rows, where they have none of their own
};
