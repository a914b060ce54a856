// SPDX-License-Identifier: Apache-2.0
// The hash by which people tell which manifest is in force: that of the file's bytes, as `sha256sum` prints it.
#pragma once

#include <string>
#include <string_view>

namespace rubato {

/// SHA-256 (FIPS 180-4) in 64 lower-case hexadecimal digits.
[[nodiscard]] std::string content_hash(std::string_view bytes);

}  // namespace rubato
