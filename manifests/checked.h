// SPDX-License-Identifier: Apache-2.0
// Checked<T, Failure>: either a T or everything that is wrong with it. Result<T> carries one error; input that people write is
// answered with all of its errors at once, so it needs a failure type of its own.
#pragma once

#include <utility>
#include <variant>

#include "manifests/check.h"

namespace rubato {

template <class T, class Failure>
class [[nodiscard]] Checked {
 public:
  Checked(T value) : state_(std::in_place_index<0>, std::move(value)) {}            // NOLINT: implicit by design
  Checked(Failure failure) : state_(std::in_place_index<1>, std::move(failure)) {}  // NOLINT: implicit by design

  [[nodiscard]] bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }

  [[nodiscard]] const T& value() const& {
    CHECK(has_value());
    return std::get<0>(state_);
  }
  [[nodiscard]] T&& value() && {
    CHECK(has_value());
    return std::get<0>(std::move(state_));
  }
  [[nodiscard]] const T* operator->() const { return &value(); }
  [[nodiscard]] const T& operator*() const& { return value(); }

  [[nodiscard]] const Failure& failure() const& {
    CHECK(!has_value());
    return std::get<1>(state_);
  }

 private:
  std::variant<T, Failure> state_;
};

}  // namespace rubato
