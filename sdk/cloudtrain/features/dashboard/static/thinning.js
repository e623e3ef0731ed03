// Curves with as many points as a drawing has pixels.
"use strict";

/** Most points per pixel of a drawn curve: more of them paint the same pixels again. */
const POINTS_PER_PIXEL = 1.5;
/** Curves are first reduced in parts of 2 ** 4 points. A smaller part would keep nearly all of its points. */
const FIRST_SHIFT = 4;

/**
 * A curve at several resolutions, so that a range of any size is drawn from about as many points as it has pixels.
 *
 * Each level divides the curve into parts of twice the points of the level below, and keeps of each part the lowest, the
 * highest and the first value that is not finite. Parts do not depend on the range: a moved curve does not flicker.
 */
class ThinnedCurve {
  /** `xs` ascend; `ys` are numbers, or null where a value is not finite. */
  constructor(xs, ys) {
    this.xs = xs;
    this.ys = ys;
    this.levels = [];
  }

  /** Return `[xs, ys]` of the points between two values of x, with one point more on each side. */
  between(first, last, pixels) {
    const { xs } = this;
    const from = Math.max(0, lowerBound(xs, first) - 1);
    const to = Math.min(xs.length, lowerBound(xs, last) + 2);
    const most = Math.max(2, POINTS_PER_PIXEL * pixels);
    if (to - from <= 2 * most) return [xs.slice(from, to), this.ys.slice(from, to)];
    // A part keeps two points.
    const level = Math.max(0, Math.ceil(Math.log2((2 * (to - from)) / most)) - FIRST_SHIFT);
    const kept = this.level(level);
    const begin = Math.max(0, lowerBound(kept, from) - 1);
    const end = Math.min(kept.length, lowerBound(kept, to) + 1);
    const shownXs = new Array(end - begin), shownYs = new Array(end - begin);
    for (let at = begin; at < end; at += 1) {
      shownXs[at - begin] = xs[kept[at]];
      shownYs[at - begin] = this.ys[kept[at]];
    }
    return [shownXs, shownYs];
  }

  /** Return the indices that a level keeps. */
  level(number) {
    for (let at = this.levels.length; at <= number; at += 1) {
      this.levels.push(extremes(this.ys, this.levels[at - 1] ?? null, FIRST_SHIFT + at));
    }
    return this.levels[number];
  }
}

/** Return the indices of the lowest, the highest and the first missing value of each part of 2 ** shift points. */
function extremes(ys, indices, shift) {
  const count = indices ? indices.length : ys.length, last = ys.length - 1;
  const kept = new Int32Array(3 * ((last >> shift) + 1) + 2);
  let length = 0, at = 0;
  // The ends of the curve stay, so that it covers its range.
  if (count) kept[length++] = 0;
  while (at < count) {
    const part = (indices ? indices[at] : at) >> shift;
    let low = -1, high = -1, missing = -1, lowest = Infinity, highest = -Infinity;
    for (; at < count; at += 1) {
      const index = indices ? indices[at] : at;
      if (index >> shift !== part) break;
      const value = ys[index];
      if (value === null || value === undefined) {
        if (missing < 0) missing = index;
        continue;
      }
      if (value < lowest) { lowest = value; low = index; }
      if (value > highest) { highest = value; high = index; }
    }
    length = keepSorted(kept, length, low, high, missing);
  }
  if (count && kept[length - 1] !== last) kept[length++] = last;
  return kept.subarray(0, length);
}

/** Append three indices, of which -1 is none, in their order and each once; return the new length. */
function keepSorted(kept, length, low, high, missing) {
  let first = Math.min(low, high), second = Math.max(low, high), third = missing;
  if (third < second) [second, third] = [third, second];
  if (second < first) [first, second] = [second, first];
  let end = length;
  for (const index of [first, second, third]) {
    if (index >= 0 && (end === 0 || kept[end - 1] !== index)) kept[end++] = index;
  }
  return end;
}

/** Return the place of the first number that is at least `value` in ascending numbers. */
function lowerBound(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return the place of the number that is nearest to `value` in ascending numbers; -1 if there is none. */
function nearestPlace(numbers, value) {
  const after = lowerBound(numbers, value);
  if (after === numbers.length) return after - 1;
  if (after === 0) return 0;
  return value - numbers[after - 1] <= numbers[after] - value ? after - 1 : after;
}

/** Return a stack of tables `[xs, ys]` with the same x, each part of 2 ** shift points as its mean. */
function meansOf([xs, ...columns], most) {
  if (xs.length <= 2 * most) return [xs, ...columns];
  const size = 2 ** Math.ceil(Math.log2(xs.length / most));
  const parts = Math.ceil(xs.length / size);
  const middles = Array.from({ length: parts }, (_, part) => xs[Math.min(xs.length - 1, part * size + (size >> 1))]);
  const means = columns.map((values) => middles.map((_, part) => {
    const inPart = values.slice(part * size, (part + 1) * size);
    return inPart.reduce((sum, value) => sum + (value ?? 0), 0) / inPart.length;
  }));
  return [middles, ...means];
}

const thinned = new WeakMap();

/** Return the thinned form of a curve, made anew when the curve has grown. `key` says how `make` derives the values. */
function thinnedOf(curve, key, make) {
  const known = thinned.get(curve) ?? {};
  if (known.length !== curve.values.length) Object.assign(known, { length: curve.values.length, forms: new Map() });
  if (!known.forms.has(key)) {
    // Smoothing has many weights: only the newest is kept.
    for (const other of known.forms.keys()) if (other.split(":")[0] === key.split(":")[0]) known.forms.delete(other);
    known.forms.set(key, make());
  }
  thinned.set(curve, known);
  return known.forms.get(key);
}
