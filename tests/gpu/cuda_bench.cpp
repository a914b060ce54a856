// SPDX-License-Identifier: Apache-2.0
// What the CUDA engine reaches on this GPU next to two ceilings measured in the same run: device memory bandwidth and BF16 matrix
// products. Decode by batch and prefill by chunk, graph against eager, the price of a set of graphs and of changing to it, what
// probing the matrix library found, and what a decode lane feels of a prefill lane beside it. An 8B-shaped synthetic model unless
// told otherwise.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/cuda/backend.h"
#include "engine/cuda/cuda_backend.h"
#include "engine/cuda/matmul.h"
#include "engine/cuda/runtime.h"
#include "engine/model/weights.h"
#include "engine/models/tensor_elements.h"
#include "manifests/settings.h"

namespace {

using namespace rubato;
using namespace rubato::engine;
using Clock = std::chrono::steady_clock;

constexpr std::int32_t context = 512;  // tokens that each decoding sequence has behind it
constexpr int repeats = 20;

template <class Value>
Value must(Result<Value> result) {
  if (result) return std::move(result).value();
  std::fprintf(stderr, "cuda_bench: %s\n", result.error().message.c_str());
  std::exit(1);
}
void must(const Result<void>& result) {
  if (result) return;
  std::fprintf(stderr, "cuda_bench: %s\n", result.error().message.c_str());
  std::exit(1);
}

template <class Body>
double median_seconds(int count, Body&& body) {
  body();  // warm
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto begin = Clock::now();
    body();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + count / 2, times.end());
  return times[static_cast<std::size_t>(count / 2)];
}

/// Bytes per second of a large copy within the device, read and write counted.
double bandwidth(const cuda::Stream& stream) {
  const std::int64_t bytes = std::int64_t{4} << 30;
  const cuda::DeviceMemory from = must(cuda::DeviceMemory::make(bytes));
  const cuda::DeviceMemory to = must(cuda::DeviceMemory::make(bytes));
  const double seconds = median_seconds(10, [&] {
    must(cuda::check(
        cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream.get()),
        "cudaMemcpyAsync"));
    must(stream.wait());
  });
  return 2.0 * static_cast<double>(bytes) / seconds;
}

/// Floating-point operations per second of a large BF16 product.
double product_peak(const cuda::DeviceFacts& device, const cuda::Stream& stream) {
  constexpr std::int32_t size = 8192;
  const auto library = must(cuda::MatmulLibrary::make(device, DataType::BFloat16));
  const std::int64_t bytes = std::int64_t{size} * size * 2;
  const cuda::DeviceMemory weights = must(cuda::DeviceMemory::make(bytes));
  const cuda::DeviceMemory x = must(cuda::DeviceMemory::make(bytes));
  const cuda::DeviceMemory out = must(cuda::DeviceMemory::make(bytes));
  must(cuda::check(cudaMemset(weights.data(), 0, static_cast<std::size_t>(bytes)), "cudaMemset"));
  must(cuda::check(cudaMemset(x.data(), 0, static_cast<std::size_t>(bytes)), "cudaMemset"));
  cuda::MatmulPlan plan{.shape = {.outputs = size, .inputs = size, .out_dtype = DataType::BFloat16}, .weights = weights.data()};
  cuda::MatmulCall call = must(cuda::MatmulCall::make(*library, plan));
  const std::vector<cublasLtMatmulAlgo_t> candidates = call.candidates(size);
  if (candidates.empty()) return 0;
  const double seconds = median_seconds(10, [&] {
    static_cast<void>(call.queue_with(stream.get(), candidates.front(),
                                      {.data = x.data(), .count = size, .columns = size, .stride = size},
                                      {.data = out.data(), .count = size, .columns = size, .stride = size}));
    must(stream.wait());
  });
  return 2.0 * size * size * size / seconds;
}

/// Fills device memory with random BF16 values, which repeat after a while.
void fill_random(const cuda::DeviceMemory& memory) {
  std::mt19937_64 generator(1);
  std::normal_distribution<float> normal;
  std::vector<std::byte> values(std::size_t{2} << 20);
  for (std::size_t at = 0; at < values.size(); at += 2) narrow_element(DataType::BFloat16, normal(generator), values.data() + at);
  for (std::int64_t at = 0; at < memory.bytes(); at += static_cast<std::int64_t>(values.size())) {
    const auto bytes =
        static_cast<std::size_t>(std::min<std::int64_t>(static_cast<std::int64_t>(values.size()), memory.bytes() - at));
    must(cuda::check(cudaMemcpy(memory.data() + at, values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy"));
  }
}

/// Of each weight shape: how many of the library's candidates have the reference's bits in every row range.
void products(const ModelConfig& config, const cuda::DeviceFacts& device, std::int32_t max_rows) {
  const cuda::Stream stream = must(cuda::Stream::make());
  const auto library = must(cuda::MatmulLibrary::make(device, DataType::BFloat16));
  const std::int32_t query = config.heads * config.head_size;
  const std::int32_t projected = config.mamba2 ? config.mamba2->projected() : 0;
  const std::int32_t inner = config.mamba2 ? config.mamba2->inner() : 0;
  struct Shape {
    const char* name;
    std::int32_t outputs;
    std::int32_t inputs;
    DataType out;
  };
  const Shape shapes[] = {{"q, k and v", query + 2 * config.kv_heads * config.head_size, config.hidden_size, DataType::Float32},
                          {"attention output", config.hidden_size, query, DataType::Float32},
                          {"gate and up", 2 * config.feed_forward, config.hidden_size, DataType::BFloat16},
                          {"down", config.hidden_size, config.feed_forward, DataType::Float32},
                          {"recurrent input", projected, config.hidden_size, DataType::Float32},
                          {"recurrent output", config.hidden_size, inner, DataType::Float32},
                          {"head", config.vocabulary, config.hidden_size, DataType::Float32}};
  std::printf("%-22s %16s %12s %12s %12s %10s\n", "products", "outputs x inputs", "candidates", "bit-equal", "share",
              "probing s");
  for (const Shape& shape : shapes) {
    if (shape.outputs == 0 || shape.inputs == 0) continue;  // the model has no such product
    const cuda::DeviceMemory weights = must(cuda::DeviceMemory::make(std::int64_t{shape.outputs} * shape.inputs * 2));
    fill_random(weights);
    cuda::MatmulPlan plan{.shape = {.outputs = shape.outputs, .inputs = shape.inputs, .out_dtype = shape.out},
                          .weights = weights.data()};
    const std::int64_t row_bytes = std::int64_t{shape.outputs} * (shape.out == DataType::Float32 ? 4 : 2);
    const auto rows = static_cast<std::int32_t>(std::clamp<std::int64_t>((std::int64_t{1} << 30) / row_bytes, 1, max_rows));
    const auto begin = Clock::now();
    const cuda::MatmulReport report = must(cuda::choose_algorithms(*library, stream, rows, plan));
    std::printf("%-22s %8d x %-6d %12d %12d %11.0f%% %10.1f%s\n", shape.name, shape.outputs, shape.inputs, report.candidates,
                report.equal, report.candidates == 0 ? 0.0 : 100.0 * report.equal / report.candidates,
                std::chrono::duration<double>(Clock::now() - begin).count(), report.own_kernel ? "  own kernel instead" : "");
  }
}

SyntheticModel model_named(const std::string& name) {
  if (name == "tiny")
    return {.hidden_size = 256, .layers = 4, .heads = 4, .kv_heads = 2, .feed_forward = 512, .vocabulary = 1024};
  if (name == "1b")
    return {.hidden_size = 2048,
            .layers = 16,
            .heads = 32,
            .kv_heads = 8,
            .feed_forward = 8192,
            .vocabulary = 128256,
            .tied_embeddings = true};
  // The shapes of Mamba2 2.7B, and of a hybrid of 9B.
  if (name == "mamba2")
    return {.architecture = Architecture::Mamba2,
            .hidden_size = 2560,
            .layers = 64,
            .mamba_heads = 80,
            .mamba_head_size = 64,
            .state_size = 128,
            .vocabulary = 50288};
  if (name == "hybrid")
    return {.architecture = Architecture::Hybrid,
            .hidden_size = 4096,
            .layers = 32,
            .heads = 32,
            .kv_heads = 8,
            .feed_forward = 14336,
            .attention_every = 8,
            .mamba_heads = 128,
            .mamba_head_size = 64,
            .state_size = 128,
            .vocabulary = 128256};
  return {.hidden_size = 4096, .layers = 32, .heads = 32, .kv_heads = 8, .feed_forward = 14336, .vocabulary = 128256};
}

class Bench {
 public:
  Bench(const std::string& model, double bandwidth_peak, double flops_peak)
      : config_(must(synthetic_model_config(model_named(model)))), bandwidth_peak_(bandwidth_peak), flops_peak_(flops_peak) {
    const auto begin = Clock::now();
    const auto weights = make_synthetic_weights(config_, 1, DataType::BFloat16);
    backend_ = must(make_cuda_backend(config_, *weights,
                                      {.dtype = DataType::BFloat16,
                                       .block_count = blocks_per_sequence * rows_max,
                                       .state_count = config_.mamba2 ? rows_max : 0,
                                       .max_tokens_per_step = 4096,
                                       .max_rows = rows_max,
                                       .max_model_len = 8192},
                                      0));
    std::printf("%s: %s; loaded in %.1f s\n", model.c_str(), backend_->description().c_str(),
                std::chrono::duration<double>(Clock::now() - begin).count());
    sampling_.emplace(SamplingParameters{.temperature = 0}, std::span<const TokenId>{}, config_.vocabulary);
  }

  void shapes() {
    const policies::StepBuckets buckets{.tokens = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}, .decode_max = 64};
    std::unique_ptr<StepShapes> built;
    // Beside running steps, as it is in service.
    std::vector<double> steps;
    std::jthread builder([&] { built = must(backend_->build_shapes(buckets, {})); });
    const auto begin = Clock::now();
    for (int i = 0; i < 50; ++i) steps.push_back(step_seconds(decode_rows(8), 1));
    builder.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    const double alone = step_seconds(decode_rows(8), repeats);
    std::printf(
        "graphs: %zu buckets, at most %.2f s beside running steps, %.1f MiB; slowest step meanwhile %.2f ms, alone %.2f ms\n",
        buckets.tokens.size(), seconds, static_cast<double>(built->bytes()) / (1 << 20),
        1e3 * *std::max_element(steps.begin(), steps.end()), 1e3 * alone);
    shapes_ = std::move(built);
  }

  /// What a step loses when a new set comes into use between it and the one before: the change itself, and how much longer the
  /// first step in a graph that never ran takes.
  void swap_stall() {
    const StepRows rows(*this, decode_rows(8));
    std::vector<double> usual;
    std::vector<double> after;
    std::vector<double> changes;
    for (int i = 0; i < 10; ++i) {
      std::unique_ptr<StepShapes> fresh = must(backend_->build_shapes({.tokens = {8}, .decode_max = 8}, {}));
      std::unique_ptr<StepShapes> before;
      changes.push_back(seconds_of([&] { before = backend_->use_shapes(std::move(fresh)); }));
      after.push_back(seconds_of([&] { must(backend_->run(rows.rows, result_)); }));
      for (int step = 0; step < 5; ++step) usual.push_back(seconds_of([&] { must(backend_->run(rows.rows, result_)); }));
    }
    const std::unique_ptr<StepShapes> before = backend_->use_shapes(nullptr);
    std::printf(
        "swap stall: change of sets %.1f us, step after it %.3f ms, usual step %.3f ms (medians; slowest after %.3f ms)\n",
        1e6 * quantile(changes, 0.5), 1e3 * quantile(after, 0.5), 1e3 * quantile(usual, 0.5), 1e3 * quantile(after, 1));
  }

  /// Decode steps of one lane, alone and beside a lane that prefills without pause.
  void interference() {
    std::printf("%-22s %12s %12s %12s %16s\n", "decode lane, batch 32", "p50 ms", "p99 ms", "slowest ms", "prefill tokens/s");
    const std::vector<double> alone = lane_steps(200);
    print_lane("alone", alone, 0);
    auto& first = static_cast<cuda::CudaBackend&>(*backend_);
    for (const cuda::Division division : {cuda::Division::GreenContexts, cuda::Division::Priorities}) {
      const auto begin = Clock::now();
      const std::unique_ptr<Backend> sibling = must(first.make_sibling(division));
      const double making = std::chrono::duration<double>(Clock::now() - begin).count();
      if (division == cuda::Division::Priorities) {
        beside(*sibling, "priorities alone");
        continue;
      }
      std::printf("%s; the second lane made in %.2f s\n", backend_->description().c_str(), making);
      if (backend_->share().given_percent == 100) continue;
      for (const std::int32_t percent : {25, 50, 75}) {
        sibling->use_share(percent);
        beside(*sibling, "prefill on " + std::to_string(sibling->share().given_percent) + "%");
      }
    }
  }

  void decode() {
    std::printf("%-22s %12s %12s %14s %12s\n", "decode, context 512", "eager ms", "graph ms", "tokens/s", "of bandwidth");
    for (const std::int32_t rows : {1, 8, 16, 32, 64, 128, 256}) {
      const std::vector<Rows> batch = decode_rows(rows);
      const double eager = step_seconds(batch, repeats);
      swap();
      const double graph = step_seconds(batch, repeats);
      swap();
      const double bytes =
          static_cast<double>(weight_bytes(config_, DataType::BFloat16)) +
          static_cast<double>(rows) * (context * static_cast<double>(config_.kv_bytes_per_token(DataType::BFloat16)) +
                                       2 * static_cast<double>(config_.state_bytes()));
      // The copy counts reads and writes; decoding only reads, but for states.
      std::printf("batch %-16d %12.2f %12.2f %14.0f %11.0f%%\n", rows, 1e3 * eager, 1e3 * graph, rows / graph,
                  100 * bytes / graph / bandwidth_peak_);
    }
  }

  void prefill() {
    std::printf("%-22s %12s %12s %14s %12s\n", "prefill", "eager ms", "graph ms", "tokens/s", "of products");
    for (const std::int32_t chunk : {64, 128, 256, 512, 1024, 2048}) {
      const std::vector<Rows> batch{{0, 0, chunk}};
      const double eager = step_seconds(batch, repeats);
      swap();
      const double graph = step_seconds(batch, repeats);
      swap();
      const double dense =
          2.0 * static_cast<double>(config_.parameter_count() -
                                    std::int64_t{config_.vocabulary} * config_.hidden_size * (config_.tied_embeddings ? 1 : 2));
      std::printf("chunk %-16d %12.2f %12.2f %14.0f %11.0f%%\n", chunk, 1e3 * eager, 1e3 * graph, chunk / std::min(eager, graph),
                  100 * dense * chunk / std::min(eager, graph) / flops_peak_);
    }
  }

 private:
  struct Rows {
    std::int32_t sequence;
    std::int32_t position;
    std::int32_t count;
  };
  static constexpr std::int32_t rows_max = 256;
  static constexpr std::int32_t blocks_per_sequence = 4096 / kv_block_tokens;

  static std::vector<Rows> decode_rows(std::int32_t rows) {
    std::vector<Rows> batch;
    for (std::int32_t i = 0; i < rows; ++i) batch.push_back({i, context, 1});
    return batch;
  }

  /// Rows of a batch, with what they point at.
  struct StepRows {
    StepRows(const Bench& bench, const std::vector<Rows>& batch) : tokens(4096, 7) {
      for (std::int32_t i = 0; i < blocks_per_sequence * rows_max; ++i) blocks.push_back({i});
      for (const Rows& row : batch) {
        rows.push_back({.position = row.position,
                        .tokens = std::span(tokens).first(static_cast<std::size_t>(row.count)),
                        .blocks = std::span(blocks).subspan(static_cast<std::size_t>(row.sequence) * blocks_per_sequence,
                                                            blocks_per_sequence),
                        .sampling = &*bench.sampling_});
        if (!bench.config_.mamba2) continue;
        const StateId slot{row.sequence};
        rows.back().state = StateUse{.from = row.position > 0 ? std::optional(slot) : std::nullopt, .to = slot, .save = {}};
      }
    }
    StepRows(const StepRows&) = delete;
    StepRows& operator=(const StepRows&) = delete;
    std::vector<TokenId> tokens;
    std::vector<BlockId> blocks{};
    std::vector<StepRow> rows{};
  };

  template <class Body>
  static double seconds_of(Body&& body) {
    const auto begin = Clock::now();
    body();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  static double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
  }

  std::vector<double> lane_steps(int count) {
    const StepRows rows(*this, decode_rows(32));
    must(backend_->run(rows.rows, result_));
    std::vector<double> times;
    for (int i = 0; i < count; ++i) times.push_back(seconds_of([&] { must(backend_->run(rows.rows, result_)); }));
    return times;
  }
  /// Both lanes in graphs of their places; 200 decode steps while the sibling runs chunks of 2048 one after another.
  void beside(Backend& sibling, const std::string& name) {
    const policies::StepBuckets decode_buckets{.tokens = {32}, .decode_max = 32};
    const policies::StepBuckets prefill_buckets{.tokens = {2048}, .decode_max = 16};
    std::unique_ptr<StepShapes> before = backend_->use_shapes(must(backend_->build_shapes(decode_buckets, {})));
    before.reset();
    before = sibling.use_shapes(must(sibling.build_shapes(prefill_buckets, {})));
    before.reset();
    const StepRows chunk(*this, {{rows_max - 1, 0, 2048}});
    StepResult chunk_result;
    must(sibling.run(chunk.rows, chunk_result));
    std::atomic<bool> done{false};
    std::int64_t tokens = 0;
    double seconds = 0;
    std::jthread prefill([&] {
      seconds = seconds_of([&] {
        while (!done) {
          must(sibling.run(chunk.rows, chunk_result));
          tokens += 2048;
        }
      });
    });
    const std::vector<double> times = lane_steps(200);
    done = true;
    prefill.join();
    print_lane(name, times, static_cast<double>(tokens) / seconds);
    before = backend_->use_shapes(nullptr);
  }
  static void print_lane(const std::string& name, const std::vector<double>& times, double prefill) {
    std::printf("%-22s %12.2f %12.2f %12.2f %16.0f\n", name.c_str(), 1e3 * quantile(times, 0.5), 1e3 * quantile(times, 0.99),
                1e3 * quantile(times, 1), prefill);
  }

  void swap() { shapes_ = backend_->use_shapes(std::move(shapes_)); }

  double step_seconds(const std::vector<Rows>& batch, int count) {
    const StepRows rows(*this, batch);
    return median_seconds(count, [&] { must(backend_->run(rows.rows, result_)); });
  }

  ModelConfig config_;
  double bandwidth_peak_;
  double flops_peak_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StepShapes> shapes_;  // those that are not in use; after backend_, so that they end first
  std::optional<SamplingState> sampling_;
  StepResult result_;
};

}  // namespace

int main(int count, char** arguments) {
  const std::string model = count > 1 ? arguments[1] : "8b";
  const Result<cuda::DeviceFacts> device = cuda::open_device(0);
  if (!device) {
    std::fprintf(stderr, "cuda_bench: %s\n", device.error().message.c_str());
    return 1;
  }
  double bandwidth_peak = 0;
  double flops_peak = 0;
  {
    const cuda::Stream stream = must(cuda::Stream::make());
    bandwidth_peak = bandwidth(stream);
    flops_peak = product_peak(*device, stream);
  }
  std::printf("%s, compute capability %d.%d, %d multiprocessors, driver %d\n", device->name.c_str(), device->major, device->minor,
              device->multiprocessors, device->driver_version);
  std::printf("ceilings: %.0f GB/s copied within the device, %.0f TFLOP/s BF16\n", bandwidth_peak / 1e9, flops_peak / 1e12);
  products(must(synthetic_model_config(model_named(model))), *device, 4096);
  Bench bench(model, bandwidth_peak, flops_peak);
  bench.shapes();
  bench.swap_stall();
  bench.decode();
  bench.prefill();
  bench.interference();
  return 0;
}
