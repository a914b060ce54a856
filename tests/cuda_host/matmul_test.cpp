// SPDX-License-Identifier: Apache-2.0
// The emulated cuBLASLt: right products in every layout, and algorithms that differ the way a probe must notice.
#include <cmath>
#include <map>
#include <random>

#include <cublasLt.h>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

enum class Reductions { None, All };

/// y (rows, outputs) = x (rows, inputs) W^T: D = (outputs x rows) = W^T B, as an engine with row-major activations asks for it.
class Product {
 public:
  Product(int outputs, int inputs, int rows, cudaDataType type, cudaDataType result) {
    cublasLtCreate(&handle_);
    cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t transpose = CUBLAS_OP_T;
    cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
    cublasLtMatrixLayoutCreate(&a_, type, static_cast<std::uint64_t>(inputs), static_cast<std::uint64_t>(outputs), inputs);
    cublasLtMatrixLayoutCreate(&b_, type, static_cast<std::uint64_t>(inputs), static_cast<std::uint64_t>(rows), inputs);
    cublasLtMatrixLayoutCreate(&d_, result, static_cast<std::uint64_t>(outputs), static_cast<std::uint64_t>(rows), outputs);
    cublasLtMatmulPreferenceCreate(&preference_);
    const std::size_t workspace = 1U << 20U;
    cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
  }
  ~Product() {
    cublasLtMatmulPreferenceDestroy(preference_);
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatrixLayoutDestroy(d_);
    cublasLtMatmulDescDestroy(description_);
    cublasLtDestroy(handle_);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  void add_bias(const void* bias, cudaDataType type) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
    cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type));
  }

  std::vector<cublasLtMatmulAlgo_t> candidates(Reductions reductions = Reductions::All) {
    const std::uint32_t mask = reductions == Reductions::All ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &mask, sizeof(mask));
    cublasLtMatmulHeuristicResult_t results[16];
    int found = 0;
    status_ = cublasLtMatmulAlgoGetHeuristic(handle_, description_, a_, b_, d_, d_, preference_, 16, results, &found);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < found; ++i) algorithms.push_back(results[i].algo);
    return algorithms;
  }
  [[nodiscard]] cublasStatus_t status() const { return status_; }

  cublasStatus_t run(const cublasLtMatmulAlgo_t& algorithm, const void* a, const void* b, void* d,
                     cudaStream_t stream = nullptr) {
    Array<char> workspace(1U << 20U);
    const float one = 1;
    const float zero = 0;
    const cublasStatus_t status = cublasLtMatmul(handle_, description_, &one, a, a_, b, b_, &zero, d, d_, d, d_, &algorithm,
                                                 workspace.get(), 1U << 20U, stream);
    cudaStreamSynchronize(stream);
    return status;
  }

 private:
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr;
  cublasLtMatrixLayout_t b_ = nullptr;
  cublasLtMatrixLayout_t d_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

int number_of(const cublasLtMatmulAlgo_t& algorithm) {
  int number = 0;
  std::size_t written = 0;
  EXPECT_EQ(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_ID, &number, sizeof(number), &written),
            CUBLAS_STATUS_SUCCESS);
  return number;
}

std::vector<float> random_values(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(normal(generator), static_cast<int>(generator() % 12) - 6);
  return values;
}

using Matmul = Emulation;
constexpr int outputs = 37;
constexpr int inputs = 96;

/// The result's first row, for that many rows of one x.
std::vector<float> first_row(const cublasLtMatmulAlgo_t& algorithm, int rows) {
  static const std::vector<float> weights = random_values(outputs * inputs, 1);
  static const std::vector<float> x = random_values(64 * inputs, 2);
  Array<float> a(weights);
  Array<float> b(x);
  Array<float> d(static_cast<std::size_t>(outputs) * 64);
  Product product(outputs, inputs, rows, CUDA_R_32F, CUDA_R_32F);
  EXPECT_EQ(product.run(algorithm, a.get(), b.get(), d.get()), CUBLAS_STATUS_SUCCESS);
  std::vector<float> out = d.read();
  out.resize(outputs);
  return out;
}

TEST_F(Matmul, every_algorithm_multiplies) {
  for (const cudaDataType type : {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F}) {
    const std::vector<float> weights = random_values(outputs * inputs, 1);
    const std::vector<float> x = random_values(5 * inputs, 2);
    const auto convert = [type](const std::vector<float>& values) {
      std::vector<unsigned short> bits;
      for (const float value : values) {
        bits.push_back(type == CUDA_R_16BF ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                           : __half_as_ushort(__float2half_rn(value)));
      }
      return bits;
    };
    const auto rounded = [type](float value) {
      if (type == CUDA_R_32F) return value;
      return type == CUDA_R_16BF ? static_cast<float>(__nv_bfloat16(value)) : static_cast<float>(__half(value));
    };
    Array<float> weights_wide(weights);
    Array<float> x_wide(x);
    Array<unsigned short> weights_narrow(convert(weights));
    Array<unsigned short> x_narrow(convert(x));
    Array<float> bias(random_values(outputs, 3));
    const std::vector<float> bias_values = random_values(outputs, 3);
    Array<float> d(outputs * 5);
    Product product(outputs, inputs, 5, type, CUDA_R_32F);
    product.add_bias(bias.get(), CUDA_R_32F);
    const void* a = type == CUDA_R_32F ? static_cast<const void*>(weights_wide.get()) : weights_narrow.get();
    const void* b = type == CUDA_R_32F ? static_cast<const void*>(x_wide.get()) : x_narrow.get();
    for (const cublasLtMatmulAlgo_t& algorithm : product.candidates()) {
      ASSERT_EQ(product.run(algorithm, a, b, d.get()), CUBLAS_STATUS_SUCCESS);
      const std::vector<float> out = d.read();
      for (std::size_t j = 0; j < 5; ++j) {
        for (std::size_t i = 0; i < outputs; ++i) {
          double expected = bias_values[i];
          double size = std::abs(expected);
          for (std::size_t k = 0; k < inputs; ++k) {
            const double term = static_cast<double>(rounded(weights[i * inputs + k])) * rounded(x[j * inputs + k]);
            expected += term;
            size += std::abs(term);
          }
          ASSERT_NEAR(out[j * outputs + i], expected, size * 1e-5) << "algorithm " << number_of(algorithm);
        }
      }
    }
  }
}

TEST_F(Matmul, a_row_s_bits_depend_on_the_other_rows_in_all_but_two_algorithms) {
  Product product(outputs, inputs, 16, CUDA_R_32F, CUDA_R_32F);
  std::map<int, bool> steady;
  for (const cublasLtMatmulAlgo_t& algorithm : product.candidates()) {
    const std::vector<float> reference = first_row(algorithm, 16);
    bool same = true;
    for (const int rows : {1, 7, 15, 16, 17, 40}) {
      for (int repeat = 0; repeat < 3; ++repeat) same = same && first_row(algorithm, rows) == reference;
    }
    steady[number_of(algorithm)] = same;
  }
  // Splits that are added in order are steady too, but say that they split.
  EXPECT_EQ(steady, (std::map<int, bool>{{1, false}, {2, false}, {3, false}, {4, true}, {5, false}, {6, true}, {7, true}}));
}

TEST_F(Matmul, the_two_steady_orders_have_different_bits) {
  Product product(outputs, inputs, 16, CUDA_R_32F, CUDA_R_32F);
  const std::vector<cublasLtMatmulAlgo_t> algorithms = product.candidates();
  EXPECT_NE(first_row(algorithms.at(5), 16), first_row(algorithms.at(6), 16));
}

TEST_F(Matmul, splits_say_so_and_are_left_out_when_reductions_are_forbidden) {
  Product product(outputs, inputs, 4, CUDA_R_32F, CUDA_R_32F);
  int splitting = 0;
  for (const Reductions reductions : {Reductions::All, Reductions::None}) {
    for (const cublasLtMatmulAlgo_t& algorithm : product.candidates(reductions)) {
      int parts = 0;
      std::uint32_t scheme = 0;
      std::size_t written = 0;
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts), &written);
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme), &written);
      EXPECT_EQ(parts > 1, scheme != CUBLASLT_REDUCTION_SCHEME_NONE);
      EXPECT_TRUE(parts == 1 || reductions == Reductions::All);
      splitting += parts > 1 ? 1 : 0;
    }
  }
  EXPECT_EQ(splitting, 2);
}

TEST_F(Matmul, none_of_the_candidates_is_steady_when_asked_so) {
  set_matmul_candidates(MatmulCandidates::NoneAcceptable);
  Product product(outputs, inputs, 16, CUDA_R_32F, CUDA_R_32F);
  const std::vector<cublasLtMatmulAlgo_t> algorithms = product.candidates(Reductions::None);
  EXPECT_EQ(algorithms.size(), 2U);
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms) EXPECT_NE(first_row(algorithm, 16), first_row(algorithm, 15));
  set_matmul_candidates(MatmulCandidates::None);
  EXPECT_TRUE(product.candidates().empty());
  EXPECT_EQ(product.status(), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST_F(Matmul, a_product_is_captured_and_replayed) {
  cudaStream_t stream = make_stream();
  Array<float> a(random_values(outputs * inputs, 1));
  Array<float> b(random_values(inputs, 2));
  Array<float> d(outputs);
  Product product(outputs, inputs, 1, CUDA_R_32F, CUDA_R_32F);
  const cublasLtMatmulAlgo_t plain = product.candidates(Reductions::None).back();
  ASSERT_EQ(product.run(plain, a.get(), b.get(), d.get()), CUBLAS_STATUS_SUCCESS);
  const std::vector<float> eager = d.read();
  ASSERT_CUDA(cudaMemset(d.get(), 0xff, outputs * sizeof(float)));
  ASSERT_CUDA(cudaDeviceSynchronize());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::scale, b.get(), 1, 1.0F));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ASSERT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  {
    cublasLtHandle_t handle = nullptr;
    cublasLtMatmulDesc_t description = nullptr;
    cublasLtMatrixLayout_t a_layout = nullptr;
    cublasLtMatrixLayout_t b_layout = nullptr;
    cublasLtMatrixLayout_t d_layout = nullptr;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t transpose = CUBLAS_OP_T;
    cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
    cublasLtMatrixLayoutCreate(&a_layout, CUDA_R_32F, inputs, outputs, inputs);
    cublasLtMatrixLayoutCreate(&b_layout, CUDA_R_32F, inputs, 1, inputs);
    cublasLtMatrixLayoutCreate(&d_layout, CUDA_R_32F, outputs, 1, outputs);
    float one = 1;
    const float zero = 0;
    EXPECT_EQ(cublasLtMatmul(handle, description, &one, a.get(), a_layout, b.get(), b_layout, &zero, d.get(), d_layout, d.get(),
                             d_layout, &plain, nullptr, 0, stream),
              CUBLAS_STATUS_SUCCESS);
    one = 2;  // frozen before
    cublasLtMatrixLayoutDestroy(a_layout);
    cublasLtMatrixLayoutDestroy(b_layout);
    cublasLtMatrixLayoutDestroy(d_layout);
    cublasLtMatmulDescDestroy(description);
    cublasLtDestroy(handle);
  }
  ASSERT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  EXPECT_EQ(d.read(), eager);
}

TEST_F(Matmul, shapes_and_types_that_do_not_fit_are_refused) {
  Array<float> a(random_values(outputs * inputs, 1));
  Array<float> b(random_values(inputs, 2));
  Array<float> d(outputs);
  Product good(outputs, inputs, 1, CUDA_R_32F, CUDA_R_32F);
  const cublasLtMatmulAlgo_t plain = good.candidates().back();
  Product mixed(outputs, inputs, 1, CUDA_R_16F, CUDA_R_16BF);
  EXPECT_TRUE(mixed.candidates().empty());
  Product biased(outputs, inputs, 1, CUDA_R_16BF, CUDA_R_16BF);
  biased.add_bias(d.get(), CUDA_R_32F);
  EXPECT_TRUE(biased.candidates().empty()) << "the bias has the result's type";
  cublasLtMatmulAlgo_t garbage{};
  EXPECT_EQ(good.run(garbage, a.get(), b.get(), d.get()), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(fault_text(), "");
  Product too_many(outputs, inputs, 2, CUDA_R_32F, CUDA_R_32F);
  EXPECT_EQ(too_many.run(plain, a.get(), b.get(), d.get()), CUBLAS_STATUS_EXECUTION_FAILED);
  expect_faults(FaultKind::OutOfBounds, "cublasLtMatmul", "B of");
}

}  // namespace
}  // namespace cuda_host
