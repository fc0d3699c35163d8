// What a block of attend_items.cu computes, its shared memory, and the warpgroup of it that reads items, in either format.
#pragma once
#include "item_tiles.cuh"

struct AttendItemsParams {
    const u8* queries;     // [num_queries, heads, LATENT + ROPE], bfloat16
    const u8* items;       // [num_items, ITEM_BYTES]
    const i64* rows;       // [num_queries, k], -1: none
    u8* partial;           // out [num_queries, heads, splits, LATENT], the mean by the split's own weights
    float* log_sums;       // out [num_queries, heads, splits], base 2
    i64 partial_bytes;     // of an element: 2 (bfloat16) or 4 (float32)
    i64 heads;
    i64 k;
    i64 rows_per_split;    // a multiple of TILE_ITEMS
    i64 scale;             // the bits of a float32: of scores, in units of log2(e)
};

constexpr int MULTIPLYING = 2;  // warpgroups
constexpr int WARPS_OF_GROUP = WARPGROUP / WARP;
constexpr int PLACES = 2;
constexpr int MULTIPLYING_REGISTERS = 192, READING_REGISTERS = 120;
constexpr int QUERY_BYTES = 2 * (LATENT + ROPE);
constexpr bool COPIES = ITEM_BYTES == QUERY_BYTES;  // items are bfloat16 as queries are
constexpr int READERS = WARPS_OF_GROUP + (COPIES ? WARPGROUP : 0);  // arrivals that make a tile ready: of warps, and of copies
constexpr int PARTS = COPIES ? 2 : 1;  // of a tile's items: weights of one are computed while the one before is added up
static_assert(THREADS == (MULTIPLYING + 1) * WARPGROUP, "a warpgroup that reads items, and those that multiply");

// Below every score and yet finite: NEVER less this is still NEVER rather than NaN.
constexpr float LOWEST = -1e30f;
// A score may be so much higher, in base 2, than what weights are relative to. Only then all that was added up is scaled down
// (lazy rescaling, as in FlashAttention-4).
constexpr float HEADROOM = 8;

struct Shared {
    u8 queries[TILE_BYTES];
    u8 tiles[PLACES][TILE_BYTES];
    u32 biases[PLACES][TILE_ITEMS];
    float references[PLACES][TILE_HEADS];  // what weights of a tile are relative to
    float totals[MULTIPLYING][TILE_HEADS];
    u64 ready[PLACES], weighed[PLACES][PARTS], free[PLACES], asked;
};
static_assert(sizeof(Shared) + SWIZZLED_BYTES <= FIXED_BYTES, "kernels/attend_items.py reserves less");

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

__device__ __forceinline__ float log_2(float x) {
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
}

// Over the 4 lanes that share rows of sums.
__device__ __forceinline__ float highest_of_lanes(float mine) {
    mine = fmaxf(mine, __shfl_xor_sync(ALL_LANES, mine, 1));
    return fmaxf(mine, __shfl_xor_sync(ALL_LANES, mine, 2));
}
__device__ __forceinline__ float sum_of_lanes(float mine) {
    mine += __shfl_xor_sync(ALL_LANES, mine, 1);
    return mine + __shfl_xor_sync(ALL_LANES, mine, 2);
}

// What a block computes: a query's tile of heads, by a range of its rows.
struct Part {
    i64 query;
    int first_head, begin, end;

    __device__ __forceinline__ explicit Part(const AttendItemsParams& p) {
        const int tiles_of_heads = ceil_div(static_cast<int>(p.heads), TILE_HEADS);
        query = blockIdx.x / tiles_of_heads;
        first_head = blockIdx.x % tiles_of_heads * TILE_HEADS;
        begin = blockIdx.y * static_cast<int>(p.rows_per_split);
        end = min(begin + static_cast<int>(p.rows_per_split), static_cast<int>(p.k));
    }

    __device__ __forceinline__ int tiles() const { return ceil_div(end - begin, TILE_ITEMS); }
};

// The warpgroup that reads items. A tile's second half is asked for while the first is converted, and the first half of the next
// tile as soon as there are registers for it.
//
// The compiler has one counter (scoreboard) for all loads on their way from one turn of a loop to the next, and to wait for one
// of them is to wait for all. So the second half is asked for in the turn that converts it, and the first well before the turn
// ends.
class Converter {
    const AttendItemsParams& p_;
    Shared& shared_;
    const Part& part_;
    const int item_;              // of half a tile
    int first_row_, second_row_;  // that are read next
    ItemPart first_, second_;

    __device__ __forceinline__ int row_of(int tile, int half) const {
        const int at = part_.begin + tile * TILE_ITEMS + half * HALF_ITEMS + item_;
        return at < part_.end ? static_cast<int>(p_.rows[part_.query * p_.k + at]) : -1;
    }
    // Reads that stand before it are issued before: the compiler would move them to where registers are free.
    __device__ __forceinline__ static void keep_order() { __syncwarp(); }

  public:
    __device__ __forceinline__ Converter(const AttendItemsParams& p, Shared& shared, const Part& part)
        : p_(p), shared_(shared), part_(part), item_(threadIdx.x % WARPGROUP / LANES_OF_ITEM) {
        const int row = row_of(0, 0);
        first_row_ = row_of(1, 0);
        second_row_ = row_of(0, 1);
        first_.read_first_half(p.items, row);
        first_.read_second_half(p.items, row);
    }

    __device__ __forceinline__ void convert() {
        const int tiles = part_.tiles();
#pragma unroll 1
        for (int number = 0; number < tiles; ++number) {
            const int place = number % PLACES;
            const Tile tile = {shared_.tiles[place], shared_.biases[place]};
            Gate(&shared_.free[place]).wait(number / PLACES + 1);
            second_.read_first_half(p_.items, second_row_);
            second_.read_second_half(p_.items, second_row_);
            keep_order();
            first_.write_first_half(tile, item_);
            first_.read_first_half(p_.items, first_row_);
            keep_order();
            first_.write_second_half(tile, item_);
            first_.read_second_half(p_.items, first_row_);
            first_row_ = row_of(number + 2, 0);
            second_row_ = row_of(number + 1, 1);
            keep_order();
            second_.write_first_half(tile, HALF_ITEMS + item_);
            second_.write_second_half(tile, HALF_ITEMS + item_);
            publish_to_tensor_cores();
            __syncwarp();
            if (lane_id() == 0) Gate(&shared_.ready[place]).arrive();
        }
    }
};

// The warpgroup that reads items in bfloat16, which are copied as they are.
class Copier {
    static constexpr int CHUNKS = ROW_BYTES / 16, ITEMS_AT_ONCE = WARPGROUP / CHUNKS, TURNS = TILE_ITEMS / ITEMS_AT_ONCE;

    const AttendItemsParams& p_;
    Shared& shared_;
    const Part& part_;
    const int item_, chunk_;  // of the items that are copied at once, and of each panel's row
    int rows_[TURNS];         // of the next tile

    __device__ __forceinline__ void find_rows(int tile) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int at = part_.begin + tile * TILE_ITEMS + turn * ITEMS_AT_ONCE + item_;
            rows_[turn] = at < part_.end ? static_cast<int>(p_.rows[part_.query * p_.k + at]) : -1;
        }
    }

  public:
    __device__ __forceinline__ Copier(const AttendItemsParams& p, Shared& shared, const Part& part)
        : p_(p), shared_(shared), part_(part), item_(threadIdx.x % WARPGROUP / CHUNKS), chunk_(threadIdx.x % CHUNKS) {
        find_rows(0);
    }

    __device__ __forceinline__ void copy() {
        const int tiles = part_.tiles();
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const int place = tile % PLACES;
            Gate(&shared_.free[place]).wait(tile / PLACES + 1);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                const int at = turn * ITEMS_AT_ONCE + item_;
                u8* const to = shared_.tiles[place] + swizzled(at, chunk_);
                const u8* const from = p_.items + static_cast<i64>(rows_[turn]) * ITEM_BYTES + chunk_ * 16;
                const bool exists = rows_[turn] >= 0;
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    if (exists) {
                        copy_async_past_l1(to + panel * PANEL_BYTES, from + panel * ROW_BYTES);
                    } else {
                        *reinterpret_cast<uint4*>(to + panel * PANEL_BYTES) = make_uint4(0, 0, 0, 0);
                    }
                }
                if (chunk_ == 0) shared_.biases[place][at] = exists ? 0 : NEVER;
            }
            Gate(&shared_.ready[place]).arrive_after_copies();
            publish_to_tensor_cores();  // zeros, which are no copies
            __syncwarp();
            if (lane_id() == 0) Gate(&shared_.ready[place]).arrive();
            find_rows(tile + 1);
        }
    }
};
