// SPDX-License-Identifier: Apache-2.0
// A streaming reader for safetensors headers: no tree is built, so memory stays in proportion to the file, and whatever is not in
// the format's grammar ends the reading at once.
#include "engine/model/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace rubato::engine {
namespace {

constexpr StoredType stored_types[] = {
    {"F32", 32, DataType::Float32},   {"F16", 16, DataType::Float16}, {"BF16", 16, DataType::BFloat16},
    {"F64", 64, std::nullopt},        {"I64", 64, std::nullopt},      {"U64", 64, std::nullopt},
    {"C64", 64, std::nullopt},        {"I32", 32, std::nullopt},      {"U32", 32, std::nullopt},
    {"I16", 16, std::nullopt},        {"U16", 16, std::nullopt},      {"I8", 8, std::nullopt},
    {"U8", 8, std::nullopt},          {"BOOL", 8, std::nullopt},      {"F8_E5M2", 8, std::nullopt},
    {"F8_E4M3", 8, std::nullopt},     {"F8_E8M0", 8, std::nullopt},   {"F8_E5M2FNUZ", 8, std::nullopt},
    {"F8_E4M3FNUZ", 8, std::nullopt}, {"F6_E2M3", 6, std::nullopt},   {"F6_E3M2", 6, std::nullopt},
    {"F4", 4, std::nullopt},
};
constexpr std::size_t rank_max = 8;

const StoredType* find_type(std::string_view name) {
  for (const StoredType& type : stored_types) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

/// A name as errors show it: cut when long, control characters replaced.
std::string name_text(std::string_view text) {
  constexpr std::size_t shown_max = 120;
  std::string out = "\"";
  for (const char c : text.substr(0, shown_max)) out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return out + (text.size() > shown_max ? "...\"" : "\"");
}

/// Follows the one grammar a header may have: {name: {dtype, shape, data_offsets}, __metadata__: {text: text}}.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<StoredTensor> tensors;
  std::string error;

  bool null() override { return unwanted("null"); }
  bool boolean(bool) override { return unwanted("a boolean"); }
  bool number_float(double, const std::string&) override { return unwanted("a number that is no integer"); }
  bool binary(binary_t&) override { return unwanted("binary data"); }

  bool number_integer(std::int64_t value) override {
    return value < 0 ? fail("holds the negative number " + std::to_string(value))
                     : number_unsigned(static_cast<std::uint64_t>(value));
  }

  bool number_unsigned(std::uint64_t value) override {
    if (depth_ != 3) return unwanted("a number");
    if (value > static_cast<std::uint64_t>(INT64_MAX))
      return fail("holds the number " + std::to_string(value) + ", beyond 63 bits");
    std::vector<std::int64_t>& list = field_ == Field::Shape ? tensors.back().shape : offsets_;
    if (list.size() >= (field_ == Field::Shape ? rank_max : 2)) return fail("holds a list that is too long");
    list.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool string(std::string& value) override {
    if (depth_ != 2) return unwanted("a string");
    if (metadata_) return true;
    if (field_ != Field::Dtype) return unwanted("a string");
    tensors.back().type = find_type(value);
    return tensors.back().type != nullptr || fail("has the unknown dtype " + name_text(value));
  }

  bool start_object(std::size_t) override {
    if (depth_ > 1) return unwanted("an object");
    if (++depth_ == 2 && !metadata_) {
      offsets_.clear();
      seen_ = 0;
    }
    return true;
  }

  bool key(std::string& name) override {
    if (depth_ == 1) {
      metadata_ = name == "__metadata__";
      if (!names_.insert(name).second) return fail(name_text(name) + " stands in the header twice");
      if (!metadata_) tensors.push_back({.name = name, .type = nullptr, .shape = {}, .begin = 0, .end = 0});
      return true;
    }
    if (metadata_) return true;
    field_ = name == "dtype"          ? Field::Dtype
             : name == "shape"        ? Field::Shape
             : name == "data_offsets" ? Field::Offsets
                                      : Field::None;
    if (field_ == Field::None) return fail("has the unknown key " + name_text(name));
    const unsigned bit = 1U << static_cast<unsigned>(field_);
    if ((seen_ & bit) != 0) return fail("has the key " + name_text(name) + " twice");
    seen_ |= bit;
    return true;
  }

  bool end_object() override {
    if (depth_-- != 2 || metadata_) return true;
    if (seen_ != 0b1110U) return fail("lacks dtype, shape or data_offsets");
    if (offsets_.size() != 2) return fail("has no two data_offsets");
    tensors.back().begin = offsets_[0];
    tensors.back().end = offsets_[1];
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || metadata_ || field_ == Field::Dtype) return unwanted("a list");
    ++depth_;
    return true;
  }

  bool end_array() override {
    --depth_;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    error = "header is no valid JSON at its byte " + std::to_string(position);
    return false;
  }

 private:
  enum class Field : std::uint8_t { None = 0, Dtype = 1, Shape = 2, Offsets = 3 };

  bool fail(const std::string& what) {
    const bool named = depth_ >= 2 && !metadata_ && !tensors.empty();
    error = (named ? "tensor " + name_text(tensors.back().name) + " " : "header: ") + what;
    return false;
  }
  bool unwanted(const char* what) { return fail(std::string("holds ") + what + " where the format allows none"); }

  std::unordered_set<std::string> names_;
  std::vector<std::int64_t> offsets_;
  int depth_ = 0;
  Field field_ = Field::None;
  unsigned seen_ = 0;
  bool metadata_ = false;
};

/// Bytes that type and shape need; nothing when that is beyond 63 bits or no whole number of bytes.
std::optional<std::int64_t> bytes_needed(const StoredTensor& tensor) {
  std::int64_t bits = tensor.type->bits;
  for (const std::int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(bits, size, &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

}  // namespace

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + ")";
}

Result<std::int64_t> parse_safetensors_length(std::span<const std::byte> first, std::int64_t file_size,
                                              const std::string& place) {
  if (file_size < safetensors_length_bytes || first.size() < static_cast<std::size_t>(safetensors_length_bytes)) {
    return unexpected(ErrorCode::InvalidArgument,
                      place + ": is no safetensors file: " + std::to_string(file_size) + " bytes long");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(safetensors_length_bytes); ++i) {
    length |= std::to_integer<std::uint64_t>(first[i]) << (8 * i);
  }
  const std::int64_t rest = file_size - safetensors_length_bytes;
  if (length < 2 || length > static_cast<std::uint64_t>(std::min(rest, safetensors_header_max))) {
    return unexpected(ErrorCode::InvalidArgument, place + ": header length " + std::to_string(length) + " is outside 2.." +
                                                      std::to_string(std::min(rest, safetensors_header_max)) +
                                                      " (file damaged or cut short)");
  }
  return static_cast<std::int64_t>(length);
}

Result<std::vector<StoredTensor>> parse_safetensors_header(std::string_view json, std::int64_t file_size,
                                                           const std::string& place) {
  const auto refused = [&place](const std::string& what) { return unexpected(ErrorCode::InvalidArgument, place + ": " + what); };
  if (json.empty() || json.front() != '{') return refused("header does not begin with {");
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &reader)) return refused(reader.error);

  const std::int64_t data_begin = safetensors_length_bytes + static_cast<std::int64_t>(json.size());
  const std::int64_t data_size = file_size - data_begin;
  std::vector<const StoredTensor*> by_place;
  by_place.reserve(reader.tensors.size());
  for (StoredTensor& tensor : reader.tensors) {
    if (tensor.begin > tensor.end || tensor.end > data_size) {
      return refused("tensor " + name_text(tensor.name) + " lies at " + std::to_string(tensor.begin) + ".." +
                     std::to_string(tensor.end) + ", outside the file's 0.." + std::to_string(data_size) +
                     " (file damaged or cut short)");
    }
    if (const auto needed = bytes_needed(tensor); needed != tensor.end - tensor.begin) {
      return refused("tensor " + name_text(tensor.name) + " has " + std::to_string(tensor.end - tensor.begin) + " bytes, but " +
                     std::string(tensor.type->name) + " of shape " + shape_text(tensor.shape) + " needs " +
                     (needed ? std::to_string(*needed) : "no such number"));
    }
    tensor.begin += data_begin;
    tensor.end += data_begin;
    by_place.push_back(&tensor);
  }
  std::sort(by_place.begin(), by_place.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::int64_t reached = data_begin;
  for (const StoredTensor* tensor : by_place) {
    if (tensor->begin != reached) {
      return refused("tensor " + name_text(tensor->name) + (tensor->begin < reached ? " overlaps another" : " follows a gap"));
    }
    reached = tensor->end;
  }
  if (reached != file_size) return refused(std::to_string(file_size - reached) + " bytes at the end belong to no tensor");
  return std::move(reader.tensors);
}

Result<std::vector<StoredTensor>> parse_safetensors(std::span<const std::byte> file, const std::string& place) {
  const auto file_size = static_cast<std::int64_t>(file.size());
  const auto length = parse_safetensors_length(file, file_size, place);
  if (!length) return Unexpected(length.error());
  const auto* text = reinterpret_cast<const char*>(file.data()) + safetensors_length_bytes;
  return parse_safetensors_header(std::string_view(text, static_cast<std::size_t>(*length)), file_size, place);
}

}  // namespace rubato::engine
