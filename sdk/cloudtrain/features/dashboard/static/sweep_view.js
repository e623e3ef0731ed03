// The page of a sweep: history, parallel coordinates and importance of its fields, and its trials.
"use strict";

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
    const { best, objective, trials } = content;
    const ended = trials.filter((each) => each.objective !== null).length;
    const isInterrupted = content.state === "INTERRUPTED";
    this.notice = el("p", { class: isInterrupted ? "warning" : "muted", role: "status" }, isInterrupted ? "Its controller has ended. To continue: cloudtrain sweep run with the same file" : "");
    this.head.replaceChildren(el("h1", {}, "Sweep ", stateBadge(content.state)), el("p", { class: "muted id" }, content.sweep),
      el("p", { class: "reason" }, content.reason ?? ""), this.notice,
      facts([["objective", `${objective.metric}, ${objective.goal}`], ["strategy", `${content.strategy}, engine ${content.engine}`],
        ["trials", `${trials.length} of ${content.planned_trials}, ${ended} with an objective`],
        ["best", best ? `${describeMetric(best.objective)} (trial ${best.number})` : ""],
        ["spent", content.budget_usd === null ? "" : `${formatUsd(content.spent_usd)} of ${formatUsd(content.budget_usd)}`],
        ["reserved", content.budget_usd === null ? "" : formatUsd(content.reserved_usd)]].filter((pair) => pair[1] !== "")));
    const link = (run) => (run ? el("a", { href: `#/run/${encodeURIComponent(`${content.backend}:${run}`)}` }, run) : "");
    const paths = content.axes.map((axis) => axis.name);
    const text = (value) => (value === undefined || value === null ? "" : typeof value === "number" ? formatNumber(value) : typeof value === "object" ? JSON.stringify(value) : String(value));
    const sign = objective.goal === "max" ? -1 : 1;
    const ranked = [...trials].sort((one, two) => (one.objective === null) - (two.objective === null) || sign * (one.objective - two.objective) || one.number - two.number);
    const axes = [...content.axes, { name: objective.metric, values: trials.map((each) => each.objective) }];
    const isDrawn = ended > 1;
    this.parts.replaceChildren(
      section("sweep-history", "History", isDrawn ? sweepHistory(content) : el("p", { class: "state" }, "Drawn when two trials have an objective.")),
      ...(content.importance ? [section("sweep-importance", "Importance of the fields", importanceBars(content.importance))] : []),
      ...(isDrawn ? [section("sweep-parallel", "Parallel coordinates", parallelCoordinates(trials.map((each) => `trial ${each.number}`), axes))] : []),
      section("sweep-trials", "Trials", table("Trials, best first", ["trial", "state", objective.metric, ...paths, "cost", "run"], ranked.map((each) => [
        el("span", { class: best?.number === each.number ? "best" : "" }, `${each.number}${best?.number === each.number ? " (best)" : ""}`),
        el("span", { title: each.reason ?? "" }, stateBadge(each.state)), each.objective === null ? "" : describeMetric(each.objective),
        ...paths.map((path) => text(each.values[path])), each.cost_usd ? formatUsd(each.cost_usd) : "", link(each.run)]))));
  }

  destroy() {
    clearTimeout(this.timer);
    this.timer = null;
  }
}

/** Return the objective of each trial by its number, and the best so far as a line. */
function sweepHistory({ trials, objective }) {
  const known = trials.filter((each) => each.objective !== null);
  const width = 720, height = 220, left = 64, right = 12, top = 12, bottom = 30;
  const last = Math.max(1, ...known.map((each) => each.number));
  const low = Math.min(...known.map((each) => each.objective)), high = Math.max(...known.map((each) => each.objective));
  const x = (number) => left + (number / last) * (width - left - right);
  const y = (value) => (high === low ? height / 2 : height - bottom - ((value - low) / (high - low)) * (height - top - bottom));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "history", role: "img",
    "aria-label": `${objective.metric} of ${known.length} trials, between ${formatNumber(low)} and ${formatNumber(high)}` });
  const label = (at, text, anchor) => { const node = svg("text", { x: at[0], y: at[1], "text-anchor": anchor }); node.textContent = text; return node; };
  drawing.append(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }),
    svg("line", { x1: left, x2: left, y1: top, y2: height - bottom, class: "axis" }),
    label([left - 6, y(high) + 4], formatNumber(high), "end"), label([x(0), height - bottom + 16], "trial 0", "middle"), label([x(last), height - bottom + 16], String(last), "end"));
  if (high !== low) drawing.append(label([left - 6, y(low) + 4], formatNumber(low), "end"));
  const best = [];
  for (const each of known) {
    // Only trials that have succeeded are candidates for the best.
    const isBetter = each.state === "SUCCEEDED" && (!best.length || (objective.goal === "max" ? each.objective > best.at(-1).value : each.objective < best.at(-1).value));
    if (isBetter) best.push({ number: each.number, value: each.objective });
    const dot = svg("circle", { cx: x(each.number), cy: y(each.objective), r: 4, class: each.state === "SUCCEEDED" ? "dot" : "dot faint" });
    dot.append(titleOf(`trial ${each.number}, ${each.state}: ${describeMetric(each.objective)}`));
    drawing.append(dot);
  }
  const steps = best.map((each, index) => `${index ? `H${x(each.number)} V${y(each.value)}` : `M${x(each.number)},${y(each.value)}`}`);
  if (best.length) drawing.append(svg("path", { d: `${steps.join(" ")} H${x(last)}`, class: "best-line" }));
  return el("div", {}, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "History of the objective" }, drawing), el("p", { class: "muted" }, "A dot for each trial, paler where it was stopped early; the line is the best so far."));
}

/** Return a bar for each field, the most important first. */
function importanceBars(importance) {
  const rows = Object.entries(importance).sort((one, two) => two[1] - one[1]);
  return el("div", { class: "timeline" }, rows.map(([name, share]) => el("div", { class: "lane" }, el("span", { class: "lane-label" }, name, el("span", { class: "muted" }, ` ${Math.round(share * 100)} %`)),
    svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${Math.round(share * 100)} %` }, [svg("rect", { x: 0, y: 1, width: Math.max(0.3, share * 100), height: 8, class: "bar" })]))),
    el("p", { class: "muted" }, "Shares of the differences between good and other trials that each field explains (Optuna's PED-ANOVA). With few trials they are rough."));
}
