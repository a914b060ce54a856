// SPDX-License-Identifier: Apache-2.0
// Makes one plan from a scheduler's state. Private to policies/; lives for one call of Scheduler::plan().
#pragma once

#include <cstdint>
#include <optional>

#include "policies/scheduler_state.h"

namespace rubato::policies {

class StepPlanner {
 public:
  StepPlanner(Scheduler::State& state, TimePoint now);
  void plan();

 private:
  void begin();
  void collect_decodes();
  void collect_prefills();
  void take_chosen_decodes(std::int32_t kept_for_prefill);
  void take_prefills();
  void take_remaining_decodes();
  void rank_prefills();
  void extend_prefills();
  void round_to_tile();
  void emit();

  void order_decodes(std::int32_t most);
  void take_decode(Slot slot);
  bool take_prefill(Slot slot, std::int32_t cap, std::int32_t at_least);
  void emit_row(Slot slot, std::int32_t count);
  [[nodiscard]] bool oldest_overdue() const;
  [[nodiscard]] bool may_start() const;
  [[nodiscard]] bool can_run(Slot slot);
  [[nodiscard]] std::optional<PrefixHit> find_start(Slot slot);
  void admit(Slot slot, const PrefixHit& hit);
  [[nodiscard]] std::int32_t room_for(std::int32_t begin, std::int32_t most) const;
  [[nodiscard]] std::int32_t overdue_cap(Slot slot) const;

  Scheduler::State& state_;
  const TimePoint now_;
  const KnobValues& knobs_;
  Policy& policy_;
  const GapBounds bounds_;
  const std::int32_t budget_;
  PolicyChoice choice_;
  PoolLoad load_;                    // kept current while prefills are taken
  StepFeatures features_;            // first of all decodes, for the policy; then of what was taken
  Slot oldest_slot_ = 0;             // where state_.oldest has a ticket
  std::int32_t oldest_quantum_ = 0;  // tokens that count as service of the oldest prefill
  std::int32_t running_decodes_ = 0;
  std::int32_t bypassed_ = 0;
  bool waiting_closed_ = false;  // no further admission in this step
  bool contended_ = false;       // a prompt that is not long competes
  bool time_is_up_ = false;
};

}  // namespace rubato::policies
