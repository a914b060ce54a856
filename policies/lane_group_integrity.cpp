// SPDX-License-Identifier: Apache-2.0
// Recounts what a lane group keeps twice.
#include <vector>

#include "manifests/check.h"
#include "policies/lane_group_state.h"

namespace rubato::policies {

void LaneGroup::State::check_integrity() const {
  std::size_t live = 0;
  std::int32_t copying = 0;
  for (const auto& lane : lanes) {
    lane->check_integrity();
    for (const auto& [id, slot] : lane->slot_of) {
      const Sequence& sequence = lane->at(slot);
      copying += sequence.copying ? 1 : 0;
      CHECK(!sequence.frozen || sequence.copying, "sequence ", id.value, " stands still for no copy");
      if (sequence.cancelled) continue;
      ++live;
      const auto found = lane_of.find(id);
      CHECK(found != lane_of.end() && &at(found->second) == lane.get(), "sequence ", id.value,
            " is not in the lane it is said to be in");
    }
  }
  CHECK(live == lane_of.size(), "live=", live, " ids=", lane_of.size());

  std::int32_t open = 0;
  for (std::size_t device = 0; device < pools.size(); ++device) {
    HeldElsewhere held;
    std::int32_t arriving = 0;
    std::int32_t promised = 0;
    std::int32_t buried = 0;
    for (const Handoff& handoff : handoffs) {
      if (handoff.stage == Handoff::Stage::Free) continue;
      if (device_of(handoff.from) == static_cast<std::int32_t>(device)) {
        open += handoff.stage == Handoff::Stage::Open ? 1 : 0;
        held.blocks.insert(held.blocks.end(), handoff.source_blocks.begin(), handoff.source_blocks.end());
        if (handoff.source_state) held.states.push_back(*handoff.source_state);
        if (handoff.source_start) held.pinned.push_back(*handoff.source_start);
        buried += static_cast<std::int32_t>(handoff.source_blocks.size());
      }
      if (device_of(handoff.to) != static_cast<std::int32_t>(device)) continue;
      held.blocks.insert(held.blocks.end(), handoff.target_blocks.begin(), handoff.target_blocks.end());
      CHECK(handoff.target_state.has_value() == (limits.each.state_count > 0), "a copy without a slot for its state");
      if (handoff.target_state) held.states.push_back(*handoff.target_state);
      ++arriving;
      promised += handoff.promised;
    }
    const KvPool& pool = *pools[device];
    pool.check_integrity(held);
    CHECK(pool.arriving == arriving && pool.arriving_blocks == promised, "arriving=", pool.arriving, " of ", arriving,
          " blocks=", pool.arriving_blocks, " of ", promised);
    CHECK(pool.buried_blocks == buried, "buried=", pool.buried_blocks, " of ", buried);
  }
  CHECK(open == copying, "copies=", open, " sequences copied=", copying);
}

}  // namespace rubato::policies
