// SPDX-License-Identifier: Apache-2.0
// Many streams at once whose answers are known in advance: sent once undisturbed and once while something changes under them,
// they must come out the same.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/stream_client.h"

namespace rubato::test {

struct StreamLoad {
  std::string model;
  int streams = 32;
  int answer_tokens = 600;
  int prompt_tokens = 40;        // of the first stream
  int prompt_tokens_growth = 0;  // from stream to stream
};

/// Every other stream samples, with a seed of its own.
inline nlohmann::json request_of(const StreamLoad& load, int stream) {
  nlohmann::json prompt = nlohmann::json::array();
  const int length = load.prompt_tokens + load.prompt_tokens_growth * stream;
  for (int i = 0; i < length; ++i) prompt.push_back((i * 31 + stream * 7) % 500 + 1);
  return {{"model", load.model},
          {"prompt", prompt},
          {"max_tokens", load.answer_tokens},
          {"temperature", stream % 2 == 0 ? 0.0 : 0.9},
          {"seed", 1000 + stream},
          {"ignore_eos", true},
          {"stream", true},
          {"stream_options", {{"include_usage", true}}}};
}

/// Returns when all have ended. pieces counts what they get, if given.
inline std::vector<StreamedReply> run_streams(int port, const StreamLoad& load, std::atomic<int>* pieces = nullptr) {
  std::vector<StreamedReply> replies(static_cast<std::size_t>(load.streams));
  std::vector<std::jthread> clients;
  for (int i = 0; i < load.streams; ++i) {
    clients.emplace_back([&, i] {
      replies[static_cast<std::size_t>(i)] = stream_completion(port, request_of(load, i), [&](const StreamedChoice&) {
        if (pieces != nullptr) pieces->fetch_add(1);
      });
    });
  }
  clients.clear();
  return replies;
}

/// All complete, without an error, and with the answers of `undisturbed`.
inline void expect_same_answers(const StreamLoad& load, const std::vector<StreamedReply>& disturbed,
                                const std::vector<StreamedReply>& undisturbed) {
  ASSERT_EQ(disturbed.size(), undisturbed.size());
  for (std::size_t i = 0; i < disturbed.size(); ++i) {
    SCOPED_TRACE("stream " + std::to_string(i));
    EXPECT_EQ(disturbed[i].status, 200);
    EXPECT_TRUE(disturbed[i].done);
    EXPECT_EQ(disturbed[i].error, "");
    ASSERT_TRUE(disturbed[i].choices.contains(0) && undisturbed[i].choices.contains(0));
    EXPECT_EQ(disturbed[i].usage["completion_tokens"], load.answer_tokens);
    EXPECT_EQ(disturbed[i].choices.at(0).finish_reasons, std::vector<std::string>{"length"});
    EXPECT_EQ(disturbed[i].choices.at(0).text, undisturbed[i].choices.at(0).text);
  }
}

}  // namespace rubato::test
