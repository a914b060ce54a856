// SPDX-License-Identifier: Apache-2.0
#include "daemon/calibration_file.h"

#include <nlohmann/json.hpp>

#include "daemon/durable_write.h"
#include "manifests/decode.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* calibration_kind = "Calibration";
constexpr std::uintmax_t bytes_max = 16UL << 20;

Unexpected bad_field(const std::string& field, const std::string& what) {
  return unexpected(ErrorCode::InvalidArgument, field, field + ": " + what);
}

Result<std::string> text_field(const Json& json, const char* name) {
  const auto found = json.find(name);
  if (found == json.end()) return bad_field(name, "is missing");
  if (!found->is_string()) return bad_field(name, "must be a text");
  return found->get<std::string>();
}

Result<void> expect_text(const Json& json, const char* name, std::string_view wanted) {
  Result<std::string> found = text_field(json, name);
  if (!found) return Unexpected(std::move(found).error());
  if (*found != wanted) return bad_field(name, "is '" + *found + "', must be '" + std::string(wanted) + "'");
  return {};
}

}  // namespace

std::string calibration_to_json(const Calibration& calibration) {
  return Json{{"apiVersion", api_version},
              {"kind", calibration_kind},
              {"modelKey", calibration.model_key},
              {"laws", Json::parse(calibration.laws.to_json())}}
             .dump(2, ' ', false, Json::error_handler_t::replace) +
         "\n";
}

Result<Calibration> calibration_from_json(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return unexpected(ErrorCode::InvalidArgument, "not a JSON object");
  if (auto kept = expect_text(json, "apiVersion", api_version); !kept) return Unexpected(std::move(kept).error());
  if (auto kept = expect_text(json, "kind", calibration_kind); !kept) return Unexpected(std::move(kept).error());
  Result<std::string> key = text_field(json, "modelKey");
  if (!key) return Unexpected(std::move(key).error());
  const auto laws_json = json.find("laws");
  if (laws_json == json.end()) return bad_field("laws", "is missing");
  Result<tuner::StepLaws> laws = tuner::StepLaws::from_json(laws_json->dump());
  if (!laws) {
    const std::string inner = laws.error().field;
    return bad_field(inner.empty() ? "laws" : "laws." + inner, laws.error().message);
  }
  return Calibration{.model_key = *std::move(key), .laws = *std::move(laws)};
}

std::filesystem::path calibration_path(const std::filesystem::path& state_directory) {
  return state_directory / "calibration.json";
}

Result<void> write_calibration(const std::filesystem::path& path, const Calibration& calibration) {
  return write_durably(path, calibration_to_json(calibration));
}

Result<Calibration> read_calibration(const std::filesystem::path& path) {
  Result<std::string> text = read_whole(path, bytes_max);
  if (!text) return Unexpected(std::move(text).error());
  Result<Calibration> calibration = calibration_from_json(*text);
  if (calibration) return calibration;
  Error error = std::move(calibration).error();
  error.message = path.string() + ": " + error.message;
  return Unexpected(std::move(error));
}

}  // namespace rubato
