// SPDX-License-Identifier: Apache-2.0
// What an ExactnessChecker keeps: the lanes under check, which blocks and states are free, and what was found. Private to the
// checker; exactness_steps.cpp runs steps, exactness_checker.cpp puts cases together and compares.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/exactness.h"

namespace rubato::engine {
namespace exactness {

/// Which blocks and states of one pool are free.
struct Pool {
  std::vector<BlockId> blocks;
  std::vector<StateId> states;
};

/// A sequence and what it holds.
struct Run {
  std::vector<TokenId> tokens;
  std::vector<BlockId> blocks;
  std::int32_t position = 0;     // computed so far
  std::optional<StateId> state;  // its own
  std::optional<StateId> from;   // what its next row begins from
  std::size_t pool = 0;
  std::size_t shared = 0;  // first blocks that are another's
};

/// One row of a step.
struct Piece {
  Run* run = nullptr;
  std::int32_t count = 0;
  std::optional<StateUse::Save> save{};
};

/// What one lane runs steps with.
struct Lane {
  Backend* backend = nullptr;
  SamplingState sampling;
  std::vector<StepRow> rows{};
  StepResult result{};
  std::vector<Run> company{};
  std::unique_ptr<StepShapes> shapes{};  // while they are not in use
  bool in_shapes = false;
  std::mt19937_64 random{};
};

}  // namespace exactness

struct ExactnessChecker::State {
  using Pool = exactness::Pool;
  using Run = exactness::Run;
  using Piece = exactness::Piece;
  using Lane = exactness::Lane;

  explicit State(const ExactnessTarget& target_in) : target(target_in), config(target.lanes.front()->config()) {
    const SamplingState greedy({.temperature = 0.0}, {}, config.vocabulary);
    for (Backend* backend : target.lanes) {
      backend->capture_logits(true);
      lanes.push_back({.backend = backend, .sampling = greedy, .random = std::mt19937_64(target.seed + 31 * lanes.size())});
    }
    if (target.other_device != nullptr) {
      target.other_device->capture_logits(true);
      lanes.push_back({.backend = target.other_device, .sampling = greedy, .random = std::mt19937_64(target.seed)});
    }
    pools.resize(target.other_device != nullptr ? 2 : 1);
    for (Pool& pool : pools) {
      for (std::int32_t i = target.options.block_count; i-- > 0;) pool.blocks.push_back(BlockId{i});
      for (std::int32_t i = target.options.state_count; i-- > 0;) pool.states.push_back(StateId{i});
    }
  }
  ~State() {
    for (Lane& lane : lanes) {
      eager(lane);
      lane.backend->capture_logits(false);
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  [[nodiscard]] bool recurrent() const { return config.mamba2.has_value(); }
  [[nodiscard]] std::size_t lane_of_other_device() const { return target.lanes.size(); }
  [[nodiscard]] Result<void> fit();

  // What sequences hold (blocks in random order, so that no two runs have the same).
  [[nodiscard]] BlockId take_block(std::size_t pool);
  [[nodiscard]] StateId take_state(std::size_t pool);
  void hold(Run& run, std::int32_t tokens);
  void let_go(Run& run, Backend& backend);
  [[nodiscard]] Run begin(std::vector<TokenId> tokens);
  [[nodiscard]] std::vector<TokenId> draw_tokens(std::mt19937_64& from, std::int32_t count) const;

  // Steps.
  [[nodiscard]] Result<void> step(Lane& lane, std::span<const Piece> pieces);
  [[nodiscard]] Result<std::size_t> step_among(Lane& lane, const std::optional<Piece>& subject);
  void gather(Lane& lane, std::int32_t count);
  void scatter(Lane& lane);
  [[nodiscard]] Result<void> use(ExactnessCase::Steps steps);
  void eager(Lane& lane) {
    if (std::exchange(lane.in_shapes, false)) lane.shapes = lane.backend->use_shapes(nullptr);
  }

  // A case.
  [[nodiscard]] Result<void> compute(const ExactnessCase& way, Run& subject);
  [[nodiscard]] Result<void> reuse(const ExactnessCase& way, Run& subject, Run& donor);
  [[nodiscard]] Result<void> advance(const ExactnessCase& way, Lane& lane, Run& subject, std::int32_t end);
  [[nodiscard]] Result<void> move(Run& subject, std::size_t pool);
  [[nodiscard]] std::int32_t next_chunk(const ExactnessCase& way, const Run& subject);

  // What is compared.
  void look(const Lane& lane, const Run& subject, std::size_t row);
  void look_at_cache(const Run& subject);
  void differ(std::int32_t token, std::size_t order, std::string layer);
  [[nodiscard]] std::pair<std::size_t, std::string> place(SublayerKind kind, std::int32_t index) const;
  [[nodiscard]] Backend& owner(const Run& run) { return run.pool == 0 ? *target.lanes.front() : *target.other_device; }

  ExactnessTarget target;
  const ModelConfig config;
  std::vector<Lane> lanes;  // of the first device, then of the other
  std::vector<Pool> pools;
  std::mt19937_64 random{target.seed};
  std::int32_t company_max = 0;  // of each lane

  const ExactnessReference* reference = nullptr;  // of the case that runs
  std::vector<std::int32_t> losses;               // positions at which all is lost, the next one last
  std::vector<std::byte> bytes;
  struct Found {
    std::int32_t token;
    std::size_t order;
    std::string layer;
  };
  std::optional<Found> found;
};

}  // namespace rubato::engine
