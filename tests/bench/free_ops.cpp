// SPDX-License-Identifier: Apache-2.0
// oneDNN products and the chunked form of the recurrence.
#include "tests/bench/free_ops.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <dnnl.hpp>

#include "engine/models/tensor_elements.h"
#include "manifests/check.h"

namespace rubato::bench {
namespace {

using engine::Format;
using engine::LinearKind;
using engine::Matrix;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Strided = Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>>;
using StridedOut = Eigen::Map<RowMajor, 0, Eigen::OuterStride<>>;

constexpr std::int32_t chunk_tokens = 64;  // of the chunked form

std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

std::vector<float> widened(const engine::TensorView& view) {
  std::vector<float> values(view.bytes.size() / static_cast<std::size_t>(engine::element_size(view.dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = engine::widen_element(view, static_cast<std::int64_t>(i));
  return values;
}

}  // namespace

struct FreeOps::Products {
  struct Linear {
    engine::LinearShape shape;
    std::vector<std::uint16_t> narrow;  // (outputs, inputs)
    std::vector<float> wide;
    std::vector<float> bias;
    struct Call {
      dnnl::matmul primitive;
      dnnl::memory weights;
    };
    std::map<std::int32_t, Call> calls{};  // by rows
    std::vector<float> gate_up{};          // Swiglu: (rows, outputs)
  };

  Linear::Call& call(Linear& linear, std::int32_t rows, std::int64_t x_stride, std::int64_t out_stride, bool narrow) {
    const auto found = linear.calls.find(rows);
    if (found != linear.calls.end()) return found->second;
    using Type = dnnl::memory::data_type;
    using Tag = dnnl::memory::format_tag;
    const dnnl::memory::dim inputs = linear.shape.inputs;
    const dnnl::memory::dim outputs = linear.shape.outputs;
    const Type type = narrow ? Type::bf16 : Type::f32;
    const dnnl::memory::desc x({rows, inputs}, type, {x_stride, 1});
    const dnnl::memory::desc free_weights({inputs, outputs}, type, Tag::any);
    const dnnl::memory::desc out({rows, outputs}, Type::f32, {out_stride, 1});
    const dnnl::memory::desc bias({1, outputs}, Type::f32, Tag::ab);
    const dnnl::matmul::desc what =
        linear.bias.empty() ? dnnl::matmul::desc(x, free_weights, out) : dnnl::matmul::desc(x, free_weights, bias, out);
    const dnnl::matmul::primitive_desc how(what, engine);
    // Packed as it likes best for this many rows; where two row counts like the same, the packing is shared.
    dnnl::memory weights;
    for (const auto& [other_rows, other] : linear.calls) {
      if (other.weights.get_desc() == how.weights_desc()) weights = other.weights;
    }
    if (!weights) {
      void* raw = narrow ? static_cast<void*>(linear.narrow.data()) : linear.wide.data();
      dnnl::memory plain({{inputs, outputs}, type, {1, inputs}}, engine, raw);
      weights = dnnl::memory(how.weights_desc(), engine);
      dnnl::reorder(plain, weights).execute(stream, plain, weights);
      stream.wait();
    }
    return linear.calls.emplace(rows, Linear::Call{.primitive = dnnl::matmul(how), .weights = weights}).first->second;
  }

  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::vector<Linear> linears;
};

FreeOps::FreeOps(DataType dtype, engine::cpu::KernelPath path, std::int32_t threads)
    : CpuOps(dtype, path, threads), dtype_(dtype), products_(std::make_unique<Products>()) {}
FreeOps::~FreeOps() = default;

Result<engine::LinearId> FreeOps::make_linear(const engine::LinearShape& shape) {
  Products::Linear linear{.shape = shape, .narrow = {}, .wide = {}, .bias = {}};
  const auto count = static_cast<std::size_t>(shape.outputs) * static_cast<std::size_t>(shape.inputs);
  dtype_ == DataType::BFloat16 ? linear.narrow.resize(count) : linear.wide.resize(count);
  products_->linears.push_back(std::move(linear));
  return CpuOps::make_linear(shape);
}

void FreeOps::load_rows(engine::LinearId id, std::int32_t first_output, const engine::TensorView& rows) {
  CpuOps::load_rows(id, first_output, rows);
  Products::Linear& linear = products_->linears[static_cast<std::size_t>(id.value)];
  const std::vector<float> values = widened(rows);
  const auto begin = static_cast<std::size_t>(first_output) * static_cast<std::size_t>(linear.shape.inputs);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype_ == DataType::BFloat16) {
      linear.narrow[begin + i] = to_bfloat16(values[i]);
    } else {
      linear.wide[begin + i] = values[i];
    }
  }
}

void FreeOps::load_bias(engine::LinearId id, std::int32_t first_output, const engine::TensorView& bias) {
  CpuOps::load_bias(id, first_output, bias);
  Products::Linear& linear = products_->linears[static_cast<std::size_t>(id.value)];
  linear.bias.resize(static_cast<std::size_t>(linear.shape.outputs));
  const std::vector<float> values = widened(bias);
  std::copy(values.begin(), values.end(), linear.bias.begin() + first_output);
}

void FreeOps::linear(engine::LinearId id, const Matrix& x, const Matrix& out) {
  if (x.rows == 0) return;
  Products::Linear& linear = products_->linears[static_cast<std::size_t>(id.value)];
  const bool gated = linear.shape.kind == LinearKind::Swiglu;
  float* result = static_cast<float*>(out.data);
  std::int64_t stride = out.stride;
  if (gated) {
    linear.gate_up.resize(static_cast<std::size_t>(x.rows) * static_cast<std::size_t>(linear.shape.outputs));
    result = linear.gate_up.data();
    stride = linear.shape.outputs;
  }
  const bool narrow = dtype_ == DataType::BFloat16;
  Products::Linear::Call& call = products_->call(linear, x.rows, x.stride, stride, narrow);
  using Type = dnnl::memory::data_type;
  const dnnl::memory in({{x.rows, linear.shape.inputs}, narrow ? Type::bf16 : Type::f32, {x.stride, 1}}, products_->engine,
                        x.data);
  const dnnl::memory to({{x.rows, linear.shape.outputs}, Type::f32, {stride, 1}}, products_->engine, result);
  std::unordered_map<int, dnnl::memory> arguments{{DNNL_ARG_SRC, in}, {DNNL_ARG_WEIGHTS, call.weights}, {DNNL_ARG_DST, to}};
  if (!linear.bias.empty()) {
    const dnnl::memory bias({{1, linear.shape.outputs}, Type::f32, dnnl::memory::format_tag::ab}, products_->engine,
                            linear.bias.data());
    arguments.emplace(DNNL_ARG_BIAS, bias);
  }
  call.primitive.execute(products_->stream, arguments);
  products_->stream.wait();
  if (!gated) return;
  const std::int32_t half = linear.shape.outputs / 2;
  constexpr std::int32_t per_task = 8;
  const auto rows = [&](std::int32_t task) {
    for (std::int32_t row = task * per_task; row < std::min(x.rows, (task + 1) * per_task); ++row) {
      const float* gate = result + row * stride;
      const float* up = gate + half;
      for (std::int32_t i = 0; i < half; ++i) {
        const float value = gate[i] / (1.0F + std::exp(-gate[i])) * up[i];
        if (narrow) {
          static_cast<std::uint16_t*>(out.data)[row * out.stride + i] = to_bfloat16(value);
        } else {
          static_cast<float*>(out.data)[row * out.stride + i] = value;
        }
      }
    }
  };
  const std::int32_t tasks = (x.rows + per_task - 1) / per_task;
  if (tasks == 1) return rows(0);
  for_each(tasks, rows);
}

Result<void> FreeOps::make_states(const engine::RecurrentShape& shape) {
  shape_ = shape;
  return CpuOps::make_states(shape);
}

Result<engine::RecurrentId> FreeOps::make_recurrent() {
  recurrent_.emplace_back();
  return CpuOps::make_recurrent();
}

void FreeOps::load_recurrent(engine::RecurrentId id, engine::RecurrentPart part, const engine::TensorView& view) {
  CpuOps::load_recurrent(id, part, view);
  Recurrent& layer = recurrent_[static_cast<std::size_t>(id.value)];
  if (part == engine::RecurrentPart::TimeStepBias) layer.time_step_bias = widened(view);
  if (part == engine::RecurrentPart::Skip) layer.skip = widened(view);
  if (part != engine::RecurrentPart::LogDecay) return;
  layer.decay = widened(view);
  for (float& decay : layer.decay) decay = -std::exp(decay);
}

void FreeOps::scan(engine::RecurrentId layer, const Matrix& projected, const Matrix& convolved,
                   std::span<const engine::SequenceSpan> sequences, const Matrix& out) {
  const auto single = [](const engine::SequenceSpan& sequence) { return sequence.count == 1; };
  if (std::all_of(sequences.begin(), sequences.end(), single)) return CpuOps::scan(layer, projected, convolved, sequences, out);
  for (const engine::SequenceSpan& sequence : sequences)
    scan_chunked(recurrent_[static_cast<std::size_t>(layer.value)], projected, convolved, sequence, out);
}

/// From zeros: the bench prefills whole prompts. Per head, with a = dt * decay and cumulated sums of it within a chunk:
///   Y = (C B^T o exp(cum_i - cum_j)) (dt X) + exp(cum) C S^T + D X,  S' = exp(cum_last) S + (dt X)^T (exp(cum_last - cum) B).
void FreeOps::scan_chunked(const Recurrent& layer, const Matrix& projected, const Matrix& convolved,
                           const engine::SequenceSpan& sequence, const Matrix& out) {
  const std::int32_t states = shape_.state_size;
  const std::int32_t size = shape_.head_size;
  const std::int32_t inner = shape_.inner();
  const std::int32_t chunks = (sequence.count + chunk_tokens - 1) / chunk_tokens;
  const float* channels = static_cast<const float*>(convolved.data) + sequence.first * convolved.stride;
  const float* steps = static_cast<const float*>(projected.data) + sequence.first * projected.stride + inner + shape_.channels();
  float* results = static_cast<float*>(out.data) + sequence.first * out.stride;
  const auto length = [&](std::int32_t chunk) { return std::min(chunk_tokens, sequence.count - chunk * chunk_tokens); };
  const auto part = [&](std::int32_t chunk, std::int32_t column, std::int32_t columns) {
    return Strided(channels + chunk * chunk_tokens * convolved.stride + column, length(chunk), columns,
                   Eigen::OuterStride<>(convolved.stride));
  };
  // C B^T of each chunk and group serves all heads of the group.
  std::vector<RowMajor> products(static_cast<std::size_t>(chunks * shape_.groups));
  for_each(chunks * shape_.groups, [&](std::int32_t task) {
    const std::int32_t chunk = task / shape_.groups;
    const std::int32_t column = inner + task % shape_.groups * states;
    products[static_cast<std::size_t>(task)].noalias() =
        part(chunk, column + shape_.groups * states, states) * part(chunk, column, states).transpose();
  });
  for_each(shape_.heads, [&](std::int32_t head) {
    const std::int32_t group = head / (shape_.heads / shape_.groups);
    RowMajor state = RowMajor::Zero(size, states);
    RowMajor mixed, scaled, weighted;
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
      const std::int32_t count = length(chunk);
      Eigen::VectorXf step(count), cumulated(count);
      float sum = 0;
      for (std::int32_t i = 0; i < count; ++i) {
        const float raw =
            steps[(chunk * chunk_tokens + i) * projected.stride + head] + layer.time_step_bias[static_cast<std::size_t>(head)];
        step[i] =
            std::clamp(std::max(raw, 0.0F) + std::log1p(std::exp(-std::fabs(raw))), shape_.time_step_min, shape_.time_step_max);
        sum += step[i] * layer.decay[static_cast<std::size_t>(head)];
        cumulated[i] = sum;
      }
      const Strided x = part(chunk, head * size, size);
      const Strided b = part(chunk, inner + group * states, states);
      const Strided c = part(chunk, inner + (shape_.groups + group) * states, states);
      scaled = step.asDiagonal() * x;
      mixed = products[static_cast<std::size_t>(chunk * shape_.groups + group)];
      for (std::int32_t i = 0; i < count; ++i) {
        for (std::int32_t j = 0; j < count; ++j)
          mixed(i, j) = j <= i ? mixed(i, j) * std::exp(cumulated[i] - cumulated[j]) : 0.0F;
      }
      StridedOut y(results + chunk * chunk_tokens * out.stride + head * size, count, size, Eigen::OuterStride<>(out.stride));
      y.noalias() = mixed * scaled;
      const Eigen::VectorXf grown = cumulated.array().exp();
      weighted.noalias() = c * state.transpose();
      y += grown.asDiagonal() * weighted;
      y += layer.skip[static_cast<std::size_t>(head)] * x;
      const Eigen::VectorXf left = (sum - cumulated.array()).exp();
      weighted = left.asDiagonal() * b;
      state *= std::exp(sum);
      state.noalias() += scaled.transpose() * weighted;
    }
  });
}

}  // namespace rubato::bench
