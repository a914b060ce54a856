// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's products, with algorithms whose sums over k truly differ:
//   1 single column: another order when the result has one column   2 by shape: begins where the result's shape says
//   3 split k, added in an order that changes from run to run       4 split k, added in order
//   5 edge: columns beyond the last whole 16 in another order       6 interleaved: two sums, of even and of odd sixteens
//   7 plain: ascending                                              8 by element: begins where the element's place says
//   9 unsteady: begins somewhere else in every run
// 6 and 7 give each column of the result bits that depend on that column of B and on A alone; the others must not be taken.
#include <algorithm>
#include <array>
#include <cstring>

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tests/cuda_host/state.h"

struct cublasLtContext {
  bool alive = true;
};
struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType scale = CUDA_R_32F;
  cublasOperation_t transpose_a = CUBLAS_OP_N;
  cublasOperation_t transpose_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int bias_type = -1;  // the result's
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType type = CUDA_R_32F;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::int64_t leading = 0;
  std::int32_t order = CUBLASLT_ORDER_COL;
  std::int32_t batch = 1;
};
struct cublasLtMatmulPreferenceOpaque_t {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
};

namespace cuda_host {

namespace {

enum class Algorithm : std::uint64_t {
  SingleColumn = 1,
  ByShape,
  SplitUnordered,
  SplitOrdered,
  Edge,
  Interleaved,
  Plain,
  ByElement,
  Unsteady,
};
constexpr std::uint64_t algorithm_tag = 0x686f737400000000ULL;  // in data[1], so that garbage is recognised
constexpr std::size_t split = 4;

struct Product {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;
  void* workspace = nullptr;
  cublasLtMatrixLayoutOpaque_t a_layout;
  cublasLtMatrixLayoutOpaque_t b_layout;
  cublasLtMatrixLayoutOpaque_t c_layout;
  cublasLtMatrixLayoutOpaque_t d_layout;
  bool a_transposed = false;
  bool b_transposed = false;
  float alpha = 1;
  float beta = 0;
  Algorithm algorithm = Algorithm::Plain;
};

std::size_t element_size(cudaDataType type) {
  return type == CUDA_R_32F ? 4 : 2;
}

float read_element(const void* data, std::size_t index, cudaDataType type) {
  switch (type) {
    case CUDA_R_16BF:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[index]);
    case CUDA_R_16F:
      return static_cast<float>(static_cast<const __half*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

void write_element(void* data, std::size_t index, cudaDataType type, float value) {
  switch (type) {
    case CUDA_R_16BF:
      static_cast<__nv_bfloat16*>(data)[index] = __nv_bfloat16(value);
      break;
    case CUDA_R_16F:
      static_cast<__half*>(data)[index] = __half(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
      break;
  }
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a * 0x9E3779B97F4A7C15ULL + b * 0xC2B2AE3D27D4EB4FULL + 0x165667B19E3779F9ULL;
  z = (z ^ (z >> 29U)) * 0xBF58476D1CE4E5B9ULL;
  return z ^ (z >> 32U);
}

// Eight rows of A at a time, so that eight sums run side by side.
constexpr std::size_t lanes = 8;
using Sums = std::array<float, lanes>;

void add_range(Sums& sums, const float* a, const float* b, std::size_t begin, std::size_t end) {
  for (std::size_t k = begin; k < end; ++k) {
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += a[k * lanes + lane] * b[k];
  }
}

void add_backwards(Sums& sums, const float* a, const float* b, std::size_t count) {
  for (std::size_t k = count; k-- > 0;) {
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += a[k * lanes + lane] * b[k];
  }
}

Sums begin_at(const float* a, const float* b, std::size_t count, std::size_t start) {
  Sums sums{};
  add_range(sums, a, b, start, count);
  add_range(sums, a, b, 0, start);
  return sums;
}

// Somewhere that is not the begin, as far as there is such a place.
std::size_t elsewhere(std::uint64_t key, std::size_t count) {
  return count < 2 ? 0 : 1 + key % (count - 1);
}

Sums sum_up(const Product& p, const float* a, const float* b, std::size_t row, std::size_t column, std::uint64_t run) {
  Sums sums{};
  switch (p.algorithm) {
    case Algorithm::SingleColumn:
      if (p.n == 1) {
        add_backwards(sums, a, b, p.k);
      } else {
        add_range(sums, a, b, 0, p.k);
      }
      return sums;
    case Algorithm::ByShape:
      return begin_at(a, b, p.k, elsewhere(mix(p.m, p.n), p.k));
    case Algorithm::ByElement:
      return begin_at(a, b, p.k, elsewhere(mix(mix(p.m, p.n), mix(row, column)), p.k));
    case Algorithm::Unsteady:
      return begin_at(a, b, p.k, elsewhere(run, p.k));
    case Algorithm::Edge:
      return begin_at(a, b, p.k, column < p.n / 16 * 16 ? 0 : elsewhere(7, p.k));
    case Algorithm::Interleaved: {
      Sums odd{};
      for (std::size_t at = 0; at < p.k; at += 16) add_range(at / 16 % 2 == 0 ? sums : odd, a, b, at, std::min(at + 16, p.k));
      for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += odd[lane];
      return sums;
    }
    case Algorithm::SplitUnordered:
    case Algorithm::SplitOrdered: {
      const std::size_t first = p.algorithm == Algorithm::SplitOrdered ? 0 : run % split;
      for (std::size_t part = 0; part < split; ++part) {
        const std::size_t which = (first + part) % split;
        Sums one{};
        add_range(one, a, b, p.k * which / split, p.k * (which + 1) / split);
        for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += one[lane];
      }
      return sums;
    }
    case Algorithm::Plain:
      add_range(sums, a, b, 0, p.k);
      return sums;
  }
  return sums;
}

void multiply(const Product& p, std::uint64_t run) {
  const std::size_t blocks = (p.m + lanes - 1) / lanes;
  std::vector<float> a(blocks * p.k * lanes, 0.0F);
  const auto a_leading = static_cast<std::size_t>(p.a_layout.leading);
  for (std::size_t i = 0; i < p.m; ++i) {
    for (std::size_t k = 0; k < p.k; ++k) {
      const std::size_t at = p.a_transposed ? i * a_leading + k : k * a_leading + i;
      a[(i / lanes * p.k + k) * lanes + i % lanes] = read_element(p.a, at, p.a_layout.type);
    }
  }
  const auto b_leading = static_cast<std::size_t>(p.b_layout.leading);
  std::vector<float> b(p.k);
  for (std::size_t j = 0; j < p.n; ++j) {
    for (std::size_t k = 0; k < p.k; ++k) {
      b[k] = read_element(p.b, p.b_transposed ? k * b_leading + j : j * b_leading + k, p.b_layout.type);
    }
    for (std::size_t block = 0; block < blocks; ++block) {
      const Sums sums = sum_up(p, a.data() + block * p.k * lanes, b.data(), block * lanes, j, run);
      for (std::size_t lane = 0; lane < lanes && block * lanes + lane < p.m; ++lane) {
        const std::size_t i = block * lanes + lane;
        float value = p.alpha * sums[lane];
        if (p.beta != 0.0F) {
          value += p.beta * read_element(p.c, j * static_cast<std::size_t>(p.c_layout.leading) + i, p.c_layout.type);
        }
        if (p.bias != nullptr) value += read_element(p.bias, i, p.d_layout.type);
        write_element(p.d, j * static_cast<std::size_t>(p.d_layout.leading) + i, p.d_layout.type, value);
      }
    }
  }
}

bool splits(Algorithm algorithm) {
  return algorithm == Algorithm::SplitUnordered || algorithm == Algorithm::SplitOrdered;
}
cublasLtReductionScheme_t reduction(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::SplitUnordered:
      return CUBLASLT_REDUCTION_SCHEME_INPLACE;
    case Algorithm::SplitOrdered:
      return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    default:
      return CUBLASLT_REDUCTION_SCHEME_NONE;
  }
}
std::size_t workspace_of(Algorithm algorithm, std::size_t m, std::size_t n) {
  return algorithm == Algorithm::SplitOrdered ? split * m * n * sizeof(float) : 0;
}

// Shapes and types that the real library takes for CUBLAS_COMPUTE_32F; fills m, n and k.
cublasStatus_t check_shapes(const cublasLtMatmulDescOpaque_t& description, const cublasLtMatrixLayoutOpaque_t& a,
                            const cublasLtMatrixLayoutOpaque_t& b, const cublasLtMatrixLayoutOpaque_t& c,
                            const cublasLtMatrixLayoutOpaque_t& d, Product& product) {
  const bool a_transposed = description.transpose_a != CUBLAS_OP_N;
  const bool b_transposed = description.transpose_b != CUBLAS_OP_N;
  product.m = a_transposed ? a.columns : a.rows;
  product.k = a_transposed ? a.rows : a.columns;
  product.n = b_transposed ? b.rows : b.columns;
  const std::uint64_t b_k = b_transposed ? b.columns : b.rows;
  if (b_k != product.k || d.rows != product.m || d.columns != product.n || c.rows != d.rows || c.columns != d.columns) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  for (const auto* layout : {&a, &b, &c, &d}) {
    if (layout->leading < static_cast<std::int64_t>(layout->rows)) return CUBLAS_STATUS_INVALID_VALUE;
    if (layout->order != CUBLASLT_ORDER_COL || layout->batch != 1) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (description.compute != CUBLAS_COMPUTE_32F && description.compute != CUBLAS_COMPUTE_32F_PEDANTIC) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool types_fit =
      description.scale == CUDA_R_32F && a.type == b.type && c.type == d.type && (d.type == a.type || d.type == CUDA_R_32F);
  if (!types_fit) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (description.epilogue != CUBLASLT_EPILOGUE_DEFAULT && description.epilogue != CUBLASLT_EPILOGUE_BIAS) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  // The bias has the result's type, or the library has no kernel.
  if (description.epilogue == CUBLASLT_EPILOGUE_BIAS && description.bias_type != -1 && description.bias_type != d.type) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

bool operand_fits(const void* pointer, std::size_t bytes, const char* name) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const Allocation* allocation = allocation_at(address);
  const bool fits = allocation != nullptr && !allocation->freed && address >= allocation->base && bytes <= allocation->size &&
                    address - allocation->base <= allocation->size - bytes;
  if (!fits) {
    const bool freed = allocation != nullptr && allocation->freed;
    add_fault(
        freed ? FaultKind::UseAfterFree : FaultKind::OutOfBounds, "cublasLtMatmul",
        std::string(name) + " of " + std::to_string(bytes) + " bytes does not fit: it begins at " + describe_address(address));
  }
  return fits;
}

std::size_t bytes_of(const cublasLtMatrixLayoutOpaque_t& layout) {
  if (layout.columns == 0) return 0;
  return ((layout.columns - 1) * static_cast<std::size_t>(layout.leading) + layout.rows) * element_size(layout.type);
}

bool operands_fit(const Product& p) {
  const bool matrices = operand_fits(p.a, bytes_of(p.a_layout), "A") && operand_fits(p.b, bytes_of(p.b_layout), "B") &&
                        operand_fits(p.d, bytes_of(p.d_layout), "D") &&
                        (p.beta == 0.0F || operand_fits(p.c, bytes_of(p.c_layout), "C"));
  return matrices && (p.bias == nullptr || operand_fits(p.bias, p.m * element_size(p.d_layout.type), "the bias")) &&
         (p.workspace == nullptr || operand_fits(p.workspace, workspace_of(p.algorithm, p.m, p.n), "the workspace"));
}

std::vector<Algorithm> offered() {
  switch (state().options.matmul_candidates) {
    case MatmulCandidates::All:
      return {Algorithm::SingleColumn, Algorithm::ByShape,     Algorithm::SplitUnordered, Algorithm::SplitOrdered,
              Algorithm::Edge,         Algorithm::Interleaved, Algorithm::Plain};
    case MatmulCandidates::NoneAcceptable:
      return {Algorithm::SplitUnordered, Algorithm::ByElement, Algorithm::SplitOrdered, Algorithm::Unsteady};
    case MatmulCandidates::None:
      return {};
  }
  return {};
}

template <class T>
cublasStatus_t read_attribute(T& value, const void* bytes, std::size_t size) {
  if (bytes == nullptr || size != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&value, bytes, size);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t write_attribute(const T& value, void* bytes, std::size_t size, std::size_t* written) {
  if (written != nullptr) *written = sizeof(T);
  if (bytes == nullptr && size == 0) return CUBLAS_STATUS_SUCCESS;
  if (bytes == nullptr || size != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(bytes, &value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasLtMatmulAlgo_t handle_of(Algorithm algorithm) {
  cublasLtMatmulAlgo_t handle{};
  handle.data[0] = static_cast<std::uint64_t>(algorithm);
  handle.data[1] = algorithm_tag;
  return handle;
}

bool algorithm_of(const cublasLtMatmulAlgo_t* handle, Algorithm& algorithm) {
  if (handle == nullptr || handle->data[1] != algorithm_tag || handle->data[0] < 1 || handle->data[0] > 9) return false;
  algorithm = static_cast<Algorithm>(handle->data[0]);
  return true;
}

cublasStatus_t queue(Call& call, const Product& product, cudaStream_t stream) {
  CUstream_st* place = find_stream(stream, call.name());
  if (place == nullptr || place->device != current_device()) return CUBLAS_STATUS_INVALID_VALUE;
  if (!operands_fit(product)) return CUBLAS_STATUS_EXECUTION_FAILED;
  Work work{
      .kind = WorkKind::Kernel,
      .name = "cublasLtMatmul algorithm " + std::to_string(static_cast<int>(product.algorithm)),
      .device = place->device,
      .action =
          [product] {
            if (!operands_fit(product)) return;  // a graph may replay it long after
            multiply(product, state().random.next());
            if (product.workspace != nullptr) {
              std::memset(product.workspace, 0xff, workspace_of(product.algorithm, product.m, product.n));
            }
          },
      .uses = {},
      .nanoseconds = 2000 + static_cast<std::uint64_t>(product.algorithm) * (100 + product.m * product.n * product.k / 10'000)};
  for (const void* operand :
       {product.a, product.b, static_cast<const void*>(product.d), product.bias, static_cast<const void*>(product.workspace)}) {
    if (const Allocation* allocation = allocation_at(reinterpret_cast<std::uintptr_t>(operand)); allocation != nullptr) {
      work.uses.push_back(allocation->base);
    }
  }
  return call.result(submit(call, *place, std::move(work))) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                           : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace

}  // namespace cuda_host

using namespace cuda_host;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  Call call("cublasLtCreate");
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (call.result(call.refuse_unsafe()) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasLtContext();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
std::size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}
std::size_t cublasLtGetCudartVersion() {
  return CUDART_VERSION;
}
const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR:
      return "CUBLAS_STATUS_LICENSE_ERROR";
  }
  return "unknown status";
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
  return cublasLtGetStatusName(status);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t compute, cudaDataType_t scale) {
  auto* made = new cublasLtMatmulDescOpaque_t();
  made->compute = compute;
  made->scale = scale;
  *description = made;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t size) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return read_attribute(description->transpose_a, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return read_attribute(description->transpose_b, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return read_attribute(description->epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return read_attribute(description->bias, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return read_attribute(description->bias_type, value, size);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
      return size == sizeof(std::int32_t) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t leading) {
  auto* made = new cublasLtMatrixLayoutOpaque_t();
  made->type = type;
  made->rows = rows;
  made->columns = columns;
  made->leading = leading;
  *layout = made;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, std::size_t size) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return read_attribute(layout->type, value, size);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return read_attribute(layout->order, value, size);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return read_attribute(layout->rows, value, size);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return read_attribute(layout->columns, value, size);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return read_attribute(layout->leading, value, size);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return read_attribute(layout->batch, value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t size) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return read_attribute(preference->workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return read_attribute(preference->reductions, value, size);
    default:
      return CUBLAS_STATUS_SUCCESS;  // alignments, waves: nothing here depends on them
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  const Call call("cublasLtMatmulAlgoGetHeuristic");
  *found = 0;
  if (handle == nullptr || requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  Product product;
  if (const cublasStatus_t status = check_shapes(*description, *a, *b, *c, *d, product); status != CUBLAS_STATUS_SUCCESS)
    return status;
  for (const Algorithm algorithm : offered()) {
    const std::size_t workspace = workspace_of(algorithm, product.m, product.n);
    const bool allowed =
        reduction(algorithm) == CUBLASLT_REDUCTION_SCHEME_NONE || (reduction(algorithm) & preference->reductions) != 0;
    if (*found == requested || !allowed || workspace > preference->workspace) continue;
    cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
    result = {};
    result.algo = handle_of(algorithm);
    result.workspaceSize = workspace;
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1.0F;
  }
  return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
  Algorithm chosen{};
  if (handle == nullptr || result == nullptr || !algorithm_of(algorithm, chosen)) return CUBLAS_STATUS_INVALID_VALUE;
  Product product;
  if (const cublasStatus_t status = check_shapes(*description, *a, *b, *c, *d, product); status != CUBLAS_STATUS_SUCCESS)
    return status;
  *result = {};
  result->algo = *algorithm;
  result->workspaceSize = workspace_of(chosen, product.m, product.n);
  result->state = CUBLAS_STATUS_SUCCESS;
  result->wavesCount = 1.0F;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* value, std::size_t size,
                                                    std::size_t* written) {
  Algorithm chosen{};
  if (!algorithm_of(algorithm, chosen)) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_ALGO_CONFIG_ID:
      return write_attribute(static_cast<std::int32_t>(chosen), value, size, written);
    case CUBLASLT_ALGO_CONFIG_TILE_ID:
      return write_attribute(std::uint32_t{0}, value, size, written);
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM:
      return write_attribute(static_cast<std::int32_t>(splits(chosen) ? split : 1), value, size, written);
    case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME:
      return write_attribute(static_cast<std::uint32_t>(reduction(chosen)), value, size, written);
    case CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING:
    case CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION:
    case CUBLASLT_ALGO_CONFIG_STAGES_ID:
      return write_attribute(std::uint32_t{0}, value, size, written);
    case CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID:
    case CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID:
      return write_attribute(std::uint16_t{0}, value, size, written);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t workspace_size,
                              cudaStream_t stream) {
  Call call("cublasLtMatmul");
  if (handle == nullptr || alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  Product product;
  const cublasStatus_t status = check_shapes(*description, *a_layout, *b_layout, *c_layout, *d_layout, product);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (algorithm != nullptr && !algorithm_of(algorithm, product.algorithm)) return CUBLAS_STATUS_INVALID_VALUE;
  const std::size_t needed = workspace_of(product.algorithm, product.m, product.n);
  if (needed > workspace_size || (needed > 0 && workspace == nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
  product.a = a;
  product.b = b;
  product.c = c;
  product.d = d;
  product.bias = description->epilogue == CUBLASLT_EPILOGUE_BIAS ? description->bias : nullptr;
  product.workspace = needed > 0 ? workspace : nullptr;
  product.a_layout = *a_layout;
  product.b_layout = *b_layout;
  product.c_layout = *c_layout;
  product.d_layout = *d_layout;
  product.a_transposed = description->transpose_a != CUBLAS_OP_N;
  product.b_transposed = description->transpose_b != CUBLAS_OP_N;
  std::memcpy(&product.alpha, alpha, sizeof(float));
  std::memcpy(&product.beta, beta, sizeof(float));
  return queue(call, product, stream);
}
