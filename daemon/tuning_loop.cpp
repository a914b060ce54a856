// SPDX-License-Identifier: Apache-2.0
#include "daemon/tuning_loop.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "daemon/calibration_file.h"

namespace rubato {
namespace {

constexpr std::uint64_t tuner_seed = 1;  // fixed: the same traffic gives the same decisions
constexpr int window_stretch_max = 4;    // a window that lacks requests is closed after this many lengths all the same

tuner::LoadWatchOptions watch_options(const TuningSpec& tuning) {
  return {.false_alarms_per_day = static_cast<double>(tuning.false_alarms_per_day)};
}

}  // namespace

TuningLoop::TuningLoop(control::TuningTarget& target, LatencyWindows& windows, TwinFeed& feed, tuner::Journal* journal,
                       TuningLoopOptions options, TimePoint now)
    : target_(target),
      windows_(windows),
      feed_(feed),
      options_(std::move(options)),
      twin_(options_.twin),
      pace_(pace_hooks(), feed.late_steps()),
      tuner_(
          [this] {
            const control::TuningInput input = target_.tuning_input();
            follow_input(input);
            return options_for(input);
          }(),
          journal, &twin_, &*watch_),
      watched_until_(now),
      changed_(now),
      settled_at_(now + tuning_.settle),
      opened_(now),
      looked_at_(now),
      calibration_kept_at_(now) {
  twin_.set_go_on([this] { return pace_.go_on(); });
  load_calibration();
  report(std::nullopt);
}

tuner::TunerOptions TuningLoop::options_for(const control::TuningInput& input) const {
  return tuner::TunerOptions{.space = input.space,
                             .objectives = input.objectives,
                             .tuning = input.tuning,
                             .seed = tuner_seed,
                             .model_key = options_.model_key,
                             .wall_at_zero = options_.wall_at_zero};
}

TwinPaceHooks TuningLoop::pace_hooks() {
  TwinPaceHooks hooks = options_.pace;
  hooks.superseded = [this] {
    return target_.tuning_input().revision != revision_ || (options_.unavailable && !options_.unavailable().empty());
  };
  return hooks;
}

void TuningLoop::follow_input(const control::TuningInput& input) {
  // How calm the watch is follows from its thresholds, and what it has seen so far was measured by others.
  if (!watch_ || input.tuning.false_alarms_per_day != tuning_.false_alarms_per_day) watch_.emplace(watch_options(input.tuning));
  revision_ = input.revision;
  tuning_ = input.tuning;
  twin_.set_enabled(input.tuning.enabled && input.tuning.twin.enabled);
  twin_.set_objectives(input.objectives);
  pace_.set_core_percent(input.tuning.twin.core_percent);
  feed_.late_steps().set_itl_target(input.objectives.itl);
}

void TuningLoop::tick(TimePoint now) {
  pace_.begin();
  take_feed(now);
  decide(now);
  pace_.end();
  if (const auto why = pace_.stopped()) spdlog::debug("tuning: the twin was cut short: {}", to_string(*why));
  if (now - calibration_kept_at_ >= calibration_interval) {
    calibration_kept_at_ = now;
    save_calibration();
  }
}

void TuningLoop::stop(TimePoint now) {
  take_feed(now);
  save_calibration();
}

void TuningLoop::take_feed(TimePoint now) {
  feed_.drain(batch_);
  for (const Arrival& arrival : batch_.arrivals) {
    twin_.traffic().arrived(arrival.id, {.arrival = arrival.time,
                                         .prompt_tokens = arrival.prompt_tokens,
                                         .output_tokens = 1,
                                         .max_new_tokens = arrival.max_new_tokens,
                                         .ttft_target = arrival.ttft_target,
                                         .itl_target = arrival.itl_target});
    load_events_.push_back({.time = arrival.time, .kind = LoadEvent::Kind::Arrived, .tokens = arrival.prompt_tokens});
  }
  for (const FeedStart& start : batch_.starts) twin_.traffic().started(start.id, start.cached_tokens);
  for (const FeedEnd& end : batch_.ends) {
    twin_.traffic().ended(end.id, end.output_tokens);
    // One that its client left before the first token tells of no output length.
    if (end.output_tokens > 0) {
      load_events_.push_back({.time = end.time, .kind = LoadEvent::Kind::Ended, .tokens = end.output_tokens});
    }
  }
  for (const tuner::StepSample& step : batch_.steps) twin_.observe(step);
  tell_watch(now);
}

void TuningLoop::tell_watch(TimePoint now) {
  std::stable_sort(load_events_.begin(), load_events_.end(),
                   [](const LoadEvent& left, const LoadEvent& right) { return left.time < right.time; });
  const TimePoint until = std::max(watched_until_, now - watch_lag);
  auto next = load_events_.begin();
  for (; next != load_events_.end() && next->time <= until; ++next) {
    const TimePoint time = std::max(next->time, watched_until_);
    if (next->kind == LoadEvent::Kind::Arrived) {
      watch_->arrived(time, next->tokens);
    } else {
      watch_->ended(time, next->tokens);
    }
    watched_until_ = time;
  }
  load_events_.erase(load_events_.begin(), next);
  watched_until_ = until;
  if (auto alarm = watch_->tick(until)) alarm_ = std::move(alarm);
}

void TuningLoop::decide(TimePoint now) {
  const control::TuningInput input = target_.tuning_input();
  if (input.revision != revision_) {
    follow_input(input);
    settle(now);  // what was measured so far belongs to other targets or other values
    act(tuner_.reconfigure(options_for(input), now), now);
    report(std::nullopt);
  }
  if (!follow_serving(now)) return;
  if (answer_alarm(now)) return;
  if (!ready_to_measure(now)) return;
  if (look_into_window(now)) return;
  close_window(now);
}

/// False while there is nothing to be learnt: what clients get during a drain, or from a broken device, is no setting's doing.
bool TuningLoop::follow_serving(TimePoint now) {
  const std::string why = options_.unavailable ? options_.unavailable() : std::string();
  if (why.empty() && frozen_) {
    frozen_ = false;
    tuner_.thaw();
    settle(now);
    report(std::nullopt);
  } else if (!why.empty() && !frozen_) {
    frozen_ = true;
    spdlog::info("tuning: frozen: {}", why);
    act(tuner_.freeze(why, now), now);
    report(std::nullopt);
  }
  if (frozen_) alarm_.reset();
  return !frozen_;
}

/// True when the answer changed what the loop does: the rest is due at the next tick, with a fresh time.
bool TuningLoop::answer_alarm(TimePoint now) {
  if (!alarm_) return false;
  const tuner::LoadAlarm alarm = *std::exchange(alarm_, std::nullopt);
  const std::optional<tuner::Decision> decision = tuner_.on_alarm(alarm, windows_.so_far(now));
  if (decision) act_early(*decision, now);
  report(std::nullopt);
  return true;
}

bool TuningLoop::ready_to_measure(TimePoint now) {
  if (settled_at_) {
    if (now < *settled_at_) return false;
    windows_.open(now, changed_);
    opened_ = now;
    looked_at_ = now;
    settled_at_.reset();
    return false;
  }
  if (!windows_.settings_changed()) return true;
  settle(now);  // under an open window, by a person: it tells of neither settings
  return false;
}

bool TuningLoop::look_into_window(TimePoint now) {
  if (now - looked_at_ < progress_interval) return false;
  looked_at_ = now;
  const std::optional<tuner::Decision> decision = tuner_.on_progress(windows_.so_far(now));
  if (!decision) return false;
  act_early(*decision, now);
  report(std::nullopt);
  return true;
}

void TuningLoop::close_window(TimePoint now) {
  const Duration open_for = now - opened_;
  if (open_for < tuning_.window) return;
  if (windows_.judged_so_far() < tuning_.min_requests && open_for < window_stretch_max * tuning_.window) return;
  const tuner::Window window = windows_.close(now);
  opened_ = now;
  looked_at_ = now;
  act(tuner_.on_window(window), now);
  report(window);
}

void TuningLoop::act(const tuner::Decision& decision, TimePoint now) {
  if (!decision.apply) return;
  const Result<std::uint64_t> number = target_.propose(*decision.apply, decision.reason, decision.message);
  if (!number) {
    spdlog::warn("tuning: {} was refused: {}", decision.reason, number.error().message);
    return;
  }
  if (*number == settings_number_) return;
  settings_number_ = *number;
  spdlog::info("tuning: settings {}: {}: {}", *number, decision.reason, decision.message);
  settle(now);
}

/// Before the window has closed: it holds the requests of two loads, or of a trial that has ended, and is dropped.
void TuningLoop::act_early(const tuner::Decision& decision, TimePoint now) {
  act(decision, now);
  settle(now);
}

/// What is measured from here on begins anew, once what runs has settled.
void TuningLoop::settle(TimePoint now) {
  changed_ = now;
  settled_at_ = now + tuning_.settle;
  windows_.open(now, changed_);
}

void TuningLoop::report(std::optional<tuner::Window> window) {
  target_.report(control::TuningReport{.status = tuner_.status(),
                                       .trials = tuner_.recent_trials(),
                                       .window = std::move(window),
                                       .regimes = tuner_.regimes(),
                                       .model_key = options_.model_key,
                                       .twin = twin_.status(),
                                       .twin_cpu = pace_.cpu_used(),
                                       .twin_core_percent = pace_.core_percent(),
                                       .feed_dropped = feed_.dropped()});
}

void TuningLoop::load_calibration() {
  std::error_code error;
  if (options_.calibration.empty() || !std::filesystem::exists(options_.calibration, error)) return;
  Result<Calibration> calibration = read_calibration(options_.calibration);
  if (!calibration) {
    spdlog::warn("tuning: the twin starts without what it had learnt: {}", calibration.error().message);
  } else if (calibration->model_key != options_.model_key) {
    spdlog::info("tuning: {} is of another model, backend or device ({}); the twin starts without it",
                 options_.calibration.string(), calibration->model_key);
  } else {
    twin_.adopt(std::move(calibration->laws));
    steps_kept_ = twin_.laws().observation_count();
  }
}

void TuningLoop::save_calibration() {
  const std::uint64_t steps = twin_.laws().observation_count();
  if (options_.calibration.empty() || steps == steps_kept_ || steps < tuner::StepLaws::law_observations_min) return;
  const Result<void> kept = write_calibration(options_.calibration, {.model_key = options_.model_key, .laws = twin_.laws()});
  if (kept) steps_kept_ = steps;
  if (!kept && !calibration_failed_) spdlog::warn("tuning: what the twin has learnt cannot be kept: {}", kept.error().message);
  calibration_failed_ = !kept;
}

}  // namespace rubato
