#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and benches the CUDA engine on a GPU machine that has a C++20 compiler, CMake, CUDA 13 and nothing else: the engine alone,
# its tests on the real device, one table of figures. Libraries come from folders that travel with the tree:
#   tests/gpu/check.sh [MODEL...]    MODEL: 8b, 1b, tiny, mamba2 or hybrid; by default 8b and mamba2
#   GOOGLETEST=/usr/src/googletest   the sources (Debian: googletest)
#   JSON_INCLUDE=/usr/include        where nlohmann/json.hpp is (Debian: nlohmann-json3-dev)
# `tests/gpu/check.sh --pack FOLDER` copies both into FOLDER/googletest and FOLDER/include on a machine that has them.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."

if [ "${1:-}" = --pack ]; then
  folder=${2:?a folder}
  mkdir -p "$folder/include"
  cp -r /usr/src/googletest "$folder/"
  cp -r /usr/include/nlohmann "$folder/include/"
  exit 0
fi

[ $# -gt 0 ] || set -- 8b mamba2
packed=build/gpu-packages
googletest=${GOOGLETEST:-$([ -d $packed/googletest ] && echo "$PWD/$packed/googletest" || echo /usr/src/googletest)}
json=${JSON_INCLUDE:-$([ -d $packed/include ] && echo "$PWD/$packed/include" || echo /usr/include)}
export PATH=$PATH:/usr/local/cuda/bin

echo "== building"
cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DRUBATO_ENGINE_ONLY=ON -DRUBATO_GPU_CHECK=ON -DCMAKE_CUDA_ARCHITECTURES=native \
  -DRUBATO_GOOGLETEST="$googletest" -DRUBATO_JSON_INCLUDE="$json" >/dev/null
cmake --build build/gpu -j"$(nproc)" --target cuda_tests cuda_bench

echo "== testing on the device"
build/gpu/tests/cuda/cuda_tests --gtest_brief=1

echo "== measuring"
for model in "$@"; do build/gpu/tests/gpu/cuda_bench "$model"; done
