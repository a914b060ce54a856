// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/conditions.h"

#include <algorithm>
#include <cmath>

#include "manifests/units.h"

namespace rubato::control {
namespace {

/// Reasons are CamelCase by contract; a text that came in empty must not break clients that require one.
std::string reason_or(const std::string& reason, const char* otherwise) {
  return reason.empty() ? otherwise : reason;
}

std::string joined(std::span<const std::string> words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

Condition ready(const ServingHealth& serving) {
  Condition condition{.type = "Ready", .status = ConditionStatus::False, .reason = {}, .message = {}, .last_transition = {}};
  if (serving.failure) {
    condition.reason = "DeviceLost";
    condition.message = serving.failure->message;
  } else if (serving.draining) {
    condition.reason = "Draining";
    condition.message = "running requests are finished, new ones are refused";
  } else if (!serving.loaded) {
    condition.reason = "Loading";
    condition.message = "the model is being loaded";
  } else if (serving.stalled) {
    condition.reason = "Stalled";
    condition.message = serving.step_stuck ? "a lane's step does not end" : "requests wait but no step has ended for long";
  } else {
    condition.status = ConditionStatus::True;
    condition.reason = "Serving";
    condition.message = "requests are accepted";
  }
  return condition;
}

Condition manifest_valid(const ConditionInputs& inputs) {
  Condition condition{
      .type = "ManifestValid", .status = ConditionStatus::True, .reason = "Accepted", .message = {}, .last_transition = {}};
  if (inputs.manifest_error) {
    condition.status = ConditionStatus::False;
    condition.reason = "Refused";
    condition.message = "the last good manifest stays in force: " + *inputs.manifest_error;
  } else if (!inputs.restart_required.empty()) {
    condition.reason = "RestartRequired";
    condition.message = "in force after a restart: " + joined(inputs.restart_required);
  }
  return condition;
}

std::string percent(double share) {
  const auto tenths = static_cast<long>(std::floor(share * 1000));  // down: 98.97 must not read as 99
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + "%";
}

std::string rounded(Duration duration) {
  const Duration unit =
      duration >= std::chrono::seconds(10) ? Duration(std::chrono::milliseconds(100)) : Duration(std::chrono::microseconds(100));
  return format_duration((duration + unit / 2) / unit * unit);
}

Condition objectives_met(const ConditionInputs& inputs) {
  Condition condition{.type = "ObjectivesMet", .reason = {}, .message = {}, .last_transition = {}};
  const auto& window = inputs.window;
  if (!window || window->judged == 0) {
    condition.reason = "NoData";
    condition.message = "no request was judged in the last window";
    return condition;
  }
  const bool met =
      static_cast<std::int64_t>(window->good) * 100 >= static_cast<std::int64_t>(window->judged) * inputs.objectives.attainment;
  condition.status = met ? ConditionStatus::True : ConditionStatus::False;
  const bool infeasible = inputs.tuner && inputs.tuner->phase == tuner::Phase::Infeasible;
  condition.reason = met ? "WithinObjectives" : infeasible ? "NoSettingFeasible" : "BelowAttainment";
  condition.message = percent(window->attainment()) + " of " + std::to_string(window->judged) +
                      " requests met both objectives (" + std::to_string(inputs.objectives.attainment) + "% wanted): TTFT p99 " +
                      rounded(window->ttft_p99) + " of " + format_duration(inputs.objectives.ttft) + ", ITL p99 " +
                      rounded(window->itl_p99) + " of " + format_duration(inputs.objectives.itl);
  return condition;
}

Condition tuning(const ConditionInputs& inputs) {
  Condition condition{.type = "Tuning", .status = ConditionStatus::False, .reason = {}, .message = {}, .last_transition = {}};
  if (!inputs.tuning_enabled) {
    condition.reason = "Disabled";
    condition.message = "spec.tuning.enabled is false, or every knob is pinned";
    return condition;
  }
  if (!inputs.tuner) {
    condition.status = ConditionStatus::Unknown;
    condition.reason = "Starting";
    condition.message = "the tuner has not reported yet";
    return condition;
  }
  condition.message = inputs.tuner->message;
  switch (inputs.tuner->phase) {
    case tuner::Phase::Searching:
      condition.status = ConditionStatus::True;
      condition.reason = reason_or(inputs.tuner->reason, "Searching");
      break;
    case tuner::Phase::Holding:
      condition.reason = reason_or(inputs.tuner->reason, "Holding");
      break;
    case tuner::Phase::Disabled:
      condition.reason = reason_or(inputs.tuner->reason, "Disabled");
      break;
    case tuner::Phase::Infeasible:
      condition.reason = reason_or(inputs.tuner->reason, "NoSettingFeasible");
      break;
    case tuner::Phase::NoData:
      condition.reason = reason_or(inputs.tuner->reason, "NoData");
      break;
  }
  return condition;
}

/// False says one thing alone: its predictions are off. A twin that is off by choice, or still learns, is not known to be wrong.
Condition twin_trusted(const ConditionInputs& inputs) {
  Condition condition{.type = "TwinTrusted", .reason = "Starting", .message = {}, .last_transition = {}};
  if (!inputs.tuning_enabled) {
    condition.reason = "Disabled";
    condition.message = "nothing is tuned";
    return condition;
  }
  if (!inputs.twin) {
    condition.message = "the tuner has not reported yet";
    return condition;
  }
  condition.message = inputs.twin->message;
  switch (inputs.twin->state) {
    case tuner::TwinState::Off:
      condition.reason = "Disabled";
      condition.message = "spec.tuning.twin.enabled is false: the search goes by live windows alone";
      break;
    case tuner::TwinState::Learning:
      condition.reason = "Learning";
      break;
    case tuner::TwinState::Trusted:
      condition.status = ConditionStatus::True;
      condition.reason = "TwinAgrees";
      break;
    case tuner::TwinState::Distrusted:
      condition.status = ConditionStatus::False;
      condition.reason = "TwinDisagrees";
      break;
  }
  return condition;
}

Condition overridden(const ConditionInputs& inputs) {
  Condition condition{
      .type = "Overridden", .status = ConditionStatus::False, .reason = "NoOverride", .message = {}, .last_transition = {}};
  if (inputs.pins.empty()) return condition;
  condition.status = ConditionStatus::True;
  condition.reason = "Pinned";
  condition.message = joined(inputs.pins) + (inputs.pins_expire ? " until " + format_time(*inputs.pins_expire) : "");
  return condition;
}

}  // namespace

std::string_view to_string(ConditionStatus status) {
  switch (status) {
    case ConditionStatus::True:
      return "True";
    case ConditionStatus::False:
      return "False";
    case ConditionStatus::Unknown:
      return "Unknown";
  }
  CHECK(false, static_cast<int>(status));
}

std::vector<Condition> compute_conditions(const ConditionInputs& inputs, std::span<const Condition> previous, WallTime now) {
  std::vector<Condition> conditions{ready(inputs.serving), manifest_valid(inputs), objectives_met(inputs),
                                    tuning(inputs),        twin_trusted(inputs),   overridden(inputs)};
  for (auto& condition : conditions) {
    condition.observed_generation = inputs.generation;
    const auto before =
        std::find_if(previous.begin(), previous.end(), [&](const Condition& old) { return old.type == condition.type; });
    const bool same = before != previous.end() && before->status == condition.status;
    condition.last_transition = same ? before->last_transition : std::chrono::floor<std::chrono::seconds>(now);
  }
  return conditions;
}

}  // namespace rubato::control
