// SPDX-License-Identifier: Apache-2.0
// One streamed completion read to its end: the text of each choice, its finish reasons, and whether [DONE] came.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/raw_client.h"

namespace rubato::test {

struct StreamedChoice {
  std::string text;
  std::vector<std::string> finish_reasons;
  int pieces = 0;
};

struct StreamedReply {
  int status = 0;
  std::map<int, StreamedChoice> choices;
  nlohmann::json usage;
  bool done = false;
  std::string error;
};

/// Sends body (which must ask for a stream) and reads all events. on_piece, if given, is called after each event that carries a
/// choice.
template <class OnPiece>
StreamedReply stream_completion(int port, const nlohmann::json& body, OnPiece&& on_piece) {
  StreamedReply reply;
  RawClient client(port);
  client.set_deadline(std::chrono::seconds(120));
  client.send(post_text("/v1/completions", body.dump()));
  const RawReply head = client.read_head();
  reply.status = head.status;
  std::string events;
  while (true) {
    const auto chunk = client.read_chunk();
    if (!chunk || chunk->empty()) break;
    events += *chunk;
    std::size_t end = 0;
    while ((end = events.find("\n\n")) != std::string::npos) {
      const std::string event = events.substr(0, end);
      events.erase(0, end + 2);
      if (event.rfind("data: ", 0) != 0) continue;
      const std::string data = event.substr(6);
      if (data == "[DONE]") {
        reply.done = true;
        continue;
      }
      const nlohmann::json json = nlohmann::json::parse(data, nullptr, false);
      if (json.is_discarded() || json.contains("error")) {
        reply.error = data;
        continue;
      }
      if (json.contains("usage") && !json["usage"].is_null()) reply.usage = json["usage"];
      for (const auto& choice : json["choices"]) {
        StreamedChoice& into = reply.choices[choice["index"].get<int>()];
        into.text += choice["text"].get<std::string>();
        ++into.pieces;
        if (!choice["finish_reason"].is_null()) into.finish_reasons.push_back(choice["finish_reason"].get<std::string>());
        on_piece(into);
      }
    }
  }
  return reply;
}

inline StreamedReply stream_completion(int port, const nlohmann::json& body) {
  return stream_completion(port, body, [](const StreamedChoice&) {});
}

}  // namespace rubato::test
