#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace drq {

// Calls work(begin, end, part) for consecutive parts of 0..items, one part per thread, and waits. Threads live for one
// call only: nothing to break after a fork, nothing to wait for when the interpreter exits.
template <class Work>
void parallel_for(int64_t items, int threads, const Work& work) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, items));
  std::vector<std::thread> others;
  others.reserve(parts - 1);
  for (int64_t p = 1; p < parts; ++p)
    others.emplace_back([&, p] { work(items * p / parts, items * (p + 1) / parts, p); });
  work(int64_t{0}, items / parts, int64_t{0});
  for (auto& thread : others) thread.join();
}

}  // namespace drq
