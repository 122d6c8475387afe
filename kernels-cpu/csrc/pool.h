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

// Calls fn(first, end) for ranges that make up [0, count), in parallel where that is worth it: each takes nanoseconds_each,
// and a region some microseconds more than its tasks.
template <class Fn>
inline void for_ranges(int64_t count, double nanoseconds_each, const Fn& fn) {
  constexpr double kShortestTask = 2'000, kShortestRegion = 5'000;
  constexpr int kTasksPerThread = 8;
  int64_t most = int64_t(num_threads()) * kTasksPerThread, per_task = int64_t(kShortestTask / nanoseconds_each);
  if (count * nanoseconds_each < kShortestRegion) per_task = count;
  if (per_task < (count + most - 1) / most) per_task = (count + most - 1) / most;
  if (per_task < 1) per_task = 1;
  parallel(int((count + per_task - 1) / per_task), [&](int task, int) {
    int64_t first = task * per_task, end = first + per_task;
    fn(first, end < count ? end : count);
  });
}

// Memory of the calling thread, aligned to 64 bytes, uninitialised, valid until the thread asks again.
// thread_scratch is for within a task, region_scratch for what the caller's regions share.
void* thread_scratch(size_t num_bytes);
void* region_scratch(size_t num_bytes);

}  // namespace inferplane
