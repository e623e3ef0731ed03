// Curves of metrics, drawn by uPlot.
"use strict";

const X_AXES = { step: "step", time: "time", samples: "samples" };
const NOT_FINITE_MARK = 4;
const NO_ZOOM = null;
const HEIGHT = 170, LARGE_HEIGHT = 280;
const FONT = "12px system-ui, sans-serif";
const STEP_DISTANCES = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
/** Distances of a y axis; a loss that grows without limit has a value of 1e36 before it is no number. */
const VALUE_DISTANCES = Array.from({ length: 320 }, (_, power) => [1, 2, 2.5, 5].map((digit) => digit * 10 ** (power - 18))).flat();
const TIME_DISTANCES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  ...[1, 2, 5, 7, 14, 30, 60, 180, 365].map((days) => days * 86400)];
/** The part of a step in which nothing is computed. */
const WAITING = /\b(wait|waiting|data)\b/i;
const CHARTS_HINT = "Drag to zoom, Shift and drag to move, double-click to reset. With the keyboard: arrows, +, − and 0.";

/** The grids on the page, which are drawn again for paper. */
const grids = new Set();

/** Return smoothed values: an exponential moving average without the bias of its start; null stays null. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Return the x values of a curve by the chosen axis; `origin` is the time that counts as 0. */
function xValues(curve, axis, origin, batch) {
  if (axis === "time") return curve.times.map((time, index) => (time === null ? curve.steps[index] : time - origin));
  return axis === "samples" && batch ? curve.steps.map((step) => step * batch) : curve.steps;
}

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 2], [1, 4]];

/** Return colour and dash of each of several runs: its own colour, or the next one that none of them has yet. */
function linesAmong(references) {
  const uses = new Array(PALETTE_SIZE).fill(0);
  return references.map((reference) => {
    let colour = hashOf(reference) % PALETTE_SIZE;
    const least = Math.min(...uses);
    while (uses[colour] > least) colour = (colour + 1) % PALETTE_SIZE;
    uses[colour] += 1;
    return { colour: paletteColour(colour), dash: DASHES[(uses[colour] - 1) % DASHES.length] };
  });
}

/** Return the value of a colour such as `var(--series-1)`, which a canvas cannot read. */
function inkOf(colour) {
  const [, name] = colour.match(/^var\((--[\w-]+)\)$/) ?? [];
  return name ? cssValue(name) : colour;
}

/**
 * A grid of charts that share axis, scale, smoothing, zoom and cursor.
 *
 * `charts` are `{title, series: [{label, colour, dash, curve, origin, batch, direction}], unit, hint, isLarge, kind}`. With the
 * direction `min` or `max` of its metric, a line has its best value in the head. The unit is a text, or one of `bytes`, `s` and
 * `%`, whose values are shares between 0 and 1. A large chart has the grid's width. The kind `stacked` draws the series as parts of a sum; those
 * whose label says `wait` or `data` are lost time. `onZoom(from, to)` may return a promise of charts with more points in a range of
 * steps.
 */
class ChartGrid {
  constructor(id, { onZoom = null } = {}) {
    this.charts = [];
    this.plots = new Map();
    this.options = { axis: "step", log: false, smoothing: 0 };
    this.zoom = NO_ZOOM;
    this.onZoom = onZoom;
    this.sync = uPlot.sync(id);
    this.grid = el("div", { class: "charts" });
    this.empty = el("p", { class: "state" }, "No metrics so far.");
    this.bar = this.controls(id);
    this.node = el("div", {}, this.bar, this.empty, this.grid);
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.grid);
    grids.add(this);
  }

  controls(id) {
    const axis = el("select", { id: `${id}-axis`, change: (event) => this.set({ axis: event.target.value }) },
      Object.entries(X_AXES).map(([value, text]) => el("option", { value }, text)));
    const log = el("input", { type: "checkbox", id: `${id}-log`, change: (event) => this.set({ log: event.target.checked }) });
    const slider = el("input", { type: "range", id: `${id}-smoothing`, min: "0", max: "0.99", step: "0.01", value: "0",
      input: (event) => this.set({ smoothing: Number(event.target.value) }) });
    this.reset = el("button", { type: "button", hidden: true, click: () => this.setZoom(NO_ZOOM) }, "Reset zoom");
    return el("div", { class: "controls chart-controls" },
      el("span", {}, el("label", { for: `${id}-axis` }, "x axis "), axis),
      el("label", { for: `${id}-log` }, log, "logarithmic"),
      el("span", {}, el("label", { for: `${id}-smoothing` }, "smoothing "), slider),
      el("details", { class: "help" }, el("summary", { title: CHARTS_HINT, "aria-label": "How to use the charts" }, "?"),
        el("p", { class: "hint" }, CHARTS_HINT)),
      this.reset);
  }

  set(options) {
    if (options.axis && options.axis !== this.options.axis) this.zoom = NO_ZOOM;
    Object.assign(this.options, options);
    this.draw();
  }

  /** Show these charts; existing ones get the new data. */
  show(charts) {
    // A line without a value would have an empty legend.
    this.charts = charts.map((chart) => ({ ...chart, series: chart.series.filter(({ curve }) => curve.values.length) }))
      .filter((chart) => chart.series.length);
    this.draw();
  }

  draw() {
    this.empty.hidden = this.charts.length > 0;
    this.bar.hidden = !this.charts.length;
    this.reset.hidden = this.zoom === NO_ZOOM;
    const titles = new Set(this.charts.map((chart) => chart.title));
    for (const [title, plot] of this.plots) {
      if (!titles.has(title)) { plot.destroy(); this.plots.delete(title); }
    }
    // All figures are placed before the first one is measured, so that the page is laid out once.
    for (const chart of this.charts) {
      if (!this.plots.has(chart.title)) this.plots.set(chart.title, new MetricChart(this));
      const plot = this.plots.get(chart.title);
      plot.describe(chart);
      if (plot.node.parentNode !== this.grid) this.grid.append(plot.node);
    }
    const widths = this.charts.map((chart) => this.plots.get(chart.title).canvas.clientWidth);
    this.charts.forEach((chart, index) => this.plots.get(chart.title).update(widths[index]));
  }

  resize() {
    const plots = [...this.plots.values()], widths = plots.map((plot) => plot.canvas.clientWidth);
    plots.forEach((plot, index) => plot.resize(widths[index]));
  }

  /** Show a range of the x axis in all charts; null shows everything. */
  setZoom(range) {
    this.zoom = range;
    this.reset.hidden = range === NO_ZOOM;
    for (const plot of this.plots.values()) plot.applyZoom();
    clearTimeout(this.fetching);
    if (this.onZoom && this.options.axis === "step") this.fetching = setTimeout(() => this.onZoom(range), 150);
  }

  /** Draw again with the colours that the page has now. */
  repaint() {
    for (const plot of this.plots.values()) plot.repaint();
  }

  destroy() {
    grids.delete(this);
    this.resizing.disconnect();
    for (const plot of this.plots.values()) plot.destroy();
    this.plots.clear();
  }
}

/** One chart: a figure with a head and a canvas. */
class MetricChart {
  constructor(grid) {
    this.owner = grid;
    this.head = new ChartHead();
    this.canvas = el("div", { class: "plot" });
    this.node = el("figure", { class: "chart", tabindex: "0", keydown: (event) => this.onKey(event) }, this.head.node, this.canvas);
    this.plot = null;
    this.shape = "";
    this.width = 0;
    this.inks = new Map();
  }

  /** Show the chart's texts. */
  describe(chart) {
    this.chart = chart;
    this.isStacked = chart.kind === "stacked";
    this.xs = chart.series.map((each) => this.formOf(each, "raw").xs);
    this.node.classList.toggle("large", Boolean(chart.isLarge));
    this.head.update(chart, this.isStacked ? waitingShare(chart.series) : "");
    this.node.dataset.points = String(chart.series.reduce((sum, { curve }) => sum + curve.values.length, 0));
    this.node.setAttribute("aria-label", `Curve of ${chart.title}. Last values: ${this.head.describe()}`);
  }

  /** Draw the chart; `width` is that of its canvas. */
  update(width) {
    const { axis, log, smoothing } = this.owner.options, { chart } = this;
    const shape = JSON.stringify([axis, log, smoothing > 0, chart.kind, chart.isLarge, this.head.kind,
      chart.series.map(({ label, colour, dash }) => [label, colour, dash])]);
    this.width = Math.max(160, width || this.width || 320);
    if (this.plot && shape === this.shape) {
      this.applyZoom();
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    const [min, max] = this.owner.zoom ?? this.range();
    this.plot = new uPlot(this.settings(), this.tables(min, max), this.canvas);
    this.plot.setScale("x", { min, max });
    this.plot.over.addEventListener("dblclick", () => this.owner.setZoom(NO_ZOOM));
    this.plot.over.addEventListener("mousedown", (event) => this.beginMove(event), true);
  }

  /** Return a line's curve at several resolutions: its values, or smoothed ones. */
  formOf({ curve, origin, batch }, kind) {
    const { axis, log, smoothing } = this.owner.options;
    const isLog = log && !this.isStacked;
    const key = `${kind}:${axis}:${axis === "time" ? origin : batch}:${isLog}${kind === "smooth" ? smoothing : ""}`;
    return thinnedOf(curve, key, () => {
      // A logarithm exists only of positive values.
      const values = isLog ? curve.values.map((value) => (value !== null && value <= 0 ? null : value)) : curve.values;
      return new ThinnedCurve(xValues(curve, axis, origin, batch), kind === "smooth" ? smooth(values, smoothing) : values);
    });
  }

  /** Return what uPlot draws of a range of the x axis. */
  tables(min, max) {
    const { series } = this.chart, pixels = this.width;
    if (!series.length) return [[]];
    if (this.isStacked) return this.stack(min, max);
    const kinds = this.owner.options.smoothing ? ["smooth", "raw"] : ["raw"];
    return uPlot.join(series.flatMap((each) => kinds.map((kind) => this.formOf(each, kind).between(min, max, pixels))));
  }

  /** Return the sums of the parts, from the first one on, each over the same steps. */
  stack(min, max) {
    const [xs, ...parts] = uPlot.join(this.chart.series.map((each) => { const { xs: own, ys } = this.formOf(each, "raw"); return [own, ys]; }));
    const from = Math.max(0, lowerBound(xs, min) - 1), to = lowerBound(xs, max) + 2;
    const [shown, ...means] = meansOf([xs, ...parts].map((values) => values.slice(from, to)), this.width);
    const sums = new Array(shown.length).fill(0);
    return [shown, ...means.map((values) => values.map((value, index) => (sums[index] += value ?? 0)))];
  }

  ink(colour) {
    if (!this.inks.has(colour)) this.inks.set(colour, inkOf(colour));
    return this.inks.get(colour);
  }

  settings() {
    const { log } = this.owner.options;
    const isLog = log && !this.isStacked;
    const ink = () => this.ink("var(--muted)"), lines = () => this.ink("var(--line)");
    const common = { stroke: ink, font: FONT, grid: { stroke: lines, width: 1 }, ticks: { show: false }, gap: 6 };
    const isOfTime = this.owner.options.axis === "time";
    const unit = this.head.kind;
    return {
      width: this.width, height: this.height(),
      // The last tick of the x axis may be at its end.
      padding: [10, 24, 0, 4],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, sync: { key: this.owner.sync.key }, drag: { x: true, y: false, setScale: false },
        focus: { prox: this.chart.series.length > 1 && !this.isStacked ? 16 : -1 } },
      scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { distr: isLog ? 3 : 1, ...(this.isStacked ? { range: (_, low, high) => [0, high * 1.05 || 1] } : {}) } },
      axes: [
        { ...common, size: 22, space: 64, incrs: isOfTime ? TIME_DISTANCES : STEP_DISTANCES,
          values: (_, ticks, __, ___, distance) => ticks.map((tick) => (isOfTime ? formatDuration(tick) : shortNumber(tick, distance))) },
        { ...common, space: 32, incrs: VALUE_DISTANCES, size: (plot, texts, _, turn) => this.axisWidth(plot, texts, turn),
          values: (_, ticks, __, ___, distance) => (isLog ? logTickTexts(unit, ticks) : tickTexts(unit, ticks, distance)) },
      ],
      series: [{}, ...this.seriesSettings()],
      bands: this.isStacked ? this.chart.series.slice(1).map((each, index) => ({ series: [index + 2, index + 1], fill: () => `${this.ink(each.colour)}d0` })) : [],
      hooks: { draw: this.isStacked ? [] : [markNotFinite], setSelect: [(plot) => this.onSelect(plot)], setCursor: [(plot) => this.onCursor(plot)] },
    };
  }

  seriesSettings() {
    const { smoothing } = this.owner.options;
    return this.chart.series.flatMap(({ label, colour, dash }, index) => {
      const line = { label, stroke: () => this.ink(colour), width: this.chart.isLarge ? 2 : 1.5, dash, points: { size: 5, space: 18, fill: () => this.ink(colour) } };
      if (this.isStacked) return [{ ...line, width: 1, points: { show: false }, ...(index ? {} : { fill: () => `${this.ink(colour)}d0` }) }];
      return smoothing ? [{ ...line, points: { show: false } }, { ...line, width: 1, alpha: 0.35 }] : [line];
    });
  }

  /** Return the width that the y axis needs for its texts, in steps of 8 px so that a moved range does not shake. */
  axisWidth(plot, texts, turn) {
    if (!texts) return this.yWidth ?? 40;
    plot.ctx.save();
    plot.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    const widest = Math.max(0, ...texts.map((text) => plot.ctx.measureText(text).width)) / devicePixelRatio;
    plot.ctx.restore();
    const needed = 8 * Math.ceil((widest + 10) / 8);
    // Within one layout it only grows, so that the layout ends.
    this.yWidth = turn > 1 ? Math.max(this.yWidth, needed) : needed;
    return this.yWidth;
  }

  height() {
    return this.chart.isLarge ? Math.min(LARGE_HEIGHT, Math.max(HEIGHT, this.width * 0.6)) : HEIGHT;
  }

  onCursor(plot) {
    const { left } = plot.cursor;
    if (left === undefined || left === null || left < 0) {
      this.head.showLast();
      return;
    }
    const x = this.snap(plot.posToVal(left, "x"));
    const { axis } = this.owner.options;
    const places = this.xs.map((xs) => (x < xs[0] || x > xs.at(-1) ? null : nearestPlace(xs, x)));
    this.head.showAt(axis === "time" ? `after ${formatDuration(x)}` : `${X_AXES[axis]} ${Math.round(x).toLocaleString("en-US")}`, places);
  }

  /** Return the x of the point nearest to the cursor. */
  snap(x) {
    let best = null;
    for (const xs of this.xs) {
      const place = nearestPlace(xs, x);
      if (place >= 0 && (best === null || Math.abs(xs[place] - x) < Math.abs(best - x))) best = xs[place];
    }
    return best ?? x;
  }

  onSelect(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, "x"), to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.owner.setZoom([from, to]);
  }

  /** Return the range of all lines. */
  range() {
    const known = this.xs.filter((xs) => xs.length);
    if (!known.length) return [0, 1];
    const first = Math.min(...known.map((xs) => xs[0])), last = Math.max(...known.map((xs) => xs.at(-1)));
    return [first, last === first ? first + 1 : last];
  }

  applyZoom() {
    const [min, max] = this.owner.zoom ?? this.range();
    this.plot.batch(() => {
      this.plot.setData(this.tables(min, max), false);
      this.plot.setScale("x", { min, max });
    });
  }

  repaint() {
    this.inks.clear();
    this.plot?.redraw(false);
  }

  /** Move the zoomed range while Shift is held. */
  beginMove(event) {
    if (!event.shiftKey) return;
    event.stopImmediatePropagation();
    event.preventDefault();
    const start = event.clientX, [min, max] = this.owner.zoom ?? this.range();
    const perPixel = (max - min) / this.plot.over.clientWidth;
    let frame = 0;
    const move = (moved) => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => {
        const by = (start - moved.clientX) * perPixel;
        this.owner.setZoom([min + by, max + by]);
      });
    };
    const end = () => { removeEventListener("mousemove", move); removeEventListener("mouseup", end); };
    addEventListener("mousemove", move);
    addEventListener("mouseup", end);
  }

  onKey(event) {
    const [min, max] = this.owner.zoom ?? this.range(), middle = (min + max) / 2, half = (max - min) / 2;
    const { left } = this.plot.cursor, width = this.plot.over.clientWidth;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const at = left < 0 ? width / 2 : left + (event.key === "ArrowLeft" ? -width / 50 : width / 50);
      this.plot.setCursor({ left: Math.min(width, Math.max(0, at)), top: 10 }, true, true);
    } else if (event.key === "+") this.owner.setZoom([middle - half / 2, middle + half / 2]);
    else if (event.key === "-") this.owner.setZoom([middle - half * 2, middle + half * 2]);
    else if (event.key === "0") this.owner.setZoom(NO_ZOOM);
    else return;
    event.preventDefault();
  }

  resize(width) {
    if (!this.plot || width <= 0 || width === this.plot.width) return;
    this.width = width;
    this.plot.setSize({ width, height: this.height() });
    this.applyZoom();
  }

  destroy() {
    this.plot?.destroy();
    this.node.remove();
  }
}

/** Return the share of waiting in the sum of all parts, as a sentence. */
function waitingShare(series) {
  const sum = ({ curve }) => curve.values.reduce((total, value) => total + (value ?? 0), 0);
  const waiting = series.filter(({ label }) => WAITING.test(label));
  const all = series.reduce((total, each) => total + sum(each), 0);
  if (!waiting.length || !all) return "";
  const lost = waiting.reduce((total, each) => total + sum(each), 0);
  return `${describeMetric(Number(((100 * lost) / all).toPrecision(2)))}% waiting for data`;
}

/** Draw a cross at the bottom for each value that is not finite. */
function markNotFinite(plot) {
  const { ctx, bbox } = plot;
  plot.series.forEach((series, index) => {
    if (index === 0 || !series.show || !plot.data[index].includes(null)) return;
    ctx.save();
    ctx.strokeStyle = cssValue("--bad");
    ctx.lineWidth = 2 * devicePixelRatio;
    const size = NOT_FINITE_MARK * devicePixelRatio, bottom = bbox.top + bbox.height - size - 2;
    plot.data[index].forEach((value, at) => {
      if (value !== null) return;
      const x = plot.valToPos(plot.data[0][at], "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.beginPath();
      ctx.moveTo(x - size, bottom - size); ctx.lineTo(x + size, bottom + size);
      ctx.moveTo(x - size, bottom + size); ctx.lineTo(x + size, bottom - size);
      ctx.stroke();
    });
    ctx.restore();
  });
}

/** Paper is white: a page is printed with the light colours. */
addEventListener("beforeprint", () => {
  const { dataset } = document.documentElement;
  dataset.themeBefore = dataset.theme ?? "";
  dataset.theme = "light";
  for (const grid of grids) grid.repaint();
});

addEventListener("afterprint", () => {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.themeBefore;
  delete dataset.themeBefore;
  for (const grid of grids) grid.repaint();
});
