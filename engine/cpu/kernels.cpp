// SPDX-License-Identifier: Apache-2.0
// The portable kernels: Highway's run-time dispatch over kernels.inl, and the choice between them and the BF16 dot product.

// Vectors of unknown size cannot stand in arrays; machines that have them fall back to fixed-size ones. Of x86 the generations
// without AVX2 use the plain fallback: correct, but nobody serves a model on them.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_SSE4)

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "engine/cpu/kernels.h"
#include "manifests/settings.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/kernels.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#define RUBATO_KERNEL_SPACE portable
#define RUBATO_BFLOAT16_DOT 0
#include "engine/cpu/kernels.inl"
#undef RUBATO_KERNEL_SPACE
#undef RUBATO_BFLOAT16_DOT

HWY_BEFORE_NAMESPACE();
namespace rubato::engine::cpu::portable {
namespace HWY_NAMESPACE {

void fill_float32(Kernels* out) {
  out->name = hwy::TargetName(HWY_TARGET);
  fill_table<Float32>(out);
}
void fill_bfloat16(Kernels* out) {
  out->name = hwy::TargetName(HWY_TARGET);
  fill_table<Bfloat16>(out);
}

}  // namespace HWY_NAMESPACE
}  // namespace rubato::engine::cpu::portable
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rubato::engine::cpu {
namespace portable {

HWY_EXPORT(fill_float32);
HWY_EXPORT(fill_bfloat16);

Kernels kernels_for(DataType dtype) {
  Kernels kernels;
  if (dtype == DataType::BFloat16) {
    HWY_DYNAMIC_DISPATCH(fill_bfloat16)(&kernels);
  } else {
    HWY_DYNAMIC_DISPATCH(fill_float32)(&kernels);
  }
  return kernels;
}

}  // namespace portable

std::vector<KernelPath> kernel_paths(DataType dtype) {
  if (dtype == DataType::BFloat16 && bfloat16_dot_supported()) return {KernelPath::Bfloat16Dot, KernelPath::Portable};
  return {KernelPath::Portable};
}

Kernels kernels_of(KernelPath path, DataType dtype) {
  return path == KernelPath::Bfloat16Dot ? bfloat16_dot_kernels() : portable::kernels_for(dtype);
}

}  // namespace rubato::engine::cpu
#endif  // HWY_ONCE
