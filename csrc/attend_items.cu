// Attention of a tile of 64 heads of a query to a split of its rows, which are fp8 items: an online softmax.
//
// Three warpgroups (FlashAttention-3: Shah et al., arXiv:2407.08608). One converts items to tiles of bfloat16
// (item_tiles.cuh), of which two have a place. The others multiply. Each computes scores and weights of every second tile, and
// half of the columns of the sum of all, since registers hold no more, as in FlashMLA's sparse decode
// (github.com/deepseek-ai/FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md). What one tells the other of a tile, its
// weights and what they are relative to, lies in shared memory. Weights take the place of the RoPE part, which nobody needs
// any more by then.
//
// | gate | says of a tile | arrivals |
// | --- | --- | --- |
// | ready | it is written | the warps that convert |
// | weighed | so are its weights | the warps of the warpgroup that weighs it |
// | free | it has been added up | the warps that multiply |
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

constexpr int TILE_HEADS = 64;
constexpr int MULTIPLYING = 2;  // warpgroups
constexpr int WARPS_OF_GROUP = WARPGROUP / WARP;
constexpr int PLACES = 2;
constexpr int MULTIPLYING_REGISTERS = 192, CONVERTING_REGISTERS = 120;
constexpr int QUERY_BYTES = 2 * (LATENT + ROPE);
static_assert(THREADS == (MULTIPLYING + 1) * WARPGROUP, "a warpgroup that converts, and those that multiply");

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
    u64 ready[PLACES], weighed[PLACES], free[PLACES];
};
static_assert(sizeof(Shared) + SWIZZLED_BYTES <= FIXED_BYTES, "hisparse/cuda/specialization.py reserves less");

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

// The warpgroup that reads items. Those of both halves of a tile are on their way.
class Converter {
    const AttendItemsParams& p_;
    Shared& shared_;
    const Part& part_;
    const int item_;    // of half a tile
    int next_rows_[2];  // of what is read next
    ItemPart items_[2];

    __device__ __forceinline__ int row_of(int tile, int half) const {
        const int at = part_.begin + tile * TILE_ITEMS + half * HALF_ITEMS + item_;
        return at < part_.end ? static_cast<int>(p_.rows[part_.query * p_.k + at]) : -1;
    }

  public:
    __device__ __forceinline__ Converter(const AttendItemsParams& p, Shared& shared, const Part& part)
        : p_(p), shared_(shared), part_(part), item_(threadIdx.x % WARPGROUP / LANES_OF_ITEM) {
        const int rows[2] = {row_of(0, 0), row_of(0, 1)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            next_rows_[half] = row_of(1, half);
            items_[half].read_first_half(p.items, rows[half]);
            items_[half].read_second_half(p.items, rows[half]);
        }
    }

    __device__ __forceinline__ void convert() {
        const int tiles = part_.tiles();
#pragma unroll 1
        for (int number = 0; number < tiles; ++number) {
            const int place = number % PLACES;
            const Gate free(&shared_.free[place]);
            const Tile tile = {shared_.tiles[place], shared_.biases[place]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = half * HALF_ITEMS + item_;
                ItemPart& item = items_[half];
                // The gate is waited for again when it is open, since the compiler moves no reads across: it would move all
                // of them behind the last write, where registers are free.
                free.wait(number / PLACES + 1);
                item.write_first_half(tile, at);
                item.read_first_half(p_.items, next_rows_[half]);
                free.wait(number / PLACES + 1);
                item.write_second_half(tile, at);
                if (half == 1) {
                    publish_to_tensor_cores();
                    __syncwarp();
                    if (lane_id() == 0) Gate(&shared_.ready[place]).arrive();
                }
                item.read_second_half(p_.items, next_rows_[half]);
                next_rows_[half] = row_of(number + 2, half);
            }
        }
    }
};

// One of the warpgroups that multiply.
class Attention {
    const AttendItemsParams& p_;
    Shared& shared_;
    const Part& part_;
    const int group_;
    const int row_;        // of the lane's heads, the other being 8 below
    float sums_[128];      // [two heads, columns of this group's half]
    float totals_[2];      // of weights, in this lane
    float references_[2];  // what all of them are relative to

    // The scores of a tile, before they are scaled.
    __device__ __forceinline__ void score(const u8* tile, float (&scores)[32]) const {
        begin_products();
#pragma unroll
        for (int step = 0; step < PANELS * STEPS_OF_PANEL; ++step) {
            multiply_by_rows(scores, rows_of(shared_.queries, step), rows_of(tile, step), step);
        }
        commit_products();
        wait_for_products(scores);
    }

    // Tell both warpgroups the weights of a tile, and what they are relative to. Adds them up in this lane.
    __device__ __forceinline__ void weigh(int place, float (&added)[2]) {
        float scores[32];
        score(shared_.tiles[place], scores);
        const float scale = __uint_as_float(static_cast<u32>(p_.scale));
        const u64* const biases = reinterpret_cast<const u64*>(shared_.biases[place]) + lane_id() % 4;
        float highest[2] = {LOWEST, LOWEST};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u64 pair = biases[4 * i];
#pragma unroll
            for (int number = 0; number < 4; ++number) {
                const float bias = __uint_as_float(static_cast<u32>(number % 2 ? pair >> 32 : pair));
                float& one = scores[4 * i + number];
                one = fmaf(one, scale, bias);
                highest[number / 2] = fmaxf(highest[number / 2], one);
            }
        }
        float reference[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float found = highest_of_lanes(highest[head]);
            reference[head] = found > references_[head] + HEADROOM ? found : references_[head];
            if (lane_id() % 4 == 0) shared_.references[place][row_ + 8 * head] = reference[head];
        }
        u8* const weights = shared_.tiles[place] + LATENT_PANELS * PANEL_BYTES + lane_id() % 4 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                const float first = power_of_two(scores[4 * i + 2 * head] - reference[head]);
                const float second = power_of_two(scores[4 * i + 2 * head + 1] - reference[head]);
                added[head] += first + second;
                *reinterpret_cast<u32*>(weights + swizzled(row_ + 8 * head, i)) = to_bfloat16(first, second);
            }
        }
        publish_to_tensor_cores();
        __syncwarp();
        if (lane_id() == 0) Gate(&shared_.weighed[place]).arrive();
    }

    // Make everything so far relative to the tile's reference.
    __device__ __forceinline__ void scale_down(int place) {
        float decay[2];
        bool same = true;
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float reference = shared_.references[place][row_ + 8 * head];
            decay[head] = power_of_two(references_[head] - reference);
            same &= reference == references_[head];
            references_[head] = reference;
        }
        if (!__ballot_sync(ALL_LANES, !same)) return;
        totals_[0] *= decay[0];
        totals_[1] *= decay[1];
#pragma unroll
        for (int i = 0; i < 128; ++i) sums_[i] *= decay[i / 2 % 2];
    }

    // Add up the tile's latents, in this group's columns.
    __device__ __forceinline__ void add(int place) {
        const u8* const tile = shared_.tiles[place];
        begin_products();
#pragma unroll
        for (int step = 0; step < STEPS_OF_PANEL; ++step) {
            multiply_by_columns(sums_, rows_of(tile + LATENT_PANELS * PANEL_BYTES, step),
                                columns_of(tile + group_ * HALF_PANELS * PANEL_BYTES, step));
        }
        commit_products();
        wait_for_products(sums_);
    }

    __device__ __forceinline__ void release(int place) const {
        if (lane_id() == 0) Gate(&shared_.free[place]).arrive();
    }

  public:
    __device__ __forceinline__ Attention(const AttendItemsParams& p, Shared& shared, const Part& part, int group)
        : p_(p),
          shared_(shared),
          part_(part),
          group_(group),
          row_(threadIdx.x % WARPGROUP / WARP * 16 + lane_id() / 4),
          sums_{},
          totals_{},
          references_{LOWEST, LOWEST} {}

    __device__ __forceinline__ void attend() {
        const int tiles = part_.tiles();
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const int place = tile % PLACES, use = tile / PLACES;
            float added[2] = {0, 0};
            if (tile % MULTIPLYING == group_) {
                Gate(&shared_.ready[place]).wait(use);
                weigh(place, added);
            }
            Gate(&shared_.weighed[place]).wait(use);
            scale_down(place);
            totals_[0] += added[0];
            totals_[1] += added[1];
            add(place);
            release(place);
        }
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float total = sum_of_lanes(totals_[head]);
            if (lane_id() % 4 == 0) shared_.totals[group_][row_ + 8 * head] = total;
        }
    }

    // Behind a barrier of the block.
    __device__ __forceinline__ void write() const {
#pragma unroll
        for (int number = 0; number < 2; ++number) {
            const int row = row_ + 8 * number, head = part_.first_head + row;
            if (head >= p_.heads) continue;
            const i64 place = (part_.query * p_.heads + head) * gridDim.y + blockIdx.y;
            const float total = shared_.totals[0][row] + shared_.totals[1][row];
            if (group_ == 0 && lane_id() % 4 == 0) p_.log_sums[place] = references_[number] + log_2(total);
            // The highest score weighs 1 or more: only a split without rows has less, and then there is nothing to divide.
            const float factor = 1.f / fmaxf(total, 1.f);
            const int column = group_ * HALF_PANELS * PANEL_COLUMNS + 2 * (lane_id() % 4);
            u8* const to = p_.partial + (place * LATENT + column) * p_.partial_bytes;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const float first = sums_[4 * i + 2 * number] * factor, second = sums_[4 * i + 2 * number + 1] * factor;
                if (p_.partial_bytes == 2) {
                    *reinterpret_cast<u32*>(to + 16 * i) = to_bfloat16(first, second);
                } else {
                    *reinterpret_cast<u64*>(to + 32 * i) =
                        static_cast<u64>(__float_as_uint(second)) << 32 | __float_as_uint(first);
                }
            }
        }
    }
};

// Heads of the query to shared memory, by the warpgroups that multiply; zeros where there are none.
__device__ __forceinline__ void read_queries(const AttendItemsParams& p, const Part& part, u8* panels) {
    constexpr int CHUNKS = QUERY_BYTES / 16, OF_THREAD = TILE_HEADS * CHUNKS / (MULTIPLYING * WARPGROUP);
    const u8* const from = p.queries + (part.query * p.heads + part.first_head) * QUERY_BYTES;
    const int chunks = min(TILE_HEADS, static_cast<int>(p.heads) - part.first_head) * CHUNKS;
    uint4 loaded[OF_THREAD];
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const int at = i * MULTIPLYING * WARPGROUP + threadIdx.x;
        loaded[i] = at < chunks ? reinterpret_cast<const uint4*>(from)[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const int at = i * MULTIPLYING * WARPGROUP + threadIdx.x, head = at / CHUNKS, chunk = at % CHUNKS;
        *reinterpret_cast<uint4*>(panels + chunk / 8 * PANEL_BYTES + swizzled(head, chunk % 8)) = loaded[i];
    }
    publish_to_tensor_cores();
}

// Grid: tiles of heads of all queries, splits.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_items(const __grid_constant__ AttendItemsParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & (SWIZZLED_BYTES - 1)));
    const Part part(p);
    if (threadIdx.x == 0) {
        for (int place = 0; place < PLACES; ++place) {
            Gate(&shared.ready[place]).make(WARPS_OF_GROUP);
            Gate(&shared.weighed[place]).make(WARPS_OF_GROUP);
            Gate(&shared.free[place]).make(MULTIPLYING * WARPS_OF_GROUP);
        }
    }
    follow();
    const int group = threadIdx.x / WARPGROUP;
    if (group == MULTIPLYING) {
        leave_registers<CONVERTING_REGISTERS>();
        Converter converter(p, shared, part);
        __syncthreads();
        converter.convert();
        __syncthreads();
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        Attention attention(p, shared, part, group);
        read_queries(p, part, shared.queries);
        __syncthreads();
        attention.attend();
        __syncthreads();
        attention.write();
    }
}
