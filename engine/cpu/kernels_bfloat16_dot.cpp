// SPDX-License-Identifier: Apache-2.0
// The kernels for CPUs with AVX-512 BF16, whose dot product of BF16 pairs this Highway version does not know: kernels.inl once
// more, in its AVX-512 form with that instruction put in. Clang refuses the instruction inside lambdas of Highway's own target,
// so that a build with it uses the portable kernels.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "engine/cpu/kernels.h"
#include "manifests/settings.h"

#if defined(__x86_64__) && !defined(__clang__)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/kernels_bfloat16_dot.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3

#define RUBATO_KERNEL_SPACE bfloat16_dot
#define RUBATO_BFLOAT16_DOT 1
#include "engine/cpu/kernels.inl"
#undef RUBATO_KERNEL_SPACE
#undef RUBATO_BFLOAT16_DOT

namespace rubato::engine::cpu {

bool bfloat16_dot_supported() {
  return (hwy::SupportedTargets() & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512bf16") != 0;
}

Kernels bfloat16_dot_kernels() {
  Kernels kernels;
  kernels.name = "avx512_bf16";
  bfloat16_dot::HWY_NAMESPACE::fill_table<bfloat16_dot::HWY_NAMESPACE::Bfloat16>(&kernels);
  return kernels;
}

}  // namespace rubato::engine::cpu

#endif  // HWY_TARGET == HWY_AVX3

#else

namespace rubato::engine::cpu {

bool bfloat16_dot_supported() {
  return false;
}
Kernels bfloat16_dot_kernels() {
  return {};
}

}  // namespace rubato::engine::cpu

#endif
