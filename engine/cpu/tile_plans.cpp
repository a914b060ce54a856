// SPDX-License-Identifier: Apache-2.0
// A small model of what tasks cost and an exhaustive search of the cuts worth considering; some 10 microseconds per linear and
// bucket.
#include "engine/cpu/tile_plans.h"

#include <algorithm>
#include <memory>

#include "manifests/check.h"

namespace rubato::engine::cpu {
namespace {

// Reading a panel from memory takes about as long as computing so many rows with it.
constexpr std::int64_t stream_rows = 12;
// Claiming a task, and the first cells of its panel, which nobody has fetched ahead; about a microsecond.
constexpr std::int64_t task_cells = 4096;

constexpr std::int32_t linear_tasks_per_thread = 8;       // of the eager cut
constexpr std::int32_t searched_tasks_per_thread = 32;    // of the finest cut considered, per block of rows
constexpr std::int32_t elementwise_tasks_per_thread = 4;  // enough that a thread taken off its core holds little
constexpr std::int32_t attention_tasks_per_thread = 2;
constexpr std::int32_t attention_tokens_min = 4;      // smaller pieces would read the cache too often
constexpr std::int64_t searched_tasks_max = 1 << 18;  // within what the workers can count

std::int32_t parts(std::int32_t count, std::int32_t size) {
  return (count + size - 1) / size;
}

TilePlan plan_bucket(const TilePlans::Sizes& sizes, std::int32_t tokens) {
  TilePlan plan;
  plan.linears.reserve(sizes.linears.size());
  for (const LinearSize& size : sizes.linears) plan.linears.push_back(best_cut(size, tokens, sizes.threads));
  plan.elementwise_rows = std::clamp(parts(tokens, elementwise_tasks_per_thread * sizes.threads), 1, eager_elementwise_rows);
  const std::int64_t tasks = static_cast<std::int64_t>(tokens) * sizes.attention.per_piece;
  const std::int64_t wanted = attention_tasks_per_thread * static_cast<std::int64_t>(sizes.threads);
  plan.attention_tokens = static_cast<std::int32_t>(std::clamp<std::int64_t>(
      (tasks + wanted - 1) / wanted, std::min(attention_tokens_min, sizes.attention.tokens_max), sizes.attention.tokens_max));
  return plan;
}

}  // namespace

LinearCut eager_cut(const LinearSize& size, std::int32_t threads) {
  // Several neighbouring panels where there are many: what a kernel fetches ahead is then its own next panel.
  return {.rows = linear_rows_max, .panels = std::max(1, size.panels / (linear_tasks_per_thread * threads))};
}

std::int64_t cut_time(const LinearSize& size, const LinearCut& cut, std::int32_t rows, std::int32_t threads) {
  const std::int64_t tasks = static_cast<std::int64_t>(parts(rows, cut.rows)) * parts(size.panels, cut.panels);
  const std::int64_t task =
      static_cast<std::int64_t>(cut.panels) * size.cells * (std::min(rows, cut.rows) + stream_rows) + task_cells;
  // One more than the rounds: threads are not equally fast, and the last one still holds a task when the others are done.
  const std::int64_t rounds = (tasks + threads - 1) / threads;
  return (rounds + (threads > 1 ? 1 : 0)) * task;
}

LinearCut best_cut(const LinearSize& size, std::int32_t rows, std::int32_t threads) {
  CHECK(rows >= 1 && size.panels >= 1 && threads >= 1);
  LinearCut best = eager_cut(size, threads);
  std::int64_t best_time = cut_time(size, best, rows, threads);
  const std::int32_t blocks_min = parts(rows, linear_rows_max);
  for (std::int32_t blocks = blocks_min; blocks <= std::min(rows, blocks_min + 1); ++blocks) {
    const std::int64_t runs_max =
        std::min<std::int64_t>({size.panels, searched_tasks_per_thread * threads, searched_tasks_max / blocks});
    for (std::int32_t runs = 1; runs <= runs_max; ++runs) {
      const LinearCut cut{.rows = parts(rows, blocks), .panels = parts(size.panels, runs)};
      const std::int64_t time = cut_time(size, cut, rows, threads);
      if (time < best_time) {
        best = cut;
        best_time = time;
      }
    }
  }
  return best;
}

Result<std::unique_ptr<StepShapes>> TilePlans::build(const policies::StepBuckets& buckets, const Sizes& sizes,
                                                     const std::stop_token& stop) {
  std::vector<TilePlan> plans;
  plans.reserve(buckets.tokens.size());
  for (const std::int32_t tokens : buckets.tokens) {
    if (stop.stop_requested()) return unexpected(ErrorCode::Cancelled, "the building of shapes was stopped");
    plans.push_back(plan_bucket(sizes, tokens));
  }
  return std::unique_ptr<StepShapes>(new TilePlans(buckets, std::move(plans)));
}

std::int64_t TilePlans::bytes() const {
  std::size_t bytes = sizeof(*this) + buckets_.tokens.size() * sizeof(std::int32_t);
  for (const TilePlan& plan : plans_) bytes += sizeof(plan) + plan.linears.size() * sizeof(LinearCut);
  return static_cast<std::int64_t>(bytes);
}

const TilePlan* TilePlans::find(std::int32_t rows) const {
  const auto bucket = buckets_.find(rows);
  return bucket ? &plans_[*bucket] : nullptr;
}

}  // namespace rubato::engine::cpu
