// SPDX-License-Identifier: Apache-2.0
// Radix search for the cut, then the draw.
#include "engine/sampling_cut.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/sampling_kernels.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

using kernels::stretch_size;

constexpr std::int64_t all_ties = std::numeric_limits<std::int64_t>::max();

struct Bin {
  std::int64_t mass = 0;
  std::int64_t count = 0;
};

/// Distances are not negative, so the order of their bits is their order. The bits fall into three digits, read from the top; the
/// first has no more values than distances up to distance_max need.
constexpr std::array<int, 3> level_shift{20, 10, 0};
constexpr std::uint32_t digit_count = (std::bit_cast<std::uint32_t>(kernels::distance_max) >> level_shift[0]) + 1;
static_assert(digit_count >= 1024, "the lower digits have ten bits");

/// Whether no token of part is within limit: then its weights need not be worked out.
bool all_beyond(const Distribution& distribution, std::span<const float> part, float limit) {
  return kernels::distance(distribution.top, kernels::largest(part), distribution.inverse_temperature) > limit;
}

using Bins = std::array<Bin, digit_count>;

/// The first digit of every token within limit. Neighbours go to different copies, so that one addition need not wait for the one
/// before.
void fill_first(const Distribution& distribution, float limit, Bins& bins) {
  constexpr std::size_t copy_count = 4;
  std::array<std::array<Bin, digit_count + 1>, copy_count> copies{};  // the last bin takes what is beyond limit
  float distance[stretch_size];
  float weight[stretch_size];
  const auto limit_bits = std::bit_cast<std::uint32_t>(limit);
  for (std::size_t begin = 0; begin < distribution.logits.size(); begin += stretch_size) {
    const auto part = distribution.logits.subspan(begin, std::min(stretch_size, distribution.logits.size() - begin));
    if (all_beyond(distribution, part, limit)) continue;
    kernels::distances(part, distribution.top, distribution.inverse_temperature, distance);
    kernels::weights(std::span<const float>(distance, part.size()), limit, weight);
    for (std::size_t i = 0; i < part.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(distance[i]);
      Bin& bin = copies[i % copy_count][bits <= limit_bits ? bits >> level_shift[0] : digit_count];
      bin.mass += kernels::mass_of(weight[i]);
      ++bin.count;
    }
  }
  for (std::uint32_t digit = 0; digit < digit_count; ++digit) {
    bins[digit] = {};
    for (const auto& copy : copies) {
      bins[digit].mass += copy[digit].mass;
      bins[digit].count += copy[digit].count;
    }
  }
}

/// A lower digit of the tokens within limit whose higher digits are those of prefix: few, as a rule.
void fill_lower(const Distribution& distribution, float limit, std::size_t level, std::uint32_t prefix, Bins& bins) {
  float distance[stretch_size];
  bins.fill({});
  const int prefix_shift = level_shift[level - 1];
  for (std::size_t begin = 0; begin < distribution.logits.size(); begin += stretch_size) {
    const auto part = distribution.logits.subspan(begin, std::min(stretch_size, distribution.logits.size() - begin));
    if (all_beyond(distribution, part, limit)) continue;
    kernels::distances(part, distribution.top, distribution.inverse_temperature, distance);
    for (std::size_t i = 0; i < part.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(distance[i]);
      if ((bits >> prefix_shift) != (prefix >> prefix_shift) || distance[i] > limit) continue;
      Bin& bin = bins[(bits >> level_shift[level]) & 0x3FFU];
      bin.mass += kernels::mass_of(kernels::weight_within(distance[i], limit));
      ++bin.count;
    }
  }
}

/// Where a cut lies: the distance, and what lies nearer; and all that was searched.
struct Found {
  float limit = 0;
  Bin before;
  Bin total;
};

/// Walks the bins, nearest first, through all levels. stops(before, bin, total) says whether the cut lies within this bin, given
/// what lies before it; the last bin that holds anything is taken when none stops.
template <class Stops>
Found search(const Distribution& distribution, const Cut& cut, Stops&& stops) {
  Bins bins;
  Found found;
  std::uint32_t prefix = 0;
  for (std::size_t level = 0; level < level_shift.size(); ++level) {
    if (level == 0) {
      fill_first(distribution, cut.limit, bins);
      for (const Bin& bin : bins) {
        found.total.mass += bin.mass;
        found.total.count += bin.count;
      }
    } else {
      fill_lower(distribution, cut.limit, level, prefix, bins);
    }
    std::uint32_t last = 0;
    Bin before_last = found.before;
    Bin before = found.before;
    for (std::uint32_t digit = 0; digit < digit_count; ++digit) {
      if (bins[digit].count == 0) continue;
      last = digit;
      before_last = before;
      if (stops(before, bins[digit], found.total)) break;
      before.mass += bins[digit].mass;
      before.count += bins[digit].count;
    }
    prefix |= last << level_shift[level];
    found.before = before_last;
  }
  found.limit = std::bit_cast<float>(prefix);
  return found;
}

/// Weights of one stretch with everything beyond the cut at zero. ties_left counts down over the stretches.
void kept_weights(const Distribution& distribution, const Cut& cut, std::size_t begin, std::size_t size, std::int64_t& ties_left,
                  float* weight) {
  float distance[stretch_size];
  kernels::distances(distribution.logits.subspan(begin, size), distribution.top, distribution.inverse_temperature, distance);
  kernels::weights(std::span<const float>(distance, size), cut.limit, weight);
  if (cut.ties == all_ties) return;
  for (std::size_t i = 0; i < size; ++i) {
    if (distance[i] == cut.limit && ties_left-- <= 0) weight[i] = 0;
  }
}

}  // namespace

Cut keep_all() {
  return {.limit = kernels::distance_max, .ties = all_ties};
}

Cut keep_min_p(double share) {
  return {.limit = std::min(kernels::distance_max, static_cast<float>(0.0 - std::log(share))), .ties = all_ties};
}

Cut keep_top_k(const Distribution& distribution, const Cut& cut, std::int64_t count) {
  if (count >= static_cast<std::int64_t>(distribution.logits.size())) return cut;
  const auto stops = [count](const Bin& before, const Bin& bin, const Bin&) { return before.count + bin.count >= count; };
  return {.limit = search(distribution, cut, stops).limit, .ties = all_ties};
}

Cut keep_top_p(const Distribution& distribution, const Cut& cut, double share) {
  CHECK(cut.ties == all_ties, "top_p comes last");
  const auto stops = [share](const Bin& before, const Bin& bin, const Bin& total) {
    return before.mass + bin.mass >= kernels::share_of(total.mass, share);
  };
  const Found found = search(distribution, cut, stops);
  // The search stopped where the mass got there, so something is missing before it and each of the ties has a mass.
  const std::int64_t missing = kernels::share_of(found.total.mass, share) - found.before.mass;
  const std::int64_t each = kernels::mass_of(kernels::weight_within(found.limit, found.limit));
  return {.limit = found.limit, .ties = (missing + each - 1) / each};
}

namespace {

std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

}  // namespace

double noise_of(std::uint64_t seed, std::int64_t position) {
  const std::uint64_t counter = mix64(static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15U + 0xD1B54A32D192ED03U);
  return static_cast<double>(mix64(mix64(seed + 0x9E3779B97F4A7C15U) ^ counter) >> 11) * 0x1p-53;
}

std::optional<TokenId> draw(const Distribution& distribution, const Cut& cut, double noise) {
  constexpr std::size_t stretch_count_max = 4096;  // vocabularies up to 4,194,304, as config.cpp allows
  const std::size_t size = distribution.logits.size();
  const std::size_t stretch_count = (size + stretch_size - 1) / stretch_size;
  CHECK(stretch_count <= stretch_count_max, "vocabulary=", size);
  std::array<double, stretch_count_max> mass;
  std::array<std::int64_t, stretch_count_max> ties_at;
  float weight[stretch_size];
  double total = 0;
  std::int64_t ties_left = cut.ties;
  std::size_t last = stretch_count;  // the last stretch with any weight
  for (std::size_t i = 0; i < stretch_count; ++i) {
    const std::size_t count = std::min(stretch_size, size - i * stretch_size);
    ties_at[i] = ties_left;
    mass[i] = 0;
    if (all_beyond(distribution, distribution.logits.subspan(i * stretch_size, count), cut.limit)) continue;
    kept_weights(distribution, cut, i * stretch_size, count, ties_left, weight);
    mass[i] = kernels::sum(std::span<const float>(weight, count));
    total += mass[i];
    if (mass[i] > 0) last = i;
  }
  if (last == stretch_count) return std::nullopt;

  double target = noise * total;
  std::size_t chosen = 0;
  while (chosen < last && target >= mass[chosen]) target -= mass[chosen++];
  const std::size_t begin = chosen * stretch_size;
  const std::size_t count = std::min(stretch_size, size - begin);
  kept_weights(distribution, cut, begin, count, ties_at[chosen], weight);
  std::optional<std::size_t> token;  // the last with any weight, should rounding carry the target past the end
  for (std::size_t i = 0; i < count; ++i) {
    if (weight[i] <= 0) continue;
    token = begin + i;
    if (target < static_cast<double>(weight[i])) break;
    target -= static_cast<double>(weight[i]);
  }
  if (!token) return std::nullopt;
  return static_cast<TokenId>(*token);
}

}  // namespace rubato::engine
