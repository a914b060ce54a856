// SPDX-License-Identifier: Apache-2.0
#include "daemon/tuning_loop.h"

#include <spdlog/spdlog.h>

#include <utility>

namespace rubato {
namespace {

constexpr std::uint64_t tuner_seed = 1;  // fixed: the same traffic gives the same decisions
constexpr int window_stretch_max = 4;    // a window that lacks requests is closed after this many lengths all the same

}  // namespace

TuningLoop::TuningLoop(control::TuningTarget& target, LatencyWindows& windows, tuner::Journal* journal, std::string model_key,
                       TimePoint now)
    : target_(target),
      windows_(windows),
      model_key_(std::move(model_key)),
      tuner_(
          [this] {
            const control::TuningInput input = target_.tuning_input();
            revision_ = input.revision;
            tuning_ = input.tuning;
            return options_for(input);
          }(),
          journal),
      changed_(now),
      settled_at_(now + tuning_.settle),
      opened_(now) {
  report(std::nullopt);
}

tuner::TunerOptions TuningLoop::options_for(const control::TuningInput& input) const {
  return tuner::TunerOptions{
      .space = input.space, .objectives = input.objectives, .tuning = input.tuning, .seed = tuner_seed, .model_key = model_key_};
}

void TuningLoop::tick(TimePoint now) {
  const control::TuningInput input = target_.tuning_input();
  if (input.revision != revision_) {
    revision_ = input.revision;
    tuning_ = input.tuning;
    // What was measured so far belongs to other targets or other values.
    changed_ = now;
    settled_at_ = now + tuning_.settle;
    act(tuner_.reconfigure(options_for(input), now), now);
    report(std::nullopt);
  }
  if (settled_at_) {
    if (now < *settled_at_) return;
    windows_.open(now, changed_);
    opened_ = now;
    settled_at_.reset();
    return;
  }
  if (windows_.settings_changed()) {  // under an open window, by a person: it tells of neither settings
    changed_ = now;
    settled_at_ = now + tuning_.settle;
    return;
  }
  const Duration open_for = now - opened_;
  if (open_for < tuning_.window) return;
  if (windows_.judged_so_far() < tuning_.min_requests && open_for < window_stretch_max * tuning_.window) return;
  const tuner::Window window = windows_.close(now);
  opened_ = now;
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
  changed_ = now;
  settled_at_ = now + tuning_.settle;
}

void TuningLoop::report(std::optional<tuner::Window> window) {
  target_.report(control::TuningReport{.status = tuner_.status(), .trials = tuner_.recent_trials(), .window = std::move(window)});
}

}  // namespace rubato
