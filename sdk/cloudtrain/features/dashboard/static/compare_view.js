// The comparison of runs.
"use strict";

class CompareView {
  constructor(source, documents, comparison) {
    this.source = source;
    this.documents = documents;
    this.grid = new ChartGrid("compare");
    this.tables = el("div", {});
    this.node = el("div", {}, el("h1", {}, `Comparison of ${documents.length} runs`),
      el("ul", { class: "legend" }, documents.map((each) => {
        const swatch = el("span", { class: "swatch" });
        swatch.style.background = runColour(each.reference);
        return el("li", {}, swatch, el("a", { href: `#/run/${encodeURIComponent(each.reference)}` }, each.reference), " ", stateBadge(each.status.state));
      })),
      this.tables, section("compare-curves", "Curves", this.grid.node));
    this.showComparison(comparison);
    this.update();
  }

  showComparison({ runs, settings, metrics }) {
    const heads = (first) => [first, ...runs.map((reference) => reference.slice(reference.indexOf(":") + 1))];
    const text = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
    const best = (each) => each.best.map((value, index) => (value === null ? (each.last[index] === null ? "" : "not finite") :
      el("span", { class: each.winner === index ? "best" : "" }, describeMetric(value), each.winner === index ? " (best)" : "")));
    const numeric = settings.filter((each) => each.values.every((value) => typeof value === "number"));
    const axes = [...numeric.map((each) => ({ name: each.path, values: each.values })),
      ...metrics.filter((each) => each.best.some((value) => value !== null)).map((each) => ({ name: each.metric, values: each.best }))];
    this.tables.replaceChildren(
      section("compare-metrics", "Metrics", table("Best value of each run", heads("metric"), metrics.map((each) => [each.metric, ...best(each)]))),
      section("compare-settings", "Settings that differ", settings.length ? table("Settings of each run", heads("setting"), settings.map((each) => [each.path, ...each.values.map(text)])) : el("p", { class: "state" }, "No setting differs.")),
      ...(runs.length > 2 && axes.length > 1 ? [section("compare-parallel", "Parallel coordinates", parallelCoordinates(runs, axes))] : []));
  }

  update() {
    this.grid.show(chartsOf(this.documents));
  }

  destroy() {
    this.grid.destroy();
  }
}
