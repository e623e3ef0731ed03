// The page of one run: its head, its tabs, and which of them is drawn.
"use strict";

const RUN_TABS = [
  ["overview", "Overview"], ["charts", "Charts"], ["system", "System"], ["timeline", "Timeline"],
  ["checkpoints", "Checkpoints"], ["plan", "Plan"], ["log", "Log"],
];
const HEAD_SECONDS = 30;
const HEAD_CURVE = { width: 180, height: 52, points: 120 };

/** Return how a metric is called: the title of its chart, the name of its line, its unit. */
function wordsOf(entry, name) {
  const found = entry.words?.metrics?.[name];
  if (found) return found;
  const at = name.lastIndexOf("/");
  return { chart: name.slice(at + 1).replaceAll("_", " "), line: name.slice(0, Math.max(0, at)), unit: "", kind: "" };
}

/** Return charts as `ChartGrid` shows them, training and validation together; with `speed` those of speed and memory. */
function chartsOf(entry, { speed = false } = {}) {
  const groups = new Map();
  for (const name of Object.keys(entry.curves)) {
    const words = wordsOf(entry, name);
    if ((words.kind !== "") !== speed) continue;
    if (!groups.has(words.chart)) groups.set(words.chart, { words, metrics: [] });
    groups.get(words.chart).metrics.push(name);
  }
  const charts = [...groups].map(([title, { words, metrics }]) => ({
    title,
    unit: words.unit,
    hint: words.hint,
    isLarge: metrics.includes(entry.words?.key?.name),
    kind: words.kind === "part" ? "stacked" : "lines",
    series: seriesOf(entry, metrics),
  }));
  const rank = (chart) => (chart.isLarge || chart.kind === "stacked" ? 0 : 1);
  return charts.sort((one, two) => rank(one) - rank(two));
}

function seriesOf(entry, metrics) {
  return metrics.map((name) => {
    const words = wordsOf(entry, name);
    const isPart = words.kind === "part";
    return {
      label: words.line || "value",
      colour: isPart ? paletteColour(metrics.indexOf(name)) : splitColour(name),
      dash: isPart || name.startsWith("train/") ? [] : [6, 3],
      curve: entry.curves[name],
      origin: originOf(entry),
      batch: entry.plan?.batch?.global,
      direction: words.direction,
    };
  });
}

function originOf(entry) {
  const begin = entry.events?.find((event) => event.event === "started")?.time;
  const started = entry.status?.started ? Date.parse(entry.status.started) / 1000 : null;
  return begin ?? started ?? entry.created ?? 0;
}

/** Return the address of a tab of a run's page. */
function tabAddress(reference, tab) {
  return `#/run/${encodeURIComponent(reference)}${tab === "overview" ? "" : `/${tab}`}`;
}

class RunView {
  constructor(source, entry, tab) {
    this.source = source;
    this.entry = entry;
    this.zoomed = {};
    this.isJumping = false;
    this.grids = {
      key: this.makeGrid("key"),
      curves: this.makeGrid("curves"),
      speed: this.makeGrid("speed"),
    };
    this.log = new LogView(() => this.entry.created ?? originOf(this.entry));
    // Of an ended run, the beginning is shown first.
    this.log.follow.checked = entry.status.exit_code === null;
    this.parts = { head: el("div", {}), failure: el("div", {}) };
    this.head = el("div", {}, this.parts.head, this.parts.failure);
    this.panels = {};
    this.tabs = this.makeTabs();
    const drawers = {
      overview: () => this.drawOverview(), charts: () => this.drawCharts(), system: () => this.drawSystem(),
      timeline: () => this.drawTimeline(), checkpoints: () => this.drawCheckpoints(), plan: () => this.drawPlan(),
      log: () => this.log.draw(),
    };
    this.drawers = drawers;
    this.fillPanels();
    this.node = el("div", { class: "run-page" }, this.head, this.tabs, Object.values(this.panels));
    this.log.add(entry.lines ?? []);
    this.log.add(loggedEvents(entry.events ?? []));
    this.showTab(tab);
    this.followPrint();
    this.timer = setInterval(() => this.drawHead(), HEAD_SECONDS * 1000);
  }

  makeGrid(id) {
    return new ChartGrid(id, { onZoom: this.source.isLive ? (range) => this.fetchRange(id, range) : null });
  }

  /** Return the list of tabs. Each has an address; arrows, Home and End move between them. */
  makeTabs() {
    const tabs = RUN_TABS.map(([name, title]) => el("a", {
      role: "tab", id: `tab-${name}`, href: tabAddress(this.entry.reference, name), "aria-controls": `panel-${name}`,
    }, title));
    return el("div", { class: "tabs", role: "tablist", "aria-label": "Parts of this page", keydown: (event) => this.onTabKey(event) }, tabs);
  }

  onTabKey(event) {
    const tabs = [...this.tabs.children], at = tabs.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1, " ": at }[event.key];
    if (next === undefined || at < 0) return;
    event.preventDefault();
    const chosen = tabs[(next + tabs.length) % tabs.length];
    chosen.focus();
    chosen.click();
  }

  /** Make the empty parts of each tab, which are filled when the tab is shown. */
  fillPanels() {
    const part = (name) => (this.parts[name] = el("div", {}));
    const contents = {
      overview: el("div", { class: "overview" },
        el("div", { class: "span-all", id: "notices" }, part("notices")),
        section("key-section", "Key metric", part("keyEmpty"), this.grids.key.node),
        section("facts-section", "Key facts", part("facts"), part("results")),
        section("ledger-section", "Where the time went", part("ledger")),
        part("evaluations"), part("classes")),
      charts: el("div", {}, part("chartsEmpty"), this.grids.curves.node),
      system: el("div", {}, section("speed-section", "Speed and memory", part("speedEmpty"), this.grids.speed.node),
        section("hosts-section", "Hosts", part("hosts")),
        section("environment-section", "Environment", part("environment"))),
      timeline: part("timeline"),
      checkpoints: part("checkpoints"),
      plan: part("plan"),
      log: this.log.node,
    };
    for (const [name, title] of RUN_TABS) {
      this.panels[name] = el("div", { id: `panel-${name}`, role: "tabpanel", class: `tab-panel tab-${name}`, "aria-labelledby": `tab-${name}` },
        el("h2", { class: "print-title" }, title), contents[name]);
      this.panels[name].hidden = true;
    }
    this.parts.evaluations.className = "span-half";
    this.parts.classes.className = "span-all";
    this.grids.key.node.classList.add("without-controls");
  }

  /** Show a tab: only this one is drawn, now and at each change. */
  showTab(name) {
    this.tab = RUN_TABS.some(([known]) => known === name) ? name : "overview";
    for (const [each] of RUN_TABS) {
      const isShown = each === this.tab, link = this.tabs.querySelector(`#tab-${each}`);
      this.panels[each].hidden = !isShown;
      link.setAttribute("aria-selected", String(isShown));
      link.setAttribute("tabindex", isShown ? "0" : "-1");
      if (isShown && this.tabs.scrollWidth > this.tabs.clientWidth) this.tabs.scrollLeft = link.offsetLeft - 32;
    }
    this.node.dataset.tab = this.tab;
    this.log.isShown = this.tab === "log";
    this.update();
  }

  /** Add what is new in the run, which its document has already. */
  receive(news) {
    this.log.add([...(news.lines ?? []), ...loggedEvents(news.events ?? [])]);
    this.update();
    if (this.isJumping) this.jump();
  }

  /** Show the document again after changes. */
  update() {
    this.drawHead();
    this.drawers[this.tab]();
  }

  /** Fill a part of the page if what it shows has changed. */
  put(name, content, make) {
    const node = this.parts[name], text = JSON.stringify(content) ?? "";
    if (node.shownContent === text) return;
    node.shownContent = text;
    node.replaceChildren(...[make(content)].flat().filter(Boolean));
  }

  drawHead() {
    const { entry } = this;
    const curve = entry.curves[entry.words.key?.name]?.values.length;
    const content = [entry.status, entry.texts, entry.words.key, entry.ledger?.share, curve, describeAgo(entry.created), tookOf(entry.status)];
    this.put("head", content, () => runHead(entry, this.source.isLive ? this.actions() : null));
    this.put("failure", [entry.explanation, entry.status.state], () => failureNotice(entry, () => this.jumpToFailure()));
  }

  actions() {
    const { entry } = this;
    const button = (text, action, command, question) => el("button", {
      type: "button", click: () => confirmAction(this.source, entry.reference, text, action, command, question),
    }, text);
    const isFinal = entry.status.exit_code !== null, submit = entry.explanation?.submit;
    const stop = () => button("Stop…", "stop", `cloudtrain stop ${entry.reference}`, "Stop this run? A Task saves a checkpoint first.");
    const resume = () => button("Resume…", "resume", `cloudtrain resume ${entry.reference}`, "Start a new run from the last checkpoint?");
    const fixed = () => button("Copy command after the fix…", null, submit,
      "A resumed run would have the old code and job. Copy the command that submits the fixed ones?");
    const isDone = entry.status.state === "SUCCEEDED";
    const first = submit ? fixed() : isDone ? null : isFinal ? resume() : stop();
    return el("div", { class: "actions" }, first,
      button("Copy command…", null, `cloudtrain follow ${entry.reference}`, "Copy the command that follows this run in a terminal?"));
  }

  drawOverview() {
    const { entry } = this, { words } = entry;
    const texts = [...(entry.status.alarms ?? []), ...(entry.status.warnings ?? []), ...(entry.error ? [entry.error] : [])];
    this.put("notices", texts, (found) => found.map((text) => el("p", { class: "warning" }, text)));
    const charts = chartsOf({ ...entry, curves: this.zoomed.key ?? entry.curves }).filter((chart) => chart.isLarge);
    this.showCharts("key", charts, "keyEmpty");
    this.put("facts", words.facts, (rows) => rowTable("", rows));
    this.put("results", words.results, resultTable);
    this.put("ledger", entry.ledger, ledgerPart);
    this.put("evaluations", entry.evaluations ?? [], (found) => (found.length ? section("evaluations-section", "Evaluations", evaluationTable(found)) : null));
    this.put("classes", entry.analysis ?? null, (found) => (found ? section("classes-section", `Classes of the ${found.split} data`, analysisTables(found)) : null));
  }

  drawCharts() {
    this.showCharts("curves", chartsOf({ ...this.entry, curves: this.zoomed.curves ?? this.entry.curves }), "chartsEmpty");
  }

  drawSystem() {
    const { words } = this.entry;
    this.showCharts("speed", chartsOf({ ...this.entry, curves: this.zoomed.speed ?? this.entry.curves }, { speed: true }), "speedEmpty");
    this.put("hosts", words.hosts, hostTable);
    this.put("environment", words.environment, environmentPart);
  }

  /** Show charts, or what would fill their place. */
  showCharts(grid, charts, empty) {
    const hint = this.entry.words.metrics_hint;
    this.grids[grid].node.hidden = !charts.length;
    this.put(empty, charts.length ? null : [grid, hint], (found) => (found ? noMetrics(grid === "speed" ? "" : hint, grid) : null));
    if (charts.length || this.grids[grid].charts.length) this.grids[grid].show(charts);
  }

  drawTimeline() {
    const { entry } = this;
    this.put("timeline", [entry.events.length, entry.events.at(-1)?.number, entry.status, entry.ledger?.attempts], () => timeline(entry));
  }

  drawCheckpoints() {
    this.put("checkpoints", [this.entry.words.checkpoints, this.entry.ledger?.rows], () => checkpointPart(this.entry));
  }

  drawPlan() {
    this.put("plan", this.entry.reference, () => planPart(this.entry));
  }

  /** Open the log at the line that shows why the run failed; of a log that is still to come, when it has arrived. */
  jumpToFailure() {
    location.hash = tabAddress(this.entry.reference, "log");
    this.showTab("log");
    this.jump();
  }

  jump() {
    const number = failureLine(this.entry.explanation, this.log.lines);
    this.isJumping = number === null;
    this.log.jump(number);
  }

  /** Show all tabs one after the other while the page is printed. */
  followPrint() {
    this.printing = matchMedia("print");
    this.onPrint = ({ matches }) => {
      if (!matches) { this.showTab(this.tab); return; }
      for (const [name] of RUN_TABS) {
        this.panels[name].hidden = false;
        this.drawers[name]();
      }
      this.log.draw(true);
    };
    this.printing.addEventListener("change", this.onPrint);
  }

  /** Fetch more points of a zoomed range. */
  async fetchRange(id, range) {
    delete this.zoomed[id];
    if (range) {
      const answer = await this.source.get(`api/run/${encodeURIComponent(this.entry.reference)}/curves?from=${range[0]}&to=${range[1]}`);
      if (!answer.curves || String(range) !== String(this.grids[id].zoom)) return;
      this.zoomed[id] = answer.curves;
    }
    this.update();
  }

  destroy() {
    clearInterval(this.timer);
    this.printing.removeEventListener("change", this.onPrint);
    for (const grid of Object.values(this.grids)) grid.destroy();
  }
}

/** Return the head of a run: name, state, age, duration, cost, effective share, and the key metric with its curve. */
function runHead(entry, actions) {
  const { status, words, ledger, texts } = entry;
  const id = el("span", { class: "id", title: entry.reference }, shortId(entry.run));
  const age = el("span", { title: formatTime(entry.created) }, describeAgo(entry.created));
  const share = ledger?.share ? el("span", { title: ledger.headline }, ledger.share) : "";
  const reason = status.state === "FAILED" ? "" : texts.reason;
  return el("div", { class: "run-head" },
    el("div", { class: "run-title" }, el("h1", {}, entry.name, " ", id, " ", stateBadge(status.state)),
      reason ? el("p", { class: "reason muted" }, reason) : null,
      facts([["Submitted", age], ["Duration", tookOf(status)], ["Cost", texts.cost], ["Effective training", share], ...progressFacts(entry)])),
    keyMetric(entry, words.key), actions);
}

function progressFacts({ status, texts }) {
  if (status.exit_code !== null) return [];
  const total = status.total_steps;
  if (!total) return [["Progress", texts.steps]];
  const bar = el("progress", { max: 1, value: Math.min(1, (status.last_step ?? 0) / total), "aria-label": "progress" });
  return [["Progress", el("span", {}, bar, ` ${texts.steps}`)], ["Time left", texts.left]];
}

function keyMetric(entry, key) {
  if (!key) return null;
  return el("div", { class: "run-key" },
    el("div", {}, el("div", { class: "fact-label" }, capitalised(key.title)), el("div", { class: "run-key-value" }, key.text)),
    headCurve(entry.curves[key.name], key.title));
}

/** Return a curve without axes: its course, and its end as a dot. */
function headCurve(curve, title) {
  const values = (curve?.values ?? []).filter((value) => value !== null);
  if (values.length < 2) return null;
  const { width, height, points } = HEAD_CURVE, pad = 4;
  const every = Math.max(1, Math.floor(values.length / points));
  const shown = values.filter((_, index) => index % every === 0 || index === values.length - 1);
  const low = Math.min(...shown), high = Math.max(...shown);
  const x = (index) => pad + (index / (shown.length - 1)) * (width - 2 * pad);
  const y = (value) => (high === low ? height / 2 : height - pad - ((value - low) / (high - low)) * (height - 2 * pad));
  const line = shown.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  return svg("svg", { class: "head-curve", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Course of ${title}` },
    svg("polyline", { points: line }), svg("circle", { cx: x(shown.length - 1), cy: y(shown.at(-1)), r: 3 }));
}

function tookOf(status) {
  const begin = status.started ?? status.created;
  if (!status.ended && status.exit_code !== null) return "";
  return begin ? formatDuration(((status.ended ? Date.parse(status.ended) : Date.now()) - Date.parse(begin)) / 1000) : "";
}

/** Return why a run failed and what to do, as a notice below its head. */
function failureNotice(entry, jump) {
  const found = entry.explanation;
  if (!found && entry.status.state !== "FAILED") return [];
  if (!found) return [el("div", { class: "notice", role: "note" }, el("pre", { class: "message", tabindex: "0" }, entry.status.reason))];
  const trace = found.traceback?.length ? found.traceback : found.last_lines ?? [];
  const name = found.traceback?.length ? "Traceback" : "Last lines";
  const rest = el("div", { class: "notice-rest" },
    found.where ? el("p", { class: "muted" }, capitalised(found.where)) : null,
    found.action ? el("p", { class: "advice" }, el("strong", {}, "What to do: "), found.action) : null,
    trace.length ? el("details", {}, el("summary", {}, name), el("pre", { tabindex: "0", "aria-label": name }, trace.join("\n"))) : null);
  return [el("section", { class: "notice", id: "explanation-section", "aria-labelledby": "explanation-title" },
    el("h2", { id: "explanation-title" }, `Why it failed${found.cause ? `: ${found.cause}` : ""}`),
    el("pre", { class: "message", tabindex: "0", "aria-label": "Message" }, found.message), rest,
    el("button", { type: "button", click: jump }, "Jump to it in the log"))];
}

/** Return the number of the line that shows why a run failed: its message, else the last error; null without one. */
function failureLine(found, lines) {
  const message = (found?.traceback?.length ? found.traceback.at(-1) : found?.message ?? "").split("\n")[0].trim();
  const ofHost = lines.filter((line) => !found?.host || line.host === found.host);
  const shown = message ? ofHost.find((line) => line.text.includes(message)) : null;
  return (shown ?? lines.findLast((line) => line.level === "error") ?? lines.at(-1))?.number ?? null;
}
