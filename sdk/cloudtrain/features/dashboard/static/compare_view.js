// The comparison of runs.
"use strict";

const COMPARE_SECONDS = 5;
const DIGEST = /^[0-9a-f]{24,}$/;
const SHOWN_DIGITS = 12;
const MOST_TEXT = 60;

class CompareView {
  constructor(source, documents, comparison) {
    this.source = source;
    this.documents = documents;
    this.lines = linesAmong(documents.map((each) => each.reference));
    this.grid = new ChartGrid("compare");
    this.showsAll = false;
    this.notice = el("p", { class: "warning", hidden: true });
    this.table = el("div", {});
    this.parallel = el("div", {});
    this.toggle = el("button", { type: "button", click: () => this.switchCommon() });
    this.node = el("div", {}, el("h1", {}, `Comparison of ${documents.length} runs`), this.notice,
      el("section", { id: "compare-table", class: "panel", "aria-labelledby": "compare-table-title" },
        el("div", { class: "panel-head" }, el("h2", { id: "compare-table-title" }, "Metrics and settings"), this.toggle), this.table),
      this.parallel, section("compare-curves", "Curves", this.grid.node));
    this.showComparison(comparison);
    this.update();
    this.wait();
  }

  /** Read the comparison again while a run is in progress. */
  wait() {
    if (!this.source.isLive || this.documents.every((each) => each.status.exit_code !== null)) return;
    this.timer = setTimeout(async () => {
      try {
        const fresh = await this.source.comparison(this.documents.map((each) => each.reference));
        if (this.timer) { this.showComparison(fresh); this.update(); }
      } catch { /* the banner reports a lost connection */ }
      if (this.timer) this.wait();
    }, COMPARE_SECONDS * 1000);
  }

  switchCommon() {
    this.showsAll = !this.showsAll;
    this.showComparison(this.comparison);
  }

  showComparison(comparison) {
    this.comparison = comparison;
    const { common, note } = comparison;
    this.notice.hidden = !note;
    this.notice.textContent = note;
    this.toggle.hidden = !common.length;
    this.toggle.textContent = this.showsAll ? "Hide what is the same" : `Show all (${common.length} are the same)`;
    this.toggle.setAttribute("aria-expanded", String(this.showsAll));
    // The table keeps its place while it is made anew.
    const place = this.table.firstChild ? [this.table.firstChild.scrollLeft, this.table.firstChild.scrollTop] : [0, 0];
    this.table.replaceChildren(this.comparisonTable());
    [this.table.firstChild.scrollLeft, this.table.firstChild.scrollTop] = place;
    const axes = this.axes();
    const drawn = this.documents.length > 2 && axes.length > 1;
    this.parallel.replaceChildren(...(drawn ? [section("compare-parallel", "Parallel coordinates", el("div", { class: "panel" }, parallelCoordinates(
      this.documents.map((each, index) => ({ label: nameOf(each), ...this.lines[index] })), axes)))] : []));
  }

  /** Return the one table of metrics and settings: a column for each run, all of the same width. */
  comparisonTable() {
    const { metrics, settings, common } = this.comparison, { documents } = this;
    const heads = documents.map((each, index) => el("th", { scope: "col" }, this.runName(each, index), stateBadge(each.status.state)));
    const part = (title, rows) => (rows.length ? el("tbody", {},
      el("tr", { class: "part-row" }, el("th", { scope: "rowgroup", colspan: documents.length + 1 }, title)), rows) : null);
    const row = (head, cells) => el("tr", {}, el("th", { scope: "row" }, head), cells.map((cell) => el("td", {}, cell)));
    const setting = (each) => row(el("code", {}, each.path), each.values.map(settingCell));
    const caption = el("caption", {}, "Each metric has the best value of the run, or its last one where better is not known.");
    return el("div", { class: "scroll compared", tabindex: "0", role: "region", "aria-label": "Metrics and settings of the runs" },
      el("table", {}, caption, el("thead", {}, el("tr", {}, el("td", {}), heads)),
        part("Metrics", metrics.map((each) => row(this.metricName(each), documents.map((_, index) => this.metricCell(each, index))))),
        part(settings.length ? "Settings that differ" : "No setting differs", settings.length ? settings.map(setting) : [el("tr", { hidden: true })]),
        this.showsAll ? part("Settings that are the same", common.map(setting)) : null));
  }

  runName(each, index) {
    return el("a", { class: "run-name", href: `#/run/${encodeURIComponent(each.reference)}`, title: each.reference },
      lineSample({ ...this.lines[index] }), el("span", {}, each.name), " ", el("span", { class: "id" }, shortId(each.run)));
  }

  metricName({ metric, direction, why }) {
    const better = { min: "lower is better", max: "higher is better" }[direction];
    return [this.titleOf(metric), better ? el("span", { class: "hint", title: why }, ` ${better}`) : null];
  }

  metricCell({ metric, best, winner }, index) {
    const value = best[index];
    if (value === null) return el("span", { class: "muted" }, this.documents[index].curves[metric] ? "not finite" : "–");
    const text = formatIn(this.wordsOf(metric).unit ?? "", value);
    return winner === index ? el("strong", { class: "best" }, text, el("span", { class: "mark-best" }, " best")) : text;
  }

  wordsOf(metric) {
    return this.documents.map((each) => each.words?.metrics?.[metric]).find(Boolean) ?? {};
  }

  titleOf(metric) {
    return this.wordsOf(metric).title ?? metric;
  }

  /** Return the axes on which the runs differ: numeric settings, and metrics of which a direction is known. */
  axes() {
    const { settings, metrics } = this.comparison;
    const numeric = settings.filter((each) => each.values.some((value) => typeof value === "number")
      && each.values.every((value) => typeof value === "number" || value === null));
    const measured = metrics.filter((each) => each.direction);
    return [...numeric.map((each) => ({ name: each.path, values: each.values })),
      ...measured.map((each) => ({ name: this.titleOf(each.metric), values: each.best }))].filter(isVaried);
  }

  /** Show a chart of each metric with a line for each run, that of the main one large. */
  update() {
    const { metrics, main, speed } = this.comparison;
    const known = new Set([...metrics.map((each) => each.metric), ...this.documents.flatMap((each) => Object.keys(each.curves))]);
    const directions = new Map(metrics.map((each) => [each.metric, each.direction]));
    const names = [...known].filter((name) => !speed.includes(name)).sort((one, two) => (two === main) - (one === main));
    this.grid.show(names.map((name) => ({
      title: capitalised(this.titleOf(name)), unit: this.wordsOf(name).unit, isLarge: name === main,
      series: this.documents.flatMap((each, index) => (each.curves[name] ? [{
        label: nameOf(each), ...this.lines[index], curve: each.curves[name],
        origin: originOf(each), batch: each.plan?.batch?.global, direction: directions.get(name),
      }] : [])),
    })));
  }

  destroy() {
    clearTimeout(this.timer);
    this.timer = null;
    this.grid.destroy();
  }
}

/** Return a run's name and short id. */
function nameOf({ name, run }) {
  return `${name} ${shortId(run)}`;
}

/** Return the value of a setting: numbers in four digits as in the commands, digests cut, all of it on hover. */
function settingCell(value) {
  if (value === null || value === undefined || value === "") return el("span", { class: "muted" }, "–");
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : el("span", { title: String(value) }, describeMetric(value));
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  if (DIGEST.test(text)) return el("code", { title: text }, text.slice(0, SHOWN_DIGITS));
  return text.length > MOST_TEXT ? el("span", { title: text }, `${text.slice(0, MOST_TEXT)}…`) : text;
}
