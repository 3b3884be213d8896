// SPDX-License-Identifier: Apache-2.0
// Gathering of input rows into L1, shared by the two data-movement kernels.
//
// A group is GROUP taps of the 32 rows of a block, in L1 a row-major matrix [32, GROUP * 2C]: what
// tilize_block takes. All reads of a group are issued before one barrier. The two kernels take the
// groups in turn, each into its own circular buffer.
#pragma once
#include "api/dataflow/dataflow_api.h"
#include "gather_conv.h"
#include "l1.h"

constexpr auto features_args = TensorAccessorArgs<0>();
constexpr auto table_args = TensorAccessorArgs<features_args.next_compile_time_args_offset()>();
constexpr auto counts_args = TensorAccessorArgs<table_args.next_compile_time_args_offset()>();
constexpr uint32_t NEXT_ARGS = counts_args.next_compile_time_args_offset();

using Words = volatile tt_l1_ptr uint32_t*;

// How many output rows there are; the page of counts is left at `l1`.
inline uint32_t read_count(uint32_t l1) {
    const auto counts = TensorAccessor(counts_args, get_common_arg_val<uint32_t>(COUNTS));
    noc_async_read(counts.get_noc_addr(0), l1, COUNT_BYTES);
    noc_async_read_barrier();
    return reinterpret_cast<Words>(l1)[get_common_arg_val<uint32_t>(COUNT_INDEX)];
}

template <uint32_t cb_rows, uint32_t cb_table, uint32_t turn>
class Gather {
public:
    Gather() :
        features(features_args, get_common_arg_val<uint32_t>(FEATURES)),
        table(table_args, get_common_arg_val<uint32_t>(TABLE)),
        first_block(get_common_arg_val<uint32_t>(TABLE_FIRST_BLOCK)),
        words(get_write_ptr(cb_table)),  // scratch: never pushed, nobody waits for it
        zeros(get_noc_addr(words + WORD_BYTES)) {
        clear(words + WORD_BYTES, ZERO_BYTES);
        finish_stores(words + WORD_BYTES + ZERO_BYTES - 4);
    }

    // Brings the words of a block into L1.
    void read_table(uint32_t block) {
        noc_async_read(table.get_noc_addr(first_block + block), words, WORD_BYTES);
        noc_async_read_barrier();
    }

    // Pushes this kernel's share of the groups of the block whose words are in L1.
    void push_block() {
        for (uint32_t tap = 0; tap < ALL_TAPS; tap += GROUP) {
            if (next_group++ % 2 == turn) {
                push_group(tap);
            }
        }
    }

    Words column(uint32_t index) const { return reinterpret_cast<Words>(words) + index * TILE; }

private:
    static constexpr uint32_t WORD_BYTES = COLUMNS * TILE * 4;
    static constexpr uint32_t SLOT_BYTES = TAP_TILES * CHUNK_BYTES;  // an input row
    static constexpr uint32_t STORED_BYTES = 64;  // zeros that are stored, not copied
    static constexpr uint32_t ZERO_BYTES = (GROUP % TAPS ? 1 : TAPS) * SLOT_BYTES;

    static void clear(uint32_t l1, uint32_t bytes) {
        for (uint32_t i = 0; i < bytes / 4; ++i) {
            reinterpret_cast<Words>(l1)[i] = 0;
        }
    }

    void read_row(uint32_t row, uint32_t slot) {
        noc_async_read<SLOT_BYTES>(features.get_noc_addr(row), slot, SLOT_BYTES);
    }

    // Few stores, or a copy within L1.
    template <uint32_t bytes>
    void zero(uint32_t slot) {
        if constexpr (bytes <= STORED_BYTES) {
            clear(slot, bytes);
        } else {
            noc_async_read<bytes>(zeros, slot, bytes);
        }
    }

    void push_group(uint32_t tap) {
        cb_reserve_back(cb_rows, GROUP_TILES);
        const uint32_t l1 = get_write_ptr(cb_rows);
        if constexpr (GROUP % TAPS == 0) {
            for (uint32_t k = 0; k < GROUP / TAPS; ++k) {
                push_column(column(tap / TAPS + k), l1 + k * TAPS * SLOT_BYTES);
            }
        } else {
            static_assert(GROUP == 1);
            push_tap(column(tap / TAPS), tap % TAPS, l1);
        }
        noc_async_read_barrier();
        if constexpr (SLOT_BYTES <= STORED_BYTES) {
            finish_stores(l1 + GROUP_TILES * TILE_BYTES - 4);
        }
        cb_push_back(cb_rows, GROUP_TILES);
    }

    void push_column(Words word, uint32_t l1) {
        for (uint32_t r = 0; r < TILE; ++r, l1 += GROUP * SLOT_BYTES) {
            const uint32_t mask = word[r];
            if (!mask) {
                zero<TAPS * SLOT_BYTES>(l1);
                continue;
            }
            uint32_t row = mask >> 3;
            uint32_t slot = l1;
            for (uint32_t t = 0; t < TAPS; ++t, slot += SLOT_BYTES) {
                if (mask >> t & 1) {
                    read_row(row++, slot);
                } else {
                    zero<SLOT_BYTES>(slot);
                }
            }
        }
    }

    void push_tap(Words word, uint32_t tap, uint32_t l1) {
        for (uint32_t r = 0; r < TILE; ++r, l1 += SLOT_BYTES) {
            const uint32_t mask = word[r];
            if (mask >> tap & 1) {
                uint32_t row = mask >> 3;
                for (uint32_t t = 0; t < tap; ++t) {
                    row += mask >> t & 1;
                }
                read_row(row, l1);
            } else {
                zero<SLOT_BYTES>(l1);
            }
        }
    }

    decltype(TensorAccessor(features_args, 0)) features;
    decltype(TensorAccessor(table_args, 0)) table;
    const uint32_t first_block;
    const uint32_t words;
    const uint64_t zeros;
    uint32_t next_group = 0;  // of all blocks: so an odd number of groups is shared evenly too
};
