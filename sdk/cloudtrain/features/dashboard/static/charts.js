// Curves of metrics, drawn by uPlot.
"use strict";

const X_AXES = { step: "step", time: "time since start", samples: "samples" };
const NOT_FINITE_MARK = 4;
const NO_ZOOM = null;

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

/** Return metrics by the part of their name after the split, so that train and validation share a chart. */
function groupMetrics(names) {
  const groups = new Map();
  for (const name of names) {
    const key = name.slice(name.lastIndexOf("/") + 1);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(name);
  }
  return groups;
}

/**
 * A grid of charts that share axis, scale, smoothing, zoom and cursor.
 *
 * `charts` are `{title, series: [{label, colour, dash, curve, origin, batch}]}`; `onZoom(from, to)` may return a promise
 * of charts with more points in a range of steps.
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
    this.node = el("div", {}, this.controls(id), this.empty, this.grid);
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.grid);
  }

  controls(id) {
    const axis = el("select", { id: `${id}-axis`, change: (event) => this.set({ axis: event.target.value }) },
      Object.entries(X_AXES).map(([value, text]) => el("option", { value }, text)));
    const log = el("input", { type: "checkbox", id: `${id}-log`, change: (event) => this.set({ log: event.target.checked }) });
    const slider = el("input", { type: "range", id: `${id}-smoothing`, min: "0", max: "0.99", step: "0.01", value: "0",
      input: (event) => this.set({ smoothing: Number(event.target.value) }) });
    this.reset = el("button", { type: "button", hidden: true, click: () => this.setZoom(NO_ZOOM) }, "Reset zoom");
    return el("div", { class: "controls" },
      el("label", { for: `${id}-axis` }, "x axis "), axis,
      el("label", { for: `${id}-log` }, log, " logarithmic"),
      el("label", { for: `${id}-smoothing` }, "smoothing "), slider, this.reset,
      el("span", { class: "hint" }, "Drag to zoom, Shift and drag to move, double-click to reset. With the keyboard: arrows, +, − and 0."));
  }

  set(options) {
    if (options.axis && options.axis !== this.options.axis) this.zoom = NO_ZOOM;
    Object.assign(this.options, options);
    this.draw();
  }

  /** Show these charts; existing ones get the new data. */
  show(charts) {
    this.charts = charts;
    this.draw();
  }

  draw() {
    this.empty.hidden = this.charts.length > 0;
    this.reset.hidden = this.zoom === NO_ZOOM;
    const titles = new Set(this.charts.map((chart) => chart.title));
    for (const [title, plot] of this.plots) {
      if (!titles.has(title)) { plot.destroy(); this.plots.delete(title); }
    }
    for (const chart of this.charts) {
      if (!this.plots.has(chart.title)) this.plots.set(chart.title, new MetricChart(this));
      const plot = this.plots.get(chart.title);
      plot.update(chart);
      if (plot.node.parentNode !== this.grid) this.grid.append(plot.node);
    }
  }

  resize() {
    for (const plot of this.plots.values()) plot.resize();
  }

  /** Show a range of the x axis in all charts; null shows everything. */
  setZoom(range) {
    this.zoom = range;
    this.reset.hidden = range === NO_ZOOM;
    for (const plot of this.plots.values()) plot.applyZoom();
    clearTimeout(this.fetching);
    if (this.onZoom && this.options.axis === "step") this.fetching = setTimeout(() => this.onZoom(range), 150);
  }

  destroy() {
    this.resizing.disconnect();
    for (const plot of this.plots.values()) plot.destroy();
    this.plots.clear();
  }
}

/** One chart: a figure with a title, a canvas, and the values at the cursor as its legend. */
class MetricChart {
  constructor(grid) {
    this.owner = grid;
    this.title = el("figcaption", {});
    this.canvas = el("div", { class: "plot" });
    this.node = el("figure", { class: "chart", tabindex: "0", keydown: (event) => this.onKey(event) }, this.title, this.canvas);
    this.plot = null;
    this.shape = "";
  }

  update(chart) {
    const { axis, log, smoothing } = this.owner.options;
    const tables = chart.series.map(({ curve, origin, batch }) => {
      const values = log ? curve.values.map((value) => (value !== null && value <= 0 ? null : value)) : curve.values;
      return [xValues(curve, axis, origin, batch), ...(smoothing ? [smooth(values, smoothing)] : []), values];
    });
    const data = tables.length ? uPlot.join(tables) : [[]];
    const shape = JSON.stringify([axis, log, smoothing > 0, chart.series.map(({ label, colour, dash }) => [label, colour, dash])]);
    this.describe(chart);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.applyZoom();
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot(this.settings(chart), data, this.canvas);
    this.plot.over.addEventListener("dblclick", () => this.owner.setZoom(NO_ZOOM));
    this.plot.over.addEventListener("mousedown", (event) => this.beginMove(event), true);
    this.applyZoom();
  }

  describe(chart) {
    this.title.textContent = chart.title;
    const points = chart.series.reduce((sum, { curve }) => sum + curve.values.length, 0);
    const latest = chart.series.filter(({ curve }) => curve.values.length)
      .map(({ label, curve }) => `${label}: ${formatNumber(curve.values.at(-1))} at step ${curve.steps.at(-1)}`);
    this.node.dataset.points = String(points);
    this.node.setAttribute("aria-label", `Curve of ${chart.title}. Last values: ${latest.join("; ")}`);
  }

  settings(chart) {
    const { axis, log, smoothing } = this.owner.options;
    const ink = cssValue("--muted"), lines = cssValue("--line");
    const series = chart.series.flatMap(({ label, colour, dash }) => {
      const line = { stroke: colour, width: 1.5, dash, points: { show: undefined }, value: (plot, value, _, index) => (index === null || index === undefined ? "" : formatValue(chart.title, value)) };
      return smoothing
        ? [{ ...line, label: `${label} (smoothed)` }, { ...line, label, width: 1, alpha: 0.35 }]
        : [{ ...line, label }];
    });
    return {
      width: Math.max(160, this.canvas.clientWidth || 320), height: 200,
      cursor: { sync: { key: this.owner.sync.key }, drag: { x: true, y: false, setScale: false }, focus: { prox: 24 } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [
        { stroke: ink, grid: { stroke: lines, width: 1 }, ticks: { stroke: lines }, size: 34, values: (_, ticks) => ticks.map((tick) => shortNumber(axis, tick)) },
        { stroke: ink, grid: { stroke: lines, width: 1 }, ticks: { stroke: lines }, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatValue(chart.title, tick))) },
      ],
      series: [{ label: X_AXES[axis], value: (_, value) => (value === null || value === undefined ? "" : axis === "time" ? formatDuration(value) : formatNumber(value)) }, ...series],
      hooks: { draw: [markNotFinite], setSelect: [(plot) => this.onSelect(plot)] },
    };
  }

  onSelect(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, "x"), to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.owner.setZoom([from, to]);
  }

  range() {
    const xs = this.plot.data[0];
    return xs.length ? [xs[0], xs.at(-1) === xs[0] ? xs[0] + 1 : xs.at(-1)] : [0, 1];
  }

  applyZoom() {
    const [min, max] = this.owner.zoom ?? this.range();
    this.plot.setScale("x", { min, max });
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
      this.plot.setCursor({ left: Math.min(width, Math.max(0, at)), top: 10 });
    } else if (event.key === "+") this.owner.setZoom([middle - half / 2, middle + half / 2]);
    else if (event.key === "-") this.owner.setZoom([middle - half * 2, middle + half * 2]);
    else if (event.key === "0") this.owner.setZoom(NO_ZOOM);
    else return;
    event.preventDefault();
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: 200 });
  }

  destroy() {
    this.plot?.destroy();
    this.node.remove();
  }
}

/** Draw a cross at the bottom for each value that is not finite. */
function markNotFinite(plot) {
  const { ctx, bbox } = plot;
  plot.series.forEach((series, index) => {
    if (index === 0 || !series.show) return;
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

function formatValue(title, value) {
  return value === undefined ? "" : formatMetric(title, value);
}

function shortNumber(axis, value) {
  if (axis === "time") return formatDuration(value);
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  return size >= 1e4 ? `${Number((value / 1e3).toPrecision(3))}k` : formatNumber(value);
}
