// SPDX-License-Identifier: Apache-2.0
// Sizes that start-up, admission and status must agree on.
#include "engine/backend.h"

#include <algorithm>
#include <limits>
#include <string>

#include "engine/model/tensors.h"
#include "manifests/check.h"
#include "manifests/settings.h"
#include "policies/accounting.h"

namespace rubato::engine {
namespace {

struct Range {
  const char* name;
  std::int64_t value;
  std::int64_t max;
};

constexpr std::int64_t shape_max = 1 << 24;

void check_state(const ModelConfig& config, const BackendOptions& options, const StepRow& row) {
  CHECK(row.state.has_value() == config.mamba2.has_value(), "position=", row.position);
  if (!row.state) return;
  const StateUse& use = *row.state;
  const auto in_range = [&](StateId state) { return state.value >= 0 && state.value < options.state_count; };
  CHECK(use.from.has_value() == (row.position > 0), "position=", row.position);
  CHECK(!use.from || in_range(*use.from), "from=", use.from->value, " count=", options.state_count);
  CHECK(in_range(use.to), "to=", use.to.value, " count=", options.state_count);
  if (!use.save) return;
  CHECK(in_range(use.save->to), "save=", use.save->to.value, " count=", options.state_count);
  CHECK(use.save->to != use.to && (!use.from || use.save->to != *use.from), "save=", use.save->to.value);
  CHECK(use.save->tokens >= 1 && use.save->tokens <= static_cast<std::int32_t>(row.tokens.size()), "tokens=", use.save->tokens);
}

/// Of models whose blocks hold nothing: each costs the scheduler some hundred bytes all the same. Where running sequences of the
/// longest kind would need more, they are counted against as many.
constexpr std::int64_t counted_blocks_max = 1 << 20;
constexpr std::int64_t remembered_blocks_max = 1 << 19;

void check_row(const ModelConfig& config, const BackendOptions& options, const StepRow& row) {
  const std::int64_t end = static_cast<std::int64_t>(row.position) + static_cast<std::int64_t>(row.tokens.size());
  CHECK(!row.tokens.empty());
  CHECK(row.position >= 0 && end <= options.max_model_len, "position=", row.position, " end=", end,
        " max=", options.max_model_len);
  const std::int64_t needed = (end + kv_block_tokens - 1) / kv_block_tokens;
  CHECK(static_cast<std::int64_t>(row.blocks.size()) >= needed, "blocks=", row.blocks.size(), " needed=", needed);
  for (std::int64_t i = 0; i < needed; ++i) {
    const std::int32_t block = row.blocks[static_cast<std::size_t>(i)].value;
    CHECK(block >= 0 && block < options.block_count, "block=", block, " count=", options.block_count);
  }
  for (const TokenId token : row.tokens) CHECK(token >= 0 && token < config.vocabulary, "token=", token);
  check_state(config, options, row);
}

Result<void> check_ranges(std::span<const Range> ranges) {
  for (const Range& range : ranges) {
    if (range.value >= 1 && range.value <= range.max) continue;
    return unexpected(ErrorCode::InvalidArgument, range.name,
                      std::string("backend: ") + range.name + " " + std::to_string(range.value) + " is outside 1.." +
                          std::to_string(range.max));
  }
  return {};
}

Result<void> check_attention(const ModelConfig& config) {
  const Range ranges[] = {
      {"heads", config.heads, 65536}, {"kv_heads", config.kv_heads, 65536}, {"head_size", config.head_size, 4096}};
  if (Result<void> checked = check_ranges(ranges); !checked) return checked;
  if (config.heads % config.kv_heads != 0) {
    return unexpected(
        ErrorCode::InvalidArgument, "heads",
        "backend: heads " + std::to_string(config.heads) + " is not a multiple of kv_heads " + std::to_string(config.kv_heads));
  }
  if (config.head_size % 2 != 0) {
    return unexpected(ErrorCode::InvalidArgument, "head_size",
                      "backend: head_size " + std::to_string(config.head_size) + " is odd; rope needs pairs");
  }
  const std::int64_t qkv =
      (static_cast<std::int64_t>(config.heads) + 2 * static_cast<std::int64_t>(config.kv_heads)) * config.head_size;
  if (qkv > shape_max) {
    return unexpected(
        ErrorCode::InvalidArgument, "heads",
        "backend: (heads + 2 kv_heads) * head_size is " + std::to_string(qkv) + ", more than " + std::to_string(shape_max));
  }
  return {};
}

Result<void> check_mamba2(const Mamba2Config& mamba2, const BackendOptions& options) {
  const Range ranges[] = {
      {"mamba2 heads", mamba2.heads, 65536},         {"mamba2 head_size", mamba2.head_size, 4096},
      {"mamba2 groups", mamba2.groups, 65536},       {"mamba2 state_size", mamba2.state_size, 4096},
      {"mamba2 window", mamba2.window, 64},          {"mamba2 norm_groups", mamba2.norm_groups, shape_max},
      {"state_count", options.state_count, 1 << 24},
  };
  if (Result<void> checked = check_ranges(ranges); !checked) return checked;
  const std::int64_t inner = static_cast<std::int64_t>(mamba2.heads) * mamba2.head_size;
  const std::int64_t projected = 2 * inner + std::int64_t{2} * mamba2.groups * mamba2.state_size + mamba2.heads;
  if (projected > shape_max) {
    return unexpected(
        ErrorCode::InvalidArgument, "mamba2 heads",
        "backend: mamba2 layers project to " + std::to_string(projected) + " columns, more than " + std::to_string(shape_max));
  }
  if (mamba2.heads % mamba2.groups != 0) {
    return unexpected(ErrorCode::InvalidArgument, "mamba2 heads",
                      "backend: mamba2 heads " + std::to_string(mamba2.heads) + " is not a multiple of mamba2 groups " +
                          std::to_string(mamba2.groups));
  }
  if (inner % mamba2.norm_groups != 0) {
    return unexpected(ErrorCode::InvalidArgument, "mamba2 norm_groups",
                      "backend: mamba2 norm_groups " + std::to_string(mamba2.norm_groups) + " does not divide the " +
                          std::to_string(inner) + " columns that are normalised");
  }
  if (!(mamba2.time_step_min >= 0.0F && mamba2.time_step_min <= mamba2.time_step_max)) {
    return unexpected(ErrorCode::InvalidArgument, "mamba2 time_step_min",
                      "backend: mamba2 time_step_min " + std::to_string(mamba2.time_step_min) + " is outside 0.." +
                          std::to_string(mamba2.time_step_max) + ", which is time_step_max");
  }
  return {};
}

}  // namespace

CacheSize cache_size(const ModelConfig& config, DataType dtype, const CacheRequest& request) {
  constexpr std::int64_t count_max = std::numeric_limits<std::int32_t>::max();
  const auto count = [=](std::int64_t value) { return static_cast<std::int32_t>(std::clamp<std::int64_t>(value, 0, count_max)); };
  CacheSize size{.block_bytes = config.kv_bytes_per_token(dtype) * kv_block_tokens, .state_bytes = config.state_bytes()};
  if (size.state_bytes == 0) {
    size.block_count = size.block_bytes > 0 ? count(request.bytes / size.block_bytes) : 0;
    return size;
  }
  const PrefixCachingSpec& caching = request.prefix_caching;
  const std::int64_t blocks_per_snapshot = caching.snapshot_tokens / kv_block_tokens;
  const std::int64_t longest = policies::blocks_for_tokens(request.max_model_len);
  const std::int64_t longest_bytes = longest * size.block_bytes;
  const std::int64_t held = std::max<std::int64_t>(request.bytes - longest_bytes, 0) / size.state_bytes;
  const std::int64_t running = std::min<std::int64_t>(request.sequences, held);
  const std::int64_t rest = request.bytes - running * size.state_bytes;
  if (size.block_bytes == 0) {
    const std::int64_t snapshots = caching.enabled ? rest / size.state_bytes : 0;
    // More than sequences can use, so that it is known for as long as snapshots live which prefixes others had.
    const std::int64_t remembered = std::min(snapshots * blocks_per_snapshot, remembered_blocks_max);
    size.block_count = count(std::max(std::min(running * longest, counted_blocks_max), longest) + remembered);
    size.state_count = count(running + snapshots);
    return size;
  }
  // As many bytes of snapshots to each byte of blocks as so many tokens have, the longest sequence's own left aside.
  const std::int64_t shared = std::max<std::int64_t>(rest - longest_bytes, 0);
  const std::int64_t snapshots = caching.enabled ? shared / (size.state_bytes + blocks_per_snapshot * size.block_bytes) : 0;
  size.state_count = count(running + snapshots);
  size.block_count = count((rest - snapshots * size.state_bytes) / size.block_bytes);
  return size;
}

std::int64_t weight_bytes(const ModelConfig& config, DataType dtype) {
  std::int64_t bytes = 0;
  for (const TensorSpec& tensor : model_tensors(config)) {
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape) elements *= size;
    bytes += elements * element_size(is_kept_in_float32(tensor) ? DataType::Float32 : dtype);
  }
  return bytes;
}

Result<void> check_backend_options(const ModelConfig& config, const BackendOptions& options) {
  const Range ranges[] = {
      {"hidden_size", config.hidden_size, shape_max},
      {"layers", config.layers, 4096},
      {"vocabulary", config.vocabulary, shape_max},
      {"block_count", options.block_count, 1 << 30},
      {"max_tokens_per_step", options.max_tokens_per_step, 1 << 19},
      {"max_rows", options.max_rows, 1 << 16},
      {"max_model_len", options.max_model_len, 1 << 22},
      {"threads", options.threads, 1024},
      // One sublayer at least must know what came before.
      {"sublayers", config.count_of(SublayerKind::Attention) + config.count_of(SublayerKind::Mamba2), 8192},
  };
  if (Result<void> checked = check_ranges(ranges); !checked) return checked;
  if (config.count_of(SublayerKind::FeedForward) > 0) {
    const Range feed_forward[] = {{"feed_forward", config.feed_forward, shape_max}};
    if (Result<void> checked = check_ranges(feed_forward); !checked) return checked;
  }
  if (config.count_of(SublayerKind::Attention) > 0) {
    if (Result<void> checked = check_attention(config); !checked) return checked;
  }
  const bool recurrent = config.count_of(SublayerKind::Mamba2) > 0;
  if (recurrent != config.mamba2.has_value()) {
    return unexpected(ErrorCode::InvalidArgument, "mamba2",
                      "backend: mamba2 has shapes if and only if there are such sublayers; there are " +
                          std::to_string(config.count_of(SublayerKind::Mamba2)));
  }
  if (recurrent) return check_mamba2(*config.mamba2, options);
  if (options.state_count != 0) {
    return unexpected(ErrorCode::InvalidArgument, "state_count",
                      "backend: state_count " + std::to_string(options.state_count) + " is not 0, though no layer is recurrent");
  }
  return {};
}

void check_step(const ModelConfig& config, const BackendOptions& options, std::span<const StepRow> rows) {
  CHECK(static_cast<std::int64_t>(rows.size()) <= options.max_rows, "rows=", rows.size(), " max=", options.max_rows);
  std::int64_t tokens = 0;
  for (const StepRow& row : rows) {
    check_row(config, options, row);
    tokens += static_cast<std::int64_t>(row.tokens.size());
  }
  CHECK(tokens <= options.max_tokens_per_step, "tokens=", tokens, " max=", options.max_tokens_per_step);
}

}  // namespace rubato::engine
