// SPDX-License-Identifier: Apache-2.0
// First data-movement kernel: tells compute the count, gathers half of the groups, and reads the
// residual rows.
#include "gather_conv_rows.h"

namespace {

constexpr auto residual_args = TensorAccessorArgs<NEXT_ARGS>();

// The channels of this part of a block's own rows, [hi|lo] a row. Rows from `rows` on stay as they
// are: they reach only output rows that nobody writes.
template <typename Accessor>
void push_residual(const Accessor& residual, uint32_t first_row, uint32_t rows, uint32_t part) {
    constexpr uint32_t row_bytes = RESIDUAL_TILES * CHUNK_BYTES;
    constexpr bool whole = RESIDUAL_TILES == 1;  // 16 channels: hi and lo fit into one tile
    constexpr uint32_t chunk = whole ? row_bytes : row_bytes / 2;
    const uint32_t hi_at = part * chunk;
    const uint32_t lo_at = CHANNELS_OUT * 2 + hi_at;
    cb_reserve_back(CB_RESIDUAL, RESIDUAL_TILES);
    uint32_t l1 = get_write_ptr(CB_RESIDUAL);
    for (uint32_t r = 0; r < rows; ++r, l1 += row_bytes) {
        const uint32_t row = first_row + r;
        noc_async_read<chunk>(residual.get_noc_addr(row, hi_at), l1, chunk);
        if constexpr (!whole) {
            noc_async_read<chunk>(residual.get_noc_addr(row, lo_at), l1 + chunk, chunk);
        }
    }
    noc_async_read_barrier();
    cb_push_back(CB_RESIDUAL, RESIDUAL_TILES);
}

// The three columns of the ones tile that meet the terms of the bias: 0, 8 and 16. A tile is four
// faces of 16 x 16; a row of a face is 8 words.
template <typename Table>
void push_present(const Table& gather) {
    constexpr uint32_t face = 16 * 8;
    cb_reserve_back(CB_PRESENT, 1);
    auto tile = reinterpret_cast<Words>(get_write_ptr(CB_PRESENT));
    for (uint32_t r = 0; r < TILE; ++r) {
        uint32_t any = 0;
        for (uint32_t k = 0; k < COLUMNS; ++k) {
            any |= gather.column(k)[r];
        }
        const uint32_t value = any ? 0x3f80 : 0;
        const Words row = tile + r / 16 * 2 * face + r % 16 * 8;
        row[0] = value;
        row[4] = value;
        row[face] = value;
    }
    finish_stores(reinterpret_cast<uint32_t>(tile) + TILE_BYTES - 4);
    cb_push_back(CB_PRESENT, 1);
}

void clear_present() {
    auto tiles = reinterpret_cast<Words>(get_write_ptr(CB_PRESENT));
    for (uint32_t i = 0; i < 2 * TILE_BYTES / 4; ++i) {
        tiles[i] = 0;
    }
}

}  // namespace

void kernel_main() {
    const uint32_t part = get_arg_val<uint32_t>(PART);
    cb_reserve_back(CB_COUNT, 1);
    const uint32_t count = read_count(get_write_ptr(CB_COUNT));
    cb_push_back(CB_COUNT, 1);
    const Share share =
        share_of(count, get_arg_val<uint32_t>(RANK), get_arg_val<uint32_t>(CORES));
    const auto residual =
        TensorAccessor(residual_args, get_common_arg_val<uint32_t>(RESIDUAL));

    if constexpr (WHERE_PRESENT) {
        clear_present();
    }
    Gather<CB_ROWS, CB_TABLE, 0> gather;
    for (uint32_t block = share.first; block < share.end; ++block) {
        gather.read_table(block);
        gather.push_block();
        if constexpr (WHERE_PRESENT) {
            push_present(gather);
        }
        if constexpr (RESIDUAL_TILES > 0) {
            const uint32_t left = count - block * TILE;
            push_residual(residual, block * TILE, left < TILE ? left : TILE, part);
        }
    }
}
