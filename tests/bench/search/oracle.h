// SPDX-License-Identifier: Apache-2.0
// What is possible: the share of good requests under settings that stay, the best of a grid, and the capacity of the node. Long
// simulations under common random numbers, remembered in a file.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tests/bench/search/controllers.h"

namespace rubato::study {

/// Calls work(0) .. work(count - 1) on so many threads.
void in_parallel(int threads, std::size_t count, const std::function<void(std::size_t)>& work);

/// A steady load on one truth.
struct Cell {
  const Workload* workload = nullptr;
  TruthKind truth = TruthKind::Nominal;
  double rate = 1;  // requests per second
};

struct OracleOptions {
  std::string cache{};  // file; empty: nothing is kept
  int threads = 1;
  Duration measured = std::chrono::seconds(240);
  int repeats = 2;  // simulations per settings, each with arrivals of its own
  Grid grid = Grid::Fine;
};

class Oracle {
 public:
  Oracle(const Traces& traces, const OracleOptions& options);

  /// Safe from several threads.
  [[nodiscard]] SteadyShare share(const Cell& cell, const KnobValues& knobs, double floor);

  struct Best {
    KnobValues knobs;
    double share = 0;
  };
  /// The best of the grid.
  [[nodiscard]] Best best(const Cell& cell, Space space);

  /// The highest rate at which some setting of the coarse grid without triage gives nine of ten requests what they were promised:
  /// found by bisection to within 3 %, from arrivals of their own.
  [[nodiscard]] double capacity(const Workload& workload, TruthKind truth);

  /// Merges what was found into the file.
  void save();

 private:
  [[nodiscard]] SteadyShare measure(const Cell& cell, const KnobValues& knobs, double floor) const;
  [[nodiscard]] bool bearable(const Cell& cell, std::vector<KnobValues>& grid);
  [[nodiscard]] std::string key(const Cell& cell) const;
  [[nodiscard]] std::string fingerprint() const;

  const Traces& traces_;
  OracleOptions options_;
  std::string fingerprint_;
  std::mutex mutex_;
  std::map<std::string, SteadyShare> shares_;
  std::map<std::string, double> capacities_;
};

/// `2048/256 DecodeFirst`; the margin too where it matters.
[[nodiscard]] std::string text_of(const KnobValues& knobs);

}  // namespace rubato::study
