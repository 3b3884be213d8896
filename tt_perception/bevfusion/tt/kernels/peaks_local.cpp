// SPDX-License-Identifier: Apache-2.0
// One strip of the heat map: ranks its logits, suppresses what is no local maximum, and writes a
// sorted list of its best candidates to DRAM. One core a strip.
#include "peaks.h"

using namespace peaks;

constexpr uint32_t cb = get_compile_time_arg_val(0);
constexpr uint32_t size_x = get_compile_time_arg_val(1);
constexpr uint32_t size_y = get_compile_time_arg_val(2);
constexpr uint32_t classes = get_compile_time_arg_val(3);
constexpr uint32_t pooled_classes = get_compile_time_arg_val(4);  // one bit a class
constexpr uint32_t page_bytes = get_compile_time_arg_val(5);      // a cell's logits
constexpr uint32_t strip_rows = get_compile_time_arg_val(6);      // the last strip may have fewer
constexpr uint32_t keep = get_compile_time_arg_val(7);            // entries of a list at most
constexpr uint32_t list_bytes = get_compile_time_arg_val(8);
// Places of the regions in L1; the logits come first, at 0.
constexpr uint32_t ranks_at = get_compile_time_arg_val(9);
constexpr uint32_t entries_at = get_compile_time_arg_val(10);
constexpr uint32_t spare_at = get_compile_time_arg_val(11);
constexpr uint32_t suppressed_at = get_compile_time_arg_val(12);
constexpr uint32_t counts_at = get_compile_time_arg_val(13);
constexpr auto logits_args = TensorAccessorArgs<14>();
constexpr auto lists_args = TensorAccessorArgs<logits_args.next_compile_time_args_offset()>();

constexpr uint32_t plane = (strip_rows + 2) * size_y;  // a class: the strip, a row on each side
constexpr uint32_t DIGITS = 256;
constexpr uint32_t PASSES = 4;

// Fills the planes from the pages of `cells` cells, which begin at row 0 or 1 of the planes.
void rank_logits(const Pages& pages, uint32_t cells, uint32_t* ranks) {
    auto cell = pages.walk();
    for (uint32_t i = 0; i < cells; ++i, ++cell) {
        auto logit = at<const uint32_t>(*cell);
        uint32_t* rank = ranks + i;
#pragma GCC unroll 8
        for (uint32_t c = 0; c < classes; ++c, rank += plane) {
            *rank = rank_of(logit[c]);
        }
    }
}

// Candidates of a strip in ascending index, those that survive apart from the suppressed ones.
struct Candidates {
    Entry* survivor;
    uint32_t* suppressed;

    void survive(uint32_t rank, uint32_t index) { *survivor++ = {rank, index}; }
    void suppress(uint32_t index) { *suppressed++ = index; }
};

inline uint32_t least(uint32_t a, uint32_t b) { return b < a ? b : a; }

// A row of a pooled class that has neighbours on both sides. A cell survives if none of its eight
// neighbours is greater, that is if its rank is the least of the nine; the two ends never do.
void list_maxima(const uint32_t* row, uint32_t index, Candidates& to) {
    const auto column = [row](uint32_t y) {
        return least(least(row[y - size_y], row[y]), row[y + size_y]);
    };
    Candidates list = to;
    list.suppress(index);
    uint32_t left = column(0);
    uint32_t middle = column(1);
    for (uint32_t y = 1; y + 1 < size_y; ++y) {
        const uint32_t right = column(y + 1);
        const uint32_t rank = row[y];
        if (rank == least(least(left, middle), right)) {
            list.survive(rank, index + y);
        } else {
            list.suppress(index + y);
        }
        left = middle;
        middle = right;
    }
    list.suppress(index + size_y - 1);
    to = list;
}

void list_all(const uint32_t* row, uint32_t index, Candidates& to) {
    Candidates list = to;
    for (uint32_t y = 0; y < size_y; ++y) {
        list.survive(row[y], index + y);
    }
    to = list;
}

void suppress_all(uint32_t index, Candidates& to) {
    for (uint32_t y = 0; y < size_y; ++y) {
        to.suppress(index + y);
    }
}

// `ranks` begin with the row before the strip.
Candidates list_strip(const uint32_t* ranks, uint32_t first, uint32_t rows, Candidates list) {
    for (uint32_t c = 0; c < classes; ++c) {
        for (uint32_t r = 0; r < rows; ++r) {
            const uint32_t x = first + r;
            const uint32_t* row = ranks + c * plane + (r + 1) * size_y;
            const uint32_t index = (c * size_x + x) * size_y;
            if (!(pooled_classes >> c & 1)) {
                list_all(row, index, list);
            } else if (x == 0 || x + 1 == size_x) {
                suppress_all(index, list);
            } else {
                list_maxima(row, index, list);
            }
        }
    }
    return list;
}

// How many entries have each value of each of the four digits, then where the entries of that
// value begin. The four counters are loaded before any is stored: a load from L1 takes several
// cycles.
void count_digits(const Entry* entries, uint32_t n, uint32_t* counts) {
    for (uint32_t i = 0; i < PASSES * DIGITS; ++i) {
        counts[i] = 0;
    }
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t rank = entries[i].rank;
        uint32_t* const first = counts + (rank & 0xFF);
        uint32_t* const second = counts + DIGITS + (rank >> 8 & 0xFF);
        uint32_t* const third = counts + 2 * DIGITS + (rank >> 16 & 0xFF);
        uint32_t* const fourth = counts + 3 * DIGITS + (rank >> 24);
        const uint32_t found[PASSES] = {*first, *second, *third, *fourth};
        *first = found[0] + 1;
        *second = found[1] + 1;
        *third = found[2] + 1;
        *fourth = found[3] + 1;
    }
    for (uint32_t pass = 0; pass < PASSES; ++pass) {
        uint32_t begin = 0;
        for (uint32_t i = 0; i < DIGITS; ++i, ++counts) {
            const uint32_t count = *counts;
            *counts = begin;
            begin += count;
        }
    }
}

// Sorts by rank; entries of equal rank keep their order. Four passes bring the result back to
// `entries`.
void sort(Entry* entries, Entry* spare, uint32_t n, uint32_t* counts) {
    count_digits(entries, n, counts);
    for (uint32_t shift = 0; shift < 8 * PASSES; shift += 8, counts += DIGITS) {
        for (uint32_t i = 0; i < n; ++i) {
            const Entry entry = entries[i];
            spare[counts[entry.rank >> shift & 0xFF]++] = entry;
        }
        Entry* sorted = spare;
        spare = entries;
        entries = sorted;
    }
}

// Survivors first, then the suppressed ones as far as they are needed, then the end.
void finish_list(Entry* list, uint32_t survivors, const uint32_t* suppressed,
                 const uint32_t* last) {
    uint32_t n = survivors < keep ? survivors : keep;
    for (; n < keep && suppressed < last; ++n) {
        list[n] = {SUPPRESSED, *suppressed++};
    }
    for (; n < list_bytes / sizeof(Entry); ++n) {
        list[n] = END;
    }
}

void kernel_main() {
    const auto logits = TensorAccessor(logits_args, get_arg_val<uint32_t>(0));
    const auto lists = TensorAccessor(lists_args, get_arg_val<uint32_t>(1));
    const uint32_t strip = get_arg_val<uint32_t>(2);
    const uint32_t l1 = aligned(get_write_ptr(cb));
    auto ranks = at<uint32_t>(l1 + ranks_at);
    auto entries = at<Entry>(l1 + entries_at);
    auto suppressed = at<uint32_t>(l1 + suppressed_at);

    const uint32_t first = strip * strip_rows;
    const uint32_t rows = size_x - first < strip_rows ? size_x - first : strip_rows;
    const uint32_t read_from = first ? first - 1 : 0;
    const uint32_t read_to = first + rows < size_x ? first + rows + 1 : size_x;
    const uint32_t cells = (read_to - read_from) * size_y;
    const Pages pages(l1, cells, page_bytes);
    pages.read(logits, read_from * size_y);
    finish_reads();
    rank_logits(pages, cells, ranks + (read_from + 1 - first) * size_y);

    const Candidates end = list_strip(ranks, first, rows, {entries, suppressed});
    const uint32_t survivors = end.survivor - entries;
    sort(entries, at<Entry>(l1 + spare_at), survivors, at<uint32_t>(l1 + counts_at));
    finish_list(entries, survivors, suppressed, end.suppressed);
    finish_stores(l1 + entries_at + list_bytes - sizeof(uint32_t));
    noc_async_write(l1 + entries_at, lists.get_noc_addr(strip), list_bytes);
    noc_async_write_barrier();
}
