// SPDX-License-Identifier: Apache-2.0
// Operations cut into tasks. Tasks split rows and outputs, never a sum, so results do not depend on how many threads share them.
#include "engine/cpu/ops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "engine/models/tensor_elements.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine::cpu {
namespace {

std::int32_t tasks_for(std::int32_t count, std::int32_t per_task) {
  return (count + per_task - 1) / per_task;
}

std::int64_t elements_of(const Matrix& matrix) {
  return static_cast<std::int64_t>(matrix.rows) * matrix.columns;
}

}  // namespace

CpuOps::CpuOps(DataType dtype, KernelPath path, std::int32_t threads, CoreGate::Clock clock)
    : kernels_(kernels_of(path, dtype)),
      clock_(std::move(clock)),
      memory_(std::make_shared<Memory>()),
      workers_(std::make_unique<Workers>(threads)) {
  CHECK(dtype != DataType::Float16);
}

std::string CpuOps::description() const {
  const std::int32_t threads = workers_->thread_count();
  return std::string(kernels_.name) + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

std::int64_t CpuOps::bytes_of(Format format) const {
  return format == Format::Accumulator ? 4 : 4 / kernels_.elements_per_cell;
}

std::byte* CpuOps::row_of(const Matrix& matrix, std::int64_t row) const {
  return static_cast<std::byte*>(matrix.data) + row * matrix.stride * bytes_of(matrix.format);
}

// ---- set-up

Result<Matrix> CpuOps::allocate(std::int32_t rows, std::int32_t columns, Format format) {
  // Whole groups, so that kernels load and store without tails; what lies past columns is zero and stays zero, because every
  // weight there is. One more line when rows would all fall on the same cache sets.
  std::int64_t stride = (static_cast<std::int64_t>(columns) + 31) / 32 * 32;
  if (stride * bytes_of(format) % 4096 == 0) stride += 64 / bytes_of(format);
  Result<HostMemory> memory = HostMemory::take(rows * stride * bytes_of(format), "activations");
  if (!memory) return Unexpected(std::move(memory).error());
  const Matrix matrix{.data = memory->data(), .rows = rows, .columns = columns, .stride = stride, .format = format};
  matrices_.push_back(std::move(*memory));
  pieces_.reserve(static_cast<std::size_t>(rows));
  token_sequence_.reserve(static_cast<std::size_t>(rows));
  return matrix;
}

CpuOps::Linear& CpuOps::linear_at(LinearId id) {
  return memory_->linears.at(static_cast<std::size_t>(id.value));
}

Result<LinearId> CpuOps::make_linear(const LinearShape& shape) {
  CHECK(shape.kind == LinearKind::Plain || shape.outputs % 2 == 0);
  Linear linear;
  linear.shape = shape;
  linear.cells = tasks_for(shape.inputs, kernels_.elements_per_cell);
  // A Swiglu panel holds gates on its left and the matching ups on its right half: both meet in one tile's registers.
  const bool gated = shape.kind == LinearKind::Swiglu;
  linear.panels =
      tasks_for(gated ? shape.outputs / 2 : shape.outputs, gated ? kernels_.panel_columns / 2 : kernels_.panel_columns);
  const std::int64_t columns = static_cast<std::int64_t>(linear.panels) * kernels_.panel_columns;
  Result<HostMemory> weights = HostMemory::take(columns * linear.cells * 4, "weights");
  if (!weights) return Unexpected(std::move(weights).error());
  linear.weights = std::move(*weights);
  Result<HostMemory> bias = HostMemory::take(gated ? 0 : columns * 4, "biases");
  if (!bias) return Unexpected(std::move(bias).error());
  linear.bias = std::move(*bias);
  memory_->linears.push_back(std::move(linear));
  return LinearId{static_cast<std::int32_t>(memory_->linears.size()) - 1};
}

CpuOps::Place CpuOps::place_of(const Linear& linear, std::int32_t output) const {
  if (linear.shape.kind == LinearKind::Plain) return {output / kernels_.panel_columns, output % kernels_.panel_columns};
  const std::int32_t half = kernels_.panel_columns / 2;
  const std::int32_t gates = linear.shape.outputs / 2;
  if (output < gates) return {output / half, output % half};
  return {(output - gates) / half, half + (output - gates) % half};
}

void CpuOps::load_row(const Linear& linear, std::int32_t output, const TensorView& rows, std::int64_t row) const {
  const Place place = place_of(linear, output);
  auto* to =
      static_cast<std::uint32_t*>(linear.weights.data()) + place.panel * linear.cells * kernels_.panel_columns + place.column;
  const std::int32_t inputs = linear.shape.inputs;
  const std::int64_t from = row * inputs;
  if (kernels_.elements_per_cell == 1) {
    for (std::int32_t i = 0; i < inputs; ++i)
      to[static_cast<std::int64_t>(i) * kernels_.panel_columns] = std::bit_cast<std::uint32_t>(widen_element(rows, from + i));
    return;
  }
  const std::byte* bytes = rows.bytes.data() + from * element_size(rows.dtype);
  for (std::int32_t cell = 0; cell < linear.cells; ++cell) {
    std::uint32_t pair = 0;
    if (rows.dtype == DataType::BFloat16) {
      std::memcpy(&pair, bytes + static_cast<std::int64_t>(cell) * 4, 2 * cell + 1 < inputs ? 4 : 2);
    } else {
      pair = float_to_bfloat16(widen_element(rows, from + 2 * cell));
      if (2 * cell + 1 < inputs)
        pair |= static_cast<std::uint32_t>(float_to_bfloat16(widen_element(rows, from + 2 * cell + 1))) << 16;
    }
    to[static_cast<std::int64_t>(cell) * kernels_.panel_columns] = pair;
  }
}

void CpuOps::load_rows(LinearId id, std::int32_t first_output, const TensorView& rows) {
  const Linear& linear = linear_at(id);
  CHECK(rows.shape.at(1) == linear.shape.inputs && first_output + rows.shape.at(0) <= linear.shape.outputs);
  const auto count = static_cast<std::int32_t>(rows.shape[0]);
  constexpr std::int32_t per_task = 64;  // rows of one panel: their cells share cache lines
  workers_->run(tasks_for(count, per_task), [&](std::int32_t task, std::int32_t) {
    const std::int32_t end = std::min(count, (task + 1) * per_task);
    for (std::int32_t row = task * per_task; row < end; ++row) load_row(linear, first_output + row, rows, row);
  });
}

void CpuOps::load_bias(LinearId id, std::int32_t first_output, const TensorView& bias) {
  Linear& linear = linear_at(id);
  CHECK(linear.shape.kind == LinearKind::Plain && first_output + bias.shape.at(0) <= linear.shape.outputs);
  linear.has_bias = true;
  for (std::int64_t i = 0; i < bias.shape[0]; ++i)
    static_cast<float*>(linear.bias.data())[first_output + i] = widen_element(bias, i);
}

Result<NormId> CpuOps::make_norm(const TensorView& weight) {
  const auto columns = static_cast<std::size_t>(weight.shape.at(0));
  Norm norm;
  norm.weights.resize((columns + 15) / 16 * 16);
  for (std::size_t i = 0; i < columns; ++i) norm.weights[i] = widen_element(weight, static_cast<std::int64_t>(i));
  memory_->norms.push_back(std::move(norm));
  return NormId{static_cast<std::int32_t>(memory_->norms.size()) - 1};
}

Result<void> CpuOps::make_cache(const AttentionShape& shape, std::span<const float> cosines, std::span<const float> sines) {
  memory_->shape = shape;
  memory_->cosines.assign(cosines.begin(), cosines.end());
  memory_->sines.assign(sines.begin(), sines.end());
  const std::int64_t head_cells = static_cast<std::int64_t>(kv_block_tokens) * shape.head_size / kernels_.elements_per_cell;
  memory_->layout = {.heads = shape.heads,
                     .kv_heads = shape.kv_heads,
                     .head_size = shape.head_size,
                     .value_offset = head_cells,
                     .head_stride = 2 * head_cells,
                     .block_stride = 2 * head_cells * shape.kv_heads};
  const std::int64_t layer_blocks = static_cast<std::int64_t>(shape.block_count) * shape.layers;
  if (layer_blocks == 0) return make_scratch();
  if (layer_blocks > std::numeric_limits<std::int64_t>::max() / 8 / memory_->layout.block_stride) {
    return unexpected(ErrorCode::ResourceExhausted, "cpu backend: no memory for the KV cache: 2^60 bytes or more");
  }
  Result<HostMemory> cache = HostMemory::take(layer_blocks * memory_->layout.block_stride * 4, "the KV cache");
  if (!cache) return Unexpected(std::move(cache).error());
  memory_->cache = std::move(*cache);
  return make_scratch();
}

Result<void> CpuOps::make_scratch() {
  const std::int64_t partial = static_cast<std::int64_t>(linear_rows_max) * kernels_.panel_columns;
  const std::int64_t scores = static_cast<std::int64_t>(attention_rows_max) * attention_tile;
  const std::int64_t sums = static_cast<std::int64_t>(attention_rows_max) * ((memory_->shape.head_size + 15) / 16 * 16);
  for (std::int32_t worker = 0; worker < workers_->thread_count(); ++worker) {
    Result<HostMemory> memory = HostMemory::take((partial + 2 * scores + sums) * 4, "scratch");
    if (!memory) return Unexpected(std::move(memory).error());
    Scratch scratch;
    scratch.memory = std::move(*memory);
    scratch.partial = static_cast<float*>(scratch.memory.data());
    scratch.attention.scores = scratch.partial + partial;
    scratch.attention.sums = scratch.attention.scores + scores;
    scratch.attention.weights = static_cast<std::uint32_t*>(scratch.memory.data()) + partial + scores + sums;
    scratch_.push_back(std::move(scratch));
  }
  return {};
}

// ---- operations

void CpuOps::embed_token(const Linear& linear, TokenId token, float scale, float* out) const {
  const Place place = place_of(linear, token);
  const auto* from = static_cast<const std::uint32_t*>(linear.weights.data()) +
                     place.panel * linear.cells * kernels_.panel_columns + place.column;
  for (std::int32_t cell = 0; cell < linear.cells; ++cell) {
    const std::uint32_t bits = from[static_cast<std::int64_t>(cell) * kernels_.panel_columns];
    if (kernels_.elements_per_cell == 1) {
      out[cell] = scale * std::bit_cast<float>(bits);
    } else {
      out[2 * cell] = scale * std::bit_cast<float>(bits << 16);
      out[2 * cell + 1] = scale * std::bit_cast<float>(bits & 0xFFFF0000U);
    }
  }
}

void CpuOps::embed(LinearId table, std::span<const TokenId> tokens, float scale, const Matrix& out) {
  const Linear& linear = linear_at(table);
  spread_rows(elements_of(out) * elementwise_work, static_cast<std::int32_t>(tokens.size()), [&](std::int32_t i, std::int32_t) {
    embed_token(linear, tokens[static_cast<std::size_t>(i)], scale, reinterpret_cast<float*>(row_of(out, i)));
  });
}

void CpuOps::norm_rows(const Matrix& x, const NormTask& common, const Matrix* delta, NormId weight, const Matrix& out) {
  const Norm& norm = memory_->norms.at(static_cast<std::size_t>(weight.value));
  spread_rows(elements_of(x) * elementwise_work, x.rows, [&](std::int32_t row, std::int32_t) {
    NormTask task = common;
    task.x = reinterpret_cast<float*>(row_of(x, row));
    task.delta = delta == nullptr ? nullptr : reinterpret_cast<const float*>(row_of(*delta, row));
    task.weight = norm.weights.data();
    task.columns = x.columns;
    task.groups = tasks_for(x.columns, group_columns);
    task.out = row_of(out, row);
    kernels_.norm(task);
  });
}

void CpuOps::rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) {
  norm_rows(x, {.epsilon = epsilon}, nullptr, weight, out);
}

void CpuOps::add_rms_norm(const Matrix& x, const Matrix& delta, float scale, NormId weight, float epsilon, const Matrix& out) {
  norm_rows(x, {.delta_scale = scale, .epsilon = epsilon}, &delta, weight, out);
}

void CpuOps::linear(LinearId id, const Matrix& x, const Matrix& out) {
  const Linear& linear = linear_at(id);
  const bool gated = linear.shape.kind == LinearKind::Swiglu;
  const std::int32_t columns = gated ? kernels_.panel_columns / 2 : kernels_.panel_columns;
  const std::int64_t panel_cells = static_cast<std::int64_t>(linear.cells) * kernels_.panel_columns;
  const TilePlan* plan = plan_of(x.rows);
  const LinearCut cut = plan != nullptr ? plan->linears[static_cast<std::size_t>(id.value)]
                                        : eager_cut({.panels = linear.panels, .cells = linear.cells}, workers_->thread_count());
  const auto one_panel = [&](std::int32_t first, std::int32_t panel, std::int32_t worker) {
    LinearTask part{.panel = static_cast<const std::uint32_t*>(linear.weights.data()) + panel * panel_cells,
                    .bias = nullptr,
                    .x = row_of(x, first),
                    .x_stride = x.stride / kernels_.elements_per_cell,
                    .rows = std::min(cut.rows, x.rows - first),
                    .cells = linear.cells,
                    .out = row_of(out, first) + static_cast<std::int64_t>(panel) * columns * bytes_of(out.format),
                    .out_stride = out.stride,
                    .out_groups = tasks_for(out.columns - panel * columns, group_columns),
                    .partial = scratch_[static_cast<std::size_t>(worker)].partial};
    if (linear.has_bias) part.bias = static_cast<const float*>(linear.bias.data()) + static_cast<std::int64_t>(panel) * columns;
    (gated ? kernels_.linear_swiglu : kernels_.linear)(part);
  };
  const std::int32_t runs = tasks_for(linear.panels, cut.panels);
  spread(static_cast<std::int64_t>(x.rows) * linear.panels * panel_cells, tasks_for(x.rows, cut.rows) * runs,
         [&](std::int32_t task, std::int32_t worker) {
           const std::int32_t begin = task % runs * cut.panels;
           const std::int32_t end = std::min(linear.panels, begin + cut.panels);
           for (std::int32_t panel = begin; panel < end; ++panel) one_panel(task / runs * cut.rows, panel, worker);
         });
}

std::uint32_t* CpuOps::layer_cache(std::int32_t layer) const {
  return static_cast<std::uint32_t*>(memory_->cache.data()) +
         static_cast<std::int64_t>(layer) * memory_->shape.block_count * memory_->layout.block_stride;
}

void CpuOps::rope_and_store(const Matrix& qkv, std::int32_t layer, std::span<const SequenceSpan> sequences,
                            const std::optional<QueryKeyNorm>& norm, const Matrix& out) {
  token_sequence_.clear();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    token_sequence_.insert(token_sequence_.end(), static_cast<std::size_t>(sequences[i].count), static_cast<std::int32_t>(i));
  }
  const std::int32_t half = memory_->shape.head_size / 2;
  RopeTask common{.layout = memory_->layout};
  if (norm) {
    common.query_norm = memory_->norms.at(static_cast<std::size_t>(norm->query.value)).weights.data();
    common.key_norm = memory_->norms.at(static_cast<std::size_t>(norm->key.value)).weights.data();
    common.epsilon = norm->epsilon;
  }
  std::uint32_t* cache = layer_cache(layer);
  spread_rows(elements_of(qkv) * elementwise_work, qkv.rows, [&](std::int32_t row, std::int32_t) {
    const SequenceSpan& sequence = sequences[static_cast<std::size_t>(token_sequence_[static_cast<std::size_t>(row)])];
    const std::int32_t position = sequence.position + row - sequence.first;
    RopeTask token = common;
    token.qkv = reinterpret_cast<float*>(row_of(qkv, row));
    token.cosines = memory_->cosines.data() + static_cast<std::int64_t>(position) * half;
    token.sines = memory_->sines.data() + static_cast<std::int64_t>(position) * half;
    token.query = row_of(out, row);
    token.block =
        cache + sequence.blocks[static_cast<std::size_t>(position / kv_block_tokens)].value * memory_->layout.block_stride;
    token.slot = position % kv_block_tokens;
    kernels_.rope(token);
  });
}

void CpuOps::attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> sequences, const Matrix& out) {
  const std::int32_t group = memory_->shape.heads / memory_->shape.kv_heads;
  const std::int32_t head_count = std::min(group, attention_rows_max);
  const std::int32_t head_parts = tasks_for(group, head_count);
  const TilePlan* plan = plan_of(query.rows);
  const std::int32_t tokens = plan != nullptr ? plan->attention_tokens : attention_rows_max / head_count;
  pieces_.clear();
  std::int64_t positions = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    positions += static_cast<std::int64_t>(sequences[i].count) * (sequences[i].position + sequences[i].count);
    for (std::int32_t token = 0; token < sequences[i].count; token += tokens) {
      pieces_.push_back(
          {.sequence = static_cast<std::int32_t>(i), .token = token, .count = std::min(tokens, sequences[i].count - token)});
    }
  }
  const std::int32_t per_piece = memory_->shape.kv_heads * head_parts;
  const std::int32_t count = static_cast<std::int32_t>(pieces_.size()) * per_piece;
  const std::uint32_t* cache = layer_cache(layer);
  const float scale = memory_->shape.scale.value_or(1.0F / std::sqrt(static_cast<float>(memory_->shape.head_size)));
  spread(2 * positions * memory_->shape.query_columns(), count, [&](std::int32_t task, std::int32_t worker) {
    // Last first: a chunk's last tokens see the most and would keep one thread busy while the others wait.
    const std::int32_t index = count - 1 - task;
    const AttentionPiece& piece = pieces_[static_cast<std::size_t>(index / per_piece)];
    const SequenceSpan& sequence = sequences[static_cast<std::size_t>(piece.sequence)];
    const std::int32_t kv_head = index % per_piece / head_parts;
    const std::int32_t first = index % head_parts * head_count;
    kernels_.attention({.layout = memory_->layout,
                        .cache = cache,
                        .blocks = sequence.blocks.data(),
                        .kv_head = kv_head,
                        .first_head = kv_head * group + first,
                        .head_count = std::min(head_count, group - first),
                        .tokens = piece.count,
                        .position = sequence.position + piece.token,
                        .query = row_of(query, sequence.first + piece.token),
                        .query_stride = query.stride,
                        .scale = scale,
                        .out = row_of(out, sequence.first + piece.token),
                        .out_stride = out.stride,
                        .scratch = scratch_[static_cast<std::size_t>(worker)].attention});
  });
}

void CpuOps::gather_rows(const Matrix& x, std::span<const std::int32_t> rows, const Matrix& out) {
  const auto bytes = static_cast<std::size_t>(std::min(x.stride, out.stride) * bytes_of(x.format));
  for (std::size_t i = 0; i < rows.size(); ++i) std::memcpy(row_of(out, static_cast<std::int64_t>(i)), row_of(x, rows[i]), bytes);
}

void CpuOps::read(const Matrix& x, std::span<float> out) const {
  CHECK(x.format == Format::Accumulator && out.size() == static_cast<std::size_t>(x.rows) * static_cast<std::size_t>(x.columns));
  for (std::int32_t row = 0; row < x.rows; ++row) {
    std::memcpy(out.data() + static_cast<std::int64_t>(row) * x.columns, row_of(x, row), static_cast<std::size_t>(x.columns) * 4);
  }
}

void CpuOps::poison(std::span<const BlockId> blocks) {
  for (std::int32_t layer = 0; layer < memory_->shape.layers; ++layer) {
    for (const BlockId block : blocks) {
      // All ones is NaN in F32 and in both halves of a BF16 pair.
      std::memset(layer_cache(layer) + block.value * memory_->layout.block_stride, 0xFF,
                  static_cast<std::size_t>(memory_->layout.block_stride) * 4);
    }
  }
}

// ---- shapes

ShapeLimits CpuOps::shape_limits() const {
  // A plan costs microseconds and a few hundred bytes; more of them would only crowd the status.
  return {.count_max = 24, .token_tile = 16, .eager_tokens = 64};
}

Result<std::unique_ptr<StepShapes>> CpuOps::build_shapes(const policies::StepBuckets& buckets,
                                                         const std::stop_token& stop) const {
  TilePlans::Sizes sizes{.threads = workers_->thread_count()};
  if (memory_->shape.layers > 0) {
    const std::int32_t group = memory_->shape.heads / memory_->shape.kv_heads;
    const std::int32_t head_count = std::min(group, attention_rows_max);
    sizes.attention = {.tokens_max = attention_rows_max / head_count,
                       .per_piece = memory_->shape.kv_heads * tasks_for(group, head_count)};
  }
  for (const Linear& linear : memory_->linears) sizes.linears.push_back({.panels = linear.panels, .cells = linear.cells});
  return TilePlans::build(buckets, sizes, stop);
}

std::unique_ptr<StepShapes> CpuOps::use_shapes(std::unique_ptr<StepShapes> shapes) {
  tokens_ = {};
  selected_ = {};
  std::unique_ptr<StepShapes> before = std::move(plans_);
  plans_.reset(static_cast<TilePlans*>(shapes.release()));
  return before;
}

std::optional<std::int32_t> CpuOps::begin_step(std::int32_t tokens, std::int32_t selected) {
  if (memory_->gate) memory_->gate->begin(side_);
  tokens_ = {.rows = tokens, .plan = plans_ ? plans_->find(tokens) : nullptr};
  selected_ = {.rows = selected, .plan = plans_ ? plans_->find(selected) : nullptr};
  if (tokens_.plan == nullptr) return std::nullopt;
  return plans_->buckets().tokens[*plans_->buckets().find(tokens)];
}

const TilePlan* CpuOps::plan_of(std::int32_t rows) const {
  if (rows == tokens_.rows) return tokens_.plan;
  return rows == selected_.rows ? selected_.plan : nullptr;
}

std::int32_t CpuOps::elementwise_rows(std::int32_t rows) const {
  const TilePlan* plan = plan_of(rows);
  return plan != nullptr ? plan->elementwise_rows : eager_elementwise_rows;
}

void CpuOps::for_each(std::int32_t count, const std::function<void(std::int32_t)>& body) {
  workers_->run(count, [&](std::int32_t task, std::int32_t) { body(task); });
}

}  // namespace rubato::engine::cpu
