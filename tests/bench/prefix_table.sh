#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A trace with shared prefixes (Mooncake's hash_ids) against the real daemon, with prefix caching and without, in turns: hit rate beside the most
# that the trace allows, and TTFT. Models: an attention model and one with recurrent layers. Build first (./dev build).
#   tests/bench/prefix_table.sh TRACE [SECONDS] [RATE_SCALE] [LENGTH_SCALE] [REPEATS]
set -euo pipefail
trace=$(readlink -f "${1:?a Mooncake trace}")
seconds=${2:-120}
rate_scale=${3:-1}
length_scale=${4:-0.03125}
repeats=${5:-1}
. "$(dirname "$(readlink -f "$0")")/daemon.sh"

# Small, so that two cores keep up with a good part of an hour's traffic in minutes.
llama='{architecture: Llama, hiddenSize: 256, layers: 4, heads: 4, kvHeads: 2, feedForward: 704, vocabulary: 4096, seed: 1}'
hybrid='{architecture: Hybrid, hiddenSize: 256, layers: 4, heads: 4, kvHeads: 2, feedForward: 704, attentionEvery: 4, mambaHeads: 8, vocabulary: 4096, seed: 1}'
mamba2='{architecture: Mamba2, hiddenSize: 256, layers: 6, mambaHeads: 8, vocabulary: 4096, seed: 1}'

# row NAME MODEL ENABLED MEMORY
row() {
  cat >"$work/engine.yaml" <<YAML
apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: bench}
spec:
  model: {synthetic: $2, dtype: BFloat16}
  capacity: {maxModelLen: 4096, maxNumSeqs: 32, kvCacheMemory: $4}
  prefixCaching: {enabled: $3}
  objectives: {ttft: 1s, itl: 100ms, attainment: 95}
  knobs:
    maxNumBatchedTokens: {initial: 512, min: 64, max: 2048}
    maxNumSeqs: {initial: 32, min: 8, max: 32}
  tuning: {enabled: false}
YAML
  start_daemon "$work/engine.yaml"
  "$build/daemon/rubato-replay" --url "$data_url" --trace "$trace" --format mooncake --seconds "$seconds" --rate-scale "$rate_scale" \
    --length-scale "$length_scale" --max-model-len 4096 --ttft 1s --itl 100ms --json "$work/report.json" >/dev/null 2>&1
  evictions=$(curl -fsS $control_url/metrics | awk '/^rubato_prefix_cache_evictions_total/ { sum += $NF } END { print sum + 0 }')
  stop_daemon
  python3 - "$1" "$3" "$evictions" "$work/report.json" <<'PY'
import json, sys
name, enabled, evictions, path = sys.argv[1:]
o = json.load(open(path))["overall"]
part = lambda key: 100 * o[key] / max(o["promptTokens"], 1)
print(f'{name:8} {"on" if enabled == "true" else "off":4} {o["requests"]:6} {sum(o["failures"].values()):6} {part("cachedTokens"):7.1f} % of {part("sharedTokens"):4.1f} %  '
      f'ttft p50/p90/p99 {o["ttftMs"]["p50"] or 0:6.0f} {o["ttftMs"]["p90"] or 0:6.0f} {o["ttftMs"]["p99"] or 0:6.0f} ms  attained {o["attainmentPercent"]:5.1f} %  evicted {evictions}')
PY
}

echo "$trace: $seconds s, rate x $rate_scale, lengths x $length_scale; cached: prompt tokens from the cache, of what the trace allows without limits"
for _ in $(seq "$repeats"); do
  for enabled in true false; do
    row llama "$llama" "$enabled" 2Gi
    row hybrid "$hybrid" "$enabled" 2Gi
    row mamba2 "$mamba2" "$enabled" 2Gi
  done
done
