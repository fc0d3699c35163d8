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
    i64 rows;
};

// Grid: blocks that share a row, rows at a time, layers.
extern "C" __global__ void __launch_bounds__(THREADS) copy_items(const __grid_constant__ CopyItemsParams p) {
    const i64 layer = blockIdx.z;
    const i64 stride = static_cast<i64>(gridDim.x) * WARPS;
    const i64 warp = blockIdx.x + static_cast<i64>(gridDim.x) * warp_id();
    WarpCopy copy(p.to + layer * p.to_layer_bytes, p.from + layer * p.from_layer_bytes);
    follow();
    for (i64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const i64 count = p.counts ? p.counts[row] : p.width;
        const auto copy_mine = [&](i64 at, bool mine, i64 many) {
            copy.copy(mine ? p.to_slots[row * p.width + at] : -1, mine ? p.from_slots[row * p.width + at] : -1,
                      many < WARP ? static_cast<int>(many) : WARP);
        };
        if (SMALL_ITEMS) {  // a warp takes neighbours, which often lie beside each other
            const i64 share = (count + stride - 1) / stride;
            const i64 together = share < WARP ? share : WARP;
            for (i64 first = warp * together; first < count; first += stride * together) {
                const i64 many = count - first < together ? count - first : together;
                copy_mine(first + lane_id(), lane_id() < many, many);
            }
        } else {
            for (i64 first = warp; first < count; first += stride * WARP) {
                const i64 at = first + stride * lane_id();
                copy_mine(at, at < count, (count - first + stride - 1) / stride);
            }
        }
        if (p.bytes && blockIdx.x == 0 && threadIdx.x == 0 && count) {
            atomicAdd(p.bytes, static_cast<u64>(count) * ITEM_BYTES);
        }
    }
}
