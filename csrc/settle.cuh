// The misses of one warp, a part of the list: dealt out evenly over the warps of all blocks, each its own run.
#pragma once

#include "copy_item.cuh"
#include "request.cuh"

class WarpMisses {
    const Request& request_;
    const Shared& shared_;
    int begin_ = 0, end_ = 0;

  public:
    __device__ __forceinline__ WarpMisses(const Request& request, const Shared& shared) : request_(request), shared_(shared) {}

    // Take this warp's part of so many, and ask for their host slots, which each lane waits for with `wait_for_copies`.
    __device__ __forceinline__ void deal(const Cluster& cluster, int misses) {
        const u32 warp = cluster.rank + cluster.size * warp_id();
        begin_ = (warp * misses >> cluster.log2_size()) / WARPS;
        end_ = ((warp + 1) * misses >> cluster.log2_size()) / WARPS;
        for (int miss = begin_ + lane_id(); miss < end_; miss += WARP) {
            copy_async_bytes<8>(shared_.host_slot + miss, request_.host_slot_of + shared_.miss_position[miss]);
        }
    }

    // Record that they have taken their victims' places, and list what has to be copied. Returns violations: misses that
    // have no host or hot slot.
    __device__ __forceinline__ u32 settle() const {
        u32 violations = 0;
        for (int miss = begin_ + lane_id(); miss < end_; miss += WARP) {
            const i32 position = shared_.miss_position[miss], hot = shared_.victims[miss];
            const i64 to = slot_at(shared_.granules, hot), from = shared_.host_slot[miss];
            const bool exists = to >= 0 && from >= 0;
            violations += !exists;
            request_.miss_device_slots[miss] = exists ? to : -1;
            request_.miss_host_slots[miss] = exists ? from : -1;
            request_.hot_of[position] = static_cast<i16>(hot);
            request_.position_at[hot] = position;
        }
        return violations;
    }

    // Copy their items.
    __device__ __forceinline__ void fetch(u8* device_items, const u8* host_items) const {
        WarpCopy items(device_items, host_items);
        for (int first = begin_; host_items && first < end_; first += WARP) {
            const int miss = first + lane_id();
            const bool exists = miss < end_;
            items.copy(exists ? slot_at(shared_.granules, shared_.victims[miss]) : -1,
                       exists ? shared_.host_slot[miss] : -1, min(WARP, end_ - first));
        }
    }
};
