// SPDX-License-Identifier: Apache-2.0
#include "daemon/replay/workload.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <unordered_set>

namespace rubato::replay {
namespace {

constexpr std::uintmax_t trace_bytes_max = 1ULL << 30;
constexpr std::int32_t length_max = 10'000'000;

std::optional<TraceFormat> guess_format(const std::string& path, const std::string& first_line) {
  const std::string extension = std::filesystem::path(path).extension().string();
  if (extension == ".yaml" || extension == ".yml") return TraceFormat::Profile;
  if (extension == ".jsonl" || first_line.starts_with('{')) return TraceFormat::Mooncake;
  if (first_line.find("ContextTokens") != std::string::npos) return TraceFormat::Azure;
  if (first_line.find("num_prefill_tokens") != std::string::npos) return TraceFormat::Lengths;
  return std::nullopt;
}

Result<Workload> read_format(TraceFormat format, std::ifstream& file, const WorkloadOptions& options) {
  switch (format) {
    case TraceFormat::Azure:
      return read_azure(file, options.trace);
    case TraceFormat::Mooncake:
      return read_mooncake(file, options.trace);
    case TraceFormat::Lengths:
      return read_lengths(file, options.trace, options);
    case TraceFormat::Profile:
      return read_profile(std::string(std::istreambuf_iterator<char>(file), {}), options.trace, options);
  }
  return unexpected(ErrorCode::Internal, "unknown trace format");
}

std::int32_t scaled(std::int32_t length, double scale) {
  return static_cast<std::int32_t>(std::clamp(std::round(length * scale), 1.0, static_cast<double>(length_max)));
}

/// Shortens to the model's limit: the output to what the prompt leaves but not below half of the limit, then the prompt to the
/// rest.
bool clip(Arrival& arrival, std::int32_t limit) {
  if (arrival.prompt_tokens <= limit - arrival.output_tokens) return false;
  arrival.output_tokens = std::min(arrival.output_tokens, std::max(limit / 2, limit - arrival.prompt_tokens));
  arrival.prompt_tokens = std::min(arrival.prompt_tokens, limit - arrival.output_tokens);
  return true;
}

void limit_time(Workload& workload, Duration seconds) {
  std::erase_if(workload.arrivals, [&](const Arrival& arrival) { return arrival.at >= seconds; });
  std::erase_if(workload.phases, [&](const Phase& phase) { return phase.start >= seconds; });
  for (Phase& phase : workload.phases) phase.length = std::min(phase.length, seconds - phase.start);
}

/// Recorded times shrink with the rate; drawn ones have it already.
void scale_time(Workload& workload, double rate_scale) {
  const auto scale = [&](Duration& time) {
    time = Duration(static_cast<std::int64_t>(static_cast<double>(time.count()) / rate_scale));
  };
  for (Arrival& arrival : workload.arrivals) scale(arrival.at);
  for (Phase& phase : workload.phases) {
    scale(phase.start);
    scale(phase.length);
  }
}

/// What of each prompt an earlier one began with, too: what a cache without limits could spare.
void count_shared(Workload& workload) {
  if (workload.block_tokens == 0) return;
  std::unordered_set<std::uint64_t> seen;
  for (Arrival& arrival : workload.arrivals) {
    const auto full = std::min(arrival.blocks.size(), static_cast<std::size_t>(arrival.prompt_tokens / workload.block_tokens));
    const auto end = arrival.blocks.begin() + static_cast<std::ptrdiff_t>(full);
    const auto first_new = std::find_if(arrival.blocks.begin(), end, [&](std::uint64_t block) { return !seen.contains(block); });
    arrival.shared_tokens = static_cast<std::int32_t>(first_new - arrival.blocks.begin()) * workload.block_tokens;
    seen.insert(arrival.blocks.begin(), end);
  }
}

}  // namespace

Result<Workload> read_workload(const WorkloadOptions& options) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(options.trace, error);
  if (error) return unexpected(ErrorCode::InvalidArgument, options.trace + ": " + error.message());
  if (size > trace_bytes_max) return unexpected(ErrorCode::InvalidArgument, options.trace + ": larger than 1 GiB");
  std::ifstream file(options.trace, std::ios::binary);
  std::string first_line;
  std::getline(file, first_line);
  file.clear();
  file.seekg(0);
  const std::optional<TraceFormat> format = options.format ? options.format : guess_format(options.trace, first_line);
  if (!format) {
    return unexpected(ErrorCode::InvalidArgument, "--format",
                      options.trace + ": format not recognised; give azure, mooncake, lengths or profile");
  }
  Result<Workload> workload = read_format(*format, file, options);
  if (!workload) return workload;
  std::ranges::stable_sort(workload->arrivals, {}, &Arrival::at);
  if (*format == TraceFormat::Azure || *format == TraceFormat::Mooncake) scale_time(*workload, options.rate_scale);
  if (options.seconds) limit_time(*workload, *options.seconds);
  for (Arrival& arrival : workload->arrivals) {
    arrival.prompt_tokens = scaled(arrival.prompt_tokens, options.length_scale);
    arrival.output_tokens = scaled(arrival.output_tokens, options.length_scale);
    if (options.max_model_len && clip(arrival, *options.max_model_len)) ++workload->clipped;
  }
  if (workload->block_tokens > 0) workload->block_tokens = scaled(workload->block_tokens, options.length_scale);
  count_shared(*workload);
  if (workload->arrivals.empty()) return unexpected(ErrorCode::InvalidArgument, options.trace + ": no request in it");
  return workload;
}

}  // namespace rubato::replay
