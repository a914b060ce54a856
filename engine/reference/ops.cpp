// SPDX-License-Identifier: Apache-2.0
// The formulas of engine/ops.h, written to be read.
#include "engine/reference/ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "engine/models/tensor_elements.h"
#include "engine/reference/scalars.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine {

using reference::dot;
using reference::row_of;
using reference::silu;

namespace {

void normalise(const float* x, const std::vector<float>& weight, float epsilon, float* out) {
  const auto size = static_cast<std::int64_t>(weight.size());
  const float scale = 1.0F / std::sqrt(dot(x, x, size) / static_cast<float>(size) + epsilon);
  for (std::int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * weight[static_cast<std::size_t>(i)];
}

}  // namespace

Result<Matrix> ReferenceOps::allocate(std::int32_t rows, std::int32_t columns, Format format) {
  matrices_.emplace_back(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
  return Matrix{.data = matrices_.back().data(), .rows = rows, .columns = columns, .stride = columns, .format = format};
}

Result<LinearId> ReferenceOps::make_linear(const LinearShape& shape) {
  const auto outputs = static_cast<std::size_t>(shape.outputs);
  memory_->linears.push_back({.shape = shape,
                              .weights = std::vector<float>(outputs * static_cast<std::size_t>(shape.inputs)),
                              .bias = std::vector<float>(outputs)});
  return LinearId{static_cast<std::int32_t>(memory_->linears.size()) - 1};
}

void ReferenceOps::load_rows(LinearId id, std::int32_t first_output, const TensorView& rows) {
  Linear& linear = memory_->linears.at(static_cast<std::size_t>(id.value));
  const std::int64_t count = rows.shape.at(0) * rows.shape.at(1);
  CHECK(rows.shape[1] == linear.shape.inputs && first_output + rows.shape[0] <= linear.shape.outputs);
  float* out = linear.weights.data() + static_cast<std::int64_t>(first_output) * linear.shape.inputs;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = widen_element(rows, i);
    out[i] = memory_->dtype == DataType::BFloat16 ? bfloat16_to_float(float_to_bfloat16(value)) : value;
  }
}

void ReferenceOps::load_bias(LinearId id, std::int32_t first_output, const TensorView& bias) {
  Linear& linear = memory_->linears.at(static_cast<std::size_t>(id.value));
  CHECK(linear.shape.kind == LinearKind::Plain && first_output + bias.shape.at(0) <= linear.shape.outputs);
  for (std::int64_t i = 0; i < bias.shape[0]; ++i)
    linear.bias[static_cast<std::size_t>(first_output + i)] = widen_element(bias, i);
}

Result<NormId> ReferenceOps::make_norm(const TensorView& weight) {
  std::vector<float>& norm = memory_->norms.emplace_back(static_cast<std::size_t>(weight.shape.at(0)));
  for (std::size_t i = 0; i < norm.size(); ++i) norm[i] = widen_element(weight, static_cast<std::int64_t>(i));
  return NormId{static_cast<std::int32_t>(memory_->norms.size()) - 1};
}

Result<void> ReferenceOps::make_cache(const AttentionShape& shape, std::span<const float> cosines, std::span<const float> sines) {
  memory_->shape = shape;
  memory_->cosines.assign(cosines.begin(), cosines.end());
  memory_->sines.assign(sines.begin(), sines.end());
  const std::size_t floats = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.block_count) *
                             kv_block_tokens * static_cast<std::size_t>(shape.kv_heads) *
                             static_cast<std::size_t>(shape.head_size);
  memory_->keys.resize(floats);
  memory_->values.resize(floats);
  scores_.resize(static_cast<std::size_t>(shape.max_position));
  return {};
}

void ReferenceOps::embed(LinearId table, std::span<const TokenId> tokens, float scale, const Matrix& out) {
  const Linear& linear = memory_->linears.at(static_cast<std::size_t>(table.value));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const float* from = linear.weights.data() + static_cast<std::int64_t>(tokens[i]) * linear.shape.inputs;
    float* to = row_of(out, static_cast<std::int64_t>(i));
    for (std::int32_t j = 0; j < linear.shape.inputs; ++j) to[j] = scale * from[j];
  }
}

void ReferenceOps::rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) {
  for (std::int32_t row = 0; row < x.rows; ++row) {
    normalise(row_of(x, row), memory_->norms.at(static_cast<std::size_t>(weight.value)), epsilon, row_of(out, row));
  }
}

void ReferenceOps::add_rms_norm(const Matrix& x, const Matrix& delta, float scale, NormId weight, float epsilon,
                                const Matrix& out) {
  for (std::int32_t row = 0; row < x.rows; ++row) {
    for (std::int32_t i = 0; i < x.columns; ++i) row_of(x, row)[i] = std::fma(scale, row_of(delta, row)[i], row_of(x, row)[i]);
  }
  rms_norm(x, weight, epsilon, out);
}

void ReferenceOps::linear(LinearId id, const Matrix& x, const Matrix& out) {
  const Linear& linear = memory_->linears.at(static_cast<std::size_t>(id.value));
  const std::int32_t inputs = linear.shape.inputs;
  const auto product = [&](std::int32_t row, std::int32_t output) {
    return dot(row_of(x, row), linear.weights.data() + static_cast<std::int64_t>(output) * inputs, inputs);
  };
  for (std::int32_t row = 0; row < x.rows; ++row) {
    for (std::int32_t output = 0; output < out.columns; ++output) {
      float& y = row_of(out, row)[output];
      if (linear.shape.kind == LinearKind::Swiglu) {
        y = silu(product(row, output)) * product(row, out.columns + output);
      } else {
        y = product(row, output) + linear.bias[static_cast<std::size_t>(output)];
      }
    }
  }
}

void ReferenceOps::rotate(float* head, std::int32_t position) const {
  const std::int32_t half = memory_->shape.head_size / 2;
  const float* cosines = memory_->cosines.data() + static_cast<std::int64_t>(position) * half;
  const float* sines = memory_->sines.data() + static_cast<std::int64_t>(position) * half;
  for (std::int32_t i = 0; i < half; ++i) {
    const float a = head[i];
    const float b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

std::size_t ReferenceOps::slot(std::int32_t layer, std::int32_t kv_head, std::int32_t position,
                               std::span<const BlockId> blocks) const {
  const std::int64_t block = static_cast<std::int64_t>(layer) * memory_->shape.block_count +
                             blocks[static_cast<std::size_t>(position / kv_block_tokens)].value;
  const std::int64_t token = block * kv_block_tokens + position % kv_block_tokens;
  return static_cast<std::size_t>((token * memory_->shape.kv_heads + kv_head) * memory_->shape.head_size);
}

void ReferenceOps::rope_and_store(const Matrix& qkv, std::int32_t layer, std::span<const SequenceSpan> sequences,
                                  const std::optional<QueryKeyNorm>& norm, const Matrix& out) {
  const std::int32_t size = memory_->shape.head_size;
  for (const SequenceSpan& sequence : sequences) {
    for (std::int32_t i = 0; i < sequence.count; ++i) {
      const std::int32_t position = sequence.position + i;
      float* query = row_of(qkv, sequence.first + i);
      float* key = query + memory_->shape.query_columns();
      const float* value = key + memory_->shape.kv_heads * size;
      for (std::int32_t head = 0; head < memory_->shape.heads; ++head) {
        float* at = query + head * size;
        if (norm) normalise(at, memory_->norms.at(static_cast<std::size_t>(norm->query.value)), norm->epsilon, at);
        rotate(at, position);
      }
      std::copy_n(query, memory_->shape.query_columns(), row_of(out, sequence.first + i));
      for (std::int32_t head = 0; head < memory_->shape.kv_heads; ++head) {
        float* at = key + head * size;
        if (norm) normalise(at, memory_->norms.at(static_cast<std::size_t>(norm->key.value)), norm->epsilon, at);
        rotate(at, position);
        const std::size_t to = slot(layer, head, position, sequence.blocks);
        std::copy_n(at, size, memory_->keys.data() + to);
        std::copy_n(value + head * size, size, memory_->values.data() + to);
      }
    }
  }
}

void ReferenceOps::attend(const float* query, std::int32_t layer, std::int32_t kv_head, std::int32_t position,
                          std::span<const BlockId> blocks, float* out) {
  const std::int32_t size = memory_->shape.head_size;
  const float scale = memory_->shape.scale.value_or(1.0F / std::sqrt(static_cast<float>(size)));
  float largest = -std::numeric_limits<float>::infinity();
  for (std::int32_t i = 0; i <= position; ++i) {
    const float score = dot(query, memory_->keys.data() + slot(layer, kv_head, i, blocks), size) * scale;
    scores_[static_cast<std::size_t>(i)] = score;
    largest = std::max(largest, score);
  }
  float sum = 0;
  std::fill_n(out, size, 0.0F);
  for (std::int32_t i = 0; i <= position; ++i) {
    const float weight = std::exp(scores_[static_cast<std::size_t>(i)] - largest);
    const float* value = memory_->values.data() + slot(layer, kv_head, i, blocks);
    sum += weight;
    for (std::int32_t j = 0; j < size; ++j) out[j] += weight * value[j];
  }
  for (std::int32_t j = 0; j < size; ++j) out[j] /= sum;
}

void ReferenceOps::attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> sequences,
                             const Matrix& out) {
  const std::int32_t group = memory_->shape.heads / memory_->shape.kv_heads;
  for (const SequenceSpan& sequence : sequences) {
    for (std::int32_t i = 0; i < sequence.count; ++i) {
      for (std::int32_t head = 0; head < memory_->shape.heads; ++head) {
        const std::int32_t row = sequence.first + i;
        const std::int32_t column = head * memory_->shape.head_size;
        attend(row_of(query, row) + column, layer, head / group, sequence.position + i, sequence.blocks,
               row_of(out, row) + column);
      }
    }
  }
}

void ReferenceOps::gather_rows(const Matrix& x, std::span<const std::int32_t> rows, const Matrix& out) {
  for (std::size_t i = 0; i < rows.size(); ++i)
    std::copy_n(row_of(x, rows[i]), x.columns, row_of(out, static_cast<std::int64_t>(i)));
}

void ReferenceOps::read(const Matrix& x, std::span<float> out) const {
  CHECK(out.size() == static_cast<std::size_t>(x.rows) * static_cast<std::size_t>(x.columns));
  for (std::int32_t row = 0; row < x.rows; ++row) {
    std::copy_n(row_of(x, row), x.columns, out.data() + static_cast<std::int64_t>(row) * x.columns);
  }
}

std::int64_t ReferenceOps::block_size() const {
  return static_cast<std::int64_t>(kv_block_tokens) * memory_->shape.kv_heads * memory_->shape.head_size;
}

std::int64_t ReferenceOps::block_begin(std::int32_t layer, BlockId block) const {
  return (static_cast<std::int64_t>(layer) * memory_->shape.block_count + block.value) * block_size();
}

void ReferenceOps::poison(std::span<const BlockId> blocks) {
  for (std::int32_t layer = 0; layer < memory_->shape.layers; ++layer) {
    for (const BlockId block : blocks) {
      const std::int64_t at = block_begin(layer, block);
      std::fill_n(memory_->keys.data() + at, block_size(), std::numeric_limits<float>::quiet_NaN());
      std::fill_n(memory_->values.data() + at, block_size(), std::numeric_limits<float>::quiet_NaN());
    }
  }
}

Result<std::unique_ptr<HostOps>> ReferenceOps::make_sibling() {
  if (memory_->has_sibling) return unexpected(ErrorCode::InvalidArgument, "reference backend: it has two lanes already");
  std::unique_ptr<ReferenceOps> sibling(new ReferenceOps(memory_));
  sibling->scores_.resize(scores_.size());
  memory_->has_sibling = true;
  return std::unique_ptr<HostOps>(std::move(sibling));
}

Result<void> ReferenceOps::check_source(const HostOps& source) const {
  if (dynamic_cast<const ReferenceOps*>(&source) != nullptr) return {};
  return unexpected(ErrorCode::InvalidArgument, "kernels", "reference backend: another kind of backend wrote the blocks");
}

void ReferenceOps::copy_block(const HostOps& source, const BlockCopy& copy) {
  const auto& from = dynamic_cast<const ReferenceOps&>(source);
  CHECK(block_size() == from.block_size() && memory_->shape.layers == from.memory_->shape.layers, "size=", block_size());
  for (std::int32_t layer = 0; layer < memory_->shape.layers; ++layer) {
    const std::int64_t begin = from.block_begin(layer, copy.from);
    const std::int64_t to = block_begin(layer, copy.to);
    if (memory_ == from.memory_ && begin == to) continue;
    std::copy_n(from.memory_->keys.data() + begin, block_size(), memory_->keys.data() + to);
    std::copy_n(from.memory_->values.data() + begin, block_size(), memory_->values.data() + to);
  }
}

void ReferenceOps::for_each(std::int32_t count, const std::function<void(std::int32_t)>& body) {
  for (std::int32_t i = 0; i < count; ++i) body(i);
}

}  // namespace rubato::engine
