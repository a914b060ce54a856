// SPDX-License-Identifier: Apache-2.0
// rubatod's command line: serving and its checks by flags alone, the offline commands by name. Small on purpose: what can be said
// in the manifest is said there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/replay/workload.h"
#include "manifests/result.h"
#include "manifests/units.h"

namespace rubato {

enum class LogFormat : std::uint8_t { Text, Json };
enum class OutputFormat : std::uint8_t { Text, Json };
/// Whose regimes may be imported.
enum class ModelKeys : std::uint8_t { Own, Any };
/// The words that may come first. None: the flags say what is done.
enum class Command : std::uint8_t { None, Explain, Plan, RegimesExport, RegimesImport };
enum class Action : std::uint8_t {
  Serve,
  Check,
  CheckExactness,
  ShowSchema,
  ShowHelp,  // of the command
  ShowVersion,
  Explain,
  Plan,
  ExportRegimes,
  ImportRegimes,
};

struct Options {
  Command command = Command::None;
  Action action = Action::Serve;
  std::string manifest;                           // file or directory
  std::string model;                              // a model folder to check the exactness of, without a manifest
  std::string listen = "127.0.0.1:8000";          // data port
  std::string control_listen = "127.0.0.1:8080";  // control port
  std::string state;                              // directory; empty: nothing survives a restart
  LogFormat log_format = LogFormat::Text;
  Duration drain_timeout = std::chrono::seconds(25);  // below Kubernetes' default grace period of 30 s

  OutputFormat output_format = OutputFormat::Text;  // of explain and plan
  std::optional<Duration> since;                    // explain: no older decisions; empty: all that are on record
  replay::WorkloadOptions workload;                 // plan
  std::string calibration;                          // plan: empty: step times are measured on this machine
  Duration measure = std::chrono::seconds(5);       // plan: for how long
  std::string output;                               // regimes export: file; empty: standard output
  std::string input;                                // regimes import: file
  std::string model_key;                            // regimes: of which model; empty: the state folder says
  ModelKeys model_keys = ModelKeys::Own;            // regimes import
};

/// InvalidArgument; field is the flag, message says what it takes. Both `--flag value` and `--flag=value` are read.
[[nodiscard]] Result<Options> parse_options(const std::vector<std::string>& arguments);

/// Of one command; of None: everything that serving takes, and the names of the commands.
[[nodiscard]] std::string usage_text(Command command = Command::None);

}  // namespace rubato
