// The clock of one request: which hot indices the misses of a step evict, as hisparse/residency.py defines it.
//
// Unprotected hot indices are of two kinds: *clear*, whose reference bit is 0, and *set*. In clock order from the hand,
// the clear ones are the victims of the first lap, the set ones those of the second. So the rank of a hot index as a
// victim is a prefix sum over its kind. Sums are taken in index order; those below the hand come last in clock order.
//
// Hot indices are bits of words. A lane works on a word or a few, so that counting them takes a few instructions; where
// there are victims, the whole warp lists them, a lane per bit.
#pragma once

#include "common.cuh"

constexpr int HOT_WORDS = ceil_div(HOT_SIZE, WARP);
constexpr int WORDS_PER_WARP = ceil_div(HOT_WORDS, WARPS);
constexpr int WORDS_PER_LANE = ceil_div(WORDS_PER_WARP, WARP);

// Counts of clear and set hot indices. Both fit 16 bits, so one addition adds both.
struct Kinds {
    u32 packed;

    __device__ __forceinline__ Kinds() : packed(0) {}
    __device__ __forceinline__ explicit Kinds(u32 both) : packed(both) {}
    __device__ __forceinline__ Kinds(u32 clear, u32 set) : packed(__popc(clear) | __popc(set) << 16) {}
    __device__ __forceinline__ Kinds operator+(Kinds other) const { return Kinds(packed + other.packed); }
    __device__ __forceinline__ Kinds operator-(Kinds other) const { return Kinds(packed - other.packed); }
    __device__ __forceinline__ int clear() const { return packed & 0xffff; }
    __device__ __forceinline__ int set() const { return packed >> 16; }
};

// 32 hot indices, as bits.
struct HotWord {
    u32 clear = 0;
    u32 set = 0;
    u32 referenced = 0;  // after the step's hits

    __device__ __forceinline__ HotWord() {}
    __device__ __forceinline__ HotWord(int word, u32 protect, u32 referenced_before) {
        const int left = HOT_SIZE - word * WARP;
        const u32 unprotected = (left >= WARP ? ALL_LANES : (1u << left) - 1) & ~protect;
        clear = unprotected & ~referenced_before;
        set = unprotected & referenced_before;
        referenced = referenced_before | protect;
    }

    // Of these bits.
    __device__ __forceinline__ Kinds kinds(u32 bits) const { return Kinds(clear & bits, set & bits); }
};

// The hot indices of a word that are below the hand.
__device__ __forceinline__ u32 below_hand(int word, int hand) {
    const int below = hand - word * WARP;
    return below <= 0 ? 0 : below >= WARP ? ALL_LANES : (1u << below) - 1;
}

// What every thread knows of the clock once the sums are taken. at_hand: the kinds below the hand.
struct Clock {
    int misses;
    int hand;
    Kinds total;
    Kinds at_hand;
    u16* victims;  // [misses], in order
    i32* new_hand;

    // Each lane has bits of a word, of which the first `count` become victims number `rank` and on. Returns those bits.
    __device__ __forceinline__ u32 evict(int word, u32 bits, int count, int rank) const {
        u32 evicted = 0;
        for (u32 left = __ballot_sync(ALL_LANES, count > 0); left; left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const u32 candidates = __shfl_sync(ALL_LANES, bits, owner);
            const int wanted = __shfl_sync(ALL_LANES, count, owner);
            const int hot = __shfl_sync(ALL_LANES, word, owner) * WARP + lane_id();
            const int number = __popc(candidates & lanes_below());
            const int at = __shfl_sync(ALL_LANES, rank, owner) + number;
            const bool victim = (candidates >> lane_id() & 1) && number < wanted;
            if (victim) victims[at] = static_cast<u16>(hot);
            if (victim && at == misses - 1) *new_hand = hot + 1 == HOT_SIZE ? 0 : hot + 1;
            const u32 all = __ballot_sync(ALL_LANES, victim);
            if (lane_id() == owner) evicted = all;
        }
        return evicted;
    }

    // Walk over the part of each lane's word that is on one side of the hand. before: the kinds before it in clock order.
    // Returns the reference bits that it has afterwards.
    __device__ __forceinline__ u32 pass(int word, HotWord bits, u32 part, Kinds before) const {
        const u32 clear = bits.clear & part, set = bits.set & part;
        const int first_lap = min(max(misses - before.clear(), 0), __popc(clear));
        const u32 taken = evict(word, clear, first_lap, before.clear());
        if (misses > total.clear()) {
            const int rank = total.clear() + before.set();
            const int second_lap = min(max(misses - rank, 0), __popc(set));
            evict(word, set, second_lap, rank);
            return bits.referenced & part & ~set;
        }
        // The hand stops behind the last victim: if that is in this part, what is above it is not passed.
        u32 passed = 0;
        if (before.clear() + __popc(clear) < misses) {
            passed = set;
        } else if (first_lap > 0) {
            passed = set & (0x7fffffffu >> __clz(taken));
        }
        return bits.referenced & part & ~passed;
    }

    // Walk over each lane's word. before: the kinds in words before it. Returns its reference bits afterwards.
    __device__ __forceinline__ u32 pass(int word, HotWord bits, Kinds before) const {
        const u32 below = below_hand(word, hand);
        u32 referenced = 0;
        if (__ballot_sync(ALL_LANES, word >= 0 && below != 0)) {
            referenced = pass(word, bits, below, before + total - at_hand);
        }
        if (__ballot_sync(ALL_LANES, word >= 0 && below != ALL_LANES)) {
            referenced |= pass(word, bits, ~below, before + bits.kinds(below) - at_hand);
        }
        return referenced;
    }
};
