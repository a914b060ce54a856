// SPDX-License-Identifier: Apache-2.0
// Keeps what came over the API across restarts: one JSON file in the state directory, replaced whole and flushed, so that a crash
// at any moment leaves the old or the new one.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "daemon/control/control_state.h"

namespace rubato::control {

struct LoadedState {
  std::optional<SavedState> state;  // none: there was none yet, or it was no use
  std::string problem;              // what was wrong with a file that was there, and where it was moved
};

/// Files of one engine. Not thread-safe.
class StateFile {
 public:
  /// directory is made if need be; empty: nothing is kept.
  StateFile(std::filesystem::path directory, const std::string& engine_name);

  /// A damaged file is moved aside under a name that tells it, so that a person may look at it and the next save does not destroy
  /// it.
  [[nodiscard]] LoadedState load();
  /// Written beside, flushed to disk, renamed over. Internal: the disk said no, the file of before is intact.
  [[nodiscard]] Result<void> save(const SavedState& state);

  static constexpr std::int64_t bytes_max = 4 << 20;

 private:
  std::filesystem::path path_;  // empty: nothing is kept
};

[[nodiscard]] Json to_json(const SavedState& state);
[[nodiscard]] Result<SavedState> saved_state_from_json(const Json& json);

}  // namespace rubato::control
