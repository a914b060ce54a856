// SPDX-License-Identifier: Apache-2.0
// One step on the GPU: metadata to the device in one copy, the forward pass and sampling queued eagerly or replayed from the
// graph of the step's bucket and place, results back in one copy. The host waits once, at the end; so whatever place a lane's
// next step runs in, its last one is done.
#include "engine/cuda/backend.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/cuda/cuda_backend.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int32_t shapes_max = 32;  // some 40 kernels per layer: a set of these costs tens of megabytes and about a second
constexpr std::int32_t shapes_max_shared = 16;  // each is captured for the whole device and for the lane's share of it
constexpr std::int32_t bucket_tile = 128;       // the tile of the tensor-core products
constexpr std::int32_t eager_tokens_cost = 96;  // launching a step kernel by kernel costs about what so many tokens do; see docs

}  // namespace

// ---- steps

/// Queues the pass over what staging holds: attention's work list, the layers, sampling, and the copy of the results. selected:
/// see Decoder::forward. Returns where the logits will be.
Result<Matrix> CudaBackend::queue_pass(CudaOps& ops, Decoder& model, const Stream& stream, std::int32_t tokens,
                                       std::span<const std::int32_t> selected) {
  ops.move_to(stream);
  ops.begin_pass();
  const Matrix logits = model.forward(std::span(zeros_).first(static_cast<std::size_t>(tokens)), {}, selected);
  if (!selected.empty()) {
    sample(stream.get(), sampling_.shape, staging_.batch().counts,
           {.data = static_cast<float*>(logits.data), .count = logits.rows, .columns = logits.columns, .stride = logits.stride},
           sampling_.memory());
    const auto bytes = static_cast<std::size_t>(logits.rows) * sizeof(SampledRow);
    const Result<void> copied = check(
        cudaMemcpyAsync(sampling_.results_host.data(), sampling_.results.data(), bytes, cudaMemcpyDeviceToHost, stream.get()),
        "cudaMemcpyAsync");
    if (!copied) return Unexpected(Error(copied.error()));
  }
  if (Result<void> queued = ops.take_failure(); !queued) return Unexpected(std::move(queued).error());
  return logits;
}

Result<Matrix> CudaBackend::queue_step(std::span<const StepRow> rows, const std::optional<Places::Part>& part,
                                       StepResult& result) {
  const Stream& stream = part ? part->place->step : places_.whole().step;
  std::int32_t tokens = 0;
  inputs_.clear();
  for (const StepRow& row : rows) {
    tokens += static_cast<std::int32_t>(row.tokens.size());
    if (row.sampling == nullptr) continue;
    inputs_.push_back({.state = row.sampling, .position = row.position + static_cast<std::int64_t>(row.tokens.size())});
  }
  const CudaShapes::Entry* const entry =
      shapes_ ? shapes_->find(tokens, part ? std::optional(part->rung) : std::nullopt) : nullptr;
  const std::int32_t bucket = entry != nullptr ? entry->tokens : tokens;
  if (entry != nullptr) result.bucket = bucket;
  result.padding_tokens = bucket - tokens;

  staging_.fill(rows, bucket);
  if (Result<void> copied = staging_.copy(stream); !copied) return Unexpected(std::move(copied).error());
  const std::int64_t sampling_bytes = write_sampling(sampling_.shape, inputs_, config_.end_tokens, sampling_.staging_host.data());
  const Result<void> copied =
      check(cudaMemcpyAsync(sampling_.staging.data(), sampling_.staging_host.data(), static_cast<std::size_t>(sampling_bytes),
                            cudaMemcpyHostToDevice, stream.get()),
            "cudaMemcpyAsync");
  if (!copied) return Unexpected(Error(copied.error()));
  if (entry == nullptr) return queue_pass(*ops_, *model_, stream, tokens, staging_.selected());
  if (Result<void> launched = entry->graph.launch(stream); !launched) return Unexpected(std::move(launched).error());
  return entry->logits.top(static_cast<std::int32_t>(inputs_.size()));
}

Result<void> CudaBackend::run(std::span<const StepRow> rows, StepResult& result) {
  if (broken_) return Unexpected(Error(*broken_));
  check_step(config_, options_, rows);
  result.logits.clear();
  result.bucket.reset();
  result.padding_tokens = 0;
  result.sample_valid.clear();
  if (rows.empty()) return {};
  Result<void> done = check(cudaSetDevice(facts_.index), "cudaSetDevice");
  std::optional<Matrix> logits;
  const std::optional<Places::Part> part = places_.begin_step();
  const Stream& stream = part ? part->place->step : places_.whole().step;
  ops_->move_to(stream);
  if (done) {
    Result<Matrix> queued = queue_step(rows, part, result);
    if (queued) {
      logits = *queued;
    } else {
      done = Unexpected(std::move(queued).error());
    }
  }
  if (done) done = stream.wait();
  places_.end_step();
  if (done) done = check(cudaGetLastError(), "step");
  if (!done) {
    broken_ = done.error();
    return done;
  }
  collect(result);
  if (capture_logits_ && logits && logits->rows > 0) {
    if (Result<void> read = read_logits(*logits, result.logits); !read) {
      broken_ = read.error();
      return read;
    }
  }
  return {};
}

/// As the model gave them: sampling has changed some in place. Only tests and the exactness checker read logits, so the buffer
/// lives for one call.
Result<void> CudaBackend::read_logits(const Matrix& logits, std::vector<float>& out) {
  out.resize(static_cast<std::size_t>(logits.rows) * static_cast<std::size_t>(config_.vocabulary));
  ops_->read(logits, out);
  const std::byte* const staging = sampling_.staging_host.data();
  const SamplingRawLogits raw = raw_logits(sampling_.shape, sampling_.memory(), staging, logits.rows);
  if (raw.count == 0) return {};
  const auto bytes = raw.count * static_cast<std::int64_t>(sizeof(float));
  Result<PinnedMemory> host = PinnedMemory::make(bytes);
  if (!host) return Unexpected(std::move(host).error());
  const Stream& stream = places_.whole().step;
  Result<void> arrived =
      check(cudaMemcpyAsync(host->data(), raw.data, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream.get()),
            "cudaMemcpyAsync");
  if (arrived) arrived = stream.wait();
  if (!arrived) return arrived;
  undo_edits(sampling_.shape, staging, {reinterpret_cast<const float*>(host->data()), static_cast<std::size_t>(raw.count)}, out);
  return {};
}

void CudaBackend::collect(StepResult& result) {
  const std::size_t count = inputs_.size();
  if (result.samples.size() < count) result.samples.resize(count);
  result.sample_valid.assign(count, false);
  for (std::size_t i = 0; i < count; ++i) result.sample_valid[i] = read_sample(sampling_.arrived()[i], result.samples[i]);
}

// ---- shapes

ShapeLimits CudaBackend::shape_limits() const {
  return {.count_max = places_.sharing() == nullptr ? shapes_max : shapes_max_shared,
          .tokens_max = options_.max_tokens_per_step,
          .token_tile = bucket_tile,
          .eager_tokens = eager_tokens_cost,
          .per_share = places_.sharing() != nullptr};
}

/// One graph per bucket, of the place whose stream it is.
Result<std::vector<CudaShapes::Entry>> CudaBackend::capture(const policies::StepBuckets& buckets, const Stream& stream,
                                                            const std::stop_token& stop) {
  std::vector<CudaShapes::Entry> entries;
  for (const std::int32_t tokens : buckets.tokens) {
    if (stop.stop_requested()) return unexpected(ErrorCode::Cancelled, "the shapes are no longer wanted");
    const auto selected = static_cast<std::size_t>(std::min(tokens, options_.max_rows));
    Matrix logits;
    Result<Graph> graph = Graph::capture(stream, [&]() -> Result<void> {
      Result<Matrix> queued = queue_pass(*build_ops_, *build_model_, stream, tokens, std::span(zeros_).first(selected));
      if (!queued) return Unexpected(std::move(queued).error());
      logits = *queued;
      return {};
    });
    if (!graph) return Unexpected(std::move(graph).error());
    entries.push_back({.tokens = tokens, .graph = std::move(*graph), .logits = logits});
  }
  return entries;
}

Result<std::unique_ptr<StepShapes>> CudaBackend::build_shapes(const policies::StepBuckets& buckets, const std::stop_token& stop) {
  CHECK(!buckets.tokens.empty() && buckets.tokens.back() <= options_.max_tokens_per_step);
  if (auto set = check(cudaSetDevice(facts_.index), "cudaSetDevice"); !set) return Unexpected(std::move(set).error());
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<std::int64_t>(free) : 0;
  };
  const std::int64_t free_before = free_bytes();
  Result<std::vector<CudaShapes::Entry>> whole = capture(buckets, places_.whole().build, stop);
  if (!whole) return Unexpected(std::move(whole).error());
  CudaShapes::Part part;
  if (const std::optional<Places::Part> place = places_.for_builds()) {
    Result<std::vector<CudaShapes::Entry>> entries = capture(buckets, place->place->build, stop);
    if (!entries) return Unexpected(std::move(entries).error());
    part = {.rung = place->rung, .entries = std::move(*entries)};
  }
  const std::int64_t bytes = std::max<std::int64_t>(0, free_before - free_bytes());
  return std::unique_ptr<StepShapes>(
      std::make_unique<CudaShapes>(facts_.index, buckets, std::move(*whole), std::move(part), bytes));
}

// ---- blocks and states

namespace {

/// Whether what two models keep of a sequence is the same, element for element.
bool same_cache(const ModelConfig& a, const ModelConfig& b) {
  if (a.count_of(SublayerKind::Attention) != b.count_of(SublayerKind::Attention) || a.kv_heads != b.kv_heads ||
      a.head_size != b.head_size || a.count_of(SublayerKind::Mamba2) != b.count_of(SublayerKind::Mamba2))
    return false;
  if (!a.mamba2 || !b.mamba2) return a.mamba2.has_value() == b.mamba2.has_value();
  return a.mamba2->heads == b.mamba2->heads && a.mamba2->head_size == b.mamba2->head_size &&
         a.mamba2->groups == b.mamba2->groups && a.mamba2->state_size == b.mamba2->state_size &&
         a.mamba2->window == b.mamba2->window;
}

}  // namespace

Result<void> CudaBackend::copy_blocks(const Backend& source, const CacheCopies& copies, const std::function<bool()>& allowed) {
  const auto* const other = dynamic_cast<const CudaBackend*>(&source);
  if (other == nullptr)
    return unexpected(ErrorCode::InvalidArgument, "blocks of '" + source.description() + "' cannot come to " + description());
  if (!same_cache(other->config_, config_) || other->options_.dtype != options_.dtype) {
    return unexpected(ErrorCode::InvalidArgument, "blocks of another model or element type cannot come to " + description());
  }
  Result<void> copied = copier_.copy(ops_->cache(), other->ops_->cache(), other->facts_.index, copies.blocks, allowed);
  if (!copied || !copies.state) return copied;
  return copier_.copy(ops_->states(), other->ops_->states(), other->facts_.index, *copies.state, allowed);
}

}  // namespace rubato::engine::cuda
