// SPDX-License-Identifier: Apache-2.0
// A backend that costs nothing, for tests of what surrounds one. Its KV blocks hold the tokens themselves, its recurrent states
// the whole history, and the next token's logits are a hash of the history as read back from both: a wrong block or position, a
// lost or foreign token, a wrong, late or missing state, or a read of memory that was never written or has died changes every
// later token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "manifests/settings.h"

namespace rubato::test {

inline constexpr std::int32_t fake_vocabulary = 96;
inline constexpr TokenId fake_end_token = 2;
/// A prompt that begins with this token produces logits that are not finite once its history is fake_bad_length tokens long.
inline constexpr TokenId fake_bad_token = 95;
inline constexpr std::size_t fake_bad_length = 20;

/// The fake model: logits after history. Greedy output ends by itself after about 40 tokens.
inline void fake_logits(std::span<const TokenId> history, std::span<float> logits) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (std::size_t i = 0; i < history.size(); ++i)
    hash = (hash ^ (static_cast<std::uint64_t>(history[i]) + 131 * i)) * 0x100000001B3U;
  for (float& logit : logits) {
    hash ^= hash >> 29;
    hash *= 0xBF58476D1CE4E5B9U;
    logit = static_cast<float>(hash >> 40) * (4.0F / (1 << 24));
  }
  if (history.front() == fake_bad_token && history.size() >= fake_bad_length) logits[7] = std::numeric_limits<float>::quiet_NaN();
}

/// What a fake model's layers keep.
enum class FakeLayers : std::uint8_t { Attention, Recurrent, Hybrid };

/// Of one device; its lanes share it.
struct FakeMemory {
  std::vector<TokenId> cells;                               // token by token, block after block
  std::vector<std::optional<std::vector<TokenId>>> states;  // the history each stands for; none: dead
  const engine::Backend* asked_for_share = nullptr;         // gets share_percent of the device, its sibling the rest
  std::int32_t share_percent = 100;
};

class FakeBackend final : public engine::Backend {
 public:
  struct Options {
    std::int32_t block_count = 0;
    std::int32_t state_count = 0;  // 0 for attention alone
    FakeLayers layers = FakeLayers::Attention;
    std::optional<std::uint64_t> fails_at_run{};   // 1-based
    std::optional<std::uint64_t> throws_at_run{};  // what no backend may do
  };

  explicit FakeBackend(const Options& options)
      : FakeBackend(
            options,
            std::make_shared<FakeMemory>(FakeMemory{
                .cells = std::vector<TokenId>(static_cast<std::size_t>(options.block_count) * kv_block_tokens, poison),
                .states = std::vector<std::optional<std::vector<TokenId>>>(static_cast<std::size_t>(options.state_count))})) {}

  FakeBackend(const Options& options, std::shared_ptr<FakeMemory> memory) : options_(options), memory_(std::move(memory)) {
    config_.architecture = "LlamaForCausalLM";
    config_.vocabulary = fake_vocabulary;
    config_.end_tokens = {fake_end_token};
  }

  [[nodiscard]] Result<void> run(std::span<const engine::StepRow> rows, engine::StepResult& result) override {
    ++run_count;
    if (options_.throws_at_run == run_count) throw std::runtime_error("the fake device threw");
    if (broken_ || options_.fails_at_run == run_count) {
      broken_ = true;
      return unexpected(ErrorCode::Internal, "the fake device broke");
    }
    tokens_in_run = 0;
    for (const engine::StepRow& row : rows) {
      tokens_in_run += static_cast<std::int32_t>(row.tokens.size());
      if (options_.layers != FakeLayers::Recurrent) {
        for (std::size_t i = 0; i < row.tokens.size(); ++i) cell(row, static_cast<std::size_t>(row.position) + i) = row.tokens[i];
      }
      move_state(row);
    }
    result.sample_valid.clear();
    result.logits.clear();
    std::size_t count = 0;
    for (const engine::StepRow& row : rows) {
      if (row.sampling == nullptr) continue;
      if (result.samples.size() == count) result.samples.emplace_back();
      const std::size_t length = static_cast<std::size_t>(row.position) + row.tokens.size();
      read_history(row, length);
      fake_logits(history_, logits_);
      if (capture_) result.logits.insert(result.logits.end(), logits_.begin(), logits_.end());
      result.sample_valid.push_back(
          row.sampling->sample(logits_, static_cast<std::int64_t>(length), config_.end_tokens, result.samples[count++]));
    }
    return {};
  }

  [[nodiscard]] Result<std::unique_ptr<engine::Backend>> make_sibling() override {
    return std::unique_ptr<engine::Backend>(std::make_unique<FakeBackend>(options_, memory_));
  }

  [[nodiscard]] Result<void> copy_blocks(const engine::Backend& source, const engine::CacheCopies& copies,
                                         const std::function<bool()>& allowed) override {
    const auto& from = dynamic_cast<const FakeBackend&>(source);
    for (const BlockCopy& copy : copies.blocks) {
      if (!allowed()) return unexpected(ErrorCode::Cancelled, "no longer wanted");
      std::copy_n(from.memory_->cells.begin() + std::ptrdiff_t{copy.from.value} * kv_block_tokens, kv_block_tokens,
                  memory_->cells.begin() + std::ptrdiff_t{copy.to.value} * kv_block_tokens);
      ++copied_count;
    }
    if (!copies.state) return {};
    if (!allowed()) return unexpected(ErrorCode::Cancelled, "no longer wanted");
    state(copies.state->to) = from.memory_->states.at(static_cast<std::size_t>(copies.state->from.value));
    ++copied_states;
    return {};
  }

  void capture_logits(bool on) override { capture_ = on; }
  void released(std::span<const BlockId> blocks) override {
    for (const BlockId block : blocks) {
      const auto begin = memory_->cells.begin() + std::ptrdiff_t{block.value} * kv_block_tokens;
      std::fill(begin, begin + kv_block_tokens, poison);
      ++released_count;
    }
  }
  void released_states(std::span<const StateId> states) override {
    for (const StateId dead : states) state(dead).reset();
  }
  void use_share(std::int32_t percent) override {
    memory_->asked_for_share = this;
    memory_->share_percent = percent;
  }
  [[nodiscard]] engine::DeviceShare share() const override {
    if (memory_->asked_for_share == nullptr) return {};
    const std::int32_t percent = memory_->asked_for_share == this ? memory_->share_percent : 100 - memory_->share_percent;
    return {.asked_percent = percent, .given_percent = percent};
  }
  [[nodiscard]] const engine::ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string description() const override { return "fake"; }

  /// For siblings made by hand.
  [[nodiscard]] std::shared_ptr<FakeMemory> cells() const { return memory_; }
  /// True when nothing holds a token: everything that was written has been released.
  [[nodiscard]] bool all_dead() const { return live_blocks() == 0 && live_states() == 0; }
  [[nodiscard]] std::int32_t live_blocks() const {
    std::int32_t live = 0;
    for (auto block = memory_->cells.begin(); block != memory_->cells.end(); block += kv_block_tokens)
      live += std::all_of(block, block + kv_block_tokens, [](TokenId token) { return token == poison; }) ? 0 : 1;
    return live;
  }
  [[nodiscard]] std::int32_t live_states() const {
    return static_cast<std::int32_t>(
        std::count_if(memory_->states.begin(), memory_->states.end(), [](const auto& held) { return held.has_value(); }));
  }

  std::uint64_t run_count = 0;
  std::int32_t tokens_in_run = 0;
  std::int64_t poison_reads = 0;
  std::int64_t released_count = 0;
  std::int64_t copied_count = 0;  // blocks
  std::int64_t copied_states = 0;
  std::int64_t saved_states = 0;  // snapshots

 private:
  static constexpr TokenId poison = -1;

  TokenId& cell(const engine::StepRow& row, std::size_t position) {
    const auto block = static_cast<std::size_t>(row.blocks[position / kv_block_tokens].value);
    return memory_->cells.at(block * kv_block_tokens + position % kv_block_tokens);
  }
  [[nodiscard]] std::optional<std::vector<TokenId>>& state(StateId id) {
    return memory_->states.at(static_cast<std::size_t>(id.value));
  }

  /// From the state that the row begins from to the one that it leaves, and to a snapshot on the way.
  void move_state(const engine::StepRow& row) {
    if (row.state.has_value() != (options_.layers != FakeLayers::Attention))
      throw std::logic_error("a row with a state too many or too few");
    if (!row.state) return;
    const StateUse& use = *row.state;
    if (use.from.has_value() != (row.position > 0)) throw std::logic_error("only a row at the start begins from nothing");
    std::vector<TokenId> history;
    if (use.from) history = state(*use.from).value_or(std::vector<TokenId>(static_cast<std::size_t>(row.position), poison));
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      history.push_back(row.tokens[i]);
      if (!use.save || i + 1 != static_cast<std::size_t>(use.save->tokens)) continue;
      if (use.save->to == use.to || use.save->to == use.from) throw std::logic_error("a snapshot over a state in use");
      state(use.save->to) = history;
      ++saved_states;
    }
    state(use.to) = std::move(history);
  }

  /// As the blocks have it, and the state; where the two differ it is nobody's.
  void read_history(const engine::StepRow& row, std::size_t length) {
    history_.clear();
    if (options_.layers != FakeLayers::Recurrent) {
      for (std::size_t i = 0; i < length; ++i) history_.push_back(cell(row, i));
    }
    if (row.state) {
      const std::vector<TokenId>& held = *state(row.state->to);
      if (options_.layers == FakeLayers::Recurrent) history_ = held;
      if (history_ != held) history_.assign(length, poison);
    }
    if (history_.size() != length) history_.assign(length, poison);
    poison_reads += std::count(history_.begin(), history_.end(), poison);
  }

  Options options_;
  engine::ModelConfig config_;
  std::shared_ptr<FakeMemory> memory_;
  std::vector<TokenId> history_;
  std::vector<float> logits_ = std::vector<float>(fake_vocabulary);
  bool capture_ = false;
  bool broken_ = false;
};

/// What a request must yield on the fake model, worked out without lane, scheduler or blocks.
struct FakeAnswer {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  bool stopped = false;  // by an end token or a stop token id, which is the last of tokens
  bool failed = false;
};

inline FakeAnswer fake_answer(std::span<const TokenId> prompt, const engine::SamplingParameters& parameters) {
  FakeAnswer answer;
  const std::vector<TokenId> ends{fake_end_token};
  engine::SamplingState state(parameters, prompt, fake_vocabulary);
  std::vector<TokenId> history(prompt.begin(), prompt.end());
  std::vector<float> logits(fake_vocabulary);
  engine::Sample sample;
  while (state.generated_count() < parameters.max_new_tokens && !answer.stopped) {
    fake_logits(history, logits);
    if (!state.sample(logits, static_cast<std::int64_t>(history.size()), ends, sample)) {
      answer.failed = true;
      break;
    }
    state.append(sample.token);
    history.push_back(sample.token);
    answer.tokens.push_back(sample.token);
    answer.logprobs.push_back(sample.logprob);
    const auto& stops = parameters.stop_token_ids;
    answer.stopped = (sample.token == fake_end_token && !parameters.ignore_eos) ||
                     std::find(stops.begin(), stops.end(), sample.token) != stops.end();
  }
  return answer;
}

}  // namespace rubato::test
