// SPDX-License-Identifier: Apache-2.0
// Snapshots under tests/golden/: a test names one and compares; UPDATE_GOLDENS=1 writes them anew, for a person to read in the
// diff.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace rubato::testing {

inline void expect_golden(const std::string& name, const std::string& actual) {
  const std::filesystem::path path = std::filesystem::path(RUBATO_SOURCE_DIR) / "tests" / "golden" / name;
  if (std::getenv("UPDATE_GOLDENS") != nullptr) {
    std::ofstream(path, std::ios::binary) << actual;
    return;
  }
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file) << path << " is missing; write it with UPDATE_GOLDENS=1";
  const std::string expected((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_EQ(expected, actual) << "differs from " << path << "; UPDATE_GOLDENS=1 accepts the new text";
}

}  // namespace rubato::testing
