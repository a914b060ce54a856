// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/staging.h"

#include <algorithm>
#include <new>
#include <optional>

#include "manifests/settings.h"

namespace rubato::engine::cuda {
namespace {

/// Hands out 16-byte aligned parts of one region, the same on host and device.
class Layout {
 public:
  std::int64_t take(std::int64_t count, std::int64_t size) {
    const std::int64_t at = bytes_;
    bytes_ = (bytes_ + count * size + 15) / 16 * 16;
    return at;
  }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

}  // namespace

Result<Staging> Staging::make(const Limits& limits) {
  Staging staging;
  staging.limits_ = limits;
  Layout layout;
  const std::int64_t rows = limits.max_rows;
  const std::int64_t tokens = limits.max_tokens;
  const std::int64_t counts = layout.take(1, sizeof(BatchCounts));
  const std::int64_t row_first = layout.take(rows + 1, 4);
  const std::int64_t row_position = layout.take(rows, 4);
  const std::int64_t row_blocks = layout.take(rows + 1, 4);
  const std::int64_t selected = layout.take(rows, 4);
  const std::int64_t state_from = layout.take(rows, 4);
  const std::int64_t state_to = layout.take(rows, 4);
  const std::int64_t state_save = layout.take(rows, 4);
  const std::int64_t state_save_tokens = layout.take(rows, 4);
  const std::int64_t token_ids = layout.take(tokens, 4);
  const std::int64_t positions = layout.take(tokens, 4);
  const std::int64_t slots = layout.take(tokens, 4);
  const std::int64_t token_first = layout.take(tokens, 4);
  const std::int64_t blocks = layout.take(rows * limits.max_blocks_per_row, 4);

  Result<PinnedMemory> host = PinnedMemory::make(layout.bytes());
  if (!host) return Unexpected(std::move(host).error());
  Result<DeviceMemory> device = DeviceMemory::make(layout.bytes());
  if (!device) return Unexpected(std::move(device).error());
  staging.host_ = std::move(*host);
  staging.device_ = std::move(*device);

  const auto on_host = [&](std::int64_t at) { return reinterpret_cast<std::int32_t*>(staging.host_.data() + at); };
  const auto on_device = [&](std::int64_t at) { return reinterpret_cast<const std::int32_t*>(staging.device_.data() + at); };
  staging.counts_ = new (staging.host_.data() + counts) BatchCounts;
  staging.token_ids_ = on_host(token_ids);
  staging.positions_ = on_host(positions);
  staging.slots_ = on_host(slots);
  staging.row_first_ = on_host(row_first);
  staging.row_position_ = on_host(row_position);
  staging.row_blocks_ = on_host(row_blocks);
  staging.blocks_ = on_host(blocks);
  staging.selected_ = on_host(selected);
  staging.token_first_ = on_host(token_first);
  staging.state_from_ = on_host(state_from);
  staging.state_to_ = on_host(state_to);
  staging.state_save_ = on_host(state_save);
  staging.state_save_tokens_ = on_host(state_save_tokens);
  staging.batch_ = Batch{.counts = reinterpret_cast<const BatchCounts*>(staging.device_.data() + counts),
                         .token_ids = on_device(token_ids),
                         .positions = on_device(positions),
                         .slots = on_device(slots),
                         .row_first = on_device(row_first),
                         .row_position = on_device(row_position),
                         .token_first = on_device(token_first),
                         .row_blocks = on_device(row_blocks),
                         .blocks = on_device(blocks),
                         .selected = on_device(selected),
                         .state_from = on_device(state_from),
                         .state_to = on_device(state_to),
                         .state_save = on_device(state_save),
                         .state_save_tokens = on_device(state_save_tokens)};
  return staging;
}

void Staging::fill(std::span<const StepRow> rows, std::int32_t bucket) {
  BatchCounts counts{.tokens = 0, .rows = static_cast<std::int32_t>(rows.size()), .selected = 0};
  std::int32_t block_count = 0;
  for (std::int32_t index = 0; index < counts.rows; ++index) {
    const StepRow& row = rows[static_cast<std::size_t>(index)];
    row_first_[index] = counts.tokens;
    row_position_[index] = row.position;
    row_blocks_[index] = block_count;
    const auto end = row.position + static_cast<std::int32_t>(row.tokens.size());
    const std::int32_t needed = (end + kv_block_tokens - 1) / kv_block_tokens;
    for (std::int32_t i = 0; i < needed; ++i) blocks_[block_count + i] = row.blocks[static_cast<std::size_t>(i)].value;
    for (std::int32_t position = row.position; position < end; ++position) {
      const std::int32_t at = counts.tokens++;
      token_ids_[at] = row.tokens[static_cast<std::size_t>(position - row.position)];
      positions_[at] = position;
      token_first_[at] = row_first_[index];
      slots_[at] = blocks_[block_count + position / kv_block_tokens] * kv_block_tokens + position % kv_block_tokens;
    }
    block_count += needed;
    if (row.sampling != nullptr) selected_[counts.selected++] = counts.tokens - 1;
  }
  CHECK(counts.tokens <= bucket && bucket <= limits_.max_tokens, "tokens=", counts.tokens, " bucket=", bucket);
  for (std::int32_t at = counts.tokens; at < bucket; ++at) {
    token_ids_[at] = 0;
    positions_[at] = 0;
    token_first_[at] = 0;
    slots_[at] = limits_.trash_slot;
  }
  std::fill(row_first_ + counts.rows, row_first_ + limits_.max_rows + 1, counts.tokens);
  std::fill(row_blocks_ + counts.rows, row_blocks_ + limits_.max_rows + 1, block_count);
  std::fill(row_position_ + counts.rows, row_position_ + limits_.max_rows, 0);
  std::fill(selected_ + counts.selected, selected_ + limits_.max_rows, 0);
  fill_states(rows);
  *counts_ = counts;
  used_bytes_ = reinterpret_cast<std::byte*>(blocks_ + block_count) - host_.data();
}

void Staging::fill_states(std::span<const StepRow> rows) {
  const auto slot = [](const std::optional<StateId>& state) { return state ? state->value : no_state; };
  for (std::size_t row = 0; row < static_cast<std::size_t>(limits_.max_rows); ++row) {
    const std::optional<StateUse> use = row < rows.size() ? rows[row].state : std::nullopt;
    const std::optional<StateUse::Save> save = use ? use->save : std::nullopt;
    state_from_[row] = use ? slot(use->from) : no_state;
    state_to_[row] = use ? use->to.value : no_state;
    state_save_[row] = save ? save->to.value : no_state;
    state_save_tokens_[row] = save ? save->tokens : 0;
  }
}

Result<void> Staging::copy(const Stream& stream) const {
  return check(
      cudaMemcpyAsync(device_.data(), host_.data(), static_cast<std::size_t>(used_bytes_), cudaMemcpyHostToDevice, stream.get()),
      "cudaMemcpyAsync");
}

}  // namespace rubato::engine::cuda
