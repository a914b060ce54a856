// SPDX-License-Identifier: Apache-2.0
// Who moves the knobs: the rows of the study that are not the tuner.
#pragma once

#include <memory>
#include <vector>

#include "tests/bench/search/node.h"
#include "tuner/evidence.h"

namespace rubato::study {

/// The grid that oracles and random search choose from. Coarse: for finding a capacity.
enum class Grid : std::uint8_t { Fine, Coarse };
[[nodiscard]] std::vector<KnobValues> settings_grid(Space space, Grid grid);

/// Makes given settings current at given times: an oracle that knows when phases change.
struct Planned {
  TimePoint at;
  KnobValues knobs;
};
[[nodiscard]] std::unique_ptr<Controller> follow(std::vector<Planned> plan);

struct BaselineOptions {
  Space space = Space::Full;
  ObjectivesSpec objectives;
  std::uint64_t seed = 1;
};

/// Tries settings from the grid while the objectives are missed, twenty at most, then holds the best that it saw.
[[nodiscard]] std::unique_ptr<Controller> random_search(const BaselineOptions& options);

/// One neighbour a window (half or twice the budget, half or twice the sequences, the next policy); stays where it is better.
[[nodiscard]] std::unique_ptr<Controller> hill_climbing(const BaselineOptions& options);

/// Half the budget after a window whose p99 gap was over target, 256 tokens more after any other.
[[nodiscard]] std::unique_ptr<Controller> aimd(const BaselineOptions& options);

/// 512 tokens while decodes run and at most two prefills are there, else 2048; looked at every 50 ms.
[[nodiscard]] std::unique_ptr<Controller> two_values();

}  // namespace rubato::study
