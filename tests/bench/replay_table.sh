#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One recorded trace or load profile against the real daemon: tuned with the twin and without, untuned at the initial settings, and a sweep of static
# settings of which the best is run again at full length. Prints one row each, with the phases of a profile. Build first (./dev build).
#   tests/bench/replay_table.sh TRACE [SECONDS] [SWEEP_SECONDS] [RATE_SCALE] [LENGTH_SCALE]
set -euo pipefail
trace=$(readlink -f "${1:?a trace file}")
seconds=${2:-300}
sweep_seconds=${3:-60}
rate_scale=${4:-1}
length_scale=${5:-0.25}
window=10s
scale=(--rate-scale "$rate_scale" --length-scale "$length_scale")
case $trace in
  *.yaml) window=5s scale=(--format profile) ;;
esac
. "$(dirname "$(readlink -f "$0")")/daemon.sh"

# manifest BUDGET POLICY TUNING: off, plain (without the twin) or twin
manifest() {
  local tuning='enabled: true'
  [ "$3" = off ] && tuning='enabled: false'
  [ "$3" = plain ] && tuning='enabled: true, twin: {enabled: false}'
  sed -e "s/maxNumBatchedTokens: {initial: [0-9]*/maxNumBatchedTokens: {initial: $1/" \
      -e "s/priorityPolicy: {initial: [A-Za-z]*/priorityPolicy: {initial: $2/" \
      -e "s/tuning: {enabled: [a-z]*, window: [0-9a-z]*/tuning: {$tuning, window: $window/" manifests/examples/demo.yaml >"$work/engine.yaml"
}

# row NAME BUDGET POLICY TUNING SECONDS: replays and prints a row; leaves the attainment in $work/attainment
row() {
  manifest "$2" "$3" "$4"
  start_daemon "$work/engine.yaml"
  "$build/daemon/rubato-replay" --url "$data_url" --trace "$trace" --seconds "$5" "${scale[@]}" \
    --max-model-len 4096 --ttft 1s --itl 60ms --attainment 95 --json "$work/report.json" >/dev/null 2>&1
  settings=$(curl -fsS $control_url/apis/rubato.dev/v1alpha1/engines | python3 -c '
import json, sys
s = json.load(sys.stdin)["items"][0]["status"]["settings"]
print(s["priorityPolicy"], s["maxNumBatchedTokens"], s["maxNumSeqs"], "number", s["number"])')
  stop_daemon
  python3 - "$1" "$settings" "$work" <<'PY'
import json, sys
name, settings, work = sys.argv[1:]
report = json.load(open(work + "/report.json"))
o = report["overall"]
print(f'{name:24} {o["requests"]:6} {o["attainmentPercent"]:7.1f} % {o["goodputPerSecond"]:7.2f}/s  ttft p50/p99 {o["ttftMs"]["p50"] or 0:7.0f} {o["ttftMs"]["p99"] or 0:7.0f} ms  itl p99 {o["requestItlMs"]["p99"] or 0:6.0f} ms  {settings}')
for p in report["phases"] if len(report["phases"]) > 1 else []:
    print(f'    {p["name"]:20} {p["requests"]:6} {p["attainmentPercent"]:7.1f} %  on target after {p["recoveredAfterSeconds"]} s')
open(work + "/attainment", "w").write(str(o["attainmentPercent"]))
PY
}

echo "$trace: $seconds s, rate x $rate_scale, lengths x $length_scale; good: TTFT 1 s and p99 gap 60 ms"
row "tuned" 2048 DecodeFirst twin "$seconds"
row "tuned, no twin" 2048 DecodeFirst plain "$seconds"
row "untuned (initial)" 2048 DecodeFirst off "$seconds"
best=-1
for policy in Deadline DecodeFirst ShortestFirst; do
  for budget in 128 256 512 2048; do
    row "sweep $policy $budget" "$budget" "$policy" off "$sweep_seconds"
    if python3 -c "import sys; sys.exit(not float('$(cat "$work/attainment")') > float('$best'))"; then
      best=$(cat "$work/attainment") best_policy=$policy best_budget=$budget
    fi
  done
done
row "best static" "$best_budget" "$best_policy" off "$seconds"
