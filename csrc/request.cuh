// What a swap-in is given, what one request has of it, and the shared memory that a block works in.
#pragma once

#include "clock.cuh"
#include "common.cuh"

struct SwapInParams {
    const POSITION_T* positions;  // [batch, k], -1 for none
    const INDEX_T* rows;          // [batch], distinct, negative for padding
    const INDEX_T* newest;        // [batch], the newest position of each row
    i32* position_at;             // [rows, HOT_SIZE], of this index layer, like the next three
    i16* hot_of;                  // [rows, max_context]
    u8* referenced;               // [rows, HOT_SIZE]
    i32* hand;                    // [rows]
    const i64* hot_granules;      // [rows, GRANULES], first slots
    const i64* host_slot_of;      // [rows, max_context]
    const u8* host_items;         // of one layer, [host slots, ITEM_BYTES]; null: only resolve
    u8* device_items;             // of the same layer, [device slots, ITEM_BYTES]
    i64* slots;                   // out [batch, k], -1 for none
    i64* miss_host_slots;         // out [batch, k], of which the first miss_counts are written
    i64* miss_device_slots;       // out, the same
    i32* miss_counts;             // out [batch]
    u64* counters;                // [4], added to
    i64 max_context;
    i64 k;  // at most TOP_K
};

enum Counter { HITS, MISSES, BYTES, VIOLATIONS };

__device__ __forceinline__ void add(u64* counters, Counter which, u64 amount) {
    if (amount) atomicAdd(&counters[which], amount);
}

constexpr i32 NONE = -1;
constexpr int BUCKETS = 1 << BUCKET_BITS;
constexpr int SEEN = 1 << SEEN_BITS;
constexpr int GRANULES = ceil_div(HOT_SIZE + 1, HOT_GRANULE);

// The hot index after one, round the clock.
__device__ __forceinline__ i32 after(i32 hot) { return hot + 1 == HOT_SIZE ? 0 : hot + 1; }

__device__ __forceinline__ i64 slot_at(const i64* granules, u32 hot) {
    const i64 first = granules[hot / HOT_GRANULE];
    return first < 0 ? -1 : first + hot % HOT_GRANULE;
}

// Each thread has PLACES places of the top-k order, and each warp a run of them, in chunks of its width.
constexpr int PLACES = ceil_div(TOP_K, THREADS);

__device__ __forceinline__ int chunk(int j) { return warp_id() * PLACES + j; }
__device__ __forceinline__ int place(int j) { return chunk(j) * WARP + lane_id(); }

// A selected position, NONE for none, and the hot index where it was last.
struct Selected {
    u64 packed;

    __device__ __forceinline__ explicit Selected(u64 both) : packed(both) {}
    __device__ __forceinline__ Selected(i32 position, i32 last_hot)
        : packed(static_cast<u64>(last_hot) << 32 | static_cast<u32>(position)) {}
    __device__ __forceinline__ i32 position() const { return static_cast<i32>(packed); }
    __device__ __forceinline__ i32 last_hot() const { return static_cast<i32>(packed >> 32); }
};

// Dynamic shared memory. The offsets are those of hisparse/cuda/specialization.py; what is only written when something
// else has been read lies over it.
struct Shared {
    u64* selected;       // [TOP_K], Selected
    u64* arrived;        // [1], of `selected`
    i64* host_slot;      // [TOP_K], of each distinct miss that this block fetches; over `selected`
    i32* position_at;    // [HOT_SIZE]
    i32* miss_position;  // [TOP_K], the misses in top-k order; over `position_at`, like the next two
    u16* victims;        // [TOP_K], hot index that each distinct miss takes
    u16* rank;           // [TOP_K], of each miss among the distinct ones, if there are repeats
    i64* granules;       // [GRANULES]
    u32* seen;           // [SEEN] bits, of positions that are missing
    i32* buckets;        // [BUCKETS]; over `seen`
    u8* protect;         // [HOT_SIZE], 1 for this step's hits
    u32* totals;         // [WARPS], what each warp counted
    u32* kinds;          // [WARPS], and the Kinds of its hot indices
    u32* at_hand;        // [1], Kinds below the hand among the hot indices of its warp

    __device__ __forceinline__ explicit Shared(u8* memory)
        : selected(reinterpret_cast<u64*>(memory + SHARED_SELECTED)),
          arrived(reinterpret_cast<u64*>(memory + SHARED_ARRIVED)),
          host_slot(reinterpret_cast<i64*>(memory + SHARED_SELECTED)),
          position_at(reinterpret_cast<i32*>(memory + SHARED_POSITION_AT)),
          miss_position(position_at),
          victims(reinterpret_cast<u16*>(miss_position + TOP_K)),
          rank(victims + TOP_K),
          granules(reinterpret_cast<i64*>(memory + SHARED_GRANULES)),
          seen(reinterpret_cast<u32*>(memory + SHARED_SEEN)),
          buckets(reinterpret_cast<i32*>(memory + SHARED_SEEN)),
          protect(memory + SHARED_PROTECT),
          totals(reinterpret_cast<u32*>(memory + SHARED_TOTALS)),
          kinds(reinterpret_cast<u32*>(memory + SHARED_KINDS)),
          at_hand(reinterpret_cast<u32*>(memory + SHARED_AT_HAND)) {}
};

// Sums over the block's warps of what each of them wrote, once the block has met at a barrier. Up to 32 bits, in which
// several sums may share out their bits.
struct Totals {
    u32 up_to;  // this lane's: the sum of the warps up to the one of the lane's number

    __device__ __forceinline__ explicit Totals(const u32* of_warps) {
        const int lane = lane_id();
        up_to = lane < WARPS ? of_warps[lane] : 0;
#pragma unroll
        for (int distance = 1; distance < WARPS; distance *= 2) {
            const u32 other = __shfl_up_sync(ALL_LANES, up_to, distance);
            if (lane >= distance) up_to += other;
        }
    }

    __device__ __forceinline__ u32 all() const { return __shfl_sync(ALL_LANES, up_to, WARPS - 1); }
    __device__ __forceinline__ u32 before_warp(int warp) const {
        const u32 sum = __shfl_sync(ALL_LANES, up_to, (warp + WARPS - 1) % WARPS);
        return warp == 0 ? 0 : sum;
    }
};

// One request's part of the parameters.
struct Request {
    i64 newest;
    int k;
    i32* position_at;
    i16* hot_of;
    u8* referenced;
    i32* hand;
    const i64* granules;
    const i64* host_slot_of;
    i64* slots;
    i64* miss_host_slots;
    i64* miss_device_slots;

    __device__ __forceinline__ Request(const SwapInParams& p, i64 entry, i64 row, i64 newest_position)
        : newest(newest_position),
          k(static_cast<int>(p.k)),
          position_at(p.position_at + row * HOT_SIZE),
          hot_of(p.hot_of + row * p.max_context),
          referenced(p.referenced + row * HOT_SIZE),
          hand(p.hand + row),
          granules(p.hot_granules + row * GRANULES),
          host_slot_of(p.host_slot_of + row * p.max_context),
          slots(p.slots + entry * p.k),
          miss_host_slots(p.miss_host_slots + entry * p.k),
          miss_device_slots(p.miss_device_slots + entry * p.k) {}

    // What lies beyond the newest position cannot be looked up: it counts as none, and as a violation.
    __device__ __forceinline__ i32 checked(i64 position, u32& violations) const {
        const bool exists = static_cast<u64>(position) <= static_cast<u64>(newest);
        violations += !exists && position != NONE;
        return exists ? static_cast<i32>(position) : NONE;
    }
};
