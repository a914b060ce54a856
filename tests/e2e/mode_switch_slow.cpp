// SPDX-License-Identifier: Apache-2.0
// Chunked and disaggregated by turns under running streams: modes, shares, reservations and roles move a hundred times, on one
// device and on several, and nobody's answer changes.
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/stream_load.h"

namespace rubato::test {
namespace {

using nlohmann::json;

std::string manifest_on(const std::string& devices) {
  return R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: modes}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 128, layers: 4, heads: 4, kvHeads: 2, feedForward: 256, vocabulary: 512, seed: 3}
    dtype: BFloat16
  devices: [)" +
         devices + R"(]
  capacity: {maxModelLen: 2048, maxNumSeqs: 48, kvCacheMemory: 64Mi}
  objectives: {ttft: 5s, itl: 1s, attainment: 90}
  knobs:
    maxNumBatchedTokens: {initial: 128, min: 64, max: 512}
    maxNumSeqs: {initial: 48, min: 8, max: 48}
    mode: {initial: Chunked, choices: [Chunked, Disaggregated]}
  tuning: {enabled: false}
)";
}

/// Mixed lengths: short ones decode while the last still prefill.
const StreamLoad load_of_streams{
    .model = "modes", .streams = 48, .answer_tokens = 500, .prompt_tokens = 20, .prompt_tokens_growth = 25};

class ModeSwitch : public ::testing::Test {
 protected:
  void start(const std::string& devices) {
    daemon_.emplace(std::vector<std::string>{"--manifest", folder_.write("engine.yaml", manifest_on(devices)).string()});
    ASSERT_TRUE(daemon_->wait_ready(std::chrono::seconds(60))) << daemon_->log();
    undisturbed_ = run_streams(daemon_->data_port(), load_of_streams);
  }

  void patch(const json& override_fields) {
    const json body{{"spec", {{"override", override_fields}}}};
    const RawReply reply = daemon_->control("PATCH", "/apis/rubato.dev/v1alpha1/engines/modes", body.dump());
    ASSERT_EQ(reply.status, 200) << reply.body;
  }

  /// Runs the load while change(i) happens `count` times, each after some stream has got a token since the last. Returns how many
  /// changes came while streams ran.
  template <class Change>
  int run_while_changing(int count, Change&& change) {
    std::atomic<int> pieces = 0;
    std::atomic<bool> ended = false;
    int under_load = 0;
    std::jthread load([&] {
      // One load after another until all changes are made, so that they meet sequences in every stage.
      do {
        disturbed_.push_back(run_streams(daemon_->data_port(), load_of_streams, &pieces));
      } while (!ended);
    });
    for (int i = 0; i < count; ++i) {
      const int before = pieces.load();
      change(i);
      EXPECT_TRUE(eventually([&] { return pieces.load() > before; })) << "change " << i << daemon_->log();
      ++under_load;
    }
    ended = true;
    load.join();
    return under_load;
  }

  void expect_nothing_lost() {
    for (const auto& replies : disturbed_) expect_same_answers(load_of_streams, replies, undisturbed_);
    EXPECT_TRUE(eventually([&] {
      return daemon_->metric("vllm:num_requests_running{engine=\"0\",model_name=\"modes\"}") == 0.0 &&
             daemon_->metric("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"modes\"}") == 0.0;
    }));
    EXPECT_EQ(daemon_->control("GET", "/readyz").status, 200);
  }

  TemporaryFolder folder_;
  std::optional<DaemonProcess> daemon_;
  std::vector<StreamedReply> undisturbed_;
  std::vector<std::vector<StreamedReply>> disturbed_;
};

const char* mode_of(int change) {
  return change % 2 == 0 ? "Disaggregated" : "Chunked";
}

TEST_F(ModeSwitch, a_hundred_switches_under_48_streams_change_no_answer) {
  start("cpu");
  const auto change = [&](int i) {
    patch({{"mode", mode_of(i)}});
    // Two at once would be none.
    EXPECT_TRUE(eventually([&] { return daemon_->metric("rubato_mode_switches_total") == i + 1; })) << i;
  };
  EXPECT_EQ(run_while_changing(100, change), 100);
  expect_nothing_lost();
}

TEST_F(ModeSwitch, a_hundred_changes_of_share_and_reservation_under_48_streams_change_no_answer) {
  start("cpu");
  const std::vector<std::string> reservations{"LastChunk", "PrefillComplete", "Early"};
  const auto change = [&](int i) {
    patch({{"mode", "Disaggregated"},
           {"prefillShare", 10 + 80 * (i % 9) / 8},
           {"reservation", reservations[static_cast<std::size_t>(i / 9) % reservations.size()]}});
  };
  EXPECT_EQ(run_while_changing(100, change), 100);
  expect_nothing_lost();
  EXPECT_GT(daemon_->metric("rubato_handoffs_total{kind=\"moved\"}").value_or(0), 0);
}

TEST_F(ModeSwitch, roles_of_several_devices_change_under_48_streams_and_no_answer_does) {
  start("cpu:0, cpu:1, cpu:2");
  const auto change = [&](int i) { patch({{"mode", i % 3 == 2 ? "Chunked" : "Disaggregated"}, {"prefillDevices", 1 + i % 2}}); };
  EXPECT_EQ(run_while_changing(60, change), 60);
  expect_nothing_lost();
  EXPECT_GT(daemon_->metric("rubato_handoffs_total{kind=\"copied\"}").value_or(0), 0);
  EXPECT_EQ(daemon_->metric("rubato_handoffs_total{kind=\"failed\"}"), 0.0);
}

/// What a client sees, but for what names this very request.
json seen_by_client(const DaemonProcess& daemon, const json& body) {
  RawClient client(daemon.data_port());
  client.set_deadline(std::chrono::seconds(60));
  client.send(post_text("/v1/completions", body.dump()));
  const RawReply reply = client.read_reply();
  json seen{{"status", reply.status}, {"events", json::array()}};
  const auto keep = [&](json one) {
    one.erase("id");
    one.erase("created");
    seen["events"].push_back(std::move(one));
  };
  if (!body.value("stream", false)) {
    keep(json::parse(reply.body));
    return seen;
  }
  for (std::size_t at = 0; (at = reply.body.find("data: {", at)) != std::string::npos; ++at)
    keep(json::parse(reply.body.substr(at + 6, reply.body.find("\n\n", at) - at - 6)));
  return seen;
}

// Elsewhere the first token came twice or without its log-probabilities, and stop strings in it were missed.
TEST_F(ModeSwitch, what_a_client_sees_is_the_same_in_both_modes) {
  daemon_.emplace(std::vector<std::string>{"--manifest", folder_.write("engine.yaml", manifest_on("cpu")).string()});
  ASSERT_TRUE(daemon_->wait_ready(std::chrono::seconds(60))) << daemon_->log();
  json prompt = json::array();
  for (int i = 0; i < 200; ++i) prompt.push_back((i * 31) % 500 + 1);
  const json base{{"model", "modes"}, {"prompt", prompt}, {"temperature", 0}, {"max_tokens", 6}};
  const auto with = [&](const json& more) {
    json body = base;
    body.update(more);
    return body;
  };
  const json plain = seen_by_client(*daemon_, base);
  ASSERT_EQ(plain["status"], 200) << plain;
  const std::string text = plain["events"][0]["choices"][0]["text"];
  ASSERT_FALSE(text.empty());
  const std::vector<json> bodies{with({{"max_tokens", 1}}),
                                 with({{"max_tokens", 2}}),
                                 with({{"logprobs", 5}}),
                                 with({{"n", 2}, {"temperature", 0.9}, {"seed", 5}}),
                                 with({{"stop", text.substr(0, 1)}}),
                                 with({{"stop", json::array({text.substr(0, 2), "zzz"})}, {"max_tokens", 30}})};
  const auto all = [&] {
    std::vector<json> seen;
    for (json body : bodies) {
      seen.push_back(seen_by_client(*daemon_, body));
      // One choice, because those of two come in the order of their steps.
      if (body.contains("n")) continue;
      body["stream"] = true;
      body["stream_options"] = {{"include_usage", true}};
      seen.push_back(seen_by_client(*daemon_, body));
    }
    return seen;
  };
  const std::vector<json> chunked = all();
  patch({{"mode", "Disaggregated"}});
  const double first_tokens = daemon_->metric("rubato_time_to_first_token_seconds_count").value_or(0);
  const double moved = daemon_->metric("rubato_handoffs_total{kind=\"moved\"}").value_or(0);
  const std::vector<json> disaggregated = all();
  for (std::size_t i = 0; i < chunked.size(); ++i) {
    EXPECT_EQ(chunked[i]["status"], 200);
    EXPECT_EQ(disaggregated[i], chunked[i]) << i;
  }
  // Eleven requests, one of them with two choices: each has one first token, and those for one token never left their lane.
  EXPECT_TRUE(eventually([&] { return daemon_->metric("rubato_time_to_first_token_seconds_count") == first_tokens + 12; }));
  EXPECT_LE(daemon_->metric("rubato_handoffs_total{kind=\"moved\"}").value_or(0) - moved, 10);
}

}  // namespace
}  // namespace rubato::test
