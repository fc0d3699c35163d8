"use strict";
// Shows /v1/cluster, which it asks for every two seconds. All text goes in by textContent: names are never HTML.

const POLL_MS = 2000;
const KEY = "hisparse-pd operator key";
const MARKS = { ready: "●", "not ready": "◐", leaving: "◌", lost: "✕" };
const byId = (id) => document.getElementById(id);

// Numbers, each with its unit

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const number = (value) => (value < 1e4 ? plain : compact).format(value);
const percent = (part) => `${plain.format(100 * part)} %`;
const plural = (value, noun) => (value === 1 ? noun : `${noun}s`);
const counted = (value, noun) => `${number(value)} ${plural(value, noun)}`;

function perSecond(bytes) {
  const power = Math.min(4, Math.floor(Math.log10(Math.max(bytes, 1)) / 3));
  return `${plain.format(bytes / 1000 ** power)} ${["B", "KB", "MB", "GB", "TB"][power]}/s`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Elements, which stay the same from one report to the next, so that a selection survives

function add(parent, tag, className = "") {
  const made = parent.appendChild(document.createElement(tag));
  made.className = className;
  return made;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The text of a part of a cell, which has a class by that name. */
function part(cell, name, text) {
  const found = cell.querySelector(`:scope > .${name}`) ?? add(cell, "span", name);
  say(found, text);
  found.hidden = text === "";
}

function show(cell, value, unit = "", note = "") {
  part(cell, "value", value);
  part(cell, "unit", unit && ` ${unit}`);
  if (note) part(cell, "note", note);
}

// Plots

/** The least of 1, 2, 5, 10, 20 ... that is no less. */
function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

/** Runs of samples without a gap, as points in a box of `samples` by 100. */
function runs(values, samples, most) {
  const found = [[]];
  values.forEach((value, index) => {
    if (value === null) found.push([]);
    else found.at(-1).push([samples - values.length + index + 0.5, 100 - (100 * value) / most]);
  });
  return found.filter((run) => run.length);
}

function plot(cell, name, values, samples, most, shown) {
  let box = cell.querySelector(".plot");
  if (!box) {
    box = add(cell, "div", "plot");
    const svg = box.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    for (const kind of ["area", "line"]) {
      svg.appendChild(document.createElementNS(svg.namespaceURI, "path")).setAttribute("class", kind);
    }
    for (const end of ["most", "least"]) add(box, "span", `scale ${end}`).setAttribute("aria-hidden", "true");
  }
  const [area, line] = box.querySelectorAll("path");
  const lines = runs(values, samples, most).map((run) => `M${run.map((point) => point.join(" ")).join("L")}h.01`);
  const areas = runs(values, samples, most).map((run) => `M${run[0][0]} 100L${run.map((point) => point.join(" ")).join("L")}V100Z`);
  line.setAttribute("d", lines.join(""));
  area.setAttribute("d", areas.join(""));
  const known = values.filter((value) => value !== null);
  const range = known.length ? `from ${shown(Math.min(...known))} to ${shown(Math.max(...known))}` : "no samples yet";
  box.firstChild.setAttribute("viewBox", `0 0 ${samples} 100`);
  box.firstChild.setAttribute("aria-label", `${name}, last ten minutes: ${range}`);
  say(box.querySelector(".most"), shown(most));
  say(box.querySelector(".least"), shown(0));
}

/** A column of nodes with a plot. series: its name in a node's history. most: of the scale, which all nodes share. */
function plotted(head, series, unit, { note = () => "", most = null, shown = number } = {}) {
  return {
    head,
    show(cell, node, report, nodes) {
      show(cell, shown(node[series]), unit);
      const all = nodes.flatMap((each) => each.history[series]).filter((value) => value !== null);
      plot(cell, head, node.history[series], report.samples, most ?? roundedUp(Math.max(0, ...all)), shown);
      part(cell, "note", note(node));
    },
  };
}

// Tables: a column has a head, and shows an item in a cell

const NODE = { head: "Node", show: (cell, node) => show(cell, node.address) };
const STATE = {
  head: "State",
  className: "state",
  show(cell, node) {
    part(cell, "mark", MARKS[node.state]);
    cell.firstChild.setAttribute("aria-hidden", "true");
    part(cell, "word", node.state);
    part(cell, "note", node.state === "lost" ? `last heard ${duration(node.heartbeat_age_s)} ago` : "");
    cell.parentElement.dataset.state = node.state;
  },
};
const CACHED = {
  head: "Cached prefixes",
  show: (cell, { cached_tokens: tokens }) => (tokens === null ? show(cell, "not known") : show(cell, number(tokens), "tokens")),
};
const HITS = {
  head: "Prefix hits",
  show(cell, { prompt_tokens: prompt, prefix_hit_tokens: hits, cached_tokens: cached }) {
    const note = cached === null ? "" : `; ${number(cached)} tokens cached`;
    if (prompt) show(cell, percent(hits / prompt), "", `of ${number(prompt)} prompt tokens${note}`);
    else show(cell, "no prompts", "", `in ten minutes${note}`);
  },
};
const hitRate = ({ hits, misses }) => (hits + misses ? `${percent(hits / (hits + misses))} hits` : "no selections");
const ofThisGateway = (node) => `${node.requests} from here, ${node.waiting} waiting`;
const DECODE = [
  NODE,
  STATE,
  plotted("Requests", "running_requests", "running", { note: ofThisGateway }),
  plotted("Generated", "tokens_per_s", "tokens/s"),
  plotted("Queue", "queued_tokens", "tokens", { note: () => "held or to come" }),
  plotted("Host slots in use", "kv_usage", "", { most: 1, shown: percent }),
  plotted("Hot slots in use", "hot_usage", "", { most: 1, shown: percent, note: hitRate }),
  plotted("Swapped in", "swapped_bytes_per_s", "", { shown: perSecond }),
  HITS,
];
const PREFILL = [
  NODE,
  STATE,
  plotted("Requests", "running_requests", "held"),
  plotted("Queue", "queued_tokens", "tokens", { note: () => "to compute" }),
  plotted("Pages in use", "kv_usage", "", { most: 1, shown: percent }),
  plotted("Sent", "transferred_bytes_per_s", "", { shown: perSecond }),
  CACHED,
];
const PHASES = {
  placing: () => "choosing a decode node",
  waiting: (node) => `queue, prefill or transfer for ${node}`,
  streaming: (node) => `decode at ${node}`,
};
const REQUESTS = [
  { head: "Request", show: (cell, request) => show(cell, request.request_id) },
  { head: "Where it is", className: "wide", show: (cell, request) => show(cell, PHASES[request.phase](request.node)) },
  { head: "Idle for", className: "number", show: (cell, request) => show(cell, duration(request.idle_s)) },
  { head: "Age", className: "number", show: (cell, request) => show(cell, duration(request.age_s)) },
  { head: "Prompt", className: "number", show: (cell, request) => show(cell, number(request.prompt_tokens), "tokens") },
  { head: "Of it cached", className: "number", show: (cell, request) => show(cell, number(request.cached_tokens), "tokens") },
  { head: "Generated", className: "number", show: (cell, request) => show(cell, number(request.tokens), "tokens") },
  { head: "Moved", className: "number", show: (cell, request) => show(cell, request.migrations ? counted(request.migrations, "time") : "never") },
];

function prepare(table, columns, className) {
  table.className = className;
  const head = add(add(table, "thead"), "tr");
  head.parentElement.setAttribute("role", "rowgroup");
  head.setAttribute("role", "row");
  for (const column of columns) {
    const cell = add(head, "th", column.className);
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    say(cell, column.head);
  }
  add(table, "tbody").setAttribute("role", "rowgroup");
}

function newRow(columns) {
  const row = document.createElement("tr");
  row.setAttribute("role", "row");
  columns.forEach((column, index) => {
    const cell = add(row, index ? "td" : "th", index ? column.className : "id");
    cell.setAttribute("role", index ? "cell" : "rowheader");
    if (index) cell.dataset.label = column.head;
    else cell.scope = "row";
  });
  return row;
}

function fill(table, columns, items, name, report) {
  const body = table.tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const row = rows.get(item[name]) ?? newRow(columns);
    rows.delete(item[name]);
    row.dataset.key = item[name];
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    columns.forEach((column, place) => column.show(row.cells[place], item, report, items));
  });
  rows.forEach((row) => row.remove());
  table.hidden = !items.length;
  table.nextElementSibling.hidden = items.length > 0;
}

function showTotals(totals) {
  const list = byId("totals");
  totals.forEach(([name, value, unit], index) => {
    const box = list.children[index] ?? add(list, "div");
    if (!box.firstChild) say(add(box, "dt"), name);
    show(box.children[1] ?? add(box, "dd"), value, unit);
  });
}

// What is said of the whole

function state(level, text) {
  byId("state").dataset.level = level;
  say(byId("state"), text);
}

function showReport(report) {
  const ready = report.nodes.filter((node) => node.state === "ready");
  const { placing, waiting, streaming } = report.phases;
  const speed = report.nodes.reduce((sum, node) => sum + node.tokens_per_s, 0);
  const ofRole = (role) => report.nodes.filter((node) => node.role === role);
  const missing = report.nodes.length - ready.length;
  if (report.unready) state("bad", `No request can be served: ${report.unready}.`);
  else if (missing) state("warn", `Requests are served. ${missing} of ${counted(report.nodes.length, "node")} not ready.`);
  else state("good", "Requests are served. All nodes are ready.");
  showTotals([
    ["Nodes", number(ready.length), `of ${number(report.nodes.length)} ready`],
    ["Generated", number(speed), "tokens/s"],
    ["Streaming", number(streaming), plural(streaming, "request")],
    ["Without a token", number(waiting), plural(waiting, "request")],
    ["Choosing a node", number(placing), plural(placing, "request")],
  ]);
  fill(byId("decode"), DECODE, ofRole("decode"), "address", report);
  fill(byId("prefill"), PREFILL, ofRole("prefill"), "address", report);
  fill(byId("requests"), REQUESTS, report.slowest, "request_id", report);
  say(byId("source"), `${location.host} · version ${report.version} · ${new Date().toLocaleTimeString()}`);
  byId("report").hidden = false;
}

let heard = null;

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch("v1/cluster", {
    headers: key ? { Authorization: `Bearer ${key}` } : {},
    signal: AbortSignal.timeout(10000),
  });
  byId("login").hidden = answer.status !== 401 && answer.status !== 403;
  if (answer.ok) {
    showReport(await answer.json());
    heard = new Date();
    return;
  }
  const { error } = await answer.json();
  byId("report").hidden = true;
  state(byId("login").hidden ? "bad" : "unknown", key || answer.status >= 500 ? error.message : "Operators only: enter your key.");
}

async function refresh() {
  try {
    await ask();
  } catch (error) {
    const since = heard ? ` since ${heard.toLocaleTimeString()}. What is shown is from then` : "";
    state("bad", `The gateway does not answer${since}.`);
    console.warn(error);
  }
}

async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, POLL_MS);
}

prepare(byId("decode"), DECODE, "nodes");
prepare(byId("prefill"), PREFILL, "nodes");
prepare(byId("requests"), REQUESTS, "requests");
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  refresh();
});
poll();
