// SPDX-License-Identifier: Apache-2.0
// Where top_k, top_p and min_p cut a row of logits, and the draw among what is left. Nothing is sorted: a radix search over the
// bits of each logit's distance from the largest finds the exact cut in at most three passes of fixed cost, however flat the
// distribution. Searches add up whole
// numbers (mass_of), so that their results depend on no order: the device finds the same cut in its own way. Private to sampling.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "engine/tokens.h"

namespace rubato::engine {

/// A row of logits as a distribution: weight of token i = exp((logits[i] - top) / temperature).
struct Distribution {
  std::span<const float> logits;  // may hold -infinity: weight zero
  float top = 0;                  // the largest; not a negative zero
  float inverse_temperature = 1;
};

/// The kept tokens: those nearer than limit, and of those at limit the first `ties` in the order of ids.
struct Cut {
  float limit = 0;
  std::int64_t ties = 0;
};

/// Every token with a weight.
[[nodiscard]] Cut keep_all();
/// Weight at least share of the largest weight; share in (0, 1].
[[nodiscard]] Cut keep_min_p(double share);
/// The count nearest among those kept by cut, and all that equal the last of them.
[[nodiscard]] Cut keep_top_k(const Distribution& distribution, const Cut& cut, std::int64_t count);
/// The smallest set of nearest tokens among those kept by cut that holds at least share of their weight.
[[nodiscard]] Cut keep_top_p(const Distribution& distribution, const Cut& cut, double share);

/// The draw's only randomness: uniform in [0, 1), a function of the request's seed and the token's position.
[[nodiscard]] double noise_of(std::uint64_t seed, std::int64_t position);

/// Inverse of the cumulative weight of the kept tokens, in the order of ids, at position noise in [0, 1). Nothing when nothing is
/// kept.
[[nodiscard]] std::optional<TokenId> draw(const Distribution& distribution, const Cut& cut, double noise);

}  // namespace rubato::engine
