// The timeline of a run: lanes of phases, attempts and events over an axis of times.
"use strict";

const TICK_SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const MOST_TICKS = 7;
const MOST_LISTED = 500;
const LABEL_SHARE = 14;
const LAST_LABEL = 88;

/** Return the timeline of a run: what it did, when, and where something went wrong. */
function timeline(entry) {
  const { status, events } = entry;
  const at = (text) => (text ? Date.parse(text) / 1000 : null);
  const times = [at(status.created), at(status.started), at(status.ended), ...events.map((event) => event.time)].filter(Boolean);
  if (!times.length) return el("p", { class: "state" }, "Nothing has happened so far.");
  const first = Math.min(...times), last = Math.max(...times, status.ended ? 0 : Date.now() / 1000);
  const span = { first, last, place: (time) => Math.min(100, Math.max(0, (100 * (time - first)) / Math.max(1e-9, last - first))) };
  const lanes = [...phaseLanes(status, span, at), ...attemptLanes(entry, span, at), ...markLanes(events, span)];
  return el("div", {}, section("timeline-section", "Timeline",
    el("div", { class: "timeline" }, timeAxis(span), lanes),
    el("p", { class: "hint", title: `${formatTime(first)} to ${formatTime(last)}` }, `From ${formatTime(first)}, ${formatDuration(last - first)}`)),
  section("events-section", "Events", eventTable(events, first)));
}

function lane(label, count, children, text) {
  return el("div", { class: "lane" }, el("span", { class: "lane-label" }, label, count ? el("span", { class: "muted" }, ` ${count}`) : null),
    el("div", { class: "track", role: "img", "aria-label": text }, children));
}

/** Return the axis: a tick at each round time since the start. */
function timeAxis({ first, last, place }) {
  const length = last - first;
  const step = TICK_SECONDS.find((seconds) => length / seconds <= MOST_TICKS) ?? TICK_SECONDS.at(-1);
  const ticks = Array.from({ length: Math.min(MOST_TICKS, Math.floor(length / step)) + 1 }, (_, index) => index * step);
  const marks = ticks.map((seconds) => {
    const isLast = place(first + seconds) > LAST_LABEL;
    const node = el("span", { class: isLast ? "tick before" : "tick", title: formatTime(first + seconds) }, seconds ? formatDuration(seconds) : "0");
    node.style.left = `${place(first + seconds)}%`;
    return node;
  });
  return el("div", { class: "lane axis-lane" }, el("span", { class: "lane-label muted" }, "time since submit"), el("div", { class: "ticks" }, marks));
}

function timeBar(span, { from, to, kind, letter, name }) {
  const text = `${name} ${formatDuration(to - from)}, from ${formatTime(from)}`;
  const node = timePart(kind, letter, text);
  node.querySelector(".name").textContent = name;
  node.style.left = `${span.place(from)}%`;
  node.style.width = `${Math.max(0.15, span.place(to) - span.place(from))}%`;
  return node;
}

/** The phases that a service reports, such as downloading. */
function phaseLanes(status, span, at) {
  if (!status.phases.length) return [];
  const bars = status.phases.map((phase, index) => timeBar(span, {
    from: at(phase.started), to: at(phase.ended) ?? span.last, kind: `phase-${index % 4}`, letter: phase.name[0], name: phase.name,
  }));
  return [lane("Phases", 0, bars, `Phases: ${status.phases.map((phase) => phase.name).join(", ")}`)];
}

/** A lane per attempt with what its time was spent for; before anything is known, one bar for the run. */
function attemptLanes({ status, ledger }, span, at) {
  const attempts = (ledger?.attempts ?? []).filter((each) => each.spans.length);
  if (!attempts.length) {
    const from = at(status.started) ?? at(status.created) ?? span.first, to = at(status.ended) ?? span.last;
    return [lane("Run", 0, [timeBar(span, { from, to, kind: "start", letter: "r", name: "run" })], `Run: ${formatDuration(to - from)}`)];
  }
  const letters = Object.fromEntries((ledger.bars ?? []).flatMap((bar) => bar.parts.map((part) => [part.kind, part.letter])));
  return attempts.map((each) => lane(`Attempt ${each.attempt}`, 0, each.spans.map((part) => timeBar(span, {
    from: part.began, to: part.began + part.seconds, kind: part.kind, letter: letters[part.kind] ?? "", name: part.kind,
  })), `Attempt ${each.attempt}: ${each.spans.map((part) => `${part.kind} ${formatDuration(part.seconds)}`).join(", ")}`));
}

/** A lane per kind of event. Where something is wrong, the mark has the rank and the host beside it. */
function markLanes(events, span) {
  const lanes = new Map();
  for (const event of events) {
    if (!event.lane || !event.time) continue;
    if (!lanes.has(event.lane)) lanes.set(event.lane, []);
    lanes.get(event.lane).push(event);
  }
  const levelOf = (found) => found.find((event) => event.level)?.level ?? "";
  return [...lanes].sort(([, one], [, two]) => (levelOf(one) ? 0 : 1) - (levelOf(two) ? 0 : 1)).map(([label, found]) => {
    let labelled = -LABEL_SHARE;
    const marks = found.map((event) => {
      const x = span.place(event.time), isNamed = event.level && x - labelled >= LABEL_SHARE;
      if (isNamed) labelled = x;
      return eventMark(event, x, isNamed);
    });
    return lane(capitalised(label), found.length, marks, `${label}: ${found.length}, the last at ${formatTime(found.at(-1).time)}`);
  });
}

function eventMark(event, x, isNamed) {
  const where = whereOf(event);
  const node = el("span", { class: `mark ${event.level || `kind-${event.event}`}`, title: `${where ? `${where}: ` : ""}${event.text}, ${formatTime(event.time)}` },
    isNamed && where ? el("span", { class: x > 70 ? "mark-name before" : "mark-name" }, where) : null);
  node.style.left = `${x}%`;
  return node;
}

/** Return a time since the start; in the first minute with tenths, so that events have an order. */
function sinceText(seconds) {
  return seconds < 60 ? `${Math.max(0, seconds).toFixed(1)}s` : formatDuration(seconds);
}

/** Return where an event happened: `rank 3, algo-2`. */
function whereOf(event) {
  return [event.rank === undefined || event.rank === null ? "" : `rank ${event.rank}`, event.host].filter(Boolean).join(", ");
}

function eventTable(events, first) {
  const listed = [...events].sort((one, two) => (one.time ?? 0) - (two.time ?? 0)).slice(-MOST_LISTED);
  if (!listed.length) return el("p", { class: "state" }, "No event so far.");
  const when = (event) => (event.time ? el("span", { title: formatTime(event.time) }, `+${sinceText(event.time - first)}`) : "");
  const what = (event) => [event.level ? el("strong", { class: event.level }, `${event.level}: `) : null, event.text];
  return cardTable(`${formatNumber(listed.length)} of ${formatNumber(events.length)} events, oldest first`, ["time", "where", "event"],
    listed.map((event) => [when(event), whereOf(event), el("span", {}, what(event))]), { kind: "events" });
}
