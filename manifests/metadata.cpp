// SPDX-License-Identifier: Apache-2.0
// Names are RFC 1123 subdomains, label and annotation keys are qualified names (`example.com/tier`), label values are words.
#include "manifests/metadata.h"

#include <algorithm>

namespace rubato {
namespace {

constexpr std::size_t name_length_max = 253;
constexpr std::size_t word_length_max = 63;
constexpr std::size_t annotations_size_max = 256 * 1024;

constexpr std::string_view subdomain_rule =
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with "
    "an "
    "alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
constexpr std::string_view key_rule =
    "must be a word of at most 63 letters, digits, '-', '_' and '.' that starts and ends with a letter or digit, with an "
    "optional DNS "
    "subdomain and '/' before it, such as 'tier' or 'example.com/tier'";
constexpr std::string_view value_rule =
    "must be empty or a word of at most 63 letters, digits, '-', '_' and '.' that starts and ends with a letter or digit";

bool is_lower_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}
bool is_alphanumeric(char c) {
  return is_lower_or_digit(c) || (c >= 'A' && c <= 'Z');
}

bool is_subdomain(std::string_view text) {
  if (text.empty() || text.size() > name_length_max) return false;
  while (true) {
    const std::size_t dot = text.find('.');
    const std::string_view part = text.substr(0, dot);
    const bool fits = !part.empty() && is_lower_or_digit(part.front()) && is_lower_or_digit(part.back()) &&
                      std::all_of(part.begin(), part.end(), [](char c) { return is_lower_or_digit(c) || c == '-'; });
    if (!fits) return false;
    if (dot == std::string_view::npos) return true;
    text.remove_prefix(dot + 1);
  }
}

bool is_word(std::string_view text) {
  return !text.empty() && text.size() <= word_length_max && is_alphanumeric(text.front()) && is_alphanumeric(text.back()) &&
         std::all_of(text.begin(), text.end(), [](char c) { return is_alphanumeric(c) || c == '-' || c == '_' || c == '.'; });
}

bool is_qualified_name(std::string_view text) {
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos) return is_word(text);
  return is_subdomain(text.substr(0, slash)) && is_word(text.substr(slash + 1));
}

void check_keys(const std::map<std::string, std::string>& entries, std::string_view field, FieldErrors& errors) {
  for (const auto& [key, value] : entries) {
    if (!is_qualified_name(key)) {
      errors.push_back({.field = std::string(field), .found = "key " + in_quotes(key), .rule = std::string(key_rule)});
    }
  }
}

}  // namespace

void check_name(std::string_view name, std::string_view field, FieldErrors& errors) {
  if (name.size() > name_length_max) {
    errors.push_back({.field = std::string(field), .found = in_quotes(name), .rule = "must be no more than 253 characters"});
  } else if (!is_subdomain(name)) {
    errors.push_back({.field = std::string(field), .found = in_quotes(name), .rule = std::string(subdomain_rule)});
  }
}

void check_labels(const std::map<std::string, std::string>& labels, std::string_view field, FieldErrors& errors) {
  check_keys(labels, field, errors);
  for (const auto& [key, value] : labels) {
    if (!value.empty() && !is_word(value)) {
      errors.push_back({.field = join_path(field, key), .found = in_quotes(value), .rule = std::string(value_rule)});
    }
  }
}

void check_annotations(const std::map<std::string, std::string>& annotations, std::string_view field, FieldErrors& errors) {
  check_keys(annotations, field, errors);
  std::size_t size = 0;
  for (const auto& [key, value] : annotations) size += key.size() + value.size();
  if (size > annotations_size_max) {
    errors.push_back(
        {.field = std::string(field), .found = std::to_string(size) + " bytes", .rule = "must be at most 262144 bytes in all"});
  }
}

}  // namespace rubato
