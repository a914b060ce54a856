// SPDX-License-Identifier: Apache-2.0
// CHECK: an invariant of our own code. It stays on in release builds, prints what it saw and ends the process, because a
// scheduler that goes on after a broken invariant corrupts other people's requests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace rubato {

/// Prints the failed condition with its values on stderr and aborts. Never returns.
[[noreturn]] inline void check_failed(const char* file, int line, const char* condition, const std::string& values) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s%s%s\n", file, line, condition, values.empty() ? "" : ": ", values.c_str());
  std::fflush(stderr);
  std::abort();
}

template <class... Values>
std::string check_values(const Values&... values) {
  std::ostringstream text;
  ((text << values), ...);
  return text.str();
}

}  // namespace rubato

/// CHECK(free_count <= block_count, "free=", free_count): further arguments are printed one after another when it fails.
#define CHECK(condition, ...)                                                                      \
  do {                                                                                             \
    if (!(condition)) [[unlikely]] {                                                               \
      ::rubato::check_failed(__FILE__, __LINE__, #condition, ::rubato::check_values(__VA_ARGS__)); \
    }                                                                                              \
  } while (false)
