// SPDX-License-Identifier: Apache-2.0
// The CUDA backend itself: one lane on one device, with a stream for each place where its steps run. backend_setup.cpp makes it,
// alone or beside a first one over the same weights and blocks; backend.cpp runs steps, captures shapes and takes in blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "engine/cuda/block_copies.h"
#include "engine/cuda/ops.h"
#include "engine/cuda/places.h"
#include "engine/cuda/sampling.h"
#include "engine/cuda/sampling_regions.h"
#include "engine/cuda/shapes.h"
#include "engine/cuda/staging.h"
#include "engine/models/decoder.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {

/// What a lane has of its own on the device before it knows a model.
struct LaneParts {
  Places places;
  Staging staging;
  SamplingRegions sampling;
  BlockCopier copier;

  [[nodiscard]] static Result<LaneParts> make(const ModelConfig& config, const BackendOptions& options, std::int32_t device,
                                              Stream::Urgency urgency);
};

/// How two lanes share a device.
enum class Division : std::uint8_t {
  GreenContexts,  // where the driver has them, else as the other
  Priorities,     // the second one's kernels start when the first one's leave room; what runs is not interrupted
};

class CudaBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> make(const ModelConfig& config, WeightSource& weights, const BackendOptions& options,
                                               std::int32_t device);
  ~CudaBackend() override {
    static_cast<void>(cudaSetDevice(facts_.index));
    // What is queued (a set-up that failed, say) still uses the memory that goes now.
    places_.wait();
    shapes_.reset();
  }

  [[nodiscard]] Result<void> run(std::span<const StepRow> rows, StepResult& result) override;
  [[nodiscard]] ShapeLimits shape_limits() const override;
  [[nodiscard]] Result<std::unique_ptr<StepShapes>> build_shapes(const policies::StepBuckets& buckets,
                                                                 const std::stop_token& stop) override;
  [[nodiscard]] std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) override {
    std::unique_ptr<StepShapes> before = std::move(shapes_);
    // Only its own build_shapes makes sets for a backend.
    shapes_.reset(static_cast<CudaShapes*>(shapes.release()));
    return before;
  }
  [[nodiscard]] Result<std::unique_ptr<Backend>> make_sibling() override { return make_sibling(Division::GreenContexts); }
  /// Again once the last one is gone.
  [[nodiscard]] Result<std::unique_ptr<Backend>> make_sibling(Division division);
  void use_share(std::int32_t percent) override {
    CHECK(percent >= 1 && percent <= 99, "percent=", percent);
    places_.use_share(percent);
  }
  [[nodiscard]] DeviceShare share() const override { return places_.share(); }
  [[nodiscard]] Result<void> copy_blocks(const Backend& source, const CacheCopies& copies,
                                         const std::function<bool()>& allowed) override;
  void capture_logits(bool on) override { capture_logits_ = on; }
  void released(std::span<const BlockId> blocks) override {
    if (!options_.poison || !check(cudaSetDevice(facts_.index), "cudaSetDevice")) return;
    ops_->move_to(places_.whole().step);
    ops_->poison(blocks);
  }
  void released_states(std::span<const StateId> states) override {
    if (!options_.poison || !check(cudaSetDevice(facts_.index), "cudaSetDevice")) return;
    ops_->move_to(places_.whole().step);
    ops_->poison_states(states);
  }
  void read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) override {
    static_cast<void>(cudaSetDevice(facts_.index));
    ops_->move_to(places_.whole().step);
    ops_->read_token(layer, block, slot, out);
  }
  void read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) override {
    static_cast<void>(cudaSetDevice(facts_.index));
    ops_->move_to(places_.whole().step);
    ops_->read_state(layer, state, out);
  }
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string description() const override;

 private:
  CudaBackend(const ModelConfig& config, const BackendOptions& options, const DeviceFacts& facts, LaneParts parts)
      : config_(config),
        options_(options),
        facts_(facts),
        places_(std::move(parts.places)),
        staging_(std::move(parts.staging)),
        sampling_(std::move(parts.sampling)),
        copier_(std::move(parts.copier)),
        zeros_(static_cast<std::size_t>(std::max(options.max_tokens_per_step, options.max_rows))) {
    inputs_.reserve(static_cast<std::size_t>(options.max_rows));
  }
  [[nodiscard]] Result<void> load(WeightSource& weights);
  [[nodiscard]] Result<void> load_beside(const CudaBackend& first);
  [[nodiscard]] Result<void> finish_set_up();
  [[nodiscard]] Result<Matrix> queue_pass(CudaOps& ops, Decoder& model, const Stream& stream, std::int32_t tokens,
                                          std::span<const std::int32_t> selected);
  [[nodiscard]] Result<Matrix> queue_step(std::span<const StepRow> rows, const std::optional<Places::Part>& part,
                                          StepResult& result);
  [[nodiscard]] Result<void> read_logits(const Matrix& logits, std::vector<float>& out);
  [[nodiscard]] Result<std::vector<CudaShapes::Entry>> capture(const policies::StepBuckets& buckets, const Stream& stream,
                                                               const std::stop_token& stop);
  void collect(StepResult& result);

  ModelConfig config_;
  BackendOptions options_;
  DeviceFacts facts_;
  std::string products_;  // what computes them, for description()
  Places places_;
  Staging staging_;
  SamplingRegions sampling_;
  BlockCopier copier_;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<CudaOps> build_ops_;  // the same memory, for the builder's thread
  std::optional<Decoder> model_;
  std::optional<Decoder> build_model_;
  std::vector<TokenId> zeros_;  // counts that a pass over device metadata is given; the contents are the batch's
  std::vector<SamplingInput> inputs_;
  std::unique_ptr<CudaShapes> shapes_;
  std::optional<Error> broken_;
  bool capture_logits_ = false;
};

}  // namespace rubato::engine::cuda
