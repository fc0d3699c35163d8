// Resolve, for one request: where each selected position is, and the sums that the clock needs.
#pragma once

#include "request.cuh"

// The misses of one request, by place, and which of them are distinct.
//
// Those of one query nearly always are: an indexer's top-k has no position twice. One atomic operation per miss checks that:
// every missing position sets its bit in a bitmap. A position that finds its bit set equals another one, or shares its bit
// with one where the bitmap is smaller than the context; only then are equals looked for in a hash table, which is slower.
// The bitmap is never cleared as a whole: each position clears its bit before it sets it. Several queries do select the same
// positions, so host slots are asked for only when it is known which misses are distinct.
class Misses {
    static constexpr bool ASKS_AT_ONCE = QUERIES == 1;

    const Request& request_;
    const Shared& shared_;
    bool met_ = false;

    __device__ __forceinline__ u32* seen(i32 position) const { return shared_.seen + (position & (SEEN - 1)) / 32; }

    // The bucket of a miss's position, which equal positions share. A hash table with linear probing (Knuth, The Art of
    // Computer Programming, vol. 3, 6.4, algorithm L) and Fibonacci hashing; a bucket has the smallest index of its position.
    __device__ int enter(int index, int bits) const {
        const i32 position = shared_.miss_position[index];
        for (u32 at = static_cast<u32>(position) * 2654435769u >> (32 - bits);; at = (at + 1) & ((1u << bits) - 1)) {
            const i32 other = atomicCAS(shared_.buckets + at, NONE, index);
            if (other == NONE) return at;
            if (shared_.miss_position[other] == position) {
                atomicMin(shared_.buckets + at, index);
                return at;
            }
        }
    }

    // The host slot of a distinct miss, which this thread waits for with `wait_for_copies`.
    __device__ __forceinline__ void ask_for_host_slot(int miss, i32 position) const {
        copy_async_bytes<8>(shared_.host_slot + miss, request_.host_slot_of + position);
    }

  public:
    bool repeated;  // whether the list may have repeats: then indices have ranks

    __device__ __forceinline__ Misses(const Request& request, const Shared& shared) : request_(request), shared_(shared) {}

    // Clear the bit of a position that may be listed once the block has met at a barrier.
    __device__ __forceinline__ void expect(i32 position) const { *seen(position) = 0; }

    // List a missing position. Its host slot is asked for, or at least on its way, if it may be this block's to fetch.
    __device__ __forceinline__ void list(int index, i32 position, const Cluster& cluster) {
        shared_.miss_position[index] = position;
        const u32 bit = 1u << position % 32;
        met_ |= (atomicOr(seen(position), bit) & bit) != 0;
        if (!cluster.is_mine(index)) return;
        if (ASKS_AT_ONCE) ask_for_host_slot(index, position);
        else prefetch(request_.host_slot_of + position);
    }

    // A barrier of the block, which sets `repeated`.
    __device__ __forceinline__ void meet() { repeated = __syncthreads_or(met_); }

    // How many of the listed are distinct. Repeats are struck off the list, and host slots asked for. All threads come here
    // after `meet`; `rank` may be called after another barrier.
    __device__ __forceinline__ int distinct(int listed, const Cluster& cluster) const {
        if (repeated) return strike_repeats(listed, cluster);
        if (!ASKS_AT_ONCE) {
            for (int i = threadIdx.x; i < listed; i += THREADS) {
                if (cluster.is_mine(i)) ask_for_host_slot(i, shared_.miss_position[i]);
            }
        }
        return listed;
    }

    // Which distinct miss a listed one is.
    __device__ __forceinline__ int rank(int at) const { return repeated ? shared_.rank[at] : at; }

  private:
    // Warps have chunks of consecutive indices, as few as there can be. Until a miss has its rank, `rank` has its bucket.
    __device__ int strike_repeats(int listed, const Cluster& cluster) const {
        const int bits = 32 - __clz(2 * listed - 1);
        for (int bucket = threadIdx.x; bucket < 1 << bits; bucket += THREADS) shared_.buckets[bucket] = NONE;
        if (ASKS_AT_ONCE) wait_for_copies();
        __syncthreads();
        const int chunks = ceil_div(listed, THREADS);
        const auto index = [&](int j) { return (warp_id() * chunks + j) * WARP + lane_id(); };
        const auto exists = [&](int j) { return j < chunks && index(j) < listed; };
        for (int j = 0; j < chunks; ++j) {
            if (exists(j)) shared_.rank[index(j)] = static_cast<u16>(enter(index(j), bits));
        }
        __syncthreads();
        i32 position[PLACES];
        u32 firsts = 0;  // bit j: of this thread's index in chunk j
        int in_warp = 0;
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            const bool is_first = exists(j) && shared_.buckets[shared_.rank[index(j)]] == index(j);
            if (is_first) position[j] = shared_.miss_position[index(j)];
            firsts |= static_cast<u32>(is_first) << j;
            in_warp += __popc(__ballot_sync(ALL_LANES, is_first));
        }
        if (lane_id() == 0) shared_.totals[warp_id()] = in_warp;
        __syncthreads();
        const Totals totals(shared_.totals);
        int before = totals.before_warp(warp_id());
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            const bool is_first = firsts >> j & 1;
            const u32 in_chunk = __ballot_sync(ALL_LANES, is_first);
            const int rank = before + __popc(in_chunk & lanes_below());
            if (is_first) {
                shared_.rank[index(j)] = static_cast<u16>(rank);
                shared_.miss_position[rank] = position[j];
                if (cluster.is_mine(rank)) ask_for_host_slot(rank, position[j]);
            }
            before += __popc(in_chunk);
        }
        __syncthreads();
        for (int j = 0; j < chunks; ++j) {
            if (!exists(j) || firsts >> j & 1) continue;
            shared_.rank[index(j)] = shared_.rank[shared_.buckets[shared_.rank[index(j)]]];
        }
        return totals.all();
    }
};

__device__ __forceinline__ void unprotect_all(const Shared& shared) {
    for (int i = 16 * threadIdx.x; i < HOT_SIZE; i += 16 * THREADS) {
        *reinterpret_cast<uint4*>(shared.protect + i) = make_uint4(0, 0, 0, 0);
    }
}

// Look up this block's share of the selected positions and send them to all blocks; load the rest of the state meanwhile.
// Returns this thread's violations, after a barrier of the block behind which everything has arrived.
__device__ __forceinline__ u32 look_up(const Request& request, const i64 (&loaded)[PLACES], const Cluster& cluster,
                                       const Mailbox& mailbox, const Shared& shared) {
    i32 position[PLACES], last_hot[PLACES];
    u32 violations = 0;
#pragma unroll
    for (int j = 0; j < PLACES; ++j) {
        position[j] = request.checked(place(j), loaded[j], violations);
        last_hot[j] = position[j] >= 0 ? request.hot_of[position[j]] : 0;
    }
    copy_async<HOT_SIZE, HOT_SIZE % 4 == 0 ? 16 : 4>(shared.position_at, request.position_at);
    copy_async<GRANULES, 8>(shared.granules, request.granules);
    unprotect_all(shared);
    cluster.wait_for_all();  // all blocks have begun: only then is their shared memory theirs
    mailbox.expect(request.valid_places());
#pragma unroll
    for (int j = 0; j < PLACES; ++j) {
        if (!cluster.is_mine(chunk(j)) || place(j) >= request.valid_places()) continue;
        const Selected selected(position[j], last_hot[j]);
#pragma unroll 1
        for (int peer = 0; peer < cluster.size; ++peer) mailbox.send(peer, place(j), selected.packed);
    }
    wait_for_copies();
    mailbox.wait();
    return violations;
}

// A thread's places. They are the same in every block of a cluster; looking up and writing are shared between the blocks.
struct Places {
    i32 hot[PLACES];       // HOT_SIZE and more for own tokens, NONE if nothing is selected or it is missing
    i32 position[PLACES];  // NONE if nothing is selected
    u32 missing[PLACES];   // bits of the warp's lanes

    // Tell hits from misses, and protect the hits.
    __device__ __forceinline__ Places(const Request& request, const Shared& shared, const Misses& misses) {
        const i32 newest = static_cast<i32>(request.newest);
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            const bool exists = place(j) < request.valid_places();
            const Selected selected = exists ? Selected(shared.selected[place(j)]) : Selected(NONE, 0);
            position[j] = selected.position();
            hot[j] = NONE;
            if (position[j] >= newest) {
                hot[j] = request.own_hot(position[j]);
            } else if (position[j] >= 0 && shared.position_at[selected.last_hot()] == position[j]) {
                hot[j] = selected.last_hot();
                shared.protect[hot[j]] = 1;
            }
            const bool is_missing = hot[j] < 0 && position[j] >= 0;
            if (is_missing) misses.expect(position[j]);
            missing[j] = __ballot_sync(ALL_LANES, is_missing);
        }
    }

    // How many of the warp's places are missing, and, << 16, selected.
    __device__ __forceinline__ u32 count() const {
        u32 all = 0;
#pragma unroll
        for (int j = 0; j < PLACES; ++j) all += __popc(missing[j]) + (__popc(__ballot_sync(ALL_LANES, position[j] >= 0)) << 16);
        return all;
    }

    __device__ __forceinline__ bool is_missing(int j) const { return missing[j] >> lane_id() & 1; }

    // Turn the missing places' `hot` into their indices in the list of misses, and list them. index: of the warp's first.
    __device__ __forceinline__ void list(int index, const Cluster& cluster, Misses& misses) {
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            if (is_missing(j)) {
                hot[j] = index + __popc(missing[j] & lanes_below());
                misses.list(hot[j], position[j], cluster);
            }
            index += __popc(missing[j]);
        }
    }

    // Keep only the places of the first queries. Returns how many distinct misses are left. All threads come here, and leave
    // from a barrier.
    __device__ __forceinline__ int keep(int queries, const Request& request, const Misses& misses, const Shared& shared) {
        unprotect_all(shared);
        __syncthreads();
        u32 distinct = 0;
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            const bool kept = place(j) < queries * request.k, missed = kept && is_missing(j);
            if (missed) distinct = max(distinct, static_cast<u32>(misses.rank(hot[j])) + 1);
            if (kept && !missed && hot[j] >= 0 && hot[j] < HOT_SIZE) shared.protect[hot[j]] = 1;
            if (!kept) hot[j] = NONE;
            missing[j] = __ballot_sync(ALL_LANES, missed);
        }
        distinct = __reduce_max_sync(ALL_LANES, distinct);
        if (lane_id() == 0) shared.totals[warp_id()] = distinct;
        __syncthreads();
        return __reduce_max_sync(ALL_LANES, lane_id() < WARPS ? shared.totals[lane_id()] : 0);
    }

    // How many places are left. All threads come here, and leave from a barrier.
    __device__ __forceinline__ int selected() const {
        int all = 0;
#pragma unroll
        for (int j = 0; j < PLACES; ++j) all += __syncthreads_count(hot[j] >= 0);
        return all;
    }

    // Write the slots of this block's share. hot_of_miss: of an index in the list.
    template <typename HotOfMiss>
    __device__ __forceinline__ void write_slots(const Request& request, const Cluster& cluster, const Shared& shared,
                                                HotOfMiss hot_of_miss) const {
#pragma unroll
        for (int j = 0; j < PLACES; ++j) {
            if (!cluster.is_mine(chunk(j)) || place(j) >= request.places()) continue;
            const i32 at = is_missing(j) ? hot_of_miss(hot[j]) : hot[j];
            request.slots[place(j)] = at < 0 ? -1 : slot_at(shared.granules, at);
        }
    }
};

// This thread's hot indices, once the block has met at a barrier after its hits were protected.
struct HotPieces {
    HotBytes before;  // reference bits
    HotPiece piece[PIECES];

    __device__ __forceinline__ HotPieces(const HotBytes& referenced, const HotBytes& hits) : before(referenced) {
#pragma unroll
        for (int j = 0; j < PIECES; ++j) piece[j] = HotPiece(first_of_piece(j), referenced.piece(j), hits.piece(j));
    }

    // Count their kinds. Returns those of the warp's before them; the warp's sums go to `shared.kinds`.
    __device__ __forceinline__ Kinds count(int hand, const Shared& shared) const {
        Kinds mine, below;
        bool at_hand = false;
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            if (hand >= piece[j].first && hand < piece[j].first + PIECE) {
                at_hand = true;
                below = mine + piece[j].kinds_below(hand);
            }
            mine = mine + piece[j].kinds();
        }
        Kinds sum = mine;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const Kinds other(__shfl_up_sync(ALL_LANES, sum.packed, distance));
            if (lane_id() >= distance) sum = sum + other;
        }
        if (at_hand) *shared.at_hand = (sum - mine + below).packed;
        if (lane_id() == WARP - 1) shared.kinds[warp_id()] = sum.packed;
        return sum - mine;
    }

    // How many hot indices are not protected, in all, once the block has met at a barrier after `count`.
    static __device__ __forceinline__ int unprotected(const Shared& shared) {
        const Kinds all(Totals(shared.kinds).all());
        return all.clear() + all.set();
    }

    // Turn the clock: list the victims and renew the reference bits. below: of `count`; the block has met at a barrier.
    __device__ __forceinline__ void turn_clock(int hand, int misses, Kinds below, const Shared& shared) {
        const Totals totals(shared.kinds);
        const Kinds at_hand = Kinds(totals.before_warp(hand / (HOT_PER_THREAD * WARP))) + Kinds(*shared.at_hand);
        const Clock clock{misses, hand, Kinds(totals.all()), at_hand, shared.victims};
        below = below + Kinds(totals.before_warp(warp_id()));
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            const Kinds kinds = piece[j].kinds();
            piece[j].referenced = clock.pass(piece[j], below);
            below = below + kinds;
        }
    }

    __device__ __forceinline__ void write_referenced(u8* referenced) const {
#pragma unroll
        for (int j = 0; j < PIECES; ++j) before.write(referenced, j, piece[j].referenced);
    }
};
