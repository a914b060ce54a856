// SPDX-License-Identifier: Apache-2.0
// Runs steps for the exactness checker straight on the backends: no scheduler is asked, so that a case holds what its name says.
#include <algorithm>
#include <utility>

#include "engine/exactness_state.h"
#include "manifests/check.h"
#include "manifests/settings.h"
#include "policies/accounting.h"
#include "policies/step_shapes.h"

namespace rubato::engine {

using exactness::Run;
namespace {

constexpr std::int32_t company_tokens_max = 48;
constexpr std::int32_t company_chunk_max = 5;

}  // namespace

// ---- what sequences hold

/// Lengths and company that the limits allow.
Result<void> ExactnessChecker::State::fit() {
  const BackendOptions& options = target.options;
  // Three times the subject: its own blocks, those it moves to, and a donor's.
  const std::int32_t longest = std::min(options.max_model_len, options.block_count / 3 * kv_block_tokens);
  if (longest < 2 * kv_block_tokens) {
    return unexpected(ErrorCode::InvalidArgument, "the exactness check needs room for " + std::to_string(6 * kv_block_tokens) +
                                                      " tokens and a max_model_len of " + std::to_string(2 * kv_block_tokens));
  }
  target.new_tokens = std::min(target.new_tokens, longest / 4);
  target.prompt_tokens = std::min(target.prompt_tokens, longest - target.new_tokens);
  const std::int32_t blocks_left =
      options.block_count - 3 * policies::blocks_for_tokens(target.prompt_tokens + target.new_tokens);
  const auto shares = static_cast<std::int32_t>(target.lanes.size());
  company_max = std::min(options.max_rows - 1, blocks_left / policies::blocks_for_tokens(company_tokens_max) / shares);
  company_max = std::min(company_max, options.max_tokens_per_step - 1);
  if (recurrent()) company_max = std::min(company_max, (options.state_count - 3) / shares);
  company_max = std::max(company_max, 0);
  return {};
}

BlockId ExactnessChecker::State::take_block(std::size_t pool) {
  std::vector<BlockId>& blocks = pools[pool].blocks;
  CHECK(!blocks.empty());
  std::swap(blocks[random() % blocks.size()], blocks.back());
  const BlockId block = blocks.back();
  blocks.pop_back();
  return block;
}

StateId ExactnessChecker::State::take_state(std::size_t pool) {
  std::vector<StateId>& states = pools[pool].states;
  CHECK(!states.empty());
  std::swap(states[random() % states.size()], states.back());
  const StateId state = states.back();
  states.pop_back();
  return state;
}

void ExactnessChecker::State::hold(Run& run, std::int32_t tokens) {
  while (static_cast<std::int32_t>(run.blocks.size()) < policies::blocks_for_tokens(tokens))
    run.blocks.push_back(take_block(run.pool));
  if (recurrent() && !run.state) run.state = take_state(run.pool);
}

/// What it shared stays with its owner.
void ExactnessChecker::State::let_go(Run& run, Backend& backend) {
  const std::span<const BlockId> own = std::span(run.blocks).subspan(run.shared);
  backend.released(own);
  pools[run.pool].blocks.insert(pools[run.pool].blocks.end(), own.begin(), own.end());
  if (run.state) {
    backend.released_states(std::span(&*run.state, 1));
    pools[run.pool].states.push_back(*run.state);
  }
  run.blocks.clear();
  run.state.reset();
  run.from.reset();
  run.shared = 0;
  run.position = 0;
}

std::vector<TokenId> ExactnessChecker::State::draw_tokens(std::mt19937_64& from, std::int32_t count) const {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (TokenId& token : tokens) token = static_cast<TokenId>(from() % static_cast<std::uint64_t>(config.vocabulary));
  return tokens;
}

Run ExactnessChecker::State::begin(std::vector<TokenId> tokens) {
  Run run;
  run.tokens = std::move(tokens);
  hold(run, static_cast<std::int32_t>(run.tokens.size()));
  return run;
}

// ---- steps

Result<void> ExactnessChecker::State::use(ExactnessCase::Steps steps) {
  for (Lane& lane : lanes) {
    if (steps == ExactnessCase::Steps::Eager) {
      eager(lane);
      continue;
    }
    const ShapeLimits limits = lane.backend->shape_limits();
    if (lane.in_shapes || limits.count_max == 0) continue;
    if (lane.shapes == nullptr) {
      const std::int32_t largest = std::min(limits.tokens_max, target.options.max_tokens_per_step);
      const policies::ShapeOptions options{.budget = largest,
                                           .max_num_seqs = std::min(target.options.max_rows, largest),
                                           .count_max = limits.count_max,
                                           .token_tile = limits.token_tile,
                                           .eager_tokens = limits.eager_tokens};
      const policies::ShapeChoice choice = policies::choose_shapes(policies::StepHistogram(largest, 1 << 20), options);
      Result<std::unique_ptr<StepShapes>> built = lane.backend->build_shapes(choice.buckets, {});
      if (!built) return Unexpected(std::move(built).error());
      lane.shapes = std::move(*built);
    }
    lane.shapes = lane.backend->use_shapes(std::move(lane.shapes));
    lane.in_shapes = true;
  }
  return {};
}

Result<void> ExactnessChecker::State::step(Lane& lane, std::span<const Piece> pieces) {
  lane.rows.clear();
  for (const Piece& piece : pieces) {
    Run& run = *piece.run;
    StepRow row{
        .position = run.position,
        .tokens = std::span(run.tokens).subspan(static_cast<std::size_t>(run.position), static_cast<std::size_t>(piece.count)),
        .blocks = run.blocks,
        .sampling = &lane.sampling};
    if (recurrent()) row.state = StateUse{.from = run.from, .to = *run.state, .save = piece.save};
    lane.rows.push_back(row);
  }
  if (Result<void> done = lane.backend->run(lane.rows, lane.result); !done) return done;
  for (const Piece& piece : pieces) {
    piece.run->position += piece.count;
    piece.run->from = piece.run->state;
  }
  return {};
}

/// Gives a lane so many others; each begins again when it has come to its end.
void ExactnessChecker::State::gather(Lane& lane, std::int32_t count) {
  for (std::int32_t i = 0; i < count; ++i) {
    const auto longest = static_cast<std::uint64_t>(std::min(company_tokens_max, target.options.max_model_len));
    const auto tokens = static_cast<std::int32_t>(1 + lane.random() % longest);
    lane.company.push_back(begin(draw_tokens(lane.random, tokens)));
  }
}

void ExactnessChecker::State::scatter(Lane& lane) {
  for (Run& run : lane.company) let_go(run, *lane.backend);
  lane.company.clear();
}

/// The subject's row somewhere among those of the lane's company. Returns which one it is.
Result<std::size_t> ExactnessChecker::State::step_among(Lane& lane, const std::optional<Piece>& subject) {
  std::vector<Piece> pieces;
  std::int32_t left = target.options.max_tokens_per_step - (subject ? subject->count : 0);
  for (Run& run : lane.company) {
    if (left == 0) break;
    const auto rest = static_cast<std::int32_t>(run.tokens.size()) - run.position;
    const auto wanted = static_cast<std::int32_t>(1 + lane.random() % company_chunk_max);
    const std::int32_t count = std::min({rest, left, wanted});
    pieces.push_back({.run = &run, .count = count});
    left -= count;
  }
  std::size_t row = 0;
  if (subject) {
    row = lane.random() % (pieces.size() + 1);
    pieces.insert(pieces.begin() + static_cast<std::ptrdiff_t>(row), *subject);
  }
  if (pieces.empty()) return row;
  if (Result<void> done = step(lane, pieces); !done) return Unexpected(std::move(done).error());
  for (Run& run : lane.company) {
    if (run.position < static_cast<std::int32_t>(run.tokens.size())) continue;
    run.position = 0;
    run.from.reset();
  }
  return row;
}

}  // namespace rubato::engine
