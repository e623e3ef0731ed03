// The log of a run.
"use strict";

const SHOWN_LINES = 2000;

/** The log by host and rank, with search. The events of steps are left out: the curves show them. */
class LogView {
  constructor() {
    this.lines = [];
    this.host = el("select", { id: "log-host", change: () => this.draw() }, el("option", { value: "" }, "all hosts"));
    this.rank = el("select", { id: "log-rank", change: () => this.draw() }, el("option", { value: "" }, "all ranks"));
    this.search = el("input", { type: "search", id: "log-search", input: () => this.draw() });
    this.follow = el("input", { type: "checkbox", id: "log-follow", checked: true });
    this.count = el("span", { class: "muted", role: "status" });
    this.text = el("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log lines" });
    this.node = el("div", {}, el("div", { class: "controls" },
      el("label", { for: "log-host" }, "host "), this.host, el("label", { for: "log-rank" }, "rank "), this.rank,
      el("label", { for: "log-search" }, "search "), this.search, el("label", { for: "log-follow" }, this.follow, " follow"), this.count), this.text);
  }

  add(lines) {
    if (!lines.length && this.lines.length) return;
    this.lines.push(...lines);
    this.lines.sort((one, two) => one.number - two.number);
    for (const line of lines) {
      this.offer(this.host, line.host);
      if (line.rank !== null) this.offer(this.rank, String(line.rank));
    }
    this.draw();
  }

  offer(select, value) {
    if (![...select.options].some((option) => option.value === value)) select.append(el("option", { value }, value));
  }

  draw() {
    const text = this.search.value.toLowerCase();
    const found = this.lines.filter((line) => (!this.host.value || line.host === this.host.value) &&
      (!this.rank.value || String(line.rank) === this.rank.value) && (!text || line.text.toLowerCase().includes(text)));
    const shown = found.slice(-SHOWN_LINES);
    this.count.textContent = found.length ? `${formatNumber(shown.length)} of ${formatNumber(found.length)} lines` : "no line matches";
    this.text.replaceChildren(...shown.map((line) => el("div", { class: "line" },
      el("span", { class: "muted" }, `${line.host}${line.rank === null ? "" : ` rank ${line.rank}`}  `), line.text)));
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }
}
