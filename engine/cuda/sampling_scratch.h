// SPDX-License-Identifier: Apache-2.0
// What the kernels of sampling hand on to one another, and where it lies in their scratch. Private to sampling on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/sampling.h"
#include "engine/sampling_math.h"

namespace rubato::engine::cuda {

/// What CUDA's 64-bit atomics and shuffles are declared for.
using Wide = unsigned long long;

/// The first pass of a search puts distances into bins of 1/16.
inline constexpr int first_bins_per_unit = 16;
inline constexpr int first_bin_count = static_cast<int>(kernels::distance_max) * first_bins_per_unit + 1;

/// Where a row's draw stands after its cut was found.
struct SamplingDraw {
  double log_sum = 0;  // when logprobs are wanted
  float top = 0;
  float limit = 0;
  std::int32_t ties_limited = 0;  // then ties_left says how many of those at limit each stretch may keep
  std::int32_t pending = 0;       // 0: the row's result is written
};

/// Everything that a kernel of sampling reads and writes; passed by value. [rows][stretches] means row * stretches + stretch.
struct SamplingPass {
  const BatchCounts* counts = nullptr;
  float* logits = nullptr;
  std::int64_t stride = 0;
  std::int32_t vocabulary = 0;
  std::int32_t stretches = 0;
  const SamplingRow* rows = nullptr;
  const SamplingEdit* edits = nullptr;
  SampledRow* results = nullptr;

  // Scratch. Each kernel reads only what an earlier one wrote for the same row in the same call.
  Wide* raw_best = nullptr;              // [rows][stretches] key of the largest logit
  Wide* best = nullptr;                  // the same after edits; rows that have some
  double* sums = nullptr;                // [rows][stretches] exp over raw logits, then kept weights
  Wide* tops = nullptr;                  // [rows][stretches][sampling_top_max] keys of the largest logits
  Wide* first_mass = nullptr;            // [rows][first_bin_count]
  std::uint32_t* first_count = nullptr;  // [rows][first_bin_count]
  std::int32_t* ties_left = nullptr;     // [rows][stretches]
  float* raw_of_edit = nullptr;          // beside edits: the logit before it
  SamplingDraw* draws = nullptr;         // [rows]
};

/// The whole pass over memory for as many rows of logits as its bucket has.
[[nodiscard]] SamplingPass sampling_pass(const SamplingShape& shape, const BatchCounts* counts, const Accumulators& logits,
                                         const SamplingMemory& memory);

}  // namespace rubato::engine::cuda
