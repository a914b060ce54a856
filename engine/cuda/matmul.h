// SPDX-License-Identifier: Apache-2.0
// Dense layers by cuBLASLt, made batch-invariant by probing: for each weight matrix one algorithm is the reference, and each
// range of row counts gets the library's fastest candidate whose rows are bit-equal to the reference's on probe data. Where no
// candidate covers every range, our own kernel with its one order over the inputs runs instead (kernels_linear.cu).
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/cuda/kernels.h"
#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {

/// y = x W^T + bias. W: (outputs, inputs) of the backend's dtype, rows without gaps.
struct MatmulShape {
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  DataType out_dtype = DataType::Float32;  // Float32 or the backend's dtype
  bool has_bias = false;

  friend bool operator==(const MatmulShape&, const MatmulShape&) = default;
};

/// What probing found for one shape, for logs and benches.
struct MatmulReport {
  MatmulShape shape;
  std::int32_t candidates = 0;  // that ran, over all row ranges
  std::int32_t equal = 0;       // of them, bit-equal to the reference
  bool own_kernel = false;
};

/// Row counts up to each of these, and above the one before it, share an algorithm.
[[nodiscard]] std::vector<std::int32_t> row_ranges(std::int32_t max_rows);

/// One weight matrix with its algorithms. Immutable once chosen.
struct MatmulPlan {
  MatmulShape shape;
  const void* weights = nullptr;
  const float* bias = nullptr;  // null: none
  std::vector<std::int32_t> ranges{};
  std::vector<cublasLtMatmulAlgo_t> algorithms{};  // one per range; empty: own kernel
};

/// The library's handle and what every product shares. Thread-safe.
class MatmulLibrary {
 public:
  [[nodiscard]] static Result<std::unique_ptr<MatmulLibrary>> make(const DeviceFacts& device, DataType dtype);
  ~MatmulLibrary();
  MatmulLibrary(const MatmulLibrary&) = delete;
  MatmulLibrary& operator=(const MatmulLibrary&) = delete;

  [[nodiscard]] cublasLtHandle_t handle() const { return handle_; }
  [[nodiscard]] DataType dtype() const { return dtype_; }
  [[nodiscard]] std::byte* workspace() const { return workspace_.data(); }
  [[nodiscard]] std::int64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  explicit MatmulLibrary(DataType dtype) : dtype_(dtype) {}
  cublasLtHandle_t handle_ = nullptr;
  DataType dtype_;
  DeviceMemory workspace_;
};

/// Descriptors of one plan, whose row count changes from call to call: one set per thread that queues products.
class MatmulCall {
 public:
  /// Calls that may run at the same time need workspaces of their own, of the library's size; without one it is the library's.
  [[nodiscard]] static Result<MatmulCall> make(const MatmulLibrary& library, const MatmulPlan& plan,
                                               std::byte* workspace = nullptr);
  MatmulCall(MatmulCall&&) noexcept = default;
  MatmulCall& operator=(MatmulCall&&) noexcept = default;

  /// Queues out = x W^T + bias for x.count rows.
  [[nodiscard]] Result<void> queue(cudaStream_t stream, const Activations& x, const Rows<void*>& out);
  /// The same with a given algorithm; for probing. False when the library does not support it here.
  [[nodiscard]] bool queue_with(cudaStream_t stream, const cublasLtMatmulAlgo_t& algorithm, const Activations& x,
                                const Rows<void*>& out);
  /// The library's candidates for so many rows, the one that it thinks fastest first; none of them splits or reduces over the
  /// inputs.
  [[nodiscard]] std::vector<cublasLtMatmulAlgo_t> candidates(std::int32_t rows);

 private:
  struct Handles {
    ~Handles();
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t weights = nullptr;
    cublasLtMatrixLayout_t x = nullptr;
    cublasLtMatrixLayout_t out = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
  };
  MatmulCall(const MatmulLibrary& library, const MatmulPlan& plan, std::byte* workspace)
      : library_(&library), plan_(&plan), workspace_(workspace) {}
  void set_rows(const Rows<const void*>& x, std::int64_t out_stride);

  const MatmulLibrary* library_;
  const MatmulPlan* plan_;
  std::byte* workspace_;
  std::unique_ptr<Handles> handles_;
};

/// Runs candidates on probe data and fills plan.algorithms. Takes memory for max_rows rows while it works. Plans of equal shape
/// may share the result.
[[nodiscard]] Result<MatmulReport> choose_algorithms(const MatmulLibrary& library, const Stream& stream, std::int32_t max_rows,
                                                     MatmulPlan& plan);

}  // namespace rubato::engine::cuda
