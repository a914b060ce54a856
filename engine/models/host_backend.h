// SPDX-License-Identifier: Apache-2.0
// The Backend shared by every Ops whose memory is the host's: flattens a step's rows, runs the model and samples. The arithmetic
// is its Ops'; the layers are the model's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/models/decoder.h"
#include "engine/ops.h"

namespace rubato::engine {

/// Ops in host memory: Matrix::data of an Accumulator is float*, readable between operations.
class HostOps : public Ops {
 public:
  /// Calls body once for each of 0 .. count-1, possibly on several threads, and returns when all are done.
  virtual void for_each(std::int32_t count, const std::function<void(std::int32_t)>& body) = 0;

  // ---- shapes, as Backend's; by default there are none
  /// tokens_max is the backend's to know.
  [[nodiscard]] virtual ShapeLimits shape_limits() const { return {}; }
  [[nodiscard]] virtual Result<std::unique_ptr<StepShapes>> build_shapes(const policies::StepBuckets& /*buckets*/,
                                                                         const std::stop_token& /*stop*/) const {
    return unexpected(ErrorCode::InvalidArgument, "these operations prepare no shapes");
  }
  [[nodiscard]] virtual std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) {
    CHECK(shapes == nullptr, "these operations prepare no shapes");
    return nullptr;
  }
  /// Announces the operations of a step on so many tokens, of which logits are wanted for some. Returns the bucket whose plan
  /// they follow.
  virtual std::optional<std::int32_t> begin_step(std::int32_t /*tokens*/, std::int32_t /*selected*/) { return std::nullopt; }
  /// After the last operation of a step.
  virtual void end_step() {}

  // ---- a second lane, as Backend's
  /// Operations over the same weights and cache; matrices of one are not the other's. InvalidArgument when there is one already;
  /// ResourceExhausted.
  [[nodiscard]] virtual Result<std::unique_ptr<HostOps>> make_sibling() = 0;
  virtual void use_share(std::int32_t /*percent*/) {}
  [[nodiscard]] virtual DeviceShare share() const { return {}; }

  // ---- blocks of another cache
  /// Whether blocks of source hold what these operations would have written into theirs, given equal models and element types;
  /// InvalidArgument says why not.
  [[nodiscard]] virtual Result<void> check_source(const HostOps& source) const = 0;
  /// check_source has said yes. Any thread, on a block that no operation touches meanwhile.
  virtual void copy_block(const HostOps& source, const BlockCopy& copy) = 0;
  /// The same for a state, of all recurrent layers.
  virtual void copy_state(const HostOps& source, const StateCopy& copy) = 0;
};

class HostBackend final : public Backend {
 public:
  /// options have been checked. May throw std::bad_alloc: the callers are the edge.
  [[nodiscard]] static Result<std::unique_ptr<Backend>> make(const ModelConfig& config, WeightSource& weights,
                                                             const BackendOptions& options, std::unique_ptr<HostOps> ops,
                                                             std::string description);

  [[nodiscard]] Result<void> run(std::span<const StepRow> rows, StepResult& result) override;
  [[nodiscard]] ShapeLimits shape_limits() const override;
  [[nodiscard]] Result<std::unique_ptr<StepShapes>> build_shapes(const policies::StepBuckets& buckets,
                                                                 const std::stop_token& stop) override;
  [[nodiscard]] std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) override;
  [[nodiscard]] Result<std::unique_ptr<Backend>> make_sibling() override;
  void use_share(std::int32_t percent) override { ops_->use_share(percent); }
  [[nodiscard]] DeviceShare share() const override { return ops_->share(); }
  [[nodiscard]] Result<void> copy_blocks(const Backend& source, const CacheCopies& copies,
                                         const std::function<bool()>& allowed) override;
  void capture_logits(bool on) override { capture_logits_ = on; }
  void released(std::span<const BlockId> blocks) override;
  void released_states(std::span<const StateId> states) override;
  void read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) override;
  void read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) override;
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string description() const override { return description_; }

 private:
  HostBackend(const ModelConfig& config, const BackendOptions& options, std::unique_ptr<HostOps> ops, Decoder model,
              std::string description);
  void flatten(std::span<const StepRow> rows);
  /// CHECKs that no row touches a state that another one writes in the same step.
  void check_states_apart(std::span<const StepRow> rows);
  /// From the embedding to the samples of the step that flatten() laid out.
  void compute(StepResult& result);
  [[nodiscard]] Result<void> check_source(const HostBackend& source) const;
  void sample_row(std::int32_t index);

  ModelConfig config_;
  BackendOptions options_;
  std::unique_ptr<HostOps> ops_;
  Decoder model_;
  std::string description_;
  bool capture_logits_ = false;

  // Of the step that is running.
  std::vector<TokenId> tokens_;
  std::vector<SequenceSpan> sequences_;
  std::vector<std::int32_t> selected_;  // index in tokens_ of each sampling row's last token
  std::vector<const StepRow*> sampling_rows_;
  std::vector<std::int32_t> state_writers_;  // by slot: 1 + index of the row that writes it; zeros between steps
  std::vector<char> valid_;                  // vector<bool> cannot be written by several threads
  Matrix logits_;
  StepResult* result_ = nullptr;
  std::function<void(std::int32_t)> sample_row_;  // made once: run() allocates nothing
};

}  // namespace rubato::engine
