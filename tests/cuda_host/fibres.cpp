// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_host/fibres.h"

#include <sys/mman.h>

#include <new>

#include "tests/cuda_host/sanitizers.h"

namespace cuda_host {

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t stack_bytes = (CUDA_HOST_ASAN || CUDA_HOST_TSAN) ? std::size_t{512} << 10U : std::size_t{128} << 10U;

}  // namespace

Context::Context() {
#if CUDA_HOST_TSAN
  thread_sanitizer_fibre_ = __tsan_get_current_fiber();
#endif
}

Context::Context(Body body, void* argument, std::size_t colour)
    : body_(body), argument_(argument), colour_(colour % 61 * 64), mapped_size_(stack_bytes) {
  stack_ = mmap(nullptr, mapped_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(stack_, page, PROT_NONE);
  stack_bottom_ = static_cast<char*>(stack_) + page;
  stack_size_ = mapped_size_ - page - colour_;
  begin_anew();
}

Context::~Context() {
  if (body_ == nullptr) return;
#if CUDA_HOST_TSAN
  if (thread_sanitizer_fibre_ != nullptr) __tsan_destroy_fiber(thread_sanitizer_fibre_);
#endif
  unpoison_region(reinterpret_cast<std::uintptr_t>(stack_), stack_top());
  munmap(stack_, mapped_size_);
}

void Context::begin_anew() {
  unpoison_region(reinterpret_cast<std::uintptr_t>(stack_bottom_), stack_top());
#if CUDA_HOST_TSAN
  if (thread_sanitizer_fibre_ != nullptr) __tsan_destroy_fiber(thread_sanitizer_fibre_);
  thread_sanitizer_fibre_ = __tsan_create_fiber(0);
#endif
  fake_stack_ = nullptr;
  place_ =
      boost::context::detail::make_fcontext(static_cast<char*>(stack_) + mapped_size_ - colour_, stack_size_, &Context::enter);
}

bool Context::stack_guard_holds(std::uintptr_t address) const {
  const auto low = reinterpret_cast<std::uintptr_t>(stack_);
  return body_ != nullptr && address >= low && address < low + page;
}

namespace {

struct Switch {
  Context* from;
  Context* to;
};

}  // namespace

void Context::switch_from(Context& from) {
  Switch change{.from = &from, .to = this};
#if CUDA_HOST_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack_, stack_bottom_, stack_size_);
#endif
#if CUDA_HOST_TSAN
  __tsan_switch_to_fiber(thread_sanitizer_fibre_, 0);
#endif
  from.arrived(boost::context::detail::jump_fcontext(place_, &change));
}

void Context::enter(boost::context::detail::transfer_t transfer) {
  Context* self = static_cast<Switch*>(transfer.data)->to;
  self->arrived(transfer);
  self->body_(self->argument_);
  __builtin_trap();
}

void Context::arrived(boost::context::detail::transfer_t transfer) {
  Context& left = *static_cast<Switch*>(transfer.data)->from;
  left.place_ = transfer.fctx;
#if CUDA_HOST_ASAN
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
  if (left.body_ == nullptr) {
    left.stack_bottom_ = bottom;
    left.stack_size_ = size;
  }
#endif
}

}  // namespace cuda_host
