// SPDX-License-Identifier: Apache-2.0
// Files and directories to one checked manifest. Bounded in size, count and retries; a FIFO or device is never opened.
#include "manifests/read_manifest.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <tuple>
#include <utility>

#include "manifests/content_hash.h"
#include "manifests/decode.h"
#include "manifests/read_yaml.h"

namespace rubato {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t error_count_max = 100;
constexpr int swap_retries_max = 3;

struct SourceText {
  std::string file;
  std::string text;
};

ManifestError whole_file(std::string file, std::string message) {
  return {.file = std::move(file), .line = 0, .column = 0, .field = {}, .message = std::move(message)};
}

ManifestError with_file(std::string_view file, const FieldError& error) {
  return {.file = std::string(file),
          .line = error.position.line,
          .column = error.position.column,
          .field = error.field,
          .message = describe(error)};
}

/// Length of the UTF-8 character at the front, or 0 if it is none (overlong, surrogate, cut off).
std::size_t character_size(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  const std::size_t size = lead < 0x80                   ? 1
                           : lead >= 0xC2 && lead < 0xE0 ? 2
                           : lead >= 0xE0 && lead < 0xF0 ? 3
                           : lead >= 0xF0 && lead < 0xF5 ? 4
                                                         : 0;
  if (size == 0 || size > text.size()) return 0;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
  }
  if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) >= 0xA0)) return 0;
  if ((lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) >= 0x90)) return 0;
  return size;
}

/// Text that any editor shows as it is read: UTF-8 without control characters.
std::optional<FieldError> find_bad_character(std::string_view text) {
  Position position{.line = 1, .column = 1};
  while (!text.empty()) {
    const std::size_t size = character_size(text);
    if (size == 0) return FieldError{.rule = "is not UTF-8 here", .position = position};
    const char c = text.front();
    const bool is_line_end = c == '\n' || (c == '\r' && text.size() > 1 && text[1] == '\n');
    if (size == 1 && !is_line_end && c != '\t' && (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)) {
      return FieldError{.rule = "holds a control character here", .position = position};
    }
    position.column += static_cast<std::int32_t>(size);
    if (c == '\n') position = {.line = position.line + 1, .column = 1};
    text.remove_prefix(size);
  }
  return std::nullopt;
}

Checked<std::string, ManifestError> read_file(const fs::path& path, const std::string& shown_as) {
  std::error_code fault;
  const fs::file_status status = fs::status(path, fault);
  if (!fs::exists(status))
    return whole_file(shown_as, "cannot be read: " + (fault ? fault.message() : "No such file or directory"));
  if (!fs::is_regular_file(status)) return whole_file(shown_as, "is not a regular file");
  errno = 0;
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return whole_file(shown_as, std::string("cannot be read: ") + std::strerror(errno));
  std::string text(manifest_size_max + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (stream.bad()) return whole_file(shown_as, "cannot be read: input error");
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (text.size() > manifest_size_max) {
    return whole_file(shown_as, "is larger than " + std::to_string(manifest_size_max) + " bytes, the most a manifest may have");
  }
  return text;
}

/// Collects the documents of all texts and picks the one Engine.
class Collector {
 public:
  void add(const SourceText& source) {
    std::string_view text = source.text;
    const std::size_t errors_before = errors_.size();
    if (text.size() > manifest_size_max) {
      errors_.push_back(whole_file(source.file, "is larger than " + std::to_string(manifest_size_max) + " bytes"));
      return;
    }
    if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // a byte order mark says UTF-8, which it is
    if (const std::optional<FieldError> bad = find_bad_character(text)) {
      errors_.push_back(with_file(source.file, *bad));
      return;
    }
    const YamlText yaml = read_yaml(text);
    for (const FieldError& error : yaml.errors) errors_.push_back(with_file(source.file, error));
    for (const YamlDocument& document : yaml.documents) add_document(document, source);
    if (yaml.documents.empty() && errors_.size() == errors_before) {
      errors_.push_back(whole_file(source.file, "is empty: a manifest has apiVersion, kind, metadata and spec"));
    }
  }

  [[nodiscard]] Checked<ReadManifest, ManifestErrors> finish(const std::string& place) {
    if (engine_count_ == 0 && errors_.empty()) errors_.push_back(whole_file(place, "holds no Engine: exactly one is needed"));
    if (errors_.empty()) return std::move(result_);
    std::stable_sort(errors_.begin(), errors_.end(), [](const ManifestError& a, const ManifestError& b) {
      return std::tie(a.file, a.line, a.column) < std::tie(b.file, b.line, b.column);
    });
    if (errors_.size() > error_count_max) {
      const std::size_t more = errors_.size() - error_count_max;
      errors_.resize(error_count_max);
      errors_.push_back(whole_file(place, std::string("has ").append(std::to_string(more)).append(" more errors")));
    }
    return ManifestErrors{std::move(errors_)};
  }

 private:
  void add_document(const YamlDocument& document, const SourceText& source) {
    const Node* kind = document.root.find("kind");
    if (kind != nullptr && kind->kind == Node::Kind::String && kind->text == engine_kind && ++engine_count_ > 1) {
      errors_.push_back({.file = source.file,
                         .line = document.root.position.line,
                         .column = document.root.position.column,
                         .field = "kind",
                         .message = "is a second Engine: the first stands in " + first_engine_ + ", and exactly one is allowed"});
      return;
    }
    Decoded<EngineManifest> decoded = decode_manifest(document.root, Source::File);
    for (const FieldError& error : document.errors) errors_.push_back(with_file(source.file, error));
    for (const FieldError& error : decoded.unknown) errors_.push_back(with_file(source.file, error));
    for (const FieldError& error : decoded.errors) {
      // A field whose text was refused (an alias, a tag, a duplicate) is not missing as well.
      if (error.fault == Fault::Required && touches(document.errors, error.field)) continue;
      errors_.push_back(with_file(source.file, error));
    }
    first_engine_ = source.file + ":" + std::to_string(document.root.position.line);
    result_ = {.manifest = std::move(decoded.value), .file = source.file, .hash = content_hash(source.text)};
  }

  std::vector<ManifestError> errors_;
  ReadManifest result_;
  std::string first_engine_;
  std::size_t engine_count_ = 0;
};

bool is_manifest_name(const std::string& name) {
  return !name.starts_with("..") && (name.ends_with(".yaml") || name.ends_with(".yml"));
}

struct DirectoryListing {
  std::vector<std::string> names;  // sorted
  std::optional<std::string> fault;
};

DirectoryListing list_directory(const fs::path& directory) {
  DirectoryListing listing;
  std::error_code fault;
  for (fs::directory_iterator entry(directory, fault), end; !fault && entry != end; entry.increment(fault)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (!is_manifest_name(name) || fs::is_directory(entry->path(), ignored)) continue;
    listing.names.push_back(name);
    if (listing.names.size() > manifest_directory_files_max) {
      listing.fault = "holds more than " + std::to_string(manifest_directory_files_max) + " *.yaml and *.yml files";
      return listing;
    }
  }
  if (fault) listing.fault = "cannot be listed: " + fault.message();
  std::sort(listing.names.begin(), listing.names.end());
  return listing;
}

Checked<ReadManifest, ManifestErrors> read_directory(const fs::path& directory, const fs::path& contents) {
  const DirectoryListing listing = list_directory(contents);
  if (listing.fault) return ManifestErrors{{whole_file(directory.string(), *listing.fault)}};
  if (listing.names.empty()) return ManifestErrors{{whole_file(directory.string(), "holds no *.yaml or *.yml file")}};
  Collector collector;
  std::vector<ManifestError> unreadable;
  for (const std::string& name : listing.names) {
    const std::string shown_as = (directory / name).string();
    Checked<std::string, ManifestError> text = read_file(contents / name, shown_as);
    if (text) {
      collector.add({.file = shown_as, .text = std::move(text).value()});
    } else {
      unreadable.push_back(text.failure());
    }
  }
  Checked<ReadManifest, ManifestErrors> result = collector.finish(directory.string());
  if (unreadable.empty()) return result;
  if (!result) unreadable.insert(unreadable.end(), result.failure().errors.begin(), result.failure().errors.end());
  return ManifestErrors{std::move(unreadable)};
}

/// What a ConfigMap mount shows now: the directory that `..data` points to, or the directory itself.
fs::path resolve_contents(const fs::path& directory) {
  std::error_code fault;
  const fs::path data = directory / "..data";
  if (!fs::is_symlink(fs::symlink_status(data, fault))) return directory;
  const fs::path target = fs::canonical(data, fault);
  return fault ? directory : target;
}

}  // namespace

std::string ManifestErrors::text() const {
  std::string text;
  for (const ManifestError& error : errors) {
    text += error.file;
    if (error.line > 0) text.append(":").append(std::to_string(error.line)).append(":").append(std::to_string(error.column));
    if (error.field.empty()) {
      text.append(": ");
    } else {
      text.append(" ").append(error.field).append(": ");
    }
    text.append(error.message).append("\n");
  }
  return text;
}

Checked<ReadManifest, ManifestErrors> parse_manifest(std::string_view text, std::string_view file) {
  Collector collector;
  collector.add({.file = std::string(file), .text = std::string(text)});
  return collector.finish(std::string(file));
}

Checked<ReadManifest, ManifestErrors> read_manifest(const fs::path& path) {
  std::error_code fault;
  if (!fs::is_directory(path, fault)) {
    Checked<std::string, ManifestError> text = read_file(path, path.string());
    if (!text) return ManifestErrors{{text.failure()}};
    return parse_manifest(std::move(text).value(), path.string());
  }
  for (int attempt = 1;; ++attempt) {
    const fs::path contents = resolve_contents(path);
    Checked<ReadManifest, ManifestErrors> result = read_directory(path, contents);
    // A ConfigMap that was swapped meanwhile may have lost its old files half-way; its new ones are whole.
    if (result || attempt == swap_retries_max || resolve_contents(path) == contents) return result;
  }
}

}  // namespace rubato
