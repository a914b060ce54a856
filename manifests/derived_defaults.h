// SPDX-License-Identifier: Apache-2.0
// Defaults that follow from other fields: where a manifest leaves out one end of a knob's range, the end fits itself to what the
// manifest does say. A value that is written is never touched; whether it fits is checks.h's business.
#pragma once

#include "manifests/engine_spec.h"
#include "manifests/node.h"

namespace rubato {

/// Devices that may prefill among so many: all but one, which is left to decode; 1 if there is one.
[[nodiscard]] std::int32_t prefill_devices_max(std::size_t devices);

/// spec_node: the manifest's `spec` mapping, which tells what was written; spec: what it was decoded to.
///   maxNumSeqs           max: capacity.maxNumSeqs · min: 8, or less · initial: max
///   mode                 choices: Chunked, and initial if that is another
///   prefillDevices       max: prefill_devices_max()
///   maxNumBatchedTokens  min: 64, or room for the fewest sequences · max: 4096, or room for the most · initial: 512, within
void derive_defaults(const Node& spec_node, EngineSpec& spec);

}  // namespace rubato
