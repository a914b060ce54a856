// SPDX-License-Identifier: Apache-2.0
// Profiles: phases of Poisson arrivals with drawn lengths. A key that is not known is an error with its line.
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <variant>

#include "daemon/replay/workload.h"

namespace rubato::replay {
namespace {

constexpr std::size_t phases_max = 10000;
constexpr std::size_t arrivals_max = 10'000'000;
constexpr double p90_of_normal = 1.2815515655446004;

struct Fixed {
  double value = 1;
};
struct Uniform {
  double low = 1;
  double high = 1;
};
struct LogNormal {
  double p50 = 1;
  double p90 = 1;
};
struct Distribution {
  std::variant<Fixed, Uniform, LogNormal> kind;
  double max = 1e6;

  std::int32_t draw(std::mt19937_64& random) const {
    double value = 0;
    if (const auto* fixed = std::get_if<Fixed>(&kind)) {
      value = fixed->value;
    } else if (const auto* uniform = std::get_if<Uniform>(&kind)) {
      value = std::uniform_real_distribution<double>(uniform->low - 0.5, uniform->high + 0.5)(random);
    } else {
      const auto& [p50, p90] = std::get<LogNormal>(kind);
      value = p50 * std::exp(std::normal_distribution<double>()(random) * std::log(p90 / p50) / p90_of_normal);
    }
    return static_cast<std::int32_t>(std::clamp(std::round(value), 1.0, max));
  }
};

/// Thrown within this file and caught in read_profile, as yaml-cpp's own exceptions are.
struct BadProfile {
  std::string message;
};

class Reader {
 public:
  explicit Reader(std::string name) : name_(std::move(name)) {}

  [[noreturn]] void fail(const YAML::Node& node, const std::string& what) const {
    const YAML::Mark mark = node.Mark();
    throw BadProfile{name_ + ":" + std::to_string(mark.line + 1) + ":" + std::to_string(mark.column + 1) + ": " + what};
  }

  void expect_keys(const YAML::Node& node, const std::set<std::string>& allowed) const {
    if (!node.IsMap()) fail(node, "expected a mapping");
    std::set<std::string> seen;
    for (const auto& entry : node) {
      const auto key = entry.first.as<std::string>();
      if (!allowed.contains(key)) fail(entry.first, "unknown key `" + key + "`; allowed are " + join(allowed));
      if (!seen.insert(key).second) fail(entry.first, "key `" + key + "` stands twice");
    }
  }

  double member(const YAML::Node& parent, const std::string& key, double min, double max) const {
    const YAML::Node node = parent[key];
    if (!node) fail(parent, "key `" + key + "` is missing");
    return number(node, key, min, max);
  }

  double number(const YAML::Node& node, const std::string& key, double min, double max) const {
    double value = 0;
    if (!node.IsScalar() || !YAML::convert<double>::decode(node, value) || !(value >= min && value <= max)) {
      fail(node, key + " must be a number in " + format(min) + ".." + format(max));
    }
    return value;
  }

  Distribution distribution(const YAML::Node& parent, const std::string& key) const {
    const YAML::Node node = parent[key];
    if (!node) fail(parent, "key `" + key + "` is missing");
    constexpr double length_max = 1e6;
    if (node.IsScalar()) return {Fixed{number(node, key, 1, length_max)}};
    expect_keys(node, {"fixed", "uniform", "lognormal", "max"});
    Distribution drawn;
    if (node["max"]) drawn.max = member(node, "max", 1, length_max);
    if (node.size() != (node["max"] ? 2u : 1u)) fail(node, "exactly one of fixed, uniform, lognormal must be given");
    if (node["fixed"]) {
      drawn.kind = Fixed{member(node, "fixed", 1, length_max)};
    } else if (const YAML::Node range = node["uniform"]) {
      if (!range.IsSequence() || range.size() != 2) fail(range, "uniform takes [low, high]");
      const double low = number(range[0], "low", 1, length_max);
      drawn.kind = Uniform{low, number(range[1], "high", low, length_max)};
    } else {
      const YAML::Node shape = node["lognormal"];
      if (!shape) fail(node, "exactly one of fixed, uniform, lognormal must be given");
      expect_keys(shape, {"p50", "p90"});
      const double p50 = member(shape, "p50", 1, length_max);
      drawn.kind = LogNormal{p50, member(shape, "p90", p50, length_max)};
    }
    return drawn;
  }

 private:
  static std::string join(const std::set<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
  }
  static std::string format(double value) {
    std::string text = std::to_string(value);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.ends_with('.')) text.pop_back();
    return text;
  }

  std::string name_;
};

Workload draw(const YAML::Node& root, const Reader& reader, const WorkloadOptions& options) {
  reader.expect_keys(root, {"phases"});
  const YAML::Node phases = root["phases"];
  if (!phases || !phases.IsSequence() || phases.size() == 0 || phases.size() > phases_max) {
    reader.fail(root, "phases must be a list of 1 to " + std::to_string(phases_max) + " phases");
  }
  std::mt19937_64 random(options.seed);
  Workload workload;
  double start = 0;
  const auto duration = [](double seconds) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  };
  // Once, or over and over until options.seconds are full.
  const double seconds_wanted = options.seconds ? std::chrono::duration<double>(*options.seconds).count() : 0;
  for (std::size_t count = 0; count < phases.size() || start < seconds_wanted; ++count) {
    if (count == phases_max) break;
    const YAML::Node& node = phases[count % phases.size()];
    const std::size_t round = count / phases.size();
    reader.expect_keys(node, {"name", "seconds", "rate", "prompt", "output"});
    const double seconds = reader.member(node, "seconds", 0.001, 1e6);
    const double rate = reader.member(node, "rate", 1e-6, 1e6) * options.rate_scale;
    const Distribution prompt = reader.distribution(node, "prompt");
    const Distribution output = reader.distribution(node, "output");
    const auto index = static_cast<std::uint32_t>(workload.phases.size());
    std::string name = node["name"] ? node["name"].as<std::string>() : "phase " + std::to_string(count % phases.size() + 1);
    if (round > 0) name += " " + std::to_string(round + 1);
    workload.phases.push_back({name, duration(start), duration(seconds)});
    std::exponential_distribution<double> gap(rate);
    for (double at = gap(random); at < seconds; at += gap(random)) {
      if (workload.arrivals.size() == arrivals_max) reader.fail(node, "more than ten million requests");
      // One after the other, so that the draws are in a defined order.
      const std::int32_t prompt_tokens = prompt.draw(random);
      const std::int32_t output_tokens = output.draw(random);
      workload.arrivals.push_back({duration(start + at), prompt_tokens, output_tokens, index});
    }
    start += seconds;
  }
  return workload;
}

}  // namespace

Result<Workload> read_profile(const std::string& text, const std::string& name, const WorkloadOptions& options) {
  try {
    return draw(YAML::Load(text), Reader(name), options);
  } catch (const BadProfile& bad) {
    return unexpected(ErrorCode::InvalidArgument, bad.message);
  } catch (const YAML::Exception& error) {
    return unexpected(ErrorCode::InvalidArgument, name + ":" + std::to_string(error.mark.line + 1) + ": " + error.msg);
  }
}

}  // namespace rubato::replay
