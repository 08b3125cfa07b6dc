// What the kernels of index_logits share: a CTA's queries and keys, where a key lies, rows of e4m3 in registers.
#pragma once
#include "params/index_logits.cuh"
#include "ptx/load_ahead.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kIndexDim = 128;   // channels of a key, one byte each
constexpr int32 kIndexHeads = 64;  // heads of one product; more are several, fewer are filled up with weights of 0

// Channels of a row in the order of the products. Lane c of the four that share a row has 32 bytes of it as 8 words:
// bytes 16c .. 16c+15 are words 0 to 3, bytes 64+16c .. 64+16c+15 words 4 to 7, so that loads are of 16 bytes and whole
// sectors. Word w of the four lanes are 16 consecutive channels of the product: those at bytes word_byte(w) + 16c.
OA_DEVICE int32 word_byte(int32 w) { return 64 * (w >> 2) + 4 * (w & 3); }

// A CTA: queries of one sequence and a span of its keys.
struct IndexItem {
    int32 sequence;
    int32 row;  // first query, of all sequences
    int32 queries;  // how many
    int32 key;  // first key
    int32 end;  // behind the last one

    OA_DEVICE explicit IndexItem(const IndexLogitsParams& p) {
        const int32 tile = int32(blockIdx.x / uint32(p.spans));
        const int32 place = int32(blockIdx.x) - tile * p.spans;
        sequence = tile / p.query_tiles;
        const int32 query = (tile - sequence * p.query_tiles) * p.query_tile;
        row = sequence * p.queries + query;
        queries = min_of(p.query_tile, p.queries - query);
        key = place * p.span;
        end = min_of(int64(key) + p.span, int64(p.max_keys));
    }
};

// Keys [begin, end) that a query sees.
struct SeenKeys {
    int32 begin, end;
};
OA_DEVICE SeenKeys seen_keys(const IndexLogitsParams& p, const IndexItem& item, int32 i) {
    SeenKeys seen{0, p.max_keys};
    const int32 row = item.row + i;
    if (p.seq_lens != nullptr) {
        int64 last = int64(p.seq_lens[item.sequence]) - p.queries + (row - item.sequence * p.queries) + 1;
        seen.end = int32(min_of(max_of(last, int64(0)), int64(p.max_keys)));
    }
    if (p.k_end != nullptr) seen.end = min_of(max_of(p.k_end[row], 0), p.max_keys);
    if (p.k_start != nullptr) seen.begin = max_of(p.k_start[row], 0);
    return seen;
}

// Where keys of a sequence lie.
class IndexKeys {
  public:
    OA_DEVICE IndexKeys(const IndexLogitsParams& p, int32 sequence)
        : p_(p), table_(p.block_table == nullptr ? nullptr : p.block_table + sequence * p.table_stride) {}

    struct Place {
        int32 block, row;
    };
    // Of a key that the sequence has: others have no entry that could be read. An entry that is no block of the cache
    // is taken for its nearest one: nothing else may be read.
    OA_DEVICE Place at(int32 key) const {
        if (table_ == nullptr) return {0, key};
        const int32 place = quotient(key, p_.block_multiplier, p_.block_shift);
        const int32 block = __ldg(table_ + place);
        return {min_of(max_of(block, 0), p_.num_blocks - 1), key - place * p_.block_size};
    }
    OA_DEVICE const uint8* values(const Place& at) const {
        return p_.k + at.block * p_.k_stride_block + at.row * p_.k_stride_row;
    }
    OA_DEVICE const float* scale(const Place& at) const {
        return reinterpret_cast<const float*>(p_.k_scale + at.block * p_.scale_stride_block +
                                              at.row * p_.scale_stride_row);
    }

  private:
    const IndexLogitsParams& p_;
    const int32* table_;
};

// relu(x) times 2, exactly; NaN stays NaN. One addition: a maximum has half of its rate.
OA_DEVICE float twice_relu(float x) { return x + fabsf(x); }
OA_DEVICE float weight(const IndexLogitsParams& p, int32 row, int32 head) {
    return p.weights[row * p.weights_stride + head];
}
// Half of a weight, for that.
OA_DEVICE float half_weight(const IndexLogitsParams& p, int32 row, int32 head) { return 0.5f * weight(p, row, head); }

// Writes -inf to the keys of a span that no query of the CTA sees: those left of `begin` and from `end` on.
template <int kThreads>
OA_DEVICE void fill_unseen(const IndexLogitsParams& p, const IndexItem& item, int32 begin, int32 end) {
    for (int32 i = 0; i < item.queries; ++i) {
        float* row = p.logits + (item.row + i) * p.logits_stride;
        for (int32 key = item.key + int32(threadIdx.x); key < min_of(begin, item.end); key += kThreads) {
            row[key] = neg_inf();
        }
        for (int64 key = max_of(end, item.key) + int64(threadIdx.x); key < item.end; key += kThreads) {
            row[key] = neg_inf();
        }
    }
}
