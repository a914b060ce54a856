// SPDX-License-Identifier: Apache-2.0
#include "tuner/risk_ledger.h"

#include <algorithm>

namespace rubato::tuner {

namespace {

constexpr Duration span = std::chrono::hours(1);
constexpr Duration merged_within = std::chrono::minutes(1);

}  // namespace

void RiskLedger::add(TimePoint at, double requests, double at_risk) {
  if (!entries_.empty() && at - entries_.back().at < merged_within) {
    entries_.back().requests += requests;
    entries_.back().at_risk += at_risk;
  } else {
    entries_.push_back({.at = at, .requests = requests, .at_risk = at_risk});
  }
  while (!entries_.empty() && entries_.front().at < at - span) entries_.pop_front();
}

double RiskLedger::hour_requests(TimePoint now, double rate) const {
  double seen = 0;
  for (const Entry& entry : entries_) {
    if (entry.at >= now - span) seen += entry.requests;
  }
  return std::max({seen, rate * to_seconds(span), 1.0});
}

double RiskLedger::at_risk(TimePoint now) const {
  double sum = 0;
  for (const Entry& entry : entries_) {
    if (entry.at >= now - span) sum += entry.at_risk;
  }
  return sum;
}

double RiskLedger::used(TimePoint now, double rate) const {
  return at_risk(now) / hour_requests(now, rate);
}

bool RiskLedger::allows(TimePoint now, double rate, double at_risk_more, double budget) const {
  return at_risk(now) + at_risk_more <= budget * hour_requests(now, rate);
}

}  // namespace rubato::tuner
