// SPDX-License-Identifier: Apache-2.0
// What tests of CUDA kernels share: a device with one stream, vectors and row-major matrices in its memory, a step's metadata
// built from rows, seeded data. Needs no other backend, so that it builds on a bare GPU machine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/batch.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/runtime.h"
#include "engine/model/number_formats.h"
#include "engine/model/tensors.h"
#include "manifests/check.h"
#include "manifests/settings.h"

#ifdef RUBATO_CUDA_EMULATED
#include "tests/cuda_host/control.h"
#endif

namespace rubato::engine::cuda {

using Values = std::vector<float>;

/// Skips, visibly, where there is no device. Work is queued on stream() in order. On the emulated device each test begins anew,
/// with an order of threads and blocks that is its own, and fails when the emulation found a fault.
class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    begin_order(std::hash<std::string>()(testing::UnitTest::GetInstance()->current_test_info()->name()));
    const Result<DeviceFacts> device = open_device(0);
    if (!device) GTEST_SKIP() << device.error().message;
    facts_ = *device;
    stream_.emplace(Stream::make().value());
  }
  void TearDown() override {
    if (stream_) wait();
    expect_no_faults();
  }
  /// Runs body with threads and blocks in `count` different orders; on a real device, as often.
  template <class Body>
  void in_any_order(std::uint64_t count, Body&& body) const {
    for (std::uint64_t seed = 1; seed <= count; ++seed) {
      SCOPED_TRACE("order " + std::to_string(seed));
      set_order(seed);
      body();
    }
  }
  [[nodiscard]] const Stream& stream() const { return *stream_; }
  [[nodiscard]] cudaStream_t queue() const { return stream_->get(); }
  [[nodiscard]] const DeviceFacts& facts() const { return facts_; }
  /// Until all queued work is done; fails the test when any of it failed.
  void wait() const {
    const Result<void> done = stream_->wait();
    ASSERT_TRUE(done.has_value()) << done.error().message;
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  }

 private:
#ifdef RUBATO_CUDA_EMULATED
  static void begin_order(std::uint64_t seed) {
    cuda_host::reset({.seed = seed});
  }
  static void set_order(std::uint64_t seed) {
    cuda_host::set_seed(seed);
  }
  static void expect_no_faults() {
    EXPECT_EQ(cuda_host::fault_text(), "");
  }
#else
  static void begin_order(std::uint64_t /*seed*/) {}
  static void set_order(std::uint64_t /*seed*/) {}
  static void expect_no_faults() {}
#endif

  DeviceFacts facts_;
  std::optional<Stream> stream_;
};

/// One value of each element type that the backend computes in, for INSTANTIATE_TEST_SUITE_P.
inline std::vector<DataType> element_types() {
  return {DataType::Float32, DataType::BFloat16, DataType::Float16};
}

inline std::string element_name(DataType dtype) {
  return dtype == DataType::Float32 ? "Float32" : dtype == DataType::BFloat16 ? "BFloat16" : "Float16";
}

/// Relative rounding error of one element.
inline float element_epsilon(DataType dtype) {
  return dtype == DataType::Float32 ? 0x1p-24F : dtype == DataType::BFloat16 ? 0x1p-8F : 0x1p-11F;
}

inline std::vector<std::byte> encode(DataType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(element_size(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DataType::Float32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      const std::uint16_t bits = dtype == DataType::BFloat16 ? float_to_bfloat16(values[i]) : float_to_float16(values[i]);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}

inline Values decode(DataType dtype, std::span<const std::byte> bytes) {
  Values values(bytes.size() / static_cast<std::size_t>(element_size(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DataType::Float32) {
      std::memcpy(&values[i], &bytes[i * 4], 4);
    } else {
      std::uint16_t bits = 0;
      std::memcpy(&bits, &bytes[i * 2], 2);
      values[i] = dtype == DataType::BFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
    }
  }
  return values;
}

/// What values become when they are stored as dtype.
inline Values rounded(DataType dtype, const Values& values) {
  return decode(dtype, encode(dtype, values));
}

/// Normal values, already rounded to dtype, so that device and expectation start from equal inputs.
inline Values draw(DataType dtype, std::int64_t count, std::uint64_t seed, float scale = 1.0F) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  Values values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return rounded(dtype, values);
}

/// Largest |a - b| over largest |b|; infinite when one is NaN or the sizes differ.
inline float relative_error(const Values& a, const Values& b) {
  if (a.size() != b.size()) return INFINITY;
  float difference = 0;
  float scale = 1e-6F;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (std::isnan(a[i]) || std::isnan(b[i])) return INFINITY;
    difference = std::max(difference, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
  }
  return difference / scale;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

/// Row `row` of values that have `columns` to a row.
inline std::span<const float> row_of(const Values& values, std::int64_t row, std::int64_t columns) {
  return std::span(values).subspan(static_cast<std::size_t>(row * columns), static_cast<std::size_t>(columns));
}

/// Copies through page-locked memory and waits; fails the test when the copy or what was queued before it failed.
inline void copy_and_wait(const Stream& stream, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const PinnedMemory pinned = PinnedMemory::make(static_cast<std::int64_t>(bytes)).value();
  const bool up = kind == cudaMemcpyHostToDevice;
  if (up) std::memcpy(pinned.data(), from, bytes);
  const Result<void> copied =
      check(cudaMemcpyAsync(up ? to : pinned.data(), up ? pinned.data() : from, bytes, kind, stream.get()), "cudaMemcpyAsync");
  const Result<void> done = stream.wait();
  ASSERT_TRUE(copied.has_value()) << copied.error().message;
  ASSERT_TRUE(done.has_value()) << done.error().message;
  if (!up) std::memcpy(to, pinned.data(), bytes);
}

/// An array in device memory, exactly as long as its values.
template <class Value>
class DeviceVector {
 public:
  DeviceVector() = default;
  DeviceVector(const Stream& stream, std::span<const Value> values)
      : count_(values.size()),
        memory_(DeviceMemory::make(static_cast<std::int64_t>(std::max<std::size_t>(1, values.size_bytes()))).value()) {
    if (!values.empty()) copy_and_wait(stream, memory_.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice);
  }
  DeviceVector(const Stream& stream, const std::vector<Value>& values) : DeviceVector(stream, std::span<const Value>(values)) {}

  [[nodiscard]] Value* data() const { return reinterpret_cast<Value*>(memory_.data()); }
  [[nodiscard]] std::vector<Value> read(const Stream& stream) const {
    std::vector<Value> values(count_);
    if (count_ > 0) copy_and_wait(stream, values.data(), memory_.data(), count_ * sizeof(Value), cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  std::size_t count_ = 0;
  DeviceMemory memory_;
};

/// Where a matrix lies in its allocation.
struct RowLayout {
  std::int64_t gap = 0;     // elements between rows, which nobody may read or write
  std::int64_t offset = 0;  // elements before the first row: takes away its alignment
};

/// A matrix in device memory. Its gaps, and all of it where no values are given, hold NaN; read() fails the test when a gap
/// changed.
class DeviceRows {
 public:
  DeviceRows(const Stream& stream, DataType dtype, std::int32_t rows, std::int32_t columns, RowLayout layout = {})
      : DeviceRows(stream, dtype, rows, columns, Values(), layout) {}
  DeviceRows(const Stream& stream, DataType dtype, std::int32_t rows, std::int32_t columns, const Values& values,
             RowLayout layout = {})
      : dtype_(dtype), rows_(rows), columns_(columns), layout_(layout) {
    std::vector<std::byte> bytes(static_cast<std::size_t>((layout.offset + rows * stride()) * element_size(dtype)), not_a_number);
    if (!values.empty()) {
      CHECK(static_cast<std::int64_t>(values.size()) == static_cast<std::int64_t>(rows) * columns);
      for (std::int32_t row = 0; row < rows; ++row) {
        const std::vector<std::byte> encoded = encode(dtype, row_of(values, row, columns));
        std::copy(encoded.begin(), encoded.end(), bytes.begin() + byte_of(row));
      }
    }
    bytes_ = DeviceVector<std::byte>(stream, bytes);
  }

  template <class Pointer>
  [[nodiscard]] Rows<Pointer> view() const {
    return {
        .data = reinterpret_cast<Pointer>(bytes_.data() + byte_of(0)), .count = rows_, .columns = columns_, .stride = stride()};
  }
  [[nodiscard]] Accumulators accumulators() const {
    CHECK(dtype_ == DataType::Float32);
    return view<float*>();
  }
  [[nodiscard]] Activations activations() const { return view<void*>(); }
  [[nodiscard]] void* data() const { return view<void*>().data; }

  [[nodiscard]] Values read(const Stream& stream) const {
    const std::vector<std::byte> bytes = bytes_.read(stream);
    Values values;
    bool gaps_kept = std::all_of(bytes.begin(), bytes.begin() + byte_of(0), [](std::byte b) { return b == not_a_number; });
    for (std::int32_t row = 0; row < rows_; ++row) {
      const auto begin = bytes.begin() + byte_of(row);
      const auto end = begin + columns_ * element_size(dtype_);
      const Values of_row = decode(dtype_, std::span<const std::byte>(begin, end));
      values.insert(values.end(), of_row.begin(), of_row.end());
      gaps_kept = gaps_kept && std::all_of(end, bytes.begin() + byte_of(row + 1), [](std::byte b) { return b == not_a_number; });
    }
    EXPECT_TRUE(gaps_kept) << "something was written between rows";
    return values;
  }

 private:
  static constexpr std::byte not_a_number{0xFF};  // all bits set: NaN in each of the types
  [[nodiscard]] std::int64_t stride() const { return columns_ + layout_.gap; }
  [[nodiscard]] std::int64_t byte_of(std::int64_t row) const { return (layout_.offset + row * stride()) * element_size(dtype_); }

  DataType dtype_;
  std::int32_t rows_;
  std::int32_t columns_;
  RowLayout layout_;
  DeviceVector<std::byte> bytes_;
};

/// One sequence's part of a step.
struct BatchRow {
  std::vector<std::int32_t> token_ids;  // one per token
  std::int32_t position = 0;            // of the first
  std::vector<std::int32_t> blocks;     // covers position + token_ids.size() tokens
};

/// The room a step runs in.
struct BatchRoom {
  std::int32_t tokens = 0;       // the bucket; what the rows do not fill is padding
  std::int32_t rows = 0;         // capacity, for selections too
  std::int32_t block_count = 0;  // without the trash block, which comes after them
  std::int32_t table_slack = 0;  // entries of `blocks` beyond the tables
};

/// The metadata of a step in device memory, without recurrent states, each array as long as the room says. Selects the last token
/// of every row unless told otherwise.
class DeviceBatch {
 public:
  DeviceBatch(const Stream& stream, const std::vector<BatchRow>& rows, const BatchRoom& room)
      : DeviceBatch(stream, rows, room, last_tokens(rows)) {}

  DeviceBatch(const Stream& stream, const std::vector<BatchRow>& rows, const BatchRoom& room,
              std::vector<std::int32_t> selected) {
    std::vector<std::int32_t> token_ids, positions, slots, token_first, row_first, row_position, row_blocks, blocks;
    for (const BatchRow& row : rows) {
      row_first.push_back(static_cast<std::int32_t>(token_ids.size()));
      row_position.push_back(row.position);
      row_blocks.push_back(static_cast<std::int32_t>(blocks.size()));
      blocks.insert(blocks.end(), row.blocks.begin(), row.blocks.end());
      for (std::size_t i = 0; i < row.token_ids.size(); ++i) {
        const std::int32_t position = row.position + static_cast<std::int32_t>(i);
        token_ids.push_back(row.token_ids[i]);
        positions.push_back(position);
        token_first.push_back(row_first.back());
        const std::int32_t block = row.blocks.at(static_cast<std::size_t>(position / kv_block_tokens));
        slots.push_back(block * kv_block_tokens + position % kv_block_tokens);
      }
    }
    row_first.push_back(static_cast<std::int32_t>(token_ids.size()));
    row_blocks.push_back(static_cast<std::int32_t>(blocks.size()));
    const BatchCounts counts{.tokens = row_first.back(),
                             .rows = static_cast<std::int32_t>(rows.size()),
                             .selected = static_cast<std::int32_t>(selected.size())};
    CHECK(counts.tokens <= room.tokens && counts.rows <= room.rows && counts.selected <= room.rows);
    counts_ = DeviceVector<BatchCounts>(stream, std::vector{counts});
    token_ids_ = padded(stream, std::move(token_ids), room.tokens, 0);
    positions_ = padded(stream, std::move(positions), room.tokens, 0);
    slots_ = padded(stream, std::move(slots), room.tokens, room.block_count * kv_block_tokens);
    token_first_ = padded(stream, std::move(token_first), room.tokens, 0);
    row_first_ = padded(stream, std::move(row_first), room.rows + 1, 0);
    row_position_ = padded(stream, std::move(row_position), room.rows, 0);
    row_blocks_ = padded(stream, std::move(row_blocks), room.rows + 1, 0);
    const auto block_entries = static_cast<std::int32_t>(blocks.size()) + room.table_slack;
    blocks_ = padded(stream, std::move(blocks), block_entries, 0);
    selected_ = padded(stream, std::move(selected), room.rows, 0);
  }

  [[nodiscard]] Batch view() const {
    return {.counts = counts_.data(),
            .token_ids = token_ids_.data(),
            .positions = positions_.data(),
            .slots = slots_.data(),
            .row_first = row_first_.data(),
            .row_position = row_position_.data(),
            .token_first = token_first_.data(),
            .row_blocks = row_blocks_.data(),
            .blocks = blocks_.data(),
            .selected = selected_.data()};
  }

 private:
  static std::vector<std::int32_t> last_tokens(const std::vector<BatchRow>& rows) {
    std::vector<std::int32_t> selected;
    std::int32_t tokens = 0;
    for (const BatchRow& row : rows) selected.push_back((tokens += static_cast<std::int32_t>(row.token_ids.size())) - 1);
    return selected;
  }
  static DeviceVector<std::int32_t> padded(const Stream& stream, std::vector<std::int32_t> values, std::int32_t count,
                                           std::int32_t padding) {
    values.resize(static_cast<std::size_t>(count), padding);
    return DeviceVector<std::int32_t>(stream, values);
  }

  DeviceVector<BatchCounts> counts_;
  DeviceVector<std::int32_t> token_ids_, positions_, slots_, token_first_, row_first_, row_position_, row_blocks_, blocks_,
      selected_;
};

}  // namespace rubato::engine::cuda
