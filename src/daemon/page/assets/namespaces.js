// All namespaces, the worst first: how sound each is, and its answers of the last minutes.
import { compact, count, counted, make, percent, say, svg } from "./text.js";

const WIDTH = 120;
const HEIGHT = 26;
/** The columns and what is read in their heads. */
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

  /** `choose` is called with the name of a namespace. */
  constructor(choose) {
    this.#choose = choose;
    const head = make("tr", {}, ...COLUMNS.map((title) => make("th", { scope: "col", textContent: title })));
    document.getElementById("namespaces").append(make("table", { className: "namespaces" }, make("thead", {}, head), this.#body));
  }

  setNamespace(name) {
    this.#chosen = name;
    for (const [known, row] of this.#rows) this.#mark(known, row);
  }

  /** Takes in the answers of the last minutes. */
  setSparks({ bars, seconds, namespaces }) {
    [this.#bars, this.#seconds] = [bars, seconds];
    this.#sparks = new Map(Object.entries(namespaces));
  }

  /** Takes in a frame, and how many holders of each namespace are exact and degraded. Returns the names, the worst first. */
  apply(frame, counts) {
    const judged = frame.namespaces.map((namespace) => judge(namespace, counts.get(namespace.name) ?? { exact: 0, degraded: 0 }));
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
    // One that moves needlessly would lose the keyboard's focus.
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

  /** Bars for the answers, and in them those that were not exact. The newest is at the right. */
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
    const label = all === 0 ? "nobody asked" : `${count(all)} answers, ${percent(inexact, all)} of them inexact, at most ${compact(top / this.#seconds)} a second`;
    row.picture.setAttribute("aria-label", `${name}: ${label}`);
  }
}

/** How a namespace is, in words, and how much it weighs among the others. */
function judge(namespace, { exact, degraded }) {
  const { name, distinct_blocks: blocks, refused_publishers: refused, ahead, broken_promises: broken, cost } = namespace;
  const words = [];
  if (degraded > 0) words.push(`${counted(degraded, "holder", "holders")} in doubt`);
  if (refused?.length) words.push(`all batches dropped of ${counted(refused.length, "publisher", "publishers")}`);
  if (broken?.length) words.push(`${counted(broken.length, "holder breaks", "holders break")} promises`);
  if (ahead?.length) words.push(`${counted(ahead.length, "clock is", "clocks are")} ahead`);
  const holders = exact + degraded;
  const inexact = cost?.queries > 0 ? cost.inexact / cost.queries : 0;
  // What is wrong weighs most, then what it costs; an empty namespace least.
  const weight = (holders > 0 ? 1 + 4 * degraded / holders : 0) + (words.length > 0 ? 10 : 0) + inexact;
  return { name, words, exact, degraded, blocks, weight, sound: holders === 0 ? "no holders" : "all exact", answers: cost?.text ?? "" };
}
