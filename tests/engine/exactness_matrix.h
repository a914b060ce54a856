// SPDX-License-Identifier: Apache-2.0
// The exactness matrix on the CPU backend, for the fast part of it and the whole.
#pragma once

#include "engine/cpu/backend.h"
#include "tests/support/exactness_matrix.h"

namespace rubato::engine {

struct MatrixCase {
  test::MatrixModel model;
  DataType dtype = DataType::Float32;
};

inline std::vector<MatrixCase> matrix_cases() {
  std::vector<MatrixCase> cases;
  for (const test::MatrixModel& model : test::matrix_models()) {
    for (const DataType dtype : {DataType::Float32, DataType::BFloat16}) cases.push_back({.model = model, .dtype = dtype});
  }
  return cases;
}

inline std::string matrix_name(const testing::TestParamInfo<MatrixCase>& info) {
  return info.param.model.name + (info.param.dtype == DataType::Float32 ? "_f32" : "_bf16");
}

inline test::MatrixDevice make_cpu_matrix_device(const MatrixCase& model, std::int32_t threads) {
  BackendOptions options = test::matrix_options(*synthetic_model_config(model.model.synthetic), model.dtype);
  options.threads = threads;
  return test::make_matrix_device(model.model, options, make_cpu_backend);
}

}  // namespace rubato::engine
