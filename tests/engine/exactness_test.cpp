// SPDX-License-Identifier: Apache-2.0
// The exactness contract on the real CPU backend: the logits of a token are the same bits for any budget, a budget that changes
// within a prompt, alone or among many, one or two threads, after a preemption, and in whatever step shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "engine/cpu/backend.h"
#include "engine/lane.h"
#include "tests/support/lane_client.h"

namespace rubato::engine {
namespace {

/// Lets a backend through and notes which sequence each row of captured logits belongs to, by its prompt's first token and
/// position.
class LogitsRecorder final : public Backend {
 public:
  explicit LogitsRecorder(Backend& inner) : inner_(inner) { inner_.capture_logits(true); }

  [[nodiscard]] Result<void> run(std::span<const StepRow> rows, StepResult& result) override {
    auto outcome = inner_.run(rows, result);
    const auto vocabulary = static_cast<std::size_t>(inner_.config().vocabulary);
    std::size_t sampled = 0;
    for (const StepRow& row : rows) {
      if (row.sampling == nullptr) continue;
      const float* begin = result.logits.data() + vocabulary * sampled++;
      const std::int64_t position = row.position + static_cast<std::int64_t>(row.tokens.size());
      // Only a preempted sequence computes several tokens at once after it has generated some.
      if (row.sampling->generated_count() > 0 && row.tokens.size() > 1) ++recomputed[row.sampling->parameters().seed];
      logits[{row.sampling->parameters().seed, position}].assign(begin, begin + vocabulary);
    }
    ++steps_by_bucket[result.bucket];
    return outcome;
  }
  void capture_logits(bool on) override { inner_.capture_logits(on); }
  void released(std::span<const BlockId> blocks) override { inner_.released(blocks); }
  [[nodiscard]] const ModelConfig& config() const override { return inner_.config(); }
  [[nodiscard]] std::string description() const override { return inner_.description(); }

  std::map<std::optional<std::int32_t>, int> steps_by_bucket;
  std::map<std::uint64_t, int> recomputed;                                      // by seed: resumptions after a preemption
  std::map<std::pair<std::uint64_t, std::int64_t>, std::vector<float>> logits;  // (seed, position of the sampled token)

 private:
  Backend& inner_;
};

struct ModelCase {
  const char* name;
  DataType dtype;
  bool attention_bias;
  bool qk_norm;
  std::int32_t head_size;
};

ModelConfig config_of(const ModelCase& model) {
  ModelConfig config = *synthetic_model_config({.architecture = Architecture::Llama,
                                                .hidden_size = 48,
                                                .layers = 2,
                                                .heads = 4,
                                                .kv_heads = 2,
                                                .head_size = model.head_size,
                                                .feed_forward = 80,
                                                .vocabulary = 131,
                                                .tied_embeddings = model.qk_norm,
                                                .seed = 1});
  config.attention_bias = model.attention_bias;
  config.qk_norm = model.qk_norm;
  if (model.attention_bias)
    config.rope = {.theta = 1e4,
                   .scaling = RopeScaling::Llama3,
                   .factor = 8,
                   .low_frequency_factor = 1,
                   .high_frequency_factor = 4,
                   .original_max_position = 64};
  return config;
}

struct RunOptions {
  std::vector<std::int32_t> budgets{512};  // one after another, step by step
  std::int32_t companions = 0;
  std::int32_t threads = 1;
  std::int32_t block_count = 400;
  std::int32_t companion_new_tokens = 20;
  std::int32_t max_num_seqs = 0;                // 0: as many as fit the smallest budget
  std::vector<policies::StepBuckets> shapes{};  // one after another, and eagerly between the last and the first
  std::size_t shape_steps = 1;                  // steps until the next
};

using LogitsByPosition = std::map<std::int64_t, std::vector<float>>;

constexpr std::uint64_t subject_seed = 1000;

std::vector<TokenId> random_prompt(std::mt19937& random, std::int32_t length) {
  std::vector<TokenId> prompt(static_cast<std::size_t>(length));
  for (TokenId& token : prompt) token = static_cast<TokenId>(random() % 131);
  return prompt;
}

/// Logits of the subject (150 prompt tokens, 30 new ones) in a world of the given options.
LogitsByPosition subject_logits(const ModelCase& model, const RunOptions& options, int* resumptions = nullptr,
                                std::map<std::optional<std::int32_t>, int>* steps_by_bucket = nullptr) {
  const ModelConfig config = config_of(model);
  const auto weights = make_synthetic_weights(config, 7, model.dtype);
  auto backend = make_cpu_backend(config, *weights,
                                  {.dtype = model.dtype,
                                   .block_count = options.block_count,
                                   .max_tokens_per_step = 512,
                                   .max_rows = 64,
                                   .max_model_len = 256,
                                   .threads = options.threads,
                                   .poison = true});
  EXPECT_TRUE(backend) << backend.error().message;
  if (!backend) return {};
  LogitsRecorder recorder(**backend);
  const auto knobs = [&](std::int32_t budget) {
    KnobValues values;
    values.max_num_batched_tokens = budget;
    values.max_num_seqs = options.max_num_seqs > 0 ? options.max_num_seqs : std::min(40, budget);
    values.priority_policy = PriorityPolicy::DecodeFirst;
    return values;
  };
  Lane lane(recorder, {.limits = {.max_model_len = 256,
                                  .max_num_seqs = 40,
                                  .max_waiting = 64,
                                  .block_count = options.block_count,
                                  .token_tile = 1,
                                  .growth_reserve_tokens = 0},
                       .initial = {.number = 1, .knobs = knobs(options.budgets[0])}});
  test::LaneClient client(lane);
  std::mt19937 random(99);
  const std::vector<TokenId> prompt = random_prompt(random, 150);
  const auto sampling = [](std::uint64_t seed, std::int32_t new_tokens) {
    SamplingParameters parameters{.temperature = 0.8, .max_new_tokens = new_tokens, .ignore_eos = true};
    parameters.seed = seed;
    return parameters;
  };
  for (std::int32_t i = 0; i < options.companions / 2; ++i)
    client.must_add(random_prompt(random, 1 + static_cast<std::int32_t>(random() % 60)),
                    sampling(i, options.companion_new_tokens));
  const SequenceId subject = client.must_add(prompt, sampling(subject_seed, 30));
  for (std::int32_t i = options.companions / 2; i < options.companions; ++i)
    client.must_add(random_prompt(random, 1 + static_cast<std::int32_t>(random() % 60)),
                    sampling(i, options.companion_new_tokens));
  std::vector<std::unique_ptr<StepShapes>> sets;
  for (const policies::StepBuckets& buckets : options.shapes) {
    auto set = (*backend)->build_shapes(buckets, {});
    EXPECT_TRUE(set) << set.error().message;
    sets.push_back(std::move(*set));
  }
  std::size_t next_set = 0;
  const auto change_shapes = [&] {  // each set goes in, and lies in the next one's place when it comes out again
    if (sets.empty()) return;
    sets[next_set] = (*backend)->use_shapes(std::move(sets[next_set]));
    next_set = (next_set + 1) % sets.size();
  };
  change_shapes();
  for (std::size_t step = 1; client.step(); ++step) {
    if (step % options.shape_steps == 0) change_shapes();
    if (options.budgets.size() > 1)
      lane.apply({.number = step + 1, .knobs = knobs(options.budgets[step % options.budgets.size()])});
    if (client.stream(subject).finish) break;
  }
  EXPECT_EQ(client.stream(subject).finish, FinishReason::Length);
  if (steps_by_bucket != nullptr) {
    for (const auto& [bucket, count] : recorder.steps_by_bucket) (*steps_by_bucket)[bucket] += count;
  }
  if (resumptions != nullptr) *resumptions += recorder.recomputed[subject_seed];
  LogitsByPosition found;
  for (const auto& [key, logits] : recorder.logits) {
    if (key.first == subject_seed) found[key.second] = logits;
  }
  EXPECT_EQ(found.size(), 30U);
  return found;
}

void expect_same_bits(const LogitsByPosition& expected, const LogitsByPosition& found, const std::string& what) {
  ASSERT_EQ(expected.size(), found.size()) << what;
  for (const auto& [position, logits] : expected) {
    const auto at = found.find(position);
    ASSERT_NE(at, found.end()) << what << " position " << position;
    ASSERT_EQ(logits.size(), at->second.size());
    EXPECT_EQ(std::memcmp(logits.data(), at->second.data(), logits.size() * sizeof(float)), 0)
        << what << " position " << position;
  }
}

class Exactness : public testing::TestWithParam<ModelCase> {
 protected:
  [[nodiscard]] const LogitsByPosition& expected() {
    if (expected_.empty()) expected_ = subject_logits(GetParam(), {});
    return expected_;
  }

 private:
  LogitsByPosition expected_;
};

TEST_P(Exactness, any_budget_gives_the_same_bits) {
  for (const std::int32_t budget : {1, 2, 7, 15, 16, 17, 64, 100, 149, 150}) {
    expect_same_bits(expected(), subject_logits(GetParam(), {.budgets = {budget}}), "budget " + std::to_string(budget));
  }
}

TEST_P(Exactness, a_budget_that_changes_within_the_prompt_gives_the_same_bits) {
  expect_same_bits(expected(), subject_logits(GetParam(), {.budgets = {7, 64, 1, 33, 16}}), "changing");
  expect_same_bits(expected(), subject_logits(GetParam(), {.budgets = {100, 1, 3}}), "changing");
}

TEST_P(Exactness, company_and_threads_give_the_same_bits) {
  for (const std::int32_t threads : {1, 2}) {
    for (const std::int32_t budget : {64, 100, 512}) {
      const std::string what = "budget " + std::to_string(budget) + ", threads " + std::to_string(threads);
      expect_same_bits(expected(), subject_logits(GetParam(), {.budgets = {budget}, .companions = 32, .threads = threads}), what);
    }
    expect_same_bits(expected(), subject_logits(GetParam(), {.budgets = {7, 100}, .threads = threads}), "alone, changing");
  }
}

TEST_P(Exactness, preemption_gives_the_same_bits) {
  int resumptions = 0;
  for (const std::int32_t block_count : {18, 20, 22, 24, 26}) {
    const RunOptions options{
        .budgets = {48}, .companions = 8, .block_count = block_count, .companion_new_tokens = 60, .max_num_seqs = 8};
    expect_same_bits(expected(), subject_logits(GetParam(), options, &resumptions), "pool of " + std::to_string(block_count));
  }
  EXPECT_GT(resumptions, 0);  // else no pool was short enough to test anything
}

TEST_P(Exactness, any_shapes_and_changes_between_them_give_the_same_bits) {
  const policies::StepBuckets coarse{.tokens = {40, 512}, .decode_max = 40};
  const policies::StepBuckets fine{.tokens = {1, 2, 3, 5, 8, 16, 24, 33, 48, 64, 80, 100, 112, 128, 150}, .decode_max = 24};
  const policies::StepBuckets odd{.tokens = {7, 31, 63, 97, 149, 201}, .decode_max = 31};
  std::map<std::optional<std::int32_t>, int> steps;
  for (const std::int32_t threads : {1, 2}) {
    for (const auto& shapes : std::vector<std::vector<policies::StepBuckets>>{{coarse}, {fine}, {odd}, {coarse, fine, odd}}) {
      for (const std::vector<std::int32_t>& budgets : std::vector<std::vector<std::int32_t>>{{150}, {7, 64, 1, 33, 16}, {100}}) {
        const RunOptions options{.budgets = budgets, .threads = threads, .shapes = shapes, .shape_steps = 3};
        expect_same_bits(expected(), subject_logits(GetParam(), options, nullptr, &steps), "alone");
      }
      const RunOptions options{.budgets = {64, 201, 100}, .companions = 32, .threads = threads, .shapes = shapes};
      expect_same_bits(expected(), subject_logits(GetParam(), options, nullptr, &steps), "among 32");
    }
  }
  EXPECT_GT(steps[std::nullopt], 20);  // else nothing ran eagerly
  EXPECT_GT(steps.size(), 12U);        // nor in many buckets
}

INSTANTIATE_TEST_SUITE_P(Models, Exactness,
                         testing::Values(ModelCase{"llama_f32", DataType::Float32, false, false, 12},
                                         ModelCase{"llama_bf16", DataType::BFloat16, false, false, 12},
                                         ModelCase{"qwen2_bias_f32", DataType::Float32, true, false, 16},
                                         ModelCase{"qwen2_bias_bf16", DataType::BFloat16, true, false, 16},
                                         ModelCase{"qwen3_norm_f32", DataType::Float32, false, true, 32},
                                         ModelCase{"qwen3_norm_bf16", DataType::BFloat16, false, true, 32}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace rubato::engine
