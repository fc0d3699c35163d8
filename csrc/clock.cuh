// The clock of one request: which hot indices the misses of a step evict, as hisparse/residency.py defines it.
//
// Unprotected hot indices are of two kinds: *clear*, whose reference bit is 0, and *set*. In clock order from the hand,
// the clear ones are the victims of the first lap, the set ones those of the second. So the rank of a hot index as a
// victim is a prefix sum over its kind. Sums are taken in index order; those below the hand come last in clock order.
#pragma once

#include "hot_bits.cuh"

// Counts of clear and set hot indices. Both fit 16 bits, so one addition adds both.
struct Kinds {
    u32 packed;

    __device__ __forceinline__ explicit Kinds(u32 both = 0) : packed(both) {}
    __device__ __forceinline__ Kinds(u32 clear, u32 set) : packed(__popc(clear) | __popc(set) << 16) {}
    __device__ __forceinline__ Kinds operator+(Kinds other) const { return Kinds(packed + other.packed); }
    __device__ __forceinline__ Kinds operator-(Kinds other) const { return Kinds(packed - other.packed); }
    __device__ __forceinline__ int clear() const { return packed & 0xffff; }
    __device__ __forceinline__ int set() const { return packed >> 16; }
};

// Up to 32 consecutive hot indices.
struct HotPiece {
    int first;
    u32 clear;
    u32 set;
    u32 referenced;  // after the step's hits

    __device__ __forceinline__ HotPiece() {}
    __device__ __forceinline__ HotPiece(int first_hot, u32 referenced_before, u32 hits) : first(first_hot) {
        const u32 others = low_bits(min(PIECE, HOT_SIZE - first)) & ~hits;
        clear = others & ~referenced_before;
        set = others & referenced_before;
        referenced = referenced_before | hits;
    }

    __device__ __forceinline__ Kinds kinds() const { return Kinds(clear, set); }
    __device__ __forceinline__ Kinds kinds_below(int hot) const {
        const u32 below = low_bits(hot - first);
        return Kinds(clear & below, set & below);
    }
};

// The clock, the same in every thread, once the sums are taken. at_hand: the kinds below the hand.
struct Clock {
    int misses;
    int hand;
    Kinds total;
    Kinds at_hand;
    u16* victims;  // [misses], in order; the hand moves to just after the last one

    // Walk over a piece, and list its victims. before: the kinds below it. Returns its reference bits afterwards.
    __device__ __forceinline__ u32 pass(const HotPiece& piece, Kinds before) const {
        const int clear = before.clear() - at_hand.clear(), set = before.set() - at_hand.set();
        const bool all_below = piece.first + PIECE <= hand;
        if (all_below ? clear + total.clear() >= misses : piece.first >= hand && clear >= misses) return piece.referenced;
        const bool two_laps = misses > total.clear();
        u32 passed = 0;
#pragma unroll 8
        for (int bit = 0; bit < PIECE; ++bit) {
            const int hot = piece.first + bit;
            const bool is_below = hot < hand;
            const int clear_before = clear + __popc(piece.clear & low_bits(bit)) + (is_below ? total.clear() : 0);
            // The hand comes by in the first lap if there is a victim yet to come, or a second lap.
            const bool is_passed = clear_before < misses;
            if ((piece.clear >> bit & 1) && is_passed) victims[clear_before] = static_cast<u16>(hot);
            if ((piece.set >> bit & 1) && is_passed) passed |= 1u << bit;
            if (two_laps) {
                const int set_before = set + __popc(piece.set & low_bits(bit)) + (is_below ? total.set() : 0);
                const int rank = total.clear() + set_before;
                if ((piece.set >> bit & 1) && rank < misses) victims[rank] = static_cast<u16>(hot);
            }
        }
        return piece.referenced & ~passed;
    }
};
