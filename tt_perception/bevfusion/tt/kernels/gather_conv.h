// SPDX-License-Identifier: Apache-2.0
// What the three kernels of the gather convolution agree on; see gatherconv.py for the layouts.
#pragma once
#include <cstdint>
#include "api/compile_time_args.h"

constexpr uint32_t TILE = 32;           // rows and columns of a tile, rows of a block
constexpr uint32_t TILE_BYTES = 2048;   // of bf16
constexpr uint32_t CHUNK_BYTES = 64;    // a row of a bf16 tile column
constexpr uint32_t COUNT_BYTES = 64;    // the page of row counts

constexpr uint32_t CB_ROWS = 0;           // gathered rows of the reader, row major
constexpr uint32_t CB_ROWS_2 = 1;         // those of the writer
constexpr uint32_t CB_TABLE = 2;          // scratch of the reader: words of a block, zeros
constexpr uint32_t CB_TABLE_2 = 3;        // scratch of the writer: counts, later as above
constexpr uint32_t CB_TILES = 4;          // gathered rows of a block as tiles, then its residual
constexpr uint32_t CB_WEIGHTS = 5;        // weights, bias, identities and the ones of a part
constexpr uint32_t CB_COUNT = 6;          // counts, for compute
constexpr uint32_t CB_PRESENT = 7;        // ones in the rows that have a tap
constexpr uint32_t CB_RESIDUAL = 8;       // residual rows of a block, row major
constexpr uint32_t CB_OUT = 16;           // finished rows of a block, row major

constexpr uint32_t COLUMNS = get_named_compile_time_arg_val("columns");
constexpr uint32_t TAPS = get_named_compile_time_arg_val("taps");            // of a column
constexpr uint32_t GROUP = get_named_compile_time_arg_val("group");          // taps a push
constexpr uint32_t TAP_TILES = get_named_compile_time_arg_val("tap_tiles");  // [hi|lo] of a row
constexpr uint32_t OUT_TILES = get_named_compile_time_arg_val("out_tiles");  // channels of a part
constexpr uint32_t CHANNELS_OUT = get_named_compile_time_arg_val("channels_out");
constexpr uint32_t PART_CHANNELS = get_named_compile_time_arg_val("part_channels");
constexpr uint32_t RESIDUAL_TILES = get_named_compile_time_arg_val("residual_tiles");
constexpr bool RELU = get_named_compile_time_arg_val("relu");
constexpr bool PAIRS_OUT = get_named_compile_time_arg_val("pairs_out");
constexpr uint32_t OUT_ITEM = get_named_compile_time_arg_val("out_item");    // bytes of a number
constexpr bool WHERE_PRESENT = get_named_compile_time_arg_val("where_present");

constexpr uint32_t ALL_TAPS = COLUMNS * TAPS;
constexpr uint32_t GROUPS = ALL_TAPS / GROUP;
constexpr uint32_t GROUP_TILES = GROUP * TAP_TILES;
constexpr uint32_t INNER_TILES = ALL_TAPS * TAP_TILES;
// Rows of weight tiles a tap: the hi and the lo tile of the same channels take the same one.
constexpr uint32_t TAP_WEIGHTS = TAP_TILES == 1 ? 1 : TAP_TILES / 2;
// A row of weight tiles: the first terms of the weights of the part's channels, then the second.
constexpr uint32_t WEIGHT_TILES = 2 * OUT_TILES;
constexpr uint32_t BIAS_AT = ALL_TAPS * TAP_WEIGHTS * WEIGHT_TILES;
constexpr uint32_t IDENTITY_AT = BIAS_AT + WEIGHT_TILES;
constexpr uint32_t ONES_AT = IDENTITY_AT + (RESIDUAL_TILES ? OUT_TILES * WEIGHT_TILES : 0);
constexpr uint32_t CONSTANT_TILES = ONES_AT + 1;
constexpr uint32_t ROW_TILES = (PAIRS_OUT ? 2 : 1) * OUT_TILES;  // of a finished row

// Common run-time arguments of the two data-movement kernels.
enum Common : uint32_t {
    FEATURES, TABLE, COUNTS, WEIGHTS, OUT, RESIDUAL,
    COUNT_INDEX, TABLE_FIRST_BLOCK,
    ROWS_PER_PAGE, WIDTH, OUTER, INNER, OFFSET, HI_BYTES, LO_BYTES,
};
// Run-time arguments of each core, of all three kernels.
enum Core : uint32_t { PART, RANK, CORES };

struct Share {
    uint32_t first;
    uint32_t end;
};

// The blocks of one of the cores that share a part: contiguous, as even as possible.
inline Share share_of(uint32_t count, uint32_t rank, uint32_t cores) {
    const uint32_t blocks = (count + TILE - 1) / TILE;
    return {blocks * rank / cores, blocks * (rank + 1) / cores};
}
