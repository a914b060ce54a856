// SPDX-License-Identifier: Apache-2.0
// The tuner as a controller, with or without its twin and its watch over the load, and the twin alone.
#pragma once

#include <memory>

#include "tests/bench/search/controllers.h"
#include "tuner/twin/step_law.h"

namespace rubato::study {

/// What a controller has used of the machine.
struct Effort {
  double cpu_seconds = 0;  // measured: not the same in every run
  Duration simulated{};    // virtual time that the twin ran through
  std::int64_t trials = 0;
  std::int64_t searches = 0;
  std::int64_t alarms = 0;
  std::int64_t rollbacks = 0;
  std::int64_t retunes = 0;  // on the twin's word, without a window
};

class MeteredController : public Controller {
 public:
  [[nodiscard]] virtual Effort effort() const = 0;
};

/// The twin's work takes time: it is held to simulate so many seconds in one.
inline constexpr double twin_speed = 1000;  // two thousand times real time on half a core

/// Tuner, Twin and LoadWatch as the daemon wires them, fed with what a live node shows.
[[nodiscard]] std::unique_ptr<MeteredController> tuner_with_twin(const BaselineOptions& options);
/// The tuner alone: contextual Bayesian search on live windows.
[[nodiscard]] std::unique_ptr<MeteredController> plain_tuner(const BaselineOptions& options);
/// Does what the twin thinks best after each window, by step times learnt elsewhere that are never corrected.
[[nodiscard]] std::unique_ptr<MeteredController> uncalibrated_twin(const BaselineOptions& options, tuner::StepLaws laws);

/// What the twin would have learnt on the nominal truth.
[[nodiscard]] tuner::StepLaws nominal_laws(const Traces& traces, std::uint64_t seed);

}  // namespace rubato::study
