// SPDX-License-Identifier: Apache-2.0
// Records of the study as JSON and as Markdown.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "manifests/result.h"
#include "tests/bench/search/runs.h"

namespace rubato::study {

/// CPU seconds differ from run to run: they are left out unless asked for, so that the same command gives the same bytes.
enum class Clocked : std::uint8_t { No, Yes };

[[nodiscard]] nlohmann::ordered_json to_json(const std::vector<Record>& records, Clocked clocked);
/// InvalidArgument names what is missing.
[[nodiscard]] Result<std::vector<Record>> records_from_json(const std::string& text);

/// One table per kind and load: rows by name, medians and 90th percentiles over the seeds. All records of a table are of one
/// truth, space and workload, or the workloads make up columns.
[[nodiscard]] std::string to_markdown(const std::vector<Record>& records);

/// Nearest rank, 0 < at <= 1. Values must not be empty.
[[nodiscard]] double quantile(std::vector<double> values, double at);

}  // namespace rubato::study
