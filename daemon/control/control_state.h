// SPDX-License-Identifier: Apache-2.0
// What this engine is asked to be, as a pure value: the manifest, what came over the API, the overrides and the tuner's proposal.
// How layers resolve is manifests/layers.h's; here is what may change them and what follows. No clock, lock, file or engine: the
// Reconciler has those.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "daemon/control/status_error.h"
#include "daemon/control/tuning_target.h"
#include "daemon/control/wall_time.h"
#include "manifests/layers.h"
#include "manifests/read_manifest.h"

namespace rubato::control {

using Json = nlohmann::ordered_json;

/// What must survive a restart of the daemon.
struct SavedState {
  std::string uid;
  WallTime created;
  std::int64_t generation = 1;
  ApiLayer api = ApiLayer::object();
  WallTime api_override_set;
  Json labels = Json::object();  // written over the API
  Json annotations = Json::object();
  std::optional<OverrideSpec> file_override;  // as last seen, and since when: a restart must not prolong it
  WallTime file_override_set;

  friend bool operator==(const SavedState&, const SavedState&) = default;
};

enum class FieldValidation : std::uint8_t { Strict, Warn, Ignore };

struct PatchRequest {
  Json body;
  FieldValidation validation = FieldValidation::Warn;
};

struct PatchResult {
  std::vector<std::string> warnings;  // one `Warning: 299` header each
  std::vector<std::string> fields;    // of the spec, that changed
};

/// Copyable: a dry run patches a copy. Between calls the layers fit together.
class ControlState {
 public:
  /// started_with is the manifest that the engine is or will be started with. A saved API layer that does not fit it is dropped;
  /// dropped() then says why.
  ControlState(const ReadManifest& started_with, SavedState saved, WallTime now);

  /// A new manifest, all or nothing. InvalidArgument: another name, or it does not go together with what was set over the API or
  /// with what the running engine was started with.
  [[nodiscard]] Result<void> reload(const ReadManifest& manifest, WallTime now);

  /// A merge patch of the object, all or nothing.
  [[nodiscard]] std::variant<PatchResult, StatusError> patch(const PatchRequest& request, const std::string& resource_version,
                                                             WallTime now);

  /// The tuner's wish.
  [[nodiscard]] Result<void> propose(const KnobValues& knobs, WallTime now);

  /// Lets overrides end whose time has come. True when one did.
  bool expire(WallTime now);

  [[nodiscard]] const std::string& name() const { return manifest_.manifest.name; }
  [[nodiscard]] const ReadManifest& manifest() const { return manifest_; }
  /// Everything merged, the override included: the object's spec.
  [[nodiscard]] const EngineSpec& spec() const { return spec_; }
  /// The same as far as the running engine can follow it: what needs a restart is as it was at start.
  [[nodiscard]] const EngineSpec& running_spec() const { return running_spec_; }
  [[nodiscard]] const EffectiveKnobs& effective() const { return effective_; }
  [[nodiscard]] const std::vector<std::string>& restart_required() const { return restart_required_; }
  /// When the next override ends.
  [[nodiscard]] std::optional<WallTime> override_expires() const;
  [[nodiscard]] Json labels() const;
  [[nodiscard]] Json annotations() const;
  [[nodiscard]] const TuningInput& tuning_input() const { return tuning_; }
  [[nodiscard]] const SavedState& saved() const { return saved_; }
  [[nodiscard]] const std::string& dropped() const { return dropped_; }

 private:
  struct Base {
    EngineSpec file;     // the manifest's, without an override that has expired
    EngineSpec running;  // the same with what needs a restart as it was at start
  };
  [[nodiscard]] Base base_for(const EngineSpec& file, WallTime now) const;
  void note_file_override(const std::optional<OverrideSpec>& pins, WallTime now);
  void derive(WallTime now);

  ReadManifest manifest_;
  EngineSpec started_;
  SavedState saved_;
  Base base_;
  std::optional<KnobValues> proposal_;
  std::string dropped_;

  EngineSpec spec_;
  EngineSpec running_spec_;
  EffectiveKnobs effective_;
  std::vector<std::string> restart_required_;
  TuningInput tuning_;
};

}  // namespace rubato::control
