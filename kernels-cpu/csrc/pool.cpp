#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace inferplane {
namespace {

// A waiting thread stays awake for some times as long as its recent waits took, within these bounds: the ops of a step
// follow one another in microseconds, steps and requests do not, and to be woken takes as long as a product. Asleep it
// leaves its core to others, and awake it does when they ask, but for the first moments.
constexpr int64_t kShortestSpin = 10'000, kLongestSpin = 200'000, kUnyielding = 20'000;  // ns
constexpr int kPatience = 4;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Of the region that this thread works in; -1 outside of any.
thread_local int current_thread = -1;

// How long one thread waits awake.
class Patience {
 public:
  // Waits awake until is_over() or the patience ends; says whether it was over.
  template <class Condition>
  bool spin(const Condition& is_over) {
    started_ = now();
    int64_t wish = kPatience * typical_, time = wish > kLongestSpin ? kShortestSpin : std::max(wish, kShortestSpin);
    for (;;) {
      for (int i = 0; i < 32; ++i) {
        if (is_over()) return true;
        __builtin_ia32_pause();
      }
      int64_t waited = now() - started_;
      if (waited > time) return false;
      if (waited > kUnyielding) sched_yield();
    }
  }

  // To be called when the wait is over, however it ended.
  void learn() { typical_ += (std::min(now() - started_, 4 * kLongestSpin) - typical_) / 8; }

 private:
  int64_t started_ = 0, typical_ = kLongestSpin / (2 * kPatience);
};

class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  }

  ~Pool() {
    stopping_.store(true);
    wake_workers();
    for (auto& worker : workers_) worker.join();
  }

  void run(int num_tasks, void (*task)(const void*, int, int), const void* context) {
    task_ = task;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    // Who claims a task of this region sees the three above; nobody claims one while they are written.
    state_.store(uint64_t(num_tasks) << 32);
    wake_workers();
    work_off(0);
    auto is_done = [&] { return done_.load(std::memory_order_acquire) == uint32_t(num_tasks); };
    if (is_done()) return;
    if (!patience_.spin(is_done)) {
      caller_sleeps_.store(true);
      for (uint32_t done; (done = done_.load()) != uint32_t(num_tasks);) sleep_while(done_, done);
      caller_sleeps_.store(false);
    }
    patience_.learn();
  }

 private:
  // A state is num_tasks << 32 | the next task. Adding 1 claims that task, or shows that there is none.
  static bool has_tasks(uint64_t state) { return uint32_t(state) < (state >> 32); }

  void work_off(int thread) {
    while (has_tasks(state_.load(std::memory_order_relaxed))) {
      uint64_t claimed = state_.fetch_add(1, std::memory_order_acq_rel);
      if (!has_tasks(claimed)) return;
      uint32_t num_tasks = uint32_t(claimed >> 32);
      task_(context_, int(uint32_t(claimed)), thread);
      if (done_.fetch_add(1) + 1 == num_tasks && caller_sleeps_.load()) wake(done_);
    }
  }

  void work(int thread) {
    current_thread = thread;
    Patience patience;
    auto is_over = [&] { return has_tasks(state_.load()) || stopping_.load(); };
    while (!stopping_.load()) {
      if (!patience.spin(is_over)) {
        sleepers_.fetch_add(1);
        for (;;) {
          uint32_t call = calls_.load();
          if (is_over()) break;
          sleep_while(calls_, call);
        }
        sleepers_.fetch_sub(1);
      }
      patience.learn();
      work_off(thread);
    }
  }

  void wake_workers() {
    if (sleepers_.load() == 0) return;
    calls_.fetch_add(1);
    wake(calls_);
  }

  std::vector<std::thread> workers_;
  Patience patience_;
  void (*task_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint32_t> calls_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

// Never destroyed: workers may still wait when the process ends.
struct Shared {
  std::mutex mutex;
  Pool* pool = nullptr;
  std::atomic<int> num_threads{0};
};

Shared* shared = new Shared;

int allowed_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
}

// The child of a fork has none of the workers, and maybe a lock that nobody will give back: it starts anew.
void forget_in_child() {
  int kept = shared->num_threads.load();
  shared = new Shared;
  shared->num_threads.store(kept);
  current_thread = -1;
}

[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, forget_in_child);

}  // namespace

int num_threads() {
  int number = shared->num_threads.load(std::memory_order_relaxed);
  if (number > 0) return number;
  number = allowed_cores();
  shared->num_threads.store(number);
  return number;
}

void run_tasks(int num_tasks, void (*task)(const void*, int, int), const void* context) {
  if (num_tasks <= 1 || num_threads() == 1 || current_thread >= 0) {
    int thread = current_thread < 0 ? 0 : current_thread;
    for (int index = 0; index < num_tasks; ++index) task(context, index, thread);
    return;
  }
  std::lock_guard<std::mutex> lock(shared->mutex);
  Pool*& pool = shared->pool;
  if (pool == nullptr) pool = new Pool(num_threads());
  current_thread = 0;
  pool->run(num_tasks, task, context);
  current_thread = -1;
}

namespace {

class Scratch {
 public:
  ~Scratch() { free(memory_); }

  void* take(size_t num_bytes) {
    if (size_ < num_bytes) {
      free(memory_);
      size_ = (num_bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(4096, size_);
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

void* thread_scratch(size_t num_bytes) {
  static thread_local Scratch scratch;
  return scratch.take(num_bytes);
}

void* region_scratch(size_t num_bytes) {
  static thread_local Scratch scratch;
  return scratch.take(num_bytes);
}

}  // namespace inferplane

extern "C" __attribute__((visibility("default"))) int inferplane_num_threads() { return inferplane::num_threads(); }

extern "C" __attribute__((visibility("default"))) void inferplane_set_num_threads(int number) {
  using inferplane::shared;
  std::lock_guard<std::mutex> lock(shared->mutex);
  shared->num_threads.store(std::max(1, number));
  delete shared->pool;  // the next one's workers may run where their maker may by then
  shared->pool = nullptr;
}
