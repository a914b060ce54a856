// SPDX-License-Identifier: Apache-2.0
// Names, help texts and bucket edges of every series.
#include "daemon/metrics/series.h"

#include <algorithm>
#include <cmath>

#include "manifests/settings.h"

namespace rubato::metrics {
namespace {

// Seconds. vLLM's edges as its dashboards expect them; rubato's own reach from half a millisecond to beyond two minutes.
const Edges compatible_ttft{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                            1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
const Edges compatible_gap{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
const Edges compatible_request{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const Edges own_ttft{.0005, .001, .005, .01, .02, .05, .1, .2, .3, .5, .75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640};
const Edges own_gap{.0005, .001, .0025, .005, .01, .015, .02, .025, .03, .04, .05, .075, .1,
                    .15,   .2,   .3,    .5,   .75, 1,    2.5, 5,    10,  30,  60,  120,  240};
const Edges step_seconds{.0001, .00025, .0005, .001, .0025, .005, .01, .02, .03, .05, .075,
                         .1,    .15,    .2,    .3,   .5,    1,    2.5, 5,   10,  60};
const Edges planning_seconds{1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2, 1e-1};
const Edges token_counts{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
const Edges shape_build_seconds{1e-4, 1e-3, 1e-2, .1, .25, .5, 1, 2.5, 5, 10, 30, 100};
const Edges shape_swap_seconds{1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, .1, 1};
const Edges relative_errors{.01, .02, .05, .1, .2, .3, .5, .75, 1, 2, 5};

}  // namespace

Edges with_edge(Edges edges, double limit) {
  const auto at = std::lower_bound(edges.begin(), edges.end(), limit);
  if (limit > 0 && (at == edges.end() || *at != limit)) edges.insert(at, limit);
  return edges;
}

void raise_to(prometheus::Counter& counter, double total) {
  const double missing = total - counter.Value();
  if (missing > 0) counter.Increment(missing);
}

Edges one_two_five(std::int32_t limit) {
  Edges edges;
  for (double power = 1;; power *= 10) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      edges.push_back(digit * power);
      if (digit * power >= limit) return edges;
    }
  }
}

prometheus::Family<prometheus::Counter>& Declare::counters(const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry_);
}
prometheus::Family<prometheus::Gauge>& Declare::gauges(const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry_);
}

prometheus::Counter& Declare::counter(const char* name, const char* help, const Labels& labels) {
  Labels all = labels_;
  all.insert(labels.begin(), labels.end());
  return counters(name, help).Add(all);
}
prometheus::Gauge& Declare::gauge(const char* name, const char* help, const Labels& labels) {
  Labels all = labels_;
  all.insert(labels.begin(), labels.end());
  return gauges(name, help).Add(all);
}
prometheus::Histogram& Declare::histogram(const char* name, const char* help, const Edges& edges) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry_).Add(labels_, edges);
}

namespace {

constexpr const char* success_name = "vllm:request_success_total";
constexpr const char* success_help = "Count of ended requests by reason.";

GoodBad slo(Declare& own, const char* objective) {
  constexpr const char* name = "rubato_slo_requests_total";
  constexpr const char* help =
      "Requests judged against their own targets; refused ones count as bad. Exact, whatever the histogram edges are.";
  return {.good = own.counter(name, help, {{"objective", objective}, {"result", "good"}}),
          .bad = own.counter(name, help, {{"objective", objective}, {"result", "bad"}})};
}

prometheus::Counter& ended(Declare& own, const char* outcome) {
  return own.counter("rubato_requests_total", "Ended requests (choices) by outcome.", {{"outcome", outcome}});
}
prometheus::Gauge& knob(Declare& own, const char* name) {
  return own.gauge("rubato_knob", "Value of an integer knob in the current settings.", {{"knob", name}});
}
prometheus::Counter& steps(Declare& own, const char* kind) {
  return own.counter("rubato_steps_total", "Executed steps: decode rows only, prefill chunks only, or both.", {{"kind", kind}});
}
prometheus::Counter& shape_steps(Declare& own, const char* kind) {
  return own.counter("rubato_shape_steps_total", "Executed steps that ran in a prepared shape, or eagerly.", {{"kind", kind}});
}
prometheus::Counter& shape_rebuilds(Declare& own, const char* result) {
  return own.counter("rubato_shape_rebuilds_total", "Sets of step shapes built in the background, by result.",
                     {{"result", result}});
}
prometheus::Gauge& state_slots(Declare& own, const char* use) {
  return own.gauge("rubato_state_slots", "Slots of recurrent state, by what they hold; all zero for models without.",
                   {{"use", use}});
}
prometheus::Counter& evictions(Declare& own, const char* kind) {
  return own.counter("rubato_prefix_cache_evictions_total", "Cached blocks and snapshots whose room was needed.",
                     {{"kind", kind}});
}
prometheus::Counter& reloads(Declare& own, const char* result) {
  return own.counter("rubato_manifest_reloads_total", "Changed manifest contents seen, by result.", {{"result", result}});
}

}  // namespace

CompatibleSeries::CompatibleSeries(Declare vllm, const MetricsOptions& options)
    : requests_running(vllm.gauge("vllm:num_requests_running", "Requests that hold KV blocks.")),
      requests_waiting(vllm.gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.")),
      kv_cache_usage(vllm.gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 means 100 percent.")),
      prompt_tokens(vllm.counter(
          "vllm:prompt_tokens_total",
          "Prompt tokens of requests that got their first token; each prompt counts once, however often it was recomputed.")),
      generation_tokens(vllm.counter("vllm:generation_tokens_total", "Tokens generated.")),
      preemptions(vllm.counter("vllm:num_preemptions_total", "Preemptions of running requests.")),
      prefix_cache_queries(vllm.counter("vllm:prefix_cache_queries_total",
                                        "Tokens of admitted sequences that were looked up in the prefix cache.")),
      prefix_cache_hits(vllm.counter("vllm:prefix_cache_hits_total", "Of the tokens looked up: found, and not computed again.")),
      success_stop(vllm.counter(success_name, success_help, {{"finished_reason", "stop"}})),
      success_length(vllm.counter(success_name, success_help, {{"finished_reason", "length"}})),
      success_abort(vllm.counter(success_name, success_help, {{"finished_reason", "abort"}})),
      success_error(vllm.counter(success_name, success_help, {{"finished_reason", "error"}})),
      time_to_first_token(vllm.histogram("vllm:time_to_first_token_seconds", "Time to first token.", compatible_ttft)),
      inter_token_latency(
          vllm.histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a request.", compatible_gap)),
      time_per_output_token(vllm.histogram("vllm:request_time_per_output_token_seconds",
                                           "Mean time per output token after the first, per finished request.", compatible_gap)),
      e2e_latency(vllm.histogram("vllm:e2e_request_latency_seconds", "Arrival to end of finished requests.", compatible_request)),
      queue_time(
          vllm.histogram("vllm:request_queue_time_seconds", "Arrival to first step of finished requests.", compatible_request)),
      prefill_time(vllm.histogram("vllm:request_prefill_time_seconds", "First step to first token of finished requests.",
                                  compatible_request)),
      decode_time(
          vllm.histogram("vllm:request_decode_time_seconds", "First token to end of finished requests.", compatible_request)),
      inference_time(
          vllm.histogram("vllm:request_inference_time_seconds", "First step to end of finished requests.", compatible_request)),
      request_prompt_tokens(vllm.histogram("vllm:request_prompt_tokens", "Prompt tokens of finished requests.",
                                           one_two_five(options.max_model_len))),
      request_generation_tokens(vllm.histogram("vllm:request_generation_tokens", "Generated tokens of finished requests.",
                                               one_two_five(options.max_model_len))),
      max_generation_tokens(vllm.histogram("vllm:request_max_num_generation_tokens",
                                           "Largest output that finished requests allowed.",
                                           one_two_five(options.max_model_len))),
      params_n(vllm.histogram("vllm:request_params_n", "The n parameter of requests.", {1, 2, 5, 10, 20})),
      params_max_tokens(vllm.histogram("vllm:request_params_max_tokens", "The max_tokens parameter of requests.",
                                       one_two_five(options.max_model_len))),
      iteration_tokens(vllm.histogram("vllm:iteration_tokens_total", "Tokens per engine step.", token_counts)) {
  vllm.gauge("vllm:cache_config_info", "Shape of the KV cache.",
             {{"block_size", std::to_string(kv_block_tokens)},
              {"enable_prefix_caching", options.prefix_caching ? "True" : "False"},
              {"num_gpu_blocks", std::to_string(options.kv_block_count)}})
      .Set(1);
}

OwnSeries::OwnSeries(Declare own, const MetricsOptions& options)
    : slo_ttft(slo(own, "ttft")),
      slo_itl(slo(own, "itl")),
      slo_both(slo(own, "both")),
      time_to_first_token(own.histogram("rubato_time_to_first_token_seconds",
                                        "Time to first token; the objective of the start is an edge.",
                                        with_edge(own_ttft, to_seconds(options.objectives.ttft)))),
      inter_token_latency(own.histogram("rubato_inter_token_latency_seconds",
                                        "Gap between two tokens of a request; the objective of the start is an edge.",
                                        with_edge(own_gap, to_seconds(options.objectives.itl)))),
      objective_ttft(own.gauge("rubato_objective_seconds", "Latency objective in force.", {{"objective", "ttft"}})),
      objective_itl(own.gauge("rubato_objective_seconds", "Latency objective in force.", {{"objective", "itl"}})),
      objective_attainment(own.gauge("rubato_objective_attainment_ratio", "Share of requests that must meet both objectives.")),
      requests_stop(ended(own, "stop")),
      requests_length(ended(own, "length")),
      requests_aborted(ended(own, "aborted")),
      requests_failed(ended(own, "failed")),
      requests_arrived(own.counter("rubato_requests_arrived_total", "Requests (choices) that entered the waiting queue.")),
      requests_rejected(own.counter("rubato_requests_rejected_total", "Requests refused at the edge: queue full or draining.")),
      knob_max_num_batched_tokens(knob(own, "maxNumBatchedTokens")),
      knob_max_num_seqs(knob(own, "maxNumSeqs")),
      knob_deadline_margin(knob(own, "deadlineMargin")),
      knob_prefill_share(knob(own, "prefillShare")),
      knob_prefill_devices(knob(own, "prefillDevices")),
      knob_info(own.gauges("rubato_knob_info", "Choices in the current settings, as labels.")),
      settings_number(own.gauge("rubato_settings_number", "Number of the current settings; grows with each change.")),
      settings_changes(
          own.counters("rubato_settings_changes_total", "Changes of the current settings by the layer that caused them.")),
      trials(own.counters("rubato_trials_total", "Finished live trials by outcome.")),
      searches(own.counter("rubato_searches_total", "Searches started by the tuner.")),
      rollbacks(own.counter("rubato_rollbacks_total", "Trials that gave way to the incumbent again.")),
      manifest_reload_failed(own.gauge("rubato_manifest_reload_failed",
                                       "1 while the manifest on disk is refused and the last good one is in force.")),
      manifest_reloads_success(reloads(own, "success")),
      manifest_reloads_failure(reloads(own, "failure")),
      step_duration(own.histogram("rubato_step_duration_seconds", "Duration of a step.", step_seconds)),
      step_planning(own.histogram("rubato_step_planning_seconds", "Scheduling and bookkeeping of a step.", planning_seconds)),
      step_tokens(own.histogram("rubato_step_tokens", "Tokens in a step, decode rows and chunks together.", token_counts)),
      step_prediction_error(own.histogram("rubato_step_prediction_error_ratio",
                                          "Distance of the predicted from the measured step duration, relative to the measured.",
                                          relative_errors)),
      steps_decode(steps(own, "decode")),
      steps_prefill(steps(own, "prefill")),
      steps_mixed(steps(own, "mixed")),
      shapes(own.gauge("rubato_shapes", "Token buckets in the set of step shapes in use.")),
      shape_bytes(own.gauge("rubato_shape_bytes", "Memory of the set of step shapes in use.")),
      shape_steps_shape(shape_steps(own, "shape")),
      shape_steps_eager(shape_steps(own, "eager")),
      shape_padding_tokens(
          own.counter("rubato_shape_padding_tokens_total", "Tokens computed beyond those of the steps, to fill their shapes.")),
      shape_rebuilds_ok(shape_rebuilds(own, "ok")),
      shape_rebuilds_failed(shape_rebuilds(own, "failed")),
      shape_build(own.histogram("rubato_shape_build_seconds",
                                "Building of a set of step shapes, beside the running steps; failed ones too.",
                                shape_build_seconds)),
      shape_swap(own.histogram("rubato_shape_swap_seconds", "Time between two steps that the change to a new set took.",
                               shape_swap_seconds)),
      requests_prefilling(own.gauge("rubato_requests_prefilling", "Running requests with prompt tokens left to compute.")),
      kv_blocks_free(own.gauge("rubato_kv_blocks_free", "KV blocks that no request holds, cached ones included.")),
      kv_blocks_cached(
          own.gauge("rubato_kv_blocks_cached", "KV blocks that a prompt may find in the prefix cache, in use or not.")),
      state_slots_running(state_slots(own, "running")),
      state_slots_snapshot(state_slots(own, "snapshot")),
      state_slots_free(state_slots(own, "free")),
      evicted_blocks(evictions(own, "block")),
      evicted_snapshots(evictions(own, "snapshot")),
      decode_gap_steps_max(
          own.gauge("rubato_decode_gap_steps_max", "Largest number of consecutive steps that left a decoding request out.")),
      prefill_gap_steps_max(own.gauge("rubato_prefill_gap_steps_max",
                                      "Largest number of consecutive steps without a chunk of the oldest prefill.")),
      http_connections(own.gauges("rubato_http_connections", "Open HTTP connections by port.")),
      cpu_seconds(own.counter("process_cpu_seconds_total", "User and system CPU time spent.")),
      start_time(own.gauge("process_start_time_seconds", "Start time of the process since the epoch.")),
      resident_bytes(own.gauge("process_resident_memory_bytes", "Resident memory.")),
      virtual_bytes(own.gauge("process_virtual_memory_bytes", "Virtual memory.")),
      threads(own.gauge("process_threads", "Threads of the process.")),
      open_descriptors(own.gauge("process_open_fds", "Open file descriptors.")),
      descriptors_max(own.gauge("process_max_fds", "Largest number of open file descriptors.")) {
  own.gauge("rubato_build_info", "Version and backend, as labels.", {{"version", options.version}, {"backend", options.backend}})
      .Set(1);
}

}  // namespace rubato::metrics
