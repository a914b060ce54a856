// SPDX-License-Identifier: Apache-2.0
#include "manifests/derived_defaults.h"

#include <algorithm>

namespace rubato {
namespace {

class Written {
 public:
  Written(const Node& spec, std::string_view knob) {
    const Node* knobs = spec.find("knobs");
    node_ = knobs == nullptr ? nullptr : knobs->find(knob);
  }
  [[nodiscard]] bool has(std::string_view end) const {
    const Node* value = node_ == nullptr ? nullptr : node_->find(end);
    return value != nullptr && value->kind != Node::Kind::Null;
  }

 private:
  const Node* node_ = nullptr;
};

}  // namespace

std::int32_t prefill_devices_max(std::size_t devices) {
  return static_cast<std::int32_t>(std::max<std::size_t>(devices, 2) - 1);
}

void derive_defaults(const Node& spec_node, EngineSpec& spec) {
  IntegerKnob& seqs = spec.knobs.max_num_seqs;
  const Written seqs_written(spec_node, "maxNumSeqs");
  if (!seqs_written.has("max")) seqs.max = std::max(spec.capacity.max_num_seqs, seqs_written.has("min") ? seqs.min : 1);
  if (!seqs_written.has("min")) seqs.min = std::min(seqs.min, seqs.max);
  if (!seqs_written.has("initial")) seqs.initial = seqs.max;

  IntegerKnob& budget = spec.knobs.max_num_batched_tokens;
  const Written budget_written(spec_node, "maxNumBatchedTokens");
  const auto room_for = [](std::int32_t sequences) { return sequences + min_prefill_quantum; };
  if (!budget_written.has("max"))
    budget.max = std::max({budget.max, room_for(seqs.max), budget_written.has("min") ? budget.min : 1});
  if (!budget_written.has("min")) budget.min = std::min(std::max(budget.min, room_for(seqs.min)), budget.max);
  if (!budget_written.has("initial")) {
    budget.initial = std::clamp(std::max(budget.initial, room_for(seqs.initial)), std::min(budget.min, budget.max), budget.max);
  }

  ChoiceKnob<Mode>& mode = spec.knobs.mode;
  if (!Written(spec_node, "mode").has("choices") &&
      std::find(mode.choices.begin(), mode.choices.end(), mode.initial) == mode.choices.end()) {
    mode.choices.push_back(mode.initial);
  }
  if (!Written(spec_node, "prefillDevices").has("max")) spec.knobs.prefill_devices.max = prefill_devices_max(spec.devices.size());
}

}  // namespace rubato
