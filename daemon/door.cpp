// SPDX-License-Identifier: Apache-2.0
#include "daemon/door.h"

#include <string>
#include <utility>

#include "manifests/check.h"

namespace rubato {

Door::Door(std::size_t outstanding_max) : outstanding_max_(outstanding_max), moves_(3 * outstanding_max) {}

Result<void> Door::submit(std::vector<Submission>& choices) {
  const std::lock_guard lock(mutex_);
  if (failure_) return unexpected(ErrorCode::DeviceLost, "the engine has stopped: " + failure_->message);
  if (draining_) return unexpected(ErrorCode::Unavailable, "the server is shutting down");
  if (tickets_.size() + choices.size() > outstanding_max_) {
    return unexpected(ErrorCode::ResourceExhausted, "the queue is full: " + std::to_string(tickets_.size()) + " of " +
                                                        std::to_string(outstanding_max_) + " sequences are waiting or running");
  }
  for (Submission& choice : choices) {
    tickets_.emplace(choice.request.id, Ticket::Open);
    CHECK(moves_.try_push(Move(std::move(choice))), "the move queue holds three moves per ticket");
  }
  return {};
}

bool Door::cancel(SequenceId id, Outcome reason) {
  const std::lock_guard lock(mutex_);
  const auto ticket = tickets_.find(id);
  if (ticket == tickets_.end() || ticket->second == Ticket::Cancelled) return false;
  ticket->second = Ticket::Cancelled;
  CHECK(moves_.try_push(Move(CancelMove{.id = id, .reason = reason})), "the move queue holds three moves per ticket");
  return true;
}

void Door::ended(SequenceId id) {
  const std::lock_guard lock(mutex_);
  tickets_.erase(id);
}

void Door::begin_drain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
}

void Door::fail(const Error& failure) {
  const std::lock_guard lock(mutex_);
  failure_ = failure;
  draining_ = true;
}

bool Door::idle() const {
  const std::lock_guard lock(mutex_);
  return tickets_.empty();
}

bool Door::draining() const {
  const std::lock_guard lock(mutex_);
  return draining_;
}

std::optional<Error> Door::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace rubato
