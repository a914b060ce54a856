// SPDX-License-Identifier: Apache-2.0
// One table of commands and one of flags serve reading and help.
#include "daemon/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

namespace rubato {
namespace {

struct CommandLine {
  Command command;
  std::string_view words;  // that come first, with one blank between them
  Action action;
  std::string_view operand;  // placeholder of what is no flag; empty: there is none
  std::string_view help;
};
constexpr std::array command_lines{
    CommandLine{Command::None, "", Action::Serve, "", "serves the model of a manifest"},
    CommandLine{Command::Explain, "explain", Action::Explain, "",
                "what the tuner decided, why, and what came of it, from the state folder's journal; the newest is last"},
    CommandLine{Command::Plan, "plan", Action::Plan, "",
                "which settings the twin would choose for a trace, and how attainment falls with load"},
    CommandLine{Command::RegimesExport, "regimes export", Action::ExportRegimes, "",
                "the loads that were met and what served them best, as JSON"},
    CommandLine{Command::RegimesImport, "regimes import", Action::ImportRegimes, "FILE",
                "hands regimes of another node to this state folder; the daemon takes them at its next start"},
};

constexpr unsigned bit(Command command) {
  return 1U << static_cast<unsigned>(command);
}
constexpr unsigned serving = bit(Command::None);
constexpr unsigned explaining = bit(Command::Explain);
constexpr unsigned planning = bit(Command::Plan);
constexpr unsigned exporting = bit(Command::RegimesExport);
constexpr unsigned importing = bit(Command::RegimesImport);
constexpr unsigned always = serving | explaining | planning | exporting | importing;

struct Flag {
  unsigned commands;  // that take it
  std::string_view name;
  std::string_view value;  // placeholder in the usage text; empty: the flag takes none
  std::string_view help;
  Result<void> (*set)(Options&, const std::string&);
};

template <std::string Options::*member>
Result<void> set_text(Options& options, const std::string& value) {
  options.*member = value;
  return {};
}

template <Action action>
Result<void> set_action(Options& options, const std::string& /*none*/) {
  options.action = action;
  return {};
}

Result<void> set_log_format(Options& options, const std::string& value) {
  if (value == "text") {
    options.log_format = LogFormat::Text;
  } else if (value == "json") {
    options.log_format = LogFormat::Json;
  } else {
    return unexpected(ErrorCode::InvalidArgument, "'" + value + "' is not one of text, json");
  }
  return {};
}

Result<void> set_drain_timeout(Options& options, const std::string& value) {
  const Result<Duration> duration = parse_duration(value);
  if (!duration) return Unexpected(duration.error());
  options.drain_timeout = *duration;
  return {};
}

Result<Duration> positive_duration(const std::string& value) {
  Result<Duration> duration = parse_duration(value);
  if (duration && *duration <= Duration::zero()) return unexpected(ErrorCode::InvalidArgument, "must be above zero");
  return duration;
}

Result<void> set_since(Options& options, const std::string& value) {
  const Result<Duration> duration = positive_duration(value);
  if (!duration) return Unexpected(duration.error());
  options.since = *duration;
  return {};
}

Result<void> set_measure(Options& options, const std::string& value) {
  constexpr Duration longest = std::chrono::minutes(10);
  const Result<Duration> duration = positive_duration(value);
  if (!duration) return Unexpected(duration.error());
  if (*duration > longest) return unexpected(ErrorCode::InvalidArgument, "at most " + format_duration(longest));
  options.measure = *duration;
  return {};
}

Result<void> set_format(Options& options, const std::string& value) {
  using replay::TraceFormat;
  constexpr std::array names{std::pair{"azure", TraceFormat::Azure}, std::pair{"mooncake", TraceFormat::Mooncake},
                             std::pair{"lengths", TraceFormat::Lengths}, std::pair{"profile", TraceFormat::Profile}};
  for (const auto& [name, format] : names) {
    if (value != name) continue;
    options.workload.format = format;
    return {};
  }
  return unexpected(ErrorCode::InvalidArgument, "'" + value + "' is not one of azure, mooncake, lengths, profile");
}

Result<double> number_in(const std::string& value, double min, double max) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc() && end == value.data() + value.size() && number >= min && number <= max) return number;
  const auto shown = [](double limit) {
    std::array<char, 32> text{};
    return std::string(text.data(), std::to_chars(text.data(), text.data() + text.size(), limit).ptr);
  };
  return unexpected(ErrorCode::InvalidArgument, "'" + value + "' is not a number in " + shown(min) + ".." + shown(max));
}

template <double replay::WorkloadOptions::*member>
Result<void> set_scale(Options& options, const std::string& value) {
  const Result<double> number = number_in(value, 1e-6, 1e6);
  if (!number) return Unexpected(number.error());
  options.workload.*member = *number;
  return {};
}

Result<void> set_seconds(Options& options, const std::string& value) {
  const Result<double> seconds = number_in(value, 0.001, 1e6);
  if (!seconds) return Unexpected(seconds.error());
  options.workload.seconds = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(*seconds));
  return {};
}

Result<void> set_seed(Options& options, const std::string& value) {
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seed);
  if (error != std::errc() || end != value.data() + value.size())
    return unexpected(ErrorCode::InvalidArgument, "'" + value + "' is not a whole number from 0 on");
  options.workload.seed = seed;
  return {};
}

Result<void> set_trace(Options& options, const std::string& value) {
  options.workload.trace = value;
  return {};
}

Result<void> set_json(Options& options, const std::string& /*none*/) {
  options.output_format = OutputFormat::Json;
  return {};
}

Result<void> set_any_model(Options& options, const std::string& /*none*/) {
  options.model_keys = ModelKeys::Any;
  return {};
}

constexpr std::array flags{
    Flag{serving | planning, "--manifest", "FILE|DIR", "the Engine manifest; a directory may be a ConfigMap mount",
         set_text<&Options::manifest>},
    Flag{serving, "--listen", "HOST:PORT", "data port: OpenAI API, /metrics, /health (default 127.0.0.1:8000)",
         set_text<&Options::listen>},
    Flag{serving, "--control-listen", "HOST:PORT", "control port: probes, metrics, /apis, dashboard (default 127.0.0.1:8080)",
         set_text<&Options::control_listen>},
    Flag{serving | explaining | exporting | importing, "--state", "DIR",
         "where API changes, the tuner's journal and the twin's calibration survive a restart", set_text<&Options::state>},
    Flag{serving, "--log-format", "text|json", "how log lines are written to stderr (default text)", set_log_format},
    Flag{serving, "--drain-timeout", "DURATION", "after SIGTERM, how long running requests may go on (default 25s)",
         set_drain_timeout},
    Flag{serving, "--check", "", "only validate the manifest: status 0 when it is good, 1 with all its errors when not",
         set_action<Action::Check>},
    Flag{serving, "--check-exactness", "",
         "load the model and compare bits over chunks, company, lanes, preemption, reuse: PASS and 0, or the first difference "
         "and 1",
         set_action<Action::CheckExactness>},
    Flag{serving, "--model", "FOLDER", "with --check-exactness: a Hugging Face folder instead of a manifest, on the CPU",
         set_text<&Options::model>},
    Flag{serving, "--schema", "", "the JSON schema of the Engine manifest", set_action<Action::ShowSchema>},
    Flag{explaining, "--since", "DURATION", "only decisions of the last so long, such as 1h (default: all on record)", set_since},
    Flag{planning, "--trace", "FILE", "the load: a recorded trace, or a profile of phases", set_trace},
    Flag{planning, "--format", "NAME", "azure, mooncake, lengths or profile; told by the file where not given", set_format},
    Flag{planning, "--rate-scale", "X", "X times as many requests per second (default 1)",
         set_scale<&replay::WorkloadOptions::rate_scale>},
    Flag{planning, "--length-scale", "X", "prompts and outputs X times as long (default 1)",
         set_scale<&replay::WorkloadOptions::length_scale>},
    Flag{planning, "--rate", "R", "requests per second of format lengths (default 1)", set_scale<&replay::WorkloadOptions::rate>},
    Flag{planning, "--seconds", "N", "no arrivals after N seconds; the phases of a profile repeat until then", set_seconds},
    Flag{planning, "--calibration", "FILE",
         "step times as the daemon learnt them: calibration.json of its state folder (default: measure this machine)",
         set_text<&Options::calibration>},
    Flag{planning, "--measure", "DURATION", "without --calibration: how long to measure (default 5s)", set_measure},
    Flag{planning, "--seed", "N", "of drawn arrivals and lengths (default 1)", set_seed},
    Flag{explaining | planning, "--json", "", "JSON instead of text", set_json},
    Flag{exporting, "--output", "FILE", "where to write (default: standard output)", set_text<&Options::output>},
    Flag{exporting | importing, "--model-key", "KEY", "the model to speak of, where the state folder knows several",
         set_text<&Options::model_key>},
    Flag{importing, "--any-model", "", "take regimes of another model, machine or build, too", set_any_model},
    Flag{always, "--help", "", "this text", set_action<Action::ShowHelp>},
    Flag{serving, "--version", "", "the version", set_action<Action::ShowVersion>},
};

const CommandLine& line_of(Command command) {
  return *std::find_if(command_lines.begin(), command_lines.end(),
                       [&](const CommandLine& line) { return line.command == command; });
}

std::string program(const CommandLine& line) {
  return line.words.empty() ? "rubatod" : "rubatod " + std::string(line.words);
}

Unexpected misused(const std::string& name, const std::string& what) {
  return unexpected(ErrorCode::InvalidArgument, name, what);
}

/// The flag of this name, or why it cannot be given here.
Result<const Flag*> find_flag(const CommandLine& line, const std::string& name, const std::string& argument) {
  const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& one) { return one.name == name; });
  const std::string help = "; " + program(line) + " --help lists what is";
  if (flag == flags.end()) return misused(name, "'" + argument + "' is not known" + help);
  if ((flag->commands & bit(line.command)) == 0)
    return misused(name, name + " is not for " + program(line) + "; " + program(line) + " --help lists what is");
  return &*flag;
}

/// Takes the command's words off the front. A first word that begins no command is an error; a flag is none.
Result<const CommandLine*> take_command(const std::vector<std::string>& arguments, std::size_t& next) {
  if (arguments.empty() || arguments[0].starts_with("-")) return &line_of(Command::None);
  const std::string two = arguments.size() > 1 ? arguments[0] + " " + arguments[1] : arguments[0];
  for (const CommandLine& line : command_lines) {
    if (line.words.empty() || (line.words != arguments[0] && line.words != two)) continue;
    next = line.words == two && arguments.size() > 1 ? 2 : 1;
    return &line;
  }
  std::string known;
  for (const CommandLine& line : command_lines) {
    if (!line.words.empty()) known += (known.empty() ? "" : ", ") + std::string(line.words);
  }
  return misused(arguments[0], "'" + two + "' is not a command; there are " + known);
}

Result<void> set_flag(const CommandLine& line, const std::vector<std::string>& arguments, std::size_t& at, Options& options) {
  const std::size_t equals = arguments[at].find('=');
  const std::string name = arguments[at].substr(0, equals);
  const Result<const Flag*> found = find_flag(line, name, arguments[at]);
  if (!found) return Unexpected(found.error());
  const Flag& flag = **found;
  std::string value;
  if (flag.value.empty()) {
    if (equals != std::string::npos) return misused(name, name + " takes no value");
  } else if (equals != std::string::npos) {
    value = arguments[at].substr(equals + 1);
  } else if (at + 1 < arguments.size()) {
    value = arguments[++at];
  }
  if (!flag.value.empty() && value.empty()) return misused(name, name + " needs a value: " + std::string(flag.value));
  if (auto set = flag.set(options, value); !set) return misused(name, name + ": " + set.error().message);
  return {};
}

Result<void> check_serving(const Options& options) {
  const bool checks_bits = options.action == Action::CheckExactness;
  if (!options.model.empty() && !checks_bits) return misused("--model", "--model goes with --check-exactness alone");
  if (!options.model.empty() && !options.manifest.empty()) return misused("--model", "--model and --manifest exclude each other");
  const bool needs_manifest =
      options.action == Action::Serve || options.action == Action::Check || (checks_bits && options.model.empty());
  if (needs_manifest && options.manifest.empty())
    return misused("--manifest", "--manifest FILE|DIR is needed; manifests/examples/ has some to start from");
  return {};
}

Result<void> check_complete(const Options& options) {
  if (options.action == Action::ShowHelp) return {};
  switch (options.command) {
    case Command::None:
      return check_serving(options);
    case Command::Plan:
      if (options.manifest.empty()) return misused("--manifest", "--manifest FILE|DIR is needed: what would be served, and how");
      if (options.workload.trace.empty()) return misused("--trace", "--trace FILE is needed: the load to plan for");
      return {};
    case Command::RegimesImport:
      if (options.input.empty()) return misused("FILE", "FILE is needed: what `rubatod regimes export` wrote");
      [[fallthrough]];
    case Command::Explain:
    case Command::RegimesExport:
      if (options.state.empty()) return misused("--state", "--state DIR is needed: the folder that the daemon was given");
      return {};
  }
  return {};
}

}  // namespace

Result<Options> parse_options(const std::vector<std::string>& arguments) {
  Options options;
  std::size_t at = 0;
  const Result<const CommandLine*> found = take_command(arguments, at);
  if (!found) return Unexpected(found.error());
  const CommandLine& line = **found;
  options.command = line.command;
  options.action = line.action;
  for (; at < arguments.size(); ++at) {
    if (!line.operand.empty() && options.input.empty() && !arguments[at].starts_with("-")) {
      options.input = arguments[at];
      continue;
    }
    if (auto set = set_flag(line, arguments, at, options); !set) return Unexpected(std::move(set).error());
  }
  if (auto complete = check_complete(options); !complete) return Unexpected(std::move(complete).error());
  return options;
}

std::string usage_text(Command command) {
  const CommandLine& line = line_of(command);
  std::string text = "usage: " + program(line) + (command == Command::None ? " --manifest FILE|DIR" : "") +
                     (command == Command::Plan ? " --manifest FILE|DIR --trace FILE" : "") +
                     ((bit(command) & (explaining | exporting | importing)) != 0 ? " --state DIR" : "") +
                     (line.operand.empty() ? "" : " " + std::string(line.operand)) + " [options]\n\n";
  const auto add = [&text](const std::string& left, std::string_view right) {
    std::string padded = "  " + left;
    padded.resize(std::max<std::size_t>(padded.size() + 2, 30), ' ');
    text += padded + std::string(right) + "\n";
  };
  if (command == Command::None) {
    for (const CommandLine& other : command_lines) {
      if (!other.words.empty()) add(program(other), other.help);
    }
    text += "\n";
  } else {
    text += std::string(line.help) + "\n\n";
  }
  for (const Flag& flag : flags) {
    if ((flag.commands & bit(command)) == 0) continue;
    add(std::string(flag.name) + (flag.value.empty() ? "" : " ") + std::string(flag.value), flag.help);
  }
  return text;
}

}  // namespace rubato
