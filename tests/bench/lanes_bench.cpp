// SPDX-License-Identifier: Apache-2.0
// Two lanes on one CPU device: decode steps of 16 sequences on one while the other runs prefill chunks of 512 tokens, by the
// decode lane's share, next to what each takes alone.
//   lanes_bench [threads] [seconds per line]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "engine/cpu/backend.h"
#include "engine/model/weights.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace {

using namespace rubato;
using Clock = std::chrono::steady_clock;

constexpr std::int32_t batch = 16;
constexpr std::int32_t context = 128;
constexpr std::int32_t chunk = 512;

/// Steps of one kind, over and over.
class Load {
 public:
  Load(engine::Backend& backend, std::int32_t rows, std::int32_t position, std::int32_t tokens, std::int32_t first_block)
      : backend_(backend),
        tokens_(static_cast<std::size_t>(position + tokens), 1),
        sampling_({.temperature = 0}, {}, backend.config().vocabulary) {
    for (std::int32_t row = 0; row < rows; ++row) {
      std::vector<BlockId>& table = tables_.emplace_back();
      for (std::int32_t at = 0; at < position + tokens; at += kv_block_tokens) table.push_back({first_block++});
    }
    for (const std::vector<BlockId>& table : tables_) {
      if (position > 0) run({{.position = 0, .tokens = std::span(tokens_).first(position), .blocks = table}});
      rows_.push_back(
          {.position = position, .tokens = std::span(tokens_).subspan(position), .blocks = table, .sampling = &sampling_});
    }
    run(rows_);
  }

  /// Until stop, at least once. Sorted milliseconds.
  template <class Stop>
  std::vector<double> measure(Stop&& stop) {
    std::vector<double> times;
    do {
      const auto begin = Clock::now();
      run(rows_);
      times.push_back(1e3 * std::chrono::duration<double>(Clock::now() - begin).count());
    } while (!stop());
    std::sort(times.begin(), times.end());
    return times;
  }

 private:
  void run(const std::vector<engine::StepRow>& rows) { CHECK(backend_.run(rows, result_).has_value()); }

  engine::Backend& backend_;
  std::vector<TokenId> tokens_;
  engine::SamplingState sampling_;
  std::vector<std::vector<BlockId>> tables_;
  std::vector<engine::StepRow> rows_;
  engine::StepResult result_;
};

double quantile(const std::vector<double>& sorted, double q) {
  return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1))];
}

void print(const char* name, const std::vector<double>& decode, const std::vector<double>& prefill) {
  std::printf("%-12s", name);
  if (decode.empty()) {
    std::printf("        -         -         -");
  } else {
    std::printf(" %8.2f  %8.2f  %8.2f", quantile(decode, 0.5), quantile(decode, 0.99), decode.back());
  }
  if (!prefill.empty()) std::printf("    %8.1f  %8.1f", quantile(prefill, 0.5), prefill.back());
  std::printf("\n");
}

}  // namespace

int main(int argument_count, char** arguments) {
  const std::int32_t threads = argument_count > 1 ? std::max(1, std::atoi(arguments[1])) : engine::default_cpu_threads();
  const double seconds = argument_count > 2 ? std::max(0.1, std::atof(arguments[2])) : 2.0;
  const engine::ModelConfig config =
      engine::synthetic_model_config(
          {.hidden_size = 768, .layers = 12, .heads = 12, .kv_heads = 4, .feed_forward = 2048, .vocabulary = 4096})
          .value();
  const auto weights = engine::make_synthetic_weights(config, 1, DataType::BFloat16);
  const auto backend =
      engine::make_cpu_backend(
          config, *weights,
          {.dtype = DataType::BFloat16,
           .block_count = batch * (context / kv_block_tokens + 1) + chunk / kv_block_tokens,
           .max_tokens_per_step = chunk,
           .max_rows = batch,
           .max_model_len = 2 * chunk,
           .threads = threads,
           .now = [] { return TimePoint(std::chrono::duration_cast<Duration>(Clock::now().time_since_epoch())); }})
          .value();
  std::printf("%s; decode: %d rows behind %d tokens; prefill: chunks of %d\n", backend->description().c_str(), batch, context,
              chunk);
  std::printf("             decode ms     p99       max      prefill ms     max\n");
  const auto until = [&] {
    return [end = Clock::now() + std::chrono::duration<double>(seconds)] { return Clock::now() >= end; };
  };
  const std::unique_ptr<engine::Backend> sibling = backend->make_sibling().value();
  Load decode(*backend, batch, context, 1, 0);
  Load prefill(*sibling, 1, 0, chunk, batch * (context / kv_block_tokens + 1));
  print("alone", decode.measure(until()), prefill.measure(until()));
  for (const std::int32_t share : {20, 50, 80}) {
    backend->use_share(share);
    std::atomic<bool> over{false};
    std::vector<double> chunks;
    std::thread other([&] { chunks = prefill.measure([&] { return over.load(); }); });
    const std::vector<double> steps = decode.measure(until());
    over = true;
    other.join();
    print((std::to_string(share) + " percent").c_str(), steps, chunks);
  }
  return 0;
}
