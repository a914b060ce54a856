// SPDX-License-Identifier: Apache-2.0
// The runtime's host functions alone; here they come with the rest.
#pragma once

#include "cuda_runtime.h"
