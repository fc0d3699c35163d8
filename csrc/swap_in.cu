// Swap-in: decide hits and victims of one decode step in one index layer (resolve), and bring the missing items of one
// layer from pinned host memory (fetch). The policy is that of hisparse/residency.py.
//
// A cluster of blocks serves one request. Each of its blocks looks up its share of the selected positions and tells the
// others, then all of them run the clock, each for itself, and then each fetches its share of the misses. So the
// blocks meet once, and a lone request still keeps enough loads in flight to fill the PCIe link.
#include "copy_item.cuh"
#include "resolve.cuh"

// Padding selects nothing, and what a short request selects is resident where its position says.
__device__ void resolve_unmanaged(const SwapInParams& p, const Request& request, const POSITION_T* positions,
                                  const Cluster& cluster, bool padding) {
    u32 hits = 0, violations = 0;
    for (int place = cluster.rank * THREADS + threadIdx.x; place < request.k; place += cluster.size * THREADS) {
        const i32 position = padding ? -1 : request.checked(positions[place]);
        request.slots[place] = position >= 0 ? request.hot_slots[position] : -1;
        hits += position >= 0;
        violations += !padding && request.is_violation(positions[place]);
    }
    hits = __reduce_add_sync(ALL_LANES, hits);
    violations = __reduce_add_sync(ALL_LANES, violations);
    if (lane_id() == 0) {
        add(p.counters, HITS, hits);
        add(p.counters, VIOLATIONS, violations);
    }
}

// Look up the slots of this block's share of the selected positions.
__device__ __forceinline__ void load_slots(const Request& request, const Cluster& cluster, const Shared& shared,
                                           const MissTable& table, int start, i64 (&slot)[AT_ONCE]) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
        const int place = looked_up_place(cluster, start + j);
        slot[j] = -1;
        if (place < request.k) {
            const i32 code = shared.code[place];
            const i32 hot = is_entered(code) ? shared.victims[table.get(slot_in_table(code))] : code;
            if (hot >= 0) slot[j] = request.hot_slots[hot];
        }
    }
}

__device__ __forceinline__ void store_slots(const Request& request, const Cluster& cluster, int start,
                                            const i64 (&slot)[AT_ONCE]) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
        const int place = looked_up_place(cluster, start + j);
        if (place < request.k) request.slots[place] = slot[j];
    }
}

// Write the slots, of which the first were loaded already.
__device__ __forceinline__ void write_slots(const Request& request, const Cluster& cluster, const Shared& shared,
                                            const MissTable& table, i64 (&slot)[AT_ONCE]) {
    store_slots(request, cluster, 0, slot);
    for (int start = AT_ONCE; start < CHUNKS_PER_WARP; start += AT_ONCE) {
        load_slots(request, cluster, shared, table, start, slot);
        store_slots(request, cluster, start, slot);
    }
}

// Write back the reference bits that changed. Blocks share the words.
__device__ __forceinline__ void write_referenced(const Request& request, const Cluster& cluster, const Shared& shared,
                                                 bool any_miss) {
    const int lane = lane_id();
    for (int word = cluster.rank + cluster.size * warp_id(); word < HOT_WORDS; word += cluster.size * WARPS) {
        const u32 before = shared.referenced[word];
        const u32 after = any_miss ? shared.renewed[word] : before | shared.protect[word];
        if ((before ^ after) >> lane & 1) request.referenced[word * WARP + lane] = after >> lane & 1;
    }
}

struct Move {
    i64 device_slot;
    i64 host_slot;
};

// Record that a miss has taken its victim's place.
__device__ __forceinline__ Move settle(int miss, const SwapInParams& p, const Request& request, const Shared& shared) {
    const i32 position = shared.position[shared.miss_place[miss]];
    const i32 hot = shared.victims[miss];
    Move move = {request.hot_slots[hot], request.host_slot_of[position]};
    const i32 evicted = request.position_at[hot];
    if (move.device_slot < 0 || move.host_slot < 0) {
        move = {-1, -1};
        add(p.counters, VIOLATIONS, 1);
    }
    request.miss_device_slots[miss] = move.device_slot;
    request.miss_host_slots[miss] = move.host_slot;
    if (evicted >= 0) request.hot_of[evicted] = -1;
    request.hot_of[position] = static_cast<i16>(hot);
    request.position_at[hot] = position;
    return move;
}

// One block per processor is enough, and says so: else the compiler makes room for two by spilling registers.
extern "C" __global__ void __launch_bounds__(THREADS, 1) swap_in(const __grid_constant__ SwapInParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const Shared shared(memory);
    MissTable table(shared.table, shared.position);
    const Cluster cluster;
    const int entry = blockIdx.x / cluster.size;
    const POSITION_T* const positions = p.positions + entry * p.k;
    const i64 row = p.rows[entry], newest = p.newest[entry];
    i64 loaded[AT_ONCE];
    load_positions(positions, static_cast<int>(p.k), cluster, 0, loaded);
    const bool padding = row < 0 || newest < 0;
    const Request request(p, entry, padding ? 0 : row, newest);
    const bool reports = cluster.rank == 0 && threadIdx.x == 0;
    if (padding || newest < HOT_SIZE) {
        if (reports) p.miss_counts[entry] = 0;
        resolve_unmanaged(p, request, positions, cluster, padding);
        return;
    }

    cluster.begin();
    const i32 hand = *request.hand;
    look_up(p, request, positions, cluster, shared, table, loaded);
    sort_out(request.k, shared, table);
    __syncthreads();
    const Kinds before_in_warp = count(request.k, hand, shared, table);
    __syncthreads();
    const Totals totals(shared);
    const Sums all = totals.all();
    const int misses = all.misses();
    if (reports) {
        p.miss_counts[entry] = misses;
        add(p.counters, HITS, all.selected() - misses);
        add(p.counters, MISSES, misses);
        if (p.host_items) add(p.counters, BYTES, static_cast<u64>(misses) * ITEM_BYTES);
    }
    i64 slot[AT_ONCE];
    if (misses == 0) {
        load_slots(request, cluster, shared, table, 0, slot);
        write_referenced(request, cluster, shared, false);
        write_slots(request, cluster, shared, table, slot);
        return;
    }

    const Sums before = totals.before_warp(warp_id());
    const int hand_warp = hand / WARP / WORDS_PER_WARP;
    const Kinds at_hand = totals.before_warp(hand_warp).kinds() + Kinds(*shared.at_hand);
    const Clock clock{misses, hand, all.kinds(), at_hand, shared.victims, shared.new_hand};
    list_victims(clock, before.kinds() + before_in_warp, shared);
    list_misses(request.k, before.misses(), shared, table);
    __syncthreads();

    // What is loaded is waited for as late as possible: first the slots, then the misses, then their items.
    load_slots(request, cluster, shared, table, 0, slot);
    WarpCopy copy(p.device_items, p.host_items);
    const int stride = cluster.size * WARPS;
    bool results_written = false;
    for (int first = cluster.rank + cluster.size * warp_id(); first < misses || !results_written; first += stride * WARP) {
        const int miss = first + stride * lane_id();
        const Move move = miss < misses ? settle(miss, p, request, shared) : Move{-1, -1};
        copy.start(move.device_slot, move.host_slot, min(WARP, max(0, ceil_div(misses - first, stride))));
        if (!results_written) {
            write_slots(request, cluster, shared, table, slot);
            write_referenced(request, cluster, shared, true);
            if (reports) *request.hand = *shared.new_hand;
        }
        results_written = true;
        copy.finish();
    }
}
