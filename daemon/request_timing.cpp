// SPDX-License-Identifier: Apache-2.0
#include "daemon/request_timing.h"

#include <algorithm>
#include <numeric>

namespace rubato {
namespace {

// Nearest rank: the smallest gap that at least 99 % of the gaps do not exceed. Reorders gaps.
Duration percentile_99(std::vector<Duration>& gaps) {
  if (gaps.empty()) return Duration::zero();
  const std::size_t rank = (gaps.size() * 99 + 99) / 100;  // ceil(0.99 n)
  const auto nth = gaps.begin() + static_cast<std::ptrdiff_t>(rank - 1);
  std::nth_element(gaps.begin(), nth, gaps.end());
  return *nth;
}

}  // namespace

RequestTiming::RequestTiming(const Arrival& arrival) : arrival_(arrival) {}

std::optional<Duration> RequestTiming::on_token(TimePoint time) {
  if (!first_token_) {
    first_token_ = time;
    last_token_ = time;
    return std::nullopt;
  }
  const Duration gap = time - last_token_;
  last_token_ = time;
  gaps_.push_back(gap);
  return gap;
}

void RequestTiming::on_scheduled(TimePoint time, std::int32_t cached_tokens) {
  if (scheduled_) return;
  scheduled_ = time;
  arrival_.cached_tokens = cached_tokens;
}

RequestRecord RequestTiming::finish(Outcome outcome, TimePoint end) {
  RequestRecord record;
  record.id = arrival_.id;
  record.arrival = arrival_.time;
  record.scheduled = scheduled_;
  record.first_token = first_token_;
  record.end = end;
  record.prompt_tokens = arrival_.prompt_tokens;
  record.output_tokens = static_cast<std::int32_t>(gaps_.size()) + (first_token_ ? 1 : 0);
  record.max_new_tokens = arrival_.max_new_tokens;
  record.ttft_target = arrival_.ttft_target;
  record.itl_target = arrival_.itl_target;
  record.outcome = outcome;
  if (!gaps_.empty()) {
    record.itl_mean = std::accumulate(gaps_.begin(), gaps_.end(), Duration::zero()) / static_cast<std::int64_t>(gaps_.size());
  }
  if (outcome == Outcome::Aborted && first_token_) gaps_.push_back(end - last_token_);  // the gap it was waiting in
  record.itl_p99 = percentile_99(gaps_);

  const Duration ttft = first_token_.value_or(end) - arrival_.time;
  record.ttft_missed = ttft > arrival_.ttft_target;
  record.itl_missed = record.itl_p99 > arrival_.itl_target;
  const bool missed = record.ttft_missed || record.itl_missed;
  switch (outcome) {
    case Outcome::Stop:
    case Outcome::Length:
      record.verdict = missed ? Verdict::Bad : Verdict::Good;
      break;
    case Outcome::Aborted:
      record.verdict = missed ? Verdict::Bad : Verdict::Unjudged;
      break;
    case Outcome::Failed:
      record.verdict = Verdict::Bad;
      break;
  }
  return record;
}

}  // namespace rubato
