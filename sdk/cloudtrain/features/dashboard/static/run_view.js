// The page of one run.
"use strict";

const SPEED = /\/(samples_per_second|tokens_per_second|data_wait|mfu|memory_bytes|(data|forward|backward|optimizer|checkpoint)_seconds)$/;
const CONTEXT_LINES = 10;

/** Return `{title, series}` of a document's curves, train and validation together. */
function chartsOf(documents, { speed = false, only = null } = {}) {
  const names = new Set(documents.flatMap((each) => Object.keys(each.curves)));
  const chosen = [...names].filter((name) => SPEED.test(name) === speed && (!only || only.has(name)));
  const several = documents.length > 1;
  return [...groupMetrics(chosen)].map(([title, metrics]) => ({
    title,
    series: documents.flatMap((each, index) => metrics.filter((name) => each.curves[name]).map((name) => ({
      label: several ? `${each.name} ${each.run.split("-").at(-1)} ${name}` : name,
      colour: several ? runColour(each.reference) : splitColour(name),
      dash: dashOf(documents, index, name, several),
      curve: each.curves[name],
      origin: originOf(each),
      batch: each.plan?.batch?.global,
    }))),
  }));
}

/** Evaluations and, among runs whose colours are equal, later runs are dashed. */
function dashOf(documents, index, name, several) {
  if (!several) return [];
  const colour = hashOf(documents[index].reference) % PALETTE_SIZE;
  const before = documents.slice(0, index).filter((each) => hashOf(each.reference) % PALETTE_SIZE === colour).length;
  if (before) return [2 + 2 * before, 3];
  return name.startsWith("train/") ? [] : [6, 3];
}

function originOf(entry) {
  const begin = entry.events?.find((event) => event.event === "started")?.time;
  const started = entry.status?.started ? Date.parse(entry.status.started) / 1000 : null;
  return begin ?? started ?? entry.created ?? 0;
}

class RunView {
  constructor(source, entry) {
    this.source = source;
    this.entry = entry;
    const zoom = source.isLive ? (range) => this.fetchRange(range) : null;
    this.curves = new ChartGrid("curves", { onZoom: zoom });
    this.speed = new ChartGrid("speed");
    this.head = el("div", {});
    this.parts = Object.fromEntries(["explanation", "timeline", "ledger", "evaluations", "classes", "checkpoints", "plan"].map((name) => [name, el("div", {})]));
    this.log = new LogView();
    const links = [["curves-section", "Curves"], ["speed-section", "Speed"], ["timeline-section", "Timeline"], ["ledger-section", "Time and money"], ["checkpoints-section", "Checkpoints"], ["plan-section", "Plan"], ["log-section", "Log"]];
    this.node = el("div", {}, this.head, this.parts.explanation,
      el("nav", { "aria-label": "Parts of this page", class: "parts" }, links.map(([id, text]) =>
        el("button", { type: "button", class: "link", click: () => document.getElementById(id)?.scrollIntoView() }, text))),
      section("curves-section", "Curves", this.curves.node),
      section("speed-section", "Speed and memory", this.speed.node),
      section("timeline-section", "Timeline", this.parts.timeline),
      section("ledger-section", "Time and money", this.parts.ledger),
      this.parts.evaluations,
      this.parts.classes,
      section("checkpoints-section", "Checkpoints", this.parts.checkpoints),
      section("plan-section", "Plan, settings and environment", this.parts.plan),
      section("log-section", "Log", this.log.node));
    this.update(true, entry.lines, entry.events);
    this.showPlan();
  }

  /** Show the document again after changes. */
  update(isComplete = false, lines = [], events = []) {
    const { entry } = this;
    this.head.replaceChildren(this.header());
    this.curves.show(chartsOf([{ ...entry, curves: this.zoomed ?? entry.curves }]));
    this.speed.show(chartsOf([entry], { speed: true }));
    this.parts.ledger.replaceChildren(...ledgerPart(entry.ledger));
    if (isComplete || entry.eventsChanged) {
      this.parts.timeline.replaceChildren(timeline(entry.status, entry.events));
      this.parts.checkpoints.replaceChildren(checkpointTable(entry));
      const evaluations = entry.evaluations ?? [];
      this.parts.evaluations.replaceChildren(...(evaluations.length ? [section("evaluations-section", "Evaluations", evaluationTable(evaluations))] : []));
      this.parts.classes.replaceChildren(...(entry.analysis ? [section("classes-section", "Classes", analysisTables(entry.analysis))] : []));
      entry.eventsChanged = false;
    }
    this.log.add([...lines, ...events.map((event) => ({ ...event, rank: event.rank ?? 0, text: describeEvent(event) }))]);
    this.parts.explanation.replaceChildren(...explanationPart(entry, this.log.lines));
  }

  header() {
    const { entry } = this, { status, texts } = entry;
    const total = status.total_steps, step = status.last_step;
    const share = total ? Math.min(1, (step ?? 0) / total) : null;
    const cost = entry.plan?.cost ?? {};
    const isBilled = entry.backend === "sagemaker";
    const progress = share === null ? texts.steps : el("span", {}, el("progress", { max: 1, value: share, "aria-label": "progress" }), ` ${texts.steps}`);
    const metric = status.metrics ? Object.entries(status.metrics).filter(([name]) => !SPEED.test(name)) : [];
    return el("div", { class: "run-head" },
      el("h1", {}, entry.name, " ", stateBadge(status.state)),
      el("p", { class: "muted id" }, entry.reference),
      texts.reason ? el("p", { class: status.state === "FAILED" ? "reason bad" : "reason" }, status.state === "FAILED" ? status.reason : texts.reason) : null,
      [...(status.alarms ?? []), ...(status.warnings ?? [])].map((text) => el("p", { class: "warning" }, text)),
      entry.error ? el("p", { class: "warning", role: "alert" }, entry.error) : null,
      facts([
        ["progress", progress], ["time left", texts.left],
        ["submitted", formatTime(entry.created)], ["took", tookOf(status)],
        ["ranks", status.world_size], ["instances", status.instance_type ? `${status.instances ?? ""} x ${status.instance_type}` : ""],
        ["cost so far", texts.cost], ["price per hour", isBilled ? formatUsd(cost.usd_per_hour) : ""],
        ["estimate at the time limit", isBilled ? formatUsd(cost.max_usd) : ""], ["at risk since the last checkpoint", texts.at_risk],
        ...metric.map(([name, value]) => [name, describeMetric(value)]),
        ...Object.entries(status.tracking ?? {}).map(([name, place]) => [name, webLink(place)]),
        ["tags", Object.entries(entry.tags ?? {}).map(([name, value]) => `${name}=${value}`).join(", ")],
      ]),
      this.source.isLive ? this.actions() : null);
  }

  actions() {
    const { entry } = this;
    const button = (text, action, command, question) => el("button", { type: "button", click: () => confirmAction(this.source, entry.reference, text, action, command, question) }, text);
    const isFinal = entry.status.exit_code !== null, submit = entry.explanation?.submit;
    return el("div", { class: "actions" },
      submit ? button("Copy command after the fix…", null, submit, "A resumed run would have the old code and job. Copy the command that submits the fixed ones?") :
      isFinal ? button("Resume…", "resume", `cloudtrain resume ${entry.reference}`, "Start a new run from the last checkpoint?") :
        button("Stop…", "stop", `cloudtrain stop ${entry.reference}`, "Stop this run? A Task saves a checkpoint first."),
      button("Copy command…", null, `cloudtrain follow ${entry.reference}`, "Copy the command that follows this run in a terminal?"));
  }

  showPlan() {
    const { plan, settings } = this.entry;
    const environment = this.entry.events.find((event) => event.event === "environment") ?? this.entry.events.find((event) => event.event === "started");
    const rows = (content) => Object.entries(content ?? {}).filter(([, value]) => value !== null && typeof value !== "object").map(([name, value]) => [name, String(value)]);
    const parts = [
      plan.command ? el("p", {}, "Starts ", el("code", {}, plan.command)) : null,
      facts([["image", plan.image], ["code", plan.bundle ? `${plan.bundle.digest?.slice(0, 12)} (${formatBytes(plan.bundle.bytes)}, ${plan.bundle.files} files)` : ""],
        ["commit", plan.commit ? `${plan.commit.slice(0, 12)}${plan.diff ? " with changes" : ""} on ${plan.branch ?? ""}` : ""]]),
      el("div", { class: "pair" },
        table("Settings", ["setting", "value"], rows(this.entry.settings)),
        environment ? table("Environment", ["what", "value"], rows(environment).filter(([name]) => !["event", "time", "number", "step", "epoch"].includes(name))) : null),
      (plan.warnings ?? []).map((text) => el("p", { class: "warning" }, text)),
      plan.decisions?.length ? el("details", {}, el("summary", {}, "Decisions of the plan"), el("ul", {}, plan.decisions.map((text) => el("li", {}, text)))) : null,
      this.entry.card ? el("details", {}, el("summary", {}, "Model card"), el("pre", { tabindex: "0", "aria-label": "model card" }, this.entry.card)) : null,
      plan.diff ? el("details", {}, el("summary", {}, "Changes since the commit (git diff)"), diffBlock(plan.diff)) : null,
    ];
    this.parts.plan.replaceChildren(...parts.flat().filter(Boolean));
  }

  /** Fetch more points of a zoomed range. */
  async fetchRange(range) {
    this.zoomed = null;
    if (range) {
      const answer = await this.source.get(`api/run/${encodeURIComponent(this.entry.reference)}/curves?from=${range[0]}&to=${range[1]}`);
      if (!answer.curves || String(range) !== String(this.curves.zoom)) return;
      this.zoomed = answer.curves;
    }
    this.curves.show(chartsOf([{ ...this.entry, curves: this.zoomed ?? this.entry.curves }]));
  }

  destroy() {
    this.curves.destroy();
    this.speed.destroy();
  }
}

function tookOf(status) {
  const begin = status.started ?? status.created;
  if (!status.ended && status.exit_code !== null) return "";
  return begin ? formatDuration(((status.ended ? Date.parse(status.ended) : Date.now()) - Date.parse(begin)) / 1000) : "";
}

function checkpointTable(entry) {
  const found = entry.events.filter((event) => event.event === "checkpoint");
  const damaged = new Set(entry.events.filter((event) => event.event === "checkpoint_damaged").map((event) => event.step));
  const missed = entry.events.filter((event) => event.event === "checkpoint_missed");
  if (!found.length && !missed.length) return el("p", { class: "state" }, "No checkpoint so far.");
  const rows = found.map((event) => [`step ${event.step}`, damaged.has(event.step) ? "damaged" : "complete", formatTime(event.time), formatBytes(event.bytes), event.seconds ? `${formatNumber(event.seconds)} s` : "", event.uri]);
  const lost = missed.map((event) => [`step ${event.step}`, `missed: ${event.reason ?? ""}`, formatTime(event.time), "", "", event.detail ?? ""]);
  return table("Checkpoints when they were written; older ones may be deleted by checkpoint.keep", ["step", "status", "written", "size", "took", "place"], [...rows, ...lost].reverse());
}

/** The lines of the failure's host around the first that shows its message; empty if no line that is kept shows it. */
function linesAround(found, lines) {
  const message = (found.traceback?.length ? found.traceback.at(-1) : found.message).split("\n")[0].trim();
  const ofHost = lines.filter((line) => !found.host || line.host === found.host);
  const at = message ? ofHost.findIndex((line) => line.text.includes(message)) : -1;
  return at < 0 ? [] : ofHost.slice(Math.max(0, at - CONTEXT_LINES), at + CONTEXT_LINES + 1);
}

function explanationPart(entry, lines) {
  const found = entry.explanation;
  if (!found) return [];
  const around = linesAround(found, lines);
  const where = [found.host, found.rank === null || found.rank === undefined ? "" : `rank ${found.rank}`, found.step === null || found.step === undefined ? "" : `after step ${found.step}`].filter(Boolean).join(", ");
  return [section("explanation-section", `Why it failed${found.class ? `: ${found.class}` : ""}`,
    el("pre", { class: "message", tabindex: "0" }, found.message), where ? el("p", { class: "muted" }, where) : null,
    found.action ? el("p", {}, found.action) : null,
    found.traceback?.length ? el("pre", { tabindex: "0", "aria-label": "Traceback" }, found.traceback.join("\n")) : null,
    found.last_lines?.length ? el("pre", { tabindex: "0", "aria-label": "Last lines" }, found.last_lines.join("\n")) : null,
    around.length ? el("details", {}, el("summary", {}, "The log around it"), el("pre", { tabindex: "0", "aria-label": "Log around the failure" },
      around.map((line) => `${line.host}${line.rank === null ? "" : ` rank ${line.rank}`}  ${line.text}`).join("\n"))) : null)];
}

function diffBlock(text) {
  return el("pre", { class: "diff", tabindex: "0", "aria-label": "git diff" }, text.split("\n").map((line) =>
    el("span", { class: line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "" }, `${line}\n`)));
}
