// SPDX-License-Identifier: Apache-2.0
// Making CUDA backends: the first of a device loads weights and takes the cache, a second one shares both.
#include <charconv>
#include <utility>

#include "engine/cuda/backend.h"
#include "engine/cuda/cuda_backend.h"
#include "manifests/names.h"
#include "manifests/settings.h"

namespace rubato::engine {
namespace cuda {

Result<LaneParts> LaneParts::make(const ModelConfig& config, const BackendOptions& options, std::int32_t device,
                                  Stream::Urgency urgency) {
  Result<Places> places = Places::make(urgency);
  if (!places) return Unexpected(std::move(places).error());
  Result<Staging> staging = Staging::make({.max_tokens = options.max_tokens_per_step,
                                           .max_rows = options.max_rows,
                                           .max_blocks_per_row = (options.max_model_len + kv_block_tokens - 1) / kv_block_tokens,
                                           .trash_slot = options.block_count * kv_block_tokens});
  if (!staging) return Unexpected(std::move(staging).error());
  Result<SamplingRegions> sampling =
      SamplingRegions::make({.max_rows = options.max_rows,
                             .vocabulary = config.vocabulary,
                             .max_model_len = options.max_model_len,
                             .cached_tokens = std::int64_t{options.block_count} * kv_block_tokens});
  if (!sampling) return Unexpected(std::move(sampling).error());
  Result<BlockCopier> copier = BlockCopier::make(device);
  if (!copier) return Unexpected(std::move(copier).error());
  return LaneParts{.places = std::move(*places),
                   .staging = std::move(*staging),
                   .sampling = std::move(*sampling),
                   .copier = std::move(*copier)};
}

Result<std::unique_ptr<Backend>> CudaBackend::make(const ModelConfig& config, WeightSource& weights,
                                                   const BackendOptions& options, std::int32_t device) {
  if (Result<void> checked = check_backend_options(config, options); !checked) return Unexpected(std::move(checked).error());
  Result<DeviceFacts> facts = open_device(device);
  if (!facts) return Unexpected(std::move(facts).error());
  Result<LaneParts> parts = LaneParts::make(config, options, device, Stream::Urgency::Urgent);
  if (!parts) return Unexpected(std::move(parts).error());
  std::unique_ptr<CudaBackend> backend(new CudaBackend(config, options, *facts, std::move(*parts)));
  if (Result<void> loaded = backend->load(weights); !loaded) return Unexpected(std::move(loaded).error());
  return std::unique_ptr<Backend>(std::move(backend));
}

Result<void> CudaBackend::load(WeightSource& weights) {
  Result<std::unique_ptr<CudaOps>> ops = CudaOps::make(facts_,
                                                       {.dtype = options_.dtype,
                                                        .max_tokens = options_.max_tokens_per_step,
                                                        .max_rows = options_.max_rows,
                                                        .cache_folder = options_.cache_folder},
                                                       staging_.batch(), places_.whole().step);
  if (!ops) return Unexpected(std::move(ops).error());
  ops_ = std::move(*ops);
  Result<Decoder> model = Decoder::make(config_, weights, options_, *ops_);
  if (!model) return Unexpected(std::move(model).error());
  model_.emplace(std::move(*model));
  if (Result<void> finished = ops_->finish_loading(); !finished) return finished;
  if (options_.poison) {
    std::vector<BlockId> all;
    for (std::int32_t block = 0; block < options_.block_count; ++block) all.push_back({block});
    ops_->poison(all);
    std::vector<StateId> states;
    for (std::int32_t state = 0; state < options_.state_count; ++state) states.push_back({state});
    ops_->poison_states(states);
  }
  std::int32_t own = 0;
  for (const MatmulReport& report : ops_->matmul_reports()) own += report.own_kernel ? 1 : 0;
  products_ = std::to_string(ops_->matmul_reports().size() - static_cast<std::size_t>(own)) + " product shapes by cuBLASLt, " +
              std::to_string(own) + " by own kernels";
  return finish_set_up();
}

/// Over the weights and blocks of another backend of the same device.
Result<void> CudaBackend::load_beside(const CudaBackend& first) {
  Result<std::unique_ptr<CudaOps>> ops = first.ops_->beside(staging_.batch(), places_.whole().step);
  if (!ops) return Unexpected(std::move(ops).error());
  ops_ = std::move(*ops);
  Result<Decoder> model = first.model_->beside(options_, *ops_);
  if (!model) return Unexpected(std::move(model).error());
  model_.emplace(std::move(*model));
  products_ = first.products_;
  return finish_set_up();
}

Result<void> CudaBackend::finish_set_up() {
  Result<std::unique_ptr<CudaOps>> build_ops = ops_->on(places_.whole().build);
  if (!build_ops) return Unexpected(std::move(build_ops).error());
  build_ops_ = std::move(*build_ops);
  build_model_.emplace(model_->through(*build_ops_));
  if (Result<void> queued = ops_->take_failure(); !queued) return queued;
  return places_.whole().step.wait();
}

Result<std::unique_ptr<Backend>> CudaBackend::make_sibling(Division division) {
  CHECK(places_.alone(), "a device runs two lanes at most");
  if (auto set = check(cudaSetDevice(facts_.index), "cudaSetDevice"); !set) return Unexpected(std::move(set).error());
  Result<LaneParts> parts = LaneParts::make(config_, options_, facts_.index, Stream::Urgency::Normal);
  if (!parts) return Unexpected(std::move(parts).error());
  std::unique_ptr<CudaBackend> sibling(new CudaBackend(config_, options_, facts_, std::move(*parts)));
  if (Result<void> loaded = sibling->load_beside(*this); !loaded) return Unexpected(std::move(loaded).error());
  std::shared_ptr<const DeviceSplit> split;
  std::string why = "green contexts are not wanted";
  if (division == Division::GreenContexts) {
    Result<std::shared_ptr<const DeviceSplit>> made = DeviceSplit::make(facts_);
    if (made) {
      split = std::move(*made);
    } else {
      why = std::move(made).error().message;
    }
  }
  const auto sharing = std::make_shared<Sharing>(std::move(split), std::move(why));
  Result<void> joined = sibling->places_.join(sharing, Side::Second, Stream::Urgency::Normal);
  if (joined) joined = places_.join(sharing, Side::First, Stream::Urgency::Urgent);
  if (!joined) return Unexpected(std::move(joined).error());
  return std::unique_ptr<Backend>(std::move(sibling));
}

std::string CudaBackend::description() const {
  std::string text = "cuda:" + std::to_string(facts_.index) + " " + facts_.name + ", " + std::string(to_string(options_.dtype)) +
                     ", " + products_;
  const Sharing* const sharing = places_.sharing();
  if (sharing == nullptr) return text;
  if (sharing->split() != nullptr)
    return text + ", one of two lanes on green contexts, " + std::to_string(sharing->split()->rungs()) + " shares";
  return text + ", one of two lanes by stream priorities alone, which bound no latency: " + sharing->why();
}

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
