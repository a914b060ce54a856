// SPDX-License-Identifier: Apache-2.0
// The best settings by the twin: short looks at all regions of the space, then at the neighbours of what looked best, then full
// forecasts of the last few. Most looks are short and end early where there is no hope, so that a study costs some seconds of one
// core at most.
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tuner/evidence.h"
#include "tuner/twin/twin_state.h"

namespace rubato::tuner {

namespace {

constexpr std::size_t glances_max = 100;
constexpr std::size_t finalists_max = 5;
constexpr std::size_t finalists_per_region = 3;
constexpr double finalists_apart = 0.8;  // octaves
constexpr std::size_t hints_max = 2;
constexpr std::size_t coarse_budgets = 6;
constexpr std::size_t coarse_places = 3;  // shares, devices and margins that the coarse pass looks at
constexpr std::size_t centres = 3;        // settings whose neighbours are looked at in one round
constexpr int rounds = 4;
constexpr std::size_t grid_max = 4096;
constexpr double hopeless_gap = 0.2;       // below the best attainment so far
constexpr double nothing_to_gain = 0.998;  // attainment of an incumbent that needs no search
constexpr double gain_min = 0.005;         // attainment
constexpr double score_gain_min = 0.1;
constexpr double glance_gain_min = 0.05;  // where no more than glances could be had

double score_of(const Looked& looked) {
  double sum = 0;
  for (const double one : looked.score) sum += one;
  return sum / static_cast<double>(std::max<std::size_t>(1, looked.score.size()));
}

/// Mean, standard deviation and least of the paired differences a - b over the futures.
struct Difference {
  double mean = 0;
  double spread = 0;
  double least = 0;
};
Difference difference(const std::vector<double>& a, const std::vector<double>& b) {
  const std::size_t count = std::min(a.size(), b.size());
  Difference result;
  if (count == 0) return result;
  result.least = a[0] - b[0];
  for (std::size_t i = 0; i < count; ++i) result.least = std::min(result.least, a[i] - b[i]);
  for (std::size_t i = 0; i < count; ++i) result.mean += (a[i] - b[i]) / static_cast<double>(count);
  if (count < 2) return result;
  double variance = 0;
  for (std::size_t i = 0; i < count; ++i) variance += (a[i] - b[i] - result.mean) * (a[i] - b[i] - result.mean);
  result.spread = std::sqrt(variance / static_cast<double>(count - 1));
  return result;
}

double octaves(std::int32_t a, std::int32_t b) {
  return std::abs(std::log2(static_cast<double>(std::max(1, a)) / std::max(1, b)));
}

/// How far apart two settings are: in octaves, with a change of policy or mode as far as two and four of them.
double distance(const KnobValues& a, const KnobValues& b) {
  double sum = octaves(a.max_num_batched_tokens, b.max_num_batched_tokens) + octaves(a.max_num_seqs, b.max_num_seqs);
  if (a.priority_policy != b.priority_policy) {
    sum += 2;
  } else if (a.priority_policy == PriorityPolicy::Deadline) {
    sum += std::abs(a.deadline_margin - b.deadline_margin) / 20.0;
  }
  if (a.mode != b.mode) return sum + 4;
  if (a.mode == Mode::Disaggregated) {
    sum += std::abs(a.prefill_share - b.prefill_share) / 20.0 + octaves(a.prefill_devices, b.prefill_devices);
  }
  return sum;
}

bool same_region(const KnobValues& a, const KnobValues& b) {
  return a.priority_policy == b.priority_policy && a.mode == b.mode;
}

/// The values that each knob takes on the grid, ascending.
struct Levels {
  std::vector<std::int32_t> budgets, sequences, margins, shares, devices;
  std::vector<PriorityPolicy> policies;
  std::vector<Mode> modes;
};

template <class Value>
std::vector<Value> sorted(const std::set<Value>& values) {
  return {values.begin(), values.end()};
}

Levels levels_of(const LegalSettings& legal, std::uint64_t seed) {
  std::set<std::int32_t> budgets, sequences, margins, shares, devices;
  std::set<PriorityPolicy> policies;
  std::set<Mode> modes;
  for (const KnobValues& one : legal.grid(grid_max, seed)) {
    budgets.insert(one.max_num_batched_tokens);
    sequences.insert(one.max_num_seqs);
    policies.insert(one.priority_policy);
    modes.insert(one.mode);
    if (one.priority_policy == PriorityPolicy::Deadline) margins.insert(one.deadline_margin);
    if (one.mode == Mode::Disaggregated) {
      shares.insert(one.prefill_share);
      devices.insert(one.prefill_devices);
    }
  }
  return {sorted(budgets), sorted(sequences), sorted(margins), sorted(shares), sorted(devices), sorted(policies), sorted(modes)};
}

/// At most so many of the values, evenly by rank, ends included where there is more than one.
std::vector<std::int32_t> thinned(const std::vector<std::int32_t>& values, std::size_t count_max) {
  if (values.size() <= count_max) return values;
  std::vector<std::int32_t> result;
  for (std::size_t i = 0; i < count_max; ++i) result.push_back(values[i * (values.size() - 1) / (count_max - 1)]);
  return result;
}

/// The middle ones of so many equal parts: of shares, of which the outermost starve a lane.
std::vector<std::int32_t> inner(const std::vector<std::int32_t>& values, std::size_t count_max) {
  if (values.size() <= count_max) return values;
  std::vector<std::int32_t> result;
  for (std::size_t i = 0; i < count_max; ++i) result.push_back(values[(2 * i + 1) * values.size() / (2 * count_max)]);
  return result;
}

}  // namespace

/// One search; what it looked at stays with the study.
class BestSearch {
 public:
  BestSearch(TwinStudy::State& study, const LegalSettings& legal, const KnobValues& incumbent, std::span<const KnobValues> hints)
      : study_(study), legal_(legal), levels_(levels_of(legal, study.options.seed)), incumbent_(incumbent), hints_(hints) {}

  std::optional<TwinStudy::Best> run() {
    const bool was_cut = std::exchange(study_.cut_short, false);
    const Looked* incumbent = study_.forecast(incumbent_);
    if (incumbent == nullptr) return std::nullopt;
    ++candidates_;
    std::vector<const Looked*> finalists;
    if (legal_.any_free() && incumbent->forecast.attainment < nothing_to_gain) {
      look_at(incumbent_);
      for (const KnobValues& hint : hints_.first(std::min(hints_.size(), hints_max)))
        forecast_into(finalists, legal_.canonical(hint));
      coarse();
      refine();
      for (const KnobValues& one : last_few()) forecast_into(finalists, one);
    }
    TwinStudy::Best best = decide(*incumbent, finalists);
    best.incumbent = incumbent->forecast;
    best.candidates = candidates_;
    best.complete = !study_.cut_short;
    study_.cut_short = study_.cut_short || was_cut;
    return best;
  }

 private:
  using Entry = const Looked*;

  bool stopped() const { return study_.cut_short || seen_.size() >= glances_max; }

  void look_at(const KnobValues& wanted) {
    const KnobValues knobs = wanted == incumbent_ ? incumbent_ : legal_.canonical(wanted);
    if (stopped() || (knobs != incumbent_ && !legal_.contains(knobs)) || !seen_.insert(key_of(knobs)).second) return;
    const Entry looked = study_.glance(knobs, best_attainment_ - hopeless_gap);
    if (looked == nullptr) return;
    candidates_ += key_of(knobs) == key_of(incumbent_) ? 0 : 1;  // that one has been counted
    glances_.push_back(looked);
    best_attainment_ = std::max(best_attainment_, looked->forecast.attainment);
  }

  void forecast_into(std::vector<Entry>& finalists, const KnobValues& knobs) {
    if (study_.cut_short || !legal_.contains(knobs) || key_of(knobs) == key_of(incumbent_)) return;
    const Entry looked = study_.forecast(knobs);
    if (looked == nullptr || std::find(finalists.begin(), finalists.end(), looked) != finalists.end()) return;
    candidates_ += seen_.contains(key_of(knobs)) ? 0 : 1;
    finalists.push_back(looked);
  }

  /// Every policy in mode Chunked, then splits of the device under the policies that did best, then fewer sequences and other
  /// margins round what did best of all.
  void coarse() {
    KnobValues one = incumbent_;
    one.max_num_seqs = levels_.sequences.back();
    if (!levels_.margins.empty()) one.deadline_margin = levels_.margins[levels_.margins.size() / 2];
    const std::vector<std::int32_t> budgets = thinned(levels_.budgets, coarse_budgets);
    for (const Mode mode : levels_.modes) {
      if (mode == Mode::Disaggregated && levels_.modes.size() > 1) continue;
      one.mode = mode;
      for (const PriorityPolicy policy : levels_.policies) {
        one.priority_policy = policy;
        // Large ones first: they tell most about policies that cut their steps themselves.
        for (auto budget = budgets.rbegin(); budget != budgets.rend(); ++budget) {
          one.max_num_batched_tokens = *budget;
          look_at(one);
        }
      }
    }
    if (std::find(levels_.modes.begin(), levels_.modes.end(), Mode::Disaggregated) != levels_.modes.end()) coarse_splits();
    for (const Entry base : best_of(2 * centres)) {
      for (const int divisor : {2, 4}) {
        KnobValues fewer = base->knobs;
        fewer.max_num_seqs = nearest_level(levels_.sequences, levels_.sequences.back() / divisor);
        look_at(fewer);
      }
      if (base->knobs.priority_policy != PriorityPolicy::Deadline) continue;
      for (const std::int32_t margin : inner(levels_.margins, coarse_places)) {
        KnobValues other = base->knobs;
        other.deadline_margin = margin;
        look_at(other);
      }
    }
  }

  void coarse_splits() {
    std::vector<KnobValues> bases;
    for (const Entry base : best_of(2 * centres)) {
      const bool known =
          std::any_of(bases.begin(), bases.end(), [&](const KnobValues& one) { return same_region(one, base->knobs); });
      if (!known && bases.size() < 2) bases.push_back(base->knobs);
    }
    if (bases.empty()) bases.push_back(incumbent_);
    for (KnobValues one : bases) {
      one.mode = Mode::Disaggregated;
      one.max_num_seqs = levels_.sequences.back();
      for (const std::int32_t share : inner(levels_.shares, coarse_places)) {
        one.prefill_share = share;
        for (const std::int32_t devices : thinned(levels_.devices, coarse_places)) {
          one.prefill_devices = devices;
          for (const std::int32_t budget : inner(levels_.budgets, 2)) {
            one.max_num_batched_tokens = budget;
            look_at(one);
          }
        }
      }
    }
  }

  /// Rounds of neighbours on the grid, of ever fewer centres, as long as they find anything better.
  void refine() {
    std::set<KnobKey> done;
    for (int round = 0; round < rounds && !stopped(); ++round) {
      const double before = glances_.empty() ? 0.0 : score_of(*best_of(1).front());
      for (const Entry centre : best_of(round == 0 ? 2 * centres : round == 1 ? centres : 1)) {
        if (done.insert(key_of(centre->knobs)).second) look_around(centre->knobs);
      }
      if (glances_.empty() || (round > 0 && score_of(*best_of(1).front()) <= before)) break;
    }
  }

  void look_around(const KnobValues& centre) {
    const auto both_ways = [&](const std::vector<std::int32_t>& levels, std::int32_t KnobValues::*knob, std::ptrdiff_t step) {
      const auto at = std::lower_bound(levels.begin(), levels.end(), centre.*knob) - levels.begin();
      for (const std::ptrdiff_t to : {at - step, at + step}) {
        if (to < 0 || to >= static_cast<std::ptrdiff_t>(levels.size())) continue;
        KnobValues other = centre;
        other.*knob = levels[static_cast<std::size_t>(to)];
        look_at(other);
      }
    };
    both_ways(levels_.budgets, &KnobValues::max_num_batched_tokens, 2);
    both_ways(levels_.budgets, &KnobValues::max_num_batched_tokens, 1);
    both_ways(levels_.sequences, &KnobValues::max_num_seqs, 1);
    if (centre.priority_policy == PriorityPolicy::Deadline) both_ways(levels_.margins, &KnobValues::deadline_margin, 1);
    if (centre.mode == Mode::Disaggregated) {
      both_ways(levels_.shares, &KnobValues::prefill_share, 1);
      both_ways(levels_.devices, &KnobValues::prefill_devices, 1);
    }
  }

  /// By score of the glances, ties to what is nearest to the incumbent.
  std::vector<Entry> best_of(std::size_t count) const {
    std::vector<Entry> order = glances_;
    std::stable_sort(order.begin(), order.end(), [&](Entry a, Entry b) {
      const double left = score_of(*a);
      const double right = score_of(*b);
      return left != right ? left > right : distance(a->knobs, incumbent_) < distance(b->knobs, incumbent_);
    });
    order.resize(std::min(order.size(), count));
    return order;
  }

  /// The best by glance, first those that differ, then what is close to them: five of a kind would tell little more than one.
  std::vector<KnobValues> last_few() const {
    std::vector<KnobValues> result;
    const std::vector<Entry> order = best_of(glances_.size());
    for (const double apart : {finalists_apart, 0.0}) {
      for (const Entry one : order) {
        if (result.size() == finalists_max) return result;
        std::size_t in_region = 0;
        bool close = key_of(one->knobs) == key_of(incumbent_);
        for (const KnobValues& other : result) {
          in_region += same_region(other, one->knobs) ? 1 : 0;
          close = close || other == one->knobs || distance(other, one->knobs) < apart;
        }
        if (!close && in_region < finalists_per_region) result.push_back(one->knobs);
      }
    }
    return result;
  }

  static std::int32_t nearest_level(const std::vector<std::int32_t>& levels, std::int32_t value) {
    const auto nearer = [&](std::int32_t a, std::int32_t b) { return octaves(a, value) < octaves(b, value); };
    return *std::min_element(levels.begin(), levels.end(), nearer);
  }

  /// How many of the settings close by are as good: a setting amid good ones forgives what the twin is off by.
  double centrality(const Looked& one) const {
    double close = 0;
    double good = 0;
    for (const Entry other : glances_) {
      if (!same_region(other->knobs, one.knobs) || distance(other->knobs, one.knobs) > 1.5) continue;
      close += 1;
      good += other->forecast.attainment >= one.forecast.attainment - 2 * gain_min ? 1 : 0;
    }
    return (good + 0.5) / (close + 1);
  }

  /// Whether one is better than another by more than chance over the futures explains.
  static bool clearly_better(const Looked& one, const Looked& other) {
    const Difference attainment = difference(one.attainment, other.attainment);
    if (attainment.mean > std::max(gain_min, attainment.spread) || attainment.least > gain_min) return true;
    const Difference score = difference(one.score, other.score);
    return attainment.mean > -gain_min && score.mean > std::max(score_gain_min, 2 * score.spread);
  }

  TwinStudy::Best decide(const Looked& incumbent, const std::vector<Entry>& finalists) const {
    Entry best = nullptr;
    for (const Entry one : finalists) {
      if (!clearly_better(*one, incumbent)) continue;
      if (best == nullptr || score(one->forecast.evidence).value > score(best->forecast.evidence).value) best = one;
    }
    if (finalists.empty()) return by_glance(incumbent);
    if (best == nullptr) return {.knobs = incumbent_, .forecast = incumbent.forecast, .incumbent = {}};
    const Entry top = best;
    for (const Entry one : finalists) {
      const Difference behind = difference(top->attainment, one->attainment);
      if (clearly_better(*top, *one) || behind.mean > gain_min || !clearly_better(*one, incumbent)) continue;
      const double left = centrality(*one);
      const double right = centrality(*best);
      const bool nearer = distance(one->knobs, incumbent_) < distance(best->knobs, incumbent_);
      if (left > right + 0.05 || (left > right - 0.05 && nearer)) best = one;
    }
    return {.knobs = best->knobs, .forecast = best->forecast, .incumbent = {}};
  }

  /// Cut short before any full forecast: what looked much better than the incumbent on the same glance is better than nothing.
  TwinStudy::Best by_glance(const Looked& incumbent) const {
    const auto own = study_.glances.find(key_of(incumbent_));
    const std::vector<Entry> order = best_of(1);
    if (own != study_.glances.end() && !order.empty()) {
      const Forecast& best = order.front()->forecast;
      const Forecast& now = own->second.forecast;
      const double noise = std::hypot(best.attainment_spread, now.attainment_spread);
      if (best.attainment - now.attainment > std::max(glance_gain_min, 2 * noise)) {
        return {.knobs = order.front()->knobs, .forecast = best, .incumbent = {}};
      }
    }
    return {.knobs = incumbent_, .forecast = incumbent.forecast, .incumbent = {}};
  }

  TwinStudy::State& study_;
  const LegalSettings& legal_;
  const Levels levels_;
  const KnobValues incumbent_;
  const std::span<const KnobValues> hints_;
  std::vector<Entry> glances_;
  std::set<KnobKey> seen_;
  double best_attainment_ = 0;
  std::int32_t candidates_ = 0;
};

std::optional<TwinStudy::Best> TwinStudy::best(const LegalSettings& legal, const KnobValues& incumbent,
                                               std::span<const KnobValues> hints) {
  return BestSearch(*state_, legal, incumbent, hints).run();
}

}  // namespace rubato::tuner
