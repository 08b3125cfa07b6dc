// What a user's score expression is written in: positions of queries and keys, and arrays.
#pragma once
#include "params/score_mod.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"

#define INFINITY __int_as_float(0x7f800000)  // as in C++, for the user's text

// An int that knows itself as a float too: converting an int takes the unit that the exponentials take, and as long as
// one of them. Exact below 2^24, which the host sees to. Sums and differences with ints stay positions; whatever else
// is done to one is done to the int.
struct ScorePosition {
    int32 value;
    float real;

    OA_DEVICE operator int32() const { return value; }
    OA_DEVICE explicit operator float() const { return real; }
};
OA_DEVICE ScorePosition score_position(int32 i) { return {i, float(i)}; }

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

OA_DEVICE ScorePosition operator+(ScorePosition a, ScorePosition b) { return {a.value + b.value, a.real + b.real}; }
OA_DEVICE ScorePosition operator-(ScorePosition a, ScorePosition b) { return {a.value - b.value, a.real - b.real}; }
OA_DEVICE int32 operator*(ScorePosition a, ScorePosition b) { return a.value * b.value; }
OA_DEVICE int32 operator/(ScorePosition a, ScorePosition b) { return a.value / b.value; }
// Templates, because an operand of yet another type (double, unsigned) would make a choice among overloads ambiguous.
template <typename T>
OA_DEVICE auto operator+(ScorePosition a, T b) {
    if constexpr (kIsSame<T, int32>)
        return ScorePosition{a.value + b, a.real + float(b)};
    else if constexpr (kIsSame<T, float>)
        return a.real + b;
    else
        return a.value + b;
}
template <typename T>
OA_DEVICE auto operator+(T a, ScorePosition b) {
    return b + a;
}
template <typename T>
OA_DEVICE auto operator-(ScorePosition a, T b) {
    if constexpr (kIsSame<T, int32>)
        return ScorePosition{a.value - b, a.real - float(b)};
    else if constexpr (kIsSame<T, float>)
        return a.real - b;
    else
        return a.value - b;
}
template <typename T>
OA_DEVICE auto operator-(T a, ScorePosition b) {
    if constexpr (kIsSame<T, int32>)
        return ScorePosition{a - b.value, float(a) - b.real};
    else if constexpr (kIsSame<T, float>)
        return a - b.real;
    else
        return a - b.value;
}
template <typename T>
OA_DEVICE auto operator*(ScorePosition a, T b) {
    if constexpr (kIsSame<T, float>)
        return a.real * b;
    else
        return a.value * b;
}
template <typename T>
OA_DEVICE auto operator*(T a, ScorePosition b) {
    return b * a;
}
template <typename T>
OA_DEVICE auto operator/(ScorePosition a, T b) {
    if constexpr (kIsSame<T, float>)
        return a.real / b;
    else
        return a.value / b;
}
template <typename T>
OA_DEVICE auto operator/(T a, ScorePosition b) {
    if constexpr (kIsSame<T, float>)
        return a / b.real;
    else
        return a / b.value;
}

// An element as expressions see it: float for floating types, bool, int32 for narrower integers, int64.
OA_DEVICE float score_element(const float* at, Float) { return __ldg(at); }
OA_DEVICE float score_element(const uint16* at, Half) { return to_float(Half{}, __ldg(at)); }
OA_DEVICE float score_element(const uint16* at, BFloat16) { return to_float(BFloat16{}, __ldg(at)); }
OA_DEVICE int32 score_element(const int32* at, int32) { return __ldg(at); }
OA_DEVICE int64 score_element(const int64* at, int64) { return __ldg(at); }
OA_DEVICE int32 score_element(const signed char* at, signed char) { return __ldg(at); }
OA_DEVICE int32 score_element(const uint8* at, uint8) { return __ldg(at); }
OA_DEVICE bool score_element(const uint8* at, bool) { return __ldg(at) != 0; }

// Memory of an element that expressions see as T.
template <typename T>
struct ScoreMemory {
    using Type = T;
};
template <>
struct ScoreMemory<Float> {
    using Type = float;
};
template <>
struct ScoreMemory<Half> {
    using Type = uint16;
};
template <>
struct ScoreMemory<BFloat16> {
    using Type = uint16;
};
template <>
struct ScoreMemory<bool> {
    using Type = uint8;
};

OA_DEVICE int64 score_index(ScorePosition i) { return i.value; }
template <typename T>
OA_DEVICE int64 score_index(T i) {
    return int64(i);
}

// The slot-th array: name(i, j, ...), an index for each dimension, or name[i] where there is one. T: element type.
// kChecked: an index outside the array is reported and ends the kernel.
template <typename T, int kDims, bool kChecked>
class ScoreArray {
    using Memory = typename ScoreMemory<T>::Type;

  public:
    OA_DEVICE ScoreArray(const ScoreModArrays& arrays, int slot, const char* name)
        : arrays_(arrays), slot_(slot), name_(name) {}

    template <typename... Indices>
    OA_DEVICE auto operator()(Indices... indices) const {
        static_assert(sizeof...(Indices) == kDims, "score_mod: an array takes one index for each of its dimensions");
        int64 at = 0;
        int dim = 0;
        ((at += place(dim++, score_index(indices))), ...);
        return score_element(static_cast<const Memory*>(arrays_.data[slot_]) + at, T{});
    }
    template <typename Index>
    OA_DEVICE auto operator[](Index i) const {
        return (*this)(i);
    }

  private:
    OA_DEVICE int64 place(int dim, int64 i) const {
        int at = slot_ * kMaxModDims + dim;
        if (kChecked && (i < 0 || i >= arrays_.extents[at])) {
            printf("omniattn: score_mod: index %lld of dimension %d of '%s' is outside 0 to %d\n", i, dim, name_,
                   arrays_.extents[at] - 1);
            __trap();
        }
        return i * arrays_.strides[at];
    }

    const ScoreModArrays& arrays_;
    int slot_;
    const char* name_;
};
