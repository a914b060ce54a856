// SPDX-License-Identifier: Apache-2.0
// The list of series, made once at start: one line per name with its help text. Private to metrics/; the only header that shows
// prometheus-cpp.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <string>
#include <string_view>

#include "daemon/metrics/metrics.h"

namespace rubato::metrics {

using Labels = std::map<std::string, std::string>;
using Edges = prometheus::Histogram::BucketBoundaries;

/// Fixed edges with a limit as an edge of its own, so that `le` of the limit exists and can be judged exactly.
[[nodiscard]] Edges with_edge(Edges edges, double limit);
/// Raises a counter to a total kept elsewhere. A smaller total is ignored: counters only grow.
void raise_to(prometheus::Counter& counter, double total);
/// 1, 2, 5, 10, 20, 50 ... up to and including the first edge that reaches limit.
[[nodiscard]] Edges one_two_five(std::int32_t limit);

/// Declares families and series in one registry. Names that break the format are a CHECK: they are ours.
class Declare {
 public:
  explicit Declare(prometheus::Registry& registry, Labels labels) : registry_(registry), labels_(std::move(labels)) {}

  prometheus::Counter& counter(const char* name, const char* help, const Labels& labels = {});
  prometheus::Gauge& gauge(const char* name, const char* help, const Labels& labels = {});
  prometheus::Histogram& histogram(const char* name, const char* help, const Edges& edges);
  prometheus::Family<prometheus::Counter>& counters(const char* name, const char* help);
  prometheus::Family<prometheus::Gauge>& gauges(const char* name, const char* help);

 private:
  prometheus::Registry& registry_;
  Labels labels_;  // on every series declared here
};

/// vLLM's names, labels and edges, for dashboards and for the endpoint picker of the Gateway API.
struct CompatibleSeries {
  CompatibleSeries(Declare vllm, const MetricsOptions& options);

  prometheus::Gauge& requests_running;
  prometheus::Gauge& requests_waiting;
  prometheus::Gauge& kv_cache_usage;
  prometheus::Counter& prompt_tokens;
  prometheus::Counter& generation_tokens;
  prometheus::Counter& preemptions;
  prometheus::Counter& prefix_cache_queries;
  prometheus::Counter& prefix_cache_hits;
  prometheus::Counter& success_stop;
  prometheus::Counter& success_length;
  prometheus::Counter& success_abort;
  prometheus::Counter& success_error;
  prometheus::Histogram& time_to_first_token;
  prometheus::Histogram& inter_token_latency;
  prometheus::Histogram& time_per_output_token;
  prometheus::Histogram& e2e_latency;
  prometheus::Histogram& queue_time;
  prometheus::Histogram& prefill_time;
  prometheus::Histogram& decode_time;
  prometheus::Histogram& inference_time;
  prometheus::Histogram& request_prompt_tokens;
  prometheus::Histogram& request_generation_tokens;
  prometheus::Histogram& max_generation_tokens;
  prometheus::Histogram& params_n;
  prometheus::Histogram& params_max_tokens;
  prometheus::Histogram& iteration_tokens;
};

struct GoodBad {
  prometheus::Counter& good;
  prometheus::Counter& bad;
};

/// rubato's own family.
struct OwnSeries {
  OwnSeries(Declare own, const MetricsOptions& options);

  GoodBad slo_ttft;
  GoodBad slo_itl;
  GoodBad slo_both;
  prometheus::Histogram& time_to_first_token;
  prometheus::Histogram& inter_token_latency;
  prometheus::Gauge& objective_ttft;
  prometheus::Gauge& objective_itl;
  prometheus::Gauge& objective_attainment;
  prometheus::Counter& requests_stop;
  prometheus::Counter& requests_length;
  prometheus::Counter& requests_aborted;
  prometheus::Counter& requests_failed;
  prometheus::Counter& requests_arrived;
  prometheus::Counter& requests_rejected;

  prometheus::Gauge& knob_max_num_batched_tokens;
  prometheus::Gauge& knob_max_num_seqs;
  prometheus::Gauge& knob_deadline_margin;
  prometheus::Gauge& knob_prefill_share;
  prometheus::Gauge& knob_prefill_devices;
  prometheus::Family<prometheus::Gauge>& knob_info;
  prometheus::Gauge& settings_number;
  prometheus::Family<prometheus::Counter>& settings_changes;
  prometheus::Family<prometheus::Counter>& trials;
  prometheus::Counter& searches;
  prometheus::Counter& rollbacks;
  prometheus::Gauge& manifest_reload_failed;
  prometheus::Counter& manifest_reloads_success;
  prometheus::Counter& manifest_reloads_failure;

  prometheus::Histogram& step_duration;
  prometheus::Histogram& step_planning;
  prometheus::Histogram& step_tokens;
  prometheus::Histogram& step_prediction_error;
  prometheus::Counter& steps_decode;
  prometheus::Counter& steps_prefill;
  prometheus::Counter& steps_mixed;
  prometheus::Gauge& shapes;
  prometheus::Gauge& shape_bytes;
  prometheus::Counter& shape_steps_shape;
  prometheus::Counter& shape_steps_eager;
  prometheus::Counter& shape_padding_tokens;
  prometheus::Counter& shape_rebuilds_ok;
  prometheus::Counter& shape_rebuilds_failed;
  prometheus::Histogram& shape_build;
  prometheus::Histogram& shape_swap;
  prometheus::Gauge& requests_prefilling;
  prometheus::Gauge& kv_blocks_free;
  prometheus::Gauge& kv_blocks_cached;
  prometheus::Gauge& state_slots_running;
  prometheus::Gauge& state_slots_snapshot;
  prometheus::Gauge& state_slots_free;
  prometheus::Counter& evicted_blocks;
  prometheus::Counter& evicted_snapshots;
  prometheus::Gauge& decode_gap_steps_max;
  prometheus::Gauge& prefill_gap_steps_max;
  prometheus::Family<prometheus::Gauge>& http_connections;

  prometheus::Counter& cpu_seconds;
  prometheus::Gauge& start_time;
  prometheus::Gauge& resident_bytes;
  prometheus::Gauge& virtual_bytes;
  prometheus::Gauge& threads;
  prometheus::Gauge& open_descriptors;
  prometheus::Gauge& descriptors_max;
};

}  // namespace rubato::metrics
