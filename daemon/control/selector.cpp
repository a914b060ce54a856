// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/selector.h"

#include <algorithm>

namespace rubato::control {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace

Result<std::vector<Requirement>> parse_selector(std::string_view text) {
  std::vector<Requirement> requirements;
  while (!text.empty()) {
    const auto comma = text.find(',');
    std::string_view part = trimmed(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    if (part.empty()) continue;
    Requirement requirement;
    const auto equals = part.find('=');
    if (equals != std::string_view::npos) {
      const bool negated = equals > 0 && part[equals - 1] == '!';
      const bool doubled = part.substr(equals).starts_with("==");
      requirement.op = negated ? Requirement::Operator::NotEquals : Requirement::Operator::Equals;
      requirement.key = trimmed(part.substr(0, negated ? equals - 1 : equals));
      requirement.value = trimmed(part.substr(equals + (doubled ? 2 : 1)));
    } else if (part.front() == '!') {
      requirement.op = Requirement::Operator::Absent;
      requirement.key = trimmed(part.substr(1));
    } else {
      requirement.op = Requirement::Operator::Exists;
      requirement.key = part;
    }
    if (requirement.key.empty() || requirement.key.find_first_of(" ()!=<>") != std::string::npos) {
      return unexpected(ErrorCode::InvalidArgument, "unable to parse requirement: \"" + std::string(part) + "\"");
    }
    requirements.push_back(std::move(requirement));
  }
  return requirements;
}

bool matches(const std::vector<Requirement>& requirements,
             const std::function<std::optional<std::string>(const std::string& key)>& lookup) {
  return std::all_of(requirements.begin(), requirements.end(), [&](const Requirement& requirement) {
    const auto value = lookup(requirement.key);
    switch (requirement.op) {
      case Requirement::Operator::Equals:
        return value == requirement.value;
      case Requirement::Operator::NotEquals:
        return value != requirement.value;
      case Requirement::Operator::Exists:
        return value.has_value();
      case Requirement::Operator::Absent:
        return !value.has_value();
    }
    return false;
  });
}

}  // namespace rubato::control
