// SPDX-License-Identifier: Apache-2.0
// The knobs that may change live, as one immutable, numbered set of values. Everything that plans, executes, simulates or
// searches speaks of this struct; where a value came from (file, API, override, tuner) is the business of layers.h.
#pragma once

#include <cstdint>

namespace rubato {

/// Which waiting work a step serves first. One file in policies/ each.
enum class PriorityPolicy : std::uint8_t { Deadline, DecodeFirst, PrefillFirst, ShortestFirst };

/// Chunked: every lane runs mixed steps. Disaggregated: prefill lanes and decode lanes.
enum class Mode : std::uint8_t { Chunked, Disaggregated };

/// When a prefill takes the slot that it will decode in. LastChunk: when at most one chunk of its prompt is left.
/// PrefillComplete: once the whole prompt is computed. Early: when the prefill is admitted.
enum class Reservation : std::uint8_t { LastChunk, PrefillComplete, Early };

/// The value of every live knob. Plain values, no bounds: bounds are KnobSpec's (engine_spec.h).
struct KnobValues {
  std::int32_t max_num_batched_tokens = 512;  // tokens per step, decode rows and chunks together
  std::int32_t max_num_seqs = 64;             // sequences per step, within capacity
  PriorityPolicy priority_policy = PriorityPolicy::Deadline;
  std::int32_t deadline_margin = 20;  // percent of the ITL target that policy Deadline keeps back
  Mode mode = Mode::Chunked;
  std::int32_t prefill_share = 50;  // percent of the device, mode Disaggregated on one device only
  Reservation reservation = Reservation::LastChunk;
  std::int32_t prefill_devices = 1;  // devices that prefill, mode Disaggregated on several devices

  friend bool operator==(const KnobValues&, const KnobValues&) = default;
};

/// KnobValues made current at a step boundary. Numbers only grow; 0 is never current.
struct Settings {
  std::uint64_t number = 1;
  KnobValues knobs;
};

/// A step must hold every decode row plus at least this many prefill tokens, or prefills starve behind a full batch:
/// max_num_batched_tokens >= max_num_seqs + min_prefill_quantum is checked at every edge where knobs come in.
inline constexpr std::int32_t min_prefill_quantum = 16;

/// Tokens in one KV block, on every backend. It divides the attention KV tile, so pages never change a sum's order.
inline constexpr std::int32_t kv_block_tokens = 16;

}  // namespace rubato
