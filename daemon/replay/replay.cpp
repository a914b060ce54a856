// SPDX-License-Identifier: Apache-2.0
#include "daemon/replay/replay.h"

namespace rubato::replay {

Result<Report> replay(const Options& options, const std::function<void(const std::string&)>& line, std::stop_token stop) {
  const Result<Workload> workload = read_workload(options.workload);
  if (!workload) return Unexpected(workload.error());
  const auto progress = [&](const Progress& state) {
    if (line) line(progress_line(*workload, state, options.targets));
  };
  const Result<LoadRun> run = run_load(*workload, options.client, progress, std::move(stop));
  if (!run) return Unexpected(run.error());
  return summarize(*workload, *run, options.targets);
}

}  // namespace rubato::replay
