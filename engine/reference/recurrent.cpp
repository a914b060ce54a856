// SPDX-License-Identifier: Apache-2.0
// The formulas of recurrent layers in engine/ops.h, token after token. A row's state is first brought to its own slot and then
// only changed there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/models/tensor_elements.h"
#include "engine/reference/ops.h"
#include "engine/reference/scalars.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine {

using reference::dot;
using reference::row_of;
using reference::silu;

namespace {

float softplus(float x) {
  return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x)));
}

void append(const float* from, std::int64_t count, std::vector<std::byte>& out) {
  const auto* bytes = reinterpret_cast<const std::byte*>(from);
  out.insert(out.end(), bytes, bytes + static_cast<std::size_t>(count) * sizeof(float));
}

}  // namespace

// ---- set-up

Result<void> ReferenceOps::make_states(const RecurrentShape& shape) {
  memory_->recurrent_shape = shape;
  memory_->states.resize(static_cast<std::size_t>(shape.state_count) * static_cast<std::size_t>(shape.layers) *
                         static_cast<std::size_t>(inputs_size() + scan_size()));
  return {};
}

Result<RecurrentId> ReferenceOps::make_recurrent() {
  const RecurrentShape& shape = memory_->recurrent_shape;
  CHECK(static_cast<std::int32_t>(memory_->recurrents.size()) < shape.layers, "layers=", shape.layers);
  const auto channels = static_cast<std::size_t>(shape.channels());
  const auto heads = static_cast<std::size_t>(shape.heads);
  memory_->recurrents.push_back({.taps = std::vector<float>(channels * static_cast<std::size_t>(shape.window)),
                                 .taps_bias = std::vector<float>(channels),
                                 .time_step_bias = std::vector<float>(heads),
                                 .log_decay = std::vector<float>(heads),
                                 .skip = std::vector<float>(heads)});
  return RecurrentId{static_cast<std::int32_t>(memory_->recurrents.size()) - 1};
}

void ReferenceOps::load_recurrent(RecurrentId id, RecurrentPart part, const TensorView& view) {
  Recurrent& weights = memory_->recurrents.at(static_cast<std::size_t>(id.value));
  std::vector<float>* parts[] = {&weights.taps, &weights.taps_bias, &weights.time_step_bias, &weights.log_decay, &weights.skip};
  std::vector<float>& out = *parts[static_cast<std::size_t>(part)];
  const std::int64_t row = part == RecurrentPart::Taps ? memory_->recurrent_shape.window : 1;
  CHECK(view.shape.at(0) * row == static_cast<std::int64_t>(out.size()), "rows=", view.shape[0]);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = widen_element(view, static_cast<std::int64_t>(i));
}

// ---- states

std::int64_t ReferenceOps::inputs_size() const {
  const RecurrentShape& shape = memory_->recurrent_shape;
  return static_cast<std::int64_t>(shape.window - 1) * shape.channels();
}

std::int64_t ReferenceOps::scan_size() const {
  const RecurrentShape& shape = memory_->recurrent_shape;
  return static_cast<std::int64_t>(shape.inner()) * shape.state_size;
}

float* ReferenceOps::state_at(std::int32_t layer, StateId state) const {
  const std::int64_t slot = static_cast<std::int64_t>(state.value) * memory_->recurrent_shape.layers + layer;
  return memory_->states.data() + slot * (inputs_size() + scan_size());
}

float* ReferenceOps::begin_state(std::int32_t layer, const StateUse& use, std::int64_t first, std::int64_t count) const {
  float* state = state_at(layer, use.to) + first;
  if (!use.from) {
    std::fill_n(state, count, 0.0F);
  } else if (*use.from != use.to) {
    std::copy_n(state_at(layer, *use.from) + first, count, state);
  }
  return state;
}

// ---- operations

void ReferenceOps::convolve(RecurrentId layer, const Matrix& projected, std::span<const SequenceSpan> sequences,
                            const Matrix& out) {
  const RecurrentShape& shape = memory_->recurrent_shape;
  const Recurrent& weights = memory_->recurrents.at(static_cast<std::size_t>(layer.value));
  const std::int32_t kept = shape.window - 1;
  for (const SequenceSpan& sequence : sequences) {
    float* inputs = begin_state(layer.value, sequence.state, 0, inputs_size());  // (channels, window - 1), oldest first
    for (std::int32_t token = 0; token < sequence.count; ++token) {
      const float* now = row_of(projected, sequence.first + token) + shape.inner();
      for (std::int32_t channel = 0; channel < shape.channels(); ++channel) {
        const float* taps = weights.taps.data() + static_cast<std::int64_t>(channel) * shape.window;
        float* before = inputs + static_cast<std::int64_t>(channel) * kept;
        float sum = weights.taps_bias[static_cast<std::size_t>(channel)];
        for (std::int32_t tap = 0; tap < kept; ++tap) sum += taps[tap] * before[tap];
        sum += taps[kept] * now[channel];
        row_of(out, sequence.first + token)[channel] = silu(sum);
        if (kept == 0) continue;
        std::copy(before + 1, before + kept, before);
        before[kept - 1] = now[channel];
      }
      const auto& save = sequence.state.save;
      if (save && save->tokens == token + 1) std::copy_n(inputs, inputs_size(), state_at(layer.value, save->to));
    }
  }
}

void ReferenceOps::scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved,
                        std::span<const SequenceSpan> sequences, const Matrix& out) {
  const RecurrentShape& shape = memory_->recurrent_shape;
  const Recurrent& weights = memory_->recurrents.at(static_cast<std::size_t>(layer.value));
  for (const SequenceSpan& sequence : sequences) {
    float* states = begin_state(layer.value, sequence.state, inputs_size(), scan_size());  // (heads, head_size, state_size)
    for (std::int32_t token = 0; token < sequence.count; ++token) {
      const float* time_steps = row_of(projected, sequence.first + token) + shape.inner() + shape.channels();
      const float* x = row_of(convolved, sequence.first + token);
      float* y = row_of(out, sequence.first + token);
      for (std::int32_t head = 0; head < shape.heads; ++head) {
        const auto at = static_cast<std::size_t>(head);
        const float* b = x + shape.inner() + head / (shape.heads / shape.groups) * shape.state_size;
        const float* c = b + shape.groups * shape.state_size;
        const float time_step =
            std::clamp(softplus(time_steps[head] + weights.time_step_bias[at]), shape.time_step_min, shape.time_step_max);
        const float decay = std::exp(-std::exp(weights.log_decay[at]) * time_step);
        for (std::int32_t column = head * shape.head_size; column < (head + 1) * shape.head_size; ++column) {
          float* state = states + static_cast<std::int64_t>(column) * shape.state_size;
          for (std::int32_t n = 0; n < shape.state_size; ++n) state[n] = decay * state[n] + time_step * x[column] * b[n];
          y[column] = dot(state, c, shape.state_size) + weights.skip[at] * x[column];
        }
      }
      const auto& save = sequence.state.save;
      if (save && save->tokens == token + 1) {
        std::copy_n(states, scan_size(), state_at(layer.value, save->to) + inputs_size());
      }
    }
  }
}

void ReferenceOps::gated_norm(const Matrix& y, const Matrix& projected, const GatedNorm& norm, const Matrix& out) {
  const std::int32_t columns = norm.group_columns;
  for (std::int32_t row = 0; row < y.rows; ++row) {
    for (std::int32_t first = 0; first < y.columns; first += columns) {
      const float* from = row_of(y, row) + first;
      const float* gate = row_of(projected, row) + first;
      float* to = row_of(out, row) + first;
      const bool gate_first = norm.order != GatedNorm::Order::NormFirst;
      for (std::int32_t i = 0; i < columns; ++i) to[i] = gate_first ? from[i] * silu(gate[i]) : from[i];
      if (norm.order == GatedNorm::Order::GateOnly) continue;
      const std::vector<float>& weight = memory_->norms.at(static_cast<std::size_t>(norm.weight.value));
      const float scale = 1.0F / std::sqrt(dot(to, to, columns) / static_cast<float>(columns) + norm.epsilon);
      for (std::int32_t i = 0; i < columns; ++i) {
        to[i] *= scale * weight[static_cast<std::size_t>(first + i)];
        if (!gate_first) to[i] *= silu(gate[i]);
      }
    }
  }
}

void ReferenceOps::relu_squared(const Matrix& x, const Matrix& out) {
  for (std::int32_t row = 0; row < x.rows; ++row) {
    for (std::int32_t i = 0; i < x.columns; ++i) {
      const float value = row_of(x, row)[i];
      const float positive = value < 0 ? 0.0F : value;
      row_of(out, row)[i] = positive * positive;
    }
  }
}

// ---- contents as bytes

void ReferenceOps::poison_states(std::span<const StateId> states) {
  const std::int64_t size = (inputs_size() + scan_size()) * memory_->recurrent_shape.layers;
  for (const StateId state : states) std::fill_n(state_at(0, state), size, std::numeric_limits<float>::quiet_NaN());
}

void ReferenceOps::read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) const {
  const std::int64_t token = block_size() / kv_block_tokens;
  const std::int64_t at = block_begin(layer, block) + slot * token;
  append(memory_->keys.data() + at, token, out);
  append(memory_->values.data() + at, token, out);
}

void ReferenceOps::read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) const {
  append(state_at(layer, state), inputs_size() + scan_size(), out);
}

void ReferenceOps::copy_state(const HostOps& source, const StateCopy& copy) {
  const auto& from = dynamic_cast<const ReferenceOps&>(source);
  const std::int64_t size = (inputs_size() + scan_size()) * memory_->recurrent_shape.layers;
  CHECK(size == (from.inputs_size() + from.scan_size()) * from.memory_->recurrent_shape.layers, "size=", size);
  const float* begin = from.state_at(0, copy.from);
  float* to = state_at(0, copy.to);
  if (begin != to) std::copy_n(begin, size, to);
}

}  // namespace rubato::engine
