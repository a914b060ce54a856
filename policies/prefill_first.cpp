// SPDX-License-Identifier: Apache-2.0
// PrefillFirst: prefills take the budget in order of arrival, decodes what they leave, and every decode at least every second
// step. With a bound of one step the gap a client sees stays below three of the slowest steps.
#include "policies/policy.h"

namespace rubato::policies {
namespace {

class PrefillFirst final : public Policy {
 public:
  [[nodiscard]] GapBounds bounds() const override { return {.decode_steps = 1, .prefill_steps = 4}; }

  PolicyChoice choose(const PolicyView& view, std::span<double> /*ranks*/) override {
    PolicyChoice choice;
    choice.decodes = DecodeChoice::OverdueOnly;
    cap_long_prompts(choice, view.knobs.max_num_batched_tokens);
    return choice;
  }
};

}  // namespace

std::unique_ptr<Policy> make_prefill_first(std::int32_t /*sequence_capacity*/) {
  return std::make_unique<PrefillFirst>();
}

}  // namespace rubato::policies
