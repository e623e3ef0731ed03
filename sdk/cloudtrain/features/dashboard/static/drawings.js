// Parallel coordinates, as plain SVG.
"use strict";

function titleOf(text) {
  const node = svg("title");
  node.textContent = text;
  return node;
}

/** Return whether an axis has two different values; one of a single value tells nothing. */
function isVaried({ values }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length > 1 && known.some((value) => value !== known[0]);
}

/** Return the height of a value on an axis, as a share from its lowest to its highest value. */
function axisScale({ values, labels, is_log: isLog }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const low = labels ? 0 : Math.min(...known), high = labels ? labels.length - 1 : Math.max(...known);
  const scale = isLog && low > 0 ? Math.log : (value) => value;
  return { low, high, share: (value) => (high === low ? 0.5 : (scale(value) - scale(low)) / (scale(high) - scale(low))) };
}

/**
 * Return parallel coordinates: an axis for each setting and metric that differs, and a line for each run.
 *
 * `lines` are `{label, colour, dash}`, those in front last. `axes` are `{name, values}` with one number or null for each
 * line; with `is_log` on a logarithmic scale, with `labels` the values are their positions. The drawing is as wide as its
 * place and scrolls where that is too narrow; texts keep their size.
 */
function parallelCoordinates(lines, axes) {
  const scales = axes.map(axisScale);
  const x = (index) => (100 * (index + 0.5)) / axes.length;
  const y = (index, value) => 100 * (1 - scales[index].share(value));
  // A run without a value crosses no axis: its line has a gap there.
  const brokenLine = (points) => points.map(([index, value], place) => {
    if (value === null) return "";
    const isNew = place === 0 || points[place - 1][1] === null;
    return `${isNew ? "M" : "L"}${x(index)} ${y(index, value)}`;
  }).join(" ");
  const shapes = axes.map((_, index) => svg("line", { x1: x(index), x2: x(index), y1: 0, y2: 100, class: "axis" }));
  lines.forEach(({ label, colour, dash }, line) => {
    const shape = svg("path", { d: brokenLine(axes.map((axis, index) => [index, axis.values[line] ?? null])), class: "run-line", "stroke-dasharray": (dash ?? []).join(" ") });
    shape.style.stroke = colour;
    shape.append(titleOf(label));
    shapes.push(shape);
  });
  const drawing = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img",
    "aria-label": `Parallel coordinates of ${lines.length} runs over ${axes.map((axis) => axis.name).join(", ")}` }, shapes);
  const columns = (texts, kind) => el("div", { class: `axis-texts ${kind}` }, texts.map((text) => el("span", {}, text)));
  const ends = (end) => axes.map(({ labels }, index) => (labels ? labels[scales[index][end]] : describeMetric(scales[index][end])));
  // Choices between the first and the last one have their names beside their axis.
  const between = axes.flatMap(({ labels }, index) => (labels ?? []).slice(1, -1).map((text, place) => {
    const node = el("span", { class: "axis-choice" }, text);
    node.style.left = `${x(index)}%`;
    node.style.top = `${y(index, place + 1)}%`;
    return node;
  }));
  const body = el("div", { class: "parallel" }, columns(axes.map((axis) => axis.name), "names"), columns(ends("high"), ""),
    el("div", { class: "parallel-lines" }, drawing, between), columns(ends("low"), ""));
  body.style.minWidth = `${axes.length * 104}px`;
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Drawing of the runs over settings and metrics" }, body);
}
