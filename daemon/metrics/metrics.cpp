// SPDX-License-Identifier: Apache-2.0
// Books what the observer calls say and renders the text. The rules of judging stand in the record; here is only which counter
// they move.
#include "daemon/metrics/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <optional>

#include "daemon/metrics/lane_series.h"
#include "daemon/metrics/process.h"
#include "daemon/metrics/series.h"
#include "daemon/metrics/twin_series.h"
#include "manifests/names.h"

namespace rubato {
namespace {

constexpr Duration render_lifetime = std::chrono::milliseconds(50);

double seconds_between(TimePoint begin, TimePoint end) {
  return std::max(0.0, to_seconds(end - begin));
}

}  // namespace

std::string_view to_string(SettingsSource source) {
  switch (source) {
    case SettingsSource::File:
      return "file";
    case SettingsSource::Api:
      return "api";
    case SettingsSource::Override:
      return "override";
    case SettingsSource::Expiry:
      return "expiry";
    case SettingsSource::Tuner:
      return "tuner";
  }
  CHECK(false, static_cast<int>(source));
}

struct Metrics::State {
  explicit State(const MetricsOptions& options)
      : blocks_hold_keys(options.blocks_hold_keys),
        vllm(metrics::Declare(registry, {{"model_name", options.model_name}, {"engine", "0"}}), options),
        own(metrics::Declare(registry, {}), options),
        lanes(metrics::Declare(registry, {}), options),
        twin(metrics::Declare(registry, {})) {
    for (const auto source :
         {SettingsSource::File, SettingsSource::Api, SettingsSource::Override, SettingsSource::Expiry, SettingsSource::Tuner}) {
      own.settings_changes.Add({{"source", std::string(to_string(source))}});
    }
    for (const char* outcome : {"Incumbent", "Worse", "RolledBack", "Inconclusive"}) own.trials.Add({{"outcome", outcome}});
  }

  void book_counts(const policies::SchedulerCounts& counts) {
    vllm.requests_running.Set(counts.running);
    vllm.requests_waiting.Set(counts.waiting);
    own.requests_prefilling.Set(counts.prefilling);
    own.kv_blocks_free.Set(counts.free_blocks);
    own.kv_blocks_cached.Set(counts.cached_blocks);
    own.state_slots_running.Set(counts.states_running);
    own.state_slots_snapshot.Set(counts.states_snapshot);
    own.state_slots_free.Set(counts.state_count - counts.states_running - counts.states_snapshot);
    metrics::raise_to(own.evicted_blocks, static_cast<double>(counts.evicted_blocks));
    metrics::raise_to(own.evicted_snapshots, static_cast<double>(counts.evicted_snapshots));
    metrics::raise_to(vllm.prefix_cache_queries, static_cast<double>(counts.prefix_queries));
    metrics::raise_to(vllm.prefix_cache_hits, static_cast<double>(counts.prefix_hits));
    // What is fullest decides when requests must wait.
    const auto share = [](std::int32_t used, std::int32_t all) { return all > 0 ? static_cast<double>(used) / all : 0.0; };
    const double blocks = blocks_hold_keys ? share(counts.block_count - counts.free_blocks, counts.block_count) : 0.0;
    vllm.kv_cache_usage.Set(std::max(blocks, share(counts.states_running, counts.state_count)));
    own.decode_gap_steps_max.Set(counts.decode_gap_steps_max);
    own.prefill_gap_steps_max.Set(counts.prefill_gap_steps_max);
  }

  void book_shapes(const ServingStatus& status) {
    std::size_t buckets = 0;
    std::int64_t bytes = 0;
    for (const LaneStatus& lane : status.lanes) {
      if (!lane.shapes) continue;
      buckets += lane.shapes->buckets.tokens.size();
      bytes += lane.shapes->bytes;
    }
    own.shapes.Set(static_cast<double>(buckets));
    own.shape_bytes.Set(static_cast<double>(bytes));
  }

  void judge(const RequestRecord& record);
  void book_finished_times(const RequestRecord& record);
  void refresh_from_sources();

  prometheus::Registry registry;
  const bool blocks_hold_keys;
  metrics::CompatibleSeries vllm;
  metrics::OwnSeries own;
  metrics::LaneGroupSeries lanes;
  metrics::TwinSeries twin;
  MetricsSources sources;

  std::mutex knob_info_mutex;
  prometheus::Gauge* knob_info = nullptr;  // the one series of its family that says what is current

  std::atomic<std::uint64_t> settings_seen{0};  // a rendering older than the newest settings is never served again
  std::mutex render_mutex;
  std::shared_ptr<const std::string> rendered;
  TimePoint rendered_at;
  std::uint64_t rendered_settings = 0;
};

Metrics::Metrics(const MetricsOptions& options) : state_(std::make_unique<State>(options)) {
  set_objectives(options.objectives);
}
Metrics::~Metrics() = default;

void Metrics::set_sources(MetricsSources sources) {
  const std::lock_guard lock(state_->render_mutex);  // the control port may be scraped already
  state_->sources = std::move(sources);
}

void Metrics::on_arrival(const Arrival& arrival) {
  state_->own.requests_arrived.Increment();
  state_->vllm.params_max_tokens.Observe(arrival.max_new_tokens);
}

void Metrics::on_rejected(TimePoint /*now*/, std::int32_t choices) {
  auto& own = state_->own;
  own.requests_rejected.Increment();
  // A refused request met nothing: leaving it out would show a saturated node as a good one.
  own.slo_both.bad.Increment(choices);
  own.slo_ttft.bad.Increment(choices);
}

void Metrics::on_token_gap(SequenceId /*id*/, Duration gap) {
  const double seconds = to_seconds(gap);
  state_->vllm.inter_token_latency.Observe(seconds);
  state_->own.inter_token_latency.Observe(seconds);
}

void Metrics::on_first_token(const Arrival& arrival, Duration ttft) {
  state_->vllm.prompt_tokens.Increment(arrival.prompt_tokens);  // once, however often it is recomputed
  const double seconds = to_seconds(ttft);
  state_->vllm.time_to_first_token.Observe(seconds);
  state_->own.time_to_first_token.Observe(seconds);
}

void Metrics::State::judge(const RequestRecord& record) {
  if (record.verdict == Verdict::Good) own.slo_both.good.Increment();
  if (record.verdict == Verdict::Bad) own.slo_both.bad.Increment();

  // One that ended Bad without a first token never met TTFT; one that failed never gave all its tokens in time.
  const bool bad = record.verdict == Verdict::Bad;
  if (record.ttft_missed || (bad && !record.first_token)) {
    own.slo_ttft.bad.Increment();
  } else if (record.first_token) {
    own.slo_ttft.good.Increment();
  }
  if (record.itl_missed || (bad && record.outcome == Outcome::Failed)) {
    own.slo_itl.bad.Increment();
  } else if (record.outcome == Outcome::Stop || record.outcome == Outcome::Length) {
    own.slo_itl.good.Increment();
  }
}

void Metrics::State::book_finished_times(const RequestRecord& record) {
  vllm.e2e_latency.Observe(seconds_between(record.arrival, record.end));
  if (record.scheduled) {
    vllm.queue_time.Observe(seconds_between(record.arrival, *record.scheduled));
    vllm.inference_time.Observe(seconds_between(*record.scheduled, record.end));
    if (record.first_token) vllm.prefill_time.Observe(seconds_between(*record.scheduled, *record.first_token));
  }
  if (record.first_token) vllm.decode_time.Observe(seconds_between(*record.first_token, record.end));
  if (record.output_tokens > 1) vllm.time_per_output_token.Observe(to_seconds(record.itl_mean));
  vllm.request_prompt_tokens.Observe(record.prompt_tokens);
  vllm.request_generation_tokens.Observe(record.output_tokens);
  vllm.max_generation_tokens.Observe(record.max_new_tokens);
}

void Metrics::on_request_end(const RequestRecord& record) {
  auto& vllm = state_->vllm;
  auto& own = state_->own;
  switch (record.outcome) {
    case Outcome::Stop:
      vllm.success_stop.Increment();
      own.requests_stop.Increment();
      break;
    case Outcome::Length:
      vllm.success_length.Increment();
      own.requests_length.Increment();
      break;
    case Outcome::Aborted:
      vllm.success_abort.Increment();
      own.requests_aborted.Increment();
      break;
    case Outcome::Failed:
      vllm.success_error.Increment();
      own.requests_failed.Increment();
      break;
  }
  state_->judge(record);
  if (record.outcome == Outcome::Stop || record.outcome == Outcome::Length) state_->book_finished_times(record);
}

void Metrics::on_step(const engine::StepRecord& record, const policies::SchedulerCounts& counts) {
  auto& vllm = state_->vllm;
  auto& own = state_->own;
  const auto& features = record.features;
  if (record.sampled > 0) vllm.generation_tokens.Increment(record.sampled);
  if (record.preempted > 0) vllm.preemptions.Increment(record.preempted);
  vllm.iteration_tokens.Observe(features.tokens);
  own.step_tokens.Observe(features.tokens);
  const double duration = seconds_between(record.begin, record.end);
  own.step_duration.Observe(duration);
  own.step_planning.Observe(to_seconds(record.planning));
  if (duration > 0) own.step_prediction_error.Observe(std::abs(to_seconds(record.predicted) - duration) / duration);
  if (features.prefill_rows == 0) {
    own.steps_decode.Increment();
  } else if (features.decode_rows == 0) {
    own.steps_prefill.Increment();
  } else {
    own.steps_mixed.Increment();
  }
  (record.bucket ? own.shape_steps_shape : own.shape_steps_eager).Increment();
  if (record.padding_tokens > 0) own.shape_padding_tokens.Increment(record.padding_tokens);
  state_->lanes.on_step(record);
  state_->book_counts(counts);
}

void Metrics::on_shapes_built(const engine::ShapeBuild& build) {
  auto& own = state_->own;
  (build.outcome ? own.shape_rebuilds_ok : own.shape_rebuilds_failed).Increment();
  own.shape_build.Observe(to_seconds(build.duration));
}

void Metrics::on_shapes_taken(Duration swap) {
  state_->own.shape_swap.Observe(to_seconds(swap));
}

void Metrics::on_settings(const Settings& settings, TimePoint /*now*/) {
  auto& own = state_->own;
  own.settings_number.Set(static_cast<double>(settings.number));
  own.knob_max_num_batched_tokens.Set(settings.knobs.max_num_batched_tokens);
  own.knob_max_num_seqs.Set(settings.knobs.max_num_seqs);
  own.knob_deadline_margin.Set(settings.knobs.deadline_margin);
  own.knob_prefill_share.Set(settings.knobs.prefill_share);
  own.knob_prefill_devices.Set(settings.knobs.prefill_devices);
  {
    const std::lock_guard lock(state_->knob_info_mutex);
    auto& now_current = own.knob_info.Add({{"mode", std::string(to_string(settings.knobs.mode))},
                                           {"policy", std::string(to_string(settings.knobs.priority_policy))},
                                           {"reservation", std::string(to_string(settings.knobs.reservation))}});
    if (state_->knob_info != nullptr && state_->knob_info != &now_current) own.knob_info.Remove(state_->knob_info);
    now_current.Set(1);
    state_->knob_info = &now_current;
  }
  state_->settings_seen.fetch_add(1, std::memory_order_release);
}

void Metrics::on_request(std::int32_t choices) {
  state_->vllm.params_n.Observe(choices);
}

void Metrics::on_settings_change(SettingsSource source) {
  state_->own.settings_changes.Add({{"source", std::string(to_string(source))}}).Increment();
}

void Metrics::on_trial(std::string_view outcome) {
  state_->own.trials.Add({{"outcome", std::string(outcome)}}).Increment();
}

void Metrics::on_tuner(const tuner::TunerStatus& status) {
  metrics::raise_to(state_->own.searches, static_cast<double>(status.searches_total));
  metrics::raise_to(state_->own.rollbacks, static_cast<double>(status.rollbacks_total));
  metrics::raise_to(state_->twin.early_rollbacks, static_cast<double>(status.early_rollbacks_total));
  metrics::raise_to(state_->twin.load_alarms, static_cast<double>(status.alarms_total));
  state_->twin.risk.Set(status.risk_used);
}

void Metrics::on_twin(const tuner::TwinStatus& status, Duration cpu, std::uint64_t feed_dropped) {
  state_->twin.book(status, cpu, feed_dropped);
}

void Metrics::set_objectives(const ObjectivesSpec& objectives) {
  auto& own = state_->own;
  own.objective_ttft.Set(to_seconds(objectives.ttft));
  own.objective_itl.Set(to_seconds(objectives.itl));
  own.objective_attainment.Set(objectives.attainment / 100.0);
}

void Metrics::on_manifest_reload(const Result<void>& outcome) {
  auto& own = state_->own;
  own.manifest_reload_failed.Set(outcome ? 0 : 1);
  (outcome ? own.manifest_reloads_success : own.manifest_reloads_failure).Increment();
}

void Metrics::State::refresh_from_sources() {
  if (sources.serving) {
    if (const auto status = sources.serving()) {
      book_counts(status->counts);
      book_shapes(*status);
      lanes.book(*status);
    }
  }
  for (const auto& [port, count] : sources.connections) own.http_connections.Add({{"port", port}}).Set(count());
  const ProcessUsage usage = read_process_usage();
  metrics::raise_to(own.cpu_seconds, usage.cpu_seconds);
  own.start_time.Set(usage.start_time_seconds);
  own.resident_bytes.Set(static_cast<double>(usage.resident_bytes));
  own.virtual_bytes.Set(static_cast<double>(usage.virtual_bytes));
  own.threads.Set(static_cast<double>(usage.threads));
  own.open_descriptors.Set(static_cast<double>(usage.open_descriptors));
  own.descriptors_max.Set(static_cast<double>(usage.descriptors_max));
}

std::shared_ptr<const std::string> Metrics::render(TimePoint now) {
  const std::lock_guard lock(state_->render_mutex);
  const std::uint64_t settings = state_->settings_seen.load(std::memory_order_acquire);
  const bool fresh = state_->rendered != nullptr && state_->rendered_settings == settings && now >= state_->rendered_at &&
                     now - state_->rendered_at < render_lifetime;
  if (!fresh) {
    state_->refresh_from_sources();
    state_->rendered = std::make_shared<const std::string>(prometheus::TextSerializer().Serialize(state_->registry.Collect()));
    state_->rendered_at = now;
    state_->rendered_settings = settings;
  }
  return state_->rendered;
}

}  // namespace rubato
