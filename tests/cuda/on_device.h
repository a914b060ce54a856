// SPDX-License-Identifier: Apache-2.0
// What whole-model tests of the CUDA backend share: a device, real or emulated, whose faults fail the test.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "engine/cuda/runtime.h"
#if RUBATO_CUDA_EMULATED
#include "tests/cuda_host/control.h"
#endif

namespace rubato::engine {

/// Skips where there is no device; on the emulated one, every fault it found fails the test.
class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
#if RUBATO_CUDA_EMULATED
    cuda_host::reset(emulation());
#endif
    if (const auto device = cuda::open_device(0); !device) GTEST_SKIP() << device.error().message;
  }
#if RUBATO_CUDA_EMULATED
  void TearDown() override {
    EXPECT_EQ(cuda_host::fault_text(), "");
  }

  /// Small in what costs time to emulate: blocks of persistent kernels, and the matrix library's workspace before Hopper.
  /// Products run in the engine's own kernel; probing the library has tests of its own (matmul_test.cpp).
  [[nodiscard]] virtual cuda_host::Options emulation() const {
    return {.multiprocessors = 4, .major = 8, .matmul_candidates = cuda_host::MatmulCandidates::None};
  }
#endif
};

}  // namespace rubato::engine
