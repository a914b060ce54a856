// SPDX-License-Identifier: Apache-2.0
// Result<T>: how every room says that the world said no (a bad manifest, a full queue, a damaged file). The names are those
// of std::expected, so that it can take over when the toolchain has it. Our own bugs are CHECKs instead.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "manifests/check.h"

namespace rubato {

/// What kind of "no" it is. One table in daemon/ maps each to an HTTP status; no other place decides on that.
enum class ErrorCode {
  InvalidArgument,    // the caller's input is wrong: 400 (422 in the control API)
  NotFound,           // 404
  Conflict,           // a stale resourceVersion: 409
  ResourceExhausted,  // a bounded queue is full; try again later: 429
  Unavailable,        // loading or draining; try again elsewhere: 503
  Cancelled,          // the client went away; nobody is left to answer
  DeviceLost,         // the backend broke and cannot go on: 503, readiness turns false
  Internal,           // a library threw, or a file could not be read: 500
};

struct Error {
  ErrorCode code = ErrorCode::Internal;
  std::string field;    // path of the offending field (`spec.knobs.mode`, `max_tokens`), empty if there is none
  std::string message;  // where, what was found and what is allowed
};

/// Tags a Result as failed: `return Unexpected(Error{...})`.
class Unexpected {
 public:
  explicit Unexpected(Error error) : error_(std::move(error)) {}
  [[nodiscard]] Error& error() & { return error_; }

 private:
  Error error_;
};

[[nodiscard]] inline Unexpected unexpected(ErrorCode code, std::string message) {
  return Unexpected(Error{.code = code, .field = {}, .message = std::move(message)});
}
[[nodiscard]] inline Unexpected unexpected(ErrorCode code, std::string field, std::string message) {
  return Unexpected(Error{.code = code, .field = std::move(field), .message = std::move(message)});
}

/// Either a T or an Error. value() on an error is a bug of the caller and a CHECK.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}                       // NOLINT: implicit by design
  Result(Unexpected failure) : state_(std::in_place_index<1>, std::move(failure.error())) {}  // NOLINT: implicit by design

  [[nodiscard]] bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }

  [[nodiscard]] T& value() & {
    CHECK(has_value(), error_text());
    return std::get<0>(state_);
  }
  [[nodiscard]] const T& value() const& {
    CHECK(has_value(), error_text());
    return std::get<0>(state_);
  }
  [[nodiscard]] T&& value() && {
    CHECK(has_value(), error_text());
    return std::get<0>(std::move(state_));
  }
  [[nodiscard]] T& operator*() & { return value(); }
  [[nodiscard]] const T& operator*() const& { return value(); }
  [[nodiscard]] T&& operator*() && { return std::move(*this).value(); }
  [[nodiscard]] T* operator->() { return &value(); }
  [[nodiscard]] const T* operator->() const { return &value(); }

  [[nodiscard]] const Error& error() const& {
    CHECK(!has_value());
    return std::get<1>(state_);
  }
  [[nodiscard]] Error&& error() && {
    CHECK(!has_value());
    return std::get<1>(std::move(state_));
  }

 private:
  [[nodiscard]] std::string error_text() const { return has_value() ? std::string() : std::get<1>(state_).message; }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Unexpected failure) : error_(std::move(failure.error())) {}  // NOLINT: implicit by design

  [[nodiscard]] bool has_value() const { return !error_.has_value(); }
  explicit operator bool() const { return has_value(); }
  [[nodiscard]] const Error& error() const& {
    CHECK(error_.has_value());
    return *error_;
  }
  [[nodiscard]] Error&& error() && {
    CHECK(error_.has_value());
    return std::move(*error_);
  }

 private:
  std::optional<Error> error_;
};

}  // namespace rubato
