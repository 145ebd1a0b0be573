#include "checksum.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"

namespace drq {
namespace {

constexpr int64_t kWords = kChecksumBlock / 4;

uint64_t sum_of(const uint8_t* block, const uint64_t* keys) {
  uint64_t sums[4] = {};  // side by side, to hide the latency of a product
  for (int64_t i = 0; i < kWords; i += 4) {
    uint32_t words[4];
    std::memcpy(words, block + 4 * i, sizeof words);
    for (int64_t j = 0; j < 4; ++j) sums[j] += keys[i + j] * words[j];
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

void block_sums(const uint8_t* data, int64_t bytes, const uint64_t* keys, uint64_t* sums, int threads) {
  constexpr int64_t kWorthAThread = 1 << 7;  // blocks
  const int64_t blocks = (bytes + kChecksumBlock - 1) / kChecksumBlock;
  const auto work = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* block = data + b * kChecksumBlock;
      uint8_t last[kChecksumBlock];
      if ((b + 1) * kChecksumBlock > bytes) {
        std::memset(last, 0, sizeof last);
        std::memcpy(last, block, bytes - b * kChecksumBlock);
        block = last;
      }
      sums[b] = sum_of(block, keys);
    }
  };
  parallel_for(blocks, static_cast<int>(std::min<int64_t>(threads, blocks / kWorthAThread + 1)), work);
}

}  // namespace drq
