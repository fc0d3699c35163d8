// A warp copies items of ITEM_BYTES bytes between two memories, of which one may be pinned host memory.
//
// What limits a copy over PCIe is how many bytes are asked for before the first arrive. So each lane issues all its
// 16-byte loads of several items before it stores any of them.
#pragma once

#include "common.cuh"

// Past the L1 cache, which these bytes would only pass through. Volatile, so that it is issued where it is written.
__device__ __forceinline__ uint4 load16(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ __forceinline__ void store16(u8* to, uint4 v) { *reinterpret_cast<uint4*>(to) = v; }

// The 16 bytes that start `shift` bytes (0 to 15) into the 32 bytes `low`, `high`.
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, int shift) {
    u32 a = low.x, b = low.y, c = low.z, d = low.w, e = high.x, f = high.y, g = high.z;
    if (shift & 8) { a = c; b = d; c = e; d = f; e = g; f = high.w; }
    if (shift & 4) { a = b; b = c; c = d; d = e; e = f; }
    const int bits = 8 * (shift & 3);
    return make_uint4(__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits), __funnelshift_r(c, d, bits),
                      __funnelshift_r(d, e, bits));
}

// Copy one item, whatever its size and wherever it lies: bytes up to the first 16-byte boundary of the destination,
// 16 bytes at a time from there, bytes for the rest. Loads are aligned even where the source is not: each lane loads
// 16 aligned bytes, and takes those that it lacks from its neighbour. No byte outside the item is read.
__device__ inline void copy_unaligned(u8* to, const u8* from) {
    int head = -static_cast<int>(reinterpret_cast<u64>(to)) & 15;
    int shift = static_cast<int>(reinterpret_cast<u64>(from) + head) & 15;
    if (head < shift) head += 16;  // else the first aligned load would begin before the item
    int vectors = (ITEM_BYTES - head + shift) / 16 - (shift != 0);
    if (head >= ITEM_BYTES || vectors < 0) vectors = 0;
    const int tail = vectors ? head + 16 * vectors : 0;
    if (!vectors) head = 0;

    const int lane = lane_id();
    constexpr int AT_ONCE = 4;
    constexpr int PER_ROUND = WARP - 1;  // the last lane's load only serves its neighbour
    const u8* aligned = from + head - shift;
    for (int start = 0; start < vectors; start += AT_ONCE * PER_ROUND) {
        uint4 loaded[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int vector = start + j * PER_ROUND + lane;
            loaded[j] = make_uint4(0, 0, 0, 0);
            if (vector < vectors + (shift != 0)) loaded[j] = load16(aligned + 16 * vector);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int vector = start + j * PER_ROUND + lane;
            uint4 next;
            next.x = __shfl_down_sync(ALL_LANES, loaded[j].x, 1);
            next.y = __shfl_down_sync(ALL_LANES, loaded[j].y, 1);
            next.z = __shfl_down_sync(ALL_LANES, loaded[j].z, 1);
            next.w = __shfl_down_sync(ALL_LANES, loaded[j].w, 1);
            if (lane < PER_ROUND && vector < vectors) store16(to + head + 16 * vector, shifted(loaded[j], next, shift));
        }
    }
    for (int i = lane; i < head; i += WARP) to[i] = from[i];
    for (int i = tail + lane; i < ITEM_BYTES; i += WARP) to[i] = from[i];
}

// Items of whole words, too small for each to keep a warp busy, such as index keys: a warp copies the words of all its
// items as one sequence, so that items which lie beside each other are read as one piece.
constexpr bool SMALL_ITEMS = !ALIGNED && ITEM_BYTES % 4 == 0 && ITEM_BYTES <= 512;

// Copy `count` items, named by the first lanes. Bases are multiples of 4 bytes.
__device__ inline void copy_words(u8* to_base, const u8* from_base, i64 to, i64 from, int count) {
    constexpr int WORDS = ITEM_BYTES / 4 < 1 ? 1 : ITEM_BYTES / 4;
    constexpr int AT_ONCE = 8;
    const int total = count * WORDS;
    for (int start = 0; start < total; start += AT_ONCE * WARP) {
        u32 loaded[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int word = start + j * WARP + lane_id();
            const int item = word < total ? word / WORDS : 0;
            const i64 slot = __shfl_sync(ALL_LANES, from, item);
            const u32* source = reinterpret_cast<const u32*>(from_base + slot * ITEM_BYTES);
            loaded[j] = word < total && slot >= 0 ? source[word - item * WORDS] : 0;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int word = start + j * WARP + lane_id();
            const int item = word < total ? word / WORDS : 0;
            const i64 slot = __shfl_sync(ALL_LANES, to, item);
            u32* target = reinterpret_cast<u32*>(to_base + slot * ITEM_BYTES);
            if (word < total && slot >= 0) target[word - item * WORDS] = loaded[j];
        }
    }
}

// Copies up to 32 items, one named by each lane.
class WarpCopy {
    static constexpr int VECTORS = ITEM_BYTES / 16;
    static constexpr int LOADS_PER_ITEM = ceil_div(VECTORS, WARP) < 1 ? 1 : ceil_div(VECTORS, WARP);
    static constexpr int LOADS = LOADS_PER_ITEM < 4 ? LOADS_PER_ITEM : 4;  // of an item, before its first store
    static constexpr int SEGMENTS = ceil_div(LOADS_PER_ITEM, LOADS);
    static constexpr int ITEMS = 8 / LOADS < 4 ? 8 / LOADS : 4;  // at once: 32 registers at most

    u8* to_base_;
    const u8* from_base_;
    i64 to_ = -1;
    i64 from_ = -1;
    int count_ = 0;
    uint4 loaded_[ITEMS][LOADS];

    // Call `body` with each vector of this lane in a step: its register, and its address in the memory of `base`.
    template <typename Byte, typename Body>
    __device__ __forceinline__ void each_vector(int step, Byte* base, i64 slot_of_lane, Body body) {
        const int first = step / SEGMENTS * ITEMS;
        const int vector = step % SEGMENTS * LOADS * WARP + lane_id();
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const i64 slot = __shfl_sync(ALL_LANES, slot_of_lane, first + i);
            Byte* item = base + slot * ITEM_BYTES;
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                const int at = vector + j * WARP;
                if (first + i < count_ && slot >= 0 && at < VECTORS) body(loaded_[i][j], item + 16 * at);
            }
        }
    }

  public:
    __device__ __forceinline__ WarpCopy(u8* to_base, const u8* from_base) : to_base_(to_base), from_base_(from_base) {}

    // The first `count` lanes, up to 32, name the items by their slots in the two memories; -1 for none.
    __device__ __forceinline__ void copy(i64 to, i64 from, int count) {
        if (count <= 0) return;
        const bool exists = to >= 0 && from >= 0;
        to_ = exists ? to : -1;
        from_ = exists ? from : -1;
        count_ = count;
        if (ALIGNED) {
            const int steps = ceil_div(count_, ITEMS) * SEGMENTS;
            for (int step = 0; step < steps; ++step) {
                each_vector(step, from_base_, from_, [](uint4& vector, const u8* from) { vector = load16(from); });
                each_vector(step, to_base_, to_, [](uint4 vector, u8* to) { store16(to, vector); });
            }
        } else if (SMALL_ITEMS && !((reinterpret_cast<u64>(to_base_) | reinterpret_cast<u64>(from_base_)) & 3)) {
            copy_words(to_base_, from_base_, to_, from_, count_);
        } else {
            for (int i = 0; i < count_; ++i) {
                const i64 at = __shfl_sync(ALL_LANES, to_, i);
                const i64 item = __shfl_sync(ALL_LANES, from_, i);
                if (item >= 0) copy_unaligned(to_base_ + at * ITEM_BYTES, from_base_ + item * ITEM_BYTES);
            }
        }
    }
};
