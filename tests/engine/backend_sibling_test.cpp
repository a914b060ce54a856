// SPDX-License-Identifier: Apache-2.0
// Two backends on one device: whichever runs a row, alone or beside the other, whatever their shares, it gives the bits of a
// lone backend; and what one wrote the other goes on with.
#include <gtest/gtest.h>

#include <atomic>
#include <ostream>
#include <thread>

#include "engine/cpu/backend.h"
#include "engine/reference/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

using Make = Result<std::unique_ptr<Backend>> (*)(const ModelConfig&, WeightSource&, const BackendOptions&);

struct Case {
  std::string name;
  Make make;
  DataType dtype;
  std::int32_t threads;
  std::size_t model;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

constexpr std::int32_t block_count = 90;
const std::vector<std::int32_t> lengths{130, 70, 33, 60, 5, 90, 17, 40, 1, 64};

std::vector<Case> cases() {
  return {{"cpu_f32_one_thread", make_cpu_backend, DataType::Float32, 1, 0},
          {"cpu_f32_qk_norm", make_cpu_backend, DataType::Float32, 2, 4},
          {"cpu_bf16", make_cpu_backend, DataType::BFloat16, 2, 0},
          {"cpu_bf16_biases_three_threads", make_cpu_backend, DataType::BFloat16, 3, 3},
          {"reference_f32", make_reference_backend, DataType::Float32, 1, 0},
          {"reference_bf16", make_reference_backend, DataType::BFloat16, 1, 4}};
}

using LogitsByPosition = std::map<std::int32_t, Logits>;

class SiblingTest : public testing::TestWithParam<Case> {
 protected:
  SiblingTest() : want_(lengths.size()) {
    Runner alone(make(1), sequences_);
    for (std::size_t i = 0; i < lengths.size(); ++i) want_[i] = alone.chunked(i, 1);
  }

  [[nodiscard]] const ModelConfig& config() const { return config_; }
  [[nodiscard]] std::unique_ptr<Backend> make(std::int32_t threads) const {
    const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config(), 7, GetParam().dtype);
    return GetParam()
        .make(config(), *weights,
              {.dtype = GetParam().dtype,
               .block_count = block_count,
               .max_tokens_per_step = 400,
               .max_rows = 16,
               .max_model_len = 256,
               .threads = threads,
               .poison = true})
        .value();
  }

  /// Takes the sequences from where they are to where ends says, in random mixes of decode rows and chunks; counts logits that
  /// are not the lone backend's.
  int walk(Runner& runner, const std::vector<std::size_t>& mine, std::vector<std::int32_t>& done,
           const std::vector<std::int32_t>& ends, std::uint64_t seed) const {
    std::mt19937_64 generator(seed);
    const auto vocabulary = static_cast<std::size_t>(config().vocabulary);
    int wrong = 0;
    const auto unfinished = [&](std::size_t i) { return done[i] < ends[i]; };
    while (std::any_of(mine.begin(), mine.end(), unfinished)) {
      std::vector<Part> parts;
      for (const std::size_t i : mine) {
        if (!unfinished(i) || generator() % 4 == 0) continue;
        const auto left = static_cast<std::uint64_t>(ends[i] - done[i]);
        parts.push_back({i, done[i], generator() % 2 == 0 ? 1 : static_cast<std::int32_t>(1 + generator() % left)});
      }
      if (parts.empty()) continue;
      const Logits& logits = runner.step(parts);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const Part& part = parts[i];
        done[part.sequence] += part.count;
        if (!same_bits(std::span(logits).subspan(i * vocabulary, vocabulary),
                       want_[part.sequence].at(part.position + part.count - 1)))
          ++wrong;
      }
    }
    return wrong;
  }

  const ModelConfig config_ = named_configs()[GetParam().model].config;
  const std::vector<Sequence> sequences_ = draw_sequences(lengths, config_.vocabulary, block_count, 1);
  std::vector<LogitsByPosition> want_;
};

INSTANTIATE_TEST_SUITE_P(Backends, SiblingTest, testing::ValuesIn(cases()), [](const auto& one) { return one.param.name; });

TEST_P(SiblingTest, a_sequence_that_changes_backends_at_every_step_keeps_its_bits) {
  std::unique_ptr<Backend> backend = make(GetParam().threads);
  Runner second(backend->make_sibling().value(), sequences_);
  Runner first(std::move(backend), sequences_);
  std::mt19937_64 generator(3);
  std::vector<std::int32_t> done(lengths.size());
  const std::vector<std::size_t> all{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  for (std::uint64_t seed = 0; done != lengths; ++seed) {
    std::vector<std::int32_t> ends = done;
    for (std::size_t i = 0; i < ends.size(); ++i)
      ends[i] = std::min(lengths[i], ends[i] + static_cast<std::int32_t>(generator() % 40));
    EXPECT_EQ(walk(seed % 2 == 0 ? first : second, all, done, ends, seed), 0) << "seed " << seed;
  }
}

TEST_P(SiblingTest, both_at_once_keep_their_bits_while_shares_change_and_sequences_change_hands) {
  std::unique_ptr<Backend> backend = make(GetParam().threads);
  Runner second(backend->make_sibling().value(), sequences_);
  Runner first(std::move(backend), sequences_);
  const std::vector<std::size_t> evens{0, 2, 4, 6, 8};
  const std::vector<std::size_t> odds{1, 3, 5, 7, 9};
  for (std::uint64_t round = 0; round < 4; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::vector<std::int32_t> half = lengths;
    for (std::int32_t& length : half) length /= 2;
    std::vector<std::int32_t> done(lengths.size());
    for (const bool swapped : {false, true}) {
      const std::vector<std::int32_t>& ends = swapped ? lengths : half;
      std::vector<std::int32_t> done_second = done;
      int wrong_first = 0;
      int wrong_second = 0;
      std::atomic<int> running{2};
      std::thread one([&] {
        wrong_first = walk(first, swapped ? odds : evens, done, ends, round * 2);
        --running;
      });
      std::thread two([&] {
        wrong_second = walk(second, swapped ? evens : odds, done_second, ends, round * 2 + 1);
        --running;
      });
      std::mt19937_64 generator(round);
      while (running > 0) {
        Runner& changed = generator() % 2 == 0 ? first : second;
        changed.backend().use_share(std::array{10, 50, 90}[generator() % 3]);
        std::this_thread::yield();
      }
      one.join();
      two.join();
      EXPECT_EQ(wrong_first, 0);
      EXPECT_EQ(wrong_second, 0);
      for (const std::size_t i : swapped ? evens : odds) done[i] = done_second[i];
      EXPECT_EQ(done, ends);
    }
    for (const Sequence& sequence : sequences_) (round % 2 == 0 ? first : second).backend().released(sequence.blocks);
  }
}

TEST_P(SiblingTest, either_may_go_first_and_the_other_goes_on) {
  const std::vector<std::size_t> all{0, 1, 2};
  for (const bool first_goes : {true, false}) {
    std::unique_ptr<Backend> backend = make(GetParam().threads);
    std::unique_ptr<Backend> sibling = backend->make_sibling().value();
    std::vector<std::int32_t> done(lengths.size());
    {
      Runner goes(std::move(first_goes ? backend : sibling), sequences_);
      EXPECT_EQ(walk(goes, all, done, std::vector<std::int32_t>(lengths.size(), 20), 1), 0);
    }
    Runner stays(std::move(first_goes ? sibling : backend), sequences_);
    EXPECT_EQ(walk(stays, all, done, lengths, 2), 0);
  }
}

TEST_P(SiblingTest, there_is_one_sibling_at_most) {
  const std::unique_ptr<Backend> backend = make(1);
  const std::unique_ptr<Backend> sibling = backend->make_sibling().value();
  for (Backend* each : {backend.get(), sibling.get()}) {
    const Result<std::unique_ptr<Backend>> third = each->make_sibling();
    ASSERT_FALSE(third);
    EXPECT_EQ(third.error().code, ErrorCode::InvalidArgument);
  }
}

TEST_P(SiblingTest, what_either_releases_is_poisoned_for_both) {
  std::unique_ptr<Backend> backend = make(GetParam().threads);
  Runner second(backend->make_sibling().value(), sequences_);
  Runner first(std::move(backend), sequences_);
  for (const bool by_first : {true, false}) {
    first.step({{1, 0, 20}});
    (by_first ? first : second).backend().released(sequences_[1].blocks);
    for (Runner* each : {&first, &second}) {
      each->step({{1, 20, 1}});  // reads positions that are dead
      EXPECT_FALSE(each->result().sample_valid.at(0));
    }
  }
}

std::unique_ptr<Backend> make_cpu(std::int32_t threads) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 7, DataType::Float32);
  return make_cpu_backend(
             config, *weights,
             {.block_count = block_count, .max_tokens_per_step = 256, .max_rows = 8, .max_model_len = 256, .threads = threads})
      .value();
}

TEST(CpuSibling, shares_are_the_siblings_complement_and_whole_without_one) {
  const std::unique_ptr<Backend> backend = make_cpu(2);
  backend->use_share(30);
  EXPECT_EQ(backend->share().given_percent, 100);
  const std::unique_ptr<Backend> sibling = backend->make_sibling().value();
  EXPECT_EQ(backend->share().asked_percent, 50);
  sibling->use_share(30);
  EXPECT_EQ(sibling->share().asked_percent, 30);
  EXPECT_EQ(sibling->share().given_percent, 30);
  EXPECT_EQ(backend->share().asked_percent, 70);
  EXPECT_EQ(sibling->description(), backend->description());
}

TEST(CpuSibling, shapes_of_one_are_not_the_others) {
  std::unique_ptr<Backend> backend = make_cpu(2);
  std::unique_ptr<Backend> sibling = backend->make_sibling().value();
  const std::vector<Sequence> sequences = draw_sequences({60}, backend->config().vocabulary, block_count, 1);
  Runner first(std::move(backend), sequences);
  Runner second(std::move(sibling), sequences);
  const auto build = [](Runner& runner, std::int32_t tokens) {
    return runner.backend().build_shapes({.tokens = {tokens}}, std::stop_token()).value();
  };
  EXPECT_EQ(first.backend().use_shapes(build(first, 32)), nullptr);
  first.step({{0, 0, 30}});
  second.step({{0, 30, 30}});
  EXPECT_EQ(first.result().bucket, std::optional(32));
  EXPECT_EQ(second.result().bucket, std::nullopt);
  EXPECT_EQ(second.backend().use_shapes(build(second, 64)), nullptr);
  first.step({{0, 0, 30}});
  second.step({{0, 0, 60}});
  EXPECT_EQ(first.result().bucket, std::optional(32));
  EXPECT_EQ(second.result().bucket, std::optional(64));
  EXPECT_NE(first.backend().use_shapes(nullptr), nullptr);
  second.step({{0, 0, 60}});
  EXPECT_EQ(second.result().bucket, std::optional(64));
}

}  // namespace
}  // namespace rubato::engine
