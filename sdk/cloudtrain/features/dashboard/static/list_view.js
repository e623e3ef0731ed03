// The list of runs.
"use strict";

const COLUMNS = [
  ["name", "run", (row) => row.name],
  ["state", "state", (row) => row.state],
  ["created", "age", (row) => -(row.created ?? 0)],
  ["progress", "progress", (row) => (row.total_steps ? (row.step ?? 0) / row.total_steps : row.step ?? -1)],
  ["metric", "key metric", (row) => row.metric?.value ?? Infinity],
  ["cost", "cost", (row) => row.cost_usd ?? -1],
  ["tags", "tags", (row) => tagText(row)],
];

function tagText(row) {
  return Object.entries(row.tags).map(([name, value]) => `${name}=${value}`).join(" ");
}

class ListView {
  constructor(source) {
    this.source = source;
    this.selected = new Set();
    this.sort = { column: "created", isDescending: false };
    this.filter = el("input", { type: "search", id: "filter", placeholder: "name, id, tag", input: () => this.draw() });
    this.state = el("select", { id: "state", change: () => this.draw() }, el("option", { value: "" }, "all"));
    this.group = el("select", { id: "group", change: () => this.draw() }, el("option", { value: "" }, "nothing"));
    this.compare = el("button", { type: "button", disabled: true, click: () => { location.hash = `#/compare/${[...this.selected].map(encodeURIComponent).join(",")}`; } }, "Compare selected");
    this.count = el("span", { class: "muted", role: "status" });
    this.notices = el("div", {});
    this.sweeps = el("p", { class: "sweeps", hidden: true });
    source.sweeps().then((names) => {
      this.sweeps.hidden = !names.length;
      this.sweeps.replaceChildren("Sweeps: ", ...names.flatMap((name, index) => [index ? ", " : "", el("a", { href: `#/sweep/${encodeURIComponent(name)}` }, name)]));
    }, () => {});
    this.head = el("tr", {});
    this.body = el("tbody", {});
    this.empty = el("p", { class: "state" });
    this.rows = new Map();
    this.node = el("div", {}, el("h1", {}, "Runs"),
      el("div", { class: "controls" }, el("label", { for: "filter" }, "filter "), this.filter, el("label", { for: "state" }, "state "), this.state,
        el("label", { for: "group" }, "group by "), this.group, this.compare, this.count),
      this.notices, this.sweeps,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" },
        el("table", { class: "runs" }, el("caption", {}, "Runs of this machine, the sandbox and the account"), el("thead", {}, this.head), this.body)), this.empty);
    this.draw();
  }

  update() {
    this.draw();
  }

  drawHead() {
    this.head.replaceChildren(el("td", {}), ...COLUMNS.map(([key, title]) => {
      const isSorted = this.sort.column === key;
      const order = isSorted ? (this.sort.isDescending ? "descending" : "ascending") : "none";
      return el("th", { scope: "col", "aria-sort": order }, el("button", { type: "button", class: "link", click: () => {
        this.sort = { column: key, isDescending: isSorted && !this.sort.isDescending };
        this.draw();
      } }, title, isSorted ? (this.sort.isDescending ? " ▾" : " ▴") : ""));
    }));
  }

  chosen() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const key = COLUMNS.find(([name]) => name === this.sort.column)[2];
    const sign = this.sort.isDescending ? -1 : 1;
    return [...this.source.rows.values()]
      .filter((row) => (!this.state.value || row.state === this.state.value) &&
        words.every((word) => `${row.reference} ${row.name} ${tagText(row)}`.toLowerCase().includes(word)))
      .sort((one, two) => { const a = key(one), b = key(two); return sign * (a < b ? -1 : a > b ? 1 : 0); });
  }

  draw() {
    this.drawHead();
    const rows = this.chosen(), all = [...this.source.rows.values()];
    offer(this.state, new Set(all.map((row) => row.state)));
    offer(this.group, new Set(["name", "backend", "state", ...all.flatMap((row) => Object.keys(row.tags).map((tag) => `tag ${tag}`))]));
    const groups = new Map();
    for (const row of rows) {
      const name = groupOf(row, this.group.value);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(row);
    }
    const nodes = [];
    for (const [name, members] of groups) {
      if (this.group.value) nodes.push(el("tr", { class: "group" }, el("th", { scope: "rowgroup", colspan: COLUMNS.length + 1 }, `${name} (${members.length})`)));
      nodes.push(...members.map((row) => this.row(row)));
    }
    setChildren(this.body, nodes);
    this.count.textContent = `${rows.length} of ${all.length} runs`;
    this.empty.hidden = rows.length > 0;
    this.empty.textContent = all.length ? "No run matches." : this.source.isLoading ? "Looking for runs…" : "No runs yet. Start one: cloudtrain submit job.yaml --local";
    this.notices.replaceChildren(...this.source.unreachable.map((text) => el("p", { class: "warning" }, text)));
  }

  /** Return the element of a row; an unchanged row keeps its element. */
  row(row) {
    const known = this.rows.get(row.reference);
    if (known?.row === row && row.is_final) return known.node;
    const node = this.newRow(row);
    if (known) updateCells(known.node, node);
    this.rows.set(row.reference, { row, node: known?.node ?? node });
    return known?.node ?? node;
  }

  newRow(row) {
    const box = el("input", { type: "checkbox", "aria-label": `select ${row.run}`, change: (event) => {
      if (event.target.checked) this.selected.add(row.reference); else this.selected.delete(row.reference);
      this.compare.disabled = this.selected.size < 2;
    } });
    box.checked = this.selected.has(row.reference);
    const progress = row.total_steps ? el("span", {}, el("progress", { max: row.total_steps, value: row.step ?? 0, "aria-label": "progress" }),
      row.texts.left ? el("span", { class: "muted" }, ` ${row.texts.left}`) : null) : row.texts.steps;
    return el("tr", {}, el("td", {}, box),
      el("th", { scope: "row" }, el("a", { href: `#/run/${encodeURIComponent(row.reference)}` }, row.name), " ", el("span", { class: "muted id" }, row.reference)),
      el("td", {}, stateBadge(row.state), row.attempts > 1 ? el("span", { class: "muted" }, ` ${row.attempts} attempts`) : null, row.texts.reason && row.state === "FAILED" ? el("span", { class: "muted short" }, ` ${row.texts.reason.slice(0, 80)}`) : null),
      el("td", { title: formatTime(row.created) }, row.created ? formatDuration(Date.now() / 1000 - row.created) : ""),
      el("td", {}, progress),
      el("td", {}, row.metric ? `${row.metric.name} ${describeMetric(row.metric.value)}` : ""),
      el("td", {}, row.texts.cost),
      el("td", { class: "muted" }, tagText(row)));
  }

  destroy() {}
}

/** Replace the cells that have changed, so that a click on another one is not lost. */
function updateCells(old, fresh) {
  [...fresh.children].forEach((cell, index) => { if (!old.children[index].isEqualNode(cell)) old.children[index].replaceWith(cell); });
}

/** Set the children of a node; nodes that are in their place already stay untouched. */
function setChildren(node, children) {
  if (node.children.length !== children.length || children.some((child, index) => node.children[index] !== child)) node.replaceChildren(...children);
}

function groupOf(row, by) {
  if (!by) return "";
  return by.startsWith("tag ") ? row.tags[by.slice(4)] ?? "(without)" : row[by];
}

function offer(select, values) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const value of values) if (!known.has(value)) select.append(el("option", { value }, value));
}
