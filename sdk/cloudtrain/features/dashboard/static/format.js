// Elements, numbers and colours. Durations, money, sizes and metrics read as in the commands. Texts from runs become text nodes only, never HTML.
"use strict";

/** Return an element. `attributes` with a function add a listener; children are nodes, texts, or lists of them. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key, value);
    else if (key === "class") node.className = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.flat());
  return node;
}

/** Set a node's text, unless it is that already. */
function setText(node, text) {
  if (node && node.textContent !== text) node.textContent = text;
}

function formatNumber(value) {
  if (value === null || value === undefined) return "not finite";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  return String(Number(value.toPrecision(5)));
}

/** Return a metric of a status or a table as the commands print it: four significant digits, `2,696` from thousands on. */
function describeMetric(value) {
  if (value === null || value === undefined) return "not finite";
  const digits = 4;
  const size = Math.abs(Number(value.toPrecision(digits)));
  if (size >= 1e3 && size < 1e9) {
    return value.toLocaleString("en-US", { maximumFractionDigits: 0, roundingMode: "halfEven" });
  }
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e").map(Number);
  if (exponent >= -4 && exponent < digits) return String(Number(value.toPrecision(digits)));
  return `${mantissa}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

function formatDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  let left = Math.max(0, Math.round(seconds));
  const parts = [];
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    if (left >= size) parts.push(`${Math.floor(left / size)}${unit}`);
    left %= size;
  }
  return parts.slice(0, 2).join("") || "0s";
}

function formatTime(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "";
}

const MINUTE = 60, HOUR = 3600, DAY = 86400;
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** Return how long ago a moment was, as people say it: `18 s ago`, `2 h ago`, `3 d ago`; after a month its date. */
function describeAgo(seconds, now = Date.now() / 1000) {
  if (!seconds) return "";
  const age = Math.max(0, now - seconds);
  if (age < MINUTE) return `${Math.floor(age)} s ago`;
  if (age < HOUR) return `${Math.floor(age / MINUTE)} min ago`;
  if (age < 2 * DAY) return `${Math.floor(age / HOUR)} h ago`;
  if (age < 30 * DAY) return `${Math.floor(age / DAY)} d ago`;
  const date = new Date(seconds * 1000), year = date.getUTCFullYear();
  const day = `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
  return year === new Date(now * 1000).getUTCFullYear() ? day : `${day} ${year}`;
}

/** Return the short id of a run's id or reference, by which every command finds it. */
function shortId(run) {
  return run.slice(-6);
}

function capitalised(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

function formatUsd(value) {
  return value === null || value === undefined ? "price unknown" : `${value.toFixed(2).replace(/\B(?=(\d{3})+\.)/g, ",")} USD`;
}

function formatBytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let size = count, unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${size.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

/** Return a metric's value with its unit, which the end of its name gives. */
function formatMetric(name, value) {
  if (value === null || value === undefined) return formatNumber(value);
  if (name.endsWith("_bytes")) return formatBytes(value);
  if (name.endsWith("_seconds")) return `${formatNumber(value)} s`;
  return formatNumber(value);
}

const PALETTE_SIZE = 8;
const SPLIT_COLOURS = { train: 0, validation: 1, test: 2 };

function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return a colour of a series for styles and SVG; of which theme, the browser decides. A canvas needs `inkOf`. */
function paletteColour(index) {
  return `var(--series-${index % PALETTE_SIZE})`;
}

function hashOf(text) {
  let hash = 2166136261;
  for (let index = 0; index < text.length; index += 1) hash = Math.imul(hash ^ text.charCodeAt(index), 16777619);
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  return (hash ^ (hash >>> 13)) >>> 0;
}

/** Return the colour of a run; among runs that are compared, one of equal colours has another. */
function runColour(reference) {
  return paletteColour(hashOf(reference));
}

function splitColour(metric) {
  const split = metric.includes("/") ? metric.slice(0, metric.lastIndexOf("/")) : "train";
  return paletteColour(SPLIT_COLOURS[split] ?? 3 + (hashOf(split) % (PALETTE_SIZE - 3)));
}

function stateBadge(state) {
  return el("span", { class: `badge ${String(state).toLowerCase()}` }, state);
}

/** Return a table. `rows` are lists of cells; a cell is a text or a node. The first column has row headers. */
function table(caption, heads, rows, attributes = {}) {
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, index) =>
    index === 0 ? el("th", { scope: "row" }, cell ?? "") : el("td", {}, cell ?? ""))));
  const head = el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", attributes, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)));
}

/** A link to a page of a tracker; text that is no address of the web stays text. */
function webLink(text) {
  return /^https?:\/\/[^\s@]+$/.test(text) ? el("a", { href: text, target: "_blank", rel: "noopener noreferrer" }, text) : text;
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter((pair) => pair[1] !== "" && pair[1] !== null && pair[1] !== undefined)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}
