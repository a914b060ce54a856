// SPDX-License-Identifier: Apache-2.0
// config.json and generation_config.json of a Hugging Face folder to ModelConfig. What the engine would compute wrongly (another
// rope, a sliding window in use, a mixture of experts, a quantised checkpoint) is refused by name, never approximated.
#include "engine/model/config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/model/config_parts.h"
#include "engine/model/config_ranges.h"
#include "engine/model/json_object.h"

namespace rubato::engine {
namespace {

constexpr std::int64_t file_size_max = 4 << 20;

struct Reader {
  const char* architecture;
  void (*read)(JsonObject& json, ModelConfig& config);
};

constexpr Reader readers[] = {
    {"LlamaForCausalLM", read_llama_family},
    {"MistralForCausalLM", read_llama_family},
    {"Qwen2ForCausalLM", read_llama_family},
    {"Qwen3ForCausalLM", read_llama_family},
    {"Mamba2ForCausalLM", read_mamba2},
    {"BambaForCausalLM", read_bamba},
    {"GraniteMoeHybridForCausalLM", read_granite_hybrid},
    {"NemotronHForCausalLM", read_nemotron_hybrid},
};

const Reader* find_reader(JsonObject& json) {
  std::string supported;
  for (const Reader& reader : readers) supported += (supported.empty() ? "" : ", ") + std::string(reader.architecture);
  const nlohmann::json* names = json.find("architectures");
  if (names == nullptr || !names->is_array() || names->size() != 1 || !names->front().is_string()) {
    json.refuse("architectures", (names == nullptr ? "is missing" : shown(*names) + " is no list of one name") +
                                     std::string("; supported: ") + supported);
    return nullptr;
  }
  const std::string name = names->front().get<std::string>();
  for (const Reader& reader : readers) {
    if (name == reader.architecture) return &reader;
  }
  json.refuse("architectures", shown(names->front()) + " is not supported; supported: " + supported);
  return nullptr;
}

/// Adds the end tokens of one file to those of the other, each once, and takes its begin token when there is none yet.
void read_special_tokens(JsonObject& json, ModelConfig& config) {
  const JsonObject::IntegerRange range{.min = 0, .max = std::max(0, config.vocabulary - 1)};
  for (const TokenId id : json.ids("eos_token_id", range)) {
    if (std::find(config.end_tokens.begin(), config.end_tokens.end(), id) == config.end_tokens.end())
      config.end_tokens.push_back(id);
  }
  if (!config.begin_token && json.has("bos_token_id")) config.begin_token = json.integer("bos_token_id", range);
}

Result<nlohmann::json> parse_object(const std::filesystem::path& path) {
  auto text = read_text_file(path, file_size_max);
  if (!text) return Unexpected(std::move(text).error());
  return parse_json_object(*text, path.string());
}

Unexpected joined(const std::vector<std::string>& errors) {
  std::string message;
  for (const std::string& error : errors) message += (message.empty() ? "" : "\n") + error;
  return unexpected(ErrorCode::InvalidArgument, message);
}

}  // namespace

Result<ModelConfig> read_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  auto object = parse_object(path);
  if (!object) return Unexpected(std::move(object).error());
  std::vector<std::string> errors;
  JsonObject json(*object, path.string(), errors);
  ModelConfig config;
  const Reader* reader = find_reader(json);
  if (reader == nullptr) return joined(errors);
  config.architecture = reader->architecture;
  reader->read(json, config);
  read_special_tokens(json, config);

  const std::filesystem::path generation_path = folder / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(generation_path, ignored)) {
    auto generation = parse_object(generation_path);
    if (!generation) return Unexpected(std::move(generation).error());
    JsonObject generation_json(*generation, generation_path.string(), errors);
    read_special_tokens(generation_json, config);
  }
  if (!errors.empty()) return joined(errors);
  return config;
}

}  // namespace rubato::engine
