// SPDX-License-Identifier: Apache-2.0
// The table: printable Latin-1 bytes stand for themselves, the other 68 are numbered from U+0100 in order.
#include "engine/text/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "engine/text/utf8.h"

namespace rubato::text {
namespace {

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<char16_t, 256> make_characters() {
  std::array<char16_t, 256> characters{};
  char16_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) characters[byte] = stands_for_itself(byte) ? static_cast<char16_t>(byte) : next++;
  return characters;
}
constexpr std::array<char16_t, 256> characters = make_characters();

constexpr std::array<std::int16_t, 0x144> make_bytes_of() {
  std::array<std::int16_t, 0x144> bytes{};
  for (auto& byte : bytes) byte = -1;
  for (unsigned byte = 0; byte < 256; ++byte) bytes[characters[byte]] = static_cast<std::int16_t>(byte);
  return bytes;
}
constexpr std::array<std::int16_t, 0x144> bytes_of = make_bytes_of();

}  // namespace

std::optional<std::string> bytes_of_piece(std::string_view piece) {
  std::string bytes;
  for (std::size_t offset = 0; offset < piece.size();) {
    const Character character = character_at(piece, offset);
    if (character.code_point >= bytes_of.size() || bytes_of[character.code_point] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(bytes_of[character.code_point]));
    offset += character.size_bytes;
  }
  return bytes;
}

std::string piece_of_bytes(std::string_view bytes) {
  std::string piece;
  for (const char byte : bytes) append_utf8(piece, characters[static_cast<unsigned char>(byte)]);
  return piece;
}

}  // namespace rubato::text
