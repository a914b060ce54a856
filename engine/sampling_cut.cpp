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
  double mass = 0;
  std::int64_t count = 0;
};

/// Distances are not negative, so the order of their bits is their order. Three levels of digits: 11, 10 and 10 bits.
constexpr std::array<int, 3> level_shift{20, 10, 0};
constexpr std::uint32_t digit_count = 2048;

std::uint32_t digit_of(std::uint32_t bits, std::size_t level) {
  return level == 0 ? bits >> level_shift[0] : (bits >> level_shift[level]) & 0x3FFU;
}

/// Histogram of one level over the tokens within limit whose higher digits equal those of prefix.
void fill_bins(const Distribution& distribution, float limit, std::size_t level, std::uint32_t prefix, std::span<Bin> bins) {
  float distance[stretch_size];
  float weight[stretch_size];
  std::fill(bins.begin(), bins.end(), Bin{});
  const int prefix_shift = level == 0 ? 31 : level_shift[level - 1];
  for (std::size_t begin = 0; begin < distribution.logits.size(); begin += stretch_size) {
    const auto part = distribution.logits.subspan(begin, std::min(stretch_size, distribution.logits.size() - begin));
    kernels::distances(part, distribution.top, distribution.inverse_temperature, distance);
    kernels::weights(std::span<const float>(distance, part.size()), limit, weight);
    for (std::size_t i = 0; i < part.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(distance[i]);
      if (!(distance[i] <= limit) || (bits >> prefix_shift) != (prefix >> prefix_shift)) continue;
      Bin& bin = bins[digit_of(bits, level)];
      bin.mass += static_cast<double>(weight[i]);
      ++bin.count;
    }
  }
}

/// Walks the bins, nearest first, through all levels. stops(before, bin) says whether the cut lies within this bin, given what
/// lies before it; the last bin that holds anything is taken when none stops. Returns the limit and what lies before it.
template <class Stops>
std::pair<float, Bin> search(const Distribution& distribution, const Cut& cut, Stops&& stops) {
  std::array<Bin, digit_count> bins;
  Bin before;
  std::uint32_t prefix = 0;
  for (std::size_t level = 0; level < level_shift.size(); ++level) {
    fill_bins(distribution, cut.limit, level, prefix, bins);
    std::uint32_t last = 0;
    Bin before_last = before;
    for (std::uint32_t digit = 0; digit < digit_count; ++digit) {
      if (bins[digit].count == 0) continue;
      last = digit;
      before_last = before;
      if (stops(before, bins[digit])) break;
      before.mass += bins[digit].mass;
      before.count += bins[digit].count;
    }
    prefix |= last << level_shift[level];
    before = before_last;
  }
  return {std::bit_cast<float>(prefix), before};
}

double kept_mass(const Distribution& distribution, const Cut& cut) {
  float distance[stretch_size];
  float weight[stretch_size];
  double total = 0;
  for (std::size_t begin = 0; begin < distribution.logits.size(); begin += stretch_size) {
    const auto part = distribution.logits.subspan(begin, std::min(stretch_size, distribution.logits.size() - begin));
    kernels::distances(part, distribution.top, distribution.inverse_temperature, distance);
    kernels::weights(std::span<const float>(distance, part.size()), cut.limit, weight);
    total += kernels::sum(std::span<const float>(weight, part.size()));
  }
  return total;
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
  return {.limit = std::min(kernels::distance_max, static_cast<float>(-std::log(share))), .ties = all_ties};
}

Cut keep_top_k(const Distribution& distribution, const Cut& cut, std::int64_t count) {
  if (count >= static_cast<std::int64_t>(distribution.logits.size())) return cut;
  const auto stops = [count](const Bin& before, const Bin& bin) { return before.count + bin.count >= count; };
  return {.limit = search(distribution, cut, stops).first, .ties = all_ties};
}

Cut keep_top_p(const Distribution& distribution, const Cut& cut, double share) {
  CHECK(cut.ties == all_ties, "top_p comes last");
  const double wanted = share * kept_mass(distribution, cut);
  const auto stops = [wanted](const Bin& before, const Bin& bin) { return before.mass + bin.mass >= wanted; };
  const auto [limit, before] = search(distribution, cut, stops);
  float weight = 0;
  kernels::weights(std::span<const float>(&limit, 1), kernels::distance_max, &weight);
  const double ties = std::ceil((wanted - before.mass) / static_cast<double>(weight));
  return {.limit = limit, .ties = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(ties, 1e15)))};
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
