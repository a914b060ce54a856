// SPDX-License-Identifier: Apache-2.0
// DecodeFirst: stall-free batching. Every running decode is in every step, prefills fill what is left of the budget in order of
// arrival.
#include "policies/policy.h"

namespace rubato::policies {
namespace {

class DecodeFirst final : public Policy {
 public:
  [[nodiscard]] GapBounds bounds() const override { return {.decode_steps = 0, .prefill_steps = 4}; }

  PolicyChoice choose(const PolicyView& view, std::span<double> /*ranks*/) override {
    PolicyChoice choice;
    cap_long_prompts(choice, view.knobs.max_num_batched_tokens);
    return choice;
  }
};

}  // namespace

std::unique_ptr<Policy> make_decode_first(std::int32_t /*sequence_capacity*/) {
  return std::make_unique<DecodeFirst>();
}

void cap_long_prompts(PolicyChoice& choice, std::int32_t budget) {
  choice.long_prompt_cap = std::max(budget / 2, min_prefill_quantum);
  choice.long_prompt_tokens =
      budget > std::numeric_limits<std::int32_t>::max() / 4 ? std::numeric_limits<std::int32_t>::max() : budget * 4;
}

}  // namespace rubato::policies
