// SPDX-License-Identifier: Apache-2.0
// What happened to the engine, as core/v1 Events that `kubectl describe` and `kubectl events` list. A short memory for people,
// never a source for automation: conditions and metrics are that.
#pragma once

#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "daemon/control/wall_time.h"

namespace rubato::control {

enum class EventType : std::uint8_t { Normal, Warning };

struct Event {
  std::uint64_t number = 0;  // names it; grows
  EventType type = EventType::Normal;
  std::string reason;  // CamelCase, of few kinds
  std::string message;
  std::int64_t count = 1;
  WallTime first;
  WallTime last;
};

/// Whom the events are about and who says so.
struct EventSubject {
  std::string name;
  std::string uid;
  std::string node;
};

/// Bounded; a repeat of a remembered event raises its count instead of taking a place. Not thread-safe.
class EventLog {
 public:
  void add(EventType type, std::string_view reason, std::string_view message, WallTime now);

  /// Oldest first by last occurrence.
  [[nodiscard]] const std::deque<Event>& events() const { return events_; }

  static constexpr std::size_t events_max = 256;
  static constexpr std::size_t message_bytes_max = 1024;

 private:
  std::deque<Event> events_;
  std::uint64_t next_number_ = 1;
};

[[nodiscard]] nlohmann::ordered_json to_json(const Event& event, const EventSubject& subject);

}  // namespace rubato::control
