// SPDX-License-Identifier: Apache-2.0
// See table.h.
#include "tests/bench/search/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace rubato::study {
namespace {

constexpr double never = std::numeric_limits<double>::infinity();

std::string decimal(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// What one row did in one cell, over its seeds.
struct Summary {
  std::string row;
  std::vector<double> windows;  // infinite: never
  std::vector<double> lost;
  std::vector<double> final_share;
  std::vector<double> attainment;
  std::vector<double> over_static;  // attainment less that of the best single setting
  std::vector<double> changes;
  std::vector<double> trials;
  std::vector<double> cpu;
  std::vector<double> simulated;
  bool has_windows = false;
};

struct Group {
  Kind kind = Kind::Cell;
  std::string title;
  std::vector<Summary> rows;
};

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

std::string title_of(const Record& record) {
  return record.workload + ", load " + decimal(record.load, 2) + ", truth " + record.truth + ", " + record.space + " space";
}

std::vector<Group> grouped(const std::vector<Record>& records) {
  std::vector<Group> groups;
  for (const Record& record : records) {
    const std::string title = title_of(record);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const Group& one) { return one.kind == record.kind && one.title == title; });
    if (group == groups.end()) group = groups.insert(groups.end(), Group{.kind = record.kind, .title = title, .rows = {}});
    auto row = std::find_if(group->rows.begin(), group->rows.end(), [&](const Summary& one) { return one.row == record.row; });
    if (row == group->rows.end()) {
      row = group->rows.insert(group->rows.end(), Summary{});
      row->row = record.row;
    }
    row->has_windows = record.kind == Kind::Cell && record.row != "twovalue";
    row->windows.push_back(record.windows.value_or(never));
    row->lost.push_back(record.lost);
    row->final_share.push_back(record.final_share);
    row->attainment.push_back(record.attainment);
    row->over_static.push_back(record.attainment - record.static_attainment);
    row->changes.push_back(record.changes_per_hour);
    row->trials.push_back(static_cast<double>(record.effort.trials));
    row->cpu.push_back(record.effort.cpu_seconds);
    row->simulated.push_back(to_seconds(record.effort.simulated));
  }
  return groups;
}

std::string windows_text(const Summary& row, double at) {
  if (!row.has_windows) return "-";
  const double value = quantile(row.windows, at);
  return value == never ? "never" : decimal(value, 1);
}

std::string search_row(const Summary& row) {
  return "| " + row.row + " | " + windows_text(row, 0.5) + " | " + windows_text(row, 0.9) + " | " +
         decimal(quantile(row.lost, 0.5), 2) + " | " + decimal(quantile(row.lost, 0.9), 2) + " | " +
         decimal(quantile(row.final_share, 0.5), 3) + " | " + decimal(mean(row.attainment), 3) + " | " +
         decimal(mean(row.over_static), 3) + " | " + decimal(mean(row.trials), 1) + " | " + decimal(mean(row.simulated), 0) +
         " | " + decimal(mean(row.cpu), 2) + " |\n";
}

std::string load_row(const Summary& row) {
  return "| " + row.row + " | " + decimal(mean(row.attainment), 3) + " | " +
         decimal(*std::min_element(row.attainment.begin(), row.attainment.end()), 3) + " | " + decimal(mean(row.over_static), 3) +
         " | " + decimal(mean(row.changes), 1) + " | " + decimal(*std::max_element(row.changes.begin(), row.changes.end()), 1) +
         " | " + decimal(mean(row.trials), 1) + " | " + decimal(mean(row.cpu), 2) + " |\n";
}

}  // namespace

double quantile(std::vector<double> values, double at) {
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<std::size_t>(std::ceil(at * static_cast<double>(values.size())));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

nlohmann::ordered_json to_json(const std::vector<Record>& records, Clocked clocked) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Record& record : records) {
    nlohmann::ordered_json one{{"kind", name_of(record.kind)},
                               {"workload", record.workload},
                               {"load", record.load},
                               {"truth", record.truth},
                               {"space", record.space},
                               {"row", record.row},
                               {"seed", record.seed},
                               {"windows", nullptr},
                               {"lostWindows", record.lost},
                               {"finalShare", record.final_share},
                               {"attainment", record.attainment},
                               {"staticAttainment", record.static_attainment},
                               {"changesPerHour", record.changes_per_hour},
                               {"settings", record.settings},
                               {"trials", record.effort.trials},
                               {"searches", record.effort.searches},
                               {"rollbacks", record.effort.rollbacks},
                               {"alarms", record.effort.alarms},
                               {"retunes", record.effort.retunes},
                               {"simulatedSeconds", to_seconds(record.effort.simulated)}};
    if (!record.changes.empty()) one["changes"] = record.changes;
    if (record.windows) one["windows"] = *record.windows;
    if (clocked == Clocked::Yes) one["cpuSeconds"] = record.effort.cpu_seconds;
    all.push_back(std::move(one));
  }
  return all;
}

Result<std::vector<Record>> records_from_json(const std::string& text) {
  std::vector<Record> records;
  try {
    for (const nlohmann::json& one : nlohmann::json::parse(text)) {
      Record record;
      const std::optional<Kind> kind = kind_named(one.at("kind"));
      if (!kind) {
        return Unexpected(Error{.code = ErrorCode::InvalidArgument, .field = "kind", .message = "kind: no such kind of run"});
      }
      record.kind = *kind;
      record.workload = one.at("workload");
      record.load = one.at("load");
      record.truth = one.at("truth");
      record.space = one.at("space");
      record.row = one.at("row");
      record.seed = one.at("seed");
      if (!one.at("windows").is_null()) record.windows = one.at("windows").get<double>();
      record.lost = one.at("lostWindows");
      record.final_share = one.at("finalShare");
      record.attainment = one.at("attainment");
      record.static_attainment = one.at("staticAttainment");
      record.changes_per_hour = one.at("changesPerHour");
      record.settings = one.at("settings");
      record.effort.trials = one.at("trials");
      record.effort.searches = one.at("searches");
      record.effort.rollbacks = one.at("rollbacks");
      record.effort.alarms = one.at("alarms");
      record.effort.retunes = one.at("retunes");
      record.effort.simulated = from_seconds(one.at("simulatedSeconds"));
      record.effort.cpu_seconds = one.value("cpuSeconds", 0.0);
      records.push_back(std::move(record));
    }
  } catch (const nlohmann::json::exception& error) {
    return Unexpected(Error{.code = ErrorCode::InvalidArgument, .field = {}, .message = error.what()});
  }
  return records;
}

std::string to_markdown(const std::vector<Record>& records) {
  std::string text;
  for (const Group& group : grouped(records)) {
    text +=
        "**" + name_of(group.kind) + ": " + group.title + "** (" + std::to_string(group.rows.front().lost.size()) + " seeds)\n\n";
    if (group.kind == Kind::Cell) {
      text +=
          "| row | windows, median | p90 | lost, median | p90 | final share | attainment | over best static | trials | twin, "
          "simulated s | twin, CPU s |\n|---|---|---|---|---|---|---|---|---|---|---|\n";
    } else {
      text +=
          "| row | attainment, mean | worst | over best static | changes per hour | most | trials | tuning, CPU s |\n"
          "|---|---|---|---|---|---|---|---|\n";
    }
    for (const Summary& row : group.rows) text += group.kind == Kind::Cell ? search_row(row) : load_row(row);
    text += "\n";
  }
  return text;
}

}  // namespace rubato::study
