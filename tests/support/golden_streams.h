// SPDX-License-Identifier: Apache-2.0
// The prompts of a model folder's golden.json as running streams, whose tokens are known.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "tests/support/lane_client.h"

namespace rubato::test {

struct GoldenStream {
  SequenceId id;
  nlohmann::json prompt;  // its entry in golden.json
};

/// One greedy request per prompt, for as many tokens as its golden output has. sampling: what else is wanted of each.
inline std::vector<GoldenStream> add_golden_prompts(LaneClient& client, const std::filesystem::path& folder,
                                                    engine::SamplingParameters sampling = {}) {
  std::ifstream file(folder / "golden.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  sampling.temperature = 0;
  sampling.ignore_eos = true;
  std::vector<GoldenStream> streams;
  for (const nlohmann::json& prompt : golden["prompts"]) {
    sampling.max_new_tokens = static_cast<std::int32_t>(prompt["output_token_ids"].size());
    const SequenceId id = client.must_add(prompt["prompt_token_ids"].get<std::vector<TokenId>>(), sampling);
    streams.push_back({.id = id, .prompt = prompt});
  }
  return streams;
}

inline void expect_golden_tokens(LaneClient& client, const std::vector<GoldenStream>& streams) {
  for (const GoldenStream& stream : streams) {
    EXPECT_EQ(client.stream(stream.id).tokens, stream.prompt["output_token_ids"].get<std::vector<TokenId>>())
        << stream.prompt["prompt"];
  }
}

}  // namespace rubato::test
