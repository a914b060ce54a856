// SPDX-License-Identifier: Apache-2.0
// What the tuner does with the twin and with regimes met before: which loads it expects, what it asks, and how it answers a
// change of load before a window of it has been measured.
#include <algorithm>
#include <cmath>

#include "tuner/describe.h"
#include "tuner/guard.h"
#include "tuner/journal.h"
#include "tuner/tuner_state.h"

namespace rubato::tuner {

namespace {

// Phases shorter than so many searches' lengths are not followed one by one: one setting is chosen for their mixture.
constexpr int phases_worth_following = 4;
constexpr int phases_in_mixture = 6;
constexpr Duration mixture_length_min = std::chrono::minutes(10);
constexpr Duration traffic_reach = std::chrono::minutes(10);  // of a load that has not changed: older requests add nothing
constexpr Duration alarm_patience = std::chrono::minutes(2);
constexpr std::int32_t regime_requests_min = 10;
constexpr double regime_veto = 0.1;   // of attainment that the twin must expect more of another setting
constexpr double regime_gain = 0.01;  // of attainment over the incumbent's, by the twin
constexpr std::int32_t pretended_judged_max = 60;
constexpr std::int32_t regime_saves_every = 16;

ExpectedOutcome outcome_of(const Forecast& forecast) {
  return {.attainment = forecast.attainment,
          .attainment_spread = forecast.attainment_spread,
          .ttft_p50 = forecast.latency[static_cast<std::size_t>(TwinQuantile::TtftP50)],
          .ttft_p99 = forecast.latency[static_cast<std::size_t>(TwinQuantile::TtftP99)],
          .itl_p50 = forecast.latency[static_cast<std::size_t>(TwinQuantile::ItlP50)],
          .itl_p99 = forecast.latency[static_cast<std::size_t>(TwinQuantile::ItlP99)]};
}

Expected expectation(const KnobValues& knobs, const Forecast& forecast) {
  const double share = std::clamp(forecast.attainment, 0.02, 0.98);
  const double spread = forecast.attainment_spread;
  return {.knobs = knobs,
          .attainment = forecast.attainment,
          .score = score(forecast.evidence).value,
          .variance = spread * spread / (share * (1 - share))};
}

/// A forecast where evidence is asked for: it counts as no more than one window's worth.
Evidence pretended(const Forecast& forecast) {
  Evidence evidence = forecast.evidence;
  evidence.windows = 1;
  if (evidence.judged > pretended_judged_max) {
    const double scale = static_cast<double>(pretended_judged_max) / evidence.judged;
    for (std::int32_t* count : {&evidence.judged, &evidence.good, &evidence.ttft_misses, &evidence.itl_misses}) {
      *count = static_cast<std::int32_t>(std::lround(*count * scale));
    }
  }
  evidence.draining = false;
  return evidence;
}

std::string describe(const ExpectedOutcome& expected) {
  return decimal(100 * expected.attainment) + " % (+-" + decimal(100 * expected.attainment_spread) + ")";
}

}  // namespace

bool Tuner::State::twin_answers() const {
  return twin && twin->trusted();
}

std::optional<Duration> Tuner::State::alternation() const {
  const auto length = watch_over_load ? watch_over_load->phase_length() : std::nullopt;
  if (!length) return std::nullopt;
  const Duration search_length = options.tuning.dwell + 2 * options.tuning.window;
  return *length < phases_worth_following * search_length ? length : std::nullopt;
}

/// What the next dwell time is expected to bring: the load since it last moved, or the mixture of those that alternate.
std::vector<TrafficPhase> Tuner::State::expected_phases(TimePoint now) const {
  const TrafficLog& traffic = twin->traffic();
  TimePoint begin = now - traffic_reach;
  if (const auto length = alternation()) {
    begin = now - std::max(mixture_length_min, phases_in_mixture * *length);
  } else if (watch_over_load) {
    begin = std::max(begin, watch_over_load->phase_begin());
  }
  std::vector<TrafficRequest> requests = traffic.between(begin, now);
  if (requests.empty()) return {};
  // The log may not reach back so far.
  begin = std::max(begin, requests.front().arrival);
  if (begin >= now) return {};
  return {{.requests = std::move(requests), .begin = begin, .end = now, .weight = 1}};
}

/// The first answers under a load rest on seconds of it, before long outputs have ended; they are worth asking for again.
bool Tuner::State::twin_knows_more(TimePoint now) const {
  if (!twin_answers()) return false;
  const std::vector<TrafficPhase> phases = expected_phases(now);
  return !phases.empty() && now - phases.front().begin >= 2 * studied_span;
}

std::optional<Tuner::State::TwinAnswer> Tuner::State::ask_twin(TimePoint now, std::span<const KnobValues> hints) {
  if (!twin_answers()) return std::nullopt;
  std::vector<TrafficPhase> phases = expected_phases(now);
  const Duration span = phases.empty() ? Duration{} : now - phases.front().begin;
  const std::unique_ptr<TwinStudy> study = twin->study(std::move(phases));
  if (!study) return std::nullopt;
  studied_span = span;
  const std::optional<TwinStudy::Best> best = study->best(legal, incumbent, hints);
  if (!best) return std::nullopt;
  TwinAnswer answer{.best = best->knobs,
                    .expected = outcome_of(best->forecast),
                    .incumbent = outcome_of(best->incumbent),
                    .incumbent_evidence = pretended(best->incumbent),
                    .candidates = best->candidates,
                    .all = {},
                    .outcomes = {},
                    .hint = {}};
  for (const TwinStudy::Known& one : study->known()) {
    answer.all.push_back(expectation(one.knobs, one.forecast));
    answer.outcomes.push_back({one.knobs, outcome_of(one.forecast)});
  }
  if (!hints.empty()) {
    if (const auto forecast = study->forecast(hints.front())) answer.hint = outcome_of(*forecast);
  }
  return answer;
}

void Tuner::State::begin_search(const LoadFeatures& load, const std::optional<TwinAnswer>& answer) {
  outcomes = answer ? answer->outcomes : std::vector<KnownOutcome>{};
  ++counts.searches_total;
  search_load = load;
  load_moves = 0;
  search_rollbacks = 0;
  load_may_have_moved = false;
  search.emplace(legal,
                 SearchOptions{.objectives = options.objectives,
                               .load = search_load,
                               .seed = options.seed + 0x9e3779b97f4a7c15ULL * static_cast<std::uint64_t>(counts.searches_total),
                               .trials_max = answer ? trials_with_twin_max : trials_per_search_max,
                               .expected = answer ? answer->all : std::vector<Expected>{}},
                 history);
}

std::optional<ExpectedOutcome> Tuner::State::outcome_expected_of(const KnobValues& knobs) const {
  const auto found = std::find_if(outcomes.begin(), outcomes.end(), [&](const KnownOutcome& one) { return one.knobs == knobs; });
  return found == outcomes.end() ? std::nullopt : std::optional(found->outcome);
}

/// The load of the requests since a change, as far as the log has them.
std::optional<RegimeLoad> Tuner::State::load_since(TimePoint since, TimePoint now) const {
  if (!twin || now <= since) return std::nullopt;
  const std::vector<TrafficRequest> requests = twin->traffic().between(since, now);
  if (static_cast<std::int32_t>(requests.size()) < regime_requests_min) return std::nullopt;
  Window window;
  window.begin = since;
  window.end = now;
  window.arrivals = static_cast<std::int32_t>(requests.size());
  for (const TrafficRequest& request : requests) {
    window.prompt_tokens_mean += request.prompt_tokens / static_cast<double>(requests.size());
    window.output_tokens_mean += request.output_tokens / static_cast<double>(requests.size());
  }
  return RegimeLoad{.features = load_of(window), .burstiness = 1};
}

std::optional<KnobValues> Tuner::State::known_regime(TimePoint since, TimePoint now) const {
  const auto load = load_since(since, now);
  if (!load) return std::nullopt;
  const Regime* regime = regime_memory.recognise(*load, options.objectives, wall_milliseconds(now) / 1000);
  if (!regime) return std::nullopt;
  const KnobValues knobs = legal.canonical(regime->best);
  return legal.contains(knobs) ? std::optional(knobs) : std::nullopt;
}

void Tuner::State::note_regime(const Window& window, const Evidence& evidence) {
  if (evidence.judged < options.tuning.min_requests || evidence.draining) return;
  const RegimeLoad load{.features = load_of(window), .burstiness = std::max(0.1, window.arrival_interval_cv)};
  const Regime& regime = regime_memory.learn(load, current, evidence, options.objectives, wall_milliseconds(window.end) / 1000);
  // A visit that changed nothing is not worth a write each time.
  const bool news = regime.visits <= 1 || regime.best == current;
  if (journal && news && (regime.visits <= 1 || regime.visits % regime_saves_every == 0 || regime.best != saved_best)) {
    saved_best = regime.best;
    keep_regimes();
  }
}

void Tuner::State::keep_regimes() {
  if (journal && !journal->keep_regimes(options.model_key, regime_memory.regimes())) ++counts.journal_errors_total;
}

bool Tuner::State::risk_allows(TimePoint now, double arrival_rate, double attainment) const {
  const double at_risk = arrival_rate * to_seconds(options.tuning.window) * attainment;
  return risk.allows(now, arrival_rate, at_risk, options.tuning.risk_budget / 100.0);
}

std::optional<Decision> Tuner::State::on_alarm(const LoadAlarm& alarm, const Window& so_far) {
  ++counts.alarms_total;
  if (phase == Phase::Disabled || frozen) return std::nullopt;
  infeasible = false;
  searches_since_shift = 0;
  settled_evidence.reset();
  studied_span = {};
  dwell_until = TimePoint::min();
  watched.clear();
  detector.reset();
  if (search && stage == Stage::Trying) {
    trial_window = trial_window ? merged(*trial_window, so_far) : so_far;
    record_trial("Inconclusive");
  }
  const bool restore = current != incumbent;
  end_search();
  pending_alarm = alarm;
  if (auto answer = answer_alarm(so_far)) return answer;
  if (!restore) return std::nullopt;
  return conclude({.phase = Phase::Holding,
                   .apply = incumbent,
                   .trial = false,
                   .reason = "ShiftDetected",
                   .message = "The " + alarm.shift.text() + " during a trial; back to " + tuner::describe(incumbent) + ".",
                   .seen = so_far},
                  so_far.end);
}

/// Empty while nobody can tell yet: too few requests of the new load have come.
std::optional<Decision> Tuner::State::answer_alarm(const Window& so_far) {
  const TimePoint now = so_far.end;
  if (!pending_alarm || stage != Stage::Watching) return std::nullopt;
  const LoadAlarm alarm = *pending_alarm;
  if (now - alarm.since > alarm_patience) {
    pending_alarm.reset();
    return std::nullopt;
  }
  if (alternation()) {
    pending_alarm.reset();
    return follow_mixture(so_far);
  }
  const std::optional<KnobValues> regime = known_regime(alarm.since, now);
  const std::string lead = "The " + alarm.shift.text();
  if (!twin_answers()) {
    if (!regime || *regime == incumbent) return std::nullopt;
    pending_alarm.reset();
    return retune(so_far, *regime, Source::Regime, lead, {});
  }
  const std::vector<KnobValues> hints = regime ? std::vector{*regime} : std::vector<KnobValues>{};
  const std::optional<TwinAnswer> answer = ask_twin(now, hints);
  if (!answer) return std::nullopt;
  pending_alarm.reset();
  // What served this load before is evidence; the twin's word against it has to be clear. But nothing is changed for nothing.
  const bool known = regime && answer->hint && answer->hint->attainment + regime_veto >= answer->expected.attainment &&
                     answer->hint->attainment >= answer->incumbent.attainment + regime_gain;
  const KnobValues next = known ? *regime : answer->best;
  if (next == legal.canonical(incumbent)) {
    return conclude(
        {.phase = Phase::Holding,
         .apply = {},
         .trial = false,
         .reason = "ShiftAnswered",
         .message = lead + "; of " + std::to_string(answer->candidates) + " settings the twin expects nothing better than " +
                    tuner::describe(incumbent) + ", " + describe(answer->incumbent) + " good.",
         .seen = so_far,
         .expected_incumbent = answer->incumbent},
        now);
  }
  return retune(so_far, next, known ? Source::Regime : Source::Twin, lead, answer);
}

/// Settings are changed on the twin's or a regime's word. The next window is their trial.
Decision Tuner::State::retune(const Window& so_far, const KnobValues& knobs, Source source, const std::string& lead,
                              const std::optional<TwinAnswer>& answer) {
  const auto load = load_since(watch_over_load ? watch_over_load->phase_begin() : so_far.begin, so_far.end);
  begin_search(load ? load->features : load_of(so_far), answer);
  ++counts.twin_retunes_total;
  incumbent_forecast = answer ? std::optional(answer->incumbent_evidence) : std::nullopt;
  begin_trial();
  Decision decision{.phase = Phase::Searching,
                    .apply = knobs,
                    .trial = true,
                    .reason = "ShiftRetuned",
                    .message = {},
                    .trial_number = trial_number,
                    .source = name_of(source),
                    .seen = so_far};
  decision.message = lead + "; changing to " + tuner::describe(knobs);
  if (source == Source::Regime) decision.message += ", which served this load best before";
  if (answer) {
    decision.expected = source == Source::Regime ? answer->hint : std::optional(answer->expected);
    decision.expected_incumbent = answer->incumbent;
    decision.message += ", expected to be " + describe(decision.expected.value_or(answer->expected)) + " good against " +
                        describe(answer->incumbent);
  }
  decision.message += ".";
  trial_expected = decision.expected;
  trial_source = decision.source;
  return conclude(decision, so_far.end);
}

/// Loads that alternate faster than a search takes: one setting for their mixture, chosen by the twin and changed seldom. Nothing
/// is tried live, because a window of one phase says nothing about settings tried in another.
std::optional<Decision> Tuner::State::follow_mixture(const Window& so_far) {
  const TimePoint now = so_far.end;
  const auto length = alternation();
  if (!length || !twin_answers() || now < mixture_until) return std::nullopt;
  const std::optional<TwinAnswer> answer = ask_twin(now, {});
  if (!answer) return std::nullopt;
  mixture_until = now + std::max(mixture_length_min, phases_in_mixture * *length);
  if (answer->best == legal.canonical(incumbent)) return std::nullopt;
  const KnobValues before = incumbent;
  incumbent = answer->best;
  watched.clear();
  detector.settings_changed();
  ++counts.twin_retunes_total;
  return conclude(
      {.phase = Phase::Holding,
       .apply = incumbent,
       .trial = false,
       .reason = "MixtureRetuned",
       .message = "Loads alternate every " + decimal(to_seconds(*length)) + " s; over their mixture the twin expects " +
                  describe(answer->expected) + " good of " + tuner::describe(incumbent) + " against " +
                  describe(answer->incumbent) + " of " + tuner::describe(before) + ".",
       .source = name_of(Source::Twin),
       .seen = so_far,
       .expected = answer->expected,
       .expected_incumbent = answer->incumbent},
      now);
}

}  // namespace rubato::tuner
