// SPDX-License-Identifier: Apache-2.0
// A builder of trees on yaml-cpp's events. The node interface of the library would not do: it keeps the first of duplicate keys
// in silence and expands aliases.
#include "manifests/read_yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

namespace rubato {
namespace {

constexpr std::size_t document_count_max = 16;
constexpr std::size_t value_count_max = 20'000;

/// Thrown through yaml-cpp to end the parse at a bound; caught in read_yaml().
struct Stop {
  FieldError error;
};

Position position_at(const YAML::Mark& mark) {
  return {.line = mark.line + 1, .column = mark.column + 1};
}

class TreeBuilder final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override { document_ = YamlDocument(); }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Node node{.position = position_at(mark), .members = {}};
    refuse_anchor(node, anchor);
    add(std::move(node));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    Node node{.kind = Node::Kind::Refused, .position = position_at(mark), .members = {}};
    report(node.position, "is an alias: anchors and aliases are not supported, write the value out");
    add(std::move(node));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, const std::string& value) override {
    Node node{.text = value, .position = position_at(mark), .members = {}};
    node.quoted = tag == "!";
    node.kind = tag == "?" ? kind_of_plain(value) : Node::Kind::String;
    if (tag != "?" && tag != "!") refuse_tag(node, tag);
    refuse_anchor(node, anchor);
    add(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(Node{.kind = Node::Kind::List, .position = position_at(mark), .members = {}}, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    open(Node{.kind = Node::Kind::Map, .position = position_at(mark), .members = {}}, tag, anchor);
  }
  void OnMapEnd() override { close(); }

  [[nodiscard]] YamlDocument take() { return std::move(document_); }

 private:
  /// A list or map that is being filled. A map alternates keys and values.
  struct Open {
    Node node;
    std::optional<Node> key{};
    bool is_dropped = false;  // the value of a key that was refused
  };

  void open(Node node, const std::string& tag, YAML::anchor_t anchor) {
    if (tag != "?" && tag != "!" && !tag.empty()) refuse_tag(node, tag);
    refuse_anchor(node, anchor);
    if (open_.size() >= static_cast<std::size_t>(node_depth_max)) {
      throw Stop{{.field = path(),
                  .rule = "is nested deeper than " + std::to_string(node_depth_max) + " levels",
                  .position = node.position}};
    }
    open_.push_back({.node = std::move(node)});
  }

  void close() {
    Node node = std::move(open_.back().node);
    open_.pop_back();
    add(std::move(node));
  }

  void add(Node node) {
    if (++value_count_ > value_count_max) {
      throw Stop{{.rule = "holds more than " + std::to_string(value_count_max) + " values", .position = node.position}};
    }
    if (open_.empty()) {
      document_.root = std::move(node);
      return;
    }
    Open& parent = open_.back();
    if (!parent.node.members.empty() || parent.key || is_map(parent.node)) {
      add_to_map(parent, std::move(node));
    } else {
      parent.node.items.push_back(std::move(node));
    }
  }

  static bool is_map(const Node& node) { return node.kind == Node::Kind::Map; }

  void add_to_map(Open& parent, Node node) {
    if (!parent.key) {
      parent.is_dropped = !check_key(parent.node, node);
      parent.key = std::move(node);
      return;
    }
    const Node key = std::move(*parent.key);
    parent.key.reset();
    if (parent.is_dropped) return;
    // An empty value has no place of its own: the library says where the next token is.
    if (node.kind == Node::Kind::Null) node.position = key.position;
    parent.node.members.push_back({.key = key.text, .position = key.position, .value = std::move(node)});
  }

  /// Reports what may not be a key. False if the member is to be dropped.
  bool check_key(const Node& map, const Node& key) {
    const bool is_word = key.kind == Node::Kind::String || key.kind == Node::Kind::BooleanLike;
    if (key.kind == Node::Kind::Refused) return false;
    if (!is_word) {
      report_in(path(), key.position, shown(key) + " cannot be a key: keys are text");
      return false;
    }
    if (key.text == "<<") {
      report_in(join_path(path(), "<<"), key.position, "merge keys are not supported: write the fields out");
      return false;
    }
    for (const Member& member : map.members) {
      if (member.key != key.text) continue;
      document_.errors.push_back({.fault = Fault::Duplicate,
                                  .field = join_path(path(), key.text),
                                  .rule = "is given twice: first in line " + std::to_string(member.position.line),
                                  .position = key.position});
      return false;
    }
    return true;
  }

  void refuse_tag(Node& node, const std::string& tag) {
    report(node.position, "tag " + in_quotes(tag) + " is not supported: write the plain value");
    node.kind = node.kind == Node::Kind::List || node.kind == Node::Kind::Map ? node.kind : Node::Kind::Refused;
  }
  void refuse_anchor(Node& node, YAML::anchor_t anchor) {
    if (anchor == YAML::NullAnchor) return;
    report(node.position, "has an anchor: anchors and aliases are not supported, write the value out");
    node.kind = node.kind == Node::Kind::List || node.kind == Node::Kind::Map ? node.kind : Node::Kind::Refused;
  }

  void report(Position position, std::string rule) { report_in(path(), position, std::move(rule)); }
  void report_in(std::string field, Position position, std::string rule) {
    document_.errors.push_back({.field = std::move(field), .rule = std::move(rule), .position = position});
  }

  /// Of the value that comes next.
  [[nodiscard]] std::string path() const {
    std::string text;
    for (const Open& parent : open_) {
      if (parent.key) {
        text = join_path(text, parent.key->text);
      } else if (parent.node.kind == Node::Kind::List) {
        text.append("[").append(std::to_string(parent.node.items.size())).append("]");
      }
    }
    return text;
  }

  YamlDocument document_;
  std::vector<Open> open_;
  std::size_t value_count_ = 0;
};

}  // namespace

YamlText read_yaml(std::string_view text) {
  YamlText result;
  TreeBuilder builder;
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
      YamlDocument document = builder.take();
      if (document.root.kind == Node::Kind::Null && document.errors.empty()) continue;
      result.documents.push_back(std::move(document));
      if (result.documents.size() > document_count_max) {
        throw Stop{{.rule = "holds more than " + std::to_string(document_count_max) + " documents"}};
      }
    }
    return result;
  } catch (const Stop& stop) {
    result.errors.push_back(stop.error);
  } catch (const YAML::Exception& exception) {
    result.errors.push_back({.rule = "is not YAML: " + exception.msg, .position = position_at(exception.mark)});
  } catch (const std::exception& exception) {
    result.errors.push_back({.rule = std::string("cannot be read as YAML: ") + exception.what()});
  }
  // What was found before the break is reported with it.
  FieldErrors before = builder.take().errors;
  result.errors.insert(result.errors.begin(), before.begin(), before.end());
  return result;
}

}  // namespace rubato
