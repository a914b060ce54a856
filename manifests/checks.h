// SPDX-License-Identifier: Apache-2.0
// The rules that hold between fields. A spec that passes cannot be driven into a contradiction: every combination of knobs that
// the tuner, a person or a reload can reach is runnable as it stands or after the one documented clamp of fit_knobs() (layers.h).
//
//   budget and sequences   Budget and sequences must leave room for one prefill quantum at both ends of their ranges and where
//   they start:
//                          budget.min >= seqs.min + quantum, budget.max >= seqs.max + quantum, budget.initial >= seqs.initial +
//                          quantum. A smaller budget beside a larger sequence count inside the ranges is legal to ask for and is
//                          clamped.
//   pins                   An override stays within the bounds and choices of its knobs, and two pins may not contradict.
#pragma once

#include <cstdint>

#include "manifests/engine_spec.h"
#include "manifests/field_error.h"

namespace rubato {

/// All violated rules, except those that rest on a field of `known`, which has been reported already.
[[nodiscard]] FieldErrors check_spec(const EngineSpec& spec, const FieldErrors& known = {});

}  // namespace rubato
