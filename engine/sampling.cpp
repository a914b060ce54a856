// SPDX-License-Identifier: Apache-2.0
// Sampling in vLLM's order: raw log-probabilities, masks and bias, penalties, temperature, min_p, top_k, top_p, one draw. All
// sums run in an order fixed by the vocabulary alone, and exp is our own, so that equal logits give equal tokens on every
// machine. Nothing allocates: intermediate values live on the stack.
#include "engine/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/sampling_cut.h"
#include "engine/sampling_kernels.h"

namespace rubato::engine {
namespace {

constexpr double greedy_below = 1e-5;  // a smaller temperature would overflow the division; vLLM draws the same line
constexpr float masked = -std::numeric_limits<float>::infinity();

std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

/// The draw's only randomness: uniform in [0, 1), a function of the request's seed and the token's position.
double noise(std::uint64_t seed, std::int64_t position) {
  const std::uint64_t counter = mix64(static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15U + 0xD1B54A32D192ED03U);
  return static_cast<double>(mix64(mix64(seed + 0x9E3779B97F4A7C15U) ^ counter) >> 11) * 0x1p-53;
}

bool has_penalty(const SamplingParameters& p) {
  return p.presence_penalty != 0 || p.frequency_penalty != 0 || p.repetition_penalty != 1;
}

/// Inserts into a short list kept best first; equal logits keep the lower id, which came first.
void insert_top(std::vector<TokenLogprob>& top, std::size_t count, TokenLogprob candidate) {
  if (top.size() == count) top.pop_back();
  auto at = top.end();
  while (at != top.begin() && std::prev(at)->logprob < candidate.logprob) --at;
  top.insert(at, candidate);
}

/// The count largest logits, best first, as raw logits for now.
void collect_top(std::span<const float> logits, std::size_t count, std::vector<TokenLogprob>& top) {
  if (count == 0) return;
  constexpr std::size_t stretch = 64;
  for (std::size_t begin = 0; begin < logits.size(); begin += stretch) {
    const auto part = logits.subspan(begin, std::min(stretch, logits.size() - begin));
    if (top.size() == count && !(kernels::largest(part) > top.back().logprob)) continue;
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (top.size() == count && !(part[i] > top.back().logprob)) continue;
      insert_top(top, count, {.token = static_cast<TokenId>(begin + i), .logprob = part[i]});
    }
  }
}

/// Logits may hold -infinity by now.
std::optional<TokenId> greedy_choice(std::span<const float> logits) {
  const float top = kernels::largest(logits);
  if (!std::isfinite(top)) return std::nullopt;
  return static_cast<TokenId>(std::find(logits.begin(), logits.end(), top) - logits.begin());
}

}  // namespace

SamplingState::SamplingState(SamplingParameters parameters, std::span<const TokenId> prompt, std::int32_t vocabulary)
    : parameters_(std::move(parameters)) {
  std::erase_if(parameters_.logit_bias, [vocabulary](const auto& bias) { return bias.first < 0 || bias.first >= vocabulary; });
  raw_of_bias_.resize(parameters_.logit_bias.size());
  if (!has_penalty(parameters_)) return;
  std::vector<TokenId> sorted(prompt.begin(), prompt.end());
  std::sort(sorted.begin(), sorted.end());
  const std::size_t distinct_max = sorted.size() + static_cast<std::size_t>(std::max(0, parameters_.max_new_tokens));
  counts_.reserve(std::min(distinct_max, static_cast<std::size_t>(vocabulary)));  // append() never allocates
  for (const TokenId token : sorted) {
    if (counts_.empty() || counts_.back().token != token) counts_.push_back({.token = token});
    ++counts_.back().prompt;
  }
}

void SamplingState::append(TokenId token) {
  ++generated_count_;
  if (!has_penalty(parameters_)) return;
  auto at =
      std::lower_bound(counts_.begin(), counts_.end(), token, [](const Count& count, TokenId id) { return count.token < id; });
  if (at == counts_.end() || at->token != token) at = counts_.insert(at, {.token = token});
  ++at->output;
}

void SamplingState::change(std::span<float> logits, std::span<const TokenId> end_tokens) const {
  if (generated_count_ < parameters_.min_new_tokens) {
    for (const std::span<const TokenId> tokens : {end_tokens, std::span<const TokenId>(parameters_.stop_token_ids)}) {
      for (const TokenId token : tokens) {
        if (token >= 0 && static_cast<std::size_t>(token) < logits.size()) logits[static_cast<std::size_t>(token)] = masked;
      }
    }
  }
  for (std::size_t i = 0; i < parameters_.logit_bias.size(); ++i) {
    float& logit = logits[static_cast<std::size_t>(parameters_.logit_bias[i].first)];
    raw_of_bias_[i] = logit;
    logit += parameters_.logit_bias[i].second;
  }
  penalise(logits);
}

void SamplingState::penalise(std::span<float> logits) const {
  const auto repetition = static_cast<float>(parameters_.repetition_penalty);
  const auto frequency = static_cast<float>(parameters_.frequency_penalty);
  const auto presence = static_cast<float>(parameters_.presence_penalty);
  for (const Count& count : counts_) {
    float& logit = logits[static_cast<std::size_t>(count.token)];
    count.raw = logit;
    logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(count.output);
    if (count.output > 0) logit -= presence;
  }
}

bool SamplingState::changes_logits() const {
  return !parameters_.logit_bias.empty() || !counts_.empty() || generated_count_ < parameters_.min_new_tokens;
}

bool SamplingState::sample(std::span<float> logits, std::int64_t position, std::span<const TokenId> end_tokens,
                           Sample& out) const {
  out.logprob = 0;
  out.top.clear();
  if (logits.empty()) return false;
  const bool greedy = parameters_.temperature < greedy_below;
  const bool wants_logprobs = parameters_.top_logprobs >= 0;
  const kernels::Argmax raw = kernels::argmax(logits);
  if (!raw.finite) return false;
  if (greedy && !wants_logprobs && !changes_logits()) {
    out.token = raw.token;
    return true;
  }

  // Raw log-probabilities first: what follows overwrites some of the logits.
  double log_sum = 0;
  if (wants_logprobs) {
    log_sum = static_cast<double>(raw.value) + std::log(kernels::exp_sum(logits, raw.value));
    collect_top(logits, std::min(static_cast<std::size_t>(parameters_.top_logprobs), logits.size()), out.top);
    for (TokenLogprob& entry : out.top) entry.logprob = static_cast<float>(static_cast<double>(entry.logprob) - log_sum);
  }

  change(logits, end_tokens);
  const std::optional<TokenId> token = greedy ? greedy_choice(logits) : random_choice(logits, position);
  if (!token) return false;  // every token is masked
  out.token = *token;
  if (wants_logprobs) out.logprob = static_cast<float>(static_cast<double>(raw_logit(logits, *token)) - log_sum);
  return true;
}

std::optional<TokenId> SamplingState::random_choice(std::span<const float> logits, std::int64_t position) const {
  const float top = kernels::largest(logits);
  if (!std::isfinite(top)) return std::nullopt;
  const Distribution distribution{
      .logits = logits, .top = top, .inverse_temperature = static_cast<float>(1.0 / parameters_.temperature)};
  Cut cut = parameters_.min_p > 0 ? keep_min_p(parameters_.min_p) : keep_all();
  if (parameters_.top_k > 0) cut = keep_top_k(distribution, cut, parameters_.top_k);
  if (parameters_.top_p < 1) cut = keep_top_p(distribution, cut, parameters_.top_p);
  return draw(distribution, cut, noise(parameters_.seed, position));
}

float SamplingState::raw_logit(std::span<const float> logits, TokenId token) const {
  // Bias comes before penalties, so its copy is the older one.
  for (std::size_t i = 0; i < parameters_.logit_bias.size(); ++i) {
    if (parameters_.logit_bias[i].first == token) return raw_of_bias_[i];
  }
  const auto at =
      std::lower_bound(counts_.begin(), counts_.end(), token, [](const Count& count, TokenId id) { return count.token < id; });
  return at != counts_.end() && at->token == token ? at->raw : logits[static_cast<std::size_t>(token)];
}

}  // namespace rubato::engine
