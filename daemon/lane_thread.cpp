// SPDX-License-Identifier: Apache-2.0
#include "daemon/lane_thread.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>

#include "daemon/bounded_queue.h"
#include "daemon/request_timing.h"
#include "daemon/shape_thread.h"
#include "daemon/snapshot_cell.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

constexpr auto idle_wait = 100ms;  // how long an idle lane sleeps before it looks round by itself

struct Cancel {
  SequenceId id;
  Outcome reason = Outcome::Aborted;
};

using Move = std::variant<Submission, Cancel>;

// What the door remembers of an outstanding choice, so that each id is cancelled at most once and the move queue stays bounded:
// two moves per outstanding choice, and the cancel of each that ended by itself before the lane took it.
enum class Ticket : std::uint8_t { Open, Cancelled };

struct Live {
  RequestTiming timing;
  std::shared_ptr<TokenSink> sink;
};

class LaneThread final : public OwnedServing {
 public:
  LaneThread(std::unique_ptr<engine::Backend> backend, const LaneThreadOptions& options)
      : options_(options),
        backend_(std::move(backend)),
        vocabulary_(backend_->config().vocabulary),
        outstanding_max_(static_cast<std::size_t>(options.limits.max_waiting) +
                         static_cast<std::size_t>(options.limits.max_num_seqs)),
        moves_(3 * outstanding_max_),
        settings_(Settings{.number = 1, .knobs = options.initial}),
        objectives_(options.objectives),
        lane_(*backend_, engine::LaneOptions{.limits = lane_limits(), .initial = *settings_.load()}),
        effective_max_len_(lane_.scheduler().effective_max_len()),
        status_(first_status()),
        shapes_(*backend_, settings_, ShapeThreadOptions{.builder = options.shapes, .observers = options.observers}) {
    current_settings_ = settings_.load()->number;
    for (Observer* observer : options_.observers) observer->on_settings(*settings_.load(), steady_now());
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }

  ~LaneThread() override { LaneThread::stop(); }

  void stop() override {
    begin_drain();
    thread_.request_stop();
    moves_.nudge();
    if (thread_.joinable()) thread_.join();
    shapes_.stop();
  }

  SequenceId next_id() override { return SequenceId{next_id_.fetch_add(1, std::memory_order_relaxed)}; }

  Result<void> submit(std::vector<Submission> choices) override {
    for (const Submission& choice : choices) {
      if (auto fits = check_fits(choice.request); !fits) return fits;
    }
    const auto refuse = [&](ErrorCode code, std::string message) {
      for (Observer* observer : options_.observers)
        observer->on_rejected(steady_now(), static_cast<std::int32_t>(choices.size()));
      return unexpected(code, std::move(message));
    };
    const std::lock_guard lock(door_);
    if (failure_) return refuse(ErrorCode::DeviceLost, "the engine has stopped: " + failure_->message);
    if (draining_) return refuse(ErrorCode::Unavailable, "the server is shutting down");
    if (tickets_.size() + choices.size() > outstanding_max_) {
      return refuse(ErrorCode::ResourceExhausted, "the queue is full: " + std::to_string(tickets_.size()) + " of " +
                                                      std::to_string(outstanding_max_) + " sequences are waiting or running");
    }
    for (Observer* observer : options_.observers) observer->on_request(static_cast<std::int32_t>(choices.size()));
    for (Submission& choice : choices) {
      tickets_.emplace(choice.request.id, Ticket::Open);
      CHECK(moves_.try_push(Move(std::move(choice))), "the move queue holds three moves per ticket");
    }
    return {};
  }

  void cancel(SequenceId id, Outcome reason) override {
    const std::lock_guard lock(door_);
    const auto ticket = tickets_.find(id);
    if (ticket == tickets_.end() || ticket->second == Ticket::Cancelled) return;
    ticket->second = Ticket::Cancelled;
    CHECK(moves_.try_push(Move(Cancel{.id = id, .reason = reason})), "the move queue holds three moves per ticket");
  }

  std::uint64_t apply(const KnobValues& knobs) override {
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(door_);
      number = settings_.load()->number + 1;
      settings_.store(Settings{.number = number, .knobs = knobs});
    }
    moves_.nudge();
    shapes_.nudge();
    return number;
  }

  std::shared_ptr<const ServingStatus> status() const override {
    // The lane publishes after each step; that the door is closed must show at once.
    auto status = std::make_shared<ServingStatus>(*status_.load());
    status->shapes = shapes_.status();
    const std::lock_guard lock(door_);
    status->draining = draining_;
    status->failure = failure_;
    return status;
  }

  void set_objectives(const ObjectivesSpec& objectives) override { objectives_.store(objectives); }
  ObjectivesSpec objectives() const override { return *objectives_.load(); }
  TimePoint now() const override { return steady_now(); }

  void begin_drain() override {
    const std::lock_guard lock(door_);
    draining_ = true;
  }

  bool idle() const override {
    const std::lock_guard lock(door_);
    return tickets_.empty();
  }

 private:
  // The door bounds what is outstanding, so the scheduler's own queue can never refuse what the door let in.
  policies::SchedulerLimits lane_limits() const {
    policies::SchedulerLimits limits = options_.limits;
    limits.max_waiting = static_cast<std::int32_t>(outstanding_max_);
    return limits;
  }

  ServingStatus first_status() const {
    ServingStatus status;
    status.counts = lane_.scheduler().counts();
    status.settings = *settings_.load();
    status.effective_max_len = effective_max_len_;
    status.vocabulary = vocabulary_;
    status.backend = options_.backend_description;
    status.last_step = steady_now();
    return status;
  }

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

  void run(const std::stop_token& stop) {
    try {
      std::vector<Move> moves;
      while (!stop.stop_requested()) {
        moves_.take_all(moves);
        for (Move& move : moves) std::visit([this](auto& item) { take(item); }, move);
        take_settings();
        shapes_.take();
        const bool worked = !lane_.failure() && lane_.step([] { return steady_now(); });
        if (worked) book_step();
        publish(worked);
        if (!worked) moves_.wait(stop, idle_wait);
      }
      fail_all(Error{.code = ErrorCode::Unavailable, .field = {}, .message = "the server is shutting down"});
      publish(false);
    } catch (const std::exception& exception) {
      // Nothing in the loop is meant to throw; bad_alloc is what is left. Readiness turns false and the daemon exits.
      fail_all(Error{.code = ErrorCode::Internal, .field = {}, .message = std::string("the lane stopped: ") + exception.what()});
      publish(false);
    }
  }

  // From here on the request is counted, and ends with a record and an event whatever happens.
  void enrol(Submission& submission) {
    const engine::Request& request = submission.request;
    const Arrival arrival{.id = request.id,
                          .time = request.arrival,
                          .prompt_tokens = static_cast<std::int32_t>(request.prompt.size()),
                          .max_new_tokens = request.sampling.max_new_tokens,
                          .ttft_target = request.ttft_target,
                          .itl_target = request.itl_target};
    for (Observer* observer : options_.observers) observer->on_arrival(arrival);
    live_.emplace(arrival.id, Live{.timing = RequestTiming(arrival), .sink = std::move(submission.sink)});
  }

  void take(Submission& submission) {
    enrol(submission);
    const SequenceId id = submission.request.id;
    if (auto added = lane_.add(std::move(submission.request)); !added) fail(id, std::move(added).error(), steady_now());
  }

  void take(const Cancel& cancel) {
    const auto live = live_.find(cancel.id);
    if (live == live_.end()) return;  // ended on its own before the cancel came through
    lane_.cancel(cancel.id);
    end(live, cancel.reason, steady_now());
  }

  void take_settings() {
    const std::shared_ptr<const Settings> wanted = settings_.load();
    if (wanted->number == current_settings_) return;
    lane_.apply(*wanted);
    current_settings_ = wanted->number;
    for (Observer* observer : options_.observers) observer->on_settings(*wanted, steady_now());
  }

  void book_step() {
    const policies::SchedulerCounts counts = lane_.scheduler().counts();
    shapes_.on_step(lane_.record());
    for (Observer* observer : options_.observers) observer->on_step(lane_.record(), counts);
    for (const engine::TokenEvent& event : lane_.events()) book(event);
    if (lane_.failure()) fail_all(*lane_.failure());
  }

  void book(const engine::TokenEvent& event) {
    const auto live = live_.find(event.id);
    CHECK(live != live_.end(), "token for unknown sequence ", event.id.value);
    RequestTiming& timing = live->second.timing;
    if (event.sample) {
      timing.on_scheduled(event.scheduled);
      if (const std::optional<Duration> gap = timing.on_token(event.time)) {
        for (Observer* observer : options_.observers) observer->on_token_gap(event.id, *gap);
      } else {
        for (Observer* observer : options_.observers)
          observer->on_first_token(timing.arrival(), event.time - timing.arrival().time);
      }
    }
    live->second.sink->on_token(event);
    if (event.finish) end(live, outcome_of(*event.finish), event.time);
  }

  static Outcome outcome_of(engine::FinishReason reason) {
    switch (reason) {
      case engine::FinishReason::Stop:
        return Outcome::Stop;
      case engine::FinishReason::Length:
        return Outcome::Length;
      case engine::FinishReason::Failed:
        return Outcome::Failed;
    }
    return Outcome::Failed;
  }

  void end(std::unordered_map<SequenceId, Live>::iterator live, Outcome outcome, TimePoint time) {
    const RequestRecord record = live->second.timing.finish(outcome, time);
    live_.erase(live);
    for (Observer* observer : options_.observers) observer->on_request_end(record);
    const std::lock_guard lock(door_);
    tickets_.erase(record.id);
  }

  void fail(SequenceId id, Error error, TimePoint time) {
    const auto live = live_.find(id);
    if (live == live_.end()) return;
    engine::TokenEvent event;
    event.id = id;
    event.finish = engine::FinishReason::Failed;
    event.error = std::move(error);
    event.time = time;
    live->second.sink->on_token(event);
    end(live, Outcome::Failed, time);
  }

  // Ends everything that is outstanding, also what still sits in the move queue.
  void fail_all(const Error& error) {
    {
      const std::lock_guard lock(door_);
      if (error.code != ErrorCode::Unavailable) failure_ = error;
      draining_ = true;
    }
    if (error.code != ErrorCode::Unavailable) spdlog::error("engine failed: {}", error.message);
    std::vector<Move> moves;
    moves_.take_all(moves);
    for (Move& move : moves) {
      if (auto* submission = std::get_if<Submission>(&move)) enrol(*submission);
    }
    while (!live_.empty()) fail(live_.begin()->first, error, steady_now());
  }

  void publish(bool worked) {
    const std::shared_ptr<const ServingStatus> before = status_.load();
    ServingStatus status = *before;
    status.counts = lane_.scheduler().counts();
    status.settings = lane_.scheduler().settings();
    if (worked) {
      status.steps = lane_.record().step_number;
      status.last_step = lane_.record().end;
    } else {
      status.last_step = steady_now();
    }
    status_.store(std::move(status));
  }

  const LaneThreadOptions options_;
  const std::unique_ptr<engine::Backend> backend_;
  const std::int32_t vocabulary_;
  const std::size_t outstanding_max_;

  std::atomic<std::uint64_t> next_id_{1};
  BoundedQueue<Move> moves_;
  SnapshotCell<Settings> settings_;  // the newest wanted; the lane takes it at its next step boundary
  SnapshotCell<ObjectivesSpec> objectives_;

  mutable std::mutex door_;  // guards the next three
  std::unordered_map<SequenceId, Ticket> tickets_;
  bool draining_ = false;
  std::optional<Error> failure_;

  // The lane thread's own.
  engine::Lane lane_;
  const std::int32_t effective_max_len_;
  std::unordered_map<SequenceId, Live> live_;
  std::uint64_t current_settings_ = 0;

  SnapshotCell<ServingStatus> status_;
  ShapeThread shapes_;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace

TimePoint steady_now() {
  return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()));
}

std::unique_ptr<OwnedServing> start_lane_thread(std::unique_ptr<engine::Backend> backend, const LaneThreadOptions& options) {
  return std::make_unique<LaneThread>(std::move(backend), options);
}

}  // namespace rubato
