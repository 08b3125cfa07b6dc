// Work items of the kernels over latent caches, formats of rows, and where a key's row is.
#pragma once
#include "decode/latent.cuh"
#include "params/mla_decode.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

// Rows of a latent cache: 16-bit channels; e4m3 with one scale for all rows; 512 e4m3, four fp32 scales of 128 channels
// each and 64 bf16 channels, 656 bytes (FlashMLA 2025, "FP8 KV cache").
enum LatentFormat : int { kRows16 = 0, kRowsE4m3 = 1, kRows656 = 2 };

// A part of a sequence's keys.
struct LatentSplit {
    int32 sequence;
    int32 begin, end, blocks;  // keys
    int32 seq_len;
    int32 slot;  // of the partial result; -1: these are all keys
    Queries queries;
};

// The splits of a CTA, one after the other: every role walks over them by itself.
template <typename Config>
struct SplitCursor {
    int32 at, end, sequence, before;

    OA_DEVICE bool next(const DecodeParams& p, const Partition& partition, LatentSplit& split) {
        return next(p, partition, split, KeySpan{}, false);
    }
    // is_known: `span` is the sequence's.
    OA_DEVICE bool next(const DecodeParams& p, const Partition& partition, LatentSplit& split, KeySpan span,
                        bool is_known) {
        while (at < end) {
            if (!is_known) span = key_span<kAllRows>(p, sequence);
            is_known = false;
            const int32 first = before + begin_chunks<kAllRows>(p);
            if (at >= first + span.chunks || span.chunks == 0) {
                if (span.chunks > 0) before = first + span.chunks;
                ++sequence;
                continue;
            }
            if (at < first) at = first;
            if (at >= end) break;
            const int32 stop = p.fixed_splits ? at + 1 : min_of(end, first + span.chunks);
            split.sequence = sequence;
            split.begin = span.begin + ((at - first) << p.chunk_log2);
            split.end = min_of<int64>(span.end, span.begin + (int64(stop - first) << p.chunk_log2));
            split.blocks = (split.end - split.begin + Config::kKeys - 1) / Config::kKeys;
            split.seq_len = span.seq_len;
            split.queries = span.queries;
            split.slot = stop - at == span.chunks ? -1 : partial_slot(p, partition, blockIdx.y, first, at);
            at = stop;
            // Blocks of rows that this sequence has not.
            if (int32(blockIdx.x) * Config::kRows >= split.queries.count * p.group) continue;
            return true;
        }
        return false;
    }
};

// A key, or the first one that any query sees where that is further right, or the last one of the split. What is left
// of all windows may be another sequence's by now.
OA_DEVICE int32 first_seen(const DecodeParams& p, const LatentSplit& split, int32 key) {
    const int32 seen = p.window_left < 0 ? 0 : split.seq_len - split.queries.count - p.window_left;
    return min_of(max_of(key, seen), split.end - 1);
}

// What the block table has for a key: the number of its block, or of a list the row's, -1 where there is none.
OA_DEVICE int32 table_entry(const MlaDecodeParams& params, const LatentSplit& split, int32 key) {
    const DecodeParams& p = params.decode;
    if (p.block_table == nullptr) return split.sequence;
    const int32* table = p.block_table + int64(split.sequence) * p.table_columns;
    if (params.lists_rows != 0) return key < split.end ? table[key] : -1;
    return table[quotient(first_seen(p, split, key), p.block_multiplier, p.block_shift)];
}

// Where a key's row is, in units of place_bytes.
struct KeyPlace {
    uint32 place;
    bool exists;
};
OA_DEVICE KeyPlace key_place(const MlaDecodeParams& params, const LatentSplit& split, int32 key, int32 entry) {
    const DecodeParams& p = params.decode;
    bool exists = key < split.end;
    uint32 block = entry;
    int32 row;
    if (params.lists_rows != 0) {
        exists = entry >= 0 && uint32(entry) < uint32(p.num_blocks) * uint32(p.block_size);
        row = exists ? entry : 0;
        block = quotient(row, p.block_multiplier, p.block_shift);
        row -= int32(block) * p.block_size;
    } else {
        block = min_of(block, uint32(p.num_blocks - 1));
        key = first_seen(p, split, key);
        row = key - quotient(key, p.block_multiplier, p.block_shift) * p.block_size;
    }
    return {block * p.block_places + uint32(row) * p.token_places, exists};
}
