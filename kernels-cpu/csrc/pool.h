// The threads that kernels share: the caller and workers that wait for it, a while awake and then asleep.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inferplane {

// Threads of a region, the caller included.
int num_threads();

// Calls task(context, index, thread) for every index below num_tasks, each once, on any of the threads; thread is below
// num_threads(). Returns when all are done. Regions of several callers follow one another; one that a task opens runs
// in that task's thread alone.
void run_tasks(int num_tasks, void (*task)(const void* context, int index, int thread), const void* context);

// run_tasks for anything callable as fn(index, thread). Tasks are handed out one at a time, so make several times as
// many as there are threads: a core that the host takes away then holds up one of them only.
template <class Fn>
inline void parallel(int num_tasks, const Fn& fn) {
  run_tasks(
      num_tasks, [](const void* context, int index, int thread) { (*static_cast<const Fn*>(context))(index, thread); },
      &fn);
}

// How many of `count` things, which take nanoseconds_each, make a task: a region takes some microseconds more than its
// tasks, and one that is too short is a single task.
inline int64_t things_per_task(int64_t count, double nanoseconds_each, int tasks_per_thread) {
  constexpr double kShortestTask = 2'000, kShortestRegion = 5'000;
  int64_t most = int64_t(num_threads()) * tasks_per_thread, per_task = int64_t(kShortestTask / nanoseconds_each);
  if (count * nanoseconds_each < kShortestRegion) per_task = count;
  if (per_task < (count + most - 1) / most) per_task = (count + most - 1) / most;
  return per_task < 1 ? 1 : per_task;
}

// Calls fn(first, end) for ranges that make up [0, count), in parallel where that is worth it.
template <class Fn>
inline void for_ranges(int64_t count, double nanoseconds_each, const Fn& fn) {
  int64_t per_task = things_per_task(count, nanoseconds_each, 8);
  parallel(int((count + per_task - 1) / per_task), [&](int task, int) {
    int64_t first = task * per_task, end = first + per_task;
    fn(first, end < count ? end : count);
  });
}

// Indices below `count`, handed out to `num_takers` threads, which each know one ahead where there are many.
class Queue {
 public:
  Queue(int64_t count, int num_takers) : count_(count), knows_next_(num_takers == 1 || count > kMany * num_takers) {}

  // Calls fn(index, next) for indices of this thread, next being the one that it will be called with then, or -1 where that
  // is not known: of few, one that a thread holds back may be one that another has no other work than.
  template <class Fn>
  void work_off(const Fn& fn) {
    for (int64_t index = take(), next; index >= 0; index = next) {
      next = knows_next_ ? take() : -1;
      fn(index, next);
      if (!knows_next_) next = take();
    }
  }

 private:
  int64_t take() {
    int64_t index = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    return index < count_ ? index : -1;
  }

  static constexpr int64_t kMany = 4;  // for each thread

  int64_t next_ = 0, count_;
  bool knows_next_;
};

// Memory of the calling thread, aligned to 64 bytes, uninitialised, valid until the thread asks again.
// thread_scratch is for within a task, region_scratch for what the caller's regions share.
void* thread_scratch(size_t num_bytes);
void* region_scratch(size_t num_bytes);

}  // namespace inferplane
