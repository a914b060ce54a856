// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz entry without libFuzzer: over a few seeds and deterministic mutations of them. It finds less than a fuzzer but runs
// wherever the tests run, under any compiler and sanitizer.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

const std::vector<std::string> seeds = {
    "",
    "{}",
    "[[[[[[[[[[[[[[[[",
    R"({"model":"m","prompt":"Once upon a time","max_tokens":5,"stop":["a","b"],"n":2,"logprobs":3})",
    R"({"model":"m","messages":[{"role":"user","content":"hi \ud83d\ude00"}],"stream":true,"stream_options":{"include_usage":true}})",
    "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec:\n  model: {path: /models/m}\n  objectives: "
    "{ttft: 500ms}\n",
    "a: &x [1, *x]\n<<: *x\nb: {c: d, c: e}\n",
    R"({"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})",
    std::string("\x40\0\0\0\0\0\0\0{\"w\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 64) +
        std::string(24, '\1'),
};

std::string mutate(const std::string& seed, std::mt19937_64& random) {
  std::string text = seed;
  const std::size_t edits = 1 + random() % 6;
  for (std::size_t i = 0; i < edits; ++i) {
    const std::size_t at = text.empty() ? 0 : random() % text.size();
    switch (random() % 5) {
      case 0:
        text.insert(at, 1, static_cast<char>(random() % 256));
        break;
      case 1:
        if (!text.empty()) text.erase(at, 1 + random() % 8);
        break;
      case 2:
        if (!text.empty()) text[at] = static_cast<char>(random() % 256);
        break;
      case 3:
        text.insert(at, text.substr(at, random() % 64));
        break;
      default:
        text.insert(at, seeds[random() % seeds.size()].substr(0, random() % 48));
        break;
    }
  }
  return text;
}

}  // namespace

int main(int argument_count, char** arguments) {
  const long count = argument_count > 1 ? std::strtol(arguments[1], nullptr, 10) : 1000;
  std::mt19937_64 random(1);
  for (const std::string& seed : seeds) LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(seed.data()), seed.size());
  for (long i = 0; i < count; ++i) {
    const std::string input = mutate(seeds[random() % seeds.size()], random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  }
  std::printf("%ld mutated inputs, no finding\n", count);
  return 0;
}
