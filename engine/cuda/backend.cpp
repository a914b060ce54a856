// SPDX-License-Identifier: Apache-2.0
// One step on the GPU: metadata to the device in one copy, the forward pass and sampling queued eagerly or replayed from the
// graph of the step's bucket, results back in one copy. The host waits once, at the end.
#include "engine/cuda/backend.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "engine/cuda/ops.h"
#include "engine/cuda/sampling.h"
#include "engine/cuda/shapes.h"
#include "engine/cuda/staging.h"
#include "engine/models/llama.h"
#include "manifests/check.h"
#include "manifests/names.h"
#include "manifests/settings.h"

namespace rubato::engine {
namespace cuda {
namespace {

constexpr std::int32_t shapes_max = 32;    // some 40 kernels per layer: a set of these costs tens of megabytes and about a second
constexpr std::int32_t bucket_tile = 128;  // the tile of the tensor-core products
constexpr std::int32_t eager_tokens_cost = 96;  // launching a step kernel by kernel costs about what so many tokens do; see docs

/// Device memory and host memory of sampling.
struct SamplingRegions {
  SamplingShape shape;
  PinnedMemory staging_host;
  DeviceMemory staging;
  DeviceMemory scratch;
  DeviceMemory results;
  PinnedMemory results_host;

  [[nodiscard]] SamplingMemory memory() const {
    return {.staging = staging.data(), .scratch = scratch.data(), .results = reinterpret_cast<SampledRow*>(results.data())};
  }
  [[nodiscard]] const SampledRow* arrived() const { return reinterpret_cast<const SampledRow*>(results_host.data()); }
};

Result<SamplingRegions> make_sampling_regions(const SamplingShape& shape) {
  SamplingRegions regions;
  regions.shape = shape;
  const std::int64_t staging = sampling_staging_bytes(shape);
  const auto results = static_cast<std::int64_t>(sizeof(SampledRow)) * shape.max_rows;
  const auto take = [](auto& memory, std::int64_t bytes) -> Result<void> {
    auto made = std::remove_reference_t<decltype(memory)>::make(bytes);
    if (!made) return Unexpected(std::move(made).error());
    memory = std::move(*made);
    return {};
  };
  Result<void> taken = take(regions.staging_host, staging);
  if (taken) taken = take(regions.staging, staging);
  if (taken) taken = take(regions.scratch, sampling_scratch_bytes(shape));
  if (taken) taken = take(regions.results, results);
  if (taken) taken = take(regions.results_host, results);
  if (!taken) return Unexpected(std::move(taken).error());
  return regions;
}

class CudaBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> make(const ModelConfig& config, WeightSource& weights, const BackendOptions& options,
                                               std::int32_t device);
  ~CudaBackend() override {
    static_cast<void>(cudaSetDevice(facts_.index));
    // What is queued (a poisoning, say) still uses the memory that goes now.
    static_cast<void>(stream_.wait());
    static_cast<void>(build_stream_.wait());
    shapes_.reset();
  }

  [[nodiscard]] Result<void> run(std::span<const StepRow> rows, StepResult& result) override;
  [[nodiscard]] ShapeLimits shape_limits() const override {
    return {.count_max = shapes_max,
            .tokens_max = options_.max_tokens_per_step,
            .token_tile = bucket_tile,
            .eager_tokens = eager_tokens_cost};
  }
  [[nodiscard]] Result<std::unique_ptr<StepShapes>> build_shapes(const policies::StepBuckets& buckets,
                                                                 const std::stop_token& stop) override;
  [[nodiscard]] std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) override {
    std::unique_ptr<StepShapes> before = std::move(shapes_);
    // Only its own build_shapes makes sets for a backend.
    shapes_.reset(static_cast<CudaShapes*>(shapes.release()));
    return before;
  }
  void capture_logits(bool on) override { capture_logits_ = on; }
  void released(std::span<const BlockId> blocks) override {
    if (options_.poison) ops_->poison(blocks);
  }
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string description() const override { return description_; }

 private:
  CudaBackend(const ModelConfig& config, const BackendOptions& options, const DeviceFacts& facts, Stream stream,
              Stream build_stream, Staging staging, SamplingRegions sampling)
      : config_(config),
        options_(options),
        facts_(facts),
        stream_(std::move(stream)),
        build_stream_(std::move(build_stream)),
        staging_(std::move(staging)),
        sampling_(std::move(sampling)),
        zeros_(static_cast<std::size_t>(std::max(options.max_tokens_per_step, options.max_rows))) {
    inputs_.reserve(static_cast<std::size_t>(options.max_rows));
  }
  [[nodiscard]] Result<void> load(WeightSource& weights);
  [[nodiscard]] Result<Matrix> queue_pass(CudaOps& ops, LlamaModel& model, const Stream& stream, std::int32_t tokens,
                                          std::span<const std::int32_t> selected);
  [[nodiscard]] Result<Matrix> queue_step(std::span<const StepRow> rows, StepResult& result);
  void collect(StepResult& result);

  ModelConfig config_;
  BackendOptions options_;
  DeviceFacts facts_;
  std::string description_;
  Stream stream_;
  Stream build_stream_;
  Staging staging_;
  SamplingRegions sampling_;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<CudaOps> build_ops_;  // the same memory on the builder's stream
  std::optional<LlamaModel> model_;
  std::optional<LlamaModel> build_model_;
  std::vector<TokenId> zeros_;  // counts that a pass over device metadata is given; the contents are the batch's
  std::vector<SamplingInput> inputs_;
  std::unique_ptr<CudaShapes> shapes_;
  std::optional<Error> broken_;
  bool capture_logits_ = false;
};

Result<std::unique_ptr<Backend>> CudaBackend::make(const ModelConfig& config, WeightSource& weights,
                                                   const BackendOptions& options, std::int32_t device) {
  if (Result<void> checked = check_backend_options(config, options); !checked) return Unexpected(std::move(checked).error());
  Result<DeviceFacts> facts = open_device(device);
  if (!facts) return Unexpected(std::move(facts).error());
  Result<Stream> stream = Stream::make(Stream::Urgency::Urgent);
  if (!stream) return Unexpected(std::move(stream).error());
  Result<Stream> build_stream = Stream::make();
  if (!build_stream) return Unexpected(std::move(build_stream).error());
  Result<Staging> staging = Staging::make({.max_tokens = options.max_tokens_per_step,
                                           .max_rows = options.max_rows,
                                           .max_blocks_per_row = (options.max_model_len + kv_block_tokens - 1) / kv_block_tokens,
                                           .trash_slot = options.block_count * kv_block_tokens});
  if (!staging) return Unexpected(std::move(staging).error());
  Result<SamplingRegions> sampling =
      make_sampling_regions({.max_rows = options.max_rows,
                             .vocabulary = config.vocabulary,
                             .max_model_len = options.max_model_len,
                             .cached_tokens = std::int64_t{options.block_count} * kv_block_tokens});
  if (!sampling) return Unexpected(std::move(sampling).error());
  std::unique_ptr<CudaBackend> backend(new CudaBackend(config, options, *facts, std::move(*stream), std::move(*build_stream),
                                                       std::move(*staging), std::move(*sampling)));
  if (Result<void> loaded = backend->load(weights); !loaded) return Unexpected(std::move(loaded).error());
  return std::unique_ptr<Backend>(std::move(backend));
}

Result<void> CudaBackend::load(WeightSource& weights) {
  Result<std::unique_ptr<CudaOps>> ops = CudaOps::make(facts_,
                                                       {.dtype = options_.dtype,
                                                        .max_tokens = options_.max_tokens_per_step,
                                                        .max_rows = options_.max_rows,
                                                        .cache_folder = options_.cache_folder},
                                                       staging_.batch(), stream_);
  if (!ops) return Unexpected(std::move(ops).error());
  ops_ = std::move(*ops);
  Result<LlamaModel> model = LlamaModel::make(config_, weights, options_, *ops_);
  if (!model) return Unexpected(std::move(model).error());
  model_.emplace(std::move(*model));
  if (Result<void> finished = ops_->finish_loading(); !finished) return finished;
  Result<std::unique_ptr<CudaOps>> build_ops = ops_->on(build_stream_);
  if (!build_ops) return Unexpected(std::move(build_ops).error());
  build_ops_ = std::move(*build_ops);
  build_model_.emplace(model_->through(*build_ops_));
  if (options_.poison) {
    std::vector<BlockId> all;
    for (std::int32_t block = 0; block < options_.block_count; ++block) all.push_back({block});
    ops_->poison(all);
  }
  std::int32_t own = 0;
  for (const MatmulReport& report : ops_->matmul_reports()) own += report.own_kernel ? 1 : 0;
  description_ = "cuda:" + std::to_string(facts_.index) + " " + facts_.name + ", " + std::string(to_string(options_.dtype)) +
                 ", " + std::to_string(ops_->matmul_reports().size() - static_cast<std::size_t>(own)) +
                 " product shapes by cuBLASLt, " + std::to_string(own) + " by own kernels";
  if (Result<void> queued = ops_->take_failure(); !queued) return queued;
  return stream_.wait();
}

/// Queues the pass over what staging holds: attention's work list, the layers, sampling, and the copy of the results. selected:
/// see LlamaModel::forward. Returns where the logits will be.
Result<Matrix> CudaBackend::queue_pass(CudaOps& ops, LlamaModel& model, const Stream& stream, std::int32_t tokens,
                                       std::span<const std::int32_t> selected) {
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

Result<Matrix> CudaBackend::queue_step(std::span<const StepRow> rows, StepResult& result) {
  std::int32_t tokens = 0;
  inputs_.clear();
  for (const StepRow& row : rows) {
    tokens += static_cast<std::int32_t>(row.tokens.size());
    if (row.sampling == nullptr) continue;
    inputs_.push_back({.state = row.sampling, .position = row.position + static_cast<std::int64_t>(row.tokens.size())});
  }
  const CudaShapes::Entry* const entry = shapes_ ? shapes_->find(tokens) : nullptr;
  const std::int32_t bucket = entry != nullptr ? entry->tokens : tokens;
  if (entry != nullptr) result.bucket = bucket;
  result.padding_tokens = bucket - tokens;

  staging_.fill(rows, bucket);
  if (Result<void> copied = staging_.copy(stream_); !copied) return Unexpected(std::move(copied).error());
  const std::int64_t sampling_bytes = write_sampling(sampling_.shape, inputs_, config_.end_tokens, sampling_.staging_host.data());
  const Result<void> copied =
      check(cudaMemcpyAsync(sampling_.staging.data(), sampling_.staging_host.data(), static_cast<std::size_t>(sampling_bytes),
                            cudaMemcpyHostToDevice, stream_.get()),
            "cudaMemcpyAsync");
  if (!copied) return Unexpected(Error(copied.error()));
  if (entry == nullptr) return queue_pass(*ops_, *model_, stream_, tokens, staging_.selected());
  if (Result<void> launched = entry->graph.launch(stream_); !launched) return Unexpected(std::move(launched).error());
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
  if (done) {
    Result<Matrix> queued = queue_step(rows, result);
    if (queued) {
      logits = *queued;
    } else {
      done = Unexpected(std::move(queued).error());
    }
  }
  if (done) done = stream_.wait();
  if (done) done = check(cudaGetLastError(), "step");
  if (!done) {
    broken_ = done.error();
    return done;
  }
  collect(result);
  if (capture_logits_ && logits && logits->rows > 0) {
    result.logits.resize(static_cast<std::size_t>(logits->rows) * static_cast<std::size_t>(config_.vocabulary));
    ops_->read(*logits, result.logits);
  }
  return {};
}

void CudaBackend::collect(StepResult& result) {
  const std::size_t count = inputs_.size();
  if (result.samples.size() < count) result.samples.resize(count);
  result.sample_valid.assign(count, false);
  for (std::size_t i = 0; i < count; ++i) result.sample_valid[i] = read_sample(sampling_.arrived()[i], result.samples[i]);
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
  std::vector<CudaShapes::Entry> entries;
  for (const std::int32_t tokens : buckets.tokens) {
    if (stop.stop_requested()) return unexpected(ErrorCode::Cancelled, "the shapes are no longer wanted");
    const auto selected = static_cast<std::size_t>(std::min(tokens, options_.max_rows));
    Matrix logits;
    Result<Graph> graph = Graph::capture(build_stream_, [&]() -> Result<void> {
      Result<Matrix> queued = queue_pass(*build_ops_, *build_model_, build_stream_, tokens, std::span(zeros_).first(selected));
      if (!queued) return Unexpected(std::move(queued).error());
      logits = *queued;
      return {};
    });
    if (!graph) return Unexpected(std::move(graph).error());
    entries.push_back({.tokens = tokens, .graph = std::move(*graph), .logits = logits});
  }
  const std::int64_t bytes = std::max<std::int64_t>(0, free_before - free_bytes());
  return std::unique_ptr<StepShapes>(std::make_unique<CudaShapes>(buckets, std::move(entries), bytes));
}

}  // namespace
}  // namespace cuda

Result<std::int32_t> cuda_device_index(const std::string& device) {
  if (device == "cuda") return 0;
  constexpr std::string_view prefix = "cuda:";
  std::int32_t index = 0;
  if (device.starts_with(prefix)) {
    const char* const begin = device.data() + prefix.size();
    const char* const end = device.data() + device.size();
    const auto [rest, error] = std::from_chars(begin, end, index);
    if (error == std::errc() && rest == end && index >= 0) return index;
  }
  return unexpected(ErrorCode::InvalidArgument, "spec.devices",
                    "device '" + device + "' is not understood; allowed: cuda:0, cuda:1, ...");
}

Result<std::unique_ptr<Backend>> make_cuda_backend(const ModelConfig& config, WeightSource& weights,
                                                   const BackendOptions& options, std::int32_t device) {
  return cuda::CudaBackend::make(config, weights, options, device);
}

}  // namespace rubato::engine
