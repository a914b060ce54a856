// SPDX-License-Identifier: Apache-2.0
// See tuned.h.
#include "tests/bench/search/tuned.h"

#include <ctime>
#include <utility>

#include "tuner/load_watch.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato::study {
namespace {

double thread_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(sum), begin_(thread_cpu_seconds()) {}
  ~Stopwatch() { sum_ += thread_cpu_seconds() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& sum_;
  double begin_;
};

tuner::TwinOptions twin_options(const BaselineOptions& options) {
  return {.limits = node_limits(),
          .shapes = true,
          .objectives = options.objectives,
          .seed = options.seed,
          .outstanding_max = outstanding_max};
}

// As a live node knows a request: not how long its answer will be.
tuner::TrafficRequest unanswered(tuner::TrafficRequest request) {
  request.output_tokens = 1;
  request.ended = false;
  return request;
}

class TunedController final : public MeteredController {
 public:
  TunedController(const BaselineOptions& options, bool with_twin)
      : twin_(with_twin ? std::make_unique<tuner::Twin>(twin_options(options)) : nullptr),
        watch_(with_twin ? std::make_unique<tuner::LoadWatch>(tuner::LoadWatchOptions{}) : nullptr),
        tuner_({.space = search_space(options.space),
                .objectives = options.objectives,
                .tuning = tuning_spec(),
                .seed = options.seed,
                .model_key = "study"},
               nullptr, twin_.get(), watch_.get()) {}

  [[nodiscard]] bool listens() const override { return twin_ != nullptr; }
  void on_step(const tuner::StepSample& sample) override {
    const Stopwatch stopwatch(effort_.cpu_seconds);
    twin_->observe(sample);
  }
  void on_arrival(SequenceId id, const tuner::TrafficRequest& request) override {
    twin_->traffic().arrived(id, unanswered(request));
    watch_->arrived(request.arrival, request.prompt_tokens);
  }
  void on_end(SequenceId id, TimePoint now, const tuner::SimulatedRequest& request) override {
    twin_->traffic().ended(id, request.request.output_tokens);
    if (!request.rejected) watch_->ended(now, request.request.output_tokens);
  }

  std::optional<Move> on_tick(const NodeView& view) override {
    if (!watch_) return std::nullopt;
    const Stopwatch stopwatch(effort_.cpu_seconds);
    const Duration before = simulated();
    const std::optional<tuner::LoadAlarm> alarm = watch_->tick(view.now);
    const tuner::Window so_far = view.node.so_far();
    if (alarm) {
      if (std::optional<tuner::Decision> decision = tuner_.on_alarm(*alarm, so_far)) return move(*decision, before);
    }
    if (!view.window_open) return std::nullopt;
    if (std::optional<tuner::Decision> decision = tuner_.on_progress(so_far)) return move(*decision, before);
    return std::nullopt;
  }

  std::optional<Move> on_window(const tuner::Window& window) override {
    const Stopwatch stopwatch(effort_.cpu_seconds);
    const Duration before = simulated();
    return move(tuner_.on_window(window), before);
  }

  [[nodiscard]] Effort effort() const override {
    Effort effort = effort_;
    const tuner::TunerStatus status = tuner_.status();
    effort.simulated = simulated();
    effort.trials = status.trials_total;
    effort.searches = status.searches_total;
    effort.alarms = status.alarms_total;
    effort.rollbacks = status.rollbacks_total;
    effort.retunes = status.twin_retunes_total;
    return effort;
  }

 private:
  [[nodiscard]] Duration simulated() const { return twin_ ? twin_->status().simulated_total : Duration::zero(); }
  [[nodiscard]] std::optional<Move> move(const tuner::Decision& decision, Duration before) const {
    if (!decision.apply) return std::nullopt;
    return Move{.knobs = *decision.apply,
                .thinking = from_seconds(to_seconds(simulated() - before) / twin_speed),
                .reason = decision.reason + (decision.source.empty() ? "" : " " + decision.source)};
  }

  std::unique_ptr<tuner::Twin> twin_;
  std::unique_ptr<tuner::LoadWatch> watch_;
  tuner::Tuner tuner_;
  Effort effort_;
};

class UncalibratedTwin final : public MeteredController {
 public:
  UncalibratedTwin(const BaselineOptions& options, tuner::StepLaws laws)
      : twin_(twin_options(options)), legal_(search_space(options.space)) {
    twin_.adopt(std::move(laws));
  }

  [[nodiscard]] bool listens() const override { return true; }
  void on_arrival(SequenceId id, const tuner::TrafficRequest& request) override {
    twin_.traffic().arrived(id, unanswered(request));
  }
  void on_end(SequenceId id, TimePoint /*now*/, const tuner::SimulatedRequest& request) override {
    twin_.traffic().ended(id, request.request.output_tokens);
  }

  std::optional<Move> on_window(const tuner::Window& window) override {
    const Stopwatch stopwatch(effort_.cpu_seconds);
    const Duration before = twin_.status().simulated_total;
    const TimePoint from = window.end - std::chrono::seconds(60);
    tuner::TrafficPhase phase{.requests = twin_.traffic().between(from, window.end), .begin = from, .end = window.end};
    if (from < TimePoint{}) phase.begin = TimePoint{};
    const std::unique_ptr<tuner::TwinStudy> study = twin_.study({phase});
    if (!study) return std::nullopt;
    const std::optional<tuner::TwinStudy::Best> best = study->best(legal_, current_);
    if (!best) return std::nullopt;
    current_ = best->knobs;
    return Move{.knobs = current_,
                .thinking = from_seconds(to_seconds(twin_.status().simulated_total - before) / twin_speed),
                .reason = "Twin"};
  }

  [[nodiscard]] Effort effort() const override {
    Effort effort = effort_;
    effort.simulated = twin_.status().simulated_total;
    return effort;
  }

 private:
  tuner::Twin twin_;
  tuner::LegalSettings legal_;
  KnobValues current_ = default_settings();
  Effort effort_;
};

class LearnLaws final : public Controller {
 public:
  [[nodiscard]] bool listens() const override { return true; }
  void on_step(const tuner::StepSample& sample) override { laws.observe(sample); }
  tuner::StepLaws laws;
};

}  // namespace

std::unique_ptr<MeteredController> tuner_with_twin(const BaselineOptions& options) {
  return std::make_unique<TunedController>(options, true);
}
std::unique_ptr<MeteredController> plain_tuner(const BaselineOptions& options) {
  return std::make_unique<TunedController>(options, false);
}
std::unique_ptr<MeteredController> uncalibrated_twin(const BaselineOptions& options, tuner::StepLaws laws) {
  return std::make_unique<UncalibratedTwin>(options, std::move(laws));
}

tuner::StepLaws nominal_laws(const Traces& traces, std::uint64_t seed) {
  const Truth truth(TruthKind::Nominal);
  const Duration length = std::chrono::seconds(120);
  LearnLaws learner;
  const auto traffic = make_traffic(traces, *workload_named("mixed"), 4, TimePoint{}, length, seed);
  static_cast<void>(run_node(traffic, truth, learner, {.initial = default_settings(), .seed = seed, .horizon = length}));
  return std::move(learner.laws);
}

}  // namespace rubato::study
