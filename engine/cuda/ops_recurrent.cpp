// SPDX-License-Identifier: Apache-2.0
// The part of CudaOps that recurrent layers need, and what tests and the exactness checker read of caches and states.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/cuda/ops_memory.h"
#include "engine/model/tensors.h"
#include "manifests/settings.h"

namespace rubato::engine::cuda {
namespace {

/// Each part of a state begins at 128 bytes, so that a warp reads whole lines.
constexpr std::int64_t line_floats = 32;

std::int64_t whole_lines(std::int64_t floats) {
  return (floats + line_floats - 1) / line_floats * line_floats;
}

StateShape state_shape(const RecurrentShape& shape) {
  StateShape states{.heads = shape.heads,
                    .head_size = shape.head_size,
                    .groups = shape.groups,
                    .state_size = shape.state_size,
                    .window = shape.window,
                    .inner = shape.inner(),
                    .channels = shape.channels()};
  states.scan_at = whole_lines(std::int64_t{shape.window - 1} * states.channels);
  states.layer_stride = states.scan_at + whole_lines(std::int64_t{states.inner} * shape.state_size);
  states.slot_stride = states.layer_stride * shape.layers;
  return states;
}

std::int64_t elements_of(const StateShape& shape, RecurrentPart part) {
  switch (part) {
    case RecurrentPart::Taps:
      return std::int64_t{shape.channels} * shape.window;
    case RecurrentPart::TapsBias:
      return shape.channels;
    case RecurrentPart::TimeStepBias:
    case RecurrentPart::LogDecay:
    case RecurrentPart::Skip:
      return shape.heads;
  }
  CHECK(false, "part=", static_cast<int>(part));
  return 0;
}

GateOrder gate_order(GatedNorm::Order order) {
  switch (order) {
    case GatedNorm::Order::GateFirst:
      return GateOrder::GateFirst;
    case GatedNorm::Order::NormFirst:
      return GateOrder::NormFirst;
    case GatedNorm::Order::GateOnly:
      return GateOrder::GateOnly;
  }
  CHECK(false, "order=", static_cast<int>(order));
  return GateOrder::GateOnly;
}

}  // namespace

// ---- set-up

Result<void> CudaOps::make_states(const RecurrentShape& shape) {
  Memory& memory = *memory_;
  CHECK(memory.states.bytes() == 0 && shape.layers > 0 && shape.state_count > 0, "layers=", shape.layers,
        " state_count=", shape.state_count);
  const StateShape states = state_shape(shape);
  if (Result<void> checked = check_recurrent(states); !checked) return checked;
  const std::int64_t bytes = states.slot_stride * 4 * shape.state_count;
  Result<DeviceMemory> made = DeviceMemory::make(bytes);
  if (!made) return Unexpected(std::move(made).error());
  memory.recurrent_shape = shape;
  memory.state_shape = states;
  memory.states = std::move(*made);
  keep(check(cudaMemsetAsync(memory.states.data(), 0, static_cast<std::size_t>(bytes), stream_->get()), "cudaMemsetAsync"));
  return {};
}

Result<RecurrentId> CudaOps::make_recurrent() {
  Memory& memory = *memory_;
  const auto index = static_cast<std::int32_t>(memory.recurrents.size());
  CHECK(index < memory.recurrent_shape.layers, "layers=", memory.recurrent_shape.layers);
  Memory::Recurrent layer;
  for (int part = 0; part < recurrent_parts; ++part) {
    const std::int64_t bytes = elements_of(memory.state_shape, static_cast<RecurrentPart>(part)) * 4;
    Result<DeviceMemory> made = DeviceMemory::make(bytes);
    if (!made) return Unexpected(std::move(made).error());
    keep(check(cudaMemsetAsync(made->data(), 0, static_cast<std::size_t>(bytes), stream_->get()), "cudaMemsetAsync"));
    layer.parts[part] = std::move(*made);
  }
  memory.recurrents.push_back(std::move(layer));
  return RecurrentId{index};
}

void CudaOps::load_recurrent(RecurrentId id, RecurrentPart part, const TensorView& view) {
  Memory& memory = *memory_;
  const std::int64_t elements = elements_of(memory.state_shape, part);
  std::int64_t given = 1;
  for (const std::int64_t size : view.shape) given *= size;
  CHECK(given == elements, "part=", static_cast<int>(part), " elements=", given, " wanted=", elements);
  const DeviceMemory& to = memory.recurrents.at(static_cast<std::size_t>(id.value)).parts[static_cast<int>(part)];
  keep(memory.uploader->upload(view, 0, elements, DataType::Float32, to.data()));
}

StateView CudaOps::states() const {
  return {.data = memory_->states.data(),
          .count = memory_->recurrent_shape.state_count,
          .bytes = memory_->state_shape.slot_stride * 4};
}

// ---- operations

RecurrentLayer CudaOps::recurrent_layer(RecurrentId id) const {
  const Memory& memory = *memory_;
  const Memory::Recurrent& weights = memory.recurrents.at(static_cast<std::size_t>(id.value));
  const auto part = [&](RecurrentPart which) {
    return reinterpret_cast<const float*>(weights.parts[static_cast<int>(which)].data());
  };
  return {.shape = memory.state_shape,
          .taps = part(RecurrentPart::Taps),
          .taps_bias = part(RecurrentPart::TapsBias),
          .time_step_bias = part(RecurrentPart::TimeStepBias),
          .log_decay = part(RecurrentPart::LogDecay),
          .skip = part(RecurrentPart::Skip),
          .time_step_min = memory.recurrent_shape.time_step_min,
          .time_step_max = memory.recurrent_shape.time_step_max,
          .states = reinterpret_cast<float*>(memory.states.data()) + id.value * memory.state_shape.layer_stride,
          .max_rows = memory.limits.max_rows};
}

void CudaOps::convolve(RecurrentId layer, const Matrix& projected, std::span<const SequenceSpan> /*sequences: the batch's*/,
                       const Matrix& out) {
  cuda::convolve(stream_->get(), recurrent_layer(layer), scratch_->batch, accumulators(projected), accumulators(out));
}

void CudaOps::scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved,
                   std::span<const SequenceSpan> /*sequences: the batch's*/, const Matrix& out) {
  cuda::scan(stream_->get(), recurrent_layer(layer), scratch_->batch, accumulators(projected), accumulators(convolved),
             accumulators(out));
}

void CudaOps::gated_norm(const Matrix& y, const Matrix& projected, const GatedNorm& norm, const Matrix& out) {
  GatedNormInputs inputs{.order = gate_order(norm.order), .group_columns = norm.group_columns, .epsilon = norm.epsilon};
  if (inputs.order != GateOrder::GateOnly) inputs.weight = norm_weight(norm.weight);
  cuda::gated_norm(stream_->get(), memory_->limits.dtype, accumulators(y), accumulators(projected), inputs, activations(out));
}

void CudaOps::relu_squared(const Matrix& x, const Matrix& out) {
  cuda::relu_squared(stream_->get(), memory_->limits.dtype, accumulators(x), activations(out));
}

// ---- host access and poison

void CudaOps::poison_states(std::span<const StateId> states) {
  const StateView view = this->states();
  for (const StateId state : states) {
    CHECK(state.value >= 0 && state.value < view.count, "state=", state.value, " count=", view.count);
    // All bits set is a NaN.
    keep(check(cudaMemsetAsync(view.data + state.value * view.bytes, 0xFF, static_cast<std::size_t>(view.bytes), stream_->get()),
               "cudaMemsetAsync"));
  }
  if (!states.empty()) keep(stream_->wait());  // they may be another lane's next
}

std::span<const std::byte> CudaOps::fetch(const std::byte* from, std::int64_t bytes) const {
  PinnedMemory& host = scratch_->read_host;
  if (host.bytes() < bytes) {
    Result<PinnedMemory> longer = PinnedMemory::make(bytes);
    CHECK(longer, longer.error().message);
    host = std::move(*longer);
  }
  const bool arrived = cudaMemcpyAsync(host.data(), from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost,
                                       stream_->get()) == cudaSuccess &&
                       stream_->wait().has_value();
  if (!arrived) std::memset(host.data(), 0xFF, static_cast<std::size_t>(bytes));
  return {host.data(), static_cast<std::size_t>(bytes)};
}

void CudaOps::read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) const {
  const CacheView view = cache();
  CHECK(layer >= 0 && layer < view.layers && block.value >= 0 && block.value < view.block_count, "layer=", layer,
        " block=", block.value);
  CHECK(slot >= 0 && slot < kv_block_tokens, "slot=", slot);
  const std::span<const std::byte> bytes =
      fetch(view.data + layer * view.layer_bytes + block.value * view.block_bytes, view.block_bytes);
  const auto row = static_cast<std::size_t>(memory_->shape.head_size * element_size(memory_->limits.dtype));
  const auto heads = static_cast<std::size_t>(memory_->shape.kv_heads);
  constexpr std::size_t tokens = kv_block_tokens;
  for (const std::size_t part : {0U, 1U}) {  // keys, values
    for (std::size_t head = 0; head < heads; ++head) {
      const auto at = bytes.subspan(((head * 2 + part) * tokens + static_cast<std::size_t>(slot)) * row, row);
      out.insert(out.end(), at.begin(), at.end());
    }
  }
}

void CudaOps::read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) const {
  const StateView view = states();
  const StateShape& shape = memory_->state_shape;
  CHECK(layer >= 0 && layer < memory_->recurrent_shape.layers && state.value >= 0 && state.value < view.count, "layer=", layer,
        " state=", state.value);
  const std::span<const std::byte> bytes =
      fetch(view.data + state.value * view.bytes + layer * shape.layer_stride * 4, shape.layer_stride * 4);
  // Without what fills the parts up to whole lines.
  const auto inputs = bytes.first(static_cast<std::size_t>(std::int64_t{shape.window - 1} * shape.channels * 4));
  const auto scan = bytes.subspan(static_cast<std::size_t>(shape.scan_at * 4),
                                  static_cast<std::size_t>(std::int64_t{shape.inner} * shape.state_size * 4));
  out.insert(out.end(), inputs.begin(), inputs.end());
  out.insert(out.end(), scan.begin(), scan.end());
}

}  // namespace rubato::engine::cuda
