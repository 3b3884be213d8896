// SPDX-License-Identifier: Apache-2.0
// Compute of the gather convolution, block by block of 32 rows: gathered rows to tiles, product
// with the weights summed in fp32 in DST, bias, residual, ReLU, split into [hi|lo], back to rows.
//
// Turning rows into tiles goes through DST as well, so all of it comes first (CB_TILES holds a
// whole block); the sum then stays in DST from the first tap to the last.
#include "gather_conv.h"
#include "api/compute/compute_kernel_hw_startup.h"
#include "api/compute/eltwise_unary/eltwise_unary.h"
#include "api/compute/matmul.h"
#include "api/compute/pack.h"
#include "api/compute/pack_untilize.h"
#include "api/compute/reconfig_data_format.h"
#include "api/compute/tilize.h"

#ifdef TRISC_MATH
#include "gather_conv_split.h"
#endif

namespace {

void tilize_groups(uint32_t& next_group) {
    tilize_init(CB_ROWS, GROUP_TILES, CB_TILES);
    for (uint32_t g = 0; g < GROUPS; ++g) {
        const uint32_t rows = next_group++ % 2 ? CB_ROWS_2 : CB_ROWS;  // of one format
        cb_wait_front(rows, GROUP_TILES);
        cb_reserve_back(CB_TILES, GROUP_TILES);
        tilize_block(rows, GROUP_TILES, CB_TILES);
        cb_push_back(CB_TILES, GROUP_TILES);
        cb_pop_front(rows, GROUP_TILES);
    }
    tilize_uninit(CB_ROWS, CB_TILES);
}

void tilize_residual() {
    tilize_init(CB_RESIDUAL, RESIDUAL_TILES, CB_TILES);
    cb_wait_front(CB_RESIDUAL, RESIDUAL_TILES);
    cb_reserve_back(CB_TILES, RESIDUAL_TILES);
    tilize_block(CB_RESIDUAL, RESIDUAL_TILES, CB_TILES);
    cb_push_back(CB_TILES, RESIDUAL_TILES);
    cb_pop_front(CB_RESIDUAL, RESIDUAL_TILES);
    tilize_uninit(CB_RESIDUAL, CB_TILES);
}

// Adds a tile of rows times a row of weight tiles to DST 0 .. WEIGHT_TILES - 1.
void multiply(uint32_t rows, uint32_t row_tile, uint32_t weight_tile) {
    matmul_block(rows, CB_WEIGHTS, row_tile, weight_tile, 0, 0, WEIGHT_TILES, 1, 1);
}

void sum_block() {
    matmul_block_init(CB_TILES, CB_WEIGHTS, 0, WEIGHT_TILES, 1, 1);
    uint32_t tile = 0;
    for (uint32_t tap = 0; tap < ALL_TAPS; ++tap) {
        for (uint32_t j = 0; j < TAP_TILES; ++j) {
            const uint32_t weight_row = tap * TAP_WEIGHTS + j % TAP_WEIGHTS;
            multiply(CB_TILES, tile++, weight_row * WEIGHT_TILES);
        }
    }
    // Ones times the terms of the bias, and residual times identity: the mode stays the same.
    if constexpr (WHERE_PRESENT) {
        multiply(CB_PRESENT, 0, BIAS_AT);
    } else {
        multiply(CB_WEIGHTS, ONES_AT, BIAS_AT);
    }
    for (uint32_t j = 0; j < RESIDUAL_TILES; ++j) {
        multiply(CB_TILES, tile++, IDENTITY_AT + j % OUT_TILES * WEIGHT_TILES);
    }
}

}  // namespace

void kernel_main() {
    compute_kernel_hw_startup<SrcOrder::Reverse>(CB_TILES, CB_WEIGHTS, CB_OUT);
    // Reading DST row by row needs its address remap on Blackhole, which may only be switched
    // while DST is idle. Once is enough; the init in the loop leaves it alone.
    pack_untilize_dest_init<ROW_TILES>(CB_OUT);
    pack_untilize_uninit(CB_OUT);

    cb_wait_front(CB_COUNT, 1);
    const uint32_t count = read_tile_value(CB_COUNT, 0, get_common_arg_val<uint32_t>(0));
    const Share share =
        share_of(count, get_arg_val<uint32_t>(RANK), get_arg_val<uint32_t>(CORES));
    if (share.first == share.end) {
        return;
    }
    cb_wait_front(CB_WEIGHTS, CONSTANT_TILES);

    uint32_t next_group = 0;
    for (uint32_t block = share.first; block < share.end; ++block) {
        pack_reconfig_data_format(CB_TILES);
        tilize_groups(next_group);
        if constexpr (RESIDUAL_TILES > 0) {
            tilize_residual();
        }
        cb_wait_front(CB_TILES, INNER_TILES + RESIDUAL_TILES);
        if constexpr (WHERE_PRESENT) {
            cb_wait_front(CB_PRESENT, 1);
        }
        tile_regs_acquire();
        sum_block();
        MATH((finish_block<OUT_TILES, RELU, PAIRS_OUT>()));
        tile_regs_commit();
        cb_pop_front(CB_TILES, INNER_TILES + RESIDUAL_TILES);
        if constexpr (WHERE_PRESENT) {
            cb_pop_front(CB_PRESENT, 1);
        }

        cb_reserve_back(CB_OUT, ROW_TILES);
        tile_regs_wait();
        pack_reconfig_data_format(CB_OUT);
        pack_untilize_dest_init<ROW_TILES, ROW_TILES, false, TILE_C_DIM, false, false>(CB_OUT);
        pack_untilize_dest<ROW_TILES>(CB_OUT);
        pack_untilize_uninit(CB_OUT);
        tile_regs_release();
        cb_push_back(CB_OUT, ROW_TILES);
    }
}
