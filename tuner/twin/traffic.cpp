// SPDX-License-Identifier: Apache-2.0
#include "tuner/twin/traffic.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "manifests/check.h"
#include "tuner/twin/counter_draw.h"

namespace rubato::tuner {
namespace {

// What is guessed of an output that is longer than any that has ended: at least so much in all, as routing does for decodes.
constexpr std::int32_t foreseen_output_tokens = 128;
constexpr std::int32_t most_tokens = std::numeric_limits<std::int32_t>::max();

/// How long outputs are, where some are still running: the product-limit estimate (Kaplan and Meier 1958). Each running one hands
/// its weight on, in equal parts, to all that are longer than it is so far.
class OutputLengths {
 public:
  struct Output {
    std::int32_t tokens = 0;
    bool ended = false;
  };

  explicit OutputLengths(std::vector<Output> outputs) {
    // One that has got as many tokens as another had in all is longer than that.
    std::sort(outputs.begin(), outputs.end(), [](const Output& left, const Output& right) {
      return left.tokens != right.tokens ? left.tokens < right.tokens : left.ended && !right.ended;
    });
    double weight = 1;
    double sum = 0;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].ended) {
        sum += weight;
        tokens_.push_back(outputs[i].tokens);
        sums_.push_back(sum);
      } else if (i + 1 < outputs.size()) {
        weight += weight / static_cast<double>(outputs.size() - i - 1);
      }
    }
  }

  /// One longer than this, drawn by weight.
  [[nodiscard]] std::int32_t longer_than(std::int32_t tokens, double draw) const {
    const auto first = static_cast<std::size_t>(std::upper_bound(tokens_.begin(), tokens_.end(), tokens) - tokens_.begin());
    if (first == tokens_.size()) return std::max(foreseen_output_tokens, tokens + std::min(tokens, most_tokens - tokens));
    const double below = first == 0 ? 0 : sums_[first - 1];
    const double wanted = below + draw * (sums_.back() - below);
    const auto found = std::upper_bound(sums_.begin() + static_cast<std::ptrdiff_t>(first), sums_.end() - 1, wanted);
    return tokens_[static_cast<std::size_t>(found - sums_.begin())];
  }

 private:
  std::vector<std::int32_t> tokens_;  // of those that ended, ascending
  std::vector<double> sums_;          // of their weights
};

// Where a span of a future comes from.
constexpr Duration shortest_span = std::chrono::milliseconds(10);

Duration span_of(const TrafficPhase& phase) {
  return std::max(phase.end - phase.begin, shortest_span);
}

/// Adds what came in [from, to) of a phase, moved by so much.
void append_span(const TrafficPhase& phase, TimePoint from, TimePoint to, Duration moved, std::vector<TrafficRequest>& future) {
  const auto earlier = [](const TrafficRequest& request, TimePoint time) { return request.arrival < time; };
  auto next = std::lower_bound(phase.requests.begin(), phase.requests.end(), from, earlier);
  for (; next != phase.requests.end() && next->arrival < std::min(to, phase.end); ++next) {
    future.push_back(*next);
    future.back().arrival += moved;
  }
}

/// A block of a phase from this place on, which goes on at the phase's begin where the phase ends: so every part of the phase is
/// drawn equally often.
void append_block(const TrafficPhase& phase, Duration offset, Duration length, TimePoint to,
                  std::vector<TrafficRequest>& future) {
  const Duration span = span_of(phase);
  const TimePoint start = phase.begin + offset;
  const Duration first = std::min(length, span - offset);
  append_span(phase, start, start + first, to - start, future);
  if (first < length) append_span(phase, phase.begin, phase.begin + (length - first), to + first - phase.begin, future);
}

}  // namespace

TrafficLog::TrafficLog(std::size_t count_max) : count_max_(std::max<std::size_t>(count_max, 1)) {}

void TrafficLog::arrived(SequenceId id, const TrafficRequest& request) {
  if (requests_.size() == count_max_) {
    const auto oldest = running_.find(requests_.front().id);
    if (oldest != running_.end() && oldest->second == first_number_) running_.erase(oldest);
    requests_.pop_front();
    ++first_number_;
  }
  if (!request.ended) running_[id] = first_number_ + requests_.size();
  requests_.push_back({.id = id, .request = request});
}

void TrafficLog::started(SequenceId id, std::int32_t cached_tokens) {
  const auto found = running_.find(id);
  if (found == running_.end()) return;
  Entry& entry = requests_[static_cast<std::size_t>(found->second - first_number_)];
  if (std::exchange(entry.started, true)) return;
  entry.request.prompt_tokens = std::max(entry.request.prompt_tokens - std::max(cached_tokens, 0), 1);
}

void TrafficLog::ended(SequenceId id, std::int32_t output_tokens) {
  const auto found = running_.find(id);
  if (found == running_.end()) return;
  TrafficRequest& request = requests_[static_cast<std::size_t>(found->second - first_number_)].request;
  request.output_tokens = std::max(output_tokens, 1);
  request.ended = true;
  running_.erase(found);
}

// Nobody counts a running request's tokens for the log. But all decodes take the same steps, so one that has started has got
// about as far as those that came after it and have ended already.
std::vector<std::int32_t> TrafficLog::outputs_so_far() const {
  std::vector<std::int32_t> outputs(requests_.size());
  std::int32_t longest_ended = 0;
  for (std::size_t i = requests_.size(); i-- > 0;) {
    const Entry& entry = requests_[i];
    outputs[i] = entry.request.output_tokens;
    if (entry.request.ended) {
      longest_ended = std::max(longest_ended, entry.request.output_tokens);
    } else if (entry.started) {
      outputs[i] = std::max(outputs[i], std::min(longest_ended, entry.request.max_new_tokens - 1));
    }
  }
  return outputs;
}

std::vector<TrafficRequest> TrafficLog::between(TimePoint from, TimePoint to) const {
  const std::vector<std::int32_t> so_far = outputs_so_far();
  std::vector<OutputLengths::Output> outputs;
  outputs.reserve(requests_.size());
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const TrafficRequest& request = requests_[i].request;
    outputs.push_back({.tokens = so_far[i], .ended = request.ended});
  }
  const OutputLengths lengths(std::move(outputs));
  std::vector<TrafficRequest> found;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    TrafficRequest request = requests_[i].request;
    if (request.arrival < from || request.arrival >= to) continue;
    if (!request.ended) {
      const double draw = counter_draw(0, 0, requests_[i].id.value);
      request.output_tokens = std::clamp(lengths.longer_than(so_far[i], draw), 1, std::max(request.max_new_tokens, 1));
    }
    found.push_back(request);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const TrafficRequest& left, const TrafficRequest& right) { return left.arrival < right.arrival; });
  return found;
}

std::vector<std::vector<TrafficRequest>> bootstrap_futures(std::span<const TrafficPhase> phases, const FutureOptions& options) {
  CHECK(options.length > Duration::zero() && options.block > Duration::zero() && options.count >= 1,
        "length=", to_seconds(options.length), " s block=", to_seconds(options.block), " s count=", options.count);
  double weights = 0;
  bool any = false;
  for (const TrafficPhase& phase : phases) {
    CHECK(phase.weight > 0 && std::isfinite(phase.weight) && phase.end > phase.begin, "weight=", phase.weight);
    weights += phase.weight;
    any = any || !phase.requests.empty();
  }
  if (!any) return {};
  const auto phase_at = [&](double share) -> const TrafficPhase& {
    double left = share * weights;
    for (const TrafficPhase& phase : phases) {
      left -= phase.weight;
      if (left < 0) return phase;
    }
    return phases.back();
  };
  std::vector<std::vector<TrafficRequest>> futures(static_cast<std::size_t>(options.count));
  for (std::size_t i = 0; i < futures.size(); ++i) {
    // All phases once, each as long as its weight; where that begins is spread evenly over the futures.
    const double turn = (static_cast<double>(i) + counter_draw(options.seed, i, 0)) / static_cast<double>(options.count);
    std::uint64_t draws = 0;
    for (Duration done{}; done < options.length;) {
      const double share = turn + to_seconds(done) / to_seconds(options.length);
      const TrafficPhase& phase = phase_at(share - std::floor(share));
      const Duration span = span_of(phase);
      const Duration length = std::min({options.block, span, options.length - done});
      const auto offset =
          Duration(static_cast<Duration::rep>(counter_draw(options.seed, i, ++draws) * static_cast<double>(span.count())));
      append_block(phase, offset, length, TimePoint{} + done, futures[i]);
      done += length;
    }
  }
  return futures;
}

}  // namespace rubato::tuner
