// Timeline, parallel coordinates and confusion matrix, as plain SVG and HTML.
"use strict";

const TIMELINE_KINDS = {
  evaluation: "evaluations", checkpoint: "checkpoints", checkpoint_missed: "missed checkpoints", checkpoint_damaged: "damaged checkpoints",
  failed: "failures", hang: "hangs", stopped: "stops", skipped: "skipped steps", straggler: "slow ranks",
};
const BAD_KINDS = new Set(["failed", "hang", "checkpoint_missed", "checkpoint_damaged", "skipped"]);

/** Return the timeline of a run: a row of phases or attempts, and a row of marks for each kind of event. */
function timeline(status, events) {
  const at = (text) => (text ? Date.parse(text) / 1000 : null);
  const times = [at(status.created), at(status.started), at(status.ended), ...events.map((event) => event.time)].filter(Boolean);
  if (!times.length) return el("p", { class: "state" }, "Nothing has happened so far.");
  const first = Math.min(...times), last = Math.max(...times, status.ended ? 0 : Date.now() / 1000);
  const place = (time) => (100 * (time - first)) / Math.max(1e-9, last - first);
  const row = (label, shapes, count) => el("div", { class: "lane" },
    el("span", { class: "lane-label" }, label, count ? el("span", { class: "muted" }, ` ${count}`) : null),
    svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${label} between ${formatTime(first)} and ${formatTime(last)}` }, shapes));
  const hasPhases = status.phases.length && !continues(status);
  const lanes = [row(hasPhases ? "phases" : "attempts", bars(status, events, at, last).map((bar, index) => {
    const left = place(bar.from), width = Math.max(0.2, place(bar.to) - left);
    const shape = svg("rect", { x: left, y: 1, width, height: 8, class: `bar bar-${index % 4}` });
    shape.append(titleOf(`${bar.label}: ${formatDuration(bar.to - bar.from)}, from ${formatTime(bar.from)}`));
    return shape;
  }))];
  for (const [kind, label] of Object.entries(TIMELINE_KINDS)) {
    const found = events.filter((event) => event.event === kind && event.time);
    if (!found.length) continue;
    lanes.push(row(label, found.map((event) => {
      const shape = svg("rect", { x: place(event.time) - 0.15, y: 1, width: 0.3, height: 8, class: BAD_KINDS.has(kind) ? "mark bad" : "mark" });
      shape.append(titleOf(`${describeEvent(event)}, ${formatTime(event.time)}`));
      return shape;
    }), found.length));
  }
  const listed = events.filter((event) => event.event in TIMELINE_KINDS || ["attempt", "started", "finished"].includes(event.event));
  return el("div", { class: "timeline" }, lanes,
    el("p", { class: "muted" }, `${formatTime(first)} to ${formatTime(last)}, ${formatDuration(last - first)}`),
    el("details", {}, el("summary", {}, `All ${listed.length} events`),
      table("Events", ["time", "event"], listed.slice(-500).map((event) => [formatTime(event.time), describeEvent(event)]))));
}

/** Return whether a run has several attempts, each with machines of its own. */
function continues(status) {
  return status.attempts?.length > 1;
}

/** Return the phases, or for runs without phases the attempts, each from its start to the next. */
function bars(status, events, at, last) {
  if (continues(status)) {
    return status.attempts.map((each) => ({ label: `attempt ${each.attempt}`, from: at(each.started), to: at(each.ended) ?? last }));
  }
  if (status.phases.length) {
    return status.phases.map((phase) => ({ label: phase.name, from: at(phase.started), to: at(phase.ended) ?? last }));
  }
  const starts = events.filter((event) => event.event === "started" || event.event === "attempt").map((event) => event.time);
  const begins = [at(status.started) ?? at(status.created), ...starts].filter(Boolean);
  const names = starts.map((_, index) => (index ? `attempt ${index + 1}` : "training"));
  const end = at(status.ended) ?? last;
  const found = begins.map((from, index) => ({
    label: index ? names[index - 1] : starts.length ? "start" : "run", from, to: begins[index + 1] ?? end,
  }));
  // After its work a rank waits for threads, child processes and exit handlers, and the run stores its results.
  const done = events.findLast((event) => event.event === "finished" && event.time >= begins.at(-1));
  if (!done) return found;
  found.at(-1).to = done.time;
  return [...found, { label: "leaving", from: done.time, to: end }];
}

/** Return where the time and the money of a run went: a bar per attempt, the sum of each kind, and what to change. */
function ledgerPart(ledger) {
  if (!ledger?.bars.length) return [el("p", { class: "state" }, "Nothing is paid so far.")];
  const longest = Math.max(...ledger.bars.map((bar) => bar.seconds), 1e-9);
  const lanes = ledger.bars.map((bar) => {
    const parts = bar.parts.map((part) => {
      const node = el("span", { class: `part kind-${part.kind}`, title: part.text }, el("span", { class: "name" }, part.kind), el("span", { class: "letter" }, part.letter));
      node.style.width = `${(100 * part.seconds) / longest}%`;
      return node;
    });
    return el("div", { class: "lane" }, el("span", { class: "lane-label" }, bar.name, " ", el("span", { class: "muted" }, bar.text)),
      el("div", { class: "parts-bar", role: "img", "aria-label": `${bar.name}: ${bar.parts.map((part) => part.text).join(", ")}` }, parts));
  });
  const letters = Object.fromEntries(ledger.bars.flatMap((bar) => bar.parts.map((part) => [part.kind, part.letter])));
  const rows = ledger.entries.filter((entry) => entry.seconds > 0).map(({ kind }) => [
    el("span", {}, el("span", { class: `key kind-${kind}`, "aria-hidden": "true" }, letters[kind] ?? ""), ` ${kind}`), ledger.texts[kind]]);
  return [el("p", {}, ledger.headline), ...lanes, table("Time by kind", ["kind", "time, share of the paid time, cost"], rows),
    facts(ledger.rows), ...ledger.advice.map((text) => el("p", { class: "warning" }, text))];
}

function titleOf(text) {
  const node = svg("title");
  node.textContent = text;
  return node;
}

function describeEvent(event) {
  const step = event.step === undefined ? "" : ` at step ${event.step}`;
  const shown = ["event", "time", "host", "step", "number", "epoch"];
  const values = Object.entries(event).filter(([name, value]) => !shown.includes(name) && value !== null && typeof value !== "object")
    .slice(0, 6).map(([name, value]) => `${name} ${typeof value === "number" ? formatNumber(value) : value}`);
  return `${event.event.replaceAll("_", " ")}${step}${values.length ? `: ${values.join(", ")}` : ""}`;
}

/** Return the confusion matrix and the scores by class. */
function analysisTables(analysis) {
  const percent = (value) => (value === null || value === undefined ? "" : value.toFixed(4));
  const scores = table(`Classes of the ${analysis.split} split`, ["class", "precision", "recall", "F1", "samples"],
    (analysis.classes ?? []).map((each) => [each.name, percent(each.precision), percent(each.recall), percent(each.f1), formatNumber(each.support)]));
  if (!analysis.confusion) return scores;
  const names = (analysis.classes ?? []).map((each) => each.name);
  const matrix = table("Confusion matrix: rows are true classes, columns predicted ones", ["true class", ...names],
    analysis.confusion.map((row, index) => {
      const total = row.reduce((sum, count) => sum + count, 0) || 1;
      return [names[index], ...row.map((count, column) => {
        const cell = el("span", { class: column === index ? "cell hit" : "cell", title: `${names[index]} predicted as ${names[column]}: ${count}` }, String(count));
        cell.style.setProperty("--share", `${Math.round((count / total) * 40)}%`);
        return cell;
      })];
    }), { class: "matrix" });
  return el("div", { class: "pair" }, scores, matrix);
}

/** Return the step of an evaluation's weights as a text. */
const weightsOf = ({ step }) => (step === null ? "" : step === 0 ? "initial" : formatNumber(step));

/** Return the metrics of a run's evaluations with their intervals, newest first. */
function evaluationTable(evaluations) {
  const interval = ({ low, high }) => (low === null || high === null ? "" : `${formatNumber(low)} to ${formatNumber(high)}`);
  const rows = evaluations.flatMap((each) => Object.entries(each.splits).flatMap(([split, found]) =>
    Object.entries(found.metrics).map(([name, measured]) => [
      each.created.slice(0, 16).replace("T", " "), weightsOf(each), `${split}/${name}`,
      measured.value === null ? "not finite" : formatNumber(measured.value), interval(measured), formatNumber(found.samples)])));
  return table("Evaluations of the run's weights", ["evaluated (UTC)", "step", "metric", "value", "95 % interval", "samples"], rows);
}

/**
 * Return parallel coordinates of runs: an axis for each numeric setting that differs, and for each metric.
 * `axes` are `{name, values}` with one number or null for each run; with `is_log` on a logarithmic scale, with `labels`
 * the values are their positions.
 */
function parallelCoordinates(references, axes) {
  const height = 260, top = 40, bottom = 30, gap = 130, left = 70;
  const width = left * 2 + gap * (axes.length - 1);
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Parallel coordinates of ${references.length} runs over ${axes.map((axis) => axis.name).join(", ")}` });
  const scales = axes.map(({ values, labels, is_log: isLog }) => {
    const known = values.filter((value) => value !== null);
    const low = labels ? 0 : Math.min(...known), high = labels ? labels.length - 1 : Math.max(...known);
    const scale = isLog ? Math.log : (value) => value;
    const share = (value) => (scale(value) - scale(low)) / (scale(high) - scale(low));
    const text = (value) => (labels ? labels[value] : formatNumber(value));
    return { low: text(low), high: text(high), y: (value) => (high === low ? (top + height - bottom) / 2 : height - bottom - share(value) * (height - top - bottom)) };
  });
  axes.forEach((axis, index) => {
    const x = left + gap * index;
    const label = (y, text) => { const node = svg("text", { x, y, "text-anchor": "middle" }); node.textContent = text; return node; };
    const short = axis.name.length > 20 ? `…${axis.name.slice(-19)}` : axis.name;
    drawing.append(svg("line", { x1: x, x2: x, y1: top, y2: height - bottom, class: "axis" }), label(14, short),
      label(top - 8, scales[index].high), label(height - bottom + 16, scales[index].low));
  });
  references.forEach((reference, run) => {
    const points = axes.map((axis, index) => (axis.values[run] === null ? null : `${left + gap * index},${scales[index].y(axis.values[run])}`));
    const line = svg("polyline", { points: points.filter(Boolean).join(" "), class: "run-line", stroke: runColour(reference) });
    line.append(titleOf(reference));
    drawing.append(line);
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Drawing of the runs over settings and metrics" }, drawing);
}
