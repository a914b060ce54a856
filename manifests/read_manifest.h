// SPDX-License-Identifier: Apache-2.0
// Reads the Engine manifest from a file, a directory (also a mounted ConfigMap) or a text. All errors come together, each with
// file, line, column and field; nothing partial is ever returned. Watching for changes is the daemon's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/checked.h"
#include "manifests/engine_spec.h"

namespace rubato {

struct ManifestError {
  std::string file;         // as given, or directory/name
  std::int32_t line = 0;    // from 1; 0: the file as a whole
  std::int32_t column = 0;  // from 1, in bytes
  std::string field;        // empty: not a field's fault
  std::string message;      // what was found and what is allowed

  friend bool operator==(const ManifestError&, const ManifestError&) = default;
};

struct ManifestErrors {
  std::vector<ManifestError> errors;  // in order of file, line and column

  /// One line each: `chat.yaml:12:9 spec.knobs.maxNumBatchedTokens.min: 0 is outside 1..65536`.
  [[nodiscard]] std::string text() const;
};

struct ReadManifest {
  EngineManifest manifest;
  std::string file;  // where it stood
  std::string hash;  // content_hash() of that file, shown in status
};

inline constexpr std::size_t manifest_size_max = 1U << 20U;      // bytes of one file
inline constexpr std::size_t manifest_directory_files_max = 64;  // *.yaml and *.yml

/// path is a file, or a directory of which all *.yaml and *.yml are read in order of name and must hold exactly one Engine
/// together. Names that begin with `..` are skipped; if there is a link `..data` (a mounted ConfigMap) it is resolved once and
/// everything is read from what it pointed to, so that a swap in between cannot mix two versions.
[[nodiscard]] Checked<ReadManifest, ManifestErrors> read_manifest(const std::filesystem::path& path);

/// The same for a text; `file` is the name that errors give.
[[nodiscard]] Checked<ReadManifest, ManifestErrors> parse_manifest(std::string_view text, std::string_view file);

}  // namespace rubato
