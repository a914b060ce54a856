// SPDX-License-Identifier: Apache-2.0
// inotify on the directory, not on the file: editors and kubelet replace files by renames, which a watch on the file itself would
// not survive. The content hash decides what is a change, so that events may come too often, and too seldom only until the next
// timer.
#include "daemon/control/manifest_watch.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace rubato::control {
namespace {

constexpr std::uint32_t watched_events =
    IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_CLOSE_WRITE | IN_DELETE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF;

std::string errno_text(int number) {
  return std::generic_category().message(number);
}

class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new()) { CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1); }
  ~Digest() { EVP_MD_CTX_free(context_); }
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;

  void add(std::string_view bytes) { CHECK(EVP_DigestUpdate(context_, bytes.data(), bytes.size()) == 1); }
  std::string hex() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
    unsigned int count = 0;
    CHECK(EVP_DigestFinal_ex(context_, bytes.data(), &count) == 1);
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (unsigned int index = 0; index < count; ++index) {
      text += digits[bytes[index] >> 4];
      text += digits[bytes[index] & 15];
    }
    return text;
  }

 private:
  EVP_MD_CTX* context_;
};

std::string hash_of(const std::vector<ManifestFile>& files) {
  Digest digest;
  if (files.size() == 1) {
    digest.add(files.front().text);
    return digest.hex();
  }
  for (const auto& file : files) {
    digest.add(file.path);
    digest.add(std::string_view("\0", 1));
    digest.add(file.text);
    digest.add(std::string_view("\0", 1));
  }
  return digest.hex();
}

/// Reads a regular file of at most bytes_max. Opens without blocking, because a named pipe would hold the main thread for ever.
Result<std::string> read_bounded(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return unexpected(ErrorCode::Internal, path.string() + ": cannot be opened: " + errno_text(errno));
  struct Closer {
    int file;
    ~Closer() { close(file); }
  } const closer{file};
  struct stat status {};
  if (fstat(file, &status) != 0) return unexpected(ErrorCode::Internal, path.string() + ": " + errno_text(errno));
  if (!S_ISREG(status.st_mode)) return unexpected(ErrorCode::InvalidArgument, path.string() + ": is not a regular file");
  const auto too_large = [&](std::int64_t size) {
    return unexpected(ErrorCode::InvalidArgument, path.string() + ": is " + std::to_string(size) +
                                                      " bytes; a manifest may have at most " +
                                                      std::to_string(ManifestWatch::bytes_max));
  };
  if (status.st_size > ManifestWatch::bytes_max) return too_large(status.st_size);
  std::string text;
  std::array<char, 16384> buffer;
  while (true) {
    const ssize_t count = ::read(file, buffer.data(), buffer.size());
    if (count == 0) return text;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return unexpected(ErrorCode::Internal, path.string() + ": cannot be read: " + errno_text(errno));
    text.append(buffer.data(), static_cast<std::size_t>(count));
    if (text.size() > static_cast<std::size_t>(ManifestWatch::bytes_max))
      return too_large(static_cast<std::int64_t>(text.size()));
  }
}

/// Manifests directly in a directory. Names that begin with a dot are kubelet's own (..data, ..2026_01_01) and editors'
/// leftovers.
Result<std::vector<std::filesystem::path>> manifest_paths(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = entry->path().filename().string();
    const auto extension = entry->path().extension().string();
    if (name.starts_with(".") || (extension != ".yaml" && extension != ".yml" && extension != ".json")) continue;
    paths.push_back(entry->path());
    if (paths.size() > ManifestWatch::files_max) {
      return unexpected(ErrorCode::InvalidArgument,
                        directory.string() + ": holds more than " + std::to_string(ManifestWatch::files_max) + " manifest files");
    }
  }
  if (error) return unexpected(ErrorCode::Internal, directory.string() + ": cannot be listed: " + error.message());
  if (paths.empty()) return unexpected(ErrorCode::NotFound, directory.string() + ": holds no *.yaml, *.yml or *.json file");
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::filesystem::path directory_of(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return path;
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

Result<ManifestText> ManifestWatch::read(const std::filesystem::path& path) {
  std::vector<std::filesystem::path> paths{path};
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    auto listed = manifest_paths(path);
    if (!listed) return Unexpected(std::move(listed).error());
    paths = *std::move(listed);
  }
  ManifestText manifest;
  for (const auto& file : paths) {
    auto text = read_bounded(file);
    if (!text) return Unexpected(std::move(text).error());
    manifest.files.push_back({.path = file.string(), .text = *std::move(text)});
  }
  manifest.hash = hash_of(manifest.files);
  return manifest;
}

ManifestWatch::ManifestWatch(std::filesystem::path path) : path_(std::move(path)) {
  const int descriptor = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  if (descriptor >= 0) descriptor_ = descriptor;
  drain_and_rearm();
}

ManifestWatch::~ManifestWatch() {
  if (descriptor_) close(*descriptor_);
}

void ManifestWatch::drain_and_rearm() {
  if (!descriptor_) return;
  alignas(inotify_event) std::array<char, 4096> buffer;
  // What happened does not matter, only that something did. Bounded: what is left wakes the main thread again.
  for (int round = 0; round < 64 && ::read(*descriptor_, buffer.data(), buffer.size()) > 0; ++round) {
  }
  // Asked anew each time: the kernel answers with the watch it has, unless the directory was removed, renamed or made again.
  const int watch = inotify_add_watch(*descriptor_, directory_of(path_).c_str(), watched_events);
  if (watch_ && watch != *watch_) inotify_rm_watch(*descriptor_, *watch_);
  watch_.reset();
  if (watch >= 0) watch_ = watch;
}

std::optional<Result<ManifestText>> ManifestWatch::poll_once() {
  drain_and_rearm();  // before reading: a change during the reading wakes us again
  auto manifest = read(path_);
  const std::string now_seen = manifest ? manifest->hash : manifest.error().message;
  if (now_seen == seen_) return std::nullopt;
  seen_ = now_seen;
  return manifest;
}

}  // namespace rubato::control
