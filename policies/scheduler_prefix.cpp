// SPDX-License-Identifier: Apache-2.0
// What a sequence gets from the prefix cache when it is admitted, what its steps add to it, and which state slots they use.
#include <algorithm>

#include "manifests/check.h"
#include "policies/scheduler_state.h"

namespace rubato::policies {

void Scheduler::State::keep_prefix(Slot slot, std::span<const BlockHash> prefix) {
  std::vector<BlockHash>& kept = prefix_of(slot);
  kept.clear();
  Sequence& sequence = at(slot);
  if (!pool->caching) return;
  CHECK(static_cast<std::int32_t>(prefix.size()) * kv_block_tokens <= sequence.known, "hashes=", prefix.size(),
        " prompt=", sequence.known);
  // Room for all that it may come to have, so that no step allocates.
  kept.reserve(static_cast<std::size_t>(blocks_for_tokens(sequence.known + sequence.request.max_new_tokens)));
  kept.assign(prefix.begin(), prefix.end());
  sequence.expected = find_prefix(slot).tokens;
}

// One that nobody has pinned is of no use where its slot is the only one left for the sequence itself.
std::optional<StateId> Scheduler::State::usable_snapshot(const BlockHash& hash) const {
  const std::optional<StateId> snapshot = pool->states.find(hash);
  if (!snapshot || (pool->states.pins(*snapshot) == 0 && pool->states.available() < 2)) return std::nullopt;
  return snapshot;
}

// The longest prefix from which the rest can be computed. The last known token is always computed: what it yields is wanted.
PrefixHit Scheduler::State::find_prefix(std::int32_t known, std::span<const BlockHash> prefix) const {
  PrefixHit hit;
  if (!pool->caching) return hit;
  const std::size_t most = std::min(prefix.size(), static_cast<std::size_t>((known - 1) / kv_block_tokens));
  const auto tokens_of = [](std::size_t blocks) { return static_cast<std::int32_t>(blocks) * kv_block_tokens; };
  std::int32_t in_use = 0;
  std::size_t seen = 0;
  for (; seen < most; ++seen) {
    const std::optional<BlockId> block = pool->blocks.find(prefix[seen]);
    if (!block) break;
    if (!limits.blocks_hold_keys) continue;
    in_use += pool->blocks.is_taken(*block) ? 1 : 0;
    const std::optional<StateId> snapshot = limits.state_count > 0 ? usable_snapshot(prefix[seen]) : std::nullopt;
    if (limits.state_count > 0 && !snapshot) continue;
    hit = {.tokens = tokens_of(seen + 1), .blocks_in_use = in_use, .snapshot = snapshot};
  }
  for (std::size_t blocks = limits.blocks_hold_keys ? 0 : most; blocks > 0 && hit.tokens == 0; --blocks) {
    if (const std::optional<StateId> snapshot = usable_snapshot(prefix[blocks - 1]))
      hit = {.tokens = tokens_of(blocks), .snapshot = snapshot};
  }
  hit.seen_tokens = std::max(hit.tokens, tokens_of(seen));
  return hit;
}

// What is found is taken before anything else is, because taking evicts.
void Scheduler::State::take_prefix(Slot slot, const PrefixHit& hit) {
  Sequence& sequence = at(slot);
  sequence.expected = 0;
  sequence.computed = hit.tokens;
  sequence.branch = hit.seen_tokens;
  if (limits.blocks_hold_keys) {
    sequence.registered = hit.tokens / kv_block_tokens;
    for (std::int32_t i = 0; i < sequence.registered; ++i) {
      const std::optional<BlockId> block = pool->blocks.find(prefix_of(slot)[static_cast<std::size_t>(i)]);
      CHECK(block, "block ", i, " of a prefix is gone");
      pool->blocks.share(*block);
      table_of(sequence).push_back(*block);
    }
  }
  if (limits.state_count > 0) {
    sequence.start = hit.snapshot;
    if (hit.snapshot) pool->states.pin(*hit.snapshot);
    sequence.state = pool->take_state();
  }
  if (!pool->caching) return;
  if (!sequence.cached) sequence.cached = hit.tokens;
  prefix_queries += static_cast<std::uint64_t>(sequence.known);
  prefix_hits += static_cast<std::uint64_t>(hit.tokens);
}

void Scheduler::State::give_states(Sequence& sequence) {
  if (sequence.start) pool->states.unpin(*sequence.start);
  if (sequence.state) pool->give_state(*sequence.state);
  sequence.start.reset();
  sequence.state.reset();
}

std::optional<StateUse> Scheduler::State::use_state(Slot slot, std::int32_t count) {
  if (limits.state_count == 0) return std::nullopt;
  const Sequence& sequence = at(slot);
  StateUse use{.from = std::nullopt, .to = *sequence.state, .save = begin_snapshot(slot, count)};
  if (sequence.computed > 0) use.from = sequence.start ? sequence.start : sequence.state;
  return use;
}

// Snapshots are kept where other sequences may come to begin: where this one leaves what others have computed too, for what two
// have in common a third is likely to have (Marconi, arXiv 2411.19379, admits states by this rule); at regular distances; and
// where a prompt ends that may be sent again with more behind it. A row keeps one.
std::optional<StateUse::Save> Scheduler::State::begin_snapshot(Slot slot, std::int32_t count) {
  if (!pool->caching) return std::nullopt;
  const Sequence& sequence = at(slot);
  const std::int32_t end = sequence.computed + count;
  const std::int32_t regular = end / limits.prefix_caching.snapshot_tokens * limits.prefix_caching.snapshot_tokens;
  const std::int32_t prompt_end = (sequence.request.prompt_tokens - 1) / kv_block_tokens * kv_block_tokens;
  for (const std::int32_t point : {sequence.branch, prompt_end <= end ? std::max(regular, prompt_end) : regular}) {
    const auto blocks = static_cast<std::size_t>(point / kv_block_tokens);
    if (point <= sequence.computed || point > end || blocks > prefix_of(slot).size()) continue;
    const BlockHash& hash = prefix_of(slot)[blocks - 1];
    if (pool->states.knows(hash) || pool->states.available() == 0) continue;
    return StateUse::Save{.to = pool->begin_snapshot(hash), .tokens = point - sequence.computed};
  }
  return std::nullopt;
}

// The row has been computed. Its blocks that are full now can be found from here on; nobody writes them again.
void Scheduler::State::book_prefix(const PlannedRow& row) {
  const Slot slot = row.index.value;
  Sequence& sequence = at(slot);
  if (sequence.start) pool->states.unpin(*sequence.start);
  sequence.start.reset();
  if (row.state && row.state->save) pool->states.keep_snapshot(row.state->save->to);
  // Blocks that hold no keys are known by their hashes all the same: they tell where sequences part.
  if (!pool->caching) return;
  // One that ends while its blocks are being copied has given them to the copy.
  const std::vector<BlockId>& table = table_of(sequence);
  const auto full =
      std::min({prefix_of(slot).size(), static_cast<std::size_t>(sequence.computed / kv_block_tokens), table.size()});
  for (; sequence.registered < static_cast<std::int32_t>(full); ++sequence.registered) {
    const auto i = static_cast<std::size_t>(sequence.registered);
    static_cast<void>(pool->blocks.cache(table[i], prefix_of(slot)[i]));
  }
}

// The sampled token ended a block.
void Scheduler::State::note_filled(Slot slot, const RowOutcome& outcome) {
  if (!pool->caching || !outcome.filled) return;
  const std::int32_t known = at(slot).known;
  CHECK(known % kv_block_tokens == 0, "sequence ", outcome.id.value, " fills no block at ", known);
  std::vector<BlockHash>& prefix = prefix_of(slot);
  if (static_cast<std::int32_t>(prefix.size()) + 1 == known / kv_block_tokens) prefix.push_back(*outcome.filled);
}

void Scheduler::State::drop_snapshot(const PlannedRow& row) {
  if (row.state && row.state->save) pool->drop_snapshot(row.state->save->to);
}

}  // namespace rubato::policies
