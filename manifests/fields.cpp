// SPDX-License-Identifier: Apache-2.0
// The two walks over the tables that need no document: listing the fields and comparing two specs.
#include "manifests/fields.h"

#include "manifests/field_error.h"

namespace rubato {
namespace {

template <class Table>
void list(const Table& table, std::string_view parent, Change inherited, std::vector<FieldInfo>& fields) {
  for_each(table, [&](const auto& line) {
    using Inner = typename Unwrap<typename std::remove_cvref_t<decltype(line)>::Value>::Inner;
    const std::string path = join_path(parent, line.name);
    const Change change = line.change.value_or(inherited);
    if constexpr (Nested<Inner, decltype(line.rule)>) {
      list(table_of(std::type_identity<Inner>(), line.rule), path, change, fields);
    } else {
      fields.push_back({.path = path, .help = std::string(line.help), .change = change});
    }
  });
}

template <class Struct, class Table>
void compare(const Struct& before, const Struct& after, const Table& table, std::string_view parent, Change inherited,
             std::vector<FieldChange>& changes);

template <class Value, class Rule>
void compare_value(const Value& before, const Value& after, const Rule& rule, const std::string& path, Change change,
                   std::vector<FieldChange>& changes) {
  if (before == after) return;
  if constexpr (Nested<Value, Rule>) {
    compare(before, after, table_of(std::type_identity<Value>(), rule), path, change, changes);
  } else {
    changes.push_back({.field = path, .change = change});
  }
}

template <class Value, class Rule>
void compare_value(const std::optional<Value>& before, const std::optional<Value>& after, const Rule& rule,
                   const std::string& path, Change change, std::vector<FieldChange>& changes) {
  if (before.has_value() && after.has_value()) {
    compare_value(*before, *after, rule, path, change, changes);
  } else if (before.has_value() || after.has_value()) {
    changes.push_back({.field = path, .change = change});
  }
}

template <class Struct, class Table>
void compare(const Struct& before, const Struct& after, const Table& table, std::string_view parent, Change inherited,
             std::vector<FieldChange>& changes) {
  for_each(table, [&](const auto& line) {
    compare_value(before.*line.member, after.*line.member, line.rule, join_path(parent, line.name),
                  line.change.value_or(inherited), changes);
  });
}

}  // namespace

std::vector<FieldInfo> all_fields() {
  std::vector<FieldInfo> fields;
  list(Fields<EngineSpec>::table(), "spec", Change::Live, fields);
  return fields;
}

std::vector<FieldChange> changed_fields(const EngineSpec& before, const EngineSpec& after) {
  std::vector<FieldChange> changes;
  compare(before, after, Fields<EngineSpec>::table(), "spec", Change::Live, changes);
  return changes;
}

std::vector<std::string> restart_fields(const std::vector<FieldChange>& changes) {
  std::vector<std::string> fields;
  for (const FieldChange& change : changes) {
    if (change.change == Change::Restart) fields.push_back(change.field);
  }
  return fields;
}

}  // namespace rubato
