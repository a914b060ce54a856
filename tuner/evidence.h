// SPDX-License-Identifier: Apache-2.0
// What windows say about the settings they ran under: counts in which unserved requests weigh as misses, one score that has a
// slope even where every request or none is good, and the noise of both. Also the load a window ran under, and how windows are
// merged.
#pragma once

#include <cstdint>
#include <string>

#include "manifests/engine_spec.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

/// The load features of a window, as powers of two, so that distances are in octaves.
struct LoadFeatures {
  double rate = 0;    // log2 of arrivals per second
  double prompt = 0;  // log2 of mean prompt tokens
  double output = 0;  // log2 of mean output tokens

  friend bool operator==(const LoadFeatures&, const LoadFeatures&) = default;
};

[[nodiscard]] LoadFeatures load_of(const Window& window);

/// Euclidean distance in octaves.
[[nodiscard]] double load_distance(const LoadFeatures& a, const LoadFeatures& b);

/// What one or more windows under one setting showed.
struct Evidence {
  std::int32_t windows = 0;
  std::int32_t judged = 0;  // with unserved requests
  std::int32_t good = 0;
  std::int32_t ttft_misses = 0;
  std::int32_t itl_misses = 0;
  double ttft_excess = 0;  // log of TTFT over its target, p50 and p99 blended; 0 is on target, mean over windows
  double itl_excess = 0;
  bool saturated = false;  // the latest window left more work behind than it found, or turned requests away
  bool draining = false;   // the latest window began with a backlog that was not of its making and shrank it

  [[nodiscard]] double attainment() const { return judged > 0 ? static_cast<double>(good) / judged : 0.0; }
};

/// Requests that the window took in but neither answered nor judged, as the growth of its queue shows. They count as misses: else
/// a setting under which only easy requests finish looks best.
[[nodiscard]] std::int32_t unserved(const Window& window);

[[nodiscard]] Evidence evidence_of(const Window& window, const ObjectivesSpec& objectives);

/// Both together; the flags of the later one stay.
[[nodiscard]] Evidence pooled(const Evidence& earlier, const Evidence& later);

/// A value of the angular transform 2 asin sqrt(p), whose binomial noise is the same everywhere but at the ends.
struct NoisyValue {
  double value = 0;
  double variance = 0;
};

/// The transform of a share of requests, as transformed_attainment() gives it for evidence of so many: at the ends few requests
/// say less than many.
[[nodiscard]] double transformed_share(double share, double count);

/// Without that: count is infinite. And back.
[[nodiscard]] double transformed_share(double share);
[[nodiscard]] double share_of_transformed(double value);

/// The attainment alone.
[[nodiscard]] NoisyValue transformed_attainment(const Evidence& evidence);

/// The attainment less a share of how far the latencies are over target: what a search maximises.
[[nodiscard]] NoisyValue score(const Evidence& evidence);

/// Two adjoining windows under the same settings as one. Percentiles cannot be merged exactly: the p50 is the mean by weight, the
/// p99 the larger one.
[[nodiscard]] Window merged(const Window& earlier, const Window& later);

/// Empty when the window makes sense, else what is wrong with it.
[[nodiscard]] std::string contradiction(const Window& window);

}  // namespace rubato::tuner
