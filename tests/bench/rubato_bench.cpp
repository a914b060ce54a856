// SPDX-License-Identifier: Apache-2.0
// rubato-bench: what the engine reaches on this machine, next to what the machine allows. Prefill by chunk, decode by batch, and
// the scheduler's own cost per step.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/cpu/backend.h"
#include "engine/lane.h"
#include "engine/model/weights.h"
#include "manifests/names.h"
#include "tests/bench/machine_peaks.h"

namespace {

using namespace rubato;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string model;  // a folder; empty: synthetic
  std::string synthetic = "qwen2-0.5b";
  DataType dtype = DataType::BFloat16;
  std::int32_t threads = engine::default_cpu_threads();
  int repeats = 3;
  std::string json;
};

const char* const usage =
    "usage: rubato-bench [--model FOLDER | --synthetic qwen2-0.5b|demo|tiny] [--dtype BFloat16|Float32] [--threads N] [--repeats "
    "N] [--json FILE]\n";

std::optional<SyntheticModel> synthetic_named(const std::string& name) {
  if (name == "qwen2-0.5b") {
    return SyntheticModel{
        .hidden_size = 896, .layers = 24, .heads = 14, .kv_heads = 2, .feed_forward = 4864, .vocabulary = 151936};
  }
  if (name == "demo")
    return SyntheticModel{.hidden_size = 768, .layers = 12, .heads = 12, .kv_heads = 4, .feed_forward = 2048, .vocabulary = 4096};
  if (name == "tiny")
    return SyntheticModel{.hidden_size = 128, .layers = 2, .heads = 4, .kv_heads = 2, .feed_forward = 256, .vocabulary = 512};
  return std::nullopt;
}

std::optional<Options> parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string flag = arguments[i];
    if (flag == "--help" || i + 1 >= count) return std::nullopt;
    const std::string value = arguments[++i];
    if (flag == "--model") {
      options.model = value;
    } else if (flag == "--synthetic" && synthetic_named(value)) {
      options.synthetic = value;
    } else if (flag == "--dtype" && from_string<DataType>(value)) {
      options.dtype = *from_string<DataType>(value);
    } else if (flag == "--threads" && std::atoi(value.c_str()) > 0) {
      options.threads = std::atoi(value.c_str());
    } else if (flag == "--repeats" && std::atoi(value.c_str()) > 0) {
      options.repeats = std::atoi(value.c_str());
    } else if (flag == "--json") {
      options.json = value;
    } else {
      std::fprintf(stderr, "rubato-bench: '%s %s' is not understood\n", flag.c_str(), value.c_str());
      return std::nullopt;
    }
  }
  return options;
}

template <class Body>
double median_seconds(int repeats, Body&& body) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    body();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

constexpr std::int32_t longest_chunk = 1024;
constexpr std::int32_t largest_batch = 32;
constexpr std::int32_t decode_context = 128;

class EngineBench {
 public:
  EngineBench(engine::Backend& backend, int repeats) : backend_(backend), repeats_(repeats) {
    for (std::int32_t i = 0; i < longest_chunk; ++i) tokens_.push_back(1 + i % (backend.config().vocabulary - 1));
    parameters_.temperature = 0;
  }

  /// One prompt of `chunk` tokens in one step, with a sample at its end.
  double prefill_seconds(std::int32_t chunk) {
    const engine::SamplingState sampling(parameters_, tokens_, backend_.config().vocabulary);
    const std::vector<BlockId> blocks = blocks_of(0, chunk);
    const std::vector<engine::StepRow> rows{{.position = 0,
                                             .tokens = std::span(tokens_).first(static_cast<std::size_t>(chunk)),
                                             .blocks = blocks,
                                             .sampling = &sampling}};
    run(rows);
    return median_seconds(repeats_, [&] { run(rows); });
  }

  /// One token of each of `batch` sequences, each behind decode_context tokens.
  double decode_seconds(std::int32_t batch) {
    const engine::SamplingState sampling(parameters_, tokens_, backend_.config().vocabulary);
    std::vector<std::vector<BlockId>> blocks;
    for (std::int32_t i = 0; i < batch; ++i) blocks.push_back(blocks_of(i, decode_context + 1));
    for (const auto& table : blocks) {
      run({{.position = 0, .tokens = std::span(tokens_).first(decode_context), .blocks = table, .sampling = nullptr}});
    }
    std::vector<engine::StepRow> rows;
    for (const auto& table : blocks) {
      rows.push_back({.position = decode_context, .tokens = std::span(tokens_).first(1), .blocks = table, .sampling = &sampling});
    }
    run(rows);
    return median_seconds(5 * repeats_, [&] { run(rows); });
  }

 private:
  static std::vector<BlockId> blocks_of(std::int32_t sequence, std::int32_t count) {
    constexpr std::int32_t per_sequence = (decode_context + kv_block_tokens) / kv_block_tokens;
    std::vector<BlockId> blocks;
    for (std::int32_t i = 0; i * kv_block_tokens < count; ++i) blocks.push_back(BlockId{sequence * per_sequence + i});
    return blocks;
  }

  void run(const std::vector<engine::StepRow>& rows) {
    const Result<void> done = backend_.run(rows, result_);
    CHECK(done.has_value(), done.error().message);
  }

  engine::Backend& backend_;
  const int repeats_;
  std::vector<TokenId> tokens_;
  engine::SamplingParameters parameters_;
  engine::StepResult result_;
};

// A device that takes no time, so that what is left of a step is the scheduler and the lane's books.
class InstantBackend final : public engine::Backend {
 public:
  explicit InstantBackend(const engine::ModelConfig& config) : config_(config) {}
  Result<void> run(std::span<const engine::StepRow> rows, engine::StepResult& result) override {
    std::size_t samples = 0;
    for (const engine::StepRow& row : rows) samples += row.sampling != nullptr ? 1 : 0;
    result.samples.resize(samples);
    result.sample_valid.assign(samples, true);
    return {};
  }
  void capture_logits(bool) override {}
  void released(std::span<const BlockId>) override {}
  [[nodiscard]] const engine::ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string description() const override { return "instant"; }

 private:
  engine::ModelConfig config_;
};

/// Seconds of a whole step of 256 running sequences (one of them half-prefilled) on the instant device.
double overhead_seconds(const engine::ModelConfig& config, PriorityPolicy policy) {
  constexpr std::int32_t sequences = 256;
  InstantBackend backend(config);
  engine::LaneOptions options;
  options.limits = {.max_model_len = 4096, .max_num_seqs = sequences, .max_waiting = sequences, .block_count = sequences * 256};
  options.initial.knobs = KnobValues{.max_num_batched_tokens = 512, .max_num_seqs = sequences, .priority_policy = policy};
  engine::Lane lane(backend, options);
  const auto now = [] { return TimePoint(std::chrono::duration_cast<Duration>(Clock::now().time_since_epoch())); };
  for (std::int32_t i = 0; i < sequences; ++i) {
    engine::Request request;
    request.id = SequenceId{static_cast<std::uint64_t>(i) + 1};
    request.prompt.assign(i == 0 ? 3000 : 64, 1);
    request.sampling.temperature = 0;
    request.sampling.max_new_tokens = 1000;
    request.sampling.ignore_eos = true;
    request.arrival = now();
    request.ttft_target = std::chrono::seconds(1);
    request.itl_target = std::chrono::milliseconds(50);
    CHECK(lane.add(std::move(request)).has_value());
  }
  for (int i = 0; i < 50; ++i) lane.step(now);
  return median_seconds(301, [&] { lane.step(now); });
}

struct Landing {
  double worst_gap = 0;  // seconds, of the running streams
  double ttft = 0;       // seconds, of the prompt
};

/// One prompt of 1024 tokens lands on four running streams.
Landing land_prompt(engine::Backend& backend, PriorityPolicy policy, std::int32_t budget, std::int32_t blocks) {
  constexpr std::uint64_t streams = 4;
  engine::LaneOptions options;
  options.limits = {.max_model_len = 2 * longest_chunk, .max_num_seqs = 8, .max_waiting = 8, .block_count = blocks};
  options.initial.knobs = KnobValues{.max_num_batched_tokens = budget, .max_num_seqs = 8, .priority_policy = policy};
  engine::Lane lane(backend, options);
  const auto now = [] { return TimePoint(std::chrono::duration_cast<Duration>(Clock::now().time_since_epoch())); };
  const auto add = [&](std::uint64_t id, std::int32_t prompt, std::int32_t answer) {
    engine::Request request;
    request.id = SequenceId{id};
    request.prompt.assign(static_cast<std::size_t>(prompt), static_cast<TokenId>(id));
    request.sampling.temperature = 0;
    request.sampling.max_new_tokens = answer;
    request.sampling.ignore_eos = true;
    request.arrival = now();
    request.ttft_target = std::chrono::seconds(3);
    request.itl_target = std::chrono::milliseconds(200);
    CHECK(lane.add(std::move(request)).has_value());
  };
  for (std::uint64_t id = 1; id <= streams; ++id) add(id, 32, 600);
  for (int i = 0; i < 30; ++i) lane.step(now);  // also teaches the step-time model
  std::vector<TimePoint> last(streams + 1, now());
  const TimePoint landed = now();
  add(streams + 1, longest_chunk, 8);
  Landing result;
  for (bool done = false; !done && lane.step(now);) {
    for (const engine::TokenEvent& event : lane.events()) {
      if (event.id.value <= streams) {
        TimePoint& before = last[event.id.value];
        result.worst_gap = std::max(result.worst_gap, to_seconds(event.time - before));
        before = event.time;
      } else if (event.index == 0) {
        result.ttft = to_seconds(event.time - landed);
      }
      done = done || (event.id.value > streams && event.finish.has_value());
    }
  }
  return result;
}

std::string share(double part, double whole) {
  char text[32];
  std::snprintf(text, sizeof text, whole > 0 ? "%3.0f %%" : "  -", 100 * part / whole);
  return text;
}

int run(const Options& options) {
  Result<engine::ModelConfig> config = options.model.empty() ? engine::synthetic_model_config(*synthetic_named(options.synthetic))
                                                             : engine::read_model_config(options.model);
  if (!config) {
    std::fprintf(stderr, "rubato-bench: %s\n", config.error().message.c_str());
    return 1;
  }
  std::unique_ptr<engine::WeightSource> weights;
  if (options.model.empty()) {
    weights = engine::make_synthetic_weights(*config, 1, options.dtype);
  } else {
    auto opened = engine::open_safetensors(options.model);
    if (!opened) {
      std::fprintf(stderr, "rubato-bench: %s\n", opened.error().message.c_str());
      return 1;
    }
    weights = std::move(*opened);
  }
  const std::int32_t blocks =
      std::max(largest_batch * (decode_context / kv_block_tokens + 1), 5 * longest_chunk / kv_block_tokens);
  auto backend = engine::make_cpu_backend(*config, *weights,
                                          {.dtype = options.dtype,
                                           .block_count = blocks,
                                           .max_tokens_per_step = longest_chunk,
                                           .max_rows = largest_batch,
                                           .max_model_len = 2 * longest_chunk,
                                           .threads = options.threads});
  weights.reset();
  if (!backend) {
    std::fprintf(stderr, "rubato-bench: %s\n", backend.error().message.c_str());
    return 1;
  }
  const bench::MachinePeaks peaks = bench::measure_peaks(options.threads);
  const double peak =
      options.dtype == DataType::BFloat16 && peaks.bfloat16_gflops > 0 ? peaks.bfloat16_gflops : peaks.float32_gflops;
  std::printf("%s, %s, %lld parameters\n", (*backend)->description().c_str(), std::string(to_string(options.dtype)).c_str(),
              static_cast<long long>(config->parameter_count()));
  std::printf("machine: %.0f GFLOP/s BF16, %.0f GFLOP/s F32, %.1f GB/s read\n\n", peaks.bfloat16_gflops, peaks.float32_gflops,
              peaks.read_gigabytes_per_second);

  nlohmann::ordered_json out{{"backend", (*backend)->description()},
                             {"dtype", to_string(options.dtype)},
                             {"peaks",
                              {{"bfloat16Gflops", peaks.bfloat16_gflops},
                               {"float32Gflops", peaks.float32_gflops},
                               {"readGigabytesPerSecond", peaks.read_gigabytes_per_second}}}};
  EngineBench bench(**backend, options.repeats);
  // The multiply-adds of the layers; the head runs once per prompt.
  const double embedding = static_cast<double>(config->vocabulary) * config->hidden_size;
  const double layers = static_cast<double>(config->parameter_count()) - embedding * (config->tied_embeddings ? 1 : 2);
  std::printf("prefill      tokens/s   GFLOP/s   of peak\n");
  for (const std::int32_t chunk : {64, 128, 256, 512, 1024}) {
    const double seconds = bench.prefill_seconds(chunk);
    const double reached = 1e-9 * (2 * layers * chunk + 2 * embedding) / seconds;
    std::printf("%5d        %8.0f  %8.0f   %s\n", chunk, chunk / seconds, reached, share(reached, peak).c_str());
    out["prefill"].push_back(
        {{"tokens", chunk}, {"tokensPerSecond", chunk / seconds}, {"gflops", reached}, {"shareOfPeak", reached / peak}});
  }
  const double bytes = 1e-9 * (layers + embedding) * (options.dtype == DataType::Float32 ? 4 : 2);
  std::printf("\ndecode       tokens/s      GB/s   of read\n");
  for (const std::int32_t batch : {1, 8, 32}) {
    const double seconds = bench.decode_seconds(batch);
    std::printf("%5d        %8.1f  %8.1f   %s\n", batch, batch / seconds, bytes / seconds,
                share(bytes / seconds, peaks.read_gigabytes_per_second).c_str());
    out["decode"].push_back({{"batch", batch}, {"tokensPerSecond", batch / seconds}, {"gigabytesPerSecond", bytes / seconds}});
  }
  std::printf("\nscheduler and bookkeeping per step, 256 sequences running\n");
  for (const auto& policy : enum_names<PriorityPolicy>) {
    const double seconds = overhead_seconds(*config, policy.value);
    std::printf("%-14s %6.1f us\n", std::string(policy.name).c_str(), 1e6 * seconds);
    out["overhead"][std::string(policy.name)] = seconds;
  }
  std::printf("\none prompt of %d tokens on 4 running streams (targets: TTFT 3 s, ITL 200 ms)\n", longest_chunk);
  std::printf("policy         budget   worst gap ms   TTFT ms\n");
  for (const auto& policy : enum_names<PriorityPolicy>) {
    for (const std::int32_t budget : {64, 256, 1024}) {
      std::vector<Landing> runs;
      for (int i = 0; i < options.repeats; ++i) runs.push_back(land_prompt(**backend, policy.value, budget, blocks));
      const auto middle = runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2);
      std::nth_element(runs.begin(), middle, runs.end(),
                       [](const Landing& a, const Landing& b) { return a.worst_gap < b.worst_gap; });
      std::printf("%-14s %6d   %12.0f   %7.0f\n", std::string(policy.name).c_str(), budget, 1e3 * middle->worst_gap,
                  1e3 * middle->ttft);
      out["landing"].push_back(
          {{"policy", policy.name}, {"budget", budget}, {"worstGap", middle->worst_gap}, {"ttft", middle->ttft}});
    }
  }
  if (!options.json.empty() && !(std::ofstream(options.json) << out.dump(2) << "\n")) {
    std::fprintf(stderr, "rubato-bench: %s cannot be written\n", options.json.c_str());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  const std::optional<Options> options = parse(argument_count, arguments);
  if (!options) {
    std::fputs(usage, stderr);
    return 2;
  }
  return run(*options);
}
