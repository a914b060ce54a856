// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/control_state.h"

#include <algorithm>
#include <array>

#include "manifests/checks.h"
#include "manifests/derived_defaults.h"
#include "manifests/fields.h"
#include "manifests/json.h"
#include "manifests/metadata.h"

namespace rubato::control {
namespace {

Duration since_epoch(WallTime time) {
  return time.time_since_epoch();
}

std::string joined(const FieldErrors& errors) {
  std::string text;
  for (const auto& error : errors) text += (text.empty() ? "" : "; ") + error.field + ": " + describe(error);
  return text;
}

void limit(IntegerKnob& knob, std::int32_t max) {
  knob.max = std::min(knob.max, max);
  knob.min = std::min(knob.min, knob.max);
  knob.initial = std::min(knob.initial, knob.max);
}

/// The file's spec as far as an engine started with `started` can follow.
EngineSpec follow(const EngineSpec& file, const EngineSpec& started) {
  EngineSpec spec = file;
  spec.model = started.model;
  spec.devices = started.devices;
  spec.capacity = started.capacity;
  spec.lanes = started.lanes;
  // Lanes were made for these modes; fewer of them can be followed.
  std::vector<Mode>& modes = spec.knobs.mode.choices;
  const auto in = [](const std::vector<Mode>& choices, Mode mode) {
    return std::find(choices.begin(), choices.end(), mode) != choices.end();
  };
  std::erase_if(modes, [&](Mode mode) { return !in(started.knobs.mode.choices, mode); });
  if (modes.empty()) modes = started.knobs.mode.choices;
  if (!in(modes, spec.knobs.mode.initial)) spec.knobs.mode.initial = modes.front();
  limit(spec.knobs.prefill_devices, prefill_devices_max(started.devices.size()));
  // Step memory was taken for this budget.
  spec.knobs.max_num_batched_tokens.max = started.knobs.max_num_batched_tokens.max;
  limit(spec.knobs.max_num_batched_tokens, started.knobs.max_num_batched_tokens.max);
  limit(spec.knobs.max_num_seqs, started.capacity.max_num_seqs);
  return spec;
}

std::map<std::string, std::string> merged_strings(const std::map<std::string, std::string>& file, const Json& api) {
  auto merged = file;
  for (const auto& [key, value] : api.items()) merged[key] = value.get<std::string>();
  return merged;
}

/// Labels or annotations of a patch onto those of the API: texts, or null to take one out. Errors name the field.
Json patched_strings(const Json& current, const Json& patch, const std::string& field, FieldErrors& errors) {
  constexpr std::size_t entries_max = 256;
  Json result = current;
  if (patch.is_null()) return Json::object();
  if (!patch.is_object()) {
    FieldError error{
        .fault = Fault::TypeInvalid, .field = field, .found = patch.type_name(), .rule = "must be a mapping of texts"};
    error.found_type = patch.type_name();
    error.expected_type = "object";
    errors.push_back(std::move(error));
    return result;
  }
  for (const auto& [key, value] : patch.items()) {
    if (value.is_null()) {
      result.erase(key);
    } else if (value.is_string()) {
      result[key] = value;
    } else {
      FieldError error{
          .fault = Fault::TypeInvalid, .field = join_path(field, key), .found = value.dump(), .rule = "must be text"};
      error.found_type = value.type_name();
      error.expected_type = "string";
      errors.push_back(std::move(error));
    }
  }
  if (result.size() > entries_max)
    errors.push_back({.field = field, .found = std::to_string(result.size()), .rule = "has more than 256 entries"});
  return result;
}

/// What the body says about the object itself must agree with the URL and with what is stored.
std::optional<StatusError> check_identity(const Json& body, const std::string& name, const std::string& uid,
                                          const std::string& resource_version) {
  const auto text_at = [](const Json& object, const char* key) -> std::string {
    const auto found = object.find(key);
    return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  const std::string version = text_at(body, "apiVersion");
  if (!version.empty() && version != api_version) {
    return bad_request("the API version in the data (" + version + ") does not match the expected API version (" +
                       std::string(api_version) + ")");
  }
  const std::string kind = text_at(body, "kind");
  if (!kind.empty() && kind != engine_kind) {
    return bad_request("the kind in the data (" + kind + ") does not match the expected kind (" + std::string(engine_kind) + ")");
  }
  const auto metadata = body.find("metadata");
  if (metadata == body.end() || !metadata->is_object()) return std::nullopt;
  const std::string body_name = text_at(*metadata, "name");
  if (!body_name.empty() && body_name != name) {
    return bad_request("the name of the object (" + body_name + ") does not match the name on the URL (" + name + ")");
  }
  const std::string body_uid = text_at(*metadata, "uid");
  const std::string body_version = text_at(*metadata, "resourceVersion");
  if ((!body_uid.empty() && body_uid != uid) || (!body_version.empty() && body_version != resource_version))
    return conflict_modified(name);
  return std::nullopt;
}

FieldErrors unknown_top_fields(const Json& body) {
  static constexpr std::array known{"apiVersion", "kind", "metadata", "spec", "status"};
  FieldErrors unknown;
  for (const auto& [key, value] : body.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      FieldError error;
      error.fault = Fault::Unknown;
      error.field = key;
      unknown.push_back(std::move(error));
    }
  }
  return unknown;
}

bool can_move(const IntegerKnob& knob) {
  return knob.min < knob.max;
}
template <class Choice>
bool can_move(const ChoiceKnob<Choice>& knob) {
  return knob.choices.size() > 1;
}

/// What the loop must hear of; its own last proposal (base of free knobs) is no news.
bool same_target(const TuningInput& a, const TuningInput& b) {
  const auto fixed_part = [](TuningInput input) {
    if (input.space.max_num_batched_tokens_free) input.space.base.max_num_batched_tokens = 0;
    if (input.space.max_num_seqs_free) input.space.base.max_num_seqs = 0;
    if (input.space.priority_policy_free) input.space.base.priority_policy = {};
    if (input.space.deadline_margin_free) input.space.base.deadline_margin = 0;
    if (input.space.mode_free) input.space.base.mode = {};
    if (input.space.prefill_share_free) input.space.base.prefill_share = 0;
    if (input.space.prefill_devices_free) input.space.base.prefill_devices = 0;
    return input;
  };
  const TuningInput x = fixed_part(a), y = fixed_part(b);
  const auto frees = [](const tuner::SearchSpace& space) {
    return std::array{space.max_num_batched_tokens_free, space.max_num_seqs_free, space.priority_policy_free,
                      space.deadline_margin_free,        space.mode_free,         space.prefill_share_free,
                      space.prefill_devices_free};
  };
  return x.space.knobs == y.space.knobs && x.space.base == y.space.base && frees(x.space) == frees(y.space) &&
         x.objectives == y.objectives && x.tuning == y.tuning;
}

}  // namespace

ControlState::ControlState(const ReadManifest& started_with, SavedState saved, WallTime now)
    : manifest_(started_with), started_(started_with.manifest.spec), saved_(std::move(saved)) {
  note_file_override(started_.override_, now);
  base_ = base_for(started_, now);
  const Decoded<EngineSpec> merged = apply_api_layer(base_.running, saved_.api);
  if (!merged.ok()) {
    dropped_ = joined(merged.errors);
    saved_.api = ApiLayer::object();
  }
  derive(now);
}

ControlState::Base ControlState::base_for(const EngineSpec& file, WallTime now) const {
  Base base{.file = file, .running = {}};
  if (file.override_ && override_expired(*file.override_, since_epoch(saved_.file_override_set), since_epoch(now)))
    base.file.override_.reset();
  base.running = follow(base.file, started_);
  return base;
}

void ControlState::note_file_override(const std::optional<OverrideSpec>& pins, WallTime now) {
  if (pins == saved_.file_override) return;
  saved_.file_override = pins;
  saved_.file_override_set = now;
}

Result<void> ControlState::reload(const ReadManifest& manifest, WallTime now) {
  if (manifest.manifest.name != name()) {
    return unexpected(ErrorCode::InvalidArgument, "metadata.name",
                      manifest.file + " metadata.name: \"" + manifest.manifest.name + "\" is not the running engine's, \"" +
                          name() + "\": a new name needs a restart");
  }
  ControlState next = *this;
  next.manifest_ = manifest;
  next.note_file_override(manifest.manifest.spec.override_,
                          now);  // one that has expired stays so until the file says another one
  next.base_ = next.base_for(manifest.manifest.spec, now);
  if (const FieldErrors errors = check_spec(next.base_.running); !errors.empty()) {
    return unexpected(ErrorCode::InvalidArgument, manifest.file + ": cannot be followed without a restart: " + joined(errors));
  }
  for (const EngineSpec* base : {&next.base_.file, &next.base_.running}) {
    const Decoded<EngineSpec> merged = apply_api_layer(*base, saved_.api);
    if (merged.ok()) continue;
    return unexpected(ErrorCode::InvalidArgument, merged.errors.front().field,
                      manifest.file + ": does not go together with what was set over the API: " + joined(merged.errors));
  }
  next.derive(now);
  *this = std::move(next);
  return {};
}

std::variant<PatchResult, StatusError> ControlState::patch(const PatchRequest& request, const std::string& resource_version,
                                                           WallTime now) {
  const Json& body = request.body;
  if (!body.is_object()) return bad_request("the patch must be a JSON object, not " + std::string(body.type_name()));
  if (auto error = check_identity(body, name(), saved_.uid, resource_version)) return *std::move(error);

  ControlState next = *this;
  FieldErrors errors;
  FieldErrors unknown = unknown_top_fields(body);
  if (const auto metadata = body.find("metadata"); metadata != body.end() && metadata->is_object()) {
    if (metadata->contains("labels"))
      next.saved_.labels = patched_strings(saved_.labels, (*metadata)["labels"], "metadata.labels", errors);
    if (metadata->contains("annotations")) {
      next.saved_.annotations = patched_strings(saved_.annotations, (*metadata)["annotations"], "metadata.annotations", errors);
    }
    if (errors.empty()) {
      check_labels(merged_strings(manifest_.manifest.labels, next.saved_.labels), "metadata.labels", errors);
      check_annotations(merged_strings(manifest_.manifest.annotations, next.saved_.annotations), "metadata.annotations", errors);
    }
  }
  if (const auto spec = body.find("spec"); spec != body.end()) {
    Decoded<PatchedLayer> patched = patch_api_layer(base_.file, saved_.api, *spec);
    unknown.insert(unknown.end(), patched.unknown.begin(), patched.unknown.end());
    errors.insert(errors.end(), patched.errors.begin(), patched.errors.end());
    if (errors.empty()) {
      // Against what runs as well: a reload may have left the two apart until the next restart.
      const FieldErrors running = apply_api_layer(base_.running, patched.value.layer).errors;
      errors.insert(errors.end(), running.begin(), running.end());
    }
    next.saved_.api = std::move(patched.value.layer);
    // Each write of the override starts its time anew.
    if (spec->is_object() && spec->contains("override") && !(*spec)["override"].is_null()) next.saved_.api_override_set = now;
  }
  if (request.validation == FieldValidation::Strict && !unknown.empty()) return strict_decoding(unknown);
  if (!errors.empty()) return invalid(name(), errors);

  next.derive(now);
  PatchResult result;
  if (request.validation == FieldValidation::Warn) {
    for (const auto& field : unknown) result.warnings.push_back(unknown_field_text(field));
  }
  for (const auto& change : changed_fields(spec_, next.spec_)) result.fields.push_back(change.field);
  *this = std::move(next);
  return result;
}

Result<void> ControlState::propose(const KnobValues& knobs, WallTime now) {
  if (!tuning_.tuning.enabled) return unexpected(ErrorCode::Unavailable, "tuning is off or every knob is pinned");
  const KnobValues fitted = fit_knobs(knobs, running_spec_.knobs, effective_.pins);
  FieldErrors outside;
  for_each(knob_table, [&](const auto& knob) {
    const bool pinned = (effective_.pins.*knob.pin).has_value();
    if (!pinned && knobs.*knob.value != fitted.*knob.value) {
      FieldError error;
      error.field = knob.name;
      error.rule = "lies outside the search space or contradicts a pin";
      outside.push_back(std::move(error));
    }
  });
  if (!outside.empty()) return unexpected(ErrorCode::InvalidArgument, outside.front().field, joined(outside));
  // Of a pinned knob the tuner only repeats the pin: what it last wished, or the start, is what the pin's end falls back to.
  KnobValues wish = knobs;
  for_each(knob_table, [&](const auto& knob) {
    if (!(effective_.pins.*knob.pin)) return;
    wish.*knob.value = proposal_ ? (*proposal_).*knob.value : (running_spec_.knobs.*knob.bounds).initial;
  });
  proposal_ = wish;
  derive(now);
  return {};
}

bool ControlState::expire(WallTime now) {
  bool ended = false;
  if (const auto& pins = base_.file.override_;
      pins && override_expired(*pins, since_epoch(saved_.file_override_set), since_epoch(now))) {
    base_ = base_for(manifest_.manifest.spec, now);
    ended = true;
  }
  if (const auto pins = saved_.api.find("override"); pins != saved_.api.end()) {
    if (override_expired(override_from_json(*pins).value, since_epoch(saved_.api_override_set), since_epoch(now))) {
      saved_.api.erase("override");
      ended = true;
    }
  }
  if (ended) derive(now);
  return ended;
}

void ControlState::derive(WallTime now) {
  const EngineSpec before_spec = spec_;
  const KnobsSpec before_knobs = running_spec_.knobs;
  const bool first = tuning_.revision == 0;

  const Decoded<EngineSpec> desired = apply_api_layer(base_.file, saved_.api);
  const Decoded<EngineSpec> running = apply_api_layer(base_.running, saved_.api);
  CHECK(running.ok(), joined(running.errors));
  running_spec_ = running.value;
  spec_ = desired.ok() ? desired.value : running.value;
  if (spec_.override_ == OverrideSpec{}) spec_.override_.reset();

  if (!running_spec_.tuning.enabled) proposal_.reset();
  if (proposal_ && !first) {
    // A person who moves where a knob starts means it; the tuner goes on from there.
    for_each(knob_table, [&](const auto& knob) {
      const auto& initial = (running_spec_.knobs.*knob.bounds).initial;
      if (initial != (before_knobs.*knob.bounds).initial) (*proposal_).*knob.value = initial;
    });
  }
  effective_ = effective_knobs({.file = base_.running,
                                .api = saved_.api,
                                .file_set_at = since_epoch(saved_.file_override_set),
                                .api_override_set_at = since_epoch(saved_.api_override_set),
                                .tuned = proposal_},
                               since_epoch(now));
  restart_required_ = restart_fields(changed_fields(started_, manifest_.manifest.spec));

  TuningInput input{
      .revision = tuning_.revision, .space = {}, .objectives = running_spec_.objectives, .tuning = running_spec_.tuning};
  const auto& knobs = running_spec_.knobs;
  const auto& pins = effective_.pins;
  input.space.knobs = knobs;
  input.space.base = effective_.values;
  input.space.max_num_batched_tokens_free = !pins.max_num_batched_tokens && can_move(knobs.max_num_batched_tokens);
  input.space.max_num_seqs_free = !pins.max_num_seqs && can_move(knobs.max_num_seqs);
  input.space.priority_policy_free = !pins.priority_policy && can_move(knobs.priority_policy);
  input.space.deadline_margin_free = !pins.deadline_margin && can_move(knobs.deadline_margin);
  input.space.mode_free = !pins.mode && can_move(knobs.mode);
  const bool may_disaggregate = input.space.mode_free || input.space.base.mode == Mode::Disaggregated;
  const bool one_device = base_.running.devices.size() == 1;
  input.space.prefill_share_free = may_disaggregate && one_device && !pins.prefill_share && can_move(knobs.prefill_share);
  input.space.prefill_devices_free = may_disaggregate && !one_device && !pins.prefill_devices && can_move(knobs.prefill_devices);
  const bool any_free = input.space.max_num_batched_tokens_free || input.space.max_num_seqs_free ||
                        input.space.priority_policy_free || input.space.deadline_margin_free || input.space.mode_free ||
                        input.space.prefill_share_free || input.space.prefill_devices_free;
  input.tuning.enabled = input.tuning.enabled && any_free;
  if (first || !same_target(tuning_, input)) ++input.revision;
  tuning_ = std::move(input);

  if (!first && spec_ != before_spec) ++saved_.generation;
}

std::optional<WallTime> ControlState::override_expires() const {
  std::optional<Duration> next;
  const auto consider = [&](std::optional<Duration> expiry) {
    if (expiry && (!next || *expiry < *next)) next = expiry;
  };
  if (const auto& pins = base_.file.override_) consider(override_expiry(*pins, since_epoch(saved_.file_override_set)));
  if (const auto pins = saved_.api.find("override"); pins != saved_.api.end()) {
    consider(override_expiry(override_from_json(*pins).value, since_epoch(saved_.api_override_set)));
  }
  if (!next) return std::nullopt;
  return WallTime(std::chrono::duration_cast<std::chrono::milliseconds>(*next));
}

Json ControlState::labels() const {
  return merged_strings(manifest_.manifest.labels, saved_.labels);
}
Json ControlState::annotations() const {
  return merged_strings(manifest_.manifest.annotations, saved_.annotations);
}

}  // namespace rubato::control
