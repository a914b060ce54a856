// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/state_file.h"

#include <algorithm>
#include <fstream>
#include <system_error>

#include "daemon/durable_write.h"
#include "manifests/json.h"

namespace rubato::control {
namespace {

namespace fs = std::filesystem;

constexpr int format_number = 1;

std::int64_t milliseconds_of(WallTime time) {
  return time.time_since_epoch().count();
}
WallTime wall_time(std::int64_t milliseconds) {
  return WallTime(std::chrono::milliseconds(milliseconds));
}

bool holds_only_texts(const Json& object) {
  return object.is_object() && std::all_of(object.begin(), object.end(), [](const Json& value) { return value.is_string(); });
}

}  // namespace

Json to_json(const SavedState& state) {
  Json json{{"format", format_number},
            {"uid", state.uid},
            {"created", milliseconds_of(state.created)},
            {"generation", state.generation},
            {"spec", state.api},
            {"overrideSet", milliseconds_of(state.api_override_set)},
            {"labels", state.labels},
            {"annotations", state.annotations}};
  if (state.file_override) json["fileOverride"] = to_json(*state.file_override);
  json["fileOverrideSet"] = milliseconds_of(state.file_override_set);
  return json;
}

Result<SavedState> saved_state_from_json(const Json& json) {
  SavedState state;
  try {
    if (json.at("format").get<int>() != format_number) {
      return unexpected(ErrorCode::InvalidArgument,
                        "has format " + json.at("format").dump() + ", not " + std::to_string(format_number));
    }
    state.uid = json.at("uid").get<std::string>();
    state.created = wall_time(json.at("created").get<std::int64_t>());
    state.generation = json.at("generation").get<std::int64_t>();
    state.api = json.at("spec");
    state.api_override_set = wall_time(json.at("overrideSet").get<std::int64_t>());
    state.labels = json.at("labels");
    state.annotations = json.at("annotations");
    state.file_override_set = wall_time(json.at("fileOverrideSet").get<std::int64_t>());
    if (json.contains("fileOverride")) {
      auto pins = override_from_json(json.at("fileOverride"));
      if (!pins.ok()) return unexpected(ErrorCode::InvalidArgument, "fileOverride is no override");
      state.file_override = std::move(pins.value);
    }
  } catch (const Json::exception& error) {
    return unexpected(ErrorCode::InvalidArgument, std::string("is not complete: ") + error.what());
  }
  if (!state.api.is_object() || !holds_only_texts(state.labels) || !holds_only_texts(state.annotations) || state.uid.empty() ||
      state.generation < 1) {
    return unexpected(ErrorCode::InvalidArgument, "holds values of the wrong kind");
  }
  return state;
}

StateFile::StateFile(fs::path directory, const std::string& engine_name) {
  if (directory.empty()) return;
  std::error_code ignored;  // shows at the first save, by name
  fs::create_directories(directory, ignored);
  path_ = directory / (engine_name + ".state.json");
}

LoadedState StateFile::load() {
  LoadedState loaded;
  std::error_code error;
  if (path_.empty() || !fs::exists(path_, error)) return loaded;
  const auto size = fs::file_size(path_, error);
  Result<SavedState> state = unexpected(ErrorCode::InvalidArgument, "cannot be read");
  if (!error && size <= static_cast<std::uintmax_t>(bytes_max)) {
    std::ifstream file(path_, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const Json json = Json::parse(text, nullptr, false);
    state = json.is_discarded() ? Result<SavedState>(unexpected(ErrorCode::InvalidArgument, "is not JSON"))
                                : saved_state_from_json(json);
  }
  if (state) {
    loaded.state = *std::move(state);
    return loaded;
  }
  const fs::path aside = path_.string() + ".damaged";
  fs::rename(path_, aside, error);
  loaded.problem = path_.string() + " " + state.error().message + "; it was moved to " + aside.string() +
                   " and what had been set over the API is lost";
  return loaded;
}

Result<void> StateFile::save(const SavedState& state) {
  if (path_.empty()) return {};
  return write_durably(path_, to_json(state).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace rubato::control
