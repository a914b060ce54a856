// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/engine_resource.h"

#include <algorithm>
#include <array>
#include <vector>

#include "daemon/control/figures.h"
#include "daemon/metrics/lane_facts.h"
#include "manifests/json.h"

namespace rubato::control {
namespace {

constexpr std::size_t trials_shown_max = 20;

Json condition_json(const Condition& condition) {
  return {{"type", condition.type},
          {"status", to_string(condition.status)},
          {"observedGeneration", condition.observed_generation},
          {"lastTransitionTime", format_time(condition.last_transition)},
          {"reason", condition.reason},
          {"message", condition.message}};
}

Json window_json(const tuner::Window& window) {
  return {{"length", rounded(window.end - window.begin)},
          {"settingsNumber", window.settings_number},
          {"arrivals", window.arrivals},
          {"judged", window.judged},
          {"good", window.good},
          {"rejected", window.rejected},
          {"attainment", decimal(100 * window.attainment())},
          {"arrivalsPerSecond", decimal(window.arrival_rate())},
          {"ttftP50", rounded(window.ttft_p50)},
          {"ttftP99", rounded(window.ttft_p99)},
          {"itlP50", rounded(window.itl_p50)},
          {"itlP99", rounded(window.itl_p99)}};
}

Json trial_json(const tuner::Trial& trial) {
  return {{"number", trial.number},
          {"outcome", trial.outcome},
          {"settings", to_json(trial.knobs)},
          {"judged", trial.window.judged},
          {"attainment", decimal(100 * trial.window.attainment())},
          {"ttftP99", rounded(trial.window.ttft_p99)},
          {"itlP99", rounded(trial.window.itl_p99)}};
}

Json trials_json(const StatusInputs& inputs) {
  Json recent = Json::array();
  for (const auto& trial : inputs.trials) {
    if (recent.size() == trials_shown_max) break;
    recent.push_back(trial_json(trial));
  }
  const tuner::TunerStatus status = inputs.tuner.value_or(tuner::TunerStatus{});
  return {{"total", status.trials_total},
          {"searches", status.searches_total},
          {"rollbacks", status.rollbacks_total},
          {"earlyRollbacks", status.early_rollbacks_total},
          {"loadAlarms", status.alarms_total},
          {"twinRetunes", status.twin_retunes_total},
          {"riskUsedPercent", decimal(100 * status.risk_used)},
          {"recent", std::move(recent)}};
}

constexpr std::array<const char*, tuner::twin_quantile_count> quantile_names{"ttftP50", "ttftP99", "itlP50", "itlP99"};

std::string_view to_string(tuner::TwinState state) {
  switch (state) {
    case tuner::TwinState::Off:
      return "Off";
    case tuner::TwinState::Learning:
      return "Learning";
    case tuner::TwinState::Trusted:
      return "Trusted";
    case tuner::TwinState::Distrusted:
      return "Distrusted";
  }
  CHECK(false, static_cast<int>(state));
}

Json latencies_json(const std::array<Duration, tuner::twin_quantile_count>& latencies, double attainment) {
  Json json = Json::object();
  for (std::size_t i = 0; i < latencies.size(); ++i) json[quantile_names[i]] = rounded(latencies[i]);
  json["attainment"] = decimal(100 * attainment);
  return json;
}

Json twin_json(const TwinUse& twin) {
  const tuner::TwinStatus& status = twin.status;
  Json errors = Json::object();
  for (std::size_t i = 0; i < quantile_names.size(); ++i) {
    errors[quantile_names[i]] = decimal(100 * status.correction.error[i]);
  }
  Json json{{"state", to_string(status.state)},
            {"steps", status.steps},
            {"stepErrorPercent", decimal(100 * status.step_error)},
            {"windows", status.correction.windows},
            {"errorPercent", std::move(errors)}};
  if (const auto& check = status.last_check) {
    json["lastCheck"] = {{"predicted", latencies_json(check->predicted, check->attainment_predicted)},
                         {"measured", latencies_json(check->measured, check->attainment_measured)}};
  }
  json.update({{"simulations", status.simulations_total},
               {"aborted", status.aborted_total},
               {"simulatedSeconds", seconds(status.simulated_total)},
               {"cpuSeconds", seconds(twin.cpu)},
               {"corePercent", twin.core_percent}});
  return json;
}

Json shapes_json(const engine::ShapeStatus& shapes) {
  Json json{{"buckets", shapes.buckets.tokens}, {"bytes", shapes.bytes}, {"rebuilds", shapes.built}, {"failed", shapes.failed}};
  if (!shapes.last_error.empty()) json["lastError"] = shapes.last_error;
  return json;
}

Json states_json(const policies::SchedulerCounts& counts) {
  return {{"count", counts.state_count}, {"running", counts.states_running}, {"snapshots", counts.states_snapshot}};
}

Json lane_json(const ServingStatus& serving, std::size_t index, const std::vector<std::string>& devices) {
  const LaneStatus& lane = serving.lanes[index];
  const policies::SchedulerCounts& counts = lane.counts.scheduler;
  const std::int32_t share = share_percent(serving, index);
  Json json{{"name", std::to_string(index)},
            {"device", devices.at(static_cast<std::size_t>(lane.device))},
            {"role", rubato::to_string(lane.counts.role)},
            {"sharePercent", share}};
  if (share == lane.share.given_percent && lane.share.asked_percent != share)
    json["askedSharePercent"] = lane.share.asked_percent;
  json.update({{"waiting", counts.waiting},
               {"running", counts.running},
               {"prefilling", counts.prefilling},
               {"reservedSlots", lane.counts.reserved},
               {"toMove", lane.counts.to_move},
               {"kvBlocksFree", counts.free_blocks},
               {"kvBlocks", counts.block_count},
               {"steps", lane.steps}});
  if (counts.state_count > 0) json["states"] = states_json(counts);
  if (lane.shapes) json["shapes"] = shapes_json(*lane.shapes);
  return json;
}

Json prefix_cache_json(const policies::SchedulerCounts& counts) {
  const double hits =
      counts.prefix_queries > 0 ? static_cast<double>(counts.prefix_hits) / static_cast<double>(counts.prefix_queries) : 0.0;
  return {{"queriedTokens", counts.prefix_queries},      {"hitTokens", counts.prefix_hits},
          {"hitPercent", decimal(100 * hits)},           {"blocks", counts.cached_blocks},
          {"evictedBlocks", counts.evicted_blocks},      {"snapshots", counts.states_snapshot},
          {"evictedSnapshots", counts.evicted_snapshots}};
}

Json handoffs_json(const ServingStatus& serving) {
  const policies::HandoffCounts& counts = serving.handoffs;
  std::int32_t to_move = 0;
  for (const LaneStatus& lane : serving.lanes) to_move += lane.counts.to_move;
  return {{"moved", counts.moved},
          {"copied", counts.copied},
          {"bytes", static_cast<std::int64_t>(counts.blocks) * serving.kv_block_bytes +
                        static_cast<std::int64_t>(counts.copied) * serving.state_bytes},
          {"copySeconds", seconds(counts.copying)},
          {"failed", counts.failed},
          {"expired", counts.expired},
          {"lateAnswers", counts.late_answers},
          {"toMove", to_move},
          {"reservationWaits", counts.reservation_waits},
          {"reservationWaitSeconds", seconds(counts.reservation_waiting)}};
}

Json lockstep_json(const policies::LockstepCounts& counts) {
  const Duration all = counts.stepping + counts.waiting;
  const double waiting = all > Duration::zero() ? to_seconds(counts.waiting) / to_seconds(all) : 0.0;
  return {{"rounds", counts.rounds}, {"waitingPercent", decimal(100 * waiting)}};
}

void add_serving(Json& status, const ServingStatus& serving, const EngineSpec& spec) {
  status["limits"] = {{"maxModelLen", serving.effective_max_len},
                      {"maxNumBatchedTokens", spec.knobs.max_num_batched_tokens.max},
                      {"maxNumSeqs", spec.capacity.max_num_seqs},
                      {"vocabulary", serving.vocabulary},
                      {"kvBlocks", serving.counts.block_count}};
  status["backend"] = serving.backend;
  const bool known = !serving.lanes.empty() && serving.lanes.front().shapes;
  status["shapes"] = shapes_json(known ? *serving.lanes.front().shapes : engine::ShapeStatus{});
  status["lanes"] = Json::array();
  for (std::size_t lane = 0; lane < serving.lanes.size(); ++lane) {
    status["lanes"].push_back(lane_json(serving, lane, spec.devices));
  }
  if (spec.prefix_caching.enabled) status["prefixCache"] = prefix_cache_json(serving.counts);
  status["handoffs"] = handoffs_json(serving);
  status["modeSwitches"] = {{"count", serving.handoffs.switches}, {"lastSeconds", seconds(serving.handoffs.last_switch)}};
  if (spec.lanes.lockstep != Lockstep::Off) status["lockstep"] = lockstep_json(serving.lockstep);
}

std::string capitalised(std::string_view word) {
  std::string text(word);
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

constexpr Column columns[] = {
    {"Name", "string", "Name of the engine.", 0},
    {"Mode", "string", "How prefills and decodes share the device.", 0},
    {"Budget", "integer", "Tokens per step in the current settings.", 0},
    {"Policy", "string", "Which waiting work a step serves first.", 0},
    {"TTFT", "string", "99th percentile of the time to first token in the last window, and the objective.", 0},
    {"ITL", "string", "99th percentile of the inter-token latency in the last window, and the objective.", 0},
    {"Attainment", "string", "Percent of the last window's requests that met both objectives, and the objective.", 0},
    {"Ready", "string", "Whether requests are accepted.", 0},
    {"Age", "date", "Time since creation.", 0},
    {"Settings", "integer", "Number of the current settings.", 1},
    {"Tuning", "string", "What the tuner does.", 1},
    {"Backend", "string", "What executes the steps.", 1},
    {"Lanes", "string", "What the lanes do, and how much of a device that two of them share.", 1},
};

/// `mixed`, `2 prefill + 2 decode`, `decode 60% + prefill 40%`. Spare lanes do nothing and are left out.
Json lanes_cell(const Json& status) {
  if (!status.contains("lanes")) return nullptr;
  std::vector<std::pair<std::string, int>> kinds;
  for (const auto& lane : status["lanes"]) {
    std::string kind = lane["role"];
    if (kind == "Spare") continue;
    kind[0] = static_cast<char>(kind[0] - 'A' + 'a');
    if (lane["sharePercent"] < 100) kind += " " + std::to_string(lane["sharePercent"].get<int>()) + "%";
    const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const auto& known) { return known.first == kind; });
    if (same == kinds.end()) {
      kinds.emplace_back(std::move(kind), 1);
    } else {
      ++same->second;
    }
  }
  std::string text;
  for (const auto& [kind, count] : kinds)
    text += (text.empty() ? "" : " + ") + (count > 1 ? std::to_string(count) + " " : "") + kind;
  return text;
}

Json condition_of(const Json& engine, const char* type, const char* key) {
  for (const auto& condition : engine["status"]["conditions"]) {
    if (condition["type"] == type) return condition[key];
  }
  return nullptr;
}

Json cells_of(const Json& engine, WallTime now) {
  const Json& status = engine["status"];
  const Json& settings = status["settings"];
  const Json& objectives = engine["spec"]["objectives"];
  const bool judged = status.contains("window") && status["window"]["judged"] != 0;
  const auto beside = [&](const char* measured, const std::string& unit, const Json& wanted) {
    const std::string wanted_text = wanted.is_string() ? wanted.get<std::string>() : wanted.dump();
    return (judged ? status["window"][measured].get<std::string>() : "-") + "/" + wanted_text + unit;
  };
  const auto created = parse_time(engine["metadata"]["creationTimestamp"].get<std::string>());
  return Json::array({engine["metadata"]["name"], settings["mode"], settings["maxNumBatchedTokens"], settings["priorityPolicy"],
                      beside("ttftP99", "", objectives["ttft"]), beside("itlP99", "", objectives["itl"]),
                      beside("attainment", "%", objectives["attainment"]), condition_of(engine, "Ready", "status"),
                      format_age(now - created.value_or(now)), settings["number"], condition_of(engine, "Tuning", "reason"),
                      status.contains("backend") ? status["backend"] : Json(nullptr), lanes_cell(status)});
}

}  // namespace

Json engine_status(const ControlState& state, const StatusInputs& inputs) {
  Json status{{"observedGeneration", inputs.observed_generation}, {"conditions", Json::array()}};
  for (const auto& condition : inputs.conditions) status["conditions"].push_back(condition_json(condition));

  Json settings{{"number", inputs.settings_number}};
  settings.update(to_json(state.effective().values));
  status["settings"] = std::move(settings);
  Json layers = Json::object();
  for (const auto& origin : state.effective().origins) layers[std::string(origin.knob)] = capitalised(to_string(origin.layer));
  status["layers"] = std::move(layers);
  if (!state.effective().clamped.empty()) status["clamped"] = state.effective().clamped;
  if (const auto expires = state.override_expires()) status["overrideExpires"] = format_time(*expires);

  if (inputs.window) status["window"] = window_json(*inputs.window);
  status["trials"] = trials_json(inputs);
  if (inputs.twin) status["twin"] = twin_json(*inputs.twin);
  status["manifest"] = {{"path", state.manifest().file}, {"hash", state.manifest().hash}};
  status["restartRequired"] = state.restart_required();
  if (inputs.serving) add_serving(status, *inputs.serving, state.running_spec());
  return status;
}

Json engine_object(const ControlState& state, const Json& status, const std::string& resource_version) {
  Json metadata{{"name", state.name()},
                {"uid", state.saved().uid},
                {"resourceVersion", resource_version},
                {"generation", state.saved().generation},
                {"creationTimestamp", format_time(state.saved().created)}};
  if (Json labels = state.labels(); !labels.empty()) metadata["labels"] = std::move(labels);
  if (Json annotations = state.annotations(); !annotations.empty()) metadata["annotations"] = std::move(annotations);
  return {{"apiVersion", api_version},
          {"kind", engine_kind},
          {"metadata", std::move(metadata)},
          {"spec", to_json(state.spec())},
          {"status", status}};
}

Json engine_list(const std::vector<Json>& engines, const std::string& resource_version) {
  return {{"apiVersion", api_version},
          {"kind", std::string(engine_kind) + "List"},
          {"metadata", {{"resourceVersion", resource_version}}},
          {"items", engines}};
}

Json engine_table(const std::vector<Json>& engines, const std::string& resource_version, IncludeObject include, WallTime now) {
  return make_table(columns, engines, resource_version, include,
                    [now](const Json& engine) { return Json(cells_of(engine, now)); });
}

}  // namespace rubato::control
