// All namespaces, the worst first: the health of each, and its answers of the last quarter of an hour.
import { compact, count, counted, make, percent, say, svg } from "./text.js";

const WIDTH = 120;
const HEIGHT = 26;
/** Titles of the columns. */
const COLUMNS = ["Namespace", "Health", "Holders exact", "Blocks", "Answers, the last quarter of an hour"];

export class Namespaces {
  #rows = new Map();
  #sparks = new Map();
  #bars = 60;
  #seconds = 15;
  #chosen = "";
  #choose;
  #body = make("tbody");
  #note = document.getElementById("namespaces-note");

  /** Makes the table. `choose` is called with the name of the chosen namespace. */
  constructor(choose) {
    this.#choose = choose;
    const head = make("tr", {}, ...COLUMNS.map((title) => make("th", { scope: "col", textContent: title })));
    document.getElementById("namespaces").append(make("table", { className: "namespaces" }, make("thead", {}, head), this.#body));
  }

  setNamespace(name) {
    this.#chosen = name;
    for (const [known, row] of this.#rows) this.#mark(known, row);
  }

  /** Stores the bars: the numbers of answers of the last quarter of an hour. */
  setSparks({ bars, seconds, namespaces }) {
    [this.#bars, this.#seconds] = [bars, seconds];
    this.#sparks = new Map(Object.entries(namespaces));
  }

  /** Shows a frame. Returns the names, the worst first. */
  apply(frame) {
    const judged = frame.namespaces.map(judge);
    judged.sort((one, other) => other.weight - one.weight || (one.name < other.name ? -1 : 1));
    const names = new Set(judged.map(({ name }) => name));
    for (const [name, row] of this.#rows) {
      if (names.has(name)) continue;
      row.element.remove();
      this.#rows.delete(name);
    }
    judged.forEach((one, place) => this.#show(one, place));
    const troubled = judged.filter(({ words }) => words.length > 0).length;
    say(this.#note, troubled === 0 ? `${counted(judged.length, "namespace", "namespaces")}, all sound` : `${count(troubled)} of ${counted(judged.length, "namespace", "namespaces")} not sound`);
    return judged.map(({ name }) => name);
  }

  #show(one, place) {
    let row = this.#rows.get(one.name);
    if (!row) {
      row = this.#makeRow(one.name);
      this.#rows.set(one.name, row);
      this.#mark(one.name, row);
    }
    // A row that is moved without need would lose the keyboard's focus.
    if (this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place] ?? null);
    say(row.health, one.words.length === 0 ? one.sound : one.words.join("; "));
    row.health.className = one.words.length === 0 ? "state-exact" : "state-degraded";
    say(row.holders, `${count(one.exact)} of ${count(one.exact + one.degraded)}`);
    row.meter.max = Math.max(1, one.exact + one.degraded);
    row.meter.value = one.exact;
    say(row.blocks, compact(one.blocks));
    say(row.answers, one.answers);
    this.#draw(row, this.#sparks.get(one.name) ?? [], one.name);
  }

  #makeRow(name) {
    const button = make("button", { type: "button", className: "plain-button name", textContent: name });
    button.addEventListener("click", () => this.#choose(name));
    const row = { button, health: make("td"), holders: make("span"), meter: make("meter", { min: 0, "aria-label": `exact holders of ${name}` }), blocks: make("td", { className: "number" }), answers: make("span", { className: "small quiet" }), drawn: "" };
    row.picture = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    row.all = svg("path", { class: "hue-0 area" });
    row.inexact = svg("path", { class: "hue-1 area" });
    row.picture.append(row.all, row.inexact);
    row.element = make("tr", {}, make("th", { scope: "row" }, button), row.health, make("td", { className: "number" }, row.holders, " ", row.meter), row.blocks, make("td", { className: "spark-cell" }, row.picture, row.answers));
    return row;
  }

  #mark(name, row) {
    const is = name === this.#chosen;
    row.element.classList.toggle("current", is);
    if (is) row.button.setAttribute("aria-current", "true");
    else row.button.removeAttribute("aria-current");
  }

  /** Draws a bar for each stretch of time: all answers, and the inexact ones within. The newest bar is at the right. */
  #draw(row, bars, name) {
    const drawn = JSON.stringify(bars);
    if (row.drawn === drawn) return;
    row.drawn = drawn;
    const top = bars.reduce((most, [all]) => Math.max(most, all), 0);
    const step = WIDTH / this.#bars;
    const path = (value) => bars.map((bar, index) => {
      const [x, height] = [WIDTH - (bars.length - index) * step, top > 0 ? HEIGHT * value(bar) / top : 0];
      return height > 0 ? `M${x.toFixed(1)},${HEIGHT}v${(-height).toFixed(1)}h${(step * 0.9).toFixed(1)}V${HEIGHT}Z` : "";
    }).join("");
    row.all.setAttribute("d", path(([all]) => all));
    row.inexact.setAttribute("d", path(([, inexact]) => inexact));
    const [all, inexact] = bars.reduce(([one, other], bar) => [one + bar[0], other + bar[1]], [0, 0]);
    // The daemon keeps bars of a limited number of namespaces, and a new one has none yet.
    const label = bars.length === 0 ? "not known" : all === 0 ? "nobody asked" : `${count(all)} answers, ${percent(inexact, all)} of them inexact, at most ${compact(top / this.#seconds)} a second`;
    row.picture.setAttribute("aria-label", `${name}: ${label}`);
  }
}

/** Returns a namespace's health in words, and its weight in the order of the namespaces. */
function judge({ name, exact, degraded, distinct_blocks: blocks, refused_total: refused, epochs_ahead: ahead, broken_promises_total: broken, cost }) {
  const words = [];
  if (degraded > 0) words.push(`${counted(degraded, "holder", "holders")} in doubt`);
  if (refused > 0) words.push(`all batches dropped of ${counted(refused, "publisher", "publishers")}`);
  if (broken > 0) words.push(`${counted(broken, "holder breaks", "holders break")} promises`);
  if (ahead > 0) words.push(`${counted(ahead, "clock is", "clocks are")} ahead`);
  const holders = exact + degraded;
  const inexact = cost?.queries > 0 ? cost.inexact / cost.queries : 0;
  // Troubles weigh most, then the share of inexact answers. An empty namespace weighs least.
  const weight = (holders > 0 ? 1 + 4 * degraded / holders : 0) + (words.length > 0 ? 10 : 0) + inexact;
  return { name, words, exact, degraded, blocks, weight, sound: holders === 0 ? "no holders" : "all exact", answers: cost?.text ?? "" };
}
