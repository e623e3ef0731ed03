// The rows of the list: a run, a sweep with its trials, and the columns of both.
"use strict";

/** Fewest characters of a reason; a shorter text would say nothing. */
const LEAST_CHARACTERS = 30;
/** Most points of a sparkline in a report, which has whole curves. */
const REPORT_POINTS = 100;
const SPARK_WIDTH = 120, SPARK_HEIGHT = 20, SPARK_EDGE = 2;
const HALF = 0.5, FENCE = 1.5;

/** What a reason begins with where a rank has failed; the cause is what tells failures apart. */
const RANK_FAILED = /^rank \d+ on \S+ (\(local rank \d+\) )?failed: /;
/** States in which the reason matters more than the metric. */
const TROUBLES = new Set(["FAILED", "INTERRUPTED", "UNKNOWN"]);

/**
 * The columns. `order` is what rows are sorted by. `isShown` says whether a row has content; a column without it is always there, on
 * a page of at least the width `least`. A card has all parts.
 */
const COLUMNS = [
  { key: "name", title: "run", order: (row) => row.name.toLowerCase() },
  { key: "state", title: "state", order: (row) => row.state },
  { key: "created", title: "age", isNumber: true, order: (row) => (row.created ? -row.created : null) },
  { key: "duration", title: "duration", isNumber: true, least: 860, order: (row) => durationOf(row) },
  { key: "metric", title: "key metric", order: (row) => metricOrder(row) },
  { key: "progress", title: "progress", order: (row) => progressOrder(row), isShown: (row) => !row.is_final },
  { key: "place", title: "where", least: 1000, order: (row) => row.backend },
  { key: "cost", title: "cost", isNumber: true, order: (row) => row.cost_usd, isShown: (row) => Boolean(row.texts.cost) },
  { key: "tags", title: "tags", least: 1100, order: (row) => tagText(row) || null, isShown: (row) => tagText(row) !== "" },
];

function tagText(row) {
  // The tags of a trial say what its place in the list says.
  const own = Object.entries(row.tags).filter(([name]) => !row.sweep || (name !== "sweep" && name !== "trial"));
  return own.map(([name, value]) => `${name}=${value}`).join(" ");
}

function durationOf(row) {
  if (!row.began) return null;
  if (row.ended) return row.ended - row.began;
  return row.is_final ? null : Date.now() / 1000 - row.began;
}

/** Values of different metrics cannot be compared, so each metric has its own part of the order. */
function metricOrder(row) {
  if (!row.metric || row.metric.value === null) return null;
  return [row.metric.name, row.metric.value];
}

function progressOrder(row) {
  if (row.is_final || row.step === null) return null;
  return row.total_steps ? row.step / row.total_steps : row.step;
}

/** Compare two rows by a column. Rows without a value come last in both directions; the newest of equal ones come first. */
function compareRows(one, two, column, isDescending) {
  const first = column.order(one), second = column.order(two);
  if (isMissing(first) !== isMissing(second)) return isMissing(first) ? 1 : -1;
  const found = isMissing(first) ? 0 : compareValues(first, second);
  if (found) return isDescending ? -found : found;
  return (two.created ?? 0) - (one.created ?? 0) || compareValues(one.reference, two.reference);
}

function isMissing(value) {
  return value === null || value === undefined;
}

function compareValues(one, two) {
  if (Array.isArray(one)) return compareValues(one[0], two[0]) || compareValues(one[1], two[1]);
  if (one < two) return -1;
  return one > two ? 1 : 0;
}

/** Return the rows with the trials of each sweep as one row. */
function foldSweeps(rows, summaries) {
  const trials = new Map(), folded = [];
  for (const row of rows) {
    if (!row.sweep) { folded.push(row); continue; }
    if (!trials.has(row.sweep)) trials.set(row.sweep, []);
    trials.get(row.sweep).push(row);
  }
  for (const [id, members] of trials) folded.push(sweepRow(id, members, summaries.get(id)));
  return folded;
}

/** Return a sweep as a row. Without a summary, as on another machine, its state follows from that of its trials. */
function sweepRow(id, trials, summary) {
  const isFinal = summary?.state ? summary.is_final : trials.every((each) => each.is_final);
  const ends = trials.map((each) => each.ended);
  const isBestKnown = Boolean(summary) && summary.best !== null;
  const costs = trials.map((each) => each.cost_usd ?? 0);
  const cost = costs.reduce((sum, each) => sum + each, 0);
  return {
    isSweep: true,
    reference: id,
    name: summary?.name ?? trials[0].name,
    backend: trials[0].backend,
    state: summary?.state ?? stateOfTrials(trials),
    is_final: isFinal,
    created: earliest(trials.map((each) => each.created)),
    began: earliest(trials.map((each) => each.began)),
    ended: isFinal && !ends.includes(null) ? Math.max(...ends) : null,
    step: null,
    metric: isBestKnown ? { name: summary.metric, title: summary.metric_title, value: summary.best } : null,
    cost_usd: cost,
    tags: {},
    texts: { cost: trials.some((each) => each.texts.cost) ? formatUsd(cost) : "", reason: "" },
    trials,
    planned: Math.max(summary?.planned_trials ?? 0, trials.length),
  };
}

function earliest(moments) {
  const known = moments.filter(Boolean);
  return known.length ? Math.min(...known) : null;
}

function stateOfTrials(trials) {
  if (trials.some((each) => !each.is_final)) return "RUNNING";
  return trials.some((each) => each.state === "SUCCEEDED") ? "SUCCEEDED" : trials[0].state;
}

/** Return the cells of a run. All columns have one; the style hides those that no row fills. */
function runCells(row, { checkbox, reasonLength }) {
  const attempts = row.attempts > 1 ? el("span", { class: "muted short" }, `${row.attempts} attempts`) : null;
  const name = el("a", { href: `#/run/${encodeURIComponent(row.reference)}`, title: row.reference }, row.name);
  const trial = row.sweep ? el("span", { class: "muted short" }, `trial ${row.tags.trial}`) : null;
  const cells = [
    cell("box", {}, checkbox),
    nameCell(name, idOf(row.reference), trial, attempts),
    cell("state-cell", {}, stateBadge(row.state)),
    cell("age number", { title: formatTime(row.created) }, describeAgo(row.created)),
    cell("duration number", {}, durationText(row)),
    cell("metric", {}, row.metric ? metricParts(row, sparkline(curveOf(row), row)) : null),
    cell("progress", {}, progressParts(row)),
    cell("place", {}, row.backend),
    cell("cost number", {}, row.texts.cost),
    cell("tags", { title: tagText(row) }, tagText(row)),
  ];
  const reason = TROUBLES.has(row.state) ? row.texts.reason : "";
  if (reason) cells.push(cell("why", { title: reason }, cutAtWord(reason.replace(RANK_FAILED, ""), reasonLength)));
  return cells;
}

/** Return the cells of a sweep. */
function sweepCells(row, { checkbox, toggle }) {
  const failed = row.trials.filter((each) => each.state === "FAILED").length;
  const shown = row.trials.length === row.planned ? `${row.planned} trials` : `${row.trials.length} of ${row.planned} trials`;
  const link = el("a", { href: `#/sweep/${encodeURIComponent(row.reference)}`, title: row.reference }, row.name);
  return [
    cell("box", {}, checkbox),
    nameCell(toggle, link, idOf(row.reference), el("span", { class: "muted short" }, failed ? `${shown}, ${failed} failed` : shown)),
    cell("state-cell", {}, stateBadge(row.state)),
    cell("age number", { title: formatTime(row.created) }, describeAgo(row.created)),
    cell("duration number", {}, durationText(row)),
    cell("metric", {}, row.metric ? metricParts(row, trialDots(row)) : null),
    cell("progress", {}, row.is_final ? null : sweepProgress(row)),
    cell("place", {}, row.backend),
    cell("cost number", {}, row.texts.cost),
    cell("tags", {}),
  ];
}

function nameCell(...children) {
  return el("th", { scope: "row", role: "rowheader", class: "name" }, ...children);
}

/** The short id, with the whole reference on hover. */
function idOf(reference) {
  return el("span", { class: "muted id", title: reference }, shortId(reference));
}

function cell(kind, attributes, ...children) {
  return el("td", { role: "cell", class: kind, ...attributes }, ...children);
}

function durationText(row) {
  const seconds = durationOf(row);
  return seconds === null ? "" : formatDuration(seconds);
}

function metricParts(row, drawing) {
  const { title, value } = row.metric;
  const label = row.isSweep ? `best ${title}` : title;
  return [
    el("span", { class: value === null ? "value bad" : "value" }, describeMetric(value)),
    el("span", { class: "muted short of", title: label }, label),
    drawing,
  ];
}

/** Progress exists only while a run is active: a bar with the time left, or the step where the length is unknown. */
function progressParts(row) {
  if (row.is_final) return null;
  if (row.step === null) return el("span", { class: "muted short", title: row.texts.reason }, row.texts.reason);
  if (!row.total_steps) return el("span", { class: "short" }, row.texts.steps);
  const share = Math.min(1, row.step / row.total_steps);
  return [
    el("progress", { max: 1, value: share.toFixed(3), "aria-label": `progress of ${row.name}`, title: row.texts.steps }),
    el("span", { class: "muted short" }, row.texts.left || `${Math.floor(share * 100)} %`),
  ];
}

function sweepProgress(row) {
  const ended = row.trials.filter((each) => each.is_final).length;
  return [
    el("progress", { max: row.planned, value: ended, "aria-label": `ended trials of ${row.name}` }),
    el("span", { class: "muted short" }, `${ended} of ${row.planned}`),
  ];
}

/** The points of a run's key metric: those that the server sends, or in a report those of the run's own curve. */
function curveOf(row) {
  const whole = row.curves?.[row.metric.name];
  if (row.curve || !whole) return row.curve;
  const every = Math.ceil(whole.steps.length / REPORT_POINTS);
  const isKept = (_, index) => index % every === 0 || index === whole.steps.length - 1;
  return { steps: whole.steps.filter(isKept), values: whole.values.filter(isKept) };
}

/** Return a small curve. A value that is not finite leaves a gap. */
function sparkline(curve, row) {
  const known = curve ? curve.values.filter((each) => each !== null) : [];
  if (known.length < 2) return null;
  const at = scale(curve.steps[0], curve.steps.at(-1), known);
  let isDown = false, path = "", last = null;
  curve.values.forEach((value, index) => {
    if (value === null) { isDown = false; return; }
    last = at(curve.steps[index], value);
    path += `${isDown ? "L" : "M"}${last[0]} ${last[1]}`;
    isDown = true;
  });
  const label = `${row.metric.title} from ${describeMetric(known[0])} to ${describeMetric(known.at(-1))}`;
  const drawing = drawingOf(label, [svg("path", { d: path, "vector-effect": "non-scaling-stroke" })]);
  drawing.style.stroke = runColour(row.reference);
  return drawing;
}

/** Return a dot for each trial's metric, in the order of the trials. */
function trialDots(row) {
  const trials = row.trials.filter((each) => each.metric?.name === row.metric.name && each.metric.value !== null);
  if (trials.length < 2) return null;
  const numbers = trials.map((each) => Number(each.tags.trial));
  const at = scale(Math.min(...numbers), Math.max(...numbers), fences(trials.map((each) => each.metric.value)));
  const dots = trials.map((each, index) => {
    const [x, y] = at(numbers[index], each.metric.value);
    // A line without length has round ends, which no stretching makes an ellipse.
    const isBest = each.metric.value === row.metric.value;
    return svg("path", { d: `M${x} ${y}h0`, class: isBest ? "dot best-dot" : "dot", "vector-effect": "non-scaling-stroke" });
  });
  return drawingOf(`${row.metric.title} of ${trials.length} trials`, dots);
}

/** Return the range of values without outliers, by the usual fences: one trial that diverged would make all others a line. */
function fences(values) {
  const sorted = [...values].sort((one, two) => one - two);
  const low = sorted[Math.floor(sorted.length / 4)], high = sorted[Math.ceil((sorted.length * 3) / 4) - 1];
  const reach = FENCE * (high - low);
  return [Math.max(sorted[0], low - reach), Math.min(sorted.at(-1), high + reach)];
}

function drawingOf(label, children) {
  const box = `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`;
  return svg("svg", { class: "spark", viewBox: box, preserveAspectRatio: "none", role: "img", "aria-label": label }, children);
}

function scale(firstStep, lastStep, values) {
  const low = Math.min(...values), high = Math.max(...values);
  const width = SPARK_WIDTH - 2 * SPARK_EDGE, height = SPARK_HEIGHT - 2 * SPARK_EDGE;
  return (step, value) => {
    const across = lastStep > firstStep ? (step - firstStep) / (lastStep - firstStep) : HALF;
    const up = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : HALF;
    return [(SPARK_EDGE + across * width).toFixed(1), (SPARK_EDGE + (1 - up) * height).toFixed(1)];
  };
}

/** Return a text of at most so many characters, cut between two words. */
function cutAtWord(text, most) {
  if (text.length <= most) return text;
  const end = text.lastIndexOf(" ", most - 1);
  // A single word, such as the path of a file, has no better place.
  const cut = end > LEAST_CHARACTERS ? text.slice(0, end) : text.slice(0, most - 1);
  return `${cut.replace(/[\s,;:.(]+$/, "")}…`;
}
