// SPDX-License-Identifier: Apache-2.0
// The page itself. Latencies shown live are quantiles of the last seconds, worked out in the browser from the histograms' growth;
// what the tuner decides on are the exact windows in the engine's status.
#include "daemon/control/dashboard.h"

namespace rubato::control {
namespace {

constexpr const char* page_head = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rubato</title>
<style>
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #667085; --line: #e3e6eb; --accent: #2f6feb;
  --good: #14804a; --bad: #c2362b; --warn: #a15c07; --good-bg: #e3f5ea; --bad-bg: #fce8e6; --warn-bg: #fdf1dc; --plain-bg: #eef0f4; }
@media (prefers-color-scheme: dark) { :root { --bg: #10141b; --card: #191f29; --ink: #e6e9ef; --soft: #94a0b3; --line: #2a3240; --accent: #6ea2ff;
  --good: #57d08f; --bad: #ff8a80; --warn: #f2bd62; --good-bg: #15392a; --bad-bg: #46201f; --warn-bg: #3e2f14; --plain-bg: #252d3a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; padding: 18px 24px 6px; }
h1 { font-size: 20px; margin: 0; letter-spacing: .02em; } h1 small { font-weight: 400; color: var(--soft); font-size: 13px; margin-left: 8px; }
h2 { font-size: 12px; margin: 0 0 10px; color: var(--soft); text-transform: uppercase; letter-spacing: .06em; font-weight: 600; }
main { display: grid; grid-template-columns: repeat(12, 1fr); gap: 14px; padding: 12px 24px 32px; max-width: 1500px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.w3 { grid-column: span 3; } .w6 { grid-column: span 6; } .w12 { grid-column: span 12; }
@media (max-width: 1000px) { .w3 { grid-column: span 6; } .w6 { grid-column: span 12; } }
.chip { border-radius: 999px; padding: 2px 10px; font-size: 12px; background: var(--plain-bg); color: var(--soft); cursor: default; }
.chip.good { background: var(--good-bg); color: var(--good); } .chip.bad { background: var(--bad-bg); color: var(--bad); }
.chip.warn { background: var(--warn-bg); color: var(--warn); }
.big { font-size: 28px; font-weight: 600; font-variant-numeric: tabular-nums; } .big small { font-size: 13px; font-weight: 400; color: var(--soft); }
.good-ink { color: var(--good); } .bad-ink { color: var(--bad); } .soft { color: var(--soft); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12px; } th, td { padding: 4px 8px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td.number, th.number { text-align: right; }
.scroll { max-height: 320px; overflow: auto; }
svg { display: block; width: 100%; height: 150px; overflow: visible; } svg text { fill: var(--soft); font-size: 10px; }
.legend { display: flex; gap: 14px; font-size: 12px; color: var(--soft); margin-top: 4px; } .legend i { display: inline-block; width: 14px; height: 0; border-top: 2px solid; vertical-align: middle; margin-right: 5px; }
#lost { display: none; background: var(--bad-bg); color: var(--bad); padding: 8px 24px; }
</style>
</head>
<body>
<div id="lost" role="alert">No answer from the daemon; trying again.</div>
<header><h1><span id="name">rubato</span><small id="backend"></small></h1><span id="conditions" style="display:flex;flex-wrap:wrap;gap:6px"></span></header>
<main>
<section class="w3"><h2>Attainment, last window</h2><div class="big" id="attainment">&ndash;</div><div class="soft" id="window"></div></section>
<section class="w3"><h2>Requests</h2><div class="big" id="requests">&ndash;</div><div class="soft" id="rates"></div></section>
<section class="w3"><h2>KV cache in use</h2><div class="big" id="kv">&ndash;</div><div class="soft" id="tokens"></div></section>
<section class="w3"><h2>Settings</h2><div class="big" id="settings">&ndash;</div><div class="soft" id="searches"></div></section>
<section class="w6"><h2>Time to first token</h2><svg id="ttft" role="img" aria-label="time to first token"></svg><div class="legend" id="ttft-legend"></div></section>
<section class="w6"><h2>Inter-token latency</h2><svg id="itl" role="img" aria-label="inter-token latency"></svg><div class="legend" id="itl-legend"></div></section>
<section class="w12"><h2>Lanes</h2><div><span class="chip" id="mode">&ndash;</span> <span class="soft" id="handoffs"></span></div><table><thead><tr><th>Lane</th><th>Device</th><th>Role</th><th class="number">Share</th><th class="number">Busy</th><th class="number">Running</th><th class="number">Waiting</th><th class="number">Slots reserved</th><th class="number">To move</th></tr></thead><tbody id="lanes"></tbody></table></section>
<section class="w6"><h2>Knobs</h2><table><thead><tr><th>Knob</th><th>Value</th><th>From</th><th>Range</th></tr></thead><tbody id="knobs"></tbody></table></section>
<section class="w6"><h2>Trials</h2><div class="scroll"><table><thead><tr><th>#</th><th>Outcome</th><th>Budget</th><th>Policy</th><th class="number">Attainment</th><th class="number">TTFT p99</th><th class="number">ITL p99</th></tr></thead><tbody id="trials"></tbody></table></div></section>
<section class="w12"><h2>Events</h2><div class="scroll"><table><thead><tr><th>Last</th><th>Type</th><th>Reason</th><th>Message</th><th class="number">Count</th></tr></thead><tbody id="events"></tbody></table></div></section>
</main>
)html";

constexpr const char* page_script = R"html(<script>
"use strict";
const $ = id => document.getElementById(id);
const keep = 150, every = 2000, spread = 5;   // points kept, milliseconds between polls, polls under one quantile
const curves = { ttft: [], itl: [], at: [] };
let samples = [];

function put(node, ...children) { node.replaceChildren(...children); return node; }
function element(tag, text, className) { const node = document.createElement(tag); if (text !== undefined) node.textContent = text; if (className) node.className = className; return node; }
function row(...cells) { const line = document.createElement("tr"); for (const cell of cells) line.append(cell instanceof Node ? cell : element("td", cell)); return line; }
function number(text) { return element("td", text, "number"); }
function milliseconds(seconds) { if (seconds == null) return "–"; const ms = seconds * 1000; return ms >= 10000 ? seconds.toFixed(1) + " s" : ms >= 100 ? ms.toFixed(0) + " ms" : ms.toFixed(1) + " ms"; }

/* Prometheus text: name -> [{labels, value}] */
function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const blank = line.lastIndexOf(" "), open = line.indexOf("{");
    const name = line.slice(0, open < 0 ? blank : open), labels = {};
    if (open > 0) for (const [, key, value] of line.slice(open, blank).matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
    if (!series.has(name)) series.set(name, []);
    series.get(name).push({ labels, value: Number(line.slice(blank + 1)) });
  }
  return series;
}
function value(series, name, wanted = {}) {
  const found = (series.get(name) || []).find(one => Object.entries(wanted).every(([key, text]) => one.labels[key] === text));
  return found ? found.value : null;
}
function buckets(series, name) {
  return (series.get(name + "_bucket") || []).map(one => ({ edge: one.labels.le === "+Inf" ? Infinity : Number(one.labels.le), count: one.value })).sort((a, b) => a.edge - b.edge);
}
/* Linear within the bucket, as histogram_quantile does. */
function quantile(now, before, share) {
  const grown = now.map((one, index) => ({ edge: one.edge, count: one.count - (before[index] ? before[index].count : 0) }));
  const total = grown.length ? grown[grown.length - 1].count : 0;
  if (total <= 0) return null;
  const rank = share * total;
  let low = 0, below = 0;
  for (const { edge, count } of grown) {
    if (count >= rank) return edge === Infinity ? low : low + (edge - low) * (count === below ? 1 : (rank - below) / (count - below));
    low = edge; below = count;
  }
  return low;
}

function chart(id, points, objective) {
  const svg = $(id), width = svg.clientWidth || 600, height = 150, left = 44, bottom = 16;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const values = points.flatMap(point => [point.p50, point.p99]).filter(one => one != null).concat(objective ? [objective] : []);
  const top = (values.length ? Math.max(...values) : 1) * 1.15 || 1;
  const x = index => left + (width - left - 6) * index / (keep - 1), y = one => (height - bottom) * (1 - one / top) + 4;
  const make = (tag, attributes, text) => { const node = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const key in attributes) node.setAttribute(key, attributes[key]); if (text) node.textContent = text; return node; };
  const children = [];
  for (let tick = 0; tick <= 3; ++tick) {
    const at = top * tick / 3;
    children.push(make("line", { x1: left, x2: width - 6, y1: y(at), y2: y(at), stroke: "var(--line)" }), make("text", { x: left - 6, y: y(at) + 3, "text-anchor": "end" }, milliseconds(at)));
  }
  if (objective) children.push(make("line", { x1: left, x2: width - 6, y1: y(objective), y2: y(objective), stroke: "var(--bad)", "stroke-dasharray": "5 4" }));
  for (const [key, colour, weight] of [["p50", "var(--soft)", 1.5], ["p99", "var(--accent)", 2]]) {
    let path = "", pen = false;
    points.forEach((point, index) => { if (point[key] == null) { pen = false; return; } path += `${pen ? "L" : "M"}${x(keep - points.length + index).toFixed(1)} ${y(point[key]).toFixed(1)}`; pen = true; });
    if (path) children.push(make("path", { d: path, fill: "none", stroke: colour, "stroke-width": weight, "stroke-linejoin": "round" }));
  }
  put(svg, ...children);
  const last = points[points.length - 1] || {};
  const entry = (colour, text) => { const node = element("span"), mark = element("i"); mark.style.color = colour; node.append(mark, text); return node; };
  put($(id + "-legend"), entry("var(--accent)", "p99 " + milliseconds(last.p99)), entry("var(--soft)", "p50 " + milliseconds(last.p50)), entry("var(--bad)", "objective " + milliseconds(objective)));
}

function showMetrics(series, at) {
  samples.push({ at, ttft: buckets(series, "rubato_time_to_first_token_seconds"), itl: buckets(series, "rubato_inter_token_latency_seconds"),
    arrived: value(series, "rubato_requests_arrived_total"), generated: value(series, "vllm:generation_tokens_total"), prompt: value(series, "vllm:prompt_tokens_total"),
    busy: Object.fromEntries((series.get("rubato_lane_step_seconds_total") || []).map(one => [one.labels.lane, one.value])) });
  samples = samples.slice(-spread - 1);
  const now = samples[samples.length - 1], before = samples[0], seconds = (now.at - before.at) / 1000;
  if (now.arrived < before.arrived) { samples = [now]; return; }   /* the daemon was restarted */
  for (const key of ["ttft", "itl"]) {
    if (samples.length > 1) curves[key].push({ p50: quantile(now[key], before[key], .5), p99: quantile(now[key], before[key], .99) });
    curves[key] = curves[key].slice(-keep);
    chart(key, curves[key], value(series, "rubato_objective_seconds", { objective: key }));
  }
  const rate = key => seconds > 0 ? ((now[key] - before[key]) / seconds).toFixed(1) : "–";
  put($("requests"), String(value(series, "vllm:num_requests_running") ?? "–"), element("small", " running, " + (value(series, "vllm:num_requests_waiting") ?? "–") + " waiting"));
  $("rates").textContent = rate("arrived") + " arrivals/s, " + (value(series, "rubato_requests_rejected_total") ?? 0) + " refused in all";
  $("kv").textContent = Math.round(100 * (value(series, "vllm:kv_cache_usage_perc") || 0)) + " %";
  $("tokens").textContent = rate("prompt") + " prompt and " + rate("generated") + " generated tokens/s";
  showLanes(series, now, before, seconds);
}

function showLanes(series, now, before, seconds) {
  const knobs = (series.get("rubato_knob_info") || [])[0];
  $("mode").textContent = knobs ? knobs.labels.mode : "–";
  const handed = kind => value(series, "rubato_handoffs_total", { kind }) ?? 0, failed = handed("failed") + handed("expired");
  const switches = value(series, "rubato_mode_switches_total") ?? 0;
  const waiting = value(series, "rubato_lockstep_wait_seconds_total") ?? 0, stepping = value(series, "rubato_lockstep_step_seconds_total") ?? 0;
  $("handoffs").textContent = (switches ? `${switches} switch${switches === 1 ? "" : "es"}, the last in ${milliseconds(value(series, "rubato_mode_switch_seconds"))}` : "not switched yet") +
    ` · handoffs: ${handed("moved")} moved, ${handed("copied")} copied, ${failed} failed` + (stepping > 0 ? ` · ${Math.round(100 * waiting / (waiting + stepping))} % of lockstep time is waiting` : "");
  put($("lanes"), ...(series.get("rubato_lane_info") || []).sort((a, b) => a.labels.lane - b.labels.lane).map(({ labels: { lane, device } }) => {
    const of = name => value(series, "rubato_lane_" + name, { lane }) ?? 0;
    const role = ((series.get("rubato_lane_role") || []).find(one => one.labels.lane === lane && one.value === 1) || { labels: {} }).labels.role || "–";
    const cell = element("td"); cell.append(element("span", role, "chip " + ({ Prefill: "warn", Decode: "good" }[role] || "")));
    const busy = seconds > 0 && lane in before.busy ? Math.min(100, Math.round(100 * (now.busy[lane] - before.busy[lane]) / seconds)) + " %" : "–";
    return row(lane, device, cell, number(Math.round(100 * of("share_ratio")) + " %"), number(busy), number(String(of("running"))), number(String(of("waiting"))), number(String(of("reserved_slots"))), number(String(of("to_move"))));
  }));
}

function showEngine(engine) {
  const { spec = {}, status = {}, metadata = {} } = engine, settings = status.settings || {}, window = status.window, trials = status.trials || {};
  $("name").textContent = metadata.name || "rubato";
  document.title = (metadata.name || "engine") + " · rubato";
  $("backend").textContent = status.backend || "";
  put($("conditions"), ...(status.conditions || []).map(one => {
    const wanted = { Ready: "True", ManifestValid: "True", ObjectivesMet: "True" }[one.type];
    const chip = element("span", one.type + (wanted ? "" : ": " + one.status) + (wanted && one.status !== wanted ? ": " + one.reason : ""), "chip " + (!wanted ? (one.status === "True" ? "warn" : "") : one.status === wanted ? "good" : one.status === "False" ? "bad" : ""));
    chip.title = one.reason + (one.message ? ": " + one.message : "") + " (since " + one.lastTransitionTime + ")";
    return chip;
  }));
  const wanted = Number((spec.objectives || {}).attainment), got = window && window.judged > 0 ? Number(window.attainment) : null;
  $("attainment").textContent = got == null ? "–" : got + " %";
  $("attainment").className = "big " + (got == null ? "" : got >= wanted ? "good-ink" : "bad-ink");
  $("window").textContent = window ? `${window.judged} requests in ${window.length}; ${wanted} % wanted` : `${wanted} % wanted`;
  put($("settings"), "#" + (settings.number ?? "–"), element("small", " " + [settings.maxNumBatchedTokens, settings.priorityPolicy].filter(one => one != null).join(" · ")));
  $("searches").textContent = `${trials.searches ?? 0} searches, ${trials.total ?? 0} trials, ${trials.rollbacks ?? 0} rolled back`;
  put($("knobs"), ...Object.entries((spec.knobs || {})).map(([name, bounds]) => {
    const from = (status.layers || {})[name] || "", chip = element("span", from, "chip " + ({ Override: "warn", Tuner: "good" }[from] || ""));
    const cell = element("td"); cell.append(chip);
    return row(name, element("td", String(settings[name] ?? "–")), cell, bounds.choices ? bounds.choices.join(", ") : `${bounds.min} to ${bounds.max}`);
  }));
  put($("trials"), ...(trials.recent || []).map(one => row(String(one.number), one.outcome, String(one.settings.maxNumBatchedTokens), one.settings.priorityPolicy, number(one.attainment + " %"), number(one.ttftP99), number(one.itlP99))));
}

function showEvents(list) {
  put($("events"), ...(list.items || []).reverse().slice(0, 100).map(one => {
    const type = element("td"); type.append(element("span", one.type, "chip " + (one.type === "Warning" ? "bad" : "")));
    return row(element("td", new Date(one.lastTimestamp).toLocaleTimeString(), "soft"), type, one.reason, one.message, number(String(one.count)));
  }));
}

async function fetched(path) { const answer = await fetch(path, { cache: "no-store" }); if (!answer.ok) throw new Error(answer.status); return answer; }
async function poll() {
  try {
    const [metrics, engines, events] = await Promise.all([fetched("metrics").then(one => one.text()), fetched("apis/rubato.dev/v1alpha1/engines").then(one => one.json()), fetched("api/v1/events").then(one => one.json())]);
    $("lost").style.display = "none";
    showMetrics(parse(metrics), performance.now());
    if (engines.items.length) showEngine(engines.items[0]);
    showEvents(events);
  } catch (error) { $("lost").style.display = "block"; }
  setTimeout(poll, every);
}
poll();
</script>
</body>
</html>
)html";

}  // namespace

http::Response dashboard_response() {
  return {.status = 200,
          .content_type = "text/html; charset=utf-8",
          .body = std::string(page_head) + page_script,
          .headers = {{"Cache-Control", "no-cache"},
                      {"X-Content-Type-Options", "nosniff"},
                      {"X-Frame-Options", "DENY"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Content-Security-Policy",
                       "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"}}};
}

}  // namespace rubato::control
