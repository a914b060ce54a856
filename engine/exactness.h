// SPDX-License-Identifier: Apache-2.0
// Checks the exactness contract on real backends: the logits, keys, values and states of a token are a function of that token and
// those before it alone, whatever way they are computed. A reference is computed one token at a time, alone; every other way
// (chunks, company, step shapes, the second lane, moves, preemption, reuse of a prefix) must give the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "manifests/result.h"

namespace rubato::engine {

/// One way to compute a sequence.
struct ExactnessCase {
  enum class Chunks : std::uint8_t {
    Equal,   // each of `chunk` tokens
    Random,  // each of 1 .. chunk tokens, drawn anew: what a budget that changes live gives
  };
  enum class Route : std::uint8_t {
    OneLane,     // all on the first lane
    TwoLanes,    // the prompt on the second lane, the rest on the first, while the other one runs steps too
    OtherPlace,  // between prompt and rest all blocks and the state are copied elsewhere in the pool
    OtherPool,   // the same, to another device
  };
  enum class Reuse : std::uint8_t { Nothing, HalfThePrompt, WholePrompt };  // of what another sequence left, in full blocks

  std::int32_t chunk = 0;  // of the prompt; cut to what a step may have
  Chunks chunks = Chunks::Equal;
  std::int32_t company = 0;  // other sequences in the same steps, as many as there is room for
  Route route = Route::OneLane;
  Reuse reuse = Reuse::Nothing;
  std::int32_t preemptions = 0;     // all is lost so often, and computed again elsewhere
  std::int32_t share_percent = 50;  // of the second lane
  enum class Steps : std::uint8_t { Eager, Shapes };
  Steps steps = Steps::Eager;

  /// `chunks of 7, among 31 others, in shapes, prefix reused`
  [[nodiscard]] std::string name() const;
};

/// Where a case first gave other bits: the first token, and of that the first layer.
struct ExactnessDifference {
  std::int32_t token = 0;  // position
  std::string layer;       // `model.layers.3.mixer.`, or `logits`
  [[nodiscard]] std::string text() const;
};

/// What is checked. The backends run nothing else meanwhile, and all their blocks and states are free.
struct ExactnessTarget {
  std::vector<Backend*> lanes;       // of one device: one, or the first and its sibling
  Backend* other_device = nullptr;   // with a pool of its own, where there is one
  BackendOptions options;            // that all of them were made with
  std::int32_t prompt_tokens = 300;  // lengths shrink to what max_model_len and the pool allow
  std::int32_t new_tokens = 24;
  std::uint64_t seed = 1;
};

/// The bits that every case is held against.
struct ExactnessReference {
  std::vector<TokenId> tokens;  // prompt and what follows
  std::int32_t prompt_tokens = 0;
  std::vector<std::vector<float>> logits;          // by position
  std::vector<std::vector<std::byte>> cached;      // keys and values, by position, layer after layer
  std::vector<std::vector<std::size_t>> states;    // hashes by position, one per recurrent layer
  std::vector<std::vector<std::byte>> last_state;  // by recurrent layer
};

/// Not thread-safe. Destroying it leaves all blocks and states as free as they were.
class ExactnessChecker {
 public:
  /// InvalidArgument: the pool or the limits hold no sequence of a few blocks.
  [[nodiscard]] static Result<ExactnessChecker> make(const ExactnessTarget& target);
  ~ExactnessChecker();
  ExactnessChecker(ExactnessChecker&&) noexcept;
  ExactnessChecker& operator=(ExactnessChecker&&) noexcept;

  /// Random tokens, computed one by one. Errors are the backend's.
  [[nodiscard]] Result<ExactnessReference> reference();
  /// Whether this target can be asked to compute so at all (a second lane, shapes, slots for a snapshot).
  [[nodiscard]] bool applies(const ExactnessCase& way) const;
  /// Computes the reference's tokens in the case's way. None: every bit is the same.
  [[nodiscard]] Result<std::optional<ExactnessDifference>> run(const ExactnessCase& way, const ExactnessReference& reference);

 private:
  struct State;
  explicit ExactnessChecker(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// The ways that users' checks go through: every value of every axis, and the pairs that are likeliest to meet.
[[nodiscard]] std::vector<ExactnessCase> exactness_cases();

struct ExactnessReport {
  struct Failure {
    ExactnessCase way;
    ExactnessDifference difference;
  };
  std::int32_t cases = 0;          // that were run
  std::int32_t skipped = 0;        // that this target has no means for
  std::optional<Failure> failure;  // the first; the check ends with it
  /// `PASS: ...`, or `FAIL: ...` with the first differing layer and token.
  [[nodiscard]] std::string text() const;
};

/// Runs exactness_cases() on several random prompts. progress is told each case before it runs. Errors: those of make() and the
/// backend's; Cancelled when stop was requested.
[[nodiscard]] Result<ExactnessReport> check_exactness(const ExactnessTarget& target,
                                                      const std::function<void(const ExactnessCase&)>& progress,
                                                      const std::stop_token& stop);

}  // namespace rubato::engine
