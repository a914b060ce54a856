// SPDX-License-Identifier: Apache-2.0
// `rubatod regimes export` and `import`: what one node has learnt of loads, for another one. An import is laid beside the
// journal, which a running daemon owns, and taken in when the daemon starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "daemon/options.h"
#include "manifests/result.h"
#include "tuner/journal.h"
#include "tuner/regimes.h"

namespace rubato {

/// Models that a state folder knows: the daemon's last one first, then those with regimes on file. Empty: none ever ran.
[[nodiscard]] std::vector<std::string> known_models(const std::filesystem::path& state_directory);

struct ExportedRegimes {
  std::string model_key;
  std::vector<tuner::Regime> regimes;
  std::vector<std::string> other_models;  // with regimes on file that are not exported
};
/// With what an import has laid there. model_key empty: the first of known_models(). NotFound: nothing was ever kept there.
[[nodiscard]] Result<ExportedRegimes> exported_regimes(const std::filesystem::path& state_directory, const std::string& model_key,
                                                       std::int64_t now);

struct RegimesImport {
  std::string model_key;    // for which they wait; any_model_key: for whatever starts next
  std::size_t read = 0;     // regimes in the text
  std::size_t waiting = 0;  // with those of earlier imports, once merged
};
/// Lays the regimes of this text there. InvalidArgument names the field at fault; Conflict: they are of another model than the
/// folder's, or others wait there for another model.
[[nodiscard]] Result<RegimesImport> import_regimes(const std::filesystem::path& state_directory, const std::string& text,
                                                   const Options& options, std::int64_t now);
inline constexpr const char* any_model_key = "*";

/// At the daemon's start, before the tuner reads the journal: merges what waits for this model into the journal and removes it;
/// a crash in between merges twice, which changes nothing. Returns how many regimes waited. Errors leave it all there: Conflict,
/// it is for another model; else the journal's, or the file's.
[[nodiscard]] Result<std::size_t> take_imported_regimes(tuner::Journal& journal, const std::string& model_key,
                                                        const std::filesystem::path& state_directory, std::int64_t now);

/// Seconds since 1970.
[[nodiscard]] std::int64_t wall_seconds();

/// Print to stdout or a file, and to stderr what is wrong. 0 or 1.
[[nodiscard]] int export_regimes_command(const Options& options);
[[nodiscard]] int import_regimes_command(const Options& options);

}  // namespace rubato
