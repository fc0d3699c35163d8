// A warpgroup reads fp8 items and writes them, in bfloat16, to tiles in shared memory that the tensor cores take.
//
// An item has 512 latent elements in float8_e4m3, a float32 scale for each 128 of them, and 64 RoPE elements in bfloat16. It is
// read by 4 neighbouring lanes, so that what they store of two items at a time meets all banks of shared memory.
#pragma once
#include "bf16_products.cuh"

constexpr int SCALES = LATENT / SCALED_TOGETHER;
constexpr int HALF_ITEMS = TILE_ITEMS / 2;
constexpr int LATENT_PANELS = LATENT / PANEL_COLUMNS, PANELS = LATENT_PANELS + ROPE / PANEL_COLUMNS;
constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
constexpr int LANES_OF_ITEM = 4;
constexpr int HALF_PANELS = LATENT_PANELS / 2, HALF_SCALES = SCALES / 2;  // of half an item
constexpr u32 NEVER = 0xff800000;  // -inf

// Factors for `scaled`, the same one twice, of an fp8 number's scale. The bits of a float8_e4m3 number, its sign apart, are
// those of a bfloat16 number that is 2^120 times smaller. A scale above 255 is taken for 255, and NaN stays.
__device__ __forceinline__ u32 factors_of(u32 scale) {
    u32 factors;
    asm("{\n"
        ".reg .f32 f;\n"
        "min.NaN.f32 f, %1, 0f437F0000;\n"
        "mul.f32 f, f, 0f7B800000;\n"
        "cvt.rn.bf16x2.f32 %0, f, f;\n"
        "}"
        : "=r"(factors)
        : "f"(__uint_as_float(scale)));
    return factors;
}

// Four fp8 numbers as bfloat16, two in each result. It is exact if the scale is a power of two, as Fp8Format makes them;
// another scale was rounded to bfloat16. The lower bytes of all four results are made together, and so are the upper ones.
__device__ __forceinline__ void scaled(u32 numbers, u32 factors, u32& first, u32& second) {
    asm("{\n"
        ".reg .b32 a, b, c, d;\n"
        "shl.b32 a, %2, 4;\n"
        "shr.u32 b, %2, 4;\n"
        "and.b32 a, a, 0xf0f0f0f0;\n"
        "and.b32 b, b, 0x07070707;\n"
        "lop3.b32 b, %2, 0x80808080, b, 0xEA;\n"
        "prmt.b32 c, a, b, 0x5140;\n"
        "prmt.b32 d, a, b, 0x7362;\n"
        "mul.rn.bf16x2 %0, c, %3;\n"
        "mul.rn.bf16x2 %1, d, %3;\n"
        "}"
        : "=r"(first), "=r"(second)
        : "r"(numbers), "r"(factors));
}

// A tile in shared memory, and what is added to the scores of its items: 0, or NEVER where there is none.
struct Tile {
    u8* panels;   // [PANELS, TILE_ITEMS, ROW_BYTES]
    u32* biases;  // [TILE_ITEMS], float32
};

// A lane's part of an item on its way, in registers. Of both halves of an item the first is written and read first.
class ItemPart {
    uint4 latents_[LATENT_PANELS];
    uint4 scales_;
    uint4 ropes_[2];
    u32 later_factors_[HALF_SCALES];  // of the half that is written next
    bool exists_;

    __device__ __forceinline__ static int part() { return lane_id() % LANES_OF_ITEM; }
    __device__ __forceinline__ static const uint4* find(const u8* items, int row) {
        return reinterpret_cast<const uint4*>(items + static_cast<i64>(row) * ITEM_BYTES);
    }
    template <int FIRST>
    __device__ __forceinline__ void read_latents(const uint4* item, bool exists) {
#pragma unroll
        for (int panel = FIRST; panel < FIRST + HALF_PANELS; ++panel) {
            latents_[panel] = exists ? item[LANES_OF_ITEM * panel + part()] : make_uint4(0, 0, 0, 0);
        }
    }
    template <int FIRST>
    __device__ __forceinline__ void write_latents(u8* panels, int at, const u32 (&factors)[HALF_SCALES]) const {
        u8* const first = panels + swizzled(at, 2 * part());
        u8* const second = panels + swizzled(at, 2 * part() + 1);
#pragma unroll
        for (int panel = FIRST; panel < FIRST + HALF_PANELS; ++panel) {
            const uint4& stored = latents_[panel];
            const u32 factor = factors[(panel - FIRST) * HALF_SCALES / HALF_PANELS];
            uint4 low, high;
            scaled(stored.x, factor, low.x, low.y);
            scaled(stored.y, factor, low.z, low.w);
            scaled(stored.z, factor, high.x, high.y);
            scaled(stored.w, factor, high.z, high.w);
            *reinterpret_cast<uint4*>(first + panel * PANEL_BYTES) = low;
            *reinterpret_cast<uint4*>(second + panel * PANEL_BYTES) = high;
        }
    }

  public:
    // row: of `items`, or -1 for none, which is written as zeros.
    __device__ __forceinline__ void read_first_half(const u8* items, int row) {
        exists_ = row >= 0;
        read_latents<0>(find(items, row), exists_);
        scales_ = exists_ ? find(items, row)[LATENT / 16] : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void read_second_half(const u8* items, int row) {
        read_latents<HALF_PANELS>(find(items, row), row >= 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ropes_[i] = row >= 0 ? find(items, row)[LATENT / 16 + 1 + 2 * part() + i] : make_uint4(0, 0, 0, 0);
        }
    }

    // Write to row `at` of a tile.
    __device__ __forceinline__ void write_first_half(const Tile& tile, int at) {
        const u32 factors[HALF_SCALES] = {factors_of(scales_.x), factors_of(scales_.y)};
        later_factors_[0] = factors_of(scales_.z);
        later_factors_[1] = factors_of(scales_.w);
        write_latents<0>(tile.panels, at, factors);
        if (part() == 0) tile.biases[at] = exists_ ? 0 : NEVER;
    }
    __device__ __forceinline__ void write_second_half(const Tile& tile, int at) const {
        write_latents<HALF_PANELS>(tile.panels, at, later_factors_);
        u8* const ropes = tile.panels + LATENT_PANELS * PANEL_BYTES;
        *reinterpret_cast<uint4*>(ropes + swizzled(at, 2 * part())) = ropes_[0];
        *reinterpret_cast<uint4*>(ropes + swizzled(at, 2 * part() + 1)) = ropes_[1];
    }
};
