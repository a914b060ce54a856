// SPDX-License-Identifier: Apache-2.0
#include "daemon/durable_write.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <system_error>

namespace rubato {
namespace {

namespace fs = std::filesystem;

Unexpected failed(const fs::path& path, const std::string& what) {
  return unexpected(ErrorCode::Internal, path.string() + ": " + what + ": " + std::generic_category().message(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

Result<void> write_durably(const fs::path& path, const std::string& text) {
  const fs::path beside = path.string() + ".new";
  {
    const Descriptor file(open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (file.number() < 0) return failed(beside, "cannot be opened");
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t count = ::write(file.number(), text.data() + done, text.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return failed(beside, "cannot be written");
      done += static_cast<std::size_t>(count);
    }
    if (fsync(file.number()) != 0) return failed(beside, "cannot be flushed");
  }
  if (std::rename(beside.c_str(), path.c_str()) != 0) return failed(path, "cannot be replaced");
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const Descriptor directory(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.number() < 0 || fsync(directory.number()) != 0) return failed(folder, "cannot be flushed");
  return {};
}

Result<std::string> read_whole(const fs::path& path, std::uintmax_t bytes_max) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  if (error) return unexpected(ErrorCode::InvalidArgument, path.string() + ": " + error.message());
  if (size > bytes_max) {
    return unexpected(ErrorCode::InvalidArgument, path.string() + ": has " + std::to_string(size) + " bytes; at most " +
                                                      std::to_string(bytes_max) + " are read");
  }
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) return unexpected(ErrorCode::InvalidArgument, path.string() + ": cannot be read");
  return text;
}

}  // namespace rubato
