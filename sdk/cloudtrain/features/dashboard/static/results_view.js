// Tables of a run's results, time, checkpoints, hosts, environment and plan.
"use strict";

/** Return a table whose rows become cards on a narrow page. Cells are texts or nodes; `numbers` are indices of columns. */
function cardTable(caption, heads, rows, { numbers = [], kind = "" } = {}) {
  const node = table(caption, heads, rows, { class: `cards ${kind}` });
  const mark = (cell, index) => { if (numbers.includes(index)) cell.classList.add("right"); };
  for (const row of node.querySelectorAll("tr")) {
    [...row.children].forEach((cell, index) => {
      mark(cell, index);
      cell.dataset.label = heads[index];
      if (!cell.textContent) cell.classList.add("empty");
    });
  }
  return node;
}

/** Return rows of `[label, text, hint]` as a table without a head. An address of the web is a link. */
function rowTable(caption, rows, { isCode = false } = {}) {
  const label = (text) => (isCode ? el("code", {}, text) : text);
  return el("table", { class: "rows" }, caption ? el("caption", {}, caption) : null,
    el("tbody", {}, rows.map(([name, text, hint]) => el("tr", {}, el("th", { scope: "row" }, label(name)), el("td", hint ? { title: hint } : {}, webLink(text))))));
}

/** Return the newest values of the metrics by split. */
function resultTable({ heads, rows }) {
  if (!rows.length) return null;
  return table("Newest values", heads, rows, { class: "numbers" });
}

/** Return where the time and the money of a run went: a bar per attempt, the sum of each kind, and what to change. */
function ledgerPart(ledger) {
  if (!ledger?.bars.length) return [el("p", { class: "state" }, "Nothing is paid so far.")];
  const longest = Math.max(...ledger.bars.map((bar) => bar.seconds), 1e-9);
  const lanes = ledger.bars.map((bar) => {
    const parts = bar.parts.map((part) => {
      const node = timePart(part.kind, part.letter, part.text);
      node.style.width = `${(100 * part.seconds) / longest}%`;
      return node;
    });
    return el("div", { class: "lane" }, el("span", { class: "lane-label" }, capitalised(bar.name), " ", el("span", { class: "muted" }, bar.text)),
      el("div", { class: "parts-bar", role: "img", "aria-label": `${bar.name}: ${bar.parts.map((part) => part.text).join(", ")}` }, parts));
  });
  const letters = Object.fromEntries(ledger.bars.flatMap((bar) => bar.parts.map((part) => [part.kind, part.letter])));
  const rows = ledger.entries.filter((entry) => entry.seconds > 0).map(({ kind }) => [
    el("span", { title: ledger.hints?.[kind] ?? "" }, el("span", { class: `time-key kind-${kind}`, "aria-hidden": "true" }, letters[kind] ?? ""), ` ${kind}`),
    ledger.texts[kind]]);
  const saves = ledger.rows.map(([name, text]) => [capitalised(name), text, ""]);
  return [el("p", {}, ledger.headline), ...lanes, ...ledger.advice.map((text) => el("p", { class: "warning" }, text)),
    el("div", { class: "pair" }, table("Time by kind", ["kind", "time, share of the paid time, cost"], rows),
      saves.length ? rowTable("Checkpoints", saves) : null)];
}

/** Return a part of a bar of time, with its name where it is wide enough, else its letter. */
function timePart(kind, letter, text) {
  return el("span", { class: `part kind-${kind}`, title: text }, el("span", { class: "name" }, kind), el("span", { class: "letter" }, letter));
}

/** Return the confusion matrix as a picture with counts, and the scores by class. */
function analysisTables(analysis) {
  const percent = (value) => (value === null || value === undefined ? "" : value.toFixed(3));
  const classes = analysis.classes ?? [];
  const scores = table("Scores by class", ["class", "precision", "recall", "F1", "samples"],
    classes.map((each) => [each.name, percent(each.precision), percent(each.recall), percent(each.f1), formatNumber(each.support)]), { class: "numbers" });
  if (!analysis.confusion) return scores;
  return el("div", { class: "pair" }, confusionPicture(analysis.confusion, classes.map((each) => each.name)), scores);
}

/** Return a confusion matrix: a square per pair of classes, darker the larger its share of the true class is. */
function confusionPicture(confusion, names) {
  const right = confusion.reduce((sum, row, index) => sum + (row[index] ?? 0), 0);
  const total = confusion.flat().reduce((sum, count) => sum + count, 0);
  const picture = table("Confusion matrix: rows are true classes, columns predicted ones", ["true", ...names],
    confusion.map((row, index) => [names[index], ...row.map((count, column) => confusionCell(count, row, names[index], names[column], column === index))]),
    { class: "matrix" });
  return el("div", {}, picture, el("p", { class: "hint" }, `${formatNumber(right)} of ${formatNumber(total)} right. Blue squares are right, orange ones are errors.`));
}

function confusionCell(count, row, name, predicted, isRight) {
  const total = row.reduce((sum, each) => sum + each, 0) || 1;
  const kind = count === 0 ? "cell none" : isRight ? "cell hit" : "cell";
  const cell = el("span", { class: kind, title: `${name} predicted as ${predicted}: ${count}` }, formatNumber(count));
  cell.style.setProperty("--share", `${count === 0 ? 0 : Math.round(12 + (count / total) * 40)}%`);
  return cell;
}

/** Return the metrics of a run's evaluations with their intervals, newest first. */
function evaluationTable(evaluations) {
  const when = (text) => el("span", { title: formatTime(Date.parse(text) / 1000) }, describeAgo(Date.parse(text) / 1000));
  return cardTable("Evaluations of the run's weights", ["metric", "value", "95 % interval", "weights", "samples", "evaluated"],
    evaluations.map((each) => [capitalised(each.metric), each.value, each.interval, each.weights, each.samples, when(each.created)]), { numbers: [1, 4] });
}

function checkpointPart(entry) {
  const rows = entry.words.checkpoints ?? [];
  if (!rows.length) return el("p", { class: "state" }, "No checkpoint so far. checkpoint.every in job.yaml says how often one is saved.");
  const saves = (entry.ledger?.rows ?? []).map(([name, text]) => el("p", {}, `${capitalised(name)}: ${text}`));
  const state = (row) => (row.is_bad ? el("span", { class: "bad" }, `✕ ${row.state}`, row.detail ? el("span", { class: "muted" }, ` ${row.detail}`) : null) : row.state);
  const when = (time) => el("span", { title: formatTime(time) }, describeAgo(time));
  return section("saves-section", "Checkpoints", saves,
    cardTable("Checkpoints as they were written, newest first; older ones may be deleted by checkpoint.keep",
      ["step", "state", "written", "size", "took", "training waited", "share of training time", "place"],
      rows.map((row) => [row.step, state(row), when(row.time), row.size, row.took, row.waited, row.share, row.place ? el("code", {}, row.place) : ""]),
      { numbers: [0, 3, 4, 5, 6] }));
}

function hostTable(hosts) {
  if (!hosts.length) return el("p", { class: "state" }, "No host has reported so far.");
  return cardTable("Hosts, and what went wrong there", ["host", "has", "trouble"], hosts.map((each) => [each.host, each.devices,
    each.troubles.length ? el("span", { class: "bad" }, `✕ ${each.troubles.join(", ")}`) : "none"]));
}

function environmentPart(parts) {
  if (!parts.length) return el("p", { class: "state" }, "No host has reported its environment so far.");
  return el("div", { class: "groups" }, parts.flatMap((part) => part.groups.map((group) =>
    settingGroup([part.title, group.title].filter(Boolean).join(": "), rowTable("", group.rows)))));
}

function settingGroup(title, content) {
  return el("div", { class: "row-group" }, el("h3", {}, title), content);
}

/** Return command, settings in groups, decisions and changes of a plan. */
function planPart(entry) {
  const { plan } = entry;
  const groups = entry.setting_groups ?? [];
  return [
    section("start-section", "Start", rowTable("", [...(plan.command ? [["Command", plan.command, ""]] : []), ...(entry.plan_rows ?? [])]),
      (plan.warnings ?? []).map((text) => el("p", { class: "warning" }, text))),
    section("settings-section", "Settings", el("div", { class: "groups" },
      groups.map((group) => settingGroup(group.title, rowTable("", group.rows, { isCode: true }))))),
    plan.decisions?.length ? section("decisions-section", "Decisions", el("ul", {}, plan.decisions.map((text) => el("li", {}, text)))) : null,
    entry.card ? section("card-section", "Model card", el("pre", { tabindex: "0", "aria-label": "model card" }, entry.card)) : null,
    plan.diff ? section("diff-section", "Changes since the commit", diffBlock(plan.diff)) : null,
  ];
}

function diffBlock(text) {
  const kind = (line) => ({ "+": "added", "-": "removed" })[line[0]] ?? "";
  return el("pre", { class: "diff", tabindex: "0", "aria-label": "git diff" }, text.split("\n").map((line) => el("span", { class: kind(line) }, `${line}\n`)));
}

/** Return what a page says where a run has no curves, with the patterns that would find them in its log. */
function noMetrics(hint, grid) {
  const text = grid === "speed" ? "No speed has been measured so far." : "No metrics so far.";
  if (!hint) return el("p", { class: "state" }, text);
  return el("div", { class: "state" }, el("p", {}, `${text} The log has numbers. These patterns in job.yaml make curves of them:`), el("pre", { tabindex: "0", "aria-label": "Patterns for job.yaml" }, hint));
}
