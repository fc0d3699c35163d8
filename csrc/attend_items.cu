// Attention of a tile of 64 heads of a query to a split of its rows, which are items in fp8 or bfloat16: an online softmax.
//
// Three warpgroups (FlashAttention-3: Shah et al., arXiv:2407.08608). One reads items and writes tiles of bfloat16
// (item_tiles.cuh), of which two have a place. The others multiply. Each computes scores and weights of every second tile, and
// half of the columns of the sum of all, since registers hold no more, as in FlashMLA's sparse decode
// (github.com/deepseek-ai/FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md). What one tells the other of a tile, its
// weights and what they are relative to, lies in shared memory. Weights take the place of the RoPE part, which nobody needs
// any more by then.
//
// | gate | says of a tile | arrivals |
// | --- | --- | --- |
// | ready | it is written | the warps that convert; the threads that copy, when their copies end |
// | weighed | so are the weights of a part of its items | the warps of the warpgroup that weighs it |
// | free | it has been added up | the warps that multiply |
//
// One more, asked, says that the queries are there: the first items are read meanwhile.
#include "attend_part.cuh"

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

    // The scores of a tile in base 2, less its reference, which both warpgroups are told.
    __device__ __forceinline__ void score(int place, float (&scores)[32]) const {
        const u8* const tile = shared_.tiles[place];
        begin_products();
#pragma unroll
        for (int step = 0; step < PANELS * STEPS_OF_PANEL; ++step) {
            multiply_by_rows(scores, rows_of(shared_.queries, step), rows_of(tile, step), step);
        }
        commit_products();
        wait_for_products(scores);
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
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float found = highest_of_lanes(highest[head]);
            const float reference = found > references_[head] + HEADROOM ? found : references_[head];
            if (lane_id() % 4 == 0) shared_.references[place][row_ + 8 * head] = reference;
#pragma unroll
            for (int i = 0; i < 16; ++i) scores[i / 2 * 4 + 2 * head + i % 2] -= reference;
        }
    }

    // Tell both warpgroups the weights of a part of a tile. Adds them up in this lane.
    __device__ __forceinline__ void weigh(int place, int part, const float (&scores)[32], float (&added)[2]) const {
        u8* const weights = shared_.tiles[place] + LATENT_PANELS * PANEL_BYTES + lane_id() % 4 * 4;
#pragma unroll
        for (int i = 8 * part / PARTS; i < 8 * (part + 1) / PARTS; ++i) {
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                const float first = power_of_two(scores[4 * i + 2 * head]);
                const float second = power_of_two(scores[4 * i + 2 * head + 1]);
                added[head] += first + second;
                *reinterpret_cast<u32*>(weights + swizzled(row_ + 8 * head, i)) = to_bfloat16(first, second);
            }
        }
        publish_to_tensor_cores();
        __syncwarp();
        if (lane_id() == 0) Gate(&shared_.weighed[place][part]).arrive();
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

    // Begin to add up the latents of a part of the tile, in this group's columns.
    __device__ __forceinline__ void begin_to_add(int place, int part) {
        const u8* const tile = shared_.tiles[place];
        begin_products();
#pragma unroll
        for (int step = STEPS_OF_PANEL * part / PARTS; step < STEPS_OF_PANEL * (part + 1) / PARTS; ++step) {
            multiply_by_columns(sums_, rows_of(tile + LATENT_PANELS * PANEL_BYTES, step),
                                columns_of(tile + group_ * HALF_PANELS * PANEL_BYTES, step));
        }
        commit_products();
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
            const int place = uniform(tile % PLACES), use = tile / PLACES;
            const bool weighs = tile % MULTIPLYING == group_;
            float scores[32], added[2] = {0, 0};
            if (weighs) {
                Gate(&shared_.ready[place]).wait(use);
                if (COPIES) publish_to_tensor_cores();  // what others have copied
                score(place, scores);
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (weighs) weigh(place, part, scores, added);
                Gate(&shared_.weighed[place][part]).wait(use);
                if (part == 0) scale_down(place);
                begin_to_add(place, part);
            }
            totals_[0] += added[0];
            totals_[1] += added[1];
            wait_for_products(sums_);
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
        if (p_.partial_bytes == 2) {
            write_as<2>();
        } else {
            write_as<4>();
        }
    }

  private:
    // A warp's 16 heads go by way of shared memory, where tiles were, so that all lanes write one head at a time.
    template <int BYTES>
    __device__ __forceinline__ void write_as() const {
        constexpr int HEADS = 16, COLUMNS = HALF_PANELS * PANEL_COLUMNS;
        constexpr int PITCH = (COLUMNS + 8) * BYTES;  // so that a lane's 8 rows lie in different banks
        static_assert(MULTIPLYING * WARPS_OF_GROUP * HEADS * PITCH <= PLACES * TILE_BYTES, "no room for the sums");
        u8* const staged = shared_.tiles[0] + threadIdx.x / WARP * HEADS * PITCH;
#pragma unroll
        for (int number = 0; number < 2; ++number) {
            const int row = row_ + 8 * number;
            const float total = shared_.totals[0][row] + shared_.totals[1][row];
            if (group_ == 0 && lane_id() % 4 == 0 && part_.first_head + row < p_.heads) {
                p_.log_sums[place_of(row)] = references_[number] + log_2(total);
            }
            // The highest score weighs 1 or more: only a split without rows has less, and then there is nothing to divide.
            const float factor = 1.f / fmaxf(total, 1.f);
            u8* const to = staged + row % HEADS * PITCH + lane_id() % 4 * 2 * BYTES;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const float first = sums_[4 * i + 2 * number] * factor, second = sums_[4 * i + 2 * number + 1] * factor;
                if (BYTES == 2) {
                    *reinterpret_cast<u32*>(to + 16 * i) = to_bfloat16(first, second);
                } else {
                    *reinterpret_cast<float2*>(to + 32 * i) = make_float2(first, second);
                }
            }
        }
        __syncwarp();
        const int first_row = row_ / HEADS * HEADS;
        const int heads = min(HEADS, static_cast<int>(p_.heads) - part_.first_head - first_row);
        for (int head = 0; head < heads; ++head) {
            u8* const to = p_.partial + (place_of(first_row + head) * LATENT + group_ * COLUMNS) * BYTES;
#pragma unroll
            for (int at = lane_id() * 16; at < COLUMNS * BYTES; at += WARP * 16) {
                *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(staged + head * PITCH + at);
            }
        }
    }

    // Of a head and this split, in what is written.
    __device__ __forceinline__ i64 place_of(int row) const {
        return (part_.query * p_.heads + part_.first_head + row) * gridDim.y + blockIdx.y;
    }
};

// Heads of the query to shared memory, by the warpgroups that multiply; zeros where there are none.
__device__ __forceinline__ void read_queries(const AttendItemsParams& p, const Part& part, u8* panels) {
    constexpr int CHUNKS = QUERY_BYTES / 16, OF_THREAD = TILE_HEADS * CHUNKS / (MULTIPLYING * WARPGROUP);
    const u8* const from = p.queries + (part.query * p.heads + part.first_head) * QUERY_BYTES;
    const int chunks = min(TILE_HEADS, static_cast<int>(p.heads) - part.first_head) * CHUNKS;
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const int at = i * MULTIPLYING * WARPGROUP + threadIdx.x, head = at / CHUNKS, chunk = at % CHUNKS;
        u8* const to = panels + chunk / 8 * PANEL_BYTES + swizzled(head, chunk % 8);
        if (at < chunks) {
            copy_async_bytes<16>(to, from + at * 16);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
    wait_for_copies();
    publish_to_tensor_cores();
}

// Grid: tiles of heads of all queries, splits.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_items(const __grid_constant__ AttendItemsParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & (SWIZZLED_BYTES - 1)));
    const Part part(p);
    if (threadIdx.x == 0) {
        Gate(&shared.asked).make(MULTIPLYING * WARPS_OF_GROUP);
        for (int place = 0; place < PLACES; ++place) {
            Gate(&shared.ready[place]).make(READERS);
            for (int part = 0; part < PARTS; ++part) Gate(&shared.weighed[place][part]).make(WARPS_OF_GROUP);
            Gate(&shared.free[place]).make(MULTIPLYING * WARPS_OF_GROUP);
        }
    }
    __syncthreads();
    follow();
    const int group = uniform(threadIdx.x / WARPGROUP);
    if (group == MULTIPLYING) {
        leave_registers<READING_REGISTERS>();
        if (COPIES) {
            Copier(p, shared, part).copy();
        } else {
            Converter(p, shared, part).convert();
        }
        __syncthreads();
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        Attention attention(p, shared, part, group);
        read_queries(p, part, shared.queries);
        __syncwarp();
        if (lane_id() == 0) Gate(&shared.asked).arrive();
        Gate(&shared.asked).wait(0);
        attention.attend();
        __syncthreads();
        attention.write();
    }
}
