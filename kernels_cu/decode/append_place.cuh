// Where `append` puts the tokens of a cache with one head: by positions of sequences, or by slots.
#pragma once
#include "params/latent_append.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

// Where a token's channels are: packed rows are those of sequence 0.
struct Source {
    uint32 sequence, row;
};

struct NewToken {
    int32 position;  // for the angles; a position without any is rope_rows
    uint32 place;  // of the cache's row, in units of place_bytes
    bool writes;  // whether there is such a row
};

// Number `at` of an array of 32 or 64 bits.
OA_DEVICE int64 number_of(const void* from, int32 wide, int32 at) {
    return wide ? static_cast<const int64*>(from)[at] : static_cast<const int32*>(from)[at];
}

// The sequence that a packed row belongs to: cu_seqlens[s] <= row < cu_seqlens[s + 1], if it belongs to any.
OA_DEVICE int32 sequence_of(const int32* cu_seqlens, int32 batch, int32 row) {
    int32 low = 0, high = batch;
    while (high - low > 1) {
        int32 middle = (low + high) >> 1;
        (cu_seqlens[middle] <= row ? low : high) = middle;
    }
    return low;
}

OA_DEVICE uint32 place_of(const LatentAppendParams& p, uint32 block, uint32 in_block) {
    return block * p.block_places + in_block * p.token_places;
}

OA_DEVICE NewToken by_slot(const LatentAppendParams& p, int32 row) {
    NewToken t{0, 0, false};
    if (p.rope != kRopeNone) {
        int64 position = number_of(p.positions, p.wide_positions, row);
        t.position = position < 0 || position > p.rope_rows ? p.rope_rows : int32(position);
    }
    int64 slot = number_of(p.slots, p.wide_slots, row);
    t.writes = slot >= 0 && slot < int64(p.num_blocks) * p.block_size;
    if (!t.writes) return t;
    uint32 block = uint32(slot) / uint32(p.block_size);
    t.place = place_of(p, block, uint32(slot) - block * uint32(p.block_size));
    return t;
}

OA_DEVICE NewToken by_position(const LatentAppendParams& p, const Source& source, int32 row) {
    NewToken t{0, 0, true};
    int32 sequence = source.sequence, in_sequence = source.row, count = p.tokens;
    if (p.cu_seqlens != nullptr) {
        sequence = sequence_of(p.cu_seqlens, p.batch, row);
        int32 begin = p.cu_seqlens[sequence];
        in_sequence = row - begin;
        count = p.cu_seqlens[sequence + 1] - begin;
        t.writes = in_sequence >= 0 && in_sequence < count;
    }
    int64 position = int64(p.seq_lens[sequence]) - count + in_sequence;
    t.writes &= position >= 0 && position < p.capacity;
    if (!t.writes) return t;
    t.position = int32(position);
    uint32 index = 0, block = sequence;
    if (p.block_table != nullptr) {
        index = uint32(quotient(t.position, p.block_multiplier, p.block_shift));
        block = p.block_table[int64(sequence) * p.table_columns + index];
    }
    t.writes = block < uint32(p.num_blocks);
    t.place = place_of(p, block, uint32(t.position) - index * p.block_size);
    return t;
}

// Known without a look at memory: the token can be loaded while the rest is looked up.
OA_DEVICE Source source_of(const LatentAppendParams& p, int32 row) {
    if (p.slots != nullptr || p.cu_seqlens != nullptr) return {0, uint32(row)};
    int32 sequence = quotient(row, p.tokens_multiplier, p.tokens_shift);
    return {uint32(sequence), uint32(row - sequence * p.tokens)};
}

OA_DEVICE NewToken new_token(const LatentAppendParams& p, const Source& source, int32 row) {
    return p.slots != nullptr ? by_slot(p, row) : by_position(p, source, row);
}
