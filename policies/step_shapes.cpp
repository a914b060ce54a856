// SPDX-License-Identifier: Apache-2.0
// The choice as a shortest path: from the end of the decode range over the chosen candidates to the budget, each stretch weighed
// in constant time by prefix sums.
#include "policies/step_shapes.h"

#include <limits>

#include "manifests/check.h"

namespace rubato::policies {
namespace {

constexpr std::int64_t unreachable = std::numeric_limits<std::int64_t>::max();

void check_options(const ShapeOptions& options) {
  CHECK(options.budget >= 1 && options.max_num_seqs >= 1 && options.token_tile >= 1, "budget=", options.budget,
        " max_num_seqs=", options.max_num_seqs, " tile=", options.token_tile);
  CHECK(options.eager_tokens >= 0 && options.eager_tokens <= 1 << 20, "eager_tokens=", options.eager_tokens);
}

std::int32_t decode_max_of(const ShapeOptions& options) {
  return std::min(options.max_num_seqs, options.budget);
}

/// Distance of two candidates: the tile, doubled until there are few enough.
std::int32_t candidate_step(const ShapeOptions& options) {
  std::int32_t step = options.token_tile;
  // So many multiples at most lie between the two, one more where neither is a multiple, and the budget.
  while ((options.budget - decode_max_of(options)) / step + 2 > shape_candidates_max) step *= 2;
  return step;
}

/// Sums over the histogram and one step of each default bucket, up to any token count.
class Prefix {
 public:
  Prefix(const StepHistogram& histogram, const ShapeOptions& options)
      : weights_(static_cast<std::size_t>(options.budget) + 1), moments_(weights_.size()) {
    for (std::int32_t tokens = 1; tokens <= std::min(options.budget, histogram.tokens_max()); ++tokens) {
      weights_[static_cast<std::size_t>(tokens)] = histogram.weight(tokens);
    }
    for (const std::int32_t tokens : default_buckets(options).tokens) {
      weights_[static_cast<std::size_t>(tokens)] += StepHistogram::unit;
    }
    for (std::size_t tokens = 1; tokens < weights_.size(); ++tokens) {
      moments_[tokens] = moments_[tokens - 1] + weights_[tokens] * static_cast<std::int64_t>(tokens);
      weights_[tokens] += weights_[tokens - 1];
    }
  }

  /// Weight of the steps of above+1 .. last tokens.
  [[nodiscard]] std::int64_t weight(std::int32_t above, std::int32_t last) const {
    return at(weights_, last) - at(weights_, above);
  }
  /// Padding of the same steps in a bucket.
  [[nodiscard]] std::int64_t padding(std::int32_t above, std::int32_t last, std::int32_t bucket) const {
    return bucket * weight(above, last) - (at(moments_, last) - at(moments_, above));
  }

 private:
  static std::int64_t at(const std::vector<std::int64_t>& sums, std::int32_t tokens) {
    return sums[static_cast<std::size_t>(tokens)];
  }

  std::vector<std::int64_t> weights_;
  std::vector<std::int64_t> moments_;  // weight times tokens
};

/// Waste of the steps of above+1 .. bucket tokens, above not below the decode range: those whose bucket wastes too much run
/// eagerly.
std::int64_t stretch_waste(const Prefix& prefix, std::int32_t above, std::int32_t bucket, std::int32_t eager_tokens) {
  const auto least = static_cast<std::int32_t>((4 * static_cast<std::int64_t>(bucket) + 4) / 5);  // 5 least >= 4 bucket
  const std::int32_t eager_last = std::max(above, least - 1);
  return eager_tokens * prefix.weight(above, eager_last) + prefix.padding(eager_last, bucket, bucket);
}

/// Waste within the decode range, where every step runs in its bucket.
std::int64_t decode_waste(const Prefix& prefix, const std::vector<std::int32_t>& buckets) {
  std::int64_t waste = 0;
  std::int32_t above = 0;
  for (const std::int32_t bucket : buckets) {
    waste += prefix.padding(above, bucket, bucket);
    above = bucket;
  }
  return waste;
}

/// Least waste of what lies above the decode range, for each number of buckets left and each last bucket.
class Table {
 public:
  Table(const Prefix& prefix, const ShapeOptions& options, const std::vector<std::int32_t>& candidates, std::size_t count)
      : prefix_(prefix), options_(options), candidates_(candidates), least_((count + 1) * (candidates.size() + 1), unreachable) {
    for (std::size_t last = 0; last <= candidates.size(); ++last) {
      at(0, last) = options.eager_tokens * prefix.weight(tokens_of(last), options.budget);
    }
    for (std::size_t left = 1; left <= count; ++left) {
      for (std::size_t last = 0; last + left <= candidates.size(); ++last) {
        for (std::size_t next = last + 1; next + left <= candidates.size() + 1; ++next) {
          at(left, last) = std::min(at(left, last), through(left, last, next));
        }
      }
    }
  }

  [[nodiscard]] std::int64_t least(std::size_t left) { return at(left, 0); }
  [[nodiscard]] std::int64_t evaluations() const { return evaluations_; }

  /// The smallest of the cheapest choices of exactly count buckets.
  void append(std::size_t count, std::vector<std::int32_t>& buckets) {
    std::size_t last = 0;
    for (std::size_t left = count; left > 0; --left) {
      std::size_t next = last + 1;
      while (through(left, last, next) != at(left, last)) ++next;
      buckets.push_back(tokens_of(next));
      last = next;
    }
  }

 private:
  /// last is 1-based in the candidates; 0 stands for the end of the decode range.
  [[nodiscard]] std::int32_t tokens_of(std::size_t last) const {
    return last == 0 ? decode_max_of(options_) : candidates_[last - 1];
  }
  [[nodiscard]] std::int64_t& at(std::size_t left, std::size_t last) { return least_[left * (candidates_.size() + 1) + last]; }
  [[nodiscard]] std::int64_t through(std::size_t left, std::size_t last, std::size_t next) {
    ++evaluations_;
    return stretch_waste(prefix_, tokens_of(last), tokens_of(next), options_.eager_tokens) + at(left - 1, next);
  }

  const Prefix& prefix_;
  const ShapeOptions& options_;
  const std::vector<std::int32_t>& candidates_;
  std::vector<std::int64_t> least_;
  std::int64_t evaluations_ = 0;
};

}  // namespace

StepHistogram::StepHistogram(std::int32_t tokens_max, std::int32_t half_life)
    : weights_(static_cast<std::size_t>(std::max(tokens_max, 1)) + 1), half_life_(half_life) {
  // Then no sum of weights times tokens comes near 2^63.
  CHECK(tokens_max >= 1 && tokens_max <= 1 << 20 && half_life >= 1 && half_life <= 1 << 20, "tokens_max=", tokens_max,
        " half_life=", half_life);
}

void StepHistogram::observe(std::int32_t tokens) {
  CHECK(tokens >= 1, "tokens=", tokens);
  weights_[static_cast<std::size_t>(std::min(tokens, tokens_max()))] += unit;
  total_ += unit;
  if (++since_halving_ == half_life_) halve();
}

void StepHistogram::halve() {
  since_halving_ = 0;
  total_ = 0;
  for (std::int64_t& weight : weights_) {
    weight /= 2;
    total_ += weight;
  }
}

void StepHistogram::move_budget(std::int32_t from, std::int32_t to) {
  CHECK(from >= 1 && to >= 1, "from=", from, " to=", to);
  const auto target = static_cast<std::size_t>(std::min(to, tokens_max()));
  std::int64_t moved = 0;
  for (auto tokens = static_cast<std::size_t>(std::min(from, to)); tokens < weights_.size(); ++tokens) {
    moved += weights_[tokens];
    weights_[tokens] = 0;
  }
  weights_[target] += moved;
}

void StepHistogram::fade(std::int32_t steps) {
  while (total_ > steps * unit) halve();
}

std::int64_t StepHistogram::token_total() const {
  std::int64_t sum = 0;
  for (std::size_t tokens = 0; tokens < weights_.size(); ++tokens) sum += weights_[tokens] * static_cast<std::int64_t>(tokens);
  return sum;
}

std::vector<std::int32_t> decode_buckets(const ShapeOptions& options) {
  check_options(options);
  const std::int32_t last = decode_max_of(options);
  std::vector<std::int32_t> buckets;
  for (std::int32_t bucket = 8; bucket < last; bucket *= 2) buckets.push_back(bucket);
  buckets.push_back(last);
  return buckets;
}

std::vector<std::int32_t> bucket_candidates(const ShapeOptions& options) {
  check_options(options);
  const std::int32_t step = candidate_step(options);
  const std::int32_t decode_max = decode_max_of(options);
  std::vector<std::int32_t> candidates;
  for (std::int32_t bucket = (decode_max / step + 1) * step; bucket < options.budget; bucket += step)
    candidates.push_back(bucket);
  if (options.budget > decode_max) candidates.push_back(options.budget);
  return candidates;
}

StepBuckets default_buckets(const ShapeOptions& options) {
  StepBuckets buckets{.tokens = decode_buckets(options), .decode_max = decode_max_of(options)};
  const std::int32_t step = candidate_step(options);
  std::int32_t bucket = 8;
  while (bucket < options.budget) {
    if (bucket > buckets.decode_max && bucket % step == 0) buckets.tokens.push_back(bucket);
    if (bucket < 128) {
      bucket *= 2;
    } else if (bucket < 1024) {
      bucket += 128;
    } else {
      bucket = std::max(bucket / 4 * 5 / step * step, (bucket / step + 1) * step);
    }
  }
  if (options.budget > buckets.decode_max) buckets.tokens.push_back(options.budget);
  return buckets;
}

std::int64_t expected_waste(const StepHistogram& histogram, const StepBuckets& buckets, const ShapeOptions& options) {
  const Prefix prefix(histogram, options);
  std::int64_t waste = 0;
  for (std::int32_t tokens = 1; tokens <= options.budget; ++tokens) {
    const std::int64_t weight = prefix.weight(tokens - 1, tokens);
    const auto bucket = buckets.find(tokens);
    waste += weight * (bucket ? buckets.tokens[*bucket] - tokens : options.eager_tokens);
  }
  return waste;
}

ShapeChoice choose_shapes(const StepHistogram& histogram, const ShapeOptions& options) {
  const Prefix prefix(histogram, options);
  const std::vector<std::int32_t> candidates = bucket_candidates(options);
  ShapeChoice choice;
  choice.buckets = {.tokens = decode_buckets(options), .decode_max = decode_max_of(options)};
  const auto spare = static_cast<std::size_t>(
      std::max<std::int64_t>(0, options.count_max - static_cast<std::int64_t>(choice.buckets.tokens.size())));
  const std::size_t count = std::min(spare, candidates.size());
  Table table(prefix, options, candidates, count);
  std::size_t best = 0;
  for (std::size_t used = 1; used <= count; ++used) {
    if (table.least(used) < table.least(best)) best = used;
  }
  choice.waste = decode_waste(prefix, choice.buckets.tokens) + table.least(best);
  choice.evaluations = table.evaluations();
  table.append(best, choice.buckets.tokens);
  return choice;
}

}  // namespace rubato::policies
