// SPDX-License-Identifier: Apache-2.0
// One table of flags serves reading and help.
#include "daemon/replay/options.h"

#include <charconv>
#include <functional>

namespace rubato::replay {
namespace {

using Apply = std::function<Result<void>(Options&, const std::string&)>;

struct Flag {
  const char* name;
  const char* takes;
  const char* help;
  Apply apply;
};

Apply text(std::string ClientOptions::*member) {
  return [member](Options& options, const std::string& value) -> Result<void> {
    options.client.*member = value;
    return {};
  };
}

template <class Number>
Result<Number> number_in(const std::string& value, Number min, Number max) {
  Number number{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !(number >= min && number <= max)) {
    return unexpected(ErrorCode::InvalidArgument,
                      "`" + value + "` is not a number in " + std::to_string(min) + ".." + std::to_string(max));
  }
  return number;
}

/// reference(options) is where the number goes.
template <class Number, class Reference>
Apply number(Number min, Number max, Reference reference) {
  return [=](Options& options, const std::string& value) -> Result<void> {
    const Result<Number> parsed = number_in<Number>(value, min, max);
    if (!parsed) return Unexpected(parsed.error());
    reference(options) = *parsed;
    return {};
  };
}

/// A duration with its unit, or a bare number of seconds where the flag's name says seconds.
template <class Reference>
Apply duration(Reference reference) {
  return [=](Options& options, const std::string& value) -> Result<void> {
    const Result<Duration> parsed = parse_duration(value);
    if (!parsed) return Unexpected(parsed.error());
    if (*parsed <= Duration(0)) return unexpected(ErrorCode::InvalidArgument, "must be above zero");
    reference(options) = *parsed;
    return {};
  };
}

Result<void> set_format(Options& options, const std::string& value) {
  if (value == "azure") {
    options.workload.format = TraceFormat::Azure;
  } else if (value == "mooncake") {
    options.workload.format = TraceFormat::Mooncake;
  } else if (value == "lengths") {
    options.workload.format = TraceFormat::Lengths;
  } else if (value == "profile") {
    options.workload.format = TraceFormat::Profile;
  } else {
    return unexpected(ErrorCode::InvalidArgument, "`" + value + "` is none of azure, mooncake, lengths, profile");
  }
  return {};
}

Result<void> set_seconds(Options& options, const std::string& value) {
  const Result<double> seconds = number_in<double>(value, 0.001, 1e6);
  if (!seconds) return Unexpected(seconds.error());
  options.workload.seconds = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(*seconds));
  return {};
}

Result<void> set_seed(Options& options, const std::string& value) {
  const auto seed = number_in<std::uint64_t>(value, 0, UINT64_MAX);
  if (!seed) return Unexpected(seed.error());
  options.workload.seed = *seed;
  options.client.seed = *seed;
  return {};
}

const std::vector<Flag>& flags() {
  static const std::vector<Flag> table = {
      {"--url", "URL", "server, such as http://127.0.0.1:8000 (required)", text(&ClientOptions::url)},
      {"--trace", "FILE", "what to replay (required)",
       [](Options& options, const std::string& value) -> Result<void> {
         options.workload.trace = value;
         return {};
       }},
      {"--format", "NAME", "azure, mooncake, lengths or profile; told by the file where not given", set_format},
      {"--rate-scale", "X", "X times as many requests per second [1]",
       number<double>(1e-6, 1e6, [](Options& o) -> double& { return o.workload.rate_scale; })},
      {"--length-scale", "X", "prompts and outputs X times as long [1]",
       number<double>(1e-6, 1e6, [](Options& o) -> double& { return o.workload.length_scale; })},
      {"--rate", "R", "requests per second of format lengths [1]",
       number<double>(1e-6, 1e6, [](Options& o) -> double& { return o.workload.rate; })},
      {"--seconds", "N", "no arrivals after N seconds; the phases of a profile repeat until then", set_seconds},
      {"--max-model-len", "N", "shorten requests to N tokens in all",
       number<std::int32_t>(2, 1 << 30, [](Options& o) -> std::optional<std::int32_t>& { return o.workload.max_model_len; })},
      {"--ttft", "TIME", "target of the time to the first token [500ms]",
       duration([](Options& o) -> Duration& { return o.targets.ttft; })},
      {"--itl", "TIME", "target of a request's p99 token gap [50ms]",
       duration([](Options& o) -> Duration& { return o.targets.itl; })},
      {"--attainment", "PERCENT", "requests that must meet both [99]",
       number<double>(0, 100, [](Options& o) -> double& { return o.targets.attainment; })},
      {"--model", "NAME", "model to ask for; the first of /v1/models where not given", text(&ClientOptions::model)},
      {"--vocabulary", "N", "prompt ids are below N [256]",
       number<std::int32_t>(2, 1 << 24, [](Options& o) -> std::int32_t& { return o.client.vocabulary; })},
      {"--timeout", "TIME", "a request that is not complete by then has failed [60s]",
       duration([](Options& o) -> Duration& { return o.client.timeout; })},
      {"--max-in-flight", "N", "arrivals beyond N running requests fail at once [1024]",
       number<std::int32_t>(1, 1 << 16, [](Options& o) -> std::int32_t& { return o.client.max_in_flight; })},
      {"--control", "URL", "rubato's control port: shows the knobs while they move", text(&ClientOptions::control)},
      {"--json", "FILE", "writes the report as JSON; `-` is standard output",
       [](Options& options, const std::string& value) -> Result<void> {
         options.json = value;
         return {};
       }},
      {"--seed", "N", "of drawn arrivals, lengths and prompts [1]", set_seed},
  };
  return table;
}

}  // namespace

Result<Options> parse_options(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    const std::size_t equals = arguments[index].starts_with("--") ? arguments[index].find('=') : std::string::npos;
    const std::string name = arguments[index].substr(0, equals);
    if (name == "--help" || name == "-h") {
      options.help = true;
      return options;
    }
    const Flag* flag = nullptr;
    for (const Flag& known : flags()) {
      if (name == known.name) flag = &known;
    }
    if (flag == nullptr)
      return unexpected(ErrorCode::InvalidArgument, name, name + ": not a flag of rubato-replay; --help lists them");
    std::string value;
    if (equals != std::string::npos) {
      value = arguments[index].substr(equals + 1);
    } else if (index + 1 < arguments.size()) {
      value = arguments[++index];
    } else {
      return unexpected(ErrorCode::InvalidArgument, name, name + ": needs a value: " + flag->takes);
    }
    if (value.empty()) return unexpected(ErrorCode::InvalidArgument, name, name + ": empty; it takes " + flag->takes);
    if (auto applied = flag->apply(options, value); !applied) {
      return unexpected(ErrorCode::InvalidArgument, name, name + ": " + applied.error().message);
    }
  }
  if (options.client.url.empty()) return unexpected(ErrorCode::InvalidArgument, "--url", "--url: is needed");
  if (options.workload.trace.empty()) return unexpected(ErrorCode::InvalidArgument, "--trace", "--trace: is needed");
  return options;
}

std::string usage_text() {
  std::string text = "usage: rubato-replay --url URL --trace FILE [flags]\n\n";
  for (const Flag& flag : flags()) {
    std::string left = std::string("  ") + flag.name + " " + flag.takes;
    left.resize(std::max<std::size_t>(left.size() + 2, 26), ' ');
    text += left + flag.help + "\n";
  }
  return text;
}

}  // namespace rubato::replay
