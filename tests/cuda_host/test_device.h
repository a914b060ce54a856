// SPDX-License-Identifier: Apache-2.0
// What the emulation's tests share: device arrays that go with their scope, copies of whole vectors, and checks of faults.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda_host/control.h"
#include "tests/cuda_host/sanitizers.h"
#include "tests/cuda_host/test_kernels.h"

#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess) << cudaGetErrorName(cudaGetLastError())
#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorName(cudaGetLastError())

namespace cuda_host {

template <class T>
class Array {
 public:
  explicit Array(std::size_t count) : count_(count) { EXPECT_CUDA(cudaMalloc(&data_, count * sizeof(T))); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    EXPECT_CUDA(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  [[nodiscard]] T* get() const { return data_; }
  /// After everything that was queued.
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> values(count_);
    EXPECT_CUDA(cudaDeviceSynchronize());
    EXPECT_CUDA(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

template <class T>
class Pinned {
 public:
  explicit Pinned(std::size_t count) { EXPECT_CUDA(cudaHostAlloc(&data_, count * sizeof(T), cudaHostAllocDefault)); }
  ~Pinned() { cudaFreeHost(data_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  [[nodiscard]] T* get() const { return data_; }
  T& operator[](std::size_t index) const { return data_[index]; }

 private:
  T* data_ = nullptr;
};

/// A fresh emulation, and at the end no fault that the test did not take.
class Emulation : public ::testing::Test {
 protected:
  Emulation() { reset(); }
  void TearDown() override {
    EXPECT_EQ(fault_text(), "");
    reset();
  }

  [[nodiscard]] static cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }
  [[nodiscard]] static cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    EXPECT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  /// The faults of one kind were found, at least one, and no other; they are taken.
  static void expect_faults(FaultKind kind, const std::string& where_part, const std::string& what_part = "") {
    const std::vector<Fault> found = take_faults();
    EXPECT_FALSE(found.empty()) << "no fault was found";
    for (const Fault& fault : found) {
      EXPECT_EQ(fault.kind, kind) << fault.text();
      EXPECT_NE(fault.where.find(where_part), std::string::npos) << fault.text();
      EXPECT_NE(fault.what.find(what_part), std::string::npos) << fault.text();
    }
  }
};

[[nodiscard]] inline std::vector<float> ascending(std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i + 1);
  return values;
}

}  // namespace cuda_host
