// SPDX-License-Identifier: Apache-2.0
// Replaces a small file whole, so that a crash at any moment leaves the old one or the new one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "manifests/result.h"

namespace rubato {

/// Written beside (PATH.new, readable by its owner alone), flushed to disk, renamed over; its name is flushed too. Blocks on the
/// disk. Internal: the disk said no, the file of before is intact.
[[nodiscard]] Result<void> write_durably(const std::filesystem::path& path, const std::string& text);

/// InvalidArgument names the path: there is none, it is no file, or it is larger than this.
[[nodiscard]] Result<std::string> read_whole(const std::filesystem::path& path, std::uintmax_t bytes_max);

}  // namespace rubato
