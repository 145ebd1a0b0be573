#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace drq {

// Calls work(begin, end, part) for consecutive parts of 0..items, one part per thread, and waits; the first exception
// is thrown again. Threads live for one call only: nothing to break after a fork, nothing to wait for when the
// interpreter exits. A part whose thread cannot be started is done by the caller.
template <class Work>
void parallel_for(int64_t items, int threads, const Work& work) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, items));
  std::vector<std::exception_ptr> failures(parts);
  const auto run = [&](int64_t part) noexcept {
    try {
      work(items * part / parts, items * (part + 1) / parts, part);
    } catch (...) {
      failures[part] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(parts - 1);
  for (int64_t part = 1; part < parts; ++part) {
    try {
      others.emplace_back(run, part);
    } catch (const std::system_error&) {
      run(part);
    }
  }
  run(0);
  for (auto& thread : others) thread.join();
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace drq
