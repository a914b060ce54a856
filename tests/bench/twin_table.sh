#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The twin against the real CPU engine: a replay under settings that stay, and for every window what the twin had predicted of TTFT and ITL next to what
# was measured. Prints, per quantile, the two over all windows after the first few, and the median error of a window. Build first (./dev build).
#   tests/bench/twin_table.sh TRACE [SECONDS] [RATE_SCALE] [LENGTH_SCALE] [BUDGET] [POLICY]
set -euo pipefail
trace=$(readlink -f "${1:?a trace file or load profile}")
seconds=${2:-240}
rate_scale=${3:-1}
length_scale=${4:-0.25}
budget=${5:-256}
policy=${6:-Deadline}
scale=(--rate-scale "$rate_scale" --length-scale "$length_scale")
case $trace in
  *.yaml) scale=(--format profile) ;;
esac
. "$(dirname "$(readlink -f "$0")")/daemon.sh"

# An attainment that nobody misses: the tuner holds, and every window is checked under the same settings.
sed -e "s/maxNumBatchedTokens: {initial: [0-9]*/maxNumBatchedTokens: {initial: $budget/" \
    -e "s/priorityPolicy: {initial: [A-Za-z]*/priorityPolicy: {initial: $policy/" \
    -e "s/attainment: [0-9]*/attainment: 1/" \
    -e "s/tuning: {enabled: true, window: [0-9a-z]*/tuning: {enabled: true, window: 15s/" manifests/examples/demo.yaml >"$work/engine.yaml"
start_daemon "$work/engine.yaml"
"$build/daemon/rubato-replay" --url "$data_url" --trace "$trace" --seconds "$seconds" "${scale[@]}" --max-model-len 4096 --ttft 1s --itl 60ms \
  --json "$work/report.json" >/dev/null 2>&1 &
replay=$!
python3 - "$replay" "$control_url" "$trace" "$policy $budget" <<'PY'
import json, os, statistics, sys, time, urllib.request

replay, control, trace, settings = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
warm = 3  # windows that only teach
checks = {}


def duration(text):
    total, number = 0.0, ""
    units = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    i = 0
    while i < len(text):
        j = i
        while text[j] in "0123456789.":
            j += 1
        k = j
        while k < len(text) and text[k].isalpha():
            k += 1
        total += float(text[i:j]) * units[text[j:k]]
        i = k
    return total


def alive(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


while alive(replay):
    with urllib.request.urlopen(control + "/apis/rubato.dev/v1alpha1/engines") as reply:
        twin = json.load(reply)["items"][0]["status"].get("twin", {})
    if "lastCheck" in twin:
        checks[twin["windows"]] = twin
    time.sleep(1)
last = checks[max(checks)] if checks else {}
judged = [checks[n]["lastCheck"] for n in sorted(checks) if n > warm]
if not judged:
    sys.exit("too few requests for windows that can be checked: a longer replay, or more requests")
print(f"{os.path.basename(trace)}, {settings}: {len(judged)} windows after {warm}, {last['state']}, step error {last['stepErrorPercent']} %, "
      f"{float(last['simulatedSeconds'].rstrip('s') if isinstance(last['simulatedSeconds'], str) else last['simulatedSeconds']):.0f} s simulated in "
      f"{last['cpuSeconds']} s of CPU")
for quantile in ("ttftP50", "ttftP99", "itlP50", "itlP99"):
    predicted = [duration(c["predicted"][quantile]) for c in judged]
    measured = [duration(c["measured"][quantile]) for c in judged]
    of_window = statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured) if m > 0)
    overall = statistics.median(predicted) / statistics.median(measured) - 1
    print(f"  {quantile:8} predicted {1e3 * statistics.median(predicted):8.1f} ms  measured {1e3 * statistics.median(measured):8.1f} ms  "
          f"over all {100 * overall:+6.1f} %  median of a window {100 * of_window:5.1f} %")
PY
wait "$replay" || true
