# SPDX-License-Identifier: Apache-2.0
# The CUDA language, where nvcc 13 is found: sets RUBATO_HAS_CUDA. Everything builds and passes without it.
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "nvcc was not found: building without the CUDA engine")
  return()
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Ampere, Ada and Hopper as machine code, Blackwell also as PTX for what comes after it.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90-real 100)
endif()
enable_language(CUDA)
find_package(CUDAToolkit)
if(NOT CUDAToolkit_FOUND OR CUDAToolkit_VERSION VERSION_LESS 13 OR NOT TARGET CUDA::cublasLt)
  message(STATUS "CUDA 13 with cuBLASLt was not found: building without the CUDA engine")
  return()
endif()
set(RUBATO_HAS_CUDA ON)
if(CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()

# CMake 3.25 does not know that nvcc 13 speaks C++20.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)

add_library(rubato_cuda_flags INTERFACE)
target_compile_options(rubato_cuda_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off>")
