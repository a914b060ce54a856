// SPDX-License-Identifier: Apache-2.0
// From the bytes of tokenizer.json and its companions to TokenizerParts. Every value is checked: the files come from anywhere.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "engine/text/tokenizer.h"
#include "engine/text/tokenizer_parts.h"
#include "manifests/result.h"

namespace rubato::text {

[[nodiscard]] Result<TokenizerParts> parse_tokenizer(const TokenizerFiles& files);

}  // namespace rubato::text
