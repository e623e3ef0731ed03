// Start, pages, and where the data comes from: the report's own element, or the dashboard's server.
"use strict";

const RETRY_SECONDS = [1, 2, 5, 10];
const MOST_CURVE_POINTS = 12000;

/** The data of a report, which are in the page. */
class ReportSource {
  constructor(content) {
    this.isLive = false;
    this.isLoading = false;
    this.unreachable = [];
    this.content = content;
    this.documents = new Map(content.documents.map((each) => [each.reference, each]));
    this.rows = new Map(content.documents.map((each) => [each.reference, each]));
  }

  async document(reference) {
    return this.documents.get(reference) ?? null;
  }

  async comparison() {
    return this.content.comparison;
  }

  async sweeps() {
    return [];
  }

  watch() {}
}

/** The data of the dashboard's server. */
class LiveSource {
  constructor(token) {
    this.isLive = true;
    this.isLoading = true;
    this.token = token;
    this.rows = new Map();
    this.unreachable = [];
    this.version = 0;
    this.stopped = new AbortController();
  }

  async get(path, options = {}) {
    const response = await fetch(path, { ...options, headers: { Authorization: `Bearer ${this.token}` } });
    return { ...(await response.json()), status_code: response.status };
  }

  async document(reference) {
    const answer = await this.get(`api/run/${encodeURIComponent(reference)}`);
    if (answer.error && !answer.reference) throw new Error([answer.error, answer.hint].filter(Boolean).join(". "));
    return answer;
  }

  async comparison(references) {
    const answer = await this.get(`api/compare?${references.map((each) => `run=${encodeURIComponent(each)}`).join("&")}`);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  async sweeps() {
    return (await this.get("api/sweeps")).sweeps ?? [];
  }

  async sweep(name) {
    const answer = await this.get(`api/sweep/${encodeURIComponent(name)}`);
    if (answer.error) throw new Error([answer.error, answer.hint].filter(Boolean).join(". "));
    return answer;
  }

  act(reference, action) {
    return this.get(`api/run/${encodeURIComponent(reference)}/${action}`, { method: "POST" });
  }

  /** Receive changes of the list, and of some runs, until the next call. */
  watch(references, onChange, onConnection, onReconnect) {
    this.stopped.abort();
    this.stopped = new AbortController();
    this.receive(references, onChange, onConnection, onReconnect, this.stopped.signal);
  }

  async receive(references, onChange, onConnection, onReconnect, signal) {
    for (let failures = 0; !signal.aborted;) {
      try {
        const query = references.map((each) => `&run=${encodeURIComponent(each)}`).join("");
        const headers = { Authorization: `Bearer ${this.token}` };
        const response = await fetch(`api/events?version=${this.version}${query}`, { headers, signal });
        if (!response.ok) throw new Error((await response.json()).error);
        onReconnect();
        onConnection("");
        failures = 0;
        await readEvents(response.body, (content) => this.apply(content, onChange));
      } catch (error) {
        if (signal.aborted) return;
        onConnection(`The connection to cloudtrain dashboard is lost: ${error.message || "it has ended"}. Trying again.`);
      }
      const seconds = RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)];
      failures += 1;
      await new Promise((resolve) => { setTimeout(resolve, seconds * 1000); });
    }
  }

  apply(content, onChange) {
    if (content.rows) {
      this.version = content.version;
      for (const row of content.rows) this.rows.set(row.reference, row);
      for (const reference of content.deleted) this.rows.delete(reference);
      this.unreachable = content.unreachable;
      this.isLoading = !content.is_listed;
    }
    onChange(content);
  }
}

/** Read server-sent events, and pass the JSON of each on. */
async function readEvents(body, onContent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) onContent(JSON.parse(block.slice(6)));
  }
}

/** Add what is new in a run to its document. */
function applyNews(entry, news) {
  if (news.error) entry.error = news.error;
  if (!news.status) return;
  entry.status = news.status;
  entry.texts = news.texts;
  entry.words = news.words ?? entry.words;
  entry.analysis = news.analysis ?? entry.analysis;
  entry.ledger = news.ledger ?? entry.ledger;
  entry.events.push(...news.events);
  for (const [name, curve] of Object.entries(news.replace)) {
    if (curve.steps.length) entry.curves[name] = curve; else delete entry.curves[name];
  }
  for (const [name, curve] of Object.entries(news.append)) {
    const known = entry.curves[name] ?? { steps: [], times: [], values: [] };
    for (const key of ["steps", "times", "values"]) known[key].push(...curve[key]);
    entry.curves[name] = known;
  }
}

class App {
  constructor(source) {
    this.source = source;
    this.view = null;
    this.banner = el("div", { class: "banner", role: "alert", hidden: true });
    this.main = el("main", { id: "main" });
    const theme = el("button", { type: "button", class: "link", click: () => this.switchTheme() }, "Light or dark");
    document.getElementById("app").replaceChildren(
      el("header", {}, el("a", { href: "#/", class: "brand" }, "cloudtrain"), source.isLive ? el("a", { href: "#/", class: "muted" }, "all runs") : el("span", { class: "muted" }, `report of ${formatTime(source.content.created)}`), theme),
      this.banner, this.main);
    addEventListener("hashchange", () => this.onAddress());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show());
    this.show();
  }

  switchTheme() {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try { localStorage.setItem("cloudtrain-theme", root.dataset.theme); } catch { /* a page without storage */ }
    this.show();
  }

  /** Another tab of the shown run needs nothing new; another page does. */
  onAddress() {
    const { kind, names, tab } = this.route();
    if (kind === "run" && this.view instanceof RunView && this.view.entry.reference === names[0]) this.view.showTab(tab);
    else this.show();
  }

  /** Return the page of the address. That of a run may name a tab: `#/run/REFERENCE/log`. */
  route() {
    const [, kind, rest] = location.hash.match(/^#\/(run|compare|sweep)\/(.+)$/) ?? [];
    if (kind === "run") {
      const [name, tab] = rest.split("/");
      return { kind, names: [decodeURIComponent(name)], tab };
    }
    const names = rest ? rest.split(",").map(decodeURIComponent) : [];
    if (kind) return { kind, names };
    const all = [...this.source.rows.keys()];
    if (this.source.isLive || /^#\/(\?|$)/.test(location.hash)) return { kind: this.source.isLive || all.length > 1 ? "list" : "run", names: all };
    return { kind: all.length > 1 ? "compare" : "run", names: all };
  }

  async show() {
    const { kind, names, tab } = this.route(), turn = Symbol("turn");
    this.turn = turn;
    this.view?.destroy();
    this.view = null;
    this.main.replaceChildren(el("p", { class: "state", role: "status" }, "Loading…"));
    const references = kind === "list" || kind === "sweep" ? [] : names;
    try {
      const documents = await Promise.all(references.map((name) => this.source.document(name)));
      const comparison = kind === "compare" ? await this.source.comparison(references) : null;
      const sweep = kind === "sweep" ? await this.source.sweep(names[0]) : null;
      if (this.turn !== turn) return;
      if (documents.includes(null)) throw new Error("This report does not contain that run.");
      this.documents = new Map(documents.map((each) => [each.reference, each]));
      this.view = kind === "list" ? new ListView(this.source) : kind === "sweep" ? new SweepView(this.source, sweep) : kind === "run" ? new RunView(this.source, documents[0], tab) : new CompareView(this.source, documents, comparison);
      this.main.replaceChildren(this.view.node);
      document.title = `${kind === "run" ? documents[0].run : kind === "sweep" ? names[0] : kind === "compare" ? "Comparison" : "Runs"} - cloudtrain`;
      this.source.watch(references, (content) => this.onChange(content), (text) => this.onConnection(text), () => this.onReconnect());
    } catch (error) {
      if (this.turn === turn) this.main.replaceChildren(el("p", { class: "state bad", role: "alert" }, error.message), el("p", {}, el("a", { href: "#/" }, "All runs")));
    }
  }

  /** The stream begins with everything, so forget what an earlier one has brought. */
  onReconnect() {
    for (const entry of this.documents.values()) Object.assign(entry, { curves: {}, events: [], lines: [] });
    this.view?.log?.clear();
  }

  onChange(content) {
    if (!this.view) return;
    for (const news of content.runs ?? []) {
      const entry = this.documents.get(news.reference);
      if (!entry) continue;
      const wasFinal = entry.status.exit_code !== null;
      applyNews(entry, news);
      if (!wasFinal && entry.status.state === "FAILED") this.source.document(entry.reference).then((fresh) => { entry.explanation = fresh.explanation; this.view?.update(); });
      if (Object.values(entry.curves).some((curve) => curve.steps.length > MOST_CURVE_POINTS)) this.thin(entry);
      if (this.view instanceof RunView) this.view.receive(news);
    }
    if (this.view instanceof CompareView && content.runs) this.view.update();
    if (this.view instanceof ListView && content.rows) this.view.update();
  }

  async thin(entry) {
    const answer = await this.source.get(`api/run/${encodeURIComponent(entry.reference)}/curves`);
    if (answer.curves) entry.curves = answer.curves;
  }

  onConnection(text) {
    this.banner.hidden = !text;
    this.banner.textContent = text;
  }
}

/** Ask before an action, with the command that does the same. */
function confirmAction(source, reference, text, action, command, question) {
  const status = el("p", { role: "status" });
  const done = () => { dialog.close(); dialog.remove(); };
  const copy = async () => {
    try { await navigator.clipboard.writeText(command); status.textContent = "Copied."; } catch { status.textContent = "Select the command and copy it."; }
  };
  const act = async () => {
    status.textContent = "Working…";
    const answer = await source.act(reference, action);
    status.textContent = answer.error ? [answer.error, answer.hint].filter(Boolean).join(". ") : answer.message;
    if (!answer.error && answer.run !== reference) location.hash = `#/run/${encodeURIComponent(answer.run)}`;
    if (!answer.error) setTimeout(done, 800);
  };
  const dialog = el("dialog", { "aria-label": text.replace("…", "") }, el("p", {}, question), el("p", {}, el("code", {}, command)), status,
    el("div", { class: "actions" }, action ? el("button", { type: "button", class: "primary", click: act }, text.replace("…", "")) : null,
      el("button", { type: "button", class: action ? "" : "primary", click: copy }, "Copy the command"), el("button", { type: "button", click: done }, "Cancel")));
  document.body.append(dialog);
  dialog.showModal();
}

/** Return the token from the address, which then no longer shows it, or from an earlier visit. */
function takeToken() {
  const found = location.hash.match(/^#token=(.+)$/);
  try {
    if (found) localStorage.setItem("cloudtrain-token", found[1]);
    if (found) history.replaceState(null, "", `${location.pathname}#/`);
    return found?.[1] ?? localStorage.getItem("cloudtrain-token") ?? "";
  } catch {
    return found?.[1] ?? "";
  }
}

try { document.documentElement.dataset.theme = localStorage.getItem("cloudtrain-theme") ?? ""; } catch { /* a page without storage */ }
const embedded = document.getElementById("data");
window.cloudtrain = new App(embedded ? new ReportSource(JSON.parse(embedded.textContent)) : new LiveSource(takeToken()));
