// SPDX-License-Identifier: Apache-2.0
// Regimes as a file that people may read, edit and carry to another node. Every field is written and read by one function each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "manifests/decode.h"
#include "manifests/field_error.h"
#include "manifests/fields.h"
#include "manifests/json.h"
#include "tuner/regimes.h"

namespace rubato::tuner {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view list_kind = "RegimeList";
constexpr double feature_max = 1e9;
constexpr std::int64_t seconds_max = 253'402'300'799;  // the end of the year 9999

/// Enough digits for a load, few enough to be read.
double readable(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const double scale = std::pow(10.0, 8 - std::floor(std::log10(std::abs(value))));
  return std::round(value * scale) / scale;
}

std::string found_in(const Json& value) {
  if (value.is_string()) return in_quotes(value.get<std::string>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string number_text(double value) {
  return Json(value).dump();
}

/// One JSON object being read. The first fault is kept; reading goes on with whatever value, nothing of it is used.
class ObjectReader {
 public:
  ObjectReader(const Json& json, std::string path, std::optional<Error>& fault)
      : json_(json), path_(std::move(path)), fault_(fault) {
    if (!json_.is_object()) fail("", found_in(json_) + " must be an object");
  }

  std::int64_t whole(const std::string& name, std::int64_t least, std::int64_t most) {
    const std::string allowed = " must be a whole number in " + std::to_string(least) + ".." + std::to_string(most);
    const Json* value = member(name, allowed);
    if (!value) return least;
    const bool fits = value->is_number_integer() &&
                      (!value->is_number_unsigned() || value->get<std::uint64_t>() <= static_cast<std::uint64_t>(most));
    const std::int64_t number = fits ? value->get<std::int64_t>() : least;
    if (!fits || number < least || number > most) fail(name, found_in(*value) + allowed);
    return std::clamp(number, least, most);
  }
  std::int32_t count(const std::string& name, std::int64_t least, std::int64_t most) {
    return static_cast<std::int32_t>(whole(name, least, std::min<std::int64_t>(most, std::numeric_limits<std::int32_t>::max())));
  }
  double number(const std::string& name, double least, double most) {
    const std::string allowed = " must be a number in " + number_text(least) + ".." + number_text(most);
    const Json* value = member(name, allowed);
    if (!value) return least;
    const double found = value->is_number() ? value->get<double>() : NAN;
    if (!(found >= least && found <= most)) fail(name, found_in(*value) + allowed);
    return found >= least && found <= most ? found : least;
  }
  bool flag(const std::string& name) {
    const Json* value = member(name, " must be true or false");
    if (value && !value->is_boolean()) fail(name, found_in(*value) + " must be true or false");
    return value && value->is_boolean() && value->get<bool>();
  }
  Duration duration(const std::string& name, Duration least, Duration most) {
    const std::string allowed =
        " must be a duration in " + format_duration(least) + ".." + format_duration(most) + ", as in `250ms`";
    const Json* value = member(name, allowed);
    if (!value) return least;
    const auto found = value->is_string() ? parse_duration(value->get<std::string>()) : Result<Duration>(Duration(-1));
    const bool fits = found && *found >= least && *found <= most;
    if (!fits) fail(name, found_in(*value) + allowed);
    return fits ? *found : least;
  }
  std::string text(const std::string& name) {
    const Json* value = member(name, " must be a text");
    if (value && !value->is_string()) fail(name, found_in(*value) + " must be a text");
    return value && value->is_string() ? value->get<std::string>() : std::string();
  }
  /// Null when missing; that is then the fault.
  const Json* member(const std::string& name, const std::string& allowed) {
    known_.insert(name);
    if (!json_.is_object()) return nullptr;
    const auto found = json_.find(name);
    if (found != json_.end()) return &*found;
    fail(name, "is missing:" + allowed);
    return nullptr;
  }
  [[nodiscard]] std::string path_of(const std::string& name) const { return join_path(path_, name); }

  /// After all fields were read: whatever is left is a slip of the pen.
  void refuse_others() {
    if (!json_.is_object()) return;
    for (const auto& [name, value] : json_.items()) {
      if (known_.contains(name)) continue;
      std::string allowed;
      for (const std::string& one : known_) allowed += (allowed.empty() ? "" : ", ") + one;
      fail(name, "no such field; there are " + allowed);
    }
  }
  void fail(const std::string& name, const std::string& message) {
    if (fault_) return;
    const std::string field = name.empty() ? path_ : path_of(name);
    fault_ = Error{ErrorCode::InvalidArgument, field, (field.empty() ? "" : field + ": ") + message};
  }

 private:
  const Json& json_;
  std::string path_;
  std::optional<Error>& fault_;
  std::set<std::string> known_;
};

const Json& or_null(const Json* json) {
  static const Json null;
  return json ? *json : null;
}

// Knobs are decoded as the pins of a manifest are, so that ranges and messages are those of the manifest; then all must be there.
KnobValues settings_from(ObjectReader& item, std::optional<Error>& fault) {
  const Json* json = item.member("settings", " must be an object");
  ObjectReader reader(or_null(json), item.path_of("settings"), fault);
  KnobValues values;
  for_each(knob_table, [&](const auto& knob) { (void)reader.member(std::string(knob.name), " must be set"); });
  reader.refuse_others();
  if (fault) return values;
  const Decoded<OverrideSpec> decoded = override_from_json(*json);
  for (const FieldErrors* errors : {&decoded.errors, &decoded.unknown}) {
    for (const FieldError& error : *errors) {
      const std::size_t dot = error.field.rfind('.');
      reader.fail(dot == std::string::npos ? "" : error.field.substr(dot + 1), describe(error));
    }
  }
  for_each(knob_table, [&](const auto& knob) {
    const auto& pin = decoded.value.*knob.pin;
    if (!pin) reader.fail(std::string(knob.name), "must be set");
    if (pin) values.*knob.value = *pin;
  });
  if (values.max_num_batched_tokens < values.max_num_seqs + min_prefill_quantum) {
    reader.fail("maxNumBatchedTokens", std::to_string(values.max_num_batched_tokens) + " must be at least maxNumSeqs + " +
                                           std::to_string(min_prefill_quantum));
  }
  return values;
}

ObjectivesSpec objectives_from(ObjectReader& item, std::optional<Error>& fault) {
  ObjectReader reader(or_null(item.member("objectives", " must be an object")), item.path_of("objectives"), fault);
  ObjectivesSpec result;
  using namespace std::chrono_literals;
  result.ttft = reader.duration("ttft", 1ms, 1h);
  result.itl = reader.duration("itl", 100us, 10min);
  result.attainment = reader.count("attainment", 1, 100);
  reader.refuse_others();
  return result;
}

RegimeLoad load_from(ObjectReader& item, std::optional<Error>& fault) {
  ObjectReader reader(or_null(item.member("load", " must be an object")), item.path_of("load"), fault);
  RegimeLoad result;
  constexpr double feature_min = 1e-3;  // as load_of() bounds them
  result.features.rate = std::log2(reader.number("ratePerSecond", feature_min, feature_max));
  result.features.prompt = std::log2(reader.number("promptTokens", feature_min, feature_max));
  result.features.output = std::log2(reader.number("outputTokens", feature_min, feature_max));
  result.burstiness = reader.number("burstiness", 0, 1e6);
  reader.refuse_others();
  return result;
}

Evidence evidence_from(ObjectReader& item, std::optional<Error>& fault) {
  ObjectReader reader(or_null(item.member("evidence", " must be an object")), item.path_of("evidence"), fault);
  Evidence result;
  result.windows = reader.count("windows", 0, 1'000'000'000);
  result.judged = reader.count("judgedRequests", 0, RegimeMemory::evidence_judged_max);
  result.good = reader.count("goodRequests", 0, result.judged);
  result.ttft_misses = reader.count("ttftMisses", 0, result.judged);
  result.itl_misses = reader.count("itlMisses", 0, result.judged);
  result.ttft_excess = reader.number("ttftExcessLogRatio", -100, 100);
  result.itl_excess = reader.number("itlExcessLogRatio", -100, 100);
  result.saturated = reader.flag("saturated");
  result.draining = reader.flag("draining");
  reader.refuse_others();
  return result;
}

Regime regime_from(const Json& json, const std::string& path, std::optional<Error>& fault) {
  ObjectReader item(json, path, fault);
  Regime result;
  result.load = load_from(item, fault);
  result.best = settings_from(item, fault);
  result.evidence = evidence_from(item, fault);
  result.objectives = objectives_from(item, fault);
  result.visits = item.count("visits", 1, std::numeric_limits<std::int32_t>::max());
  result.last_seen = item.whole("lastSeenUnixSeconds", 0, seconds_max);
  result.measured = item.whole("measuredUnixSeconds", 0, seconds_max);
  item.refuse_others();
  return result;
}

Json to_json(const Regime& regime) {
  const LoadFeatures& features = regime.load.features;
  const Evidence& evidence = regime.evidence;
  return {{"load",
           {{"ratePerSecond", readable(std::exp2(features.rate))},
            {"promptTokens", readable(std::exp2(features.prompt))},
            {"outputTokens", readable(std::exp2(features.output))},
            {"burstiness", readable(regime.load.burstiness)}}},
          {"settings", rubato::to_json(regime.best)},
          {"evidence",
           {{"windows", evidence.windows},
            {"judgedRequests", evidence.judged},
            {"goodRequests", evidence.good},
            {"ttftMisses", evidence.ttft_misses},
            {"itlMisses", evidence.itl_misses},
            {"ttftExcessLogRatio", readable(evidence.ttft_excess)},
            {"itlExcessLogRatio", readable(evidence.itl_excess)},
            {"saturated", evidence.saturated},
            {"draining", evidence.draining}}},
          {"objectives",
           {{"ttft", format_duration(regime.objectives.ttft)},
            {"itl", format_duration(regime.objectives.itl)},
            {"attainment", regime.objectives.attainment}}},
          {"visits", regime.visits},
          {"lastSeenUnixSeconds", regime.last_seen},
          {"measuredUnixSeconds", regime.measured}};
}

void expect_text(ObjectReader& reader, const std::string& name, std::string_view wanted) {
  const std::string found = reader.text(name);
  if (found != wanted) reader.fail(name, in_quotes(found) + " must be " + std::string(wanted));
}

}  // namespace

std::string regimes_to_json(std::span<const Regime> regimes, const std::string& model_key) {
  Json items = Json::array();
  for (const Regime& regime : regimes) items.push_back(to_json(regime));
  const Json list{{"apiVersion", api_version}, {"kind", list_kind}, {"modelKey", model_key}, {"items", std::move(items)}};
  return list.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<ImportedRegimes> regimes_from_json(const std::string& text) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    return unexpected(ErrorCode::InvalidArgument, std::string("not JSON: ") + error.what());
  }
  std::optional<Error> fault;
  ObjectReader list(json, "", fault);
  expect_text(list, "apiVersion", api_version);
  expect_text(list, "kind", list_kind);
  ImportedRegimes result;
  result.model_key = list.text("modelKey");
  if (result.model_key.empty()) list.fail("modelKey", "must not be empty");
  const Json* items = list.member("items", " must be a list");
  list.refuse_others();
  if (items && !items->is_array()) list.fail("items", found_in(*items) + " must be a list");
  if (items && items->size() > regimes_import_max) {
    list.fail("items", std::to_string(items->size()) + " entries are more than " + std::to_string(regimes_import_max));
  }
  for (std::size_t i = 0; !fault && i < items->size(); ++i) {
    result.regimes.push_back(regime_from((*items)[i], "items[" + std::to_string(i) + "]", fault));
  }
  if (fault) return Unexpected(*fault);
  return result;
}

}  // namespace rubato::tuner
