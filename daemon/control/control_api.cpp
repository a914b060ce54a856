// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/control_api.h"

#include <algorithm>
#include <array>

#include "daemon/control/dashboard.h"
#include "daemon/control/discovery.h"
#include "daemon/control/health.h"
#include "daemon/control/object_query.h"
#include "daemon/control/table.h"
#include "daemon/control/trials.h"

namespace rubato::control {
namespace {

constexpr std::string_view engines_path = "/apis/rubato.dev/v1alpha1/engines";
constexpr std::string_view trials_path = "/apis/rubato.dev/v1alpha1/trials";

std::string media_type(const http::Request& request) {
  const std::string_view whole = request.header("content-type");
  std::string type(whole.substr(0, whole.find_first_of("; ")));
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return type;
}

/// Deepest nesting of brackets outside strings: checked before anything recurses into a hostile body.
int nesting_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (std::size_t index = 0; index < text.size(); ++index) {
    const char c = text[index];
    if (quoted) {
      if (c == '\\') ++index;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

/// A Warning header holds one line of printable text in quotes.
std::string warning_header(const std::string& text) {
  std::string quoted = "299 - \"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) continue;
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

std::variant<PatchRequest, StatusError> read_patch(const http::Request& request) {
  if (media_type(request) != "application/merge-patch+json") return unsupported_patch_type();
  if (request.body.size() > ControlApi::patch_bytes_max) {
    return from_http_status(413, "the body is larger than " + std::to_string(ControlApi::patch_bytes_max) + " bytes");
  }
  PatchRequest patch;
  const std::string validation = query_of(request, "fieldValidation");
  if (validation == "Strict") {
    patch.validation = FieldValidation::Strict;
  } else if (validation == "Ignore") {
    patch.validation = FieldValidation::Ignore;
  } else if (!validation.empty() && validation != "Warn") {
    return bad_request("fieldValidation must be Ignore, Warn or Strict, not \"" + validation + "\"");
  }
  if (nesting_depth(request.body) > ControlApi::json_depth_max) {
    return bad_request("the body is nested deeper than " + std::to_string(ControlApi::json_depth_max) + " levels");
  }
  try {
    patch.body = Json::parse(request.body);
  } catch (const Json::exception& error) {
    return bad_request("the object provided is unrecognized (must be of type " + std::string(engine_kind) + "): " + error.what());
  }
  return patch;
}

constexpr Column event_columns[] = {
    {"Last Seen", "string", "", 0}, {"Type", "string", "", 0},    {"Reason", "string", "", 0},
    {"Object", "string", "", 0},    {"Message", "string", "", 0},
};

Json event_table(const std::vector<Json>& events, WallTime now) {
  return make_table(event_columns, events, "", IncludeObject::Metadata, [now](const Json& event) {
    const auto last = parse_time(event["lastTimestamp"].get<std::string>());
    const std::string object = std::string(engine_singular) + "/" + event["involvedObject"]["name"].get<std::string>();
    return Json{format_age(now - last.value_or(now)), event["type"], event["reason"], object, event["message"]};
  });
}

using Answer = std::function<http::Response(const http::Request&, const http::PathParameters&)>;

void add_route(http::Router& router, std::string_view method, std::string_view pattern, Answer answer) {
  router.add(
      method, pattern,
      [answer = std::move(answer)](http::Request request, std::shared_ptr<http::Exchange> exchange,
                                   const http::PathParameters& parameters) { exchange->respond(answer(request, parameters)); });
}

}  // namespace

http::Response metrics_response(Metrics& metrics, TimePoint now) {
  return {.status = 200,
          .content_type = std::string(Metrics::content_type),
          .body = *metrics.render(now),
          .headers = {{"Cache-Control", "no-cache"}}};
}

ControlApi::ControlApi(Reconciler& reconciler, Metrics& metrics, ControlApiOptions options)
    : reconciler_(reconciler), metrics_(metrics), options_(std::move(options)) {}

http::Response ControlApi::error_response(int status, std::string message) {
  return to_response(from_http_status(status, std::move(message)));
}

http::Response ControlApi::list_engines(const http::Request& request) const {
  static constexpr std::array<std::string_view, 1> fields{"metadata.name"};
  if (auto error = unserved_list(request)) return to_response(*error);
  EngineSnapshot engine = reconciler_.engine();
  std::vector<Json> items{std::move(engine.object)};
  if (auto error = apply_field_selector(request, fields, items)) return to_response(*error);
  if (auto error = apply_label_selector(request, items)) return to_response(*error);
  if (wanted_form(request) == Wanted::Table)
    return json_response(engine_table(items, engine.resource_version, *include_object(request), options_.wall_clock()));
  return json_response(engine_list(items, engine.resource_version));
}

http::Response ControlApi::get_engine(const http::Request& request, const std::string& name) const {
  const Wanted wanted = wanted_form(request);
  if (wanted == Wanted::Nothing) return to_response(not_acceptable());
  const auto include = include_object(request);
  if (!include) return to_response(bad_request("includeObject must be None, Metadata or Object"));
  const EngineSnapshot engine = reconciler_.engine();
  if (engine.object["metadata"]["name"] != name) return to_response(not_found(name));
  if (wanted == Wanted::Table)
    return json_response(engine_table({engine.object}, engine.resource_version, *include, options_.wall_clock()));
  return json_response(engine.object);
}

http::Response ControlApi::patch_engine(const http::Request& request, const std::string& name) const {
  const Wanted wanted = wanted_form(request);
  if (wanted == Wanted::Nothing) return to_response(not_acceptable());
  if (name != reconciler_.name()) return to_response(not_found(name));
  const std::string dry_run = query_of(request, "dryRun");
  if (!dry_run.empty() && dry_run != "All") return to_response(bad_request("dryRun must be All, not \"" + dry_run + "\""));
  auto patch = read_patch(request);
  if (const auto* error = std::get_if<StatusError>(&patch)) return to_response(*error);
  const auto outcome = reconciler_.patch(std::get<PatchRequest>(patch), dry_run == "All" ? DryRun::All : DryRun::None);
  if (const auto* error = std::get_if<StatusError>(&outcome)) return to_response(*error);
  const auto& answer = std::get<PatchAnswer>(outcome);
  http::Response response = wanted == Wanted::Table
                                ? json_response(engine_table({answer.engine.object}, answer.engine.resource_version,
                                                             IncludeObject::Metadata, options_.wall_clock()))
                                : json_response(answer.engine.object);
  for (const auto& warning : answer.warnings) response.headers.emplace_back("Warning", warning_header(warning));
  return response;
}

http::Response ControlApi::list_trials(const http::Request& request) const {
  if (auto error = unserved_list(request)) return to_response(*error);
  std::vector<Json> items = trial_objects(reconciler_.tuning_report().trials, identity());
  if (auto error = apply_field_selector(request, trial_fields, items)) return to_response(*error);
  if (auto error = apply_label_selector(request, items)) return to_response(*error);
  if (wanted_form(request) == Wanted::Table)
    return json_response(trial_table(items, *include_object(request), options_.wall_clock()));
  return json_response(trial_list(std::move(items)));
}

http::Response ControlApi::get_trial(const http::Request& request, const std::string& name) const {
  if (auto error = unserved_list(request)) return to_response(*error);
  std::vector<Json> items = trial_objects(reconciler_.tuning_report().trials, identity());
  std::erase_if(items, [&](const Json& trial) { return trial["metadata"]["name"] != name; });
  if (items.empty()) return to_response(trial_not_found(name));
  if (wanted_form(request) == Wanted::Table)
    return json_response(trial_table(items, *include_object(request), options_.wall_clock()));
  return json_response(items.front());
}

http::Response ControlApi::get_regimes(const http::Request& request, const std::string& name) const {
  if (wanted_form(request) == Wanted::Nothing) return to_response(not_acceptable());
  if (name != reconciler_.name()) return to_response(not_found(name));
  const TuningReport report = reconciler_.tuning_report();
  return json_response(Json::parse(tuner::regimes_to_json(report.regimes, report.model_key)));
}

EngineIdentity ControlApi::identity() const {
  const Json metadata = reconciler_.engine().object["metadata"];
  return {.name = metadata["name"], .uid = metadata["uid"]};
}

http::Response ControlApi::list_events(const http::Request& request, const std::string& name_space) const {
  static constexpr std::array<std::string_view, 9> fields{"involvedObject.name",
                                                          "involvedObject.namespace",
                                                          "involvedObject.kind",
                                                          "involvedObject.uid",
                                                          "involvedObject.apiVersion",
                                                          "metadata.name",
                                                          "metadata.namespace",
                                                          "reason",
                                                          "type"};
  const Wanted wanted = wanted_form(request);
  if (wanted == Wanted::Nothing) return to_response(not_acceptable());
  std::vector<Json> items;
  if (name_space.empty() || name_space == "default") items = reconciler_.events();
  if (auto error = apply_field_selector(request, fields, items)) return to_response(*error);
  if (wanted == Wanted::Table) return json_response(event_table(items, options_.wall_clock()));
  return json_response(
      {{"kind", "EventList"}, {"apiVersion", "v1"}, {"metadata", {{"resourceVersion", ""}}}, {"items", std::move(items)}});
}

void ControlApi::add_routes(http::Router& router) const {
  const auto get = [&router](std::string_view pattern, Answer answer) { add_route(router, "GET", pattern, std::move(answer)); };
  const auto document = [&](std::string_view pattern, const Json& json) {
    get(pattern, [json](const auto&, const auto&) { return json_response(json); });
  };
  // A copy of this object rides in each handler: it holds two references and the clocks.
  const ControlApi api = *this;

  // healthz is the old name of livez.
  const std::vector<std::pair<std::string, std::vector<Check> (*)(const ServingHealth&)>> probes{
      {"livez", live_checks}, {"healthz", live_checks}, {"readyz", ready_checks}};
  for (const auto& probe : probes) {
    const std::string endpoint = probe.first;
    const auto checks = [api, make = probe.second] { return make(api.reconciler_.health()); };
    get("/" + endpoint,
        [checks, endpoint](const auto& request, const auto&) { return health_response(endpoint, checks(), request); });
    get("/" + endpoint + "/{check}",
        [checks](const auto&, const auto& parameters) { return single_check_response(checks(), parameters.at("check")); });
  }
  get("/metrics", [api](const auto&, const auto&) { return metrics_response(api.metrics_, api.options_.steady_clock()); });
  get("/", [](const auto&, const auto&) { return dashboard_response(); });

  document("/version", version_info(options_.version));
  document("/apis", discovery_groups());
  document("/apis/rubato.dev", discovery_group());
  document("/apis/rubato.dev/v1alpha1", discovery_resources());
  document("/api", core_versions());
  document("/api/v1", core_resources());

  const std::string engines(engines_path);
  get(engines, [api](const auto& request, const auto&) { return api.list_engines(request); });
  for (const char* suffix : {"/{name}", "/{name}/status"}) {
    get(engines + suffix,
        [api](const auto& request, const auto& parameters) { return api.get_engine(request, parameters.at("name")); });
  }
  add_route(router, "PATCH", engines + "/{name}",
            [api](const auto& request, const auto& parameters) { return api.patch_engine(request, parameters.at("name")); });

  get(engines + "/{name}/regimes",
      [api](const auto& request, const auto& parameters) { return api.get_regimes(request, parameters.at("name")); });

  const std::string trials(trials_path);
  get(trials, [api](const auto& request, const auto&) { return api.list_trials(request); });
  get(trials + "/{name}",
      [api](const auto& request, const auto& parameters) { return api.get_trial(request, parameters.at("name")); });

  get("/api/v1/events", [api](const auto& request, const auto&) { return api.list_events(request, ""); });
  get("/api/v1/namespaces/{namespace}/events",
      [api](const auto& request, const auto& parameters) { return api.list_events(request, parameters.at("namespace")); });
}

}  // namespace rubato::control
