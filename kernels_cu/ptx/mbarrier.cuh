// mbarrier objects in shared memory (PTX ISA, "mbarrier"). Addresses are shared-window byte addresses, 8-byte aligned.
// A wait names the parity of the phase that it waits for: 0 for the first completion, 1 for the second, and so on.
#pragma once
#include "ptx/delay.cuh"
#include "ptx/types.cuh"

// mbarrier.init: one thread, before anyone uses it; fence_barrier_init and a CTA barrier must follow.
OA_DEVICE void mbarrier_init(uint32 bar, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// fence.mbarrier_init.release.cluster: makes the inits visible to the asynchronous proxy.
OA_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive: release semantics for this thread's earlier accesses.
OA_DEVICE void mbarrier_arrive(uint32 bar) {
    random_delay();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and lets the phase wait for `bytes` more of bulk copies.
OA_DEVICE void mbarrier_arrive_expect_tx(uint32 bar, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// The same of a barrier with one arrival a phase, and waits for its copies, which `copy` issues (mbarrier.try_wait with
// the state of the phase, so that no parity has to be kept). One thread.
template <typename Copy>
OA_DEVICE void mbarrier_expect_and_wait(uint32 bar, uint32 bytes, Copy copy) {
    uint64 state;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;"
                 : "=l"(state)
                 : "r"(bar), "r"(bytes)
                 : "memory");
    copy();
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(bar),
        "l"(state)
        : "memory");
}

// cp.async.mbarrier.arrive.noinc: this thread arrives once all its cp.async so far have landed.
OA_DEVICE void mbarrier_arrive_after_copies(uint32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// mbarrier.test_wait.parity: whether the phase has completed, without waiting; acquire semantics if it has.
OA_DEVICE bool mbarrier_test(uint32 bar, uint32 parity) {
    uint32 done;
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

// mbarrier.try_wait.parity in a loop; acquire semantics. The "memory" clobber keeps later loads below it.
OA_DEVICE void mbarrier_wait(uint32 bar, uint32 parity) {
    random_delay();
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
