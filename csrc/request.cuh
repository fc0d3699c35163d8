// What a swap-in is given, what one request has of it, and the shared memory that a block works in.
#pragma once

#include "clock.cuh"
#include "common.cuh"
#include "miss_table.cuh"

struct SwapInParams {
    const POSITION_T* positions;  // [batch, k], -1 for none
    const INDEX_T* rows;          // [batch], distinct, negative for padding
    const INDEX_T* newest;        // [batch], the newest position of each row
    i32* position_at;             // [rows, HOT_SIZE], of this index layer, like the next three
    i16* hot_of;                  // [rows, max_context]
    u8* referenced;               // [rows, HOT_SIZE]
    i32* hand;                    // [rows]
    const i64* hot_slots;         // [rows, HOT_SIZE + 1]
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

// What is known of a selected position: its hot index (HOT_SIZE for the newest), or one of these. A miss that was entered
// into the table at slot s is ENTERED - 2 s, one less if it is the first of its position.
constexpr i32 NONE = -1;
constexpr i32 MISSING = -2;
constexpr i32 ENTERED = -4;

__device__ __forceinline__ bool is_entered(i32 code) { return code <= ENTERED; }
__device__ __forceinline__ bool is_first(i32 code) { return code < ENTERED && (code & 1); }
__device__ __forceinline__ int slot_in_table(i32 code) { return (ENTERED - code) >> 1; }

// The selected positions are worked on in chunks of a warp's width, and a warp's chunks a few at a time, so that the loads
// of all of them are issued before the first is waited for.
constexpr int CHUNKS = ceil_div(TOP_K, WARP);
constexpr int CHUNKS_PER_WARP = ceil_div(CHUNKS, WARPS);
constexpr int AT_ONCE = CHUNKS_PER_WARP < 8 ? CHUNKS_PER_WARP : 8;

// A warp's words of the clock are consecutive, and so are a lane's. -1 if there are fewer.
__device__ __forceinline__ int word_of_lane(int j) {
    const int in_warp = lane_id() * WORDS_PER_LANE + j;
    const int word = warp_id() * WORDS_PER_WARP + in_warp;
    return in_warp < WORDS_PER_WARP && word < HOT_WORDS ? word : -1;
}

// Dynamic shared memory. The offsets are those of hisparse/cuda/specialization.py.
struct Shared {
    i32* position;    // [TOP_K], the selected positions
    i32* code;        // [TOP_K], what is known of each
    i32* table;       // [MissTable::SIZE]
    u32* protect;     // [HOT_WORDS], bits of this step's hits
    u32* referenced;  // [HOT_WORDS], reference bits before the step
    u32* renewed;     // [HOT_WORDS], and after it
    u64* totals;      // [WARPS], what each warp counted
    u32* at_hand;     // [1], Kinds below the hand among the words of its warp
    i32* new_hand;    // [1]
    u16* victims;     // [TOP_K], hot index that each miss takes
    u16* miss_place;  // [TOP_K], first place of each miss

    __device__ __forceinline__ explicit Shared(u8* memory)
        : position(reinterpret_cast<i32*>(memory + SHARED_POSITION)),
          code(reinterpret_cast<i32*>(memory + SHARED_CODE)),
          table(reinterpret_cast<i32*>(memory + SHARED_TABLE)),
          protect(reinterpret_cast<u32*>(memory + SHARED_PROTECT)),
          referenced(reinterpret_cast<u32*>(memory + SHARED_REFERENCED)),
          renewed(reinterpret_cast<u32*>(memory + SHARED_RENEWED)),
          totals(reinterpret_cast<u64*>(memory + SHARED_TOTALS)),
          at_hand(reinterpret_cast<u32*>(memory + SHARED_AT_HAND)),
          new_hand(reinterpret_cast<i32*>(memory + SHARED_NEW_HAND)),
          victims(reinterpret_cast<u16*>(memory + SHARED_VICTIMS)),
          miss_place(reinterpret_cast<u16*>(memory + SHARED_MISS_PLACE)) {}

    // Word number `j` of those that this lane works on, empty if it is none.
    __device__ __forceinline__ HotWord hot_word(int j) const {
        const int word = word_of_lane(j);
        return word < 0 ? HotWord() : HotWord(word, protect[word], referenced[word]);
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
    const i64* hot_slots;
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
          hot_slots(p.hot_slots + row * (HOT_SIZE + 1)),
          host_slot_of(p.host_slot_of + row * p.max_context),
          slots(p.slots + entry * p.k),
          miss_host_slots(p.miss_host_slots + entry * p.k),
          miss_device_slots(p.miss_device_slots + entry * p.k) {}

    // What lies beyond the newest position cannot be looked up: it counts as none, and as a violation.
    __device__ __forceinline__ i32 checked(i64 position) const {
        return position >= 0 && position <= newest ? static_cast<i32>(position) : -1;
    }
    __device__ __forceinline__ bool is_violation(i64 position) const { return position < -1 || position > newest; }
};
