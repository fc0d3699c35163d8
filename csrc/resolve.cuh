// Resolve, for one request: hits, distinct misses and their order, and the clock's sums.
#pragma once

#include "request.cuh"

// Four sums in one word, each below 2^15: of distinct misses, selected positions, and the two kinds of hot indices.
struct Sums {
    u64 packed;

    __device__ __forceinline__ explicit Sums(u64 all) : packed(all) {}
    __device__ __forceinline__ Sums(int misses, int selected, Kinds kinds)
        : packed(static_cast<u64>(kinds.packed) << 32 | static_cast<u32>(selected) << 16 | misses) {}
    __device__ __forceinline__ int misses() const { return packed & 0xffff; }
    __device__ __forceinline__ int selected() const { return packed >> 16 & 0xffff; }
    __device__ __forceinline__ Kinds kinds() const { return Kinds(static_cast<u32>(packed >> 32)); }
};

// The place in top-k order that this lane looks up, of the chunks that are this block's.
__device__ __forceinline__ int looked_up_place(const Cluster& cluster, int chunk) {
    return (cluster.rank + cluster.size * (warp_id() + chunk * WARPS)) * WARP + lane_id();
}

__device__ __forceinline__ void load_positions(const POSITION_T* positions, int k, const Cluster& cluster, int start,
                                               i64 (&loaded)[AT_ONCE]) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
        const int place = looked_up_place(cluster, start + j);
        loaded[j] = place < k ? positions[place] : -1;
    }
}

// Bring all selected positions, and the reference bits, into this block's shared memory.
__device__ __forceinline__ void load_state(const Request& request, const POSITION_T* positions, const Shared& shared,
                                           bool counts_violations, u64* counters) {
    const int lane = lane_id(), warp = warp_id();
    for (int start = 0; start < CHUNKS_PER_WARP; start += AT_ONCE) {
        i64 position[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (warp + (start + j) * WARPS) * WARP + lane;
            position[j] = place < request.k ? positions[place] : -1;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (warp + (start + j) * WARPS) * WARP + lane;
            if (place < request.k) shared.position[place] = request.checked(position[j]);
            if (counts_violations && request.is_violation(position[j])) add(counters, VIOLATIONS, 1);
        }
    }
    constexpr int WORDS_AT_ONCE = WORDS_PER_WARP < 8 ? WORDS_PER_WARP : 8;
    for (int start = 0; start < WORDS_PER_WARP; start += WORDS_AT_ONCE) {
        u8 bit[WORDS_AT_ONCE];
#pragma unroll
        for (int j = 0; j < WORDS_AT_ONCE; ++j) {
            const int hot = (warp + (start + j) * WARPS) * WARP + lane;
            bit[j] = hot < HOT_SIZE ? request.referenced[hot] : 0;
        }
#pragma unroll
        for (int j = 0; j < WORDS_AT_ONCE; ++j) {
            const int word = warp + (start + j) * WARPS;
            const u32 bits = __ballot_sync(ALL_LANES, bit[j]);
            if (lane == 0 && word < HOT_WORDS) shared.referenced[word] = bits;
        }
    }
    for (int word = threadIdx.x; word < HOT_WORDS; word += THREADS) shared.protect[word] = 0;
}

// Look up this block's share of the selected positions, tell all blocks, and load the state meanwhile. `loaded` are the
// first of the share. Ends with all blocks at a barrier.
__device__ __forceinline__ void look_up(const SwapInParams& p, const Request& request, const POSITION_T* positions,
                                        const Cluster& cluster, const Shared& shared, MissTable& table,
                                        i64 (&loaded)[AT_ONCE]) {
    for (int start = 0; start < CHUNKS_PER_WARP; start += AT_ONCE) {
        if (start > 0) load_positions(positions, request.k, cluster, start, loaded);
        i32 found[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const i32 position = request.checked(loaded[j]);
            found[j] = position >= 0 && position != request.newest ? request.hot_of[position] : NONE;
        }
        if (start == 0) {
            load_state(request, positions, shared, cluster.rank == 0, p.counters);
            table.clear();
            cluster.wait_for_all();
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = looked_up_place(cluster, start + j);
            const i32 position = request.checked(loaded[j]);
            const i32 code = position < 0 ? NONE : position == request.newest ? HOT_SIZE : found[j] < 0 ? MISSING : found[j];
            if (place < request.k) cluster.broadcast(&shared.code[place], code);
        }
    }
    cluster.sync();
}

// Protect the hits, and enter the misses into the table.
__device__ __forceinline__ void sort_out(int k, const Shared& shared, MissTable& table) {
    for (int start = 0; start < CHUNKS_PER_WARP; start += AT_ONCE) {
        i32 code[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (start + j) * THREADS + threadIdx.x;
            code[j] = place < k ? shared.code[place] : NONE;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (start + j) * THREADS + threadIdx.x;
            if (code[j] >= 0 && code[j] < HOT_SIZE) atomicOr(&shared.protect[code[j] / WARP], 1u << code[j] % WARP);
            if (code[j] == MISSING) shared.code[place] = ENTERED - 2 * table.enter(place);
        }
    }
}

// Count each warp's run of places, marking the first of each missing position, and its hot words. Returns the kinds in the
// warp's words before this lane's.
__device__ __forceinline__ Kinds count(int k, int hand, const Shared& shared, const MissTable& table) {
    const int lane = lane_id(), warp = warp_id();
    int misses = 0, selected = 0;
    for (int start = 0; start < CHUNKS_PER_WARP; start += AT_ONCE) {
        i32 code[AT_ONCE];
        bool first[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (warp * CHUNKS_PER_WARP + start + j) * WARP + lane;
            code[j] = start + j < CHUNKS_PER_WARP && place < k ? shared.code[place] : NONE;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (warp * CHUNKS_PER_WARP + start + j) * WARP + lane;
            first[j] = is_entered(code[j]) && table.get(slot_in_table(code[j])) == place;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int place = (warp * CHUNKS_PER_WARP + start + j) * WARP + lane;
            if (first[j]) shared.code[place] = code[j] - 1;
            misses += __popc(__ballot_sync(ALL_LANES, first[j]));
            selected += __popc(__ballot_sync(ALL_LANES, code[j] != NONE));
        }
    }

    Kinds mine;
#pragma unroll
    for (int j = 0; j < WORDS_PER_LANE; ++j) mine = mine + shared.hot_word(j).kinds(ALL_LANES);
    Kinds sum = mine;
#pragma unroll
    for (int distance = 1; distance < WARP && distance < WORDS_PER_WARP; distance *= 2) {
        const Kinds other(__shfl_up_sync(ALL_LANES, sum.packed, distance));
        if (lane >= distance) sum = sum + other;
    }
    const Kinds before = sum - mine;
    Kinds below = before;
    for (int j = 0; j < WORDS_PER_LANE; ++j) {
        const HotWord bits = shared.hot_word(j);
        const int word = word_of_lane(j);
        if (word == hand / WARP) *shared.at_hand = (below + bits.kinds(below_hand(word, hand))).packed;
        below = below + bits.kinds(ALL_LANES);
    }
    constexpr int LAST = (WORDS_PER_WARP < WARP ? WORDS_PER_WARP : WARP) - 1;
    if (lane == LAST) shared.totals[warp] = Sums(misses, selected, sum).packed;
    return before;
}

// What all warps counted. Reads what `count` left; the block has met at a barrier since.
struct Totals {
    u64 up_to;  // this lane's: the sums of the warps up to the one of the lane's number

    __device__ __forceinline__ explicit Totals(const Shared& shared) {
        const int lane = lane_id();
        up_to = lane < WARPS ? shared.totals[lane] : 0;
#pragma unroll
        for (int distance = 1; distance < WARPS; distance *= 2) {
            const u64 other = __shfl_up_sync(ALL_LANES, up_to, distance);
            if (lane >= distance) up_to += other;
        }
    }

    __device__ __forceinline__ Sums all() const { return Sums(__shfl_sync(ALL_LANES, up_to, WARPS - 1)); }
    __device__ __forceinline__ Sums before_warp(int warp) const {
        const u64 sums = __shfl_sync(ALL_LANES, up_to, (warp + WARPS - 1) % WARPS);
        return Sums(warp == 0 ? 0 : sums);
    }
};

// List the misses in top-k order. rank: of this warp's first one.
__device__ __forceinline__ void list_misses(int k, int rank, const Shared& shared, MissTable& table) {
    for (int j = 0; j < CHUNKS_PER_WARP; ++j) {
        const int place = (warp_id() * CHUNKS_PER_WARP + j) * WARP + lane_id();
        const i32 code = place < k ? shared.code[place] : NONE;
        const u32 firsts = __ballot_sync(ALL_LANES, is_first(code));
        if (is_first(code)) {
            const int mine = rank + __popc(firsts & lanes_below());
            table.put(slot_in_table(code), mine);
            shared.miss_place[mine] = place;
        }
        rank += __popc(firsts);
    }
}

// Turn the clock: list the victims, renew the reference bits. before: the kinds before this lane's words.
__device__ __forceinline__ void list_victims(const Clock& clock, Kinds before, const Shared& shared) {
#pragma unroll
    for (int j = 0; j < WORDS_PER_LANE; ++j) {
        const int word = word_of_lane(j);
        const HotWord bits = shared.hot_word(j);
        const u32 renewed = clock.pass(word, bits, before);
        if (word >= 0) shared.renewed[word] = renewed;
        before = before + bits.kinds(ALL_LANES);
    }
}
