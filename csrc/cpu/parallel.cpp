#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#ifdef _WIN32
#define DRQ_PROCESS 0
#else
#include <unistd.h>
#define DRQ_PROCESS static_cast<int64_t>(getpid())
#endif

namespace drq {
namespace {

// One call of parallel_for.
struct Job {
  const std::function<void(int64_t, int64_t, int64_t)>& work;
  int64_t items, parts, running = 0;
  std::vector<std::exception_ptr> failures;

  void run(int64_t part) noexcept {
    try {
      work(items * part / parts, items * (part + 1) / parts, part);
    } catch (...) {
      failures[part] = std::current_exception();
    }
  }
};

struct Task {
  Job* job;
  int64_t part;
};

class Pool {
 public:
  explicit Pool(int64_t process) : process(process) {}

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      waiting.reserve(waiting.size() + job.parts);  // the only statement that can throw, before any task is queued
      for (int64_t part = 1; part < job.parts; ++part) waiting.push_back({&job, part});
      start_threads(job.parts - 1);
    }
    begun.notify_all();
    job.run(0);
    std::unique_lock<std::mutex> lock(mutex);
    for (Task task{}; take(&job, task);) {
      lock.unlock();
      job.run(task.part);
      lock.lock();
    }
    ended.wait(lock, [&job] { return job.running == 0; });
  }

  const int64_t process;

 private:
  // If no thread can be started, the caller runs all parts.
  void start_threads(int64_t wanted) {
    try {
      for (; threads < wanted; ++threads) std::thread([this] { serve(); }).detach();
    } catch (...) {
    }
  }

  // Takes the first waiting task: of `job`, or of any job if it is null.
  bool take(const Job* job, Task& task) {
    const auto found =
        std::find_if(waiting.begin(), waiting.end(), [job](const Task& t) { return job == nullptr || t.job == job; });
    if (found == waiting.end()) return false;
    task = *found;
    waiting.erase(found);
    return true;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    for (Task task{};;) {
      begun.wait(lock, [&] { return take(nullptr, task); });
      ++task.job->running;
      lock.unlock();
      task.job->run(task.part);
      lock.lock();
      if (--task.job->running == 0) ended.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable begun, ended;
  std::vector<Task> waiting;
  int64_t threads = 0;
};

// Never destroyed: its threads sleep until the process ends. After a fork the parent's pool is left alone, because its
// locks may be in any state.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load();
  while (found == nullptr || found->process != DRQ_PROCESS) {
    Pool* fresh = new Pool(DRQ_PROCESS);
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

}  // namespace

void parallel_for(int64_t items, int threads, const std::function<void(int64_t, int64_t, int64_t)>& work) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, items));
  Job job{work, items, parts, 0, std::vector<std::exception_ptr>(parts)};
  if (parts == 1)
    job.run(0);
  else
    pool().run(job);
  for (const auto& failure : job.failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace drq
