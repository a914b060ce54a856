// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_host/blocks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/cuda_host/sanitizers.h"

namespace rubato::engine::cuda {

alignas(128) unsigned char shared_bytes[cuda_host::shared_bytes_max + 65536];

}  // namespace rubato::engine::cuda

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace cuda_host {

using rubato::engine::cuda::shared_bytes;

unsigned long long atomics_in_a_row = 0;

namespace {

constexpr unsigned char poison = 0xff;
constexpr std::size_t guard_per_block = 4096;  // bytes behind the launch's own that are checked after each block
constexpr std::size_t guard_per_kernel = 32768;
Blocks* running_blocks = nullptr;

std::string triple(const uint3& value) {
  return "(" + std::to_string(value.x) + ", " + std::to_string(value.y) + ", " + std::to_string(value.z) + ")";
}

template <class Index>
void permute(std::vector<Index>& values, Random& random) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}

CUDA_HOST_NO_SANITIZE bool is_poison(std::size_t begin, std::size_t end) {
  const volatile unsigned char* bytes = shared_bytes;
  for (; begin < end && begin % 8 != 0; ++begin) {
    if (bytes[begin] != poison) return false;
  }
  std::uint64_t all = ~std::uint64_t{0};
  for (; begin + 8 <= end; begin += 8) all &= *reinterpret_cast<const volatile std::uint64_t*>(bytes + begin);
  for (; begin < end; ++begin) {
    if (bytes[begin] != poison) return false;
  }
  return all == ~std::uint64_t{0};
}

// Outside a kernel all of it is poison.
void poison_all_shared_once() {
  static const bool done = [] {
    std::memset(shared_bytes, poison, sizeof(shared_bytes));
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

Blocks& Blocks::of_this_thread() {
  thread_local Blocks instance;
  return instance;
}
Blocks* Blocks::running() {
  return running_blocks;
}

bool Blocks::run(const KernelRun& kernel, Random& random) {
  run_ = &kernel;
  random_ = &random;
  mixed_ = random.one_in(3);
  aborted_ = false;
  gridDim = kernel.grid;
  blockDim = kernel.block;
  threads_.resize(std::size_t{kernel.block.x} * kernel.block.y * kernel.block.z);
  warps_.assign((threads_.size() + 31) / 32, Warp{});
  for (unsigned int number = 0; number < threads_.size(); ++number) {
    threads_[number].number = number;
    threads_[number].index = {number % kernel.block.x, number / kernel.block.x % kernel.block.y,
                              number / (kernel.block.x * kernel.block.y)};
    warps_[number / 32].present |= 1U << (number % 32);
  }
  std::vector<std::uint32_t> order(std::size_t{kernel.grid.x} * kernel.grid.y * kernel.grid.z);
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  permute(order, random);

  use_signal_stack();
  poison_all_shared_once();
  const auto guard = reinterpret_cast<std::uintptr_t>(shared_bytes) + kernel.shared_bytes;
  poison_region(guard, reinterpret_cast<std::uintptr_t>(shared_bytes) + sizeof(shared_bytes));
  running_blocks = this;
  for (const std::uint32_t number : order) {
    if (!run_block({number % kernel.grid.x, number / kernel.grid.x % kernel.grid.y, number / (kernel.grid.x * kernel.grid.y)}))
      break;
  }
  running_blocks = nullptr;
  if (!aborted_) check_shared(guard_per_kernel);
  unpoison_region(guard, reinterpret_cast<std::uintptr_t>(shared_bytes) + sizeof(shared_bytes));
  std::memset(shared_bytes, poison, aborted_ ? sizeof(shared_bytes) : kernel.shared_bytes);
  return !aborted_;
}

bool Blocks::run_block(uint3 block) {
  blockIdx = block;
  if (run_->shared_bytes > 0) std::memset(shared_bytes, poison, run_->shared_bytes);
  for (Thread& thread : threads_) {
    thread.waits = Waits::No;
    thread.fibre = nullptr;
    thread.groups = 0;
    thread.copies.clear();
  }
  for (Warp& warp : warps_) {
    warp.ended = 0;
    warp.groups.clear();
  }
  at_barrier_ = 0;
  ended_ = 0;
  runnable_.clear();
  order_threads();
  running_fibre_ = take_fibre();
  take_up(*pick());
  current_->fibre = running_fibre_;
  mark_on_device(true);
  running_fibre_->context.switch_from(main_);
  mark_on_device(false);
  if (aborted_) {
    idle_.clear();
    for (const auto& fibre : fibres_) {
      fibre->context.begin_anew();
      idle_.push_back(fibre.get());
    }
    return false;
  }
  check_shared(guard_per_block);
  return !aborted_;
}

void Blocks::order_threads() {
  unstarted_.clear();
  if (mixed_) {
    for (std::size_t i = 0; i < threads_.size(); ++i) unstarted_.push_back(static_cast<std::uint16_t>(i));
    permute(unstarted_, *random_);
    return;
  }
  std::vector<std::uint16_t> warps(warps_.size());
  for (std::size_t i = 0; i < warps.size(); ++i) warps[i] = static_cast<std::uint16_t>(i);
  permute(warps, *random_);
  for (const std::size_t warp : warps) {
    const std::size_t flip = random_->below(32);
    for (std::size_t lane = 0; lane < 32; ++lane) {
      const std::size_t number = warp * 32 + (lane ^ flip);
      if (number < threads_.size()) unstarted_.push_back(static_cast<std::uint16_t>(number));
    }
  }
}

Blocks::Fibre* Blocks::take_fibre() {
  if (idle_.empty()) {
    fibres_.push_back(std::make_unique<Fibre>(*this, fibres_.size()));
    return fibres_.back().get();
  }
  Fibre* fibre = idle_.back();
  idle_.pop_back();
  return fibre;
}

Blocks::Thread* Blocks::pick() {
  std::size_t number = 0;
  if (mixed_) {
    const std::size_t choices = runnable_.size() + unstarted_.size();
    if (choices == 0) return nullptr;
    const std::size_t choice = random_->below(choices);
    if (choice < runnable_.size()) {
      number = runnable_[choice];
      runnable_[choice] = runnable_.back();
      runnable_.pop_back();
      return &threads_[number];
    }
  } else if (!runnable_.empty()) {
    number = runnable_.back();
    runnable_.pop_back();
    return &threads_[number];
  }
  if (unstarted_.empty()) return nullptr;
  number = unstarted_.back();
  unstarted_.pop_back();
  return &threads_[number];
}

// The next thread to run; nullptr when all have ended. Does not return when those left wait for each other.
Blocks::Thread* Blocks::pick_or_resolve() {
  Thread* next = pick();
  if (next != nullptr || ended_ == threads_.size()) return next;
  if (complete_without_missing()) return pick();
  fault(FaultKind::Divergence, describe_stall());
}

// Warp operations may go on without lanes that have ended or never were.
bool Blocks::complete_without_missing() {
  bool any = false;
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    Warp& warp = warps_[w];
    const unsigned int alive = warp.present & ~warp.ended;
    for (std::size_t g = 0; g < warp.groups.size();) {
      if (warp.groups[g].missing == MissingLanes::Allowed && warp.groups[g].arrived == (warp.groups[g].mask & alive)) {
        complete(warp, w * 32, g);
        any = true;
      } else {
        ++g;
      }
    }
  }
  return any;
}

void Blocks::complete(Warp& warp, std::size_t first, std::size_t index) {
  const Group group = warp.groups[index];
  warp.groups[index] = warp.groups.back();
  warp.groups.pop_back();
  void* operands[32];
  const std::size_t flip = random_->below(32);
  for (std::size_t i = 0; i < 32; ++i) {
    const std::size_t lane = i ^ flip;
    const bool takes_part = ((group.arrived >> lane) & 1U) != 0;
    operands[lane] = takes_part ? threads_[first + lane].operand : nullptr;
    if (!takes_part) continue;
    threads_[first + lane].waits = Waits::No;
    runnable_.push_back(static_cast<std::uint16_t>(first + lane));
  }
  if (group.operation != nullptr) group.operation(group.mask, operands);
}

void Blocks::take_up(Thread& thread) {
  current_ = &thread;
  threadIdx = thread.index;
  atomics_in_a_row = 0;
}

// The current thread waits, or is among those that may run; another goes on.
void Blocks::hand_over() {
  Thread* self = current_;
  Thread* next = pick_or_resolve();
  if (next == self) return;
  take_up(*next);
  if (next->fibre == nullptr) next->fibre = take_fibre();
  running_fibre_ = next->fibre;
  next->fibre->context.switch_from(self->fibre->context);
}

void Blocks::fibre_body(void* self) {
  static_cast<Blocks*>(self)->run_threads();
}

// A fibre runs one thread after another as long as nobody else is to go on; a thread that waits keeps the fibre it began on.
void Blocks::run_threads() {
  while (true) {
    Fibre* fibre = running_fibre_;
    run_->kernel.run();
    Thread& ended = *current_;
    ended.waits = Waits::Ended;
    ended.fibre = nullptr;
    warps_[ended.number / 32].ended |= 1U << (ended.number % 32);
    ++ended_;
    Thread* next = pick_or_resolve();
    if (next == nullptr) {
      idle_.push_back(fibre);
      main_.switch_from(fibre->context);
      continue;  // as the first fibre of another block
    }
    take_up(*next);
    if (next->fibre == nullptr) {
      next->fibre = fibre;
      continue;
    }
    idle_.push_back(fibre);
    running_fibre_ = next->fibre;
    next->fibre->context.switch_from(fibre->context);
  }
}

void Blocks::barrier() {
  current_->waits = Waits::Barrier;
  if (++at_barrier_ == threads_.size()) {
    at_barrier_ = 0;
    order_threads();  // all threads have begun and wait: both lists are empty
    std::swap(unstarted_, runnable_);
    for (Thread& thread : threads_) thread.waits = Waits::No;
  }
  hand_over();
}

void Blocks::warp_collective(unsigned int mask, WarpOperation operation, void* operand, MissingLanes missing) {
  Thread& self = *current_;
  Warp& warp = warps_[self.number / 32];
  const unsigned int bit = 1U << (self.number % 32);
  if ((mask & bit) == 0) fault(FaultKind::Kernel, "a warp operation's mask leaves out the thread that calls it");
  if (missing == MissingLanes::Forbidden && (mask & ~warp.present) != 0) {
    fault(FaultKind::Kernel, "a warp operation needs 32 lanes, and the block's last warp has fewer");
  }
  std::size_t index = 0;
  while (index < warp.groups.size() && (warp.groups[index].operation != operation || warp.groups[index].mask != mask)) ++index;
  if (index == warp.groups.size()) {
    warp.groups.push_back(Group{.operation = operation, .mask = mask, .arrived = 0, .missing = missing});
  }
  warp.groups[index].arrived |= bit;
  self.operand = operand;
  self.waits = Waits::Warp;
  if (warp.groups[index].arrived == mask) complete(warp, self.number / 32 * 32, index);
  hand_over();
}

std::string Blocks::describe_stall() const {
  std::size_t at_barrier = 0;
  std::size_t in_warp = 0;
  for (const Thread& thread : threads_) {
    at_barrier += thread.waits == Waits::Barrier ? 1U : 0U;
    in_warp += thread.waits == Waits::Warp ? 1U : 0U;
  }
  return "threads wait for others that will not come: " + std::to_string(at_barrier) + " at __syncthreads, " +
         std::to_string(in_warp) + " in a warp operation, " + std::to_string(ended_) + " of " + std::to_string(threads_.size()) +
         " have ended";
}

std::string Blocks::place() const {
  return run_->name + " block " + triple(blockIdx) + " thread " + triple(threadIdx);
}

void Blocks::fault(FaultKind kind, std::string what) {
  add_fault(kind, place(), std::move(what));
  abandon();
}

void Blocks::abandon() {
  aborted_ = true;
  main_.switch_from(running_fibre_->context);
  __builtin_unreachable();  // the fibre begins anew
}

std::uintptr_t Blocks::stack_top() const {
  return running_fibre_->context.stack_top();
}
bool Blocks::is_stack_overflow(std::uintptr_t address) const {
  return running_fibre_->context.stack_guard_holds(address);
}

// Bytes behind what the launch asked for.
void Blocks::check_shared(std::size_t bytes) {
  const std::size_t end = std::min(run_->shared_bytes + bytes, sizeof(shared_bytes));
  if (is_poison(run_->shared_bytes, end)) return;
  add_fault(FaultKind::OutOfBounds, run_->name + " block " + triple(blockIdx),
            "wrote shared memory beyond the " + std::to_string(run_->shared_bytes) + " bytes of its launch");
  aborted_ = true;
}

void Blocks::copy_async(void* shared, const void* global) {
  const auto from = reinterpret_cast<std::uintptr_t>(global);
  if (!in_shared_memory(shared, 16)) {
    fault(FaultKind::OutOfBounds, "copy_async_16: the target is not 16 aligned bytes of the block's shared memory");
  }
  if (from % 16 != 0) fault(FaultKind::IllegalAddress, "copy_async_16: the source is not aligned to 16 bytes");
  if (random_->one_in(2)) {
    std::memcpy(shared, global, 16);
    return;
  }
  current_->copies.push_back(PendingCopy{.to = shared, .from = global, .group = current_->groups});
}

void Blocks::copy_async_commit() {
  ++current_->groups;
}

void Blocks::copy_async_wait(unsigned int pending) {
  auto& copies = current_->copies;
  const unsigned int done = current_->groups > pending ? current_->groups - pending : 0;  // groups below this have arrived
  std::size_t kept = 0;
  for (const PendingCopy& copy : copies) {
    if (copy.group < done) {
      std::memcpy(copy.to, copy.from, 16);
    } else {
      copies[kept++] = copy;
    }
  }
  copies.resize(kept);
}

}  // namespace cuda_host
