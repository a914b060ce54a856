// SPDX-License-Identifier: Apache-2.0
// The one table from our error codes to HTTP statuses.
#pragma once

#include <chrono>
#include <optional>

#include "manifests/result.h"

namespace rubato::http {

/// The control API turns InvalidArgument about an object's content into 422 itself, as Kubernetes does.
[[nodiscard]] constexpr int status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::InvalidArgument:
      return 400;
    case ErrorCode::NotFound:
      return 404;
    case ErrorCode::Conflict:
      return 409;
    case ErrorCode::ResourceExhausted:
      return 429;
    case ErrorCode::Unavailable:
      return 503;
    case ErrorCode::DeviceLost:
      return 503;
    case ErrorCode::Cancelled:
      return 500;  // nobody is left to read it
    case ErrorCode::Internal:
      return 500;
  }
  return 500;
}

/// What Retry-After says, for the statuses that have one: a full queue drains within a second or so, a drained node is replaced
/// later.
[[nodiscard]] constexpr std::optional<std::chrono::seconds> retry_after(int status) {
  if (status == 429) return std::chrono::seconds(1);
  if (status == 503) return std::chrono::seconds(5);
  return std::nullopt;
}

}  // namespace rubato::http
