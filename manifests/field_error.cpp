// SPDX-License-Identifier: Apache-2.0
// Wording of field errors: one sentence for people, one for the Kubernetes Status.
#include "manifests/field_error.h"

#include <algorithm>
#include <array>

#include "manifests/check.h"

namespace rubato {
namespace {

constexpr std::size_t quoted_length_max = 64;
constexpr std::size_t suggestion_length_max = 64;

bool reads_on(std::string_view rule) {
  constexpr std::array starts{"is ", "must ", "may ", "has "};
  return std::any_of(starts.begin(), starts.end(), [&](std::string_view start) { return rule.starts_with(start); });
}

std::string joined(const std::vector<std::string>& words, std::string_view quote) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ", ";
    text.append(quote).append(word).append(quote);
  }
  return text;
}

std::string did_you_mean(const FieldError& error) {
  return error.suggestion.empty() ? std::string() : "; did you mean " + error.suggestion + "?";
}

/// Case counts half: `deadline` is nearer to `Deadline` than to any other word, but not equal to it. Counted in halves.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = 2 * j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = 2 * i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = a[i - 1] == b[j - 1] ? 0 : lower(a[i - 1]) == lower(b[j - 1]) ? 1 : 2;
      const std::size_t best = std::min({diagonal + change, row[j] + 2, row[j - 1] + 2});
      diagonal = row[j];
      row[j] = best;
    }
  }
  return row[b.size()];
}

bool is_at_or_below(std::string_view field, std::string_view ancestor) {
  if (!field.starts_with(ancestor)) return false;
  return field.size() == ancestor.size() || ancestor.empty() || field[ancestor.size()] == '.' || field[ancestor.size()] == '[';
}

}  // namespace

std::string describe(const FieldError& error) {
  switch (error.fault) {
    case Fault::Required:
      return error.rule.empty() ? "is required" : "is required: " + error.rule;
    case Fault::NotSupported:
      return error.found + " is not one of " + joined(error.choices, "") + did_you_mean(error);
    case Fault::Unknown:
      return "unknown field" + did_you_mean(error) + (error.suggestion.empty() ? "; allowed: " : " Allowed: ") +
             joined(error.choices, "");
    case Fault::Duplicate:
    case Fault::Forbidden:
    case Fault::Invalid:
    case Fault::TypeInvalid:
      if (error.found.empty()) return error.rule;
      return error.found + (reads_on(error.rule) ? " " : ": ") + error.rule;
  }
  CHECK(false, "no such fault: ", static_cast<int>(error.fault));
}

StatusCause status_cause(const FieldError& error) {
  const std::string found = error.found.empty() ? "\"\"" : error.found;
  switch (error.fault) {
    case Fault::Required:
      return {"FieldValueRequired", error.rule.empty() ? "Required value" : "Required value: " + error.rule, error.field};
    case Fault::NotSupported:
      return {"FieldValueNotSupported", "Unsupported value: " + found + ": supported values: " + joined(error.choices, "\""),
              error.field};
    case Fault::Unknown:
      return {"FieldValueInvalid", "unknown field " + in_quotes(error.field), error.field};
    case Fault::Duplicate:
      return {"FieldValueDuplicate", "Duplicate value: " + found, error.field};
    case Fault::Forbidden:
      return {"FieldValueForbidden", "Forbidden: " + error.rule, error.field};
    case Fault::TypeInvalid: {
      const std::string type = in_quotes(error.found_type);
      return {"FieldValueTypeInvalid",
              "Invalid value: " + type + ": " + error.field + " in body must be of type " + error.expected_type + ": " + type,
              error.field};
    }
    case Fault::Invalid:
      return {"FieldValueInvalid", "Invalid value: " + found + ": " + error.rule, error.field};
  }
  CHECK(false, "no such fault: ", static_cast<int>(error.fault));
}

std::string in_quotes(std::string_view text) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string result = "\"";
  std::size_t end = std::min(text.size(), quoted_length_max);
  while (end > 0 && end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U)
    --end;  // not inside a character
  for (const char c : text.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      result.append("\\u00") += digits[byte >> 4U];
      result += digits[byte & 15U];
    } else {
      result += c;
    }
  }
  return result + (end < text.size() ? "...\"" : "\"");
}

std::string closest(std::string_view word, std::span<const std::string> candidates) {
  if (word.size() > suggestion_length_max) return {};
  std::string best;
  std::size_t best_distance = 0;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    // A third of the letters may be wrong (in halves); words that differ only in case are always meant.
    const bool near = distance <= std::max(word.size(), candidate.size()) * 2 / 3;
    if (near && (best.empty() || distance < best_distance)) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string join_path(std::string_view parent, std::string_view name) {
  std::string path(parent);
  if (!path.empty()) path += '.';
  const bool is_plain = name.size() <= quoted_length_max && std::all_of(name.begin(), name.end(), [](char c) {
                          return static_cast<unsigned char>(c) > 0x20 && c != 0x7F && c != '"';
                        });
  return is_plain ? path.append(name) : path.append(in_quotes(name));
}

bool touches(const FieldErrors& errors, std::string_view field) {
  return std::any_of(errors.begin(), errors.end(), [&](const FieldError& error) {
    return is_at_or_below(error.field, field) || is_at_or_below(field, error.field);
  });
}

}  // namespace rubato
