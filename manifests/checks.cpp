// SPDX-License-Identifier: Apache-2.0
// Cross-field rules of the Engine spec, one line each.
#include "manifests/checks.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <set>

#include "manifests/derived_defaults.h"
#include "manifests/device_name.h"
#include "manifests/fields.h"

namespace rubato {
namespace {

class Checker {
 public:
  explicit Checker(const FieldErrors& known) : known_(known) {}

  /// An error at `field` unless holds. Silent if `field` or one of `also` is wrong already: one slip, one error.
  void require(const bool holds, const std::string& field, std::initializer_list<std::string> also, std::string found,
               std::string rule) {
    if (holds || is_wrong(field) ||
        std::any_of(also.begin(), also.end(), [&](const std::string& other) { return is_wrong(other); }))
      return;
    errors.push_back({.field = field, .found = std::move(found), .rule = std::move(rule)});
  }
  void add(FieldError error) {
    if (!is_wrong(error.field)) errors.push_back(std::move(error));
  }

  FieldErrors errors;

 private:
  [[nodiscard]] bool is_wrong(std::string_view field) const { return touches(known_, field) || touches(errors, field); }

  const FieldErrors& known_;
};

std::string number(std::int64_t value) {
  return std::to_string(value);
}

/// Sizes that one architecture needs and another has no use for.
void check_presence(const SyntheticModel& m, const std::string& at, Checker& checker) {
  struct Size {
    const char* name;
    std::int32_t value;
  };
  const std::string architecture(to_string(m.architecture));
  for (const Size& size : {Size{".heads", m.heads}, Size{".kvHeads", m.kv_heads}, Size{".feedForward", m.feed_forward}}) {
    if (m.architecture == Architecture::Mamba2) {
      checker.require(size.value == 0, at + size.name, {at + ".architecture"}, number(size.value),
                      "must be left out: architecture Mamba2 has recurrent layers alone");
    } else if (size.value == 0) {
      checker.add({.fault = Fault::Required, .field = at + size.name, .rule = "by architecture " + architecture});
    }
  }
  checker.require(m.attention_every == 0 || m.architecture == Architecture::Hybrid, at + ".attentionEvery",
                  {at + ".architecture"}, number(m.attention_every),
                  "must be left out: architecture " + architecture + " does not mix kinds of layers");
}

void check_heads(const SyntheticModel& m, const std::string& at, Checker& checker) {
  if (m.heads <= 0 || m.kv_heads <= 0) return;  // reported as missing
  checker.require(m.heads % m.kv_heads == 0, at + ".kvHeads", {at + ".heads"}, number(m.kv_heads),
                  "must divide heads (" + number(m.heads) + ")");
  if (m.head_size == 0) {
    checker.require(m.hidden_size % m.heads == 0, at + ".heads", {at + ".hiddenSize"}, number(m.heads),
                    "must divide hiddenSize (" + number(m.hidden_size) + ") unless headSize is given");
    checker.require(m.hidden_size % m.heads != 0 || m.hidden_size / m.heads % 2 == 0, at + ".heads", {at + ".hiddenSize"},
                    number(m.heads), "must give heads of even width: hiddenSize / heads is " + number(m.hidden_size / m.heads));
  } else {
    checker.require(m.head_size % 2 == 0, at + ".headSize", {}, number(m.head_size), "must be even");
  }
}

void check_recurrence(const SyntheticModel& m, const std::string& at, Checker& checker) {
  if (m.mamba_head_size <= 0 || m.mamba_groups <= 0) return;  // reported as out of range
  const std::int32_t inner = 2 * m.hidden_size;
  if (m.mamba_heads == 0) {
    checker.require(inner % m.mamba_head_size == 0, at + ".mambaHeadSize", {at + ".hiddenSize"}, number(m.mamba_head_size),
                    "must divide 2 * hiddenSize (" + number(inner) + ") unless mambaHeads is given");
    if (inner % m.mamba_head_size != 0) return;
  }
  const std::int32_t heads = m.mamba_heads != 0 ? m.mamba_heads : inner / m.mamba_head_size;
  checker.require(heads % m.mamba_groups == 0, at + ".mambaGroups", {at + ".mambaHeads"}, number(m.mamba_groups),
                  "must divide the number of heads (" + number(heads) + ")");
}

void check_synthetic(const SyntheticModel& m, const std::string& at, Checker& checker) {
  check_presence(m, at, checker);
  if (m.architecture != Architecture::Mamba2) check_heads(m, at, checker);
  if (m.architecture != Architecture::Llama) check_recurrence(m, at, checker);
  if (m.architecture != Architecture::Hybrid) return;
  const std::int32_t every = m.attention_every != 0 ? m.attention_every : 4;
  checker.require(m.layers > 1, at + ".layers", {}, number(m.layers), "must be at least 2 for layers of both kinds");
  checker.require(m.layers <= 1 || (every > 1 && every <= m.layers), at + ".attentionEvery", {at + ".layers"}, number(every),
                  "must be 2.." + number(m.layers) + " (layers), so that layers of both kinds are left");
}

void check_model(const ModelSpec& model, Checker& checker) {
  const std::string at = "spec.model";
  if (model.path.empty() && !model.synthetic) {
    checker.add({.fault = Fault::Required, .field = at, .rule = "exactly one of path and synthetic"});
  }
  checker.require(model.path.empty() || !model.synthetic, at, {}, "path and synthetic",
                  "must not both be set: exactly one is allowed");
  if (model.synthetic) check_synthetic(*model.synthetic, at + ".synthetic", checker);
}

void check_devices(const std::vector<std::string>& devices, Checker& checker) {
  std::set<DeviceName> seen;
  std::optional<std::size_t> first;  // the entry that sets the family
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const std::string at = "spec.devices[" + std::to_string(i) + "]";
    const std::optional<DeviceName> device = parse_device(devices[i]);
    checker.require(device.has_value(), at, {}, in_quotes(devices[i]), "must be cpu, cpu:<index> or cuda:<index>, index 0..999");
    if (!device) continue;
    if (!seen.insert(*device).second) {
      checker.add({.fault = Fault::Duplicate, .field = at, .found = in_quotes(devices[i]), .rule = "is in the list twice"});
    }
    if (!first) first = i;
    checker.require(device->family == parse_device(devices[*first])->family, at, {}, in_quotes(devices[i]),
                    "must be of one family with " + in_quotes(devices[*first]) + " (spec.devices[" + std::to_string(*first) +
                        "]): an engine runs on CPU devices or on CUDA devices, not on both");
  }
}

void check_bounds(const IntegerKnob& knob, const std::string& at, Checker& checker) {
  checker.require(knob.min <= knob.max, at + ".min", {at + ".max"}, number(knob.min),
                  "must not be above max (" + number(knob.max) + ")");
  if (knob.min > knob.max) return;
  checker.require(knob.initial >= knob.min, at + ".initial", {at + ".min"}, number(knob.initial),
                  "must not be below min (" + number(knob.min) + ")");
  checker.require(knob.initial <= knob.max, at + ".initial", {at + ".max"}, number(knob.initial),
                  "must not be above max (" + number(knob.max) + ")");
}

template <class Choice>
void add_not_a_choice(Choice value, const std::vector<Choice>& choices, const std::string& field, Checker& checker) {
  FieldError error{.fault = Fault::NotSupported, .field = field, .found = in_quotes(to_string(value))};
  for (const Choice choice : choices) error.choices.emplace_back(to_string(choice));
  checker.add(std::move(error));
}

template <class Choice>
bool contains(const std::vector<Choice>& choices, Choice value) {
  return std::find(choices.begin(), choices.end(), value) != choices.end();
}

template <class Choice>
void check_bounds(const ChoiceKnob<Choice>& knob, const std::string& at, Checker& checker) {
  if (contains(knob.choices, knob.initial)) return;
  checker.require(false, at + ".initial", {at + ".choices"}, in_quotes(to_string(knob.initial)),
                  "must be one of the knob's choices");
}

void check_pin(std::int32_t pin, const IntegerKnob& knob, const std::string& field, const std::string& bounds, Checker& checker) {
  checker.require(pin >= knob.min && pin <= knob.max, field, {bounds}, number(pin),
                  "is outside " + bounds + ", " + number(knob.min) + ".." + number(knob.max));
}

template <class Choice>
void check_pin(Choice pin, const ChoiceKnob<Choice>& knob, const std::string& field, const std::string&, Checker& checker) {
  if (!contains(knob.choices, pin)) add_not_a_choice(pin, knob.choices, field, checker);
}

/// One device must be left to decode, so that no number of prefill devices can stop a sequence half way.
void check_prefill_devices(const EngineSpec& spec, Checker& checker) {
  const IntegerKnob& knob = spec.knobs.prefill_devices;
  const std::int32_t allowed = prefill_devices_max(spec.devices.size());
  checker.require(knob.max <= allowed, "spec.knobs.prefillDevices.max", {"spec.devices"}, number(knob.max),
                  spec.devices.size() > 1
                      ? "must not be above " + number(allowed) + ": of " +
                            number(static_cast<std::int64_t>(spec.devices.size())) + " devices one must be left to decode"
                      : "must not be above 1: spec.devices has one device");
}

void check_budget(const EngineSpec& spec, Checker& checker) {
  const std::string budget_at = "spec.knobs.maxNumBatchedTokens";
  const std::string seqs_at = "spec.knobs.maxNumSeqs";
  const IntegerKnob& budget = spec.knobs.max_num_batched_tokens;
  const IntegerKnob& seqs = spec.knobs.max_num_seqs;
  const auto rule = [](std::string_view end, std::int32_t value) {
    return std::string("must be at least maxNumSeqs.").append(end) + " (" + number(value) + ") + one prefill quantum (" +
           number(min_prefill_quantum) + ") = " + number(std::int64_t{value} + min_prefill_quantum);
  };
  const auto holds = [](std::int32_t tokens, std::int32_t rows) { return tokens >= std::int64_t{rows} + min_prefill_quantum; };
  checker.require(holds(budget.initial, seqs.initial), budget_at + ".initial", {seqs_at + ".initial"}, number(budget.initial),
                  rule("initial", seqs.initial));
  checker.require(holds(budget.min, seqs.min), budget_at + ".min", {seqs_at + ".min"}, number(budget.min), rule("min", seqs.min));
  checker.require(holds(budget.max, seqs.max), budget_at + ".max", {seqs_at + ".max"}, number(budget.max), rule("max", seqs.max));
  checker.require(seqs.max <= spec.capacity.max_num_seqs, seqs_at + ".max", {"spec.capacity.maxNumSeqs"}, number(seqs.max),
                  "must not be above spec.capacity.maxNumSeqs (" + number(spec.capacity.max_num_seqs) + ")");
}

void check_override(const EngineSpec& spec, Checker& checker) {
  if (!spec.override_) return;
  const OverrideSpec& pins = *spec.override_;
  for_each(knob_table, [&](const auto& knob) {
    const auto& pin = pins.*knob.pin;
    if (!pin) return;
    check_pin(*pin, spec.knobs.*knob.bounds, join_path("spec.override", knob.name), join_path("spec.knobs", knob.name), checker);
  });
  if (pins.max_num_batched_tokens && pins.max_num_seqs) {
    const std::int64_t needed = std::int64_t{*pins.max_num_seqs} + min_prefill_quantum;
    checker.require(*pins.max_num_batched_tokens >= needed, "spec.override.maxNumBatchedTokens", {"spec.override.maxNumSeqs"},
                    number(*pins.max_num_batched_tokens),
                    "must be at least maxNumSeqs (" + number(*pins.max_num_seqs) + ") + one prefill quantum (" +
                        number(min_prefill_quantum) + ") = " + number(needed) + ", because both are pinned");
  }
}

}  // namespace

FieldErrors check_spec(const EngineSpec& spec, const FieldErrors& known) {
  Checker checker(known);
  check_model(spec.model, checker);
  check_devices(spec.devices, checker);
  for_each(knob_table,
           [&](const auto& knob) { check_bounds(spec.knobs.*knob.bounds, join_path("spec.knobs", knob.name), checker); });
  checker.require(spec.prefix_caching.snapshot_tokens % kv_block_tokens == 0, "spec.prefixCaching.snapshotTokens", {},
                  number(spec.prefix_caching.snapshot_tokens), "must be a multiple of " + number(kv_block_tokens));
  check_prefill_devices(spec, checker);
  check_budget(spec, checker);
  check_override(spec, checker);
  return std::move(checker.errors);
}

}  // namespace rubato
