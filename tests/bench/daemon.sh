# SPDX-License-Identifier: Apache-2.0
# Sourced by the tables in this folder: a work folder that goes away at the end, and one rubatod at a time on ports of its own.
#   start_daemon MANIFEST [FLAG...]   serves it and waits until it is ready; what it logs is in $work/log
#   stop_daemon                       as a user would: SIGTERM, and waits
# $build may be set before: the build folder (default build/release).
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."
build=${build:-build/release}
work=$(mktemp -d)
data_url=http://127.0.0.1:18000
control_url=http://127.0.0.1:18080
daemon=

stop_daemon() {
  [ -n "$daemon" ] || return 0
  kill "$daemon" 2>/dev/null || true
  wait "$daemon" 2>/dev/null || true
  daemon=
}
trap 'stop_daemon; rm -rf "$work"' EXIT

start_daemon() {
  stop_daemon
  "$build/daemon/rubatod" --manifest "$1" --listen 127.0.0.1:18000 --control-listen 127.0.0.1:18080 "${@:2}" 2>"$work/log" &
  daemon=$!
  for _ in $(seq 600); do
    curl -fsS -o /dev/null "$control_url/readyz" 2>/dev/null && return 0
    kill -0 "$daemon" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.1
  done
  cat "$work/log" >&2
  exit 1
}
