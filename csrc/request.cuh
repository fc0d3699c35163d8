// The parameters of a swap-in, one request's part of them, and the layout of a block's shared memory.
#pragma once

#include "clock.cuh"
#include "common.cuh"

// The kernel that is launched directly before may write positions, first and valid, but not rows, newest and identity.
struct SwapInParams {
    const i64* positions;         // [batch, QUERIES, k], -1 for none
    const i64* rows;              // [batch], distinct, negative for padding
    const i64* newest;            // [batch], the newest position of each row
    const i64* identity;          // [batch], the row has each position at its own hot index while newest + WINDOW is not larger
    const i64* first;             // [batch], the position of query 0; not read if WINDOW is 1, like the next
    i64* valid;                   // [batch], how many queries there are; written where some are cut
    i32* position_at;             // [rows, HOT_SIZE], of this index layer, like the next three
    i16* hot_of;                  // [rows, max_context]
    u8* referenced;               // [rows, HOT_SIZE]
    i32* hand;                    // [rows]
    const i64* hot_granules;      // [rows, row_granules], first slots
    const i64* host_slot_of;      // [rows, max_context]
    const u8* host_items;         // of the group's first layer, [host slots, ITEM_BYTES]
    u8* device_items;             // of the same layer, [device slots, ITEM_BYTES]
    i64* slots;                   // out [batch, QUERIES, k], -1 for none
    i64* miss_host_slots;         // out [batch, QUERIES * k], of which the first miss_counts are written
    i64* miss_device_slots;       // out, the same
    i32* miss_counts;             // out [batch]
    u64* counters;                // [4], added to
    i64 max_context;
    i64 row_granules;  // at least GRANULES
    i64 host_layer_bytes;    // from one layer's items to the next
    i64 device_layer_bytes;
    i64 fetched_layers;  // of the group, from its first; 0: only resolve
    i64 k;  // at most TOP_K
};

enum Counter { HITS, MISSES, BYTES, VIOLATIONS };

__device__ __forceinline__ void add(u64* counters, Counter which, u64 amount) {
    if (amount) atomicAdd(&counters[which], amount);
}

constexpr i32 NONE = -1;
constexpr int BUCKETS = 1 << BUCKET_BITS;
constexpr int SEEN = 1 << SEEN_BITS;
constexpr int GRANULES = ceil_div(HOT_SIZE + WINDOW, HOT_GRANULE);
constexpr int MOST_SELECTED = QUERIES * TOP_K;
constexpr bool MAY_CUT = MOST_SELECTED > HOT_SIZE && QUERIES > 1;

// The hot index after one, round the clock.
__device__ __forceinline__ i32 after(i32 hot) { return hot + 1 == HOT_SIZE ? 0 : hot + 1; }

// The slot of a hot index in its granule, which begins at slot `first`; -1 if that is negative.
__device__ __forceinline__ i64 slot_in(i64 first, u32 hot) { return first < 0 ? -1 : first + hot % HOT_GRANULE; }

__device__ __forceinline__ i64 slot_at(const i64* granules, u32 hot) { return slot_in(granules[hot / HOT_GRANULE], hot); }

// Places are those of the queries' selections, one after the other, each in top-k order. Each warp has PLACES chunks of WARP
// consecutive ones, and each of its threads one place per chunk.
constexpr int PLACES = ceil_div(MOST_SELECTED, THREADS);

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

// Dynamic shared memory, at the offsets of kernels/swap_in.py. Some arrays lie over others: they are written
// only when those have been read.
struct Shared {
    u8* memory;
    u64* selected = at<u64>(SHARED_SELECTED);        // [MOST_SELECTED], Selected
    u64* arrived = at<u64>(SHARED_ARRIVED);          // [1], of `selected`
    i64* host_slot = at<i64>(SHARED_SELECTED);       // [MOST_SELECTED], of this block's distinct misses; over `selected`
    i32* position_at = at<i32>(SHARED_POSITION_AT);  // [HOT_SIZE]
    i32* miss_position = position_at;  // [MOST_SELECTED], misses by place; over `position_at`, like the next two
    u16* victims = at<u16>(SHARED_POSITION_AT + 4 * MOST_SELECTED);  // [MOST_SELECTED], each distinct miss's hot index
    u16* rank = victims + MOST_SELECTED;  // [MOST_SELECTED], of each miss among the distinct ones, if there are repeats
    i64* granules = at<i64>(SHARED_GRANULES);        // [GRANULES]
    u32* seen = at<u32>(SHARED_SEEN);                // [SEEN] bits, of positions that are missing
    i32* buckets = at<i32>(SHARED_SEEN);             // [BUCKETS]; over `seen`
    u8* protect = at<u8>(SHARED_PROTECT);            // [HOT_SIZE], 1 for this step's hits
    u32* totals = at<u32>(SHARED_TOTALS);            // [WARPS], what each warp counted
    u32* kinds = at<u32>(SHARED_KINDS);              // [WARPS], and the Kinds of its hot indices
    u32* at_hand = at<u32>(SHARED_AT_HAND);          // [1], Kinds below the hand among the hot indices of its warp

    __device__ __forceinline__ explicit Shared(u8* dynamic) : memory(dynamic) {}

    template <typename T>
    __device__ __forceinline__ T* at(int offset) const {
        return reinterpret_cast<T*>(memory + offset);
    }
};

// One request's part of the parameters.
struct Request {
    i64 newest;
    i64 first;
    int valid;
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

    __device__ __forceinline__ Request(const SwapInParams& p, i64 entry, i64 row, i64 newest)
        : newest(newest),
          first(WINDOW > 1 ? p.first[entry] : newest),
          valid(WINDOW > 1 ? max(0, min(QUERIES, static_cast<int>(p.valid[entry]))) : 1),
          k(static_cast<int>(p.k)),
          position_at(p.position_at + row * HOT_SIZE),
          hot_of(p.hot_of + row * p.max_context),
          referenced(p.referenced + row * HOT_SIZE),
          hand(p.hand + row),
          granules(p.hot_granules + row * p.row_granules),
          host_slot_of(p.host_slot_of + row * p.max_context),
          slots(p.slots + entry * QUERIES * p.k),
          miss_host_slots(p.miss_host_slots + entry * QUERIES * p.k),
          miss_device_slots(p.miss_device_slots + entry * QUERIES * p.k) {}

    // How many places all queries have, and those that exist.
    __device__ __forceinline__ int places() const { return QUERIES * k; }
    __device__ __forceinline__ int valid_places() const { return valid * k; }

    __device__ __forceinline__ int query_of(int place) const {
        int query = 0;
#pragma unroll
        for (int i = 1; i < QUERIES; ++i) query += place >= i * k;
        return query;
    }

    // The hot index of an own token in a long row.
    __device__ __forceinline__ i32 own_hot(i32 position) const {
        return WINDOW > 1 ? HOT_SIZE + position - static_cast<i32>(newest) : HOT_SIZE;
    }

    // What lies beyond the position of its query cannot be looked up: it counts as none, and as a violation.
    __device__ __forceinline__ i32 checked(int place, i64 position, u32& violations) const {
        if (WINDOW > 1 && place >= valid_places()) return NONE;
        const i64 last = WINDOW > 1 ? min(first + query_of(place), newest + WINDOW - 1) : newest;
        const bool exists = static_cast<u64>(position) <= static_cast<u64>(last);
        violations += !exists && position != NONE;
        return exists ? static_cast<i32>(position) : NONE;
    }
};
