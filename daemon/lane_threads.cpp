// SPDX-License-Identifier: Apache-2.0
// One lock, the floor, covers everything the lanes decide and book together; a lane lets go of it while its step runs on the
// device. What is done under it takes microseconds against the milliseconds of a step.
#include "daemon/lane_threads.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <variant>

#include "daemon/bell.h"
#include "daemon/door.h"
#include "daemon/request_book.h"
#include "daemon/shape_thread.h"
#include "daemon/snapshot_cell.h"
#include "engine/lanes.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

constexpr auto idle_wait = 100ms;  // how long an idle lane sleeps before it looks round by itself
constexpr int expiries_per_lease = 10;

std::vector<engine::Backend*> pointers(const std::vector<std::unique_ptr<engine::Backend>>& backends) {
  std::vector<engine::Backend*> result;
  for (const auto& backend : backends) result.push_back(backend.get());
  return result;
}

class LaneThreads final : public OwnedServing {
 public:
  LaneThreads(std::vector<std::unique_ptr<engine::Backend>> backends, const LaneThreadsOptions& options)
      : options_(options),
        backends_(std::move(backends)),
        vocabulary_(backends_.front()->config().vocabulary),
        door_(static_cast<std::size_t>(outstanding_max(options.limits))),
        settings_(Settings{.number = 1, .knobs = options.initial}),
        objectives_(options.objectives),
        lanes_(pointers(backends_),
               {.limits = serving_limits(options.limits), .initial = *settings_.load(), .prefix_key = options_.prefix_key}),
        effective_max_len_(lanes_.group().effective_max_len()),
        book_(door_, options.observers),
        status_(ServingStatus{}) {
    for (const auto& backend : backends_) {
      auto& lane = threads_.emplace_back(std::make_unique<LaneThread>());
      lane->shapes = std::make_unique<ShapeThread>(*backend, settings_,
                                                   ShapeThreadOptions{.builder = options.shapes, .observers = options.observers});
    }
    current_settings_ = settings_.load()->number;
    for (Observer* observer : options_.observers) observer->on_settings(*settings_.load(), steady_now());
    publish();
    for (std::int32_t lane = 0; lane < lanes_.lane_count(); ++lane) {
      at(LaneIndex{lane}).thread = std::jthread([this, lane](const std::stop_token& stop) { run(LaneIndex{lane}, stop); });
    }
    if (options_.limits.devices > 1) copier_ = std::jthread([this](const std::stop_token& stop) { run_copies(stop); });
  }

  ~LaneThreads() override { LaneThreads::stop(); }

  void stop() override {
    begin_drain();
    for (const auto& lane : threads_) lane->thread.request_stop();
    copier_.request_stop();
    for (const auto& lane : threads_) {
      if (lane->thread.joinable()) lane->thread.join();
    }
    if (copier_.joinable()) copier_.join();
    for (const auto& lane : threads_) lane->shapes->stop();
    const std::lock_guard floor(floor_);
    end_all(Error{.code = ErrorCode::Unavailable, .field = {}, .message = "the server is shutting down"});
    publish();
  }

  SequenceId next_id() override { return SequenceId{next_id_.fetch_add(1, std::memory_order_relaxed)}; }

  Result<void> submit(std::vector<Submission> choices) override {
    for (const Submission& choice : choices) {
      if (auto fits = check_fits(choice.request); !fits) return fits;
    }
    const auto count = static_cast<std::int32_t>(choices.size());
    if (auto let_in = door_.submit(choices); !let_in) {
      for (Observer* observer : options_.observers) observer->on_rejected(steady_now(), count);
      return let_in;
    }
    for (Observer* observer : options_.observers) observer->on_request(count);
    ring_working_lanes();
    return {};
  }

  void cancel(SequenceId id, Outcome reason) override {
    if (door_.cancel(id, reason)) ring_working_lanes();
  }

  std::uint64_t apply(const KnobValues& knobs) override {
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(settings_mutex_);
      number = settings_.load()->number + 1;
      settings_.store(Settings{.number = number, .knobs = knobs});
    }
    for (const auto& lane : threads_) {
      lane->bell.ring();
      lane->shapes->nudge();
    }
    return number;
  }

  std::shared_ptr<const ServingStatus> status() const override {
    // Lanes publish after each step; that the door is closed or a step is stuck must show at once.
    auto status = std::make_shared<ServingStatus>(*status_.load());
    status->draining = door_.draining();
    status->failure = door_.failure();
    for (std::size_t lane = 0; lane < threads_.size(); ++lane) {
      status->lanes[lane].shapes = threads_[lane]->shapes->status();
      const Duration::rep began = threads_[lane]->step_began.load(std::memory_order_relaxed);
      if (began == 0) continue;
      const TimePoint since{Duration(began)};
      status->step_open_since = std::min(status->step_open_since.value_or(since), since);
    }
    return status;
  }

  void set_objectives(const ObjectivesSpec& objectives) override { objectives_.store(objectives); }
  ObjectivesSpec objectives() const override { return *objectives_.load(); }
  TimePoint now() const override { return steady_now(); }
  void begin_drain() override { door_.begin_drain(); }
  bool idle() const override { return door_.idle(); }

 private:
  struct LaneThread {
    Bell bell;
    std::atomic<bool> spare{false};            // has nothing to do in the mode of the moment
    std::atomic<Duration::rep> step_began{0};  // of the step that is running; 0: none is
    std::uint64_t steps = 0;                   // under the floor
    std::unique_ptr<ShapeThread> shapes;
    std::jthread thread;
  };

  LaneThread& at(LaneIndex lane) { return *threads_[static_cast<std::size_t>(lane.value)]; }

  Result<void> check_fits(const engine::Request& request) const {
    const auto prompt = static_cast<std::int64_t>(request.prompt.size());
    if (prompt == 0) return unexpected(ErrorCode::InvalidArgument, "prompt", "the prompt has no tokens; at least one is needed");
    for (const TokenId token : request.prompt) {
      if (token < 0 || token >= vocabulary_) {
        return unexpected(ErrorCode::InvalidArgument, "prompt",
                          "token id " + std::to_string(token) + " is outside 0.." + std::to_string(vocabulary_ - 1));
      }
    }
    const std::string limit =
        "this server's limit is " + std::to_string(effective_max_len_) + " tokens, prompt and output together";
    if (prompt >= effective_max_len_) {
      return unexpected(ErrorCode::InvalidArgument, "prompt", "the prompt has " + std::to_string(prompt) + " tokens; " + limit);
    }
    if (prompt + request.sampling.max_new_tokens > effective_max_len_) {
      return unexpected(ErrorCode::InvalidArgument, "max_tokens",
                        std::to_string(prompt) + " prompt tokens and " + std::to_string(request.sampling.max_new_tokens) +
                            " new ones are asked for; " + limit);
    }
    return {};
  }

  // Lanes that may take a move. A spare one is woken by whoever leaves it something to do.
  void ring_working_lanes() {
    for (const auto& lane : threads_) {
      if (!lane->spare.load(std::memory_order_relaxed)) lane->bell.ring();
    }
  }

  void run(LaneIndex index, const std::stop_token& stop) {
    LaneThread& lane = at(index);
    try {
      while (!stop.stop_requested()) {
        const std::uint64_t seen = lane.bell.count();
        std::unique_lock floor(floor_);
        const std::uint64_t changes = lanes_.group().changes();
        take_moves();
        take_settings();
        lane.shapes->take();
        const bool begun = !failed_ && lanes_.begin_step(index, steady_now());
        // What came or moved may be for another lane, or for this one. Without a change idle lanes would wake each other for
        // ever.
        const bool changed = lanes_.group().changes() != changes;
        if (changed) wake_others(index);
        if (!begun) publish();
        floor.unlock();
        if (!begun && !changed) lane.bell.wait(seen, stop, idle_wait);
        if (!begun) continue;
        const TimePoint began = steady_now();
        lane.step_began.store(began.time_since_epoch().count(), std::memory_order_relaxed);
        lanes_.run_step(index, began);
        lane.step_began.store(0, std::memory_order_relaxed);
        floor.lock();
        lanes_.end_step(index, steady_now());
        if (!failed_) book_step(index);
        publish();
        wake_others(index);
      }
    } catch (const std::exception& exception) {
      // Nothing in the loop is meant to throw; bad_alloc is what is left. Readiness turns false and the daemon exits.
      fail(Error{.code = ErrorCode::Internal, .field = {}, .message = std::string("a lane stopped: ") + exception.what()});
    }
  }

  // What a lane has just booked may have left another one something to do: a sequence handed over, a slot, blocks, its turn.
  void wake_others(LaneIndex index) {
    for (std::int32_t i = 0; i < lanes_.lane_count(); ++i) {
      const LaneIndex other{i};
      at(other).spare.store(lanes_.group().role(other) == policies::LaneRole::Spare, std::memory_order_relaxed);
      if (other != index && lanes_.group().may_have_work(other)) at(other).bell.ring();
    }
    if (options_.limits.devices > 1) copier_bell_.ring();
  }

  void run_copies(const std::stop_token& stop) {
    try {
      const auto pause =
          std::clamp(std::chrono::duration_cast<std::chrono::milliseconds>(options_.limits.handoff_lease) / expiries_per_lease,
                     std::chrono::milliseconds(10), std::chrono::milliseconds(1000));
      while (!stop.stop_requested()) {
        const std::uint64_t seen = copier_bell_.count();
        std::unique_lock floor(floor_);
        const std::uint64_t changes = lanes_.group().changes();
        lanes_.expire(steady_now());
        if (lanes_.group().changes() != changes) wake_all();
        const std::optional<engine::CopyJob> job = lanes_.next_copy(steady_now());
        floor.unlock();
        if (!job) {
          copier_bell_.wait(seen, stop, pause);
          continue;
        }
        const Result<void> outcome = job->run();
        floor.lock();
        if (!outcome && outcome.error().code != ErrorCode::Cancelled)
          spdlog::warn("copying {} KV blocks between devices failed: {}", job->blocks.size(), outcome.error().message);
        lanes_.copied(*job, outcome, steady_now());
        wake_all();
      }
    } catch (const std::exception& exception) {
      fail(Error{.code = ErrorCode::Internal, .field = {}, .message = std::string("the copier stopped: ") + exception.what()});
    }
  }

  void wake_all() {
    for (std::int32_t i = 0; i < lanes_.lane_count(); ++i) {
      if (lanes_.group().may_have_work(LaneIndex{i})) at(LaneIndex{i}).bell.ring();
    }
  }

  // ---- from here on under the floor

  void take_moves() {
    door_.take_all(moves_);
    for (Move& move : moves_) std::visit([this](auto& item) { take(item); }, move);
    moves_.clear();
  }

  void take(Submission& submission) {
    book_.enter(submission);
    const SequenceId id = submission.request.id;
    if (auto added = lanes_.add(std::move(submission.request)); !added) book_.fail(id, std::move(added).error(), steady_now());
  }

  void take(const CancelMove& cancel) {
    if (book_.leave(cancel.id, cancel.reason, steady_now())) lanes_.cancel(cancel.id);
  }

  void take_settings() {
    const std::shared_ptr<const Settings> wanted = settings_.load();
    if (wanted->number == current_settings_) return;
    lanes_.apply(*wanted, steady_now());
    current_settings_ = wanted->number;
    for (Observer* observer : options_.observers) observer->on_settings(*wanted, steady_now());
  }

  void book_step(LaneIndex index) {
    const policies::SchedulerCounts counts = lanes_.group().totals();
    const engine::StepRecord& record = lanes_.record(index);
    ++at(index).steps;
    at(index).shapes->on_step(record);
    for (Observer* observer : options_.observers) observer->on_step(record, counts);
    for (const engine::TokenEvent& event : lanes_.events(index)) book_.book(event);
    if (lanes_.failure()) fail_here(*lanes_.failure());
  }

  // Ends everything that is outstanding, also what still sits in the move queue.
  void end_all(const Error& error) {
    std::vector<Move> moves;
    door_.take_all(moves);
    for (Move& move : moves) {
      if (auto* submission = std::get_if<Submission>(&move)) book_.enter(*submission);
    }
    book_.fail_all(error, steady_now());
  }

  void fail_here(const Error& error) {
    if (std::exchange(failed_, true)) return;
    door_.fail(error);
    spdlog::error("engine failed: {}", error.message);
    end_all(error);
    publish();
  }
  void fail(const Error& error) {
    const std::lock_guard floor(floor_);
    fail_here(error);
  }

  void publish() {
    ServingStatus status;
    status.counts = lanes_.group().totals();
    status.settings = lanes_.group().settings();
    status.handoffs = lanes_.group().handoffs();
    status.lockstep = lanes_.group().lockstep();
    status.kv_block_bytes = options_.kv_block_bytes;
    status.state_bytes = options_.state_bytes;
    status.effective_max_len = effective_max_len_;
    status.vocabulary = vocabulary_;
    status.backend = options_.backend_description;
    for (std::int32_t i = 0; i < lanes_.lane_count(); ++i) {
      const LaneIndex lane{i};
      status.steps += at(lane).steps;
      status.lanes.push_back({.counts = lanes_.group().counts(lane),
                              .device = lanes_.group().device_of(lane),
                              .share = lanes_.backend(lane).share(),
                              .steps = at(lane).steps,
                              .shapes = nullptr});
    }
    status_.store(std::move(status));
  }

  const LaneThreadsOptions options_;
  const std::vector<std::unique_ptr<engine::Backend>> backends_;
  const std::int32_t vocabulary_;

  std::atomic<std::uint64_t> next_id_{1};
  Door door_;
  std::mutex settings_mutex_;        // one apply() at a time
  SnapshotCell<Settings> settings_;  // the newest wanted; taken at the next step boundary of any lane
  SnapshotCell<ObjectivesSpec> objectives_;

  std::mutex floor_;  // guards what follows, but for what runs on a device
  engine::Lanes lanes_;
  const std::int32_t effective_max_len_;
  RequestBook book_;
  std::vector<Move> moves_;  // being taken
  std::uint64_t current_settings_ = 0;
  bool failed_ = false;  // everything has ended; no lane steps any more

  SnapshotCell<ServingStatus> status_;
  Bell copier_bell_;
  std::vector<std::unique_ptr<LaneThread>> threads_;  // these two last: they use everything above
  std::jthread copier_;
};

}  // namespace

std::int32_t outstanding_max(const policies::LaneGroupLimits& limits) {
  return limits.each.max_waiting + limits.devices * limits.lanes_per_device * limits.each.max_num_seqs;
}

policies::LaneGroupLimits serving_limits(const policies::LaneGroupLimits& limits) {
  policies::LaneGroupLimits serving = limits;
  serving.each.max_waiting = outstanding_max(limits);
  return serving;
}

TimePoint steady_now() {
  return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()));
}

std::unique_ptr<OwnedServing> start_lane_threads(std::vector<std::unique_ptr<engine::Backend>> backends,
                                                 const LaneThreadsOptions& options) {
  return std::make_unique<LaneThreads>(std::move(backends), options);
}

}  // namespace rubato
