// Keys of a tile in another order inside each 16, so that a lane has four neighbours and not two times two: column
// 8m + 2c + x of an accumulator, which is a lane's with l%4 = c, stands for key 4c + 2m + x. What masks say of a lane's
// four keys is then one access of 4, 8 or 16 bytes. Rows of K and V change places as they are copied; the products do
// not notice.
#pragma once
#include "ptx/types.cuh"

struct FourKeys {
    static constexpr bool kIsIdentity = false;
    OA_DEVICE static constexpr int row_at(int slot) {
        return (slot & ~15) | (slot >> 1 & 3) << 2 | (slot >> 3 & 1) << 1 | (slot & 1);
    }
    // Keys of a lane, s[4n + 2r + x] of an accumulator: of lane(l) + of(n, x).
    OA_DEVICE static constexpr int of(int n, int x) { return 16 * (n >> 1) + 2 * (n & 1) + x; }
    OA_DEVICE static constexpr int of_lane(int lane) { return 4 * (lane & 3); }
};
struct TwoKeys {
    OA_DEVICE static constexpr int of(int n, int x) { return 8 * n + x; }
    OA_DEVICE static constexpr int of_lane(int lane) { return 2 * (lane & 3); }
};
