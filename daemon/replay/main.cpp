// SPDX-License-Identifier: Apache-2.0
// rubato-replay: status 0 when the load ran (whatever the figures), 1 when it could not run, 2 for a bad command line.
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <stop_token>
#include <thread>

#include "daemon/replay/replay.h"

namespace {

/// Progress on standard error: one line that is overwritten on a terminal, else every tenth.
class ProgressPrinter {
 public:
  void print(const std::string& line) {
    if (terminal_) {
      std::cerr << "\r\033[K" << line << std::flush;
    } else if (count_++ % 10 == 0) {
      std::cerr << line << std::endl;
    }
  }
  void end() const {
    if (terminal_) std::cerr << "\r\033[K" << std::flush;
  }

 private:
  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
  int count_ = 0;
};

bool write_json(const rubato::replay::Report& report, const std::string& path) {
  const std::string text = rubato::replay::to_json(report).dump(2);
  if (path == "-") return static_cast<bool>(std::cout << text << std::endl);
  std::ofstream file(path);
  return static_cast<bool>(file << text << std::endl);
}

/// Ends the run at the first SIGINT or SIGTERM; its figures are still printed. Signals are blocked in every other thread.
std::jthread stop_on_signal(const sigset_t& signals, std::stop_source& stop) {
  return std::jthread([&signals, &stop](const std::stop_token& ended) {
    constexpr timespec poll{.tv_sec = 0, .tv_nsec = 200'000'000};
    while (!ended.stop_requested()) {
      if (::sigtimedwait(&signals, nullptr, &poll) > 0) {
        stop.request_stop();
        return;
      }
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  using namespace rubato;
  const Result<replay::Options> options = replay::parse_options({argv + 1, argv + argc});
  if (!options) {
    std::cerr << "rubato-replay: " << options.error().message << std::endl;
    return 2;
  }
  if (options->help) {
    std::cout << replay::usage_text();
    return 0;
  }
  std::signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::stop_source stop;
  const std::jthread watcher = stop_on_signal(signals, stop);

  ProgressPrinter printer;
  const Result<replay::Report> report = replay::replay(
      *options, [&](const std::string& line) { printer.print(line); }, stop.get_token());
  printer.end();
  if (!report) {
    std::cerr << "rubato-replay: " << report.error().message << std::endl;
    return 1;
  }
  (options->json == "-" ? std::cerr : std::cout) << replay::to_table(*report) << std::flush;
  if (!options->json.empty() && !write_json(*report, options->json)) {
    std::cerr << "rubato-replay: " << options->json << ": cannot be written" << std::endl;
    return 1;
  }
  return 0;
}
