// SPDX-License-Identifier: Apache-2.0
// What a priority policy may choose, and nothing more. A policy ranks prefills, says how much of the step they may take and
// whether decodes may be held back; the scheduler keeps every promise of scheduler.h whatever it answers.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>

#include "manifests/settings.h"
#include "policies/scheduler.h"
#include "policies/step_time.h"
#include "policies/time.h"

namespace rubato::policies {

/// A running sequence whose next step yields a token.
struct DecodeView {
  std::int32_t context_tokens = 0;
  TimePoint last_token;
  Duration itl_target{};
};

/// A sequence with tokens to compute before it yields one: waiting, half-prefilled, or preempted.
struct PrefillView {
  std::int32_t begin = 0;      // tokens already computed
  std::int32_t remaining = 0;  // tokens to compute, >= 1
  TimePoint ttft_deadline;
  std::uint64_t waited_steps = 0;  // since it was added
  bool has_sampled = false;        // a preempted stream: a client is watching it stand still
};

/// Everything a policy sees.
struct PolicyView {
  TimePoint now;
  const KnobValues& knobs;
  const StepTimeModel& step_time;
  const StepFeatures& decode_features;    // of all decodes together
  std::span<const DecodeView> decodes;    // every running decode, oldest first
  std::span<const PrefillView> prefills;  // those that could run in this step, in the policy's candidate_order()
};

/// Which decodes must be in the step. Those held back still get what prefills leave of the budget.
enum class DecodeChoice : std::uint8_t { All, OverdueOnly };

/// What happens to the ones behind when the first waiting request does not fit the pool. Bypass is bounded by the prefill gap.
enum class AdmissionChoice : std::uint8_t { InOrder, Bypass };

/// The order in which a policy wants to be shown the candidates.
enum class CandidateOrder : std::uint8_t { ByArrival, ByTtftDeadline };

struct PolicyChoice {
  DecodeChoice decodes = DecodeChoice::All;
  AdmissionChoice admission = AdmissionChoice::InOrder;
  std::optional<TimePoint> step_end;  // prefills are cut so that the step-time model has the step end by then
  // While a shorter prompt competes, one with more than long_prompt_tokens left gets at most long_prompt_cap of a step.
  std::int32_t long_prompt_tokens = std::numeric_limits<std::int32_t>::max();
  std::int32_t long_prompt_cap = std::numeric_limits<std::int32_t>::max();
};

/// Deterministic; allocates nothing in choose(). One instance belongs to one scheduler.
class Policy {
 public:
  virtual ~Policy() = default;
  [[nodiscard]] virtual GapBounds bounds() const = 0;
  [[nodiscard]] virtual CandidateOrder candidate_order() const { return CandidateOrder::ByArrival; }

  /// ranks[i] is for view.prefills[i] and comes in as i; the lowest goes first, equal ones in candidate order.
  virtual PolicyChoice choose(const PolicyView& view, std::span<double> ranks) = 0;
};

/// The list of policies. sequence_capacity: most candidates that one view can hold.
[[nodiscard]] std::unique_ptr<Policy> make_policy(PriorityPolicy policy, std::int32_t sequence_capacity);

std::unique_ptr<Policy> make_deadline(std::int32_t sequence_capacity);
std::unique_ptr<Policy> make_decode_first(std::int32_t sequence_capacity);
std::unique_ptr<Policy> make_prefill_first(std::int32_t sequence_capacity);
std::unique_ptr<Policy> make_shortest_first(std::int32_t sequence_capacity);

/// Rank of a prefill under shortest-first: tokens left, less a credit for its age. The credit needs no cap: who has waited
/// longest has the most of it.
[[nodiscard]] double aged_remaining(const PrefillView& prefill, std::int32_t budget);

/// The cap on long prompts for first-come-first-served policies: half the step, for those that need more than four.
void cap_long_prompts(PolicyChoice& choice, std::int32_t budget);

}  // namespace rubato::policies
