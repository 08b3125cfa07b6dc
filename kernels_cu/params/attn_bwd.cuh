// Arguments of the backward kernels. Strides in elements.
#pragma once
#include "params/attn_fwd.cuh"
#include "params/dropout.cuh"
#include "params/score_mod.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// Workspaces are indexed by padded query rows: row i of sequence b (a dense batch has seqlen_q rows in each) is row
// padded_begin(b) + i of rows_stride_h, in every head:
//   dense    padded_begin(b) = b * round_up(seqlen_q, 128)
//   packed   padded_begin(b) = round_down(cu_seqlens_q[b] + 128 * b, 128)
// Rows between the sequences belong to nobody. Row r of head h is element h * rows_stride_h + r of lse2 and delta, and
// elements (h * rows_stride_h + r) * dq_columns + (0 ... dq_columns - 1) of dq_accum. Of packed sequences, and with
// lists, delta has one element more, behind the last head: how many tiles the CTAs of attn_bwd_sm90 have drawn, 0
// before. With ORDERED
// it is there for dense batches too, and 2 * num_n_blocks * kv heads (times the dense batch) elements follow: of every
// tile of keys how many steps of dQ either warpgroup has added (attention/bwd_ordered.cuh), 0 before.
constexpr int kStrayRows = 64;  // padded rows to a number of stray_do
struct AttnBwdParams {
    AttnFwdParams fwd;  // of the forward: q, k, v, o and lse are read here
    const uint16* d_o;
    const float* dlse;          // [batch, num_q_heads, seqlen_q] or [num_q_heads, rows]; or null
    uint16* dq;                 // dq, dk, dv: null where they are not wanted
    uint16* dk;
    uint16* dv;
    float* dsinks;              // [num_q_heads]; or null
    float* dmask;               // or null
    float* lse2;  // lse * log2(e); +inf where a row attends to nothing, and behind the end of a sequence
    float* delta;  // rowsum(do * o) - dlse; 0 behind the end of a sequence
    float* dq_accum;  // or null: dq is not wanted, or written by its own kernel
    float* sink_partials;  // [num_q_heads][rows_stride_h / 128]: sums for dsinks of blocks of padded rows; or null
    // [num_q_heads][rows_stride_h / kStrayRows]: not 0 where a row that attends to nothing has a do with NaN or
    // infinity (attention/bwd_stray.cuh); null: every row attends to something.
    uint32* stray_do;
    // Of a block mask: which tiles of 64 queries each tile of keys has to visit, a list for each query head, as
    // mask_list_sm80 makes them with queries and keys exchanged. Of kernels of dq alone: which tiles of 64 keys each
    // tile of queries has to. Null: all that the window leaves.
    const int32* lists;
    int64 do_stride_b, do_stride_s, do_stride_h;
    int64 dq_stride_b, dq_stride_s, dq_stride_h;
    int64 dk_stride_b, dk_stride_s, dk_stride_h;
    int64 dv_stride_b, dv_stride_s, dv_stride_h;
    int64 dlse_stride_b, dlse_stride_h;  // contiguous along the sequence
    int64 dmask_stride_b, dmask_stride_h, dmask_stride_q, dmask_stride_k;
    int64 lists_stride_b, lists_stride_h;  // 0 where the mask is broadcast
    int64 rows_stride_h;  // padded rows of a head
    int32 dq_columns;  // of dq_accum: head_dim rounded up to the kernel's width
    // Dense: tiles of keys of a (batch, kv head); varlen: upper bound over all sequences. Of attn_bwd_prepare: 0 unless
    // dQ is added to in an order.
    int32 num_n_blocks;
    int32 num_list_tiles;  // one less than a list has elements
    int32 zero;  // makes the size a multiple of 8
};

OA_DEVICE uint32* item_counter(const AttnBwdParams& p) {
    return reinterpret_cast<uint32*>(p.delta + p.fwd.num_q_heads * p.rows_stride_h);
}
// The first of the counters of steps; the tile's number times 2, plus the warpgroup.
OA_DEVICE uint32* step_counters(const AttnBwdParams& p) { return item_counter(p) + 1; }

// attn_bwd_sm90. The maps are those of q, k, v and do, whose pointers and strides in `bwd` are not used. Maps of packed
// sequences have [seqlen, num_heads] as [rows of a copy][num_heads][rows + 1] with the stride of a row twice, and begin
// as many rows before the array: a copy of the n rows that end at row e is at (rows of a copy - n, head, e), and zeros
// take the place of what comes behind them. dq_accum holds
// accumulators of wgmma as they lie: blocks of 64 rows by dq_columns, of each the columns of warpgroup 0 and of
// warpgroup 1, half each; (row r, column c) of a half at (c / 8) * 512 + ((r / 16) * 32 + (r % 8) * 4 + (c % 8) / 2) *
// 4 + (r % 16) / 8 * 2 + c % 2.
struct AttnBwdSm90Params {
    TensorMap map_q, map_k, map_v, map_do;
    AttnBwdParams bwd;
    TileList tiles;  // of keys
};

// attn_bwd_sm90 with softcap.
struct AttnBwdModsSm90Params {
    TensorMap map_q, map_k, map_v, map_do;
    AttnBwdParams bwd;
    TileList tiles;
    ScoreModParams mods;
    float inv_factor2;  // of mods.factor2
};

// The kernels of mma.sync with a score modification of the user's.
struct AttnBwdUserModParams {
    AttnBwdParams call;
    ScoreModArrays arrays;
};

// With dropout.
struct AttnBwdDropoutParams {
    AttnBwdParams call;
    DropoutParams dropout;
};
struct AttnBwdDropoutSm90Params {
    TensorMap map_q, map_k, map_v, map_do;
    AttnBwdParams bwd;
    TileList tiles;
    DropoutParams dropout;
};
