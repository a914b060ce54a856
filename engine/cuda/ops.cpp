// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/ops.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "engine/cuda/kernels.h"
#include "engine/cuda/matmul_cache.h"
#include "engine/cuda/ops_memory.h"
#include "engine/model/tensors.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine::cuda {
namespace {

// Results of a probed product take at most this much memory; taller batches run in pieces of as many rows, with the same bits.
constexpr std::int64_t probe_bytes_max = std::int64_t{1} << 30;

}  // namespace

CudaOps::CudaOps(std::shared_ptr<Memory> memory, std::shared_ptr<Scratch> scratch, const Stream& stream)
    : memory_(std::move(memory)), scratch_(std::move(scratch)), stream_(&stream) {}
CudaOps::~CudaOps() = default;

Result<std::unique_ptr<CudaOps>> CudaOps::make(const DeviceFacts& device, const OpsLimits& limits, const Batch& batch,
                                               const Stream& stream) {
  auto memory = std::make_shared<Memory>();
  memory->device = device;
  memory->limits = limits;
  Result<std::unique_ptr<MatmulLibrary>> library = MatmulLibrary::make(device, limits.dtype);
  if (!library) return Unexpected(std::move(library).error());
  memory->library = std::move(*library);
  Result<Uploader> uploader = Uploader::make(stream);
  if (!uploader) return Unexpected(std::move(uploader).error());
  memory->uploader.emplace(std::move(*uploader));
  if (auto prepared = prepare_linear(); !prepared) return Unexpected(std::move(prepared).error());
  return std::unique_ptr<CudaOps>(new CudaOps(std::move(memory), std::make_shared<Scratch>(Scratch{.batch = batch}), stream));
}

Result<std::unique_ptr<CudaOps>> CudaOps::on(const Stream& stream) const {
  std::unique_ptr<CudaOps> other(new CudaOps(memory_, scratch_, stream));
  if (auto made = other->make_calls(); !made) return Unexpected(std::move(made).error());
  return other;
}

Result<std::unique_ptr<CudaOps>> CudaOps::beside(const Batch& batch, const Stream& stream) const {
  std::unique_ptr<CudaOps> other(new CudaOps(memory_, std::make_shared<Scratch>(Scratch{.batch = batch}), stream));
  Result<void> made = other->take_attention_scratch();
  if (made) made = other->take_product_scratch();
  if (made) made = other->make_calls();
  if (!made) return Unexpected(std::move(made).error());
  return other;
}

CacheView CudaOps::cache() const {
  return {.data = memory_->cache.data(),
          .layers = memory_->shape.layers,
          .block_count = memory_->shape.block_count,
          .layer_bytes = memory_->layer_bytes,
          .block_bytes = memory_->layer_bytes / (memory_->shape.block_count + 1)};
}

void CudaOps::keep(Result<void> result) {
  if (!result && !failure_) failure_ = std::move(result).error();
}

Result<void> CudaOps::take_failure() {
  keep(check(cudaGetLastError(), "kernel launch"));
  if (!failure_) return {};
  return Unexpected(*std::exchange(failure_, std::nullopt));
}

const std::vector<MatmulReport>& CudaOps::matmul_reports() const {
  return memory_->reports;
}

// ---- set-up

Result<Matrix> CudaOps::allocate(std::int32_t rows, std::int32_t columns, Format format) {
  const DataType dtype = format == Format::Accumulator ? DataType::Float32 : memory_->limits.dtype;
  const std::int64_t bytes = std::int64_t{rows} * columns * element_size(dtype);
  Result<DeviceMemory> memory = DeviceMemory::make(bytes);
  if (!memory) return Unexpected(std::move(memory).error());
  if (bytes > 0)
    keep(check(cudaMemsetAsync(memory->data(), 0, static_cast<std::size_t>(bytes), stream_->get()), "cudaMemsetAsync"));
  scratch_->matrices.push_back(std::move(*memory));
  return Matrix{.data = scratch_->matrices.back().data(), .rows = rows, .columns = columns, .stride = columns, .format = format};
}

Result<LinearId> CudaOps::make_linear(const LinearShape& shape) {
  const std::int64_t bytes = std::int64_t{shape.outputs} * shape.inputs * element_size(memory_->limits.dtype);
  Result<DeviceMemory> weights = DeviceMemory::make(bytes);
  if (!weights) return Unexpected(std::move(weights).error());
  keep(check(cudaMemsetAsync(weights->data(), 0, static_cast<std::size_t>(bytes), stream_->get()), "cudaMemsetAsync"));
  memory_->linears.push_back({.shape = shape, .weights = std::move(*weights), .bias = {}, .plan = {}});
  return LinearId{static_cast<std::int32_t>(memory_->linears.size()) - 1};
}

void CudaOps::load_rows(LinearId id, std::int32_t first_output, const TensorView& rows) {
  Memory::Linear& linear = memory_->linears.at(static_cast<std::size_t>(id.value));
  CHECK(rows.shape.size() == 2 && rows.shape[1] == linear.shape.inputs && first_output + rows.shape[0] <= linear.shape.outputs);
  const std::int64_t at = std::int64_t{first_output} * linear.shape.inputs * element_size(memory_->limits.dtype);
  keep(memory_->uploader->upload(rows, 0, rows.shape[0] * rows.shape[1], memory_->limits.dtype, linear.weights.data() + at));
}

void CudaOps::load_bias(LinearId id, std::int32_t first_output, const TensorView& bias) {
  Memory::Linear& linear = memory_->linears.at(static_cast<std::size_t>(id.value));
  CHECK(linear.shape.kind == LinearKind::Plain && first_output + bias.shape.at(0) <= linear.shape.outputs);
  if (linear.bias.bytes() == 0) {
    const std::int64_t bytes = std::int64_t{linear.shape.outputs} * 4;
    Result<DeviceMemory> memory = DeviceMemory::make(bytes);
    if (!memory) return keep(Unexpected(std::move(memory).error()));
    linear.bias = std::move(*memory);
    keep(check(cudaMemsetAsync(linear.bias.data(), 0, static_cast<std::size_t>(bytes), stream_->get()), "cudaMemsetAsync"));
  }
  keep(memory_->uploader->upload(bias, 0, bias.shape[0], DataType::Float32, linear.bias.data() + std::int64_t{first_output} * 4));
}

Result<NormId> CudaOps::make_norm(const TensorView& weight) {
  Result<DeviceMemory> norm = DeviceMemory::make(weight.shape.at(0) * 4);
  if (!norm) return Unexpected(std::move(norm).error());
  memory_->norms.push_back(std::move(*norm));
  keep(memory_->uploader->upload(weight, 0, weight.shape[0], DataType::Float32, memory_->norms.back().data()));
  return NormId{static_cast<std::int32_t>(memory_->norms.size()) - 1};
}

Result<void> CudaOps::make_cache(const AttentionShape& shape, std::span<const float> cosines, std::span<const float> sines) {
  Memory& memory = *memory_;
  memory.shape = shape;
  if (shape.layers == 0) return {};
  memory.cache_shape = {
      .heads = shape.heads, .kv_heads = shape.kv_heads, .head_size = shape.head_size, .block_count = shape.block_count};
  memory.layer_bytes = (std::int64_t{shape.block_count} + 1) * shape.kv_heads * 2 * kv_block_tokens * shape.head_size *
                       element_size(memory.limits.dtype);
  struct Part {
    DeviceMemory* memory;
    std::int64_t bytes;
  };
  for (const Part& part : {Part{&memory.cache, memory.layer_bytes * shape.layers},
                           Part{&memory.cosines, static_cast<std::int64_t>(cosines.size_bytes())},
                           Part{&memory.sines, static_cast<std::int64_t>(sines.size_bytes())}}) {
    Result<DeviceMemory> made = DeviceMemory::make(part.bytes);
    if (!made) return Unexpected(std::move(made).error());
    *part.memory = std::move(*made);
  }
  const auto upload = [&](std::span<const float> values, const DeviceMemory& to) {
    const TensorView view{
        .dtype = DataType::Float32, .shape = {static_cast<std::int64_t>(values.size())}, .bytes = std::as_bytes(values)};
    keep(memory.uploader->upload(view, 0, view.shape[0], DataType::Float32, to.data()));
  };
  upload(cosines, memory.cosines);
  upload(sines, memory.sines);
  return take_attention_scratch();
}

Result<void> CudaOps::take_attention_scratch() {
  const Memory& memory = *memory_;
  if (memory.shape.layers == 0) return {};
  const std::int64_t list_bytes = std::int64_t{memory.shape.block_count} * 4;
  const AttentionScratchSize size =
      attention_scratch_size(memory.cache_shape, memory.limits.max_tokens, memory.limits.max_rows, memory.shape.max_position);
  Result<DeviceMemory> attention = DeviceMemory::make(size.bytes);
  if (!attention) return Unexpected(std::move(attention).error());
  scratch_->attention = std::move(*attention);
  Result<DeviceMemory> poison_blocks = DeviceMemory::make(list_bytes);
  if (!poison_blocks) return Unexpected(std::move(poison_blocks).error());
  scratch_->poison_blocks = std::move(*poison_blocks);
  Result<PinnedMemory> poison_host = PinnedMemory::make(list_bytes);
  if (!poison_host) return Unexpected(std::move(poison_host).error());
  scratch_->poison_host = std::move(*poison_host);
  keep(check(cudaMemsetAsync(scratch_->attention.data(), 0, static_cast<std::size_t>(size.bytes), stream_->get()),
             "cudaMemsetAsync"));
  Result<AttentionPlan> plan =
      make_attention_plan(memory.limits.dtype, memory.cache_shape, memory.limits.max_tokens, memory.limits.max_rows,
                          memory.shape.max_position, memory.device.multiprocessors, scratch_->attention.data());
  if (!plan) return Unexpected(std::move(plan).error());
  scratch_->attention_plan = *plan;
  scratch_->attention_plan.scale = memory.shape.scale;
  return {};
}

Result<void> CudaOps::finish_loading() {
  Memory& memory = *memory_;
  keep(memory.uploader->finish());
  memory.uploader.reset();
  if (auto loaded = take_failure(); !loaded) return loaded;

  if (auto taken = take_product_scratch(); !taken) return taken;
  MatmulCache cache(memory.limits.cache_folder, memory.device, memory.limits.dtype);
  for (Memory::Linear& linear : memory.linears) {
    const bool swiglu = linear.shape.kind == LinearKind::Swiglu;
    linear.plan.shape = {.outputs = linear.shape.outputs,
                         .inputs = linear.shape.inputs,
                         .out_dtype = swiglu ? memory.limits.dtype : DataType::Float32,
                         .has_bias = linear.bias.bytes() > 0};
    linear.plan.weights = linear.weights.data();
    linear.plan.bias = linear.bias.bytes() > 0 ? reinterpret_cast<const float*>(linear.bias.data()) : nullptr;
    const auto same = std::find_if(memory.linears.begin(), memory.linears.end(),
                                   [&](const Memory::Linear& other) { return other.plan.shape == linear.plan.shape; });
    if (&*same != &linear) {  // the first of a shape has been probed
      linear.plan.ranges = same->plan.ranges;
      linear.plan.algorithms = same->plan.algorithms;
      continue;
    }
    const std::int64_t row_bytes = std::int64_t{linear.shape.outputs} * element_size(linear.plan.shape.out_dtype);
    const auto rows =
        static_cast<std::int32_t>(std::clamp<std::int64_t>(probe_bytes_max / row_bytes, 1, memory.limits.max_tokens));
    if (cache.find(rows, linear.plan)) {
      memory.reports.push_back({.shape = linear.plan.shape, .own_kernel = linear.plan.algorithms.empty()});
      continue;
    }
    Result<MatmulReport> report = choose_algorithms(*memory.library, *stream_, rows, linear.plan);
    if (!report) return Unexpected(std::move(report).error());
    memory.reports.push_back(*report);
    cache.add(rows, linear.plan);
  }
  cache.save();
  return make_calls();
}

Result<void> CudaOps::take_product_scratch() {
  std::int32_t swiglu_outputs = 0;
  for (const Memory::Linear& linear : memory_->linears) {
    if (linear.shape.kind == LinearKind::Swiglu) swiglu_outputs = std::max(swiglu_outputs, linear.shape.outputs);
  }
  const OpsLimits& limits = memory_->limits;
  Result<DeviceMemory> gate_up =
      DeviceMemory::make(std::int64_t{limits.max_tokens} * swiglu_outputs * element_size(limits.dtype));
  if (!gate_up) return Unexpected(std::move(gate_up).error());
  scratch_->gate_up = std::move(*gate_up);
  Result<DeviceMemory> workspace = DeviceMemory::make(memory_->library->workspace_bytes());
  if (!workspace) return Unexpected(std::move(workspace).error());
  scratch_->workspace = std::move(*workspace);
  return {};
}

Result<void> CudaOps::make_calls() {
  for (const Memory::Linear& linear : memory_->linears) {
    Result<MatmulCall> call = MatmulCall::make(*memory_->library, linear.plan, scratch_->workspace.data());
    if (!call) return Unexpected(std::move(call).error());
    calls_.push_back(std::move(*call));
  }
  return {};
}

// ---- operations

void* CudaOps::layer_cache(std::int32_t layer) const {
  return memory_->cache.data() + layer * memory_->layer_bytes;
}

const float* CudaOps::norm_weight(NormId id) const {
  return reinterpret_cast<const float*>(memory_->norms[static_cast<std::size_t>(id.value)].data());
}

void CudaOps::begin_pass() {
  if (memory_->shape.layers == 0) return;
  plan_attention(stream_->get(), scratch_->attention_plan, scratch_->batch);
}

void CudaOps::embed(LinearId table, std::span<const TokenId> /*tokens: the batch's*/, float scale, const Matrix& out) {
  cuda::embed(stream_->get(), memory_->limits.dtype, memory_->linears[static_cast<std::size_t>(table.value)].weights.data(),
              scratch_->batch, scale, accumulators(out));
}

void CudaOps::rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) {
  cuda::add_rms_norm(stream_->get(), memory_->limits.dtype, accumulators(x), {}, norm_weight(weight), epsilon, activations(out));
}

void CudaOps::add_rms_norm(const Matrix& x, const Matrix& delta, float scale, NormId weight, float epsilon, const Matrix& out) {
  cuda::add_rms_norm(stream_->get(), memory_->limits.dtype, accumulators(x), {.delta = accumulators(delta), .scale = scale},
                     norm_weight(weight), epsilon, activations(out));
}

void CudaOps::linear(LinearId id, const Matrix& x, const Matrix& out) {
  const Memory::Linear& linear = memory_->linears[static_cast<std::size_t>(id.value)];
  MatmulCall& call = calls_[static_cast<std::size_t>(id.value)];
  if (linear.shape.kind == LinearKind::Plain) return keep(call.queue(stream_->get(), activations(x), any_rows(out)));
  const Activations gate_up{
      .data = scratch_->gate_up.data(), .count = x.rows, .columns = linear.shape.outputs, .stride = linear.shape.outputs};
  keep(call.queue(stream_->get(), activations(x), gate_up));
  swiglu(stream_->get(), memory_->limits.dtype, gate_up, activations(out));
}

void CudaOps::rope_and_store(const Matrix& qkv, std::int32_t layer, std::span<const SequenceSpan> /*sequences: the batch's*/,
                             const std::optional<QueryKeyNorm>& norm, const Matrix& out) {
  RopeInputs rope{.cosines = reinterpret_cast<const float*>(memory_->cosines.data()),
                  .sines = reinterpret_cast<const float*>(memory_->sines.data())};
  if (norm) {
    rope.query_norm = norm_weight(norm->query);
    rope.key_norm = norm_weight(norm->key);
    rope.epsilon = norm->epsilon;
  }
  cuda::rope_and_store(stream_->get(), memory_->limits.dtype, memory_->cache_shape, accumulators(qkv), rope, scratch_->batch,
                       layer_cache(layer), activations(out));
}

void CudaOps::attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> /*sequences: the batch's*/,
                        const Matrix& out) {
  cuda::attention(stream_->get(), scratch_->attention_plan, scratch_->batch, activations(query), layer_cache(layer),
                  activations(out));
}

void CudaOps::gather_rows(const Matrix& x, std::span<const std::int32_t> /*rows: the batch's*/, const Matrix& out) {
  const auto size = static_cast<std::int32_t>(x.format == Format::Accumulator ? 4 : element_size(memory_->limits.dtype));
  cuda::gather_rows(stream_->get(), size, any_rows(x), scratch_->batch, any_rows(out));
}

// ---- host access and poison

void CudaOps::read(const Matrix& x, std::span<float> out) const {
  CHECK(x.format == Format::Accumulator && x.stride == x.columns);
  CHECK(out.size() == static_cast<std::size_t>(x.rows) * static_cast<std::size_t>(x.columns));
  // Only tests and the exactness checker read matrices, so the page-locked buffer lives for one call.
  const auto bytes = static_cast<std::int64_t>(out.size_bytes());
  const Result<PinnedMemory> pinned = PinnedMemory::make(bytes);
  const bool arrived = pinned.has_value() &&
                       cudaMemcpyAsync(pinned->data(), x.data, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost,
                                       stream_->get()) == cudaSuccess &&
                       stream_->wait().has_value();
  if (arrived) {
    std::memcpy(out.data(), pinned->data(), static_cast<std::size_t>(bytes));
  } else {
    std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
  }
}

void CudaOps::poison(std::span<const BlockId> blocks) {
  if (memory_->shape.layers == 0) return;  // there is nothing in them
  CHECK(static_cast<std::int64_t>(blocks.size()) * 4 <= scratch_->poison_host.bytes(), "blocks=", blocks.size());
  if (blocks.empty()) return;
  auto* list = reinterpret_cast<std::int32_t*>(scratch_->poison_host.data());
  for (std::size_t i = 0; i < blocks.size(); ++i) list[i] = blocks[i].value;
  keep(check(cudaMemcpyAsync(scratch_->poison_blocks.data(), list, blocks.size() * 4, cudaMemcpyHostToDevice, stream_->get()),
             "cudaMemcpyAsync"));
  for (std::int32_t layer = 0; layer < memory_->shape.layers; ++layer) {
    poison_blocks(stream_->get(), memory_->limits.dtype, memory_->cache_shape,
                  reinterpret_cast<const std::int32_t*>(scratch_->poison_blocks.data()), static_cast<std::int32_t>(blocks.size()),
                  layer_cache(layer));
  }
  keep(stream_->wait());  // the blocks may be another lane's next, and the list is written anew next time
}

}  // namespace rubato::engine::cuda
