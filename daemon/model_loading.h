// SPDX-License-Identifier: Apache-2.0
// From spec.model and spec.capacity to something that can run: configuration, tokenizer, weights and a backend, with every limit
// worked out and every contradiction refused before the first request.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/exactness.h"
#include "engine/model/config.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "policies/lane_group.h"

namespace rubato {

/// What can be said of a model without loading its weights.
struct ModelPlan {
  engine::ModelConfig config;
  DataType dtype = DataType::Float32;  // of weights and KV cache
  policies::LaneGroupLimits limits;
  std::int64_t weight_bytes = 0;  // on each device
  engine::CacheSize cache;
  std::int32_t threads = 1;           // of each CPU device
  std::vector<std::string> notes;     // what was clamped, for the log
  std::vector<std::string> findings;  // what loading has shown, for the log
};

struct LoadedModel {
  ModelPlan plan;
  std::unique_ptr<text::Tokenizer> tokenizer;
  std::optional<text::ChatForm> chat_form;                 // none: the model's template is of a form that is not known
  std::vector<std::unique_ptr<engine::Backend>> backends;  // one per lane
  engine::BackendOptions backend_options;                  // that they were made with
};

/// Reads config.json only. One device has a second lane where mode Disaggregated is among the choices; several devices have one
/// each, and weights and KV blocks of their own. Errors: those of read_model_config and synthetic_model_config; a device this
/// build has no backend for; a KV budget that does not hold one request of maxModelLen (field spec.capacity.kvCacheMemory, with
/// the bytes that would do).
[[nodiscard]] Result<ModelPlan> plan_model(const EngineSpec& spec);

/// Loads everything; takes seconds to minutes and the memory that plan_model announced. state: a folder in which a backend may
/// remember what it finds out about its device; empty: none.
[[nodiscard]] Result<LoadedModel> load_model(const EngineSpec& spec, const std::filesystem::path& state);

/// Runs the exactness checker on a model that serves nothing yet. Errors: the backend's; a pool too small to check anything.
[[nodiscard]] Result<engine::ExactnessReport> check_model_exactness(
    LoadedModel& model, const std::function<void(const engine::ExactnessCase&)>& progress);

/// Identifies model, dtype, backend and devices, so that the tuner's journal never reuses evidence from another one.
[[nodiscard]] std::string model_key(const EngineSpec& spec, const LoadedModel& model);
/// What every such key of this model begins with, whatever it is loaded on.
[[nodiscard]] std::string model_key_stem(const EngineSpec& spec, const ModelPlan& plan);

}  // namespace rubato
