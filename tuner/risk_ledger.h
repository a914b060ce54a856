// SPDX-License-Identifier: Apache-2.0
// How many requests trials may put at risk: a budget over the last hour, as a share of the hour's requests. A request is at risk
// as far as the incumbent would have served it well: where nothing is good, nothing can be lost.
#pragma once

#include <deque>

#include "policies/time.h"

namespace rubato::tuner {

class RiskLedger {
 public:
  /// Requests that were judged in a window that ended at `at`, and how many of them were put at risk. In order of time.
  void add(TimePoint at, double requests, double at_risk);

  /// Share of an hour's requests that was put at risk in the last hour. The hour's requests: those seen, or what the present rate
  /// (per second) comes to in an hour where less than an hour was seen.
  [[nodiscard]] double used(TimePoint now, double rate) const;

  /// Whether so many more may be put at risk within `budget`, a share 0..1.
  [[nodiscard]] bool allows(TimePoint now, double rate, double at_risk, double budget) const;

 private:
  struct Entry {
    TimePoint at;
    double requests = 0;
    double at_risk = 0;
  };
  [[nodiscard]] double hour_requests(TimePoint now, double rate) const;
  [[nodiscard]] double at_risk(TimePoint now) const;

  std::deque<Entry> entries_;  // of the last hour, merged to minutes
};

}  // namespace rubato::tuner
