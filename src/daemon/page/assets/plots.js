// Plots of the last quarter of an hour, with axes. The daemon tells the rates from before the page was opened.
import { compact, make, moment, say, svg, time } from "./text.js";

const WINDOW_US = 900e6;
const HEIGHT = 110;
/** Margins for the axes. */
const LEFT = 52;
const BOTTOM = 16;
const TOP = 6;
/** A point from the daemon is dropped if this page has a point of its own within this time, in microseconds. */
const NEAR_US = 4e6;
/** Time between two labels of the time axis, in microseconds: on a wide plot, and on a narrow one. */
const STEPS_US = [180e6, 300e6];

const perSecond = (value) => `${compact(value)}/s`;

const PLOTS = [
  { title: "Queries", unit: perSecond, lines: [["answered", "queries"], ["failed", "failed"]] },
  { title: "Query latency", unit: time, lines: [["p50", "query_p50_us"], ["p99", "query_p99_us"]] },
  { title: "Answers", unit: perSecond, stacked: true, hues: [3, 1, 4], lines: [["exact", "exact"], ["degraded", "degraded"], ["nobody holds it", "empty"]] },
  { title: "Blocks", unit: perSecond, hues: [0, 2], lines: [["stored", "stored"], ["removed", "removed"]] },
  { title: "Batches", unit: perSecond, lines: [["applied", "batches"], ["dropped", "dropped"]] },
  { title: "Time to apply a batch", unit: time, hues: [2], lines: [["p99", "apply_p99_us"]] },
];

class Plot {
  constructor(spec, parent) {
    this.spec = spec;
    this.picture = svg("svg", { class: "plot", role: "img" });
    this.axes = svg("g", { class: "axes", "aria-hidden": "true" });
    this.picture.append(this.axes);
    const caption = make("figcaption", {}, make("b", { textContent: spec.title }));
    this.series = spec.lines.map(([label, key], index) => {
      const hue = `hue-${spec.hues?.[index] ?? index}`;
      const path = svg("path", { class: spec.stacked ? `${hue} area` : hue });
      const text = make("span", { className: `key ${hue}` });
      this.picture.append(path);
      caption.append(text);
      return { label, key, path, text };
    });
    parent.append(make("figure", {}, caption, this.picture));
  }

  draw(points, now) {
    const { unit, stacked } = this.spec;
    const below = (index, point) => this.series.slice(0, index).reduce((sum, { key }) => sum + (point[key] ?? 0), 0);
    const value = (index, point) => point[this.series[index].key];
    const width = Math.max(200, this.picture.clientWidth);
    const highest = points.reduce((top, point) => this.series.reduce((one, _, index) =>
      Math.max(one, (value(index, point) ?? 0) + (stacked ? below(index, point) : 0)), top), 0);
    const top = rounded(highest);
    const bottom = HEIGHT - BOTTOM;
    const x = (at) => (LEFT + (width - LEFT) * Math.max(0, at - now + WINDOW_US) / WINDOW_US).toFixed(1);
    const y = (number) => (bottom - (bottom - TOP) * number / top).toFixed(1);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#drawAxes({ width, bottom, top, x, y, now });
    this.series.forEach(({ path }, index) => {
      let commands = "";
      let isOpen = false;
      if (stacked) {
        const upper = points.map((point) => `${x(point.at)},${y(below(index, point) + (value(index, point) ?? 0))}`);
        const lower = points.map((point) => `${x(point.at)},${y(below(index, point))}`).reverse();
        if (points.length > 1) commands = `M${upper.join("L")}L${lower.join("L")}Z`;
      } else {
        for (const point of points) {
          const number = value(index, point);
          // There was no event in this time, so there is no latency to draw.
          if (number === null || number === undefined) { isOpen = false; continue; }
          commands += `${isOpen ? "L" : "M"}${x(point.at)},${y(number)}`;
          isOpen = true;
        }
      }
      path.setAttribute("d", commands);
    });
    const last = points.at(-1);
    for (const { label, key, text } of this.series) say(text, `${label} ${last?.[key] === null || !last ? "–" : unit(last[key])}`);
    this.picture.setAttribute("aria-label", `${this.spec.title} over the last quarter of an hour, highest ${highest > 0 ? unit(highest) : "nothing"}; ` +
      this.series.map(({ text }) => text.textContent).join(", "));
  }

  #drawAxes({ width, bottom, top, x, y, now }) {
    const { unit } = this.spec;
    const step = STEPS_US[width < 420 ? 1 : 0];
    const parts = [];
    for (const number of [0, top / 2, top]) {
      const place = y(number);
      parts.push(svg("line", { x1: LEFT, x2: width, y1: place, y2: place }), label(LEFT - 4, Number(place) + 4, number === 0 ? "0" : unit(number), "end"));
    }
    // Labels are at whole minutes, so that they move with the curves.
    for (let at = Math.ceil((now - WINDOW_US) / step) * step; at <= now; at += step) {
      const place = Number(x(at));
      if (place < LEFT + 14 || place > width - 16) continue;
      parts.push(svg("line", { x1: place, x2: place, y1: TOP, y2: bottom, class: "faint" }), label(place, HEIGHT - 3, moment(at), "middle"));
    }
    this.axes.replaceChildren(...parts);
  }
}

function label(x, y, text, anchor) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

/** Returns the smallest number of 1, 2, 4, 6, 10, 20, … that is not below `number`. */
function rounded(number) {
  if (!(number > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  return power * [1, 2, 4, 6, 10].find((digit) => digit * power >= number * 0.9999);
}

export class Plots {
  #points = [];
  #plots;

  constructor() {
    const parent = document.getElementById("plots");
    this.#plots = PLOTS.map((spec) => new Plot(spec, parent));
  }

  /** Adds the points from before the page was opened. A row has a time, and a number for each of `names`. */
  setPast({ names, rows }) {
    const live = this.#points;
    const isNew = ([at]) => !live.some((point) => Math.abs(point.at - at) < NEAR_US);
    const past = rows.filter(isNew).map(([at, numbers]) => ({ ...Object.fromEntries(names.map((name, index) => [name, numbers[index]])), at }));
    this.#points = [...live, ...past].sort((one, other) => one.at - other.at);
  }

  apply(rates, nowUs) {
    if (rates) this.#points.push({ ...rates, at: nowUs });
    // One point older than the window stays, so that lines reach the left edge.
    while (this.#points.length > 2 && this.#points[1].at < nowUs - WINDOW_US) this.#points.shift();
    for (const plot of this.#plots) plot.draw(this.#points, nowUs);
  }
}
