// Attention of one or a few new query tokens over a latent cache on Hopper, up to 16 query rows a sequence: the
// equation, the tensors and the formats are those of mla_decode_sm80, and so is what a warp computes.
//
// A CTA has 16 rows (query token, head), and one split of the keys after another. Two teams of eight warps have every
// other tile each, with O, maxima and denominators of their own, which they add at a split's end: a row for each. Four
// more warps bring the tiles, those of both teams one after the other, to a ring of stages: where memory is busy a
// copy holds up the warp that asks for it.
//
//   team 0 | team 1:  wait full  |  part of S(i) -> shared  |  team barrier  |  sum of the parts, m, P(i) -> shared  |
//                     team barrier  |  O += P(i) k(i)  |  arrive empty
//   producers:        wait empty  |  a quarter of a tile's keys, 16 bytes a copy  |  arrive full behind the copies
//
// A tile has 32 keys; 64 where rows have 8 bits, which stay so in shared memory (decode/latent_codes.cuh). About half
// of Q is in registers, the rest is read from shared memory.
//
// Shared memory, bytes: Q [16 * 1152], later Q's fragments, at last O of a team | barriers | K [stages][keys * row] |
// scores [2][4][16 * 4 * keys], at last O of a team | P, scales, rescale factors, maxima, denominators of a team |
// listed keys | scan, splits. Registers: 104 of warps that compute, 64 of those that copy,
// together what 640 threads of 96 begin with.
#include "decode/latent.cuh"
#include "decode/latent_cluster.cuh"
#include "decode/latent_producer.cuh"
#include "decode/latent_rows.cuh"
#include "decode/latent_warps.cuh"
#include "params/mla_decode.cuh"
#include "ptx/barrier_vote.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/delay.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kFormat = CACHE_FORMAT;
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V, kPanels = kHeadDim / 64;
    static constexpr int kRows = 16, kTeams = 2;
    static constexpr bool kInCodes = kFormat != kRows16;  // rows in 8 bits stay so in shared memory
    static constexpr bool kNarrowed = kIsBFloat16<Io>;
    static constexpr int kKeys = kInCodes ? 64 : 32;  // of a tile
    static constexpr int kStages = kInCodes ? 4 : 5;
    static constexpr int kTileRow = kCodeRow<kFormat, kHeadDim>;  // bytes of a key in a tile
    static constexpr int kWarps = 8, kTeamThreads = 32 * kWarps;  // of a team
    static constexpr int kThreads = kTeams * kTeamThreads + 128;
    // Warps of S: by rows, 16 each; by channels; by keys.
    static constexpr int kRowWarps = 1, kParts = 4, kKeyWarps = 2;
    static constexpr int kHeld = 5;  // panels of Q in registers, of nine: the others are read from shared memory
    static constexpr int kHeldSteps = 4;  // with kInCodes, of nine of 16 channels
    static constexpr bool kByCopies = true;  // Q comes by way of shared memory
    static constexpr bool kClusters = CLUSTERS;  // each CTA has one split, and clusters merge theirs
    static_assert(kHeadDim == 576 && kHeadDimV == 512, "the formats of rows");
};

struct TeamStorage {
    alignas(128) uint8 p[Config::kRows * 128];
    uint8 q[16];  // unused: panels of Q that registers do not hold
    uint16 scales[Config::kTeams][4][Config::kFormat == kRows656 ? Config::kKeys : 2];
    float alpha[Config::kRows], m[Config::kRows], l[Config::kRows];
};
struct SharedStorage {
    using Team = TeamStorage;
    alignas(128) uint8 queries[Config::kRows * 2 * Config::kHeadDim];
    uint64 full[Config::kStages], empty[Config::kStages];
    uint64 both_teams;  // in the place of a named barrier, for race checkers
    SplitCursor<Config> producer;  // behind the first split
    alignas(128) uint8 stages[Config::kStages][Config::kKeys * Config::kTileRow];
    float scores[Config::kTeams][Config::kParts][Config::kRows][Config::kKeys];
    TeamStorage teams[Config::kTeams];
    uint8 exists[Config::kStages][Config::kKeys];  // of a list: whether a place has a key
    ScanStorage<Config::kThreads> scan;
    SplitCursor<Config> cursor;
    int32 chunks;  // of all sequences
    float row_scale;  // the one of e4m3 rows, else 1
    LatentSplit split[2];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

static_assert(sizeof(SharedStorage::stages) >= sizeof(ClusterPart<Config>), "a result in the place of tiles");

using Producer = LatentProducer<Config, SharedStorage>;
using Warps = LatentWarps<Config, SharedStorage>;

// Every role walks over the splits by itself.
OA_DEVICE void produce(const MlaDecodeParams& params, SharedStorage& smem) {
    Producer producer(params, smem);
    SplitCursor<Config> cursor = smem.producer;
    LatentSplit split = smem.split[0];
    while (split.blocks != 0) {
        producer.bring(split);
        if (!cursor.next(params.decode, Partition(smem.chunks, params.decode), split)) break;
    }
    cp_async_wait<0>();
}
OA_DEVICE void attend(Warps& warps, const LatentSplit& split, int32 team) {
    warps.ask(split);
    warps.begin(split);
    const int32 own_tiles = (split.blocks - team + 1) / Config::kTeams;
#pragma unroll 1
    for (int32 tile = 0; tile < own_tiles; ++tile) {
        warps.wait(tile);
        warps.part_of_scores(tile);
        named_barrier_sync(1 + team, Config::kTeamThreads);
        const bool grew = warps.probabilities(split, tile);
        warps.add_values(tile, any_at_barrier(grew, 1 + team, Config::kTeamThreads));
        warps.release(tile);
    }
    warps.end(split);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) mla_decode_few_sm90(
    const __grid_constant__ MlaDecodeParams params) {
    extern __shared__ __align__(128) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const DecodeParams& p = params.decode;
    launch_dependents();  // mla_combine waits for the end of this kernel
    if (threadIdx.x < Config::kStages) {
        mbarrier_init(smem_addr_of(&smem.full[threadIdx.x]), Producer::kArrivals);
        mbarrier_init(smem_addr_of(&smem.empty[threadIdx.x]), Config::kWarps * kArrivalsOfWarp);
        if (threadIdx.x == 0) mbarrier_init(smem_addr_of(&smem.both_teams), Config::kTeams * Config::kTeamThreads);
        fence_barrier_init();
    }
    {
        Scan<Config::kThreads, kAllRows> scan(p, smem.scan);
        const Partition partition(scan.total, p);
        SplitCursor<Config> cursor;
        cursor.at = partition.begin(blockIdx.y), cursor.end = partition.begin(blockIdx.y + 1);
        if (cursor.at >= cursor.end) return;
        if (scan.find(p, cursor.at, cursor.sequence, cursor.before)) {
            const bool is_known = cursor.sequence == scan.last - 1;
            if (!cursor.next(p, partition, smem.split[0], scan.span, is_known)) smem.split[0].blocks = 0;
            smem.cursor = smem.producer = cursor, smem.chunks = scan.total;
            const bool scaled = Config::kFormat == kRowsE4m3 && p.k_params != nullptr;
            smem.row_scale = scaled ? __uint_as_float(*p.k_params) : 1.0f;
        }
    }
    random_delay();
    __syncthreads();
    const int32 team = __shfl_sync(0xffffffffu, int32(threadIdx.x) / Config::kTeamThreads, 0);
    if (team == Config::kTeams) {
        registers_release<64>();
        produce(params, smem);
        return;
    }
    registers_claim<104>();
    Warps warps(params, smem, team);
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        // In shared memory, by one thread: registers are for the products.
        const LatentSplit& split = smem.split[number & 1];
        if (split.blocks == 0) return;
        attend(warps, split, team);
        if constexpr (Config::kClusters) {
            merge_in_cluster<Config, Config::kTeams * Config::kTeamThreads>(params, split, warps.part_of_cluster(),
                                                                            ClusterMembers(params, smem.chunks));
            return;
        }
        LatentSplit& other = smem.split[~number & 1];
        if (threadIdx.x == 0 && !smem.cursor.next(p, Partition(smem.chunks, p), other)) other.blocks = 0;
        warps.all_teams();
    }
}
