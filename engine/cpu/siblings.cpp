// SPDX-License-Identifier: Apache-2.0
// Two sets of CPU operations over the same weights and cache, and blocks that come from another cache.
#include <cstring>
#include <string>
#include <utility>

#include "engine/cpu/ops.h"
#include "manifests/check.h"

namespace rubato::engine::cpu {

CpuOps::CpuOps(const CpuOps& first, std::unique_ptr<Workers> workers)
    : kernels_(first.kernels_), memory_(first.memory_), side_(Side::Second), workers_(std::move(workers)) {}

Result<std::unique_ptr<HostOps>> CpuOps::make_sibling() {
  if (memory_->gate != nullptr) return unexpected(ErrorCode::InvalidArgument, "cpu backend: its device has two lanes already");
  const std::int32_t threads = workers_->thread_count();
  auto gate = std::make_unique<CoreGate>(threads, clock_);
  auto mine = std::make_unique<Workers>(threads, GateSide{.gate = gate.get(), .side = Side::First});
  auto theirs = std::make_unique<Workers>(threads, GateSide{.gate = gate.get(), .side = Side::Second});
  std::unique_ptr<CpuOps> sibling(new CpuOps(*this, std::move(theirs)));
  if (Result<void> scratch = sibling->make_scratch(); !scratch) return Unexpected(std::move(scratch).error());
  if (Result<void> scratch = sibling->make_recurrent_scratch(); !scratch) return Unexpected(std::move(scratch).error());
  memory_->gate = std::move(gate);
  workers_ = std::move(mine);
  return std::unique_ptr<HostOps>(std::move(sibling));
}

void CpuOps::end_step() {
  if (memory_->gate) memory_->gate->end(side_);
}

void CpuOps::use_share(std::int32_t percent) {
  if (memory_->gate) memory_->gate->use_share(side_, percent);
}

DeviceShare CpuOps::share() const {
  if (!memory_->gate) return {};
  const std::int32_t percent = memory_->gate->share(side_);
  return {.asked_percent = percent, .given_percent = percent};  // turns on the shared core make up for what whole cores miss
}

Result<void> CpuOps::check_source(const HostOps& source) const {
  const auto* ops = dynamic_cast<const CpuOps*>(&source);
  const std::string theirs = ops == nullptr ? "another kind of backend" : ops->kernels_.name;
  // By name: other kernels may lay out a block differently, and would have written other bits into it.
  if (theirs == kernels_.name) return {};
  return unexpected(ErrorCode::InvalidArgument, "kernels",
                    std::string("cpu backend: its kernels are ") + kernels_.name + ", those that wrote the blocks " + theirs);
}

void CpuOps::copy_block(const HostOps& source, const BlockCopy& copy) {
  const auto& from = dynamic_cast<const CpuOps&>(source);
  const std::int64_t cells = memory_->layout.block_stride;
  CHECK(cells == from.memory_->layout.block_stride && memory_->shape.layers == from.memory_->shape.layers, "cells=", cells);
  for (std::int32_t layer = 0; layer < memory_->shape.layers; ++layer) {
    const std::uint32_t* begin = from.layer_cache(layer) + copy.from.value * cells;
    std::uint32_t* to = layer_cache(layer) + copy.to.value * cells;
    if (begin != to) std::memcpy(to, begin, static_cast<std::size_t>(cells) * 4);
  }
}

}  // namespace rubato::engine::cpu
