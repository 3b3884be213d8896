// SPDX-License-Identifier: Apache-2.0
// Vector unit: the end of a block, from sums in DST to what is packed.
//
// The matrix unit, as the functional simulator has it, brings the products of eight neighbouring
// channels to the exponent of the greatest one and rounds them there to 12 bits. So hi is not y rounded to bf16, but y rounded to
// a multiple of one step a row, less than 128 steps in size: such products lose nothing.
// lo = y - hi.
#pragma once
#include "llk_math_eltwise_unary_sfpu_macros.h"
#include "sfpi.h"

namespace gather_conv {

constexpr uint32_t TILE_REGISTERS = 32;  // a tile in DST as the vector unit counts it
constexpr uint32_t FACE_REGISTERS = 8;   // a face of 16 x 16: registers of 4 rows x 8 columns

// Where register i of the 4 rows of a row of tiles is: left face even and odd columns, right face.
constexpr uint32_t place(uint32_t i) {
    return i / 4 * TILE_REGISTERS + i % 4 / 2 * FACE_REGISTERS + i % 2;
}

// Four rows of all tiles: y = first sums + second sums, ReLU, and for pairs the split into hi, in
// the place of y, and lo, in the tiles behind.
template <uint32_t tiles, bool relu, bool pairs>
sfpi_inline void finish_four_rows() {
    sfpi::vFloat greatest = 0.0f;  // of what each lane saw
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 4 * tiles; ++i) {
        sfpi::vFloat y = sfpi::dst_reg[place(i)];
        sfpi::vFloat second = sfpi::dst_reg[place(i) + tiles * TILE_REGISTERS];
        y = y + second;
        if constexpr (relu) {
            second = 0.0f;
            sfpi::vec_min_max(second, y);
        }
        sfpi::dst_reg[place(i)] = y;
        if constexpr (pairs) {
            y = sfpi::abs(y);
            sfpi::vec_min_max(y, greatest);
        }
    }
    if constexpr (pairs) {
        sfpi::vFloat turned = greatest;
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 7; ++i) {  // eight lanes hold a row
            turned = sfpi::subvec_shflror1(turned);
            sfpi::vFloat other = turned;
            sfpi::vec_min_max(other, greatest);
        }
        // Numbers of this size are 2^-6 of the greatest one's power of two apart. The factor keeps
        // the greatest one below 128 steps once it is rounded.
        greatest = greatest * (1.0f + 1.0f / 128);
        const sfpi::vInt exponent =
            sfpi::exexp(greatest, sfpi::ExponentMode::Biased) + (23 - 6);
        const sfpi::vFloat magic = sfpi::setexp(sfpi::vFloat(1.5f), exponent);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 4 * tiles; ++i) {
            const sfpi::vFloat y = sfpi::dst_reg[place(i)];
            const sfpi::vFloat shifted = y + magic;
            const sfpi::vFloat hi = shifted - magic;
            sfpi::dst_reg[place(i)] = hi;
            sfpi::dst_reg[place(i) + tiles * TILE_REGISTERS] = y - hi;
        }
    }
}

template <uint32_t tiles, bool relu, bool pairs>
void finish_rows() {
    for (uint32_t half = 0; half < 2; ++half) {  // the upper faces, then the lower ones
        for (uint32_t quarter = 0; quarter < 4; ++quarter) {
            finish_four_rows<tiles, relu, pairs>();
            sfpi::dst_reg++;
            sfpi::dst_reg++;
        }
        for (uint32_t i = 0; i < FACE_REGISTERS; ++i) {
            sfpi::dst_reg++;
        }
    }
}

}  // namespace gather_conv

// DST: first sums in tiles 0 .. tiles - 1, second sums in the next ones -> y, or hi and lo.
template <uint32_t tiles, bool relu, bool pairs>
void finish_block() {
    SFPU_UNARY_INIT(unused);
    _llk_math_eltwise_unary_sfpu_params_(
        gather_conv::finish_rows<tiles, relu, pairs>, 0, VectorMode::None);
}
