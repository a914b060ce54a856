// SPDX-License-Identifier: Apache-2.0
// The loads of the study: request lengths and arrivals from recorded traces, or from lognormal lengths with the same quantiles
// where no traces are at hand.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "tuner/twin/traffic.h"

namespace rubato::study {

inline constexpr std::int32_t prompt_tokens_max = 8192;
inline constexpr std::int32_t output_tokens_max = 3072;

/// Uniform in (0, 1), the same on every platform.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : random_(seed) {}
  double uniform() { return (static_cast<double>(random_() >> 11) + 0.5) * 0x1p-53; }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(uniform() * static_cast<double>(count)); }

 private:
  std::mt19937_64 random_;
};

struct RecordedRequest {
  std::int32_t prompt_tokens = 1;
  std::int32_t output_tokens = 1;
  double interval = 0;  // seconds since the one before; 0 where no times were recorded
};

/// The traces by name: azure_code, azure_conv, sharegpt, arxiv, bwb.
class Traces {
 public:
  /// Lognormal lengths fitted to the traces' quantiles; azure_code with bursts.
  Traces();
  /// NotFound or InvalidArgument names the file.
  static Result<Traces> read(const std::string& folder);

  [[nodiscard]] const std::vector<RecordedRequest>& of(const std::string& name) const { return tables_.at(name); }
  [[nodiscard]] bool recorded() const { return recorded_; }

 private:
  std::map<std::string, std::vector<RecordedRequest>> tables_;
  bool recorded_ = false;
};

struct RequestClass {
  std::string trace;
  double weight = 1;
  Duration ttft{};
  Duration itl{};
  std::int32_t max_new_tokens = output_tokens_max;
};

enum class Arrivals : std::uint8_t { Poisson, Recorded };

struct Workload {
  std::string name;
  std::vector<RequestClass> classes;
  Arrivals arrivals = Arrivals::Poisson;  // Recorded: of the first class, its silences cut to five seconds, scaled to the rate

  /// Those of the first class.
  [[nodiscard]] ObjectivesSpec objectives() const;
};

[[nodiscard]] const std::vector<Workload>& all_workloads();
[[nodiscard]] const Workload* workload_named(const std::string& name);

/// Requests from `from` on, in order of arrival, no two at the same time. Their number per second is `rate` on average; with
/// recorded arrivals exactly, so that every seed has the same load.
[[nodiscard]] std::vector<tuner::TrafficRequest> make_traffic(const Traces& traces, const Workload& workload, double rate,
                                                              TimePoint from, Duration length, std::uint64_t seed);

}  // namespace rubato::study
