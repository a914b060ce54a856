// SPDX-License-Identifier: Apache-2.0
// Fuzz entry of the manifest reader: any bytes give a manifest or errors with text, and a manifest that was accepted survives the
// way through the API's JSON unchanged.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "manifests/check.h"
#include "manifests/json.h"
#include "manifests/read_manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rubato;
  const auto result = parse_manifest(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz.yaml");
  if (!result) {
    CHECK(!result.failure().errors.empty());
    CHECK(!result.failure().text().empty());
    return 0;
  }
  const Decoded<EngineManifest> again = manifest_from_json(to_json(result->manifest));
  CHECK(again.ok() && again.unknown.empty());
  CHECK(again.value == result->manifest);
  return 0;
}
