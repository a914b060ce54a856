// SPDX-License-Identifier: Apache-2.0
// A SAX builder, because the library's own silently keeps the last of duplicate keys and has no bounds.
#include "daemon/openai/json_body.h"

#include <exception>
#include <utility>
#include <vector>

namespace rubato::openai {
namespace {

class BodyBuilder final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return fail({}, "request body: binary values are not JSON"); }

  bool start_object(std::size_t /*size*/) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(Json::array()); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (open_.back()->contains(name)) return fail(name, "request body: the key `" + name + "` occurs twice in one object");
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/, const nlohmann::detail::exception& thrown) override {
    std::string why = thrown.what();
    why.erase(0, why.find("] ") == std::string::npos ? 0 : why.find("] ") + 2);  // the library's own error number
    if (why.size() > 200) why.resize(200);
    return fail({}, "request body: not valid JSON at byte " + std::to_string(position) + ": " + why);
  }

  Json root;
  Error error{.code = ErrorCode::InvalidArgument, .field = {}, .message = {}};

 private:
  bool fail(std::string field, std::string message) {
    error.field = std::move(field);
    error.message = std::move(message);
    return false;
  }
  bool add(Json value) {
    place(std::move(value));
    return ++values_ <= json_values_max ||
           fail({}, "request body: more than " + std::to_string(json_values_max) + " JSON values");
  }
  Json* place(Json value) {
    if (open_.empty()) {
      root = std::move(value);
      return &root;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }
  bool open(Json container) {
    if (open_.size() >= json_depth_max) {
      return fail({}, "request body: JSON nested deeper than " + std::to_string(json_depth_max) + " levels");
    }
    open_.push_back(place(std::move(container)));
    return ++values_ <= json_values_max ||
           fail({}, "request body: more than " + std::to_string(json_values_max) + " JSON values");
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::vector<Json*> open_;
  std::string key_;
  std::size_t values_ = 0;
};

}  // namespace

Result<Json> parse_body(std::string_view body) {
  if (body.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return unexpected(ErrorCode::InvalidArgument, "request body: empty; a JSON object is needed");
  }
  BodyBuilder builder;
  try {
    if (!Json::sax_parse(body.begin(), body.end(), &builder)) return Unexpected(std::move(builder.error));
  } catch (const std::exception& thrown) {
    return unexpected(ErrorCode::InvalidArgument, std::string("request body: cannot be read: ") + thrown.what());
  }
  if (!builder.root.is_object()) {
    return unexpected(ErrorCode::InvalidArgument,
                      std::string("request body: a JSON object is needed, found ") + builder.root.type_name());
  }
  return std::move(builder.root);
}

}  // namespace rubato::openai
