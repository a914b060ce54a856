// SPDX-License-Identifier: Apache-2.0
// What can be wrong with one field, kept in parts so that the same fault reads well in a terminal (`describe`) and in the
// causes of a Kubernetes Status (`status_cause`). Who reads or serves the document is not known here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rubato {

/// Where in a text, counted from 1; line 0 means nowhere (a cross-field fault of a field that was left out, or JSON).
struct Position {
  std::int32_t line = 0;
  std::int32_t column = 0;  // in bytes

  friend bool operator==(const Position&, const Position&) = default;
};

enum class Fault : std::uint8_t {
  Invalid,       // the value breaks a rule
  TypeInvalid,   // a text where a number belongs, and the like
  Required,      // missing
  NotSupported,  // not one of the choices
  Unknown,       // no such field
  Duplicate,     // the key stands twice, or a list holds a value twice
  Forbidden,     // may not be changed here
};

struct FieldError {
  Fault fault = Fault::Invalid;
  std::string field{};                 // spec.knobs.mode.initial
  std::string found{};                 // as people would write it: 50, "Foo", a list
  std::string rule{};                  // reads on after `found`: "is outside 1..65536", "must be true or false"
  std::vector<std::string> choices{};  // NotSupported: the values; Unknown: the fields
  std::string suggestion{};            // the choice that was probably meant
  std::string found_type{};            // TypeInvalid: `integer`, `string`, ... as JSON schema calls them
  std::string expected_type{};
  Position position{};

  friend bool operator==(const FieldError&, const FieldError&) = default;
};

using FieldErrors = std::vector<FieldError>;

/// What was found and what is allowed, in one line, without the field: `0 is outside 1..65536`.
[[nodiscard]] std::string describe(const FieldError& error);

/// One entry of `details.causes` in a Kubernetes Status: `FieldValueInvalid`, `Invalid value: 50: ...`, `spec.replicas`.
struct StatusCause {
  std::string reason;
  std::string message;
  std::string field;
};
[[nodiscard]] StatusCause status_cause(const FieldError& error);

/// `text` in double quotes, control characters escaped and cut after 64 bytes, so that hostile input cannot forge a log line.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// The candidate that `word` is probably a misspelling of, or empty.
[[nodiscard]] std::string closest(std::string_view word, std::span<const std::string> candidates);

/// `spec.knobs` + `mode`; an empty parent gives `mode`. A name that could break a line of a report is put in quotes.
[[nodiscard]] std::string join_path(std::string_view parent, std::string_view name);

/// True if one of the errors stands at `field`, above it or below it.
[[nodiscard]] bool touches(const FieldErrors& errors, std::string_view field);

}  // namespace rubato
