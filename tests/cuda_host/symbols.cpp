// SPDX-License-Identifier: Apache-2.0
// A kernel's name from its address, read from the executable's own symbol table, where names of static functions stand too.
#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

std::uintptr_t load_bias() {
  std::uintptr_t bias = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        *static_cast<std::uintptr_t*>(result) = info->dlpi_addr;
        return 1;  // the first is the executable
      },
      &bias);
  return bias;
}

// Mangled names of all functions, by address.
std::map<std::uintptr_t, std::string> read_functions() {
  std::map<std::uintptr_t, std::string> functions;
  std::ifstream in("/proc/self/exe", std::ios::binary | std::ios::ate);
  std::vector<char> file(in ? static_cast<std::size_t>(in.tellg()) : 0);
  in.seekg(0);
  in.read(file.data(), static_cast<std::streamsize>(file.size()));
  if (file.size() < sizeof(ElfW(Ehdr))) return functions;
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(file.data());
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(file.data() + header->e_shoff);
  const std::uintptr_t bias = load_bias();
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* names = file.data() + sections[sections[i].sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(file.data() + sections[i].sh_offset);
    for (std::size_t s = 0; s < sections[i].sh_size / sizeof(ElfW(Sym)); ++s) {
      if ((symbols[s].st_info & 0xf) == STT_FUNC && symbols[s].st_value != 0) {
        functions.emplace(symbols[s].st_value + bias, names + symbols[s].st_name);
      }
    }
  }
  return functions;
}

// "void a::k<float>(int, float*)" becomes "a::k<float>".
std::string without_signature(std::string name) {
  const std::string anonymous = "(anonymous namespace)::";
  for (std::size_t at = name.find(anonymous); at != std::string::npos; at = name.find(anonymous))
    name.erase(at, anonymous.size());
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    if (c == '<') ++depth;
    if (c == '>') --depth;
    if (c == ' ' && depth == 0) begin = i + 1;
    if (c == '(' && depth == 0) return name.substr(begin, i - begin);
  }
  return name;
}

}  // namespace

std::string kernel_name(const void* function) {
  static const std::map<std::uintptr_t, std::string> functions = read_functions();
  static std::map<const void*, std::string> known;  // under the call's lock
  std::string& name = known[function];
  if (!name.empty()) return name;
  const auto found = functions.find(reinterpret_cast<std::uintptr_t>(function));
  if (found == functions.end()) {
    char text[32];
    std::snprintf(text, sizeof(text), "kernel at %p", function);
    return name = text;
  }
  int status = 0;
  char* plain = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
  name = without_signature(status == 0 ? plain : found->second);
  std::free(plain);
  return name;
}

}  // namespace cuda_host
