// Which blocks of keys each block of queries keeps, from the means and similarities of block_means_sm80.
// Source: SpargeAttn (Zhang et al. 2025), section 3.2.
//
//   score[i, j] = scale * q_mean[i] . k_mean[j]      of blocks of keys that are similar to themselves, and visible
//   weight[i, j] = exp(score[i, j] - max)
//   kept: of a row the largest ones, as many as its head's share says, or those whose weights make up at most this
//   share of all; at least one. Of equal scores those with the lowest j. Besides: blocks of keys or queries that are
//   not similar to themselves, scores that are no finite numbers, the first keep_first blocks. Never what causality
//   hides.
//
// A CTA takes up to 4 rows of one head, so that K's means are read once for all of them; then a warp a row. A score is
// an unsigned number with the same order; the smallest one that is not kept whole is found bit by bit, by sums over the
// row. Shared memory: means of Q [4][256 * 4] | scores [KEYS * 4], of all rows of the CTA.
#include "params/sparse_blocks.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 4, kMaxHeadDim = 256, kKeys = KEYS;

struct SharedStorage {
    alignas(16) float q[kRows * kMaxHeadDim];
    uint32 keys[kKeys];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

// In place of a score's number: of a block that nothing is kept of, of one that is always kept. No finite score has it.
constexpr uint32 kHidden = 0, kAlways = 0xffffffffu;
constexpr uint32 kSign = 0x80000000u;

OA_DEVICE uint32 number_of(float score) {
    const uint32 bits = __float_as_uint(score + 0.0f);  // of -0 as of 0
    return bits & kSign ? ~bits : bits | kSign;
}
OA_DEVICE float score_of(uint32 number) { return __uint_as_float(number & kSign ? number ^ kSign : ~number); }

// The scores of a row. All lanes of a warp call the functions.
class Row {
  public:
    OA_DEVICE Row(const uint32* numbers, int32 size, int32 lane, bool by_count)
        : numbers_(numbers), size_(size), lane_(lane), by_count_(by_count), top_(0.0f) {
        uint32 top = kHidden;
        for (int32 j = lane_; j < size_; j += 32)
            if (numbers_[j] != kAlways) top = max_of(top, numbers_[j]);
        top = __reduce_max_sync(0xffffffffu, top);
        if (top != kHidden) top_ = score_of(top);
    }
    // What a block counts for.
    OA_DEVICE float weight(uint32 number) const {
        return by_count_ ? 1.0f : exp2_approx((score_of(number) - top_) * kLog2e);
    }
    // Weights of those from `least` on, which is above kHidden. The order of the sum is always the same, and so it
    // grows with what it is of.
    OA_DEVICE float sum_from(uint32 least) const {
        if (by_count_) {
            int32 count = 0;
            for (int32 j = lane_; j < size_; j += 32) count += numbers_[j] >= least && numbers_[j] != kAlways;
            return float(__reduce_add_sync(0xffffffffu, count));
        }
        float sum = 0.0f;
        for (int32 j = lane_; j < size_; j += 32) {
            const uint32 number = numbers_[j];
            if (number >= least && number != kAlways) sum += weight(number);
        }
#pragma unroll
        for (int mask = 1; mask <= 16; mask <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        return sum;
    }
    // The largest number that not all blocks of are kept, so that those from it on weigh more than `most`; kHidden:
    // none.
    OA_DEVICE uint32 find_last(float most) const {
        uint32 last = kHidden;
        for (uint32 bit = kSign; bit != 0; bit >>= 1)
            if (sum_from(last | bit) > most) last |= bit;
        return last;
    }
    OA_DEVICE uint32 number(int32 j) const { return j < size_ ? numbers_[j] : kHidden; }

  private:
    const uint32* numbers_;
    int32 size_, lane_;
    bool by_count_;
    float top_;
};

OA_DEVICE void choose(const ChooseBlocksParams& p, const uint32* numbers, float share, int64 row, int32 lane) {
    const Row of(numbers, p.k_blocks, lane, p.by_count != 0);
    const float most = p.by_count != 0 ? share : share * of.sum_from(1);
    const uint32 last = of.find_last(most);
    // How many of those with just that number.
    float ties = 0.0f;
    if (last != kHidden) {
        const float above = of.sum_from(last + 1), each = of.weight(last);
        ties = each > 0.0f ? floorf((most - above) / each) : 0.0f;
        if (above == 0.0f && ties < 1.0f) ties = 1.0f;
    }
    const bool all = !(p.q_similar[row] > p.similarity);
    uint8* out = p.blocks + row * p.k_blocks;
    float before = 0.0f;
    for (int32 first = 0; first < p.k_blocks; first += 32) {
        const int32 j = first + lane;
        const uint32 number = of.number(j);
        const uint32 tied = __ballot_sync(0xffffffffu, number == last && last != kHidden);
        const bool of_ties = (tied >> lane & 1) && before + float(__popc(tied & ((1u << lane) - 1))) < ties;
        before += float(__popc(tied));
        const bool kept = number > last || of_ties || all || j < p.keep_first;
        if (j < p.k_blocks) out[j] = number != kHidden && kept;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) choose_blocks_sm80(const
                                                                          __grid_constant__ ChooseBlocksParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const int32 groups = (p.q_blocks + p.rows - 1) / p.rows;
    const int32 head = int32(blockIdx.x) / groups, first = (int32(blockIdx.x) - head * groups) * p.rows;
    const int32 b = head / p.num_q_heads;
    const int32 kv = b * p.num_kv_heads + (head - b * p.num_q_heads) / (p.num_q_heads / p.num_kv_heads);
    const int32 rows = min_of(p.rows, p.q_blocks - first);
    const float* q = p.q_means + (int64(head) * p.q_blocks + first) * p.head_dim;
    for (int32 i = threadIdx.x; i < kRows * p.head_dim; i += kThreads) smem.q[i] = i < rows * p.head_dim ? q[i] : 0.0f;
    __syncthreads();
    const float* k = p.k_means + int64(kv) * p.head_dim * p.k_blocks;
    for (int32 j = threadIdx.x; j < p.k_blocks; j += kThreads) {
        float s[kRows] = {};
#pragma unroll 2
        for (int32 c = 0; c < p.head_dim; c += 4) {
            float of_k[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) of_k[x] = __ldg(k + int64(c + x) * p.k_blocks + j);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const float4 of_q = *reinterpret_cast<const float4*>(smem.q + r * p.head_dim + c);
                s[r] = fmaf(of_q.x, of_k[0], fmaf(of_q.y, of_k[1], fmaf(of_q.z, of_k[2], fmaf(of_q.w, of_k[3], s[r]))));
            }
        }
        const bool odd = !(p.k_similar[int64(kv) * p.k_blocks + j] > p.similarity);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (r >= rows) continue;
            const float score = s[r] * p.scale;
            const int64 last_query = min_of(int64(first + r + 1) * p.block_q, int64(p.seqlen_q)) - 1;
            const bool hidden = p.causal && int64(j) * p.block_k > last_query + p.seqlen_k - p.seqlen_q;
            const bool always = odd || !(fabsf(score) <= -kLowest);
            smem.keys[r * p.k_blocks + j] = hidden ? kHidden : always ? kAlways : number_of(score);
        }
    }
    __syncthreads();
    const int32 warp = threadIdx.x / 32;
    if (warp >= rows) return;
    const float share = p.shares[head % p.num_shares];
    choose(p, smem.keys + warp * p.k_blocks, share, int64(head) * p.q_blocks + first + warp, threadIdx.x % 32);
}
