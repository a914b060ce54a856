// SPDX-License-Identifier: Apache-2.0
// Whole models of every family with recurrent layers, from a folder of safetensors to logits, against the same model in double
// precision (model_in_double.h), put together here from each family's own description.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/tensors.h"
#include "engine/model/weights.h"
#include "engine/reference/backend.h"
#include "manifests/settings.h"
#include "tests/engine/model_in_double.h"
#include "tests/support/temporary_folder.h"

namespace rubato::engine {
namespace {

using namespace test;  // NOLINT: the pieces of a model
using nlohmann::json;

constexpr std::int32_t length = 40;  // tokens: beyond two blocks

/// Weights that make every part of a layer matter.
std::vector<float> draw(const TensorSpec& tensor, std::uint64_t seed) {
  std::mt19937_64 random(seed + std::hash<std::string>()(tensor.name));
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  std::size_t count = 1;
  for (const std::int64_t size : tensor.shape) count *= static_cast<std::size_t>(size);
  float centre = 0;
  float scale = 0.3F;
  if (tensor.shape.size() > 1) scale = std::sqrt(3.0F / static_cast<float>(tensor.shape.back()));
  if (tensor.name.find("norm") != std::string::npos) centre = 1, scale = 0.5F;
  if (tensor.name.ends_with("A_log")) centre = 0.5F, scale = 0.5F;
  if (tensor.name.ends_with("dt_bias")) centre = -1, scale = 1;
  if (tensor.name.ends_with(".D")) scale = 1;
  std::vector<float> values(count);
  for (float& value : values) value = centre + scale * uniform(random);
  return values;
}

/// A folder as a person would have it, and the same weights in double.
class Folder {
 public:
  /// change: what no published family has, but the decoder can do.
  Folder(const json& config, std::uint64_t seed, void (*change)(ModelConfig&) = nullptr) {
    folder_.write("config.json", config.dump());
    Result<ModelConfig> read = read_model_config(folder_.path());
    EXPECT_TRUE(read) << read.error().message;
    if (!read) return;
    config_ = *read;
    if (change != nullptr) change(config_);
    json header = json::object();
    std::string data;
    for (const TensorSpec& tensor : model_tensors(config_)) {
      const std::vector<float> values = draw(tensor, seed);
      const std::size_t begin = data.size();
      data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
      header[tensor.name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
      tensors_[tensor.name] = std::vector<double>(values.begin(), values.end());
    }
    const std::string text = header.dump();
    const std::uint64_t size = text.size();
    folder_.write("model.safetensors", std::string(reinterpret_cast<const char*>(&size), sizeof size) + text + data);
  }

  [[nodiscard]] Scope scope(const std::string& prefix) const { return {tensors_, prefix}; }

  /// Row by row: logits of every token, in chunks of the sizes that come round and round.
  [[nodiscard]] Rows logits(const std::vector<TokenId>& tokens, const std::vector<std::int32_t>& chunks) const {
    auto weights = open_safetensors(folder_.path());
    EXPECT_TRUE(weights) << weights.error().message;
    const auto checked = check_weights(config_, **weights);
    EXPECT_TRUE(checked) << checked.error().message;
    const BackendOptions options{.block_count = 8,
                                 .state_count = config_.mamba2 ? 3 : 0,
                                 .max_tokens_per_step = 64,
                                 .max_rows = 4,
                                 .max_model_len = 64,
                                 .poison = true};
    auto backend = make_reference_backend(config_, **weights, options);
    EXPECT_TRUE(backend) << backend.error().message;
    (*backend)->capture_logits(true);
    const SamplingState sampling({.temperature = 0.0}, {}, config_.vocabulary);
    const std::vector<BlockId> blocks{{5}, {0}, {3}};
    const std::vector<BlockId> other_blocks{{1}};
    Rows all(tokens.size());
    std::int32_t position = 0;
    for (std::size_t i = 0; position < length; ++i) {
      const std::int32_t count = std::min(chunks[i % chunks.size()], length - position);
      StepRow row{.position = position,
                  .tokens = std::span(tokens).subspan(static_cast<std::size_t>(position), static_cast<std::size_t>(count)),
                  .blocks = blocks};
      if (i % 3 != 2) row.sampling = &sampling;  // every third step is a chunk whose logits nobody wants
      // Another sequence beside it that starts over and over again.
      StepRow other{.position = 0, .tokens = std::span(tokens).first(2), .blocks = other_blocks};
      if (i % 2 == 0) other.sampling = &sampling;
      if (config_.mamba2) {
        row.state = StateUse{.from = position == 0 ? std::nullopt : std::optional(StateId{1}), .to = StateId{1}, .save = {}};
        other.state = StateUse{.from = {}, .to = StateId{2}, .save = {}};
      }
      StepResult result;
      const std::vector<StepRow> rows{row, other};
      const Result<void> done = (*backend)->run(i % 4 == 3 ? std::span(rows).first(1) : std::span(rows), result);
      EXPECT_TRUE(done);
      position += count;
      if (row.sampling != nullptr) {
        const auto vocabulary = static_cast<std::ptrdiff_t>(config_.vocabulary);
        all[static_cast<std::size_t>(position) - 1] = Row(result.logits.begin(), result.logits.begin() + vocabulary);
      }
    }
    return all;
  }

 private:
  rubato::test::TemporaryFolder folder_;
  ModelConfig config_;
  Tensors tensors_;
};

std::vector<TokenId> draw_tokens(std::int32_t vocabulary, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens(static_cast<std::size_t>(length));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % static_cast<std::uint64_t>(vocabulary));
  return tokens;
}

Rows embedded(const std::vector<double>& table, const std::vector<TokenId>& tokens, std::size_t hidden, double multiplier = 1) {
  Rows x;
  for (const TokenId token : tokens) {
    x.push_back(part(table, static_cast<std::size_t>(token) * hidden, hidden));
    for (double& value : x.back()) value *= multiplier;
  }
  return x;
}

Rows normed(const Rows& x, const std::vector<double>& weight, double epsilon) {
  Rows y;
  for (const Row& row : x) y.push_back(normalised(row, weight, epsilon, row.size()));
  return y;
}

void add(Rows& x, const Rows& delta, double multiplier = 1) {
  for (std::size_t t = 0; t < x.size(); ++t) {
    for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += multiplier * delta[t][i];
  }
}

template <class Function>
Rows each(const Rows& x, Function function) {
  Rows y;
  for (const Row& row : x) y.push_back(function(row));
  return y;
}

/// The engine's logits in several cuts against those in double.
void expect_equal(const Folder& folder, const std::vector<TokenId>& tokens, const Rows& expected, double tolerance = 1e-4) {
  for (const std::vector<std::int32_t>& chunks : {std::vector<std::int32_t>{length}, {1}, {7, 1, 1, 16, 2}, {17}}) {
    const Rows found = folder.logits(tokens, chunks);
    for (std::size_t t = 0; t < found.size(); ++t) {
      if (found[t].empty()) continue;
      double scale = 0;
      double worst = 0;
      ASSERT_EQ(found[t].size(), expected[t].size());
      for (std::size_t i = 0; i < found[t].size(); ++i) {
        scale = std::max(scale, std::abs(expected[t][i]));
        worst = std::max(worst, std::isfinite(found[t][i]) ? std::abs(found[t][i] - expected[t][i]) : HUGE_VAL);
      }
      ASSERT_GT(scale, 0.1);
      ASSERT_LE(worst, tolerance * scale) << "token " << t << " chunk " << chunks.front();
    }
  }
}

json small_mamba2() {
  return {{"architectures", {"Mamba2ForCausalLM"}},
          {"hidden_size", 32},
          {"num_hidden_layers", 3},
          {"vocab_size", 61},
          {"num_heads", 8},
          {"head_dim", 8},
          {"n_groups", 2},
          {"state_size", 12},
          {"conv_kernel", 3},
          {"use_conv_bias", false},
          {"use_bias", true},
          {"layer_norm_epsilon", 1e-3},
          {"time_step_limit", {0.1, 0.8}},
          {"tie_word_embeddings", true}};
}

Rows mamba2_in_double(const Folder& folder, const std::vector<TokenId>& tokens, const RecurrentForm& form) {
  const Scope backbone = folder.scope("backbone.");
  Rows x = embedded(backbone["embeddings.weight"], tokens, 32);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string at = "backbone.layers." + std::to_string(layer) + ".";
    add(x, recur(normed(x, folder.scope(at)["norm.weight"], 1e-3), form, folder.scope(at + "mixer.")));
  }
  return each(normed(x, backbone["norm_f.weight"], 1e-3),
              [&](const Row& row) { return product(backbone["embeddings.weight"], row); });
}

constexpr RecurrentForm mamba2_form{
    .heads = 8, .head_size = 8, .groups = 2, .state_size = 12, .window = 3, .limit_low = 0.1, .limit_high = 0.8, .epsilon = 1e-3};

TEST(DecoderFamilies, mamba2_with_groups_biases_limits_and_no_convolution_bias) {
  const Folder folder(small_mamba2(), 1);
  const auto tokens = draw_tokens(61, 1);
  expect_equal(folder, tokens, mamba2_in_double(folder, tokens, mamba2_form));
}

TEST(DecoderFamilies, mamba2_with_the_norm_before_the_gate) {
  const Folder folder(small_mamba2(), 2, [](ModelConfig& config) { config.mamba2->norm_before_gate = true; });
  RecurrentForm form = mamba2_form;
  form.gating = Gating::NormThenGate;
  const auto tokens = draw_tokens(61, 2);
  expect_equal(folder, tokens, mamba2_in_double(folder, tokens, form));
}

TEST(DecoderFamilies, mamba2_with_the_gate_alone) {
  const Folder folder(small_mamba2(), 3, [](ModelConfig& config) { config.mamba2->norm = false; });
  RecurrentForm form = mamba2_form;
  form.gating = Gating::GateAlone;
  const auto tokens = draw_tokens(61, 3);
  expect_equal(folder, tokens, mamba2_in_double(folder, tokens, form));
}

/// Heads of 8 of which the first 4 elements are turned.
void expect_bamba(void (*change)(ModelConfig&)) {
  const Folder folder({{"architectures", {"BambaForCausalLM"}},
                       {"hidden_size", 32},
                       {"num_hidden_layers", 4},
                       {"vocab_size", 53},
                       {"num_attention_heads", 4},
                       {"num_key_value_heads", 2},
                       {"intermediate_size", 44},
                       {"attn_layer_indices", {1, 3}},
                       {"rope_theta", 100.0},
                       {"mamba_n_heads", 4},
                       {"mamba_d_head", "auto"},
                       {"mamba_d_state", 20},
                       {"rms_norm_eps", 1e-5}},
                      4, change);
  const auto tokens = draw_tokens(53, 4);
  const AttentionForm attention{
      .heads = 4, .kv_heads = 2, .head_size = 8, .turned = 4, .scale = 1 / std::sqrt(8.0), .theta = 100.0};
  const RecurrentForm recurrent{.heads = 4, .head_size = 16, .groups = 1, .state_size = 20, .window = 4};
  Rows x = embedded(folder.scope("")["model.embed_tokens.weight"], tokens, 32);
  for (int layer = 0; layer < 4; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    const Scope scope = folder.scope(at);
    const Rows mixed = normed(x, scope["input_layernorm.weight"], 1e-5);
    add(x, layer % 2 == 1 ? attend(mixed, attention, folder.scope(at + "self_attn."))
                          : recur(mixed, recurrent, folder.scope(at + "mamba.")));
    add(x, each(normed(x, scope["pre_ff_layernorm.weight"], 1e-5), [&](const Row& row) {
          return scope.linear("feed_forward.down_proj", gated_product(scope.linear("feed_forward.gate_proj", row),
                                                                      scope.linear("feed_forward.up_proj", row)));
        }));
  }
  const Rows expected = each(normed(x, folder.scope("")["model.final_layernorm.weight"], 1e-5),
                             [&](const Row& row) { return folder.scope("").linear("lm_head", row); });
  expect_equal(folder, tokens, expected);
}

TEST(DecoderFamilies, bamba_turns_half_of_each_head) {
  expect_bamba(nullptr);
}

TEST(DecoderFamilies, biases_and_norms_of_heads_move_with_the_rows_that_are_turned) {
  expect_bamba([](ModelConfig& config) {
    config.attention_bias = true;
    config.attention_output_bias = true;
    config.qk_norm = true;
  });
}

/// What Granite's two kinds of positions share.
void expect_granite(const char* positions, std::size_t turned) {
  const Folder folder({{"architectures", {"GraniteMoeHybridForCausalLM"}},
                       {"hidden_size", 32},
                       {"num_hidden_layers", 3},
                       {"layer_types", {"mamba", "attention", "mamba"}},
                       {"vocab_size", 47},
                       {"num_attention_heads", 4},
                       {"num_key_value_heads", 1},
                       {"attention_bias", true},
                       {"attention_multiplier", 0.2},
                       {"embedding_multiplier", 3.0},
                       {"residual_multiplier", 0.4},
                       {"logits_scaling", 0.3},
                       {"num_local_experts", 0},
                       {"intermediate_size", 999},
                       {"shared_intermediate_size", 40},
                       {"position_embedding_type", positions},
                       {"mamba_n_heads", 8},
                       {"mamba_d_head", 8},
                       {"mamba_d_state", 16},
                       {"mamba_d_conv", 5},
                       {"mamba_proj_bias", true},
                       {"rms_norm_eps", 1e-4},
                       {"tie_word_embeddings", true}},
                      5);
  const auto tokens = draw_tokens(47, 5);
  const AttentionForm attention{.heads = 4, .kv_heads = 1, .head_size = 8, .turned = turned, .scale = 0.2};
  const RecurrentForm recurrent{.heads = 8, .head_size = 8, .groups = 1, .state_size = 16, .window = 5, .epsilon = 1e-4};
  const std::vector<double>& table = folder.scope("")["model.embed_tokens.weight"];
  Rows x = embedded(table, tokens, 32, 3.0);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    const Scope scope = folder.scope(at);
    const Rows mixed = normed(x, scope["input_layernorm.weight"], 1e-4);
    add(x,
        layer == 1 ? attend(mixed, attention, folder.scope(at + "self_attn."))
                   : recur(mixed, recurrent, folder.scope(at + "mamba.")),
        0.4);
    const auto shared = [&](const Row& row) {
      const Row both = scope.linear("shared_mlp.input_linear", row);
      return scope.linear("shared_mlp.output_linear", gated_product(part(both, 0, 40), part(both, 40, 40)));
    };
    add(x, each(normed(x, scope["post_attention_layernorm.weight"], 1e-4), shared), 0.4);
  }
  Rows expected =
      each(normed(x, folder.scope("")["model.norm.weight"], 1e-4), [&](const Row& row) { return product(table, row); });
  for (Row& row : expected) {
    for (double& logit : row) logit /= 0.3;
  }
  expect_equal(folder, tokens, expected);
}

TEST(DecoderFamilies, granite_multiplies_and_knows_no_positions) {
  expect_granite("nope", 0);
}

TEST(DecoderFamilies, granite_may_turn_whole_heads) {
  expect_granite("rope", 8);
}

TEST(DecoderFamilies, nemotron_h_has_one_sublayer_in_each_layer) {
  const std::string pattern = "M-M-*M-";
  const Folder folder({{"architectures", {"NemotronHForCausalLM"}},
                       {"hidden_size", 32},
                       {"hybrid_override_pattern", pattern},
                       {"num_hidden_layers", 7},
                       {"vocab_size", 59},
                       {"num_attention_heads", 4},
                       {"num_key_value_heads", 2},
                       {"attention_head_dim", 12},
                       {"intermediate_size", 36},
                       {"mlp_hidden_act", "relu2"},
                       {"mamba_num_heads", 6},
                       {"mamba_head_dim", 10},
                       {"n_groups", 3},
                       {"ssm_state_size", 16},
                       {"conv_kernel", 4},
                       {"expand", 2},
                       {"layer_norm_epsilon", 1e-5}},
                      6);
  const auto tokens = draw_tokens(59, 6);
  const AttentionForm attention{.heads = 4, .kv_heads = 2, .head_size = 12, .turned = 0, .scale = 1 / std::sqrt(12.0)};
  const RecurrentForm recurrent{.heads = 6, .head_size = 10, .groups = 3, .state_size = 16, .window = 4};
  Rows x = embedded(folder.scope("backbone.")["embeddings.weight"], tokens, 32);
  for (std::size_t layer = 0; layer < pattern.size(); ++layer) {
    const std::string at = "backbone.layers." + std::to_string(layer) + ".";
    const Scope mixer = folder.scope(at + "mixer.");
    const Rows mixed = normed(x, folder.scope(at)["norm.weight"], 1e-5);
    if (pattern[layer] == '*') {
      add(x, attend(mixed, attention, mixer));
    } else if (pattern[layer] == 'M') {
      add(x, recur(mixed, recurrent, mixer));
    } else {
      add(x, each(mixed, [&](const Row& row) {
            Row wide = mixer.linear("up_proj", row);
            for (double& value : wide) value = value > 0 ? value * value : 0;
            return mixer.linear("down_proj", wide);
          }));
    }
  }
  const Rows expected = each(normed(x, folder.scope("backbone.")["norm_f.weight"], 1e-5),
                             [&](const Row& row) { return folder.scope("").linear("lm_head", row); });
  expect_equal(folder, tokens, expected);
}

}  // namespace
}  // namespace rubato::engine
