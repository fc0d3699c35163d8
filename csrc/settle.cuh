// The misses of one warp: dealt out in turn to the blocks, and within each in runs to its warps.
#pragma once

#include "copy_item.cuh"
#include "request.cuh"

class WarpMisses {
    const Request& request_;
    const Shared& shared_;
    const Cluster& cluster_;
    int begin_, end_;  // among the block's misses

    __device__ __forceinline__ int miss(int of_block) const { return of_block << cluster_.log2_size() | cluster_.rank; }

  public:
    __device__ __forceinline__ WarpMisses(const Request& request, const Shared& shared, const Cluster& cluster, int misses)
        : request_(request), shared_(shared), cluster_(cluster) {
        const int of_block = (misses + cluster.size - 1 - cluster.rank) >> cluster.log2_size();
        begin_ = warp_id() * of_block / WARPS;
        end_ = (warp_id() + 1) * of_block / WARPS;
    }

    // Record that they have taken their victims' places, and list what has to be copied. Returns violations: misses
    // without a host slot or a hot slot.
    __device__ __forceinline__ u32 settle() const {
        u32 violations = 0;
        for (int of_block = begin_ + lane_id(); of_block < end_; of_block += WARP) {
            const int at = miss(of_block);
            const i32 position = shared_.miss_position[at], hot = shared_.victims[at];
            const i64 to = slot_at(shared_.granules, hot), from = shared_.host_slot[at];
            const bool exists = to >= 0 && from >= 0;
            violations += !exists;
            request_.miss_device_slots[at] = exists ? to : -1;
            request_.miss_host_slots[at] = exists ? from : -1;
            request_.hot_of[position] = static_cast<i16>(hot);
            request_.position_at[hot] = position;
        }
        return violations;
    }

    // Copy their items.
    __device__ __forceinline__ void fetch(u8* device_items, const u8* host_items) const {
        WarpCopy items(device_items, host_items);
        for (int first = begin_; host_items && first < end_; first += WARP) {
            const bool exists = first + lane_id() < end_;
            const int at = miss(first + lane_id());
            items.copy(exists ? slot_at(shared_.granules, shared_.victims[at]) : -1,
                       exists ? shared_.host_slot[at] : -1, min(WARP, end_ - first));
        }
    }
};
