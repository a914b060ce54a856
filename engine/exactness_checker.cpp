// SPDX-License-Identifier: Apache-2.0
// Computes one sequence in a given way and compares every bit of it with the reference.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/exactness_state.h"
#include "manifests/check.h"
#include "manifests/settings.h"
#include "policies/accounting.h"

namespace rubato::engine {

using exactness::Lane;
using exactness::Piece;
using exactness::Run;
namespace {

std::size_t hash_of(const std::vector<std::byte>& bytes) {
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace

// ---- a case

std::int32_t ExactnessChecker::State::next_chunk(const ExactnessCase& way, const Run& subject) {
  std::int32_t chunk = std::min(way.chunk, target.options.max_tokens_per_step);
  if (way.chunks == ExactnessCase::Chunks::Random)
    chunk = static_cast<std::int32_t>(1 + random() % static_cast<std::uint64_t>(chunk));
  if (subject.position >= reference->prompt_tokens) return 1;
  return std::min(chunk, reference->prompt_tokens - subject.position);
}

/// Computes on until position end, losing everything on the way where the case says so.
Result<void> ExactnessChecker::State::advance(const ExactnessCase& way, Lane& lane, Run& subject, std::int32_t end) {
  while (subject.position < end) {
    const std::int32_t count = std::min(next_chunk(way, subject), end - subject.position);
    Result<std::size_t> row = step_among(lane, Piece{.run = &subject, .count = count});
    if (!row) return Unexpected(std::move(row).error());
    look(lane, subject, *row);
    if (losses.empty() || subject.position < losses.back()) continue;
    losses.pop_back();
    let_go(subject, *lane.backend);
    hold(subject, static_cast<std::int32_t>(subject.tokens.size()));
  }
  return {};
}

/// A donor computes what the subject then begins with: its first full blocks, and the state kept while it passed their end.
Result<void> ExactnessChecker::State::reuse(const ExactnessCase& way, Run& subject, Run& donor) {
  const std::int32_t wanted =
      way.reuse == ExactnessCase::Reuse::WholePrompt ? reference->prompt_tokens - 1 : reference->prompt_tokens / 2;
  const std::int32_t prefix = wanted / kv_block_tokens * kv_block_tokens;
  if (prefix == 0) return {};
  Lane& lane = lanes.front();
  donor = begin(reference->tokens);
  std::optional<StateId> snapshot;
  if (recurrent()) snapshot = take_state(0);
  // Two tokens past the prefix, so that what is kept is not simply what was there last.
  const std::int32_t end = std::min(prefix + 2, static_cast<std::int32_t>(donor.tokens.size()));
  while (donor.position < end) {
    Piece piece{.run = &donor, .count = std::min({way.chunk, target.options.max_tokens_per_step, end - donor.position})};
    if (snapshot && donor.position < prefix && donor.position + piece.count >= prefix)
      piece.save = StateUse::Save{.to = *snapshot, .tokens = prefix - donor.position};
    if (Result<void> done = step(lane, std::span(&piece, 1)); !done) return done;
  }
  subject.blocks.assign(donor.blocks.begin(), donor.blocks.begin() + prefix / kv_block_tokens);
  subject.shared = subject.blocks.size();
  subject.position = prefix;
  subject.from = snapshot;
  hold(subject, static_cast<std::int32_t>(subject.tokens.size()));
  // The first row alone reads the snapshot.
  Result<std::size_t> row = step_among(lane, Piece{.run = &subject, .count = next_chunk(way, subject)});
  if (!row) return Unexpected(std::move(row).error());
  look(lane, subject, *row);
  if (snapshot) pools[0].states.push_back(*snapshot);
  return {};
}

/// All that it has computed goes elsewhere; where it was it is dead.
Result<void> ExactnessChecker::State::move(Run& subject, std::size_t pool) {
  Backend& from = owner(subject);
  Run moved;
  moved.tokens = subject.tokens;
  moved.position = subject.position;
  moved.pool = pool;
  hold(moved, static_cast<std::int32_t>(moved.tokens.size()));
  std::vector<BlockCopy> copies;
  const std::int32_t full =
      config.kv_bytes_per_token(target.options.dtype) > 0 ? policies::blocks_for_tokens(subject.position) : 0;
  for (std::int32_t i = 0; i < full; ++i)
    copies.push_back({.from = subject.blocks[static_cast<std::size_t>(i)], .to = moved.blocks[static_cast<std::size_t>(i)]});
  std::optional<StateCopy> state;
  if (recurrent() && subject.from) state = StateCopy{.from = *subject.from, .to = *moved.state};
  moved.from = moved.state;
  Result<void> copied = owner(moved).copy_blocks(from, {.blocks = copies, .state = state}, [] { return true; });
  let_go(subject, from);
  subject = std::move(moved);
  return copied;
}

Result<void> ExactnessChecker::State::compute(const ExactnessCase& way, Run& subject) {
  const auto all = static_cast<std::int32_t>(subject.tokens.size());
  const std::int32_t prompt = reference->prompt_tokens;
  switch (way.route) {
    case ExactnessCase::Route::OneLane:
      return advance(way, lanes.front(), subject, all);
    case ExactnessCase::Route::OtherPlace:
    case ExactnessCase::Route::OtherPool: {
      if (Result<void> done = advance(way, lanes.front(), subject, prompt); !done) return done;
      const bool far = way.route == ExactnessCase::Route::OtherPool;
      if (Result<void> moved = move(subject, far ? 1 : 0); !moved) return moved;
      return advance(way, far ? lanes[lane_of_other_device()] : lanes.front(), subject, all);
    }
    case ExactnessCase::Route::TwoLanes:
      break;
  }
  const auto beside = [&](Lane& other, auto&& work) -> Result<void> {
    std::atomic<bool> done = false;
    Result<void> others;
    Result<void> own;
    {
      const std::jthread thread([&] {
        while (others && !done.load() && !other.company.empty()) {
          if (Result<std::size_t> row = step_among(other, std::nullopt); !row) others = Unexpected(std::move(row).error());
        }
      });
      own = work();
      done = true;
    }
    return own ? others : own;
  };
  lanes[1].backend->use_share(way.share_percent);
  Result<void> prefilled = beside(lanes[0], [&] { return advance(way, lanes[1], subject, prompt); });
  if (!prefilled) return prefilled;
  return beside(lanes[1], [&] { return advance(way, lanes[0], subject, all); });
}

// ---- what is compared

/// In the order of execution, and what the layer is called.
std::pair<std::size_t, std::string> ExactnessChecker::State::place(SublayerKind kind, std::int32_t index) const {
  for (std::size_t i = 0; i < config.sublayers.size(); ++i) {
    if (config.sublayers[i].kind == kind && config.sublayers[i].index == index) return {i, config.sublayers[i].prefix};
  }
  CHECK(false, "no such layer: ", index);
  return {};
}

void ExactnessChecker::State::differ(std::int32_t token, std::size_t order, std::string layer) {
  if (found && std::pair(found->token, found->order) <= std::pair(token, order)) return;
  found = Found{.token = token, .order = order, .layer = std::move(layer)};
}

/// After a step with the subject in it: the logits of its last token, and its state.
void ExactnessChecker::State::look(const Lane& lane, const Run& subject, std::size_t row) {
  const std::int32_t token = subject.position - 1;
  const auto vocabulary = static_cast<std::size_t>(config.vocabulary);
  const std::vector<float>& expected = reference->logits[static_cast<std::size_t>(token)];
  if (std::memcmp(lane.result.logits.data() + row * vocabulary, expected.data(), vocabulary * sizeof(float)) != 0)
    differ(token, config.sublayers.size(), "logits");
  const std::vector<std::size_t>& states = reference->states[static_cast<std::size_t>(token)];
  for (std::size_t layer = 0; layer < states.size(); ++layer) {
    bytes.clear();
    const auto index = static_cast<std::int32_t>(layer);
    lane.backend->read_state(index, *subject.state, bytes);
    const bool last = token + 1 == static_cast<std::int32_t>(subject.tokens.size());
    if (hash_of(bytes) == states[layer] && (!last || bytes == reference->last_state[layer])) continue;
    auto [order, name] = place(SublayerKind::Mamba2, index);
    differ(token, order, std::move(name));
  }
}

void ExactnessChecker::State::look_at_cache(const Run& subject) {
  const std::int32_t layers = config.count_of(SublayerKind::Attention);
  for (std::int32_t token = 0; token < subject.position && layers > 0; ++token) {
    const std::vector<std::byte>& expected = reference->cached[static_cast<std::size_t>(token)];
    const std::size_t part = expected.size() / static_cast<std::size_t>(layers);
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      bytes.clear();
      owner(subject).read_token(layer, subject.blocks[static_cast<std::size_t>(token / kv_block_tokens)], token % kv_block_tokens,
                                bytes);
      const std::byte* begin = expected.data() + part * static_cast<std::size_t>(layer);
      if (bytes.size() == part && std::equal(bytes.begin(), bytes.end(), begin)) continue;
      auto [order, name] = place(SublayerKind::Attention, layer);
      differ(token, order, std::move(name));
    }
  }
}

// ---- the public door

ExactnessChecker::ExactnessChecker(std::unique_ptr<State> state) : state_(std::move(state)) {}
ExactnessChecker::~ExactnessChecker() = default;
ExactnessChecker::ExactnessChecker(ExactnessChecker&&) noexcept = default;
ExactnessChecker& ExactnessChecker::operator=(ExactnessChecker&&) noexcept = default;

Result<ExactnessChecker> ExactnessChecker::make(const ExactnessTarget& target) {
  CHECK(!target.lanes.empty() && target.lanes.size() <= 2, "lanes=", target.lanes.size());
  auto state = std::make_unique<State>(target);
  if (Result<void> fits = state->fit(); !fits) return Unexpected(std::move(fits).error());
  return ExactnessChecker(std::move(state));
}

Result<ExactnessReference> ExactnessChecker::reference() {
  State& state = *state_;
  if (Result<void> used = state.use(ExactnessCase::Steps::Eager); !used) return Unexpected(std::move(used).error());
  ExactnessReference reference;
  reference.prompt_tokens = state.target.prompt_tokens;
  reference.tokens = state.draw_tokens(state.random, state.target.prompt_tokens + state.target.new_tokens);
  Lane& lane = state.lanes.front();
  Run run = state.begin(reference.tokens);
  const std::int32_t recurrent = state.config.count_of(SublayerKind::Mamba2);
  for (std::size_t token = 0; token < reference.tokens.size(); ++token) {
    const Piece piece{.run = &run, .count = 1};
    if (Result<void> done = state.step(lane, std::span(&piece, 1)); !done) return Unexpected(std::move(done).error());
    reference.logits.push_back(lane.result.logits);
    std::vector<std::byte>& cached = reference.cached.emplace_back();
    const auto position = static_cast<std::int32_t>(token);
    for (std::int32_t layer = 0; layer < state.config.count_of(SublayerKind::Attention); ++layer)
      lane.backend->read_token(layer, run.blocks[token / kv_block_tokens], position % kv_block_tokens, cached);
    std::vector<std::size_t>& hashes = reference.states.emplace_back();
    reference.last_state.assign(static_cast<std::size_t>(recurrent), {});
    for (std::int32_t layer = 0; layer < recurrent; ++layer) {
      std::vector<std::byte>& bytes = reference.last_state[static_cast<std::size_t>(layer)];
      lane.backend->read_state(layer, *run.state, bytes);
      hashes.push_back(hash_of(bytes));
    }
  }
  state.let_go(run, *lane.backend);
  return reference;
}

bool ExactnessChecker::applies(const ExactnessCase& way) const {
  const State& state = *state_;
  const std::int32_t states = state.target.options.state_count;
  if (way.route == ExactnessCase::Route::TwoLanes && state.target.lanes.size() < 2) return false;
  if (way.route == ExactnessCase::Route::OtherPool && state.target.other_device == nullptr) return false;
  if (way.steps == ExactnessCase::Steps::Shapes && state.lanes.front().backend->shape_limits().count_max == 0) return false;
  if (way.company > 0 && state.company_max == 0) return false;
  if (!state.recurrent()) return true;
  if (way.route == ExactnessCase::Route::OtherPlace && states < 2) return false;
  return way.reuse == ExactnessCase::Reuse::Nothing || states >= 3;
}

Result<std::optional<ExactnessDifference>> ExactnessChecker::run(const ExactnessCase& way, const ExactnessReference& reference) {
  State& state = *state_;
  CHECK(way.chunk >= 1 && applies(way), way.name());
  state.reference = &reference;
  state.found.reset();
  state.losses.clear();
  const auto tokens = static_cast<std::int32_t>(reference.tokens.size());
  for (std::int32_t i = way.preemptions; i >= 1; --i) state.losses.push_back(tokens * i / (way.preemptions + 1));
  const std::int32_t company = std::min(way.company, state.company_max);
  for (std::size_t lane = 0; lane < state.target.lanes.size(); ++lane) {
    if (lane == 0 || way.route == ExactnessCase::Route::TwoLanes) state.gather(state.lanes[lane], company);
  }
  Run subject;
  subject.tokens = reference.tokens;
  Run donor;
  Result<void> done = state.use(way.steps);
  if (done && way.reuse != ExactnessCase::Reuse::Nothing) done = state.reuse(way, subject, donor);
  state.hold(subject, tokens);
  if (done) done = state.compute(way, subject);
  if (done) state.look_at_cache(subject);
  state.let_go(subject, state.owner(subject));
  state.let_go(donor, *state.lanes.front().backend);
  for (Lane& lane : state.lanes) state.scatter(lane);
  if (!done) return Unexpected(std::move(done).error());
  if (!state.found) return std::optional<ExactnessDifference>();
  return std::optional<ExactnessDifference>({.token = state.found->token, .layer = std::move(state.found->layer)});
}

}  // namespace rubato::engine
