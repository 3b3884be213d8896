// SPDX-License-Identifier: Apache-2.0
// Second data-movement kernel: brings the weights of its part into L1 once, gathers half of the
// groups, and writes the finished rows, one block behind what it gathers.
#include "gather_conv_rows.h"

namespace {

constexpr auto weights_args = TensorAccessorArgs<NEXT_ARGS>();
constexpr auto out_args = TensorAccessorArgs<weights_args.next_compile_time_args_offset()>();

// Each core begins at another tile, so that they do not all ask the same bank of DRAM at once.
void load_constants(uint32_t part, uint32_t first) {
    const auto weights = TensorAccessor(weights_args, get_common_arg_val<uint32_t>(WEIGHTS));
    cb_reserve_back(CB_WEIGHTS, CONSTANT_TILES);
    const uint32_t l1 = get_write_ptr(CB_WEIGHTS);
    uint32_t t = first;
    do {
        noc_async_read<TILE_BYTES>(
            weights.get_noc_addr(part * CONSTANT_TILES + t), l1 + t * TILE_BYTES, TILE_BYTES);
        t = t + 1 == CONSTANT_TILES ? 0 : t + 1;
    } while (t != first);
    noc_async_read_barrier();
    cb_push_back(CB_WEIGHTS, CONSTANT_TILES);
}

// Writes finished rows to where the target has them: row r is slot r % rows_per_page of place
// q = r / rows_per_page, and place q is page offset + q / width * outer + q % width * inner.
class Target {
public:
    explicit Target(uint32_t part) :
        out(out_args, get_common_arg_val<uint32_t>(OUT)),
        rows_per_page(get_common_arg_val<uint32_t>(ROWS_PER_PAGE)),
        width(get_common_arg_val<uint32_t>(WIDTH)),
        outer(get_common_arg_val<uint32_t>(OUTER)),
        inner(get_common_arg_val<uint32_t>(INNER)),
        offset(get_common_arg_val<uint32_t>(OFFSET)),
        hi_at(get_common_arg_val<uint32_t>(HI_BYTES) + part * BYTES),
        lo_at(get_common_arg_val<uint32_t>(LO_BYTES) + part * BYTES) {}

    void write_block(uint32_t first_row, uint32_t rows) {
        cb_wait_front(CB_OUT, ROW_TILES);
        uint32_t l1 = get_read_ptr(CB_OUT);
        const uint32_t place = first_row / rows_per_page;
        uint32_t slot = first_row % rows_per_page;
        uint32_t across = place % width;
        uint32_t line = offset + place / width * outer;
        for (uint32_t r = 0; r < rows; ++r, l1 += ROW_TILES * TILE * OUT_ITEM) {
            const uint32_t page = line + across * inner;
            const uint32_t at = slot * CHANNELS_OUT * OUT_ITEM;
            noc_async_write<BYTES>(l1, out.get_noc_addr(page, hi_at + at), BYTES);
            if constexpr (PAIRS_OUT) {
                const uint32_t lo = l1 + OUT_TILES * CHUNK_BYTES;
                noc_async_write<BYTES>(lo, out.get_noc_addr(page, lo_at + at), BYTES);
            }
            if (++slot == rows_per_page) {
                slot = 0;
                if (++across == width) {
                    across = 0;
                    line += outer;
                }
            }
        }
        noc_async_writes_flushed();
        cb_pop_front(CB_OUT, ROW_TILES);
    }

private:
    static constexpr uint32_t BYTES = PART_CHANNELS * OUT_ITEM;

    decltype(TensorAccessor(out_args, 0)) out;
    const uint32_t rows_per_page, width, outer, inner, offset, hi_at, lo_at;
};

}  // namespace

void kernel_main() {
    const uint32_t part = get_arg_val<uint32_t>(PART);
    const uint32_t count = read_count(get_write_ptr(CB_TABLE_2));
    const uint32_t rank = get_arg_val<uint32_t>(RANK);
    const uint32_t cores = get_arg_val<uint32_t>(CORES);
    const Share share = share_of(count, rank, cores);
    if (share.first == share.end) {
        return;
    }
    load_constants(part, rank * CONSTANT_TILES / cores);
    Gather<CB_ROWS_2, CB_TABLE_2, 1> gather;
    Target target(part);
    const auto write = [&](uint32_t block) {
        const uint32_t left = count - block * TILE;
        target.write_block(block * TILE, left < TILE ? left : TILE);
    };
    for (uint32_t block = share.first; block < share.end; ++block) {
        gather.read_table(block);
        gather.push_block();
        if (block > share.first) {
            write(block - 1);
        }
    }
    write(share.end - 1);
    noc_async_write_barrier();
}
