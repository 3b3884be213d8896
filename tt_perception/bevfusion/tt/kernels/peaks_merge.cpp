// SPDX-License-Identifier: Apache-2.0
// Merges the sorted lists of all strips up to the number of proposals, and writes the proposals.
// One core.
#include "peaks.h"

using namespace peaks;

constexpr uint32_t cb = get_compile_time_arg_val(0);
constexpr uint32_t size_x = get_compile_time_arg_val(1);
constexpr uint32_t size_y = get_compile_time_arg_val(2);
constexpr uint32_t strips = get_compile_time_arg_val(3);
constexpr uint32_t leaves = get_compile_time_arg_val(4);  // strips, rounded up to a power of two
constexpr uint32_t list_bytes = get_compile_time_arg_val(5);
constexpr uint32_t proposals_wanted = get_compile_time_arg_val(6);
constexpr uint32_t proposals_padded = get_compile_time_arg_val(7);
// Places of the regions in L1; the lists come first, at 0.
constexpr uint32_t heads_at = get_compile_time_arg_val(8);
constexpr uint32_t tree_at = get_compile_time_arg_val(9);
constexpr uint32_t rows_at = get_compile_time_arg_val(10);
constexpr uint32_t cells_at = get_compile_time_arg_val(11);
constexpr auto lists_args = TensorAccessorArgs<12>();
constexpr auto proposals_args = TensorAccessorArgs<lists_args.next_compile_time_args_offset()>();
constexpr auto cells_args = TensorAccessorArgs<proposals_args.next_compile_time_args_offset()>();

constexpr uint32_t ROW_WORDS = 32;
constexpr uint32_t ROW_BYTES = ROW_WORDS * sizeof(uint32_t);
constexpr uint32_t FIRST_CLASS_COLUMN = 8;
constexpr uint32_t ONE = 0x3F800000;
constexpr uint32_t NO_LOGIT = 0xC61C4000;  // -10000.0
constexpr uint32_t NOBODY = 0xFFFFFFFF;

// The float of an integer below 2^24: its highest bit is the implied one, and the others follow
// it.
inline uint32_t float_of(uint32_t value) {
    if (value == 0) {
        return 0;
    }
    const uint32_t zeros = __builtin_clz(value);
    return ((127 + 31 - zeros) << 23) | ((value << zeros >> 8) & 0x7FFFFF);
}

struct Player {
    uint32_t rank;
    uint32_t index;
    uint32_t list;
};

// A tournament of the heads of all lists: each inner node keeps who lost there, so that after the
// winner left, its successor only has to play those on its own way up.
class Tournament {
public:
    // `heads` are the first entries of the lists; lists beyond them are empty.
    Tournament(const Entry** heads, Player* nodes) : heads(heads), nodes(nodes) {
        for (uint32_t node = 1; node < leaves; ++node) {
            nodes[node].list = NOBODY;
        }
        for (uint32_t list = 0; list < leaves; ++list) {
            enter(list);
        }
    }

    const Player& winner() const { return best; }

    // Replaces the winner by the next entry of its list.
    void next() {
        ++heads[best.list];
        best = head(best.list);
        for (uint32_t node = parent(best.list); node; node >>= 1) {
            play(nodes[node]);
        }
    }

private:
    static uint32_t parent(uint32_t list) { return (leaves + list) >> 1; }

    Player head(uint32_t list) const {
        const Entry entry = list < strips ? *heads[list] : END;
        return {entry.rank, entry.index, list};
    }

    void play(Player& other) {
        if (precedes(other.rank, other.index, best.rank, best.index)) {
            const Player loser = best;
            best = other;
            other = loser;
        }
    }

    // The first to come to a node waits there, the second plays; the last of all becomes the
    // winner.
    void enter(uint32_t list) {
        best = head(list);
        for (uint32_t node = parent(list); node; node >>= 1) {
            if (nodes[node].list == NOBODY) {
                nodes[node] = best;
                return;
            }
            play(nodes[node]);
        }
    }

    const Entry** const heads;
    Player* const nodes;
    Player best;
};

void write_row(uint32_t* row, uint32_t rank, uint32_t x, uint32_t y, uint32_t label) {
    row[0] = rank == SUPPRESSED ? NO_LOGIT : logit_of(rank);
    row[1] = float_of(x);
    row[2] = float_of(y);
    row[3] = float_of(label);
#pragma GCC unroll 28
    for (uint32_t i = 4; i < ROW_WORDS; ++i) {
        row[i] = 0;
    }
    row[FIRST_CLASS_COLUMN + label] = ONE;
}

void write_padding(uint32_t* row) {
    row[0] = NO_LOGIT;
    for (uint32_t i = 1; i < ROW_WORDS; ++i) {
        row[i] = 0;
    }
}

void kernel_main() {
    const auto lists = TensorAccessor(lists_args, get_arg_val<uint32_t>(0));
    const auto proposals = TensorAccessor(proposals_args, get_arg_val<uint32_t>(1));
    const auto cells = TensorAccessor(cells_args, get_arg_val<uint32_t>(2));
    const uint32_t l1 = aligned(get_write_ptr(cb));

    const Pages pages(l1, strips, list_bytes);
    pages.read(lists, 0);
    finish_reads();
    auto heads = at<const Entry*>(l1 + heads_at);
    auto list = pages.walk();
    for (uint32_t i = 0; i < strips; ++i, ++list) {
        heads[i] = at<const Entry>(*list);
    }
    Tournament tournament(heads, at<Player>(l1 + tree_at));

    const Pages rows(l1 + rows_at, proposals_padded, ROW_BYTES);
    auto row = rows.walk();
    auto cell_words = at<uint32_t>(l1 + cells_at);
    uint32_t i = 0;
    for (; i < proposals_wanted; ++i, ++row) {
        const Player best = tournament.winner();
        const uint32_t label = best.index / (size_x * size_y);
        const uint32_t cell = best.index - label * (size_x * size_y);
        const uint32_t x = cell / size_y;
        write_row(at<uint32_t>(*row), best.rank, x, cell - x * size_y, label);
        cell_words[i] = cell;
        tournament.next();
    }
    for (; i < proposals_padded; ++i, ++row) {
        write_padding(at<uint32_t>(*row));
        cell_words[i] = 0;
    }
    finish_stores(l1 + cells_at + (proposals_padded - 1) * sizeof(uint32_t));
    rows.write(proposals, 0);
    noc_async_write(l1 + cells_at, cells.get_noc_addr(0), proposals_padded * sizeof(uint32_t));
    noc_async_write_barrier();
}
