// The clock of one request: which hot indices the misses of a step evict, as hisparse/residency.py defines it.
//
// Unprotected hot indices are of two kinds: *clear*, whose reference bit is 0, and *set*. In clock order from the hand,
// the clear ones are the victims of the first lap, the set ones those of the second. So the rank of a hot index as a
// victim is a prefix sum over its kind. Sums are taken in index order; those below the hand come last in clock order.
#pragma once

#include "common.cuh"

// Every thread has a run of hot indices. Their flags are bytes of 0 or 1 in memory, and bits of one or a few words
// ("pieces") in registers.
__host__ __device__ constexpr int power_of_two_from(int least) { return least <= 1 ? 1 : 2 * power_of_two_from((least + 1) / 2); }

constexpr int HOT_PER_THREAD = power_of_two_from(ceil_div(HOT_SIZE, THREADS));
constexpr int PIECE = HOT_PER_THREAD < WARP ? HOT_PER_THREAD : WARP;  // bits
constexpr int PIECES = HOT_PER_THREAD / PIECE;
constexpr int PIECE_WORDS = ceil_div(PIECE, 8);  // of eight bytes

__device__ __forceinline__ int first_of_piece(int j) { return threadIdx.x * HOT_PER_THREAD + j * PIECE; }

// The lowest `count` bits.
__device__ __forceinline__ u32 low_bits(int count) { return count <= 0 ? 0 : count >= WARP ? ALL_LANES : (1u << count) - 1; }

// Eight bytes of 0 or 1 to bits: byte i times the factor 2^(56 - 7 i) falls on bit 56 + i.
__device__ __forceinline__ u32 bits_of(u64 bytes) { return (bytes * 0x0102040810204080ull) >> 56; }

// And back: every byte gets all eight bits, keeps its own, and becomes 1 if that is set.
__device__ __forceinline__ u64 bytes_of(u32 bits) {
    const u64 own = (bits * 0x0101010101010101ull) & 0x8040201008040201ull;
    return ((own + 0x7f7f7f7f7f7f7f7full) >> 7) & 0x0101010101010101ull;
}

// This thread's part of an array of HOT_SIZE bytes, as it was when it was read.
class HotBytes {
    static constexpr bool IN_WORDS = PIECE % 8 == 0 && HOT_SIZE % 8 == 0;  // the array being aligned to that

    u64 words_[PIECES][PIECE_WORDS];

    static __device__ __forceinline__ int first_of_word(int j, int w) { return first_of_piece(j) + 8 * w; }
    static __device__ __forceinline__ int length(int j, int w) {
        return max(0, min(min(8, PIECE), HOT_SIZE - first_of_word(j, w)));
    }

  public:
    __device__ __forceinline__ explicit HotBytes(const u8* array) {
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
#pragma unroll
            for (int w = 0; w < PIECE_WORDS; ++w) {
                const u8* const from = array + first_of_word(j, w);
                words_[j][w] = 0;
                if (IN_WORDS) {
                    if (length(j, w)) words_[j][w] = *reinterpret_cast<const u64*>(from);
                } else {
                    for (int i = 0; i < length(j, w); ++i) words_[j][w] |= static_cast<u64>(from[i]) << 8 * i;
                }
            }
        }
    }

    __device__ __forceinline__ u32 piece(int j) const {
        u32 bits = 0;
#pragma unroll
        for (int w = 0; w < PIECE_WORDS; ++w) bits |= bits_of(words_[j][w]) << 8 * w;
        return bits;
    }

    // Write a piece's new bits to the array, where they differ.
    __device__ __forceinline__ void write(u8* array, int j, u32 bits) const {
#pragma unroll
        for (int w = 0; w < PIECE_WORDS; ++w) {
            u8* const to = array + first_of_word(j, w);
            const u64 bytes = bytes_of(bits >> 8 * w & 0xff);
            if (bytes == words_[j][w]) continue;
            if (IN_WORDS) {
                *reinterpret_cast<u64*>(to) = bytes;
            } else {
                for (int i = 0; i < length(j, w); ++i) to[i] = bytes >> 8 * i & 1;
            }
        }
    }
};

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
