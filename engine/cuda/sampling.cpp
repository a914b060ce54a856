// SPDX-License-Identifier: Apache-2.0
// The host's side of sampling on the device: layouts, staging, reading results.
#include "engine/cuda/sampling.h"

#include <algorithm>
#include <bit>
#include <new>

#include "engine/cuda/sampling_scratch.h"
#include "engine/sampling_cut.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int64_t stretches_max = 4096;  // vocabularies up to 4,194,304, as on the host

std::int64_t stretch_count(const SamplingShape& shape) {
  constexpr std::int64_t size = kernels::stretch_size;
  const std::int64_t count = (shape.vocabulary + size - 1) / size;
  CHECK(shape.vocabulary > 0 && count <= stretches_max, "vocabulary=", shape.vocabulary);
  return count;
}

std::int64_t edits_max(const SamplingShape& shape) {
  const std::int64_t rows = shape.max_rows;
  const std::int64_t counted = std::min(rows * std::min(shape.vocabulary, shape.max_model_len), shape.cached_tokens);
  return rows * (sampling_mask_max + sampling_bias_max) + counted;
}

std::int64_t rows_bytes(const SamplingShape& shape) {
  return shape.max_rows * static_cast<std::int64_t>(sizeof(SamplingRow));
}

/// Hands out 256-byte aligned parts of one region.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <class Value>
  void take(Value*& part, std::int64_t count) {
    part = base_ == nullptr ? nullptr : reinterpret_cast<Value*>(base_ + bytes_);
    bytes_ += (count * static_cast<std::int64_t>(sizeof(Value)) + 255) / 256 * 256;
  }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

/// Lays the scratch out; returns its bytes.
std::int64_t lay_out(const SamplingShape& shape, std::byte* base, SamplingPass& pass) {
  const std::int64_t rows = shape.max_rows;
  const std::int64_t stretches = stretch_count(shape);
  Layout layout(base);
  layout.take(pass.raw_best, rows * stretches);
  layout.take(pass.best, rows * stretches);
  layout.take(pass.sums, rows * stretches);
  layout.take(pass.tops, rows * stretches * sampling_top_max);
  layout.take(pass.first_mass, rows * first_bin_count);
  layout.take(pass.first_count, rows * first_bin_count);
  layout.take(pass.ties_left, rows * stretches);
  layout.take(pass.raw_of_edit, edits_max(shape));
  layout.take(pass.draws, rows);
  return layout.bytes();
}

/// Distinct tokens of the vocabulary, ascending.
std::int32_t write_masks(const SamplingShape& shape, const SamplingState& state, std::span<const TokenId> end_tokens,
                         SamplingEdit* out) {
  const std::span<const TokenId> stop_tokens(state.parameters().stop_token_ids);
  CHECK(end_tokens.size() + stop_tokens.size() <= static_cast<std::size_t>(sampling_mask_max), "end tokens=", end_tokens.size(),
        " stop tokens=", stop_tokens.size());
  SamplingEdit* end = out;
  for (const std::span<const TokenId> tokens : {end_tokens, stop_tokens}) {
    for (const TokenId token : tokens) {
      if (token >= 0 && token < shape.vocabulary) *end++ = {.token = token, .value = 0};
    }
  }
  std::sort(out, end, [](const SamplingEdit& a, const SamplingEdit& b) { return a.token < b.token; });
  end = std::unique(out, end, [](const SamplingEdit& a, const SamplingEdit& b) { return a.token == b.token; });
  return static_cast<std::int32_t>(end - out);
}

/// Writes a row's edits, says how many in row, and returns their end.
SamplingEdit* write_edits(const SamplingShape& shape, const SamplingState& state, std::span<const TokenId> end_tokens,
                          SamplingRow& row, SamplingEdit* out) {
  if (state.masks_end_tokens()) row.masks = write_masks(shape, state, end_tokens, out);
  out += row.masks;
  const auto& biases = state.parameters().logit_bias;
  CHECK(biases.size() <= static_cast<std::size_t>(sampling_bias_max), "biases=", biases.size());
  row.biases = static_cast<std::int32_t>(biases.size());
  for (const auto& [token, bias] : biases) *out++ = {.token = token, .value = std::bit_cast<std::uint32_t>(bias)};
  row.counts = static_cast<std::int32_t>(state.counts().size());
  for (const TokenCount& count : state.counts()) {
    *out++ = {.token = count.token, .value = static_cast<std::uint32_t>(count.output)};
  }
  return out;
}

SamplingRow row_of(const SamplingShape& shape, const SamplingInput& input) {
  const SamplingParameters& wanted = input.state->parameters();
  CHECK(wanted.top_logprobs <= sampling_top_max, "top_logprobs=", wanted.top_logprobs);
  SamplingRow row;
  row.repetition = static_cast<float>(wanted.repetition_penalty);
  row.frequency = static_cast<float>(wanted.frequency_penalty);
  row.presence = static_cast<float>(wanted.presence_penalty);
  row.top_logprobs = std::min(wanted.top_logprobs, shape.vocabulary);
  row.greedy = input.state->is_greedy() ? 1 : 0;
  if (row.greedy != 0) return row;
  row.noise = noise_of(wanted.seed, input.position);
  row.inverse_temperature = static_cast<float>(1.0 / wanted.temperature);
  row.limit = (wanted.min_p > 0 ? keep_min_p(wanted.min_p) : keep_all()).limit;
  row.top_k = wanted.top_k < shape.vocabulary ? std::max(0, wanted.top_k) : 0;
  row.top_p = std::min(1.0, wanted.top_p);
  return row;
}

}  // namespace

std::int64_t sampling_staging_bytes(const SamplingShape& shape) {
  const std::int64_t bytes = rows_bytes(shape) + edits_max(shape) * static_cast<std::int64_t>(sizeof(SamplingEdit));
  return (bytes + 15) / 16 * 16;
}

std::int64_t write_sampling(const SamplingShape& shape, std::span<const SamplingInput> rows, std::span<const TokenId> end_tokens,
                            std::byte* staging) {
  CHECK(rows.size() <= static_cast<std::size_t>(shape.max_rows), "rows=", rows.size(), " max_rows=", shape.max_rows);
  auto* const edits = reinterpret_cast<SamplingEdit*>(staging + rows_bytes(shape));
  SamplingEdit* edits_end = edits;
  std::int64_t counted = 0;
  std::byte* at = staging;
  for (const SamplingInput& input : rows) {
    counted += static_cast<std::int64_t>(input.state->counts().size());
    CHECK(counted <= edits_max(shape) - shape.max_rows * std::int64_t{sampling_mask_max + sampling_bias_max},
          "more counted tokens than the cache can hold: ", counted);
    SamplingRow row = row_of(shape, input);
    row.edit_first = static_cast<std::int32_t>(edits_end - edits);
    edits_end = write_edits(shape, *input.state, end_tokens, row, edits_end);
    new (at) SamplingRow(row);
    at += sizeof(SamplingRow);
  }
  return edits_end == edits ? at - staging : reinterpret_cast<std::byte*>(edits_end) - staging;
}

std::int64_t sampling_scratch_bytes(const SamplingShape& shape) {
  SamplingPass nowhere;
  return lay_out(shape, nullptr, nowhere);
}

SamplingPass sampling_pass(const SamplingShape& shape, const BatchCounts* counts, const Accumulators& logits,
                           const SamplingMemory& memory) {
  CHECK(logits.count <= shape.max_rows && logits.columns == shape.vocabulary, "rows=", logits.count, " columns=", logits.columns);
  SamplingPass pass;
  lay_out(shape, memory.scratch, pass);
  pass.counts = counts;
  pass.logits = logits.data;
  pass.stride = logits.stride;
  pass.vocabulary = shape.vocabulary;
  pass.stretches = static_cast<std::int32_t>(stretch_count(shape));
  pass.rows = reinterpret_cast<const SamplingRow*>(memory.staging);
  pass.edits = reinterpret_cast<const SamplingEdit*>(memory.staging + rows_bytes(shape));
  pass.results = memory.results;
  return pass;
}

SamplingRawLogits raw_logits(const SamplingShape& shape, const SamplingMemory& memory, const std::byte* staging,
                             std::int32_t rows) {
  SamplingPass pass;
  lay_out(shape, memory.scratch, pass);
  if (rows == 0) return {};
  const SamplingRow& last = reinterpret_cast<const SamplingRow*>(staging)[rows - 1];
  return {.data = pass.raw_of_edit, .count = std::int64_t{last.edit_first} + last.masks + last.biases + last.counts};
}

void undo_edits(const SamplingShape& shape, const std::byte* staging, std::span<const float> raw, std::span<float> logits) {
  const auto* const rows = reinterpret_cast<const SamplingRow*>(staging);
  const auto* const edits = reinterpret_cast<const SamplingEdit*>(staging + rows_bytes(shape));
  const auto vocabulary = static_cast<std::size_t>(shape.vocabulary);
  for (std::size_t row = 0; row < logits.size() / vocabulary; ++row) {
    const std::int32_t first = rows[row].edit_first;
    // Backwards: a token that was edited twice gets its oldest value last.
    for (std::int32_t edit = first + rows[row].masks + rows[row].biases + rows[row].counts; edit-- > first;)
      logits[row * vocabulary + static_cast<std::size_t>(edits[edit].token)] = raw[static_cast<std::size_t>(edit)];
  }
}

bool read_sample(const SampledRow& row, Sample& out) {
  out.token = 0;
  out.logprob = 0;
  out.top.clear();
  if (row.valid == 0) return false;
  out.token = row.token;
  out.logprob = row.logprob;
  out.top.assign(row.top, row.top + row.top_count);
  return true;
}

}  // namespace rubato::engine::cuda
