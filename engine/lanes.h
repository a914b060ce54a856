// SPDX-License-Identifier: Apache-2.0
// The lanes of a node: one lane group deciding, one backend per lane executing. It turns requests into steps and steps into token
// events. It has no thread, no lock and no clock of its own: the daemon's lane threads call it with the time, a test with virtual
// time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/prefix_hash.h"
#include "engine/sampling.h"
#include "manifests/result.h"
#include "manifests/settings.h"
#include "policies/lane_group.h"

namespace rubato::engine {

/// One generation. A request for n choices is n of these with seeds of their own.
struct Request {
  SequenceId id;
  std::vector<TokenId> prompt;  // >= 1 token, each below the vocabulary
  SamplingParameters sampling;
  TimePoint arrival;
  Duration ttft_target{};
  Duration itl_target{};
  std::string cache_salt{};  // requests with different ones share nothing of the prefix cache
};

enum class FinishReason : std::uint8_t {
  Stop,    // an end token or a stop token id; that token is not part of the text
  Length,  // max_new_tokens or the effective limit reached
  Failed,  // its logits were not finite, or a device broke: error says which
};

/// What a step did for one sequence. Every admitted request ends with exactly one event that has a finish, unless it was
/// cancelled.
struct TokenEvent {
  SequenceId id;
  std::int32_t index = 0;        // 0-based number of the token within the output
  std::optional<Sample> sample;  // none only on Failed
  std::optional<FinishReason> finish;
  Error error;                     // on Failed
  TimePoint time;                  // when the step ended
  TimePoint scheduled;             // when the first step with a row of this sequence began (queue time ends there)
  std::int32_t cached_tokens = 0;  // of its prompt: came from the prefix cache when it was first admitted
};

/// One executed step, for metrics, the step log and the tuner.
struct StepRecord {
  LaneIndex lane;
  policies::LaneRole role = policies::LaneRole::Mixed;
  std::uint64_t step_number = 0;  // of the lane
  std::uint64_t settings_number = 0;
  policies::StepFeatures features;
  std::int32_t sampled = 0;
  std::int32_t preempted = 0;
  std::optional<std::int32_t> bucket;  // tokens of the shape that it ran in; none: eagerly
  std::int32_t padding_tokens = 0;
  std::int32_t share_percent = 100;  // of its device, for most of its time: all where the device's other lane ran no step then
  TimePoint begin;
  TimePoint end;
  Duration planning{};  // scheduler and bookkeeping alone
  Duration predicted{};
};

struct LanesOptions {
  policies::LaneGroupLimits limits;
  Settings initial;
  PrefixKey prefix_key{};  // of the prefix cache, where the limits have one; drawn anew at each start
};

/// Blocks, and perhaps a state, to be copied between two lanes' backends. Owned by whoever carries it out.
struct CopyJob {
  std::uint64_t epoch = 0;
  Backend* from = nullptr;
  Backend* to = nullptr;
  std::vector<BlockCopy> blocks;
  std::optional<StateCopy> state{};
  std::shared_ptr<const std::atomic<bool>> wanted;

  /// Carries it out; takes as long as the copy. Any thread that runs no step.
  [[nodiscard]] Result<void> run() const;
};

/// Not thread-safe, but a lane's run_step() and a CopyJob's run() may overlap with anything except that lane's own begin_step()
/// and end_step(): its callers hold one lock round all other calls and let go of it for those two.
class Lanes {
 public:
  /// One backend per lane; they outlive the lanes. Where one device has two lanes, the second is the first one's sibling.
  Lanes(std::vector<Backend*> backends, const LanesOptions& options);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  /// InvalidArgument: a token outside the vocabulary, an empty prompt, prompt + max_new_tokens above effective_max_len() (the
  /// message names the limit and the field is `max_tokens` or `prompt`). ResourceExhausted: the waiting queue is full.
  Result<void> add(Request request);
  /// Frees everything at once, or at the end of the step that it has a row in; no event follows. False when unknown or already
  /// ended.
  bool cancel(SequenceId id);
  /// Current for each lane from its next step on; the devices' shares at once.
  void apply(const Settings& settings, TimePoint now);

  /// Plans the lane's next step. False: there is nothing to do for it now (see LaneGroup::plan).
  [[nodiscard]] bool begin_step(LaneIndex lane, TimePoint now);
  /// Runs what begin_step() planned.
  void run_step(LaneIndex lane, TimePoint now);
  /// Books it. Once a device has failed every sequence of every lane gets a Failed event, here, and failure() is set.
  void end_step(LaneIndex lane, TimePoint now);

  /// Of the lane's last step; overwritten by its next.
  [[nodiscard]] std::span<const TokenEvent> events(LaneIndex lane) const;
  [[nodiscard]] const StepRecord& record(LaneIndex lane) const;

  /// The next copy between pools, oldest first. Every job that was handed out is answered with copied().
  [[nodiscard]] std::optional<CopyJob> next_copy(TimePoint now);
  void copied(const CopyJob& job, const Result<void>& outcome, TimePoint now);
  /// Gives up copies without an answer. Call it about as often as a tenth of the lease.
  void expire(TimePoint now);

  [[nodiscard]] const std::optional<Error>& failure() const;
  [[nodiscard]] const policies::LaneGroup& group() const;
  [[nodiscard]] std::int32_t lane_count() const;
  [[nodiscard]] Backend& backend(LaneIndex lane);
  void check_integrity() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::engine
