// SPDX-License-Identifier: Apache-2.0
// Loads met before and what served them best. Recognised by their features, reused at once, bounded, aged, and carried from node
// to node as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "manifests/settings.h"
#include "tuner/evidence.h"

namespace rubato::tuner {

/// A load by its features, with burstiness.
struct RegimeLoad {
  LoadFeatures features;
  double burstiness = 1;  // variation of the intervals between arrivals

  friend bool operator==(const RegimeLoad&, const RegimeLoad&) = default;
};

struct Regime {
  std::int64_t number = 0;  // names it on this node, from 1 on; never given twice while any later one is remembered
  RegimeLoad load;          // running mean over its visits
  KnobValues best;
  Evidence evidence;          // of best, newer windows weighing more; judged is at most evidence_judged_max
  ObjectivesSpec objectives;  // under which it was best
  std::int32_t visits = 0;
  std::int64_t last_seen = 0;  // seconds since 1970
  std::int64_t measured = 0;   // seconds since 1970 when evidence was last added: it ages from there
};

/// Octaves between two loads; burstiness weighs a half.
[[nodiscard]] double regime_distance(const RegimeLoad& a, const RegimeLoad& b);

/// What evidence of this age is still worth: its counts shrink by half every half_life, shares stay.
[[nodiscard]] Evidence aged(const Evidence& evidence, std::int64_t age, std::int64_t half_life);

struct RegimeOptions {
  std::size_t count_max = 64;               // the least valuable goes first: oldest, fewest requests; > 0
  double same_distance = 0.6;               // octaves (burstiness weighs a half): nearer is the same regime
  std::int64_t half_life = 14 * 24 * 3600;  // seconds after which evidence counts half
};

/// Not thread-safe. Knows neither clock nor file: the caller hands in the time and keeps rows() in the journal.
class RegimeMemory {
 public:
  explicit RegimeMemory(const RegimeOptions& options = {});

  static constexpr std::int32_t evidence_judged_max = 4096;
  static constexpr std::int32_t evidence_judged_min = 20;  // fewer, aged, are no reason to reuse settings

  /// The nearest regime within same_distance under these objectives whose settings are worth reusing (aged evidence of at least
  /// evidence_judged_min requests). Null: never met. Valid until the memory changes.
  [[nodiscard]] const Regime* recognise(const RegimeLoad& load, const ObjectivesSpec& objectives, std::int64_t now) const;

  /// These settings served this load so: a new regime, or better news of a known one. Settings that were worse than what the
  /// regime holds, by aged evidence, change nothing but the visit; where chance explains the difference the settings with more
  /// evidence stay. Valid until the memory changes. Loads or evidence that are not finite are a bug of the caller.
  const Regime& learn(const RegimeLoad& load, const KnobValues& knobs, const Evidence& evidence, const ObjectivesSpec& objectives,
                      std::int64_t now);

  [[nodiscard]] std::span<const Regime> regimes() const { return regimes_; }
  /// What the journal held; replaces everything. Numbers that are missing or double are given anew.
  void load(std::vector<Regime> rows);
  /// Regimes of another node. One that is near a known one is folded into it: the better settings win, of the same settings the
  /// richer evidence, and nothing is added up, so that importing a file twice changes nothing.
  void merge(std::span<const Regime> others, std::int64_t now);

 private:
  [[nodiscard]] std::size_t nearest(const RegimeLoad& load, const ObjectivesSpec& objectives, double within) const;
  Regime& add(Regime regime, std::int64_t now);
  void take_better(Regime& regime, const KnobValues& knobs, const Evidence& evidence, std::int64_t measured,
                   std::int64_t now) const;
  std::size_t join_neighbour(std::size_t index, std::int64_t now);

  RegimeOptions options_;
  std::int64_t last_number_ = 0;
  std::vector<Regime> regimes_;
};

/// `{"apiVersion":"rubato.dev/v1alpha1","kind":"RegimeList","modelKey":...,"items":[...]}`, pretty printed; units in the names,
/// settings and objectives as the manifest writes them.
[[nodiscard]] std::string regimes_to_json(std::span<const Regime> regimes, const std::string& model_key);

struct ImportedRegimes {
  std::string model_key;
  std::vector<Regime> regimes;
};
/// Reads what regimes_to_json() writes, edited or not: at most regimes_import_max items. InvalidArgument names the first field
/// that is wrong (`items[3].load.ratePerSecond`) and what it must be; fields that do not exist are wrong. Knobs outside the
/// present bounds are the caller's to clamp.
inline constexpr std::size_t regimes_import_max = 4096;
[[nodiscard]] Result<ImportedRegimes> regimes_from_json(const std::string& text);

}  // namespace rubato::tuner
