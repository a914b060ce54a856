// SPDX-License-Identifier: Apache-2.0
// exactness_cost: what the exactness contract costs. The engine's own kernels against operations that sum as they like (oneDNN,
// chunked SSD), the same model and the same steps in turns; medians and their ratio.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/cpu/backend.h"
#include "engine/cpu/ops.h"
#include "engine/model/weights.h"
#include "engine/models/host_backend.h"
#include "tests/bench/free_ops.h"

namespace {

using namespace rubato;
using Clock = std::chrono::steady_clock;

constexpr std::int32_t prompt_tokens = 512;
constexpr std::int32_t largest_batch = 32;

struct Model {
  const char* name;
  SyntheticModel synthetic;
};

const Model models[] = {
    {"Llama (Qwen2-0.5B shape)",
     {.hidden_size = 896, .layers = 24, .heads = 14, .kv_heads = 2, .feed_forward = 4864, .vocabulary = 151936}},
    {"Mamba2 (130M shape)",
     {.architecture = Architecture::Mamba2, .hidden_size = 768, .layers = 24, .mamba_heads = 24, .vocabulary = 50288}},
};

/// One backend with sequences to prefill and to decode.
class Runner {
 public:
  Runner(const engine::ModelConfig& config, std::unique_ptr<engine::HostOps> ops) {
    const engine::BackendOptions options{.dtype = DataType::BFloat16,
                                         .block_count = largest_batch * 2 + prompt_tokens / kv_block_tokens,
                                         .state_count = config.mamba2 ? largest_batch : 0,
                                         .max_tokens_per_step = prompt_tokens,
                                         .max_rows = largest_batch,
                                         .max_model_len = 2 * prompt_tokens};
    const auto weights = engine::make_synthetic_weights(config, 1, DataType::BFloat16);
    auto made = engine::HostBackend::make(config, *weights, options, std::move(ops), "bench");
    CHECK(made.has_value(), made.error().message);
    backend_ = std::move(*made);
    backend_->capture_logits(true);
    for (std::int32_t i = 0; i < prompt_tokens; ++i) tokens_.push_back(1 + i % 1000);
  }

  double prefill_seconds() {
    const engine::SamplingState sampling({.temperature = 0.0}, {}, backend_->config().vocabulary);
    std::vector<BlockId> blocks;
    for (std::int32_t i = 0; i * kv_block_tokens < prompt_tokens; ++i) blocks.push_back(BlockId{i});
    return run({{.position = 0, .tokens = tokens_, .blocks = blocks, .sampling = &sampling, .state = state(0, 0)}});
  }

  /// The second token of each sequence.
  double decode_seconds(std::int32_t batch) {
    const engine::SamplingState sampling({.temperature = 0.0}, {}, backend_->config().vocabulary);
    std::vector<BlockId> blocks;
    for (std::int32_t i = 0; i < batch; ++i) blocks.push_back(BlockId{i});
    std::vector<engine::StepRow> rows;
    for (std::int32_t position = 0; position < 2; ++position) {
      rows.clear();
      for (std::int32_t i = 0; i < batch; ++i) {
        rows.push_back({.position = position,
                        .tokens = std::span(tokens_).subspan(static_cast<std::size_t>(position), 1),
                        .blocks = std::span(blocks).subspan(static_cast<std::size_t>(i), 1),
                        .sampling = &sampling,
                        .state = state(i, position)});
      }
      if (position == 0) static_cast<void>(run(rows));
    }
    return run(rows);
  }

  [[nodiscard]] const std::vector<float>& logits() const { return result_.logits; }

 private:
  [[nodiscard]] std::optional<StateUse> state(std::int32_t slot, std::int32_t position) const {
    if (!backend_->config().mamba2) return std::nullopt;
    return StateUse{
        .from = position == 0 ? std::nullopt : std::optional(StateId{slot}), .to = StateId{slot}, .save = std::nullopt};
  }
  double run(const std::vector<engine::StepRow>& rows) {
    const auto begin = Clock::now();
    const Result<void> done = backend_->run(rows, result_);
    CHECK(done.has_value(), done.error().message);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  std::unique_ptr<engine::Backend> backend_;
  std::vector<TokenId> tokens_;
  engine::StepResult result_;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Largest difference of logits against the largest logit: both compute the same, but for rounding.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  double scale = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    scale = std::max(scale, std::fabs(static_cast<double>(a[i])));
  }
  return largest / scale;
}

template <class Step>
void compare(const char* what, std::int32_t tokens, int repeats, Runner& exact, Runner& free, Step step) {
  step(exact);
  step(free);
  const double apart = distance(exact.logits(), free.logits());
  CHECK(apart < 0.1, what, " differs by ", apart);
  std::vector<double> own, others, ratios;
  for (int i = 0; i < repeats; ++i) {
    own.push_back(step(exact));
    others.push_back(step(free));
    ratios.push_back(own.back() / others.back());
  }
  std::printf("%-14s %12.1f %12.1f %14.3f   %.1e\n", what, tokens / median(own), tokens / median(others), median(ratios), apart);
}

}  // namespace

int main(int count, char** arguments) {
  const std::int32_t threads = count > 1 ? std::max(std::atoi(arguments[1]), 1) : 1;
  const int repeats = count > 2 ? std::max(std::atoi(arguments[2]), 1) : 9;
  const std::string width = std::to_string(threads);
  setenv("OMP_NUM_THREADS", width.c_str(), 1);
  setenv("OMP_WAIT_POLICY", "passive", 0);
  const engine::cpu::KernelPath path = engine::cpu::kernel_paths(DataType::BFloat16).front();
  for (const Model& model : models) {
    const engine::ModelConfig config = *engine::synthetic_model_config(model.synthetic);
    Runner exact(config, std::make_unique<engine::cpu::CpuOps>(DataType::BFloat16, path, threads));
    Runner free(config, std::make_unique<bench::FreeOps>(DataType::BFloat16, path, threads));
    std::printf("%s, BF16, %d thread%s, %d repeats\n", model.name, threads, threads == 1 ? "" : "s", repeats);
    std::printf("               exact tok/s   free tok/s   exact / free   logits apart\n");
    compare("prefill 512", prompt_tokens, repeats, exact, free, [](Runner& runner) { return runner.prefill_seconds(); });
    for (const std::int32_t batch : {1, 8, 32}) {
      compare(("decode " + std::to_string(batch)).c_str(), batch, 3 * repeats, exact, free,
              [batch](Runner& runner) { return runner.decode_seconds(batch); });
    }
  }
  return 0;
}
