// Draws the curves of a report from the facts in the page. Text from the run goes to Plotly through `safe` alone, because Plotly
// takes some of HTML for markup.
"use strict";

let facts, log, series;
const take = (taken) => {
  facts = taken || {};
  log = facts.log;
  series = log && log.series;
};
take(JSON.parse(document.getElementById("facts").textContent));
const live = document.getElementById("live");
const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const sum = (values) => values.reduce((a, b) => a + b, 0);
const drawn = [];  // [element, a function that makes its data and layout]

// ---- over time

const times = () => series.seconds.map((_, i) => (i + 0.5) * series.width);
// The last bin is as long as the log; a sliver of one would be noise.
const lengths = () => series.seconds.map((_, i) => Math.min(series.width, series.end - i * series.width));
const rates = (name, factor = 1) => {
  const wide = lengths();
  return series[name].map((value, i) => (wide[i] < series.width * 0.2 && i ? null : (value * factor) / wide[i]));
};
const line = (name, y, index, more = {}) => ({
  type: "scatter", mode: "lines", name, x: times(), y, line: {color: colour(`--c${index}`), width: 1.8}, ...more,
});
const atATime = (name) => series[name].map((value, i) => (series.seconds[i] > 0 ? value / series.seconds[i] : 0));
const area = (name, y, index) => line(name, y, index, {stackgroup: "one", line: {color: colour(`--c${index}`), width: 0.5}});

// Changes of policy and restarts, as lines across a curve over time.
function marks() {
  const kinds = {policy: "--c3", restart: "--c6"};
  return log.events.filter((event) => event.kind in kinds).map((event) => ({
    type: "line", xref: "x", yref: "paper", x0: event.at, x1: event.at, y0: 0, y1: 1,
    line: {color: colour(kinds[event.kind]), width: 1.2, dash: "dot"},
  }));
}

function overTime(id, y, traces, more = {}) {
  draw(id, () => ({data: traces(), layout: {xaxis: {title: {text: "seconds"}}, yaxis: {title: {text: y}, rangemode: "tozero", ...more}, shapes: marks()}}));
}

// ---- one drawing

function layoutOf(more, element) {
  const narrow = element.clientWidth < 520;
  const axis = {gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--rule"), automargin: true, fixedrange: narrow};
  const {xaxis = {}, yaxis = {}, ...rest} = more;
  return {
    paper_bgcolor: colour("--paper"), plot_bgcolor: colour("--paper"), font: {color: colour("--ink"), size: narrow ? 11 : 12},
    margin: {l: 8, r: 8, t: 8, b: 8}, hovermode: "x unified", hoverlabel: {bgcolor: colour("--panel"), font: {color: colour("--ink")}},
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, showlegend: true, dragmode: narrow ? false : "zoom",
    ...rest, xaxis: {...axis, ...xaxis}, yaxis: {...axis, ...yaxis},
  };
}

function draw(id, make) {
  const element = document.getElementById(id);
  if (element) drawn.push([element, make]);
}

function drawAll() {
  for (const [element, make] of drawn) {
    const {data, layout} = make();
    Plotly.react(element, data, layoutOf(layout, element), {displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"], displayModeBar: "hover"});
  }
}

// ---- the drawings

const CLASSES = [["weights", "weights", 0], ["kv", "KV", 1], ["act", "ACT", 2], ["stores", "stores (to the host)", 3]];
const WAITS = [["weights", "waits for weights", 0], ["blocks", "waits for blocks", 1], ["rows", "waits for rows", 3], ["host", "waits for host cores", 4]];
const happens = (name) => series[name] && series[name].some((value) => value > 0);

if (log || live) {
  overTime("throughput", "per second", () => [
    line("generated tokens", rates("tokens"), 0),
    line("all rows, prompts included", rates("rows"), 4, {visible: "legendonly"}),
  ]);
  overTime("requests", "requests", () => [
    line("at work", atATime("sequence_seconds"), 2),
    ...(series.waiting_seconds ? [line("waiting", atATime("waiting_seconds"), 4)] : []),
  ]);
}
if (live || (log && log.has_reports)) {
  overTime("busy", "% of the time", () => [
    line("link to the device", rates("link", 100), 0),
    line("computation", rates("compute", 100), 1),
    line("link to the host", rates("back", 100), 3),
    ...(happens("host") ? [line("host cores that attend", rates("host", 100), 4)] : []),
  ], {range: [0, 105]});
  overTime("bytes", "GB/s", () => CLASSES.map(([name, words, index]) => area(words, rates(`bytes_${name}`, 1e-9), index)));
  overTime("stalls", "% of the time", () => [
    area("computes", rates("compute", 100), 7),
    ...WAITS.filter(([name]) => name !== "host" || happens("waits_host")).map(([name, words, index]) => area(words, rates(`waits_${name}`, 100), index)),
  ], {range: [0, 105]});
}

const bytes = (count) => {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < 4; ++unit) count /= 1024;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
};

const MEMORY = {"weights": 0, "resident weights": 0, "KV blocks": 1, "ACT blocks": 2, "load buffers": 5};

function memory(id, parts) {
  draw(id, () => ({
    data: Object.entries(parts).map(([name, amount]) => ({
      type: "bar", orientation: "h", name: safe(name), y: [""], x: [(100 * amount) / sum(Object.values(parts))], text: [bytes(amount)],
      textposition: "inside", insidetextanchor: "middle", hovertemplate: `${safe(name)}: ${bytes(amount)}<extra></extra>`, marker: {color: colour(`--c${MEMORY[name] ?? 7}`)},
    })),
    layout: {barmode: "stack", hovermode: "closest", xaxis: {title: {text: "% of what is in use"}, range: [0, 100]}, yaxis: {visible: false}},
  }));
}
if (facts.memory) {
  memory("memory-host", facts.memory.host);
  memory("memory-device", facts.memory.device);
}

function histogram(id, bins, what, index) {
  if (!bins || !bins.requests) return;
  draw(id, () => ({
    data: [{
      type: "bar", x: bins.requests.map((_, i) => (i + 0.5) * bins.width), y: bins.requests, width: bins.width * 0.92, marker: {color: colour(`--c${index}`)},
      hovertemplate: bins.requests.map((count, i) => `${+(i * bins.width).toPrecision(4)} to ${+((i + 1) * bins.width).toPrecision(4)} ${what}: ${count} requests<extra></extra>`),
    }],
    layout: {showlegend: false, hovermode: "closest", bargap: 0, xaxis: {title: {text: what}, rangemode: "tozero"}, yaxis: {title: {text: "requests"}}},
  }));
}
if (facts.results) {
  histogram("prompts", facts.results.prompts, "tokens", 0);
  histogram("completions", facts.results.completions, "tokens", 2);
}
if (log && !live) {
  histogram("waited", log.waited, "seconds", 4);
  histogram("worked", log.worked, "seconds", 5);
}

// ---- the library, packed into the page

async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent.trim()), (c) => c.charCodeAt(0));
  const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
}

// ---- a page that is live asks for new figures

const EVERY = 2000;

async function refresh() {
  try {
    const answer = await fetch(live.dataset.from, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    const got = await answer.json();
    take(got.facts);
    live.innerHTML = got.head;
    document.getElementById("live-tables").innerHTML = got.tables;
    if (log) drawAll();
  } catch {
    if (!live.querySelector(".gone")) live.insertAdjacentHTML("afterbegin", '<p class="note gone">There is no answer: it has ended, or cannot be reached.</p>');
  }
  document.body.dataset.refreshed = String(1 + Number(document.body.dataset.refreshed || 0));
  setTimeout(refresh, EVERY);
}

unpack().then(async () => {
  if (!live) drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => log && drawAll());
  document.body.dataset.drawn = String(drawn.length);
  if (live) refresh();
});
