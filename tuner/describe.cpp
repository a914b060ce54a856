// SPDX-License-Identifier: Apache-2.0
#include "tuner/describe.h"

#include <cmath>
#include <cstdio>

#include "manifests/names.h"

namespace rubato::tuner {

std::string describe(const KnobValues& knobs) {
  std::string text = "budget " + std::to_string(knobs.max_num_batched_tokens) + ", " + std::to_string(knobs.max_num_seqs) +
                     " sequences, " + std::string(to_string(knobs.priority_policy));
  if (knobs.priority_policy == PriorityPolicy::Deadline) text += " with " + std::to_string(knobs.deadline_margin) + " % margin";
  if (knobs.mode == Mode::Disaggregated) {
    text += ", disaggregated with ";
    text += knobs.prefill_devices > 1 ? std::to_string(knobs.prefill_devices) + " prefill devices"
                                      : std::to_string(knobs.prefill_share) + " % prefill";
  }
  return text;
}

std::string describe(const Evidence& evidence) {
  return decimal(100.0 * evidence.attainment()) + " % of " + std::to_string(evidence.judged) + " requests good";
}

std::string milliseconds(Duration duration) {
  return decimal(to_milliseconds(duration)) + " ms";
}

std::string decimal(double value) {
  char text[32];
  const double tenth = std::round(value * 10.0) / 10.0;
  std::snprintf(text, sizeof text, tenth == std::floor(tenth) ? "%.0f" : "%.1f", tenth);
  return text;
}

}  // namespace rubato::tuner
