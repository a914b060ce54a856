// SPDX-License-Identifier: Apache-2.0
// Places where execution can be left and taken up again, each with a stack of its own, over Boost.Context's switch. A fibre that
// is stuck in the middle of a kernel is simply begun anew: kernels own nothing that would have to be destroyed.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>

namespace cuda_host {

/// One context belongs to one host thread.
class Context {
 public:
  using Body = void (*)(void* argument);  // never returns

  /// The host thread's own stack.
  Context();
  /// A fibre: its stack is coloured, so that the tops of many stacks do not fall into the same lines of the cache.
  Context(Body body, void* argument, std::size_t colour);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Leaves from and goes on in this one, until somebody switches back to from.
  void switch_from(Context& from);
  /// Forgets where the fibre was and begins its body anew at the next switch.
  void begin_anew();
  /// Highest usable address of the fibre's stack.
  [[nodiscard]] std::uintptr_t stack_top() const { return reinterpret_cast<std::uintptr_t>(stack_) + mapped_size_; }
  [[nodiscard]] bool stack_guard_holds(std::uintptr_t address) const;

 private:
  static void enter(boost::context::detail::transfer_t transfer);
  void arrived(boost::context::detail::transfer_t transfer);

  Body body_ = nullptr;
  void* argument_ = nullptr;
  std::size_t colour_ = 0;
  void* stack_ = nullptr;  // lowest address, a guard page
  std::size_t mapped_size_ = 0;
  boost::context::detail::fcontext_t place_ = nullptr;
  void* fake_stack_ = nullptr;          // AddressSanitizer's
  const void* stack_bottom_ = nullptr;  // the same
  std::size_t stack_size_ = 0;          // the same
  void* thread_sanitizer_fibre_ = nullptr;
};

}  // namespace cuda_host
