// SPDX-License-Identifier: Apache-2.0
// Remembers what probing chose, so that the next start with the same GPU, driver and library need not probe again. A file that
// cannot be read, or that was written under anything else, counts as empty: algorithms mean nothing across library versions.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/matmul.h"
#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {

class MatmulCache {
 public:
  /// folder empty: remembers nothing.
  MatmulCache(const std::filesystem::path& folder, const DeviceFacts& device, DataType dtype);

  /// Fills plan's ranges and algorithms with what was chosen for its shape and so many rows. False: unknown.
  [[nodiscard]] bool find(std::int32_t max_rows, MatmulPlan& plan) const;
  void add(std::int32_t max_rows, const MatmulPlan& plan);
  /// Writes the file if anything was added; a failure costs only the next start's time.
  void save() const;

 private:
  struct Entry {
    MatmulShape shape;
    std::int32_t max_rows = 0;
    std::vector<cublasLtMatmulAlgo_t> algorithms{};  // empty: own kernel
  };
  void load();

  std::filesystem::path file_;
  std::string key_;
  std::vector<Entry> entries_;
  bool added_ = false;
};

}  // namespace rubato::engine::cuda
