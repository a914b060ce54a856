// SPDX-License-Identifier: Apache-2.0
#include "daemon/options.h"

#include <array>
#include <functional>
#include <string_view>

namespace rubato {
namespace {

struct Flag {
  std::string_view name;
  std::string_view value;  // placeholder in the usage text; empty: the flag takes none
  std::string_view help;
  Result<void> (*set)(Options&, const std::string&);
};

Result<void> set_log_format(Options& options, const std::string& value) {
  if (value == "text") {
    options.log_format = LogFormat::Text;
  } else if (value == "json") {
    options.log_format = LogFormat::Json;
  } else {
    return unexpected(ErrorCode::InvalidArgument, "--log-format", "--log-format: '" + value + "' is not one of text, json");
  }
  return {};
}

const std::array flags{
    Flag{"--manifest", "FILE|DIR", "the Engine manifest; a directory may be a ConfigMap mount",
         [](Options& options, const std::string& value) -> Result<void> {
           options.manifest = value;
           return {};
         }},
    Flag{"--listen", "HOST:PORT", "data port: OpenAI API, /metrics, /health (default 127.0.0.1:8000)",
         [](Options& options, const std::string& value) -> Result<void> {
           options.listen = value;
           return {};
         }},
    Flag{"--control-listen", "HOST:PORT", "control port: probes, metrics, /apis, dashboard (default 127.0.0.1:8080)",
         [](Options& options, const std::string& value) -> Result<void> {
           options.control_listen = value;
           return {};
         }},
    Flag{"--state", "DIR", "where API changes and the tuner's journal survive a restart",
         [](Options& options, const std::string& value) -> Result<void> {
           options.state = value;
           return {};
         }},
    Flag{"--log-format", "text|json", "how log lines are written to stderr (default text)", set_log_format},
    Flag{"--drain-timeout", "DURATION", "after SIGTERM, how long running requests may go on (default 25s)",
         [](Options& options, const std::string& value) -> Result<void> {
           const Result<Duration> duration = parse_duration(value);
           if (!duration)
             return unexpected(ErrorCode::InvalidArgument, "--drain-timeout", "--drain-timeout: " + duration.error().message);
           options.drain_timeout = *duration;
           return {};
         }},
    Flag{"--check", "", "only validate the manifest: status 0 when it is good, 1 with all its errors when not",
         [](Options& options, const std::string&) -> Result<void> {
           options.action = Action::Check;
           return {};
         }},
    Flag{"--check-exactness", "",
         "load the model and compare bits over chunks, company, lanes, preemption, reuse: PASS and 0, or the first difference "
         "and 1",
         [](Options& options, const std::string&) -> Result<void> {
           options.action = Action::CheckExactness;
           return {};
         }},
    Flag{"--model", "FOLDER", "with --check-exactness: a Hugging Face folder instead of a manifest, on the CPU",
         [](Options& options, const std::string& value) -> Result<void> {
           options.model = value;
           return {};
         }},
    Flag{"--schema", "", "the JSON schema of the Engine manifest",
         [](Options& options, const std::string&) -> Result<void> {
           options.action = Action::ShowSchema;
           return {};
         }},
    Flag{"--help", "", "this text",
         [](Options& options, const std::string&) -> Result<void> {
           options.action = Action::ShowHelp;
           return {};
         }},
    Flag{"--version", "", "the version",
         [](Options& options, const std::string&) -> Result<void> {
           options.action = Action::ShowVersion;
           return {};
         }},
};

const Flag* find_flag(std::string_view name) {
  for (const Flag& flag : flags) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

}  // namespace

Result<Options> parse_options(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::size_t equals = arguments[i].find('=');
    const std::string name = arguments[i].substr(0, equals);
    const Flag* flag = find_flag(name);
    if (flag == nullptr) {
      return unexpected(ErrorCode::InvalidArgument, name, "'" + arguments[i] + "' is not known; --help lists what is");
    }
    std::string value;
    if (flag->value.empty()) {
      if (equals != std::string::npos) return unexpected(ErrorCode::InvalidArgument, name, name + " takes no value");
    } else if (equals != std::string::npos) {
      value = arguments[i].substr(equals + 1);
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    }
    if (!flag->value.empty() && value.empty()) {
      return unexpected(ErrorCode::InvalidArgument, name, name + " needs a value: " + std::string(flag->value));
    }
    if (auto set = flag->set(options, value); !set) return Unexpected(std::move(set).error());
  }
  const bool checks_bits = options.action == Action::CheckExactness;
  if (!options.model.empty() && !checks_bits)
    return unexpected(ErrorCode::InvalidArgument, "--model", "--model goes with --check-exactness alone");
  if (!options.model.empty() && !options.manifest.empty())
    return unexpected(ErrorCode::InvalidArgument, "--model", "--model and --manifest exclude each other");
  const bool needs_manifest =
      options.action == Action::Serve || options.action == Action::Check || (checks_bits && options.model.empty());
  if (needs_manifest && options.manifest.empty()) {
    return unexpected(ErrorCode::InvalidArgument, "--manifest",
                      "--manifest FILE|DIR is needed; manifests/examples/ has some to start from");
  }
  return options;
}

std::string usage_text() {
  std::string text = "usage: rubatod --manifest FILE|DIR [options]\n\n";
  for (const Flag& flag : flags) {
    std::string left = "  " + std::string(flag.name) + (flag.value.empty() ? "" : " ") + std::string(flag.value);
    left.resize(std::max<std::size_t>(left.size() + 2, 30), ' ');
    text += left + std::string(flag.help) + "\n";
  }
  return text;
}

}  // namespace rubato
