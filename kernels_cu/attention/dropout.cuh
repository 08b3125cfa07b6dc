// Dropout of probabilities: which of them are kept. Source: Philox 4x32-10 (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3").
//
//   O = (P * Z / keep) V;  Z[b, h, q, k] = byte of (b, h, q, k) >= threshold;  keep = 1 - threshold / 256
//
// LSE is that of all probabilities. The byte depends on seed, offset, sequence, query head and the positions of query
// and key in their sequence, and on nothing else: tiles, packing and the order of the backward do not matter.
//
//   key      = words 0, 1 of philox(counter {offset low, offset high, 0, 0}, key {seed low, seed high})
//   counter  = {4 (k / 16) + k / 2 % 4,  4 (q / 16) + q / 2 % 4,  h,  b}
//   the byte = number  q / 8 % 2 + 2 (k / 8 % 2)  of word  q % 2 + 2 (k % 2)  of philox(counter, key)
//
// A call gives the bytes of 4 queries by 4 keys. In accumulators of mma.sync and wgmma two lanes share these, of S and
// of S^T alike: queries 2a, 2a + 1, 2a + 8, 2a + 9 of 16 by keys 2c, 2c + 1, 2c + 8, 2c + 9 are a half each of lanes
// 8a + c and 8a + 4 + c. So each makes them for every second of two such squares, and they exchange words.
#pragma once
#include "attention/dropout_mode.cuh"
#include "params/dropout.cuh"
#include "ptx/byte_permute.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

struct PhiloxKey {
    uint32 x, y;
};

// Ten rounds.
OA_DEVICE uint4 philox(uint4 c, PhiloxKey key) {
    constexpr uint32 kFactor0 = 0xd2511f53u, kFactor1 = 0xcd9e8d57u;
    constexpr uint32 kStep0 = 0x9e3779b9u, kStep1 = 0xbb67ae85u;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 a = uint64(kFactor0) * c.x, b = uint64(kFactor1) * c.z;
        const uint32 key0 = key.x + uint32(round) * kStep0, key1 = key.y + uint32(round) * kStep1;
        c = make_uint4(uint32(b >> 32) ^ c.y ^ key0, uint32(b), uint32(a >> 32) ^ c.w ^ key1, uint32(a));
    }
    return c;
}

// The key of a call.
OA_DEVICE PhiloxKey key_of(const DropoutParams& p) {
    const uint4 seed = make_uint4(__ldg(p.rng), __ldg(p.rng + 1), __ldg(p.rng + 2), __ldg(p.rng + 3));
    const uint4 made = philox(make_uint4(seed.z, seed.w, 0, 0), {seed.x, seed.y});
    return {made.x, made.y};
}
// Where the key is: in registers; or in shared memory, where every thread puts it for itself and others, all the same.
// From either it comes as something that the compiler does not know: keys of rounds, kept over a loop, would take 18
// registers.
class KeyInRegisters {
  public:
    OA_DEVICE explicit KeyInRegisters(PhiloxKey key) : key_(key) {}
    OA_DEVICE PhiloxKey get() const { return {uint32(in_register(int32(key_.x))), uint32(in_register(int32(key_.y)))}; }

  private:
    PhiloxKey key_;
};
class KeyInSharedMemory {
  public:
    OA_DEVICE explicit KeyInSharedMemory(PhiloxKey key) {
        store_shared(place(), key.x);
        store_shared(place() + 4, key.y);
    }
    OA_DEVICE PhiloxKey get() const {
        const uint2 key = load_shared2(place());
        return {key.x, key.y};
    }

  private:
    OA_DEVICE static uint32 place() {
        __shared__ uint2 key;
        return smem_addr_of(&key);
    }
};

// What a kernel knows of the dropout of a call. All but the key are arguments.
template <typename Key>
class Dropout {
  public:
    OA_DEVICE explicit Dropout(const DropoutParams& p) : params_(p), key_(key_of(p)) {}

    OA_DEVICE float scale() const { return params_.scale; }
    OA_DEVICE PhiloxKey key() const { return key_.get(); }
    // Bit 7 of each byte: it is kept.
    OA_DEVICE uint32 kept(uint32 x) const {
        const uint32 sum = (x & 0x7f7f7f7fu) + params_.addend;
        return (sum & x) | (params_.either & (sum | x));
    }

  private:
    const DropoutParams& params_;
    Key key_;
};

// What is kept of two squares of 16 by 16 scores of a warp in the layout of accumulators: number `rows` of 16 rows and
// `columns` of 16 columns, and the next columns (kDown: the next rows). Word [i][x] is of columns 8n + 2(lane % 4) + x
// of square i; number r + 2(n % 2) of its bytes (kTransposed, rows are keys: n % 2 + 2r) that of row lane / 4 + 8r; bit
// 7 of a byte is set where kept.
using KeptWords = uint32[2][2];

template <bool kTransposed, bool kDown, typename D>
OA_DEVICE void kept_words(KeptWords& kept, const D& d, PhiloxKey key, int32 sequence, int32 head, int32 rows,
                          int32 columns, int lane) {
    const int parity = lane >> 2 & 1;
    const uint32 of_rows = 4 * (rows + (kDown ? parity : 0)) + (lane >> 3);
    const uint32 of_columns = 4 * (columns + (kDown ? 0 : parity)) + (lane & 3);
    const uint4 w = philox(
        kTransposed ? make_uint4(of_rows, of_columns, head, sequence) : make_uint4(of_columns, of_rows, head, sequence),
        key);
    // Words of even rows, and of odd ones.
    const uint32 even[2] = {w.x, kTransposed ? w.y : w.z}, odd[2] = {kTransposed ? w.z : w.y, w.w};
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const uint32 got = __shfl_xor_sync(0xffffffffu, parity ? even[x] : odd[x], 4);
        kept[0][x] = d.kept(parity ? got : even[x]);
        kept[1][x] = d.kept(parity ? odd[x] : got);
    }
}
// The same of S whose columns are keys in the order of FourKeys: column x of block n is key 4(lane % 4) + 2(n % 2) + x
// of a square, in the byte that it has above. Four lanes share four calls.
template <typename D>
OA_DEVICE void kept_words_of_four_keys(KeptWords& kept, const D& d, PhiloxKey key, int32 sequence, int32 head,
                                       int32 rows, int32 columns, int lane) {
    const int parity = lane >> 2 & 1;
    const bool upper = lane & 2;  // keys 8 to 15
    const uint32 key_group = 4 * (columns + parity) + 2 * (lane & 1) + upper;
    const uint4 w = philox(make_uint4(key_group, 4 * rows + (lane >> 3), head, sequence), key);
    const uint32 even[2] = {w.x, w.z}, odd[2] = {w.y, w.w};
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const uint32 got = __shfl_xor_sync(0xffffffffu, parity ? even[x] : odd[x], 4);
        const uint32 own[2] = {parity ? got : even[x], parity ? odd[x] : got};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Of this lane's half of the keys: bytes of the lower group, then of the upper one.
            const uint32 others = __shfl_xor_sync(0xffffffffu, own[i], 2);
            kept[i][x] = d.kept(byte_permute(own[i], others, upper ? 0x3276u : 0x5410u));
        }
    }
}
// All bits of a pair of 16-bit numbers, columns 0 and 1, that are kept; byte: theirs, which the compiler knows.
OA_DEVICE uint32 kept_pair(const uint32 (&words)[2], int byte) {
    return byte_permute(words[0], words[1], (byte | 8) * 0x11 | (byte | 12) * 0x1100);
}
// `scale` where it is kept, else 0.
OA_DEVICE float kept_factor(uint32 word, int byte, float scale) {
    return __uint_as_float(byte_permute(word, word, (byte | 8) * 0x1111) & __float_as_uint(scale));
}
// Probabilities of a square as operands of a product: [2 (n % 2) + r] has columns 0 and 1 of block n, row 8r. Zeros in
// place of those that are not kept.
template <bool kTransposed = false>
OA_DEVICE void keep_probabilities(uint32 (&p)[4], const uint32 (&words)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] &= kept_pair(words, kTransposed ? i / 2 + 2 * (i % 2) : i);
}

// What a warp keeps of its rows of a tile, of kernels with dropout and of those without one. rows, columns: squares of
// 16 rows, and of 16 columns, from the first of the sequence on.
struct ColumnPairs {  // as they lie in accumulators
    OA_DEVICE static constexpr int of_lane(int lane) { return 2 * (lane & 3); }
};
class NoDropout {
  public:
    struct Kept {};
    template <typename P>
    OA_DEVICE explicit NoDropout(const P&) {}
    OA_DEVICE void begin(int32, int32, int) {}
    OA_DEVICE float scaled(float x) const { return x; }
    template <typename Columns, bool kTransposed = false, bool kDown = false>
    OA_DEVICE void find(Kept&, int32, int32) const {}
    OA_DEVICE void drop(uint32 (&)[4], const Kept&, int) const {}
    OA_DEVICE uint32 drop_pair(uint32 pair, const Kept&, int, int) const { return pair; }
    OA_DEVICE uint32 marked(uint32 pair, const Kept&, int, int) const { return pair; }
    OA_DEVICE float2 unmarked(float2 p) const { return p; }
    OA_DEVICE float change(float dp, float delta, float) const { return dp - delta; }
    OA_DEVICE float change(float dp, float delta, const Kept&, int, int, int) const { return dp - delta; }
};
template <typename Key>
class WithDropout {
  public:
    using Kept = KeptWords;  // of two squares
    // Of 16 rows by kColumns columns.
    template <int kColumns>
    using TileKept = KeptWords[kColumns / 32];
    template <int kColumns, bool kTransposed = false>
    OA_DEVICE void find_tile(TileKept<kColumns>& kept, int32 rows, int32 columns) const {
        static_assert(kColumns % 32 == 0, "pairs of squares");
        const PhiloxKey key = dropout_.key();
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i)
            kept_words<kTransposed, false>(kept[i], dropout_, key, of_sequence_, of_head_, rows, columns + 2 * i,
                                           of_lane_);
    }
    template <bool kTransposed = false, int kSquares>
    OA_DEVICE void drop_tile(uint32 (&p)[kSquares][4], const KeptWords (&kept)[kSquares / 2]) const {
#pragma unroll
        for (int i = 0; i < kSquares; ++i) keep_probabilities<kTransposed>(p[i], kept[i / 2][i % 2]);
    }
    template <typename P>
    OA_DEVICE explicit WithDropout(const P& params) : dropout_(params.dropout) {}
    OA_DEVICE void begin(int32 sequence, int32 head, int lane) {
        of_sequence_ = sequence, of_head_ = head, of_lane_ = lane;
    }
    // A sum of what was kept.
    OA_DEVICE float scaled(float x) const { return x * dropout_.scale(); }
    // Of the squares at `rows` and `columns` and the next one. Columns: the order of keys that are columns.
    template <typename Columns, bool kTransposed = false, bool kDown = false>
    OA_DEVICE void find(Kept& kept, int32 rows, int32 columns) const {
        if constexpr (Columns::of_lane(1) == ColumnPairs::of_lane(1))
            kept_words<kTransposed, kDown>(kept, dropout_, dropout_.key(), of_sequence_, of_head_, rows, columns,
                                           of_lane_);
        else
            kept_words_of_four_keys(kept, dropout_, dropout_.key(), of_sequence_, of_head_, rows, columns, of_lane_);
    }
    // Probabilities of S as operands of a product, of the square-th of both.
    OA_DEVICE void drop(uint32 (&p)[4], const Kept& kept, int square) const { keep_probabilities(p, kept[square]); }

    // Of the backward. square: of both that `kept` has; byte: in its words.
    // Columns 0 and 1 of a row as a pair of 16-bit numbers, zeros where they are dropped.
    OA_DEVICE uint32 drop_pair(uint32 pair, const Kept& kept, int square, int byte) const {
        return pair & kept_pair(kept[square], byte);
    }
    // The same with a minus in place of zeros, of numbers that have none: for who has not the words.
    OA_DEVICE uint32 marked(uint32 pair, const Kept& kept, int square, int byte) const {
        return pair | (~kept_pair(kept[square], byte) & 0x80008000u);
    }
    OA_DEVICE float2 unmarked(float2 p) const { return make_float2(fabsf(p.x), fabsf(p.y)); }
    OA_DEVICE float unmarked(float p) const { return fabsf(p); }
    // What P is multiplied by: the gradient of a probability less delta. p: marked.
    OA_DEVICE float change(float dp, float delta, float p) const {
        return fmaf(dp, __float_as_int(p) < 0 ? 0.0f : dropout_.scale(), -delta);
    }
    OA_DEVICE float change(float dp, float delta, const Kept& kept, int square, int byte, int column) const {
        return fmaf(dp, kept_factor(kept[square][column], byte, dropout_.scale()), -delta);
    }

  protected:
    Dropout<Key> dropout_;
    int32 of_sequence_ = 0, of_head_ = 0;
    int of_lane_ = 0;
};
// Of kernels on mma.sync, which are short of registers. Those on wgmma count on where dynamic shared memory begins.
using TileDropout = Select<kHasDropout, WithDropout<KeyInSharedMemory>, NoDropout>::Type;

// Of the forward on wgmma: what a tile of keys keeps is found under its products, from the last tile to the first.
class NoForwardDropout : public NoDropout {
  public:
    using NoDropout::NoDropout;
    OA_DEVICE void begin_tile(int32, int32, int, int32, int32) {}
    OA_DEVICE void find_next() {}
    template <typename Probabilities>
    OA_DEVICE void drop(Probabilities&) const {}
    template <int kOutputs>
    OA_DEVICE void scale(float (&)[kOutputs]) const {}
};
template <int kBlockN>
class WithForwardDropout : public WithDropout<KeyInRegisters> {
  public:
    using WithDropout::WithDropout;
    // rows: number of 16 rows; n: tile of keys.
    OA_DEVICE void begin_tile(int32 sequence, int32 head, int lane, int32 rows, int32 n) {
        begin(sequence, head, lane);
        rows_ = rows, columns_ = n * (kBlockN / 16);
    }
    OA_DEVICE void find_next() {
        find_tile<kBlockN>(kept_, rows_, columns_);
        columns_ -= kBlockN / 16;
    }
    OA_DEVICE void drop(uint32 (&p)[kBlockN / 16][4]) const { drop_tile(p, kept_); }
    template <int kOutputs>
    OA_DEVICE void scale(float (&o)[kOutputs]) const {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] = scaled(o[i]);
    }

  private:
    KeptWords kept_[kBlockN / 32];
    int32 rows_ = 0, columns_ = 0;
};
template <int kBlockN>
using ForwardDropout = typename Select<kHasDropout, WithForwardDropout<kBlockN>, NoForwardDropout>::Type;

// Of the backward on wgmma: of S^T, 64 keys by kBlockM queries a step. kMarks: registers for words are not there, and P
// that is dropped is negative.
class NoBackwardDropout : public NoDropout {
  public:
    using NoDropout::NoDropout;
    template <typename Tile>
    OA_DEVICE void begin_keys(const Tile&, int32, int, int32) {}
    OA_DEVICE void next_head(bool) {}
    template <int kSquares, int kScores>
    OA_DEVICE void drop(uint32 (&)[kSquares][4], float (&)[kScores], int32) {}
    OA_DEVICE void score_gradients(float*, const float*, float2, int, int) const {}
};
template <int kBlockM, bool kMarks>
class WithBackwardDropout : public WithDropout<KeyInRegisters> {
  public:
    using WithDropout::WithDropout;
    // group: heads of queries of a head of keys; rows: the warp's 16 keys of the tile.
    template <typename Tile>
    OA_DEVICE void begin_keys(const Tile& t, int32 group, int lane, int32 rows) {
        begin(t.sequence, t.kv_head_idx * group, lane);
        rows_ = t.n0 / 16 + rows;
    }
    OA_DEVICE void next_head(bool ends) { of_head_ += ends; }
    // P as operands, zeros where they are dropped. m: tile of queries.
    template <int kSquares, int kScores>
    OA_DEVICE void drop(uint32 (&operand)[kSquares][4], float (&p)[kScores], int32 m) {
        const int32 columns = m * (kBlockM / 16);
        if constexpr (kMarks) {
            mark(operand, p, columns);
        } else {
            find_tile<kBlockM, true>(kept_, rows_, columns);
            drop_tile<true>(operand, kept_);
        }
    }
    // dS in the place of dP, of both columns of block n and row r.
    OA_DEVICE void score_gradients(float* ds, const float* p, float2 delta, int n, int r) const {
        ds[0] = score_gradient(p[0], ds[0], delta.x, n, r, 0);
        ds[1] = score_gradient(p[1], ds[1], delta.y, n, r, 1);
    }
    OA_DEVICE float score_gradient(float p, float dp, float delta, int n, int r, int x) const {
        if constexpr (kMarks) return fabsf(p) * change(dp, delta, p);
        return p * change(dp, delta, kept_[n / 4], n / 2 % 2, n % 2 + 2 * r, x);
    }

  private:
    KeptWords kept_[kBlockM / 32];
    int32 rows_ = 0;

    template <int kSquares, int kScores>
    OA_DEVICE void mark(uint32 (&operand)[kSquares][4], float (&p)[kScores], int32 columns) const {
#pragma unroll
        for (int i = 0; i < kSquares; i += 2) {
            // One call behind the other: registers for both are not there.
            PhiloxKey key = dropout_.key();
            if (i > 0) asm volatile("mov.b32 %0, %1;" : "=r"(key.x) : "r"(key.x), "r"(operand[i - 1][3]));
            KeptWords kept;
            kept_words<true, false>(kept, dropout_, key, of_sequence_, of_head_, rows_, columns + i, of_lane_);
#pragma unroll
            for (int square = 0; square < 2; ++square) {
                keep_probabilities<true>(operand[i + square], kept[square]);
#pragma unroll
                for (int x = 0; x < 8; ++x) {
                    const int byte = x / 4 + x / 2 % 2 * 2;
                    const uint32 word = kept[square][x % 2];
                    const uint32 dropped = ~byte_permute(word, word, (byte | 8) * 0x1111) & 0x80000000u;
                    p[8 * (i + square) + x] = __uint_as_float(__float_as_uint(p[8 * (i + square) + x]) | dropped);
                }
            }
        }
    }
};
template <int kBlockM, bool kMarks>
using BackwardDropout = typename Select<kHasDropout, WithBackwardDropout<kBlockM, kMarks>, NoBackwardDropout>::Type;
