// SPDX-License-Identifier: Apache-2.0
// What the twin has learnt of step times, as a file: the daemon keeps one in its state folder, `rubatod plan` reads it.
// `{"apiVersion":"rubato.dev/v1alpha1","kind":"Calibration","modelKey":...,"laws":{...}}`
#pragma once

#include <filesystem>
#include <string>

#include "manifests/result.h"
#include "tuner/twin/step_law.h"

namespace rubato {

struct Calibration {
  std::string model_key;  // of what was measured: see model_loading.h
  tuner::StepLaws laws;
};

[[nodiscard]] std::string calibration_to_json(const Calibration& calibration);
/// InvalidArgument names the field (`kind`, `laws`) and what it must be.
[[nodiscard]] Result<Calibration> calibration_from_json(const std::string& text);

/// `STATE/calibration.json`.
[[nodiscard]] std::filesystem::path calibration_path(const std::filesystem::path& state_directory);

/// Replaces the file whole and flushes it: blocks on the disk, so not on a lane's thread. Internal: the disk said no.
[[nodiscard]] Result<void> write_calibration(const std::filesystem::path& path, const Calibration& calibration);
/// InvalidArgument names path and field. A file that is not there is one too: ask std::filesystem::exists() where that is usual.
[[nodiscard]] Result<Calibration> read_calibration(const std::filesystem::path& path);

}  // namespace rubato
