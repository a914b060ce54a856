// SPDX-License-Identifier: Apache-2.0
// Safetensors as they come and as an enemy would write them; synthetic weights; exact number formats.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "engine/model/number_formats.h"
#include "engine/model/safetensors_header.h"
#include "engine/model/tensors.h"
#include "engine/model/weights.h"
#include "tests/support/temporary_folder.h"

namespace rubato::engine {
namespace {

using nlohmann::json;
using test::TemporaryFolder;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Shape = std::vector<std::int64_t>;

std::string file_with_header(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return file + header + data;
}

/// A file of float32 tensors, each filled with value and of the given shape.
struct Filled {
  std::string name;
  Shape shape;
  float value = 0;
};

std::string file_with(const std::vector<Filled>& tensors) {
  json header = json::object();
  std::string data;
  for (const Filled& tensor : tensors) {
    std::size_t count = 1;
    for (const std::int64_t size : tensor.shape) count *= static_cast<std::size_t>(size);
    const std::size_t begin = data.size();
    for (std::size_t i = 0; i < count; ++i) data.append(reinterpret_cast<const char*>(&tensor.value), sizeof(float));
    header[tensor.name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return file_with_header(header.dump(), data);
}

std::string parse_error(const std::string& file) {
  const auto result = parse_safetensors(std::as_bytes(std::span(file)), "x.safetensors");
  return result ? "accepted" : result.error().message;
}

float first_value(WeightSource& source, const char* name, const Shape& shape) {
  const auto view = source.load(name, shape);
  EXPECT_TRUE(view) << view.error().message;
  float value = 0;
  std::memcpy(&value, view->bytes.data(), sizeof value);
  return value;
}

TEST(SafetensorsHeader, reads_names_types_shapes_and_places) {
  const std::string header =
      R"({"__metadata__":{"format":"pt","n":"1"},"b":{"shape":[2,3],"data_offsets":[4,16],"dtype":"BF16"},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"empty":{"dtype":"I64","shape":[0,5],"data_offsets":[4,4]}}   )";
  const std::string file = file_with_header(header, std::string(16, 'x'));
  const auto tensors = parse_safetensors(std::as_bytes(std::span(file)), "x");
  ASSERT_TRUE(tensors) << tensors.error().message;
  ASSERT_EQ(tensors->size(), 3U);
  const StoredTensor& b = (*tensors)[0];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.type->name, "BF16");
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(b.begin, static_cast<std::int64_t>(8 + header.size() + 4));
  EXPECT_EQ(b.end - b.begin, 12);
}

struct Damage {
  const char* name;
  std::string file;
  const char* says;
};

class SafetensorsDamage : public testing::TestWithParam<Damage> {};

TEST_P(SafetensorsDamage, is_refused_with_its_reason) {
  EXPECT_THAT(parse_error(GetParam().file), HasSubstr(GetParam().says));
}

std::string one(const std::string& entry, std::size_t bytes) {
  return file_with_header("{\"t\":" + entry + "}", std::string(bytes, 'x'));
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, SafetensorsDamage,
    testing::Values(
        Damage{"nothing", "", "0 bytes long"}, Damage{"short", "1234567", "7 bytes long"},
        Damage{"zero_length", std::string(8, '\0') + "{}", "header length 0 is outside"},
        Damage{"length_beyond_file", std::string("\xff\0\0\0\0\0\0\0{}", 10), "header length 255 is outside 2..2"},
        Damage{"length_huge", std::string(8, '\xff') + "{}", "18446744073709551615 is outside"},
        Damage{"no_json", file_with_header("{nonsense", ""), "no valid JSON"},
        Damage{"no_object", file_with_header("[]", ""), "does not begin with {"},
        Damage{"leading_blank", file_with_header(" {}", ""), "does not begin with {"},
        Damage{"trailing_text", file_with_header("{}x", ""), "no valid JSON"},
        Damage{"deep", file_with_header("{\"t\":" + std::string(100000, '['), ""), "holds a list where"},
        Damage{"unknown_dtype", one(R"({"dtype":"F128","shape":[1],"data_offsets":[0,16]})", 16),
               "tensor \"t\" has the unknown dtype \"F128\""},
        Damage{"dtype_number", one(R"({"dtype":1,"shape":[1],"data_offsets":[0,4]})", 4), "holds a number where"},
        Damage{"unknown_key", one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"z":"y"})", 4), "unknown key \"z\""},
        Damage{"key_twice", one(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})", 4), "key \"dtype\" twice"},
        Damage{"tensor_twice",
               file_with_header(
                   R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                   "xx"),
               "\"t\" stands in the header twice"},
        Damage{"missing_offsets", one(R"({"dtype":"F32","shape":[1]})", 4), "lacks dtype, shape or data_offsets"},
        Damage{"one_offset", one(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", 4), "no two data_offsets"},
        Damage{"three_offsets", one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,4]})", 4), "too long"},
        Damage{"negative_shape", one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", 4), "negative number -1"},
        Damage{"fraction", one(R"({"dtype":"F32","shape":[1.5],"data_offsets":[0,4]})", 4), "no integer"},
        Damage{"shape_overflow",
               one(R"({"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,4]})", 4),
               "needs no such number"},
        Damage{"shape_beyond_63_bits", one(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]})", 4),
               "beyond 63 bits"},
        Damage{"rank", one(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]})", 1), "too long"},
        Damage{"wrong_size", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4), "F32 of shape (2) needs 8"},
        Damage{"reversed", one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", 4), "lies at 4..0"},
        Damage{"outside", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 7), "outside the file's 0..7"},
        Damage{"offset_huge", one(R"({"dtype":"F32","shape":[1],"data_offsets":[9223372036854775803,9223372036854775807]})", 4),
               "outside the file's"},
        Damage{"overlap",
               file_with_header(
                   R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                   std::string(6, 'x')),
               "\"b\" overlaps another"},
        Damage{"gap",
               file_with_header(
                   R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                   std::string(5, 'x')),
               "\"b\" follows a gap"},
        Damage{"bytes_left_over", one(R"({"dtype":"U8","shape":[2],"data_offsets":[0,2]})", 3), "1 bytes at the end"},
        Damage{"half_bytes", one(R"({"dtype":"F4","shape":[1],"data_offsets":[0,1]})", 1), "needs no such number"}),
    [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(SafetensorsHeader, random_damage_is_refused_or_leaves_everything_in_bounds) {
  const std::string good = file_with({{"first", {3, 5}, 1}, {"second", {7}, 2}, {"third", {2, 2, 2}, 3}});
  std::mt19937 random(20240229);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string file = good;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes; ++i) {
      const std::size_t at = random() % file.size();
      switch (random() % 4) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file.resize(at);
          break;
        case 2:
          file.insert(at, 1, "0123456789{}[]\",:"[random() % 17]);
          break;
        default:
          file.erase(at, 1 + random() % 8);
          break;
      }
      if (file.empty()) break;
    }
    const auto tensors = parse_safetensors(std::as_bytes(std::span(file)), "x");
    if (!tensors) continue;
    ++accepted;
    for (const StoredTensor& tensor : *tensors) {
      ASSERT_GE(tensor.begin, 8) << "round " << round;
      ASSERT_LE(tensor.begin, tensor.end) << "round " << round;
      ASSERT_LE(tensor.end, static_cast<std::int64_t>(file.size())) << "round " << round;
    }
  }
  EXPECT_GT(accepted, 100);  // changed data bytes and names are still good files
}

TEST(Safetensors, single_file_gives_the_bytes_written) {
  const TemporaryFolder folder;
  folder.write("model.safetensors", file_with({{"a", {2, 3}, 1.5F}, {"b", {4}, -2}}));
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_TRUE((*source)->has("a"));
  EXPECT_FALSE((*source)->has("c"));
  EXPECT_EQ(first_value(**source, "a", {2, 3}), 1.5F);
  EXPECT_EQ(first_value(**source, "b", {4}), -2.0F);
  EXPECT_THAT((*source)->warnings(), IsEmpty());
  const auto absent = (*source)->load("c", Shape{1});
  EXPECT_EQ(absent.error().code, ErrorCode::NotFound);
  EXPECT_THAT(absent.error().message, HasSubstr("no tensor c"));
  const auto misshapen = (*source)->load("a", Shape{3, 2});
  ASSERT_FALSE(misshapen);
  EXPECT_THAT(misshapen.error().message,
              testing::AllOf(HasSubstr("model.safetensors"), HasSubstr("tensor a"), HasSubstr("(2, 3)"), HasSubstr("(3, 2)")));
}

TEST(Safetensors, views_are_aligned_whatever_the_headers_length) {
  for (int padding = 0; padding < 8; ++padding) {
    const TemporaryFolder folder;
    const std::string header =
        R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})" + std::string(static_cast<std::size_t>(padding), ' ');
    const float value = 0.25F;
    folder.write("model.safetensors", file_with_header(header, std::string(reinterpret_cast<const char*>(&value), 4)));
    auto source = open_safetensors(folder.path());
    ASSERT_TRUE(source) << source.error().message;
    const auto view = (*source)->load("a", Shape{1});
    ASSERT_TRUE(view);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view->bytes.data()) % alignof(float), 0U) << padding;
    EXPECT_EQ(std::memcmp(view->bytes.data(), &value, 4), 0) << padding;
  }
}

TEST(Safetensors, mixed_types_keep_their_own_and_others_are_refused_by_name_on_load) {
  const TemporaryFolder folder;
  folder.write(
      "model.safetensors",
      file_with_header(
          R"({"f32":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"bf16":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]},)"
          R"("f16":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},"f64":{"dtype":"F64","shape":[1],"data_offsets":[12,20]},)"
          R"("i8":{"dtype":"I8","shape":[4],"data_offsets":[20,24]}})",
          std::string(24, '\0')));
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_EQ((*source)->load("f32", Shape{1})->dtype, DataType::Float32);
  EXPECT_EQ((*source)->load("bf16", Shape{2})->dtype, DataType::BFloat16);
  EXPECT_EQ((*source)->load("f16", Shape{2})->dtype, DataType::Float16);
  EXPECT_THAT((*source)->load("f64", Shape{1}).error().message, HasSubstr("f64 is F64; supported: F32, F16, BF16"));
  EXPECT_THAT((*source)->load("i8", Shape{4}).error().message, HasSubstr("i8 is I8"));
}

void write_index(const TemporaryFolder& folder, const json& weight_map) {
  folder.write("model.safetensors.index.json", json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
}

TEST(Safetensors, shards_are_joined_through_the_index_and_strays_are_ignored_with_a_warning) {
  const TemporaryFolder folder;
  folder.write("part-1.safetensors", file_with({{"a", {1}, 1}, {"extra", {1}, 9}}));
  folder.write("part-2.safetensors", file_with({{"b", {1}, 2}}));
  folder.write("stray.safetensors", file_with({{"a", {1}, 77}, {"c", {1}, 77}}));
  write_index(folder, {{"a", "part-1.safetensors"}, {"b", "part-2.safetensors"}});
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_EQ(first_value(**source, "a", {1}), 1.0F);
  EXPECT_EQ(first_value(**source, "b", {1}), 2.0F);
  EXPECT_FALSE((*source)->has("c"));
  EXPECT_FALSE((*source)->has("extra"));
  EXPECT_THAT((*source)->warnings(),
              testing::UnorderedElementsAre(HasSubstr("stray.safetensors"), HasSubstr("1 tensors that the index")));
}

TEST(Safetensors, a_single_file_wins_over_an_index_and_shards_beside_it_are_strays) {
  const TemporaryFolder folder;
  folder.write("model.safetensors", file_with({{"a", {1}, 1}}));
  folder.write("part-1.safetensors", file_with({{"a", {1}, 2}}));
  write_index(folder, {{"a", "part-1.safetensors"}});
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source);
  EXPECT_EQ(first_value(**source, "a", {1}), 1.0F);
  EXPECT_THAT((*source)->warnings(), ElementsAre(HasSubstr("part-1.safetensors")));
}

std::string open_error(const TemporaryFolder& folder) {
  const auto source = open_safetensors(folder.path());
  return source ? "accepted" : source.error().message;
}

TEST(Safetensors, absent_shards_are_all_named) {
  const TemporaryFolder folder;
  folder.write("part-1.safetensors", file_with({{"a", {1}, 1}}));
  write_index(folder, {{"a", "part-1.safetensors"}, {"b", "part-2.safetensors"}, {"c", "part-3.safetensors"}});
  EXPECT_THAT(open_error(folder), HasSubstr("part-2.safetensors, part-3.safetensors"));
}

TEST(Safetensors, a_tensor_in_another_shard_than_stated_is_named) {
  const TemporaryFolder folder;
  folder.write("part-1.safetensors", file_with({{"a", {1}, 1}, {"b", {1}, 1}}));
  folder.write("part-2.safetensors", file_with({{"c", {1}, 1}}));
  write_index(folder, {{"a", "part-1.safetensors"}, {"b", "part-2.safetensors"}, {"c", "part-2.safetensors"}});
  EXPECT_THAT(open_error(folder), HasSubstr("b (stated to be in part-2.safetensors)"));
}

TEST(Safetensors, the_index_cannot_leave_the_folder) {
  const TemporaryFolder outer;
  outer.write("x.safetensors", file_with({{"a", {1}, 1}}));
  for (const json& name :
       std::vector<json>{"../x.safetensors", "../../x", "/etc/passwd", "..", ".", "", "sub/x.safetensors", "a\\b",
                         std::string("x\0y", 3), std::string(300, 'x'), 5, nullptr, json::array({"x"})}) {
    const TemporaryFolder folder;
    write_index(folder, {{"a", name}});
    EXPECT_THAT(open_error(folder), HasSubstr("no file name within the folder")) << name;
  }
}

TEST(Safetensors, a_damaged_index_is_refused) {
  const TemporaryFolder folder;
  EXPECT_THAT(open_error(folder), HasSubstr("holds neither model.safetensors nor"));
  for (const char* content : {"", "[]", "{}", R"({"weight_map":{}})", R"({"weight_map":[]})", R"({"weight_map":5})"}) {
    folder.write("model.safetensors.index.json", content);
    EXPECT_THAT(open_error(folder), HasSubstr("model.safetensors.index.json")) << content;
  }
  folder.write("model.safetensors.index.json", std::string(1 << 20, '['));
  EXPECT_THAT(open_error(folder), HasSubstr("nested"));
}

TEST(Safetensors, truncation_at_any_place_is_an_error_and_no_signal) {
  const std::string good = file_with({{"a", {64, 64}, 1}});
  for (std::size_t size = 0; size < good.size(); size += 1 + size / 7) {
    const TemporaryFolder folder;
    folder.write("model.safetensors", std::string_view(good).substr(0, size));
    EXPECT_THAT(open_error(folder), HasSubstr("model.safetensors: ")) << size;
  }
}

TEST(Safetensors, a_file_cut_after_opening_is_an_error_and_no_signal) {
  const TemporaryFolder folder;
  const auto path = folder.write("model.safetensors", file_with({{"a", {64, 64}, 1}}));
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source);
  std::filesystem::resize_file(path, 100);
  EXPECT_THAT((*source)->load("a", Shape{64, 64}).error().message, HasSubstr("was cut short"));
}

TEST(Safetensors, a_folder_or_pipe_of_that_name_is_refused) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "model.safetensors");
  EXPECT_THAT(open_error(folder), HasSubstr("no regular file"));
  std::filesystem::remove(folder.path() / "model.safetensors");
  ASSERT_EQ(::mkfifo((folder.path() / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(open_error(folder), HasSubstr("no regular file"));
}

TEST(Safetensors, links_of_a_download_cache_are_followed) {
  const TemporaryFolder blobs;
  const TemporaryFolder folder;
  const auto blob = blobs.write("0a1b2c", file_with({{"a", {1}, 3}}));
  std::filesystem::create_symlink(blob, folder.path() / "model.safetensors");
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_EQ(first_value(**source, "a", {1}), 3.0F);
}

ModelConfig tiny(bool tied) {
  return *synthetic_model_config({.architecture = Architecture::Llama,
                                  .hidden_size = 8,
                                  .layers = 1,
                                  .heads = 2,
                                  .kv_heads = 1,
                                  .head_size = 0,
                                  .feed_forward = 16,
                                  .vocabulary = 32,
                                  .tied_embeddings = tied,
                                  .seed = 1});
}

/// Writes tiny's tensors as a checkpoint; head: value of lm_head.weight, which is left out when empty.
std::string checkpoint(std::optional<float> head) {
  std::vector<Filled> tensors;
  for (const TensorSpec& tensor : model_tensors(tiny(true))) tensors.push_back({tensor.name, tensor.shape, 1});
  if (head) tensors.push_back({"lm_head.weight", {32, 8}, *head});
  return file_with(tensors);
}

Result<std::vector<std::string>> check(bool tied, std::optional<float> head) {
  const TemporaryFolder folder;
  folder.write("model.safetensors", checkpoint(head));
  auto source = open_safetensors(folder.path());
  EXPECT_TRUE(source) << source.error().message;
  return check_weights(tiny(tied), **source);
}

TEST(CheckWeights, tied_without_head_and_tied_with_equal_head_are_silent) {
  EXPECT_THAT(*check(true, std::nullopt), IsEmpty());
  EXPECT_THAT(*check(true, 1.0F), IsEmpty());
}

TEST(CheckWeights, tied_with_different_head_warns) {
  EXPECT_THAT(*check(true, 2.0F), ElementsAre(HasSubstr("lm_head.weight differs")));
}

TEST(CheckWeights, the_embedding_goes_by_its_own_name) {
  const ModelConfig config =
      *synthetic_model_config({.architecture = Architecture::Mamba2, .hidden_size = 64, .layers = 1, .vocabulary = 32});
  std::vector<Filled> tensors;
  for (const TensorSpec& tensor : model_tensors(config)) tensors.push_back({tensor.name, tensor.shape, 1});
  tensors.push_back({"lm_head.weight", {32, 64}, 2});
  const TemporaryFolder folder;
  folder.write("model.safetensors", file_with(tensors));
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source) << source.error().message;
  const auto warnings = check_weights(config, **source);
  ASSERT_TRUE(warnings) << warnings.error().message;
  EXPECT_THAT(*warnings, ElementsAre(HasSubstr("lm_head.weight differs from backbone.embeddings.weight")));
}

TEST(CheckWeights, untied_without_head_is_an_error_that_names_it) {
  const auto result = check(false, std::nullopt);
  ASSERT_FALSE(result);
  EXPECT_THAT(result.error().message, HasSubstr("lm_head.weight"));
  EXPECT_TRUE(check(false, 2.0F));
}

TEST(CheckWeights, every_missing_tensor_is_named) {
  const TemporaryFolder folder;
  folder.write("model.safetensors", file_with({{"model.norm.weight", {8}, 1}}));
  auto source = open_safetensors(folder.path());
  ASSERT_TRUE(source);
  const auto result = check_weights(tiny(true), **source);
  ASSERT_FALSE(result);
  EXPECT_THAT(result.error().message, HasSubstr("model.embed_tokens.weight, model.layers.0.input_layernorm.weight"));
}

std::vector<float> synthetic_values(std::uint64_t seed, DataType dtype, const char* name, const Shape& shape) {
  const auto source = make_synthetic_weights(tiny(false), seed, dtype);
  const auto view = source->load(name, shape);
  EXPECT_TRUE(view) << view.error().message;
  EXPECT_EQ(view->dtype, dtype);
  std::vector<float> values(static_cast<std::size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DataType::Float32) {
      std::memcpy(&values[i], view->bytes.data() + 4 * i, 4);
    } else {
      std::uint16_t half = 0;
      std::memcpy(&half, view->bytes.data() + 2 * i, 2);
      values[i] = dtype == DataType::BFloat16 ? bfloat16_to_float(half) : float16_to_float(half);
    }
  }
  return values;
}

TEST(Synthetic, values_depend_on_seed_and_name_and_have_the_stated_spread) {
  const Shape shape{32, 8};
  const auto values = synthetic_values(1, DataType::Float32, "lm_head.weight", shape);
  EXPECT_EQ(values, synthetic_values(1, DataType::Float32, "lm_head.weight", shape));
  EXPECT_NE(values, synthetic_values(2, DataType::Float32, "lm_head.weight", shape));
  EXPECT_NE(values, synthetic_values(1, DataType::Float32, "model.embed_tokens.weight", shape));
  double mean = 0;
  double square = 0;
  for (const float value : values) {
    mean += value / 256.0;
    square += value * value / 256.0;
  }
  EXPECT_NEAR(mean, 0, 0.1);
  EXPECT_NEAR(square, 1.0 / 8, 0.03);  // 1 / fan_in
  for (const float value : synthetic_values(1, DataType::Float32, "model.norm.weight", {8})) EXPECT_NEAR(value, 1, 0.1F);
}

TEST(Synthetic, recurrences_neither_die_nor_blow_up) {
  const ModelConfig config =
      *synthetic_model_config({.architecture = Architecture::Mamba2, .hidden_size = 2048, .layers = 1, .vocabulary = 32});
  const auto source = make_synthetic_weights(config, 3, DataType::Float32);
  struct Case {
    const char* name;
    double low;  // of the quantity that the recurrence sees
    double high;
    double (*seen)(double);
  };
  for (const Case& c : {Case{"A_log", 1, 16.01, [](double x) { return std::exp(x); }},
                        Case{"dt_bias", 0.00099, 0.11, [](double x) { return std::log1p(std::exp(x)); }},
                        Case{"D", 0.9, 1.1, [](double x) { return x; }}}) {
    const auto view = source->load(std::string("backbone.layers.0.mixer.") + c.name, Shape{64});
    ASSERT_TRUE(view) << view.error().message;
    double least = 1e30;
    double most = -1e30;
    for (std::size_t i = 0; i < 64; ++i) {
      float value = 0;
      std::memcpy(&value, view->bytes.data() + 4 * i, 4);
      least = std::min(least, c.seen(value));
      most = std::max(most, c.seen(value));
    }
    EXPECT_GE(least, c.low) << c.name;
    EXPECT_LE(most, c.high) << c.name;
    EXPECT_GT((most - least) / (c.high - c.low), 0.7) << c.name;  // all of the range is used
  }
}

TEST(Synthetic, narrow_types_are_the_wide_values_rounded) {
  const Shape shape{32, 8};
  const auto wide = synthetic_values(1, DataType::Float32, "lm_head.weight", shape);
  const auto bfloat = synthetic_values(1, DataType::BFloat16, "lm_head.weight", shape);
  const auto half = synthetic_values(1, DataType::Float16, "lm_head.weight", shape);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    EXPECT_EQ(bfloat[i], bfloat16_to_float(float_to_bfloat16(wide[i])));
    EXPECT_NEAR(half[i], wide[i], 1e-3F);
  }
}

TEST(Synthetic, known_values_stay_what_they_are) {
  // Answers of synthetic models are compared across machines and releases; a change here changes them all.
  const auto values = synthetic_values(7, DataType::Float32, "model.embed_tokens.weight", {32, 8});
  EXPECT_EQ(std::bit_cast<std::uint32_t>(values[0]), 3187321817U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(values[100]), 1032495863U);
}

TEST(Synthetic, names_and_shapes_are_the_models_own) {
  const auto source = make_synthetic_weights(tiny(true), 1, DataType::BFloat16);
  EXPECT_FALSE(source->has("lm_head.weight"));
  EXPECT_FALSE(source->load("lm_head.weight", Shape{32, 8}));
  EXPECT_THAT(source->load("model.norm.weight", Shape{9}).error().message, HasSubstr("(8), asked for (9)"));
}

TEST(NumberFormats, sixteen_bit_values_survive_the_way_up_and_down) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (!std::isnan(float16_to_float(half))) {
      ASSERT_EQ(float_to_float16(float16_to_float(half)), half);
    }
    if (!std::isnan(bfloat16_to_float(half))) {
      ASSERT_EQ(float_to_bfloat16(bfloat16_to_float(half)), half);
    }
  }
  EXPECT_TRUE(std::isnan(float16_to_float(float_to_float16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(bfloat16_to_float(float_to_bfloat16(std::bit_cast<float>(0x7F800001U)))));
}

TEST(NumberFormats, halves_round_to_the_even_neighbour) {
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3F808000U)), 0x3F80);
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3F818000U)), 0x3F82);
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3F808001U)), 0x3F81);
  EXPECT_EQ(float_to_float16(1.0F + 0x1p-11F), 0x3C00);
  EXPECT_EQ(float_to_float16(1.0F + 3 * 0x1p-11F), 0x3C02);
  EXPECT_EQ(float_to_float16(65519.0F), 0x7BFF);
  EXPECT_EQ(float_to_float16(65520.0F), 0x7C00);
  EXPECT_EQ(float_to_float16(0x1p-25F), 0x0000);
  EXPECT_EQ(float_to_float16(3 * 0x1p-25F), 0x0002);
  EXPECT_EQ(float_to_float16(-0.0F), 0x8000);
}

}  // namespace
}  // namespace rubato::engine
