// The head of a chart: title, unit and values, and the texts of its axes.
"use strict";

const MOST_DECIMALS = 8;
const LEGEND_SCROLLS_AFTER = 12;
const BYTE_UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];

/** Return the unit of a chart: its own, or the one that the end of its metrics' names gives. */
function unitOf({ title, unit, series }) {
  if (unit !== undefined && unit !== null) return unit;
  const names = [title, ...series.map((each) => each.label)];
  if (names.some((name) => name.endsWith("_bytes"))) return "bytes";
  return names.some((name) => name.endsWith("_seconds")) ? "s" : "";
}

/** Return what a chart's unit multiplies: a size or a duration has another unit for large values than for small ones. */
function scaleOf(unit, largest) {
  if (unit === "bytes") {
    const power = largest >= 1 ? Math.min(BYTE_UNITS.length - 1, Math.floor(Math.log10(largest) / 3)) : 0;
    return { factor: 1000 ** power, suffix: ` ${BYTE_UNITS[power]}` };
  }
  if (unit === "s") return largest < 1 ? { factor: 1e-3, suffix: " ms" } : { factor: 1, suffix: " s" };
  if (unit === "%") return { factor: 0.01, suffix: "%" };
  return { factor: 1, suffix: "" };
}

/** Return one value with its unit, in four significant digits. Units of other kinds stand once, in the head. */
function formatIn(unit, value) {
  if (value === null || value === undefined) return "not finite";
  const { factor, suffix } = scaleOf(unit, Math.abs(value));
  return suffix ? `${describeMetric(Number((value / factor).toPrecision(3)))}${suffix}` : describeMetric(value);
}

/** Return the decimals that a multiple of `increment` needs. */
function decimalsOf(increment) {
  for (let decimals = 0; decimals < MOST_DECIMALS; decimals += 1) {
    const scaled = increment * 10 ** decimals;
    if (Math.abs(scaled - Math.round(scaled)) < 1e-6 * Math.max(1, scaled)) return decimals;
  }
  return MOST_DECIMALS;
}

/** Return a whole or large number in few characters: `950`, `1.5k`, `12,340` between near neighbours, `2M`. */
function shortNumber(value, increment) {
  const size = Math.abs(value);
  if (size >= 1e6 && increment >= 1e4) return `${Number((value / 1e6).toFixed(2))}M`;
  if (size >= 1e3 && increment >= 100) return `${Number((value / 1e3).toFixed(2))}k`;
  return value.toLocaleString("en-US", { maximumFractionDigits: decimalsOf(increment) });
}

/** Return the texts of the ticks of a y axis. No two are equal, because their digits follow from their distance. */
function tickTexts(unit, ticks, increment) {
  const known = ticks.filter((tick) => tick !== null && tick !== undefined);
  const largest = Math.max(...known.map(Math.abs), 0);
  const { factor, suffix } = scaleOf(unit, largest);
  const decimals = decimalsOf(increment / factor);
  const isFar = !suffix && largest > 0 && (largest < 1e-3 || largest >= 1e12);
  const exponent = isFar ? Math.floor(Math.log10(largest)) : 0;
  const text = (tick) => {
    if (tick === 0) return suffix ? `0${suffix}` : "0";
    if (isFar) return `${(tick / 10 ** exponent).toFixed(decimalsOf(increment / 10 ** exponent))}e${exponent}`;
    if (decimals === 0 && !suffix) return shortNumber(tick, increment);
    return `${(tick / factor).toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })}${suffix}`;
  };
  return ticks.map((tick) => (tick === null || tick === undefined ? "" : text(tick)));
}

/** Return the texts of the ticks of a logarithmic axis, each in its own unit. */
function logTickTexts(unit, ticks) {
  return ticks.map((tick) => (tick === null || tick === undefined ? "" : formatIn(unit, tick)));
}

/** Return the best value of a curve whose metric has a direction. */
function bestOf({ curve, direction }) {
  const known = direction ? curve.values.filter((value) => value !== null) : [];
  if (!known.length) return null;
  return known.reduce((one, two) => ((direction === "max" ? two > one : two < one) ? two : one));
}

/** Return a piece of a line as the chart draws it; of a stack, a field of its colour. */
function lineSample({ colour, dash }, isStacked) {
  const shape = isStacked
    ? svg("rect", { x: 0, y: 0, width: 12, height: 10, rx: 2, fill: colour })
    : svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": (dash ?? []).join(" ") });
  return svg("svg", { width: isStacked ? 12 : 22, height: 10, class: "sample", "aria-hidden": "true" }, shape);
}

/** The head of a chart: title and unit, and for each line a sample, its label and its last value, or that at the cursor. */
class ChartHead {
  constructor() {
    this.title = el("span", { class: "chart-title" });
    this.unit = el("span", { class: "chart-unit" });
    this.note = el("span", { class: "chart-note" });
    this.at = el("span", { class: "chart-at" });
    this.list = el("ul", { class: "chart-values" });
    this.node = el("figcaption", {}, el("div", { class: "chart-name" }, this.title, this.unit, this.note, this.at), this.list);
    this.shape = "";
    this.cells = [];
  }

  /** Show these lines and their last values. */
  update(chart, note) {
    this.chart = chart;
    this.kind = unitOf(chart);
    const isScaled = scaleOf(this.kind, 1).suffix !== "";
    setText(this.title, chart.title);
    this.title.title = chart.hint ?? "";
    setText(this.unit, isScaled ? "" : this.kind);
    setText(this.note, note);
    const shape = JSON.stringify(chart.series.map(({ label, colour, dash }) => [label, colour, dash]));
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(chart);
    }
    this.showLast();
  }

  build({ series, kind, title }) {
    // A single line needs no label where the title is its name.
    const label = series[0].label.split("/").at(-1).toLowerCase();
    const isAlone = series.length === 1 && [title.split("/").at(-1).toLowerCase(), "training", "value"].includes(label);
    this.cells = series.map(() => ({ value: el("span", { class: "chart-value" }), best: el("span", { class: "chart-best" }) }));
    this.list.replaceChildren(...series.map((each, index) => el("li", {}, lineSample(each, kind === "stacked"),
      isAlone ? null : el("span", { class: "chart-label" }, each.label), this.cells[index].value, this.cells[index].best)));
    this.node.classList.toggle("alone", isAlone);
    const scrolls = series.length > LEGEND_SCROLLS_AFTER;
    this.list.classList.toggle("long", scrolls);
    if (scrolls) {
      this.list.tabIndex = 0;
      this.list.setAttribute("aria-label", `Lines of ${title}`);
    } else this.list.removeAttribute("tabindex");
  }

  showLast() {
    setText(this.at, "");
    this.chart.series.forEach((each, index) => {
      const best = bestOf(each), last = each.curve.values.at(-1);
      setText(this.cells[index].value, formatIn(this.kind, last));
      setText(this.cells[index].best, best === null || best === last ? "" : `best ${formatIn(this.kind, best)}`);
    });
  }

  /** Show the values of the points nearest to the cursor; a line that is not there has none. */
  showAt(text, places) {
    setText(this.at, text);
    this.chart.series.forEach(({ curve }, index) => {
      setText(this.cells[index].value, places[index] === null ? "–" : formatIn(this.kind, curve.values[places[index]]));
    });
  }

  /** Return the last values as a sentence. */
  describe() {
    return this.chart.series.map(({ label, curve }) => `${label}: ${formatIn(this.kind, curve.values.at(-1))} at step ${curve.steps.at(-1)}`).join("; ");
  }
}
