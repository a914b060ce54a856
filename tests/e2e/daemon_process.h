// SPDX-License-Identifier: Apache-2.0
// A real rubatod as a child process on free ports, its log in the test's hands, and the few client calls that tests need.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "manifests/check.h"
#include "tests/support/raw_client.h"
#include "tests/support/temporary_folder.h"

extern char** environ;

namespace rubato::test {

class DaemonProcess {
 public:
  /// Starts rubatod with these arguments beside free ports, and waits until it has said where it listens.
  explicit DaemonProcess(std::vector<std::string> arguments) {
    std::vector<std::string> all{RUBATOD, "--listen", "127.0.0.1:0", "--control-listen", "127.0.0.1:0"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    int ends[2];
    CHECK(::pipe2(ends, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    std::vector<char*> argv;
    for (std::string& argument : all) argv.push_back(argument.data());
    argv.push_back(nullptr);
    CHECK(::posix_spawn(&process_, RUBATOD, &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    log_end_ = ends[0];
    wait_for_log(std::regex(R"(data port 127\.0\.0\.1:(\d+), control port 127\.0\.0\.1:(\d+))"), std::chrono::seconds(30));
    std::smatch match;
    if (std::regex_search(log_, match, std::regex(R"(data port 127\.0\.0\.1:(\d+), control port 127\.0\.0\.1:(\d+))"))) {
      data_port_ = std::stoi(match[1]);
      control_port_ = std::stoi(match[2]);
    }
  }

  ~DaemonProcess() {
    if (process_ > 0) {
      ::kill(process_, SIGKILL);
      ::waitpid(process_, nullptr, 0);
    }
    ::close(log_end_);
  }
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  [[nodiscard]] int data_port() const { return data_port_; }
  [[nodiscard]] int control_port() const { return control_port_; }
  [[nodiscard]] const std::string& log() {
    read_log(std::chrono::milliseconds(0));
    return log_;
  }
  void signal(int number) const { ::kill(process_, number); }

  /// Polls /readyz; false after the time-out or when the process has ended.
  bool wait_ready(std::chrono::seconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (std::chrono::steady_clock::now() < deadline) {
      read_log(std::chrono::milliseconds(20));
      if (control("GET", "/readyz").status == 200) return true;
      if (ended()) return false;
    }
    return false;
  }

  /// The exit status, or none when it still runs at the time-out. A signal's number is returned as 128 + number.
  std::optional<int> wait_exit(std::chrono::seconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (std::chrono::steady_clock::now() < deadline) {
      if (ended()) return exit_status_;
      read_log(std::chrono::milliseconds(20));
    }
    return std::nullopt;
  }

  RawReply data(const std::string& method, const std::string& path, const std::string& body = "",
                const std::string& content_type = "application/json") const {
    return call(data_port_, method, path, body, content_type);
  }
  RawReply control(const std::string& method, const std::string& path, const std::string& body = "",
                   const std::string& content_type = "application/merge-patch+json") const {
    return call(control_port_, method, path, body, content_type);
  }
  [[nodiscard]] nlohmann::json engine(const std::string& name) const {
    return nlohmann::json::parse(control("GET", "/apis/rubato.dev/v1alpha1/engines/" + name).body, nullptr, false);
  }
  /// One series' value from /metrics; labels as printed, e.g. `rubato_knob{knob="maxNumBatchedTokens"}`.
  [[nodiscard]] std::optional<double> metric(const std::string& series) const {
    const std::string text = data("GET", "/metrics").body;
    const std::size_t at = text.find("\n" + series + " ");
    if (at == std::string::npos) return std::nullopt;
    return std::strtod(text.c_str() + at + series.size() + 2, nullptr);
  }

 private:
  static RawReply call(int port, const std::string& method, const std::string& path, const std::string& body,
                       const std::string& content_type) {
    RawClient client(port);
    client.set_deadline(std::chrono::seconds(120));
    std::string request = method + " " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n";
    if (!body.empty()) request += "Content-Type: " + content_type + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
    client.send(request + "\r\n" + body);
    return client.read_reply();
  }

  bool ended() {
    if (process_ <= 0) return true;
    int status = 0;
    if (::waitpid(process_, &status, WNOHANG) != process_) return false;
    exit_status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    process_ = 0;
    read_log(std::chrono::milliseconds(0));
    return true;
  }

  void read_log(std::chrono::milliseconds wait) {
    pollfd descriptor{.fd = log_end_, .events = POLLIN, .revents = 0};
    int timeout = static_cast<int>(wait.count());
    while (::poll(&descriptor, 1, timeout) > 0 && (descriptor.revents & POLLIN) != 0) {
      char buffer[4096];
      const ssize_t count = ::read(log_end_, buffer, sizeof buffer);
      if (count <= 0) return;
      log_.append(buffer, static_cast<std::size_t>(count));
      timeout = 0;
    }
  }

  void wait_for_log(const std::regex& pattern, std::chrono::seconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (std::chrono::steady_clock::now() < deadline && !std::regex_search(log_, pattern) && !ended()) {
      read_log(std::chrono::milliseconds(20));
    }
  }

  pid_t process_ = 0;
  int log_end_ = -1;
  int data_port_ = 0;
  int control_port_ = 0;
  std::string log_;
  std::optional<int> exit_status_;
};

}  // namespace rubato::test
