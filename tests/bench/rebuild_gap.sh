#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What running streams feel of a rebuild of step shapes: 32 streams decode on the real daemon while the budget goes 64 -> 2048 -> 256, round after
# round. Prints, for each rebuild, the largest gap between two tokens of any stream around it, next to the gaps of the same streams when nothing
# was rebuilt, and what the daemon says of its builds and swaps. Build first (./dev build); wants an otherwise idle machine.
#   tests/bench/rebuild_gap.sh [ROUNDS] [STREAMS] [BUILD_FOLDER] [MANIFEST]
set -euo pipefail
rounds=${1:-5}
streams=${2:-32}
build=${3:-build/release}
manifest=${4:-manifests/examples/demo.yaml}
. "$(dirname "$(readlink -f "$0")")/daemon.sh"

sed -e 's/tuning: {enabled: true/tuning: {enabled: false/' "$manifest" >"$work/engine.yaml"
start_daemon "$work/engine.yaml"

python3 - "$rounds" "$streams" <<'PY'
import json, re, selectors, socket, sys, threading, time, urllib.request

rounds, streams = int(sys.argv[1]), int(sys.argv[2])
settle, around = 3.0, 1.0  # seconds between two changes, and on either side of a rebuild that count as around it
data, control = ("127.0.0.1", 18000), "http://127.0.0.1:18080/apis/rubato.dev/v1alpha1/engines"


def get(url):
    with urllib.request.urlopen(url) as reply:
        return reply.read().decode()


engine = json.loads(get(control))["items"][0]
name, limits = engine["metadata"]["name"], engine["status"]["limits"]
path = control + "/" + name
answer = limits["maxModelLen"] - 40


def metric(text, series):
    found = re.search("^" + re.escape(series) + r" (\S+)$", text, re.M)
    return float(found.group(1)) if found else float("nan")


def patch(budget):
    body = json.dumps({"spec": {"override": {"maxNumBatchedTokens": budget}}}).encode()
    request = urllib.request.Request(path, body, {"Content-Type": "application/merge-patch+json"}, method="PATCH")
    urllib.request.urlopen(request).read()


class Stream:
    def __init__(self, number):
        self.times = []
        body = json.dumps({"model": name, "prompt": [(i * 31 + number * 7) % 500 + 1 for i in range(32)], "max_tokens": answer,
                           "temperature": 0, "ignore_eos": True, "stream": True})
        self.socket = socket.create_connection(data)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                             % (len(body), body)).encode())
        self.ended = False
        self.socket.setblocking(False)

    def read(self):
        received = self.socket.recv(65536)
        now = time.monotonic()
        if b'"error"' in received:
            print("a stream failed:", received.decode(errors="replace"))
            self.ended = True
        if b"data: {" in received:
            self.times.append(now)
        if not received or b"[DONE]" in received:
            self.ended = True


selector = selectors.DefaultSelector()
running = [Stream(i) for i in range(streams)]
for stream in running:
    selector.register(stream.socket, selectors.EVENT_READ, stream)
over = threading.Event()  # a stream has ended, or the measurement


def read_all():
    while not over.is_set():
        for key, _ in selector.select(0.1):
            key.data.read()
            if key.data.ended:
                over.set()


reader = threading.Thread(target=read_all)
reader.start()
while not all(len(stream.times) > 5 for stream in running):
    if over.wait(0.2):
        sys.exit("a stream ended before the measurement began")
over.wait(settle)

rebuilds = []
for budget in [64, 2048, 256] * rounds:
    begin, end = time.monotonic(), None
    patch(budget)
    while end is None and not over.wait(0.05) and time.monotonic() - begin < 30:
        if json.loads(get(path))["status"]["shapes"]["buckets"][-1] == budget:
            end = time.monotonic()
    if end is None:
        break
    rebuilds.append((budget, begin, end))
    if over.wait(settle):
        break
complete = len(rebuilds) == 3 * rounds and not over.is_set()
over.set()
reader.join()

text = get("http://127.0.0.1:18000/metrics")
gaps = [(a, b, b - a) for stream in running for a, b in zip(stream.times, stream.times[1:]) if a > running[0].times[5]]


def near(a, b):
    return any(b > begin - around and a < end + around for _, begin, end in rebuilds)


quiet = sorted(gap for a, b, gap in gaps if not near(a, b))


def share(values, part):
    return values[min(len(values) - 1, int(part * len(values)))] * 1e3 if values else float("nan")


print(f"{streams} streams, {len(gaps)} gaps; without a rebuild: p50 {share(quiet, .5):.1f} ms, p99 {share(quiet, .99):.1f} ms, "
      f"largest {share(quiet, 1):.1f} ms")
print("budget   change to in use   largest gap of any stream around it")
for budget, begin, end in rebuilds:
    worst = max((gap for a, b, gap in gaps if b > begin - around and a < end + around), default=float("nan"))
    print(f"{budget:6}   {(end - begin) * 1e3:13.0f} ms   {worst * 1e3:8.1f} ms")
print("rebuilds {:.0f}, failed {:.0f}; build mean {:.3f} ms; swap mean {:.1f} us; steps in a shape {:.0f}, eager {:.0f}".format(
    metric(text, 'rubato_shape_rebuilds_total{result="ok"}'), metric(text, 'rubato_shape_rebuilds_total{result="failed"}'),
    1e3 * metric(text, "rubato_shape_build_seconds_sum") / metric(text, "rubato_shape_build_seconds_count"),
    1e6 * metric(text, "rubato_shape_swap_seconds_sum") / metric(text, "rubato_shape_swap_seconds_count"),
    metric(text, 'rubato_shape_steps_total{kind="shape"}'), metric(text, 'rubato_shape_steps_total{kind="eager"}')))
if not rebuilds:
    sys.exit("no rebuild was seen")
if not complete:
    print("(a stream ended, or a rebuild did not come, before the last round)")
PY
