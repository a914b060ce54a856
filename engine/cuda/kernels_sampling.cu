// SPDX-License-Identifier: Apache-2.0
// The kernels of sampling, in their order. Those that walk logits take one warp per stretch and many blocks per row; they leave
// what they found in scratch, and the next kernel puts it together in the order of stretches. No kernel depends on which block
// ran first.
#include "engine/cuda/sampling.h"

#include "engine/cuda/runtime.h"
#include "engine/cuda/sampling_device.cuh"
#include "engine/cuda/sampling_search.cuh"

namespace rubato::engine::cuda {
namespace {

constexpr int stretch_warps = 8;  // stretches of one block
constexpr int stretch_threads = stretch_warps * warp_lanes;

__device__ inline int stretch_of_warp() {
  return static_cast<int>(blockIdx.x) * stretch_warps + warp_of_thread();
}

/// The key of the largest logit of a stretch; not_finite where one is not and that matters.
enum class Infinities : std::uint8_t { Refused, Masks };
__device__ inline Wide largest_of(const Stretch& stretch, Infinities infinities) {
  Wide best = 0;
  for_each_logit(stretch, [&](int offset, float logit) {
    if (offset >= stretch.size) return;
    const bool refused = infinities == Infinities::Refused && !kernels::is_finite(logit);
    best = larger(best, refused ? not_finite : key_of(logit, stretch.first + offset));
  });
  return warp_largest(best);
}

/// Keys of the count largest logits of the stretch, best first; zeros when it has fewer.
__device__ inline void write_tops(const Stretch& stretch, std::int32_t count, Wide* tops) {
  const auto largest_below = [&](Wide bound) {  // of this lane's
    Wide best = 0;
    for_each_logit(stretch, [&](int offset, float logit) {
      const Wide key = offset < stretch.size ? key_of(logit, stretch.first + offset) : 0;
      if (key < bound) best = larger(best, key);
    });
    return best;
  };
  Wide mine = largest_below(not_finite);
  for (std::int32_t i = 0; i < count; ++i) {
    const Wide best = warp_largest(mine);
    if (lane_of_thread() == 0) tops[i] = best;
    if (mine == best) mine = largest_below(best);
  }
}

/// Masks, biases, penalties, in this order.
__device__ inline void edit_stretch(const SamplingPass& pass, const SamplingRow& wanted, const Stretch& stretch) {
  std::int32_t first = wanted.edit_first;
  apply_edits(pass, stretch, first, wanted.masks, [&](std::int32_t edit, float& logit) {
    pass.raw_of_edit[edit] = logit;
    logit = minus_infinity;
  });
  first += wanted.masks;
  apply_edits(pass, stretch, first, wanted.biases, [&](std::int32_t edit, float& logit) {
    pass.raw_of_edit[edit] = logit;
    logit = kernels::biased(logit, kernels::float_of(pass.edits[edit].value));
  });
  first += wanted.biases;
  const kernels::Penalties penalties{.repetition = wanted.repetition, .frequency = wanted.frequency, .presence = wanted.presence};
  apply_edits(pass, stretch, first, wanted.counts, [&](std::int32_t edit, float& logit) {
    pass.raw_of_edit[edit] = logit;
    logit = kernels::penalised(logit, penalties, static_cast<std::int32_t>(pass.edits[edit].value));
  });
}

/// A row that is not finite is not edited; but whoever undoes edits finds what he would put back.
__device__ inline void keep_stretch(const SamplingPass& pass, const SamplingRow& wanted, const Stretch& stretch) {
  std::int32_t first = wanted.edit_first;
  const std::int32_t counts[] = {wanted.masks, wanted.biases, wanted.counts};
  for (const std::int32_t count : counts) {
    apply_edits(pass, stretch, first, count, [&](std::int32_t edit, float& logit) { pass.raw_of_edit[edit] = logit; });
    first += count;
  }
}

/// The best tokens of the row from those of its stretches. One block; keys: scratch.
__device__ inline void merge_tops(const SamplingPass& pass, const SamplingRow& wanted, int row, double log_sum, Wide* keys) {
  const Wide* tops = pass.tops + static_cast<std::int64_t>(row) * pass.stretches * sampling_top_max;
  const std::int32_t count = wanted.top_logprobs;
  Wide last = not_finite;
  for (std::int32_t rank = 0; rank < count; ++rank) {
    Wide best = 0;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < pass.stretches * count; i += search_threads) {
      const Wide key = tops[i / count * sampling_top_max + i % count];
      if (key < last) best = larger(best, key);
    }
    last = block_largest(best, keys);
    if (threadIdx.x == 0) {
      pass.results[row].top[rank] = {.token = token_of(last), .logprob = kernels::log_probability(logit_of(last), log_sum)};
    }
  }
}

/// Sum of count values in their order; thread 0 has it. One block of search_threads.
__device__ inline double sum_in_order(const double* values, std::int32_t count, double (&scratch)[search_sums]) {
  double total = 0;
  for (std::int32_t begin = 0; begin < count; begin += search_sums) {
    const std::int32_t left = count - begin < search_sums ? count - begin : search_sums;
    if (static_cast<std::int32_t>(threadIdx.x) < left)
      scratch[threadIdx.x] = values[begin + static_cast<std::int32_t>(threadIdx.x)];
    __syncthreads();
    if (threadIdx.x == 0) {
      for (std::int32_t i = 0; i < left; ++i) total = kernels::add(total, scratch[i]);
    }
    __syncthreads();
  }
  return total;
}

/// How many of the tokens at the limit each stretch may keep, when only `ties` of them are kept. One block.
__device__ inline void share_ties(const SamplingPass& pass, const SamplingRow& wanted, int row, const SamplingDraw& draw,
                                  std::int32_t ties, std::uint32_t (&counts)[search_list_size]) {
  for (int index = warp_of_thread(); index < pass.stretches; index += search_threads / warp_lanes) {
    std::uint32_t count = 0;
    for_each_logit(stretch_of(pass, row, index), [&](int, float logit) {
      const bool tie = kernels::distance(draw.top, logit, wanted.inverse_temperature) == draw.limit;
      count += static_cast<std::uint32_t>(__popc(__ballot_sync(all_lanes, tie)));
    });
    if (lane_of_thread() == 0) counts[index] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int index = 0; index < pass.stretches; ++index) {
      const auto here = static_cast<std::int32_t>(counts[index]);
      pass.ties_left[static_cast<std::int64_t>(row) * pass.stretches + index] = ties;
      ties = ties > here ? ties - here : 0;
    }
  }
}

/// What top_k and top_p keep of the row. One block.
__device__ inline void find_cut(const SamplingPass& pass, const SamplingRow& wanted, int row, SearchShared& shared,
                                SamplingDraw& draw) {
  RowSearch search(pass, row, draw.top, shared);
  std::uint32_t limit = kernels::bits_of(wanted.limit);
  Tally kept = search.total();
  if (wanted.top_k > 0) {
    const auto k = static_cast<Wide>(wanted.top_k);
    const RowSearch::Cut cut = search.search(limit, {.measure = Measure::Count, .target = k < kept.count ? k : kept.count});
    limit = cut.limit;
    kept = cut.before + cut.at;
  }
  draw.limit = kernels::float_of(limit);
  if (!(wanted.top_p < 1)) return;
  const auto target = static_cast<Wide>(kernels::share_of(static_cast<std::int64_t>(kept.mass), wanted.top_p));
  const RowSearch::Cut cut = search.search(limit, {.measure = Measure::Mass, .target = target});
  draw.limit = kernels::float_of(cut.limit);
  const auto each = static_cast<Wide>(kernels::mass_of(kernels::exp_negative(draw.limit)));
  const Wide ties = (target - cut.before.mass + each - 1) / each;
  if (ties >= cut.at.count) return;
  draw.ties_limited = 1;
  share_ties(pass, wanted, row, draw, static_cast<std::int32_t>(ties), shared.list);
}

/// Takes the weights away from target, in order, until one is larger than what is left: that is the one. The last with any
/// weight, should rounding carry target past the end; -1 when there is none. One thread; size is a multiple of 8.
__device__ inline int pick(const float* weights, int size, double target) {
  constexpr int at_once = 8;  // only the subtractions wait for each other
  int last = -1;
  for (int begin = 0; begin < size; begin += at_once) {
    double left = target;
    bool here = false;
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const float weight = weights[begin + i];
      here = here || (weight > 0 && left < static_cast<double>(weight));
      left = kernels::subtract(left, static_cast<double>(weight));
      last = weight > 0 && !here ? begin + i : last;
    }
    if (!here) {
      target = left;
      continue;
    }
    for (int i = begin;; ++i) {
      if (weights[i] > 0 && target < static_cast<double>(weights[i])) return i;
      target = kernels::subtract(target, static_cast<double>(weights[i]));
    }
  }
  return last;
}

using FirstBins = SharedBins<first_bin_count, 19, std::int64_t{stretch_warps} * stretch_tokens>;
struct FirstBinsShared {
  Wide keys[stretch_warps];
  FirstBins bins;
};

struct DrawShared {
  std::int32_t chosen;  // stretch
  double target;
  float weights[stretch_tokens];
  // then the sums of all stretches
};
static_assert(sizeof(DrawShared) % sizeof(double) == 0);

}  // namespace

/// Every row: the largest logit of each stretch. Empties the bins of rows that will search.
__global__ void __launch_bounds__(stretch_threads) scan_stretches(SamplingPass pass) {
  const int row = static_cast<int>(blockIdx.y);
  if (row >= pass.counts->selected) return;
  if (has_search(pass.rows[row])) {
    const int threads = static_cast<int>(gridDim.x) * stretch_threads;
    for (int i = static_cast<int>(blockIdx.x) * stretch_threads + static_cast<int>(threadIdx.x); i < first_bin_count;
         i += threads) {
      pass.first_mass[static_cast<std::int64_t>(row) * first_bin_count + i] = 0;
      pass.first_count[static_cast<std::int64_t>(row) * first_bin_count + i] = 0;
    }
  }
  const int index = stretch_of_warp();
  if (index >= pass.stretches) return;
  const Wide best = largest_of(stretch_of(pass, row, index), Infinities::Refused);
  if (lane_of_thread() == 0) pass.raw_best[static_cast<std::int64_t>(row) * pass.stretches + index] = best;
}

/// Rows that want logprobs or change logits: what depends on raw logits, then the changes, then the largest logit again.
__global__ void __launch_bounds__(stretch_threads) edit_stretches(SamplingPass pass) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int row = static_cast<int>(blockIdx.y);
  if (row >= pass.counts->selected) return;
  const SamplingRow wanted = pass.rows[row];
  if (wanted.top_logprobs < 0 && !has_edits(wanted)) return;
  const std::int64_t first_stretch = static_cast<std::int64_t>(row) * pass.stretches;
  const Wide raw = row_largest(pass.raw_best + first_stretch, pass.stretches, reinterpret_cast<Wide*>(shared_bytes));
  const int index = stretch_of_warp();
  if (index >= pass.stretches) return;
  const Stretch stretch = stretch_of(pass, row, index);
  if (wanted.top_logprobs >= 0 && raw != not_finite) {
    const float top = logit_of(raw);
    const double sum = sum_weights(stretch, [top](int, float logit) {
      return kernels::weight_within(kernels::distance(top, logit, 1.0F), kernels::distance_max);
    });
    if (lane_of_thread() == 0) pass.sums[first_stretch + index] = sum;
    if (wanted.top_logprobs > 0) write_tops(stretch, wanted.top_logprobs, pass.tops + (first_stretch + index) * sampling_top_max);
  }
  if (!has_edits(wanted)) return;
  Wide best = not_finite;
  if (raw != not_finite) {
    __syncwarp();  // lanes have read what others change now
    edit_stretch(pass, wanted, stretch);
    best = largest_of(stretch, Infinities::Masks);
  } else {
    keep_stretch(pass, wanted, stretch);
  }
  if (lane_of_thread() == 0) pass.best[first_stretch + index] = best;
}

/// Rows with top_k or top_p: how many tokens, of what mass, lie in each bin of distances.
__global__ void __launch_bounds__(stretch_threads) fill_first_bins(SamplingPass pass) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<FirstBinsShared*>(shared_bytes);
  const int row = static_cast<int>(blockIdx.y);
  if (row >= pass.counts->selected) return;
  const SamplingRow wanted = pass.rows[row];
  if (!has_search(wanted)) return;
  const Wide* keys = stretch_keys(pass, wanted, row);
  const Wide best = row_largest(keys, pass.stretches, shared.keys);
  const float top = logit_of(best);
  if (best == not_finite || !kernels::is_finite(top)) return;
  shared.bins.clear();
  __syncthreads();
  const int index = stretch_of_warp();
  if (index < pass.stretches && kernels::distance(top, logit_of(keys[index]), wanted.inverse_temperature) <= wanted.limit) {
    for_each_logit(stretch_of(pass, row, index), [&](int, float logit) {
      const float distance = kernels::distance(top, logit, wanted.inverse_temperature);
      if (!(distance <= wanted.limit)) return;
      const float bin = kernels::multiply(distance, static_cast<float>(first_bins_per_unit));
      shared.bins.add(static_cast<int>(bin), kernels::mass_of(kernels::exp_negative(distance)));
    });
  }
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < first_bin_count; bin += stretch_threads) {
    if (shared.bins.counts[bin] == 0) continue;
    const std::int64_t at = static_cast<std::int64_t>(row) * first_bin_count + bin;
    atomicAdd(&pass.first_count[at], shared.bins.counts[bin]);
    atomicAdd(&pass.first_mass[at], shared.bins.mass(bin));
  }
}

/// Every row, one block: logprobs, and the token of greedy rows; the cut of others.
__global__ void __launch_bounds__(search_threads) settle_rows(SamplingPass pass) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<SearchShared*>(shared_bytes);
  const int row = static_cast<int>(blockIdx.x);
  if (row >= pass.counts->selected) return;
  const SamplingRow wanted = pass.rows[row];
  const std::int64_t first_stretch = static_cast<std::int64_t>(row) * pass.stretches;
  const Wide best = row_largest(stretch_keys(pass, wanted, row), pass.stretches, shared.keys);
  if (best == not_finite || !kernels::is_finite(logit_of(best))) {  // infinite: every token is masked
    if (threadIdx.x == 0) {
      write_invalid(pass, row);
      pass.draws[row].pending = 0;
    }
    return;
  }
  SamplingDraw draw;
  if (wanted.top_logprobs >= 0) {
    const Wide raw = row_largest(pass.raw_best + first_stretch, pass.stretches, shared.keys);
    const double sum = sum_in_order(pass.sums + first_stretch, pass.stretches, shared.sums);
    if (threadIdx.x == 0) draw.log_sum = kernels::add(static_cast<double>(logit_of(raw)), kernels::natural_log(sum));
    merge_tops(pass, wanted, row, draw.log_sum, shared.keys);
  }
  if (wanted.greedy != 0) {
    if (threadIdx.x == 0) {
      write_token(pass, wanted, row, token_of(best), draw.log_sum);
      pass.draws[row].pending = 0;
    }
    return;
  }
  draw.top = logit_of(best);
  draw.limit = wanted.limit;
  draw.pending = 1;
  if (has_search(wanted)) find_cut(pass, wanted, row, shared, draw);
  if (threadIdx.x == 0) pass.draws[row] = draw;
}

__device__ inline Keeper keeper_of(const SamplingPass& pass, int row, int index, const SamplingDraw& draw) {
  const bool limited = draw.ties_limited != 0;
  return {.top = draw.top,
          .inverse_temperature = pass.rows[row].inverse_temperature,
          .limit = draw.limit,
          .ties_limited = limited,
          .ties_left = limited ? pass.ties_left[static_cast<std::int64_t>(row) * pass.stretches + index] : 0};
}

/// Rows that draw: the weight that each stretch keeps.
__global__ void __launch_bounds__(stretch_threads) weigh_stretches(SamplingPass pass) {
  const int row = static_cast<int>(blockIdx.y);
  const int index = stretch_of_warp();
  if (row >= pass.counts->selected || index >= pass.stretches) return;
  const SamplingDraw draw = pass.draws[row];
  if (draw.pending == 0) return;
  Keeper keeper = keeper_of(pass, row, index, draw);
  double sum = 0;
  const float largest = logit_of(stretch_keys(pass, pass.rows[row], row)[index]);
  if (kernels::distance(draw.top, largest, keeper.inverse_temperature) <= draw.limit) {
    sum = sum_weights(stretch_of(pass, row, index), [&](int, float logit) { return keeper.weigh(logit); });
  }
  if (lane_of_thread() == 0) pass.sums[static_cast<std::int64_t>(row) * pass.stretches + index] = sum;
}

/// Rows that draw, one block: the stretch, then the token.
__global__ void __launch_bounds__(stretch_threads) draw_tokens(SamplingPass pass) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<DrawShared*>(shared_bytes);
  auto* sums = reinterpret_cast<double*>(shared_bytes + sizeof(DrawShared));
  const int row = static_cast<int>(blockIdx.x);
  if (row >= pass.counts->selected) return;
  const SamplingDraw draw = pass.draws[row];
  if (draw.pending == 0) return;
  const SamplingRow wanted = pass.rows[row];
  for (int i = static_cast<int>(threadIdx.x); i < pass.stretches; i += stretch_threads) {
    sums[i] = pass.sums[static_cast<std::int64_t>(row) * pass.stretches + i];
  }
  for (int i = static_cast<int>(threadIdx.x); i < stretch_tokens; i += stretch_threads) shared.weights[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    int last = 0;  // with any weight; the largest logit has some
    for (int i = 0; i < pass.stretches; ++i) {
      total = kernels::add(total, sums[i]);
      last = sums[i] > 0 ? i : last;
    }
    double target = kernels::multiply(wanted.noise, total);
    int chosen = 0;
    while (chosen < last && target >= sums[chosen]) target = kernels::subtract(target, sums[chosen++]);
    shared.chosen = chosen;
    shared.target = target;
  }
  __syncthreads();
  const Stretch stretch = stretch_of(pass, row, shared.chosen);
  if (warp_of_thread() == 0) {
    Keeper keeper = keeper_of(pass, row, shared.chosen, draw);
    for_each_logit(stretch, [&](int offset, float logit) {
      const float weight = keeper.weigh(logit);
      if (offset < stretch.size) shared.weights[offset] = weight;
    });
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int offset = pick(shared.weights, stretch_tokens, shared.target);
  if (offset < 0) return write_invalid(pass, row);
  write_token(pass, wanted, row, stretch.first + offset, draw.log_sum);
}

void sample(cudaStream_t stream, const SamplingShape& shape, const BatchCounts* counts, const Accumulators& logits,
            const SamplingMemory& memory) {
  const SamplingPass pass = sampling_pass(shape, counts, logits, memory);
  const auto rows = static_cast<std::uint32_t>(logits.count);
  const auto stretches = static_cast<std::uint32_t>(pass.stretches);
  const auto by_stretch = [&](std::size_t shared) {
    return LaunchShape{.blocks = (stretches + stretch_warps - 1) / stretch_warps,
                       .blocks_y = rows,
                       .threads = stretch_threads,
                       .shared_bytes = shared};
  };
  launch(stream, by_stretch(0), scan_stretches, pass);
  launch(stream, by_stretch(stretch_warps * sizeof(Wide)), edit_stretches, pass);
  launch(stream, by_stretch(sizeof(FirstBinsShared)), fill_first_bins, pass);
  launch(stream, {.blocks = rows, .threads = search_threads, .shared_bytes = sizeof(SearchShared)}, settle_rows, pass);
  launch(stream, by_stretch(0), weigh_stretches, pass);
  launch(stream, {.blocks = rows, .threads = stretch_threads, .shared_bytes = sizeof(DrawShared) + stretches * sizeof(double)},
         draw_tokens, pass);
}

}  // namespace rubato::engine::cuda
