// SPDX-License-Identifier: Apache-2.0
#include "tuner/search_space.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace rubato::tuner {

namespace {

constexpr int budget_levels_per_octave = 4;
constexpr int sequences_levels_per_octave = 2;
constexpr int devices_levels_per_octave = 2;
constexpr std::int32_t percent_level = 10;
constexpr std::int32_t exhaustive_span = 12;  // ranges up to this wide are taken value by value

/// Coarse values are rounded to whole tiles: a budget of 181 tokens has nothing over one of 184.
std::int32_t rounded(double value) {
  const double tile = value >= 256 ? 16 : value >= 64 ? 8 : 1;
  return static_cast<std::int32_t>(std::lround(value / tile) * std::lround(tile));
}

std::vector<std::int32_t> finish(std::vector<std::int32_t> levels, const IntegerKnob& knob, std::int32_t base) {
  levels.push_back(std::clamp(base, knob.min, knob.max));
  std::sort(levels.begin(), levels.end());
  levels.erase(std::unique(levels.begin(), levels.end()), levels.end());
  return levels;
}

std::vector<std::int32_t> geometric_levels(const IntegerKnob& knob, std::int32_t base, int per_octave) {
  std::vector<std::int32_t> levels;
  if (knob.max - knob.min <= exhaustive_span) {
    for (std::int32_t value = knob.min; value <= knob.max; ++value) levels.push_back(value);
    return finish(levels, knob, base);
  }
  const double low = std::max(1, knob.min);
  const auto count = static_cast<int>(std::ceil(std::log2(knob.max / low) * per_octave));
  for (int i = 0; i <= count; ++i) {
    const double value = low * std::exp2(static_cast<double>(i) / per_octave);
    levels.push_back(std::clamp(rounded(value), knob.min, knob.max));
  }
  levels.push_back(knob.min);
  levels.push_back(knob.max);
  return finish(levels, knob, base);
}

std::vector<std::int32_t> linear_levels(const IntegerKnob& knob, std::int32_t base) {
  std::vector<std::int32_t> levels;
  const std::int32_t step = knob.max - knob.min <= exhaustive_span ? 1 : percent_level;
  for (std::int32_t value = knob.min; value < knob.max; value += step) levels.push_back(value);
  levels.push_back(knob.max);
  return finish(levels, knob, base);
}

bool within(std::int32_t value, const IntegerKnob& knob) {
  return knob.min <= value && value <= knob.max;
}

template <class Choice>
bool holds(const std::vector<Choice>& choices, Choice value) {
  return std::find(choices.begin(), choices.end(), value) != choices.end();
}

/// The base in every mode, and in mode Disaggregated with every share and number of prefill devices that may be tried.
std::vector<KnobValues> splits(const SearchSpace& space, const KnobValues& base) {
  const KnobsSpec& knobs = space.knobs;
  const auto modes = space.mode_free ? knobs.mode.choices : std::vector{base.mode};
  const auto shares =
      space.prefill_share_free ? linear_levels(knobs.prefill_share, base.prefill_share) : std::vector{base.prefill_share};
  const auto devices = space.prefill_devices_free
                           ? geometric_levels(knobs.prefill_devices, base.prefill_devices, devices_levels_per_octave)
                           : std::vector{base.prefill_devices};
  std::vector<KnobValues> all;
  KnobValues one = base;
  for (const Mode mode : modes) {
    one.mode = mode;
    if (mode != Mode::Disaggregated) {
      all.push_back(one);
      continue;
    }
    for (const std::int32_t share : shares) {
      one.prefill_share = share;
      for (const std::int32_t count : devices) {
        one.prefill_devices = count;
        all.push_back(one);
      }
    }
    one.prefill_share = base.prefill_share;
    one.prefill_devices = base.prefill_devices;
  }
  return all;
}

}  // namespace

bool act_alike(const KnobValues& a, const KnobValues& b) {
  KnobValues like_a = b;
  if (b.priority_policy != PriorityPolicy::Deadline) like_a.deadline_margin = a.deadline_margin;
  if (b.mode != Mode::Disaggregated) {
    like_a.prefill_share = a.prefill_share;
    like_a.prefill_devices = a.prefill_devices;
  }
  return like_a == a;
}

LegalSettings::LegalSettings(const SearchSpace& space) : space_(space) {
  // A range that is upside down holds one value; the manifest reader refuses it, so it can only come from a caller's slip.
  for (IntegerKnob* knob : {&space_.knobs.max_num_batched_tokens, &space_.knobs.deadline_margin, &space_.knobs.max_num_seqs,
                            &space_.knobs.prefill_share, &space_.knobs.prefill_devices}) {
    knob->max = std::max(knob->min, knob->max);
  }
  const KnobsSpec& knobs = space_.knobs;
  if (knobs.priority_policy.choices.empty()) space_.priority_policy_free = false;
  if (knobs.mode.choices.empty()) space_.mode_free = false;
  const bool may_disaggregate =
      space_.mode_free ? holds(knobs.mode.choices, Mode::Disaggregated) : space_.base.mode == Mode::Disaggregated;
  if (!may_disaggregate) space_.prefill_share_free = space_.prefill_devices_free = false;
}

bool LegalSettings::any_free() const {
  const KnobsSpec& knobs = space_.knobs;
  const auto moves = [](bool is_free, const IntegerKnob& knob) { return is_free && knob.max > knob.min; };
  return moves(space_.max_num_batched_tokens_free, knobs.max_num_batched_tokens) ||
         moves(space_.max_num_seqs_free, knobs.max_num_seqs) || moves(space_.deadline_margin_free, knobs.deadline_margin) ||
         moves(space_.prefill_share_free, knobs.prefill_share) || moves(space_.prefill_devices_free, knobs.prefill_devices) ||
         (space_.priority_policy_free && knobs.priority_policy.choices.size() > 1) ||
         (space_.mode_free && knobs.mode.choices.size() > 1);
}

bool LegalSettings::contains(const KnobValues& values) const {
  const KnobsSpec& knobs = space_.knobs;
  const KnobValues& base = space_.base;
  const auto number = [](bool is_free, std::int32_t value, std::int32_t pinned, const IntegerKnob& knob) {
    return is_free ? within(value, knob) : value == pinned;
  };
  return number(space_.max_num_batched_tokens_free, values.max_num_batched_tokens, base.max_num_batched_tokens,
                knobs.max_num_batched_tokens) &&
         number(space_.max_num_seqs_free, values.max_num_seqs, base.max_num_seqs, knobs.max_num_seqs) &&
         number(space_.deadline_margin_free, values.deadline_margin, base.deadline_margin, knobs.deadline_margin) &&
         number(space_.prefill_share_free, values.prefill_share, base.prefill_share, knobs.prefill_share) &&
         number(space_.prefill_devices_free, values.prefill_devices, base.prefill_devices, knobs.prefill_devices) &&
         values.reservation == base.reservation &&
         (space_.priority_policy_free ? holds(knobs.priority_policy.choices, values.priority_policy)
                                      : values.priority_policy == base.priority_policy) &&
         (space_.mode_free ? holds(knobs.mode.choices, values.mode) : values.mode == base.mode) &&
         values.max_num_batched_tokens >= values.max_num_seqs + min_prefill_quantum;
}

KnobValues LegalSettings::clamp(KnobValues values) const {
  const KnobsSpec& knobs = space_.knobs;
  const KnobValues& base = space_.base;
  const auto number = [](bool is_free, std::int32_t value, std::int32_t pinned, const IntegerKnob& knob) {
    return is_free ? std::clamp(value, knob.min, knob.max) : pinned;
  };
  values.max_num_batched_tokens = number(space_.max_num_batched_tokens_free, values.max_num_batched_tokens,
                                         base.max_num_batched_tokens, knobs.max_num_batched_tokens);
  values.max_num_seqs = number(space_.max_num_seqs_free, values.max_num_seqs, base.max_num_seqs, knobs.max_num_seqs);
  values.deadline_margin =
      number(space_.deadline_margin_free, values.deadline_margin, base.deadline_margin, knobs.deadline_margin);
  values.prefill_share = number(space_.prefill_share_free, values.prefill_share, base.prefill_share, knobs.prefill_share);
  values.prefill_devices =
      number(space_.prefill_devices_free, values.prefill_devices, base.prefill_devices, knobs.prefill_devices);
  values.reservation = base.reservation;
  const auto choice = [](bool is_free, auto value, auto pinned, const auto& knob) {
    if (!is_free) return pinned;
    return holds(knob.choices, value) ? value : holds(knob.choices, pinned) ? pinned : knob.choices.front();
  };
  values.priority_policy =
      choice(space_.priority_policy_free, values.priority_policy, base.priority_policy, knobs.priority_policy);
  values.mode = choice(space_.mode_free, values.mode, base.mode, knobs.mode);

  // The cross-knob rule: raise the budget as far as it goes (it costs nothing that is running), then lower the sequences.
  const std::int32_t needed = values.max_num_seqs + min_prefill_quantum;
  if (values.max_num_batched_tokens < needed && space_.max_num_batched_tokens_free) {
    values.max_num_batched_tokens = std::min(needed, knobs.max_num_batched_tokens.max);
  }
  if (values.max_num_batched_tokens < needed && space_.max_num_seqs_free) {
    values.max_num_seqs = std::max(knobs.max_num_seqs.min, values.max_num_batched_tokens - min_prefill_quantum);
  }
  return values;
}

KnobValues LegalSettings::canonical(const KnobValues& values) const {
  KnobValues result = clamp(values);
  const KnobValues base = clamp(space_.base);
  if (result.priority_policy != PriorityPolicy::Deadline) result.deadline_margin = base.deadline_margin;
  if (result.mode != Mode::Disaggregated) {
    result.prefill_share = base.prefill_share;
    result.prefill_devices = base.prefill_devices;
  }
  return result;
}

std::vector<KnobValues> LegalSettings::grid(std::size_t count_max, std::uint64_t seed) const {
  const KnobsSpec& knobs = space_.knobs;
  const KnobValues base = clamp(space_.base);
  const auto budgets = space_.max_num_batched_tokens_free
                           ? geometric_levels(knobs.max_num_batched_tokens, base.max_num_batched_tokens, budget_levels_per_octave)
                           : std::vector{base.max_num_batched_tokens};
  const auto sequences = space_.max_num_seqs_free
                             ? geometric_levels(knobs.max_num_seqs, base.max_num_seqs, sequences_levels_per_octave)
                             : std::vector{base.max_num_seqs};
  const auto margins = space_.deadline_margin_free ? linear_levels(knobs.deadline_margin, base.deadline_margin)
                                                   : std::vector{base.deadline_margin};
  const auto policies = space_.priority_policy_free ? knobs.priority_policy.choices : std::vector{base.priority_policy};

  std::vector<KnobValues> all;
  for (KnobValues one : splits(space_, base)) {
    for (const PriorityPolicy policy : policies) {
      one.priority_policy = policy;
      for (const std::int32_t margin : policy == PriorityPolicy::Deadline ? margins : std::vector{base.deadline_margin}) {
        one.deadline_margin = margin;
        for (const std::int32_t count : sequences) {
          one.max_num_seqs = count;
          for (const std::int32_t budget : budgets) {
            one.max_num_batched_tokens = budget;
            if (contains(one)) all.push_back(one);
          }
        }
      }
    }
  }
  if (all.size() <= count_max) return all;
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < count_max; ++i) std::swap(all[i], all[i + random() % (all.size() - i)]);
  all.resize(count_max);
  return all;
}

}  // namespace rubato::tuner
