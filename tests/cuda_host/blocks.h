// SPDX-License-Identifier: Apache-2.0
// Runs the blocks of one kernel, one after the other, their threads as fibres. Thread order between two barriers, and the order
// of blocks, come from the seed: warp by warp with shuffled lanes, or all threads mixed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/cuda_host/fibres.h"
#include "tests/cuda_host/state.h"

namespace cuda_host {

/// One per host thread; it keeps its fibres from kernel to kernel.
class Blocks {
 public:
  /// This thread's.
  static Blocks& of_this_thread();
  /// The one that runs a kernel now, or nullptr. Only device code asks, and only one kernel runs at a time.
  static Blocks* running();

  /// False when a rule was broken; the fault is noted and the rest of the kernel left out.
  bool run(const KernelRun& kernel, Random& random);

  // ---- called by device code
  void barrier();
  void warp_collective(unsigned int mask, WarpOperation operation, void* operand, MissingLanes missing);
  void copy_async(void* shared, const void* global);
  void copy_async_commit();
  void copy_async_wait(unsigned int pending);
  [[nodiscard]] unsigned int lane() const { return current_->number % 32; }
  [[nodiscard]] std::size_t shared_size() const { return run_->shared_bytes; }
  /// Takes the text with it: what the fibre's stack holds is never destroyed.
  [[noreturn]] void fault(FaultKind kind, std::string what);
  /// Leaves the kernel for good; the fault is noted already. Also reached from the signal handler.
  [[noreturn]] void abandon();

  /// Kernel, block and thread.
  [[nodiscard]] std::string place() const;
  /// Top of the running fibre's stack, and whether address is in its guard page.
  [[nodiscard]] std::uintptr_t stack_top() const;
  [[nodiscard]] bool is_stack_overflow(std::uintptr_t address) const;

 private:
  struct Fibre {
    Fibre(Blocks& owner, std::size_t index) : context(&Blocks::fibre_body, &owner, index) {}
    Context context;
  };
  enum class Waits : std::uint8_t { No, Barrier, Warp, Ended };
  struct PendingCopy {
    void* to;
    const void* from;
    unsigned int group;
  };
  struct Thread {
    uint3 index{};
    unsigned int number = 0;
    Waits waits = Waits::No;
    Fibre* fibre = nullptr;
    void* operand = nullptr;
    std::vector<PendingCopy> copies;
    unsigned int groups = 0;  // committed
  };
  struct Group {
    WarpOperation operation;
    unsigned int mask;
    unsigned int arrived;
    MissingLanes missing;
  };
  struct Warp {
    unsigned int present = 0;  // lanes that the block has
    unsigned int ended = 0;
    std::vector<Group> groups;
  };

  static void fibre_body(void* self);
  void run_threads();
  bool run_block(uint3 block);
  void order_threads();
  Fibre* take_fibre();
  Thread* pick();
  Thread* pick_or_resolve();
  bool complete_without_missing();
  void complete(Warp& warp, std::size_t first, std::size_t group);
  void hand_over();
  void take_up(Thread& thread);
  std::string describe_stall() const;
  void check_shared(std::size_t bytes);

  const KernelRun* run_ = nullptr;
  Random* random_ = nullptr;
  bool mixed_ = false;  // all threads in one random order
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::uint16_t> unstarted_;  // taken from the end
  std::vector<std::uint16_t> runnable_;   // taken from the end, or anywhere when mixed
  std::size_t at_barrier_ = 0;
  std::size_t ended_ = 0;
  bool aborted_ = false;
  Thread* current_ = nullptr;
  Context main_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  std::vector<Fibre*> idle_;
  Fibre* running_fibre_ = nullptr;
};

}  // namespace cuda_host
