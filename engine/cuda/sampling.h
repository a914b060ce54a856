// SPDX-License-Identifier: Apache-2.0
// Sampling on the device: the host writes each row's parameters and the changes of its logits into the step's staging region, a
// fixed sequence of kernels turns logits into tokens, and one small copy brings them back. For equal logits every result has the
// bits of SamplingState::sample.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/cuda/batch.h"
#include "engine/cuda/kernels.h"
#include "engine/sampling.h"

namespace rubato::engine::cuda {

/// What the regions are sized for; the same from set-up on.
struct SamplingShape {
  std::int32_t max_rows = 0;  // that sample in one step
  std::int32_t vocabulary = 0;
  std::int32_t max_model_len = 0;
  /// Tokens that the KV cache holds. What penalties count stands in the cache, in blocks of the row's own, so this bounds the
  /// counts of all rows together. Were blocks ever shared between sequences: max_rows * max_model_len.
  std::int64_t cached_tokens = 0;
};

/// Results have room for as many of the best tokens. Larger wishes are a bug.
inline constexpr std::int32_t sampling_top_max = 20;
/// Distinct tokens that one row may bias or mask (its stop tokens and the model's end tokens). More are a bug: requests are
/// refused before.
inline constexpr std::int32_t sampling_bias_max = 1024;
inline constexpr std::int32_t sampling_mask_max = 2048;

/// One change of one logit, in the order of a row's segments: masks, bias, counts; each ascending by token, at most one of a
/// token.
struct SamplingEdit {
  std::int32_t token = 0;
  std::uint32_t value = 0;  // mask: unused; bias: bits of the float; count: occurrences in the output
};

/// What one row wants. Edits are those from edit_first on: masks, then biases, then counts.
struct SamplingRow {
  double noise = 0;  // the draw, in [0, 1)
  double top_p = 1;  // 1: off
  float inverse_temperature = 0;
  float limit = 0;  // largest distance that counts: min_p or everything
  float repetition = 1;
  float frequency = 0;
  float presence = 0;
  std::int32_t top_k = 0;          // 0: off
  std::int32_t top_logprobs = -1;  // as in SamplingParameters, at most the vocabulary
  std::int32_t edit_first = 0;
  std::int32_t masks = 0;
  std::int32_t biases = 0;
  std::int32_t counts = 0;
  std::int32_t greedy = 0;  // then nothing of noise, temperature and cuts matters
};
static_assert(sizeof(SamplingRow) == 64);

/// One row's result. Results stay in device memory until the next sample(): the next step may read its tokens there.
struct SampledRow {
  std::int32_t token = 0;
  std::int32_t valid = 0;  // 0: a logit was not finite or every token is masked; the rest means nothing
  float logprob = 0;
  std::int32_t top_count = 0;
  TokenLogprob top[sampling_top_max];  // the first top_count, best first
};

/// One row that samples.
struct SamplingInput {
  const SamplingState* state = nullptr;
  std::int64_t position = 0;  // of the token being drawn
};

/// Bytes of the staging region: max_rows * 64 for parameters; then edits of 8 bytes, as many as masks, biases and counts of all
/// rows can ever be (about 24 KiB a row for the first two, and 8 bytes per cached token or max_rows * min(vocabulary,
/// max_model_len), whichever is less). Multiple of 16, as the region's address must be.
[[nodiscard]] std::int64_t sampling_staging_bytes(const SamplingShape& shape);

/// Writes rows, in the order of their logits, into staging (on the host) and returns how many of its first bytes the device
/// needs. Allocates nothing.
[[nodiscard]] std::int64_t write_sampling(const SamplingShape& shape, std::span<const SamplingInput> rows,
                                          std::span<const TokenId> end_tokens, std::byte* staging);

/// Bytes of scratch in device memory, 256-byte aligned; what it holds between two calls does not matter.
[[nodiscard]] std::int64_t sampling_scratch_bytes(const SamplingShape& shape);

/// Regions in device memory.
struct SamplingMemory {
  const std::byte* staging = nullptr;  // a copy of what write_sampling wrote
  std::byte* scratch = nullptr;
  SampledRow* results = nullptr;  // [max_rows]
};

/// Draws a token for each of the first counts->selected rows of logits, whose changed entries it overwrites, and leaves other
/// rows' logits and results as they are. logits: (bucket rows <= max_rows, vocabulary). Six kernels, launched alike for every
/// batch; a block whose row does not need its kernel ends at once.
void sample(cudaStream_t stream, const SamplingShape& shape, const BatchCounts* counts, const Accumulators& logits,
            const SamplingMemory& memory);

/// What undo_edits() reads, one float for each edit that staging holds: where the last sample() left it in device memory, and how
/// many. staging: on the host, as it was written for so many rows.
struct SamplingRawLogits {
  const float* data = nullptr;
  std::int64_t count = 0;
};
[[nodiscard]] SamplingRawLogits raw_logits(const SamplingShape& shape, const SamplingMemory& memory, const std::byte* staging,
                                           std::int32_t rows);
/// Puts back what sample() changed in rows of logits, all on the host: (rows, vocabulary) without gaps.
void undo_edits(const SamplingShape& shape, const std::byte* staging, std::span<const float> raw, std::span<float> logits);

/// A result, once it is on the host; false when it is not valid. Allocates nothing once out.top has its capacity.
[[nodiscard]] bool read_sample(const SampledRow& row, Sample& out);

}  // namespace rubato::engine::cuda
