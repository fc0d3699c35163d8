// What every kernel here uses: integer types, lanes, warps and thread block clusters.
//
// Compile-time constants come from the `Specialization` of each kernel (kernels/) as macros: THREADS for all, others for each.
#pragma once

typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr u32 ALL_LANES = 0xffffffffu;

__host__ __device__ constexpr int ceil_div(int dividend, int divisor) { return (dividend + divisor - 1) / divisor; }

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// A number that is the same in all lanes of a warp, so that the compiler knows it. What follows from it then takes a uniform
// register and one instruction for the warp.
__device__ __forceinline__ int uniform(int number) { return __shfl_sync(ALL_LANES, number, 0); }

// Bits of the lanes below this one.
__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

__device__ __forceinline__ u32 shared_address(const void* in_shared) {
    return static_cast<u32>(__cvta_generic_to_shared(in_shared));
}

// Wait for the kernel before, and let the one behind come, as kernels/triton/launch.py says. Every kernel calls it, and
// before it writes global memory or reads what the kernel before may have written.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// One thread's part of `copy_async`, and the wait for all copies of this thread.
template <int BYTES>
__device__ __forceinline__ void copy_async_bytes(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}
// The same of 16 bytes, past the L1 cache.
__device__ __forceinline__ void copy_async_past_l1(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Have what lies there come to the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// The sum of the warp's numbers up to this lane's, of which those of the first LANES are not 0.
template <int LANES = WARP>
__device__ __forceinline__ u32 sum_up_to_lane(u32 mine) {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, mine, distance);
        if (lane_id() >= distance) mine += other;
    }
    return mine;
}

// Sums over the block's warps of the numbers that they wrote before a barrier. A number may be several packed into 32 bits.
struct Totals {
    u32 up_to;  // lane i: the sum over warps 0 .. i

    __device__ __forceinline__ explicit Totals(const u32* of_warps) {
        up_to = sum_up_to_lane<WARPS>(lane_id() < WARPS ? of_warps[lane_id()] : 0);
    }

    __device__ __forceinline__ u32 all() const { return __shfl_sync(ALL_LANES, up_to, WARPS - 1); }
    __device__ __forceinline__ u32 before_warp(int warp) const {
        const u32 sum = __shfl_sync(ALL_LANES, up_to, (warp + WARPS - 1) % WARPS);
        return warp == 0 ? 0 : sum;
    }
};

// The blocks that work together on one request or row; their number is a power of two. Before Hopper it is one.
struct Cluster {
    int rank;
    int size;

    __device__ __forceinline__ Cluster() {
#if __CUDA_ARCH__ >= 900
        rank = __clusterRelativeBlockRank();
        size = max(1, static_cast<int>(__clusterSizeInBlocks()));
#else
        rank = 0;
        size = 1;
#endif
    }

    // Signal that this thread has come here. This orders no memory accesses, so it needs no fence. But what this thread
    // has read and used was read before anything that others do after `wait_for_all`.
    __device__ __forceinline__ void arrive() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) __cluster_barrier_arrive_relaxed();
#endif
    }

    // Wait until all threads of all blocks have called `arrive`.
    __device__ __forceinline__ void wait_for_all() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) __cluster_barrier_wait();
#endif
    }

    __device__ __forceinline__ int log2_size() const { return __popc(size - 1); }

    // Whether this block is the one that does number `i` of what the blocks share out.
    __device__ __forceinline__ bool is_mine(int i) const { return (i & (size - 1)) == rank; }
};

// An array of 8-byte words in the shared memory of every block of a cluster; each block writes its words to all blocks.
// Every block counts what arrives (with a transaction barrier, `mbarrier`). A barrier of the cluster would do, but waits
// for all that its threads have written anywhere. It may be used several times: each use is a
// phase, 0 first.
class Mailbox {
    u64* words_;
    u64* arrived_;
    bool alone_;

  public:
    __device__ __forceinline__ Mailbox(u64* words, u64* arrived, const Cluster& cluster)
        : words_(words), arrived_(arrived), alone_(cluster.size == 1) {}

    // Call before `Cluster::arrive`.
    __device__ __forceinline__ void open() const {
#if __CUDA_ARCH__ >= 900
        if (!alone_ && threadIdx.x == 0) {
            asm volatile(
                "mbarrier.init.shared::cta.b64 [%0], 1;\n"
                "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(arrived_))
                : "memory");
        }
#endif
    }

    // Expect so many words. Call after `open` and a barrier; some words may have arrived by then.
    __device__ __forceinline__ void expect(int words) const {
#if __CUDA_ARCH__ >= 900
        if (!alone_ && threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived_)),
                         "r"(8 * words)
                         : "memory");
        }
#endif
    }

    // Write a word to the mailbox of a block that has called `arrive`.
    __device__ __forceinline__ void send(int peer, int at, u64 value) const {
#if __CUDA_ARCH__ >= 900
        if (!alone_) {
            asm volatile(
                "{\n"
                ".reg .b32 to, arrived;\n"
                "mapa.shared::cluster.u32 to, %0, %3;\n"
                "mapa.shared::cluster.u32 arrived, %2, %3;\n"
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [arrived];\n"
                "}" ::"r"(shared_address(words_ + at)),
                "l"(value), "r"(shared_address(arrived_)), "r"(peer)
                : "memory");
            return;
        }
#endif
        words_[at] = value;
    }

    // Wait until all words of the first phase have arrived. A barrier of the block's threads, for all of its shared memory.
    __device__ __forceinline__ void wait() const {
        __syncthreads();
        wait_for_words(0);
    }

    // The same of any phase, for the threads of one warp; `expect` was called before a barrier.
    __device__ __forceinline__ void wait_in_warp(int phase) const {
        __syncwarp();
        wait_for_words(phase & 1);
    }

  private:
    __device__ __forceinline__ void wait_for_words(u32 parity) const {
#if __CUDA_ARCH__ >= 900
        for (u32 done = alone_; !done;) {
            asm volatile(
                "{\n"
                ".reg .pred done;\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
                "selp.u32 %0, 1, 0, done;\n"
                "}"
                : "=r"(done)
                : "r"(shared_address(arrived_)), "r"(parity)
                : "memory");
        }
#endif
    }
};

// Copy N values to shared memory, all threads together, without waiting for them. BYTES: 4, 8 or 16 at a time, which
// divide the size and both addresses.
template <int N, int BYTES, typename T>
__device__ __forceinline__ void copy_async(T* to, const T* from) {
    constexpr int PER_COPY = BYTES / sizeof(T);
    constexpr int COPIES = N / PER_COPY;
#pragma unroll
    for (int first = 0; first < COPIES; first += THREADS) {
        const int copy = first + threadIdx.x;
        if (copy < COPIES) copy_async_bytes<BYTES>(to + copy * PER_COPY, from + copy * PER_COPY);
    }
}
