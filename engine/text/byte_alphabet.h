// SPDX-License-Identifier: Apache-2.0
// GPT-2's spelling of bytes as printable characters, in which byte-level vocabularies are written (a blank is `Ġ`).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace rubato::text {

/// The bytes that piece (valid UTF-8) spells; empty when a character of it is outside the alphabet.
[[nodiscard]] std::optional<std::string> bytes_of_piece(std::string_view piece);

/// The spelling of bytes. bytes_of_piece(piece_of_bytes(b)) == b for all b.
[[nodiscard]] std::string piece_of_bytes(std::string_view bytes);

}  // namespace rubato::text
