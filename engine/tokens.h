// SPDX-License-Identifier: Apache-2.0
// The type of a token's value, shared by the step engine and the text code.
#pragma once

#include <cstdint>

namespace rubato {

/// An index into the vocabulary. Always >= 0 and below the model's vocabulary size once a request has been admitted.
using TokenId = std::int32_t;

}  // namespace rubato
