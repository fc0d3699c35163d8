// Swap-in: decide cuts, hits and victims of one decode step in one index layer (resolve), and bring the missing items of
// layers of its group from pinned host memory (fetch). The policy is that of hisparse/residency.py.
//
// A cluster of blocks serves one request, so that a lone request still keeps enough loads in flight to fill the PCIe link.
// Each block looks up its share of the selected positions and sends it to the others. Every block then runs the whole clock
// for itself. When all have read the old state, each block writes and fetches its share of the misses.
#include "copy_item.cuh"
#include "resolve.cuh"

// The misses of one block: dealt out in turn to the blocks, and within each in runs to its warps.
class BlockMisses {
    const Request& request_;
    const Shared& shared_;
    const Cluster& cluster_;
    const int count_;

    __device__ __forceinline__ int miss(int of_block) const { return of_block << cluster_.log2_size() | cluster_.rank; }

    // Where a warp's part of so many begins; the next warp's beginning is its end.
    __device__ __forceinline__ static int begin_of(int warp, int of) { return warp * of / WARPS; }

  public:
    __device__ __forceinline__ BlockMisses(const Request& request, const Shared& shared, const Cluster& cluster, int misses)
        : request_(request), shared_(shared), cluster_(cluster),
          count_((misses + cluster.size - 1 - cluster.rank) >> cluster.log2_size()) {}

    // Record that they have taken their victims' places, and list what has to be copied. Returns violations: misses
    // without a host slot or a hot slot.
    __device__ __forceinline__ u32 settle() const {
        u32 violations = 0;
        const int end = begin_of(warp_id() + 1, count_);
        for (int of_block = begin_of(warp_id(), count_) + lane_id(); of_block < end; of_block += WARP) {
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

    // Copy the items of a run of the block's misses in one layer.
    __device__ __forceinline__ void fetch_run(u8* device_items, const u8* host_items, int first, int end) const {
        WarpCopy items(device_items, host_items);
        for (; first < end; first += WARP) {
            const bool exists = first + lane_id() < end;
            const int at = miss(first + lane_id());
            items.copy(exists ? slot_at(shared_.granules, shared_.victims[at]) : -1,
                       exists ? shared_.host_slot[at] : -1, min(WARP, end - first));
        }
    }

    // Copy their items: all in one layer, then in the next. Each warp has a run of that list. A single layer is compiled by
    // itself, which makes a launch with few misses 2% shorter.
    __device__ __forceinline__ void fetch(const SwapInParams& p) const {
        const int layers = static_cast<int>(p.fetched_layers);
        if (layers == 1) {
            fetch_run(p.device_items, p.host_items, begin_of(warp_id(), count_), begin_of(warp_id() + 1, count_));
            return;
        }
        int begin = begin_of(warp_id(), layers * count_), end = begin_of(warp_id() + 1, layers * count_);
        for (int layer = 0; layer < layers; ++layer, begin -= count_, end -= count_) {
            fetch_run(p.device_items + layer * p.device_layer_bytes, p.host_items + layer * p.host_layer_bytes,
                      max(begin, 0), min(end, count_));
        }
    }
};

// A short row's table up to its newest position. Selected positions are scattered over all of it.
__device__ __forceinline__ void prefetch_granules(const i64* granules, i64 newest, const Cluster& cluster) {
    constexpr int LINE = 128 / sizeof(i64);
    const i64 entries = newest / HOT_GRANULE + 1, step = cluster.size * THREADS * LINE;
    for (i64 at = (cluster.rank * THREADS + threadIdx.x) * LINE; at < entries; at += step) prefetch(granules + at);
}

// Padding selects nothing. A short request has each position at the hot index of the same number.
__device__ __forceinline__ void resolve_unmanaged(const SwapInParams& p, const Request& request, const i64 (&loaded)[PLACES],
                                                  const Cluster& cluster, const Shared& shared, bool padding) {
    u32 hits = 0, violations = 0;
    i32 position[PLACES];
    i64 granule[PLACES];
#pragma unroll
    for (int j = 0; j < PLACES; ++j) {
        position[j] = request.checked(place(j), padding ? NONE : loaded[j], violations);
        granule[j] = position[j] >= 0 ? request.granules[static_cast<u32>(position[j]) / HOT_GRANULE] : NONE;
        hits += position[j] >= 0;
    }
    // One addition for a block: all go to one address, and the next kernel waits for them.
    const u32 in_warp = __reduce_add_sync(ALL_LANES, violations << 16 | hits);
    if (lane_id() == 0) shared.totals[warp_id()] = in_warp;
    __syncthreads();
    const u32 in_block = Totals(shared.totals).all();
    if (threadIdx.x == 0) {
        add(p.counters, HITS, in_block & 0xffff);
        add(p.counters, VIOLATIONS, in_block >> 16);
    }
#pragma unroll
    for (int j = 0; j < PLACES; ++j) {
        if (!cluster.is_mine(chunk(j)) || place(j) >= request.places()) continue;
        request.slots[place(j)] = slot_in(granule[j], position[j]);
    }
}

// The positions at the places that this block looks up.
__device__ __forceinline__ void load_positions(const i64* positions, int places, const Cluster& cluster,
                                               i64 (&loaded)[PLACES]) {
#pragma unroll
    for (int j = 0; j < PLACES; ++j) {
        loaded[j] = cluster.is_mine(chunk(j)) && place(j) < places ? positions[place(j)] : NONE;
    }
}

// One block per processor is enough. Without the bound the compiler spills registers to make room for two.
extern "C" __global__ void __launch_bounds__(THREADS, 1) swap_in(const __grid_constant__ SwapInParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const Shared shared(memory);
    const Cluster cluster;
    const Mailbox mailbox(shared.selected, shared.arrived, cluster);
    const int entry = blockIdx.x >> cluster.log2_size();
    mailbox.open();  // before it follows: this block's own memory
    cluster.arrive();
    const i64 row = p.rows[entry], newest = p.newest[entry], identity = p.identity[entry];
    const bool padding = (row | newest) < 0, is_short = newest + WINDOW <= identity;
    if (is_short && !padding) prefetch_granules(p.hot_granules + row * p.row_granules, newest, cluster);
    follow();
    i64 loaded[PLACES];
    load_positions(p.positions + entry * QUERIES * p.k, QUERIES * static_cast<int>(p.k), cluster, loaded);
    const Request request(p, entry, padding ? 0 : row, newest);
    const bool reports = cluster.rank == 0 && threadIdx.x == 0;
    if (padding | is_short) {
        if (reports) p.miss_counts[entry] = 0;
        resolve_unmanaged(p, request, loaded, cluster, shared, padding);
        return;
    }

    const HotBytes referenced(request.referenced);
    const i32 hand = *request.hand;
    u32 violations = look_up(request, loaded, cluster, mailbox, shared);
    Misses misses(request, shared);
    Places places(request, shared, misses);
    const u32 in_warp = places.count();
    if (lane_id() == 0) shared.totals[warp_id()] = in_warp;
    __syncthreads();
    const Totals totals(shared.totals);
    int selected = totals.all() >> 16;
    const int missing = totals.all() & 0xffff;
    HotPieces pieces(referenced, HotBytes(shared.protect));
    const bool writes_referenced = cluster.is_mine(warp_id());
    if (missing == 0) {
        places.write_slots(request, cluster, shared, [](i32) { return NONE; });
        if (writes_referenced) pieces.write_referenced(request.referenced);
        add(p.counters, VIOLATIONS, violations);
        if (reports) {
            p.miss_counts[entry] = 0;
            add(p.counters, HITS, selected);
        }
        return;
    }

    places.list(totals.before_warp(warp_id()) & 0xffff, cluster, misses);
    Kinds below = pieces.count(hand, shared);
    misses.meet();
    cluster.arrive();
    int distinct = misses.distinct(missing, cluster);
    int valid = request.valid;
    while (MAY_CUT && distinct > HotPieces::unprotected(shared)) {
        distinct = places.keep(--valid, request, misses, shared);
        pieces = HotPieces(pieces.before, HotBytes(shared.protect));
        below = pieces.count(hand, shared);
        selected = places.selected();
    }
    pieces.turn_clock(hand, distinct, below, shared);
    wait_for_copies();
    __syncthreads();
    cluster.wait_for_all();  // all blocks have read the state that is written now

    places.write_slots(request, cluster, shared, [&](i32 index) { return shared.victims[misses.rank(index)]; });
    if (writes_referenced) pieces.write_referenced(request.referenced);
    const BlockMisses mine(request, shared, cluster, distinct);
    violations += mine.settle();
    add(p.counters, VIOLATIONS, violations);
    if (reports) {
        if (!MAY_CUT || distinct > 0) *request.hand = after(shared.victims[distinct - 1]);
        p.miss_counts[entry] = distinct;
        if (MAY_CUT && valid < request.valid) p.valid[entry] = valid;
        add(p.counters, HITS, selected - distinct);
        add(p.counters, MISSES, distinct);
        add(p.counters, BYTES, static_cast<u64>(distinct) * p.fetched_layers * ITEM_BYTES);
    }
    mine.fetch(p);
}
