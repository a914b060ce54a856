// SPDX-License-Identifier: Apache-2.0
// rubatod's command line. Small on purpose: what can be said in the manifest is said there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "manifests/result.h"
#include "manifests/units.h"

namespace rubato {

enum class LogFormat : std::uint8_t { Text, Json };
enum class Action : std::uint8_t { Serve, Check, CheckExactness, ShowSchema, ShowHelp, ShowVersion };

struct Options {
  Action action = Action::Serve;
  std::string manifest;                           // file or directory
  std::string model;                              // a model folder to check the exactness of, without a manifest
  std::string listen = "127.0.0.1:8000";          // data port
  std::string control_listen = "127.0.0.1:8080";  // control port
  std::string state;                              // directory; empty: nothing survives a restart
  LogFormat log_format = LogFormat::Text;
  Duration drain_timeout = std::chrono::seconds(25);  // below Kubernetes' default grace period of 30 s
};

/// InvalidArgument; field is the flag, message says what it takes. Both `--flag value` and `--flag=value` are read.
[[nodiscard]] Result<Options> parse_options(const std::vector<std::string>& arguments);

[[nodiscard]] std::string usage_text();

}  // namespace rubato
