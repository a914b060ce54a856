// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/trials.h"

#include <utility>

#include "daemon/control/figures.h"
#include "manifests/json.h"

namespace rubato::control {
namespace {

constexpr std::string_view engine_label = "rubato.dev/engine";

WallTime ended_at(const tuner::Trial& trial) {
  return WallTime(std::chrono::seconds(trial.ended));
}

Json trial_object(const tuner::Trial& trial, const EngineIdentity& engine) {
  const std::string number = std::to_string(trial.number);
  Json metadata{{"name", engine.name + "-" + number}, {"uid", engine.uid + "-" + number}, {"resourceVersion", number}};
  if (trial.ended > 0) metadata["creationTimestamp"] = format_time(ended_at(trial));
  metadata["labels"] = {{engine_label, engine.name}};
  Json status{{"number", trial.number}, {"outcome", trial.outcome}, {"source", trial.source}};
  if (trial.expected) status["expected"] = expected_json(*trial.expected);
  status["measured"] = measured_json(trial.window);
  return {{"apiVersion", api_version},
          {"kind", trial_kind},
          {"metadata", std::move(metadata)},
          {"spec", {{"engine", engine.name}, {"settings", to_json(trial.knobs)}}},
          {"status", std::move(status)}};
}

constexpr Column columns[] = {
    {"Name", "string", "Name of the trial.", 0},
    {"Number", "integer", "Number of the trial.", 0},
    {"Outcome", "string", "What came of it: Incumbent was adopted, Worse and RolledBack were not, Inconclusive showed nothing.",
     0},
    {"Source", "string", "Where the proposal came from.", 0},
    {"Budget", "integer", "Tokens per step.", 0},
    {"Seqs", "integer", "Sequences per step.", 0},
    {"Policy", "string", "Which waiting work a step serves first.", 0},
    {"Expected", "string", "Attainment that was predicted, with its standard deviation.", 0},
    {"Measured", "string", "Attainment that was measured.", 0},
    {"Judged", "integer", "Requests that it was judged by.", 0},
    {"Age", "date", "Time since it ended.", 0},
    {"Mode", "string", "How prefills and decodes share the device.", 1},
    {"Margin", "integer", "Percent kept back from the ITL target by policy Deadline.", 1},
    {"TTFT", "string", "99th percentile of the time to first token.", 1},
    {"ITL", "string", "99th percentile of the inter-token latency.", 1},
};

Json cells_of(const Json& trial, WallTime now) {
  const Json& settings = trial["spec"]["settings"];
  const Json& status = trial["status"];
  const Json& measured = status["measured"];
  std::string expected = "-";
  if (status.contains("expected")) {
    expected =
        status["expected"]["attainment"].get<std::string>() + "% +-" + status["expected"]["attainmentSpread"].get<std::string>();
  }
  std::string age = "<unknown>";
  if (trial["metadata"].contains("creationTimestamp")) {
    const auto ended = parse_time(trial["metadata"]["creationTimestamp"].get<std::string>());
    age = format_age(now - ended.value_or(now));
  }
  const std::string source = status["source"];
  return Json::array({trial["metadata"]["name"], status["number"], status["outcome"], source.empty() ? "-" : source,
                      settings["maxNumBatchedTokens"], settings["maxNumSeqs"], settings["priorityPolicy"], expected,
                      measured["judged"] == 0 ? "-" : measured["attainment"].get<std::string>() + "%", measured["judged"], age,
                      settings["mode"], settings["deadlineMargin"], measured["ttftP99"], measured["itlP99"]});
}

}  // namespace

Json expected_json(const tuner::ExpectedOutcome& expected) {
  return {{"attainment", decimal(100 * expected.attainment)},
          {"attainmentSpread", decimal(100 * expected.attainment_spread)},
          {"ttftP50", rounded(expected.ttft_p50)},
          {"ttftP99", rounded(expected.ttft_p99)},
          {"itlP50", rounded(expected.itl_p50)},
          {"itlP99", rounded(expected.itl_p99)}};
}

Json measured_json(const tuner::Window& window) {
  return {{"length", rounded(window.end - window.begin)},
          {"settingsNumber", window.settings_number},
          {"arrivals", window.arrivals},
          {"arrivalsPerSecond", decimal(window.arrival_rate())},
          {"promptTokens", decimal(window.prompt_tokens_mean)},
          {"outputTokens", decimal(window.output_tokens_mean)},
          {"judged", window.judged},
          {"good", window.good},
          {"rejected", window.rejected},
          {"attainment", decimal(100 * window.attainment())},
          {"ttftP50", rounded(window.ttft_p50)},
          {"ttftP99", rounded(window.ttft_p99)},
          {"itlP50", rounded(window.itl_p50)},
          {"itlP99", rounded(window.itl_p99)}};
}

std::vector<Json> trial_objects(std::span<const tuner::Trial> trials, const EngineIdentity& engine) {
  std::vector<Json> objects;
  for (const tuner::Trial& trial : trials) objects.push_back(trial_object(trial, engine));
  return objects;
}

Json trial_list(std::vector<Json> trials) {
  // Newest first: its number names the whole list.
  const Json version = trials.empty() ? Json("0") : trials.front()["metadata"]["resourceVersion"];
  return {{"apiVersion", api_version},
          {"kind", std::string(trial_kind) + "List"},
          {"metadata", {{"resourceVersion", version}}},
          {"items", std::move(trials)}};
}

Json trial_table(std::span<const Json> trials, IncludeObject include, WallTime now) {
  const Json version = trials.empty() ? Json("0") : trials.front()["metadata"]["resourceVersion"];
  return make_table(columns, trials, version, include, [now](const Json& trial) { return Json(cells_of(trial, now)); });
}

StatusError trial_not_found(const std::string& name) {
  return {.code = 404,
          .reason = "NotFound",
          .message = std::string(trial_plural) + "." + std::string(api_group) + " \"" + name + "\" not found",
          .name = name,
          .kind = std::string(trial_plural),
          .causes = {}};
}

}  // namespace rubato::control
