#pragma once

#include <cstdint>
#include <functional>

namespace drq {

// Calls work(begin, end, part) for consecutive parts of 0..items, one part per thread, and waits; the first exception
// is thrown again. The caller does a part, and those that no thread has begun by then.
//
// Threads are kept: where one is started anew, Linux may leave it waiting behind the caller on the same core for longer
// than a search takes. After a fork they are made anew, and nothing waits for them at exit. Several callers may share
// them.
void parallel_for(int64_t items, int threads, const std::function<void(int64_t, int64_t, int64_t)>& work);

}  // namespace drq
