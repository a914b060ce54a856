// SPDX-License-Identifier: Apache-2.0
// One step on the host: rows to flat tokens, forward pass, sampling.
#include "engine/models/host_backend.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "manifests/check.h"
#include "manifests/names.h"
#include "manifests/settings.h"

namespace rubato::engine {
Result<std::unique_ptr<Backend>> HostBackend::make(const ModelConfig& config, WeightSource& weights,
                                                   const BackendOptions& options, std::unique_ptr<HostOps> ops,
                                                   std::string description) {
  Result<Decoder> model = Decoder::make(config, weights, options, *ops);
  if (!model) return Unexpected(std::move(model).error());
  std::unique_ptr<HostBackend> backend(
      new HostBackend(config, options, std::move(ops), std::move(model).value(), std::move(description)));
  if (options.poison) {
    std::vector<BlockId> all(static_cast<std::size_t>(options.block_count));
    for (std::int32_t block = 0; block < options.block_count; ++block) all[static_cast<std::size_t>(block)] = BlockId{block};
    backend->ops_->poison(all);
    std::vector<StateId> states(static_cast<std::size_t>(options.state_count));
    for (std::int32_t state = 0; state < options.state_count; ++state) states[static_cast<std::size_t>(state)] = StateId{state};
    backend->ops_->poison_states(states);
  }
  return std::unique_ptr<Backend>(std::move(backend));
}

HostBackend::HostBackend(const ModelConfig& config, const BackendOptions& options, std::unique_ptr<HostOps> ops, Decoder model,
                         std::string description)
    : config_(config), options_(options), ops_(std::move(ops)), model_(std::move(model)), description_(std::move(description)) {
  tokens_.reserve(static_cast<std::size_t>(options.max_tokens_per_step));
  const auto rows = static_cast<std::size_t>(options.max_rows);
  sequences_.reserve(rows);
  selected_.reserve(rows);
  sampling_rows_.reserve(rows);
  valid_.resize(rows);
  state_writers_.resize(static_cast<std::size_t>(options.state_count));
  sample_row_ = [this](std::int32_t index) { sample_row(index); };
}

ShapeLimits HostBackend::shape_limits() const {
  ShapeLimits limits = ops_->shape_limits();
  limits.tokens_max = options_.max_tokens_per_step;
  return limits;
}

Result<std::unique_ptr<StepShapes>> HostBackend::build_shapes(const policies::StepBuckets& buckets, const std::stop_token& stop) {
  CHECK(!buckets.tokens.empty() && std::is_sorted(buckets.tokens.begin(), buckets.tokens.end()) && buckets.tokens.front() >= 1 &&
            buckets.tokens.back() <= options_.max_tokens_per_step,
        "buckets=", buckets.tokens.size());
  try {
    return ops_->build_shapes(buckets, stop);
  } catch (const std::bad_alloc&) {
    return unexpected(ErrorCode::ResourceExhausted, "no memory for " + std::to_string(buckets.tokens.size()) + " step shapes");
  }
}

std::unique_ptr<StepShapes> HostBackend::use_shapes(std::unique_ptr<StepShapes> shapes) {
  return ops_->use_shapes(std::move(shapes));
}

void HostBackend::released(std::span<const BlockId> blocks) {
  if (options_.poison) ops_->poison(blocks);
}

void HostBackend::released_states(std::span<const StateId> states) {
  if (options_.poison) ops_->poison_states(states);
}

void HostBackend::read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) {
  CHECK(layer >= 0 && layer < config_.count_of(SublayerKind::Attention), "layer=", layer);
  CHECK(block.value >= 0 && block.value < options_.block_count, "block=", block.value);
  CHECK(slot >= 0 && slot < kv_block_tokens, "slot=", slot);
  ops_->read_token(layer, block, slot, out);
}

void HostBackend::read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) {
  CHECK(layer >= 0 && layer < config_.count_of(SublayerKind::Mamba2), "layer=", layer);
  CHECK(state.value >= 0 && state.value < options_.state_count, "state=", state.value);
  ops_->read_state(layer, state, out);
}

Result<std::unique_ptr<Backend>> HostBackend::make_sibling() {
  try {
    Result<std::unique_ptr<HostOps>> ops = ops_->make_sibling();
    if (!ops) return Unexpected(std::move(ops).error());
    Result<Decoder> model = model_.beside(options_, **ops);
    if (!model) return Unexpected(std::move(model).error());
    auto* sibling = new HostBackend(config_, options_, std::move(*ops), std::move(*model), description_);
    return std::unique_ptr<Backend>(sibling);
  } catch (const std::bad_alloc&) {
    return unexpected(ErrorCode::ResourceExhausted, "backend: not enough memory for the scratch of a second lane");
  } catch (const std::length_error&) {
    return unexpected(ErrorCode::ResourceExhausted, "backend: the scratch of a second lane is larger than the address space");
  } catch (const std::system_error& error) {
    return unexpected(ErrorCode::ResourceExhausted,
                      std::string("backend: threads of a second lane could not be started: ") + error.what());
  }
}

Result<void> HostBackend::check_source(const HostBackend& source) const {
  struct Property {
    const char* name;
    std::int64_t here;
    std::int64_t there;
  };
  const ModelConfig& other = source.config_;
  // Shapes of recurrent layers; zeros where there are none.
  const Mamba2Config here = config_.mamba2.value_or(Mamba2Config{});
  const Mamba2Config there = other.mamba2.value_or(Mamba2Config{});
  for (const Property& property :
       {Property{"hidden_size", config_.hidden_size, other.hidden_size}, Property{"layers", config_.layers, other.layers},
        Property{"heads", config_.heads, other.heads}, Property{"kv_heads", config_.kv_heads, other.kv_heads},
        Property{"head_size", config_.head_size, other.head_size},
        Property{"feed_forward", config_.feed_forward, other.feed_forward},
        Property{"vocabulary", config_.vocabulary, other.vocabulary},
        Property{"attention sublayers", config_.count_of(SublayerKind::Attention), other.count_of(SublayerKind::Attention)},
        Property{"mamba2 sublayers", config_.count_of(SublayerKind::Mamba2), other.count_of(SublayerKind::Mamba2)},
        Property{"mamba2 heads", here.heads, there.heads}, Property{"mamba2 head_size", here.head_size, there.head_size},
        Property{"mamba2 groups", here.groups, there.groups}, Property{"mamba2 state_size", here.state_size, there.state_size},
        Property{"mamba2 window", here.window, there.window}}) {
    if (property.here == property.there) continue;
    return unexpected(ErrorCode::InvalidArgument, property.name,
                      std::string("copy_blocks: ") + property.name + " is " + std::to_string(property.here) + " here and " +
                          std::to_string(property.there) + " where the blocks come from");
  }
  if (options_.dtype != source.options_.dtype) {
    return unexpected(ErrorCode::InvalidArgument, "dtype",
                      "copy_blocks: dtype is " + std::string(to_string(options_.dtype)) + " here and " +
                          std::string(to_string(source.options_.dtype)) + " where the blocks come from");
  }
  return ops_->check_source(*source.ops_);
}

Result<void> HostBackend::copy_blocks(const Backend& source, const CacheCopies& copies, const std::function<bool()>& allowed) {
  const auto* host = dynamic_cast<const HostBackend*>(&source);
  if (host == nullptr) {
    return unexpected(ErrorCode::InvalidArgument,
                      "copy_blocks: '" + description_ + "' takes no blocks of '" + source.description() + "'");
  }
  if (Result<void> checked = check_source(*host); !checked) return checked;
  for (const BlockCopy& copy : copies.blocks) {
    CHECK(copy.from.value >= 0 && copy.from.value < host->options_.block_count, "from=", copy.from.value);
    CHECK(copy.to.value >= 0 && copy.to.value < options_.block_count, "to=", copy.to.value);
    if (!allowed()) return unexpected(ErrorCode::Cancelled, "copy_blocks: the copy was called off");
    ops_->copy_block(*host->ops_, copy);
  }
  if (copies.state) {
    const StateCopy& copy = *copies.state;
    CHECK(copy.from.value >= 0 && copy.from.value < host->options_.state_count, "from=", copy.from.value);
    CHECK(copy.to.value >= 0 && copy.to.value < options_.state_count, "to=", copy.to.value);
    if (!allowed()) return unexpected(ErrorCode::Cancelled, "copy_blocks: the copy was called off");
    ops_->copy_state(*host->ops_, copy);
  }
  return {};
}

void HostBackend::check_states_apart(std::span<const StepRow> rows) {
  const auto writer = [this](StateId state) -> std::int32_t& { return state_writers_[static_cast<std::size_t>(state.value)]; };
  const auto for_written = [&rows](auto&& function) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!rows[i].state) continue;
      function(rows[i].state->to, static_cast<std::int32_t>(i) + 1);
      if (rows[i].state->save) function(rows[i].state->save->to, static_cast<std::int32_t>(i) + 1);
    }
  };
  for_written([&](StateId state, std::int32_t row) {
    CHECK(writer(state) == 0, "state=", state.value, " rows=", writer(state) - 1, " and ", row - 1);
    writer(state) = row;
  });
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].state || !rows[i].state->from) continue;
    const StateId from = *rows[i].state->from;
    CHECK(writer(from) == 0 || writer(from) == static_cast<std::int32_t>(i) + 1, "state=", from.value, " read by row ", i,
          " and written by row ", writer(from) - 1);
  }
  for_written([&](StateId state, std::int32_t) { writer(state) = 0; });
}

void HostBackend::flatten(std::span<const StepRow> rows) {
  check_step(config_, options_, rows);
  check_states_apart(rows);
  tokens_.clear();
  sequences_.clear();
  selected_.clear();
  sampling_rows_.clear();
  for (const StepRow& row : rows) {
    sequences_.push_back({.first = static_cast<std::int32_t>(tokens_.size()),
                          .count = static_cast<std::int32_t>(row.tokens.size()),
                          .position = row.position,
                          .blocks = row.blocks,
                          .state = row.state.value_or(StateUse{})});
    tokens_.insert(tokens_.end(), row.tokens.begin(), row.tokens.end());
    if (row.sampling == nullptr) continue;
    selected_.push_back(static_cast<std::int32_t>(tokens_.size()) - 1);
    sampling_rows_.push_back(&row);
  }
}

Result<void> HostBackend::run(std::span<const StepRow> rows, StepResult& result) {
  flatten(rows);
  // Never shrunk: a Sample keeps the memory of its alternatives from step to step.
  if (result.samples.size() < selected_.size()) result.samples.resize(selected_.size());
  result.sample_valid.assign(selected_.size(), false);
  result.logits.clear();
  result.padding_tokens = 0;  // the host computes a step's own tokens alone, whatever bucket it is planned for
  result.bucket = ops_->begin_step(static_cast<std::int32_t>(tokens_.size()), static_cast<std::int32_t>(selected_.size()));
  if (!tokens_.empty()) compute(result);
  ops_->end_step();
  return {};
}

void HostBackend::compute(StepResult& result) {
  logits_ = model_.forward(tokens_, sequences_, selected_);
  if (capture_logits_) {
    result.logits.resize(selected_.size() * static_cast<std::size_t>(config_.vocabulary));
    if (!selected_.empty()) ops_->read(logits_, result.logits);
  }
  result_ = &result;
  ops_->for_each(static_cast<std::int32_t>(selected_.size()), sample_row_);
  result_ = nullptr;
  for (std::size_t i = 0; i < selected_.size(); ++i) result.sample_valid[i] = valid_[i] != 0;
}

void HostBackend::sample_row(std::int32_t index) {
  const auto i = static_cast<std::size_t>(index);
  const StepRow& row = *sampling_rows_[i];
  auto* logits = static_cast<float*>(logits_.data) + index * logits_.stride;
  const std::int64_t position = static_cast<std::int64_t>(row.position) + static_cast<std::int64_t>(row.tokens.size());
  const bool finite = row.sampling->sample(std::span(logits, static_cast<std::size_t>(config_.vocabulary)), position,
                                           config_.end_tokens, result_->samples[i]);
  valid_[i] = finite ? 1 : 0;
}

}  // namespace rubato::engine
