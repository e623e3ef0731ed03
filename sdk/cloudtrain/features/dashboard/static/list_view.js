// The list of runs: filters that are kept in the address, order, groups, keys and selection.
"use strict";

const STATE_ORDER = ["RUNNING", "STARTING", "QUEUED", "STOPPING", "FAILED", "INTERRUPTED", "UNKNOWN", "STOPPED", "SUCCEEDED"];
const DEFAULT_SORT = "created";
const SOON_MILLISECONDS = 10_000, LATER_MILLISECONDS = 60_000, SWEEPS_MILLISECONDS = 3_000;
/** Width of a character of a reason, on average, in pixels; a bit more than it is, so that a line is never too long. */
const CHARACTER_PIXELS = 6.6, MOST_PIXELS = 2400, MARGIN_PIXELS = 120;
const CARD_PIXELS = 700;
const FIRST_ROWS = 60, MORE_ROWS = 150;

const KEYS = [
  ["j", "next run"], ["k", "run before"], ["x", "select it"], ["c", "compare those selected"], ["Enter", "open it"],
  ["→ ←", "show or hide the trials of a sweep"], ["/", "search"], ["Escape", "leave the search"], ["?", "show these keys"],
];

/** What the user has set. It is in the address, so that a link or a reload shows the same. */
function readListAddress() {
  const given = new URLSearchParams(location.hash.match(/^#\/\?(.*)$/)?.[1] ?? "");
  const sort = given.get("sort") ?? DEFAULT_SORT, column = sort.replace(/^-/, "");
  return {
    words: given.get("q") ?? "",
    state: given.get("state") ?? "",
    group: given.get("group") ?? "",
    sort: COLUMNS.some((each) => each.key === column) ? column : DEFAULT_SORT,
    isDescending: sort.startsWith("-"),
    opened: new Set((given.get("open") ?? "").split(",").filter(Boolean)),
  };
}

function writeListAddress(set) {
  const given = new URLSearchParams();
  if (set.words) given.set("q", set.words);
  if (set.state) given.set("state", set.state);
  if (set.group) given.set("group", set.group);
  if (set.sort !== DEFAULT_SORT || set.isDescending) given.set("sort", `${set.isDescending ? "-" : ""}${set.sort}`);
  if (set.opened.size) given.set("open", [...set.opened].join(","));
  const query = given.toString();
  history.replaceState(null, "", query ? `#/?${query}` : "#/");
}

class ListView {
  constructor(source) {
    this.source = source;
    this.set = readListAddress();
    // Sweeps that were closed while a state is chosen, which opens all of them.
    this.closed = new Set();
    this.summaries = new Map();
    this.elements = new Map();
    this.address = location.hash;
    // Who comes back from a run finds the list as it was.
    const left = ListView.left?.address === this.address ? ListView.left : { scroll: 0 };
    this.limit = left.scroll ? Infinity : FIRST_ROWS;
    this.selected = new Set(ListView.left?.selected ?? []);
    this.build();
    this.draw();
    this.readSweeps();
    this.listen();
    if (left.scroll) requestAnimationFrame(() => scrollTo(0, left.scroll));
  }

  build() {
    const search = () => this.change({ words: this.filter.value.trim() });
    this.filter = el("input", { type: "search", id: "filter", placeholder: "name, id, tag, reason", input: search });
    this.filter.value = this.set.words;
    const group = () => this.change({ group: this.group.value });
    this.group = el("select", { id: "group", change: group }, el("option", { value: "" }, "nothing"));
    if (this.set.group) offer(this.group, [this.set.group]);
    this.group.value = this.set.group;
    this.order = el("select", { id: "order", change: () => this.change({ sort: this.order.value, isDescending: false }) },
      COLUMNS.map((column) => el("option", { value: column.key }, column.title)));
    this.states = el("div", { class: "states", role: "group", "aria-label": "state" });
    this.count = el("span", { class: "muted", role: "status" });
    this.notices = el("div", {});
    this.sweeps = el("p", { class: "sweeps muted", hidden: true });
    this.head = el("tr", { role: "row" });
    this.body = el("tbody", { role: "rowgroup" });
    this.empty = el("p", { class: "state" });
    const caption = el("caption", { class: "unseen" }, "Runs of this machine, the sandbox and the account");
    this.table = el("table", { class: "runs", role: "table" }, caption, el("thead", { role: "rowgroup" }, this.head), this.body);
    this.bar = el("div", { class: "selection", role: "region", "aria-label": "Selected runs", hidden: true });
    const keys = el("button", { type: "button", class: "link keys-button", click: () => this.showKeys() }, "Keys");
    this.node = el("div", { class: "list" },
      el("div", { class: "list-head" }, el("h1", {}, "Runs"), this.states),
      el("div", { class: "controls" },
        el("label", { for: "filter" }, "filter"), this.filter,
        el("label", { for: "group" }, "group by"), this.group,
        el("label", { for: "order", class: "for-cards" }, "order by"), this.order, this.count, keys),
      this.notices, this.sweeps, this.table, this.empty, this.bar);
  }

  listen() {
    this.stopped = new AbortController();
    const { signal } = this.stopped;
    document.addEventListener("keydown", (event) => this.onKey(event), { signal });
    addEventListener("resize", () => requestAnimationFrame(() => { if (!signal.aborted) this.draw(); }), { signal });
    this.tick();
  }

  update() {
    this.draw();
    this.readSweepsSoon();
  }

  destroy() {
    ListView.left = { address: this.address, scroll: scrollY, selected: this.selected };
    this.stopped.abort();
    clearTimeout(this.timer);
    clearTimeout(this.sweepTimer);
    cancelAnimationFrame(this.frame);
  }

  /** Ages grow without news. A list whose youngest run is old looks once a minute, and changes only texts that differ. */
  tick() {
    const now = Date.now() / 1000;
    const isYoung = [...this.source.rows.values()].some((row) => !row.is_final || now - (row.created ?? 0) < MINUTE);
    this.timer = setTimeout(() => {
      if (!document.hidden) this.drawAges();
      this.tick();
    }, isYoung ? SOON_MILLISECONDS : LATER_MILLISECONDS);
  }

  drawAges() {
    for (const { node, row } of this.elements.values()) {
      setText(node.querySelector(".age"), describeAgo(row.created));
      if (!row.is_final) setText(node.querySelector(".duration"), durationText(row));
    }
  }

  async readSweeps() {
    try {
      const found = await this.source.sweeps();
      this.summaries = new Map(found.map((each) => [each.sweep, each]));
      if (!this.stopped?.signal.aborted) this.draw();
    } catch { /* the banner says that the server is gone */ }
  }

  /** A sweep that has not ended is read again after its runs have changed. */
  readSweepsSoon() {
    const isChanging = [...this.source.rows.values()].some((row) => row.sweep && !this.summaries.get(row.sweep)?.is_final);
    if (this.sweepTimer || !isChanging) return;
    this.sweepTimer = setTimeout(() => { this.sweepTimer = null; this.readSweeps(); }, SWEEPS_MILLISECONDS);
  }

  change(values) {
    Object.assign(this.set, values);
    if ("state" in values) this.closed.clear();
    writeListAddress(this.set);
    this.address = location.hash;
    this.draw();
  }

  draw() {
    const all = [...this.source.rows.values()];
    const words = this.set.words.toLowerCase().split(/\s+/).filter(Boolean);
    const named = all.filter((row) => words.every((word) => searchText(row).includes(word)));
    const rows = this.set.state ? named.filter((row) => row.state === this.set.state) : named;
    this.isCard = innerWidth <= CARD_PIXELS;
    this.drawColumns(rows);
    this.drawHead();
    this.drawStates(named);
    this.drawBody(rows);
    this.drawWords(rows, all);
    this.drawBar();
    const tags = all.flatMap((row) => Object.keys(row.tags).map((tag) => `tag ${tag}`));
    offer(this.group, ["name", "backend", "state", ...new Set(tags)]);
    this.order.value = this.set.sort;
  }

  /** A column is there when a row has content for it; the place only where runs are in several. */
  drawColumns(rows) {
    const places = new Set([...this.source.rows.values()].map((row) => row.backend));
    const fits = (column) => this.isCard || innerWidth >= (column.least ?? 0);
    const isFilled = (column) => (column.key === "place" ? places.size > 1 : !column.isShown || rows.some(column.isShown));
    this.columns = COLUMNS.filter((column) => fits(column) && isFilled(column));
    for (const { key } of COLUMNS) this.table.classList.toggle(`has-${key}`, this.columns.some((each) => each.key === key));
    this.reasonLength = charactersOf(this.isCard ? 2 * innerWidth : innerWidth);
    this.table.style.setProperty("--columns", ["var(--box)", ...this.columns.map((column) => `var(--${column.key})`)].join(" "));
  }

  drawHead() {
    const { sort, isDescending } = this.set;
    const known = `${this.columns.map((each) => each.key)} ${sort} ${isDescending}`;
    if (this.headKnown === known) return;
    const focused = document.activeElement?.closest?.("thead button")?.dataset.column;
    this.headKnown = known;
    this.head.replaceChildren(el("td", { role: "cell", class: "box" }), ...this.columns.map((column) => this.headCell(column)));
    if (focused) this.head.querySelector(`[data-column="${focused}"]`)?.focus();
  }

  headCell({ key, title, isNumber }) {
    const isSorted = this.set.sort === key, isDown = isSorted && this.set.isDescending;
    const direction = isDown ? "descending" : "ascending";
    const sort = () => this.change({ sort: key, isDescending: isSorted && !isDown });
    const button = el("button", { type: "button", class: "link", "data-column": key, click: sort }, title,
      isSorted ? el("span", { "aria-hidden": "true" }, isDown ? " ↓" : " ↑") : null);
    const kind = isNumber ? `head-${key} number` : `head-${key}`;
    return el("th", { scope: "col", role: "columnheader", class: kind, "aria-sort": isSorted ? direction : "none" }, button);
  }

  /** The counts of the states choose one: a click on "4 failed" shows those. */
  drawStates(rows) {
    const counts = new Map([["", rows.length]]);
    for (const row of rows) counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
    if (this.set.state && !counts.has(this.set.state)) counts.set(this.set.state, 0);
    const rank = (state) => (state ? STATE_ORDER.indexOf(state) + STATE_ORDER.length : 0);
    const states = [...counts.keys()].sort((one, two) => rank(one) - rank(two));
    const wanted = JSON.stringify([states, [...counts], this.set.state]);
    if (this.statesKnown === wanted) return;
    this.statesKnown = wanted;
    const focused = document.activeElement?.closest?.(".states button")?.dataset.state;
    this.states.replaceChildren(...(rows.length || this.set.state ? states.map((state) => this.stateButton(state, counts.get(state))) : []));
    if (focused !== undefined) this.states.querySelector(`[data-state="${focused}"]`)?.focus();
  }

  stateButton(state, count) {
    const isChosen = this.set.state === state;
    const text = state ? `${count} ${state.toLowerCase()}` : plural(count, "run");
    const choose = () => this.change({ state: isChosen ? "" : state });
    const attributes = { class: `chip ${state.toLowerCase()}`, "data-state": state, "aria-pressed": String(isChosen) };
    return el("button", { type: "button", ...attributes, click: choose }, text);
  }

  drawBody(rows) {
    const groups = new Map();
    for (const row of rows) {
      const name = groupOf(row, this.set.group);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(row);
    }
    const makers = [];
    for (const [name, members] of groups) {
      if (this.set.group) makers.push(() => this.groupElement(name, members));
      for (const row of this.sorted(foldSweeps(members, this.summaries))) makers.push(...this.makersOf(row, name));
    }
    this.place(makers);
  }

  sorted(rows) {
    const column = COLUMNS.find((each) => each.key === this.set.sort);
    return rows.sort((one, two) => compareRows(one, two, column, this.set.isDescending));
  }

  /** Return functions that return the elements of a row: of a run its own, of an open sweep also those of its trials. */
  makersOf(row, group) {
    if (!row.isSweep) return [() => this.runElement(row)];
    const isOpen = this.isOpen(row.reference);
    const trials = isOpen ? this.sorted([...row.trials]) : [];
    return [() => this.sweepElement(row, group, isOpen), ...trials.map((each) => () => this.runElement(each))];
  }

  /** Put the rows in place. Of a long list the first screen comes first, and the rest part by part while the page can answer. */
  place(makers) {
    this.makers = makers;
    setChildren(this.body, makers.slice(0, this.limit).map((make) => make()));
    if (this.limit >= makers.length || this.frame) return;
    const afterPaint = () => { this.frame = requestAnimationFrame(() => this.placeMore()); };
    this.frame = requestAnimationFrame(afterPaint);
  }

  placeMore() {
    const before = this.limit;
    this.frame = null;
    this.limit += MORE_ROWS;
    this.body.append(...this.makers.slice(before, this.limit).map((make) => make()));
    if (this.limit < this.makers.length) this.frame = requestAnimationFrame(() => this.placeMore());
  }

  groupElement(name, members) {
    const key = `group ${name}`, text = `${name} (${members.length})`;
    const known = this.elements.get(key);
    if (known) { setText(known.node.firstChild, text); return known.node; }
    const node = el("tr", { class: "group", role: "row" }, el("th", { scope: "rowgroup", role: "rowheader" }, text));
    // Nothing of it has an age.
    this.elements.set(key, { row: { is_final: true }, node });
    return node;
  }

  /** Return the element of a run; an unchanged row keeps its element, and a changed one the cells that are equal. */
  runElement(row) {
    const known = this.elements.get(row.reference);
    if (known?.row === row && known.length === this.reasonLength) return known.node;
    const box = this.checkbox(`select ${row.run}`, [row.reference]);
    const cells = runCells(row, { checkbox: box, reasonLength: this.reasonLength });
    return this.keep(row.reference, row, cells, row.sweep ? "trial" : "");
  }

  sweepElement(row, group, isOpen) {
    const texts = { "aria-expanded": String(isOpen), "aria-label": `trials of ${row.reference}`, "data-sweep": row.reference };
    const click = () => this.toggle(row.reference);
    const toggle = el("button", { type: "button", class: "link toggle", ...texts, click }, isOpen ? "▾" : "▸");
    const box = this.checkbox(`select the trials of ${row.reference}`, row.trials.map((each) => each.reference));
    return this.keep(`sweep ${group} ${row.reference}`, row, sweepCells(row, { checkbox: box, toggle }), "sweep");
  }

  keep(key, row, cells, kind) {
    const known = this.elements.get(key);
    const node = known?.node ?? el("tr", { role: "row" }, cells);
    if (known) updateCells(node, cells);
    node.className = [kind, cells.length > COLUMNS.length + 1 ? "with-reason" : ""].join(" ").trim();
    this.elements.set(key, { row, node, length: this.reasonLength });
    return node;
  }

  checkbox(label, references) {
    const box = el("input", { type: "checkbox", "aria-label": label, "data-runs": references.join(" "), change: () => {
      for (const each of references) if (box.checked) this.selected.add(each); else this.selected.delete(each);
      this.drawBoxes();
      this.drawBar();
    } });
    this.check(box);
    return box;
  }

  check(box) {
    const references = box.dataset.runs.split(" ");
    const count = references.filter((each) => this.selected.has(each)).length;
    box.checked = count === references.length;
    box.indeterminate = count > 0 && !box.checked;
  }

  drawBoxes() {
    for (const box of this.body.querySelectorAll("input[data-runs]")) this.check(box);
  }

  /** The bar of the selection. Deleted runs are no longer selected. */
  drawBar() {
    for (const each of this.selected) if (!this.source.rows.has(each) && !this.source.isLoading) this.selected.delete(each);
    const count = this.selected.size;
    if (this.barCount === count) return;
    this.barCount = count;
    this.bar.hidden = count === 0;
    const compare = () => this.compareSelected();
    const clear = () => { this.selected.clear(); this.drawBoxes(); this.drawBar(); };
    const offered = count > 1
      ? el("button", { type: "button", class: "primary", click: compare }, `Compare ${count} runs`)
      : el("span", { class: "muted" }, "Select another run to compare.");
    this.bar.replaceChildren(offered, el("button", { type: "button", click: clear }, "Clear the selection"));
  }

  isOpen(sweep) {
    // Whoever asks for failed runs wants to see them, also in a sweep.
    return this.set.state ? !this.closed.has(sweep) : this.set.opened.has(sweep);
  }

  toggle(sweep) {
    const changed = this.set.state ? this.closed : this.set.opened;
    if (!changed.delete(sweep)) changed.add(sweep);
    this.change({});
    this.body.querySelector(`button[data-sweep="${CSS.escape(sweep)}"]`)?.focus();
  }

  drawWords(rows, all) {
    const isFiltered = rows.length < all.length;
    setText(this.count, isFiltered ? `${rows.length} of ${plural(all.length, "run")}` : "");
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    if (!rows.length) this.drawEmpty(all.length > 0);
    const known = this.source.unreachable.join("\n");
    if (this.noticesKnown !== known) {
      this.noticesKnown = known;
      this.notices.replaceChildren(...this.source.unreachable.map((text) => el("p", { class: "warning" }, text)));
    }
    this.drawSweepsWithoutRuns(all);
  }

  drawEmpty(hasRuns) {
    if (hasRuns) {
      const clear = () => { this.filter.value = ""; this.change({ words: "", state: "" }); };
      this.empty.replaceChildren("No run matches. ", el("button", { type: "button", click: clear }, "Show all runs"));
    } else if (this.source.isLoading) {
      this.empty.replaceChildren("Looking for runs…");
    } else {
      this.empty.replaceChildren("No runs yet. Start one: ", el("code", {}, "cloudtrain submit job.yaml --local"));
    }
  }

  /** A sweep whose runs are gone or on another machine has no row, but still a page. */
  drawSweepsWithoutRuns(all) {
    const withRuns = new Set(all.map((row) => row.sweep));
    const names = this.source.isLoading ? [] : [...this.summaries.keys()].filter((name) => !withRuns.has(name));
    if (this.namesKnown === names.join()) return;
    this.namesKnown = names.join();
    this.sweeps.hidden = !names.length;
    const links = names.flatMap((name, index) => [index ? ", " : "", el("a", { href: `#/sweep/${encodeURIComponent(name)}` }, name)]);
    this.sweeps.replaceChildren("Sweeps without runs here: ", ...links);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && event.target === this.filter) {
      // The browser would clear the search.
      event.preventDefault();
      this.filter.blur();
      return;
    }
    if (!areKeysOn() || event.target.closest?.("input:not([type=checkbox]), select, textarea")) return;
    const act = {
      j: () => this.move(1),
      k: () => this.move(-1),
      x: () => this.selectCurrent(),
      c: () => this.compareSelected(),
      "/": () => this.filter.select(),
      "?": () => this.showKeys(),
      ArrowRight: () => this.openCurrent(true),
      ArrowLeft: () => this.openCurrent(false),
    }[event.key];
    if (act && act() !== false) event.preventDefault();
  }

  get current() {
    return document.activeElement?.closest?.("table.runs tbody tr");
  }

  /** Move to the next or previous run. The focus is on its link, so Enter opens it. */
  move(by) {
    const rows = [...this.body.querySelectorAll("tr:not(.group)")];
    const at = rows.indexOf(this.current);
    const next = at < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, at + by));
    rows[next]?.querySelector(".name a").focus();
    rows[next]?.scrollIntoView({ block: "nearest" });
  }

  compareSelected() {
    if (this.selected.size < 2) return false;
    location.hash = `#/compare/${[...this.selected].map(encodeURIComponent).join(",")}`;
    return true;
  }

  selectCurrent() {
    this.current?.querySelector("input[type=checkbox]")?.click();
  }

  openCurrent(isOpen) {
    const toggle = this.current?.querySelector("button[data-sweep]");
    if (!toggle) return false;
    if (this.isOpen(toggle.dataset.sweep) !== isOpen) this.toggle(toggle.dataset.sweep);
    this.current?.querySelector(".name a").focus();
    return true;
  }

  showKeys() {
    const isOn = el("input", { type: "checkbox", checked: areKeysOn(), change: () => setKeysOn(isOn.checked) });
    const dialog = el("dialog", { "aria-label": "Keys", class: "keys", close: () => dialog.remove() }, el("h2", {}, "Keys"),
      el("dl", {}, KEYS.map(([key, text]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)))),
      el("p", {}, el("label", {}, isOn, " Use these keys")),
      el("button", { type: "button", click: () => dialog.close() }, "Close"));
    document.body.append(dialog);
    dialog.showModal();
  }
}

/** Return how many characters of a reason a list of this width has room for: in tens, so that a resize seldom cuts anew. */
function charactersOf(width) {
  const room = Math.min(width, MOST_PIXELS) - MARGIN_PIXELS;
  return Math.max(LEAST_CHARACTERS, 10 * Math.floor(room / CHARACTER_PIXELS / 10));
}

/** Keys without Ctrl can be in the way of speech input, so they can be turned off. */
function areKeysOn() {
  try { return localStorage.getItem("cloudtrain-keys") !== "off"; } catch { return true; }
}

function setKeysOn(isOn) {
  try { localStorage.setItem("cloudtrain-keys", isOn ? "on" : "off"); } catch { /* a page without storage */ }
}

function searchText(row) {
  return `${row.reference} ${row.name} ${row.sweep} ${tagText(row)} ${row.texts.reason}`.toLowerCase();
}

function plural(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Replace the cells that have changed, so that a click on another one is not lost. */
function updateCells(node, cells) {
  cells.forEach((fresh, index) => {
    const old = node.children[index];
    if (!old) node.append(fresh);
    else if (!old.isEqualNode(fresh)) replaceCell(old, fresh);
  });
  while (node.children.length > cells.length) node.lastChild.remove();
}

/** Replace a cell. What has the focus in it has it afterwards, too. */
function replaceCell(old, fresh) {
  const focused = old.contains(document.activeElement) ? document.activeElement.localName : "";
  old.replaceWith(fresh);
  if (focused) fresh.querySelector(focused)?.focus({ preventScroll: true });
}

/** Set the children of a node; nodes that are in their place already stay untouched. */
function setChildren(node, children) {
  const isSame = node.children.length === children.length && children.every((child, index) => node.children[index] === child);
  if (isSame) return;
  const isLonger = node.children.length < children.length && [...node.children].every((child, index) => child === children[index]);
  if (isLonger) { node.append(...children.slice(node.children.length)); return; }
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  node.replaceChildren(...children);
  if (focused && node.contains(focused)) focused.focus({ preventScroll: true });
}

function groupOf(row, by) {
  if (!by) return "";
  return by.startsWith("tag ") ? row.tags[by.slice(4)] ?? "(without)" : row[by];
}

function offer(select, values) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const value of values) if (!known.has(value)) select.append(el("option", { value }, value));
}
