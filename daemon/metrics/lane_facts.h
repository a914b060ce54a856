// SPDX-License-Identifier: Apache-2.0
// What metrics and the Engine object say of a lane in the same words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "daemon/serving.h"

namespace rubato {

[[nodiscard]] std::string_view to_string(policies::LaneRole role);

/// Percent of its device that the lane's steps get while every lane of the device that has something to do is in a step: all of
/// it for a lane without such a neighbour, none for a spare lane that has nothing left to move out. Neither is what the backend
/// says, which knows shares but not roles.
[[nodiscard]] std::int32_t share_percent(const ServingStatus& status, std::size_t lane);

}  // namespace rubato
