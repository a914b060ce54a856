// SPDX-License-Identifier: Apache-2.0
// What stands in a device's KV blocks and recurrent states, for tests of those who hand them out: texts instead of tokens, so
// that a block that was overwritten or handed out too early, a state that is not the one at its token, and dead contents that are
// read show in the contents themselves.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "policies/scheduler.h"

namespace rubato::policies {

/// Of each token a number that stands for it and all before it; never 0.
using Text = std::vector<std::uint64_t>;

inline std::uint64_t next_of(std::uint64_t before, std::uint64_t token) {
  std::uint64_t value = before ^ (token + 0x9E3779B97F4A7C15U);
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBU;
  return (value ^ (value >> 31U)) | 1U;
}

/// Makes a text `tokens` long: cuts it, or goes on with tokens of `own`.
inline void fit(Text& text, std::int32_t tokens, std::uint64_t own) {
  if (static_cast<std::size_t>(tokens) < text.size()) text.resize(static_cast<std::size_t>(tokens));
  while (static_cast<std::int32_t>(text.size()) < tokens)
    text.push_back(next_of(text.empty() ? 0 : text.back(), own << 32U | text.size()));
}

/// What the model says next is a matter of the text alone.
inline void say(Text& text) {
  text.push_back(next_of(text.back(), 77));
}

inline BlockHash hash_of_block(const Text& text, std::int32_t block) {
  return {.high = 5, .low = text[static_cast<std::size_t>((block + 1) * kv_block_tokens - 1)]};
}

inline std::vector<BlockHash> hashes_of(const Text& text) {
  std::vector<BlockHash> hashes;
  for (std::int32_t block = 0; (block + 1) * kv_block_tokens <= static_cast<std::int32_t>(text.size()); ++block)
    hashes.push_back(hash_of_block(text, block));
  return hashes;
}

/// A kind of model and what is kept for it.
struct ModelShape {
  const char* name = "";
  bool attention = true;
  bool recurrent = false;
  bool caching = false;
  bool few_states = false;  // possibly fewer than sequences may run
};

inline constexpr ModelShape all_models[] = {
    {.name = "Attention"},
    {.name = "AttentionCached", .caching = true},
    {.name = "RecurrentCached", .attention = false, .recurrent = true, .caching = true},
    {.name = "RecurrentCachedFewStates", .attention = false, .recurrent = true, .caching = true, .few_states = true},
    {.name = "Hybrid", .recurrent = true, .few_states = true},
    {.name = "HybridCached", .recurrent = true, .caching = true},
    {.name = "HybridCachedFewStates", .recurrent = true, .caching = true, .few_states = true}};

/// draw(low, high) is only called for what the shape needs.
template <class Draw>
void shape_limits(const ModelShape& shape, SchedulerLimits& limits, Draw&& draw) {
  limits.blocks_hold_keys = shape.attention;
  if (shape.recurrent) limits.state_count = shape.few_states ? draw(1, 5) : limits.max_num_seqs + draw(1, 20);
  limits.prefix_caching = {.enabled = shape.caching};
  if (shape.caching) limits.prefix_caching.snapshot_tokens = kv_block_tokens * draw(1, 4);
}

class MadeUpMemory {
 public:
  MadeUpMemory(const SchedulerLimits& limits, std::string replay)
      : hold_keys_(limits.blocks_hold_keys),
        recurrent_(limits.state_count > 0),
        replay_(std::move(replay)),
        blocks_(static_cast<std::size_t>(limits.block_count)),
        states_(static_cast<std::size_t>(limits.state_count), 0) {}

  using Block = std::array<std::uint64_t, kv_block_tokens>;
  Block& block(BlockId id) { return blocks_[static_cast<std::size_t>(id.value)]; }
  std::uint64_t& state(StateId id) { return states_[static_cast<std::size_t>(id.value)]; }

  /// The row may run now: it reads what it must, and what it writes is in nobody's way.
  void begin(const PlannedRow& row, std::span<const BlockId> blocks, const Text& text) {
    check_reads(row, blocks, text);
    write(row, blocks, {});
    if (!row.state) return;
    if (row.state->from != row.state->to) state(row.state->to) = 0;
    if (row.state->save) state(row.state->save->to) = 0;
  }

  /// It has run.
  void end(const PlannedRow& row, std::span<const BlockId> blocks, const Text& text) {
    check_reads(row, blocks, text);
    write(row, blocks, text);
    if (!row.state) return;
    state(row.state->to) = text[static_cast<std::size_t>(row.begin + row.count - 1)];
    if (row.state->save) state(row.state->save->to) = text[static_cast<std::size_t>(row.begin + row.state->save->tokens - 1)];
  }

  void kill(std::span<const BlockId> blocks, std::span<const StateId> states) {
    for (const BlockId dead : blocks) block(dead).fill(0);
    for (const StateId dead : states) state(dead) = 0;
  }

  [[nodiscard]] std::int32_t live_states() const {
    return static_cast<std::int32_t>(std::count_if(states_.begin(), states_.end(), [](std::uint64_t held) { return held != 0; }));
  }

 private:
  void write(const PlannedRow& row, std::span<const BlockId> blocks, const Text& text) {
    for (std::int32_t position = row.begin; hold_keys_ && position < row.begin + row.count; ++position) {
      block(blocks[static_cast<std::size_t>(position / kv_block_tokens)])[static_cast<std::size_t>(position % kv_block_tokens)] =
          text.empty() ? 0 : text[static_cast<std::size_t>(position)];
    }
  }

  void check_reads(const PlannedRow& row, std::span<const BlockId> blocks, const Text& text) {
    for (std::int32_t position = 0; hold_keys_ && position < row.begin; ++position) {
      const Block& held = block(blocks[static_cast<std::size_t>(position / kv_block_tokens)]);
      if (held[static_cast<std::size_t>(position % kv_block_tokens)] == text[static_cast<std::size_t>(position)]) continue;
      ADD_FAILURE() << "sequence " << row.id.value << " does not find its token " << position << replay_;
      return;
    }
    ASSERT_EQ(row.state.has_value(), recurrent_) << replay_;
    if (!row.state) return;
    const StateUse& use = *row.state;
    ASSERT_EQ(use.from.has_value(), row.begin > 0) << "sequence " << row.id.value << replay_;
    if (use.from) {
      EXPECT_EQ(state(*use.from), text[static_cast<std::size_t>(row.begin - 1)])
          << "sequence " << row.id.value << " does not begin from its state after " << row.begin << " tokens" << replay_;
    }
    if (!use.save) return;
    EXPECT_TRUE(use.save->to != use.to && use.save->to != use.from) << "sequence " << row.id.value << replay_;
    EXPECT_TRUE(use.save->tokens >= 1 && use.save->tokens <= row.count) << use.save->tokens << " of " << row.count << replay_;
    EXPECT_EQ((row.begin + use.save->tokens) % kv_block_tokens, 0) << "a snapshot within a block" << replay_;
  }

  const bool hold_keys_;
  const bool recurrent_;
  const std::string replay_;
  std::vector<Block> blocks_;
  std::vector<std::uint64_t> states_;  // the text's number at the token that each is the state after; 0: dead
};

/// Of a step: no block that a row writes is in another row, and no slot of a state is written twice or while another reads it.
inline void check_writes(const StepPlan& plan, const std::string& replay) {
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> written;
  std::vector<std::int32_t> states_written;
  std::vector<std::int32_t> states_read;
  for (const PlannedRow& row : plan.rows) {
    for (std::size_t i = 0; i < row.blocks.size(); ++i) {
      blocks.push_back(row.blocks[i].value);
      if (static_cast<std::int32_t>(i + 1) * kv_block_tokens > row.begin) written.push_back(row.blocks[i].value);
    }
    if (!row.state) continue;
    states_written.push_back(row.state->to.value);
    if (row.state->save) states_written.push_back(row.state->save->to.value);
    if (row.state->from && row.state->from != row.state->to) states_read.push_back(row.state->from->value);
  }
  std::sort(blocks.begin(), blocks.end());
  for (const std::int32_t block : written) {
    const auto [first, last] = std::equal_range(blocks.begin(), blocks.end(), block);
    EXPECT_EQ(last - first, 1) << "block " << block << " is written, and in two rows" << replay;
  }
  std::sort(states_written.begin(), states_written.end());
  EXPECT_TRUE(std::adjacent_find(states_written.begin(), states_written.end()) == states_written.end())
      << "a state is written twice" << replay;
  for (const std::int32_t state : states_read) {
    EXPECT_FALSE(std::binary_search(states_written.begin(), states_written.end(), state)) << "state " << state << replay;
  }
}

}  // namespace rubato::policies
