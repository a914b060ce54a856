// SPDX-License-Identifier: Apache-2.0
#include "tuner/load_watch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <utility>

#include "manifests/check.h"
#include "tuner/load_watch_track.h"

namespace rubato::tuner {

namespace {

constexpr double day_seconds = 86'400;
constexpr double confirmed = 0.5;            // posterior probability of a change from which an alarm is given
constexpr std::int64_t warm_up_slices = 60;  // how much the traffic scatters is not known before
constexpr std::size_t phases_remembered = 4;
constexpr std::int64_t slices_per_gap_max = 100'000;  // a longer silence is not walked through in full
constexpr double octave = 0.693147180559945;

enum Feature : std::size_t { Rate, Prompt, Output, Burstiness };
constexpr std::array<const char*, 4> names{"arrival rate", "prompt length", "output length", "burstiness"};
// How the false alarms allowed are dealt out. More arrivals hurt most and soonest, so that is found quickest.
constexpr std::array<double, 4> shares_up{0.5, 0.25, 0.05, 0.02};
constexpr std::array<double, 4> shares_down{0.06, 0.05, 0.05, 0.02};
// Of burstiness: e-folds between an interval and the next, where Poisson arrivals have 1.4.
constexpr std::array<double, 4> changes{octave, 0.9, octave, 0.5};

double tokens_log(std::int32_t tokens) {
  return std::log(static_cast<double>(std::max(1, tokens)));
}

void add(SliceSum& slice, double value, double natural) {
  slice.exposure += 1;
  slice.sum += value;
  slice.squares += value * value;
  slice.natural += natural;
}

}  // namespace

struct LoadWatch::State {
  explicit State(const LoadWatchOptions& given)
      : options(given), tracks{track(Rate), track(Prompt), track(Output), track(Burstiness)} {}

  [[nodiscard]] FeatureTrack track(Feature feature) const {
    const double per_slice = options.false_alarms_per_day * to_seconds(options.slice) / day_seconds;
    return FeatureTrack({.kind = feature == Rate ? TrackKind::Rate : TrackKind::Mean,
                         .change = changes[feature],
                         .spread_min = 0.2,
                         .false_alarms_up = per_slice * shares_up[feature],
                         .false_alarms_down = per_slice * shares_down[feature],
                         .memory = 900 / to_seconds(options.slice),
                         .memory_exposures = 200});
  }

  void close_until(TimePoint now);
  void close_slice();
  void raise(Feature feature, const ChangePoint& change);
  void interval_ended(double seconds);

  LoadWatchOptions options;
  std::array<FeatureTrack, 4> tracks;
  std::array<SliceSum, 4> open{};
  std::optional<TimePoint> slice_begin;  // none: nothing has arrived yet
  std::optional<TimePoint> last_arrival;
  std::optional<double> interval_log;  // of the last interval, in seconds
  std::int64_t slices = 0;
  TimePoint phase_begin{};
  std::deque<TimePoint> alarms;
  std::optional<LoadAlarm> pending;
};

/// Burstiness is told by how far, on a log scale, an interval lies from the one before: that does not depend on the rate, and
/// means of squares would hang on the longest few.
void LoadWatch::State::interval_ended(double seconds) {
  constexpr double far_max = 5;
  const double value = std::log(std::max(seconds, 1e-4));
  if (interval_log) {
    const double far = std::min(far_max, std::abs(value - *interval_log));
    add(open[Burstiness], far, far);
  }
  interval_log = value;
}

void LoadWatch::State::close_until(TimePoint now) {
  if (!slice_begin) return;
  const std::int64_t over = (now - *slice_begin) / options.slice;
  for (std::int64_t i = 0; i < std::min(over, slices_per_gap_max); ++i) close_slice();
  if (over > slices_per_gap_max) *slice_begin += (over - slices_per_gap_max) * options.slice;
}

void LoadWatch::State::close_slice() {
  open[Rate].exposure = to_seconds(options.slice);
  open[Rate].natural = open[Rate].sum;
  *slice_begin += options.slice;
  ++slices;
  for (std::size_t i = 0; i < tracks.size(); ++i) tracks[i].observe(open[i]);
  open = {};
  if (slices < warm_up_slices) return;
  std::size_t most = 0;
  for (std::size_t i = 1; i < tracks.size(); ++i) {
    if (tracks[i].suspicion() > tracks[most].suspicion()) most = i;
  }
  if (tracks[most].suspicion() < 1) return;
  const ChangePoint change = tracks[most].change_point();
  if (change.probability >= confirmed) raise(static_cast<Feature>(most), change);
}

void LoadWatch::State::raise(Feature feature, const ChangePoint& change) {
  LoadAlarm alarm;
  alarm.shift.feature = names[feature];
  alarm.shift.before = tracks[feature].normal();
  alarm.shift.after = change.since.exposure > 0 ? change.since.natural / change.since.exposure : 0;
  alarm.since = *slice_begin - static_cast<std::int64_t>(change.slices) * options.slice;
  alarm.probability = change.probability;
  alarm.requests = static_cast<std::int32_t>(std::lround(tracks[Rate].last(change.slices).sum));
  for (FeatureTrack& one : tracks) one.restart(change.slices);
  alarms.push_back(alarm.since);
  if (alarms.size() > phases_remembered + 1) alarms.pop_front();
  phase_begin = alarm.since;
  pending = alarm;
}

LoadWatch::LoadWatch(const LoadWatchOptions& options) : state_(std::make_unique<State>(options)) {
  CHECK(options.false_alarms_per_day > 0 && options.slice > Duration::zero(),
        "false_alarms_per_day=", options.false_alarms_per_day, " slice=", options.slice.count());
}
LoadWatch::~LoadWatch() = default;

void LoadWatch::arrived(TimePoint at, std::int32_t prompt_tokens) {
  State& state = *state_;
  if (!state.slice_begin) {
    state.slice_begin = at;
    state.phase_begin = at;
  }
  state.close_until(at);
  state.open[Rate].sum += 1;
  add(state.open[Prompt], tokens_log(prompt_tokens), std::max(1, prompt_tokens));
  if (state.last_arrival) state.interval_ended(to_seconds(at - *state.last_arrival));
  state.last_arrival = at;
}

void LoadWatch::ended(TimePoint at, std::int32_t output_tokens) {
  if (!state_->slice_begin) return;
  state_->close_until(at);
  add(state_->open[Output], tokens_log(output_tokens), std::max(1, output_tokens));
}

std::optional<LoadAlarm> LoadWatch::tick(TimePoint now) {
  state_->close_until(now);
  return std::exchange(state_->pending, std::nullopt);
}

TimePoint LoadWatch::phase_begin() const {
  return state_->phase_begin;
}

std::optional<Duration> LoadWatch::phase_length() const {
  const auto& alarms = state_->alarms;
  if (alarms.size() < 2) return std::nullopt;
  return (alarms.back() - alarms.front()) / static_cast<std::int64_t>(alarms.size() - 1);
}

}  // namespace rubato::tuner
