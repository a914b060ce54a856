// SPDX-License-Identifier: Apache-2.0
#include "daemon/twin_feed.h"

namespace rubato {

TwinFeed::TwinFeed(std::size_t requests_max, std::size_t steps_max)
    : spare_(requests_max, steps_max), rings_(requests_max, steps_max) {}

void TwinFeed::on_arrival(const Arrival& arrival) {
  const std::lock_guard lock(mutex_);
  dropped_ += rings_.arrivals.push(arrival);
}

void TwinFeed::on_first_token(const Arrival& arrival, Duration /*ttft*/) {
  const std::lock_guard lock(mutex_);
  dropped_ += rings_.starts.push({.id = arrival.id, .cached_tokens = arrival.cached_tokens});
}

void TwinFeed::on_request_end(const RequestRecord& record) {
  const std::lock_guard lock(mutex_);
  dropped_ += rings_.ends.push({.id = record.id, .time = record.end, .output_tokens = record.output_tokens});
}

void TwinFeed::on_step(const engine::StepRecord& record, const policies::SchedulerCounts& /*counts*/) {
  const Duration took = record.end - record.begin;
  late_steps_.on_step(record.features.decode_rows, record.predicted, took);
  const std::lock_guard lock(mutex_);
  dropped_ += rings_.steps.push({.lane = record.lane.value,
                                 .share_percent = record.share_percent,
                                 .features = record.features,
                                 .bucket = record.bucket,
                                 .duration = took});
}

void TwinFeed::drain(FeedBatch& batch) {
  {
    const std::lock_guard lock(mutex_);
    rings_.arrivals.swap(spare_.arrivals);
    rings_.starts.swap(spare_.starts);
    rings_.ends.swap(spare_.ends);
    rings_.steps.swap(spare_.steps);
  }
  batch.arrivals.clear();
  batch.starts.clear();
  batch.ends.clear();
  batch.steps.clear();
  spare_.arrivals.move_to(batch.arrivals);
  spare_.starts.move_to(batch.starts);
  spare_.ends.move_to(batch.ends);
  spare_.steps.move_to(batch.steps);
}

std::uint64_t TwinFeed::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

}  // namespace rubato
