// SPDX-License-Identifier: Apache-2.0
// rubatod.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "daemon/daemon.h"
#include "daemon/explain.h"
#include "daemon/logging.h"
#include "daemon/options.h"
#include "daemon/plan.h"
#include "daemon/regimes_command.h"
#include "daemon/version.h"
#include "manifests/schema.h"

int main(int argument_count, char** arguments) {
  try {
    const rubato::Result<rubato::Options> options =
        rubato::parse_options(std::vector<std::string>(arguments + 1, arguments + argument_count));
    if (!options) {
      std::fprintf(stderr, "rubatod: %s\n", options.error().message.c_str());
      return 2;
    }
    switch (options->action) {
      case rubato::Action::ShowHelp:
        std::fputs(rubato::usage_text(options->command).c_str(), stdout);
        return 0;
      case rubato::Action::ShowSchema:
        std::printf("%s\n", rubato::engine_schema().dump(2).c_str());
        return 0;
      case rubato::Action::ShowVersion:
        std::printf("rubatod %s\n", rubato::version);
        return 0;
      case rubato::Action::Check:
        return rubato::check(*options);
      case rubato::Action::CheckExactness:
        return rubato::check_exactness(*options);
      case rubato::Action::Explain:
        return rubato::explain(*options);
      case rubato::Action::Plan:
        return rubato::plan(*options);
      case rubato::Action::ExportRegimes:
        return rubato::export_regimes_command(*options);
      case rubato::Action::ImportRegimes:
        return rubato::import_regimes_command(*options);
      case rubato::Action::Serve:
        rubato::start_logging(options->log_format);
        return rubato::serve(*options);
    }
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "rubatod: %s\n", exception.what());
  }
  return 1;
}
