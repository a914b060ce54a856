// SPDX-License-Identifier: Apache-2.0
// Knobs, bounds, windows, what was expected, loads and evidence as the JSON text that journal rows hold, and back.
#pragma once

#include <optional>
#include <string>

#include "manifests/engine_spec.h"
#include "tuner/evidence.h"
#include "tuner/regimes.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

[[nodiscard]] std::string to_row(const KnobValues& knobs);
[[nodiscard]] std::string to_row(const KnobsSpec& bounds);
[[nodiscard]] std::string to_row(const Window& window);
[[nodiscard]] std::string to_row(const ExpectedOutcome& expected);
[[nodiscard]] std::string to_row(const RegimeLoad& load);
[[nodiscard]] std::string to_row(const Evidence& evidence);

/// Empty when the text is not what to_row() writes: damaged, or of another version.
[[nodiscard]] std::optional<KnobValues> knobs_from_row(const std::string& text);
[[nodiscard]] std::optional<KnobsSpec> bounds_from_row(const std::string& text);
[[nodiscard]] std::optional<Window> window_from_row(const std::string& text);
[[nodiscard]] std::optional<ExpectedOutcome> expected_from_row(const std::string& text);
[[nodiscard]] std::optional<RegimeLoad> load_from_row(const std::string& text);
[[nodiscard]] std::optional<Evidence> evidence_from_row(const std::string& text);

}  // namespace rubato::tuner
