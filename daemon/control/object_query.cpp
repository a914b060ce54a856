// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/object_query.h"

#include <algorithm>

#include "daemon/control/selector.h"

namespace rubato::control {
namespace {

std::optional<std::string> text_at(const Json& object, std::string_view dotted) {
  const Json* at = &object;
  while (!dotted.empty()) {
    const auto dot = dotted.find('.');
    const auto found = at->is_object() ? at->find(dotted.substr(0, dot)) : at->end();
    if (!at->is_object() || found == at->end()) return std::nullopt;
    at = &*found;
    dotted = dot == std::string_view::npos ? std::string_view() : dotted.substr(dot + 1);
  }
  return at->is_string() ? std::optional(at->get<std::string>()) : std::nullopt;
}

}  // namespace

std::string query_of(const http::Request& request, std::string_view key) {
  const auto found = request.query.find(key);
  return found == request.query.end() ? std::string() : found->second;
}

Wanted wanted_form(const http::Request& request) {
  std::string accept(request.header("accept"));
  accept.erase(std::remove(accept.begin(), accept.end(), ' '), accept.end());
  if (accept.empty()) return Wanted::Plain;
  std::string_view rest = accept;
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const std::string_view type = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const std::string_view media = type.substr(0, type.find(';'));
    if (media != "application/json" && media != "*/*" && media != "application/*") continue;
    if (type.find(";as=") == std::string_view::npos) return Wanted::Plain;
    if (type.find(";as=Table") != std::string_view::npos && type.find(";v=v1;") != std::string_view::npos) return Wanted::Table;
  }
  return Wanted::Nothing;
}

std::optional<IncludeObject> include_object(const http::Request& request) {
  const std::string wanted = query_of(request, "includeObject");
  if (wanted.empty() || wanted == "Metadata") return IncludeObject::Metadata;
  if (wanted == "Object") return IncludeObject::Object;
  if (wanted == "None") return IncludeObject::None;
  return std::nullopt;
}

std::optional<StatusError> unserved_list(const http::Request& request) {
  if (wanted_form(request) == Wanted::Nothing) return not_acceptable();
  if (const std::string watch = query_of(request, "watch"); !watch.empty() && watch != "false" && watch != "0")
    return from_http_status(405, "watch is not served");
  if (!include_object(request)) return bad_request("includeObject must be None, Metadata or Object");
  return std::nullopt;
}

std::optional<StatusError> apply_field_selector(const http::Request& request, std::span<const std::string_view> known,
                                                std::vector<Json>& items) {
  const auto selector = parse_selector(query_of(request, "fieldSelector"));
  if (!selector) return bad_request(selector.error().message);
  for (const auto& requirement : *selector) {
    if (std::find(known.begin(), known.end(), requirement.key) == known.end()) {
      return bad_request("field label not supported: " + requirement.key);
    }
  }
  std::erase_if(items, [&](const Json& item) {
    return !matches(*selector, [&](const std::string& key) { return std::optional(text_at(item, key).value_or("")); });
  });
  return std::nullopt;
}

std::optional<StatusError> apply_label_selector(const http::Request& request, std::vector<Json>& items) {
  const auto selector = parse_selector(query_of(request, "labelSelector"));
  if (!selector) return bad_request(selector.error().message);
  std::erase_if(items, [&](const Json& item) {
    const Json& metadata = item["metadata"];
    return !matches(*selector, [&](const std::string& key) -> std::optional<std::string> {
      if (!metadata.contains("labels") || !metadata["labels"].contains(key)) return std::nullopt;
      return metadata["labels"][key].get<std::string>();
    });
  });
  return std::nullopt;
}

}  // namespace rubato::control
