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
  std::int64_t number = 0;  // of the journal's row; 0: not on file
  RegimeLoad load;          // running mean over its visits
  KnobValues best;
  Evidence evidence;          // of best, newer windows weighing more; judged is at most evidence_judged_max
  ObjectivesSpec objectives;  // under which it was best
  std::int32_t visits = 0;
  std::int64_t last_seen = 0;  // seconds since 1970
};

struct RegimeOptions {
  std::size_t count_max = 64;               // the least valuable goes first: oldest, fewest requests
  double same_distance = 0.6;               // octaves (burstiness weighs a half): nearer is the same regime
  std::int64_t half_life = 14 * 24 * 3600;  // seconds after which evidence counts half
};

/// Not thread-safe. Knows neither clock nor file: the caller hands in the time and keeps rows() in the journal.
class RegimeMemory {
 public:
  explicit RegimeMemory(const RegimeOptions& options = {});

  static constexpr std::int32_t evidence_judged_max = 4096;

  /// The nearest regime within same_distance under these objectives whose settings are worth reusing (aged evidence of at least
  /// 20 requests). Empty: never met.
  [[nodiscard]] const Regime* recognise(const RegimeLoad& load, const ObjectivesSpec& objectives, std::int64_t now) const;

  /// These settings served this load so: a new regime, or better news of a known one. Settings that were worse than what the
  /// regime holds, by aged evidence, change nothing but the visit.
  const Regime& learn(const RegimeLoad& load, const KnobValues& knobs, const Evidence& evidence, const ObjectivesSpec& objectives,
                      std::int64_t now);

  [[nodiscard]] std::span<const Regime> regimes() const { return regimes_; }
  void load(std::vector<Regime> rows);

 private:
  RegimeOptions options_;
  std::vector<Regime> regimes_;
};

/// `{"apiVersion":"rubato.dev/v1alpha1","kind":"RegimeList","modelKey":...,"items":[...]}`, pretty printed; units in the names.
[[nodiscard]] std::string regimes_to_json(std::span<const Regime> regimes, const std::string& model_key);

struct ImportedRegimes {
  std::string model_key;
  std::vector<Regime> regimes;
};
/// InvalidArgument names the field (`items[3].load.ratePerSecond`) and what it must be. Knobs outside the present bounds are the
/// caller's to clamp.
[[nodiscard]] Result<ImportedRegimes> regimes_from_json(const std::string& text);

}  // namespace rubato::tuner
