// SPDX-License-Identifier: Apache-2.0
// States at a host backend's door: what it refuses, and that states copied, kept or shared between lanes go on with the bits of
// an undisturbed run, while those released do not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "engine/cpu/backend.h"
#include "engine/reference/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

using testing::HasSubstr;
using Make = Result<std::unique_ptr<Backend>> (*)(const ModelConfig&, WeightSource&, const BackendOptions&);

struct Case {
  std::string name;
  Make make;
  DataType dtype;
  Architecture architecture;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

ModelConfig config_of(Architecture architecture) {
  SyntheticModel model;
  model.architecture = architecture;
  model.hidden_size = 48;
  model.layers = 2;
  model.vocabulary = 97;
  model.mamba_heads = 4;
  model.mamba_head_size = 24;
  model.mamba_groups = 2;
  model.state_size = 16;
  if (architecture == Architecture::Hybrid) {
    model.attention_every = 2;
    model.heads = 4;
    model.kv_heads = 2;
    model.head_size = 8;
    model.feed_forward = 64;
  }
  return synthetic_model_config(model).value();
}

BackendOptions options_of(DataType dtype) {
  return {.dtype = dtype,
          .block_count = 40,
          .state_count = 6,
          .max_tokens_per_step = 128,
          .max_rows = 8,
          .max_model_len = 128,
          .threads = 2,
          .poison = true};
}

/// One sequence on a backend, wherever a test wants its blocks and states.
class RecurrentBackendTest : public testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] std::unique_ptr<Backend> make() const { return make_with(options_of(GetParam().dtype)); }
  [[nodiscard]] std::unique_ptr<Backend> make_with(const BackendOptions& options) const {
    const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config_, 7, options.dtype);
    std::unique_ptr<Backend> backend = GetParam().make(config_, *weights, options).value();
    backend->capture_logits(true);
    return backend;
  }
  /// Logits after the last of tokens [position, position + count).
  Logits run(Backend& backend, const std::vector<BlockId>& blocks, std::int32_t position, std::int32_t count,
             const StateUse& use) {
    const StepRow row{.position = position,
                      .tokens = std::span(tokens_).subspan(static_cast<std::size_t>(position), static_cast<std::size_t>(count)),
                      .blocks = blocks,
                      .sampling = &greedy_,
                      .state = use};
    EXPECT_TRUE(backend.run(std::span(&row, 1), result_));
    return result_.logits;
  }
  /// After tokens 0..39 and 0..79.
  [[nodiscard]] std::pair<Logits, Logits> undisturbed() {
    const std::unique_ptr<Backend> backend = make();
    const Logits first = run(*backend, there_, 0, 40, {.from = {}, .to = {0}, .save = {}});
    return {first, run(*backend, there_, 40, 40, {.from = StateId{0}, .to = {0}, .save = {}})};
  }
  [[nodiscard]] static std::vector<std::byte> state_of(Backend& backend, StateId state) {
    std::vector<std::byte> bytes;
    for (std::int32_t layer = 0; layer < backend.config().count_of(SublayerKind::Mamba2); ++layer) {
      backend.read_state(layer, state, bytes);
    }
    return bytes;
  }

  const ModelConfig config_ = config_of(GetParam().architecture);
  const std::vector<TokenId> tokens_ = draw_sequences({80}, config_.vocabulary, 40, 1)[0].tokens;
  const std::vector<BlockId> there_{{3}, {1}, {7}, {0}, {20}};
  const std::vector<BlockId> here_{{9}, {30}, {2}, {39}, {5}};
  const SamplingState greedy_{{.temperature = 0.0}, {}, config_.vocabulary};
  StepResult result_;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [model, architecture] :
       {std::pair{"Mamba2", Architecture::Mamba2}, std::pair{"Hybrid", Architecture::Hybrid}}) {
    all.push_back({std::string("CpuF32") + model, make_cpu_backend, DataType::Float32, architecture});
    all.push_back({std::string("CpuBf16") + model, make_cpu_backend, DataType::BFloat16, architecture});
    all.push_back({std::string("Reference") + model, make_reference_backend, DataType::Float32, architecture});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, RecurrentBackendTest, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

TEST_P(RecurrentBackendTest, a_sequence_goes_on_in_another_pool_with_the_bits_of_an_undisturbed_run) {
  const auto [first, second] = undisturbed();
  const std::unique_ptr<Backend> source = make();
  const std::unique_ptr<Backend> target = make();
  EXPECT_TRUE(same_bits(run(*source, there_, 0, 40, {.from = {}, .to = {2}, .save = {}}), first));
  std::vector<BlockCopy> blocks;
  for (std::size_t i = 0; i < 3; ++i) blocks.push_back({.from = there_[i], .to = here_[i]});
  int asked = 0;
  ASSERT_TRUE(target->copy_blocks(*source, {.blocks = blocks, .state = StateCopy{.from = {2}, .to = {5}}},
                                  [&asked] { return ++asked > 0; }));
  EXPECT_EQ(asked, 4);
  EXPECT_EQ(state_of(*target, {5}), state_of(*source, {2}));
  EXPECT_TRUE(same_bits(run(*target, here_, 40, 40, {.from = StateId{5}, .to = {5}, .save = {}}), second));
  EXPECT_TRUE(same_bits(run(*source, there_, 40, 40, {.from = StateId{2}, .to = {2}, .save = {}}), second));
}

TEST_P(RecurrentBackendTest, a_copy_called_off_leaves_the_state_alone) {
  const std::unique_ptr<Backend> source = make();
  const std::unique_ptr<Backend> target = make();
  run(*source, there_, 0, 16, {.from = {}, .to = {0}, .save = {}});
  const std::vector<std::byte> before = state_of(*target, {0});
  int asked = 0;
  const std::vector<BlockCopy> blocks{{.from = there_[0], .to = here_[0]}};
  const Result<void> copied =
      target->copy_blocks(*source, {.blocks = blocks, .state = StateCopy{.from = {0}, .to = {0}}}, [&] { return ++asked < 2; });
  ASSERT_FALSE(copied);
  EXPECT_EQ(copied.error().code, ErrorCode::Cancelled);
  EXPECT_EQ(state_of(*target, {0}), before);
}

TEST_P(RecurrentBackendTest, a_snapshot_and_its_keys_are_what_another_way_of_cutting_leaves) {
  const std::unique_ptr<Backend> one = make();
  const std::unique_ptr<Backend> two = make();
  run(*one, there_, 0, 80, {.from = {}, .to = {0}, .save = StateUse::Save{.to = {3}, .tokens = 48}});
  for (std::int32_t position = 0; position < 48; position += 6) {
    const StateUse use{.from = position == 0 ? std::nullopt : std::optional(StateId{4}), .to = {4}, .save = {}};
    run(*two, here_, position, 6, use);
  }
  EXPECT_EQ(state_of(*one, {3}), state_of(*two, {4}));
  for (std::int32_t layer = 0; layer < config_.count_of(SublayerKind::Attention); ++layer) {
    for (const std::int32_t position : {0, 15, 16, 29, 47}) {
      std::vector<std::byte> a;
      std::vector<std::byte> b;
      one->read_token(layer, there_[static_cast<std::size_t>(position / 16)], position % 16, a);
      two->read_token(layer, here_[static_cast<std::size_t>(position / 16)], position % 16, b);
      EXPECT_EQ(a, b) << position;
      EXPECT_EQ(a.size() % (2U * static_cast<std::size_t>(config_.kv_heads * config_.head_size)), 0U);
      std::vector<std::byte> other;
      one->read_token(layer, there_[4], 15, other);
      EXPECT_NE(a, other);
    }
  }
}

TEST_P(RecurrentBackendTest, a_sibling_goes_on_from_the_same_states) {
  const auto [first, second] = undisturbed();
  const std::unique_ptr<Backend> backend = make();
  const std::unique_ptr<Backend> sibling = backend->make_sibling().value();
  sibling->capture_logits(true);
  EXPECT_TRUE(same_bits(run(*sibling, there_, 0, 40, {.from = {}, .to = {1}, .save = {}}), first));
  EXPECT_TRUE(same_bits(run(*backend, there_, 40, 40, {.from = StateId{1}, .to = {1}, .save = {}}), second));
}

TEST_P(RecurrentBackendTest, a_released_state_is_poisoned_and_a_fresh_row_does_not_read_it) {
  const auto [first, second] = undisturbed();
  const std::unique_ptr<Backend> backend = make();
  run(*backend, there_, 0, 40, {.from = {}, .to = {0}, .save = {}});
  backend->released_states(std::vector<StateId>{{0}});
  run(*backend, there_, 40, 1, {.from = StateId{0}, .to = {1}, .save = {}});
  EXPECT_FALSE(result_.sample_valid.at(0));
  EXPECT_TRUE(same_bits(run(*backend, there_, 0, 40, {.from = {}, .to = {0}, .save = {}}), first));
}

TEST_P(RecurrentBackendTest, states_of_another_shape_are_refused_by_name) {
  const std::unique_ptr<Backend> target = make();
  ModelConfig other = config_;
  other.mamba2->state_size = 17;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(other, 7, GetParam().dtype);
  const std::unique_ptr<Backend> source = GetParam().make(other, *weights, options_of(GetParam().dtype)).value();
  const Result<void> copied =
      target->copy_blocks(*source, {.blocks = {}, .state = StateCopy{.from = {0}, .to = {0}}}, [] { return true; });
  ASSERT_FALSE(copied);
  EXPECT_THAT(copied.error().message, HasSubstr("state_size is 16 here and 17"));
}

TEST(RecurrentLimits, shapes_and_counts_out_of_range_are_named) {
  const ModelConfig config = config_of(Architecture::Hybrid);
  const BackendOptions options = options_of(DataType::Float32);
  ASSERT_TRUE(check_backend_options(config, options));
  const auto refuses = [&](const std::string& text, auto&& change) {
    ModelConfig changed = config;
    BackendOptions changed_options = options;
    change(changed, changed_options);
    const Result<void> checked = check_backend_options(changed, changed_options);
    ASSERT_FALSE(checked) << text;
    EXPECT_EQ(checked.error().code, ErrorCode::InvalidArgument);
    EXPECT_THAT(checked.error().message, HasSubstr(text));
  };
  refuses("state_count 0", [](ModelConfig&, BackendOptions& o) { o.state_count = 0; });
  refuses("mamba2 heads 0", [](ModelConfig& c, BackendOptions&) { c.mamba2->heads = 0; });
  refuses("mamba2 head_size 0", [](ModelConfig& c, BackendOptions&) { c.mamba2->head_size = 0; });
  refuses("mamba2 groups 0", [](ModelConfig& c, BackendOptions&) { c.mamba2->groups = 0; });
  refuses("not a multiple of mamba2 groups 3", [](ModelConfig& c, BackendOptions&) { c.mamba2->groups = 3; });
  refuses("mamba2 state_size 4097", [](ModelConfig& c, BackendOptions&) { c.mamba2->state_size = 4097; });
  refuses("mamba2 window 0", [](ModelConfig& c, BackendOptions&) { c.mamba2->window = 0; });
  refuses("mamba2 window 65", [](ModelConfig& c, BackendOptions&) { c.mamba2->window = 65; });
  refuses("mamba2 norm_groups 5", [](ModelConfig& c, BackendOptions&) { c.mamba2->norm_groups = 5; });
  refuses("time_step_min", [](ModelConfig& c, BackendOptions&) { c.mamba2->time_step_max = -1.0F; });
  refuses("time_step_min", [](ModelConfig& c, BackendOptions&) { c.mamba2->time_step_min = std::nanf(""); });
  refuses("columns, more than", [](ModelConfig& c, BackendOptions&) {
    c.mamba2->heads = 65536;
    c.mamba2->head_size = 4096;
  });
  refuses("mamba2 has shapes if and only if", [](ModelConfig& c, BackendOptions&) { c.mamba2.reset(); });
  refuses("heads 0", [](ModelConfig& c, BackendOptions&) { c.heads = 0; });
  refuses("feed_forward 0", [](ModelConfig& c, BackendOptions&) { c.feed_forward = 0; });
  refuses("sublayers 0", [](ModelConfig& c, BackendOptions&) { c.sublayers.clear(); });
  // Without attention its sizes are nobody's business.
  ModelConfig mamba2 = config_of(Architecture::Mamba2);
  mamba2.heads = 0;
  mamba2.kv_heads = 0;
  mamba2.head_size = 0;
  EXPECT_TRUE(check_backend_options(mamba2, options));
  // And without recurrent layers there are no states.
  BackendOptions stateful = options;
  const Result<void> checked = check_backend_options(named_configs()[0].config, stateful);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().field, "state_count");
}

using RecurrentLimitsDeathTest = RecurrentBackendTest;
INSTANTIATE_TEST_SUITE_P(Backends, RecurrentLimitsDeathTest,
                         testing::Values(Case{"CpuF32", make_cpu_backend, DataType::Float32, Architecture::Hybrid}),
                         [](const auto& one) { return one.param.name; });

TEST_P(RecurrentLimitsDeathTest, rows_that_contradict_themselves_are_our_bug) {
  const BackendOptions options = options_of(DataType::Float32);
  const auto step = [&](std::int32_t position, std::int32_t count, const std::optional<StateUse>& use) {
    const StepRow row{.position = position,
                      .tokens = std::span(tokens_).first(static_cast<std::size_t>(count)),
                      .blocks = there_,
                      .sampling = nullptr,
                      .state = use};
    check_step(config_, options, std::span(&row, 1));
  };
  using Save = StateUse::Save;
  step(0, 4, StateUse{.from = {}, .to = {5}, .save = Save{.to = {0}, .tokens = 4}});  // as it should be
  EXPECT_DEATH(step(0, 4, std::nullopt), "state");
  EXPECT_DEATH(step(0, 4, StateUse{.from = StateId{0}, .to = {0}, .save = {}}), "from");
  EXPECT_DEATH(step(1, 4, StateUse{.from = {}, .to = {0}, .save = {}}), "from");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{6}, .to = {0}, .save = {}}), "from=6");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{0}, .to = {-1}, .save = {}}), "to=-1");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{0}, .to = {1}, .save = Save{.to = {6}, .tokens = 1}}), "save=6");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{0}, .to = {1}, .save = Save{.to = {1}, .tokens = 1}}), "save=1");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{0}, .to = {1}, .save = Save{.to = {0}, .tokens = 1}}), "save=0");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{0}, .to = {1}, .save = Save{.to = {2}, .tokens = 0}}), "tokens=0");
  EXPECT_DEATH(step(1, 4, StateUse{.from = StateId{0}, .to = {1}, .save = Save{.to = {2}, .tokens = 5}}), "tokens=5");
}

TEST_P(RecurrentLimitsDeathTest, a_state_that_one_row_writes_is_no_other_rows) {
  BackendOptions options = options_of(DataType::Float32);
  options.threads = 1;  // a process that dies in a test must have no other thread
  const std::unique_ptr<Backend> backend = make_with(options);
  const auto step = [&](const StateUse& one, const StateUse& other) {
    const std::vector<BlockId> more{{10}, {11}};
    const auto row = [&](std::span<const BlockId> blocks, const StateUse& use) {
      return StepRow{.position = use.from ? 1 : 0,
                     .tokens = std::span(tokens_).first(4),
                     .blocks = blocks,
                     .sampling = nullptr,
                     .state = use};
    };
    const std::vector<StepRow> rows{row(there_, one), row(more, other)};
    EXPECT_TRUE(backend->run(rows, result_));
  };
  using Save = StateUse::Save;
  step({.from = {}, .to = {0}, .save = Save{.to = {1}, .tokens = 2}}, {.from = {}, .to = {2}, .save = {}});
  step({.from = StateId{1}, .to = {3}, .save = {}}, {.from = StateId{1}, .to = {4}, .save = {}});  // a snapshot has many readers
  EXPECT_DEATH(step({.from = {}, .to = {0}, .save = {}}, {.from = {}, .to = {0}, .save = {}}), "state=0");
  EXPECT_DEATH(step({.from = {}, .to = {0}, .save = Save{.to = {1}, .tokens = 2}}, {.from = {}, .to = {1}, .save = {}}),
               "state=1");
  EXPECT_DEATH(step({.from = {}, .to = {0}, .save = {}}, {.from = StateId{0}, .to = {1}, .save = {}}), "state=0 read by row 1");
}

}  // namespace
}  // namespace rubato::engine
