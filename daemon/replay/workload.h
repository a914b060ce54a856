// SPDX-License-Identifier: Apache-2.0
// What is to be sent and when: read from a recorded trace or drawn from a profile of phases. No clock and no socket; one seed is
// one workload.
#pragma once

#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <vector>

#include "manifests/result.h"
#include "manifests/units.h"

namespace rubato::replay {

/// Azure: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake: JSON lines with timestamp (ms), input_length,
/// output_length and hash_ids, one for each 512 tokens: prompts that begin with the same ids begin with the same tokens. Lengths:
/// CSV with num_prefill_tokens, num_decode_tokens and no times. Profile: YAML with phases.
enum class TraceFormat : std::uint8_t { Azure, Mooncake, Lengths, Profile };

struct WorkloadOptions {
  std::string trace;                  // path
  std::optional<TraceFormat> format;  // empty: told by the file's name and first line
  double rate_scale = 1;              // how many times as many requests per second
  double length_scale = 1;            // both lengths are multiplied by it
  double rate = 1;                    // requests per second, Lengths only
  std::optional<Duration>
      seconds;  // arrivals after it are left out; Lengths: how long to draw; Profile: its phases repeat until then
  std::optional<std::int32_t> max_model_len;
  std::uint64_t seed = 1;
};

struct Arrival {
  Duration at{};  // after the start of the run
  std::int32_t prompt_tokens = 1;
  std::int32_t output_tokens = 1;
  std::uint32_t phase = 0;
  std::vector<std::uint64_t> blocks{};  // what the prompt consists of, block after block; empty: nothing it shares with others
  std::int32_t shared_tokens = 0;       // of the prompt: in blocks at its begin that an earlier arrival had too
};

struct Phase {
  std::string name;
  Duration start{};
  Duration length{};
};

/// arrivals are in order of time, phases in order and not empty.
struct Workload {
  std::vector<Phase> phases;
  std::vector<Arrival> arrivals;
  std::int64_t clipped = 0;       // requests shortened to max_model_len
  std::int32_t block_tokens = 0;  // of one of the arrivals' blocks; 0: they have none
};

/// Errors name file and line. A workload without a single arrival is one.
[[nodiscard]] Result<Workload> read_workload(const WorkloadOptions& options);

// The formats one by one, before scaling and clipping (profile and lengths apply rate_scale as they draw). name is for messages.
[[nodiscard]] Result<Workload> read_azure(std::istream& in, const std::string& name);
[[nodiscard]] Result<Workload> read_mooncake(std::istream& in, const std::string& name);
[[nodiscard]] Result<Workload> read_lengths(std::istream& in, const std::string& name, const WorkloadOptions& options);
[[nodiscard]] Result<Workload> read_profile(const std::string& text, const std::string& name, const WorkloadOptions& options);

}  // namespace rubato::replay
