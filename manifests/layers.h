// SPDX-License-Identifier: Apache-2.0
// From the three layers (manifest file, the API's spec, overrides) and the tuner to the values in force. Each layer stays as it
// was given, so that removing one falls back to the layer below. Pure: now is an argument, and the caller keeps what is set.
//
//   override   a pin of the API, then a pin of the file; each until it expires. A pinned knob is never tuned.
//   tuner      where tuning is enabled and the knob is not pinned; kept within the knob's bounds
//   api        spec.knobs.<knob>.initial set over the API
//   file       the manifest, or the default
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/decode.h"
#include "manifests/engine_spec.h"
#include "manifests/names.h"

namespace rubato {

enum class Layer : std::uint8_t { File, Api, Override, Tuner };

template <>
inline constexpr std::array enum_names<Layer>{
    Named{Layer::File, "file", "the manifest file, or the default"},
    Named{Layer::Api, "api", "spec set over the API"},
    Named{Layer::Override, "override", "pinned by a person"},
    Named{Layer::Tuner, "tuner", "chosen by the tuner"},
};

/// The API's layer: the spec fields set over the API and no others, as a JSON object in the form of a spec.
using ApiLayer = nlohmann::ordered_json;

/// The file's spec with the API's layer on it, checked as a whole. After a reload the old layer may not fit the new file: then
/// there are errors.
[[nodiscard]] Decoded<EngineSpec> apply_api_layer(const EngineSpec& file, const ApiLayer& layer);

struct PatchedLayer {
  ApiLayer layer = ApiLayer::object();
  EngineSpec spec;  // the file's with the new layer on it
};

/// A merge patch (RFC 7396) of `spec`: null removes what the API had set. Only live fields may change; a patch that would change
/// another is Forbidden, by name. Unknown fields are reported in `unknown` and never stored. With errors nothing is to be stored.
[[nodiscard]] Decoded<PatchedLayer> patch_api_layer(const EngineSpec& file, const ApiLayer& layer,
                                                    const nlohmann::ordered_json& spec_patch);

/// When the pins end; none if they stay. Times are on any one timeline, as durations since its epoch.
[[nodiscard]] std::optional<Duration> override_expiry(const OverrideSpec& pins, Duration set_at);
[[nodiscard]] bool override_expired(const OverrideSpec& pins, Duration set_at, Duration now);

struct Layers {
  EngineSpec file;
  ApiLayer api = ApiLayer::object();
  Duration file_set_at{};             // when the file's override came into force
  Duration api_override_set_at{};     // when the API's override was last patched
  std::optional<KnobValues> tuned{};  // the tuner's last word
};

struct KnobOrigin {
  std::string_view knob;
  Layer layer = Layer::File;

  friend bool operator==(const KnobOrigin&, const KnobOrigin&) = default;
};

struct EffectiveKnobs {
  KnobValues values;
  OverrideSpec pins;                 // those in force, both layers together, without an expiry
  std::vector<KnobOrigin> origins;   // one per knob, in the order of knob_table: status.layers
  std::vector<std::string> clamped;  // what had to give way and why, for status and log

  /// `knob` is a YAML name; asking for another is a bug.
  [[nodiscard]] Layer origin(std::string_view knob) const;
  [[nodiscard]] bool pinned(std::string_view knob) const { return origin(knob) == Layer::Override; }
};

/// Layers that fit together (apply_api_layer has no errors); if they do not, the API's layer is left out.
[[nodiscard]] EffectiveKnobs effective_knobs(const Layers& layers, Duration now);

/// `wanted` with pins applied and brought within bounds, so that budget >= sequences + one prefill quantum. If budget and
/// sequences contradict, the one that is pinned stands; if none is, the budget is raised. Both bounds and pins must have passed
/// check_spec().
[[nodiscard]] KnobValues fit_knobs(const KnobValues& wanted, const KnobsSpec& bounds, const OverrideSpec& pins);

/// Every knob where it starts.
[[nodiscard]] KnobValues initial_knobs(const KnobsSpec& bounds);

}  // namespace rubato
