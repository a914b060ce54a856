// SPDX-License-Identifier: Apache-2.0
// Merging and resolving layers, by walks over the tables of fields.h.
#include "manifests/layers.h"

#include <algorithm>

#include "manifests/encode.h"
#include "manifests/fields.h"
#include "manifests/node.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view restart_rule =
    "may not be changed while the engine runs: it is fixed at start; change it in the manifest file and restart";

FieldError forbidden(std::string field) {
  return {.fault = Fault::Forbidden, .field = std::move(field), .rule = std::string(restart_rule)};
}

/// Keeps of `object` what the API's layer may hold: fields that exist and are live, and no empty groups.
template <class Table>
Json pruned(const Json& object, const Table& table, Change inherited) {
  Json result = Json::object();
  for_each(table, [&](const auto& line) {
    using Inner = typename Unwrap<typename std::remove_cvref_t<decltype(line)>::Value>::Inner;
    const std::string name(line.name);
    const Change change = line.change.value_or(inherited);
    if (!object.contains(name)) return;
    const Json& value = object[name];
    if constexpr (Nested<Inner, decltype(line.rule)>) {
      if (!value.is_object()) return;
      Json inner = pruned(value, table_of(std::type_identity<Inner>(), line.rule), change);
      if (!inner.empty()) result[name] = std::move(inner);
    } else if (change == Change::Live) {
      result[name] = value;
    }
  });
  return result;
}

/// A null at a field that is fixed and set asks to remove it; that is a change like any other.
template <class Struct, class Table>
void find_forbidden_nulls(const Json& patch, const Struct& current, const Table& table, const std::string& path, Change inherited,
                          FieldErrors& errors) {
  for_each(table, [&](const auto& line) {
    using Member = typename std::remove_cvref_t<decltype(line)>::Value;
    using Inner = typename Unwrap<Member>::Inner;
    const std::string name(line.name);
    const Member& member = current.*line.member;
    const Change change = line.change.value_or(inherited);
    if (!patch.is_object() || !patch.contains(name) || is_unset(member)) return;
    if (patch[name].is_null() && change == Change::Restart) {
      errors.push_back(forbidden(join_path(path, name)));
    } else if constexpr (Nested<Inner, decltype(line.rule)>) {
      const auto inner = table_of(std::type_identity<Inner>(), line.rule);
      if constexpr (std::is_same_v<Inner, Member>) {
        find_forbidden_nulls(patch[name], member, inner, join_path(path, name), change, errors);
      } else {
        find_forbidden_nulls(patch[name], *member, inner, join_path(path, name), change, errors);
      }
    }
  });
}

std::int32_t fit(std::int32_t value, const IntegerKnob& knob) {
  return std::clamp(value, knob.min, knob.max);
}

template <class Choice>
Choice fit(Choice value, const ChoiceKnob<Choice>& knob) {
  return std::find(knob.choices.begin(), knob.choices.end(), value) != knob.choices.end() ? value : knob.initial;
}

template <class Rule, class Value>
std::string shown_value(const Value& value, const Rule& rule) {
  const Json json = encode(value, rule);
  return json.is_string() ? json.get<std::string>() : json.dump();
}

/// What of `above` is set replaces what is set in `below`.
void lay_over(OverrideSpec& below, const OverrideSpec& above) {
  for_each(knob_table, [&](const auto& knob) {
    if (const auto& pin = above.*knob.pin) below.*knob.pin = pin;
  });
}

/// The API's own pins. They have been checked when they were set.
OverrideSpec api_pins(const ApiLayer& layer) {
  const auto found = layer.find("override");
  if (found == layer.end()) return {};
  FieldErrors ignored;
  return decode_override(node_from_json(*found, "spec.override", ignored), Source::Api).value;
}

bool sets_initial(const ApiLayer& layer, std::string_view knob) {
  const auto knobs = layer.find("knobs");
  if (knobs == layer.end() || !knobs->is_object()) return false;
  const auto found = knobs->find(std::string(knob));
  return found != knobs->end() && found->is_object() && found->contains("initial");
}

}  // namespace

Decoded<EngineSpec> apply_api_layer(const EngineSpec& file, const ApiLayer& layer) {
  FieldErrors tree_errors;
  const Node node = node_from_json(layer, "spec", tree_errors);
  Decoded<EngineSpec> decoded = decode_spec(node, file, Source::Api);
  decoded.errors.insert(decoded.errors.begin(), tree_errors.begin(), tree_errors.end());
  return decoded;
}

Decoded<PatchedLayer> patch_api_layer(const EngineSpec& file, const ApiLayer& layer, const Json& spec_patch) {
  Decoded<PatchedLayer> result{.value = {.layer = layer, .spec = file}, .errors = {}, .unknown = {}};
  const Node patch_node = node_from_json(spec_patch, "spec", result.errors);
  if (!result.errors.empty()) return result;  // too deep to walk
  if (patch_node.kind != Node::Kind::Map && patch_node.kind != Node::Kind::Null) {
    result.errors = decode_spec(patch_node, file, Source::Api).errors;
    return result;
  }
  Json merged = layer;
  if (spec_patch.is_null()) {
    merged = Json::object();
  } else {
    merged.merge_patch(spec_patch);
  }
  find_forbidden_nulls(spec_patch, file, Fields<EngineSpec>::table(), "spec", Change::Live, result.errors);
  Decoded<EngineSpec> decoded = apply_api_layer(file, merged);
  for (const std::string& field : restart_fields(changed_fields(file, decoded.value))) {
    if (!touches(result.errors, field)) result.errors.push_back(forbidden(field));
  }
  for (FieldError& error : decoded.errors) {
    if (!touches(result.errors, error.field)) result.errors.push_back(std::move(error));
  }
  result.unknown = std::move(decoded.unknown);
  result.value.layer = pruned(merged, Fields<EngineSpec>::table(), Change::Live);
  // Again without what was pruned: an empty group in the patch must not show as set.
  result.value.spec = apply_api_layer(file, result.value.layer).value;
  return result;
}

std::optional<Duration> override_expiry(const OverrideSpec& pins, Duration set_at) {
  if (!pins.expires_after) return std::nullopt;
  return set_at + *pins.expires_after;
}

bool override_expired(const OverrideSpec& pins, Duration set_at, Duration now) {
  const std::optional<Duration> expiry = override_expiry(pins, set_at);
  return expiry && now >= *expiry;
}

Layer EffectiveKnobs::origin(std::string_view knob) const {
  const auto found = std::find_if(origins.begin(), origins.end(), [&](const KnobOrigin& origin) { return origin.knob == knob; });
  CHECK(found != origins.end(), "no knob ", knob);
  return found->layer;
}

KnobValues initial_knobs(const KnobsSpec& bounds) {
  KnobValues values;
  for_each(knob_table, [&](const auto& knob) { values.*knob.value = (bounds.*knob.bounds).initial; });
  return values;
}

KnobValues fit_knobs(const KnobValues& wanted, const KnobsSpec& bounds, const OverrideSpec& pins) {
  KnobValues values = wanted;
  for_each(knob_table, [&](const auto& knob) {
    auto& value = values.*knob.value;
    value = fit((pins.*knob.pin).value_or(value), bounds.*knob.bounds);
  });
  if (values.max_num_batched_tokens >= values.max_num_seqs + min_prefill_quantum) return values;
  if (pins.max_num_batched_tokens) {
    values.max_num_seqs = values.max_num_batched_tokens - min_prefill_quantum;
  } else {
    values.max_num_batched_tokens = values.max_num_seqs + min_prefill_quantum;
  }
  return values;
}

EffectiveKnobs effective_knobs(const Layers& layers, Duration now) {
  const Decoded<EngineSpec> merged = apply_api_layer(layers.file, layers.api);
  const EngineSpec& spec = merged.ok() ? merged.value : layers.file;
  const ApiLayer& api = merged.ok() ? layers.api : ApiLayer::object();

  EffectiveKnobs result;
  if (layers.file.override_ && !override_expired(*layers.file.override_, layers.file_set_at, now)) {
    lay_over(result.pins, *layers.file.override_);
  }
  if (const OverrideSpec pins = api_pins(api); !override_expired(pins, layers.api_override_set_at, now))
    lay_over(result.pins, pins);

  const bool is_tuned = spec.tuning.enabled && layers.tuned.has_value();
  const KnobValues wanted = is_tuned ? *layers.tuned : initial_knobs(spec.knobs);
  result.values = fit_knobs(wanted, spec.knobs, result.pins);
  for_each(knob_table, [&](const auto& knob) {
    const auto& pin = result.pins.*knob.pin;
    const Layer below = sets_initial(api, knob.name) ? Layer::Api : Layer::File;
    // The tuner's word counts as its own where it differs from what the layers below say.
    const bool tuned = is_tuned && wanted.*knob.value != (spec.knobs.*knob.bounds).initial;
    result.origins.push_back({.knob = knob.name, .layer = pin ? Layer::Override : tuned ? Layer::Tuner : below});
    const auto asked = pin.value_or(wanted.*knob.value);
    if (asked != result.values.*knob.value) {
      result.clamped.push_back(std::string(knob.name) + ": " + shown_value(asked, knob.rule) + " became " +
                               shown_value(result.values.*knob.value, knob.rule) +
                               " to fit the knob's bounds and the other knobs");
    }
  });
  return result;
}

}  // namespace rubato
