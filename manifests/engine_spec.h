// SPDX-License-Identifier: Apache-2.0
// The Engine kind: what a manifest may ask for, after reading, defaulting and checking. The names, help texts, ranges and
// defaults of its fields stand once, in fields.h; the reader, the JSON schema and the API all walk that table.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "manifests/settings.h"
#include "manifests/units.h"

namespace rubato {

enum class DataType : std::uint8_t { Float32, BFloat16, Float16 };
/// Llama: attention and feed-forward in every layer. Mamba2: recurrent layers alone. Hybrid: every layer has one of the two, and
/// a feed-forward.
enum class Architecture : std::uint8_t { Llama, Mamba2, Hybrid };

/// A model made from a seed instead of files: real shapes and real work, no meaning. Used by the demo, benches and tests.
struct SyntheticModel {
  Architecture architecture = Architecture::Llama;
  std::int32_t hidden_size = 0;
  std::int32_t layers = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;  // 0: hidden_size / heads
  std::int32_t feed_forward = 0;
  std::int32_t attention_every = 0;  // Hybrid: of each so many layers the last one attends
  std::int32_t mamba_heads = 0;      // Mamba2 and Hybrid, as all that follow
  std::int32_t mamba_head_size = 64;
  std::int32_t mamba_groups = 1;        // divides mamba_heads
  std::int32_t state_size = 128;        // of each element of a head
  std::int32_t convolution_window = 4;  // tokens that the convolution sees
  std::int32_t vocabulary = 0;
  bool tied_embeddings = true;
  std::uint64_t seed = 1;

  friend bool operator==(const SyntheticModel&, const SyntheticModel&) = default;
};

/// Exactly one of path and synthetic is set. Restart-only.
struct ModelSpec {
  std::string path;                         // a Hugging Face folder
  std::optional<SyntheticModel> synthetic;  // or a model from a seed
  std::string served_name;                  // `model` in the OpenAI API; empty: metadata.name
  std::optional<DataType> dtype;            // empty: that of the checkpoint

  friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
};

/// What is allocated at start; live knobs stay within it. Restart-only.
struct CapacitySpec {
  std::int32_t max_model_len = 4096;           // tokens, prompt and output together
  std::int32_t max_num_seqs = 64;              // sequences that may be in one step
  std::int32_t max_waiting = 1024;             // requests queued before 429
  std::int64_t kv_cache_memory = 512LL << 20;  // bytes
  std::int32_t cpu_threads = 0;                // 0: min(affinity, cgroup quota)

  friend bool operator==(const CapacitySpec&, const CapacitySpec&) = default;
};

/// Whether data-parallel lanes step together. Off: each lane for itself. On: every step waits for the slowest lane, as models
/// need whose layers synchronise all ranks. Aligned: as On, and prefill chunks are dealt to all lanes in the same step.
enum class Lockstep : std::uint8_t { Off, On, Aligned };

/// How lanes work together. Restart-only.
struct LanesSpec {
  Lockstep lockstep = Lockstep::Off;
  std::int32_t max_handoffs = 64;                     // sequences between prefill and decode before prefills wait
  Duration handoff_lease = std::chrono::seconds(10);  // how long a copy of blocks between devices may take

  friend bool operator==(const LanesSpec&, const LanesSpec&) = default;
};

/// Blocks and states of what has been computed are kept for requests that begin with the same tokens, as long as nobody else
/// needs the room; the longest unused go first. What a hit is worth is not computed again, and has the bits that computing would
/// have given. Restart-only.
struct PrefixCachingSpec {
  bool enabled = true;
  std::int32_t snapshot_tokens = 512;  // models with recurrent layers: a snapshot of the state every so many tokens, at the last
                                       // full block of a prompt, and where prompts part. A multiple of kv_block_tokens

  friend bool operator==(const PrefixCachingSpec&, const PrefixCachingSpec&) = default;
};

/// Trust: what tests have shown holds here too. Verify: the exactness checker runs on this machine, device and model before the
/// first request, and a backend that fails it serves none.
enum class Exactness : std::uint8_t { Trust, Verify };

/// A request is good when its TTFT and its own p99 token gap are both within target.
struct ObjectivesSpec {
  Duration ttft = std::chrono::milliseconds(500);
  Duration itl = std::chrono::milliseconds(50);
  std::int32_t attainment = 99;  // percent of requests that must be good

  friend bool operator==(const ObjectivesSpec&, const ObjectivesSpec&) = default;
};

/// Where an integer knob starts and may go, both ends included.
struct IntegerKnob {
  std::int32_t initial = 0;
  std::int32_t min = 0;
  std::int32_t max = 0;

  friend bool operator==(const IntegerKnob&, const IntegerKnob&) = default;
};

/// Where a choice starts and what it may become. choices is never empty and holds initial.
template <class Choice>
struct ChoiceKnob {
  Choice initial{};
  std::vector<Choice> choices;

  friend bool operator==(const ChoiceKnob&, const ChoiceKnob&) = default;
};

struct KnobsSpec {
  IntegerKnob max_num_batched_tokens{.initial = 512, .min = 64, .max = 4096};
  ChoiceKnob<PriorityPolicy> priority_policy{.initial = PriorityPolicy::Deadline,
                                             .choices = {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst,
                                                         PriorityPolicy::PrefillFirst, PriorityPolicy::ShortestFirst}};
  IntegerKnob deadline_margin{.initial = 20, .min = 0, .max = 50};
  IntegerKnob max_num_seqs{.initial = 64, .min = 8, .max = 64};
  ChoiceKnob<Mode> mode{.initial = Mode::Chunked, .choices = {Mode::Chunked}};
  IntegerKnob prefill_share{.initial = 50, .min = 10, .max = 90};
  ChoiceKnob<Reservation> reservation{.initial = Reservation::LastChunk,
                                      .choices = {Reservation::LastChunk, Reservation::PrefillComplete, Reservation::Early}};
  IntegerKnob prefill_devices{.initial = 1, .min = 1, .max = 1};  // max: one less than devices, see derived_defaults.h

  friend bool operator==(const KnobsSpec&, const KnobsSpec&) = default;
};

/// The twin simulates this engine under other settings. Its work is kept to a share of one core and stops while steps run late.
struct TwinSpec {
  bool enabled = true;
  std::int32_t core_percent = 50;

  friend bool operator==(const TwinSpec&, const TwinSpec&) = default;
};

struct TuningSpec {
  bool enabled = true;
  Duration window = std::chrono::seconds(15);  // how long one live measurement lasts
  std::int32_t min_requests = 20;              // a window with fewer finished requests decides nothing
  Duration settle = std::chrono::seconds(2);   // dropped after every change before a trial's window opens
  Duration dwell = std::chrono::seconds(60);   // shortest time between a finished search and the next
  std::int32_t risk_budget = 10;               // percent of an hour's requests that trials may put at risk
  std::int32_t false_alarms_per_day = 1;       // how jumpy the watch over the load is
  TwinSpec twin;

  friend bool operator==(const TuningSpec&, const TuningSpec&) = default;
};

/// Knobs pinned by a person. A pinned knob is never tuned. expires_after counts from when the override was set.
struct OverrideSpec {
  std::optional<std::int32_t> max_num_batched_tokens{};
  std::optional<PriorityPolicy> priority_policy{};
  std::optional<std::int32_t> deadline_margin{};
  std::optional<std::int32_t> max_num_seqs{};
  std::optional<Mode> mode{};
  std::optional<std::int32_t> prefill_share{};
  std::optional<Reservation> reservation{};
  std::optional<std::int32_t> prefill_devices{};
  std::optional<Duration> expires_after{};

  friend bool operator==(const OverrideSpec&, const OverrideSpec&) = default;
};

struct EngineSpec {
  ModelSpec model;
  std::vector<std::string> devices{"cpu"};  // cpu | cpu:0 | cpu:1 ... or cuda:0 ..., all of one family. Restart-only.
  CapacitySpec capacity;
  LanesSpec lanes;
  PrefixCachingSpec prefix_caching;
  Exactness exactness = Exactness::Trust;  // restart-only
  ObjectivesSpec objectives;
  KnobsSpec knobs;
  TuningSpec tuning;
  std::optional<OverrideSpec> override_;

  friend bool operator==(const EngineSpec&, const EngineSpec&) = default;
};

struct EngineManifest {
  std::string name;
  std::map<std::string, std::string> labels;
  std::map<std::string, std::string> annotations;
  EngineSpec spec;

  friend bool operator==(const EngineManifest&, const EngineManifest&) = default;
};

}  // namespace rubato
