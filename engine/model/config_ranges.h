// SPDX-License-Identifier: Apache-2.0
// Which sizes a model may have at all, whether from config.json or from a manifest. Private to engine/model/.
#pragma once

#include "engine/model/json_object.h"

namespace rubato::engine {

constexpr JsonObject::IntegerRange hidden_range{.min = 1, .max = 1 << 17};
constexpr JsonObject::IntegerRange layers_range{.min = 1, .max = 1024};
constexpr JsonObject::IntegerRange heads_range{.min = 1, .max = 1024};
constexpr JsonObject::IntegerRange head_size_range{.min = 2, .max = 1024};
constexpr JsonObject::IntegerRange feed_forward_range{.min = 1, .max = 1 << 20};
constexpr JsonObject::IntegerRange vocabulary_range{.min = 1, .max = 1 << 22};
constexpr JsonObject::IntegerRange position_range{.min = 1, .max = 1 << 24};
constexpr JsonObject::IntegerRange mamba_heads_range{.min = 1, .max = 4096};
constexpr JsonObject::IntegerRange mamba_head_size_range{.min = 1, .max = 1024};
constexpr JsonObject::IntegerRange state_size_range{.min = 1, .max = 1024};
constexpr JsonObject::IntegerRange window_range{.min = 2, .max = 16};

}  // namespace rubato::engine
