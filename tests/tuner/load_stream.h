// SPDX-License-Identifier: Apache-2.0
// Traffic under virtual time for tests of the watch over the load: steady or bursty arrivals, lognormal lengths.
#pragma once

#include <cmath>
#include <optional>
#include <random>

#include "tuner/load_watch.h"

namespace rubato::tuner {

enum class Arrivals : std::uint8_t {
  Poisson,
  Bursty,  // intervals of variation 2, from two exponential laws
  Spells,  // Poisson, the logarithm of the rate wandering by 0.35 within 20 seconds, as in traces of real services
};

class LoadStream {
 public:
  LoadStream(std::uint64_t seed, Arrivals arrivals) : random_(seed), arrivals_(arrivals) {}
  double rate = 4;  // per second; 0: none arrive
  double prompt = 600;
  double output = 100;
  double seconds = 0;

  /// Until then, with a tick at every whole second; stops at an alarm.
  std::optional<LoadAlarm> run(LoadWatch& watch, double until) {
    while (true) {
      const double arrives = rate > 0 ? seconds + interval() : until;
      const double to = std::min(arrives, until);
      for (; tick_ <= to; tick_ += 1) {
        if (auto alarm = watch.tick(at(tick_))) {
          seconds = tick_;
          tick_ += 1;
          return alarm;
        }
      }
      seconds = to;
      if (arrives >= until) return std::nullopt;
      watch.arrived(at(arrives), length(prompt));
      watch.ended(at(arrives), length(output));
    }
  }
  static TimePoint at(double second) { return TimePoint(from_seconds(second)); }

 private:
  double exponential(double mean) { return std::exponential_distribution<>(1 / mean)(random_); }
  double interval() {
    if (arrivals_ == Arrivals::Bursty) {
      const double often = 0.5 * (1 + std::sqrt(0.6));  // balanced means, squared variation 4
      const bool short_one = std::bernoulli_distribution(often)(random_);
      return exponential(0.5 / (short_one ? often : 1 - often) / rate);
    }
    if (arrivals_ == Arrivals::Poisson) return exponential(1 / rate);
    constexpr double spread = 0.35;
    const double result = exponential(std::exp(0.5 * spread * spread - wander_) / rate);
    const double keep = std::exp(-result / 20);
    wander_ = keep * wander_ + std::sqrt(1 - keep * keep) * spread * std::normal_distribution<>()(random_);
    return result;
  }
  std::int32_t length(double mean) {
    constexpr double sigma = 0.75;
    return std::max(
        1, static_cast<std::int32_t>(std::lognormal_distribution<>(std::log(mean) - 0.5 * sigma * sigma, sigma)(random_)));
  }
  std::mt19937_64 random_;
  Arrivals arrivals_;
  double wander_ = 0;
  double tick_ = 1;
};

/// Alarms in so many seconds of a load that does not move.
inline int false_alarms(std::uint64_t seed, Arrivals arrivals, double rate, double seconds) {
  LoadWatch watch({});
  LoadStream stream(seed, arrivals);
  stream.rate = rate;
  int alarms = 0;
  while (stream.run(watch, seconds)) ++alarms;
  return alarms;
}

}  // namespace rubato::tuner
