// SPDX-License-Identifier: Apache-2.0
// The lane property over more than 100,000 steps.
#include <gtest/gtest.h>

#include "tests/support/lane_property.h"

namespace rubato::engine {
namespace {

class LanePropertySlow : public testing::TestWithParam<std::uint32_t> {};

TEST_P(LanePropertySlow, streams_equal_an_undisturbed_run_under_any_settings) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  test::LaneProperty(GetParam()).run(6000);
}

INSTANTIATE_TEST_SUITE_P(Seeds, LanePropertySlow, testing::Range(101U, 121U));

}  // namespace
}  // namespace rubato::engine
