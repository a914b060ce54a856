// SPDX-License-Identifier: Apache-2.0
// See oracle.h.
#include "tests/bench/search/oracle.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "manifests/names.h"

namespace rubato::study {
namespace {

constexpr double bearable_share = 0.9;
constexpr std::uint64_t oracle_seed = 100'000;  // apart from those of the runs

std::string decimal(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

}  // namespace

void in_parallel(int threads, std::size_t count, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads && static_cast<std::size_t>(i) < count; ++i) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
}

std::string text_of(const KnobValues& knobs) {
  std::string text = std::to_string(knobs.max_num_batched_tokens) + "/" + std::to_string(knobs.max_num_seqs) + " " +
                     std::string(to_string(knobs.priority_policy));
  if (knobs.priority_policy == PriorityPolicy::Deadline) text += " " + std::to_string(knobs.deadline_margin) + "%";
  return text;
}

Oracle::Oracle(const Traces& traces, const OracleOptions& options) : traces_(traces), options_(options) {
  fingerprint_ = fingerprint();
  if (options_.cache.empty()) return;
  std::ifstream in(options_.cache);
  if (!in) return;
  const nlohmann::json file = nlohmann::json::parse(in, nullptr, false);
  if (file.is_discarded()) return;
  const nlohmann::json capacities = file.value("capacities", nlohmann::json::object());
  for (const auto& [name, value] : capacities.items()) capacities_[name] = value;
  const nlohmann::json shares = file.value("shares", nlohmann::json::object());
  for (const auto& [name, value] : shares.items()) shares_[name] = {.share = value.at(0), .exact = value.at(1)};
}

void Oracle::save() {
  if (options_.cache.empty()) return;
  nlohmann::json file = nlohmann::json::object();
  if (std::ifstream in(options_.cache); in) {
    const nlohmann::json there = nlohmann::json::parse(in, nullptr, false);
    if (there.is_object()) file = there;
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [name, value] : capacities_) file["capacities"][name] = value;
  for (const auto& [name, value] : shares_) file["shares"][name] = {value.share, value.exact};
  const std::string temporary = options_.cache + ".new";
  std::ofstream(temporary) << file.dump() << '\n';
  std::rename(temporary.c_str(), options_.cache.c_str());
}

std::string Oracle::fingerprint() const {
  // What a short run under each policy comes to: the file serves no other code, traces or truth.
  const Truth truth(TruthKind::Nominal);
  const auto traffic = make_traffic(traces_, *workload_named("mixed"), 8, TimePoint{}, std::chrono::seconds(25), oracle_seed);
  double sum = to_seconds(options_.measured) * options_.repeats;
  for (const PriorityPolicy policy : search_space(Space::Full).knobs.priority_policy.choices) {
    KnobValues knobs = default_settings();
    knobs.priority_policy = policy;
    tuner::Simulation node({.limits = node_limits(), .initial = knobs, .seed = 1, .shapes = true}, truth);
    for (const tuner::TrafficRequest& request : traffic) node.add(request);
    node.run_until(TimePoint{} + std::chrono::seconds(20));
    double ttft = 0;
    for (const tuner::SimulatedRequest& one : node.take_requests(true)) ttft += to_seconds(one.ttft.value_or(Duration::zero()));
    sum = sum * 1.37 + static_cast<double>(node.steps()) + ttft;
  }
  return decimal(sum, 6);
}

std::string Oracle::key(const Cell& cell) const {
  return fingerprint_ + "|" + cell.workload->name + "|" + study::name_of(cell.truth);
}

SteadyShare Oracle::measure(const Cell& cell, const KnobValues& knobs, double floor) const {
  const Truth truth(cell.truth);
  SteadyShare all{.share = 0, .exact = true};
  for (int i = 0; i < options_.repeats; ++i) {
    SteadyOptions steady{.measured = options_.measured, .seed = oracle_seed + static_cast<std::uint64_t>(i)};
    // What is left to be had if all that follows were perfect.
    steady.floor = std::max(0.0, floor * options_.repeats - all.share - (options_.repeats - 1 - i));
    const Duration length = steady.warm + steady.measured + steady.after;
    const auto traffic = make_traffic(traces_, *cell.workload, cell.rate, TimePoint{}, length, steady.seed);
    const SteadyShare one = steady_share(traffic, truth, knobs, steady);
    all.share += one.share;
    if (!one.exact) return {.share = (all.share + (options_.repeats - 1 - i)) / options_.repeats, .exact = false};
  }
  all.share /= options_.repeats;
  return all;
}

SteadyShare Oracle::share(const Cell& cell, const KnobValues& knobs, double floor) {
  const std::string name = key(cell) + "|" + decimal(cell.rate, 4) + "|" + text_of(knobs);
  {
    const std::lock_guard lock(mutex_);
    const auto found = shares_.find(name);
    if (found != shares_.end() && (found->second.exact || found->second.share < floor)) return found->second;
  }
  const SteadyShare measured = measure(cell, knobs, floor);
  const std::lock_guard lock(mutex_);
  shares_[name] = measured;
  return measured;
}

Oracle::Best Oracle::best(const Cell& cell, Space space) {
  constexpr std::size_t batch = 8;        // whose floor comes from those before: the same whatever the threads
  constexpr double worth_knowing = 0.85;  // of the best so far
  const std::vector<KnobValues> grid = settings_grid(space, options_.grid);
  Best best;
  for (std::size_t begin = 0; begin < grid.size(); begin += batch) {
    const std::size_t count = std::min(batch, grid.size() - begin);
    std::vector<SteadyShare> found(count);
    in_parallel(options_.threads, count,
                [&](std::size_t i) { found[i] = share(cell, grid[begin + i], worth_knowing * best.share); });
    for (std::size_t i = 0; i < count; ++i) {
      if (found[i].exact && found[i].share > best.share) best = {.knobs = grid[begin + i], .share = found[i].share};
    }
  }
  return best;
}

bool Oracle::bearable(const Cell& cell, std::vector<KnobValues>& grid) {
  std::atomic<std::size_t> found{grid.size()};
  in_parallel(options_.threads, grid.size(), [&](std::size_t i) {
    if (found.load() < grid.size()) return;
    if (measure(cell, grid[i], bearable_share).share >= bearable_share) found = i;
  });
  if (found.load() == grid.size()) return false;
  std::rotate(grid.begin(), grid.begin() + static_cast<std::ptrdiff_t>(found.load()),
              grid.begin() + static_cast<std::ptrdiff_t>(found.load()) + 1);  // the next rate begins with it
  return true;
}

double Oracle::capacity(const Workload& workload, TruthKind truth) {
  constexpr int steps = 7;
  const Cell any{.workload = &workload, .truth = truth};
  if (const auto known = capacities_.find(key(any)); known != capacities_.end()) return known->second;
  // No device computes prompts faster than this.
  double prompt = 0;
  double weight = 0;
  for (const RequestClass& one : workload.classes) {
    double mean = 0;
    for (const RecordedRequest& row : traces_.of(one.trace)) mean += row.prompt_tokens;
    prompt += one.weight * mean / static_cast<double>(traces_.of(one.trace).size());
    weight += one.weight;
  }
  const Roofline law = roofline(truth);
  double high = weight / (prompt * law.token * law.factor);
  double low = high / 24;
  std::vector<KnobValues> grid = settings_grid(Space::Static, Grid::Coarse);
  for (int i = 0; i < steps; ++i) {
    const double middle = std::sqrt(low * high);
    (bearable({.workload = &workload, .truth = truth, .rate = middle}, grid) ? low : high) = middle;
  }
  capacities_[key(any)] = low;
  return low;
}

}  // namespace rubato::study
