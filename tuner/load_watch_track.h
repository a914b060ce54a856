// SPDX-License-Identifier: Apache-2.0
// One feature of the load, slice by slice: what is normal, how much that scatters, two Page tests (Page 1954) and the posterior
// of when it changed (Adams and MacKay 2007).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace rubato::tuner {

/// What a slice saw of a feature. Rates: exposure is its seconds, sum the arrivals. Means: exposure is the requests.
struct SliceSum {
  double exposure = 0;
  double sum = 0;      // of the values tested (logarithms of lengths)
  double squares = 0;  // of the same
  double natural = 0;  // sum of the values in the unit that people read
};

/// How much more sums scatter than those of independent values would, by the length of the sum: traffic comes in bursts, and
/// bursts in spells. The ratio of variances over blocks of 1, 4, 16 and 64 slices; each scale starts from the one below.
class Dispersion {
 public:
  /// residual: a slice's sum less what was expected; variance: of it, were its values independent.
  void observe(double residual, double variance);
  /// Of all scales.
  [[nodiscard]] double largest() const;
  /// The blocks under way hold a change of the level.
  void drop_open_blocks();

 private:
  struct Scale {
    double residual = 0, variance = 0;  // of the block under way
    std::int32_t filled = 0;
    double squares = 0, expected = 0;  // over closed blocks, newer ones weighing more
    double blocks = 0;
  };
  static constexpr std::size_t scale_count = 4;
  [[nodiscard]] double at(std::size_t scale) const;
  std::array<Scale, scale_count> scales_{};
};

enum class TrackKind : std::uint8_t {
  Rate,  // counts: negative binomial by way of a Poisson law whose likelihood is tempered by the dispersion
  Mean,  // normal, spread learnt
};

struct TrackOptions {
  TrackKind kind = TrackKind::Mean;
  double change = 0.7;            // of the mean, that is to be found quickest; rates: of its logarithm
  double spread_min = 0.2;        // means: no values scatter less than this
  double false_alarms_up = 0;     // per slice
  double false_alarms_down = 0;   // per slice
  double memory = 900;            // slices over which the baseline is learnt
  double memory_exposures = 200;  // and at least over so many arrivals or requests
};

/// Since which slice, counted back from the last, it is another load, and how probable that is.
struct ChangePoint {
  std::size_t slices = 0;
  double probability = 0;
  SliceSum since{};
};

class FeatureTrack {
 public:
  explicit FeatureTrack(const TrackOptions& options) : options_(options) {}

  void observe(const SliceSum& slice);

  /// By how much the more suspicious test is over its threshold; 1 is at it.
  [[nodiscard]] double suspicion() const;
  [[nodiscard]] ChangePoint change_point() const;
  /// In the unit that people read.
  [[nodiscard]] double normal() const { return exposure_ > 0 ? natural_ / exposure_ : 0; }
  /// Sum over the last slices that are remembered.
  [[nodiscard]] SliceSum last(std::size_t slices) const;

  /// Learns anew from the last slices; how much the feature scatters outlives a move of its level.
  void restart(std::size_t slices);

  static constexpr std::size_t slices_remembered = 256;

 private:
  void learn_until(std::size_t slice);
  void learn(const SliceSum& slice);
  [[nodiscard]] double information(double step) const;  // nats per slice that a test loses while nothing changes
  [[nodiscard]] double threshold(double step, double false_alarms) const;
  [[nodiscard]] double likelihood_ratio(double exposure, double sum) const;
  void page(const SliceSum& slice);

  TrackOptions options_;
  // Baseline: sums with a fading memory.
  double exposure_ = 0, sum_ = 0, squares_ = 0, natural_ = 0, slices_ = 0;
  double mean_ = 0;
  double variance_ = 1;  // of one value; rates: of the count in one unit of exposure
  double dispersion_ = 1;
  double up_ = 0, down_ = 0;
  double threshold_up_ = 0, threshold_down_ = 0;
  Dispersion scatter_;
  std::array<SliceSum, slices_remembered> recent_{};
  std::size_t seen_ = 0;     // slices since the last restart
  std::size_t learned_ = 0;  // of them
  std::size_t settling_ = 0;
};

}  // namespace rubato::tuner
