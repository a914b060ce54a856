// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/events.h"

#include <algorithm>

#include "daemon/control/status_error.h"

namespace rubato::control {
namespace {

/// At most bytes long, never ending in half a UTF-8 character.
std::string cut(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return std::string(text);
  std::size_t end = bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end));
}

}  // namespace

void EventLog::add(EventType type, std::string_view reason, std::string_view message, WallTime now) {
  const std::string text = cut(message, message_bytes_max);
  const auto same = std::find_if(events_.begin(), events_.end(), [&](const Event& event) {
    return event.type == type && event.reason == reason && event.message == text;
  });
  Event event;
  if (same != events_.end()) {
    event = *same;
    events_.erase(same);
    ++event.count;
  } else {
    event = {.number = next_number_++,
             .type = type,
             .reason = std::string(reason),
             .message = text,
             .count = 1,
             .first = now,
             .last = now};
  }
  event.last = std::max(event.last, now);
  events_.push_back(std::move(event));
  if (events_.size() > events_max) events_.pop_front();
}

nlohmann::ordered_json to_json(const Event& event, const EventSubject& subject) {
  const std::string number = std::to_string(event.number);
  // An event about a cluster-scoped object lives in namespace `default`.
  return {{"kind", "Event"},
          {"apiVersion", "v1"},
          {"metadata",
           {{"name", subject.name + "." + number},
            {"namespace", "default"},
            {"uid", subject.uid + "-" + number},
            {"resourceVersion", number + "." + std::to_string(event.count)},
            {"creationTimestamp", format_time(event.first)}}},
          {"involvedObject", {{"kind", engine_kind}, {"name", subject.name}, {"uid", subject.uid}, {"apiVersion", api_version}}},
          {"reason", event.reason},
          {"message", event.message},
          {"source", {{"component", "rubatod"}, {"host", subject.node}}},
          {"firstTimestamp", format_time(event.first)},
          {"lastTimestamp", format_time(event.last)},
          {"count", event.count},
          {"type", event.type == EventType::Normal ? "Normal" : "Warning"},
          {"eventTime", nullptr},
          {"reportingComponent", "rubato.dev/rubatod"},
          {"reportingInstance", subject.node}};
}

}  // namespace rubato::control
