// SPDX-License-Identifier: Apache-2.0
// Memory-mapped safetensors, one file or the shards of an index. All checks happen on sizes and headers that were read, before
// the first mapped byte is touched, so that a damaged file is an error message and never a signal.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "engine/model/json_object.h"
#include "engine/model/safetensors_header.h"
#include "engine/model/tensors.h"
#include "engine/model/weights.h"

namespace rubato::engine {
namespace {

constexpr const char* single_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";
constexpr std::int64_t index_size_max = 64 << 20;
constexpr std::size_t listed_max = 20;  // names shown in one message

Unexpected system_error(const std::string& place, const char* what) {
  const int number = errno;
  return unexpected(number == ENOENT ? ErrorCode::NotFound : ErrorCode::Internal,
                    place + ": " + what + ": " + std::generic_category().message(number));
}

/// One open file, mapped read-only. Move-only owner of descriptor and mapping.
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept
      : path(std::move(other.path)),
        tensors(std::move(other.tensors)),
        descriptor_(std::exchange(other.descriptor_, -1)),
        bytes_(std::exchange(other.bytes_, nullptr)),
        size_(other.size_) {}
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile() {
    if (bytes_ != nullptr) ::munmap(bytes_, static_cast<std::size_t>(size_));
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  std::string path;
  std::vector<StoredTensor> tensors;

  static Result<MappedFile> open(const std::filesystem::path& path) {
    MappedFile file;
    file.path = path.string();
    file.descriptor_ = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // never hangs on a pipe of that name
    if (file.descriptor_ < 0) return system_error(file.path, "cannot be opened");
    struct stat status {};
    if (::fstat(file.descriptor_, &status) != 0) return system_error(file.path, "cannot be examined");
    if (!S_ISREG(status.st_mode)) return unexpected(ErrorCode::InvalidArgument, file.path + ": is no regular file");
    file.size_ = status.st_size;
    if (auto parsed = file.parse(); !parsed) return Unexpected(std::move(parsed).error());
    void* bytes = ::mmap(nullptr, static_cast<std::size_t>(file.size_), PROT_READ, MAP_PRIVATE, file.descriptor_, 0);
    if (bytes == MAP_FAILED) return system_error(file.path, "cannot be mapped");
    file.bytes_ = bytes;
    return file;
  }

  /// The tensor's bytes. The file's size is asked again, because it may have been cut since it was opened.
  [[nodiscard]] Result<std::span<const std::byte>> bytes(const StoredTensor& tensor) const {
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0 || status.st_size < tensor.end) {
      return unexpected(ErrorCode::Internal, path + ": was cut short while it was being read");
    }
    return std::span(static_cast<const std::byte*>(bytes_) + tensor.begin, static_cast<std::size_t>(tensor.end - tensor.begin));
  }

 private:
  Result<void> read(std::span<char> into, std::int64_t offset) const {
    std::size_t done = 0;
    while (done < into.size()) {
      const ssize_t count =
          ::pread(descriptor_, into.data() + done, into.size() - done, offset + static_cast<std::int64_t>(done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return system_error(path, "cannot be read");
      if (count == 0) return unexpected(ErrorCode::InvalidArgument, path + ": ends within its header");
      done += static_cast<std::size_t>(count);
    }
    return {};
  }

  Result<void> parse() {
    char first[safetensors_length_bytes] = {};
    if (size_ >= safetensors_length_bytes) {
      if (auto done = read(first, 0); !done) return done;
    }
    const auto length = parse_safetensors_length(std::as_bytes(std::span(first)), size_, path);
    if (!length) return Unexpected(length.error());
    std::string json(static_cast<std::size_t>(*length), '\0');
    if (auto done = read(json, safetensors_length_bytes); !done) return done;
    auto parsed = parse_safetensors_header(json, size_, path);
    if (!parsed) return Unexpected(std::move(parsed).error());
    tensors = std::move(*parsed);
    return {};
  }

  int descriptor_ = -1;
  void* bytes_ = nullptr;
  std::int64_t size_ = 0;
};

class SafetensorsSource final : public WeightSource {
 public:
  std::vector<MappedFile> files;
  struct Place {
    std::size_t file = 0;
    std::size_t tensor = 0;
  };
  std::unordered_map<std::string, Place> places;
  std::vector<std::string> notes;
  std::string folder;

  [[nodiscard]] bool has(std::string_view name) const override { return places.contains(std::string(name)); }
  [[nodiscard]] std::vector<std::string> warnings() const override { return notes; }

  [[nodiscard]] Result<TensorView> load(std::string_view name, std::span<const std::int64_t> expected_shape) override {
    const auto found = places.find(std::string(name));
    if (found == places.end()) return unexpected(ErrorCode::NotFound, folder + ": no tensor " + std::string(name));
    const MappedFile& file = files[found->second.file];
    const StoredTensor& tensor = file.tensors[found->second.tensor];
    const std::string place = file.path + ": tensor " + tensor.name;
    if (!tensor.type->dtype) {
      return unexpected(ErrorCode::InvalidArgument,
                        place + " is " + std::string(tensor.type->name) + "; supported: F32, F16, BF16");
    }
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), expected_shape.begin(), expected_shape.end())) {
      return unexpected(ErrorCode::InvalidArgument, place + " has shape " + shape_text(tensor.shape) +
                                                        ", the configuration needs " + shape_text(expected_shape));
    }
    auto bytes = file.bytes(tensor);
    if (!bytes) return Unexpected(std::move(bytes).error());
    return TensorView{.dtype = *tensor.type->dtype, .shape = tensor.shape, .bytes = aligned(*bytes, *tensor.type->dtype)};
  }

 private:
  /// The format does not promise alignment; readers of the view may rely on it.
  std::span<const std::byte> aligned(std::span<const std::byte> bytes, DataType dtype) {
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % static_cast<std::uintptr_t>(element_size(dtype)) == 0) return bytes;
    copy_.assign(bytes.begin(), bytes.end());
    return copy_;
  }

  std::vector<std::byte> copy_;
};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), listed_max); ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > listed_max) text += " and " + std::to_string(names.size() - listed_max) + " more";
  return text;
}

/// A plain file name: no separator, no parent, nothing that could leave the folder.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

/// weight_map of the index: file name -> tensors it must hold.
Result<std::map<std::string, std::vector<std::string>>> read_index(const std::filesystem::path& path) {
  const auto text = read_text_file(path, index_size_max);
  if (!text) return Unexpected(text.error());
  const auto json = parse_json_object(*text, path.string());
  if (!json) return Unexpected(json.error());
  const auto map = json->find("weight_map");
  if (map == json->end() || !map->is_object() || map->empty()) {
    return unexpected(ErrorCode::InvalidArgument,
                      path.string() + ": weight_map: is missing or no object of tensor names to file names");
  }
  std::map<std::string, std::vector<std::string>> files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || !is_plain_name(file.get<std::string>())) {
      return unexpected(ErrorCode::InvalidArgument,
                        path.string() + ": weight_map: " + tensor + ": " + shown(file) + " is no file name within the folder");
    }
    files[file.get<std::string>()].push_back(tensor);
  }
  return files;
}

/// Files beside the ones used that look like weights: an interrupted download or a copy. Never read.
void note_strays(const std::filesystem::path& folder, SafetensorsSource& source) {
  std::vector<std::string> strays;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() != ".safetensors") continue;
    const bool used = std::any_of(source.files.begin(), source.files.end(), [&](const MappedFile& file) {
      return std::filesystem::path(file.path).filename() == entry->path().filename();
    });
    if (!used) strays.push_back(entry->path().filename().string());
  }
  std::sort(strays.begin(), strays.end());
  if (!strays.empty()) source.notes.push_back(folder.string() + ": not part of the model and ignored: " + listed(strays));
}

Result<void> add_single(const std::filesystem::path& folder, SafetensorsSource& source) {
  auto file = MappedFile::open(folder / single_name);
  if (!file) return Unexpected(std::move(file).error());
  for (std::size_t i = 0; i < file->tensors.size(); ++i) source.places[file->tensors[i].name] = {.file = 0, .tensor = i};
  source.files.push_back(std::move(*file));
  return {};
}

/// Adds one shard; names of the index that it does not hold go to missing.
void add_shard(MappedFile file, const std::vector<std::string>& names, SafetensorsSource& source,
               std::vector<std::string>& missing) {
  std::unordered_map<std::string_view, std::size_t> held;
  for (std::size_t i = 0; i < file.tensors.size(); ++i) held.emplace(file.tensors[i].name, i);
  std::size_t found_count = 0;
  for (const std::string& name : names) {
    const auto found = held.find(name);
    if (found == held.end()) {
      missing.push_back(name + " (stated to be in " + std::filesystem::path(file.path).filename().string() + ")");
    } else {
      source.places[name] = {.file = source.files.size(), .tensor = found->second};
      ++found_count;
    }
  }
  if (found_count < held.size()) {
    source.notes.push_back(file.path + ": " + std::to_string(held.size() - found_count) +
                           " tensors that the index does not assign to it are ignored");
  }
  held.clear();  // its keys point into file
  source.files.push_back(std::move(file));
}

Result<void> add_shards(const std::filesystem::path& folder, SafetensorsSource& source) {
  const std::filesystem::path index = folder / index_name;
  auto map = read_index(index);
  if (!map) return Unexpected(std::move(map).error());
  std::vector<std::string> absent;
  for (const auto& [name, tensors] : *map) {
    std::error_code error;
    if (!std::filesystem::exists(folder / name, error)) absent.push_back(name);
  }
  if (!absent.empty()) {
    return unexpected(ErrorCode::NotFound, index.string() + ": shards that are not in the folder: " + listed(absent));
  }
  std::vector<std::string> missing;
  for (const auto& [name, tensors] : *map) {
    auto file = MappedFile::open(folder / name);
    if (!file) return Unexpected(std::move(file).error());
    add_shard(std::move(*file), tensors, source, missing);
  }
  if (!missing.empty())
    return unexpected(ErrorCode::NotFound, index.string() + ": tensors that no shard holds as stated: " + listed(missing));
  return {};
}

/// 128 bits of a tensor's bytes, good enough to tell a copy from something else.
std::pair<std::uint64_t, std::uint64_t> fingerprint(std::span<const std::byte> bytes) {
  std::uint64_t a = 0x9E3779B97F4A7C15U;
  std::uint64_t b = bytes.size();
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<std::size_t>(8, bytes.size() - i));
    a = (a ^ word) * 0xFF51AFD7ED558CCDU;
    a ^= a >> 32;
    b = (b + word) * 0xC4CEB9FE1A85EC53U;
    b ^= b >> 29;
  }
  return {a, b};
}

}  // namespace

Result<std::unique_ptr<WeightSource>> open_safetensors(const std::filesystem::path& folder) {
  try {
    auto source = std::make_unique<SafetensorsSource>();
    source->folder = folder.string();
    std::error_code error;
    const bool single = std::filesystem::exists(folder / single_name, error);
    if (!single && !std::filesystem::exists(folder / index_name, error)) {
      return unexpected(ErrorCode::NotFound, folder.string() + ": holds neither " + single_name + " nor " + index_name);
    }
    if (auto added = single ? add_single(folder, *source) : add_shards(folder, *source); !added)
      return Unexpected(std::move(added).error());
    note_strays(folder, *source);
    return std::unique_ptr<WeightSource>(std::move(source));
  } catch (const std::bad_alloc&) {
    return unexpected(ErrorCode::Internal, folder.string() + ": not enough memory to read the headers");
  }
}

Result<std::vector<std::string>> check_weights(const ModelConfig& config, WeightSource& source) {
  std::vector<std::string> missing;
  for (const TensorSpec& tensor : model_tensors(config)) {
    if (!source.has(tensor.name)) missing.push_back(tensor.name);
  }
  if (!missing.empty()) return unexpected(ErrorCode::NotFound, "the model's weights lack " + listed(missing));
  std::vector<std::string> warnings = source.warnings();
  if (!config.tied_embeddings || !source.has("lm_head.weight")) return warnings;
  const std::string embedding = config.embedding_name + ".weight";
  const std::int64_t shape[] = {config.vocabulary, config.hidden_size};
  std::pair<std::uint64_t, std::uint64_t> prints[2];
  for (int i = 0; i < 2; ++i) {
    const auto view = source.load(i == 0 ? embedding : "lm_head.weight", shape);
    if (!view) return Unexpected(view.error());
    prints[i] = fingerprint(view->bytes);
  }
  if (prints[0] != prints[1]) {
    warnings.push_back("config.json ties the head to the embedding, but lm_head.weight differs from " + embedding +
                       ": it is ignored");
  }
  return warnings;
}

}  // namespace rubato::engine
