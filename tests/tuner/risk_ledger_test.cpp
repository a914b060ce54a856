// SPDX-License-Identifier: Apache-2.0
#include "tuner/risk_ledger.h"

#include <gtest/gtest.h>

namespace rubato::tuner {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

constexpr TimePoint start{std::chrono::hours(10)};

TEST(RiskLedger, the_budget_is_of_an_hour_at_the_present_rate_before_an_hour_was_seen) {
  RiskLedger ledger;
  // 10 requests per second: 36,000 an hour, of which a tenth may be put at risk.
  EXPECT_TRUE(ledger.allows(start, 10, 3600, 0.1));
  EXPECT_FALSE(ledger.allows(start, 10, 3601, 0.1));
  ledger.add(start, 150, 150);
  EXPECT_TRUE(ledger.allows(start, 10, 3450, 0.1));
  EXPECT_FALSE(ledger.allows(start, 10, 3451, 0.1));
  EXPECT_DOUBLE_EQ(ledger.used(start, 10), 150.0 / 36000);
}

TEST(RiskLedger, what_is_older_than_an_hour_is_forgotten) {
  RiskLedger ledger;
  ledger.add(start, 100, 100);
  ledger.add(start + minutes(30), 100, 50);
  EXPECT_DOUBLE_EQ(ledger.used(start + minutes(59), 0), 150.0 / 200);
  EXPECT_DOUBLE_EQ(ledger.used(start + minutes(61), 0), 50.0 / 100);
  EXPECT_DOUBLE_EQ(ledger.used(start + minutes(91), 0), 0.0);
}

TEST(RiskLedger, a_budget_of_nothing_allows_nothing_but_what_risks_nothing) {
  const RiskLedger ledger;
  EXPECT_FALSE(ledger.allows(start, 100, 1, 0));
  EXPECT_TRUE(ledger.allows(start, 100, 0, 0));
}

// A window closes every few seconds for as long as the process lives.
TEST(RiskLedger, short_windows_are_kept_together_and_nothing_of_them_is_lost) {
  RiskLedger ledger;
  for (int i = 0; i < 3600; ++i) ledger.add(start + seconds(i), 1, 0.5);
  EXPECT_NEAR(ledger.used(start + seconds(3599), 0), 0.5, 1e-9);
}

}  // namespace
}  // namespace rubato::tuner
