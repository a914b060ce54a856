// SPDX-License-Identifier: Apache-2.0
#include "daemon/model_loading.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "daemon/lane_threads.h"
#include "engine/cpu/backend.h"
#if RUBATO_HAS_CUDA
#include "engine/cuda/backend.h"
#endif
#include "engine/model/weights.h"
#include "manifests/check.h"
#include "manifests/names.h"
#include "manifests/units.h"
#include "policies/accounting.h"

namespace rubato {
namespace {

Result<engine::ModelConfig> read_config(const ModelSpec& model) {
  if (model.synthetic) return engine::synthetic_model_config(*model.synthetic);
  return engine::read_model_config(model.path);
}

bool is_cuda(const EngineSpec& spec) {  // all devices are of one family
  return spec.devices.front().starts_with("cuda");
}

// The CPU backend keeps weights in F32 or BF16; F16 checkpoints are widened, which is exact.
DataType choose_dtype(const EngineSpec& spec, const engine::ModelConfig& config) {
  const DataType wanted = spec.model.dtype.value_or(config.checkpoint_dtype);
  return wanted == DataType::Float16 && !is_cuda(spec) ? DataType::Float32 : wanted;
}

Result<void> check_devices(const std::vector<std::string>& devices) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].starts_with("cpu")) continue;
#if RUBATO_HAS_CUDA
    if (Result<std::int32_t> index = engine::cuda_device_index(devices[i]); !index) return Unexpected(std::move(index).error());
#else
    return unexpected(ErrorCode::InvalidArgument, "spec.devices[" + std::to_string(i) + "]",
                      "device '" + devices[i] + "' needs a backend that this build does not have; cpu is built in");
#endif
  }
  return {};
}

Result<std::unique_ptr<engine::Backend>> make_backend(const std::string& device, const engine::ModelConfig& config,
                                                      engine::WeightSource& weights, const engine::BackendOptions& options) {
#if RUBATO_HAS_CUDA
  if (device.starts_with("cuda")) {
    const Result<std::int32_t> index = engine::cuda_device_index(device);
    if (!index) return Unexpected(Error(index.error()));
    return engine::make_cuda_backend(config, weights, options, *index);
  }
#else
  CHECK(!device.starts_with("cuda"), "refused by plan_model");
#endif
  return engine::make_cpu_backend(config, weights, options);
}

Result<void> make_backends(const EngineSpec& spec, engine::WeightSource& weights, const engine::BackendOptions& options,
                           LoadedModel& model) {
  for (const std::string& device : spec.devices) {
    Result<std::unique_ptr<engine::Backend>> backend = make_backend(device, model.plan.config, weights, options);
    if (!backend) return Unexpected(std::move(backend).error());
    model.backends.push_back(std::move(*backend));
  }
  if (model.plan.limits.lanes_per_device == 1) return {};
  Result<std::unique_ptr<engine::Backend>> sibling = model.backends.front()->make_sibling();
  if (!sibling) return Unexpected(std::move(sibling).error());
  model.backends.push_back(std::move(*sibling));
  return {};
}

/// Whether the longest request fits when it is alone.
bool holds_longest(const engine::CacheSize& cache, std::int32_t max_model_len) {
  return (cache.state_bytes == 0 || cache.state_count > 0) && cache.block_count >= policies::blocks_for_tokens(max_model_len);
}

/// In whole MiB, what cache_size sets aside before anything else: one state, and the blocks of one longest sequence.
std::int64_t bytes_needed(const engine::CacheSize& cache, std::int32_t max_model_len) {
  constexpr std::int64_t mebibyte = 1 << 20;
  const std::int64_t bytes = cache.state_bytes + std::int64_t{policies::blocks_for_tokens(max_model_len)} * cache.block_bytes;
  return (bytes + mebibyte - 1) / mebibyte * mebibyte;
}

Result<void> check_cache(const engine::CacheSize& cache, const engine::CacheRequest& request) {
  if (holds_longest(cache, request.max_model_len)) return {};
  std::string holds = "no state of a sequence";
  if (cache.state_bytes == 0 || cache.state_count > 0) {
    holds = fmt::format("{} tokens{}, less than one request of maxModelLen {}", std::int64_t{cache.block_count} * kv_block_tokens,
                        cache.state_count == 0 ? "" : fmt::format(" beside {} states", cache.state_count), request.max_model_len);
  }
  return unexpected(ErrorCode::InvalidArgument, "spec.capacity.kvCacheMemory",
                    fmt::format("{} holds {}; at least {} is needed", format_quantity(request.bytes), holds,
                                format_quantity(bytes_needed(cache, request.max_model_len))));
}

bool may_disaggregate(const EngineSpec& spec) {
  const std::vector<Mode>& modes = spec.knobs.mode.choices;
  return std::find(modes.begin(), modes.end(), Mode::Disaggregated) != modes.end();
}

}  // namespace

Result<ModelPlan> plan_model(const EngineSpec& spec) {
  if (auto devices = check_devices(spec.devices); !devices) return Unexpected(std::move(devices).error());
  Result<engine::ModelConfig> config = read_config(spec.model);
  if (!config) return Unexpected(std::move(config).error());

  ModelPlan plan;
  plan.config = std::move(*config);
  plan.dtype = choose_dtype(spec, plan.config);
  plan.weight_bytes = engine::weight_bytes(plan.config, plan.dtype);
  const std::int32_t threads = spec.capacity.cpu_threads > 0 ? spec.capacity.cpu_threads : engine::default_cpu_threads();
  const auto devices = static_cast<std::int32_t>(spec.devices.size());
  plan.threads = std::max(threads / devices, 1);

  std::int32_t max_model_len = spec.capacity.max_model_len;
  if (plan.config.max_position > 0 && max_model_len > plan.config.max_position) {
    plan.notes.push_back(fmt::format("capacity.maxModelLen {} is above the model's own limit; {} is used", max_model_len,
                                     plan.config.max_position));
    max_model_len = plan.config.max_position;
  }
  const std::int32_t lanes_per_device = devices == 1 && may_disaggregate(spec) ? 2 : 1;
  const engine::CacheRequest cache{.bytes = spec.capacity.kv_cache_memory,
                                   .max_model_len = max_model_len,
                                   .sequences = lanes_per_device * spec.capacity.max_num_seqs,
                                   .prefix_caching = spec.prefix_caching};
  plan.cache = engine::cache_size(plan.config, plan.dtype, cache);
  if (Result<void> holds = check_cache(plan.cache, cache); !holds) return Unexpected(std::move(holds).error());
  if (plan.cache.state_bytes > 0 && plan.cache.state_count < lanes_per_device * spec.capacity.max_num_seqs) {
    plan.notes.push_back(fmt::format("capacity.kvCacheMemory {} holds {} states of {}: no more sequences run at once",
                                     format_quantity(spec.capacity.kv_cache_memory), plan.cache.state_count,
                                     format_quantity(plan.cache.state_bytes)));
  }
  if (spec.lanes.lockstep != Lockstep::Off && devices == 1)
    plan.notes.emplace_back("lanes.lockstep has no effect with one device: there is no other lane to wait for");
  plan.limits = policies::LaneGroupLimits{.each = {.max_model_len = max_model_len,
                                                   .max_num_seqs = spec.capacity.max_num_seqs,
                                                   .max_waiting = spec.capacity.max_waiting,
                                                   .block_count = plan.cache.block_count,
                                                   .state_count = plan.cache.state_count,
                                                   .blocks_hold_keys = plan.cache.block_bytes > 0,
                                                   .prefix_caching = spec.prefix_caching},
                                          .devices = devices,
                                          .lanes_per_device = lanes_per_device,
                                          .max_handoffs = spec.lanes.max_handoffs,
                                          .handoff_lease = spec.lanes.handoff_lease,
                                          .lockstep = spec.lanes.lockstep};
  return plan;
}

Result<LoadedModel> load_model(const EngineSpec& spec, const std::filesystem::path& state) {
  Result<ModelPlan> plan = plan_model(spec);
  if (!plan) return Unexpected(std::move(plan).error());
  LoadedModel model;
  model.plan = std::move(*plan);

  std::unique_ptr<engine::WeightSource> weights;
  if (spec.model.synthetic) {
    model.tokenizer = text::Tokenizer::make_bytes(model.plan.config.vocabulary);
    weights = engine::make_synthetic_weights(model.plan.config, spec.model.synthetic->seed, model.plan.dtype);
  } else {
    Result<std::unique_ptr<text::Tokenizer>> tokenizer = text::Tokenizer::load(spec.model.path);
    if (!tokenizer) return Unexpected(std::move(tokenizer).error());
    model.tokenizer = std::move(*tokenizer);
    Result<std::unique_ptr<engine::WeightSource>> opened = engine::open_safetensors(spec.model.path);
    if (!opened) return Unexpected(std::move(opened).error());
    weights = std::move(*opened);
    Result<std::vector<std::string>> warnings = engine::check_weights(model.plan.config, *weights);
    if (!warnings) return Unexpected(std::move(warnings).error());
    for (std::string& warning : *warnings) model.plan.notes.push_back(std::move(warning));
    // Some folders declare the end token in tokenizer_config.json alone.
    std::vector<TokenId>& ends = model.plan.config.end_tokens;
    const std::optional<TokenId> end = model.tokenizer->end_token();
    if (end && std::find(ends.begin(), ends.end(), *end) == ends.end()) ends.push_back(*end);
  }
  Result<text::ChatForm> form = text::detect_chat_form(*model.tokenizer);
  if (form) {
    model.chat_form = *form;
  } else {
    model.plan.notes.push_back(form.error().message +
                               "; /v1/chat/completions is refused, /v1/completions takes prompts already formatted");
  }

  const engine::BackendOptions options{.dtype = model.plan.dtype,
                                       .block_count = model.plan.limits.each.block_count,
                                       .state_count = model.plan.limits.each.state_count,
                                       .max_tokens_per_step = spec.knobs.max_num_batched_tokens.max,
                                       .max_rows = spec.capacity.max_num_seqs,
                                       .max_model_len = model.plan.limits.each.max_model_len,
                                       .threads = model.plan.threads,
                                       .cache_folder = state,
                                       .now = steady_now};
  if (Result<void> made = make_backends(spec, *weights, options, model); !made) return Unexpected(std::move(made).error());
  model.backend_options = options;
  if (spec.exactness == Exactness::Trust) return model;
  Result<engine::ExactnessReport> report = check_model_exactness(model, {});
  if (!report) {
    Error error = std::move(report).error();
    error.field = "spec.exactness";
    return Unexpected(std::move(error));
  }
  if (report->failure) return unexpected(ErrorCode::Internal, "spec.exactness", report->text());
  model.plan.findings.push_back("exactness verified: " + report->text());
  return model;
}

Result<engine::ExactnessReport> check_model_exactness(LoadedModel& model,
                                                      const std::function<void(const engine::ExactnessCase&)>& progress) {
  engine::ExactnessTarget target{.lanes = {}, .options = model.backend_options};
  const bool several_devices = model.plan.limits.devices > 1;
  for (const auto& backend : model.backends) {
    if (several_devices && !target.lanes.empty()) {
      target.other_device = backend.get();
      break;
    }
    target.lanes.push_back(backend.get());
  }
  return engine::check_exactness(target, progress, {});
}

std::string model_key(const EngineSpec& spec, const LoadedModel& model) {
  const std::size_t devices = spec.devices.size();
  const std::string lanes = devices > 1 ? fmt::format("/{} devices", devices) : "";
  return model_key_stem(spec, model.plan) + model.backends.front()->description() + lanes;
}

std::string model_key_stem(const EngineSpec& spec, const ModelPlan& plan) {
  const engine::ModelConfig& config = plan.config;
  const std::string source = spec.model.synthetic ? "synthetic" : std::filesystem::path(spec.model.path).filename().string();
  return fmt::format("{}/{}/h{}l{}f{}v{}/{}/", source, config.architecture, config.hidden_size, config.layers,
                     config.feed_forward, config.vocabulary, to_string(plan.dtype));
}

}  // namespace rubato
