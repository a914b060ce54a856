// SPDX-License-Identifier: Apache-2.0
// The text of all kernels, compiled once per instruction set by kernels.cpp (Highway's dispatch) and once more by
// kernels_bfloat16_dot.cpp. Included several times per file on purpose, so it has no include guard.
//
// Everything is written on groups of 16 lanes, of which a vector holds 1, 2, 4, 8 or all: an instruction set chooses how fast a
// group is, never the order of a sum.

#ifndef RUBATO_KERNEL_SPACE
#error "define RUBATO_KERNEL_SPACE and RUBATO_BFLOAT16_DOT before including kernels.inl"
#endif

HWY_BEFORE_NAMESPACE();
#if RUBATO_BFLOAT16_DOT
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif
namespace rubato::engine::cpu::RUBATO_KERNEL_SPACE {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#include "engine/cpu/kernels_lanes.inl"

#include "engine/cpu/kernels_linear.inl"

#include "engine/cpu/kernels_rows.inl"

#include "engine/cpu/kernels_attention.inl"

#include "engine/cpu/kernels_recurrent.inl"

template <class Element>
void fill_table(Kernels* out) {
  out->panel_columns = panel_groups * group_columns;
  out->elements_per_cell = per_cell<Element>;
  out->linear = linear<Element, false>;
  out->linear_swiglu = linear<Element, true>;
  out->norm = norm<Element>;
  out->rope = rope<Element>;
  out->attention = attention<Element>;
  out->convolve = convolve;
  out->scan = scan;
  out->gated_norm = gated_norm<Element>;
  out->relu_squared = relu_squared<Element>;
}

}  // namespace HWY_NAMESPACE
}  // namespace rubato::engine::cpu::RUBATO_KERNEL_SPACE
#if RUBATO_BFLOAT16_DOT
#pragma GCC pop_options
#endif
HWY_AFTER_NAMESPACE();
