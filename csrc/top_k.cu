// The positions of the k largest scores of each row, ascending; of equal scores the lower positions. Radix select.
//
// A cluster of blocks serves one row; each block has consecutive positions of it, and keeps as many of their keys in shared
// memory as fit, so that a row is read once. When the k-th largest key is known (radix.cuh), every block also knows how
// many keys the blocks before it select, and so where its own positions belong.
#include "radix.cuh"

struct TopKParams {
    const float* scores;   // [rows, width]
    const void* lengths;   // [rows], i64 or i32, how many scores of a row count; null: all
    i64* positions;        // out [rows, k], -1 behind a row that is shorter
    i64 row_stride;        // from one row of scores to the next
    i64 length_bytes;      // of one length: 8 or 4
    i64 width;
    i64 k;
    i64 kept;              // keys that the shared memory of the launch has room for, a multiple of WARP
};

constexpr int FIRST_SHIFT = 32 - DIGIT_BITS;
constexpr int AHEAD = 8;  // loads of a thread that are on their way at the same time

struct Shared {
    Counters counters;
    u32 totals[WARPS];
};
constexpr int KEYS_AT = ceil_div(sizeof(Shared), 16) * 16;  // in shared memory, behind Shared
static_assert(KEYS_AT <= FIXED_BYTES, "kernels/top_k.py reserves less");

// One block's part of a row.
struct Part {
    const float* scores;
    u32* keys;  // [kept]
    int kept;
    int count;  // of scores

    // Use AHEAD * THREADS values from `first` on, of which those before `end` exist; WHOLE: all do. All loads are on their way
    // before the first is used, which predicates would prevent: what does not exist loads what does.
    template <bool WHOLE, typename T, typename Use>
    __device__ __forceinline__ static void use_chunk(const T* from, int first, int end, Use use) {
        T loaded[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int at = first + j * THREADS + threadIdx.x;
            loaded[j] = from[WHOLE ? at : min(at, end - 1)];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int at = first + j * THREADS + threadIdx.x;
            use(at, loaded[j], WHOLE || at < end);
        }
    }

    // Use each value between two places once, in any order.
    template <typename T, typename Use>
    __device__ __forceinline__ static void scan(const T* from, int begin, int end, Use use) {
        int first = begin;
#pragma unroll 1
        for (; first + AHEAD * THREADS <= end; first += AHEAD * THREADS) use_chunk<true>(from, first, end, use);
        if (first < end) use_chunk<false>(from, first, end, use);
    }

    // Count each key in the bin of its first digit, and keep those for which there is room.
    __device__ __forceinline__ void count_first(u32* bins) const {
        scan(scores, 0, count, [&](int at, float score, bool exists) {
            const u32 key = key_of(score);
            u32* const bin = &bins[key >> FIRST_SHIFT];
            if (at < kept) keys[at] = key;
            if (exists) atomicAdd(bin, 1u);
        });
    }

    // Count each key that may be the k-th largest in the bin of its next digit.
    __device__ __forceinline__ void count_next(const Threshold& known, int shift, u32* bins) const {
        const auto use = [&](u32 key, bool exists) {
            u32* const bin = &bins[key >> shift & (BINS - 1)];
            if (exists && key >> known.shift == known.prefix) atomicAdd(bin, 1u);
        };
        scan(keys, 0, min(count, kept), [&](int, u32 key, bool exists) { use(key, exists); });
        scan(scores, kept, count, [&](int, float score, bool exists) { use(key_of(score), exists); });
    }

    // The keys at `first`, `first` + WARP, ...; where there is none, another one.
    __device__ __forceinline__ void look_at(int first, u32 (&key)[AHEAD]) const {
        if (first - lane_id() + AHEAD * WARP <= min(kept, count)) {
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) key[j] = keys[first + j * WARP];
            return;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int at = min(first + j * WARP, count - 1);
            key[j] = at < kept ? keys[at] : key_of(scores[at]);
        }
    }
};

// Which of WARP consecutive positions are selected, as bits: by larger keys, or by the same if there is room.
struct Word {
    u32 above;
    u32 equal;
};

// Each lane gets one of `words` consecutive words, the first of which begins at `first`.
__device__ __forceinline__ Word select(const Part& part, int first, int words, const Threshold& threshold) {
    Word mine = {0, 0};
#pragma unroll 1
    for (int done = 0; done < words; done += AHEAD) {
        u32 key[AHEAD];
        part.look_at(first + done * WARP + lane_id(), key);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const u32 prefix = key[j] >> threshold.shift;
            const u32 above = __ballot_sync(ALL_LANES, prefix > threshold.prefix);
            const u32 equal = __ballot_sync(ALL_LANES, prefix == threshold.prefix);
            if (lane_id() == done + j) mine = {above, equal};
        }
    }
    const int exist = lane_id() < words ? part.count - first - lane_id() * WARP : 0;
    const u32 bits = exist >= WARP ? ALL_LANES : exist > 0 ? (1u << exist) - 1 : 0;
    return {mine.above & bits, mine.equal & bits};
}

__device__ __forceinline__ int length_of(const TopKParams& p, i64 row) {
    if (!p.lengths) return static_cast<int>(p.width);
    const i64 length = p.length_bytes == 8 ? static_cast<const i64*>(p.lengths)[row] : static_cast<const i32*>(p.lengths)[row];
    return static_cast<int>(max(static_cast<i64>(0), min(length, p.width)));
}

__device__ __forceinline__ Threshold find_threshold(const Part& part, u32 k, const Cluster& cluster, Counters& counters) {
    counters.open(cluster);
    cluster.arrive();
    part.count_first(counters.bins);
    cluster.wait_for_all();  // all blocks have begun: only then is their shared memory theirs
    Threshold threshold = {0, FIRST_SHIFT, k, 0, 0, 0};
    int shift = FIRST_SHIFT;
    for (int phase = 0;; ++phase) {
        threshold = counters.narrow(threshold, shift, phase, cluster);
        if (threshold.is_final()) return threshold;
        counters.clear();
        __syncthreads();
        shift = max(shift - DIGIT_BITS, 0);
        part.count_next(threshold, shift, counters.bins);
    }
}

// The lowest `room` bits that are set.
__device__ __forceinline__ u32 lowest(u32 bits, u32 room) {
    for (u32 surplus = __popc(bits); surplus > room; --surplus) bits ^= 0x80000000u >> __clz(bits);
    return bits;
}

// Write the selected positions of a part. first: its first position.
__device__ __forceinline__ void write_positions(const Part& part, i64 first, const Threshold& threshold, u32* totals, i64* out) {
    u32 above_before = threshold.above_before, equal_before = threshold.equal_before;
    const int words = ceil_div(part.count, WARP);
    for (int done = 0; done < words; done += THREADS) {
        const int per_warp = min(WARP, ceil_div(words - done, WARPS));
        const int word = done + warp_id() * per_warp;  // the warp's first
        const Word bits = select(part, word * WARP, per_warp, threshold);

        // Both counts in one sum: a round has at most 32768 positions.
        const u32 mine = __popc(bits.above) | __popc(bits.equal) << 16;
        const u32 up_to = sum_up_to_lane(mine);
        if (lane_id() == WARP - 1) totals[warp_id()] = up_to;
        __syncthreads();
        const Totals warps(totals);
        const u32 before = up_to - mine + warps.before_warp(warp_id()), all = warps.all();
        const u32 equals = equal_before + (before >> 16);
        const u32 taken = min(equals, threshold.wanted);
        i64* to = out + above_before + (before & 0xffff) + taken;
        for (u32 left = bits.above | lowest(bits.equal, threshold.wanted - taken); left; left &= left - 1) {
            *to++ = first + (word + lane_id()) * WARP + __ffs(left) - 1;
        }
        above_before += all & 0xffff;
        equal_before += all >> 16;
        __syncthreads();
    }
}

// Grid: clusters, one a row.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR) top_k(const __grid_constant__ TopKParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Cluster cluster;
    const i64 row = blockIdx.x >> cluster.log2_size();
    follow();
    const int length = length_of(p, row), k = static_cast<int>(p.k);
    i64* const out = p.positions + row * k;
    if (length <= k) {
#pragma unroll 1
        for (int at = cluster.rank * THREADS + threadIdx.x; at < k; at += cluster.size * THREADS) {
            out[at] = at < length ? at : -1;
        }
        return;
    }

    // A multiple of WARP; the last blocks of a short row may have nothing.
    const int each = ((length - 1 >> cluster.log2_size()) / WARP + 1) * WARP;
    const int first = min(cluster.rank * each, length);
    const Part part = {p.scores + row * p.row_stride + first, reinterpret_cast<u32*>(memory + KEYS_AT),
                       static_cast<int>(p.kept), min(each, length - first)};
    const Threshold threshold = find_threshold(part, static_cast<u32>(k), cluster, shared.counters);
    write_positions(part, first, threshold, shared.totals, out);
}
