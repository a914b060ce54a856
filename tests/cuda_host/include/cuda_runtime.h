// SPDX-License-Identifier: Apache-2.0
// Stands in for the CUDA 13 runtime header when rubato's own .cu sources are compiled by a host compiler for tests: the same
// names, types and meanings for the part that engine/cuda/ uses.
#pragma once

#include "cuda_host/device.h"
#include "cuda_host/runtime_api.h"
#include "cuda_host/runtime_types.h"
#include "cuda_host/vector_types.h"
