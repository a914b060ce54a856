// SPDX-License-Identifier: Apache-2.0
// When to build, and the exchange: what the lane may touch is taken by compare-and-swap, never by a lock.
#include "engine/shape_builder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "manifests/check.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t faded_steps = 128;  // what the steps under an earlier target are worth under the next

}  // namespace

ShapeBuilder::ShapeBuilder(Backend& backend, const ShapeBuilderOptions& options)
    : backend_(backend),
      options_(options),
      limits_(backend.shape_limits()),
      ring_(ring_size),
      histogram_(std::max(1, limits_.tokens_max), options.half_life) {
  CHECK(limits_.count_max == 0 || (limits_.tokens_max >= 1 && limits_.token_tile >= 1), "tokens_max=", limits_.tokens_max);
  CHECK(options.build_share >= 1 && options.excess_percent >= 0 && options.waste_percent >= 0);
}

ShapeBuilder::~ShapeBuilder() = default;

// ---- the lane's side

void ShapeBuilder::observe(std::int32_t step_tokens) {
  const std::uint64_t end = ring_end_.load(std::memory_order_relaxed);
  if (end - ring_begin_.load(std::memory_order_acquire) == ring_size) return;
  ring_[end % ring_size] = step_tokens;
  ring_end_.store(end + 1, std::memory_order_release);
}

bool ShapeBuilder::take() {
  Slot expected = Slot::Offered;
  if (!slot_.compare_exchange_strong(expected, Slot::Taking, std::memory_order_acq_rel)) return false;
  held_ = backend_.use_shapes(std::move(held_));
  slot_.store(Slot::Returned, std::memory_order_release);
  return true;
}

// ---- the builder's side

void ShapeBuilder::settle() {
  if (slot_.load(std::memory_order_acquire) != Slot::Returned) return;
  held_.reset();
  status_.buckets = offered_buckets_;
  status_.bytes = offered_bytes_;
  used_percent_ = offered_percent_;
  slot_.store(Slot::Empty, std::memory_order_release);
}

bool ShapeBuilder::make_room() {
  Slot expected = Slot::Offered;
  if (slot_.compare_exchange_strong(expected, Slot::Empty, std::memory_order_acq_rel)) {
    held_.reset();
    newest_ = status_.buckets;
    newest_percent_ = used_percent_;
    built_target_.reset();
  }
  return slot_.load(std::memory_order_acquire) == Slot::Empty;
}

void ShapeBuilder::take_steps() {
  const std::uint64_t end = ring_end_.load(std::memory_order_acquire);
  std::uint64_t begin = ring_begin_.load(std::memory_order_relaxed);
  if (begin == end) return;
  steps_ = static_cast<std::int32_t>(
      std::min<std::uint64_t>(static_cast<std::uint64_t>(steps_) + end - begin, std::numeric_limits<std::int32_t>::max()));
  steps_are_new_ = true;
  for (; begin != end; ++begin) histogram_.observe(ring_[begin % ring_size]);
  ring_begin_.store(begin, std::memory_order_release);
}

void ShapeBuilder::follow(const ShapeTarget& target) {
  if (target_ == target) return;
  if (target_ && target_->budget != target.budget) {
    // A step that the budget cuts ends at a multiple of the tile.
    const std::int32_t cut = std::max(1, target_->budget / limits_.token_tile * limits_.token_tile);
    histogram_.move_budget(cut, target.budget);
    histogram_.fade(faded_steps);
    steps_ = 0;
    excess_since_.reset();
  }
  target_ = target;
}

policies::ShapeOptions ShapeBuilder::choice_options() const {
  return {.budget = target_->budget,
          .max_num_seqs = target_->max_num_seqs,
          .count_max = limits_.count_max,
          .token_tile = limits_.token_tile,
          .eager_tokens = limits_.eager_tokens};
}

bool ShapeBuilder::load_has_moved(const policies::ShapeChoice& best, TimePoint now) {
  const std::int64_t waste = policies::expected_waste(histogram_, newest_, choice_options());
  const bool dearer = waste * 100 > best.waste * (100 + options_.excess_percent);
  const bool matters = (waste - best.waste) * 100 > histogram_.token_total() * options_.waste_percent;
  if (!dearer || !matters) {
    excess_since_.reset();
    return false;
  }
  if (!excess_since_) excess_since_ = now;
  return now - *excess_since_ >= options_.excess_hold && now >= load_not_before_;
}

bool ShapeBuilder::plan(ShapeTarget target, TimePoint now) {
  if (!limits_.per_share) target.given_percent = 100;
  if (limits_.count_max == 0) return false;
  settle();
  take_steps();
  target.budget = std::clamp(target.budget, 1, limits_.tokens_max);
  target.max_num_seqs = std::max(1, target.max_num_seqs);
  follow(target);
  const bool target_has_moved = built_target_ != target_;
  if (target_has_moved) {
    if (now < target_not_before_) return false;
  } else {
    if (now < weigh_not_before_ || !steps_are_new_ || steps_ < options_.evidence_steps) return false;
  }
  weigh_not_before_ = now + options_.weigh_interval;
  steps_are_new_ = false;
  policies::ShapeChoice best = policies::choose_shapes(histogram_, choice_options());
  if (best.buckets == newest_ && target_->given_percent == newest_percent_) {
    built_target_ = target_;
    excess_since_.reset();
    return false;
  }
  if (!target_has_moved && !load_has_moved(best, now)) return false;
  wish_ = std::move(best.buckets);
  return make_room();
}

void ShapeBuilder::build(const std::stop_token& stop) {
  error_.reset();
  Result<std::unique_ptr<StepShapes>> shapes = backend_.build_shapes(wish_, stop);
  if (shapes) {
    CHECK(*shapes != nullptr && (*shapes)->buckets() == wish_);
    built_ = std::move(*shapes);
  } else {
    error_ = std::move(shapes).error();
  }
}

std::optional<ShapeBuild> ShapeBuilder::finish(TimePoint begin, TimePoint end) {
  if (error_ && error_->code == ErrorCode::Cancelled) return std::nullopt;
  const Duration duration = end - begin;
  ShapeBuild done{.outcome = {}, .duration = duration, .buckets = static_cast<std::int32_t>(wish_.tokens.size())};
  target_not_before_ = end + std::max(options_.target_pause, duration * (options_.build_share - 1));
  excess_since_.reset();
  if (error_) {
    ++status_.failed;
    status_.last_error = error_->message;
    target_not_before_ = std::max(target_not_before_, end + options_.retry_pause);
    load_not_before_ = end + options_.load_pause;
    done.outcome = Unexpected(*std::exchange(error_, std::nullopt));
    return done;
  }
  // What a set for a new target was chosen by is a guess until steps under it have been seen.
  load_not_before_ = end + (built_target_ == target_ ? options_.load_pause : options_.excess_hold);
  built_target_ = target_;
  newest_ = wish_;
  steps_ = 0;
  ++status_.built;
  status_.last_error.clear();
  offered_buckets_ = built_->buckets();
  offered_bytes_ = done.bytes = built_->bytes();
  offered_percent_ = newest_percent_ = target_->given_percent;
  held_ = std::move(built_);  // make_room() has emptied the slot, and only this side fills it
  slot_.store(Slot::Offered, std::memory_order_release);
  return done;
}

}  // namespace rubato::engine
