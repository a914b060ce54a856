// SPDX-License-Identifier: Apache-2.0
// Deadline: each step takes the largest chunk with which, by the step-time model, no running decode misses its ITL deadline.
// Prefills go by TTFT deadline; those that can no longer make theirs yield to the largest set that can (Moore and Hodgson 1968).
#include <algorithm>
#include <vector>

#include "policies/policy.h"

namespace rubato::policies {
namespace {

// A request has met its ITL target when 99 of its 100 gaps have. So steps are planned to end three standard deviations of what
// the model errs by before the targets, whatever the margin says; at most by a quarter each, where the model knows nothing yet.
constexpr double sigmas_kept = 3.0;
constexpr double largest_sigma = 0.25;

class Deadline final : public Policy {
 public:
  explicit Deadline(std::int32_t sequence_capacity) { kept_.reserve(static_cast<std::size_t>(sequence_capacity)); }

  [[nodiscard]] GapBounds bounds() const override { return {.decode_steps = 0, .prefill_steps = 8}; }
  [[nodiscard]] CandidateOrder candidate_order() const override { return CandidateOrder::ByTtftDeadline; }

  PolicyChoice choose(const PolicyView& view, std::span<double> ranks) override {
    PolicyChoice choice;
    choice.admission = AdmissionChoice::Bypass;
    // Without one observation the model only guesses: serve by deadline and let the first step teach it.
    if (view.step_time.observation_count() == 0) return choice;
    const Duration decode_time = view.step_time.predict(view.decode_features);
    if (!view.decodes.empty()) choice.step_end = step_end(view, decode_time);
    triage(view, PrefillSpeed(view, decode_time, choice.step_end), ranks);
    return choice;
  }

 private:
  // How long prefill work takes by the clock: a step of the expected length also carries the decodes.
  struct PrefillSpeed {
    PrefillSpeed(const PolicyView& view, Duration decode_time, const std::optional<TimePoint>& step_end) {
      const StepTimeModel::Vector coefficients = view.step_time.coefficients();
      seconds_per_token = coefficients[1];
      seconds_per_pair = coefficients[2];
      const std::int32_t room = std::max(view.knobs.max_num_batched_tokens - view.decode_features.tokens, min_prefill_quantum);
      StepFeatures full = view.decode_features;
      full.add_chunk(0, room);
      double step = to_seconds(view.step_time.predict(full));
      if (step_end) step = std::min(step, to_seconds(*step_end - view.now));
      // Seconds of a step that prefill gets; at least a tenth, so that a passing squeeze does not make every deadline look lost.
      const double fixed = view.decodes.empty() ? coefficients[0] : to_seconds(decode_time);
      const double share = std::max(step - fixed, step * 0.1);
      slowdown = share > 0 ? std::max(step / share, 1.0) : 1.0;
      chunk = room;
      seconds_per_step = step;
    }

    [[nodiscard]] double seconds(const PrefillView& prefill) const {
      const double count = prefill.remaining;
      // The sum of count * (begin + count) over its chunks.
      const double pairs = count * (prefill.begin + 0.5 * (count + std::min<double>(chunk, count)));
      return slowdown * (count * seconds_per_token + pairs * seconds_per_pair);
    }

    double seconds_per_token = 0;
    double seconds_per_pair = 0;
    double slowdown = 1;
    double chunk = 0;
    double seconds_per_step = 0;
  };

  // When this step must end. Where decodes alone overrun the margin, up to the bare targets; where they overrun even those, the
  // miss is not ours to prevent and prefills get a quarter of the tightest target, so that both go on.
  static TimePoint step_end(const PolicyView& view, Duration decode_time) {
    TimePoint with_margin = TimePoint::max();
    TimePoint bare = TimePoint::max();
    Duration tightest = Duration::max();
    for (const DecodeView& decode : view.decodes) {
      with_margin = std::min(with_margin, decode.last_token + decode.itl_target / 100 * (100 - view.knobs.deadline_margin));
      bare = std::min(bare, decode.last_token + decode.itl_target);
      tightest = std::min(tightest, decode.itl_target);
    }
    if (bare > view.now) {
      const double scatter = sigmas_kept * std::min(view.step_time.relative_overrun(), largest_sigma);
      with_margin = std::min(with_margin, view.now + from_seconds(to_seconds(bare - view.now) / (1.0 + scatter)));
    }
    const TimePoint decodes_done = view.now + decode_time;
    if (decodes_done <= with_margin) return with_margin;
    if (decodes_done <= bare) return bare;
    return decodes_done + tightest / 4;
  }

  struct Kept {
    double seconds = 0;
    std::int32_t candidate = 0;
    friend bool operator<(const Kept& left, const Kept& right) {
      return left.seconds != right.seconds ? left.seconds < right.seconds : left.candidate < right.candidate;
    }
  };

  // Ranks come in as positions by TTFT deadline. Walks them, adding up work; when one would be late, the largest kept so far
  // (itself included) goes behind all that are kept, ordered there by aged remaining work. Tokens come out at the ends of steps,
  // so that work must be done one step before its deadline.
  void triage(const PolicyView& view, const PrefillSpeed& speed, std::span<double> ranks) {
    constexpr double behind = 1e15;
    kept_.clear();
    double total = 0;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const PrefillView& prefill = view.prefills[i];
      const double seconds = speed.seconds(prefill);
      if (prefill.has_sampled) {  // a stream that stands still comes before all that have not begun
        ranks[i] -= behind;
        total += seconds;
        continue;
      }
      const double allowed = to_seconds(prefill.ttft_deadline - view.now) - speed.seconds_per_step;
      if (seconds > allowed) {  // hopeless even alone
        ranks[i] = behind + aged_remaining(prefill, view.knobs.max_num_batched_tokens);
        continue;
      }
      total += seconds;
      kept_.push_back({.seconds = seconds, .candidate = static_cast<std::int32_t>(i)});
      std::push_heap(kept_.begin(), kept_.end());
      if (total <= allowed) continue;
      const Kept largest = kept_.front();
      std::pop_heap(kept_.begin(), kept_.end());
      kept_.pop_back();
      total -= largest.seconds;
      const auto late = static_cast<std::size_t>(largest.candidate);
      ranks[late] = behind + aged_remaining(view.prefills[late], view.knobs.max_num_batched_tokens);
    }
  }

  std::vector<Kept> kept_;  // heap, largest first
};

}  // namespace

std::unique_ptr<Policy> make_deadline(std::int32_t sequence_capacity) {
  return std::make_unique<Deadline>(sequence_capacity);
}

}  // namespace rubato::policies
