// SPDX-License-Identifier: Apache-2.0
// What executes steps. A backend owns a device's memory: weights, KV blocks and scratch, all taken when it is made. It is handed
// one ragged batch per step and returns sampled tokens; it knows no queue, policy or client. CPU here, CUDA beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "engine/sampling.h"
#include "engine/tokens.h"
#include "manifests/result.h"
#include "policies/ids.h"

namespace rubato::engine {

struct BackendOptions {
  DataType dtype = DataType::Float32;    // of weights and KV cache
  std::int32_t block_count = 0;          // KV blocks of kv_block_tokens tokens
  std::int32_t max_tokens_per_step = 0;  // largest budget any settings may choose
  std::int32_t max_rows = 0;             // largest number of rows in a step
  std::int32_t max_model_len = 0;
  std::int32_t threads = 1;
  bool poison = false;  // fill fresh and freed KV with NaN, so that a read of unwritten memory shows
};

/// One sequence's share of a step.
struct StepRow {
  std::int32_t position = 0;                // absolute position of tokens[0]
  std::span<const TokenId> tokens;          // >= 1
  std::span<const BlockId> blocks;          // block table covering position + tokens.size()
  const SamplingState* sampling = nullptr;  // null: the row samples nothing
};

/// Results, reused from step to step. samples[i] belongs to the i-th row that samples; samples may be longer than that, because
/// it keeps what larger steps allocated. sample_valid has exactly one entry per sampling row.
struct StepResult {
  std::vector<Sample> samples;
  std::vector<bool> sample_valid;  // false: that row's logits were not finite; the request fails alone
  std::vector<float> logits;       // (sampling rows, vocabulary), before sampling; only when capture_logits is on
};

/// Thread: the lane's. run() allocates nothing after the first full-sized step.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Executes the step. An error means the device broke: nothing was computed and the backend stays broken.
  [[nodiscard]] virtual Result<void> run(std::span<const StepRow> rows, StepResult& result) = 0;

  /// Tests and the exactness checker compare bits of logits; off by default.
  virtual void capture_logits(bool on) = 0;

  /// Tells the backend that a block's contents are dead (only used for poisoning).
  virtual void released(std::span<const BlockId> blocks) = 0;

  [[nodiscard]] virtual const ModelConfig& config() const = 0;
  /// Shown in status and metrics: `cpu avx512_bf16, 2 threads`.
  [[nodiscard]] virtual std::string description() const = 0;
};

/// The KV pool's size in blocks for a byte budget; the one function that start-up, status and checks use.
[[nodiscard]] std::int32_t kv_block_count(const ModelConfig& config, DataType dtype, std::int64_t kv_cache_bytes);

/// Bytes of one step's scratch plus weights, so that start-up can refuse before the allocation fails.
[[nodiscard]] std::int64_t weight_bytes(const ModelConfig& config, DataType dtype);

}  // namespace rubato::engine
