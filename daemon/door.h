// SPDX-License-Identifier: Apache-2.0
// The door to serving: what HTTP threads submit and cancel becomes moves in one bounded queue, which the lanes' threads take at
// their step boundaries. It bounds what is outstanding and remembers whether new work is let in.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

#include "daemon/bounded_queue.h"
#include "daemon/serving.h"

namespace rubato {

struct CancelMove {
  SequenceId id;
  Outcome reason = Outcome::Aborted;
};

using Move = std::variant<Submission, CancelMove>;

/// Any thread. Nothing here waits for more than a look into a table.
class Door {
 public:
  explicit Door(std::size_t outstanding_max);

  /// All choices or none. DeviceLost, Unavailable (draining), ResourceExhausted (too many outstanding).
  [[nodiscard]] Result<void> submit(std::vector<Submission>& choices);
  /// False: unknown, ended or cancelled before; there is no move.
  bool cancel(SequenceId id, Outcome reason);
  /// The moves since the last call, in order.
  void take_all(std::vector<Move>& moves) { moves_.take_all(moves); }
  /// A choice has ended; its place is free.
  void ended(SequenceId id);

  void begin_drain();
  /// Refuses everything from now on, for this reason.
  void fail(const Error& failure);

  [[nodiscard]] bool idle() const;
  [[nodiscard]] bool draining() const;
  [[nodiscard]] std::optional<Error> failure() const;

 private:
  // What the door remembers of an outstanding choice, so that each id is cancelled at most once and the move queue stays bounded:
  // two moves per outstanding choice, and the cancel of each that ended by itself before it was taken.
  enum class Ticket : std::uint8_t { Open, Cancelled };

  const std::size_t outstanding_max_;
  BoundedQueue<Move> moves_;
  mutable std::mutex mutex_;
  std::unordered_map<SequenceId, Ticket> tickets_;
  bool draining_ = false;
  std::optional<Error> failure_;
};

}  // namespace rubato
