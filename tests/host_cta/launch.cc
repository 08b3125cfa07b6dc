// Runs a kernel CTA by CTA. Macros: KERNEL (the source), SYMBOL, PARAMS (its arguments' struct).
#include "cuda.h"

#include KERNEL

#include <ucontext.h>

#include <deque>
#include <vector>

Dim3 threadIdx, blockIdx, gridDim;
alignas(1024) unsigned char smem_raw[228 << 10];

namespace {
struct Copy {
    unsigned to, size, bytes;
    const void* from;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
    unsigned operations, votes;
    bool is_done;
};
struct Barrier {
    unsigned members, arrived, generation;
    void pass() {
        if (arrived == members) arrived = 0, ++generation;
    }
};
constexpr unsigned kMostWarps = 32;
std::vector<Fiber> fibers;
unsigned current;
ucontext_t host;
Barrier barriers[kMostWarps + 1];  // of the warps, of the CTA
Lanes lanes[kMostWarps][2];
const PARAMS* params;

void run_thread() {
    SYMBOL(*params);
    Fiber& own = fibers[current];
    own.is_done = true;
    for (Barrier* b : {&barriers[current / 32], &barriers[kMostWarps]}) --b->members, b->pass();
    swapcontext(&own.context, &host);
}
}  // namespace

void host_barrier(bool of_cta) {
    Barrier& b = barriers[of_cta ? kMostWarps : current / 32];
    const unsigned generation = b.generation, own = current;
    ++b.arrived;
    b.pass();
    while (b.generation == generation) swapcontext(&fibers[own].context, &host);
}
// Three places in turn: while some still read a vote's result, others may have cast the next one, and none the one after.
bool votes[3];
bool host_any(bool x) {
    const unsigned turn = fibers[current].votes++ % 3;
    votes[turn] |= x;
    host_barrier(true);
    votes[(turn + 2) % 3] = false;
    return votes[turn];
}
Lanes& host_lanes() { return lanes[current / 32][fibers[current].operations++ % 2]; }
void host_copy(unsigned to, const void* from, unsigned size, unsigned bytes) {
    if (to % size != 0 || (bytes > 0 && reinterpret_cast<uintptr_t>(from) % size != 0)) abort();
    fibers[current].open.push_back({to, size, bytes, from});
}
void host_commit() {
    fibers[current].groups.push_back(std::move(fibers[current].open));
    fibers[current].open.clear();
}
void host_wait(int groups) {
    Fiber& own = fibers[current];
    for (; int(own.groups.size()) > groups; own.groups.pop_front())
        for (const Copy& c : own.groups.front()) {
            memset(host_shared(c.to), 0, c.size);
            if (c.bytes > 0) memcpy(host_shared(c.to), c.from, c.bytes);
        }
}

extern "C" unsigned params_bytes() { return sizeof(PARAMS); }
extern "C" void launch(const void* arguments, unsigned x, unsigned y, unsigned threads) {
    params = static_cast<const PARAMS*>(arguments);
    gridDim = {x, y, 1};
    fibers.resize(threads);
    for (unsigned cta = 0; cta < x * y; ++cta) {
        blockIdx = {cta % x, cta / x, 0};
        memset(smem_raw, 0xff, sizeof smem_raw);  // NaN
        for (unsigned i = 0; i <= kMostWarps; ++i) barriers[i] = {i < kMostWarps ? 32 : threads, 0, 0};
        for (Fiber& f : fibers) {
            f.stack.resize(256 << 10);
            f.open.clear(), f.groups.clear();
            f.operations = f.votes = 0, f.is_done = false;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = nullptr;
            makecontext(&f.context, run_thread, 0);
        }
        for (bool runs = true; runs;) {
            runs = false;
            for (unsigned t = 0; t < threads; ++t) {
                if (fibers[t].is_done) continue;
                runs = true, current = t, threadIdx = {t, 0, 0};
                swapcontext(&host, &fibers[t].context);
            }
        }
    }
}
