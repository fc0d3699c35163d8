// The lightning indexer's scores of a decode step: the sum over heads of weight * relu(query . key), times the key's scale.
//
// Keys are fp8 vectors of 128, each with its float32 scale behind it, in pages. All sequences' tiles of 64 keys are shared
// out evenly over the blocks, one run of tiles each, by their lengths. A warpgroup multiplies a tile by the heads of each of
// the sequence's QUERIES queries: the newest token, and its drafts. Each of its warps fetches 16 of the 64 keys for itself,
// once for all queries, so that warps wait for nobody but the copy engine. The keys go to
// the tensor cores through registers: 132 bytes from key to key are none of the layouts of shared memory that
// they read, but a warp's lanes can read them from different banks if lane 4i + c takes elements 32c to 32c + 31 of key i.
// So the elements of keys, and with them those of the queries, are multiplied in an order of their own.
#include "index_scores.cuh"

struct ScorePagesParams {
    const u8* keys;             // [pages, page_size, KEY_BYTES]
    const u32* queries;         // [batch, QUERIES, HEADS, DIM / 4], fp8
    const float* head_weights;  // [batch, QUERIES, HEADS]
    const i64* page_table;      // [batch, QUERIES, ...], of which each sequence's first row is read
    const i64* lengths;         // [batch, QUERIES]
    float* scores;              // out [batch, QUERIES, width]; what lies behind a sequence's longest length is not written
    i64 page_stride;            // bytes from page to page, a multiple of 16
    i64 page_size;              // a multiple of PIECE
    i64 table_stride;           // from one row of the page table to the next
    i64 width;                  // the longest length, at most
    i64 batch;  // sequences
};

constexpr int PIECE_WORDS = PIECE * KEY_WORDS;
constexpr int QUERY_BYTES = HEADS * DIM;
constexpr int CHUNKS = QUERIES * QUERY_BYTES / 16;
constexpr int CHUNKS_PER_THREAD = ceil_div(CHUNKS, THREADS);
constexpr int WEIGHTS = QUERIES * HEADS;
static_assert(WEIGHTS <= THREADS, "a thread copies one weight");
static_assert(QUERY_BYTES % SWIZZLED_BYTES == 0, "the swizzle begins anew with each query");
static_assert(SWIZZLED_BYTES + QUERIES * QUERY_BYTES + 4 * WEIGHTS + WARPS * STAGES * (4 * PIECE_WORDS + 8) + 4 * WARPS <= FIXED_BYTES,
              "kernels/score_keys.py reserves less");

struct Shared {
    u8* queries;      // [QUERIES, HEADS, DIM], as the tensor cores read them
    float* weights;   // [QUERIES, HEADS], used if QUERIES > 1
    u32* pieces;      // [WARPS, STAGES, PIECE_WORDS]
    u64* arrived;     // [WARPS, STAGES]
    u32* totals;      // [WARPS]
    int* first_tile;  // [batch + 1], of each sequence among those of all
    int* lengths;     // [batch], of each sequence the longest

    __device__ __forceinline__ Shared(u8* memory, int batch) {
        queries = memory + (-shared_address(memory) & (SWIZZLED_BYTES - 1));
        weights = reinterpret_cast<float*>(queries + QUERIES * QUERY_BYTES);
        pieces = reinterpret_cast<u32*>(weights + WEIGHTS);
        arrived = reinterpret_cast<u64*>(pieces + WARPS * STAGES * PIECE_WORDS);
        totals = reinterpret_cast<u32*>(arrived + WARPS * STAGES);
        first_tile = reinterpret_cast<int*>(totals + WARPS);
        lengths = first_tile + batch + 1;
    }

    // The sequence that a tile belongs to.
    __device__ __forceinline__ int sequence_of(int tile, int batch) const {
        int sequence = 0;
        for (int count = batch; count > 1;) {
            const int half = count / 2;
            if (first_tile[sequence + half] <= tile) sequence += half;
            count -= half;
        }
        return sequence;
    }
};

// Count the tiles of all sequences; every block does it for itself.
__device__ __forceinline__ void count_tiles(const ScorePagesParams& p, const Shared& shared) {
    const int batch = static_cast<int>(p.batch), each = ceil_div(batch, THREADS);
    const int begin = min(static_cast<int>(threadIdx.x) * each, batch), end = min(begin + each, batch);
    u32 mine = 0;
    for (int sequence = begin; sequence < end; ++sequence) {
        i64 longest = 0;
        for (int query = 0; query < QUERIES; ++query) longest = max(longest, p.lengths[sequence * QUERIES + query]);
        const int length = static_cast<int>(min(longest, p.width));
        shared.lengths[sequence] = length;
        shared.first_tile[sequence] = mine;
        mine += ceil_div(length, TILE);
    }
    const u32 up_to = sum_up_to_lane(mine);
    if (lane_id() == WARP - 1) shared.totals[warp_id()] = up_to;
    __syncthreads();
    const Totals warps(shared.totals);
    const u32 before = up_to - mine + warps.before_warp(warp_id()), all = warps.all();
    for (int sequence = begin; sequence < end; ++sequence) shared.first_tile[sequence] += before;
    if (threadIdx.x == 0) shared.first_tile[batch] = all;
    __syncthreads();
}

// A warp's keys of one tile after another, STAGES of them on their way or waiting in shared memory.
class Pieces {
    const ScorePagesParams& p_;
    const Shared& shared_;
    int begin_, end_;  // tiles of the block
    u32* stages_;
    u64* arrived_;
    const u8* from_;      // lane i: the keys of piece number 32n + i, null if there are none
    const u8* upcoming_;  // of the 32 pieces behind these

    __device__ __forceinline__ const u8* look_up(int number) const {
        const int tile = tile_of(number);
        if (tile >= end_) return nullptr;
        const int sequence = shared_.sequence_of(tile, static_cast<int>(p_.batch));
        const int position = (tile - shared_.first_tile[sequence]) * TILE + warp_id() % 4 * PIECE;
        if (position >= shared_.lengths[sequence]) return nullptr;
        const int page_size = static_cast<int>(p_.page_size), page = position / page_size;
        const i64 stored = p_.page_table[sequence * QUERIES * p_.table_stride + page];
        return p_.keys + stored * p_.page_stride + (position - page * page_size) * KEY_BYTES;
    }

  public:
    __device__ __forceinline__ Pieces(const ScorePagesParams& p, const Shared& shared, int begin, int end)
        : p_(p), shared_(shared), begin_(begin), end_(end) {
        stages_ = shared.pieces + warp_id() * STAGES * PIECE_WORDS;
        arrived_ = shared.arrived + warp_id() * STAGES;
        from_ = nullptr;
        upcoming_ = look_up(lane_id());
    }

    // The tile of the warpgroup's piece number `number`.
    __device__ __forceinline__ int tile_of(int number) const { return begin_ + warp_id() / 4 + number * GROUPS; }

    __device__ __forceinline__ const u32* stage(int number) const { return stages_ + number % STAGES * PIECE_WORDS; }

    // Fetch a piece; the one that was in its place has been read. Pieces are fetched in order.
    __device__ __forceinline__ void fetch(int number) {
        if (tile_of(number) >= end_) return;
        if (number % WARP == 0) {
            from_ = upcoming_;
            upcoming_ = look_up(number + WARP + lane_id());
        }
        const u64 from = __shfl_sync(ALL_LANES, reinterpret_cast<u64>(from_), number % WARP);
        if (lane_id() != 0) return;
        const Gate gate(arrived_ + number % STAGES);
        if (from) {
            gate.arrive_with_copy(stages_ + number % STAGES * PIECE_WORDS, reinterpret_cast<const u8*>(from), 4 * PIECE_WORDS);
        } else {
            gate.arrive();
        }
    }

    __device__ __forceinline__ void wait_for(int number) const {
        Gate(arrived_ + number % STAGES).wait(number / STAGES);
    }
};

// One sequence's queries on their way to shared memory. Weights of one query stay in registers, which those of several would
// fill.
struct Queries {
    u32 words[CHUNKS_PER_THREAD][4];
    float weights[HEADS / 4];  // a lane's share of a query's
    float weight;              // thread i: number i of [QUERIES, HEADS]

    __device__ __forceinline__ void load(const ScorePagesParams& p, int sequence) {
        const u32* const from = p.queries + static_cast<i64>(sequence) * QUERIES * (QUERY_BYTES / 4);
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_THREAD; ++i) {
            const int chunk = i * THREADS + threadIdx.x;
            if (chunk >= CHUNKS) break;
#pragma unroll
            for (int part = 0; part < 4; ++part) words[i][part] = from[chunk / 8 * (DIM / 4) + part * 8 + chunk % 8];
        }
        const float* const heads = p.head_weights + static_cast<i64>(sequence) * WEIGHTS;
        if constexpr (QUERIES == 1) {
            read_weights(heads, weights);
        } else if (threadIdx.x < WEIGHTS) {
            weight = heads[threadIdx.x];
        }
    }

    // Of all threads, between two barriers of the block.
    __device__ __forceinline__ void store(const Shared& shared) const {
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_THREAD; ++i) {
            const int chunk = i * THREADS + threadIdx.x;
            if (chunk >= CHUNKS) break;
            *reinterpret_cast<uint4*>(shared.queries + swizzled(chunk / 8, chunk % 8)) =
                make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
        }
        if (QUERIES > 1 && threadIdx.x < WEIGHTS) shared.weights[threadIdx.x] = weight;
        publish_to_tensor_cores();
    }
};

// Step s takes elements 8s to 8s + 7 of each lane's 32.
__device__ __forceinline__ Keys read_piece(const u32* piece) {
    const u32* const words = piece + lane_id() / 4 * KEY_WORDS + lane_id() % 4 * 8;
    Keys keys;
    keys.scale = __uint_as_float(piece[scored_key() * KEY_WORDS + DIM / 4]);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        keys.left[step][0] = words[2 * step];
        keys.left[step][1] = words[8 * KEY_WORDS + 2 * step];
        keys.left[step][2] = words[2 * step + 1];
        keys.left[step][3] = words[8 * KEY_WORDS + 2 * step + 1];
    }
    return keys;
}

// Grid: blocks, at most one for each processor.
extern "C" __global__ void __launch_bounds__(THREADS, 1) score_pages(const __grid_constant__ ScorePagesParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const int batch = static_cast<int>(p.batch);
    const Shared shared(memory, batch);
    if (lane_id() == 0) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) Gate(shared.arrived + warp_id() * STAGES + stage).make(1);
        publish_gates();
    }
    // While the kernel before still runs: neither lengths nor page table are its work.
    count_tiles(p, shared);
    const i64 all = shared.first_tile[batch];
    const int begin = static_cast<int>(all * blockIdx.x / gridDim.x), end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
    Pieces pieces(p, shared, begin, end);
    follow();
    if (begin == end) return;
    int sequence = shared.sequence_of(begin, batch);
    Queries queries;
    queries.load(p, sequence);
#pragma unroll 1
    for (int number = 0; number < STAGES; ++number) pieces.fetch(number);

    int number = 0;
    for (;;) {
        const int first = shared.first_tile[sequence], stop = min(end, shared.first_tile[sequence + 1]);
        queries.store(shared);
        __syncthreads();
        float* const scores = p.scores + sequence * QUERIES * p.width;
        const int length = shared.lengths[sequence];
#pragma unroll 1
        for (int tile; (tile = pieces.tile_of(number)) < stop; ++number) {
            pieces.wait_for(number);
            const Keys keys = read_piece(pieces.stage(number));
            const int position = (tile - first) * TILE + warp_id() % 4 * PIECE + scored_key();
#pragma unroll 1
            for (int query = 0; query < QUERIES; ++query) {
                float sums[HEADS / 2];
                keys.begin_products_with(shared.queries + query * QUERY_BYTES, sums);
                if (QUERIES > 1) read_weights(shared.weights + query * HEADS, queries.weights);
                if (query == 0) {
                    // The products have taken what this warp read of the piece.
                    __syncwarp();
                    pieces.fetch(number + STAGES);
                }
                wait_for_products(sums);
                const float score = keys.score(sums, queries.weights);
                if (has_score() && position < length) scores[query * p.width + position] = score;
            }
        }
        if (stop == end) break;
        sequence = shared.sequence_of(stop, batch);
        queries.load(p, sequence);
        __syncthreads();  // all warps have multiplied by the queries before
    }
}
