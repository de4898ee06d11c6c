// The matrix: a cell for each holder that passes the filter, in the order of names, coloured by state.
import { clock, count, make, say } from "./text.js";

/** Maximum number of cells. More cells could not be told apart. */
const CELLS_MAX = 5000;
/** Reasons that mostly end by themselves, and reasons of silent publishers. */
const PASSING = new Set(["resyncing", "unverified", "changing", "behind"]);
const SILENT = new Set(["stale", "upstream_lost"]);

/** Returns the CSS class for the colour of a state. */
export function shade(words) {
  if (words.length === 0) return "exact";
  if (words.every((word) => PASSING.has(word))) return "passing";
  return words.some((word) => SILENT.has(word)) ? "silent" : "doubt";
}

export class Matrix {
  #cells = [];
  #current = 0;
  #choose;
  #list = document.getElementById("matrix");
  #note = document.getElementById("matrix-note");

  /** Makes the matrix. `choose` is called with the key of the chosen holder. */
  constructor(choose) {
    this.#choose = choose;
    this.#list.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Shows these holders in the given order. `words` returns the reasons of a holder. */
  apply(holders, words, chosen) {
    const shown = holders.slice(0, CELLS_MAX);
    while (this.#cells.length > shown.length) this.#cells.pop().element.remove();
    shown.forEach((holder, place) => this.#fill(this.#cells[place] ?? this.#make(place), holder, words, chosen));
    this.#current = Math.min(this.#current, Math.max(0, shown.length - 1));
    this.#mark();
    say(this.#note, holders.length > shown.length ? `the first ${count(shown.length)} of ${count(holders.length)}; a filter finds the others` : "");
  }

  #make(place) {
    const element = make("div", { className: "cell", role: "option", id: `cell-${place}` });
    const cell = { element, key: null, bits: -1, since: -1, isChosen: null };
    element.addEventListener("click", () => {
      this.#current = place;
      this.#mark();
      this.#choose(cell.key);
    });
    this.#cells.push(cell);
    this.#list.append(element);
    return cell;
  }

  /** Updates a cell, but only if it has changed: there may be thousands of cells. */
  #fill(cell, holder, words, chosen) {
    const isChosen = holder.key === chosen;
    if (cell.key === holder.key && cell.bits === holder.bits && cell.since === holder.since && cell.isChosen === isChosen) return;
    Object.assign(cell, { key: holder.key, bits: holder.bits, since: holder.since, isChosen });
    const reasons = words(holder.bits);
    // Without the age, which would change every second.
    const begun = holder.since > 0 ? ` since ${clock(holder.since)}` : "";
    const state = reasons.length === 0 ? "exact" : `degraded: ${reasons.join(", ")}${begun}`;
    const text = `${holder.worker}/${holder.rank}: ${state}`;
    cell.element.className = `cell ${shade(reasons)}`;
    cell.element.title = text;
    cell.element.setAttribute("aria-label", text);
    cell.element.setAttribute("aria-selected", String(isChosen));
  }

  #mark() {
    const current = this.#cells[this.#current];
    this.#list.querySelector(".current")?.classList.remove("current");
    current?.element.classList.add("current");
    if (current) this.#list.setAttribute("aria-activedescendant", current.element.id);
    else this.#list.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    const columns = getComputedStyle(this.#list).gridTemplateColumns.split(" ").length;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -Infinity, End: Infinity };
    if (event.key in steps) {
      const to = this.#current + steps[event.key];
      this.#current = Math.min(Math.max(0, to), Math.max(0, this.#cells.length - 1));
      this.#mark();
      this.#cells[this.#current]?.element.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") {
      if (this.#cells[this.#current]) this.#choose(this.#cells[this.#current].key);
    } else return;
    event.preventDefault();
  }
}
