// SPDX-License-Identifier: Apache-2.0
// Probe and accept. An algorithm may serve a range of row counts when the rows it computes, at the ends of the range, first and
// last in the batch, have the bits that the reference gives the same rows in batches of sixteen. Data: random at many scales,
// with terms that cancel, so that another order of the sum shows.
#include <algorithm>
#include <cmath>
#include <random>

#include "engine/cuda/matmul.h"
#include "engine/models/tensor_elements.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int32_t edge_rows = 16;             // rows compared at each end of a batch: the reference's batch
constexpr std::int64_t outputs_compared = 100000;  // at each number of rows, where the probe has as many
constexpr std::int32_t references_max = 4;         // candidates tried as the reference before our own kernel is taken
constexpr std::int64_t pool_elements = 1 << 20;    // distinct probe values; repeated over the rows at changing offsets
constexpr std::int64_t pool_step = 524287;         // prime, so that rows repeat late

/// x on the device, and results on both sides.
class Probe {
 public:
  static Result<Probe> make(const Stream& stream, DataType dtype, const MatmulShape& shape, std::int32_t rows) {
    Probe probe(stream, dtype, shape, std::max(rows, edge_rows));
    Result<DeviceMemory> x = DeviceMemory::make(probe.rows_ * probe.x_row_bytes());
    if (!x) return Unexpected(std::move(x).error());
    Result<DeviceMemory> out = DeviceMemory::make(probe.rows_ * probe.out_row_bytes());
    if (!out) return Unexpected(std::move(out).error());
    Result<PinnedMemory> host =
        PinnedMemory::make(std::max((pool_elements + pool_step) * element_size(dtype), edge_rows * probe.out_row_bytes()));
    if (!host) return Unexpected(std::move(host).error());
    probe.x_ = std::move(*x);
    probe.out_ = std::move(*out);
    probe.host_ = std::move(*host);
    if (auto filled = probe.fill(); !filled) return Unexpected(std::move(filled).error());
    return probe;
  }

  /// Whether the rows at both ends of batches of count have the reference's bits, over enough different rows that rounding to 16
  /// bits cannot hide another order.
  [[nodiscard]] bool equal(MatmulCall& call, const cublasLtMatmulAlgo_t& reference, const cublasLtMatmulAlgo_t& candidate,
                           std::int32_t count) {
    const std::int64_t compared = std::int64_t{std::min(count, 2 * edge_rows)} * shape_.outputs;
    const std::int32_t room = rows_ - std::max(count, edge_rows);
    const auto batches =
        static_cast<std::int32_t>(std::clamp<std::int64_t>((outputs_compared + compared - 1) / compared, 1, room + 1));
    for (std::int32_t batch = 0; batch < batches; ++batch) {
      const auto first = static_cast<std::int32_t>(std::int64_t{room} * batch / std::max(1, batches - 1));
      if (!equal_rows(call, reference, candidate, first, count)) return false;
    }
    return true;
  }

 private:
  Probe(const Stream& stream, DataType dtype, const MatmulShape& shape, std::int32_t rows)
      : stream_(&stream), dtype_(dtype), shape_(shape), rows_(rows) {}
  /// The reference always computes batches of edge_rows: in batches of the candidate's size it might share the candidate's fault.
  [[nodiscard]] bool equal_rows(MatmulCall& call, const cublasLtMatmulAlgo_t& reference, const cublasLtMatmulAlgo_t& candidate,
                                std::int32_t first, std::int32_t count) {
    const std::int32_t ends = std::min(count, edge_rows);
    if (!run(call, candidate, first, count)) return false;
    const auto head = bring(0, ends);
    const auto tail = bring(count - ends, ends);
    const std::int32_t last_batch = std::max(0, count - edge_rows);
    return head && tail && run(call, reference, first, edge_rows) && bring(0, ends) == head &&
           run(call, reference, first + last_batch, edge_rows) && bring(count - ends - last_batch, ends) == tail;
  }
  /// Rows [first, first + count) of x through the algorithm, to the first rows of out. False: the library refuses it.
  [[nodiscard]] bool run(MatmulCall& call, const cublasLtMatmulAlgo_t& algorithm, std::int32_t first, std::int32_t count) {
    return call.queue_with(
        stream_->get(), algorithm,
        {.data = x_.data() + first * x_row_bytes(), .count = count, .columns = shape_.inputs, .stride = shape_.inputs},
        {.data = out_.data(), .count = count, .columns = shape_.outputs, .stride = shape_.outputs});
  }
  /// Rows of out, on the host.
  [[nodiscard]] std::optional<std::vector<std::byte>> bring(std::int32_t first, std::int32_t count) {
    const auto bytes = static_cast<std::size_t>(count * out_row_bytes());
    const cudaError_t copied =
        cudaMemcpyAsync(host_.data(), out_.data() + first * out_row_bytes(), bytes, cudaMemcpyDeviceToHost, stream_->get());
    if (copied != cudaSuccess || !stream_->wait()) return std::nullopt;
    return std::vector<std::byte>(host_.data(), host_.data() + bytes);
  }
  [[nodiscard]] std::int64_t x_row_bytes() const { return shape_.inputs * element_size(dtype_); }
  [[nodiscard]] std::int64_t out_row_bytes() const { return shape_.outputs * element_size(shape_.out_dtype); }

  Result<void> fill() {
    std::mt19937_64 generator(1);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-6, 6);
    const std::int64_t size = element_size(dtype_);
    float last = 0;
    for (std::int64_t i = 0; i < pool_elements; ++i) {
      // Every other pair nearly cancels at one scale: what is left depends on when the two meet in the sum.
      last = i % 4 == 1 ? -last : std::ldexp(normal(generator), exponent(generator));
      narrow_element(dtype_, last, host_.data() + i * size);
    }
    std::memcpy(host_.data() + pool_elements * size, host_.data(), static_cast<std::size_t>(pool_step * size));
    const std::int64_t total = std::int64_t{rows_} * shape_.inputs;
    std::int64_t offset = 0;
    for (std::int64_t at = 0; at < total; at += pool_elements - pool_step) {
      const std::int64_t count = std::min(pool_elements - pool_step, total - at);
      const auto copied = check(cudaMemcpyAsync(x_.data() + at * size, host_.data() + offset * size,
                                                static_cast<std::size_t>(count * size), cudaMemcpyHostToDevice, stream_->get()),
                                "cudaMemcpyAsync");
      if (!copied) return copied;
      offset = (offset + 104729) % pool_step;
    }
    return stream_->wait();
  }

  const Stream* stream_;
  DataType dtype_;
  MatmulShape shape_;
  std::int32_t rows_;
  DeviceMemory x_;
  DeviceMemory out_;
  PinnedMemory host_;
};

/// The ends of each range are what is probed: an algorithm that changes its order with the number of rows changes it at a
/// boundary.
std::vector<std::int32_t> probed_rows(std::int32_t below, std::int32_t last) {
  std::vector<std::int32_t> rows{below + 1, last};
  if (last - below > 2) rows.push_back(last - 1);
  return rows;
}

}  // namespace

Result<MatmulReport> choose_algorithms(const MatmulLibrary& library, const Stream& stream, std::int32_t max_rows,
                                       MatmulPlan& plan) {
  MatmulReport report{.shape = plan.shape};
  plan.ranges = row_ranges(max_rows);
  plan.algorithms.clear();
  Result<MatmulCall> call = MatmulCall::make(library, plan);
  if (!call) return Unexpected(std::move(call).error());
  Result<Probe> probe = Probe::make(stream, library.dtype(), plan.shape, max_rows);
  if (!probe) return Unexpected(std::move(probe).error());

  // A reference that is good for many rows is the likeliest to be matched by the others, or to serve where none matches.
  std::vector<cublasLtMatmulAlgo_t> references = call->candidates(max_rows);
  references.resize(std::min<std::size_t>(references.size(), references_max));
  for (const cublasLtMatmulAlgo_t& reference : references) {
    std::vector<cublasLtMatmulAlgo_t> chosen;
    std::int32_t below = 0;
    for (const std::int32_t last : plan.ranges) {
      std::vector<cublasLtMatmulAlgo_t> candidates = call->candidates(last);
      candidates.push_back(reference);
      const std::vector<std::int32_t> rows = probed_rows(below, last);
      const auto accepted = std::find_if(candidates.begin(), candidates.end(), [&](const cublasLtMatmulAlgo_t& candidate) {
        ++report.candidates;
        const bool equal = std::all_of(rows.begin(), rows.end(),
                                       [&](std::int32_t count) { return probe->equal(*call, reference, candidate, count); });
        report.equal += equal ? 1 : 0;
        return equal;
      });
      if (accepted == candidates.end()) break;
      chosen.push_back(*accepted);
      below = last;
    }
    if (chosen.size() == plan.ranges.size()) {
      plan.algorithms = std::move(chosen);
      return report;
    }
  }
  report.own_kernel = true;
  return report;
}

}  // namespace rubato::engine::cuda
