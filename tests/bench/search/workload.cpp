// SPDX-License-Identifier: Apache-2.0
// See workload.h.
#include "tests/bench/search/workload.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "tests/bench/search/truth.h"

namespace rubato::study {
namespace {

constexpr double silence_max = 5;  // seconds

struct Fitted {
  const char* name;
  double prompt_median, prompt_p90;
  std::int32_t prompt_max;
  double output_median, output_p90;
  std::int32_t output_max;
};

constexpr Fitted fitted[] = {
    {"azure_code", 1469, 5187, 7437, 13, 55, 1899}, {"azure_conv", 1020, 2734, 14050, 129, 424, 1000},
    {"sharegpt", 1730, 5696, 8141, 415, 834, 1024}, {"arxiv", 2730, 3702, 4054, 167, 372, 4056},
    {"bwb", 1037, 1453, 3504, 1601, 2149, 2858},
};

std::int32_t lognormal(Draws& draws, double median, double p90, std::int32_t most) {
  constexpr double p90_deviations = 1.2816;
  const double value = median * std::exp(std::log(p90 / median) / p90_deviations * normal_quantile(draws.uniform()));
  return std::clamp(static_cast<std::int32_t>(std::lround(value)), 1, most);
}

double exponential(Draws& draws) {
  return -std::log(draws.uniform());
}

RecordedRequest within_bounds(RecordedRequest request) {
  request.prompt_tokens = std::clamp(request.prompt_tokens, 1, prompt_tokens_max);
  request.output_tokens = std::clamp(request.output_tokens, 1, output_tokens_max);
  request.interval = std::clamp(request.interval, 0.0, silence_max);
  return request;
}

// Seconds of the day of `2023-11-16 18:17:03.9799600`.
double seconds_of_day(const std::string& stamp) {
  const std::size_t space = stamp.find(' ');
  if (space == std::string::npos || stamp.size() < space + 9) return -1;
  return std::stod(stamp.substr(space + 1, 2)) * 3600 + std::stod(stamp.substr(space + 4, 2)) * 60 +
         std::stod(stamp.substr(space + 7));
}

Unexpected bad_file(std::string message) {
  return Unexpected(Error{.code = ErrorCode::InvalidArgument, .field = {}, .message = std::move(message)});
}

Result<std::vector<RecordedRequest>> read_table(const std::string& path, bool stamped) {
  std::ifstream in(path);
  if (!in) return Unexpected(Error{.code = ErrorCode::NotFound, .field = {}, .message = path + ": cannot be read"});
  std::vector<RecordedRequest> rows;
  std::string line;
  std::getline(in, line);  // names of the columns
  double before = -1;
  for (std::size_t number = 2; std::getline(in, line); ++number) {
    std::istringstream fields(line);
    std::string first;
    std::string second;
    std::string third;
    std::getline(fields, first, ',');
    std::getline(fields, second, ',');
    std::getline(fields, third, ',');
    RecordedRequest row;
    try {
      row.prompt_tokens = std::stoi(stamped ? second : first);
      row.output_tokens = std::stoi(stamped ? third : second);
      if (stamped) {
        const double at = seconds_of_day(first);
        row.interval = before < 0 ? 0 : at - before;
        before = at;
      }
    } catch (const std::exception&) {
      return bad_file(path + ":" + std::to_string(number) + ": '" + line + "' is not a row of numbers");
    }
    rows.push_back(within_bounds(row));
  }
  if (rows.empty()) return bad_file(path + ": holds no rows");
  return rows;
}

const RequestClass& draw_class(const Workload& workload, double at) {
  double total = 0;
  for (const RequestClass& one : workload.classes) total += one.weight;
  double sum = 0;
  for (const RequestClass& one : workload.classes) {
    sum += one.weight / total;
    if (at < sum) return one;
  }
  return workload.classes.back();
}

tuner::TrafficRequest request_of(const RequestClass& one, const RecordedRequest& row, TimePoint arrival) {
  return {.arrival = arrival,
          .prompt_tokens = row.prompt_tokens,
          .output_tokens = std::min(row.output_tokens, one.max_new_tokens),
          .max_new_tokens = one.max_new_tokens,
          .ttft_target = one.ttft,
          .itl_target = one.itl,
          .ended = true};
}

}  // namespace

Traces::Traces() {
  std::uint64_t seed = 1;
  for (const Fitted& fit : fitted) {
    Draws draws(seed++);
    std::vector<RecordedRequest>& rows = tables_[fit.name];
    const bool bursts = std::string(fit.name) == "azure_code";
    for (int i = 0; i < 20000; ++i) {
      const double wait = exponential(draws);
      // Groups of close requests with silences between.
      const double interval = !bursts ? wait : draws.uniform() < 0.9 ? 0.06 * wait : 2.5 * wait;
      rows.push_back(within_bounds({.prompt_tokens = lognormal(draws, fit.prompt_median, fit.prompt_p90, fit.prompt_max),
                                    .output_tokens = lognormal(draws, fit.output_median, fit.output_p90, fit.output_max),
                                    .interval = interval}));
    }
  }
}

Result<Traces> Traces::read(const std::string& folder) {
  struct File {
    const char* name;
    const char* path;
    bool stamped;
  };
  constexpr File files[] = {{"azure_code", "azure_2023_code.csv", true},
                            {"azure_conv", "azure_2023_conv.csv", true},
                            {"sharegpt", "sharegpt_8k_filtered_stats_llama2_tokenizer.csv", false},
                            {"arxiv", "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", false},
                            {"bwb", "bwb_stats_llama2_tokenizer_filtered_v2.csv", false}};
  Traces traces;
  traces.recorded_ = true;
  for (const File& file : files) {
    Result<std::vector<RecordedRequest>> rows = read_table(folder + "/" + file.path, file.stamped);
    if (!rows) return Unexpected(rows.error());
    traces.tables_[file.name] = std::move(*rows);
  }
  return traces;
}

ObjectivesSpec Workload::objectives() const {
  return {.ttft = classes.front().ttft, .itl = classes.front().itl, .attainment = 95};
}

const std::vector<Workload>& all_workloads() {
  using std::chrono::milliseconds;
  static const std::vector<Workload> workloads{
      {.name = "chat",
       .classes = {{.trace = "sharegpt", .ttft = milliseconds(1000), .itl = milliseconds(40), .max_new_tokens = 1024}}},
      {.name = "conversation",
       .classes = {{.trace = "azure_conv", .ttft = milliseconds(750), .itl = milliseconds(40), .max_new_tokens = 1024}},
       .arrivals = Arrivals::Recorded},
      {.name = "retrieval",
       .classes = {{.trace = "arxiv", .ttft = milliseconds(2000), .itl = milliseconds(50), .max_new_tokens = 2048}}},
      {.name = "long", .classes = {{.trace = "bwb", .ttft = milliseconds(1500), .itl = milliseconds(35)}}},
      {.name = "burst",
       .classes = {{.trace = "azure_code", .ttft = milliseconds(2000), .itl = milliseconds(50), .max_new_tokens = 1024}},
       .arrivals = Arrivals::Recorded},
      {.name = "mixed",
       .classes =
           {{.trace = "sharegpt", .weight = 5, .ttft = milliseconds(1000), .itl = milliseconds(40), .max_new_tokens = 1024},
            {.trace = "azure_code", .weight = 3, .ttft = milliseconds(500), .itl = milliseconds(50), .max_new_tokens = 1024},
            {.trace = "arxiv", .weight = 2, .ttft = milliseconds(5000), .itl = milliseconds(100), .max_new_tokens = 2048}}},
  };
  return workloads;
}

const Workload* workload_named(const std::string& name) {
  for (const Workload& workload : all_workloads()) {
    if (workload.name == name) return &workload;
  }
  return nullptr;
}

std::vector<tuner::TrafficRequest> make_traffic(const Traces& traces, const Workload& workload, double rate, TimePoint from,
                                                Duration length, std::uint64_t seed) {
  Draws draws(seed * 0x9e3779b97f4a7c15ULL + 17);
  std::vector<tuner::TrafficRequest> requests;
  const double seconds = to_seconds(length);
  if (workload.arrivals == Arrivals::Poisson) {
    for (double at = exponential(draws) / rate; at < seconds; at += exponential(draws) / rate) {
      const RequestClass& one = draw_class(workload, draws.uniform());
      const std::vector<RecordedRequest>& rows = traces.of(one.trace);
      requests.push_back(request_of(one, rows[draws.below(rows.size())], from + from_seconds(at)));
    }
  } else {
    const RequestClass& one = workload.classes.front();
    const std::vector<RecordedRequest>& rows = traces.of(one.trace);
    const auto count = static_cast<std::size_t>(std::max(1.0, std::round(rate * seconds)));
    const std::size_t offset = draws.below(rows.size());
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) total += rows[(offset + i) % rows.size()].interval;
    double at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const RecordedRequest& row = rows[(offset + i) % rows.size()];
      at += row.interval;
      requests.push_back(request_of(one, row, from + from_seconds(at / total * seconds * 0.999999)));
    }
  }
  for (std::size_t i = 1; i < requests.size(); ++i) {
    requests[i].arrival = std::max(requests[i].arrival, requests[i - 1].arrival + Duration(1));
  }
  return requests;
}

}  // namespace rubato::study
