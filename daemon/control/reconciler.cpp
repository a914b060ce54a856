// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/reconciler.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "manifests/fields.h"
#include "manifests/json.h"

namespace rubato::control {
namespace {

constexpr std::chrono::milliseconds save_backoff_min{1000};
constexpr std::chrono::milliseconds save_backoff_max{60000};

SavedState fresh_state(const ReconcilerOptions& options) {
  SavedState state;
  state.uid = options.make_uid();
  state.created = std::chrono::floor<std::chrono::seconds>(options.clock());
  return state;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

/// `maxNumBatchedTokens 512 -> 256, priorityPolicy Deadline -> DecodeFirst`.
std::string difference(const KnobValues& before, const KnobValues& after) {
  const Json old_values = to_json(before), new_values = to_json(after);
  std::vector<std::string> changes;
  const auto shown = [](const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); };
  for (const auto& [name, value] : new_values.items()) {
    if (old_values[name] != value) changes.push_back(name + " " + shown(old_values[name]) + " -> " + shown(value));
  }
  return joined(changes);
}

std::vector<std::string> shown_pins(const OverrideSpec& pins) {
  std::vector<std::string> shown;
  const Json json = to_json(pins);
  for (const auto& [name, value] : json.items())
    shown.push_back(name + "=" + (value.is_string() ? value.get<std::string>() : value.dump()));
  return shown;
}

}  // namespace

Reconciler::Reconciler(const ReadManifest& manifest, ReconcilerOptions options, Metrics& metrics)
    : options_(std::move(options)),
      metrics_(metrics),
      file_(options_.state_directory, manifest.manifest.name),
      loaded_(file_.load()),
      state_(manifest, loaded_.state ? *loaded_.state : fresh_state(options_), options_.clock()),
      saved_(loaded_.state) {
  const WallTime now = options_.clock();
  // Versions go on from the clock, so that one from before a restart is never taken for a current one.
  resource_version_ = static_cast<std::uint64_t>(now.time_since_epoch().count());
  if (!loaded_.problem.empty()) {
    spdlog::warn("control: {}", loaded_.problem);
    events_.add(EventType::Warning, "StateLost", loaded_.problem, now);
  }
  if (!state_.dropped().empty()) {
    spdlog::warn("control: what was set over the API does not fit the manifest and was dropped: {}", state_.dropped());
    events_.add(EventType::Warning, "ApiSettingsDropped",
                "what was set over the API does not fit the manifest: " + state_.dropped(), now);
  }
  const std::lock_guard lock(mutex_);
  expire(now);
  save(now);
  metrics_.set_objectives(state_.running_spec().objectives);
}

KnobValues Reconciler::knobs() {
  const std::lock_guard lock(mutex_);
  return state_.effective().values;
}

ObjectivesSpec Reconciler::objectives() {
  const std::lock_guard lock(mutex_);
  return state_.running_spec().objectives;
}

std::string Reconciler::name() {
  const std::lock_guard lock(mutex_);
  return state_.name();
}

void Reconciler::attach(Serving& serving) {
  const std::lock_guard lock(mutex_);
  serving_ = &serving;
  const auto status = serving.status();
  applied_ = status->settings.knobs;
  settings_number_ = status->settings.number;
  objectives_applied_ = serving.objectives();
  const WallTime now = options_.clock();
  converge(SettingsSource::File, now);
  (void)refresh(now);
}

void Reconciler::converge(SettingsSource source, WallTime now) {
  const ObjectivesSpec& objectives = state_.running_spec().objectives;
  if (objectives_applied_ != objectives) {
    if (Serving* serving = serving_) {
      serving->set_objectives(objectives);
      objectives_applied_ = objectives;
    }
    metrics_.set_objectives(objectives);
    if (report_) report_->window.reset();  // judged by other objectives
  }
  const KnobValues& wanted = state_.effective().values;
  if (Serving* serving = serving_; serving != nullptr && applied_ != wanted) {
    const std::string change = difference(*applied_, wanted);
    settings_number_ = serving->apply(wanted);
    applied_ = wanted;
    metrics_.on_settings_change(source);
    spdlog::info("control: settings {} ({}): {}", settings_number_, to_string(source), change);
    events_.add(EventType::Normal, "SettingsChanged", change + " (" + std::string(to_string(source)) + ")", now);
  }
  save(now);
}

void Reconciler::save(WallTime now) {
  if (saved_ == state_.saved() || now < next_save_) return;
  if (const auto written = file_.save(state_.saved()); !written) {
    // What was asked for is in force all the same; only its survival is in doubt.
    save_backoff_ = std::clamp(save_backoff_ * 2, save_backoff_min, save_backoff_max);
    next_save_ = now + save_backoff_;
    spdlog::error("control: state is not saved: {}; next try in {} s", written.error().message, save_backoff_.count() / 1000);
    events_.add(EventType::Warning, "StateNotSaved", "changes would be lost in a restart: " + written.error().message, now);
    return;
  }
  saved_ = state_.saved();
  save_backoff_ = std::chrono::milliseconds(0);
  next_save_ = WallTime();
}

void Reconciler::expire(WallTime now) {
  if (!state_.expire(now)) return;
  events_.add(EventType::Normal, "OverrideExpired", "the knobs it pinned follow the layers below again", now);
  converge(SettingsSource::Expiry, now);
}

void Reconciler::tick() {
  const std::lock_guard lock(mutex_);
  const WallTime now = options_.clock();
  expire(now);
  save(now);
  (void)refresh(now);
}

void Reconciler::on_manifest(const ManifestWatch::Outcome& outcome) {
  const std::lock_guard lock(mutex_);
  const WallTime now = options_.clock();
  expire(now);
  const EngineSpec before = state_.spec();
  std::string errors = outcome ? std::string() : outcome.failure().text();
  while (errors.ends_with('\n')) errors.pop_back();  // each line ends with one; a message does not
  Result<void> taken = outcome ? state_.reload(*outcome, now) : unexpected(ErrorCode::InvalidArgument, std::move(errors));
  metrics_.on_manifest_reload(taken);
  if (!taken) {
    manifest_error_ = taken.error().message;
    spdlog::error("control: the manifest was refused and the last good one stays in force: {}", *manifest_error_);
    events_.add(EventType::Warning, "ManifestRefused", *manifest_error_, now);
  } else {
    manifest_error_.reset();
    std::vector<std::string> fields;
    for (const auto& change : changed_fields(before, state_.spec())) fields.push_back(change.field);
    spdlog::info("control: manifest {} in force, changed: {}", state_.manifest().hash, joined(fields));
    events_.add(EventType::Normal, "ManifestReloaded",
                fields.empty() ? "nothing in the spec changed" : "changed: " + joined(fields), now);
    if (!state_.restart_required().empty()) {
      events_.add(EventType::Warning, "RestartRequired", "in force after a restart: " + joined(state_.restart_required()), now);
    }
    converge(SettingsSource::File, now);
  }
  (void)refresh(now);
}

std::variant<PatchAnswer, StatusError> Reconciler::patch(const PatchRequest& request, DryRun dry_run) {
  const std::lock_guard lock(mutex_);
  const WallTime now = options_.clock();
  expire(now);
  const std::string version = refresh(now).resource_version;
  ControlState next = state_;
  auto outcome = next.patch(request, version, now);
  if (auto* error = std::get_if<StatusError>(&outcome)) return std::move(*error);
  PatchResult result = std::get<PatchResult>(std::move(outcome));
  if (dry_run == DryRun::All) {
    Json object = engine_object(next, status_of(next, now), version);
    return PatchAnswer{.engine = {.object = std::move(object), .resource_version = version},
                       .warnings = std::move(result.warnings)};
  }
  const bool pins_changed = next.effective().pins != state_.effective().pins;
  state_ = std::move(next);
  if (!result.fields.empty()) events_.add(EventType::Normal, "Patched", "changed over the API: " + joined(result.fields), now);
  converge(pins_changed ? SettingsSource::Override : SettingsSource::Api, now);
  if (saved_ != state_.saved())
    result.warnings.push_back("the change is in force but could not be saved: a restart would lose it");
  return PatchAnswer{.engine = refresh(now), .warnings = std::move(result.warnings)};
}

ServingHealth Reconciler::health() {
  ServingHealth health;
  Serving* const serving = serving_;
  if (serving == nullptr) return health;
  const auto status = serving->status();
  health.loaded = true;
  health.draining = status->draining;
  health.failure = status->failure;
  const TimePoint now = serving->now();
  // One lane's step that never ends is a stall, whatever the others do.
  health.step_stuck = status->step_open_since && now - *status->step_open_since > StallDetector::stalled_after;
  health.stalled = stalls_.look(status->steps, !serving->idle(), now) || health.step_stuck;
  return health;
}

void Reconciler::note_condition_changes(const std::vector<Condition>& before, const std::vector<Condition>& after, WallTime now) {
  for (const auto& condition : after) {
    const auto old = std::find_if(before.begin(), before.end(), [&](const Condition& one) { return one.type == condition.type; });
    if (old == before.end() || old->status == condition.status) continue;
    if (condition.type == "Ready") {
      const bool ready = condition.status == ConditionStatus::True;
      events_.add(ready ? EventType::Normal : EventType::Warning, ready ? "Ready" : condition.reason, condition.message, now);
    }
    if (condition.type == "TwinTrusted" && condition.status != ConditionStatus::Unknown) {
      const bool trusted = condition.status == ConditionStatus::True;
      events_.add(trusted ? EventType::Normal : EventType::Warning, trusted ? "TwinTrusted" : "TwinDistrusted", condition.message,
                  now);
    }
    if (condition.type == "ObjectivesMet" && condition.status != ConditionStatus::Unknown) {
      const bool met = condition.status == ConditionStatus::True;
      events_.add(met ? EventType::Normal : EventType::Warning, met ? "ObjectivesMet" : "ObjectivesMissed", condition.message,
                  now);
    }
  }
}

Json Reconciler::status_of(const ControlState& state, WallTime now) {
  const ConditionInputs inputs{.generation = state.saved().generation,
                               .serving = health(),
                               .manifest_error = manifest_error_,
                               .restart_required = state.restart_required(),
                               .objectives = state.running_spec().objectives,
                               .window = report_ ? report_->window : std::nullopt,
                               .tuning_enabled = state.tuning_input().tuning.enabled,
                               .tuner = report_ ? std::optional(report_->status) : std::nullopt,
                               .twin = report_ ? report_->twin : std::nullopt,
                               .pins = shown_pins(state.effective().pins),
                               .pins_expire = state.override_expires()};
  StatusInputs status{.observed_generation = state.saved().generation,
                      .settings_number = settings_number_,
                      .conditions = compute_conditions(inputs, conditions_, now),
                      .serving = lanes_.sample(),
                      .tuner = inputs.tuner,
                      .trials = report_ ? report_->trials : std::vector<tuner::Trial>(),
                      .window = inputs.window,
                      .twin = twin_use()};
  if (&state == &state_) {
    note_condition_changes(conditions_, status.conditions, now);
    conditions_ = status.conditions;
  }
  return engine_status(state, status);
}

std::optional<TwinUse> Reconciler::twin_use() const {
  if (!report_ || !report_->twin) return std::nullopt;
  return TwinUse{.status = *report_->twin, .cpu = report_->twin_cpu, .core_percent = report_->twin_core_percent};
}

EngineSnapshot Reconciler::refresh(WallTime now) {
  if (const Serving* serving = serving_) lanes_.look(serving->status(), serving->now(), now, events_);
  Json object = engine_object(state_, status_of(state_, now), "");
  if (object != shown_) {
    ++resource_version_;
    shown_ = object;
  }
  const std::string version = std::to_string(resource_version_);
  object["metadata"]["resourceVersion"] = version;
  return {.object = std::move(object), .resource_version = version};
}

EngineSnapshot Reconciler::engine() {
  const std::lock_guard lock(mutex_);
  const WallTime now = options_.clock();
  expire(now);
  return refresh(now);
}

std::vector<Json> Reconciler::events() {
  const std::lock_guard lock(mutex_);
  const EventSubject subject{.name = state_.name(), .uid = state_.saved().uid, .node = options_.node};
  std::vector<Json> events;
  for (const auto& event : events_.events()) events.push_back(to_json(event, subject));
  return events;
}

TuningReport Reconciler::tuning_report() {
  const std::lock_guard lock(mutex_);
  return report_.value_or(TuningReport{});
}

TuningInput Reconciler::tuning_input() {
  const std::lock_guard lock(mutex_);
  expire(options_.clock());
  return state_.tuning_input();
}

Result<std::uint64_t> Reconciler::propose(const KnobValues& knobs, const std::string& reason, const std::string& message) {
  const std::lock_guard lock(mutex_);
  const WallTime now = options_.clock();
  expire(now);
  if (auto taken = state_.propose(knobs, now); !taken) return Unexpected(std::move(taken).error());
  events_.add(EventType::Normal, reason, message, now);
  converge(SettingsSource::Tuner, now);
  return settings_number_;
}

void Reconciler::report(const TuningReport& report) {
  const std::lock_guard lock(mutex_);
  metrics_.on_tuner(report.status);
  if (report.twin) metrics_.on_twin(*report.twin, report.twin_cpu, report.feed_dropped);
  std::int64_t newest = trial_seen_;
  for (const auto& trial : report.trials) {
    if (trial.number > trial_seen_ && report_) metrics_.on_trial(trial.outcome);
    newest = std::max(newest, trial.number);
  }
  trial_seen_ = newest;  // those of the first report come from the journal of an earlier run
  std::optional<tuner::Window> last = report_ ? report_->window : std::nullopt;
  report_ = report;
  if (report_->window) {
    lanes_.window_closed();
  } else {
    report_->window = std::move(last);
  }
  (void)refresh(options_.clock());
}

}  // namespace rubato::control
