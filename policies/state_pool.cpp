// SPDX-License-Identifier: Apache-2.0
#include "policies/state_pool.h"

#include "manifests/check.h"

namespace rubato::policies {

StatePool::StatePool(std::int32_t state_count)
    : free_{.ends = state_count}, unused_{.ends = state_count + 1}, index_(state_count) {
  CHECK(state_count >= 0, "state_count=", state_count);
  entries_.resize(static_cast<std::size_t>(state_count) + 2);
  for (const List* list : {&free_, &unused_}) {
    Entry& ends = entries_[static_cast<std::size_t>(list->ends)];
    ends.before = ends.after = list->ends;
  }
  for (std::int32_t state = 0; state < state_count; ++state) append(free_, StateId{state});
}

const StatePool::Entry& StatePool::at(StateId state) const {
  CHECK(state.value >= 0 && state.value < state_count(), "state ", state.value, " of ", state_count());
  return entries_[static_cast<std::size_t>(state.value)];
}

void StatePool::append(List& list, StateId state) {
  Entry& ends = entries_[static_cast<std::size_t>(list.ends)];
  Entry& entry = at(state);
  entry.before = ends.before;
  entry.after = list.ends;
  entries_[static_cast<std::size_t>(ends.before)].after = state.value;
  ends.before = state.value;
  ++list.count;
}

void StatePool::remove(List& list, StateId state) {
  const Entry& entry = at(state);
  entries_[static_cast<std::size_t>(entry.before)].after = entry.after;
  entries_[static_cast<std::size_t>(entry.after)].before = entry.before;
  --list.count;
}

StateId StatePool::take() {
  CHECK(available() > 0);
  List& list = free_.count > 0 ? free_ : unused_;
  const StateId state{entries_[static_cast<std::size_t>(list.ends)].after};
  remove(list, state);
  Entry& entry = at(state);
  if (entry.kind == Kind::Snapshot) {
    index_.erase(entry.hash);
    ++evicted_;
  }
  entry.kind = Kind::Working;
  ++working_;
  return state;
}

void StatePool::give(StateId state) {
  Entry& entry = at(state);
  CHECK(entry.kind == Kind::Working, "state ", state.value, " does not work");
  entry.kind = Kind::Free;
  append(free_, state);
  --working_;
}

StateId StatePool::begin_snapshot(const BlockHash& hash) {
  const StateId state = take();
  Entry& entry = at(state);
  entry.kind = Kind::Writing;
  entry.hash = hash;
  --working_;
  ++writing_;
  index_.insert(hash, state.value);
  return state;
}

void StatePool::keep_snapshot(StateId state) {
  Entry& entry = at(state);
  CHECK(entry.kind == Kind::Writing, "state ", state.value, " is not being written");
  entry.kind = Kind::Snapshot;
  append(unused_, state);
  --writing_;
}

void StatePool::drop_snapshot(StateId state) {
  Entry& entry = at(state);
  CHECK(entry.kind == Kind::Writing, "state ", state.value, " is not being written");
  index_.erase(entry.hash);
  entry.kind = Kind::Free;
  append(free_, state);
  --writing_;
}

std::optional<StateId> StatePool::find(const BlockHash& hash) const {
  const std::optional<std::int32_t> found = index_.find(hash);
  if (!found || at(StateId{*found}).kind != Kind::Snapshot) return std::nullopt;
  return StateId{*found};
}

void StatePool::pin(StateId state) {
  Entry& entry = at(state);
  CHECK(entry.kind == Kind::Snapshot, "state ", state.value, " is no snapshot");
  if (entry.pins++ == 0) remove(unused_, state);
}

void StatePool::unpin(StateId state) {
  Entry& entry = at(state);
  CHECK(entry.kind == Kind::Snapshot && entry.pins > 0, "state ", state.value, " is not pinned");
  if (--entry.pins == 0) append(unused_, state);
}

void StatePool::check_list(const List& list, Kind kind) const {
  std::int32_t count = 0;
  std::int32_t before = list.ends;
  for (std::int32_t state = entries_[static_cast<std::size_t>(list.ends)].after; state != list.ends; ++count) {
    const Entry& entry = at(StateId{state});
    CHECK(entry.kind == kind && entry.pins == 0 && entry.before == before && count < state_count(), "state ", state,
          " is in the wrong list");
    before = state;
    state = entry.after;
  }
  CHECK(count == list.count, "listed=", count, " counted=", list.count);
}

void StatePool::check_integrity() const {
  check_list(free_, Kind::Free);
  check_list(unused_, Kind::Snapshot);
  std::int32_t free = 0;
  std::int32_t unused = 0;
  std::int32_t working = 0;
  std::int32_t writing = 0;
  std::int32_t indexed = 0;
  for (std::int32_t state = 0; state < state_count(); ++state) {
    const Entry& entry = at(StateId{state});
    free += entry.kind == Kind::Free ? 1 : 0;
    working += entry.kind == Kind::Working ? 1 : 0;
    writing += entry.kind == Kind::Writing ? 1 : 0;
    unused += entry.kind == Kind::Snapshot && entry.pins == 0 ? 1 : 0;
    CHECK(entry.pins == 0 || entry.kind == Kind::Snapshot, "state ", state, " is pinned and no snapshot");
    if (entry.kind != Kind::Writing && entry.kind != Kind::Snapshot) continue;
    ++indexed;
    CHECK(index_.find(entry.hash) == state, "state ", state, " is not found by its hash");
  }
  CHECK(free == free_.count && unused == unused_.count, "free=", free, " of ", free_.count, " unused=", unused, " of ",
        unused_.count);
  CHECK(working == working_ && writing == writing_ && indexed == index_.size(), "working=", working, " writing=", writing,
        " indexed=", indexed);
  index_.check_integrity();
}

}  // namespace rubato::policies
