// The misses of one request, in top-k order, and which of them are distinct.
//
// Nearly always all are: an indexer's top-k has no position twice. One atomic operation per miss checks that: every
// missing position sets its bit in a bitmap. A position that finds its bit set equals another one, or shares its bit with
// one where the bitmap is smaller than the context; only then are equals looked for in a hash table, which is slower. The
// bitmap is never cleared as a whole: each position clears its bit before it sets it.
#pragma once

#include "request.cuh"

class Misses {
    const Request& request_;
    const Shared& shared_;
    bool met_ = false;

    // Consecutive misses go to consecutive threads, so that most warps have none of a short list.
    static __device__ __forceinline__ int index(int j) { return j * THREADS + threadIdx.x; }

    __device__ __forceinline__ u32* seen(i32 position) const { return shared_.seen + (position & (SEEN - 1)) / 32; }

    // The bucket of a miss's position, which equal positions share. A hash table with linear probing (Knuth, The Art of
    // Computer Programming, vol. 3, 6.4, algorithm L) and Fibonacci hashing; a bucket has the smallest index of its position.
    __device__ i32* enter(int index) const {
        const i32 position = shared_.miss_position[index];
        for (u32 at = static_cast<u32>(position) * 2654435769u >> (32 - BUCKET_BITS);; at = (at + 1) & (BUCKETS - 1)) {
            const i32 other = atomicCAS(shared_.buckets + at, NONE, index);
            if (other == NONE) return shared_.buckets + at;
            if (shared_.miss_position[other] == position) {
                atomicMin(shared_.buckets + at, index);
                return shared_.buckets + at;
            }
        }
    }

  public:
    bool repeated;  // whether the list may have repeats: then indices have ranks

    __device__ __forceinline__ Misses(const Request& request, const Shared& shared) : request_(request), shared_(shared) {}

    // Clear the bit of a position that may be listed once the block has met at a barrier.
    __device__ __forceinline__ void expect(i32 position) const { *seen(position) = 0; }

    // List a missing position, and ask for its host slot if that is this block's to fetch.
    __device__ __forceinline__ void list(int index, i32 position, const Cluster& cluster) {
        shared_.miss_position[index] = position;
        const u32 bit = 1u << position % 32;
        met_ |= (atomicOr(seen(position), bit) & bit) != 0;
        if (cluster.is_mine(index)) ask_for_host_slot(index, position);
    }

    // The host slot of a distinct miss, which this thread waits for with `wait_for_copies`.
    __device__ __forceinline__ void ask_for_host_slot(int miss, i32 position) const {
        copy_async_bytes<8>(shared_.host_slot + miss, request_.host_slot_of + position);
    }

    // A barrier of the block, which sets `repeated`.
    __device__ __forceinline__ void meet() { repeated = __syncthreads_or(met_); }

    // Strike the repeats off the list, whose distinct misses get ranks. Returns how many these are. All threads come
    // here, and leave from a barrier.
    __device__ int strike_repeats(int listed, const Cluster& cluster) const {
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) shared_.buckets[bucket] = NONE;
        wait_for_copies();
        __syncthreads();
        i32 position[PLACES];
        i32* bucket[PLACES];
        for (int j = 0; j < PLACES; ++j) {
            if (index(j) >= listed) continue;
            position[j] = shared_.miss_position[index(j)];
            bucket[j] = enter(index(j));
        }
        __syncthreads();
        int distinct = 0;
        for (int j = 0; j < PLACES; ++j) {
            const bool is_first = index(j) < listed && *bucket[j] == index(j);
            const u32 firsts = __ballot_sync(ALL_LANES, is_first);
            if (lane_id() == 0) shared_.totals[warp_id()] = __popc(firsts);
            __syncthreads();
            const Totals totals(shared_.totals);
            const int rank = distinct + totals.before_warp(warp_id()) + __popc(firsts & lanes_below());
            if (is_first) {
                shared_.rank[index(j)] = static_cast<u16>(rank);
                shared_.miss_position[rank] = position[j];
                if (cluster.is_mine(rank)) ask_for_host_slot(rank, position[j]);
            }
            distinct += totals.all();
            __syncthreads();
        }
        for (int j = 0; j < PLACES; ++j) {
            if (index(j) < listed && *bucket[j] != index(j)) shared_.rank[index(j)] = shared_.rank[*bucket[j]];
        }
        __syncthreads();
        return distinct;
    }

    // Which distinct miss a listed one is.
    __device__ __forceinline__ int rank(int at) const { return repeated ? shared_.rank[at] : at; }
};
