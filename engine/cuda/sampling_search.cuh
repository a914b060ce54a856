// SPDX-License-Identifier: Apache-2.0
// Where top_k and top_p cut a row: a search by one block over the bits of distances, narrowing from bins over the whole row to
// one distance. Counts and masses are whole numbers, so the cut is the host's however many threads add them up.
#pragma once

#include "engine/cuda/sampling_device.cuh"

namespace rubato::engine::cuda {

/// Bins that many threads add to, in shared memory. A mass of up to 2^41 is spread over pieces of piece_bits, each with a sum of
/// its own, because 32-bit additions are what shared memory does by itself; tokens_max of them cannot overflow.
template <int bin_count, int piece_bits, std::int64_t tokens_max>
struct SharedBins {
  static constexpr int mass_bits = 42;
  static constexpr int pieces = (mass_bits + piece_bits - 1) / piece_bits;
  static_assert(((std::int64_t{1} << piece_bits) - 1) * tokens_max < (std::int64_t{1} << 32));

  unsigned counts[bin_count];
  unsigned masses[pieces][bin_count];

  /// All threads of the block; a barrier must follow.
  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < bin_count; i += static_cast<int>(blockDim.x)) {
      counts[i] = 0;
      for (int piece = 0; piece < pieces; ++piece) masses[piece][i] = 0;
    }
  }
  __device__ void add(int bin, std::int64_t mass) {
    atomicAdd(&counts[bin], 1U);
    auto rest = static_cast<Wide>(mass);
    for (int piece = 0; piece < pieces && rest != 0; ++piece, rest >>= piece_bits) {
      const auto part = static_cast<unsigned>(rest & ((1U << piece_bits) - 1U));
      if (part != 0) atomicAdd(&masses[piece][bin], part);
    }
  }
  [[nodiscard]] __device__ Wide mass(int bin) const {
    Wide sum = 0;
    for (int piece = 0; piece < pieces; ++piece) sum += static_cast<Wide>(masses[piece][bin]) << (piece * piece_bits);
    return sum;
  }
};

struct Tally {
  Wide mass = 0;
  Wide count = 0;
};
__device__ inline Tally operator+(const Tally& a, const Tally& b) {
  return {.mass = a.mass + b.mass, .count = a.count + b.count};
}
__device__ inline Tally operator-(const Tally& a, const Tally& b) {
  return {.mass = a.mass - b.mass, .count = a.count - b.count};
}

enum class Measure : std::uint8_t { Count, Mass };
__device__ inline Wide amount(const Tally& tally, Measure measure) {
  return measure == Measure::Count ? tally.count : tally.mass;
}

/// What a search looks for: the nearest distance within which there is `target` of `measure`, >= 1.
struct Goal {
  Measure measure;
  Wide target;
};

struct Found {
  int bin = 0;
  Tally before;  // what lies nearer than the bin
  Tally within;
};

inline constexpr int search_threads = 1024;
inline constexpr int search_bits = 10;  // settled by one pass
inline constexpr int search_bin_count = 1 << search_bits;
inline constexpr int search_list_size = 4096;  // no less than there are stretches: they count their ties here
inline constexpr int search_sums = 512;

struct SearchShared {
  Tally warp_tallies[search_threads / warp_lanes];
  Found found;
  Wide keys[search_threads / warp_lanes];
  double sums[search_sums];
  SharedBins<search_bin_count, 10, std::int64_t{1} << 22> bins;
  unsigned list_count;
  std::uint32_t list[search_list_size];  // distances
};
static_assert(sizeof(SearchShared) <= 48 * 1024);

/// A block's search in one row. All threads of the block call everything together.
class RowSearch {
 public:
  __device__ RowSearch(const SamplingPass& pass, int row, float top, SearchShared& shared)
      : pass_(pass), wanted_(pass.rows[row]), row_(row), top_(top), shared_(shared) {}

  /// Of all tokens within the row's limit, from the bins of the pass before.
  [[nodiscard]] __device__ Tally total() {
    const auto bin = [this](int i) { return first_bin(i); };
    return find(first_bin_count, bin, {}, {.measure = Measure::Count, .target = 1}).total;
  }

  /// The distance at which goal is reached, and what lies before it and at it. goal must lie within limit.
  struct Cut {
    std::uint32_t limit = 0;  // bits
    Tally before;
    Tally at;
  };
  [[nodiscard]] __device__ Cut search(std::uint32_t limit, const Goal& goal) {
    const auto bin = [this](int i) { return first_bin(i); };
    Found found = find(first_bin_count, bin, {}, goal).found;
    std::uint32_t low = kernels::bits_of(static_cast<float>(found.bin) / first_bins_per_unit);
    std::uint32_t high = kernels::bits_of(static_cast<float>(found.bin + 1) / first_bins_per_unit) - 1;
    if (high > limit) high = limit;
    bool narrowed = false;  // even one distance needs its own tally: the bin may reach beyond limit
    while (low < high || !narrowed) {
      const int width = low == high ? 1 : 32 - __clz(static_cast<int>(high - low));
      const int shift = width > search_bits ? width - search_bits : 0;
      fill(low, high, shift);
      const auto lower = [this](int i) { return Tally{.mass = shared_.bins.mass(i), .count = shared_.bins.counts[i]}; };
      found = find(search_bin_count, lower, found.before, goal).found;
      low += static_cast<std::uint32_t>(found.bin) << shift;
      const std::uint32_t last = low + ((1U << shift) - 1U);
      if (last < high) high = last;
      narrowed = true;
    }
    return {.limit = low, .before = found.before, .at = found.within};
  }

 private:
  struct Finding {
    Found found;
    Tally total;
  };

  __device__ Tally first_bin(int i) const {
    const std::int64_t at = static_cast<std::int64_t>(row_) * first_bin_count + i;
    return {.mass = pass_.first_mass[at], .count = pass_.first_count[at]};
  }

  /// The bin at which the running tally, from before on, reaches the goal. read(i): bin i.
  template <class Read>
  __device__ Finding find(int bin_count, Read&& read, const Tally& before, const Goal& goal) {
    const int share = (bin_count + search_threads - 1) / search_threads;
    const int begin = static_cast<int>(threadIdx.x) * share;
    Tally mine;
    for (int i = begin; i < begin + share && i < bin_count; ++i) mine = mine + read(i);
    Tally running = mine;
    for (int offset = 1; offset < warp_lanes; offset *= 2) {
      const Tally other{.mass = __shfl_up_sync(all_lanes, running.mass, offset),
                        .count = __shfl_up_sync(all_lanes, running.count, offset)};
      if (lane_of_thread() >= offset) running = running + other;
    }
    if (lane_of_thread() == warp_lanes - 1) shared_.warp_tallies[warp_of_thread()] = running;
    __syncthreads();
    Tally start = before + (running - mine);
    Tally total = before;
    for (int warp = 0; warp < search_threads / warp_lanes; ++warp) {
      const Tally of_warp = shared_.warp_tallies[warp];
      if (warp < warp_of_thread()) start = start + of_warp;
      total = total + of_warp;
    }
    // Exactly one thread has the bin.
    if (amount(start, goal.measure) < goal.target && amount(start + mine, goal.measure) >= goal.target) {
      int i = begin;
      Tally within = read(i);
      while (amount(start + within, goal.measure) < goal.target) {
        start = start + within;
        within = read(++i);
      }
      shared_.found = {.bin = i, .before = start, .within = within};
    }
    __syncthreads();  // the next call has a barrier before it writes found again
    return {.found = shared_.found, .total = total};
  }

  __device__ void add(std::uint32_t distance, std::uint32_t low, int shift) {
    const float weight = kernels::exp_negative(kernels::float_of(distance));
    shared_.bins.add(static_cast<int>((distance - low) >> shift), kernels::mass_of(weight));
  }

  /// Fills the bins with the tokens at distances low..high: from the list of an earlier pass when that holds them, else from the
  /// row, and makes a list of them if they fit.
  __device__ void fill(std::uint32_t low, std::uint32_t high, int shift) {
    const bool listed = list_low_ <= low && high <= list_high_;
    shared_.bins.clear();
    if (!listed && threadIdx.x == 0) shared_.list_count = 0;
    __syncthreads();
    if (listed) {
      for (unsigned i = threadIdx.x; i < shared_.list_count; i += search_threads) {
        if (shared_.list[i] >= low && shared_.list[i] <= high) add(shared_.list[i], low, shift);
      }
      __syncthreads();
      return;
    }
    const Wide* keys = stretch_keys(pass_, wanted_, row_);
    for (int index = warp_of_thread(); index < pass_.stretches; index += search_threads / warp_lanes) {
      const float nearest = kernels::distance(top_, logit_of(keys[index]), wanted_.inverse_temperature);
      if (kernels::bits_of(nearest) > high) continue;
      for_each_logit(stretch_of(pass_, row_, index), [&](int, float logit) {
        const std::uint32_t distance = kernels::bits_of(kernels::distance(top_, logit, wanted_.inverse_temperature));
        if (distance < low || distance > high) return;
        add(distance, low, shift);
        const unsigned slot = atomicAdd(&shared_.list_count, 1U);
        if (slot < search_list_size) shared_.list[slot] = distance;
      });
    }
    __syncthreads();
    const bool fits = shared_.list_count <= search_list_size;
    list_low_ = fits ? low : 1;
    list_high_ = fits ? high : 0;
  }

  const SamplingPass& pass_;
  const SamplingRow& wanted_;
  int row_;
  float top_;
  SearchShared& shared_;
  std::uint32_t list_low_ = 1;  // above list_high_: there is no list
  std::uint32_t list_high_ = 0;
};

}  // namespace rubato::engine::cuda
