// A barrier in shared memory (`mbarrier`) at which some of a block's threads arrive, and others wait. Needs Hopper.
#pragma once
#include "common.cuh"

// Opens for the next phase when as many threads have arrived as it was made for. Phase 0 is its first use, and the phase before
// counts as over.
class Gate {
    u64* gate_;

  public:
    __device__ __forceinline__ explicit Gate(u64* gate) : gate_(gate) {}

    // One thread calls this before any use, and a barrier of the block follows.
    __device__ __forceinline__ void make(int threads) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate_)), "r"(threads) : "memory");
    }

    // What this thread did before is seen by those who wait.
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate_)) : "memory");
    }

    __device__ __forceinline__ void wait(u32 phase) const {
        for (u32 open = 0; !open;) {
            asm volatile(
                "{\n"
                ".reg .pred open;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 open, [%1], %2;\n"
                "selp.u32 %0, 1, 0, open;\n"
                "}"
                : "=r"(open)
                : "r"(shared_address(gate_)), "r"(phase & 1)
                : "memory");
        }
    }
};
