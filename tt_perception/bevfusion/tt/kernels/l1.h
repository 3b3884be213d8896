// SPDX-License-Identifier: Apache-2.0
// When others see what a data-movement processor has put into L1 with plain stores.
#pragma once
#include <cstdint>

// After it, the NoC and the other processors of the core see the stores before it. They may
// overtake each other on their way to L1 and to registers, and a fence does not order these; so
// the last word is loaded again and waited for.
inline void finish_stores(uint32_t last_word) {
    asm volatile("fence" ::: "memory");
    const uint32_t value = *reinterpret_cast<volatile uint32_t*>(last_word);
    asm volatile("andi zero, %0, 0" ::"r"(value) : "memory");
}
