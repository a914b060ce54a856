// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA 13 driver API that green contexts need, with the real header's names and values.
#pragma once
#pragma GCC system_header

#include "cuda_host/runtime_types.h"

#define CUDA_VERSION 13000

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
  CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
  CUDA_ERROR_UNKNOWN = 999,
};

using CUdevice = int;
using CUstream = cudaStream_t;
using CUcontext = struct CUctx_st*;
using CUgreenCtx = struct CUgreenCtx_st*;
using CUdevResourceDesc = struct CUdevResourceDesc_st*;

enum CUstream_flags {
  CU_STREAM_DEFAULT = 0x0,
  CU_STREAM_NON_BLOCKING = 0x1,
};

enum CUgreenCtxCreate_flags {
  CU_GREEN_CTX_DEFAULT_STREAM = 0x1,
};

enum CUdevSmResourceSplit_flags {
  CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING = 0x1,
  CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE = 0x2,
};

enum CUdevResourceType {
  CU_DEV_RESOURCE_TYPE_INVALID = 0,
  CU_DEV_RESOURCE_TYPE_SM = 1,
};

struct CUdevSmResource {
  unsigned int smCount;
  unsigned int minSmPartitionSize;
  unsigned int smCoscheduledAlignment;
};

struct CUdevResource {
  CUdevResourceType type;
  unsigned char _internal_padding[92];
  union {
    CUdevSmResource sm;
    unsigned char _oversize[48];
  };
};

CUresult cuInit(unsigned int flags);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuGetErrorName(CUresult error, const char** name);
CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type);
CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned int* groups, const CUdevResource* input,
                                     CUdevResource* remaining, unsigned int flags, unsigned int minimum);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* description, CUdevResource* resources, unsigned int count);
CUresult cuGreenCtxCreate(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device, unsigned int flags);
CUresult cuGreenCtxDestroy(CUgreenCtx context);
CUresult cuGreenCtxGetDevResource(CUgreenCtx context, CUdevResource* resource, CUdevResourceType type);
CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx context, unsigned int flags, int priority);
CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* context);
CUresult cuStreamDestroy(CUstream stream);
