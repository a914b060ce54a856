// SPDX-License-Identifier: Apache-2.0
// Watches the manifest on disk, as a plain file or as a mounted ConfigMap whose ..data link is swapped, and hands out its text
// when the text has changed. What the text means, and that a bad one never replaces a good one, is the Reconciler's business.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "manifests/result.h"

namespace rubato::control {

struct ManifestFile {
  std::string path;
  std::string text;
};

/// What stood on disk at one look.
struct ManifestText {
  std::vector<ManifestFile> files;  // in order of their names; one unless the path is a directory
  std::string hash;  // SHA-256 in hex: of a single file's bytes (as sha256sum prints it), else of all names and texts
};

/// Not thread-safe: the main thread waits on descriptor() and a timer, and calls poll_once() for either. Never blocks, never
/// throws.
class ManifestWatch {
 public:
  /// A file, or a directory of which every *.yaml, *.yml and *.json file is read. It need not exist yet.
  explicit ManifestWatch(std::filesystem::path path);
  ~ManifestWatch();
  ManifestWatch(const ManifestWatch&) = delete;
  ManifestWatch& operator=(const ManifestWatch&) = delete;

  /// Looks at the disk. Nothing when it is as at the last look (an error that repeats is nothing new either).
  [[nodiscard]] std::optional<Result<ManifestText>> poll_once();

  /// Looks without remembering: for start-up and --check.
  [[nodiscard]] static Result<ManifestText> read(const std::filesystem::path& path);

  /// Readable when something happened in the watched directory. Empty where the kernel gives no watch (its limit of instances is
  /// reached): then the timer alone finds changes.
  [[nodiscard]] std::optional<int> descriptor() const { return descriptor_; }

  /// How often to look even without a sign: network file systems give none, and a link may lead out of the directory.
  static constexpr std::chrono::seconds poll_interval{10};
  static constexpr std::int64_t bytes_max = 1 << 20;  // as large as a ConfigMap can be
  static constexpr std::size_t files_max = 64;

 private:
  void drain_and_rearm();

  std::filesystem::path path_;
  std::optional<int> descriptor_;
  std::optional<int> watch_;
  std::string seen_;  // hash or error text of the last look
};

}  // namespace rubato::control
