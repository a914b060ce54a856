// SPDX-License-Identifier: Apache-2.0
// Recurrent layers bit for bit: outputs and states after any token are the same however a sequence is cut, whoever shares its
// steps, wherever its states lie and however many threads run. The standard is each sequence alone, token by token, on one thread
// of the same kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "engine/ops.h"
#include "tests/engine/recurrent_device.h"

namespace rubato::engine {
namespace {

/// A host Ops under test: a kernel table of the CPU, or the reference.
struct Subject {
  std::string name;
  std::optional<Variant> variant;
};

void PrintTo(const Subject& subject, std::ostream* out) {
  *out << subject.name;
}

std::vector<Subject> subjects() {
  std::vector<Subject> all{{"Reference", std::nullopt}};
  for (const Variant& variant : variants()) all.push_back({variant_name(variant), variant});
  return all;
}

/// Outputs and states of one sequence, token by token.
struct Standard {
  Values outputs;  // (tokens, inner)
  std::vector<std::vector<std::byte>> states;
};

class RecurrentRowsTest : public testing::TestWithParam<Subject> {
 protected:
  [[nodiscard]] static Device device(const RecurrentCase& one, std::int32_t threads) {
    const Subject& subject = GetParam();
    return with_layers(subject.variant ? cpu_device(*subject.variant, threads) : reference_device(DataType::Float32), one);
  }
  [[nodiscard]] static Standard standard(const RecurrentCase& one, const Values& sequence) {
    Device alone = device(one, 1);
    Standard want;
    const auto tokens = static_cast<std::int32_t>(sequence.size()) / one.shape.projected();
    for (std::int32_t position = 0; position < tokens; ++position) {
      const StateUse use{.from = position == 0 ? std::nullopt : std::optional(StateId{0}), .to = {0}, .save = {}};
      const Values row = recurrent_step(alone, one.shape, {sequence}, {{0, position, 1, use}});
      want.outputs.insert(want.outputs.end(), row.begin(), row.end());
      want.states.push_back(state_of(alone, {0}));
    }
    for (const float value : want.outputs) EXPECT_TRUE(std::isfinite(value));  // NaN would equal NaN below
    return want;
  }
  static void expect_outputs(const RecurrentShape& shape, const Standard& want, const RecurrentPiece& piece, const float* got) {
    const auto row = static_cast<std::size_t>(shape.inner());
    EXPECT_EQ(std::memcmp(got, want.outputs.data() + static_cast<std::size_t>(piece.position) * row,
                          static_cast<std::size_t>(piece.count) * row * sizeof(float)),
              0)
        << "sequence " << piece.sequence << " tokens " << piece.position << "+" << piece.count;
  }
  /// Runs pieces and compares outputs, new states and snapshots.
  static void expect_step(Device& on, const RecurrentShape& shape, const std::vector<Values>& sequences,
                          const std::vector<Standard>& want, const std::vector<RecurrentPiece>& pieces) {
    const Values got = recurrent_step(on, shape, sequences, pieces);
    const float* at = got.data();
    for (const RecurrentPiece& piece : pieces) {
      const Standard& expected = want[piece.sequence];
      expect_outputs(shape, expected, piece, at);
      at += static_cast<std::ptrdiff_t>(piece.count) * shape.inner();
      const auto last = static_cast<std::size_t>(piece.position + piece.count - 1);
      EXPECT_EQ(state_of(on, piece.state.to), expected.states[last]) << "sequence " << piece.sequence << " state after " << last;
      if (!piece.state.save) continue;
      const auto kept = static_cast<std::size_t>(piece.position + piece.state.save->tokens - 1);
      EXPECT_EQ(state_of(on, piece.state.save->to), expected.states[kept])
          << "sequence " << piece.sequence << " tokens " << piece.position << "+" << piece.count << " snapshot after " << kept;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Every, RecurrentRowsTest, testing::ValuesIn(subjects()),
                         [](const auto& subject) { return subject.param.name; });

RecurrentCase usual_case(std::int32_t state_count) {
  return {.shape = {.layers = 2,
                    .heads = 4,
                    .head_size = 64,
                    .groups = 2,
                    .state_size = 128,
                    .window = 4,
                    .time_step_min = 0.0F,
                    .time_step_max = std::numeric_limits<float>::infinity(),
                    .state_count = state_count}};
}

TEST_P(RecurrentRowsTest, every_chunk_size_gives_the_same_bits) {
  for (const std::uint64_t seed : {0U, 3U, 8U, 14U}) {
    const RecurrentCase one = seed == 0 ? usual_case(2) : draw_case(seed, 2);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_text(one));
    constexpr std::int32_t tokens = 130;
    const std::vector<Values> sequences{draw_projected(one.shape, tokens, 40 + seed)};
    const std::vector<Standard> want{standard(one, sequences[0])};
    for (const std::int32_t chunk : {2, 7, 31, 33, 64, 130}) {
      Device on = device(one, 2);
      for (std::int32_t position = 0; position < tokens; position += chunk) {
        const StateUse use{.from = position == 0 ? std::nullopt : std::optional(StateId{1}), .to = {1}, .save = {}};
        expect_step(on, one.shape, sequences, want, {{0, position, std::min(chunk, tokens - position), use}});
      }
    }
  }
}

TEST_P(RecurrentRowsTest, a_snapshot_taken_in_a_row_is_the_state_of_a_row_that_ends_there) {
  for (const std::uint64_t seed : {0U, 2U, 5U, 9U}) {
    const RecurrentCase one = seed == 0 ? usual_case(3) : draw_case(seed, 3);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_text(one));
    const std::vector<Values> sequences{draw_projected(one.shape, 70, 60 + seed)};
    const std::vector<Standard> want{standard(one, sequences[0])};
    for (const std::int32_t tokens : {1, 2, 3, 31, 32, 33, 65, 70}) {
      Device on = device(one, 2);
      const StateUse saving{.from = {}, .to = {0}, .save = StateUse::Save{.to = {2}, .tokens = tokens}};
      expect_step(on, one.shape, sequences, want, {{0, 0, 70, saving}});
      if (tokens == 70) continue;
      // Going on from it in a slot of its own, and from it again: a snapshot is only read.
      for (int again = 0; again < 2; ++again) {
        const StateUse resumed{.from = StateId{2}, .to = {1}, .save = {}};
        expect_step(on, one.shape, sequences, want, {{0, tokens, 70 - tokens, resumed}});
      }
    }
  }
}

/// Cuts sequences at random into steps shared with others; every state moves to another slot from time to time, every free slot
/// is NaN, snapshots are taken at random and sequences go on from them in place of their own state.
struct RandomSteps {
  std::mt19937_64 generator;
  std::int32_t state_count;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> done;
  std::vector<std::optional<StateId>> held;

  RandomSteps(std::uint64_t seed, std::int32_t states, std::vector<std::int32_t> all)
      : generator(seed), state_count(states), lengths(std::move(all)), done(lengths.size()), held(lengths.size()) {}

  [[nodiscard]] std::vector<StateId> free_states() {
    std::vector<StateId> free;
    for (std::int32_t state = 0; state < state_count; ++state) {
      if (std::find(held.begin(), held.end(), std::optional(StateId{state})) == held.end()) free.push_back({state});
    }
    std::shuffle(free.begin(), free.end(), generator);
    return free;
  }

  /// Empty when all is done. free: slots that nobody reads in this step.
  std::vector<RecurrentPiece> next(std::vector<StateId>& free) {
    std::vector<RecurrentPiece> pieces;
    while (pieces.empty() && done != lengths) {
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const std::int32_t left = lengths[i] - done[i];
        if (left == 0 || generator() % 4 == 0) continue;
        const auto count =
            generator() % 2 == 0 ? 1 : 1 + static_cast<std::int32_t>(generator() % static_cast<std::uint64_t>(left));
        StateUse use{.from = held[i], .to = {}, .save = {}};
        const bool stays = held[i].has_value() && generator() % 3 != 0;
        use.to = stays ? *held[i] : take(free);
        if (generator() % 3 == 0 && free.size() > lengths.size()) {
          use.save = {.to = take(free), .tokens = 1 + static_cast<std::int32_t>(generator() % static_cast<std::uint64_t>(count))};
        }
        pieces.push_back({i, done[i], count, use});
      }
    }
    std::shuffle(pieces.begin(), pieces.end(), generator);
    return pieces;
  }

  void book(const std::vector<RecurrentPiece>& pieces) {
    for (const RecurrentPiece& piece : pieces) {
      const bool from_snapshot = piece.state.save && generator() % 2 == 0;
      held[piece.sequence] = from_snapshot ? piece.state.save->to : piece.state.to;
      done[piece.sequence] = piece.position + (from_snapshot ? piece.state.save->tokens : piece.count);
    }
  }

 private:
  static StateId take(std::vector<StateId>& free) {
    const StateId state = free.back();
    free.pop_back();
    return state;
  }
};

TEST_P(RecurrentRowsTest, bits_do_not_depend_on_chunks_companions_slots_snapshots_or_threads) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    const std::vector<std::int32_t> lengths{90, 33, 64, 7, 1};
    const RecurrentCase one = draw_case(seed + 30, 16);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_text(one));
    std::vector<Values> sequences;
    std::vector<Standard> want;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      sequences.push_back(draw_projected(one.shape, lengths[i], 1000 * seed + i));
      want.push_back(standard(one, sequences.back()));
    }
    Device on = device(one, seed % 2 == 0 ? 1 : 2);
    RandomSteps steps(seed, 16, lengths);
    for (std::vector<StateId> free = steps.free_states();; free = steps.free_states()) {
      on.ops->poison_states(free);
      const std::vector<RecurrentPiece> pieces = steps.next(free);
      if (pieces.empty()) break;
      expect_step(on, one.shape, sequences, want, pieces);
      steps.book(pieces);
    }
  }
}

TEST_P(RecurrentRowsTest, a_row_among_thirty_two_others_has_the_bits_it_has_alone) {
  const RecurrentCase one = usual_case(33);
  constexpr std::int32_t tokens = 40;
  std::vector<Values> sequences;
  std::vector<Standard> want;
  std::vector<RecurrentPiece> first;
  std::vector<RecurrentPiece> second;
  for (std::int32_t i = 0; i < 33; ++i) {
    const auto index = static_cast<std::size_t>(i);
    sequences.push_back(draw_projected(one.shape, tokens, 2000 + static_cast<std::uint64_t>(i % 3)));
    want.push_back(i < 3 ? standard(one, sequences.back()) : want[index % 3]);
    first.push_back({index, 0, 1 + i, {.from = {}, .to = {32 - i}, .save = {}}});
    second.push_back({index, 1 + i, i == 0 ? tokens - 1 : 1, {.from = StateId{32 - i}, .to = {32 - i}, .save = {}}});
  }
  Device on = device(one, 2);
  expect_step(on, one.shape, sequences, want, first);
  expect_step(on, one.shape, sequences, want, second);
}

TEST_P(RecurrentRowsTest, siblings_share_weights_and_states) {
  const RecurrentCase one = draw_case(4, 3);
  const std::vector<Values> sequences{draw_projected(one.shape, 50, 9)};
  const std::vector<Standard> want{standard(one, sequences[0])};
  Device on = device(one, 2);
  Device sibling{.ops = on.ops->make_sibling().value(), .activation = on.activation, .tolerance = on.tolerance};
  expect_step(on, one.shape, sequences, want, {{0, 0, 20, {.from = {}, .to = {1}, .save = {}}}});
  expect_step(sibling, one.shape, sequences, want, {{0, 20, 13, {.from = StateId{1}, .to = {2}, .save = {}}}});
  expect_step(on, one.shape, sequences, want, {{0, 33, 17, {.from = StateId{2}, .to = {2}, .save = {}}}});
}

TEST_P(RecurrentRowsTest, a_copied_state_goes_on_with_the_same_bits_in_all_layers) {
  const RecurrentCase one = draw_case(6, 3);
  const std::vector<Values> sequences{draw_projected(one.shape, 30, 9)};
  const std::vector<Standard> want{standard(one, sequences[0])};
  Device from = device(one, 1);
  RecurrentCase larger = one;
  larger.shape.state_count = 7;
  Device to = device(larger, 2);
  expect_step(from, one.shape, sequences, want, {{0, 0, 12, {.from = {}, .to = {2}, .save = {}}}});
  recurrent_step(from, one.shape, sequences, {{0, 0, 9, {.from = {}, .to = {2}, .save = {}}}}, RecurrentId{0});
  std::vector<std::byte> first_layer;
  from.ops->read_state(0, {2}, first_layer);
  to.ops->copy_state(*from.ops, {.from = {2}, .to = {5}});
  expect_step(to, one.shape, sequences, want, {{0, 12, 18, {.from = StateId{5}, .to = {5}, .save = {}}}});
  from.ops->copy_state(*from.ops, {.from = {2}, .to = {0}});
  from.ops->copy_state(*from.ops, {.from = {2}, .to = {2}});
  from.ops->poison_states(std::vector<StateId>{{2}});
  expect_step(from, one.shape, sequences, want, {{0, 12, 18, {.from = StateId{0}, .to = {0}, .save = {}}}});
  std::vector<std::byte> copied;
  to.ops->read_state(0, {5}, copied);
  EXPECT_EQ(first_layer, copied);
}

TEST_P(RecurrentRowsTest, planned_steps_have_the_bits_of_eager_ones) {
  const RecurrentCase one = draw_case(12, 2);
  const std::vector<Values> sequences{draw_projected(one.shape, 60, 9)};
  const std::vector<Standard> want{standard(one, sequences[0])};
  Device on = device(one, 2);
  if (on.ops->shape_limits().count_max == 0) return;  // the reference plans nothing
  const policies::StepBuckets buckets{.tokens = {4, 64}, .decode_max = 4};
  ASSERT_EQ(on.ops->use_shapes(on.ops->build_shapes(buckets, {}).value()), nullptr);
  std::int32_t position = 0;
  for (const std::int32_t count : {3, 57}) {
    ASSERT_TRUE(on.ops->begin_step(count, 1).has_value());
    const StateUse use{.from = position == 0 ? std::nullopt : std::optional(StateId{0}), .to = {0}, .save = {}};
    expect_step(on, one.shape, sequences, want, {{0, position, count, use}});
    on.ops->end_step();
    position += count;
  }
}

}  // namespace
}  // namespace rubato::engine
