// Copy items between the tiers by lists of slots: other layers' misses of a swap-in, new tokens to the host, a short
// request's tokens to the device, index keys either way.
#include "common.cuh"
#include "copy_item.cuh"

struct CopyItemsParams {
    const u8* from;          // the first layer's items
    u8* to;
    i64 from_layer_bytes;    // from one layer to the next
    i64 to_layer_bytes;
    const i64* from_slots;   // [rows, width], nothing is copied where either is -1
    const i64* to_slots;
    const i32* counts;       // [rows], how many of a row's slots count; null: all
    u64* bytes;              // added to by what is copied; null: not counted
    i64 width;
};

// Grid: blocks that share a row, rows, layers.
extern "C" __global__ void __launch_bounds__(THREADS) copy_items(const __grid_constant__ CopyItemsParams p) {
    const i64 row = blockIdx.y, layer = blockIdx.z;
    const i64 count = p.counts ? p.counts[row] : p.width;
    const i64 stride = static_cast<i64>(gridDim.x) * WARPS;
    WarpCopy copy(p.to + layer * p.to_layer_bytes, p.from + layer * p.from_layer_bytes);
    for (i64 first = blockIdx.x + static_cast<i64>(gridDim.x) * warp_id(); first < count; first += stride * WARP) {
        const i64 at = first + stride * lane_id();
        const i64 left = (count - first + stride - 1) / stride;
        const bool mine = at < count;
        copy.copy(mine ? p.to_slots[row * p.width + at] : -1, mine ? p.from_slots[row * p.width + at] : -1,
                  left < WARP ? static_cast<int>(left) : WARP);
    }
    if (p.bytes && blockIdx.x == 0 && threadIdx.x == 0 && count) {
        atomicAdd(p.bytes, static_cast<u64>(count) * ITEM_BYTES);
    }
}
