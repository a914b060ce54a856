// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/lane_facts.h"

#include "manifests/check.h"

namespace rubato {
namespace {

bool works(const LaneStatus& lane) {
  return lane.counts.role != policies::LaneRole::Spare || lane.counts.scheduler.running > 0;
}

}  // namespace

std::string_view to_string(policies::LaneRole role) {
  switch (role) {
    case policies::LaneRole::Mixed:
      return "Mixed";
    case policies::LaneRole::Prefill:
      return "Prefill";
    case policies::LaneRole::Decode:
      return "Decode";
    case policies::LaneRole::Spare:
      return "Spare";
  }
  CHECK(false, static_cast<int>(role));
}

std::int32_t share_percent(const ServingStatus& status, std::size_t lane) {
  const LaneStatus& own = status.lanes[lane];
  if (!works(own)) return 0;
  for (const LaneStatus& other : status.lanes) {
    if (&other != &own && other.device == own.device && works(other)) return own.share.given_percent;
  }
  return 100;
}

}  // namespace rubato
