#include "program.h"

#include <cstdint>
#include <cstring>
#include <vector>

namespace inferplane {

class Program {
 public:
  void append(void (*run)(const void*), const void* arguments, size_t num_bytes) {
    calls_.push_back({run, words_.size()});
    words_.resize(words_.size() + (num_bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    std::memcpy(&words_[calls_.back().first_word], arguments, num_bytes);
  }

  void run() const {
    for (const Call& call : calls_) call.run(&words_[call.first_word]);
  }

  size_t num_calls() const { return calls_.size(); }

 private:
  struct Call {
    void (*run)(const void*);
    size_t first_word;
  };
  std::vector<Call> calls_;
  std::vector<uint64_t> words_;  // arguments, aligned for any of them
};

namespace {
thread_local Program* current = nullptr;
}

Program* recording() { return current; }

void append(Program& program, void (*run)(const void*), const void* arguments, size_t num_bytes) {
  program.append(run, arguments, num_bytes);
}

}  // namespace inferplane

#define API extern "C" __attribute__((visibility("default")))

using inferplane::Program;

API Program* inferplane_new_program() { return new Program; }

API void inferplane_delete_program(Program* program) { delete program; }

// What this thread calls from now on is also added to the program; with null nothing is any more.
API void inferplane_record(Program* program) { inferplane::current = program; }

API bool inferplane_is_recording() { return inferplane::current != nullptr; }

API void inferplane_run_program(const Program* program) { program->run(); }

API int64_t inferplane_program_size(const Program* program) { return int64_t(program->num_calls()); }
