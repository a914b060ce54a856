// SPDX-License-Identifier: Apache-2.0
// The study of the search, from the command line. See README.md in this folder.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>

#include "tests/bench/search/table.h"

namespace rubato::study {
namespace {

constexpr const char* usage =
    "search_study [--kind cell|day|alternate|steady] [--workload W,..|all] [--load L,..] [--truth T,..] [--space full|static]\n"
    "             [--rows R,..] [--seeds N] [--windows N] [--period S] [--hours H] [--phase S]\n"
    "             [--traces FOLDER] [--cache FILE] [--threads 1|2] [--json FILE] [--table] [--cpu]\n"
    "search_study --merge FILE...      tables of several --json files\n"
    "search_study --quick              one cell: fails unless ours is no slower than the plain search\n";

[[noreturn]] void fail(const std::string& message) {
  std::cerr << "search_study: " << message << "\n\n" << usage;
  std::exit(2);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

double number(const std::string& name, const std::string& text, double least, double most) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= least && value <= most)) {
    fail(name + " is '" + text + "'; a number from " + std::to_string(least) + " to " + std::to_string(most) + " is allowed");
  }
  return value;
}

struct CommandLine {
  RunRequest pattern;
  std::vector<const Workload*> workloads{workload_named("chat")};
  std::vector<double> loads{0.95};
  std::vector<TruthKind> truths{TruthKind::Nominal};
  std::string traces;
  std::string json;
  OracleOptions oracle;
  Clocked clocked = Clocked::No;
  bool table = false;
  bool quick = false;
  std::vector<std::string> merge;
};

std::vector<const Workload*> workloads_named(const std::string& text) {
  std::vector<const Workload*> found;
  if (text == "all") {
    for (const Workload& workload : all_workloads()) found.push_back(&workload);
    return found;
  }
  for (const std::string& name : split(text)) {
    found.push_back(workload_named(name));
    if (found.back() == nullptr) fail("--workload " + name + ": there is none of this name");
  }
  return found;
}

std::vector<std::string> rows_named(const std::string& text) {
  const std::vector<std::string>& known = all_rows();
  if (text == "all") return known;
  for (const std::string& name : split(text)) {
    if (std::find(known.begin(), known.end(), name) == known.end()) fail("--rows " + name + ": there is none of this name");
  }
  return split(text);
}

// Options that say what is run. False: not one of them.
bool read_run_option(CommandLine& line, const std::string& name, const std::string& value) {
  if (name == "--kind") {
    const std::optional<Kind> kind = kind_named(value);
    if (!kind) fail("--kind " + value + ": cell, day, alternate or steady is allowed");
    line.pattern.kind = *kind;
  } else if (name == "--workload") {
    line.workloads = workloads_named(value);
  } else if (name == "--load") {
    line.loads.clear();
    for (const std::string& one : split(value)) line.loads.push_back(number(name, one, 0.05, 4));
  } else if (name == "--truth") {
    line.truths.clear();
    for (const std::string& one : split(value)) {
      const std::optional<TruthKind> truth = truth_named(one);
      if (!truth) fail("--truth " + one + ": there is none of this name");
      line.truths.push_back(*truth);
    }
  } else if (name == "--space") {
    if (value != "full" && value != "static") fail("--space " + value + ": full or static is allowed");
    line.pattern.space = value == "full" ? Space::Full : Space::Static;
  } else if (name == "--rows") {
    line.pattern.rows = rows_named(value);
  } else if (name == "--seeds") {
    line.pattern.seeds = static_cast<std::uint64_t>(number(name, value, 1, 1000));
  } else if (name == "--windows") {
    line.pattern.windows = static_cast<int>(number(name, value, 4, 1000));
  } else if (name == "--period") {
    line.pattern.period = from_seconds(number(name, value, 20, 1200));
  } else if (name == "--hours") {
    line.pattern.length = from_seconds(3600 * number(name, value, 0.2, 48));
  } else if (name == "--phase") {
    line.pattern.phase = from_seconds(number(name, value, 60, 7200));
  } else {
    return false;
  }
  return true;
}

CommandLine parse(int count, char** arguments) {
  CommandLine line;
  line.pattern.rows = all_rows();
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (name == "--help") {
      std::cout << usage;
      std::exit(0);
    }
    if (name == "--table") {
      line.table = true;
    } else if (name == "--cpu") {
      line.clocked = Clocked::Yes;
    } else if (name == "--quick") {
      line.quick = true;
    } else if (name == "--merge") {
      while (i + 1 < count) line.merge.emplace_back(arguments[++i]);
    } else {
      if (i + 1 >= count) fail(name + ": a value is missing, or it is not known");
      const std::string value = arguments[++i];
      if (name == "--traces") {
        line.traces = value;
      } else if (name == "--json") {
        line.json = value;
      } else if (name == "--cache") {
        line.oracle.cache = value;
      } else if (name == "--threads") {
        line.pattern.threads = line.oracle.threads = static_cast<int>(number(name, value, 1, 2));
      } else if (!read_run_option(line, name, value)) {
        fail(name + ": not known");
      }
    }
  }
  return line;
}

void print(const std::vector<Record>& records, const CommandLine& line) {
  if (!line.json.empty()) std::ofstream(line.json) << to_json(records, line.clocked).dump(1) << '\n';
  if (!line.table && !line.json.empty()) return;
  std::vector<Record> shown = records;
  if (line.clocked == Clocked::No) {
    for (Record& record : shown) record.effort.cpu_seconds = 0;
  }
  std::cout << to_markdown(shown);
}

int merge(const std::vector<std::string>& files) {
  std::vector<Record> all;
  for (const std::string& file : files) {
    std::ifstream in(file);
    std::stringstream text;
    text << in.rdbuf();
    const Result<std::vector<Record>> records = records_from_json(text.str());
    if (!records) fail(file + ": " + records.error().message);
    all.insert(all.end(), records->begin(), records->end());
  }
  std::cout << to_markdown(all);
  return 0;
}

// One cell, few seeds. Not a measure of quality: it fails when twin or tuner have come to nothing.
int quick() {
  const Traces traces;
  Oracle oracle(traces, {.measured = std::chrono::seconds(60), .repeats = 1, .grid = Grid::Coarse});
  const RunRequest request{.workload = workload_named("retrieval"),
                           .load = 0.95,
                           .truth = TruthKind::Slower,
                           .space = Space::Static,
                           .rows = {"plain", "ours"},
                           .rate = 6.2,
                           .seeds = 2,
                           .windows = 12};
  const std::vector<Record> records = run(request, traces, oracle);
  std::cout << to_markdown(records);
  double lost[2] = {0, 0};
  double windows[2] = {0, 0};
  for (const Record& record : records) {
    const int row = record.row == "ours" ? 1 : 0;
    lost[row] += record.lost;
    windows[row] += record.windows.value_or(request.windows);
  }
  if (lost[1] <= lost[0] && windows[1] <= windows[0]) return 0;
  std::cerr << "ours took " << windows[1] << " windows until stable and lost " << lost[1] << ", the plain search " << windows[0]
            << " and " << lost[0] << "\n";
  return 1;
}

std::vector<RunRequest> requests_of(const CommandLine& line) {
  std::vector<RunRequest> requests;
  const bool of_one_load = line.pattern.kind == Kind::Cell || line.pattern.kind == Kind::Steady;
  for (const TruthKind truth : line.truths) {
    for (const double load : line.loads) {
      RunRequest request = line.pattern;
      request.truth = truth;
      request.load = load;
      if (!of_one_load) {
        requests.push_back(request);
        continue;
      }
      for (const Workload* workload : line.workloads) {
        request.workload = workload;
        requests.push_back(request);
      }
    }
  }
  return requests;
}

int main_with(const CommandLine& line) {
  if (!line.merge.empty()) return merge(line.merge);
  if (line.quick) return quick();
  Traces traces;
  if (!line.traces.empty()) {
    Result<Traces> read = Traces::read(line.traces);
    if (!read) fail(read.error().message);
    traces = std::move(*read);
  }
  Oracle oracle(traces, line.oracle);
  std::vector<Record> records;
  for (const RunRequest& request : requests_of(line)) {
    for (Record& record : run(request, traces, oracle)) records.push_back(std::move(record));
    oracle.save();
  }
  print(records, line);
  return 0;
}

}  // namespace
}  // namespace rubato::study

int main(int count, char** arguments) {
  return rubato::study::main_with(rubato::study::parse(count, arguments));
}
