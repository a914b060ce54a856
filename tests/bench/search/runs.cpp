// SPDX-License-Identifier: Apache-2.0
// See runs.h.
#include "tests/bench/search/runs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace rubato::study {
namespace {

using std::chrono::seconds;

constexpr double within = 0.95;               // of the oracle's share
constexpr Duration slot = seconds(20);        // a window's worth
constexpr Duration tail = seconds(60);        // traffic goes on for so long
constexpr Duration start_up = seconds(1800);  // of a steady run: changes made then are not needless

using Traffic = std::vector<tuner::TrafficRequest>;

// What a row may know beforehand.
struct Scene {
  const RunRequest* request = nullptr;
  const Traces* traces = nullptr;
  ObjectivesSpec objectives;
  Duration horizon{};
  KnobValues single;            // the best static setting without triage
  std::vector<Planned> oracle;  // the best settings of each phase; the first from the start
};

struct RowRun {
  NodeRun run;
  Effort effort;
};

RowRun run_row(const std::string& row, const Scene& scene, const Traffic& traffic, std::uint64_t seed) {
  const Truth truth(scene.request->truth);
  const BaselineOptions options{.space = scene.request->space, .objectives = scene.objectives, .seed = seed};
  NodeOptions node{.initial = default_settings(), .seed = seed, .horizon = scene.horizon, .slot = slot};
  std::unique_ptr<Controller> controller;
  MeteredController* metered = nullptr;
  const auto keep = [&](std::unique_ptr<MeteredController> made) {
    metered = made.get();
    controller = std::move(made);
  };
  if (row == "random") controller = random_search(options);
  if (row == "hill") controller = hill_climbing(options);
  if (row == "aimd") controller = aimd(options);
  if (row == "twovalue") controller = two_values();
  if (row == "plain") keep(plain_tuner(options));
  if (row == "uncalibrated") keep(uncalibrated_twin(options, nominal_laws(*scene.traces, 1)));
  if (row == "ours") keep(tuner_with_twin(options));
  if (row == "static") node.initial = scene.single;
  if (row == "deadline") node.initial.priority_policy = PriorityPolicy::Deadline;
  if (row == "oracle") {
    node.initial = scene.oracle.front().knobs;
    controller = follow(scene.oracle);
  }
  if (!controller) controller = std::make_unique<Still>();
  RowRun result{.run = run_node(traffic, truth, *controller, node), .effort = {}};
  if (metered != nullptr) result.effort = metered->effort();
  return result;
}

// When the settings are within reach of the best for good, in windows: the end of the last stretch in which they are not.
std::optional<double> windows_until_stable(const NodeRun& run, const Cell& cell, double best, Duration horizon, Oracle& oracle) {
  const auto near = [&](const KnobValues& knobs) { return oracle.share(cell, knobs, within * best).share >= within * best; };
  if (!near(run.changes.back().knobs)) return std::nullopt;
  for (std::size_t i = run.changes.size() - 1; i > 0; --i) {
    if (run.changes[i].at >= TimePoint{} + horizon) continue;
    if (!near(run.changes[i - 1].knobs)) return to_seconds(run.changes[i].at.time_since_epoch()) / to_seconds(slot);
  }
  return 0.0;
}

void compare(Record& record, const NodeRun& run, const NodeRun& best) {
  const auto total = static_cast<double>(best.requests());
  const double per_window = total / static_cast<double>(std::max<std::size_t>(1, best.slots.size()));
  record.lost = per_window > 0 ? static_cast<double>(best.good() - run.good()) / per_window : 0;
  double mine = 0;
  double theirs = 0;
  for (std::size_t i = best.slots.size() * 3 / 4; i < best.slots.size(); ++i) {
    mine += run.slots[i].good;
    theirs += best.slots[i].good;
  }
  record.final_share = theirs > 0 ? mine / theirs : 1;
}

double changes_per_hour(const NodeRun& run, Duration horizon, Duration from) {
  const auto late = std::count_if(run.changes.begin() + 1, run.changes.end(),
                                  [&](const Change& change) { return change.at >= TimePoint{} + from; });
  return static_cast<double>(late) / (to_seconds(horizon - from) / 3600);
}

std::vector<std::string> first_changes(const NodeRun& run) {
  constexpr std::size_t most = 60;
  std::vector<std::string> lines;
  for (std::size_t i = 1; i < std::min(run.changes.size(), most); ++i) {
    const Change& change = run.changes[i];
    lines.push_back(std::to_string((change.at - TimePoint{}) / seconds(1)) + " s: " + text_of(change.knobs) + ", " +
                    change.reason);
  }
  return lines;
}

Record blank(const RunRequest& request) {
  Record record;
  record.kind = request.kind;
  record.workload = request.workload != nullptr ? request.workload->name : name_of(request.kind);
  record.load = request.load;
  record.truth = study::name_of(request.truth);
  record.space = request.space == Space::Full ? "full" : "static";
  return record;
}

// All rows and seeds on the same arrivals per seed. The oracle's and the single setting's runs are made once per seed.
std::vector<Record> run_rows(const Scene& scene, Record pattern, const std::vector<Traffic>& traffic,
                             std::vector<std::vector<NodeRun>>* kept) {
  const RunRequest& request = *scene.request;
  const std::size_t seeds = traffic.size();
  std::vector<NodeRun> best(seeds);
  std::vector<NodeRun> single(seeds);
  in_parallel(request.threads, 2 * seeds, [&](std::size_t i) {
    const bool oracle = i % 2 == 0;
    (oracle ? best : single)[i / 2] = run_row(oracle ? "oracle" : "static", scene, traffic[i / 2], i / 2 + 1).run;
  });
  std::vector<Record> records(request.rows.size() * seeds, pattern);
  if (kept != nullptr) kept->assign(request.rows.size(), std::vector<NodeRun>(seeds));
  in_parallel(request.threads, records.size(), [&](std::size_t i) {
    const std::size_t row = i / seeds;
    const std::size_t seed = i % seeds;
    const std::string& name = request.rows[row];
    RowRun made;
    if (name == "oracle") {
      made.run = best[seed];
    } else if (name == "static") {
      made.run = single[seed];
    } else {
      made = run_row(name, scene, traffic[seed], seed + 1);
    }
    Record& record = records[i];
    record.row = name;
    record.seed = seed + 1;
    record.effort = made.effort;
    record.attainment = made.run.attainment();
    record.static_attainment = single[seed].attainment();
    record.settings = text_of(made.run.changes.back().knobs);
    record.changes = first_changes(made.run);
    record.changes_per_hour = changes_per_hour(made.run, scene.horizon,
                                               request.kind == Kind::Steady ? std::min(start_up, scene.horizon / 2) : Duration{});
    compare(record, made.run, best[seed]);
    if (kept != nullptr) (*kept)[row][seed] = std::move(made.run);
  });
  return records;
}

std::vector<Traffic> for_seeds(std::uint64_t seeds, const std::function<Traffic(std::uint64_t)>& make) {
  std::vector<Traffic> all;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) all.push_back(make(seed));
  return all;
}

std::vector<Record> run_cell(const RunRequest& request, const Traces& traces, Oracle& oracle) {
  const Cell cell{.workload = request.workload,
                  .truth = request.truth,
                  .rate = request.rate ? *request.rate : request.load * oracle.capacity(*request.workload, request.truth)};
  const Oracle::Best best = oracle.best(cell, request.space);
  const Oracle::Best single = request.space == Space::Static ? best : oracle.best(cell, Space::Static);
  const Duration horizon = request.kind == Kind::Steady ? request.length : request.windows * slot;
  std::fprintf(stderr, "%s %s %.2f: %.2f requests/s, best %s %.3f, without triage %s %.3f\n", request.workload->name.c_str(),
               study::name_of(request.truth).c_str(), request.load, cell.rate, text_of(best.knobs).c_str(), best.share,
               text_of(single.knobs).c_str(), single.share);
  const Scene scene{.request = &request,
                    .traces = &traces,
                    .objectives = request.workload->objectives(),
                    .horizon = horizon,
                    .single = single.knobs,
                    .oracle = {{.at = TimePoint{}, .knobs = best.knobs}}};
  const auto traffic = for_seeds(request.seeds, [&](std::uint64_t seed) {
    return make_traffic(traces, *request.workload, cell.rate, TimePoint{}, horizon + tail, seed);
  });
  std::vector<std::vector<NodeRun>> runs;
  std::vector<Record> records = run_rows(scene, blank(request), traffic, &runs);
  if (request.kind == Kind::Steady) return records;
  in_parallel(request.threads, records.size(), [&](std::size_t i) {
    if (records[i].row == "twovalue") return;  // has no settings that stay
    records[i].windows = windows_until_stable(runs[i / traffic.size()][i % traffic.size()], cell, best.share, horizon, oracle);
  });
  return records;
}

struct PhaseOfDay {
  const Workload* workload;
  TimePoint begin;
  double rate;
};

// The setting with the most good requests over all phases, by steady shares, then by runs of the few best.
KnobValues best_single(const std::vector<Cell>& cells, const std::vector<Traffic>& traffic, Duration horizon, TruthKind kind,
                       int threads, Oracle& oracle) {
  constexpr std::size_t finalists = 6;
  const std::vector<KnobValues> grid = settings_grid(Space::Static, Grid::Fine);
  std::vector<double> good(grid.size(), 0);
  for (const Cell& cell : cells) {
    const double floor = 0.85 * oracle.best(cell, Space::Static).share;
    in_parallel(threads, grid.size(), [&](std::size_t i) { good[i] += cell.rate * oracle.share(cell, grid[i], floor).share; });
  }
  std::vector<std::size_t> order(grid.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return good[a] > good[b]; });
  std::array<double, finalists> attained{};
  const Truth truth(kind);
  in_parallel(threads, finalists, [&](std::size_t i) {
    for (std::size_t seed = 0; seed < std::min<std::size_t>(2, traffic.size()); ++seed) {
      Still still;
      attained[i] +=
          run_node(traffic[seed], truth, still, {.initial = grid[order[i]], .seed = seed + 1, .horizon = horizon}).attainment();
    }
  });
  return grid[order[static_cast<std::size_t>(std::max_element(attained.begin(), attained.end()) - attained.begin())]];
}

std::vector<Record> run_phases(const RunRequest& request, const std::vector<PhaseOfDay>& phases, TimePoint end, Record pattern,
                               const Traces& traces, Oracle& oracle) {
  std::vector<Cell> cells;
  Scene scene{.request = &request,
              .traces = &traces,
              .objectives = workload_named("chat")->objectives(),
              .horizon = end - TimePoint{},
              .single = {},
              .oracle = {}};
  for (const PhaseOfDay& phase : phases) {
    cells.push_back({.workload = phase.workload, .truth = request.truth, .rate = phase.rate});
    // The oracle of the day is one of static settings: no triage, whatever the others may choose.
    scene.oracle.push_back({.at = phase.begin, .knobs = oracle.best(cells.back(), Space::Static).knobs});
  }
  const auto traffic = for_seeds(request.seeds, [&](std::uint64_t seed) {
    Traffic all;
    for (std::size_t i = 0; i < phases.size(); ++i) {
      const TimePoint until = i + 1 < phases.size() ? phases[i + 1].begin : end + tail;
      const Traffic part =
          make_traffic(traces, *phases[i].workload, phases[i].rate, phases[i].begin, until - phases[i].begin, seed * 100 + i);
      for (const tuner::TrafficRequest& one : part) {
        if (all.empty() || one.arrival > all.back().arrival) all.push_back(one);
      }
    }
    return all;
  });
  scene.single = best_single(cells, traffic, scene.horizon, request.truth, request.threads, oracle);
  std::fprintf(stderr, "%s %.2f: best single %s\n", pattern.workload.c_str(), request.load, text_of(scene.single).c_str());
  return run_rows(scene, std::move(pattern), traffic, nullptr);
}

std::vector<Record> run_day(const RunRequest& request, const Traces& traces, Oracle& oracle) {
  std::vector<PhaseOfDay> phases;
  TimePoint at{};
  for (const char* name : {"conversation", "chat", "burst", "retrieval", "mixed", "long", "conversation", "retrieval"}) {
    const Workload* workload = workload_named(name);
    phases.push_back({.workload = workload, .begin = at, .rate = request.load * oracle.capacity(*workload, request.truth)});
    at += request.phase;
  }
  return run_phases(request, phases, at, blank(request), traces, oracle);
}

std::vector<Record> run_alternate(const RunRequest& request, const Traces& traces, Oracle& oracle) {
  constexpr Duration whole = seconds(2400);
  std::vector<PhaseOfDay> phases;
  for (TimePoint at{}; at < TimePoint{} + whole; at += request.period) {
    const Workload* workload = workload_named(phases.size() % 2 == 0 ? "chat" : "retrieval");
    phases.push_back({.workload = workload, .begin = at, .rate = request.load * oracle.capacity(*workload, request.truth)});
  }
  Record pattern = blank(request);
  pattern.workload = std::to_string(request.period / seconds(1)) + " s";
  return run_phases(request, phases, TimePoint{} + whole, pattern, traces, oracle);
}

}  // namespace

std::string name_of(Kind kind) {
  switch (kind) {
    case Kind::Cell:
      return "cell";
    case Kind::Day:
      return "day";
    case Kind::Alternate:
      return "alternate";
    case Kind::Steady:
      return "steady";
  }
  return {};
}

std::optional<Kind> kind_named(const std::string& name) {
  for (const Kind kind : {Kind::Cell, Kind::Day, Kind::Alternate, Kind::Steady}) {
    if (name_of(kind) == name) return kind;
  }
  return std::nullopt;
}

const std::vector<std::string>& all_rows() {
  static const std::vector<std::string> rows{"default", "static",   "oracle", "deadline",     "random", "hill",
                                             "aimd",    "twovalue", "plain",  "uncalibrated", "ours"};
  return rows;
}

std::vector<Record> run(const RunRequest& request, const Traces& traces, Oracle& oracle) {
  switch (request.kind) {
    case Kind::Cell:
    case Kind::Steady:
      return run_cell(request, traces, oracle);
    case Kind::Day:
      return run_day(request, traces, oracle);
    case Kind::Alternate:
      return run_alternate(request, traces, oracle);
  }
  return {};
}

}  // namespace rubato::study
