// Checksums of large arrays, at the speed of memory.
#pragma once

#include <cstdint>

namespace drq {

// Bytes that one sum covers.
constexpr int64_t kChecksumBlock = 1 << 13;

// sums[b] = sum over i of keys[i] * word[i] mod 2^64 for the 32-bit words of block b of the data; the last block is
// filled up with zeros. keys[i] is odd, so that every change within one word changes the sum. A change of several words
// goes unnoticed where the differences, times these keys, add up to 0: one in 2^32 at worst.
void block_sums(const uint8_t* data, int64_t bytes, const uint64_t* keys, uint64_t* sums, int threads);

}  // namespace drq
