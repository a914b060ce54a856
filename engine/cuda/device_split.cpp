// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/device_split.h"

#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace rubato::engine::cuda {
namespace {

constexpr unsigned int driver_interface = 13000;  // whose structures cuda.h declares here

Unexpected no_split(const std::string& why) {
  return unexpected(ErrorCode::NotFound, "no green contexts: " + why);
}

template <class Function>
bool find_entry(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &found, driver_interface, cudaEnableDefault, &result);
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());  // a driver without it is no broken device
  function = reinterpret_cast<Function>(found);
  return code == cudaSuccess && result == cudaDriverEntryPointSuccess && function != nullptr;
}

std::int32_t count_of(const CUdevResource& resource) {
  return resource.type == CU_DEV_RESOURCE_TYPE_SM ? static_cast<std::int32_t>(resource.sm.smCount) : 0;
}

}  // namespace

struct DeviceSplit::Driver {
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuGetErrorName) error_name = nullptr;
  decltype(&cuDeviceGetDevResource) device_resource = nullptr;
  decltype(&cuDevSmResourceSplitByCount) split = nullptr;
  decltype(&cuDevResourceGenerateDesc) describe = nullptr;
  decltype(&cuGreenCtxCreate) create = nullptr;
  decltype(&cuGreenCtxDestroy) destroy = nullptr;
  decltype(&cuGreenCtxStreamCreate) make_stream = nullptr;

  [[nodiscard]] bool load() {
    return find_entry("cuDeviceGet", device_get) && find_entry("cuGetErrorName", error_name) &&
           find_entry("cuDeviceGetDevResource", device_resource) && find_entry("cuDevSmResourceSplitByCount", split) &&
           find_entry("cuDevResourceGenerateDesc", describe) && find_entry("cuGreenCtxCreate", create) &&
           find_entry("cuGreenCtxDestroy", destroy) && find_entry("cuGreenCtxStreamCreate", make_stream);
  }
  [[nodiscard]] std::string text(const char* call, CUresult code) const {
    const char* name = nullptr;
    if (error_name(code, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
    return std::string(call) + ": " + name;
  }
};

struct DeviceSplit::Part {
  Part(const Driver& of, CUgreenCtx green, std::int32_t size) : driver(&of), context(green), multiprocessors(size) {}
  Part(Part&& other) noexcept
      : driver(other.driver), context(std::exchange(other.context, nullptr)), multiprocessors(other.multiprocessors) {}
  Part& operator=(Part&& other) noexcept {
    driver = other.driver;
    std::swap(context, other.context);
    multiprocessors = other.multiprocessors;
    return *this;
  }
  ~Part() {
    if (context != nullptr) static_cast<void>(driver->destroy(context));
  }

  /// Owns the groups given, which come from one split.
  [[nodiscard]] static Result<Part> make(const Driver& driver, CUdevice device, std::vector<CUdevResource> groups) {
    CUdevResourceDesc description = nullptr;
    if (const CUresult code = driver.describe(&description, groups.data(), static_cast<unsigned int>(groups.size()));
        code != CUDA_SUCCESS)
      return no_split(driver.text("cuDevResourceGenerateDesc", code));
    CUgreenCtx context = nullptr;
    if (const CUresult code = driver.create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM); code != CUDA_SUCCESS)
      return no_split(driver.text("cuGreenCtxCreate", code));
    std::int32_t size = 0;
    for (const CUdevResource& group : groups) size += count_of(group);
    return Part(driver, context, size);
  }

  const Driver* driver;
  CUgreenCtx context;
  std::int32_t multiprocessors;
};

struct DeviceSplit::Rung {
  Part first;
  Part second;
};

DeviceSplit::DeviceSplit() : driver_(std::make_unique<Driver>()) {}
DeviceSplit::~DeviceSplit() = default;

Result<std::shared_ptr<const DeviceSplit>> DeviceSplit::make(const DeviceFacts& device) {
  std::shared_ptr<DeviceSplit> split(new DeviceSplit);
  if (!split->driver_->load()) return no_split("the driver is older than CUDA 13.0");
  if (Result<void> climbed = split->climb(device); !climbed) return Unexpected(std::move(climbed).error());
  return std::shared_ptr<const DeviceSplit>(std::move(split));
}

Result<void> DeviceSplit::climb(const DeviceFacts& device) {
  const Driver& driver = *driver_;
  // The contexts share the primary one, which is best alive before.
  if (auto set = check(cudaSetDevice(device.index), "cudaSetDevice"); !set) return set;
  CUdevice handle{};
  if (const CUresult code = driver.device_get(&handle, device.index); code != CUDA_SUCCESS)
    return no_split(driver.text("cuDeviceGet", code));
  CUdevResource whole{};
  if (const CUresult code = driver.device_resource(handle, &whole, CU_DEV_RESOURCE_TYPE_SM); code != CUDA_SUCCESS)
    return no_split(driver.text("cuDeviceGetDevResource", code));

  const auto align = std::max(1U, whole.sm.smCoscheduledAlignment);
  const auto least = std::max({static_cast<unsigned int>(granularity), whole.sm.minSmPartitionSize, 1U});
  const unsigned int size = (least + align - 1) / align * align;
  unsigned int count = 0;
  if (const CUresult code =
          size > whole.sm.smCount ? CUDA_ERROR_INVALID_VALUE : driver.split(nullptr, &count, &whole, nullptr, 0, size);
      code != CUDA_SUCCESS || count < 2) {
    return no_split(std::to_string(whole.sm.smCount) + " multiprocessors cannot be split into groups of " + std::to_string(size));
  }
  std::vector<CUdevResource> groups(count);
  CUdevResource rest{};
  if (const CUresult code = driver.split(groups.data(), &count, &whole, &rest, 0, size); code != CUDA_SUCCESS || count < 2)
    return no_split(driver.text("cuDevSmResourceSplitByCount", code));

  for (std::ptrdiff_t given = 1; given < static_cast<std::ptrdiff_t>(count); ++given) {
    Result<Part> first = Part::make(driver, handle, {groups.begin(), groups.begin() + given});
    if (!first) return rungs_.empty() ? Result<void>(Unexpected(std::move(first).error())) : Result<void>();
    std::vector<CUdevResource> others(groups.begin() + given, groups.begin() + static_cast<std::ptrdiff_t>(count));
    if (count_of(rest) > 0) others.push_back(rest);
    Result<Part> second = Part::make(driver, handle, others);
    if (!second && count_of(rest) > 0) {  // what was left over may be refused; then nobody uses it
      others.pop_back();
      second = Part::make(driver, handle, others);
    }
    if (!second) return rungs_.empty() ? Result<void>(Unexpected(std::move(second).error())) : Result<void>();
    rungs_.push_back({.first = std::move(*first), .second = std::move(*second)});
  }
  return {};
}

std::int32_t DeviceSplit::rungs() const {
  return static_cast<std::int32_t>(rungs_.size());
}

const DeviceSplit::Part& DeviceSplit::part(std::int32_t rung, Side side) const {
  const Rung& at = rungs_.at(static_cast<std::size_t>(rung));
  return side == Side::First ? at.first : at.second;
}

std::int32_t DeviceSplit::multiprocessors(std::int32_t rung, Side side) const {
  return part(rung, side).multiprocessors;
}

std::int32_t DeviceSplit::percent(std::int32_t rung, Side side) const {
  const std::int32_t first = multiprocessors(rung, Side::First);
  const std::int32_t whole = first + multiprocessors(rung, Side::Second);
  const std::int32_t percent_first = (200 * first + whole) / (2 * whole);
  return side == Side::First ? percent_first : 100 - percent_first;
}

std::int32_t DeviceSplit::nearest(std::int32_t percent_first) const {
  std::int32_t best = 0;
  for (std::int32_t rung = 1; rung < rungs(); ++rung) {
    const auto away = [&](std::int32_t other) { return std::abs(percent(other, Side::First) - percent_first); };
    if (away(rung) < away(best)) best = rung;
  }
  return best;
}

Result<Stream> DeviceSplit::make_stream(std::int32_t rung, Side side, Stream::Urgency urgency) const {
  Result<int> priority = Stream::priority(urgency);
  if (!priority) return Unexpected(std::move(priority).error());
  CUstream stream = nullptr;
  if (const CUresult code = driver_->make_stream(&stream, part(rung, side).context, CU_STREAM_NON_BLOCKING, *priority);
      code != CUDA_SUCCESS)
    return unexpected(ErrorCode::ResourceExhausted, driver_->text("cuGreenCtxStreamCreate", code));
  return Stream::own(stream);
}

}  // namespace rubato::engine::cuda
