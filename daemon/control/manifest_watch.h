// SPDX-License-Identifier: Apache-2.0
// Watches the manifest on disk, as a plain file or as a mounted ConfigMap whose ..data link is swapped, and reads it when
// something may have changed. That a bad manifest never replaces a good one is the Reconciler's business; how it is read is
// read_manifest's.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

#include "manifests/read_manifest.h"

namespace rubato::control {

/// Not thread-safe: the main thread waits on descriptor() and a timer, and calls poll_once() for either. Never blocks, never
/// throws.
class ManifestWatch {
 public:
  using Outcome = Checked<ReadManifest, ManifestErrors>;

  /// A file or a directory, as read_manifest takes it. It need not exist yet. hash_in_force: that of the manifest already read at
  /// start, so that the first look is no change.
  ManifestWatch(std::filesystem::path path, std::string hash_in_force);
  ~ManifestWatch();
  ManifestWatch(const ManifestWatch&) = delete;
  ManifestWatch& operator=(const ManifestWatch&) = delete;

  /// Reads the manifest. Nothing when it is as at the last look; the same errors again are nothing new either.
  [[nodiscard]] std::optional<Outcome> poll_once();

  /// Readable when something happened in the watched directory. Empty where the kernel gives no watch (its limit of instances is
  /// reached): then the timer alone finds changes.
  [[nodiscard]] std::optional<int> descriptor() const { return descriptor_; }

  /// How often to look even without a sign: network file systems give none, and a link may lead out of the directory.
  static constexpr std::chrono::seconds poll_interval{10};

 private:
  void drain_and_rearm();

  std::filesystem::path path_;
  std::string seen_;  // hash or error text of the last look
  std::optional<int> descriptor_;
  std::optional<int> watch_;
};

}  // namespace rubato::control
