// SPDX-License-Identifier: Apache-2.0
// The well-formed byte sequences of Unicode's table 3-7, written once (scan) and used for everything else.
#include "engine/text/utf8.h"

#include <algorithm>
#include <cstring>

namespace rubato::text {
namespace {

constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

enum class Form : std::uint8_t { Complete, Incomplete, Invalid };

/// What stands at the front of a non-empty byte string: a whole character, the beginning of one, or bytes that can never be one.
/// size is that of the character or of the maximal ill-formed part.
struct Scan {
  Form form = Form::Invalid;
  std::size_t size = 1;
};

Scan scan(std::string_view bytes) {
  const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(bytes[index]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {Form::Complete, 1};
  std::size_t length = 0;
  unsigned low = 0x80;
  unsigned high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {Form::Invalid, 1};
  }
  for (std::size_t index = 1; index < length; ++index) {
    if (index == bytes.size()) return {Form::Incomplete, index};
    if (byte(index) < low || byte(index) > high) return {Form::Invalid, index};
    low = 0x80;
    high = 0xBF;
  }
  return {Form::Complete, length};
}

}  // namespace

std::optional<std::size_t> find_invalid_utf8(std::string_view text) {
  std::size_t offset = 0;
  while (offset < text.size()) {
    std::uint64_t eight = 0;
    if (offset + sizeof eight <= text.size()) {
      std::memcpy(&eight, text.data() + offset, sizeof eight);
      if ((eight & 0x8080808080808080ULL) == 0) {
        offset += sizeof eight;
        continue;
      }
    }
    const Scan front = scan(text.substr(offset, 4));
    if (front.form != Form::Complete) return offset;
    offset += front.size;
  }
  return std::nullopt;
}

Character character_at(std::string_view text, std::size_t offset) {
  const auto byte = [&](std::size_t index) { return static_cast<char32_t>(static_cast<unsigned char>(text[offset + index])); };
  const char32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  if (first < 0xE0) return {((first & 0x1F) << 6) | (byte(1) & 0x3F), 2};
  if (first < 0xF0) return {((first & 0x0F) << 12) | ((byte(1) & 0x3F) << 6) | (byte(2) & 0x3F), 3};
  return {((first & 0x07) << 18) | ((byte(1) & 0x3F) << 12) | ((byte(2) & 0x3F) << 6) | (byte(3) & 0x3F), 4};
}

std::size_t leading_ascii(std::string_view text) {
  std::size_t offset = 0;
  for (std::uint64_t eight = 0; offset + sizeof eight <= text.size(); offset += sizeof eight) {
    std::memcpy(&eight, text.data() + offset, sizeof eight);
    if ((eight & 0x8080808080808080ULL) != 0) break;
  }
  while (offset < text.size() && static_cast<unsigned char>(text[offset]) < 0x80) ++offset;
  return offset;
}

void append_utf8(std::string& out, char32_t code_point) {
  const auto tail = [&](unsigned shift) { out.push_back(static_cast<char>(0x80 | ((code_point >> shift) & 0x3F))); };
  if (code_point < 0x80) {
    out.push_back(static_cast<char>(code_point));
  } else if (code_point < 0x800) {
    out.push_back(static_cast<char>(0xC0 | (code_point >> 6)));
    tail(0);
  } else if (code_point < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | (code_point >> 12)));
    tail(6);
    tail(0);
  } else {
    out.push_back(static_cast<char>(0xF0 | (code_point >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
}

void take_characters(std::string& pending, std::string& out) {
  const std::string_view bytes = pending;
  std::size_t offset = 0;
  while (offset < bytes.size()) {
    const Scan front = scan(bytes.substr(offset, 4));
    if (front.form == Form::Incomplete) break;
    out += front.form == Form::Complete ? bytes.substr(offset, front.size) : replacement_character;
    offset += front.size;
  }
  pending.erase(0, offset);
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::size_t leading_spaces(std::string_view text) {
  std::size_t offset = 0;
  while (offset < text.size()) {
    const Character character = character_at(text, offset);
    if (!is_space(character.code_point)) break;
    offset += character.size_bytes;
  }
  return offset;
}

std::size_t trailing_spaces(std::string_view text) {
  std::size_t end = text.size();
  while (end > 0) {
    std::size_t start = end - 1;
    while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    if (!is_space(character_at(text, start).code_point)) break;
    end = start;
  }
  return text.size() - end;
}

std::string_view trim_spaces(std::string_view text) {
  text.remove_prefix(leading_spaces(text));
  text.remove_suffix(trailing_spaces(text));
  return text;
}

}  // namespace rubato::text
