// SPDX-License-Identifier: Apache-2.0
// What a CudaOps owns on its device, and how the engine's matrices look to kernels. Only the files of CudaOps include this.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/cuda/kernels.h"
#include "engine/cuda/matmul.h"
#include "engine/cuda/ops.h"
#include "engine/cuda/runtime.h"
#include "engine/cuda/uploader.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {

inline constexpr int recurrent_parts = 5;

inline Accumulators accumulators(const Matrix& matrix) {
  CHECK(matrix.format == Format::Accumulator);
  return {.data = static_cast<float*>(matrix.data), .count = matrix.rows, .columns = matrix.columns, .stride = matrix.stride};
}

inline Rows<void*> any_rows(const Matrix& matrix) {
  return {.data = matrix.data, .count = matrix.rows, .columns = matrix.columns, .stride = matrix.stride};
}

inline Activations activations(const Matrix& matrix) {
  CHECK(matrix.format == Format::Activation);
  return any_rows(matrix);
}

struct CudaOps::Memory {
  struct Linear {
    LinearShape shape;
    DeviceMemory weights;
    DeviceMemory bias;  // empty: none
    MatmulPlan plan;
  };

  DeviceFacts device;
  OpsLimits limits;
  std::unique_ptr<MatmulLibrary> library;
  std::optional<Uploader> uploader;  // until finish_loading()
  std::vector<Linear> linears;
  std::vector<DeviceMemory> norms;
  std::vector<MatmulReport> reports;

  AttentionShape shape;
  CacheShape cache_shape;
  DeviceMemory cache;  // [layer][block, the trash block last][kv head][keys | values]
  std::int64_t layer_bytes = 0;
  DeviceMemory cosines;
  DeviceMemory sines;

  struct Recurrent {
    DeviceMemory parts[recurrent_parts];  // by RecurrentPart
  };
  RecurrentShape recurrent_shape;
  StateShape state_shape;
  DeviceMemory states;  // [slot][layer][inputs | S]
  std::vector<Recurrent> recurrents;
};

struct CudaOps::Scratch {
  Batch batch;
  std::vector<DeviceMemory> matrices{};
  DeviceMemory gate_up{};  // (max_tokens, largest Swiglu outputs) of dtype
  DeviceMemory workspace{};
  DeviceMemory attention{};
  AttentionPlan attention_plan{};
  PinnedMemory poison_host{};
  DeviceMemory poison_blocks{};
  PinnedMemory read_host{};  // as long as the longest read so far
};

}  // namespace rubato::engine::cuda
