// SPDX-License-Identifier: Apache-2.0
// The slots of recurrent state of one device. A slot is free, works for a sequence, or keeps a snapshot: the state at the end of
// a prefix, for whoever begins with the same tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "policies/ids.h"
#include "policies/prefix_index.h"

namespace rubato::policies {

/// A fixed set of slots. Those that work come first: where none is free, the snapshot that was not used for longest gives way,
/// except while it is pinned or still being written. Everything costs O(1) and allocates nothing.
class StatePool {
 public:
  /// state_count may be 0: there are none.
  explicit StatePool(std::int32_t state_count);

  /// Slots that could be taken now: free ones, and snapshots that nobody needs at the moment.
  [[nodiscard]] std::int32_t available() const { return free_.count + unused_.count; }
  /// A slot to work in. Precondition: available() > 0.
  [[nodiscard]] StateId take();
  /// CHECKs that it works.
  void give(StateId state);

  /// A slot for a step to write a snapshot to: kept or dropped when that step has ended. Preconditions: available() > 0,
  /// !knows(hash).
  [[nodiscard]] StateId begin_snapshot(const BlockHash& hash);
  void keep_snapshot(StateId state);
  void drop_snapshot(StateId state);
  /// Whether there is such a snapshot or one is being written.
  [[nodiscard]] bool knows(const BlockHash& hash) const { return index_.find(hash).has_value(); }
  /// A snapshot that can be read.
  [[nodiscard]] std::optional<StateId> find(const BlockHash& hash) const;

  /// Keeps a snapshot for somebody who will begin from it; after the last unpin() it counts as just used.
  void pin(StateId state);
  void unpin(StateId state);
  [[nodiscard]] std::int32_t pins(StateId state) const { return at(state).pins; }

  [[nodiscard]] std::int32_t state_count() const { return static_cast<std::int32_t>(entries_.size()) - 2; }
  [[nodiscard]] std::int32_t working_count() const { return working_; }
  [[nodiscard]] std::int32_t snapshot_count() const { return index_.size() - writing_; }
  [[nodiscard]] bool is_working(StateId state) const { return at(state).kind == Kind::Working; }
  [[nodiscard]] bool is_being_written(StateId state) const { return at(state).kind == Kind::Writing; }
  [[nodiscard]] std::int32_t writing_count() const { return writing_; }
  /// Snapshots whose slots were taken, ever.
  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }

  /// CHECKs that every slot is in the list that its kind belongs to, and that index and slots agree.
  void check_integrity() const;

 private:
  enum class Kind : std::uint8_t { Free, Working, Writing, Snapshot };
  struct Entry {
    Kind kind = Kind::Free;
    std::int32_t pins = 0;    // of a snapshot
    std::int32_t before = 0;  // in its list, while free or an unpinned snapshot
    std::int32_t after = 0;
    BlockHash hash;  // of a snapshot, also while it is written
  };
  struct List {
    std::int32_t ends = 0;  // the entry that is before the first and after the last
    std::int32_t count = 0;
  };
  [[nodiscard]] const Entry& at(StateId state) const;
  [[nodiscard]] Entry& at(StateId state) { return const_cast<Entry&>(static_cast<const StatePool*>(this)->at(state)); }
  void append(List& list, StateId state);
  void remove(List& list, StateId state);
  void check_list(const List& list, Kind kind) const;

  std::vector<Entry> entries_;  // by slot; behind the last one the ends of the two lists
  List free_;                   // longest free first
  List unused_;                 // snapshots without pins, longest unused first
  PrefixIndex index_;
  std::int32_t working_ = 0;
  std::int32_t writing_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace rubato::policies
