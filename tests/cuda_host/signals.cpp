// SPDX-License-Identifier: Apache-2.0
// Touching what one may not becomes a fault with a name: a kernel that does so is left for good, host code that touched device
// memory is noted and let go on.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "tests/cuda_host/blocks.h"
#include "tests/cuda_host/sanitizers.h"

namespace cuda_host {

namespace {

struct sigaction earlier_segv;
struct sigaction earlier_bus;
thread_local bool on_device = false;  // between the first switch into a kernel and the return from it

enum class Access : std::uint8_t { Read, Write, Unknown };

#if defined(__x86_64__)
Access access_of(const ucontext_t& context) {
  return (context.uc_mcontext.gregs[REG_ERR] & 2) != 0 ? Access::Write : Access::Read;
}
void redirect(ucontext_t& context, void (*target)(), std::uintptr_t stack) {
  context.uc_mcontext.gregs[REG_RSP] =
      static_cast<greg_t>((stack & ~std::uintptr_t{63}) - 72);  // as if called: 8 below a multiple of 16
  context.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(target);
}
#elif defined(__aarch64__)
Access access_of(const ucontext_t& /*context*/) {
  return Access::Unknown;
}
void redirect(ucontext_t& context, void (*target)(), std::uintptr_t stack) {
  context.uc_mcontext.sp = (stack & ~std::uintptr_t{63}) - 64;
  context.uc_mcontext.pc = reinterpret_cast<std::uintptr_t>(target);
}
#else
#error "the host emulation knows x86-64 and AArch64"
#endif

const char* verb(Access access) {
  switch (access) {
    case Access::Read:
      return "read ";
    case Access::Write:
      return "wrote ";
    case Access::Unknown:
      return "touched ";
  }
  return "";
}

// What the running kernel stumbled over; the handler only notes it.
struct Trap {
  std::uintptr_t address = 0;
  Access access = Access::Unknown;
  bool is_known = false;
};
thread_local Trap trap;

// Runs instead of the kernel, on the top of its fibre's stack.
void report_trap() {
  Blocks& blocks = *Blocks::running();
  FaultKind kind = FaultKind::IllegalAddress;
  std::string what;
  if (!trap.is_known) {
    what = "touched a misaligned address, or one that cannot exist";
  } else if (blocks.is_stack_overflow(trap.address)) {
    what = "overflowed its stack";
  } else {
    what = verb(trap.access) + describe_address(trap.address);
    if (const Allocation* allocation = allocation_at(trap.address); allocation != nullptr) {
      const bool inside = trap.address >= allocation->base && trap.address < allocation->base + allocation->size;
      kind = allocation->freed ? FaultKind::UseAfterFree : FaultKind::OutOfBounds;
      if (inside && !allocation->freed) what += ", which this device may not touch (cudaDeviceEnablePeerAccess)";
    }
  }
  blocks.fault(kind, std::move(what));
}

// Host code that touched device memory: noted by the handler, reported by the next call. Zero: free.
constexpr std::size_t notes_max = 64;
std::atomic<std::uint64_t> notes[notes_max];
std::atomic<bool> any_note{false};

void note_host_access(std::uintptr_t address, Access access) {
  const std::uint64_t note = (static_cast<std::uint64_t>(address) << 2U) | static_cast<std::uint64_t>(access);
  for (std::atomic<std::uint64_t>& slot : notes) {
    std::uint64_t expected = 0;
    if (slot.compare_exchange_strong(expected, note)) break;
  }
  any_note = true;
}

void on_signal(int number, siginfo_t* info, void* raw_context) {
  auto& context = *static_cast<ucontext_t*>(raw_context);
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const bool is_known = info->si_code > 0 && info->si_code != SI_KERNEL;
  if (on_device) {
    const Blocks& blocks = *Blocks::running();
    trap = Trap{.address = address, .access = access_of(context), .is_known = is_known};
    unpoison_region(blocks.stack_top() - 65536, blocks.stack_top());
    redirect(context, &report_trap, blocks.stack_top() - 4096);
    return;
  }
  if (is_known && in_arena(address)) {
    note_host_access(address, access_of(context));
    open_page(address);  // until the next call
    return;
  }
  // Not ours: as if we had never been here.
  sigaction(number, number == SIGSEGV ? &earlier_segv : &earlier_bus, nullptr);
}

}  // namespace

void install_signal_handlers() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = &on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGSEGV, &action, &earlier_segv) == 0 && sigaction(SIGBUS, &action, &earlier_bus) == 0;
  }();
  static_cast<void>(installed);
}

void report_host_accesses() {
  if (!any_note.exchange(false)) return;
  for (std::atomic<std::uint64_t>& slot : notes) {
    const std::uint64_t note = slot.exchange(0);
    if (note == 0) continue;
    const auto address = static_cast<std::uintptr_t>(note >> 2U);
    const Allocation* allocation = allocation_at(address);
    add_fault(allocation != nullptr && allocation->freed ? FaultKind::UseAfterFree : FaultKind::HostAccess, "host code",
              verb(static_cast<Access>(note & 3U)) + describe_address(address));
    close_page(address);
  }
}

// A kernel that overflows its fibre's stack has no room for a handler.
void use_signal_stack() {
  struct SignalStack {
    SignalStack() {
      stack_t earlier{};
      if (sigaltstack(nullptr, &earlier) == 0 && (earlier.ss_flags & SS_DISABLE) == 0) return;  // a sanitizer's
      constexpr std::size_t size = std::size_t{256} << 10U;
      memory = std::malloc(size);
      stack_t mine{};
      mine.ss_sp = memory;
      mine.ss_size = size;
      sigaltstack(&mine, nullptr);
    }
    ~SignalStack() {
      if (memory == nullptr) return;
      stack_t none{};
      none.ss_flags = SS_DISABLE;
      sigaltstack(&none, nullptr);
      std::free(memory);
    }
    SignalStack(const SignalStack&) = delete;
    SignalStack& operator=(const SignalStack&) = delete;
    void* memory = nullptr;
  };
  thread_local const SignalStack stack;
  static_cast<void>(stack);
}

void mark_on_device(bool is) {
  on_device = is;
}

}  // namespace cuda_host
