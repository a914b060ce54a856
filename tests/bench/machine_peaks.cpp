// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/machine_peaks.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "engine/cpu/memory.h"

namespace rubato::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int accumulators = 12;  // enough independent sums to hide the latency of a multiply-add
constexpr std::int64_t rounds = 4'000'000;

std::atomic<float> float_sink;
std::atomic<std::uint64_t> integer_sink;

__attribute__((target("avx512f,avx512bf16"))) void multiply_bfloat16() {
  __m512 sums[accumulators];
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3c00));
  const auto y = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3c01));
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, x, y);
  }
#pragma GCC unroll 12
  for (const auto& sum : sums) {
    float lanes[16];
    _mm512_storeu_ps(lanes, sum);
    float_sink = float_sink + lanes[0];
  }
}

__attribute__((target("avx512f"))) void multiply_float32_wide() {
  __m512 sums[accumulators];
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const __m512 x = _mm512_set1_ps(1e-6F);
  const __m512 y = _mm512_set1_ps(1e-5F);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm512_fmadd_ps(x, y, sum);
  }
#pragma GCC unroll 12
  for (const auto& sum : sums) {
    float lanes[16];
    _mm512_storeu_ps(lanes, sum);
    float_sink = float_sink + lanes[0];
  }
}

__attribute__((target("avx2,fma"))) void multiply_float32() {
  __m256 sums[accumulators];
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  const __m256 x = _mm256_set1_ps(1e-6F);
  const __m256 y = _mm256_set1_ps(1e-5F);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm256_fmadd_ps(x, y, sum);
  }
#pragma GCC unroll 12
  for (const auto& sum : sums) float_sink = float_sink + _mm256_cvtss_f32(sum);
}

double gflops(std::int32_t threads, double operations_per_instruction, void (*loop)()) {
  const double seconds = best_parallel_seconds(threads, 3, [loop](std::int32_t) { loop(); });
  return 1e-9 * operations_per_instruction * accumulators * static_cast<double>(rounds) * threads / seconds;
}

constexpr std::int64_t read_bytes = 256LL << 20;  // per thread: far beyond any cache

__attribute__((target("avx512f"))) void read_wide(const std::byte* data) {
  __m512i sums[8];
#pragma GCC unroll 8
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (std::int64_t at = 0; at < read_bytes; at += 8 * 64) {
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < 8; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(data + at + i * 64 + 4096), _MM_HINT_T0);
      sums[i] = _mm512_add_epi64(sums[i], _mm512_load_si512(data + at + i * 64));
    }
  }
#pragma GCC unroll 8
  for (const auto& sum : sums) {
    std::uint64_t lanes[8];
    _mm512_storeu_si512(lanes, sum);
    integer_sink += lanes[0];
  }
}

void read_plain(const std::byte* data) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(data);
  std::uint64_t sums[8] = {};
  for (std::int64_t i = 0; i < read_bytes / 8; i += 8) {
    for (std::int64_t j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  for (const std::uint64_t sum : sums) integer_sink += sum;
}

double read_bandwidth(std::int32_t threads) {
  std::vector<engine::HostMemory> memory;
  for (std::int32_t i = 0; i < threads; ++i) memory.push_back(engine::HostMemory::take(read_bytes + 8192, "read").value());
  const bool wide = __builtin_cpu_supports("avx512f") != 0;
  const double seconds = best_parallel_seconds(threads, 5, [&](std::int32_t thread) {
    const auto* const data = static_cast<const std::byte*>(memory[static_cast<std::size_t>(thread)].data());
    wide ? read_wide(data) : read_plain(data);
  });
  return 1e-9 * static_cast<double>(read_bytes) * threads / seconds;
}

}  // namespace

double best_parallel_seconds(std::int32_t threads, int repeats, const std::function<void(std::int32_t)>& body) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    {
      std::vector<std::jthread> others;
      for (std::int32_t thread = 1; thread < threads; ++thread) others.emplace_back([&body, thread] { body(thread); });
      body(0);
    }
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

MachinePeaks measure_peaks(std::int32_t threads) {
  MachinePeaks peaks;
  if (__builtin_cpu_supports("avx512bf16")) peaks.bfloat16_gflops = gflops(threads, 64, multiply_bfloat16);
  if (__builtin_cpu_supports("avx512f")) {
    peaks.float32_gflops = gflops(threads, 32, multiply_float32_wide);
  } else if (__builtin_cpu_supports("avx2")) {
    peaks.float32_gflops = gflops(threads, 16, multiply_float32);
  }
  peaks.read_gigabytes_per_second = read_bandwidth(threads);
  return peaks;
}

}  // namespace rubato::bench
