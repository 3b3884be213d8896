// SPDX-License-Identifier: Apache-2.0
// What the two kernels of the proposal selection share: how logits are ordered, lists of entries,
// and how pages travel between DRAM and L1.
#pragma once
#include "api/dataflow/dataflow_api.h"
#include "l1.h"

namespace peaks {

// Ranks order logits as unsigned numbers, the greatest logit first. The cores compare integers
// only. Negative floats ascend in rank with their magnitude, positive ones descend; -0.0 and +0.0
// share the rank 0x7FFFFFFF. No float has the rank SUPPRESSED. A NaN has a rank like every other
// pattern: with a clear sign bit before +inf, with a set one after -inf.
constexpr uint32_t SUPPRESSED = 0xFFFFFFFF;

inline uint32_t rank_of(uint32_t logit) {
    const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(logit) >> 31);
    return (logit ^ (~sign & 0x7FFFFFFF)) + sign;
}

inline uint32_t logit_of(uint32_t rank) {
    return rank <= 0x7FFFFFFF ? rank ^ 0x7FFFFFFF : rank + 1;
}

// A candidate; index = class * cells + cell. Lists are sorted by rank, then by index.
struct Entry {
    uint32_t rank;
    uint32_t index;
};

inline bool precedes(uint32_t rank, uint32_t index, uint32_t other_rank, uint32_t other_index) {
    return rank < other_rank || (rank == other_rank && index < other_index);
}

// Ends a list: no entry comes after it.
constexpr Entry END{SUPPRESSED, 0xFFFFFFFF};

// DRAM reads need source and destination to agree modulo 64, and a circular buffer promises less.
inline uint32_t aligned(uint32_t address) { return (address + 63) & ~63u; }

template <typename T>
T* at(uint32_t address) {
    return reinterpret_cast<T*>(address);
}

// Pages of an interleaved tensor change the bank with each page, and pages of one bank lie side by
// side. So `count` pages travel as one transfer a bank; in L1 each bank has a stripe of its own,
// where its pages lie side by side as well.
class Pages {
public:
    static constexpr uint32_t BANKS = NUM_DRAM_BANKS;
    static_assert(BANKS <= 16, "the host leaves space for the unused ends of up to 16 stripes");

    Pages(uint32_t l1, uint32_t count, uint32_t page_bytes) :
        l1(l1), count(count), page_bytes(page_bytes), stripe(bytes_of(0)) {}

    // Starts the transfer of pages first, first + 1, ... of the tensor.
    template <typename Tensor>
    void read(const Tensor& tensor, uint32_t first) const {
        for (uint32_t bank = 0; bank < BANKS && bank < count; ++bank) {
            noc_async_read(tensor.get_noc_addr(first + bank), l1 + bank * stripe, bytes_of(bank));
        }
    }

    template <typename Tensor>
    void write(const Tensor& tensor, uint32_t first) const {
        for (uint32_t bank = 0; bank < BANKS && bank < count; ++bank) {
            noc_async_write(l1 + bank * stripe, tensor.get_noc_addr(first + bank), bytes_of(bank));
        }
    }

    // Walks over the pages in their order.
    class Walk {
    public:
        explicit Walk(const Pages& pages) :
            address(pages.l1),
            stripe(pages.stripe),
            back(BANKS * pages.stripe - pages.page_bytes) {}

        uint32_t operator*() const { return address; }

        void operator++() {
            address += stripe;
            if (++bank == BANKS) {
                bank = 0;
                address -= back;
            }
        }

    private:
        uint32_t address;
        uint32_t bank = 0;
        const uint32_t stripe;
        const uint32_t back;
    };

    Walk walk() const { return Walk(*this); }

private:
    uint32_t bytes_of(uint32_t bank) const {
        return (count - bank + BANKS - 1) / BANKS * page_bytes;
    }

    const uint32_t l1;
    const uint32_t count;
    const uint32_t page_bytes;
    const uint32_t stripe;
};

// After it, plain loads see what the NoC has read into L1.
inline void finish_reads() {
    noc_async_read_barrier();
    asm volatile("fence" ::: "memory");  // the barrier does not stop the compiler moving loads
}

}  // namespace peaks
