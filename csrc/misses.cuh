// The distinct misses of one request, in top-k order.
//
// Missing places are listed first, in order; which of them miss the same position is found in rounds. In a round each
// listed position that is not settled yet writes its index into the bucket of its hash. Whoever finds itself there is
// settled, and so is whoever finds its own position there, which leaves the smaller index; the others go on with another
// hash and another table. So nothing has to be cleared, the work follows the number of misses, and what comes out does not
// depend on who wrote last.
#pragma once

#include "request.cuh"

class Misses {
    const Shared& shared_;
    i32 position_[PLACES];  // at the list's indices index(0), index(1), ...

    // Misses are dealt out to threads singly: of a short list most warps have none.
    static __device__ __forceinline__ int index(int j) { return j * THREADS + threadIdx.x; }

    // The bucket of a position in a round. Fibonacci hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4), other bits
    // in every round. Rounds take turns at two tables, of which the second is for the few who lost in the first.
    __device__ __forceinline__ i32* bucket(i32 position, int round) const {
        const u32 hash = (static_cast<u32>(position) + round * 0x85ebca6bu) * 2654435769u;
        return round & 1 ? shared_.few_buckets + (hash >> (32 - FEW_BUCKET_BITS)) : shared_.buckets + (hash >> (32 - BUCKET_BITS));
    }

    static __device__ __forceinline__ bool is_mine(u32 lanes) { return lanes >> lane_id() & 1; }

    enum Found { ITSELF, ITS_EQUAL, ANOTHER };

    // What a miss finds in its bucket.
    __device__ __forceinline__ Found find(int j, int round) const {
        const i32 other = *bucket(position_[j], round);
        if (other == index(j)) return ITSELF;
        return shared_.miss_position[other] == position_[j] ? ITS_EQUAL : ANOTHER;
    }

    // Where equals met, let the smallest index be the first of all of them.
    __device__ void leave_smallest(int round, const u32 (&pending)[PLACES], const u32 (&lost)[PLACES],
                                   const u32 (&equal)[PLACES], i32 (&first)[PLACES]) const {
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            if (is_mine(equal[j])) atomicMin(bucket(position_[j], round), index(j));
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            if (is_mine(pending[j] & ~lost[j])) first[j] = *bucket(position_[j], round);
        }
    }

    // For each of this thread's misses, the first index of the same position.
    __device__ __forceinline__ void find_first(int listed, i32 (&first)[PLACES]) const {
        u32 pending[PLACES];  // bits of the warp's lanes
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            pending[j] = __ballot_sync(ALL_LANES, index(j) < listed);
            first[j] = index(j);
        }
        for (int round = 0;; ++round) {
            u32 lost[PLACES], equal[PLACES], any = 0;
#pragma unroll
            for (int j = 0; j < PLACES; ++j) {
                const Found found = pending[j] && is_mine(pending[j]) ? find(j, round) : ITSELF;
                lost[j] = pending[j] ? __ballot_sync(ALL_LANES, found == ANOTHER) : 0;
                equal[j] = pending[j] ? __ballot_sync(ALL_LANES, found == ITS_EQUAL) : 0;
                if (equal[j]) *shared_.repeats = 1;
                any |= lost[j];
            }
            any = __syncthreads_or(any);
            if (*shared_.repeats) leave_smallest(round, pending, lost, equal, first);
            if (!any) return;
#pragma unroll
            for (int j = 0; j < PLACES; ++j) {
                pending[j] = lost[j];
                if (lost[j] && is_mine(lost[j])) atomicExch(bucket(position_[j], round + 1), index(j));
            }
            __syncthreads();
        }
    }

    // Strike the repeats off the list. Returns what is left. Ends with the block at a barrier.
    __device__ int strike_repeats(int listed, const i32 (&first)[PLACES]) const {
        int left = 0;
        for (int j = 0; j < PLACES; ++j) {
            const bool is_first = index(j) < listed && first[j] == index(j);
            const u32 firsts = __ballot_sync(ALL_LANES, is_first);
            if (lane_id() == 0) shared_.totals[warp_id()] = __popc(firsts);
            __syncthreads();
            const Totals totals(shared_.totals);
            const int rank = left + totals.before_warp(warp_id()) + __popc(firsts & lanes_below());
            if (is_first) {
                shared_.rank[index(j)] = static_cast<u16>(rank);
                shared_.miss_position[rank] = position_[j];
            }
            left += totals.all();
            __syncthreads();
        }
        for (int j = 0; j < PLACES; ++j) {
            if (index(j) < listed && first[j] != index(j)) shared_.rank[index(j)] = shared_.rank[first[j]];
        }
        __syncthreads();
        return left;
    }

  public:
    int distinct;
    bool repeated;  // whether some position is missed at more than one place

    __device__ __forceinline__ explicit Misses(const Shared& shared) : shared_(shared) {}

    // List a missing position.
    __device__ __forceinline__ void enter(int index, i32 position) const {
        shared_.miss_position[index] = position;
        atomicExch(bucket(position, 0), index);
    }

    // Find out which of those listed are distinct, once the block has met at a barrier. All threads come here.
    __device__ __forceinline__ void find_distinct(int listed) {
#pragma unroll
        for (int j = 0; j < PLACES; ++j) position_[j] = index(j) < listed ? shared_.miss_position[index(j)] : NONE;
        i32 first[PLACES];
        find_first(listed, first);
        repeated = *shared_.repeats;
        distinct = repeated ? strike_repeats(listed, first) : listed;
    }

    // Which distinct miss a listed one is.
    __device__ __forceinline__ int rank(int at) const { return repeated ? shared_.rank[at] : at; }
};
