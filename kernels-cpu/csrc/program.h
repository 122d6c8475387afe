// Programs: calls of ops that were recorded once, with their arguments, and are run again as a whole.
#pragma once

#include <cstddef>

namespace inferplane {

class Program;

// The program that this thread records, or null.
Program* recording();

// Adds a call of run(arguments), with a copy of the arguments.
void append(Program& program, void (*run)(const void* arguments), const void* arguments, size_t num_bytes);

// An op as Python enters it.
template <auto op>
struct Entry;

template <class... Arguments, void (*op)(Arguments...)>
struct Entry<op> {
  static void call(Arguments... arguments) {
    auto again = [=] { op(arguments...); };
    again();
    if (Program* program = recording())
      append(*program, [](const void* it) { (*static_cast<const decltype(again)*>(it))(); }, &again, sizeof(again));
  }
};

}  // namespace inferplane

// Behind EXPORT(void, name)(...) {...}: a call of it from Python enters the program that is being recorded. Numbers are
// kept as they are, pointers must stay valid.
#define RECORDABLE(name)                                                                                          \
  extern "C" __attribute__((visibility("default"))) void (*const INFERPLANE_JOIN(name##_entry, INFERPLANE_LEVEL))() = \
      reinterpret_cast<void (*)()>(&inferplane::Entry<&INFERPLANE_JOIN(name, INFERPLANE_LEVEL)>::call);
