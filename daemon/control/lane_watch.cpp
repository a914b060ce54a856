// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/lane_watch.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/control/figures.h"
#include "manifests/json.h"

namespace rubato::control {
namespace {

using Numbers = std::vector<std::int64_t>;

/// What changes seldom and means something for long: a new value is shown at once.
Numbers lasting(const ServingStatus& status) {
  Numbers numbers{static_cast<std::int64_t>(status.handoffs.switches_done), status.handoffs.last_switch.count(),
                  status.effective_max_len, status.counts.block_count, static_cast<std::int64_t>(status.lanes.size())};
  for (const LaneStatus& lane : status.lanes) {
    numbers.insert(numbers.end(),
                   {static_cast<std::int64_t>(lane.counts.role), lane.share.asked_percent, lane.share.given_percent});
    if (!lane.shapes) continue;
    numbers.insert(numbers.end(), {static_cast<std::int64_t>(lane.shapes->built), static_cast<std::int64_t>(lane.shapes->failed),
                                   lane.shapes->bytes});
    numbers.insert(numbers.end(), lane.shapes->buckets.tokens.begin(), lane.shapes->buckets.tokens.end());
  }
  return numbers;
}

/// What moves with every step.
Numbers passing(const ServingStatus& status) {
  const policies::HandoffCounts& handoffs = status.handoffs;
  Numbers numbers{status.lockstep.stepping.count(), status.lockstep.waiting.count(), handoffs.copying.count(),
                  handoffs.reservation_waiting.count()};
  for (const std::uint64_t count : {status.lockstep.rounds, handoffs.moved, handoffs.copied, handoffs.blocks, handoffs.failed,
                                    handoffs.expired, handoffs.late_answers, handoffs.reservation_waits}) {
    numbers.push_back(static_cast<std::int64_t>(count));
  }
  for (const LaneStatus& lane : status.lanes) {
    const policies::SchedulerCounts& counts = lane.counts.scheduler;
    numbers.insert(numbers.end(), {static_cast<std::int64_t>(lane.steps), counts.waiting, counts.running, counts.prefilling,
                                   counts.free_blocks, lane.counts.reserved, lane.counts.to_move});
  }
  return numbers;
}

std::uint64_t handed_over(const policies::HandoffCounts& counts) {
  return counts.moved + counts.copied;
}

/// `mode Chunked -> Disaggregated`: the knobs that decide on roles and slots.
std::string switched_knobs(const KnobValues& before, const KnobValues& after) {
  const auto old_values = to_json(before), new_values = to_json(after);
  std::string text;
  for (const char* name : {"mode", "prefillDevices", "reservation"}) {
    if (old_values[name] == new_values[name]) continue;
    const auto shown = [](const auto& value) { return value.is_string() ? value.template get<std::string>() : value.dump(); };
    text += (text.empty() ? "" : ", ") + std::string(name) + " " + shown(old_values[name]) + " -> " + shown(new_values[name]);
  }
  return text.empty() ? "there and back again" : text;
}

}  // namespace

void LaneWatch::look(std::shared_ptr<const ServingStatus> status, TimePoint now, WallTime wall_now, EventLog& events) {
  if (!sample_) {  // what was before is not known, so that there is nothing to tell of
    settled_ = status->handoffs;
    settled_knobs_ = status->settings.knobs;
    failures_seen_ = status->handoffs.failed;
  }
  watch_switches(*status, wall_now, events);
  watch_failures(*status, now, wall_now, events);
  if (due(*status, now)) {
    sample_ = std::move(status);
    sampled_at_ = now;
  }
  window_closed_ = false;
}

void LaneWatch::watch_switches(const ServingStatus& status, WallTime wall_now, EventLog& events) {
  const policies::HandoffCounts& counts = status.handoffs;
  const std::uint64_t changes = counts.switches - settled_.switches;
  switching_ = counts.switches_done < counts.switches;
  if (switching_) return;
  if (changes > 0) {
    std::string message = switched_knobs(settled_knobs_, status.settings.knobs);
    if (changes > 1) message += " in " + std::to_string(changes) + " changes";
    message +=
        counts.last_switch == Duration::zero() ? ": all in place at once" : ": all in place after " + rounded(counts.last_switch);
    const std::uint64_t moved = handed_over(counts) - handed_over(settled_);
    if (moved > 0) message += ", " + std::to_string(moved) + (moved == 1 ? " sequence" : " sequences") + " handed over meanwhile";
    events.add(EventType::Normal, "ModeSwitched", message, wall_now);
  }
  settled_ = counts;
  settled_knobs_ = status.settings.knobs;
}

// Always the same words, so that a repetition counts up in the log and takes no place in it.
void LaneWatch::watch_failures(const ServingStatus& status, TimePoint now, WallTime wall_now, EventLog& events) {
  const std::uint64_t failures = std::exchange(failures_seen_, status.handoffs.failed);
  if (status.handoffs.failed == failures || (failure_told_ && now - *failure_told_ < failure_event_pause)) return;
  failure_told_ = now;
  events.add(EventType::Warning, "HandoffFailed",
             "copies of KV blocks between devices fail; their sequences go on where they are and are tried again", wall_now);
}

bool LaneWatch::due(const ServingStatus& status, TimePoint now) const {
  if (!sample_ || lasting(status) != lasting(*sample_)) return true;
  const auto busy = [](const ServingStatus& one) { return one.counts.running + one.counts.waiting > 0; };
  // Work that is long done would look like a leak.
  const Duration age_max = switching_                        ? sample_age_max_switching
                           : !busy(status) && busy(*sample_) ? sample_age_max_idle
                                                             : sample_age_max;
  return (window_closed_ || now - sampled_at_ >= age_max) && passing(status) != passing(*sample_);
}

}  // namespace rubato::control
