#pragma once

#include <cstdint>
#include <functional>

namespace drq {

// Calls work(begin, end, part) for consecutive parts of 0..items, one part per thread, and waits; the first exception
// is thrown again. The caller runs the first part, then every part that no thread has started.
//
// Threads are kept between calls, because Linux may leave a new thread waiting on the caller's core for longer than a
// search takes. A process creates its own threads after a fork. Nothing waits for them at exit. Several callers may
// share them.
void parallel_for(int64_t items, int threads, const std::function<void(int64_t, int64_t, int64_t)>& work);

}  // namespace drq
