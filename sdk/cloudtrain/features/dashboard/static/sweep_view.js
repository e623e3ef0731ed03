// The page of a sweep: its best trial, history, parallel coordinates and importance of its fields, and its trials.
"use strict";

const SCALE_STEPS = 5;
const LOGARITHMIC_FROM = 20;

class SweepView {
  constructor(source, content) {
    this.source = source;
    this.id = content.sweep;
    this.head = el("div", { class: "run-head" });
    this.parts = el("div", {});
    this.node = el("div", {}, this.head, this.parts);
    this.show(content);
    this.wait(content);
  }

  wait(content) {
    if (content.is_final) return;
    this.timer = setTimeout(async () => {
      let fresh = content;
      try { fresh = await this.source.sweep(this.id); this.show(fresh); } catch (error) { this.notice.textContent = error.message; }
      if (this.timer) this.wait(fresh);
    }, content.poll_seconds * 1000);
  }

  show(content) {
    this.showHead(content);
    const ranked = rankTrials(content);
    const isDrawn = ranked.filter((each) => each.objective !== null).length > 1;
    const panel = (id, title, ...children) => el("section", { id, class: "panel", "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
    this.history?.stop();
    this.history = isDrawn ? sweepHistory(content) : null;
    const left = this.parts.querySelector("#sweep-trials .scroll")?.scrollLeft ?? 0;
    this.parts.replaceChildren(
      el("div", { class: "sweep-panels" },
        content.best ? panel("sweep-best", "Best trial", ...bestTrial(content)) : null,
        panel("sweep-history", "History", this.history ? this.history.node : el("p", { class: "state" }, "Drawn when two trials have an objective.")),
        content.importance ? panel("sweep-importance", "Importance of the fields", importanceBars(content.importance)) : null),
      ...(isDrawn ? [panel("sweep-parallel", "Parallel coordinates", sweepCoordinates(content, ranked))] : []),
      panel("sweep-trials", "Trials, best first", trialTable(content, ranked)));
    const table = this.parts.querySelector("#sweep-trials .scroll");
    if (table) table.scrollLeft = left;
  }

  showHead(content) {
    const { objective, trials } = content;
    const known = trials.filter((each) => each.objective !== null).length;
    const failed = trials.filter((each) => each.state === "FAILED").length;
    const isInterrupted = content.state === "INTERRUPTED";
    this.notice = el("p", { class: isInterrupted ? "warning" : "muted", role: "status" },
      isInterrupted ? "Its controller has ended. To continue: cloudtrain sweep run with the same file" : "");
    this.head.replaceChildren(...[el("h1", {}, `${content.name} `, stateBadge(content.state)),
      el("p", { class: "muted" }, "Sweep ", el("span", { class: "id" }, content.sweep)),
      content.reason ? el("p", { class: "reason" }, content.reason) : null, this.notice,
      facts([["Objective", `${objective.title}, ${objective.goal === "max" ? "higher" : "lower"} is better`],
        ["Trials", `${trials.length} of ${content.planned_trials}`], ["With an objective", String(known)], ["Failed", failed ? String(failed) : ""],
        ["Strategy", `${content.strategy}, by ${content.engine}`],
        ["Spent", content.budget_usd === null ? "" : `${formatUsd(content.spent_usd)} of ${formatUsd(content.budget_usd)}`],
        ["Reserved", content.budget_usd === null ? "" : formatUsd(content.reserved_usd)]])].filter(Boolean));
  }

  destroy() {
    clearTimeout(this.timer);
    this.timer = null;
    this.history?.stop();
  }
}

/** Return the trials, the best first; those without an objective last. */
function rankTrials({ trials, objective }) {
  const sign = objective.goal === "max" ? -1 : 1;
  return [...trials].sort((one, two) => (one.objective === null) - (two.objective === null)
    || sign * (one.objective - two.objective) || one.number - two.number);
}

/** Return the best trial: its objective large, its values, and the command that keeps its job. */
function bestTrial(content) {
  const { best, objective } = content;
  const { values } = content.trials.find((each) => each.number === best.number) ?? best;
  return [
    el("p", { class: "key-number" }, describeMetric(best.objective)),
    el("p", { class: "muted" }, `${objective.title} of trial ${best.number}`, best.run ? [", run ", trialLink(content, best.run)] : null),
    facts(Object.entries(values ?? {}).map(([path, value]) => [path, settingCell(value)])),
    copyableCommand(`cloudtrain sweep best ${content.sweep} --write best.yaml`),
  ];
}

function trialLink({ backend }, run) {
  return run ? el("a", { href: `#/run/${encodeURIComponent(`${backend}:${run}`)}`, title: run, class: "id" }, shortId(run)) : "";
}

/** Return a command with a button that copies it. */
function copyableCommand(command) {
  const button = el("button", { type: "button", click: async () => {
    try { await navigator.clipboard.writeText(command); button.textContent = "Copied"; } catch { button.textContent = "Select it to copy"; }
    setTimeout(() => { button.textContent = "Copy command"; }, 2000);
  } }, "Copy command");
  // A line breaks before an option, not within one.
  const parts = command.split(/ (?=--)/).flatMap((part, index) => (index ? [" ", el("span", { class: "option" }, part)] : [part]));
  return el("div", { class: "command" }, el("code", {}, parts), button);
}

/** Return the table of trials. */
function trialTable(content, ranked) {
  const { best, objective } = content;
  const paths = content.axes.map((axis) => axis.name);
  const hasCost = ranked.some((each) => each.cost_usd);
  const hasReason = ranked.some((each) => each.reason);
  const isBest = (each) => best?.number === each.number;
  const heads = ["Trial", capitalised(objective.title), ...paths, "State", ...(hasReason ? ["Reason"] : []), ...(hasCost ? ["Cost"] : []), "Run"];
  const found = table("Values of each trial", heads, ranked.map((each) => [
    el("span", { class: isBest(each) ? "best" : "" }, `${each.number}${isBest(each) ? " (best)" : ""}`),
    each.objective === null ? el("span", { class: "muted" }, "–") : el("span", { class: isBest(each) ? "best" : "" }, describeMetric(each.objective)),
    ...paths.map((path) => settingCell(each.values[path])), stateBadge(each.state),
    ...(hasReason ? [el("span", { class: "trial-reason", title: each.reason ?? "" }, each.reason ?? "")] : []),
    ...(hasCost ? [each.cost_usd ? formatUsd(each.cost_usd) : ""] : []), trialLink(content, each.run)]));
  found.classList.add("trials");
  return found;
}

/** Return the colour of a share between the worst (0) and the best (1) value. */
function scaleColour(share) {
  const place = share * (SCALE_STEPS - 1), step = Math.min(SCALE_STEPS - 2, Math.floor(place));
  return `color-mix(in oklab, var(--scale-${step + 1}) ${Math.round(100 * (place - step))}%, var(--scale-${step}))`;
}

/** Return the trials over the fields, coloured by the rank of their objective: a single bad trial would hide all others. */
function sweepCoordinates(content, ranked) {
  const { objective, trials } = content;
  const measured = ranked.filter((each) => each.objective !== null);
  const lineOf = (each) => {
    const rank = measured.indexOf(each);
    if (rank < 0) return { label: `trial ${each.number}, ${each.state}`, colour: "var(--line)", dash: [3, 3] };
    return { label: `trial ${each.number}: ${describeMetric(each.objective)}`, colour: scaleColour(1 - rank / (measured.length - 1)) };
  };
  // The best trial is drawn last, in front of the others.
  const drawn = [...ranked.filter((each) => each.objective === null), ...measured.toReversed()];
  const places = drawn.map((each) => trials.indexOf(each));
  const all = [...content.axes, { name: objective.title, values: trials.map((each) => each.objective), is_log: isWide(measured) }];
  const axes = all.filter(isVaried).map((axis) => ({ ...axis, values: places.map((place) => axis.values[place]) }));
  const bar = el("span", { class: "scale-bar", role: "img", "aria-label": "Colours from the worst to the best trial" });
  const legend = el("p", { class: "scale-legend" }, `worst ${describeMetric(measured.at(-1).objective)}`, bar, `best ${describeMetric(measured[0].objective)}`);
  const sentence = axes.length < 2 ? el("p", { class: "state" }, "Drawn when trials differ in two fields.") : parallelCoordinates(drawn.map(lineOf), axes);
  return el("div", {}, legend, sentence);
}

/** Return whether objectives differ so much that only a logarithm shows the good ones. */
function isWide(measured) {
  const values = measured.map((each) => each.objective), low = Math.min(...values);
  return low > 0 && Math.max(...values) / low >= LOGARITHMIC_FROM;
}

/** Return the objective of each trial by its number, and the best so far as a line; drawn anew for each width. */
function sweepHistory(content) {
  const place = el("div", { class: "history" });
  let width = 0;
  const watching = new ResizeObserver(() => {
    if (!place.clientWidth || place.clientWidth === width) return;
    width = place.clientWidth;
    place.replaceChildren(historyDrawing(content, width));
  });
  place.append(historyDrawing(content, 480));
  watching.observe(place);
  const { trials } = content;
  const hint = `A dot for each trial${trials.some((each) => each.state === "PRUNED") ? ", paler where it was stopped early" : ""}; the line is the best so far.`;
  return { node: el("div", {}, place, el("p", { class: "hint" }, hint)), stop: () => watching.disconnect() };
}

function historyDrawing({ trials, objective }, width) {
  const known = trials.filter((each) => each.objective !== null);
  const height = 260, left = 56, right = 12, top = 10, bottom = 36;
  const last = Math.max(1, ...known.map((each) => each.number));
  const scale = axisScale({ values: known.map((each) => each.objective), is_log: isWide(known) });
  const x = (number) => left + (number / last) * (width - left - right);
  const y = (value) => height - bottom - 8 - scale.share(value) * (height - top - bottom - 16);
  const drawing = svg("svg", { width, height, role: "img",
    "aria-label": `${objective.title} of ${known.length} trials, between ${describeMetric(scale.low)} and ${describeMetric(scale.high)}` });
  const label = (at, text, anchor) => { const node = svg("text", { x: at[0], y: at[1], "text-anchor": anchor }); node.textContent = text; return node; };
  for (const [tick, text] of historyTicks(scale, isWide(known))) {
    drawing.append(svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid-line" }), label([left - 8, y(tick) + 4], text, "end"));
  }
  const every = Math.max(1, Math.ceil(last / Math.max(2, Math.floor((width - left) / 48))));
  for (let number = 0; number <= last; number += every) drawing.append(label([x(number), height - bottom + 14], String(number), "middle"));
  drawing.append(label([(left + width - right) / 2, height - 4], "trial", "middle"));
  drawing.append(...bestLine(known, objective, x, y, last), ...known.map((each) => {
    const dot = svg("circle", { cx: x(each.number), cy: y(each.objective), r: 4, class: each.state === "SUCCEEDED" ? "dot" : "dot faint" });
    dot.append(titleOf(`trial ${each.number}, ${each.state}: ${describeMetric(each.objective)}`));
    return dot;
  }));
  return drawing;
}

/** Return the line of the best objective so far. Only trials that have succeeded are candidates. */
function bestLine(known, objective, x, y, last) {
  const best = [];
  for (const each of known.filter((trial) => trial.state === "SUCCEEDED")) {
    const isBetter = !best.length || (objective.goal === "max" ? each.objective > best.at(-1).objective : each.objective < best.at(-1).objective);
    if (isBetter) best.push(each);
  }
  if (!best.length) return [];
  const steps = best.map((each, index) => `${index ? `H${x(each.number)} V${y(each.objective)}` : `M${x(each.number)},${y(each.objective)}`}`);
  return [svg("path", { d: `${steps.join(" ")} H${x(last)}`, class: "best-line" })];
}

/** Return up to six ticks of round values, with their texts. */
function historyTicks({ low, high }, isLog) {
  if (high === low) return [[low, describeMetric(low)]];
  if (isLog) {
    const first = Math.floor(Math.log10(low)), powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, index) => first + index);
    const found = powers.flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)).filter((tick) => tick >= low && tick <= high);
    return found.map((tick) => [tick, describeMetric(tick)]);
  }
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough);
  const first = Math.ceil(low / distance);
  const ticks = Array.from({ length: Math.floor(high / distance) - first + 1 }, (_, index) => (first + index) * distance);
  const texts = tickTexts("", ticks, distance);
  return ticks.map((tick, index) => [tick, texts[index]]);
}

/** Return a bar for each field, the most important first. */
function importanceBars(importance) {
  const rows = Object.entries(importance).sort((one, two) => two[1] - one[1]);
  const lanes = rows.map(([name, share]) => {
    const bar = el("span", { class: "share-bar" });
    bar.style.width = `${Math.max(0.5, share * 100)}%`;
    return el("div", { class: "lane importance" }, el("code", {}, name), el("span", { class: "share" }, bar), el("span", { class: "share-text" }, `${Math.round(share * 100)}%`));
  });
  return el("div", {}, lanes,
    el("p", { class: "hint" }, "Shares of the differences between good and other trials that each field explains (Optuna's PED-ANOVA). With few trials they are rough."));
}
