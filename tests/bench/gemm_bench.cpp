// SPDX-License-Identifier: Apache-2.0
// One thread's linear kernels against two loops measured in the same run: the products that registers alone allow, and the bytes
// that a plain read takes from memory. Time is the thread's own, so that a busy machine disturbs little.
#include <ctime>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "engine/cpu/kernels.h"
#include "engine/cpu/memory.h"

namespace {

using rubato::engine::cpu::Kernels;
using rubato::engine::cpu::LinearTask;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class Body>
double best_seconds(int repeats, Body&& body) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double begin = thread_seconds();
    body();
    best = std::min(best, thread_seconds() - begin);
  }
  return best;
}

struct Bench {
  Kernels kernels;
  std::int32_t inputs;
  std::int32_t outputs;
  rubato::engine::HostMemory weights;
  std::int32_t panels;
  std::int32_t cells;

  Bench(const Kernels& table, std::int32_t k, std::int32_t n) : kernels(table), inputs(k), outputs(n) {
    cells = k / table.elements_per_cell;
    panels = n / table.panel_columns;
    weights =
        rubato::engine::HostMemory::take(static_cast<std::int64_t>(panels) * table.panel_columns * cells * 4, "weights").value();
  }

  double seconds(std::int32_t rows, std::int32_t block, int repeats) {
    std::vector<std::uint32_t> x(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cells));
    std::vector<float> out(static_cast<std::size_t>(rows) * static_cast<std::size_t>(outputs));
    std::vector<float> partial(static_cast<std::size_t>(block) * static_cast<std::size_t>(kernels.panel_columns));
    return best_seconds(repeats, [&] {
      for (std::int32_t first = 0; first < rows; first += block) {
        for (std::int32_t panel = 0; panel < panels; ++panel) {
          kernels.linear({.panel = static_cast<const std::uint32_t*>(weights.data()) +
                                   static_cast<std::int64_t>(panel) * kernels.panel_columns * cells,
                          .x = x.data() + static_cast<std::int64_t>(first) * cells,
                          .x_stride = cells,
                          .rows = std::min(block, rows - first),
                          .cells = cells,
                          .out = out.data() + static_cast<std::int64_t>(first) * outputs + panel * kernels.panel_columns,
                          .out_stride = outputs,
                          .out_groups = kernels.panel_columns / 16,
                          .partial = partial.data()});
        }
      }
    });
  }
};

double read_bandwidth() {
  const auto memory = rubato::engine::HostMemory::take(512 << 20, "read").value();
  const auto* words = static_cast<const std::uint64_t*>(memory.data());
  std::uint64_t sink = 0;
  const double seconds = best_seconds(3, [&] {
    std::uint64_t sum[8] = {};
    for (std::size_t i = 0; i < (512U << 20) / 8; i += 8) {
      for (std::size_t j = 0; j < 8; ++j) sum[j] += words[i + j];
    }
    for (const std::uint64_t one : sum) sink += one;
  });
  if (sink != 0) std::printf("unexpected\n");
  return 0.536870912 / seconds;
}

}  // namespace

int main() {
  using rubato::DataType;
  const auto paths = rubato::engine::cpu::kernel_paths(DataType::BFloat16);
  const double bandwidth = read_bandwidth();
  std::printf("read, one thread: %.1f GB/s\n", bandwidth);
  for (const DataType dtype : {DataType::BFloat16, DataType::Float32}) {
    const Kernels kernels = rubato::engine::cpu::kernels_of(
        dtype == DataType::BFloat16 ? paths.front() : rubato::engine::cpu::KernelPath::Portable, dtype);
    // One panel of 32 KiB: everything in the first-level cache.
    Bench small(kernels, 128 * kernels.elements_per_cell, kernels.panel_columns);
    const double peak = 2e-9 * 6 * 64 * small.inputs * small.outputs / small.seconds(6 * 64, 6 * 64, 50);
    std::printf("%s %s: peak in cache %.0f GFLOP/s\n", kernels.name, dtype == DataType::BFloat16 ? "bf16" : "f32", peak);
    const std::int32_t shapes[][2] = {{896, 1152}, {896, 896}, {896, 9728}, {4864, 896}, {896, 151936}};
    for (const auto& shape : shapes) {
      Bench bench(kernels, shape[0], shape[1]);
      std::printf("  K %4d N %6d:", shape[0], shape[1]);
      for (const std::int32_t rows : {1, 8, 32, 64, 128, 512}) {
        if (shape[1] > 10000 && rows > 32) continue;
        const double seconds = bench.seconds(rows, 128, rows > 32 ? 3 : 6);
        const double flops = 2e-9 * rows * shape[0] * shape[1] / seconds;
        const double bytes = 1e-9 * shape[0] * shape[1] * 4 / kernels.elements_per_cell / seconds;
        std::printf("  M%d %.0f%%", rows, 100 * flops / peak);
        if (rows <= 32) std::printf(" %.0fGB/s", bytes);
      }
      std::printf("\n");
    }
  }
}
