// SPDX-License-Identifier: Apache-2.0
// Typed reading of one JSON object, member by member. The first fault is kept, names its parameter and says what is allowed;
// members nobody asked for are found at the end.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/openai/json_body.h"

namespace rubato::openai {

/// A null member counts as absent, as OpenAI's own clients mean it.
class FieldReader {
 public:
  /// path: how the object is called in errors (`messages[2]`), empty for the body itself. object must outlive the reader.
  FieldReader(const Json& object, std::string path);

  /// The member if present and not null. Marks it as known.
  [[nodiscard]] const Json* find(std::string_view name);

  template <class T>
  struct Range {
    T min;
    T max;
  };
  [[nodiscard]] std::optional<std::int32_t> integer(std::string_view name, Range<std::int32_t> range);
  [[nodiscard]] std::optional<double> number(std::string_view name, Range<double> range);
  [[nodiscard]] std::optional<bool> flag(std::string_view name);
  [[nodiscard]] std::optional<std::string> text(std::string_view name);

  /// Parameters whose every value leaves the answer unchanged.
  void ignore(std::initializer_list<std::string_view> names);
  /// A parameter that is not supported, accepted only where its value asks for nothing: one of the neutral ones.
  void only_neutral(std::string_view name, std::initializer_list<Json> neutral);
  /// Any member not asked for so far is an error.
  void refuse_unknown();

  void fail(std::string_view name, std::string message);
  /// Takes over the fault of a nested object's reader.
  void adopt(const std::optional<Error>& error);
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }
  [[nodiscard]] std::string path_of(std::string_view name) const;

 private:
  const Json& object_;
  const std::string path_;
  std::set<std::string, std::less<>> known_;
  std::optional<Error> error_;
};

/// A value as an error message shows it: short, and valid UTF-8.
[[nodiscard]] std::string shown(const Json& value);

}  // namespace rubato::openai
