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

bool has_penalty(const SamplingParameters& p) {
  return p.presence_penalty != 0 || p.frequency_penalty != 0 || p.repetition_penalty != 1;
}

/// Ascending by token; several entries of one token add up.
void normalise(std::vector<std::pair<TokenId, float>>& bias) {
  std::stable_sort(bias.begin(), bias.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::size_t kept = 0;
  for (std::size_t i = 0; i < bias.size(); ++i) {
    if (kept > 0 && bias[kept - 1].first == bias[i].first) {
      bias[kept - 1].second += bias[i].second;
    } else {
      bias[kept++] = bias[i];
    }
  }
  bias.resize(kept);
}

/// Where the entry of token is, or would be.
std::size_t find_count(std::span<const TokenCount> counts, TokenId token) {
  const auto at =
      std::lower_bound(counts.begin(), counts.end(), token, [](const TokenCount& count, TokenId id) { return count.token < id; });
  return static_cast<std::size_t>(at - counts.begin());
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
  normalise(parameters_.logit_bias);
  raw_of_bias_.resize(parameters_.logit_bias.size());
  if (!has_penalty(parameters_)) return;
  std::vector<TokenId> sorted(prompt.begin(), prompt.end());
  std::sort(sorted.begin(), sorted.end());
  const std::size_t distinct_max = sorted.size() + static_cast<std::size_t>(std::max(0, parameters_.max_new_tokens));
  const std::size_t entries = std::min(distinct_max, static_cast<std::size_t>(vocabulary));
  counts_.reserve(entries);  // append() never allocates
  raw_of_counts_.resize(entries);
  for (const TokenId token : sorted) {
    if (counts_.empty() || counts_.back().token != token) counts_.push_back({.token = token});
    ++counts_.back().prompt;
  }
}

void SamplingState::append(TokenId token) {
  ++generated_count_;
  if (!has_penalty(parameters_)) return;
  const std::size_t at = find_count(counts_, token);
  if (at == counts_.size() || counts_[at].token != token) {
    counts_.insert(counts_.begin() + static_cast<std::ptrdiff_t>(at), {.token = token});
    raw_of_counts_.resize(std::max(raw_of_counts_.size(), counts_.size()));
  }
  ++counts_[at].output;
}

bool SamplingState::is_greedy() const {
  return parameters_.temperature < greedy_below;
}

void SamplingState::change(std::span<float> logits, std::span<const TokenId> end_tokens) const {
  if (masks_end_tokens()) {
    for (const std::span<const TokenId> tokens : {end_tokens, std::span<const TokenId>(parameters_.stop_token_ids)}) {
      for (const TokenId token : tokens) {
        if (token >= 0 && static_cast<std::size_t>(token) < logits.size()) logits[static_cast<std::size_t>(token)] = masked;
      }
    }
  }
  for (std::size_t i = 0; i < parameters_.logit_bias.size(); ++i) {
    float& logit = logits[static_cast<std::size_t>(parameters_.logit_bias[i].first)];
    raw_of_bias_[i] = logit;
    logit = kernels::biased(logit, parameters_.logit_bias[i].second);
  }
  penalise(logits);
}

void SamplingState::penalise(std::span<float> logits) const {
  const kernels::Penalties penalties{.repetition = static_cast<float>(parameters_.repetition_penalty),
                                     .frequency = static_cast<float>(parameters_.frequency_penalty),
                                     .presence = static_cast<float>(parameters_.presence_penalty)};
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    float& logit = logits[static_cast<std::size_t>(counts_[i].token)];
    raw_of_counts_[i] = logit;
    logit = kernels::penalised(logit, penalties, counts_[i].output);
  }
}

bool SamplingState::changes_logits() const {
  return !parameters_.logit_bias.empty() || !counts_.empty() || masks_end_tokens();
}

bool SamplingState::sample(std::span<float> logits, std::int64_t position, std::span<const TokenId> end_tokens,
                           Sample& out) const {
  out.logprob = 0;
  out.top.clear();
  if (logits.empty()) return false;
  const bool greedy = is_greedy();
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
    log_sum = static_cast<double>(raw.value) + kernels::natural_log(kernels::exp_sum(logits, raw.value));
    collect_top(logits, std::min(static_cast<std::size_t>(parameters_.top_logprobs), logits.size()), out.top);
    for (TokenLogprob& entry : out.top) entry.logprob = kernels::log_probability(entry.logprob, log_sum);
  }

  change(logits, end_tokens);
  const std::optional<TokenId> token = greedy ? greedy_choice(logits) : random_choice(logits, position);
  if (!token) return false;  // every token is masked
  out.token = *token;
  if (wants_logprobs) out.logprob = kernels::log_probability(raw_logit(logits, *token), log_sum);
  return true;
}

std::optional<TokenId> SamplingState::random_choice(std::span<const float> logits, std::int64_t position) const {
  const float top = kernels::largest(logits);
  if (!std::isfinite(top)) return std::nullopt;
  const Distribution distribution{.logits = logits,
                                  .top = kernels::without_sign_of_zero(top),
                                  .inverse_temperature = static_cast<float>(1.0 / parameters_.temperature)};
  Cut cut = parameters_.min_p > 0 ? keep_min_p(parameters_.min_p) : keep_all();
  if (parameters_.top_k > 0) cut = keep_top_k(distribution, cut, parameters_.top_k);
  if (parameters_.top_p < 1) cut = keep_top_p(distribution, cut, parameters_.top_p);
  return draw(distribution, cut, noise_of(parameters_.seed, position));
}

float SamplingState::raw_logit(std::span<const float> logits, TokenId token) const {
  // Bias comes before penalties, so its copy is the older one.
  for (std::size_t i = 0; i < parameters_.logit_bias.size(); ++i) {
    if (parameters_.logit_bias[i].first == token) return raw_of_bias_[i];
  }
  const std::size_t at = find_count(counts_, token);
  return at < counts_.size() && counts_[at].token == token ? raw_of_counts_[at] : logits[static_cast<std::size_t>(token)];
}

}  // namespace rubato::engine
