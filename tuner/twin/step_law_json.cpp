// SPDX-License-Identifier: Apache-2.0
// Laws as JSON text and back, for calibration files. Numbers are written so that they read back the same.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "tuner/twin/step_law.h"

namespace rubato::tuner {

namespace {

using Json = nlohmann::ordered_json;

constexpr double log_reach = 10.0;
constexpr double coefficient_max = 1e6;  // seconds per unit
constexpr std::size_t laws_max = 64;
constexpr std::uint64_t believed = 100;  // steps that coefficients of a file count as

/// Reads fields of one object; the first fault is kept, with the path of its field.
class Reader {
 public:
  Reader(const Json& object, std::string path, std::optional<Error>& fault)
      : object_(object), path_(std::move(path)), fault_(fault) {
    if (!object_.is_object()) say(path_, "must be an object");
  }

  double number(const char* name, double min, double max) {
    const Json* value = member(name);
    return value != nullptr ? checked(*value, path_of(name), min, max) : min;
  }

  std::int32_t integer(const char* name, std::int32_t min, std::int32_t max) {
    const Json* value = member(name);
    if (value == nullptr) return min;
    if (!value->is_number_integer()) {
      say(path_of(name), "must be a whole number, not " + shortened(*value));
      return min;
    }
    return static_cast<std::int32_t>(checked(*value, path_of(name), min, max));
  }

  template <std::size_t count>
  std::array<double, count> numbers(const char* name, double min, double max) {
    std::array<double, count> result{};
    const Json* value = member(name);
    if (value == nullptr) return result;
    if (!value->is_array() || value->size() != count) {
      say(path_of(name), "must be a list of " + std::to_string(count) + " numbers");
      return result;
    }
    for (std::size_t i = 0; i < count; ++i) {
      result[i] = checked((*value)[i], path_of(name) + "[" + std::to_string(i) + "]", min, max);
    }
    return result;
  }

  /// An empty list where it is missing or too long.
  const Json& list(const char* name, std::size_t count_max) {
    static const Json none = Json::array();
    const Json* value = member(name);
    if (value == nullptr) return none;
    if (value->is_array() && value->size() <= count_max) return *value;
    say(path_of(name), "must be a list of at most " + std::to_string(count_max) + " objects");
    return none;
  }

  const Json* member(const char* name) {
    if (fault_) return nullptr;
    const auto found = object_.find(name);
    if (found != object_.end()) return &*found;
    say(path_of(name), "is missing");
    return nullptr;
  }

  [[nodiscard]] std::string path_of(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

  void say(const std::string& field, const std::string& what) {
    if (!fault_) fault_ = Error{.code = ErrorCode::InvalidArgument, .field = field, .message = field + " " + what};
  }

 private:
  static std::string shortened(const Json& value) {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 40) text = text.substr(0, 40) + "...";
    return text;
  }

  double checked(const Json& value, const std::string& field, double min, double max) {
    if (value.is_number()) {
      const double number = value.get<double>();
      if (number >= min && number <= max) return number;
    }
    say(field, "must be a number from " + Json(min).dump() + " to " + Json(max).dump() + ", not " + shortened(value));
    return min;
  }

  const Json& object_;
  std::string path_;
  std::optional<Error>& fault_;
};

std::optional<Json> parsed(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) return std::nullopt;
  return json;
}

Unexpected not_json() {
  return unexpected(ErrorCode::InvalidArgument, "the calibration is not JSON");
}

}  // namespace

std::string StepLaw::to_json() const {
  Json buckets = Json::array();
  for (const auto& [key, bucket] : buckets_) {
    buckets.push_back({{"key", key}, {"logFactor", bucket.log_factor}, {"weight", bucket.weight}});
  }
  return Json{{"observations", observation_count_},
              {"coefficients", averaged_count_ > 0 ? averaged_ : model_.coefficients()},
              {"logLevel", averaged_count_ > 0 ? log_level_ : 0.0},
              {"spreadSeconds", to_seconds(model_.spread())},
              {"relativeError", relative_error_},
              {"buckets", buckets},
              {"logQuantiles", log_quantiles_}}
      .dump();
}

Result<StepLaw> StepLaw::from_json(const std::string& text) {
  const std::optional<Json> json = parsed(text);
  if (!json) return not_json();
  std::optional<Error> fault;
  Reader read(*json, "", fault);
  StepLaw law;
  const double observations = read.number("observations", 0, 9e15);
  const auto coefficients = read.numbers<policies::StepTimeModel::coefficient_count>("coefficients", 0, coefficient_max);
  law.log_level_ = read.number("logLevel", -1, 1);
  const double spread = read.number("spreadSeconds", 0, coefficient_max);
  law.relative_error_ = read.number("relativeError", 0, 1);
  law.log_quantiles_ = read.numbers<quantile_count>("logQuantiles", -log_reach, log_reach);
  if (!std::is_sorted(law.log_quantiles_.begin(), law.log_quantiles_.end())) read.say("logQuantiles", "must not fall");
  const Json& buckets = read.list("buckets", buckets_max);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    Reader each(buckets[i], "buckets[" + std::to_string(i) + "]", fault);
    const std::int32_t key = each.integer("key", -1000, 1 << 24);
    law.buckets_[key] = {.log_factor = each.number("logFactor", -log_reach, log_reach), .weight = each.number("weight", 0, 1e6)};
  }
  if (fault) return Unexpected(*fault);
  law.observation_count_ = static_cast<std::uint64_t>(observations);
  if (law.observation_count_ > 0) {
    law.model_ = policies::StepTimeModel::from_coefficients(coefficients, from_seconds(spread));
    law.averaged_ = coefficients;
    law.averaged_count_ = believed;
    law.fill_errors();
  }
  return law;
}

std::string StepLaws::to_json() const {
  Json laws = Json::array();
  for (const auto& [key, law] : laws_) {
    if (law.observation_count() == 0) continue;
    laws.push_back({{"lane", key.first}, {"sharePercent", key.second}, {"law", Json::parse(law.to_json(), nullptr, false)}});
  }
  return Json{{"laws", laws}}.dump();
}

Result<StepLaws> StepLaws::from_json(const std::string& text) {
  const std::optional<Json> json = parsed(text);
  if (!json) return not_json();
  std::optional<Error> fault;
  Reader read(*json, "", fault);
  StepLaws laws;
  const Json& list = read.list("laws", laws_max);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string path = "laws[" + std::to_string(i) + "]";
    Reader each(list[i], path, fault);
    const std::int32_t lane = each.integer("lane", 0, 1 << 16);
    const std::int32_t share = each.integer("sharePercent", 1, 100);
    const Json* body = each.member("law");
    if (body == nullptr) break;
    Result<StepLaw> law = StepLaw::from_json(body->dump());
    if (!law) {
      const std::string field = law.error().field.empty() ? path + ".law" : path + ".law." + law.error().field;
      return unexpected(ErrorCode::InvalidArgument, field, path + ".law: " + law.error().message);
    }
    laws.observation_count_ += law->observation_count();
    laws.laws_.insert_or_assign({lane, share}, std::move(*law));
  }
  if (fault) return Unexpected(*fault);
  return laws;
}

}  // namespace rubato::tuner
