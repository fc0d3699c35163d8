// What every kernel here uses: integer types, lanes, warps and thread block clusters.
//
// Compile-time constants come from hisparse/cuda/kernels.py as macros: THREADS, ITEM_BYTES, ALIGNED, and for swap_in.cu
// those of hisparse/cuda/specialization.py.
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

// Bits of the lanes below this one.
__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

// The blocks that work together on one request. Before Hopper there are no clusters, and a cluster is one block.
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

    // Say that this block has begun. Orders no memory accesses, so it costs no fence.
    __device__ __forceinline__ void begin() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) __cluster_barrier_arrive_relaxed();
#endif
    }

    // Wait until all blocks have begun: only then is their shared memory theirs.
    __device__ __forceinline__ void wait_for_all() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) __cluster_barrier_wait();
#endif
    }

    // A barrier of all threads of all blocks, for what they wrote to their own and each other's shared memory.
    __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) {
            __cluster_barrier_arrive();
            __cluster_barrier_wait();
            return;
        }
#endif
        __syncthreads();
    }

    // Write to the same place in the shared memory of every block. All must have begun.
    __device__ __forceinline__ void broadcast(i32* place, i32 value) const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) {
            for (int peer = 0; peer < size; ++peer) {
                *static_cast<i32*>(__cluster_map_shared_rank(place, peer)) = value;
            }
            return;
        }
#endif
        *place = value;
    }
};
