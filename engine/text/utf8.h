// SPDX-License-Identifier: Apache-2.0
// UTF-8 as the tokenizer needs it: strict validation, walking valid text, and turning a byte stream into whole characters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace rubato::text {

/// One character of a text and the bytes it takes there.
struct Character {
  char32_t code_point = 0;
  std::size_t size_bytes = 0;
};

/// Offset of the first byte that is not part of a well-formed character (no surrogates, no overlong forms); empty: text is valid.
[[nodiscard]] std::optional<std::size_t> find_invalid_utf8(std::string_view text);

/// The character at offset of valid UTF-8; offset < text.size() and at the start of a character.
[[nodiscard]] Character character_at(std::string_view text, std::size_t offset);

/// Bytes at the front of text that are ASCII.
[[nodiscard]] std::size_t leading_ascii(std::string_view text);

void append_utf8(std::string& out, char32_t code_point);

/// Moves every decided character of pending to out. Each maximal ill-formed part becomes one U+FFFD (the practice Unicode
/// recommends); what stays in pending is the beginning of a character that may still complete, 3 bytes at most.
void take_characters(std::string& pending, std::string& out);

/// White_Space of Unicode: what Jinja's trim and the `lstrip` and `rstrip` of added tokens mean by a blank.
[[nodiscard]] bool is_space(char32_t code_point);

/// text without leading and trailing white space. text must be valid UTF-8.
[[nodiscard]] std::string_view trim_spaces(std::string_view text);
/// Bytes of white space that text begins or ends with. text must be valid UTF-8.
[[nodiscard]] std::size_t leading_spaces(std::string_view text);
[[nodiscard]] std::size_t trailing_spaces(std::string_view text);

}  // namespace rubato::text
