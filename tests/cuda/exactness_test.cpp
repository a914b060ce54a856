// SPDX-License-Identifier: Apache-2.0
// The exactness checker on the CUDA backend: graphs and eager steps, two lanes, two devices, preemption, reuse. On the emulated
// device, where whole models are slow, with short prompts and a selection that has every value of every axis.
#include "engine/exactness.h"

#include "engine/cuda/backend.h"
#include "tests/cuda/on_device.h"
#include "tests/support/exactness_matrix.h"

namespace rubato::engine {
namespace {

struct CudaMatrixCase {
  test::MatrixModel model;
  DataType dtype = DataType::Float32;
  std::size_t first = 0;  // of the matrix
};

/// Prime to the length of every axis of the matrix.
constexpr std::size_t stride = 107;

std::vector<CudaMatrixCase> cuda_matrix_cases() {
  std::vector<CudaMatrixCase> cases;
  for (const test::MatrixModel& model : test::matrix_models()) {
    cases.push_back({.model = model, .dtype = DataType::BFloat16});
    if (model.name == "mamba2") cases.push_back({.model = model, .dtype = DataType::Float32});
  }
  for (std::size_t i = 0; i < cases.size(); ++i) cases[i].first = i * stride / cases.size();
  return cases;
}

/// Every 107th of the whole matrix, others for each model: the emulated device is too slow for all.
std::vector<ExactnessCase> selection(std::size_t first) {
  const std::vector<ExactnessCase> all = test::whole_matrix();
  std::vector<ExactnessCase> cases;
  for (std::size_t i = first; i < all.size(); i += stride) {
    cases.push_back(all[i]);
    cases.back().company = std::min(cases.back().company, 5);
  }
  return cases;
}

class CudaExactness : public OnDevice, public testing::WithParamInterface<CudaMatrixCase> {
#if RUBATO_CUDA_EMULATED
 protected:
  [[nodiscard]] cuda_host::Options emulation() const override {
    cuda_host::Options options = OnDevice::emulation();
    options.devices = 2;
    return options;
  }
#endif
};

TEST_P(CudaExactness, every_way_gives_the_bits_of_token_by_token) {
  const test::MatrixModel& model = GetParam().model;
  BackendOptions options = test::matrix_options(*synthetic_model_config(model.synthetic), GetParam().dtype);
  options.max_tokens_per_step = 80;
  options.max_rows = 8;
  std::int32_t next = 0;
  test::MatrixDevice device =
      test::make_matrix_device(model, options, [&](const ModelConfig& config, WeightSource& weights, const BackendOptions& each) {
        return make_cuda_backend(config, weights, each, next++);
      });
  ASSERT_FALSE(device.target.lanes.empty());
  device.target.prompt_tokens = 38;
  device.target.new_tokens = 3;
  Result<ExactnessChecker> checker = ExactnessChecker::make(device.target);
  ASSERT_TRUE(checker) << checker.error().message;
  const Result<ExactnessReference> reference = checker->reference();
  ASSERT_TRUE(reference) << reference.error().message;
  test::expect_exact(*checker, *reference, selection(GetParam().first));
}

INSTANTIATE_TEST_SUITE_P(Models, CudaExactness, testing::ValuesIn(cuda_matrix_cases()), [](const auto& model) {
  return model.param.model.name + (model.param.dtype == DataType::Float32 ? "_f32" : "_bf16");
});

}  // namespace
}  // namespace rubato::engine
