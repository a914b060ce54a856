// SPDX-License-Identifier: Apache-2.0
// The recurrent layers' weights, states and operations, cut into tasks of (sequence, part of the channels or of a head). Time is
// never cut: a task takes its part of a state through all of a sequence's tokens.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "engine/cpu/ops.h"
#include "engine/models/tensor_elements.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine::cpu {
namespace {

constexpr std::int32_t convolve_channels = 256;  // of a task: their taps and window of inputs stay in the first-level cache
constexpr std::int32_t convolve_sequences = 8;   // of a task at most, where there are many: a decode row alone is too little
constexpr std::int32_t scan_tasks_per_thread = 4;
constexpr std::int64_t tasks_max = 1 << 19;  // within what the workers can count
constexpr std::int64_t scan_work = 4;        // of one entry of a state for one token, and of reading and writing it

std::int64_t parts(std::int64_t count, std::int64_t size) {
  return (count + size - 1) / size;
}

std::int32_t whole_groups(std::int32_t columns) {
  return (columns + group_columns - 1) / group_columns * group_columns;
}

std::int64_t tokens_of(std::span<const SequenceSpan> sequences) {
  std::int64_t tokens = 0;
  for (const SequenceSpan& sequence : sequences) tokens += sequence.count;
  return tokens;
}

}  // namespace

// ---- set-up

Result<void> CpuOps::make_states(const RecurrentShape& shape) {
  CHECK(shape.layers >= 1 && shape.heads >= 1 && shape.head_size >= 1 && shape.groups >= 1 && shape.state_size >= 1 &&
            shape.window >= 1 && shape.window <= window_max && shape.state_count >= 1 && shape.heads % shape.groups == 0,
        "heads=", shape.heads, " groups=", shape.groups);
  StateLayout layout;
  layout.channels = whole_groups(shape.channels());
  layout.state_size = whole_groups(shape.state_size);
  layout.element_groups = whole_groups(shape.head_size) / group_columns;
  layout.inputs = static_cast<std::int64_t>(shape.window - 1) * layout.channels;
  const std::int64_t head = layout.element_groups * layout.element_group();
  if (head > std::numeric_limits<std::int64_t>::max() / 16 / shape.heads / shape.layers / shape.state_count) {
    return unexpected(ErrorCode::ResourceExhausted, "cpu backend: no memory for recurrent states: 2^60 bytes or more");
  }
  layout.layer = layout.inputs + shape.heads * head;
  Result<HostMemory> states = HostMemory::take(layout.layer * shape.layers * shape.state_count * 4, "recurrent states");
  if (!states) return Unexpected(std::move(states).error());
  memory_->states = std::move(*states);
  memory_->state_layout = layout;
  memory_->recurrent_shape = shape;
  return make_recurrent_scratch();
}

Result<void> CpuOps::make_recurrent_scratch() {
  const RecurrentShape& shape = memory_->recurrent_shape;
  if (shape.layers == 0) return {};
  constexpr std::int64_t group_tokens = static_cast<std::int64_t>(scan_tokens) * group_columns;
  const std::int64_t entries = static_cast<std::int64_t>(scan_tokens) * memory_->state_layout.state_size;
  const std::int64_t product = whole_groups(shape.inner());
  for (std::int32_t worker = 0; worker < workers_->thread_count(); ++worker) {
    const std::int64_t floats = 2 * scan_tokens + 2 * group_tokens + 2 * entries + product;
    Result<HostMemory> memory = HostMemory::take(floats * 4, "scratch of recurrent layers");
    if (!memory) return Unexpected(std::move(memory).error());
    RecurrentScratch scratch;
    scratch.memory = std::move(*memory);
    scratch.scan.x = static_cast<float*>(scratch.memory.data());
    scratch.scan.y = scratch.scan.x + group_tokens;
    scratch.scan.b = scratch.scan.y + group_tokens;
    scratch.scan.c = scratch.scan.b + entries;
    scratch.scan.time_steps = scratch.scan.c + entries;
    scratch.scan.decays = scratch.scan.time_steps + scan_tokens;
    scratch.product = scratch.scan.decays + scan_tokens;
    recurrent_scratch_.push_back(std::move(scratch));
  }
  return {};
}

Result<RecurrentId> CpuOps::make_recurrent() {
  const RecurrentShape& shape = memory_->recurrent_shape;
  CHECK(static_cast<std::int32_t>(memory_->recurrents.size()) < shape.layers, "layers=", shape.layers);
  const auto channels = static_cast<std::size_t>(memory_->state_layout.channels);
  const auto heads = static_cast<std::size_t>(shape.heads);
  memory_->recurrents.push_back({.taps = std::vector<float>(static_cast<std::size_t>(shape.window) * channels),
                                 .taps_bias = std::vector<float>(channels),
                                 .time_step_bias = std::vector<float>(heads),
                                 .rates = std::vector<float>(heads, -1.0F),
                                 .skips = std::vector<float>(heads)});
  return RecurrentId{static_cast<std::int32_t>(memory_->recurrents.size()) - 1};
}

CpuOps::Recurrent& CpuOps::recurrent_at(RecurrentId id) const {
  return memory_->recurrents.at(static_cast<std::size_t>(id.value));
}

void CpuOps::load_recurrent(RecurrentId id, RecurrentPart part, const TensorView& view) {
  const RecurrentShape& shape = memory_->recurrent_shape;
  Recurrent& weights = recurrent_at(id);
  const auto fill = [&](std::vector<float>& out, std::int32_t count, auto&& value_of) {
    CHECK(view.shape.at(0) == count, "rows=", view.shape[0], " expected=", count);
    for (std::int32_t i = 0; i < count; ++i) out[static_cast<std::size_t>(i)] = value_of(widen_element(view, i));
  };
  const auto plain = [](float value) { return value; };
  switch (part) {
    case RecurrentPart::Taps:
      CHECK(view.shape.at(0) == shape.channels() && view.shape.at(2) == shape.window, "channels=", view.shape[0]);
      for (std::int32_t channel = 0; channel < shape.channels(); ++channel) {
        for (std::int32_t tap = 0; tap < shape.window; ++tap) {
          const std::int64_t at = static_cast<std::int64_t>(tap) * memory_->state_layout.channels + channel;
          weights.taps[static_cast<std::size_t>(at)] =
              widen_element(view, static_cast<std::int64_t>(channel) * shape.window + tap);
        }
      }
      return;
    case RecurrentPart::TapsBias:
      return fill(weights.taps_bias, shape.channels(), plain);
    case RecurrentPart::TimeStepBias:
      return fill(weights.time_step_bias, shape.heads, plain);
    case RecurrentPart::LogDecay:
      return fill(weights.rates, shape.heads, [](float value) { return -std::exp(value); });
    case RecurrentPart::Skip:
      return fill(weights.skips, shape.heads, plain);
  }
}

// ---- operations

float* CpuOps::state_at(std::int32_t layer, StateId state) const {
  const std::int64_t slot = static_cast<std::int64_t>(state.value) * memory_->recurrent_shape.layers + layer;
  return static_cast<float*>(memory_->states.data()) + slot * memory_->state_layout.layer;
}

void CpuOps::convolve(RecurrentId layer, const Matrix& projected, std::span<const SequenceSpan> sequences, const Matrix& out) {
  const RecurrentShape& shape = memory_->recurrent_shape;
  const Recurrent& weights = recurrent_at(layer);
  const std::int32_t stride = memory_->state_layout.channels;
  const auto part = [&](const SequenceSpan& sequence, std::int32_t channel) {
    const StateUse& use = sequence.state;
    kernels_.convolve({.in = reinterpret_cast<const float*>(row_of(projected, sequence.first)) + shape.inner() + channel,
                       .in_stride = projected.stride,
                       .tokens = sequence.count,
                       .channels = std::min(convolve_channels, shape.channels() - channel),
                       .window = shape.window,
                       .taps = weights.taps.data() + channel,
                       .taps_stride = stride,
                       .bias = weights.taps_bias.data() + channel,
                       .from = use.from ? state_at(layer.value, *use.from) + channel : nullptr,
                       .to = state_at(layer.value, use.to) + channel,
                       .save = use.save ? state_at(layer.value, use.save->to) + channel : nullptr,
                       .save_tokens = use.save ? use.save->tokens : 0,
                       .out = reinterpret_cast<float*>(row_of(out, sequence.first)) + channel,
                       .out_stride = out.stride});
  };
  // A task is some channels of a few sequences, so that every task has its share of a long one.
  const auto count = static_cast<std::int64_t>(sequences.size());
  const std::int64_t slices = parts(shape.channels(), convolve_channels);
  const std::int64_t per_task = std::max<std::int64_t>(convolve_sequences, parts(count * slices, tasks_max));
  const std::int64_t work = tokens_of(sequences) * shape.channels() * (shape.window + elementwise_work);
  spread(work, static_cast<std::int32_t>(slices * parts(count, per_task)), [&](std::int32_t task, std::int32_t) {
    const auto channel = static_cast<std::int32_t>(task % slices) * convolve_channels;
    const std::int64_t first = task / slices * per_task;
    const std::int64_t end = std::min(count, first + per_task);
    for (std::int64_t i = first; i < end; ++i) part(sequences[static_cast<std::size_t>(i)], channel);
  });
}

void CpuOps::scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved, std::span<const SequenceSpan> sequences,
                  const Matrix& out) {
  const RecurrentShape& shape = memory_->recurrent_shape;
  const StateLayout& layout = memory_->state_layout;
  const Recurrent& weights = recurrent_at(layer);
  const std::int64_t heads = static_cast<std::int64_t>(sequences.size()) * shape.heads;
  if (heads == 0) return;
  // Whole heads where there are enough of them: their parts share time steps, B and C.
  const std::int64_t wanted = parts(static_cast<std::int64_t>(scan_tasks_per_thread) * workers_->thread_count(), heads);
  const auto groups =
      static_cast<std::int32_t>(parts(layout.element_groups, std::min<std::int64_t>(wanted, layout.element_groups)));
  const auto slices = static_cast<std::int32_t>(parts(layout.element_groups, groups));
  const auto part = [&](const SequenceSpan& sequence, std::int32_t head, std::int32_t first_group, const ScanScratch& scratch) {
    const StateUse& use = sequence.state;
    const auto at = static_cast<std::size_t>(head);
    const auto* time_steps = reinterpret_cast<const float*>(row_of(projected, sequence.first)) + shape.inner() + shape.channels();
    const auto* row = reinterpret_cast<const float*>(row_of(convolved, sequence.first));
    const std::int32_t element = first_group * group_columns;
    const std::int32_t column = head * shape.head_size + element;
    const std::int32_t group_entries = head / (shape.heads / shape.groups) * shape.state_size;
    const std::int64_t state =
        layout.inputs + (static_cast<std::int64_t>(head) * layout.element_groups + first_group) * layout.element_group();
    kernels_.scan({.time_step = time_steps + head,
                   .time_step_stride = projected.stride,
                   .time_step_bias = weights.time_step_bias[at],
                   .time_step_min = shape.time_step_min,
                   .time_step_max = shape.time_step_max,
                   .rate = weights.rates[at],
                   .skip = weights.skips[at],
                   .x = row + column,
                   .b = row + shape.inner() + group_entries,
                   .c = row + shape.inner() + shape.groups * shape.state_size + group_entries,
                   .stride = convolved.stride,
                   .tokens = sequence.count,
                   .elements = std::min(groups * group_columns, shape.head_size - element),
                   .state_size = shape.state_size,
                   .from = use.from ? state_at(layer.value, *use.from) + state : nullptr,
                   .to = state_at(layer.value, use.to) + state,
                   .save = use.save ? state_at(layer.value, use.save->to) + state : nullptr,
                   .save_tokens = use.save ? use.save->tokens : 0,
                   .out = reinterpret_cast<float*>(row_of(out, sequence.first)) + column,
                   .out_stride = out.stride,
                   .scratch = scratch});
  };
  const std::int64_t units = heads * slices;
  const std::int64_t per_task = parts(units, tasks_max);
  const std::int64_t visits = tokens_of(sequences) + static_cast<std::int64_t>(sequences.size());
  const std::int64_t work = visits * scan_work * shape.inner() * shape.state_size;
  spread(work, static_cast<std::int32_t>(parts(units, per_task)), [&](std::int32_t task, std::int32_t worker) {
    const std::int64_t end = std::min(units, (task + 1) * per_task);
    for (std::int64_t unit = task * per_task; unit < end; ++unit) {
      const std::int64_t head = unit / slices;
      part(sequences[static_cast<std::size_t>(head / shape.heads)], static_cast<std::int32_t>(head % shape.heads),
           static_cast<std::int32_t>(unit % slices) * groups, recurrent_scratch_[static_cast<std::size_t>(worker)].scan);
    }
  });
}

void CpuOps::gated_norm(const Matrix& y, const Matrix& projected, const GatedNorm& norm, const Matrix& out) {
  GatedNormTask common{.columns = y.columns, .norm_columns = norm.group_columns, .epsilon = norm.epsilon};
  CHECK(norm.group_columns >= 1 && y.columns % norm.group_columns == 0, "columns=", y.columns, " group=", norm.group_columns);
  switch (norm.order) {
    case GatedNorm::Order::GateFirst:
      common.order = GateOrder::GateFirst;
      break;
    case GatedNorm::Order::NormFirst:
      common.order = GateOrder::NormFirst;
      break;
    case GatedNorm::Order::GateOnly:
      common.order = GateOrder::GateOnly;
      break;
  }
  if (norm.order != GatedNorm::Order::GateOnly) {
    common.weight = memory_->norms.at(static_cast<std::size_t>(norm.weight.value)).weights.data();
  }
  const std::int64_t work = static_cast<std::int64_t>(y.rows) * y.columns * elementwise_work;
  spread_rows(work, y.rows, [&](std::int32_t row, std::int32_t worker) {
    GatedNormTask task = common;
    task.y = reinterpret_cast<const float*>(row_of(y, row));
    task.gate = reinterpret_cast<const float*>(row_of(projected, row));
    task.product = recurrent_scratch_[static_cast<std::size_t>(worker)].product;
    task.out = row_of(out, row);
    kernels_.gated_norm(task);
  });
}

void CpuOps::relu_squared(const Matrix& x, const Matrix& out) {
  const std::int64_t work = static_cast<std::int64_t>(x.rows) * x.columns * elementwise_work;
  spread_rows(work, x.rows, [&](std::int32_t row, std::int32_t) {
    kernels_.relu_squared({.x = reinterpret_cast<const float*>(row_of(x, row)),
                           .groups = static_cast<std::int32_t>(parts(x.columns, group_columns)),
                           .out = row_of(out, row)});
  });
}

// ---- states as bytes

void CpuOps::poison_states(std::span<const StateId> states) {
  for (const StateId state : states) {
    // All ones is NaN in F32.
    std::memset(state_at(0, state), 0xFF,
                static_cast<std::size_t>(memory_->state_layout.layer * memory_->recurrent_shape.layers) * sizeof(float));
  }
}

void CpuOps::read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) const {
  const auto* from = reinterpret_cast<const std::byte*>(state_at(layer, state));
  out.insert(out.end(), from, from + static_cast<std::size_t>(memory_->state_layout.layer) * sizeof(float));
}

void CpuOps::read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) const {
  const HeadLayout& layout = memory_->layout;
  const std::int32_t pack = kernels_.elements_per_cell;
  const std::int32_t bytes = 4 / pack;
  const auto append = [&](const std::uint32_t* cells, std::int64_t element) {
    const auto* from = reinterpret_cast<const std::byte*>(cells) + element * bytes;
    out.insert(out.end(), from, from + bytes);
  };
  const std::uint32_t* keys = layer_cache(layer) + block.value * layout.block_stride;
  for (std::int32_t head = 0; head < layout.kv_heads; ++head) {
    for (std::int32_t i = 0; i < layout.head_size; ++i) {
      append(keys + head * layout.head_stride, ((i / pack) * kv_block_tokens + slot) * pack + i % pack);
    }
  }
  const std::uint32_t* values = keys + layout.value_offset;
  for (std::int32_t head = 0; head < layout.kv_heads; ++head) {
    for (std::int32_t i = 0; i < layout.head_size; ++i) {
      append(values + head * layout.head_stride,
             (static_cast<std::int64_t>(slot / pack) * layout.head_size + i) * pack + slot % pack);
    }
  }
}

void CpuOps::copy_state(const HostOps& source, const StateCopy& copy) {
  const auto& from = dynamic_cast<const CpuOps&>(source);
  const std::int64_t floats = memory_->state_layout.layer * memory_->recurrent_shape.layers;
  CHECK(floats == from.memory_->state_layout.layer * from.memory_->recurrent_shape.layers, "floats=", floats);
  const float* begin = from.state_at(0, copy.from);
  float* to = state_at(0, copy.to);
  if (begin != to) std::memcpy(to, begin, static_cast<std::size_t>(floats) * sizeof(float));
}

}  // namespace rubato::engine::cpu
