// SPDX-License-Identifier: Apache-2.0
#include "daemon/daemon.h"

#include <fmt/format.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "daemon/control/control_api.h"
#include "daemon/control/manifest_watch.h"
#include "daemon/control/reconciler.h"
#include "daemon/data_port.h"
#include "daemon/lane_threads.h"
#include "daemon/latency_windows.h"
#include "daemon/metrics/metrics.h"
#include "daemon/model_loading.h"
#include "daemon/openai/error_answer.h"
#include "daemon/tuning_thread.h"
#include "daemon/twin_feed.h"
#include "daemon/version.h"
#include "engine/text/chat_template.h"
#include "manifests/read_manifest.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

constexpr auto housekeeping_interval = 250ms;  // main thread: expiry, conditions, failure and drain checks
constexpr auto flush_timeout = 5s;             // at the end, for last words to reach slow clients
constexpr int http_threads = 2;                // per port: one may tokenise a long prompt while the other serves

// SIGTERM and SIGINT as a descriptor; every thread started later inherits the blocked mask, so that only main sees them.
class Signals {
 public:
  Signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    CHECK(::pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0);
    std::signal(SIGPIPE, SIG_IGN);
    descriptor_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    CHECK(descriptor_ >= 0, "signalfd: ", errno);
  }
  ~Signals() { ::close(descriptor_); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// How many have come since the last call.
  [[nodiscard]] int take() const {
    int count = 0;
    signalfd_siginfo info;
    while (::read(descriptor_, &info, sizeof info) == sizeof info) ++count;
    return count;
  }

 private:
  int descriptor_ = -1;
};

std::string node_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : std::string("localhost");
}

// RFC 4122 version 4, from the system's entropy.
std::string make_uid() {
  std::random_device entropy;
  std::array<std::uint32_t, 4> words{entropy(), entropy(), entropy(), entropy()};
  words[1] = (words[1] & 0xffff0fffU) | 0x4000U;
  words[2] = (words[2] & 0x3fffffffU) | 0x80000000U;
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:04x}{:08x}", words[0], words[1] >> 16, words[1] & 0xffffU, words[2] >> 16,
                     words[2] & 0xffffU, words[3]);
}

engine::PrefixKey draw_prefix_key() {
  std::random_device entropy;
  const auto word = [&entropy] { return (std::uint64_t{entropy()} << 32) | entropy(); };
  return {.low = word(), .high = word()};
}

control::WallTime wall_now() {
  return std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now());
}

std::string with_port(const std::string& listen, int port) {
  return listen.substr(0, listen.rfind(':')) + ":" + std::to_string(port);
}

class Daemon {
 public:
  Daemon(const Options& options, ReadManifest manifest, const ModelPlan& plan)
      : options_(options),
        spec_(manifest.manifest.spec),
        served_name_(spec_.model.served_name.empty() ? manifest.manifest.name : spec_.model.served_name),
        metrics_(MetricsOptions{.model_name = served_name_,
                                .version = version,
                                .backend = "cpu",
                                .objectives = spec_.objectives,
                                .max_model_len = plan.limits.each.max_model_len,
                                .kv_block_count = plan.limits.devices * plan.limits.each.block_count,
                                .blocks_hold_keys = plan.limits.each.blocks_hold_keys,
                                .prefix_caching = spec_.prefix_caching.enabled,
                                .devices = spec_.devices,
                                .lanes_per_device = plan.limits.lanes_per_device}),
        reconciler_(manifest, reconciler_options(options), metrics_),
        watch_(options.manifest, manifest.hash),
        control_api_(reconciler_, metrics_, {.version = version, .wall_clock = wall_now, .steady_clock = steady_now}),
        control_router_(control::ControlApi::error_response),
        data_port_(metrics_, [this] { return can_serve(); }) {
    control_api_.add_routes(control_router_);
  }

  ~Daemon() { stop(); }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  int run(const Signals& signals) {
    if (auto opened = open_ports(); !opened) {
      spdlog::error("{}", opened.error().message);
      return 1;
    }
    std::future<Result<LoadedModel>> loading =
        std::async(std::launch::async, [this] { return load_model(spec_, options_.state); });
    while (loading.wait_for(50ms) != std::future_status::ready) {
      if (signals.take() > 0) {
        spdlog::info("stopped while loading");
        std::fflush(nullptr);
        std::_Exit(0);  // the loader cannot be interrupted, and nothing is in flight yet
      }
    }
    Result<LoadedModel> model = loading.get();
    if (!model) {
      spdlog::error("cannot serve the model: {}: {}", model.error().field.empty() ? "spec.model" : model.error().field,
                    model.error().message);
      return 1;
    }
    start_serving(std::move(*model));
    return serve_until_stopped(signals);
  }

 private:
  static control::ReconcilerOptions reconciler_options(const Options& options) {
    return control::ReconcilerOptions{
        .state_directory = options.state, .node = node_name(), .clock = wall_now, .make_uid = make_uid};
  }

  [[nodiscard]] bool can_serve() {
    const control::ServingHealth health = reconciler_.health();
    return health.loaded && !health.draining && !health.stalled && !health.failure;
  }

  Result<void> open_ports() {
    auto control_server = http::Server::start(
        {.listen = options_.control_listen, .threads = http_threads, .body_bytes_max = 4UL << 20, .connections_max = 1024},
        [this](http::Request request, std::shared_ptr<http::Exchange> exchange) {
          control_router_.handle(std::move(request), std::move(exchange));
        },
        control::ControlApi::error_response);
    if (!control_server) return Unexpected(std::move(control_server).error());
    control_server_ = std::move(*control_server);
    auto data_server = http::Server::start(
        {.listen = options_.listen, .threads = http_threads},
        [this](http::Request request, std::shared_ptr<http::Exchange> exchange) {
          data_port_.handle(std::move(request), std::move(exchange));
        },
        [](int status, std::string message) { return openai::error_response(status, std::move(message)); });
    if (!data_server) return Unexpected(std::move(data_server).error());
    data_server_ = std::move(*data_server);
    metrics_.set_sources({.serving = [this]() -> std::shared_ptr<const ServingStatus> {
                            const std::lock_guard lock(serving_mutex_);
                            return serving_ ? serving_->status() : nullptr;
                          },
                          .connections = {{"data", [this] { return data_server_->open_connections(); }},
                                          {"control", [this] { return control_server_->open_connections(); }}}});
    spdlog::info("data port {}, control port {}", with_port(options_.listen, data_server_->port()),
                 with_port(options_.control_listen, control_server_->port()));
    return {};
  }

  void start_serving(LoadedModel model) {
    for (const std::string& note : model.plan.notes) spdlog::warn("{}", note);
    for (const std::string& finding : model.plan.findings) spdlog::info("{}", finding);
    std::string backend = model.backends.front()->description();
    if (spec_.devices.size() > 1) backend += fmt::format(", {} devices", spec_.devices.size());
    const std::string key = model_key(spec_, model);
    tuner::TwinOptions twin{.limits = serving_limits(model.plan.limits),
                            .shapes = model.backends.front()->shape_limits().count_max > 0,
                            .objectives = reconciler_.objectives(),
                            .outstanding_max = outstanding_max(model.plan.limits)};
    tokenizer_ = std::move(model.tokenizer);
    std::unique_ptr<OwnedServing> serving =
        start_lane_threads(std::move(model.backends), LaneThreadsOptions{.limits = model.plan.limits,
                                                                         .initial = reconciler_.knobs(),
                                                                         .objectives = reconciler_.objectives(),
                                                                         .observers = {&metrics_, &windows_, &feed_},
                                                                         .backend_description = backend,
                                                                         .kv_block_bytes = model.plan.cache.block_bytes,
                                                                         .state_bytes = model.plan.cache.state_bytes,
                                                                         .prefix_key = draw_prefix_key()});
    const std::int32_t max_model_len = serving->status()->effective_max_len;
    const openai::ModelInfo info{
        .names = {served_name_},
        .created = std::chrono::duration_cast<std::chrono::seconds>(wall_now().time_since_epoch()).count(),
        .max_model_len = max_model_len,
        .vocabulary = model.plan.config.vocabulary,
        .chat_form = model.chat_form,
        .chat_end_tokens = model.chat_form ? text::chat_end_tokens(*tokenizer_, *model.chat_form) : std::vector<TokenId>{}};
    auto api = std::make_shared<openai::OpenAiApi>(*serving, *tokenizer_, info);
    {
      const std::lock_guard lock(serving_mutex_);
      serving_ = std::move(serving);
    }
    // In this order: from attach() on /readyz says that requests are taken.
    data_port_.ready(std::move(api));
    reconciler_.attach(*serving_);
    tuning_ = std::make_unique<TuningThread>(
        reconciler_, *serving_, windows_, feed_,
        TuningThreadOptions{.state_directory = options_.state, .model_key = key, .twin = std::move(twin)});
    spdlog::info("serving {} on {}: {} tokens per request, {} KV blocks of {} tokens", served_name_, backend, max_model_len,
                 model.plan.limits.each.block_count, kv_block_tokens);
  }

  int serve_until_stopped(const Signals& signals) {
    TimePoint next_look = steady_now();
    std::optional<TimePoint> drain_deadline;
    while (true) {
      const bool manifest_touched = wait_for_something(signals);
      if (signals.take() > 0) {  // several at once are one wish: Ctrl-C in a terminal often brings two
        if (drain_deadline) {
          spdlog::warn("second signal: ending at once");
          return serving_->idle() ? 0 : 1;
        }
        spdlog::info("draining: new requests are refused, running ones have {}", format_duration(options_.drain_timeout));
        serving_->begin_drain();
        drain_deadline = steady_now() + options_.drain_timeout;
      }
      if (manifest_touched || steady_now() >= next_look) {
        next_look = steady_now() + control::ManifestWatch::poll_interval;
        if (const auto outcome = watch_.poll_once()) reconciler_.on_manifest(*outcome);
      }
      reconciler_.tick();
      if (const auto status = serving_->status(); status->failure) {
        spdlog::error("the engine has failed and cannot go on: {}", status->failure->message);
        return 1;
      }
      if (drain_deadline && serving_->idle()) {
        spdlog::info("drained");
        return 0;
      }
      if (drain_deadline && steady_now() >= *drain_deadline) {
        spdlog::warn("the drain time-out has passed; cutting what still runs");
        return 1;
      }
    }
  }

  // A signal, a touched manifest (then true) or the time for housekeeping.
  [[nodiscard]] bool wait_for_something(const Signals& signals) const {
    std::array<pollfd, 2> descriptors{pollfd{.fd = signals.descriptor(), .events = POLLIN, .revents = 0},
                                      pollfd{.fd = watch_.descriptor().value_or(-1), .events = POLLIN, .revents = 0}};
    ::poll(descriptors.data(), descriptors.size(), static_cast<int>(housekeeping_interval.count()));
    return (descriptors[1].revents & POLLIN) != 0;
  }

  // In this order, so that every answer that has been produced still reaches its client and nobody calls what is gone.
  void stop() {
    tuning_.reset();
    if (data_server_) data_server_->stop_accepting();
    if (serving_) serving_->stop();
    const TimePoint flushed_by = steady_now() + flush_timeout;
    while (data_server_ && data_server_->open_exchanges() > 0 && steady_now() < flushed_by) std::this_thread::sleep_for(5ms);
    if (data_server_) data_server_->stop();
    if (control_server_) control_server_->stop();
  }

  const Options options_;
  const EngineSpec spec_;
  const std::string served_name_;
  Metrics metrics_;
  LatencyWindows windows_;
  TwinFeed feed_;
  control::Reconciler reconciler_;
  control::ManifestWatch watch_;
  control::ControlApi control_api_;
  http::Router control_router_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::mutex serving_mutex_;  // metrics may be scraped while serving starts
  std::unique_ptr<OwnedServing> serving_;
  DataPort data_port_;
  std::unique_ptr<TuningThread> tuning_;
  std::unique_ptr<http::Server> control_server_;
  std::unique_ptr<http::Server> data_server_;
};

// Prints what is wrong and returns nothing, or the manifest and the limits that follow from it.
std::optional<std::pair<ReadManifest, ModelPlan>> read_and_plan(const Options& options) {
  auto manifest = read_manifest(options.manifest);
  if (!manifest) {
    std::fprintf(stderr, "%s", manifest.failure().text().c_str());
    return std::nullopt;
  }
  Result<ModelPlan> plan = plan_model(manifest->manifest.spec);
  if (!plan) {
    const Error& error = plan.error();
    std::fprintf(stderr, "%s: %s%s%s\n", manifest->file.c_str(), error.field.c_str(), error.field.empty() ? "" : ": ",
                 error.message.c_str());
    return std::nullopt;
  }
  return std::pair(std::move(manifest).value(), std::move(*plan));
}

}  // namespace

int serve(const Options& options) {
  const Signals signals;
  auto planned = read_and_plan(options);
  if (!planned) return 1;
  if (!options.state.empty()) {
    std::error_code failed;
    std::filesystem::create_directories(options.state, failed);
    if (failed) {
      std::fprintf(stderr, "rubatod: --state %s: %s\n", options.state.c_str(), failed.message().c_str());
      return 1;
    }
  }
  Daemon daemon(options, std::move(planned->first), planned->second);
  return daemon.run(signals);
}

int check(const Options& options) {
  const auto planned = read_and_plan(options);
  if (!planned) return 1;
  const auto& [manifest, plan] = *planned;
  std::fprintf(stderr, "%s: good: %s of %s parameters, %s of weights, %d KV blocks of %d tokens\n", manifest.file.c_str(),
               plan.config.architecture.c_str(), std::to_string(plan.config.parameter_count()).c_str(),
               format_quantity(plan.weight_bytes).c_str(), plan.limits.each.block_count, kv_block_tokens);
  for (const std::string& note : plan.notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  return 0;
}

int check_exactness(const Options& options) {
  EngineSpec spec;
  if (options.model.empty()) {
    auto manifest = read_manifest(options.manifest);
    if (!manifest) {
      std::fprintf(stderr, "%s", manifest.failure().text().c_str());
      return 1;
    }
    spec = manifest->manifest.spec;
  } else {
    // Small, with a second lane and shapes, so that every kind of case applies.
    spec.model.path = options.model;
    spec.capacity = {.max_model_len = 1024, .max_num_seqs = 32, .kv_cache_memory = 2LL << 30};
    spec.knobs.max_num_batched_tokens.max = 512;
    spec.knobs.mode.choices = {Mode::Chunked, Mode::Disaggregated};
  }
  spec.exactness = Exactness::Trust;  // checked here, with every case named
  Result<LoadedModel> model = load_model(spec, {});
  const auto refuse = [](const Error& error) {
    std::fprintf(stderr, "rubatod: %s: %s\n", error.field.empty() ? "spec.model" : error.field.c_str(), error.message.c_str());
    return 1;
  };
  if (!model) return refuse(model.error());
  std::fprintf(stderr, "%s on %s\n", model->plan.config.architecture.c_str(), model->backends.front()->description().c_str());
  const Result<engine::ExactnessReport> report =
      check_model_exactness(*model, [](const engine::ExactnessCase& way) { std::fprintf(stderr, "  %s\n", way.name().c_str()); });
  if (!report) return refuse(report.error());
  std::printf("%s\n", report->text().c_str());
  return report->failure ? 1 : 0;
}

}  // namespace rubato
