// The threads that kernels share: the caller and workers that wait for it, a while awake and then asleep.
#pragma once

#include <cstddef>

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

// Memory of the calling thread, aligned to 64 bytes, uninitialised, valid until the thread asks again.
void* thread_scratch(size_t num_bytes);

}  // namespace inferplane
