// Every thread has a run of hot indices. Their flags are bytes of 0 or 1 in memory, and bits of one or a few words
// ("pieces") in registers.
#pragma once

#include "common.cuh"

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
