// SPDX-License-Identifier: Apache-2.0
// Claiming tasks by compare-and-swap on one ticket; short spins between operations, a futex wait between steps.
#include "engine/cpu/workers.h"

#include "manifests/check.h"

namespace rubato::engine {
namespace {

constexpr int field_bits = 20;
constexpr std::uint64_t field_mask = (1ULL << field_bits) - 1;

// Operations follow one another within microseconds; some 20 to 100 microseconds without one mean that the step has ended. The
// two cores of a small machine also run the HTTP threads, which must not wait for a spinning worker.
constexpr std::int32_t spin_limit = 1500;

std::uint64_t make_ticket(std::uint64_t operation, std::int32_t count) {
  return (operation << (2 * field_bits)) | (static_cast<std::uint64_t>(count) << field_bits);
}
std::int32_t ticket_count(std::uint64_t ticket) {
  return static_cast<std::int32_t>((ticket >> field_bits) & field_mask);
}
std::int32_t ticket_next(std::uint64_t ticket) {
  return static_cast<std::int32_t>(ticket & field_mask);
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Workers::Workers(std::int32_t threads, cpu::GateSide gate) : gate_(gate) {
  CHECK(threads >= 1, "threads=", threads);
  threads_.reserve(static_cast<std::size_t>(threads - 1));
  for (std::int32_t worker = 1; worker < threads; ++worker) threads_.emplace_back([this, worker] { work(worker); });
}

Workers::~Workers() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  if (gate_.gate != nullptr) gate_.gate->wake(gate_.side);
  for (std::thread& thread : threads_) thread.join();
}

void Workers::run_tasks(std::int32_t count, Call call, void* context) {
  CHECK(count >= 0 && static_cast<std::uint64_t>(count) < field_mask, "count=", count);
  if (count <= 1 || threads_.empty()) {
    for (std::int32_t task = 0; task < count; ++task) {
      pass();
      call(context, task, 0);
    }
    return;
  }
  // All tasks of the last operation are done, so no claim can succeed until the new ticket stands.
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const std::uint64_t ticket = make_ticket(++operation_, count);
  ticket_.store(ticket, std::memory_order_release);
  epoch_.fetch_add(1);
  if (sleepers_.load() > 0) epoch_.notify_all();
  drain(ticket, 0);
  for (std::int32_t spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
    if (spins < 4096) {
      pause();
    } else {
      std::this_thread::yield();  // the worker that holds the last task may need this core
    }
  }
}

bool Workers::admitted(std::int32_t worker) {
  if (gate_.gate == nullptr) return true;
  if (worker > 0) return gate_.gate->admits(gate_.side, worker);
  gate_.gate->pass(gate_.side);
  return true;
}

void Workers::drain(std::uint64_t ticket, std::int32_t worker) {
  const std::uint64_t operation = ticket >> (2 * field_bits);
  while (ticket_next(ticket) < ticket_count(ticket) && ticket >> (2 * field_bits) == operation) {
    if (!admitted(worker)) return;
    const Call call = call_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    call(context, ticket_next(ticket), worker);
    done_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

std::uint64_t Workers::look_for_tasks() const {
  for (std::int32_t spins = 0; spins < spin_limit; ++spins) {
    const std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (ticket_next(ticket) < ticket_count(ticket)) return ticket;
    pause();
  }
  return 0;
}

std::uint64_t Workers::await(std::int32_t worker) {
  while (!stop_.load()) {
    if (gate_.gate != nullptr) {
      const std::uint32_t changes = gate_.gate->changes(gate_.side);
      if (!gate_.gate->admits(gate_.side, worker)) {
        // Whoever stops the workers changes the gate after stop_ is set.
        if (!stop_.load()) gate_.gate->wait_for_change(gate_.side, changes);
        continue;
      }
    }
    const std::uint32_t epoch = epoch_.load();
    if (const std::uint64_t ticket = look_for_tasks()) return ticket;
    // Either an operation has moved the epoch since it was read, or the one that moves it next sees this sleeper and wakes it.
    sleepers_.fetch_add(1);
    if (!stop_.load()) epoch_.wait(epoch);
    sleepers_.fetch_sub(1);
  }
  return 0;
}

void Workers::work(std::int32_t worker) {
  while (const std::uint64_t ticket = await(worker)) drain(ticket, worker);
}

}  // namespace rubato::engine
