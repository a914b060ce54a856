// SPDX-License-Identifier: Apache-2.0
// See controllers.h.
#include "tests/bench/search/controllers.h"

#include <algorithm>
#include <map>
#include <utility>

namespace rubato::study {
namespace {

class Follow final : public Controller {
 public:
  explicit Follow(std::vector<Planned> plan) : plan_(std::move(plan)) {}
  std::optional<Move> on_tick(const NodeView& view) override {
    std::optional<Move> move;
    for (; next_ < plan_.size() && plan_[next_].at <= view.now; ++next_) {
      move = Move{.knobs = plan_[next_].knobs, .reason = "Phase"};
    }
    return move;
  }

 private:
  std::vector<Planned> plan_;
  std::size_t next_ = 0;
};

// What random search and hill climbing share: evidence of a window, and when there is nothing to do.
struct Judge {
  ObjectivesSpec objectives;
  [[nodiscard]] tuner::Evidence evidence(const tuner::Window& window) const { return tuner::evidence_of(window, objectives); }
  [[nodiscard]] bool met(const tuner::Evidence& evidence) const {
    return evidence.judged > 0 && evidence.attainment() * 100 >= objectives.attainment;
  }
};

class RandomSearch final : public Controller {
 public:
  explicit RandomSearch(const BaselineOptions& options)
      : judge_{options.objectives}, grid_(settings_grid(options.space, Grid::Fine)), draws_(options.seed) {}

  std::optional<Move> on_window(const tuner::Window& window) override {
    const tuner::Evidence evidence = judge_.evidence(window);
    const double value = tuner::score(evidence).value;
    if (!best_value_ || value > *best_value_) {
      best_value_ = value;
      best_ = current_;
    }
    if (trials_ >= trials_max || judge_.met(evidence)) {
      if (trials_ >= trials_max) current_ = best_;
      return Move{.knobs = current_, .reason = "Best"};
    }
    ++trials_;
    current_ = grid_[draws_.below(grid_.size())];
    return Move{.knobs = current_, .reason = "Trial"};
  }

 private:
  static constexpr int trials_max = 20;
  Judge judge_;
  std::vector<KnobValues> grid_;
  Draws draws_;
  KnobValues current_ = default_settings();
  KnobValues best_ = default_settings();
  std::optional<double> best_value_;
  int trials_ = 0;
};

class HillClimbing final : public Controller {
 public:
  explicit HillClimbing(const BaselineOptions& options) : judge_{options.objectives}, legal_(search_space(options.space)) {}

  std::optional<Move> on_window(const tuner::Window& window) override {
    const tuner::Evidence evidence = judge_.evidence(window);
    const double value = tuner::score(evidence).value;
    if (!best_value_ || value > *best_value_ || current_ == best_) {
      if (current_ != best_) neighbour_ = 0;
      best_value_ = value;
      best_ = current_;
    }
    if (judge_.met(evidence)) return std::nullopt;
    for (int tries = 0; tries < neighbours; ++tries) {
      current_ = legal_.canonical(neighbour(neighbour_++ % neighbours));
      if (!(current_ == best_)) return Move{.knobs = current_, .reason = "Trial"};
    }
    return std::nullopt;
  }

 private:
  static constexpr int neighbours = 6;
  [[nodiscard]] KnobValues neighbour(int which) const {
    KnobValues knobs = best_;
    switch (which) {
      case 0:
        knobs.max_num_batched_tokens /= 2;
        break;
      case 1:
        knobs.max_num_batched_tokens *= 2;
        break;
      case 2:
        knobs.max_num_seqs /= 2;
        break;
      case 3:
        knobs.max_num_seqs *= 2;
        break;
      default: {
        const std::vector<PriorityPolicy>& choices = legal_.space().knobs.priority_policy.choices;
        const auto at =
            static_cast<std::size_t>(std::find(choices.begin(), choices.end(), knobs.priority_policy) - choices.begin());
        knobs.priority_policy = choices[(at + (which == 4 ? 1 : choices.size() - 1)) % choices.size()];
      }
    }
    return knobs;
  }

  Judge judge_;
  tuner::LegalSettings legal_;
  KnobValues current_ = default_settings();
  KnobValues best_ = default_settings();
  std::optional<double> best_value_;
  int neighbour_ = 0;
};

class Aimd final : public Controller {
 public:
  explicit Aimd(const BaselineOptions& options) : objectives_(options.objectives), bounds_(search_space(options.space).knobs) {}

  std::optional<Move> on_window(const tuner::Window& window) override {
    std::int32_t& budget = current_.max_num_batched_tokens;
    budget = window.itl_p99 > objectives_.itl ? budget / 2 : budget + 256;
    const std::int32_t least = std::max(bounds_.max_num_batched_tokens.min, current_.max_num_seqs + min_prefill_quantum);
    budget = std::clamp(budget, least, bounds_.max_num_batched_tokens.max);
    return Move{.knobs = current_, .reason = "Aimd"};
  }

 private:
  ObjectivesSpec objectives_;
  KnobsSpec bounds_;
  KnobValues current_ = default_settings();
};

class TwoValues final : public Controller {
 public:
  [[nodiscard]] Duration tick_period() const override { return std::chrono::milliseconds(50); }
  std::optional<Move> on_tick(const NodeView& view) override {
    const policies::SchedulerCounts counts = view.node.group().totals();
    const bool decodes = counts.running > counts.prefilling;
    const bool few = counts.prefilling + counts.waiting <= 2;
    KnobValues knobs = default_settings();
    knobs.max_num_batched_tokens = decodes && few ? 512 : 2048;
    if (knobs == view.node.knobs()) return std::nullopt;
    return Move{.knobs = knobs, .reason = "Rule"};
  }
};

}  // namespace

std::vector<KnobValues> settings_grid(Space space, Grid grid) {
  const bool fine = grid == Grid::Fine;
  const std::vector<std::int32_t> budgets = fine ? std::vector<std::int32_t>{256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192}
                                                 : std::vector<std::int32_t>{256, 512, 768, 1024, 1536, 2048, 4096};
  const std::vector<std::int32_t> sequences =
      fine ? std::vector<std::int32_t>{32, 64, 128, 256, 512} : std::vector<std::int32_t>{64, 128, 256, 512};
  std::vector<KnobValues> found;
  const auto add = [&](PriorityPolicy policy, std::int32_t margin) {
    for (const std::int32_t budget : budgets) {
      for (const std::int32_t count : sequences) {
        if (budget < count + min_prefill_quantum) continue;
        KnobValues knobs = default_settings();
        knobs.max_num_batched_tokens = budget;
        knobs.max_num_seqs = count;
        knobs.priority_policy = policy;
        knobs.deadline_margin = margin;
        found.push_back(knobs);
      }
    }
  };
  const std::int32_t margin = default_settings().deadline_margin;
  if (space == Space::Full) {
    for (const std::int32_t kept : {10, 20, 40}) add(PriorityPolicy::Deadline, kept);
  }
  add(PriorityPolicy::ShortestFirst, margin);
  add(PriorityPolicy::DecodeFirst, margin);
  if (fine) add(PriorityPolicy::PrefillFirst, margin);
  return found;
}

std::unique_ptr<Controller> follow(std::vector<Planned> plan) {
  return std::make_unique<Follow>(std::move(plan));
}
std::unique_ptr<Controller> random_search(const BaselineOptions& options) {
  return std::make_unique<RandomSearch>(options);
}
std::unique_ptr<Controller> hill_climbing(const BaselineOptions& options) {
  return std::make_unique<HillClimbing>(options);
}
std::unique_ptr<Controller> aimd(const BaselineOptions& options) {
  return std::make_unique<Aimd>(options);
}
std::unique_ptr<Controller> two_values() {
  return std::make_unique<TwoValues>();
}

}  // namespace rubato::study
