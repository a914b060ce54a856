// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/sampling_regions.h"

#include <type_traits>
#include <utility>

namespace rubato::engine::cuda {

Result<SamplingRegions> SamplingRegions::make(const SamplingShape& shape) {
  SamplingRegions regions{.shape = shape};
  const std::int64_t staging = sampling_staging_bytes(shape);
  const auto results = static_cast<std::int64_t>(sizeof(SampledRow)) * shape.max_rows;
  const auto take = [](auto& memory, std::int64_t bytes) -> Result<void> {
    auto made = std::remove_reference_t<decltype(memory)>::make(bytes);
    if (!made) return Unexpected(std::move(made).error());
    memory = std::move(*made);
    return {};
  };
  Result<void> taken = take(regions.staging_host, staging);
  if (taken) taken = take(regions.staging, staging);
  if (taken) taken = take(regions.scratch, sampling_scratch_bytes(shape));
  if (taken) taken = take(regions.results, results);
  if (taken) taken = take(regions.results_host, results);
  if (!taken) return Unexpected(std::move(taken).error());
  return regions;
}

}  // namespace rubato::engine::cuda
