// Runs CUDA kernels on a CPU, thread by thread: enough of CUDA C++ for the kernels in csrc/.
//
// Every CUDA thread is a coroutine that runs until it must wait for others: at a barrier of its warp (each of the _sync
// intrinsics is two of them), its block or its cluster. Blocks of a cluster run together, clusters one after the other.
// When nobody can go on, or lanes of a warp wait at different intrinsics, the run fails and says so: on a GPU it
// would hang, or worse.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y, z; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }

inline unsigned long long emulated_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

struct Barrier {
    int expected = 0, arrived = 0;
    long generation = 0;
    const char* what = "";
};

struct Warp {
    Barrier barrier;
    unsigned long long lanes[32];
    unsigned left[32][4];  // registers that the tensor cores read
};

struct Block {
    std::vector<unsigned char> memory;
    Barrier barrier;
    std::vector<Warp> warps;
    bool any = false;  // of a __syncthreads_or
    int count = 0;     // of a __syncthreads_count
};

struct Cluster_ {
    Barrier barrier;
    std::vector<Block> blocks;
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<unsigned char[]> stack;
    dim3 thread, block;
    int rank;
    Cluster_* cluster;
    Block* shared;
    Warp* warp;
    long cluster_generation;
    bool done = false;
    const char* waits_at = "";
};

inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline dim3 grid_size;
inline bool progress = false, failed = false;

#define threadIdx (current->thread)
#define blockIdx (current->block)
#define gridDim (grid_size)

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void fail(const char* why, const char* a, const char* b) {
    std::fprintf(stderr, "emulator: %s: %s, %s (block %u, thread %u)\n", why, a, b, blockIdx.x, threadIdx.x);
    failed = true;
    for (;;) yield();
}

inline long arrive(Barrier& barrier, const char* what) {
    if (barrier.arrived == 0) barrier.what = what;
    if (std::strcmp(barrier.what, what)) fail("threads meet at different barriers", barrier.what, what);
    const long generation = barrier.generation;
    progress = true;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    return generation;
}

inline void wait(Barrier& barrier, long generation, const char* what) {
    current->waits_at = what;
    while (barrier.generation == generation) yield();
    progress = true;
}

inline void meet(Barrier& barrier, const char* what) { wait(barrier, arrive(barrier, what), what); }

inline void __syncthreads() { meet(current->shared->barrier, "__syncthreads"); }
inline int __syncthreads_or(int predicate) {
    Block& block = *current->shared;
    meet(block.barrier, "__syncthreads_or");
    block.any |= predicate != 0;
    meet(block.barrier, "__syncthreads_or");
    const int any = block.any;
    meet(block.barrier, "__syncthreads_or");
    block.any = false;
    return any;
}
inline int __syncthreads_count(int predicate) {
    Block& block = *current->shared;
    meet(block.barrier, "__syncthreads_count");
    block.count += predicate != 0;
    meet(block.barrier, "__syncthreads_count");
    const int count = block.count;
    meet(block.barrier, "__syncthreads_count");
    block.count = 0;
    return count;
}
inline void __syncwarp() { meet(current->warp->barrier, "__syncwarp"); }
inline void __cluster_barrier_arrive() { current->cluster_generation = arrive(current->cluster->barrier, "cluster"); }
inline void __cluster_barrier_arrive_relaxed() { __cluster_barrier_arrive(); }
inline void __cluster_barrier_wait() { wait(current->cluster->barrier, current->cluster_generation, "cluster"); }
inline int __clusterRelativeBlockRank() { return current->rank; }
inline int __clusterSizeInBlocks() { return current->cluster->blocks.size(); }
inline void* __cluster_map_shared_rank(void* address, int rank) {
    const long offset = static_cast<unsigned char*>(address) - current->shared->memory.data();
    return current->cluster->blocks[rank].memory.data() + offset;
}

inline unsigned long __cvta_generic_to_shared(const void* in_shared) {
    return static_cast<const unsigned char*>(in_shared) - current->shared->memory.data();
}
inline void send_async(unsigned long long* to, unsigned long long* arrived, int peer, unsigned long long value) {
    *static_cast<unsigned long long*>(__cluster_map_shared_rank(to, peer)) = value;
    *static_cast<unsigned long long*>(__cluster_map_shared_rank(arrived, peer)) -= sizeof(value);
    progress = true;
}

template <typename T, typename Read>
inline T exchange(T value, const char* what, Read read) {
    Warp& warp = *current->warp;
    warp.lanes[threadIdx.x % 32] = static_cast<unsigned long long>(value);
    meet(warp.barrier, what);
    const T result = static_cast<T>(read(warp.lanes));
    meet(warp.barrier, what);
    return result;
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int from) {
    return exchange(value, "__shfl_sync", [=](unsigned long long* lanes) { return lanes[from & 31]; });
}
template <typename T>
inline T __shfl_up_sync(unsigned, T value, int by) {
    const int from = static_cast<int>(threadIdx.x % 32) - by;
    return exchange(value, "__shfl_up_sync",
                    [=](unsigned long long* lanes) { return from < 0 ? static_cast<unsigned long long>(value) : lanes[from]; });
}
template <typename T>
inline T __shfl_down_sync(unsigned, T value, int by) {
    const unsigned from = threadIdx.x % 32 + by;
    return exchange(value, "__shfl_down_sync",
                    [=](unsigned long long* lanes) { return from > 31 ? static_cast<unsigned long long>(value) : lanes[from]; });
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const int from = threadIdx.x % 32 ^ mask;
    bits = exchange(bits, "__shfl_xor_sync", [=](unsigned long long* lanes) { return lanes[from]; });
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    return exchange<unsigned>(predicate != 0, "__ballot_sync", [](unsigned long long* lanes) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= (lanes[lane] != 0) << lane;
        return bits;
    });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return exchange(value, "__reduce_add_sync", [](unsigned long long* lanes) {
        unsigned sum = 0;
        for (int lane = 0; lane < 32; ++lane) sum += lanes[lane];
        return sum;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return exchange(value, "__reduce_max_sync", [](unsigned long long* lanes) {
        return *std::max_element(lanes, lanes + 32);
    });
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
}

inline float float8_e4m3(unsigned char bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = (bits & 127) == 127 ? NAN : std::ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10);
    return bits & 128 ? -size : size;
}

// A step of 32 fp8 numbers of wgmma.mma_async: registers by [64, 128] in shared memory, swizzled by 128 bytes. Rows of sums
// belong to warps, so that a warp needs no other.
template <int SUMS>
inline void multiply_emulated(float (&sums)[SUMS], const unsigned (&left)[4], const unsigned char* right, int step) {
    Warp& warp = *current->warp;
    const int lane = threadIdx.x % 32;
    std::memcpy(warp.left[lane], left, sizeof(left));
    meet(warp.barrier, "wgmma");
    for (int sum = 0; sum < SUMS; ++sum) {
        const int below = sum / 2 % 2, column = sum / 4 * 8 + lane % 4 * 2 + sum % 2;
        float total = step ? sums[sum] : 0;
        for (int k = 0; k < 32; ++k) {
            const unsigned word = warp.left[lane / 4 * 4 + k % 16 / 4][k / 16 * 2 + below];
            const int chunk = (2 * step + k / 16) ^ (column % 8);
            total += float8_e4m3(word >> k % 4 * 8 & 255) * float8_e4m3(right[column * 128 + chunk * 16 + k % 16]);
        }
        sums[sum] = total;
    }
    meet(warp.barrier, "wgmma");
}

inline float of_bfloat16(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
inline unsigned bfloat16_of(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A bfloat16 number in shared memory as a descriptor of the tensor cores has it, at an offset from where that begins.
inline float described(unsigned long long descriptor, unsigned offset) {
    const unsigned at = ((descriptor & 0x3fff) << 4) + offset;
    unsigned short bits;
    std::memcpy(&bits, current->shared->memory.data() + (at ^ (at >> 7 & 7) << 4), sizeof(bits));
    return of_bfloat16(bits);
}
inline unsigned stride(unsigned long long descriptor, int shift) { return (descriptor >> shift & 0x3fff) << 4; }
inline unsigned row_offset(unsigned long long descriptor, int row) { return row / 8 * stride(descriptor, 32) + row % 8 * 128; }

// A step of 16 bfloat16 numbers of wgmma.mma_async: rows of both matrices, or rows of the first and columns of the second.
template <int SUMS, typename Right>
inline void multiply_emulated(float (&sums)[SUMS], unsigned long long left, int step, Right right) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16 + lane / 4;
    for (int sum = 0; sum < SUMS; ++sum) {
        const int row = first + sum / 2 % 2 * 8, column = sum / 4 * 8 + lane % 4 * 2 + sum % 2;
        float total = step ? sums[sum] : 0;
        for (int k = 0; k < 16; ++k) total += described(left, row_offset(left, row) + 2 * k) * right(column, k);
        sums[sum] = total;
    }
}
inline void multiply_emulated(float (&sums)[32], unsigned long long left, unsigned long long right, int step) {
    multiply_emulated(sums, left, step, [=](int column, int k) { return described(right, row_offset(right, column) + 2 * k); });
}
inline void multiply_emulated(float (&sums)[128], unsigned long long left, unsigned long long right) {
    multiply_emulated(sums, left, 1, [=](int column, int k) {
        return described(right, row_offset(right, k) + column / 64 * stride(right, 16) + column % 64 * 2);
    });
}

inline unsigned emulated_factors(float scale) {
    const unsigned factor = bfloat16_of((scale > 255 ? 255 : scale) * 0x1p120f);
    return factor << 16 | factor;
}
inline void emulated_scaled(unsigned numbers, unsigned factors, unsigned& first, unsigned& second) {
    unsigned words[2] = {0, 0};
    for (int i = 0; i < 4; ++i) {
        const unsigned number = numbers >> 8 * i & 0xff;
        const float value = of_bfloat16((number & 0x80) << 8 | (number & 0x7f) << 4) * of_bfloat16(factors & 0xffff);
        words[i / 2] |= bfloat16_of(value) << i % 2 * 16;
    }
    first = words[0], second = words[1];
}

// The barriers of gate.cuh: what is expected, what has arrived, and how many phases are over.
struct GateState {
    unsigned short expected, arrived;
    unsigned over;
};
inline void make_gate(unsigned long long* gate, int threads) {
    *reinterpret_cast<GateState*>(gate) = {static_cast<unsigned short>(threads), 0, 0};
}
inline void arrive_at_gate(unsigned long long* gate) {
    GateState& state = *reinterpret_cast<GateState*>(gate);
    if (++state.arrived == state.expected) state.arrived = 0, ++state.over;
    progress = true;
}
inline bool is_open(unsigned long long* gate, unsigned phase) {
    current->waits_at = "a gate";
    return (reinterpret_cast<GateState*>(gate)->over & 1) != (phase & 1);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, int shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
template <typename T> inline T min(T a, T b) { return a < b ? a : b; }
template <typename T> inline T max(T a, T b) { return a > b ? a : b; }

template <typename T> inline T atomicCAS(T* at, T expected, T value) {
    const T old = *at;
    if (old == expected) *at = value;
    return old;
}
template <typename T> inline T atomicExch(T* at, T value) {
    const T old = *at;
    *at = value;
    return old;
}
template <typename T> inline T atomicMin(T* at, T value) {
    const T old = *at;
    *at = min(old, value);
    return old;
}
template <typename T> inline T atomicOr(T* at, T value) {
    const T old = *at;
    *at |= value;
    return old;
}
template <typename T> inline T atomicAdd(T* at, T value) {
    const T old = *at;
    *at += value;
    return old;
}

template <typename Params, void (*KERNEL)(Params)>
struct Run {
    inline static const Params* params;

    static void body() {
        KERNEL(*params);
        current->done = true;
        progress = true;
        // A thread that left counts as arrived wherever others still wait.
        --current->shared->barrier.expected;
        --current->cluster->barrier.expected;
        for (;;) yield();
    }

    static bool cluster_of_blocks(unsigned first, int size, unsigned y, unsigned z, int threads, int shared_bytes) {
        Cluster_ cluster;
        cluster.blocks.resize(size);
        cluster.barrier.expected = size * threads;
        std::vector<Thread> all(size * threads);
        for (int rank = 0; rank < size; ++rank) {
            Block& block = cluster.blocks[rank];
            block.memory.assign(shared_bytes + 16, 0xcd);  // as good as any garbage
            block.barrier.expected = threads;
            block.warps.resize(threads / 32);
            for (Warp& warp : block.warps) warp.barrier.expected = 32;
            for (int t = 0; t < threads; ++t) {
                Thread& thread = all[rank * threads + t];
                thread.thread = {static_cast<unsigned>(t), 0, 0};
                thread.block = {first + rank, y, z};
                thread.rank = rank;
                thread.cluster = &cluster;
                thread.shared = &block;
                thread.warp = &block.warps[t / 32];
                thread.stack = std::make_unique<unsigned char[]>(STACK);
                getcontext(&thread.context);
                thread.context.uc_stack.ss_sp = thread.stack.get();
                thread.context.uc_stack.ss_size = STACK;
                makecontext(&thread.context, body, 0);
            }
        }
        for (bool running = true; running && !failed;) {
            running = progress = false;
            for (Thread& thread : all) {
                if (thread.done) continue;
                running = true;
                current = &thread;
                swapcontext(&scheduler, &thread.context);
            }
            if (running && !progress) {
                std::fprintf(stderr, "emulator: nobody can go on\n");
                for (Thread& thread : all) {
                    if (!thread.done && thread.thread.x % 32 == 0) {
                        std::fprintf(stderr, "  block %u thread %u waits at %s\n", thread.block.x, thread.thread.x, thread.waits_at);
                    }
                }
                failed = true;
            }
        }
        return !failed;
    }

    static constexpr int STACK = 32 * 1024;
};

template <typename Params, void (*KERNEL)(Params)>
inline int run(const Params* params, dim3 grid, int cluster, int threads, int shared_bytes) {
    Run<Params, KERNEL>::params = params;
    grid_size = grid;
    failed = false;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; x += cluster) {
                if (!Run<Params, KERNEL>::cluster_of_blocks(x, cluster, y, z, threads, shared_bytes)) return 1;
            }
        }
    }
    return 0;
}
