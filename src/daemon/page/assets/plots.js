// Lines and areas over the last five minutes.
import { compact, make, say, time } from "./text.js";

const WINDOW_US = 300e6;
const WIDTH = 600;
const HEIGHT = 74;
const SVG = "http://www.w3.org/2000/svg";

const perSecond = (value) => `${compact(value)}/s`;

const PLOTS = [
  { title: "Queries", unit: perSecond, lines: [["answered", "queries"], ["failed", "failed"]] },
  { title: "Query latency", unit: time, lines: [["p50", "query_p50_us"], ["p99", "query_p99_us"]] },
  { title: "Answers", unit: perSecond, stacked: true, hues: [3, 1, 4], lines: [["exact", "exact"], ["degraded", "degraded"], ["nobody holds it", "empty"]] },
  { title: "Blocks", unit: perSecond, hues: [0, 2], lines: [["stored", "stored"], ["removed", "removed"]] },
  { title: "Batches", unit: perSecond, lines: [["applied", "batches"], ["dropped", "dropped"]] },
  { title: "Time to apply a batch", unit: time, hues: [2], lines: [["p99", "apply_p99_us"]] },
];

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

class Plot {
  constructor(spec, parent) {
    this.spec = spec;
    this.picture = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.picture.append(svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }));
    const caption = make("figcaption", {}, make("b", { textContent: spec.title }));
    this.series = spec.lines.map(([label, key], index) => {
      const hue = `hue-${spec.hues?.[index] ?? index}`;
      const path = svg("path", { class: spec.stacked ? `${hue} area` : hue });
      const text = make("span", { className: `key ${hue}` });
      this.picture.append(path);
      caption.append(text);
      return { label, key, path, text };
    });
    this.top = make("span", { className: "quiet push small" });
    caption.append(this.top);
    parent.append(make("figure", {}, caption, this.picture));
  }

  draw(points, now) {
    const { unit, stacked } = this.spec;
    const below = (index, point) => this.series.slice(0, index).reduce((sum, { key }) => sum + (point[key] ?? 0), 0);
    const value = (index, point) => point[this.series[index].key];
    const tops = points.flatMap((point) => this.series.map((_, index) => (value(index, point) ?? 0) + (stacked ? below(index, point) : 0)));
    const top = tops.reduce((one, other) => Math.max(one, other), 0);
    const x = (point) => (WIDTH * (point.at - now + WINDOW_US) / WINDOW_US).toFixed(1);
    const y = (number) => (top > 0 ? HEIGHT - 2 - (HEIGHT - 6) * number / top : HEIGHT - 2).toFixed(1);
    this.series.forEach(({ path }, index) => {
      let commands = "";
      let isOpen = false;
      if (stacked) {
        const upper = points.map((point) => `${x(point)},${y(below(index, point) + (value(index, point) ?? 0))}`);
        const lower = points.map((point) => `${x(point)},${y(below(index, point))}`).reverse();
        if (points.length > 1) commands = `M${upper.join("L")}L${lower.join("L")}Z`;
      } else {
        for (const point of points) {
          const number = value(index, point);
          // Nothing happened: there is no latency to draw.
          if (number === null || number === undefined) { isOpen = false; continue; }
          commands += `${isOpen ? "L" : "M"}${x(point)},${y(number)}`;
          isOpen = true;
        }
      }
      path.setAttribute("d", commands);
    });
    const last = points.at(-1);
    for (const { label, key, text } of this.series) say(text, `${label} ${last?.[key] === null || !last ? "–" : unit(last[key])}`);
    say(this.top, top > 0 ? `highest ${unit(top)}` : "");
    this.picture.setAttribute("aria-label", `${this.spec.title} over the last five minutes, highest ${unit(top)}; ` +
      this.series.map(({ text }) => text.textContent).join(", "));
  }
}

export class Plots {
  #points = [];
  #plots;

  constructor() {
    const parent = document.getElementById("plots");
    this.#plots = PLOTS.map((spec) => new Plot(spec, parent));
  }

  apply(rates, nowUs) {
    if (rates) this.#points.push({ ...rates, at: nowUs });
    // One further point, so that lines reach the left edge.
    while (this.#points.length > 2 && this.#points[1].at < nowUs - WINDOW_US) this.#points.shift();
    for (const plot of this.#plots) plot.draw(this.#points, nowUs);
  }
}

