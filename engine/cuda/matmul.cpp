// SPDX-License-Identifier: Apache-2.0
// cuBLASLt is column-major: a row-major y (rows, outputs) is its D = (outputs x rows) = op(A) B with A = W as (inputs x outputs),
// transposed, and B = x as (inputs x rows). Rows of ours are columns of its D.
#include "engine/cuda/matmul.h"

#include <algorithm>

#include "engine/model/tensors.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

// What the library's manual advises.
std::int64_t workspace_bytes_wanted(const DeviceFacts& device) {
  return std::int64_t{device.major >= 9 ? 32 : 4} << 20;
}

constexpr int candidates_max = 8;

Result<void> check_library(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return unexpected(ErrorCode::DeviceLost, std::string(call) + ": status " + std::to_string(static_cast<int>(status)));
}

cudaDataType_t data_type(DataType dtype) {
  switch (dtype) {
    case DataType::Float32:
      return CUDA_R_32F;
    case DataType::BFloat16:
      return CUDA_R_16BF;
    case DataType::Float16:
      return CUDA_R_16F;
  }
  return CUDA_R_32F;
}

template <class Value>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, Value value) {
  const cublasStatus_t status = cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value);
  CHECK(status == CUBLAS_STATUS_SUCCESS, "attribute=", static_cast<int>(attribute));
}

template <class Value>
Value read(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, Value unknown) {
  Value value{};
  std::size_t written = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : unknown;
}

bool splits_inputs(const cublasLtMatmulAlgo_t& algorithm) {
  return read<std::int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 0) > 1 ||
         read<std::uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, CUBLASLT_REDUCTION_SCHEME_NONE) !=
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

}  // namespace

std::vector<std::int32_t> row_ranges(std::int32_t max_rows) {
  std::vector<std::int32_t> ranges;
  for (std::int32_t rows = 16; rows < max_rows; rows *= 2) ranges.push_back(rows);
  ranges.push_back(max_rows);
  return ranges;
}

Result<std::unique_ptr<MatmulLibrary>> MatmulLibrary::make(const DeviceFacts& device, DataType dtype) {
  std::unique_ptr<MatmulLibrary> library(new MatmulLibrary(dtype));
  if (auto made = check_library(cublasLtCreate(&library->handle_), "cublasLtCreate"); !made)
    return Unexpected(std::move(made).error());
  Result<DeviceMemory> workspace = DeviceMemory::make(workspace_bytes_wanted(device));
  if (!workspace) return Unexpected(std::move(workspace).error());
  library->workspace_ = std::move(*workspace);
  return library;
}

MatmulLibrary::~MatmulLibrary() {
  if (handle_ != nullptr) static_cast<void>(cublasLtDestroy(handle_));
}

MatmulCall::Handles::~Handles() {
  if (preference != nullptr) static_cast<void>(cublasLtMatmulPreferenceDestroy(preference));
  for (cublasLtMatrixLayout_t layout : {weights, x, out}) {
    if (layout != nullptr) static_cast<void>(cublasLtMatrixLayoutDestroy(layout));
  }
  if (operation != nullptr) static_cast<void>(cublasLtMatmulDescDestroy(operation));
}

Result<MatmulCall> MatmulCall::make(const MatmulLibrary& library, const MatmulPlan& plan, std::byte* workspace) {
  MatmulCall call(library, plan, workspace != nullptr ? workspace : library.workspace());
  call.handles_ = std::make_unique<Handles>();
  Handles& handles = *call.handles_;
  const MatmulShape& shape = plan.shape;
  const auto outputs = static_cast<std::uint64_t>(shape.outputs);
  const auto inputs = static_cast<std::uint64_t>(shape.inputs);
  const cudaDataType_t in = data_type(library.dtype());

  Result<void> made =
      check_library(cublasLtMatmulDescCreate(&handles.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const auto describe = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    if (made)
      made = check_library(cublasLtMatmulDescSetAttribute(handles.operation, attribute, &value, sizeof value),
                           "cublasLtMatmulDescSetAttribute");
  };
  describe(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  describe(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  if (shape.has_bias) {
    describe(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    describe(CUBLASLT_MATMUL_DESC_BIAS_POINTER, plan.bias);
    describe(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F);
  }
  const auto lay_out = [&](cublasLtMatrixLayout_t& layout, cudaDataType_t type, std::uint64_t rows, std::uint64_t columns) {
    if (made) {
      made = check_library(cublasLtMatrixLayoutCreate(&layout, type, rows, columns, static_cast<std::int64_t>(rows)),
                           "cublasLtMatrixLayoutCreate");
    }
  };
  lay_out(handles.weights, in, inputs, outputs);
  lay_out(handles.x, in, inputs, 1);
  lay_out(handles.out, data_type(shape.out_dtype), outputs, 1);
  if (made) made = check_library(cublasLtMatmulPreferenceCreate(&handles.preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    if (made) {
      made = check_library(cublasLtMatmulPreferenceSetAttribute(handles.preference, attribute, &value, sizeof value),
                           "cublasLtMatmulPreferenceSetAttribute");
    }
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::size_t>(library.workspace_bytes()));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  if (!made) return Unexpected(std::move(made).error());
  return call;
}

void MatmulCall::set_rows(const Rows<const void*>& x, std::int64_t out_stride) {
  set(handles_->x, CUBLASLT_MATRIX_LAYOUT_COLS, static_cast<std::uint64_t>(x.count));
  set(handles_->x, CUBLASLT_MATRIX_LAYOUT_LD, x.stride);
  set(handles_->out, CUBLASLT_MATRIX_LAYOUT_COLS, static_cast<std::uint64_t>(x.count));
  set(handles_->out, CUBLASLT_MATRIX_LAYOUT_LD, out_stride);
}

bool MatmulCall::queue_with(cudaStream_t stream, const cublasLtMatmulAlgo_t& algorithm, const Activations& x,
                            const Rows<void*>& out) {
  set_rows({.data = x.data, .count = x.count, .columns = x.columns, .stride = x.stride}, out.stride);
  const float one = 1.0F;
  const float zero = 0.0F;
  return cublasLtMatmul(library_->handle(), handles_->operation, &one, plan_->weights, handles_->weights, x.data, handles_->x,
                        &zero, out.data, handles_->out, out.data, handles_->out, &algorithm, workspace_,
                        static_cast<std::size_t>(library_->workspace_bytes()), stream) == CUBLAS_STATUS_SUCCESS;
}

Result<void> MatmulCall::queue(cudaStream_t stream, const Activations& x, const Rows<void*>& out) {
  if (x.count == 0) return {};
  if (plan_->algorithms.empty()) {
    linear(stream, library_->dtype(), plan_->weights, plan_->bias, plan_->shape.outputs, x, plan_->shape.out_dtype, out);
    return {};
  }
  // More rows than were probed run in pieces: rows do not depend on each other.
  const std::int64_t in_bytes = element_size(library_->dtype());
  const std::int64_t out_bytes = element_size(plan_->shape.out_dtype);
  bool queued = true;
  for (std::int32_t first = 0; first < x.count && queued; first += plan_->ranges.back()) {
    const std::int32_t count = std::min(plan_->ranges.back(), x.count - first);
    const auto range = std::lower_bound(plan_->ranges.begin(), plan_->ranges.end(), count) - plan_->ranges.begin();
    Activations piece = x;
    piece.data = static_cast<std::byte*>(x.data) + first * x.stride * in_bytes;
    piece.count = count;
    Rows<void*> piece_out = out;
    piece_out.data = static_cast<std::byte*>(out.data) + first * out.stride * out_bytes;
    piece_out.count = count;
    queued = queue_with(stream, plan_->algorithms[static_cast<std::size_t>(range)], piece, piece_out);
  }
  if (queued) return {};
  return unexpected(ErrorCode::DeviceLost, "cublasLtMatmul: a product of " + std::to_string(x.count) + " rows, " +
                                               std::to_string(plan_->shape.inputs) + " inputs and " +
                                               std::to_string(plan_->shape.outputs) + " outputs failed");
}

std::vector<cublasLtMatmulAlgo_t> MatmulCall::candidates(std::int32_t rows) {
  set_rows({.data = nullptr, .count = rows, .columns = plan_->shape.inputs, .stride = plan_->shape.inputs}, plan_->shape.outputs);
  cublasLtMatmulHeuristicResult_t results[candidates_max] = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(library_->handle(), handles_->operation, handles_->weights, handles_->x, handles_->out,
                                     handles_->out, handles_->preference, candidates_max, results, &count);
  std::vector<cublasLtMatmulAlgo_t> found;
  if (status != CUBLAS_STATUS_SUCCESS) return found;
  for (int i = 0; i < count; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS && !splits_inputs(results[i].algo)) found.push_back(results[i].algo);
  }
  return found;
}

}  // namespace rubato::engine::cuda
