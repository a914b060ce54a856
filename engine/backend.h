// SPDX-License-Identifier: Apache-2.0
// What executes steps. A backend owns a device's memory: weights, KV blocks and scratch, all taken when it is made. It is handed
// one ragged batch per step and returns sampled tokens; it knows no queue, policy or client. CPU here, CUDA beside it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "engine/sampling.h"
#include "engine/tokens.h"
#include "manifests/check.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "policies/ids.h"
#include "policies/step_shapes.h"
#include "policies/time.h"

namespace rubato::engine {

struct BackendOptions {
  DataType dtype = DataType::Float32;    // of weights and KV cache
  std::int32_t block_count = 0;          // KV blocks of kv_block_tokens tokens
  std::int32_t state_count = 0;          // slots of recurrent state; 0 if and only if the model has no recurrent layer
  std::int32_t max_tokens_per_step = 0;  // largest budget any settings may choose
  std::int32_t max_rows = 0;             // largest number of rows in a step
  std::int32_t max_model_len = 0;
  std::int32_t threads = 1;
  std::filesystem::path
      cache_folder{};   // a writable folder for what set-up finds out about the device; empty: find it out each time
  bool poison = false;  // fill fresh and freed KV with NaN, so that a read of unwritten memory shows
  std::function<TimePoint()>
      now{};  // steady, cheap, any thread: by it two lanes take turns on a device. Empty: they count tasks instead
};

/// One sequence's share of a step.
struct StepRow {
  std::int32_t position = 0;                // absolute position of tokens[0]
  std::span<const TokenId> tokens;          // >= 1
  std::span<const BlockId> blocks;          // block table covering position + tokens.size()
  const SamplingState* sampling = nullptr;  // null: the row samples nothing
  std::optional<StateUse> state{};          // if and only if the model has recurrent layers
};

/// Results, reused from step to step. samples[i] belongs to the i-th row that samples; samples may be longer than that, because
/// it keeps what larger steps allocated. sample_valid has exactly one entry per sampling row.
struct StepResult {
  std::vector<Sample> samples;
  std::vector<bool> sample_valid;      // false: that row's logits were not finite; the request fails alone
  std::vector<float> logits;           // (sampling rows, vocabulary), before sampling; only when capture_logits is on
  std::optional<std::int32_t> bucket;  // tokens of the bucket that the step ran in; none: it ran eagerly
  std::int32_t padding_tokens = 0;     // computed beyond the step's own tokens to fill its bucket
};

/// What a backend can prepare for; bounds for whoever chooses the buckets.
struct ShapeLimits {
  std::int32_t count_max = 0;     // buckets in one set, from the memory and the time that each costs: 16 (enough for any decode
                                  // range) or more; 0: every step runs eagerly
  std::int32_t tokens_max = 0;    // largest bucket
  std::int32_t token_tile = 16;   // buckets above the decode range are multiples of it
  std::int32_t eager_tokens = 0;  // what a step loses by running eagerly, in tokens of padding that would cost as much
  bool per_share = false;         // a set is made for the share of the device that the backend has while it is built
};

/// A set of prepared buckets of one backend (captured graphs, tile plans). Immutable and opaque: made by build_shapes, used by
/// run(), destroyed by whoever holds it, before its backend. Destroying it may wait until the device has finished the last step
/// that used it, and frees memory: never on the lane's thread.
class StepShapes {
 public:
  virtual ~StepShapes() = default;
  [[nodiscard]] virtual const policies::StepBuckets& buckets() const = 0;
  /// Memory that this set holds on host and device.
  [[nodiscard]] virtual std::int64_t bytes() const = 0;
};

/// What is copied from one pool to another.
struct CacheCopies {
  std::span<const BlockCopy> blocks{};
  std::optional<StateCopy> state{};
};

/// How much of a device two backends on it get. Percent, because that is what a manifest speaks of; a device that can only be
/// split in steps takes the nearest.
struct DeviceShare {
  std::int32_t asked_percent = 100;
  std::int32_t given_percent = 100;
};

/// Thread: the lane's, but for build_shapes(), copy_blocks() and use_share(). run() allocates nothing after the first full-sized
/// step.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Executes the step. An error means the device broke: nothing was computed and the backend stays broken.
  [[nodiscard]] virtual Result<void> run(std::span<const StepRow> rows, StepResult& result) = 0;

  /// The same for as long as the backend lives. The default: no shapes.
  [[nodiscard]] virtual ShapeLimits shape_limits() const { return {}; }

  /// Prepares a set for use_shapes(). Called by one thread at a time, not the lane's, while run() and use_shapes() go on, and
  /// delays neither: it shares no lock, stream or scratch with a step. buckets has 1..count_max entries, the last at most
  /// tokens_max. At most one other set lives meanwhile, the one in use. Errors leave the backend as it was: Cancelled (stop was
  /// requested; looked at between two buckets), ResourceExhausted.
  [[nodiscard]] virtual Result<std::unique_ptr<StepShapes>> build_shapes(const policies::StepBuckets& /*buckets*/,
                                                                         const std::stop_token& /*stop*/) {
    return unexpected(ErrorCode::InvalidArgument, "this backend prepares no shapes");
  }

  /// Between two steps: steps run in shapes (its own build_shapes made them; null: eagerly) from the next run() on. It
  /// neither waits, allocates nor frees, and returns the set in use until now (null: none), which the caller lets die on another
  /// thread. Steps in flight may still use that one; its destructor sees to it. Which bucket a step runs in, or none, never
  /// changes a bit of its results. The default accepts null alone.
  [[nodiscard]] virtual std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) {
    CHECK(shapes == nullptr, "this backend prepares no shapes");
    return nullptr;
  }

  /// A second backend on the same device: the same weights and KV blocks, with a queue, scratch and shapes of its own, so that
  /// two lanes can be in a step at once. At any time a block is written by one of them at most, and not read by the other
  /// meanwhile; what one wrote is seen by the other once run() has returned. Which of them runs a row never changes a bit. They
  /// may be destroyed in any order. Called at most once, before the first step. InvalidArgument by default: one lane only;
  /// ResourceExhausted.
  [[nodiscard]] virtual Result<std::unique_ptr<Backend>> make_sibling() {
    return unexpected(ErrorCode::InvalidArgument, "this backend runs one lane on a device");
  }

  /// How much of the device steps of this backend get while the sibling is in a step too, 1..99 percent; the sibling gets the
  /// rest. A step that runs while the sibling has none gets the whole device. Any thread; waits for nothing; what has been
  /// queued keeps its share. Equal shares until the first call. Never changes a bit. The default does nothing.
  virtual void use_share(std::int32_t /*percent*/) {}
  /// Of this backend, as set last. 100 percent of both without a sibling.
  [[nodiscard]] virtual DeviceShare share() const { return {}; }

  /// Copies blocks, then a state, of another backend's pool into this one's: same model and dtype, on this device or another one
  /// of the same kind. Called by one thread at a time, none of the lanes', while steps of both go on; no step touches the blocks
  /// meanwhile, but steps may read those copied from. Returns when every copy can be read by the next run(). allowed is asked
  /// before each block and the state: once it says no, nothing more is written and the answer is Cancelled. Other errors:
  /// DeviceLost; by default InvalidArgument, this backend takes in none.
  [[nodiscard]] virtual Result<void> copy_blocks(const Backend& /*source*/, const CacheCopies& /*copies*/,
                                                 const std::function<bool()>& /*allowed*/) {
    return unexpected(ErrorCode::InvalidArgument, "this backend takes no blocks from another");
  }

  /// Tests and the exactness checker compare bits of logits; off by default.
  virtual void capture_logits(bool on) = 0;

  /// Tells the backend that blocks' contents are dead. Does something only with options.poison, which is for tests that run no
  /// step of this backend meanwhile; returns when it is done.
  virtual void released(std::span<const BlockId> blocks) = 0;
  /// The same for states.
  virtual void released_states(std::span<const StateId> /*states*/) {}

  /// For tests and the exactness checker, as Ops': what one attention layer's cache holds of one token, and one recurrent layer's
  /// part of a state. Appended to out; equal contents give equal bytes. No step runs meanwhile. By default nothing.
  virtual void read_token(std::int32_t /*layer*/, BlockId /*block*/, std::int32_t /*slot*/, std::vector<std::byte>& /*out*/) {}
  virtual void read_state(std::int32_t /*layer*/, StateId /*state*/, std::vector<std::byte>& /*out*/) {}

  [[nodiscard]] virtual const ModelConfig& config() const = 0;
  /// Shown in status and metrics: `cpu avx512_bf16, 2 threads`.
  [[nodiscard]] virtual std::string description() const = 0;
};

/// InvalidArgument when an option is out of range or config's shapes contradict each other.
[[nodiscard]] Result<void> check_backend_options(const ModelConfig& config, const BackendOptions& options);

/// CHECKs that a step is one that every backend can run: rows, tokens, positions and blocks within what options and config allow.
void check_step(const ModelConfig& config, const BackendOptions& options, std::span<const StepRow> rows);

/// What a pool is made for.
struct CacheRequest {
  std::int64_t bytes = 0;          // for blocks and states together
  std::int32_t max_model_len = 0;  // tokens
  std::int32_t sequences = 0;      // that may run at once
  PrefixCachingSpec prefix_caching{.enabled = false};
};

/// What it holds.
struct CacheSize {
  std::int32_t block_count = 0;
  std::int32_t state_count = 0;  // 0: no recurrent layers
  std::int64_t block_bytes = 0;  // of one block; 0: no attention layers, so that blocks only count tokens
  std::int64_t state_bytes = 0;  // of one state
};

/// The pool's size for a byte budget; the one function that start-up, status and checks use. Attention alone: all of it are
/// blocks. With recurrent layers: first the blocks of one longest sequence, then a state for each sequence that may run at once
/// (as many as the budget holds), then, in one proportion, blocks and (with prefix caching) a snapshot for each snapshot_tokens
/// tokens of them. Without attention blocks cost nothing: there are enough for running sequences, and with prefix caching some to
/// remember prefixes by, a million and a half at most.
[[nodiscard]] CacheSize cache_size(const ModelConfig& config, DataType dtype, const CacheRequest& request);

/// Bytes of one step's scratch plus weights, so that start-up can refuse before the allocation fails.
[[nodiscard]] std::int64_t weight_bytes(const ModelConfig& config, DataType dtype);

}  // namespace rubato::engine
