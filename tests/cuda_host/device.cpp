// SPDX-License-Identifier: Apache-2.0
// The device functions of include/cuda_host/device.h that reach into the running block.
#include <cstring>

#include "tests/cuda_host/blocks.h"

namespace cuda_host {

namespace {

Blocks& blocks() {
  return *Blocks::running();
}

void complete_shuffle(unsigned int /*mask*/, void* const operands[32]) {
  for (unsigned int lane = 0; lane < 32; ++lane) {
    if (operands[lane] == nullptr) continue;
    auto& own = *static_cast<ShuffleOperand*>(operands[lane]);
    const void* source = operands[own.source % 32];
    if (source != nullptr) {
      std::memcpy(own.result, static_cast<const ShuffleOperand*>(source)->value, sizeof(own.result));
    } else {
      std::memset(own.result, 0xff, sizeof(own.result));  // a lane that takes no part: undefined, so poison
    }
  }
}

struct BallotOperand {
  bool predicate;
  unsigned int result;
};

void complete_ballot(unsigned int /*mask*/, void* const operands[32]) {
  unsigned int votes = 0;
  for (unsigned int lane = 0; lane < 32; ++lane) {
    if (operands[lane] != nullptr && static_cast<const BallotOperand*>(operands[lane])->predicate) votes |= 1U << lane;
  }
  for (unsigned int lane = 0; lane < 32; ++lane) {
    if (operands[lane] != nullptr) static_cast<BallotOperand*>(operands[lane])->result = votes;
  }
}

}  // namespace

void kernel_fault(const char* what) {
  blocks().fault(FaultKind::Kernel, what);
}
unsigned int lane_index() {
  return blocks().lane();
}
void warp_collective(unsigned int mask, WarpOperation operation, void* operand, MissingLanes missing) {
  blocks().warp_collective(mask, operation, operand, missing);
}
void shuffle(unsigned int mask, void* operand) {
  blocks().warp_collective(mask, complete_shuffle, operand, MissingLanes::Allowed);
}
unsigned int ballot(unsigned int mask, bool predicate) {
  BallotOperand operand{.predicate = predicate, .result = 0};
  blocks().warp_collective(mask, complete_ballot, &operand, MissingLanes::Allowed);
  return operand.result;
}
void report_spinning() {
  blocks().fault(FaultKind::Spinning,
                 "a thread polls with atomics and never waits: another block cannot run before this one ends");
}

bool in_shared_memory(const void* address, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(rubato::engine::cuda::shared_bytes);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return at % bytes == 0 && at >= begin && at + bytes <= begin + blocks().shared_size();
}
void copy_async(void* shared, const void* global) {
  blocks().copy_async(shared, global);
}
void copy_async_commit() {
  blocks().copy_async_commit();
}
void copy_async_wait(unsigned int pending) {
  blocks().copy_async_wait(pending);
}

void multiply_tile(float* c, const float* a, const float* b) {
  for (int row = 0; row < 16; ++row) {
    float sums[8];
    for (int column = 0; column < 8; ++column) sums[column] = c[row * 8 + column];
    for (int k = 0; k < 16; ++k) {
      const float left = a[row * 16 + k];
      for (int column = 0; column < 8; ++column) sums[column] += left * b[k * 8 + column];
    }
    for (int column = 0; column < 8; ++column) c[row * 8 + column] = sums[column];
  }
}

}  // namespace cuda_host

void __syncthreads() {
  cuda_host::blocks().barrier();
}
void __syncwarp(unsigned int mask) {
  cuda_host::blocks().warp_collective(mask, nullptr, nullptr, cuda_host::MissingLanes::Allowed);
}
