// SPDX-License-Identifier: Apache-2.0
// The house rules as tests: include arrows, rooms of third-party code, file headers, sizes, clocks and names. Reads the tree as
// text, and every rule is first shown to catch a planted offence.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct SourceFile {
  std::string path;  // from the root, with '/'
  std::vector<std::string> lines;
};

const std::array<std::string_view, 5> product_rooms{"manifests", "policies", "engine", "tuner", "daemon"};

std::vector<SourceFile> read_tree() {
  const fs::path root = RUBATO_SOURCE_DIR;
  std::vector<SourceFile> files;
  for (const std::string_view top : {"manifests", "policies", "engine", "tuner", "daemon", "tests"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      const std::string extension = entry.path().extension().string();
      if (!entry.is_regular_file() || (extension != ".h" && extension != ".cpp" && extension != ".cu" && extension != ".cuh"))
        continue;
      SourceFile file{.path = fs::relative(entry.path(), root).generic_string(), .lines = {}};
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) file.lines.push_back(line);
      files.push_back(std::move(file));
    }
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return files;
}

std::string room_of(const std::string& path) {
  return path.substr(0, path.find('/'));
}
bool in_product(const SourceFile& file) {
  return std::find(product_rooms.begin(), product_rooms.end(), room_of(file.path)) != product_rooms.end();
}
bool starts_with(const std::string& text, std::string_view prefix) {
  return text.rfind(prefix, 0) == 0;
}

using Offences = std::vector<std::string>;

std::string place(const SourceFile& file, std::size_t line) {
  return file.path + ":" + std::to_string(line + 1);
}

// Which rooms a room may include: manifests <- policies <- engine <- daemon, manifests <- policies <- tuner <- daemon.
Offences arrow_offences(const SourceFile& file) {
  static const std::map<std::string, std::set<std::string>> allowed{
      {"manifests", {"manifests"}},
      {"policies", {"manifests", "policies"}},
      {"engine", {"manifests", "policies", "engine"}},
      {"tuner", {"manifests", "policies", "tuner"}},
      {"daemon", {"manifests", "policies", "engine", "tuner", "daemon"}}};
  static const std::regex quoted(R"re(^\s*#\s*include\s*"([^"]+)")re");
  Offences offences;
  if (!in_product(file)) return offences;
  for (std::size_t i = 0; i < file.lines.size(); ++i) {
    std::smatch match;
    if (!std::regex_search(file.lines[i], match, quoted)) continue;
    const std::string target = match[1];
    if (starts_with(target, "hwy/")) continue;  // Highway's own re-inclusion headers are written with quotes
    if (!allowed.at(room_of(file.path)).contains(room_of(target))) offences.push_back(place(file, i) + " includes " + target);
  }
  return offences;
}

// Third-party headers and the only places that may include them.
Offences third_party_offences(const SourceFile& file) {
  static const std::vector<std::pair<std::string, std::vector<std::string>>> homes{
      {"openssl/", {"manifests/content_hash"}},
      {"yaml-cpp/", {"manifests/read_", "daemon/replay/"}},
      {"boost/", {"daemon/http/", "daemon/replay/"}},
      {"Eigen/", {"tuner/", "engine/reference/"}},
      {"nlopt", {"tuner/"}},
      {"hwy/", {"engine/cpu/"}},
      {"immintrin.h", {"engine/cpu/"}},
      {"cuda", {"engine/cuda/"}},
      {"sqlite3", {"tuner/journal"}},
      {"spdlog/", {"daemon/"}},
      {"fmt/", {"daemon/"}},
      {"prometheus/", {"daemon/metrics/"}},
      {"pcre2", {"engine/text/"}},
      {"utf8proc", {"engine/text/normalizer"}}};
  static const std::regex include(R"re(^\s*#\s*include\s*[<"]([^>"]+)[>"])re");
  Offences offences;
  if (!in_product(file)) return offences;
  for (std::size_t i = 0; i < file.lines.size(); ++i) {
    std::smatch match;
    if (!std::regex_search(file.lines[i], match, include)) continue;
    for (const auto& [library, rooms] : homes) {
      if (!starts_with(match[1], library)) continue;
      const bool home = std::any_of(rooms.begin(), rooms.end(), [&](const auto& room) { return starts_with(file.path, room); });
      if (!home) offences.push_back(place(file, i) + " includes " + match[1].str());
    }
  }
  return offences;
}

Offences header_offences(const SourceFile& file) {
  Offences offences;
  if (file.lines.empty() || file.lines[0] != "// SPDX-License-Identifier: Apache-2.0")
    offences.push_back(file.path + " lacks the SPDX line");
  if (file.path.ends_with(".h") &&
      std::find(file.lines.begin(), file.lines.end(), std::string("#pragma once")) == file.lines.end()) {
    offences.push_back(file.path + " lacks #pragma once");
  }
  return offences;
}

Offences size_offences(const SourceFile& file) {
  Offences offences;
  const std::size_t limit = file.path.ends_with(".cu") || !in_product(file) ? 600 : 400;
  // About 400 lines: a tenth over is still one thing.
  if (file.lines.size() > limit + limit / 10) {
    offences.push_back(file.path + " has " + std::to_string(file.lines.size()) + " lines; about " + std::to_string(limit) +
                       " are allowed");
  }
  if (!in_product(file)) return offences;
  // clang-format puts a namespace-level function's last brace alone in column 0.
  static const std::regex not_a_function(
      R"(^(namespace|class|struct|enum|union|extern|#|//|template\s*<[^>]*>\s*(class|struct)|constexpr|const|inline constexpr))");
  std::size_t begin = 0;
  bool inside = false;
  for (std::size_t i = 0; i < file.lines.size(); ++i) {
    const std::string& line = file.lines[i];
    if (!inside && !line.empty() && line[0] != ' ' && line[0] != '}' && line.ends_with("{") &&
        !std::regex_search(line, not_a_function)) {
      inside = true;
      begin = i;
    } else if (inside && line == "}") {
      inside = false;
      if (i - begin > 85) offences.push_back(place(file, begin) + " is a function of " + std::to_string(i - begin) + " lines");
    }
  }
  return offences;
}

// Time is an argument everywhere but in daemon/, and nothing reads the environment.
Offences purity_offences(const SourceFile& file) {
  static const std::regex clock(R"((steady_clock|system_clock|high_resolution_clock)::now|gettimeofday|clock_gettime)");
  static const std::regex environment(R"(\bgetenv\s*\()");
  static const std::regex thread(R"(std::j?thread\b)");
  static const std::regex sleep(R"(sleep_for|sleep_until|\busleep\s*\()");
  Offences offences;
  const std::string room = room_of(file.path);
  for (std::size_t i = 0; i < file.lines.size(); ++i) {
    const std::string& line = file.lines[i];
    if (in_product(file) && room != "daemon" && std::regex_search(line, clock))
      offences.push_back(place(file, i) + " reads a clock");
    if (in_product(file) && std::regex_search(line, environment)) offences.push_back(place(file, i) + " reads the environment");
    if ((room == "manifests" || room == "policies" || room == "tuner") && std::regex_search(line, thread)) {
      offences.push_back(place(file, i) + " starts a thread");
    }
    if (in_product(file) && room != "daemon" && std::regex_search(line, sleep)) offences.push_back(place(file, i) + " sleeps");
  }
  return offences;
}

Offences name_offences(const SourceFile& file) {
  static const std::regex vague(R"((^|[/_])(utils?|common|helpers?|managers?|misc)([._/]|$))");
  Offences offences;
  if (std::regex_search(file.path, vague)) offences.push_back(file.path + " has a name that says nothing");
  return offences;
}

template <class Rule>
void expect_clean(Rule rule) {
  Offences all;
  for (const SourceFile& file : read_tree()) {
    for (std::string& offence : rule(file)) all.push_back(std::move(offence));
  }
  std::ostringstream text;
  for (const std::string& offence : all) text << "\n  " << offence;
  EXPECT_TRUE(all.empty()) << text.str();
}

SourceFile planted(std::string path, std::vector<std::string> lines) {
  return SourceFile{.path = std::move(path), .lines = std::move(lines)};
}

TEST(Tidy, include_arrows_point_one_way) {
  EXPECT_EQ(arrow_offences(planted("policies/x.cpp", {"#include \"engine/lane.h\""})).size(), 1U);
  EXPECT_EQ(arrow_offences(planted("tuner/x.cpp", {"#include \"engine/lane.h\""})).size(), 1U);
  EXPECT_EQ(arrow_offences(planted("engine/x.cpp", {"#include \"tuner/tuner.h\""})).size(), 1U);
  EXPECT_TRUE(arrow_offences(planted("daemon/x.cpp", {"#include \"tuner/tuner.h\""})).empty());
  expect_clean(arrow_offences);
}

TEST(Tidy, third_party_code_stays_in_its_room) {
  EXPECT_EQ(third_party_offences(planted("daemon/main.cpp", {"#include <boost/asio.hpp>"})).size(), 1U);
  EXPECT_EQ(third_party_offences(planted("manifests/checks.cpp", {"#include <yaml-cpp/yaml.h>"})).size(), 1U);
  expect_clean(third_party_offences);
}

TEST(Tidy, files_begin_with_their_licence_and_headers_are_included_once) {
  EXPECT_EQ(header_offences(planted("tuner/x.h", {"// something"})).size(), 2U);
  expect_clean(header_offences);
}

TEST(Tidy, files_and_functions_hold_one_thing) {
  std::vector<std::string> long_function{"void f() {"};
  long_function.resize(100, "  x();");
  long_function.emplace_back("}");
  EXPECT_EQ(size_offences(planted("tuner/x.cpp", long_function)).size(), 1U);
  EXPECT_EQ(size_offences(planted("tuner/x.cpp", std::vector<std::string>(500, "x"))).size(), 1U);
  expect_clean(size_offences);
}

TEST(Tidy, only_the_daemon_owns_clocks_threads_and_sleeps) {
  EXPECT_EQ(purity_offences(planted("tuner/x.cpp", {"auto t = std::chrono::steady_clock::now();"})).size(), 1U);
  EXPECT_EQ(purity_offences(planted("daemon/x.cpp", {"getenv(\"X\")"})).size(), 1U);
  EXPECT_EQ(purity_offences(planted("policies/x.cpp", {"std::jthread t;"})).size(), 1U);
  expect_clean(purity_offences);
}

TEST(Tidy, names_say_what_a_file_is) {
  EXPECT_EQ(name_offences(planted("daemon/http_utils.h", {})).size(), 1U);
  EXPECT_EQ(name_offences(planted("engine/common/x.h", {})).size(), 1U);
  expect_clean(name_offences);
}

}  // namespace
