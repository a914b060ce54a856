// SPDX-License-Identifier: Apache-2.0
// The data types that cuBLASLt is told of, with the values of the real header.
#pragma once

enum cudaDataType_t {
  CUDA_R_32F = 0,
  CUDA_R_64F = 1,
  CUDA_R_16F = 2,
  CUDA_R_16BF = 14,
};
using cudaDataType = cudaDataType_t;
