// SPDX-License-Identifier: Apache-2.0
// Candidates by rank, lowest first. Of thousands that wait a step takes a few, so it orders only as many as are asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace rubato::policies {

/// Fill with push(), then start(), then read with peek() and pop(). start() is linear, pop() logarithmic (constant where the
/// ranks came in order); nothing allocates within the reserved capacity.
class RankedQueue {
 public:
  struct Entry {
    double rank = 0;
    std::int32_t candidate = 0;
  };

  void reserve(std::size_t capacity) { entries_.reserve(capacity); }
  void clear() { entries_.clear(); }
  void push(Entry entry) { entries_.push_back(entry); }

  void start() {
    next_ = 0;
    in_order_ = std::is_sorted(entries_.begin(), entries_.end(), before);
    if (!in_order_) std::make_heap(entries_.begin(), entries_.end(), after);
  }

  [[nodiscard]] bool empty() const { return next_ == entries_.size(); }
  [[nodiscard]] const Entry& peek() const { return in_order_ ? entries_[next_] : entries_.front(); }
  void pop() {
    if (in_order_) {
      ++next_;
    } else {
      std::pop_heap(entries_.begin(), entries_.end(), after);
      entries_.pop_back();
    }
  }

  /// Equal ranks keep the order of the candidates.
  static bool before(const Entry& left, const Entry& right) {
    return left.rank != right.rank ? left.rank < right.rank : left.candidate < right.candidate;
  }

 private:
  static bool after(const Entry& left, const Entry& right) { return before(right, left); }

  std::vector<Entry> entries_;
  std::size_t next_ = 0;
  bool in_order_ = true;
};

}  // namespace rubato::policies
