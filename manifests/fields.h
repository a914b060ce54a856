// SPDX-License-Identifier: Apache-2.0
// Every field of the Engine kind, written once: its YAML name, help, type, range, default, and whether it may change live. The
// YAML and JSON readers, the JSON writer, the schema, the diff and the layers all walk these tables. A new field is one line here
// and its member in engine_spec.h; defaults are those of the members.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/names.h"
#include "manifests/settings.h"

namespace rubato {

/// Live: the API may change it and the next step knows. Restart: fixed when the engine starts.
enum class Change : std::uint8_t { Live, Restart };

// ---- rules: how a value is written and what it may be -----------------------------------------------------------------------

struct Whole {  // a whole number, both ends included
  std::int64_t min;
  std::int64_t max;
};
struct Bytes {  // a quantity such as 512Mi, both ends in bytes
  std::int64_t min;
  std::int64_t max;
};
struct Time {  // a duration such as 500ms
  Duration min;
  Duration max;
};
struct Switch {};  // true or false
struct Text {      // never empty when written
  std::size_t length_max;
};
struct OneOf {};  // a value of a named enumeration
struct Group {};  // a struct with a table of its own
template <class Item>
struct ListOf {  // never empty when written
  Item item;
  std::size_t count_max;
};
/// A knob in spec.knobs: where a value under `value` starts and may go. `ceiling` tells whether its max, or its choices, may move
/// live.
template <class Value>
struct Bounds {
  Value value;
  Change ceiling;
};

// ---- a line of a table --------------------------------------------------------------------------------------------------------

template <class Struct, class ValueType, class RuleType>
struct Field {
  using Value = ValueType;

  std::string_view name;
  ValueType Struct::*member;
  RuleType rule;
  std::string_view help;
  bool is_required = false;
  std::optional<Change> change{};  // none: that of the group it is in

  /// Must be written; the member's zero value means that it was not.
  [[nodiscard]] constexpr Field required() const {
    Field field = *this;
    field.is_required = true;
    return field;
  }
  [[nodiscard]] constexpr Field changes(Change how) const {
    Field field = *this;
    field.change = how;
    return field;
  }
};

template <class Struct, class Value, class Rule>
constexpr Field<Struct, Value, Rule> field(std::string_view name, Value Struct::*member, Rule rule, std::string_view help) {
  return {name, member, rule, help};
}

/// A knob: one line makes its bounds in spec.knobs, its pin in spec.override, its value in KnobValues and its row in
/// status.layers.
template <class SpecMember, class PinMember, class ValueMember, class RuleType>
struct Knob {
  std::string_view name;
  SpecMember bounds;  // of KnobsSpec
  PinMember pin;      // of OverrideSpec
  ValueMember value;  // of KnobValues
  RuleType rule;
  std::string_view help;
  Change ceiling = Change::Live;

  [[nodiscard]] constexpr Knob ceiling_fixed_at_start() const {
    Knob knob = *this;
    knob.ceiling = Change::Restart;
    return knob;
  }
};

template <class SpecMember, class PinMember, class ValueMember, class Rule>
constexpr Knob<SpecMember, PinMember, ValueMember, Rule> knob(std::string_view name, SpecMember bounds, PinMember pin,
                                                              ValueMember value, Rule rule, std::string_view help) {
  return {name, bounds, pin, value, rule, help};
}

/// Calls visit(line) for every line of a table.
template <class Table, class Visit>
constexpr void for_each(const Table& table, Visit&& visit) {
  std::apply([&](const auto&... line) { (visit(line), ...); }, table);
}

// ---- the tables
// ----------------------------------------------------------------------------------------------------------------

// clang-format off: one line per field, however long, so that the tables can be read as tables

inline constexpr auto knob_table = std::tuple(
    knob("maxNumBatchedTokens", &KnobsSpec::max_num_batched_tokens, &OverrideSpec::max_num_batched_tokens,
         &KnobValues::max_num_batched_tokens, Whole{1, 65536}, "Tokens per step, decode rows and prefill chunks together.")
        .ceiling_fixed_at_start(),
    knob("priorityPolicy", &KnobsSpec::priority_policy, &OverrideSpec::priority_policy, &KnobValues::priority_policy, OneOf{},
         "Which waiting work a step serves first."),
    knob("deadlineMargin", &KnobsSpec::deadline_margin, &OverrideSpec::deadline_margin, &KnobValues::deadline_margin,
         Whole{0, 90}, "Percent of the ITL target that policy Deadline keeps back."),
    knob("maxNumSeqs", &KnobsSpec::max_num_seqs, &OverrideSpec::max_num_seqs, &KnobValues::max_num_seqs, Whole{1, 4096},
         "Sequences per step, within spec.capacity.maxNumSeqs."),
    knob("mode", &KnobsSpec::mode, &OverrideSpec::mode, &KnobValues::mode, OneOf{},
         "How prefills and decodes share the devices. Whether Disaggregated is a choice is settled at start, because it takes "
         "memory for a second lane.")
        .ceiling_fixed_at_start(),
    knob("prefillShare", &KnobsSpec::prefill_share, &OverrideSpec::prefill_share, &KnobValues::prefill_share, Whole{1, 99},
         "Percent of the device that the prefill lane gets, mode Disaggregated on one device only."),
    knob("reservation", &KnobsSpec::reservation, &OverrideSpec::reservation, &KnobValues::reservation, OneOf{},
         "When a prefill takes the slot that it will decode in, mode Disaggregated only. Never tuned."),
    knob("prefillDevices", &KnobsSpec::prefill_devices, &OverrideSpec::prefill_devices, &KnobValues::prefill_devices,
         Whole{1, 15}, "Devices that prefill while the others decode, mode Disaggregated on several devices only."));

template <class Struct>
struct Fields;

template <>
struct Fields<SyntheticModel> {
  static constexpr auto table() {
    return std::tuple(
        field("architecture", &SyntheticModel::architecture, OneOf{}, "Which decoder."),
        field("hiddenSize", &SyntheticModel::hidden_size, Whole{1, 65536}, "Width of the residual stream.").required(),
        field("layers", &SyntheticModel::layers, Whole{1, 1024}, "Decoder layers.").required(),
        field("heads", &SyntheticModel::heads, Whole{0, 1024}, "Llama and Hybrid, required there: query heads."),
        field("kvHeads", &SyntheticModel::kv_heads, Whole{0, 1024},
              "Llama and Hybrid, required there: key and value heads; divides heads."),
        field("headSize", &SyntheticModel::head_size, Whole{0, 1024}, "Width of one head, even; 0 means hiddenSize / heads."),
        field("feedForward", &SyntheticModel::feed_forward, Whole{0, 1 << 20},
              "Llama and Hybrid, required there: width of the feed-forward layer."),
        field("attentionEvery", &SyntheticModel::attention_every, Whole{0, 1024},
              "Hybrid: of each so many layers the last one attends, the others are recurrent; 0 means 4."),
        field("mambaHeads", &SyntheticModel::mamba_heads, Whole{0, 4096},
              "Mamba2 and Hybrid: heads of a recurrent layer; 0 means 2 * hiddenSize / mambaHeadSize."),
        field("mambaHeadSize", &SyntheticModel::mamba_head_size, Whole{1, 1024}, "Mamba2 and Hybrid: width of such a head."),
        field("mambaGroups", &SyntheticModel::mamba_groups, Whole{1, 4096},
              "Mamba2 and Hybrid: groups of heads that share what they take in and give out; divides the number of heads."),
        field("stateSize", &SyntheticModel::state_size, Whole{1, 1024},
              "Mamba2 and Hybrid: numbers of state for each element of a head."),
        field("convolutionWindow", &SyntheticModel::convolution_window, Whole{2, 16},
              "Mamba2 and Hybrid: tokens that the convolution sees."),
        field("vocabulary", &SyntheticModel::vocabulary, Whole{2, 1 << 21}, "Number of tokens.").required(),
        field("tiedEmbeddings", &SyntheticModel::tied_embeddings, Switch{}, "The output head reuses the embedding matrix."),
        field("seed", &SyntheticModel::seed, Whole{0, 1LL << 53}, "The weights are a function of this number."));
  }
};

template <>
struct Fields<ModelSpec> {
  static constexpr auto table() {
    return std::tuple(
        field("path", &ModelSpec::path, Text{4096},
              "A Hugging Face folder: config.json, *.safetensors, tokenizer.json. Exactly one of path and synthetic is set."),
        field("synthetic", &ModelSpec::synthetic, Group{},
              "A model made from a seed: real shapes and real work, no meaning. For demos, benches and tests."),
        field("servedName", &ModelSpec::served_name, Text{256}, "`model` in the OpenAI API; metadata.name if left out."),
        field("dtype", &ModelSpec::dtype, OneOf{}, "Type of weights and KV cache; that of the checkpoint if left out."));
  }
};

template <>
struct Fields<CapacitySpec> {
  static constexpr auto table() {
    return std::tuple(field("maxModelLen", &CapacitySpec::max_model_len, Whole{1, 1 << 20},
                            "Longest request in tokens, prompt and output together."),
                      field("maxNumSeqs", &CapacitySpec::max_num_seqs, Whole{1, 4096}, "Sequences that may ever be in one step."),
                      field("maxWaiting", &CapacitySpec::max_waiting, Whole{1, 1 << 20},
                            "Requests that may wait; further ones are answered 429."),
                      field("kvCacheMemory", &CapacitySpec::kv_cache_memory, Bytes{1LL << 10, 64LL << 40},
                            "Memory for keys and values, taken at start."),
                      field("cpuThreads", &CapacitySpec::cpu_threads, Whole{0, 1024},
                            "Compute threads of the CPU backend; 0 means as many as the process may use."));
  }
};

template <>
struct Fields<LanesSpec> {
  static constexpr auto table() {
    using namespace std::chrono_literals;
    return std::tuple(field("lockstep", &LanesSpec::lockstep, OneOf{}, "Whether data-parallel lanes step together."),
                      field("maxHandoffs", &LanesSpec::max_handoffs, Whole{1, 4096},
                            "Sequences that may be between prefill and decode; beyond that prefills wait."),
                      field("handoffLease", &LanesSpec::handoff_lease, Time{100ms, 10min},
                            "How long a copy of blocks between devices may take; after that the sequence goes on where it is."));
  }
};

template <>
struct Fields<PrefixCachingSpec> {
  static constexpr auto table() {
    return std::tuple(
        field("enabled", &PrefixCachingSpec::enabled, Switch{},
              "Whether what prompts have in common is computed once and kept while there is room."),
        field("snapshotTokens", &PrefixCachingSpec::snapshot_tokens, Whole{kv_block_tokens, 1 << 20},
              "Models with recurrent layers: tokens from one snapshot of their state to the next; a multiple of 16."));
  }
};

template <>
struct Fields<ObjectivesSpec> {
  static constexpr auto table() {
    using namespace std::chrono_literals;
    return std::tuple(
        field("ttft", &ObjectivesSpec::ttft, Time{1ms, 1h}, "Target for the time from arrival to the first token."),
        field("itl", &ObjectivesSpec::itl, Time{100us, 10min},
              "Target for the time between tokens; a request is judged by its own 99th percentile."),
        field("attainment", &ObjectivesSpec::attainment, Whole{1, 100}, "Percent of requests that must meet both targets."));
  }
};

template <>
struct Fields<TwinSpec> {
  static constexpr auto table() {
    return std::tuple(
        field("enabled", &TwinSpec::enabled, Switch{}, "Whether it runs, and the search asks it first."),
        field("corePercent", &TwinSpec::core_percent, Whole{1, 100}, "How much of one core it may take at most."));
  }
};

template <>
struct Fields<TuningSpec> {
  static constexpr auto table() {
    using namespace std::chrono_literals;
    return std::tuple(
        field("enabled", &TuningSpec::enabled, Switch{}, "Whether the tuner may move knobs that are not pinned."),
        field("window", &TuningSpec::window, Time{100ms, 1h}, "How long one live measurement lasts."),
        field("minRequests", &TuningSpec::min_requests, Whole{1, 100000},
              "A window with fewer finished requests decides nothing."),
        field("settle", &TuningSpec::settle, Time{0s, 10min}, "Dropped after every change before a trial's window opens."),
        field("dwell", &TuningSpec::dwell, Time{0s, 24h}, "Shortest time between a finished search and the next."),
        field("riskBudget", &TuningSpec::risk_budget, Whole{0, 100},
              "Percent of an hour's requests that trials may put at risk."),
        field("falseAlarmsPerDay", &TuningSpec::false_alarms_per_day, Whole{1, 1000},
              "How often the watch over the load may cry wolf; more makes it quicker."),
        field("twin", &TuningSpec::twin, Group{}, "The simulator of this engine that the search asks first."));
  }
};

template <>
struct Fields<KnobsSpec> {
  static constexpr auto table() {
    return std::apply(
        [](const auto&... row) {
          return std::tuple(field(row.name, row.bounds, Bounds<decltype(row.rule)>{row.rule, row.ceiling}, row.help)...);
        },
        knob_table);
  }
};

template <>
struct Fields<OverrideSpec> {
  static constexpr auto table() {
    using namespace std::chrono_literals;
    return std::tuple_cat(
        std::apply([](const auto&... row) { return std::tuple(field(row.name, row.pin, row.rule, row.help)...); }, knob_table),
        std::tuple(field("expiresAfter", &OverrideSpec::expires_after, Time{1s, 8760h},
                         "The pins end this long after they were set; never if left out.")));
  }
};

template <>
struct Fields<EngineSpec> {
  static constexpr auto table() {
    return std::tuple(
        field("model", &EngineSpec::model, Group{}, "What is served.").required().changes(Change::Restart),
        field("devices", &EngineSpec::devices, ListOf<Text>{Text{32}, 16},
              "Where it runs, on devices of one family: cpu:0, cpu:1, ... or cuda:0, cuda:1, ...; cpu is cpu:0.")
            .changes(Change::Restart),
        field("capacity", &EngineSpec::capacity, Group{}, "What is taken at start; live knobs stay within it.")
            .changes(Change::Restart),
        field("lanes", &EngineSpec::lanes, Group{}, "How lanes step together and hand sequences over.").changes(Change::Restart),
        field("prefixCaching", &EngineSpec::prefix_caching, Group{},
              "Reuse of what requests that begin with the same tokens have in common. It never changes an answer.")
            .changes(Change::Restart),
        field("exactness", &EngineSpec::exactness, OneOf{},
              "Whether the exactness checker runs before the first request; a backend that fails it serves none.")
            .changes(Change::Restart),
        field("objectives", &EngineSpec::objectives, Group{}, "A request is good when it meets both targets."),
        field("knobs", &EngineSpec::knobs, Group{}, "Where each knob starts and how far it may go."),
        field("tuning", &EngineSpec::tuning, Group{}, "How the tuner measures and when it searches."),
        field("override", &EngineSpec::override_, Group{},
              "Knobs pinned by a person: they win at once and are never tuned. Usually set over the API."));
  }
};

/// initial, min and max of an integer knob, initial and choices of the others, all under the knob's own rule.
constexpr auto bounds_table(std::type_identity<IntegerKnob>, const Bounds<Whole>& bounds) {
  return std::tuple(field("initial", &IntegerKnob::initial, bounds.value, "Where it starts."),
                    field("min", &IntegerKnob::min, bounds.value, "The lowest value it may take."),
                    field("max", &IntegerKnob::max, bounds.value, "The highest value it may take.").changes(bounds.ceiling));
}
template <class Choice>
constexpr auto bounds_table(std::type_identity<ChoiceKnob<Choice>>, const Bounds<OneOf>& bounds) {
  return std::tuple(field("initial", &ChoiceKnob<Choice>::initial, bounds.value, "Where it starts."),
                    field("choices", &ChoiceKnob<Choice>::choices, ListOf<OneOf>{bounds.value, enum_names<Choice>.size()},
                          "What it may become.")
                        .changes(bounds.ceiling));
}

// clang-format on

// ---- walking
// -------------------------------------------------------------------------------------------------------------------

template <class Value>
struct Unwrap {
  using Inner = Value;
};
template <class Value>
struct Unwrap<std::optional<Value>> {
  using Inner = Value;
};

template <class Struct>
requires requires {
  Fields<Struct>::table();
}
constexpr auto table_of(std::type_identity<Struct>, const Group&) {
  return Fields<Struct>::table();
}
template <class Struct, class Value>
requires requires(std::type_identity<Struct> type, const Bounds<Value>& bounds) {
  bounds_table(type, bounds);
}
constexpr auto table_of(std::type_identity<Struct> type, const Bounds<Value>& bounds) {
  return bounds_table(type, bounds);
}

/// True for a value that has fields of its own under this rule; table_of(type_identity, rule) gives them.
template <class Value, class Rule>
concept Nested = requires(std::type_identity<Value> type, const Rule& rule) {
  table_of(type, rule);
};

/// One leaf of the spec as shown to people.
struct FieldInfo {
  std::string path;
  std::string help;
  Change change = Change::Live;
};

/// Every leaf of the spec in order; an optional group counts with all of its fields.
[[nodiscard]] std::vector<FieldInfo> all_fields();

/// The leaves in which two specs differ. A group that only one of them has (model.synthetic, override) counts as one leaf.
struct FieldChange {
  std::string field;
  Change change = Change::Live;

  friend bool operator==(const FieldChange&, const FieldChange&) = default;
};
[[nodiscard]] std::vector<FieldChange> changed_fields(const EngineSpec& before, const EngineSpec& after);

/// Of these, the ones that a running engine cannot follow.
[[nodiscard]] std::vector<std::string> restart_fields(const std::vector<FieldChange>& changes);

}  // namespace rubato
