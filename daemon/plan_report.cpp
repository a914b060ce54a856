// SPDX-License-Identifier: Apache-2.0
// The plan for people and programs, and the command: where manifest, trace and step times come from.
#include <fmt/format.h>

#include <cstdio>
#include <optional>
#include <utility>

#include "daemon/calibration_file.h"
#include "daemon/control/control_state.h"
#include "daemon/control/figures.h"
#include "daemon/lane_threads.h"
#include "daemon/model_loading.h"
#include "daemon/plan.h"
#include "daemon/step_measurement.h"
#include "manifests/json.h"
#include "manifests/read_manifest.h"
#include "tuner/describe.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;
using tuner::TwinQuantile;

Duration latency(const tuner::Forecast& forecast, TwinQuantile quantile) {
  return forecast.latency[static_cast<std::size_t>(quantile)];
}

std::string latency_cells(const tuner::Forecast& forecast) {
  return fmt::format("{:>9} {:>9} {:>9} {:>9}", control::rounded(latency(forecast, TwinQuantile::TtftP50)),
                     control::rounded(latency(forecast, TwinQuantile::TtftP99)),
                     control::rounded(latency(forecast, TwinQuantile::ItlP50)),
                     control::rounded(latency(forecast, TwinQuantile::ItlP99)));
}

std::string attainment_cell(const tuner::Forecast& forecast) {
  return fmt::format("{} +-{}", control::decimal(100 * forecast.attainment), control::decimal(100 * forecast.attainment_spread));
}

std::string number(double value) {
  return fmt::format("{:.3g}", value);
}

double base_rate(const LoadPlan& plan) {
  for (const PlannedLoad& load : plan.loads) {
    if (load.scale == 1) return load.rate;
  }
  return 0;
}

std::string limit_text(const LoadPlan& plan, const ObjectivesSpec& objectives) {
  const std::string goal = fmt::format("{} % of requests good", objectives.attainment);
  if (!plan.holds_to)
    return fmt::format("{} at none of the loads looked at, down to {} of the trace's rate", goal, number(plan_scale_min));
  const std::string load = fmt::format("{} times the trace's rate, about {} requests/s", number(*plan.holds_to),
                                       number(*plan.holds_to * base_rate(plan)));
  return plan.holds_further ? fmt::format("{} at all loads looked at, up to {}", goal, load)
                            : fmt::format("{} up to {}", goal, load);
}

Json forecast_json(const tuner::Forecast& forecast) {
  return {{"attainment", control::decimal(100 * forecast.attainment)},
          {"attainmentSpread", control::decimal(100 * forecast.attainment_spread)},
          {"ttftP50", control::rounded(latency(forecast, TwinQuantile::TtftP50))},
          {"ttftP99", control::rounded(latency(forecast, TwinQuantile::TtftP99))},
          {"itlP50", control::rounded(latency(forecast, TwinQuantile::ItlP50))},
          {"itlP99", control::rounded(latency(forecast, TwinQuantile::ItlP99))}};
}

struct StepTimes {
  tuner::StepLaws laws;
  bool shapes = true;
  std::string source;
};

Result<StepTimes> read_step_times(const Options& options, const EngineSpec& spec, const ModelPlan& planned) {
  Result<Calibration> read = read_calibration(options.calibration);
  if (!read) return Unexpected(std::move(read).error());
  const std::string stem = model_key_stem(spec, planned);
  if (!read->model_key.starts_with(stem)) {
    return unexpected(
        ErrorCode::InvalidArgument, "modelKey",
        fmt::format("{}: modelKey: is '{}', the manifest's model is '{}...'", options.calibration, read->model_key, stem));
  }
  return StepTimes{.laws = std::move(read->laws), .shapes = true, .source = "learnt by a daemon of " + read->model_key};
}

Result<StepTimes> measure_step_times(const Options& options, const EngineSpec& spec) {
  fmt::print(stderr, "rubatod: no --calibration: loading the model and measuring steps for {}\n",
             format_duration(options.measure));
  Result<LoadedModel> model = load_model(spec, {});
  if (!model) return Unexpected(std::move(model).error());
  Result<tuner::StepLaws> laws =
      measure_steps(*model, spec.knobs, {.length = options.measure, .seed = options.workload.seed, .now = steady_now});
  if (!laws) return Unexpected(std::move(laws).error());
  std::string source = "measured on this machine: " + model_key(spec, *model);
  if (model->plan.limits.lanes_per_device > 1) source += " (one lane at a time: how two slow each other is derived)";
  return StepTimes{
      .laws = *std::move(laws), .shapes = model->backends.front()->shape_limits().count_max > 0, .source = std::move(source)};
}

int fail(const Error& error) {
  fmt::print(stderr, "rubatod: {}\n", error.message);
  return 1;
}

}  // namespace

std::string plan_text(const LoadPlan& plan, const ObjectivesSpec& objectives, const std::string& step_source) {
  std::string text = fmt::format("step times  {}; {} steps, off by {} % on average\n", step_source, plan.steps,
                                 control::decimal(100 * plan.step_error));
  text += fmt::format("trace       {} requests, {} requests/s", plan.requests, number(base_rate(plan)));
  if (plan.shared_tokens > 0) {
    text +=
        fmt::format("; {} % of the prompt tokens taken to be found in the prefix cache",
                    control::decimal(100.0 * static_cast<double>(plan.shared_tokens) / static_cast<double>(plan.prompt_tokens)));
  }
  text += fmt::format("\nobjectives  TTFT {}, ITL {}, {} % of requests\n", format_duration(objectives.ttft),
                      format_duration(objectives.itl), objectives.attainment);
  text += fmt::format("initial     {}\n", tuner::describe(plan.initial));
  text += fmt::format("chosen      {}{} ({} looked at)\n", tuner::describe(plan.chosen),
                      plan.chosen == plan.initial ? ", as they are" : "", plan.candidates);
  text += fmt::format("holds       {}\n\n", limit_text(plan, objectives));
  text += fmt::format("{:>5} {:>10}  {:>13}  {:>13} {:>9} {:>9} {:>9} {:>9}\n", "load", "requests/s", "initial good%",
                      "chosen good%", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99");
  for (const PlannedLoad& load : plan.loads) {
    text += fmt::format("{:>5} {:>10}  {:>13}  {:>13} {}\n", number(load.scale), number(load.rate), attainment_cell(load.initial),
                        attainment_cell(load.chosen), latency_cells(load.chosen));
  }
  return text;
}

Json plan_json(const LoadPlan& plan, const ObjectivesSpec& objectives, const std::string& step_source) {
  Json loads = Json::array();
  for (const PlannedLoad& load : plan.loads) {
    loads.push_back({{"scale", number(load.scale)},
                     {"requestsPerSecond", number(load.rate)},
                     {"chosen", forecast_json(load.chosen)},
                     {"initial", forecast_json(load.initial)}});
  }
  Json json{
      {"apiVersion", api_version},
      {"kind", "Plan"},
      {"stepTimes", {{"source", step_source}, {"steps", plan.steps}, {"errorPercent", control::decimal(100 * plan.step_error)}}},
      {"trace", {{"requests", plan.requests}, {"promptTokens", plan.prompt_tokens}, {"sharedTokens", plan.shared_tokens}}},
      {"objectives",
       {{"ttft", format_duration(objectives.ttft)},
        {"itl", format_duration(objectives.itl)},
        {"attainment", objectives.attainment}}},
      {"initial", to_json(plan.initial)},
      {"chosen", to_json(plan.chosen)},
      {"candidates", plan.candidates},
      {"loads", std::move(loads)}};
  Json highest{{"found", plan.holds_to.has_value()}, {"holdsFurther", plan.holds_further}};
  if (plan.holds_to) {
    highest["scale"] = number(*plan.holds_to);
    highest["requestsPerSecond"] = number(*plan.holds_to * base_rate(plan));
  }
  json["highestLoad"] = std::move(highest);
  return json;
}

int plan(const Options& options) {
  const auto manifest = read_manifest(options.manifest);
  if (!manifest) {
    fmt::print(stderr, "{}", manifest.failure().text());
    return 1;
  }
  const control::ControlState state(
      *manifest, {}, control::WallTime(std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now())));
  const EngineSpec& spec = state.running_spec();
  const Result<ModelPlan> planned = plan_model(spec);
  if (!planned) return fail(planned.error());
  replay::WorkloadOptions wanted = options.workload;
  wanted.max_model_len = planned->limits.each.max_model_len;
  Result<replay::Workload> workload = replay::read_workload(wanted);
  if (!workload) return fail(workload.error());
  if (workload->clipped > 0)
    fmt::print(stderr, "rubatod: {} requests shortened to {} tokens\n", workload->clipped, *wanted.max_model_len);
  Result<StepTimes> steps =
      options.calibration.empty() ? measure_step_times(options, spec) : read_step_times(options, spec, *planned);
  if (!steps) return fail(steps.error());
  const PlanQuestion question{.limits = planned->limits,
                              .shapes = steps->shapes,
                              .space = state.tuning_input().space,
                              .objectives = spec.objectives,
                              .laws = std::move(steps->laws),
                              .workload = *std::move(workload)};
  const Result<LoadPlan> made = make_plan(question, [](const std::string& what) { fmt::print(stderr, "rubatod: {}\n", what); });
  if (!made) return fail(made.error());
  if (options.output_format == OutputFormat::Json) {
    fmt::print("{}\n", plan_json(*made, spec.objectives, steps->source).dump(2));
  } else {
    fmt::print("{}", plan_text(*made, spec.objectives, steps->source));
  }
  return 0;
}

}  // namespace rubato
