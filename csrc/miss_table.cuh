// Which of the missing positions are the same, and which of those comes first in top-k order.
//
// A hash table in shared memory, open addressing with linear probing. A slot holds a place in top-k order and stands for
// the position at that place; whoever finds its own position there leaves the smaller place. What is left, once every
// miss has been entered and the block has met at a barrier, does not depend on the order of entering.
#pragma once

#include "common.cuh"

class MissTable {
    i32* slots_;
    const i32* position_;

    // Fibonacci hashing (Knuth, The Art of Computer Programming, vol. 3, 6.4): neighbouring positions spread evenly.
    static __device__ __forceinline__ u32 home(i32 position) {
        return (static_cast<u32>(position) * 2654435769u) >> (32 - TABLE_BITS);
    }

  public:
    static constexpr int SIZE = 1 << TABLE_BITS;  // more than TOP_K, so that probing ends
    static constexpr i32 EMPTY = 0x7fffffff;

    // slots: i32 [SIZE]. position: i32 [TOP_K], the position at every place, written before the first `enter`.
    __device__ __forceinline__ MissTable(i32* slots, const i32* position) : slots_(slots), position_(position) {}

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < SIZE; i += THREADS) slots_[i] = EMPTY;
    }

    // Enter the position at a place. Returns its slot.
    __device__ __forceinline__ int enter(int place) {
        const i32 mine = position_[place];
        u32 slot = home(mine);
        for (;;) {
            const i32 other = atomicCAS(&slots_[slot], EMPTY, place);
            if (other == EMPTY) return slot;
            if (position_[other] == mine) {
                if (place < other) atomicMin(&slots_[slot], place);
                return slot;
            }
            slot = (slot + 1) % SIZE;
        }
    }

    // What a slot holds: after all were entered the first place of its position, and later what `put` put there.
    __device__ __forceinline__ i32 get(int slot) const { return slots_[slot]; }
    __device__ __forceinline__ void put(int slot, i32 value) { slots_[slot] = value; }
};
