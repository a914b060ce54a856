// SPDX-License-Identifier: Apache-2.0
// The list of policies: a new one is a file beside this one and a line here (and its name in manifests/settings.h).
#include <array>

#include "manifests/check.h"
#include "policies/policy.h"

namespace rubato::policies {
namespace {

struct Entry {
  PriorityPolicy name;
  std::unique_ptr<Policy> (*make)(std::int32_t sequence_capacity);
};

constexpr std::array entries{
    Entry{PriorityPolicy::Deadline, make_deadline},
    Entry{PriorityPolicy::DecodeFirst, make_decode_first},
    Entry{PriorityPolicy::PrefillFirst, make_prefill_first},
    Entry{PriorityPolicy::ShortestFirst, make_shortest_first},
};

}  // namespace

std::unique_ptr<Policy> make_policy(PriorityPolicy policy, std::int32_t sequence_capacity) {
  for (const Entry& entry : entries) {
    if (entry.name == policy) return entry.make(sequence_capacity);
  }
  CHECK(false, "no policy ", static_cast<int>(policy));
  return nullptr;
}

GapBounds gap_bounds(PriorityPolicy policy) {
  return make_policy(policy, 0)->bounds();
}

}  // namespace rubato::policies
