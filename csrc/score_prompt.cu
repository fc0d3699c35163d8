// The lightning indexer's scores of a prompt's chunk: of queries at consecutive positions against the keys before them.
//
// A block keeps its keys in registers, 64 of them in each warpgroup, and multiplies them by one query after another. Queries
// come to shared memory QUERIES at a time, STAGES of these rounds being there or on their way.
#include "index_scores.cuh"

struct ScorePromptParams {
    const u32* keys;            // [num_keys, KEY_WORDS]
    const u8* queries;          // [num_queries, HEADS, DIM], fp8
    const float* head_weights;  // [num_queries, HEADS]
    float* scores;              // out [num_queries, num_keys]; what lies behind a query's position is not written
    i64 num_queries;
    i64 num_keys;
    i64 start;               // position of the first query; keys are those of positions from 0
    i64 queries_per_block;
};

constexpr int QUERY_BYTES = HEADS * DIM;
constexpr int WEIGHT_BYTES = 4 * HEADS;
constexpr int QUERY_CHUNKS = QUERY_BYTES / 16, WEIGHT_CHUNKS = WEIGHT_BYTES / 16;
static_assert(QUERIES * QUERY_CHUNKS % THREADS == 0 && THREADS * 16 % SWIZZLED_BYTES == 0, "threads copy whole rows");
static_assert(QUERIES * WEIGHT_CHUNKS <= THREADS, "a thread copies one chunk of weights");
static_assert(SWIZZLED_BYTES + STAGES * QUERIES * (QUERY_BYTES + WEIGHT_BYTES) <= FIXED_BYTES,
              "kernels/score_keys.py reserves less");

// The queries of a block on their way to shared memory, in rounds.
class Rounds {
    const ScorePromptParams& p_;
    u8* queries_;  // [STAGES, QUERIES, HEADS, DIM], as the tensor cores read them
    u8* weights_;  // [STAGES, QUERIES, HEADS]
    int begin_, end_;

  public:
    __device__ __forceinline__ Rounds(const ScorePromptParams& p, u8* memory, int begin, int end)
        : p_(p), begin_(begin), end_(end) {
        queries_ = memory + (-shared_address(memory) & (SWIZZLED_BYTES - 1));
        weights_ = queries_ + STAGES * QUERIES * QUERY_BYTES;
    }

    __device__ __forceinline__ const u8* query(int round, int number) const {
        return queries_ + (round % STAGES * QUERIES + number) * QUERY_BYTES;
    }
    __device__ __forceinline__ const float* weights(int round, int number) const {
        return reinterpret_cast<const float*>(weights_ + (round % STAGES * QUERIES + number) * WEIGHT_BYTES);
    }

    // One group of copies, which may be empty.
    __device__ __forceinline__ void fetch(int round) const {
        const int first = begin_ + round * QUERIES, count = min(QUERIES, end_ - first);
        u8* const queries = queries_ + round % STAGES * QUERIES * QUERY_BYTES;
        const u8* const from = p_.queries + static_cast<i64>(first) * QUERY_BYTES;
        // Rows of all queries one after the other: THREADS chunks are a multiple of 8 rows, after which the swizzle repeats.
        const int place = swizzled(threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
        for (int i = 0; i < QUERIES * QUERY_CHUNKS / THREADS; ++i) {
            const int chunk = i * THREADS + threadIdx.x;
            if (chunk < count * QUERY_CHUNKS) copy_async_bytes<16>(queries + i * THREADS * 16 + place, from + chunk * 16);
        }
        u8* const weights = weights_ + round % STAGES * QUERIES * WEIGHT_BYTES;
        const u8* const heads = reinterpret_cast<const u8*>(p_.head_weights + static_cast<i64>(first) * HEADS);
        const int chunk = threadIdx.x;
        if (chunk < count * WEIGHT_CHUNKS) copy_async_bytes<16>(weights + chunk * 16, heads + chunk * 16);
        end_copy_group();
    }
};

// A warp's 16 keys from `first` on, of which those before num_keys exist.
__device__ __forceinline__ Keys read_keys(const ScorePromptParams& p, int first) {
    const int last = static_cast<int>(p.num_keys) - 1, key = first + lane_id() / 4;
    const u32* const upper = p.keys + static_cast<i64>(min(key, last)) * KEY_WORDS + lane_id() % 4;
    const u32* const lower = p.keys + static_cast<i64>(min(key + 8, last)) * KEY_WORDS + lane_id() % 4;
    Keys keys;
    keys.scale = __uint_as_float(p.keys[static_cast<i64>(min(first + scored_key(), last)) * KEY_WORDS + DIM / 4]);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        keys.left[step][0] = upper[8 * step];
        keys.left[step][1] = lower[8 * step];
        keys.left[step][2] = upper[8 * step + 4];
        keys.left[step][3] = lower[8 * step + 4];
    }
    return keys;
}

// Grid: blocks of keys, blocks of queries.
extern "C" __global__ void __launch_bounds__(THREADS, 1) score_prompt(const __grid_constant__ ScorePromptParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const int per_block = static_cast<int>(p.queries_per_block), start = static_cast<int>(p.start);
    const int begin = blockIdx.y * per_block, end = min(begin + per_block, static_cast<int>(p.num_queries));
    const int first_key = blockIdx.x * GROUPS * TILE;
    follow();
    if (first_key >= start + end) return;  // behind all queries

    const Rounds rounds(p, memory, begin, end);
#pragma unroll 1
    for (int round = 0; round < STAGES - 1; ++round) rounds.fetch(round);
    const int first = first_key + warp_id() * PIECE;
    const Keys keys = read_keys(p, first);
    const int key = first + scored_key();
    const int seen_by = has_score() && key < p.num_keys ? key - start : end;  // the first query
    float* score_of_query = p.scores + begin * p.num_keys + key;

#pragma unroll 1
    for (int round = 0; begin + round * QUERIES < end; ++round) {
        wait_for_copy_groups<STAGES - 2>();
        publish_to_tensor_cores();
        __syncthreads();  // of all threads; and all have multiplied by the round before, whose place is filled next
        rounds.fetch(round + STAGES - 1);
        const int here = begin + round * QUERIES, count = min(QUERIES, end - here);
#pragma unroll 1
        for (int number = 0; number < count; ++number) {
            float sums[HEADS / 2], weights[HEADS / 4];
            keys.begin_products_with(rounds.query(round, number), sums);
            read_weights(rounds.weights(round, number), weights);
            wait_for_products(sums);
            const float score = keys.score(sums, weights);
            if (here + number >= seen_by) *score_of_query = score;
            score_of_query += p.num_keys;
        }
    }
}
