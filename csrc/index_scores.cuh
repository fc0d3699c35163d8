// The lightning indexer's score of a key for a query: the sum over heads of weight * relu(query . key), times the key's
// scale and DIM^-0.5. Keys are fp8 vectors of 128, each with its float32 scale behind it.
//
// A warpgroup multiplies 64 keys, the rows, by the heads of one query, the columns.
#pragma once
#include "warpgroup.cuh"

constexpr int KEY_WORDS = KEY_BYTES / 4;
constexpr int GROUPS = THREADS / WARPGROUP;
constexpr int STEPS = DIM / STEP_BYTES;
constexpr float HALF_SCALE = 0.044194173824159225f;  // DIM^-0.5 / 2

// Which of the warp's 16 keys the lane has the score of in the end, and whether it is the one to write it.
__device__ __forceinline__ int scored_key() { return lane_id() / 4 + lane_id() % 2 * 8; }
__device__ __forceinline__ bool has_score() { return lane_id() % 4 < 2; }

// Twice relu(x). Processors add at twice the rate at which they compare.
__device__ __forceinline__ float twice_relu(float x) { return x + fabsf(x); }

// A lane's share of the weights of a query's heads, 8i + 2 * (lane % 4) and the next for each i.
__device__ __forceinline__ void read_weights(const float* heads, float (&weights)[HEADS / 4]) {
    const u64* const pairs = reinterpret_cast<const u64*>(heads) + lane_id() % 4;
#pragma unroll
    for (int i = 0; i < HEADS / 8; ++i) {
        const u64 pair = pairs[4 * i];
        weights[2 * i] = __uint_as_float(static_cast<u32>(pair));
        weights[2 * i + 1] = __uint_as_float(static_cast<u32>(pair >> 32));
    }
}

// A lane's part of its warp's keys.
struct Keys {
    u32 left[STEPS][4];  // as `multiply` takes them
    float scale;         // of the scored key

    // Of queries [HEADS, DIM] in shared memory.
    __device__ __forceinline__ void begin_products_with(const u8* queries, float (&sums)[HEADS / 2]) const {
        begin_products();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) multiply(sums, left[step], queries, step);
        commit_products();
    }

    // Of the scored key. weights: as `read_weights` reads them.
    __device__ __forceinline__ float score(const float (&sums)[HEADS / 2], const float (&weights)[HEADS / 4]) const {
        float even[2] = {0, 0}, odd[2] = {0, 0};  // of two keys
#pragma unroll
        for (int i = 0; i < HEADS / 8; ++i) {
#pragma unroll
            for (int key = 0; key < 2; ++key) {
                even[key] = fmaf(twice_relu(sums[4 * i + 2 * key]), weights[2 * i], even[key]);
                odd[key] = fmaf(twice_relu(sums[4 * i + 2 * key + 1]), weights[2 * i + 1], odd[key]);
            }
        }
        const float upper = even[0] + odd[0], lower = even[1] + odd[1];
        const bool is_odd = lane_id() % 2;
        float sum = is_odd ? lower : upper;
        sum += __shfl_xor_sync(ALL_LANES, is_odd ? upper : lower, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        return sum * (HALF_SCALE * scale);
    }
};
