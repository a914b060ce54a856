// SPDX-License-Identifier: Apache-2.0
// What the kernels of sampling share: keys that order logits, one warp's way over a stretch, its sums, a row's edits.
#pragma once

#include <limits>

#include "engine/cuda/element.cuh"
#include "engine/cuda/sampling_scratch.h"

namespace rubato::engine::cuda {

inline constexpr int stretch_tokens = static_cast<int>(kernels::stretch_size);
inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

__device__ inline int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % warp_lanes;
}
__device__ inline int warp_of_thread() {
  return static_cast<int>(threadIdx.x) / warp_lanes;
}

// ---- keys: a logit and its token as one number. A larger logit has the larger key; of equal ones, the lower token.
/// Larger than every key: a logit was not finite.
inline constexpr Wide not_finite = ~Wide{0};

__device__ inline Wide key_of(float logit, std::int32_t token) {
  const std::uint32_t bits = kernels::bits_of(kernels::without_sign_of_zero(logit));
  const std::uint32_t ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return (static_cast<Wide>(ordered) << 32) | (0xFFFFFFFFU - static_cast<std::uint32_t>(token));
}
__device__ inline float logit_of(Wide key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  return kernels::float_of((ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}
__device__ inline std::int32_t token_of(Wide key) {
  return static_cast<std::int32_t>(0xFFFFFFFFU - static_cast<std::uint32_t>(key));
}

__device__ inline Wide larger(Wide a, Wide b) {
  return a > b ? a : b;
}

__device__ inline Wide warp_largest(Wide key) {
  for (int offset = warp_lanes / 2; offset > 0; offset /= 2) key = larger(key, __shfl_xor_sync(all_lanes, key, offset));
  return key;
}

/// All threads of the block take part and get the result. scratch: a key per warp, in shared memory; usable again when it
/// returns.
__device__ inline Wide block_largest(Wide key, Wide* scratch) {
  key = warp_largest(key);
  if (lane_of_thread() == 0) scratch[warp_of_thread()] = key;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / warp_lanes;
  key = lane_of_thread() < warps ? scratch[lane_of_thread()] : 0;
  __syncthreads();
  return warp_largest(key);
}

// ---- rows and stretches
__device__ inline bool has_edits(const SamplingRow& row) {
  return row.masks + row.biases + row.counts > 0;
}
/// Whether the row's cut needs a search.
__device__ inline bool has_search(const SamplingRow& row) {
  return row.greedy == 0 && (row.top_k > 0 || row.top_p < 1);
}

/// Keys of the largest logits of a row's stretches, edits included.
__device__ inline const Wide* stretch_keys(const SamplingPass& pass, const SamplingRow& wanted, int row) {
  return (has_edits(wanted) ? pass.best : pass.raw_best) + static_cast<std::int64_t>(row) * pass.stretches;
}

/// The largest of a row's keys; all threads of the block.
__device__ inline Wide row_largest(const Wide* keys, int stretches, Wide* scratch) {
  Wide key = 0;
  for (int i = static_cast<int>(threadIdx.x); i < stretches; i += static_cast<int>(blockDim.x)) key = larger(key, keys[i]);
  return block_largest(key, scratch);
}

struct Stretch {
  float* logits = nullptr;
  std::int32_t first = 0;  // token
  int size = 0;
};

__device__ inline Stretch stretch_of(const SamplingPass& pass, int row, int index) {
  const std::int32_t first = index * stretch_tokens;
  const std::int32_t left = pass.vocabulary - first;
  return {
      .logits = pass.logits + row * pass.stride + first, .first = first, .size = left < stretch_tokens ? left : stretch_tokens};
}

/// Calls body(offset, logit) for each token, 32 neighbours at a time and those in ascending order, all lanes of the warp
/// together: beyond the stretch with -infinity.
template <class Body>
__device__ inline void for_each_logit(const Stretch& stretch, Body&& body) {
  constexpr int at_once = 8;  // loads on their way
  for (int begin = 0; begin < stretch.size; begin += at_once * warp_lanes) {
    float logits[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int offset = begin + i * warp_lanes + lane_of_thread();
      logits[i] = offset < stretch.size ? stretch.logits[offset] : minus_infinity;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) body(begin + i * warp_lanes + lane_of_thread(), logits[i]);
  }
}

/// Sums the weights of a stretch as kernels::sum does. weigh(offset, logit) is called as for_each_logit calls its body.
template <class Weigh>
__device__ inline double sum_weights(const Stretch& stretch, Weigh&& weigh) {
  static_assert(kernels::sum_lanes * 2 == warp_lanes, "a step over 32 tokens is two of the sixteen sums' turns");
  constexpr int lanes = static_cast<int>(kernels::sum_lanes);
  float partial = 0;
  for_each_logit(stretch, [&](int offset, float logit) {
    const float weight = weigh(offset, logit);
    partial = kernels::add(partial, weight);
    partial = kernels::add(partial, __shfl_down_sync(all_lanes, weight, lanes));  // lanes 16 to 31 add nothing of use
  });
  double total = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    total = kernels::add(total, static_cast<double>(__shfl_sync(all_lanes, partial, lane)));
  }
  return total;
}

/// The weights that the cut keeps, for a warp that walks a stretch.
struct Keeper {
  float top;
  float inverse_temperature;
  float limit;
  bool ties_limited;
  std::int32_t ties_left;

  __device__ float weigh(float logit) {
    const float distance = kernels::distance(top, logit, inverse_temperature);
    const float weight = kernels::weight_within(distance, limit);
    if (!ties_limited) return weight;
    const bool tie = distance == limit;
    const unsigned ties = __ballot_sync(all_lanes, tie);
    const int before = __popc(ties & ((1U << lane_of_thread()) - 1U));
    const bool kept = !tie || before < ties_left;
    ties_left -= __popc(ties);
    return kept ? weight : 0.0F;
  }
};

// ---- edits
/// First of the ascending edits whose token is not below `token`.
__device__ inline std::int32_t first_edit(const SamplingEdit* edits, std::int32_t count, std::int32_t token) {
  std::int32_t begin = 0;
  while (begin < count) {
    const std::int32_t middle = begin + (count - begin) / 2;
    if (edits[middle].token < token) {
      begin = middle + 1;
    } else {
      count = middle;
    }
  }
  return begin;
}

/// Calls change(edit, logit) for those of count ascending edits that fall into the warp's stretch. Lanes see one another's
/// changes afterwards.
template <class Change>
__device__ inline void apply_edits(const SamplingPass& pass, const Stretch& stretch, std::int32_t first, std::int32_t count,
                                   Change&& change) {
  const SamplingEdit* edits = pass.edits + first;
  for (std::int32_t i = first_edit(edits, count, stretch.first) + lane_of_thread(); i < count; i += warp_lanes) {
    const std::int32_t offset = edits[i].token - stretch.first;
    if (offset >= stretch.size) break;
    change(first + i, stretch.logits[offset]);
  }
  __syncwarp();
}

/// The logit of a token before edits; one thread.
__device__ inline float raw_logit(const SamplingPass& pass, const SamplingRow& wanted, int row, std::int32_t token) {
  // Biases come before counts, so what they keep is older.
  std::int32_t first = wanted.edit_first + wanted.masks;
  const std::int32_t counts[] = {wanted.biases, wanted.counts};
  for (const std::int32_t count : counts) {
    const std::int32_t at = first_edit(pass.edits + first, count, token);
    if (at < count && pass.edits[first + at].token == token) return pass.raw_of_edit[first + at];
    first += count;
  }
  return pass.logits[row * pass.stride + token];
}

// ---- results; one thread
__device__ inline void write_invalid(const SamplingPass& pass, int row) {
  SampledRow& result = pass.results[row];
  result.token = 0;
  result.valid = 0;
  result.logprob = 0;
  result.top_count = 0;
}

/// The best tokens are written already.
__device__ inline void write_token(const SamplingPass& pass, const SamplingRow& wanted, int row, std::int32_t token,
                                   double log_sum) {
  SampledRow& result = pass.results[row];
  result.token = token;
  result.valid = 1;
  const bool wants_logprob = wanted.top_logprobs >= 0;
  result.logprob = wants_logprob ? kernels::log_probability(raw_logit(pass, wanted, row, token), log_sum) : 0.0F;
  result.top_count = wants_logprob ? wanted.top_logprobs : 0;
}

}  // namespace rubato::engine::cuda
