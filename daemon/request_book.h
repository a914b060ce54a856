// SPDX-License-Identifier: Apache-2.0
// The requests in flight: from the moment a lane takes a submission to its end, each token is timed, told to its sink and to the
// observers, and each request ends exactly once, with a record.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "daemon/door.h"
#include "daemon/observer.h"
#include "daemon/request_timing.h"
#include "daemon/serving.h"
#include "engine/lanes.h"

namespace rubato {

/// Not thread-safe: called under the lanes' floor.
class RequestBook {
 public:
  /// Both must outlive it. The door learns of each end, which frees a place.
  RequestBook(Door& door, std::vector<Observer*> observers) : door_(door), observers_(std::move(observers)) {}

  /// From here on the request is counted, and ends with a record and an event whatever happens.
  void enter(Submission& submission);
  /// A token, or the end, of a request that has entered.
  void book(const engine::TokenEvent& event);
  /// Ends a request silently: its client is gone. False when it has ended by itself.
  bool leave(SequenceId id, Outcome reason, TimePoint now);
  /// Ends a request with an error; nothing if it has ended.
  void fail(SequenceId id, Error error, TimePoint now);
  /// Ends all of them.
  void fail_all(const Error& error, TimePoint now);

 private:
  struct Live {
    RequestTiming timing;
    std::shared_ptr<TokenSink> sink;
  };
  using LiveMap = std::unordered_map<SequenceId, Live>;

  void end(LiveMap::iterator live, Outcome outcome, TimePoint now);

  Door& door_;
  const std::vector<Observer*> observers_;
  LiveMap live_;
};

}  // namespace rubato
