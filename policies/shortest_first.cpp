// SPDX-License-Identifier: Apache-2.0
// ShortestFirst: every running decode is in every step; the prefill with the least left to compute goes first, and age counts as
// work done.
#include "policies/policy.h"

namespace rubato::policies {
namespace {

// So many steps of waiting weigh as much as one whole step of work. At 32 a prompt of eight steps yields to newcomers for at most
// 256 steps, some seconds; below about 8 the order degenerates to first come first served under load.
constexpr double steps_per_step_of_credit = 32.0;

class ShortestFirst final : public Policy {
 public:
  [[nodiscard]] GapBounds bounds() const override { return {.decode_steps = 0, .prefill_steps = 16}; }

  PolicyChoice choose(const PolicyView& view, std::span<double> ranks) override {
    for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = aged_remaining(view.prefills[i], view.knobs.max_num_batched_tokens);
    PolicyChoice choice;
    choice.admission = AdmissionChoice::Bypass;
    return choice;
  }
};

}  // namespace

std::unique_ptr<Policy> make_shortest_first(std::int32_t /*sequence_capacity*/) {
  return std::make_unique<ShortestFirst>();
}

double aged_remaining(const PrefillView& prefill, std::int32_t budget) {
  return prefill.remaining - static_cast<double>(prefill.waited_steps) * budget / steps_per_step_of_credit;
}

}  // namespace rubato::policies
