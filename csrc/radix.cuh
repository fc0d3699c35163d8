// Radix select (11 + 11 + 10 bits) over a cluster: which key is the k-th largest of those that its blocks hold.
//
// Each block counts its keys by their next digit. In the sum of all blocks' counts one warp of each block finds the digit
// of the k-th largest key, first by groups of 32 digits and then within one group, so that little is exchanged. All blocks
// do the same work, so nothing has to be sent back.
#pragma once

#include "common.cuh"

constexpr int DIGIT_BITS = 11;  // 32 bits are digits of 11, 11 and 10 bits
constexpr int BINS = 1 << DIGIT_BITS;
constexpr int GROUPS = BINS / WARP;

// A score's key: unsigned integers in the order of the scores. The sum makes one zero of both and is the largest number
// for every NaN (PTX has one NaN as the result of arithmetic).
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);
    return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}

// What is known of the k-th largest key: its high bits. Keys with larger high bits are selected, and of the `count` keys
// with the same the `wanted` first.
struct Threshold {
    u32 prefix;  // key >> shift
    int shift;
    u32 wanted;
    u32 count;
    u32 above_before;  // keys with larger high bits in the blocks before this one
    u32 equal_before;  // keys with the same high bits there

    // Whether further digits would say nothing new.
    __device__ __forceinline__ bool is_final() const { return shift == 0 || count == wanted; }
};

// Of the sum of several rows of counters, the one that counts the `wanted`-th largest key.
struct Found {
    int at;
    u32 above;  // sum of the counters behind it, which count larger keys
    u32 count;  // of itself
    u32 above_before;  // what the blocks before this one have of both
    u32 equal_before;
};

// Find it in rows of WARP * PER_LANE counters, one of each block. For one whole warp; the result is the same in all lanes.
template <int PER_LANE>
__device__ __forceinline__ Found find(const u32* counters, u32 wanted, const Cluster& cluster) {
    // The first lane has the last counters, so that prefix sums are over larger keys.
    const int first = (WARP - 1 - lane_id()) * PER_LANE;
    u32 all[PER_LANE] = {}, before[PER_LANE] = {}, mine = 0, mine_before = 0;
#pragma unroll 4
    for (int peer = 0; peer < cluster.size; ++peer) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const u32 count = counters[peer * WARP * PER_LANE + first + j];
            all[j] += count;
            before[j] += peer < cluster.rank ? count : 0;
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        mine += all[j];
        mine_before += before[j];
    }
    const u32 up_to = sum_up_to_lane(mine);
    const int lane = __ffs(__ballot_sync(ALL_LANES, up_to >= wanted)) - 1;

    // Which of its counters, if it is this lane's.
    int at = first + PER_LANE - 1;
    u32 above = up_to - mine, above_before = 0, count = all[PER_LANE - 1], equal_before = before[PER_LANE - 1];
#pragma unroll
    for (int j = PER_LANE - 2; j >= 0; --j) {
        if (above + count >= wanted) continue;
        above += count;
        above_before += equal_before;
        count = all[j];
        equal_before = before[j];
        at = first + j;
    }
    if (lane_id() != lane) above_before = lane_id() < lane ? mine_before : 0;
    Found found;
    found.at = __shfl_sync(ALL_LANES, at, lane);
    found.above = __shfl_sync(ALL_LANES, above, lane);
    found.count = __shfl_sync(ALL_LANES, count, lane);
    found.above_before = __reduce_add_sync(ALL_LANES, above_before);
    found.equal_before = __shfl_sync(ALL_LANES, equal_before, lane);
    return found;
}

// In shared memory: a block's own counts, and what all blocks of the cluster sent it. A block sends its bins of a digit when
// it has all groups of it, and its groups of the next digit when it has all bins: nobody overwrites what is still read.
struct Counters {
    u32 bins[BINS];                        // of this block, by digit
    u64 groups[MAX_CLUSTER * GROUPS / 2];  // of each block the sums of WARP consecutive bins, two in a word
    u64 in_group[MAX_CLUSTER * WARP / 2];  // of each block the bins of one group, two in a word
    u64 groups_arrived;
    u64 in_group_arrived;
    Threshold threshold;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int first = 0; first < BINS; first += THREADS) {
            if (first + threadIdx.x < BINS) bins[first + threadIdx.x] = 0;
        }
    }

    // Before anything is counted, and before `Cluster::arrive`; `wait_for_all` comes before the first `narrow`.
    __device__ __forceinline__ void open(const Cluster& cluster) {
        clear();
        Mailbox(groups, &groups_arrived, cluster).open();
        Mailbox(in_group, &in_group_arrived, cluster).open();
        __syncthreads();
    }

    // When this block has counted a digit, know the threshold better by it. All threads of all blocks call this. Ends with
    // a barrier of the block. phase: number of the digit, the highest first. shift: the bits below it.
    __device__ __forceinline__ Threshold narrow(const Threshold& known, int shift, int phase, const Cluster& cluster) {
        const Mailbox all_groups(groups, &groups_arrived, cluster), all_in_group(in_group, &in_group_arrived, cluster);
        all_groups.expect(cluster.size * GROUPS / 2);
        all_in_group.expect(cluster.size * WARP / 2);
        __syncthreads();
#pragma unroll 1
        for (int pair = warp_id(); pair < GROUPS / 2; pair += WARPS) {
            const u64 low = __reduce_add_sync(ALL_LANES, bins[2 * pair * WARP + lane_id()]);
            const u64 high = __reduce_add_sync(ALL_LANES, bins[(2 * pair + 1) * WARP + lane_id()]);
            if (lane_id() < cluster.size) all_groups.send(lane_id(), cluster.rank * GROUPS / 2 + pair, low | high << 32);
        }
        __syncthreads();
        if (warp_id() == 0) {
            all_groups.wait_in_warp(phase);
            const Found group = find<GROUPS / WARP>(reinterpret_cast<const u32*>(groups), known.wanted, cluster);
            const int pair = lane_id() % (WARP / 2);
            const u64 counts = reinterpret_cast<const u64*>(bins)[group.at * WARP / 2 + pair];
#pragma unroll 1
            for (int peer = lane_id() / (WARP / 2); peer < cluster.size; peer += 2) {
                all_in_group.send(peer, cluster.rank * WARP / 2 + pair, counts);
            }
            all_in_group.wait_in_warp(phase);
            const Found bin = find<1>(reinterpret_cast<const u32*>(in_group), known.wanted - group.above, cluster);
            if (lane_id() == 0) {
                // The last digit overlaps the one before by a bit, which is the same in both.
                threshold.prefix = known.prefix << (known.shift - shift) | static_cast<u32>(group.at * WARP + bin.at);
                threshold.shift = shift;
                threshold.wanted = known.wanted - group.above - bin.above;
                threshold.count = bin.count;
                threshold.above_before = known.above_before + group.above_before + bin.above_before;
                threshold.equal_before = bin.equal_before;
            }
        }
        __syncthreads();
        return threshold;
    }
};
