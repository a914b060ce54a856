#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Chunked against disaggregated on this machine's CPU: long prompts arrive among steady decoders on the real daemon, and for each setting the clients'
# own clocks give ITL and TTFT. Then each reservation policy with fewer decode slots than prompts, and what running streams feel of a switch. Build
# first (./dev build); wants an otherwise idle machine.
#   tests/bench/mode_table.sh [SECONDS_PER_ROW] [BUILD_FOLDER]
set -euo pipefail
seconds=${1:-30}
build=${2:-build/release}
. "$(dirname "$(readlink -f "$0")")/daemon.sh"

# serve DEVICES MAX_NUM_SEQS
serve() {
  cat >"$work/engine.yaml" <<YAML
apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: modes}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 768, layers: 12, heads: 12, kvHeads: 4, feedForward: 2048, vocabulary: 4096, seed: 1}
    dtype: BFloat16
  devices: [$1]
  capacity: {maxModelLen: 4096, maxNumSeqs: $2, kvCacheMemory: 1536Mi}
  objectives: {ttft: 5s, itl: 100ms, attainment: 95}
  knobs:
    maxNumBatchedTokens: {initial: 512, min: 64, max: 2048}
    priorityPolicy: {initial: DecodeFirst, choices: [DecodeFirst, Deadline]}
    maxNumSeqs: {initial: $2, min: 4, max: $2}
    mode: {initial: Chunked, choices: [Chunked, Disaggregated]}
  tuning: {enabled: false}
YAML
  start_daemon "$work/engine.yaml"
}

cat >"$work/load.py" <<'PY'
import json, socket, sys, threading, time, urllib.request

part, seconds = sys.argv[1], float(sys.argv[2])
data, control = ("127.0.0.1", 18000), "http://127.0.0.1:18080/apis/rubato.dev/v1alpha1/engines/modes"


def patch(fields):
    body = json.dumps({"spec": {"override": fields}}).encode()
    urllib.request.urlopen(urllib.request.Request(control, body, {"Content-Type": "application/merge-patch+json"}, method="PATCH")).read()


class Request(threading.Thread):
    """One streamed completion; the times at which its tokens arrived."""

    def __init__(self, number, prompt, tokens):
        super().__init__(daemon=True)
        self.times, self.begun, self.error = [], time.monotonic(), None
        self.body = json.dumps({"model": "modes", "prompt": [(i * 31 + number * 7) % 4000 + 1 for i in range(prompt)], "max_tokens": tokens,
                                "temperature": 0, "ignore_eos": True, "stream": True})
        self.start()

    def run(self):
        connection = socket.create_connection(data)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(("POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                            "Content-Length: %d\r\n\r\n%s" % (len(self.body), self.body)).encode())
        while True:
            received = connection.recv(65536)
            now = time.monotonic()
            self.times += [now] * received.count(b"data: {")
            if b'"error"' in received:
                self.error = received.decode(errors="replace")
            if not received or b"[DONE]" in received or over.is_set():
                return

    def gaps(self, begin, end):
        return [(b, b - a) for a, b in zip(self.times, self.times[1:]) if begin <= b <= end]


def at(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def quantiles(values, digits=0):
    return "%.*f / %.*f" % (digits, 1000 * at(values, 0.5), digits, 1000 * at(values, 0.99))


over = threading.Event()
serial = iter(range(1, 1 << 30))


def measure(decoders, prompt, interval, answer):
    """Decoders that never end, and a long prompt each interval; ITL of the decoders, TTFT of the prompts, everything in the second half and later."""
    settle = 3.0
    steady = [Request(next(serial), 32, 3900) for _ in range(decoders)]
    while not all(len(stream.times) > 3 for stream in steady):
        time.sleep(0.05)
    prompts, begin = [], time.monotonic() + settle
    end = begin + seconds
    following = time.monotonic()
    while time.monotonic() < end:
        if time.monotonic() >= following:
            prompts.append(Request(next(serial), prompt, answer))
            following += interval
        time.sleep(0.01)
    gaps = [gap for stream in steady for _, gap in stream.gaps(begin, end)]
    first = [p.times[0] - p.begun for p in prompts if p.times and p.begun >= begin - settle]
    second = [p.times[1] - p.times[0] for p in prompts if len(p.times) > 1]
    waiting = sum(1 for p in prompts if not p.times)
    errors = [r.error for r in steady + prompts if r.error]
    over.set()
    for request in steady + prompts:
        request.join(10)
    over.clear()
    time.sleep(2)
    return gaps, first, second, waiting, errors


def row(name, fields, decoders=16, prompt=3000, interval=4.0, answer=16):
    patch(fields)
    time.sleep(1)
    gaps, first, second, waiting, errors = measure(decoders, prompt, interval, answer)
    print("| %s | %s / %.0f | %s | %s | %d | %.0f |%s" % (name, quantiles(gaps), 1000 * max(gaps), quantiles(first), quantiles(second), waiting,
                                                    len(gaps) / seconds, " %d errors: %s" % (len(errors), errors[0][:100]) if errors else ""),
          flush=True)


if part == "modes":
    for budget in (128, 512, 2048):
        row("Chunked, budget %d" % budget, {"mode": "Chunked", "maxNumBatchedTokens": budget})
    for share in (30, 50, 70):
        row("Disaggregated, prefillShare %d, budget 512" % share, {"mode": "Disaggregated", "maxNumBatchedTokens": 512, "prefillShare": share})
elif part == "devices":
    for budget in (128, 512, 2048):
        row("Chunked on two devices, budget %d" % budget, {"mode": "Chunked", "maxNumBatchedTokens": budget})
    row("Disaggregated, one device prefills, budget 512", {"mode": "Disaggregated", "maxNumBatchedTokens": 512, "prefillDevices": 1})
elif part == "reservations":
    # More prompts than decode slots, each with an answer: whoever holds a slot early keeps others out.
    for policy in ("LastChunk", "PrefillComplete", "Early"):
        row("%s" % policy, {"mode": "Disaggregated", "prefillShare": 50, "reservation": policy, "maxNumBatchedTokens": 256, "maxNumSeqs": 8},
            decoders=4, prompt=1000, interval=1.5, answer=400)
elif part == "switches":
    streams = [Request(next(serial), 32 + 40 * i, 3000 - 40 * i) for i in range(32)]
    while not all(len(stream.times) > 5 for stream in streams):
        time.sleep(0.1)
    time.sleep(3)
    quiet = (time.monotonic() - 3, time.monotonic())
    switches = []
    for i in range(20):
        switches.append(time.monotonic())
        patch({"mode": "Disaggregated" if i % 2 == 0 else "Chunked"})
        time.sleep(2)
    largest = lambda begin, end: max([gap for s in streams for _, gap in s.gaps(begin, end)] or [float("nan")])
    around = [largest(moment, moment + 1) for moment in switches]
    between = [largest(moment + 1, moment + 2) for moment in switches]
    print("largest gap of any stream, ms: before the first switch %.0f; within a second of each switch: median %.0f, worst %.0f; "
          "in the second after that: median %.0f, worst %.0f; errors %d"
          % (1000 * largest(*quiet), 1000 * at(around, 0.5), 1000 * max(around), 1000 * at(between, 0.5), 1000 * max(between),
             sum(1 for s in streams if s.error)))
    over.set()
PY

head='| setting | decoders: ITL p50 / p99 / worst ms | prompts: TTFT p50 / p99 ms | first to second token p50 / p99 ms | prompts without a token at the end | decoder tokens/s |
|---|---|---|---|---|---|'
echo "One CPU device, 16 decoders, a prompt of 3000 tokens each 4 s:"
echo "$head"
serve "cpu" 32
python3 "$work/load.py" modes "$seconds"
echo
echo "Two CPU devices of half the cores each, the same load:"
echo "$head"
serve "cpu:0, cpu:1" 32
python3 "$work/load.py" devices "$seconds"
echo
echo "One CPU device, 8 decode slots of which 4 are taken, a prompt of 1000 tokens with an answer of 400 each 1.5 s:"
echo "$head"
serve "cpu" 32
python3 "$work/load.py" reservations "$seconds"
echo
echo "Switches of mode under 32 running streams:"
serve "cpu" 32
python3 "$work/load.py" switches "$seconds"
