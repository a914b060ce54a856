// SPDX-License-Identifier: Apache-2.0
// inotify on the directory, not on the file: editors and kubelet replace files by renames, which a watch on the file itself would
// not survive. The content decides what is a change, so that events may come too often, and too seldom only until the next timer.
#include "daemon/control/manifest_watch.h"

#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <system_error>
#include <utility>

namespace rubato::control {
namespace {

constexpr std::uint32_t watched_events =
    IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_CLOSE_WRITE | IN_DELETE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF;

std::filesystem::path directory_of(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return path;
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

ManifestWatch::ManifestWatch(std::filesystem::path path, std::string hash_in_force)
    : path_(std::move(path)), seen_(std::move(hash_in_force)) {
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

std::optional<ManifestWatch::Outcome> ManifestWatch::poll_once() {
  drain_and_rearm();  // before reading: a change during the reading wakes us again
  Outcome outcome = read_manifest(path_);
  std::string now_seen = outcome ? outcome->hash : outcome.failure().text();
  if (now_seen == seen_) return std::nullopt;
  seen_ = std::move(now_seen);
  return outcome;
}

}  // namespace rubato::control
