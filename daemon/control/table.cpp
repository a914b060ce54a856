// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/table.h"

#include <string_view>

namespace rubato::control {

Json make_table(std::span<const Column> columns, std::span<const Json> objects, const Json& resource_version,
                IncludeObject include, const std::function<Json(const Json&)>& cells) {
  Json table{{"kind", "Table"},
             {"apiVersion", "meta.k8s.io/v1"},
             {"metadata", {{"resourceVersion", resource_version}}},
             {"columnDefinitions", Json::array()},
             {"rows", Json::array()}};
  for (const Column& column : columns) {
    table["columnDefinitions"].push_back({{"name", column.name},
                                          {"type", column.type},
                                          {"format", std::string_view(column.name) == "Name" ? "name" : ""},
                                          {"description", column.description},
                                          {"priority", column.priority}});
  }
  for (const Json& object : objects) {
    Json row{{"cells", cells(object)}};
    if (include == IncludeObject::Object) row["object"] = object;
    if (include == IncludeObject::Metadata) {
      row["object"] = {{"kind", "PartialObjectMetadata"}, {"apiVersion", "meta.k8s.io/v1"}, {"metadata", object["metadata"]}};
    }
    table["rows"].push_back(std::move(row));
  }
  return table;
}

}  // namespace rubato::control
