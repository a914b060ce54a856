// SPDX-License-Identifier: Apache-2.0
// Numbers as the tuner's messages write them.
#pragma once

#include <string>

#include "manifests/settings.h"
#include "manifests/units.h"
#include "tuner/evidence.h"

namespace rubato::tuner {

/// `budget 256, 32 sequences, Deadline with 20 % margin`
[[nodiscard]] std::string describe(const KnobValues& knobs);

/// `93.3 % of 60 requests good`
[[nodiscard]] std::string describe(const Evidence& evidence);

/// `500 ms`, `12.5 ms`
[[nodiscard]] std::string milliseconds(Duration duration);

/// One decimal, none when it is zero.
[[nodiscard]] std::string decimal(double value);

}  // namespace rubato::tuner
