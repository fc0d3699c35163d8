// What Hopper's tensor cores and copy engine offer to kernels here: products of fp8 numbers by warpgroups of 128 threads,
// and copies to shared memory that report to a barrier there. Needs sm_90a.
//
// Formats of registers and of shared memory are those of the PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once
#include "common.cuh"

constexpr int WARPGROUP = 4 * WARP;
constexpr int ROW_BYTES = 128;           // of a matrix in shared memory
constexpr int SWIZZLED_BYTES = 1024;     // 8 rows, whose 16-byte chunks are swapped; a matrix begins at a multiple of it
constexpr int STEP_BYTES = 32;           // of each row, that one instruction multiplies

// Where a chunk of 16 bytes of a row lies in shared memory, from the beginning of the matrix.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * ROW_BYTES + (chunk ^ row % 8) * 16; }

// A matrix in shared memory for the tensor cores, from its first column on: swizzle of 128 bytes, 1024 bytes from 8 rows to the
// next. To say another place in it, add bytes / 16.
__device__ __forceinline__ u64 matrix(const u8* from) {
    return 1ull << 62 | static_cast<u64>(SWIZZLED_BYTES / 16) << 32 | 1ull << 16 | (shared_address(from) & 0x3ffff) >> 4;
}

// Begin products that read registers and accumulators written so far.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Add to sums [64, N] the products of a step of [64, 128] and [N, 128], both fp8; step 0 begins the sums.
//
// Of the first matrix a warp has 16 rows: registers 0 and 2 of a lane hold bytes 4 * (lane % 4) and 16 more of row
// lane / 4, registers 1 and 3 those of 8 rows below. Of the sums it has, for each 8 columns, two from 2 * (lane % 4) on, of
// the same two rows.
__device__ __forceinline__ void multiply(float (&sums)[32], const u32 (&left)[4], const u8* right, int step) {
    const u64 columns = matrix(right) + step * STEP_BYTES / 16;
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, adds, 1, 1;\n"
        "}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]),
          "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
          "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(columns), "r"(step)
        : "memory");
}
__device__ __forceinline__ void multiply(float (&sums)[16], const u32 (&left)[4], const u8* right, int step) {
    const u64 columns = matrix(right) + step * STEP_BYTES / 16;
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, adds, 1, 1;\n"
        "}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(columns), "r"(step)
        : "memory");
}

// The products since `begin_products` are all that the tensor cores are given.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait for all products. The sums are not touched before.
template <int N>
__device__ __forceinline__ void wait_for_products(float (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("" : "+f"(sums[i])::"memory");
    }
}

// Wait until at most LATER of the groups of copies that this thread has made by `copy_async_bytes` are on their way.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void wait_for_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// What this thread wrote to shared memory is seen by the tensor cores, once a barrier has told them.
__device__ __forceinline__ void publish_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier in shared memory (`mbarrier`) at which some of a block's threads or copies arrive, and others wait.
//
// Opens for the next phase when as many threads have arrived as it was made for, and all bytes that they have the copy engine
// bring. Phase 0 is its first use, and the phase before counts as over.
class Gate {
    u64* gate_;

  public:
    __device__ __forceinline__ explicit Gate(u64* gate) : gate_(gate) {}

    // One thread calls this before any use, and a barrier of the block or `publish_gates` follows.
    __device__ __forceinline__ void make(int threads) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate_)), "r"(threads) : "memory");
    }

    // What this thread did before is seen by those who wait.
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate_)) : "memory");
    }

    // Arrive when the copies end that this thread has begun.
    __device__ __forceinline__ void arrive_after_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(gate_)) : "memory");
    }

    // Arrive, and have the copy engine copy to shared memory; both addresses and the size are multiples of 16.
    __device__ __forceinline__ void arrive_with_copy(void* to, const void* from, u32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate_)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(bytes), "r"(shared_address(gate_))
                     : "memory");
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

// The copy engine sees the gates that this thread has made.
__device__ __forceinline__ void publish_gates() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
