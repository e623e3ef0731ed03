// The log of a run.
"use strict";

const SHOWN_GROUPS = 2000;
const FOLD_WINDOW = 80;
const SAME_SECONDS = 60;
const NEAR_GROUPS = 200;

/** Return the events that a log shows as sentences, as its lines. */
function loggedEvents(events) {
  return events.filter((event) => event.is_logged).map((event) => ({
    number: event.number, host: event.host, rank: event.rank ?? null, time: event.time, text: event.text, level: event.level, isEvent: true,
  }));
}

/**
 * The log by host, rank and level, with search. The events of steps are left out: the curves show them.
 *
 * Lines are folded here and not with the terminal's rules: a filter decides which lines follow each other, and a search
 * or a jump must find each of them. The words of events and the levels come from Python.
 */
class LogView {
  constructor(origin) {
    this.origin = origin;
    this.lines = [];
    this.groups = [];
    this.target = null;
    this.isShown = false;
    const redraw = () => { this.target = null; this.isStale = true; this.draw(); };
    const select = (name, ...options) => el("select", { id: `log-${name}`, "aria-label": name, change: redraw },
      options.map(([value, text]) => el("option", { value }, text)));
    this.host = select("host", ["", "all hosts"]);
    this.rank = select("rank", ["", "all ranks"]);
    this.level = select("level", ["", "all lines"], ["warning", "warnings and errors"], ["error", "errors"]);
    this.search = el("input", { type: "search", id: "log-search", "aria-label": "search", placeholder: "Search", input: redraw });
    this.follow = el("input", { type: "checkbox", id: "log-follow", checked: true });
    this.count = el("span", { class: "muted", role: "status" });
    this.text = el("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log lines" });
    this.node = el("section", { id: "log-section", "aria-label": "Log" }, el("div", { class: "controls" },
      this.search, this.level, this.host, this.rank, el("label", { for: "log-follow" }, this.follow, " follow"), this.count), this.text);
    this.offerChoices();
  }

  clear() {
    this.lines = [];
    this.isStale = true;
  }

  add(lines) {
    if (!lines.length) return;
    const ordered = [...lines].sort((one, two) => one.number - two.number);
    const isLater = !this.lines.length || ordered[0].number > this.lines.at(-1).number;
    this.lines.push(...ordered);
    if (!isLater) this.lines.sort((one, two) => one.number - two.number);
    for (const line of ordered) {
      this.offer(this.host, line.host, line.host);
      if (line.rank !== null) this.offer(this.rank, String(line.rank), `rank ${line.rank}`);
    }
    this.offerChoices();
    if (isLater && this.isShown && !this.isStale && this.target === null) this.append(ordered);
    else this.isStale = true;
  }

  offer(select, value, text) {
    if (![...select.options].some((option) => option.value === value)) select.append(el("option", { value }, text));
  }

  /** A choice among one is none. */
  offerChoices() {
    for (const select of [this.host, this.rank]) select.hidden = select.options.length <= 2;
  }

  wanted(lines) {
    const text = this.search.value.toLowerCase(), level = this.level.value;
    return lines.filter((line) => (!this.host.value || line.host === this.host.value) && (!this.rank.value || String(line.rank) === this.rank.value) &&
      (!level || line.level === "error" || line.level === level) && (!text || line.text.toLowerCase().includes(text)));
  }

  /** Draw all lines again if they have changed. */
  draw(isForced = false) {
    if (!this.isStale && !isForced) return;
    this.isStale = false;
    const found = this.wanted(this.lines);
    this.groups = [];
    this.found = found.length;
    for (const line of found) this.fold(line);
    const at = this.target === null ? -1 : this.groups.findIndex((group) => group.numbers.has(this.target));
    const start = at < 0 || at >= this.groups.length - SHOWN_GROUPS ? Math.max(0, this.groups.length - SHOWN_GROUPS) : Math.max(0, at - NEAR_GROUPS);
    this.shown = this.groups.slice(start, start + SHOWN_GROUPS);
    this.text.replaceChildren(...this.shown.map((group) => this.nodeOf(group)));
    this.describe();
    if (this.target !== null) this.showTarget();
    else if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }

  /** Add new lines at the end without drawing those before. */
  append(lines) {
    const found = this.wanted(lines);
    this.found += found.length;
    for (const line of found) {
      const group = this.fold(line);
      const before = group.node;
      const node = this.nodeOf(group);
      if (before) before.replaceWith(node); else { this.text.append(node); this.shown.push(group); }
    }
    while (this.shown.length > SHOWN_GROUPS) this.shown.shift().node.remove();
    this.describe();
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }

  describe() {
    const drawn = this.shown.reduce((sum, group) => sum + group.numbers.size, 0);
    this.count.textContent = this.found ? `${formatNumber(drawn)} of ${formatNumber(this.found)} lines` : "no line matches";
  }

  /** Put a line into its group: what its rank repeats, and what another rank printed just before, is shown once. */
  fold(line) {
    const source = `${line.host} ${line.rank}`;
    let isNewest = true;
    for (let index = this.groups.length - 1; index >= Math.max(0, this.groups.length - FOLD_WINDOW); index -= 1) {
      const group = this.groups[index], times = group.counts.get(source);
      const isSame = group.text === line.text && (group.isEvent ?? false) === (line.isEvent ?? false);
      if (isSame && (times ? isNewest : isNear(group, line))) {
        group.counts.set(source, (times ?? 0) + 1);
        group.numbers.add(line.number);
        return group;
      }
      if (times) isNewest = false;
    }
    const group = { ...line, counts: new Map([[source, 1]]), numbers: new Set([line.number]), node: null };
    const before = this.groups.at(-1);
    // The first line of an error or a warning has the word, unless it says so itself; a traceback's other lines belong to it.
    const belongs = before && before.level === line.level && before.counts.has(source);
    group.isNamed = Boolean(line.level) && !belongs && !line.text.toLowerCase().includes(line.level);
    this.groups.push(group);
    return group;
  }

  nodeOf(group) {
    const times = Math.max(...group.counts.values());
    const since = group.time && group.time >= this.origin() ? `+${sinceText(group.time - this.origin())}` : "";
    const level = group.level || "";
    group.node = el("div", { class: `line ${level} ${group.isEvent ? "event" : ""}` },
      el("span", { class: "line-number" }, String(group.number)),
      el("span", { class: "line-time", title: formatTime(group.time) }, since),
      sourceLabel(group),
      el("span", { class: "line-text" }, group.isNamed ? el("strong", { class: "level" }, `${level} `) : null, this.marked(group.text),
        times > 1 ? el("span", { class: "times" }, ` x ${formatNumber(times)}`) : null));
    return group.node;
  }

  /** Return a text with what the search has found marked. */
  marked(text) {
    const wanted = this.search.value.toLowerCase();
    if (!wanted) return text;
    const parts = [], lower = text.toLowerCase();
    let from = 0;
    for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
      parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
      from = at + wanted.length;
    }
    return [...parts, text.slice(from)];
  }

  /** Show the line with a number, whatever is filtered. */
  jump(number) {
    if (number === null) return;
    for (const filter of [this.host, this.rank, this.level, this.search]) filter.value = "";
    this.follow.checked = false;
    this.target = number;
    this.draw(true);
  }

  showTarget() {
    const group = this.groups.find((each) => each.numbers.has(this.target));
    if (!group?.node) return;
    group.node.classList.add("target");
    group.node.setAttribute("aria-current", "true");
    this.text.scrollTop = group.node.offsetTop - this.text.offsetTop - this.text.clientHeight / 3;
    this.text.focus();
  }
}

/** Another rank's line is the same failure or message only if it comes soon after. */
function isNear(group, line) {
  return !group.time || !line.time || Math.abs(line.time - group.time) <= SAME_SECONDS;
}

/** Return who printed a line: ranks with their colour and number, else the host. */
function sourceLabel(group) {
  const sources = [...group.counts.keys()].map((key) => ({ host: key.slice(0, key.lastIndexOf(" ")), rank: key.slice(key.lastIndexOf(" ") + 1) }));
  const ranks = sources.filter((each) => each.rank !== "null").map((each) => Number(each.rank)).sort((one, two) => one - two);
  const hosts = [...new Set(sources.map((each) => each.host))];
  const title = `${ranks.length ? `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")} on ` : ""}${hosts.join(", ")}`;
  const text = ranks.length ? `${ranks.length > 1 ? "ranks" : "rank"} ${shortRanks(ranks)}` : shortHosts(hosts);
  const node = el("span", { class: "line-source", title }, text);
  if (ranks.length) node.style.borderColor = paletteColour(ranks[0]);
  return node;
}

/** Return ranks as `0-7` or `0, 2`, and of many that are not consecutive the first and how many more. */
function shortRanks(ranks) {
  if (ranks.length > 2 && ranks.at(-1) - ranks[0] === ranks.length - 1) return `${ranks[0]}-${ranks.at(-1)}`;
  return ranks.length > 2 ? `${ranks[0]} + ${ranks.length - 1}` : ranks.join(", ");
}

function shortHosts(hosts) {
  return hosts.length > 1 ? `${hosts[0]} + ${hosts.length - 1}` : hosts[0];
}
