// SPDX-License-Identifier: Apache-2.0
#include "daemon/twin_pace.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <ctime>
#include <string>
#include <system_error>
#include <utility>

namespace rubato {
namespace {

using namespace std::chrono_literals;

constexpr Duration lateness_min = 2ms;  // less is the scheduler of any machine
constexpr Duration far_lateness_min = 50ms;
constexpr int far_times = 4;              // the prediction
constexpr double idle_weight = 1.0 / 64;  // of one step in the share of late ones while the twin is idle
constexpr double blame_times = 2;         // the idle share
constexpr int niceness = 10;

}  // namespace

void LateSteps::set_itl_target(Duration target) {
  const std::lock_guard lock(mutex_);
  itl_target_ = target;
}

bool LateSteps::is_late(std::int32_t decode_rows, Duration predicted, Duration took) const {
  if (took - predicted < lateness_min) return false;
  if (took > predicted + predicted / 2) return true;
  return decode_rows > 0 && itl_target_ > 0ns && predicted <= itl_target_ && took > itl_target_ &&
         took > predicted + predicted / 10;
}

void LateSteps::on_step(std::int32_t decode_rows, Duration predicted, Duration took) {
  const std::lock_guard lock(mutex_);
  const bool late = is_late(decode_rows, predicted, took);
  if (work_ == TwinWork::Idle) {
    idle_late_share_ += idle_weight * ((late ? 1.0 : 0.0) - idle_late_share_);
    return;
  }
  recent_ = ((recent_ << 1) | (late ? 1U : 0U)) & ((1U << steps_looked_at) - 1);
  seen_ = std::min(seen_ + 1, steps_looked_at);
  far_too_late_ = far_too_late_ || (took > far_times * predicted && took - predicted > far_lateness_min);
}

void LateSteps::set_twin_work(TwinWork work) {
  const std::lock_guard lock(mutex_);
  work_ = work;
  recent_ = 0;
  seen_ = 0;
  far_too_late_ = false;
}

bool LateSteps::late() const {
  const std::lock_guard lock(mutex_);
  if (far_too_late_) return true;
  const int late = std::popcount(recent_);
  return late >= late_steps_min && late > blame_times * idle_late_share_ * seen_;
}

std::string_view to_string(TwinStop stop) {
  switch (stop) {
    case TwinStop::Stopping:
      return "serving stops";
    case TwinStop::Superseded:
      return "what is asked has changed";
    case TwinStop::ServingLate:
      return "steps run late";
    case TwinStop::HeldOff:
      return "steps ran late a moment ago";
    case TwinStop::TimeUp:
      return "its time is up";
  }
  CHECK(false, static_cast<int>(stop));
}

TwinPace::TwinPace(TwinPaceHooks hooks, LateSteps& late) : hooks_(std::move(hooks)), late_(late) {
  CHECK(hooks_.now && hooks_.thread_time && hooks_.sleep);
}

void TwinPace::begin() {
  end();
  stopped_.reset();
}

void TwinPace::end() {
  if (!work_) return;
  cpu_used_ += hooks_.thread_time() - work_->thread_time_at_begin;
  work_.reset();
  late_.set_twin_work(TwinWork::Idle);
  if (!stopped_) hold_off_ = std::max(hold_off_ / 2, hold_off_min);  // it could finish: the machine bears it
}

bool TwinPace::go_on() {
  if (stopped_) return false;
  const TimePoint now = hooks_.now();
  if (!work_) {
    if (const auto reason = reason_to_stop(now)) return stop(*reason, now);
    const Duration used = hooks_.thread_time();
    work_ = Work{.begin = now,
                 .thread_time_at_begin = used,
                 .share_begin = now,
                 .share_thread_time = used,
                 .looked_at = now,
                 .superseded_at = now};
    late_.set_twin_work(TwinWork::Working);
    return true;
  }
  if (now - work_->looked_at < look_interval) return true;
  work_->looked_at = now;
  if (const auto reason = reason_to_stop(now)) return stop(*reason, now);
  return keep_to_share(now);
}

std::optional<TwinStop> TwinPace::reason_to_stop(TimePoint now) {
  if (hooks_.stopping && hooks_.stopping()) return TwinStop::Stopping;
  if (held_until_ && now < *held_until_) return TwinStop::HeldOff;
  if (!work_) return std::nullopt;
  if (late_.late()) return TwinStop::ServingLate;
  if (now - work_->begin >= work_max) return TwinStop::TimeUp;
  if (hooks_.superseded && now - work_->superseded_at >= superseded_interval) {
    work_->superseded_at = now;
    if (hooks_.superseded()) return TwinStop::Superseded;
  }
  return std::nullopt;
}

bool TwinPace::stop(TwinStop reason, TimePoint now) {
  stopped_ = reason;
  if (reason == TwinStop::ServingLate) {
    held_until_ = now + hold_off_;
    hold_off_ = std::min(2 * hold_off_, hold_off_max);
  }
  return false;
}

bool TwinPace::keep_to_share(TimePoint now) {
  Work& work = *work_;
  const Duration used = hooks_.thread_time() - work.share_thread_time;
  const Duration due = used * 100 / core_percent_;  // wall time that may be used up for it
  // Time that others took from it is not made up for in a burst.
  const Duration unused = (now - work.share_begin) - due;
  if (unused > unused_max) work.share_begin += unused - unused_max;
  while (now - work.share_begin < due) {
    hooks_.sleep(std::min(due - (now - work.share_begin), sleep_max));
    now = hooks_.now();
    work.looked_at = now;
    if (const auto reason = reason_to_stop(now)) return stop(*reason, now);
  }
  return true;
}

Duration thread_cpu_time() {
  timespec time{};
  CHECK(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0, errno);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

Result<void> lower_thread_priority() {
  // On Linux a thread's number names that thread alone, although the call speaks of processes.
  if (::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), niceness) == 0) return {};
  return unexpected(ErrorCode::Internal, "setpriority: " + std::generic_category().message(errno));
}

}  // namespace rubato
