// SPDX-License-Identifier: Apache-2.0
#include "engine/prefix_hash.h"

#include <array>
#include <bit>
#include <string>

#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine {
namespace {

// First byte of a message, so that no salt can stand for a block.
constexpr std::byte salt_message{0};
constexpr std::byte block_message{1};

struct SipState {
  std::uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v2 += v3;
      v1 = std::rotl(v1, 13) ^ v0;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 = std::rotl(v0, 32);
      v2 += v1;
      v0 += v3;
      v1 = std::rotl(v1, 17) ^ v2;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 = std::rotl(v2, 32);
    }
  }
  void absorb(std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  [[nodiscard]] std::uint64_t folded() const { return v0 ^ v1 ^ v2 ^ v3; }
};

std::uint64_t word_at(std::span<const std::byte> bytes) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) word |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  return word;
}

/// Appends the bytes of a number, the lowest first, and moves on.
template <class Number>
void put(std::byte*& to, Number number) {
  for (std::size_t i = 0; i < sizeof(Number); ++i) *to++ = static_cast<std::byte>(number >> (8 * i));
}

}  // namespace

BlockHash sip_hash_128(const PrefixKey& key, std::span<const std::byte> message) {
  SipState state{.v0 = key.low ^ 0x736f6d6570736575U,
                 .v1 = key.high ^ 0x646f72616e646f6dU ^ 0xeeU,
                 .v2 = key.low ^ 0x6c7967656e657261U,
                 .v3 = key.high ^ 0x7465646279746573U};
  const std::size_t whole = message.size() / 8 * 8;
  for (std::size_t i = 0; i < whole; i += 8) state.absorb(word_at(message.subspan(i, 8)));
  state.absorb(word_at(message.subspan(whole)) | static_cast<std::uint64_t>(message.size()) << 56U);
  state.v2 ^= 0xeeU;
  state.rounds(4);
  BlockHash hash;
  hash.low = state.folded();
  state.v1 ^= 0xddU;
  state.rounds(4);
  hash.high = state.folded();
  return hash;
}

BlockHash PrefixHasher::root(std::string_view salt) const {
  std::string message(1, static_cast<char>(salt_message));
  message += salt;
  return sip_hash_128(key_, std::as_bytes(std::span(message)));
}

BlockHash PrefixHasher::next(const BlockHash& parent, std::span<const TokenId> block) const {
  CHECK(block.size() == static_cast<std::size_t>(kv_block_tokens), "tokens=", block.size());
  std::array<std::byte, 1 + sizeof(BlockHash) + kv_block_tokens * sizeof(TokenId)> message;
  std::byte* to = message.data();
  *to++ = block_message;
  put(to, parent.low);
  put(to, parent.high);
  for (const TokenId token : block) put(to, static_cast<std::uint32_t>(token));
  return sip_hash_128(key_, message);
}

}  // namespace rubato::engine
